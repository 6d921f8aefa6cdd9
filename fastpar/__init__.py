"""Fused kernels and a lean parallel runtime for training GPT-2-class models in PyTorch.

The public names are loaded when they are first used: `import fastpar` itself does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from fastpar._version import __version__


def _cpu_is_intel() -> bool:
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return b"GenuineIntel" in file.read(1024)
    except OSError:
        return False


# MKL reads it at its first product: the same bits for any number of threads and rows. On other
# makers' CPUs it only changes which products depend on threads (engine/README.md).
if _cpu_is_intel():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Module -> the public names that it defines: the one list. __init__.pyi is its copy for type
# checkers; `python tests/tools/test_import.py` writes it, and a test compares the two.
_PUBLIC = {
    "axes.replicas": ("Outer",),
    "checkpoint.restore": ("load_checkpoint",),
    "checkpoint.saver": ("Saver", "save_checkpoint"),
    "comm.mesh": ("Mesh",),
    "engine.engine": ("engine_of",),
    "engine.parallelize": ("parallelize",),
    "engine.pipeline_step": ("pipeline_step",),
    "foreign.patch": ("patch", "unpatch"),
    "models.gpt": ("GPT",),
    "optim.adafactor": ("Adafactor",),
    "optim.adamw": ("AdamW",),
    "optim.graphs": ("graphed",),
    "optim.muon": ("Muon", "muon_groups"),
    "settings.model": ("GPTConfig",),
    "settings.parallel": ("Offload", "Parallel", "Pipeline", "Precision", "Wires"),
}
_PACKAGES = ("kernels", "nn", "sharding")  # public too, each with an __all__ of its own
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = ["__version__", *_MODULE_OF]


def _check_compiled() -> None:
    """Say what to type when this is a checkout that was never built."""
    spec = importlib.util.find_spec("fastpar.kernels")
    folders = spec.submodule_search_locations if spec is not None else None
    suffixes = [*importlib.machinery.EXTENSION_SUFFIXES, ".py"]  # .py: setup.py's stand-in
    names = [f"_C{suffix}" for suffix in suffixes]
    if not any((Path(folder) / name).exists() for folder in folders or () for name in names):
        raise ImportError(
            "fastpar: expected the compiled module fastpar.kernels._C, got "
            f"{'no such module' if folders else 'a checkout that is not installed'}; "
            "run `pip install -e .` in the checkout (or `make train`), with "
            "FASTPAR_CPP=0 in front where there is no C++ compiler"
        )


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fastpar.{name}")
    if name not in _MODULE_OF:
        message = f"module 'fastpar' has no attribute '{name}'"
        for package in ("nn", "sharding") if name[:1].isupper() else ():
            if name in importlib.import_module(f"fastpar.{package}").__all__:
                message = f"fastpar.{name} moved; use fastpar.{package}.{name}"
                if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                    # `from fastpar import name` replaces the text of an AttributeError.
                    raise ImportError(message)
        raise AttributeError(message)
    value = getattr(importlib.import_module(f"fastpar.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_PACKAGES})


_check_compiled()
