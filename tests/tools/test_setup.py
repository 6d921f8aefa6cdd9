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


def run(*command, cwd=ROOT, **env):
    env = {**os.environ, **env}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


def setup_py(*arguments, **how):
    return run(sys.executable, "setup.py", "-q", *arguments, **how)


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
    commands = tmp_path / "setuptools" / "command"
    commands.mkdir(parents=True)
    (tmp_path / "setuptools" / "__init__.py").write_text(
        "__version__ = '65.5.0'\nCommand = object\nExtension = lambda name, **settings: name\n"
        "setup = lambda **settings: print(settings['license'])\n"
    )
    for name in ("build_ext", "build_py"):
        (commands / f"{name}.py").write_text(f"class {name}: pass\n")
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
        ("1", {"FASTPAR_TORCHES": "/no"}, "expected folders of torch in FASTPAR_TORCHES, got /no"),
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


FAKE_PIP = """#!/bin/sh
echo "$@"
case "$*" in
  *cpu-index*+cpu*|*2.13.0\\ numpy*|*">=2.10"*) ;;
  *) echo "ERROR: No matching distribution found for torch==2.13.0+cpu" >&2; exit 1 ;;
esac
"""


def test_the_builds_of_torch_in_their_order(tmp_path):
    for name, text in (("pip", FAKE_PIP), ("nvidia-smi", "#!/bin/sh\nexit $NO_GPU\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    path = f"{tmp_path}:{os.environ['PATH']}"
    cpu, plain = "torch==2.13.0+cpu numpy\n", "torch==2.13.0 numpy\n"
    for env, status, out, err in (
        ({"TORCH_INDEX": "cpu-index"}, 0, f"--extra-index-url cpu-index {cpu}", ""),
        ({"TORCH_INDEX": ""}, 0, f"{cpu}== torch 2.13.0 without CUDA is no.*: .*\n{plain}", ""),
        ({"TORCH_INDEX": "elsewhere"}, 2, ".*\n", "make: expected .* got none in elsewhere; .*\n"),
        ({"NO_GPU": "0"}, 0, "torch>=2.10 numpy\n", ""),
    ):
        done = run(ROOT / ".ci" / "torch", "pip", PATH=path, **{"NO_GPU": "1", **env})
        assert done.returncode == status
        for said, expected in ((done.stdout, out), (done.stderr, err)):
            assert re.fullmatch(expected.replace("+", r"\+"), said), said


STEP = """
import pytest, torch, fastpar
from fastpar.kernels import _C, attention, backend, keep_freed_memory, quantize_blockwise
assert _C is None and backend.choice == "torch" and not keep_freed_memory()
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

config = fastpar.GPTConfig(1, 2, 16, 8, 32, dropout=0.1)
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
def test_a_model_trains_and_what_is_missing_is_said(tmp_path):
    """The package as FASTPAR_CPP=0 builds it, without a compiler."""
    build = ("build_py", "--build-lib", str(tmp_path))
    done = setup_py(*build, FASTPAR_CPP="0", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("**/_C*.so"))
    done = run(sys.executable, "-c", STEP, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
