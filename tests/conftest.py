"""Every test starts from the same seeds and thread count; a missing GPU is a visible skip."""

import contextlib
import fcntl
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by torch: workers share the cores

import numpy as np
import pytest
import torch

import fastpar  # noqa: F401  before the first product: see fastpar/__init__.py

# Read once, at the first product on a GPU: a deterministic test may come after others.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before the first <op>_triton module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

    # Elsewhere what `fastpar doctor` found decides which kernels train and patched models run.
    no_proofs = Path(tempfile.gettempdir(), f"fastpar_proofs_{os.getpid()}")
    os.environ["FASTPAR_PROOFS"] = str(no_proofs)

# `with torch.device(...)` keeps the functions that it found at its first use in the process: not
# those that a test has put in their places.
with torch.device("cpu"):
    torch.empty(0)

with contextlib.suppress(ImportError):
    import hypothesis

    # The same examples in every run: a red test stays red until its cause is gone.
    hypothesis.settings.register_profile("fastpar", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("fastpar")


def pytest_configure():
    """Each of xdist's workers has cores of its own. Ranks that are threads take half the time on
    one core: on two they wait for the interpreter's lock."""
    number, n = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if number and n and len(cores) >= int(n):  # one that replaces a worker has a higher number
        first = int(number.removeprefix("gw")) % int(n)
        os.sched_setaffinity(0, set(cores[first :: int(n)]))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):  # the keywords hold the name of the folder, too
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_start():
    """LayerNorm's gradient and long sums change their last bits with the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _times_count(monkeypatch):
    """A deterministic engine of an earlier test may still wait for the garbage collector."""
    from fastpar.kernels import choice

    monkeypatch.setattr(choice, "_strict", [])


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """torch.set_default_dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _mesh_on_the_cpu(request, monkeypatch):
    """A test that is not about GPUs has its mesh and models on the CPU, also beside a GPU."""
    from fastpar.comm import mesh

    if request.node.get_closest_marker("gpu") is None:
        pick = mesh._pick_device
        monkeypatch.setattr(mesh, "_pick_device", lambda asked, *at: pick(asked or "cpu", *at))


@pytest.fixture
def triton_device(monkeypatch) -> Iterator[str]:
    """Ops run their Triton kernels: on a GPU where there is one, else on CPU tensors in Triton's
    interpreter, with a GPU's rounding."""
    pytest.importorskip("triton", reason="needs triton")
    from interpreter import gpu_arithmetic

    from fastpar.kernels import backend

    monkeypatch.setattr(backend, "choice", "triton")
    if torch.cuda.is_available():
        yield "cuda"
        return
    with gpu_arithmetic(), language_interpreted():
        yield "cpu"


@contextlib.contextmanager
def language_interpreted() -> Iterator[None]:
    """The functions of triton.language are replaced once. The interpreter does it at every launch
    and at every call of a device function, tl.sum and tl.max included: most of a test's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        scope.restore()


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def emulated_cuda() -> ModuleType:
    """_C with its CUDA kernels compiled for the CPU: csrc/cuda_launch.h says how."""
    folder = ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "setup.py", *(ROOT / "csrc").iterdir(), *(ROOT / "tests/support").glob("*.h")]
    newest = max(source.stat().st_mtime for source in sources)
    with open(folder / "lock", "w") as lock:  # of several test processes one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list((folder / "fastpar" / "kernels").glob("_C*.so"))
        if not found or found[0].stat().st_mtime < newest:
            built = subprocess.run(
                [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)],
                cwd=ROOT,
                env={**os.environ, "FASTPAR_CUDA": "emulated"},
                capture_output=True,
                text=True,
            )
            assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (folder / "fastpar" / "kernels").glob("_C*.so")
    spec = importlib.util.spec_from_file_location("emulated_cuda._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda_device(request, monkeypatch) -> str:
    """Ops run their own CUDA kernels: on a GPU where there is one, else the kernels' source on CPU
    tensors through tests/support/cuda_emulator.h."""
    from fastpar.kernels import backend

    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setattr(backend, "cuda_kernels", request.getfixturevalue("emulated_cuda"))
    monkeypatch.setattr(backend, "cuda_on_cpu", True)
    return "cpu"
