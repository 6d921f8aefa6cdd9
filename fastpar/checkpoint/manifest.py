"""manifest.json: what a checkpoint consists of, with a checksum of every byte.

    step      optimizer steps done
    model     "gpt" or "module", see [Note: models]
    files     name -> size and SHA-256; of files with tensors only the header is under the latter
    weights   tensors of model*.safetensors, whole, as transformers has them
    optimizer tensors of optimizer-*.safetensors, pieces: PARAMETER/ENTRY, whole shape, runs

A piece is described by its parameter's name and by global indices (ranges.py), never by a rank, so
a reader puts together what it needs of whatever mesh has written. The manifest carries a digest of
itself.

[Note: models]
The weights of a GPT have transformers' names and layouts, and config.json describes the model. The
weights and state of any other module (one of transformers' or nanoGPT's too) have its own names and
layouts: whoever loads it builds the module first. Version 2 had no field for this: such a manifest
is a GPT's if it has config.json and a GPT's names, and no others.

[Note: trust]
The digest finds damage; it does not stop anybody from writing a manifest. So everything is checked
before a file is opened or memory allocated: types, names without a path, sizes that are bounded and
add up to those of the files, every element of every tensor in exactly one piece. test_manifest.py
holds this with manifests that were changed and sealed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fastpar.files.plain_files import (
    JSON_BYTES,
    is_plain_name,
    parse_object,
    read_plain,
    reason,
    shown,
)
from fastpar.files.step_folders import is_step_name, step_of
from fastpar.files.tensor_header import ITEM_BYTES
from fastpar.sharding.ranges import HOLE, Run, check_cover, numel_of, whole_run

FORMAT = "fastpar-checkpoint"
VERSION = 3
_READS = (2, 3)
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
CONFIG = "config.json"
GPT_MODEL, ANY_MODULE = "gpt", "module"
_PREFIX = "transformer."  # of a GPT's weights, not of its optimizer's state
_GPT_WEIGHT = re.compile(
    r"transformer\.(wte|wpe|ln_f|h\.\d+\.(ln_[12]|attn\.c_(attn|proj)|mlp\.c_(fc|proj)))"
    r"\.(weight|bias)"
)
_HUGE = 1 << 48  # no size, index or shape reaches this
_ROWS = 1 << 22  # contiguous parts of one tensor, which are listed in memory
_ALL_ROWS = 1 << 26  # and of all
_NAME = 512  # characters of a tensor's name
_DIGEST = re.compile(r"[0-9a-f]{64}")
_END = re.compile(rb', "digest": "([0-9a-f]{64})"}\n\Z')
_T = TypeVar("_T")
_DICT: type[dict[str, Any]] = dict
_LIST: type[list[Any]] = list


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    sha256: str  # of the first `head` bytes
    head: int  # size, or of a file with tensors: where their data begin


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: a whole one, or a piece."""

    file: str
    key: str  # its name in the file; of the optimizer's: PARAMETER/ENTRY
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]  # of the whole tensor
    runs: tuple[Run, ...]  # what the file has of it
    sha256: str  # of its bytes in the file

    @property
    def nbytes(self) -> int:
        """What the file has of it."""
        return numel_of(self.runs) * ITEM_BYTES[self.dtype]


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

    @staticmethod
    def join(parts: Sequence[Manifest]) -> Manifest:
        """One manifest of the ranks' parts of a checkpoint."""
        return Manifest(
            parts[0].step,
            {name: entry for part in parts for name, entry in part.files.items()},
            tuple(t for part in parts for t in part.weights),
            tuple(t for part in parts for t in part.optimizer),
            parts[0].model,
        )

    def sealed(self) -> bytes:
        """The manifest's file: the content and its digest.

        Raises:
            ValueError: it is larger than what a reader takes.
        """
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(content)
        if len(text) + 100 > JSON_BYTES:
            raise ValueError(
                f"sealed: expected at most {JSON_BYTES} bytes, got a manifest of "
                f"bytes={len(text) + 100}; use fewer ranks, or a layout with longer pieces"
            )
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f'{text[:-1]}, "digest": "{digest}"}}\n'.encode()


def read_manifest(folder: str | Path, name: str = MANIFEST, *, complete: bool = True) -> Manifest:
    """The manifest of a checkpoint; checked for sense, not against the files beside it.

    Args:
        folder: of the checkpoint.
        name: of the manifest's file.
        complete: whether it has to describe a whole checkpoint; a rank's part need not: its pieces
            cover nothing, and their files are listed by another part.
    Raises:
        ValueError: there is none, it is of another version, it is damaged, or it makes no sense.
    """
    file = Path(folder) / name
    try:
        manifest = parse_manifest(read_plain(file, JSON_BYTES), complete=complete)
        real = file.parent.resolve()
        if not is_step_name(real.name) or step_of(real) == manifest.step:
            return manifest
        problem = ManifestError(f"of step {manifest.step}, in a folder of another one")
    except OSError as error:
        problem = ManifestError(reason(error))
    except ManifestError as error:
        problem = error
    raise ValueError(
        f"read_manifest: expected a checkpoint's manifest, got {file} ({problem}); {problem.advice}"
    ) from problem


