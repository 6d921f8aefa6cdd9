"""manifest.json: the contents of a checkpoint, with a checksum of every byte.

    format    "fastpar-checkpoint", and version: a new field or meaning needs a new VERSION
    step      optimizer steps done
    model     "gpt" or "module", see [Note: models]
    axes      information of axes for people, if any
    files     name -> size, head, digest of the first `head` bytes (all of a text file, the header
              of a safetensors file)
    weights   whole tensors of model*.safetensors: file, key, dtype, shape, runs, digest
    optimizer the same for pieces in optimizer-*.safetensors; key is PARAMETER/ENTRY, shape that of
              the whole entry, runs the elements of the piece
    digest    SHA-256 of the line of JSON before it was added

A run [start, length, stride, count] stands for the elements start + i * stride + j (i < count, j <
length) of the flattened whole tensor (sharding/placements.py). Pieces are described by parameter
names and global indices, not by ranks, so any mesh can read what another has written.

[Note: models]
The weights of a GPT have transformers' names and layouts, and config.json describes the model. The
weights and state of any other module (also of transformers or nanoGPT) have the module's own names
and layouts; to load them, build the module first.

[Note: digests]
"xxh3:HEX" is 128-bit XXH3 from the package xxhash; "sha256:HEX" is written without that package,
and by earlier versions. A digest finds damage by disks and networks; it does not prove who wrote a
checkpoint. Hashing reaches several GB/s, so saves wait for the disk, not for hashing.

[Note: checks]
The digest finds every change of a manifest; no file of it is outside the folder. Before its commit
a saver checks its meaning: tensors fill their files, every element of every tensor is in exactly
one piece.
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

from fastpar.files.packages import to_install
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
    head: int  # size; for a file with tensors: the offset of their data


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: a whole one, or a piece."""

    file: str
    key: str  # its name in the file; for optimizer state PARAMETER/ENTRY
    dtype: str  # safetensors' name
    shape: tuple[int, ...]  # of the whole tensor
    runs: tuple[Run, ...]  # its elements in the file
    digest: str  # of its bytes in the file

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the file."""
        return numel_of(self.runs) * STORED[self.dtype].itemsize


def hasher(digest: str = "") -> tuple[str, Any]:
    """(name, object with update()) of the hash function of a digest; "": that of new digests.

    Raises:
        ValueError: an unknown hash function.
    """
    name = digest.partition(":")[0] or ("sha256" if xxhash is None else "xxh3")
    if name == "sha256":
        return name, hashlib.sha256()
    if name != "xxh3" or xxhash is None:
        raise ValueError(f"a digest of an unknown kind: {shown(name)}")
    return name, xxhash.xxh3_128()


def digest_of(raw: Any) -> str:
    """The digest of some bytes; releases the interpreter's lock."""
    name, digest = hasher()
    digest.update(raw)
    return f"{name}:{digest.hexdigest()}"


def by_key(entries: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Name of each tensor -> its pieces."""
    pieces: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        pieces.setdefault(entry.key, []).append(entry)
    return pieces


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, or of one rank's part of it."""

    step: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    weights: tuple[TensorEntry, ...] = ()
    optimizer: tuple[TensorEntry, ...] = ()
    model: str = ANY_MODULE
    axes: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def join(parts: Sequence[Manifest]) -> Manifest:
        """Join the manifests of all ranks' parts of a checkpoint."""
        return Manifest(
            parts[0].step,
            {name: entry for part in parts for name, entry in part.files.items()},
            tuple(t for part in parts for t in part.weights),
            tuple(t for part in parts for t in part.optimizer),
            parts[0].model,
            parts[0].axes,
        )

    def sealed(self) -> bytes:
        """The content of manifest.json, with its digest.

        Raises:
            ValueError: it is larger than readers accept.
        """
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if not self.axes:
            del content["axes"]
        text = json.dumps(content)
        if len(text) + 100 > JSON_BYTES:
            raise ValueError(
                f"sealed: expected at most {JSON_BYTES} bytes, got a manifest of "
                f"bytes={len(text) + 100}; use fewer ranks, or a layout with larger shards"
            )
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f'{text[:-1]}, "digest": "{digest}"}}\n'.encode()


class VersionError(ValueError):
    """A checkpoint that needs another version of fastpar or another package."""


def read_manifest(folder: str | Path, name: str = MANIFEST) -> Manifest:
    """Read and check the manifest of a checkpoint; does not read the checkpoint's other files.

    Args:
        folder: the checkpoint's folder.
        name: name of the manifest's file.
    Raises:
        VersionError: another version; names the fastpar that reads it.
        ValueError: it is missing or damaged.
    """
    file = Path(folder) / name
    try:
        manifest = _parse(file, read_plain(file, JSON_BYTES))
        real = file.parent.resolve()
        if is_step_name(real.name) and step_of(real) != manifest.step:
            raise ValueError(f"step {manifest.step} in a folder of another step")
        return manifest
    except VersionError:
        raise
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"read_manifest: expected a checkpoint's manifest, got {file} ({reason(error)}); the "
            "folder is not a checkpoint of fastpar or is damaged, use another one"
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
    for name in raw["files"]:
        if not is_plain_name(name):
            raise ValueError(f"an invalid file name: {shown(name)}")
    raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
    for kind in ("weights", "optimizer"):
        for entry in raw[kind]:
            entry["shape"] = tuple(entry["shape"])
            entry["runs"] = tuple(Run(*run) for run in entry["runs"])
        raw[kind] = tuple(TensorEntry(**entry) for entry in raw[kind])
    for entry in (*raw["files"].values(), *raw["weights"], *raw["optimizer"]):
        if xxhash is None and entry.digest.startswith("xxh3:"):  # not damage: do not skip it
            raise VersionError(
                f"read_manifest: expected the package xxhash for the XXH3 digests in {file}, got "
                f"none; run {to_install('xxhash')}"
            )
        hasher(entry.digest)
    return Manifest(**raw)


def check_complete(manifest: Manifest) -> None:
    """Check that the parts of all ranks form a checkpoint, see [Note: checks].

    Raises:
        ValueError: they do not.
    """
    nbytes = {name: entry.head for name, entry in manifest.files.items()}
    for tensor in manifest.weights + manifest.optimizer:
        nbytes[tensor.file] += tensor.nbytes
    for name, entry in manifest.files.items():
        if entry.size != nbytes[name]:
            raise ValueError(f"{name} has {entry.size} bytes, its tensors {nbytes[name]}")
    for key, pieces in (*by_key(manifest.weights).items(), *by_key(manifest.optimizer).items()):
        problem = check_cover([piece.runs for piece in pieces], math.prod(pieces[0].shape))
        if problem is not None:
            raise ValueError(f"pieces of {shown(key)} with {problem}")
