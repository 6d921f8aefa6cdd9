"""What set-up builds and downloads: setup.py's compilers, .ci/torch's choice of a torch."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import fastpar

ROOT = Path(__file__).resolve().parents[2]


def setup_py(*arguments, cwd=ROOT, **env):
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def test_no_compiler_is_one_line(tmp_path):
    done = setup_py("build_ext", "--build-lib", str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr.startswith("setup.py: expected a C++ compiler, got no no-such-compiler; ")
    assert "FASTPAR_CPP=0" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    done = setup_py("describe_build", FASTPAR_CPP="no")
    assert "setup.py: expected 0 or 1, got FASTPAR_CPP=no" in done.stderr


def test_an_old_setuptools_builds(tmp_path):
    """A new environment of Python 3.10 has 65.5; below 77 a license in pyproject.toml ends it."""
    (tmp_path / "setuptools" / "command").mkdir(parents=True)
    (tmp_path / "setuptools" / "__init__.py").write_text(
        "__version__ = '65.5.0'\nCommand = object\n"
        "Extension = lambda name, **settings: name\n"
        "setup = lambda **settings: print(settings['license'])\n"
    )
    for name in ("build_ext", "build_py"):
        (tmp_path / "setuptools" / "command" / f"{name}.py").write_text(f"class {name}: pass\n")
    done = setup_py("build_ext", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "Apache-2.0\n"), done.stderr
    project = (ROOT / "pyproject.toml").read_text().split("[project]")[1].split("\n[")[0]
    assert "\nlicense" not in project
    assert 'dynamic = ["license", ' in project


def test_the_version_is_the_same_everywhere():
    """The newest release everywhere, or in the package the one to come; it is in one place."""
    released = re.search(r"\n## \[([\d.]+)\] - ", (ROOT / "CHANGELOG.md").read_text())[1]
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text()
    ours = re.fullmatch(r"([\d.]+?)(\.dev0)?", fastpar.__version__)
    numbers = [[int(n) for n in text.split(".")] for text in (ours[1], released)]
    assert numbers[0] > numbers[1] if ours[2] else numbers[0] == numbers[1]
    assert f'"{fastpar.__version__}"' in (ROOT / "fastpar" / "_version.py").read_text()
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool")[0]


def put(folder):
    """An nvcc that does nothing."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_where_a_build_looks_for_nvcc(tmp_path, monkeypatch):
    """The newest of the usual folders; CUDA_HOME comes first and alone."""
    for name in ("CUDA_HOME", "CUDA_PATH", "FASTPAR_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("setuptools.setup", lambda **settings: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    find_nvcc = runpy.run_path(str(ROOT / "setup.py"))["find_nvcc"]
    monkeypatch.setenv("PATH", "")
    assert find_nvcc(tmp_path) is None
    put(tmp_path / "usr/local/cuda-9.2")
    newest = put(tmp_path / "usr/local/cuda-13.0")
    assert find_nvcc(tmp_path) == newest
    chosen = put(tmp_path / "usr/local/cuda")  # the administrator's choice among them
    assert find_nvcc(tmp_path) == chosen
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "mine"))
    assert find_nvcc(tmp_path) is None
    mine = put(tmp_path / "mine")
    assert find_nvcc(tmp_path) == mine


@pytest.mark.slow
def test_nvcc_compiles_for_a_torch_with_cuda_only(tmp_path):
    """What setup.py would build beside a fake nvcc and a fake torch."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    put(tmp_path / "toolkit")
    for name in ("csrc", "torch"):
        (tmp_path / name).mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    for torch_cuda, changes, words in (
        ("13.0", {}, "compiling C++ and CUDA for sm_80, sm_90a: ab"),
        (None, {}, "compiling C++ only (torch 2.99, which has no CUDA): ab"),
        (None, {"FASTPAR_CUDA": "1"}, "C++ and CUDA"),
        ("13.0", {"FASTPAR_CUDA": "0"}, "compiling C++ only (FASTPAR_CUDA=0)"),
        ("13.0", {"CUDA_HOME": "/nowhere"}, "C++ only (no nvcc)"),
        ("13.0", {"FASTPAR_CPP": "0"}, "nothing to compile: FASTPAR_CPP=0"),
        (None, {"FASTPAR_CUDA": "1", "CUDA_HOME": "/no"}, "expected nvcc with FASTPAR_CUDA=1, got"),
        ("1", {"FASTPAR_CUDA": "yes"}, "expected 0, 1 or emulated, got FASTPAR_CUDA=yes"),
    ):
        version = f"__version__ = '2.99'\ncuda = {torch_cuda!r}\n"
        (tmp_path / "torch" / "version.py").write_text(version)
        env = {"CUDA_HOME": str(tmp_path / "toolkit"), "MAX_JOBS": "2", **changes}
        done = setup_py("describe_build", cwd=tmp_path, PYTHONPATH=str(tmp_path), **env)
        assert words in done.stdout + done.stderr
        assert done.returncode == ("expected" in words)


@pytest.mark.slow
def test_an_editable_install_leaves_the_module_out_and_takes_it_in_again(tmp_path):
    skip = shutil.ignore_patterns("*.so", "__pycache__", "results", "build", "tests", ".*")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=skip)
    kernels = tmp_path / "checkout" / "kernels"
    old = kernels / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    old.touch()
    wheel = ("editable_wheel", "-d", str(tmp_path / "wheels"))
    done = setup_py(*wheel, cwd=kernels.parent, FASTPAR_CPP="0", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert (kernels / "_C.py").exists()
    assert not old.exists()
    assert setup_py("build_py", "--build-lib", "lib", cwd=kernels.parent).returncode == 0
    assert not list((kernels.parent / "lib").glob("fastpar/kernels/_C*"))
    assert (kernels / "_C.py").exists()  # a wheel's build leaves the checkout as it is


# .ci/torch


FAKE_PIP = """#!/bin/sh
echo "$@"
case "$*" in
  *cpu-index*+cpu*|*2.13.0\\ numpy*|*">=2.10"*) ;;
  *) echo "ERROR: No matching distribution found for torch==2.13.0+cpu" >&2; exit 1 ;;
