"""What the proof of an op depends on: its sources in kernels/, and those that they import.

So a line changed in one op leaves the proofs of others alone. What decides who runs (PASSED) is
left out: it computes nothing. What checks a proof (cases.py, reference.py, trial.py) is, too: where
a check becomes stricter, table.VERSION grows.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import fastpar.kernels
from fastpar.kernels.choice import PARTS

KERNELS = Path(fastpar.kernels.__file__).parent
PASSED = {"__init__.py", "backend.py", "choice.py"}  # directly in kernels/
_HOMES = {  # ops that are no function of fastpar.kernels
    "attention_masked": "attention", "linear_fp8": "linear",
    "relu2": "activation", "swiglu": "activation",
}  # fmt: skip
_IMPORT = re.compile(r"^\s*from fastpar\.kernels([.\w]*) import (\([^)]*\)|[^\n]*)", re.M)
_LAZY = re.compile(r"triton_module\(\"([.\w]+)\"\)")


def _files(module: str) -> set[Path]:
    """Files of a module below kernels/, "norm.triton": its package's, whole, or its own."""
    first = module.strip(".").partition(".")[0]
    if first and (KERNELS / first).is_dir():
        return {path for path in (KERNELS / first).iterdir() if path.suffix in (".py", ".json")}
    path = KERNELS / f"{first}.py"
    return {path} if path.is_file() and path.name not in PASSED else set()


@functools.cache
def _imported(path: Path) -> frozenset[Path]:
    """Files in kernels/ that this file imports, at its top or later."""
    if path.suffix != ".py":
        return frozenset()
    text, found = path.read_text(encoding="utf-8"), set[Path]()
    for module, names in _IMPORT.findall(text):
        for name in [module] if module else re.findall(r"\w+", names):
            found |= _files(name)
    for name in _LAZY.findall(text):
        found |= _files(name)
    return frozenset(found)


@functools.cache
def sources_of(op: str) -> frozenset[Path]:
    """The files of an op's digest; none for an op that fastpar does not have."""
    function = getattr(fastpar.kernels, PARTS.get(op, op), None)
    home = getattr(function, "__module__", "").removeprefix("fastpar.kernels")
    todo, found = _files(_HOMES.get(op, home)), set[Path]()
    while todo:
        path = todo.pop()
        found.add(path)
        todo |= _imported(path) - found
    return frozenset(found)


@functools.cache
def digest_of(op: str) -> str:
    """A digest of an op's sources."""
    digest = hashlib.sha256()
    for path in sorted(sources_of(op)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