class ManifestError(ValueError):
    """What is wrong with a manifest: text to be put behind its name."""

    advice = "the folder is no checkpoint of fastpar, or it is damaged: use another one"


def parse_manifest(content: bytes, *, complete: bool = True) -> Manifest:
    """The manifest that sealed() wrote.

    Args:
        content: of the file.
        complete: as in read_manifest.
    Raises:
        ManifestError: it did not write this.
    """
    try:
        raw = parse_object(content)
    except ValueError as error:
        raise ManifestError(str(error)) from error
    version = _check_version(raw.get("format"), raw.get("version"))
    end = _END.search(content)
    if end is None or hashlib.sha256(content[: end.start()] + b"}").hexdigest().encode() != end[1]:
        raise ManifestError("its digest does not match")
    names = [f.name for f in fields(Manifest) if version > 2 or f.name != "model"]
    _names("manifest", raw, ["format", "version", *names, "digest"])
    files = {}
    for name, entry in _of(_DICT, "files", raw["files"]).items():
        if not is_plain_name(name) or name == MANIFEST:
            raise ManifestError(f"a file name that is none of ours: {shown(name)}")
        files[name] = _file(name, entry)
    kinds = (raw["weights"], raw["optimizer"])
    weights, optimizer = (
        tuple(_tensor(entry) for entry in _of(_LIST, kind, tensors))
        for kind, tensors in zip(("weights", "optimizer"), kinds)
    )
    for piece in optimizer:
        if not all(piece.key.rpartition("/")):
            raise ManifestError(f"no PARAMETER/ENTRY: {shown(piece.key)}")
    model = raw["model"] if version > 2 else _model_of_version_2(files, weights, optimizer)
    if model not in (GPT_MODEL, ANY_MODULE):
        raise ManifestError(f"an unknown model: {shown(model)}")
    manifest = Manifest(_int("step", raw["step"]), files, weights, optimizer, model)
    _check_unique(manifest)
    if complete:
        _check_files(manifest)
        _check_complete(manifest)
    return manifest


def _model_of_version_2(
    files: dict[str, FileEntry],
    weights: tuple[TensorEntry, ...],
    optimizer: tuple[TensorEntry, ...],
) -> str:
    named = all(_GPT_WEIGHT.fullmatch(tensor.key) for tensor in weights)
    own = any(tensor.key.startswith(_PREFIX) for tensor in optimizer)
    return GPT_MODEL if CONFIG in files and named and not own else ANY_MODULE


