"""`import fastpar`: quick, lazy, and clear about what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastpar

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "fastpar" / "__init__.pyi"


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_import_loads_nothing_heavy():
    done = python("-c", "import sys, fastpar; print(fastpar.__version__, 'torch' in sys.modules)")
    assert done.stdout.split() == [fastpar.__version__, "False"], done.stderr


def test_mkl_is_set_up_where_it_keeps_its_promise():
    """On Intel's CPUs alone: on others MKL_CBWR makes more products depend on threads."""
    code = "import fastpar, os; print(os.environ.get('MKL_CBWR'))"
    unset = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    for env, wanted in (
        (unset, "AUTO,STRICT" if intel else "None"),
        ({**unset, "MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE"),
    ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.split() == [wanted], done.stderr


STEP = """
import sys, torch, fastpar
config = fastpar.GPTConfig(1, 2, 16, 8, 32, dropout=0.1)
model = fastpar.parallelize(fastpar.GPT(config), fastpar.Mesh())
optimizer = fastpar.AdamW(model.parameters(), max_grad_norm=1.0)
x = torch.zeros(2, 8, dtype=torch.int64)
model(x, x).backward(), optimizer.step(), optimizer.zero_grad()
print([name for name in ("torch._dynamo", "sympy", "triton") if name in sys.modules])
"""


def test_a_step_does_not_import_the_compiler():
    assert python("-c", STEP).stdout.strip() == "[]"


def test_public_names_are_there():
    for name in fastpar.__all__:
        assert getattr(fastpar, name) is not None
        assert name in dir(fastpar)
    assert fastpar.parallelize.__module__ == "fastpar.engine.parallelize"
    assert STUB.read_text() == stub(), "run `python tests/tools/test_import.py`"
    with pytest.raises(AttributeError, match="module 'fastpar' has no attribute 'nothing'"):
        _ = fastpar.nothing


@pytest.mark.parametrize("package", ["nn", "sharding"])
def test_names_that_moved_say_where(package):
    for name in getattr(fastpar, package).__all__:
        assert name not in fastpar.__all__
        message = rf"^fastpar.{name} moved; use fastpar.{package}.{name}$"
        with pytest.raises(AttributeError, match=message):
            getattr(fastpar, name)
        with pytest.raises(ImportError, match=message):
            exec(f"from fastpar import {name}")


def stub() -> str:
    """fastpar/__init__.pyi: the public names, for type checkers."""
    lines = ['"""Written from the table of __init__.py by `python tests/tools/test_import.py`."""']
    lines += ["", *(f"from fastpar import {name} as {name}" for name in fastpar._PACKAGES)]
    lines.append("from fastpar._version import __version__ as __version__")
    for module, names in fastpar._PUBLIC.items():
        lines += [f"from fastpar.{module} import {name} as {name}" for name in names]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("with_kernels", "message"),
    [(False, "got a checkout that is not installed"), (True, "got no such module")],
)
def test_a_checkout_that_was_not_built_says_what_to_type(tmp_path, with_kernels, message):
    package = tmp_path / "fastpar"
    package.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "fastpar" / name, package)
    if with_kernels:
        (package / "kernels").mkdir()
        (package / "kernels" / "__init__.py").touch()
    # -S: without what is installed in this environment
    done = python("-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fastpar")
    assert done.returncode == 1
    assert f"expected the compiled module fastpar.kernels._C, {message}; run `pip" in done.stderr


if __name__ == "__main__":
    STUB.write_text(stub())
