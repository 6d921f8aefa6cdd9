"""Reads and verifies tensors of a checkpoint or a transformers folder.

TensorReader is the only code that reads tensors. It reads a file of a checkpoint only if its size
and the digest of its header match the manifest. compare() and read() also check the content.
gather() hashes tensors that it reads as a whole, block by block while they are in the CPU's cache,
and records the result, so that they need not be read again for verification. A file consists of its
head, whose digest is in FileEntry, and its tensors, each with its own digest. Verification is
divided among ranks and threads; hashing releases the interpreter's lock.

Files are read, not mapped: mapped pages count as memory of the process, and each costs a page
fault. A reader needs memory for the largest tensor returned by whole().
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastpar.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    TensorEntry,
    VersionError,
    hasher,
    read_manifest,
)
from fastpar.files.plain_files import (
    open_plain,
    printable,
    read_into,
    read_object,
    reason,
)
from fastpar.files.runs import is_step_name, linked, list_checkpoints, step_of
from fastpar.files.tensor_file import (
    BLOCK_BYTES,
    STORED,
    THREADS,
    TILE_ROWS,
    Place,
    bytes_of,
    parse_header,
    read_header,
)
from fastpar.models.hf import INDEX_FILE, WEIGHTS_FILE, weight_files
from fastpar.sharding.placements import (
    HOLE,
    Run,
    intervals,
    numel_of,
    overlaps,
    whole_run,
)

_DIFFERS = "other content"


def list_plain_tensors(folder: Path) -> Manifest:
    """The weights of a transformers folder, as a manifest without files and digests.

    Raises:
        ValueError: a file is missing, or its header is damaged.
    """
    weights = []
    for path in weight_files(folder):
        try:
            with open(open_plain(path, links=True), "rb") as file:
                header = read_header(file.fileno())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"list_plain_tensors: expected a complete safetensors file, got {path} "
                f"({reason(error)}); copy or save it again"
            ) from error
        weights += [
            TensorEntry(path.name, key, dtype, shape, tuple(whole_run(math.prod(shape))), "")
            for key, (dtype, shape, _) in header.items()
        ]
    return Manifest(0, weights=tuple(weights))


class TensorReader:
    """Reads tensors of one folder. A context manager; whole() is for one thread at a time.

    Args:
        folder: the folder of the files.
        manifest: from read_manifest() or list_plain_tensors().
    Attributes:
        seen: (file, key) of tensors that were read as a whole -> whether their digest matched.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._descriptors: dict[str, int] = {}
        self._places: dict[str, dict[str, Place]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._opening = threading.Lock()
        self.seen: dict[tuple[str, str], bool] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    # Files. Errors state only the problem; the caller adds the file's name.

    def open(self, file: str) -> int:
        """Open a file whose size matches the manifest; return its descriptor.

        Raises:
            OSError: it cannot be read.
            ValueError: it has another size.
        """
        if file not in self._descriptors:
            listed = self.manifest.files.get(file)
            descriptor = open_plain(self.folder / file, links=listed is None)
            size = os.fstat(descriptor).st_size
            if listed is not None and size != listed.size:
                os.close(descriptor)
                raise ValueError(f"{size} bytes instead of {listed.size}")
            self._descriptors[file] = descriptor
        return self._descriptors[file]

    def has_tensors(self, file: str) -> bool:
        """Whether a listed file holds tensors; then its own digest covers only its header."""
        listed = self.manifest.files[file]
        return listed.head < listed.size or file.endswith(".safetensors")

    def compare_file(self, file: str) -> None:
        """Compare a file, or the header of one with tensors, with its digest.

        Raises:
            OSError: it cannot be read.
            ValueError: it differs.
        """
        self.places(file) if self.has_tensors(file) else self._head(file)

    def _head(self, file: str) -> bytes:
        """The bytes of a listed file before its tensors; all of a file without tensors."""
        listed = self.manifest.files[file]
        raw, digest = bytearray(listed.head), hasher(listed.digest)[1]
        read_into(self.open(file), memoryview(raw), 0)
        digest.update(raw)
        if not listed.digest.endswith(f":{digest.hexdigest()}"):
            raise ValueError(_DIFFERS + " in its header" * self.has_tensors(file))
        return bytes(raw)

    def places(self, file: str) -> dict[str, Place]:
        """The places of a file's tensors, from its header.

        Raises:
            OSError: it cannot be read.
            ValueError: the header is damaged.
        """
        with self._opening:
            if file not in self._places:
                listed = file in self.manifest.files
                header = parse_header(self._head(file)) if listed else read_header(self.open(file))
                self._places[file] = {key: stored.place for key, stored in header.items()}
            return self._places[file]

    # Tensors

    def compare(self, entry: TensorEntry) -> None:
        """Compare a tensor's bytes with their digest; thread-safe after places().

        Raises:
            OSError: they cannot be read.
            ValueError: they differ. Both state only the problem.
        """
        digest, left = hasher(entry.digest)[1], entry.nbytes if entry.digest else 0
        block = np.empty(min(BLOCK_BYTES, left), np.uint8)
        for offset in range(0, left, BLOCK_BYTES):
            self._read(entry, offset, block[: left - offset], digest)
        if entry.digest and not entry.digest.endswith(f":{digest.hexdigest()}"):
            raise ValueError(_DIFFERS)

    def read(self, entries: list[TensorEntry]) -> Tensor:
        """A whole tensor from all of its pieces, checked by digest.

        Raises:
            ValueError: a piece cannot be read or differs; names it.
        """
        for entry in entries:
            with self._named(entry):
                self.compare(entry)
        shape = entries[0].shape
        return self.gather(entries, whole_run(math.prod(shape))).view(shape)

    def whole(self, entry: TensorEntry) -> Tensor:
        """A weight as stored in its file, in memory that the next call overwrites.

        Raises:
            ValueError: its file cannot be read; names it and the tensor.
        """
        if self._scratch.numel() < entry.nbytes:
            self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one
            self._scratch = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
        out = self._scratch[: entry.nbytes].view(STORED[entry.dtype])
        return self.gather([entry], list(entry.runs), out).view(entry.shape)

    def read_transposed(self, entry: TensorEntry, out: Tensor, first: int) -> None:
        """Read columns of a weight into the rows of a CPU tensor of its dtype, by tiles.

        Args:
            out: contiguous; gets the columns from `first` on.
        Raises:
            ValueError: its file cannot be read; names it and the tensor.
        """
        turned = bytes_of(out).view(f"i{out.itemsize}").reshape(out.shape).T
        tile = np.empty((TILE_ROWS, entry.shape[1]), turned.dtype)
        digest = hasher(entry.digest)[1]
        with self._named(entry):
            for row in range(0, len(turned), TILE_ROWS):
                part = tile[: len(turned) - row]
                self._read(entry, row * part[0].nbytes, part.reshape(-1).view(np.uint8), digest)
                turned[row : row + TILE_ROWS] = part[:, first : first + len(out)]
        self._note(entry, digest)

    def gather(
        self, entries: list[TensorEntry], runs: list[Run], out: Tensor | None = None
    ) -> Tensor:
        """The elements of some runs from the pieces that hold them; holes are 0.

        Args:
            entries: pieces of one tensor.
            runs: the elements to read.
            out: flat, contiguous, on the CPU; used if it has the right size and dtype.
        Returns:
            out, or a new tensor.
        Raises:
            ValueError: a file cannot be read; names it and the tensor.
        """
        dtype, numel = STORED[entries[0].dtype], numel_of(runs)
        if out is None or out.dtype != dtype or out.numel() != numel:
            out = torch.empty(numel, dtype=dtype, device="cpu")
        raw, size = bytes_of(out), dtype.itemsize
        if list(entries[0].runs) == runs and all(run.start != HOLE for run in runs):
            self._fill(entries[0], np.array([[0, 0, raw.nbytes]]), raw)  # the piece as saved
            return out
        wanted = intervals(runs)
        if wanted[:, 1].sum() < numel:
            out.zero_()
        for entry in entries:
            self._fill(entry, _joined(overlaps(wanted, intervals(entry.runs))) * size, raw)
        return out

    def _fill(self, entry: TensorEntry, rows: np.ndarray, raw: np.ndarray) -> None:
        """Copy rows, in bytes: (offset in raw, offset in the tensor, number)."""
        rows = rows[np.argsort(rows[:, 1], kind="stable")]  # in the order of the file
        whole = entry.digest and rows[:, 2].sum() == entry.nbytes
        digest = hasher(entry.digest)[1] if whole else None
        with self._named(entry):
            for at, there, n in rows.tolist():
                self._read(entry, there, raw[at : at + n], digest)
        self._note(entry, digest)

    def _read(self, entry: TensorEntry, start: int, into: np.ndarray, digest: Any) -> None:
        """Read bytes of a tensor from `start` on, and update the digest."""
        offset = self.places(entry.file)[entry.key].start + start
        for i in range(0, len(into), BLOCK_BYTES):
            block = into[i : i + BLOCK_BYTES].data
            read_into(self.open(entry.file), block, offset + i)
            if digest is not None:
                digest.update(block)

    def _note(self, entry: TensorEntry, digest: Any) -> None:
        if digest is not None:
            self.seen[entry.file, entry.key] = entry.digest.endswith(f":{digest.hexdigest()}")

    @contextlib.contextmanager
    def _named(self, entry: TensorEntry) -> Iterator[None]:
        """Add the tensor and file to errors."""
        try:
            yield
        except (OSError, ValueError) as error:
            advice = "the checkpoint is damaged, use another one"
            raise ValueError(
                f"TensorReader: expected {describe(entry)} as saved, got {reason(error)} in "
                f"{self.folder / entry.file}; "
                + (advice if self.manifest.files else "copy or save it again")
            ) from error


def describe(tensor: TensorEntry) -> str:
    """A tensor or piece in words: name, first and last index in the whole tensor."""
    runs = [run for run in tensor.runs if run.start != HOLE]
    if not runs:
        return f"{printable(tensor.key)}, no elements"
    first, last = min(run.start for run in runs), max(run.stop for run in runs) - 1
    return f"{printable(tensor.key)}, elements {first} to {last}"


def _joined(rows: np.ndarray) -> np.ndarray:
    """Merge rows of overlaps() that are adjacent on both sides."""
    if len(rows) < 2:
        return rows
    ends = rows[:, :2] + rows[:, 2:]
    new = np.concatenate(([True], (rows[1:, :2] != ends[:-1]).any(1)))
    firsts = np.flatnonzero(new)
    joined = rows[firsts]
    joined[:, 2] = np.add.reduceat(rows[:, 2], firsts)
    return joined


class Damage(NamedTuple):
    """A damaged file and its problem."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} ({self.problem})"


def verify_files(folder: str | Path, manifest: Manifest, **options: Any) -> None:
    """Raise ValueError for the first damage that find_damage() finds; same arguments.

    Raises:
        ValueError: a file is missing, truncated, changed, or has other tensors; names the file, the
            tensor and its indices.
    """
    damage = find_damage(folder, manifest, **options)
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise ValueError(
            f"verify_files: expected files as in the manifest of {folder}, got {damage[0]}{more}; "
            "the checkpoint is damaged, use another one"
        )


def newest_checkpoint(
    run: str | Path, say: Callable[[str], None] = print, steps: Collection[int] | None = None
) -> Path:
    """The newest undamaged checkpoint of a run; damaged ones are reported through `say`.

    Args:
        steps: consider only these steps; None: all.
    Raises:
        ValueError: there is none.
        VersionError: it was written by a version of fastpar that this one cannot read.
    """
    problems = []
    for path in reversed(list_checkpoints(run)):
        if steps is not None and step_of(path) not in steps:
            continue
        try:
            verify_checkpoint(path)
        except VersionError:
            raise
        except ValueError as error:
            if not path.exists():  # the run has removed it meanwhile
                continue
            problems.append(str(error))
            say(f"damaged, trying an older one: {error}")
            continue
        return path
    raise ValueError(
        f"newest_checkpoint: expected a run with a complete checkpoint, got run={run} with "
        + (f"only damaged ones; the newest: {problems[0]}" if problems else "none; start a new run")
    )


def verify_checkpoint(path: str | Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest; return the manifest.

    Raises:
        ValueError: not a checkpoint, another version, or a missing, truncated or changed file,
            which is named.
    """
    path = linked(path)
    manifest = read_manifest(path)
    verify_files(path, manifest)
    return manifest


def verify_weights(folder: Path) -> Manifest | None:
    """Verify the files of a checkpoint that load_hf() reads; None for other folders.

    Raises:
        ValueError: the checkpoint is damaged, or load_hf() would read a file not in its manifest.
    """
    if not is_checkpoint(folder):
        return None
    with contextlib.suppress(ValueError):
        if read_object(folder / MANIFEST).get("format") != FORMAT:
            return None  # another program's file
    manifest = read_manifest(folder)
    states = {tensor.file for tensor in manifest.optimizer}
    files = {name: entry for name, entry in manifest.files.items() if name not in states}
    verify_files(folder, replace(manifest, files=files, optimizer=()))
    for name in (WEIGHTS_FILE, INDEX_FILE):
        if name not in files and os.path.lexists(folder / name):
            raise ValueError(
                f"verify_weights: expected only files of the checkpoint {folder}, got {name}, "
                "which its manifest does not list; delete it"
            )
    return manifest


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, or is named like a checkpoint."""
    return os.path.lexists(folder / MANIFEST) or is_step_name(folder.resolve().name)


def find_damage(
    folder: str | Path,
    manifest: Manifest,
    *,
    part: int = 0,
    n_parts: int = 1,
    tensors: bool = True,
    seen: Mapping[tuple[str, str], bool] | None = None,
) -> list[Damage]:
    """Compare the files of a checkpoint, or a part of them, with the manifest.

    Args:
        folder: the checkpoint's folder.
        manifest: from read_manifest().
        part: index of the part to read; sizes of all files are compared, and headers of files with
            tensors in this part.
        n_parts: number of parts.
        tensors: False: compare only sizes and kinds of files, and the content of files without
            tensors; to be done before reading, which must not wait for a pipe.
        seen: (file, key) of tensors that need not be read again -> whether they are undamaged.
    Returns:
        All damage, in the manifest's order.
    """
    seen = seen or {}
    both = manifest.weights + manifest.optimizer if tensors else ()
    share = [t for t in both if (t.file, t.key) not in seen][part::n_parts]
    shared_files = {tensor.file for tensor in share}
    files, damage = list(manifest.files), []
    with TensorReader(Path(folder), manifest) as reader:
        for i, file in enumerate(files):
            inside = i % n_parts == part or file in shared_files
            inside = inside if tensors else not reader.has_tensors(file)
            damage += _try(reader.compare_file if inside else reader.open, file, file)
        broken = {found.file for found in damage}
        sound = [tensor for tensor in share if tensor.file not in broken]
        with ThreadPoolExecutor(THREADS) as pool:
            for found in pool.map(lambda t: _try(reader.compare, t, t.file, describe(t)), sound):
                damage += found
    for t in manifest.weights + manifest.optimizer:
        if not seen.get((t.file, t.key), True):
            damage.append(Damage(t.file, f"{_DIFFERS} in {describe(t)}"))
    return sorted(damage, key=lambda found: files.index(found.file))


def _try(act: Callable[[Any], object], what: Any, file: str, where: str = "") -> list[Damage]:
    try:
        act(what)
        return []
    except (OSError, ValueError) as error:
        return [Damage(file, reason(error) + f" in {where}" * bool(where))]