def _check_version(format: object, version: object) -> int:
    if format != FORMAT:
        raise ManifestError(f"another format: {shown(format)}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ManifestError(f"no version: {shown(version)}")
    if version in _READS:
        return version
    known = " and ".join(map(str, _READS))
    problem = ManifestError(f"version {version}; this fastpar reads {known}")
    if version > VERSION:
        problem.advice = "update fastpar"
    else:
        problem.advice = (
            "go on with the fastpar that wrote it, or train on from its weights with --init-from"
        )
    raise problem


def _check_unique(manifest: Manifest) -> None:
    weights: list[object] = [t.key for t in manifest.weights]
    pieces: list[object] = [(t.file, t.key) for t in manifest.optimizer]
    for names in (weights, pieces):
        twice = next((name for name, n in Counter(names).items() if n > 1), None)
        if twice is not None:
            raise ManifestError(f"{shown(twice)} twice")


def _check_files(manifest: Manifest) -> None:
    """Every tensor in a listed file, and the files' data made up of them."""
    nbytes: Counter[str] = Counter()
    for tensor in manifest.weights + manifest.optimizer:
        if tensor.file not in manifest.files:
            raise ManifestError(f"{shown(tensor.key)} in a file not listed, {shown(tensor.file)}")
        nbytes[tensor.file] += tensor.nbytes
    mixed = {t.file for t in manifest.weights} & {t.file for t in manifest.optimizer}
    if mixed:
        raise ManifestError(f"weights and optimizer both in {min(mixed)}")
    for name, entry in manifest.files.items():
        if entry.size - entry.head != nbytes[name]:
            raise ManifestError(
                f"{name} with {entry.size - entry.head} bytes of data and tensors of {nbytes[name]}"
            )


def _check_complete(manifest: Manifest) -> None:
    """Every element of every entry in one piece, and the files that every checkpoint has."""
    for name in (CONFIG, STATE) if manifest.model == GPT_MODEL else (STATE,):
        if name not in manifest.files:
            raise ManifestError(f"no {name} in its list")
    if not manifest.weights:
        raise ManifestError("no weights in its list")
    for tensor in manifest.weights:
        if list(tensor.runs) != whole_run(math.prod(tensor.shape)):
            raise ManifestError(f"a part only of {shown(tensor.key)}")
    pieces = by_key(manifest.optimizer)
    rows = {key: sum(run.count for p in found for run in p.runs) for key, found in pieces.items()}
    total = sum(rows.values())
    for key, n in rows.items():
        if n > _ROWS or total > _ALL_ROWS:
            raise ManifestError(f"{shown(key)} in {n} of {total} rows, more than a model has")
    for key, found in pieces.items():
        first = found[0]
        for other in found[1:]:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise ManifestError(
                    f"pieces of {shown(key)} of {first.dtype}{list(first.shape)} in {first.file} "
                    f"and of {other.dtype}{list(other.shape)} in {other.file}"
                )
        problem = check_cover([piece.runs for piece in found], math.prod(first.shape))
        if problem is not None:
            raise ManifestError(f"pieces of {shown(key)} with {problem}")


def _file(name: str, raw: object) -> FileEntry:
    entry = _names(name, raw, [f.name for f in fields(FileEntry)])
    size, head = _int(f"size of {name}", entry["size"]), _int(f"head of {name}", entry["head"])
    if head > size:
        raise ManifestError(f"{name} with a head of {head} bytes in {size}")
    return FileEntry(size, _digest(name, entry["sha256"]), head)


def _tensor(raw: object) -> TensorEntry:
    entry = _names("tensor", raw, [f.name for f in fields(TensorEntry)])
    key, dtype = entry["key"], entry["dtype"]
    if not isinstance(key, str) or not key.isprintable() or not 0 < len(key) <= _NAME:
        raise ManifestError(f"no name of a tensor: {shown(key)}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ManifestError(f"{shown(key)} of an unknown dtype, {shown(dtype)}")
    shape = tuple(_int(f"shape of {key}", n) for n in _of(_LIST, f"shape of {key}", entry["shape"]))
    if len(shape) > 16 or math.prod(shape) >= _HUGE:
        raise ManifestError(f"{shown(key)} of an absurd shape")
    runs = tuple(_run(key, run) for run in _of(_LIST, f"runs of {key}", entry["runs"]))
    numel = math.prod(shape)
    if any(run.start != HOLE and run.stop > numel for run in runs) or numel_of(runs) >= _HUGE:
        raise ManifestError(f"{shown(key)} of {numel} elements with indices beyond")
    if not is_plain_name(entry["file"]):
        raise ManifestError(f"file of {shown(key)} that is none of ours: {shown(entry['file'])}")
    return TensorEntry(
        file=entry["file"],
        key=key,
        dtype=dtype,
        shape=shape,
        runs=runs,
        sha256=_digest(key, entry["sha256"]),
    )


def _run(key: str, raw: object) -> Run:
    numbers = _of(_LIST, f"runs of {key}", raw)
    if len(numbers) != len(Run._fields):
        raise ManifestError(f"runs of {shown(key)} with {shown(raw)}")
    run = Run(*(_int(f"runs of {key}", n, HOLE) for n in numbers))
    if run.start == HOLE:
        sound = run == Run(HOLE, run.length)
    else:
        sound = run.stride >= run.length if run.count > 1 else run.stride == 0
    if run.length < 1 or run.count < 1 or not sound:
        raise ManifestError(f"runs of {shown(key)} with {shown(raw)}")
    return run


def _names(what: str, raw: object, names: Sequence[str]) -> dict[str, Any]:
    given = _of(_DICT, what, raw)
    for name in sorted(given.keys() ^ set(names)):
        kind = "no" if name in names else "an unknown"
        raise ManifestError(f"{kind} field {shown(name)} of {shown(what)}")
    return given


def _of(kind: type[_T], what: str, value: object) -> _T:
    if isinstance(value, kind):
        return value
    raise ManifestError(f"{shown(what)} is no {kind.__name__} but {shown(value)}")


def _int(what: str, value: object, low: int = 0) -> int:
    if type(value) is not int or not low <= value < _HUGE:
        raise ManifestError(f"{shown(what)} is no number that can be: {shown(value)}")
    return value


def _digest(what: str, value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ManifestError(f"no SHA-256 of {shown(what)}: {shown(value)}")
    return value