esac
"""


def test_the_builds_of_torch_in_their_order(tmp_path):
    """Which one .ci/torch asks pip for, and what it says."""
    for name, text in (("pip", FAKE_PIP), ("nvidia-smi", "#!/bin/sh\nexit $NO_GPU\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(**env):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NO_GPU": "1", **env}
        done = subprocess.run(
            [ROOT / ".ci" / "torch", "pip"], env=env, capture_output=True, text=True
        )
        return done.returncode, done.stdout.splitlines(), done.stderr

    status, (first,), _ = run(TORCH_INDEX="cpu-index")
    assert (status, first) == (0, "--extra-index-url cpu-index torch==2.13.0+cpu numpy")
    status, (first, says, second), said = run(TORCH_INDEX="")
    assert (status, first, second, said) == (
        0, "torch==2.13.0+cpu numpy", "torch==2.13.0 numpy", ""
    )  # fmt: skip
    assert says.startswith("== torch 2.13.0 without CUDA is nowhere pip looks")
    status, _, said = run(TORCH_INDEX="elsewhere")
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("make: expected torch 2.13.0+cpu in TORCH_INDEX, got none in elsewhere;")
    assert run(NO_GPU="0") == (0, ["torch>=2.10 numpy"], "")


# Installed with FASTPAR_CPP=0: no compiled module, torch computes everything


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The package as FASTPAR_CPP=0 builds it, without a compiler."""
    folder = tmp_path_factory.mktemp("without_cpp")
    done = setup_py("build_py", "--build-lib", str(folder), FASTPAR_CPP="0", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("**/_C*.so"))
    (folder / "bench").symlink_to(ROOT / "bench")
    return folder


def python(tree, *arguments, **env):
    """Python that finds the tree's fastpar first."""
    path = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, **path, **env},
        capture_output=True,
        text=True,
        timeout=280,
    )


STEP = """
import pytest, torch, fastpar
from fastpar.kernels import _C, attention, backend, host, keep_freed_memory, quantize_blockwise
assert _C is None and backend.choice == "torch" and not keep_freed_memory()
assert host.isa() == "none" and host.supported_isas() == ()
for call in (host.worker_cpus, lambda: host.set_isa("avx2")):
    with pytest.raises(RuntimeError, match="expected the compiled module.* install fastpar ag"):
        call()
with pytest.raises(RuntimeError, match="FASTPAR_BACKEND=torch seed=1; install fastpar again"):
    quantize_blockwise(torch.ones(64), seed=1)
backend.choice = "auto"  # as where Triton serves
with pytest.raises(RuntimeError, match=r"pack_: expected .* with CUDA .* \\(FASTPAR_CPP=0"):
    backend.cuda_on_cpu = True
    backend.use_cuda("pack_", torch.ones(1))
backend.choice, backend.cuda_on_cpu = "torch", False
with pytest.raises(RuntimeError, match="read_backend: expected the compiled module .* again"):
    backend.read_backend("cpp")
info = backend.describe()
assert "\\n_C        none: installed with FASTPAR_CPP=0; install fastpar again" in info
assert "\\nattention                cpu  torch [1]\\n" in info
assert "\\n[1] installed with FASTPAR_CPP=0; install fastpar again, with a C++" in info
assert ".cpp" not in info
with pytest.raises(ValueError, match=r"expected targets in \\[0, 5\\) .* got targets\\[1\\]=5"):
    fastpar.kernels.cross_entropy(torch.zeros(3, 5), torch.tensor([-100, 5, 0]))

from fastpar.settings.model import GPTConfig
config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32, dropout=0.1)
model = fastpar.parallelize(fastpar.GPT(config), fastpar.Mesh(), zero_stage=2)
optimizer = fastpar.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
x = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(12):
    loss = model(x[:, :-1], x[:, 1:])
    loss.backward(), optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
"""


@pytest.mark.slow
def test_a_model_trains_and_what_is_missing_is_said(tree):
    done = python(tree, "-c", STEP)
    assert done.returncode == 0, done.stderr


OPS = """
from fastpar.kernels.cases import MAKERS, cases_of
sizes = {"adamw_step_": (1003, 1), "attention": (33, 16), "attention_masked": (20, 16)}
sizes |= {"orthogonalize": (24, 32), "dropout": (3, 40)}
for op in MAKERS:
    for number, case in enumerate(cases_of(op, *sizes.get(op, (24, 96)), "cpu", more=True)):
        dtype = case.dtypes[number % len(case.dtypes)]
        most = case.allowed(dtype, "cpu")
        for result, errors in case.measure(dtype, "cpu").items():
            print(op, case.shape, dtype, result, "fails" * (errors.max > most[result]))
"""


@pytest.mark.slow
def test_every_op_agrees_with_its_oracle_without_the_module(tree):
    done = python(tree, "-c", OPS)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith("fails")] == []
    for op in ("attention", "layer_norm", "linear_cross_entropy", "embedding", "adamw_step_"):
        assert f"\n{op} " in done.stdout
