"""manifest.json: what a checkpoint consists of, with a checksum of every byte.

    step      optimizer steps done
    model     "gpt" or "module", see [Note: models]
    axes      what axes note of how they ran, if any does; for people
    files     name -> size and digest; of files with tensors only the header is under the latter
    weights   tensors of model*.safetensors, whole, as transformers has them
    optimizer tensors of optimizer-*.safetensors, pieces: PARAMETER/ENTRY, whole shape, runs

A piece is described by its parameter's name and by global indices (sharding/placements.py), never
by a rank, so a reader puts together what it needs of whatever mesh has written. The manifest
carries a digest of itself.

[Note: models]
The weights of a GPT have transformers' names and layouts, and config.json describes the model. The
weights and state of any other module (one of transformers' or nanoGPT's too) have its own names and
layouts: whoever loads it builds the module first.

[Note: digests]
"xxh3:HEX" is XXH3 in 128 bits, of the package xxhash, "sha256:HEX" what is written without that
package, and by earlier versions. A digest finds damage, by disks and networks; it does not prove
who wrote a checkpoint. Several GB/s: a save waits for the disk, not for it.

[Note: checks]
The digest finds every change of a manifest. What stands behind it is checked, by a saver before it
commits and by each reader: no file lies outside of the folder, tensors fill their files, every
element of every tensor is in exactly one piece.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastpar.files.plain_files import (
    JSON_BYTES,
    is_plain_name,
    parse_object,
    read_plain,
    reason,
    shown,
)
from fastpar.files.runs import is_step_name, step_of
from fastpar.files.tensor_file import STORED
from fastpar.sharding.placements import Run, check_cover, numel_of

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]

FORMAT = "fastpar-checkpoint"
VERSION, _READ = 4, (3, 4)
_LAST_READERS = {1: "0.1", 2: "0.3"}  # the last fastpar that reads a version
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
CONFIG = "config.json"
GPT_MODEL, ANY_MODULE = "gpt", "module"
_END = re.compile(rb', "digest": "([0-9a-f]{64})"}\n\Z')


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    digest: str  # of the first `head` bytes
    head: int  # size, or of a file with tensors: where their data begin


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: a whole one, or a piece."""

    file: str
    key: str  # its name in the file; of the optimizer's: PARAMETER/ENTRY
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]  # of the whole tensor
    runs: tuple[Run, ...]  # what the file has of it
    digest: str  # of its bytes in the file

    @property
    def nbytes(self) -> int:
        """What the file has of it."""
        return numel_of(self.runs) * STORED[self.dtype].itemsize


def hasher(digest: str = "") -> tuple[str, Any]:
    """(its name, what takes bytes by update()) of a digest; by default of a new one.

    Raises:
        ValueError: a digest of another kind.
    """
    name = digest.partition(":")[0] or ("sha256" if xxhash is None else "xxh3")
    if name == "sha256":
        return name, hashlib.sha256()
    if name != "xxh3" or xxhash is None:
        raise ValueError(f"a digest of another kind: {shown(name)}")
    return name, xxhash.xxh3_128()


def digest_of(raw: Any) -> str:
    """The digest of some bytes; lets go of the interpreter's lock."""
    name, found = hasher()
    found.update(raw)
    return f"{name}:{found.hexdigest()}"


def by_key(entries: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Name of each tensor -> its pieces."""
    found: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        found.setdefault(entry.key, []).append(entry)
    return found


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint, or one rank's part of it, consists of."""

    step: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    weights: tuple[TensorEntry, ...] = ()
    optimizer: tuple[TensorEntry, ...] = ()
    model: str = ANY_MODULE
    axes: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def join(parts: Sequence[Manifest]) -> Manifest:
        """One manifest of the ranks' parts of a checkpoint."""
        return Manifest(
            parts[0].step,
            {name: entry for part in parts for name, entry in part.files.items()},
            tuple(t for part in parts for t in part.weights),
            tuple(t for part in parts for t in part.optimizer),
            parts[0].model,
            parts[0].axes,
        )

    def sealed(self) -> bytes:
        """The manifest's file: the content and its digest.

        Raises:
            ValueError: it is larger than what a reader takes.
        """
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if not self.axes:
            del content["axes"]
        text = json.dumps(content)
        if len(text) + 100 > JSON_BYTES:
            raise ValueError(
                f"sealed: expected at most {JSON_BYTES} bytes, got a manifest of "
                f"bytes={len(text) + 100}; use fewer ranks, or a layout with longer pieces"
            )
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f'{text[:-1]}, "digest": "{digest}"}}\n'.encode()


class VersionError(ValueError):
    """A checkpoint that this installation does not read, and another one does."""


def read_manifest(folder: str | Path, name: str = MANIFEST, *, complete: bool = True) -> Manifest:
    """The manifest of a checkpoint; checked for sense, not against the files beside it.

    Args:
        folder: of the checkpoint.
        name: of the manifest's file.
        complete: whether it has to describe a whole checkpoint; a rank's part need not.
    Raises:
        VersionError: says which fastpar reads it.
        ValueError: there is none, or it is damaged.
    """
    file = Path(folder) / name
    try:
        manifest = _parse(file, read_plain(file, JSON_BYTES))
        if complete:
            check_complete(manifest)
        real = file.parent.resolve()
        if is_step_name(real.name) and step_of(real) != manifest.step:
            raise ValueError(f"of step {manifest.step}, in a folder of another one")
        return manifest
    except VersionError:
        raise
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"read_manifest: expected a checkpoint's manifest, got {file} ({reason(error)}); the "
            "folder is no checkpoint of fastpar, or it is damaged: use another one"
        ) from error


def _parse(file: Path, content: bytes) -> Manifest:
    raw = parse_object(content)
    format, version = raw.pop("format", None), raw.pop("version", None)
    if format != FORMAT:
        raise ValueError(f"another format: {shown(format)}")
    end = _END.search(content)  # version 1 had none
    if end and hashlib.sha256(content[: end.start()] + b"}").hexdigest().encode() != end[1]:
        raise ValueError("its digest does not match")
    if version not in _READ:
        reads = _LAST_READERS.get(version)
        raise VersionError(
            f"read_manifest: expected a checkpoint of version {VERSION}, got {file} of version "
            f"{shown(version)}; " + (f"fastpar {reads} reads it" if reads else "update fastpar")
        )
    if end is None:
        raise ValueError("no digest")
    del raw["digest"]
    if version == 3:
        for entry in (*raw["files"].values(), *raw["weights"], *raw["optimizer"]):
            entry["digest"] = f"sha256:{entry.pop('sha256')}"
    raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
    for kind in ("weights", "optimizer"):
        for entry in raw[kind]:
            entry["shape"] = tuple(entry["shape"])
            entry["runs"] = tuple(Run(*run) for run in entry["runs"])
        raw[kind] = tuple(TensorEntry(**entry) for entry in raw[kind])
    for entry in (*raw["files"].values(), *raw["weights"], *raw["optimizer"]):
        if xxhash is None and entry.digest.startswith("xxh3:"):  # not damage: nothing is skipped
            raise VersionError(
                f"read_manifest: the digests in {file} are XXH3, which needs the package xxhash; "
                "run pip install xxhash"
            )
        hasher(entry.digest)
    return Manifest(**raw)


def check_complete(manifest: Manifest) -> None:
    """See [Note: checks].

    Raises:
        ValueError: the ranks' parts do not go together.
    """
    nbytes = {name: entry.head for name, entry in manifest.files.items()}
    for tensor in manifest.weights + manifest.optimizer:
        if tensor.file not in nbytes:
            raise ValueError(f"{shown(tensor.key)} in a file not listed, {shown(tensor.file)}")
        nbytes[tensor.file] += tensor.nbytes
    for name, entry in manifest.files.items():
        if not is_plain_name(name):
            raise ValueError(f"a file name that is none of ours: {shown(name)}")
        if entry.size != nbytes[name]:
            raise ValueError(f"{name} of {entry.size} bytes, its tensors of {nbytes[name]}")
    tensors = (*by_key(manifest.weights).items(), *by_key(manifest.optimizer).items())
    for key, found in tensors:
        first = found[0]
        for other in found[1:]:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"pieces of {shown(key)} of {first.dtype}{list(first.shape)} in {first.file} "
                    f"and of {other.dtype}{list(other.shape)} in {other.file}"
                )
        problem = check_cover([piece.runs for piece in found], math.prod(first.shape))
        if problem is not None:
            raise ValueError(f"pieces of {shown(key)} with {problem}")
