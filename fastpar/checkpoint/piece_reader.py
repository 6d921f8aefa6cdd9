"""Reads tensors of a checkpoint, or the parts of them that a rank needs, straight to their places.

Files are read and not mapped: what a mapping shows counts as memory of the process, page for page,
and each page of it costs a fault. A reader's own memory is that of the largest tensor that whole()
has returned, and a few MB for pieces that are cut another way than they were saved.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from fastpar.checkpoint.manifest import Manifest, TensorEntry
from fastpar.checkpoint.verify import read_places
from fastpar.files.plain_files import open_plain, reason
from fastpar.files.tensor_file import DTYPE_NAMES
from fastpar.files.tensor_header import Place
from fastpar.sharding.ranges import Run, intervals, numel_of, overlaps

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SPAN_BYTES = 1 << 22  # read at once where elements are picked out of it
_DIRECT_BYTES = 1 << 16  # a row of elements from which on it is read by itself


class PieceReader:
    """Use as a context manager; one thread at a time.

    Args:
        folder: of the checkpoint.
        manifest: from read_manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, tuple[int, dict[str, Place]]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for descriptor, _places in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def whole(self, entry: TensorEntry) -> Tensor:
        """A weight as its file has it, in memory that the next call overwrites.

        Raises:
            ValueError: its file cannot be read; names both.
        """
        if self._scratch.numel() < entry.nbytes:
            self._scratch = torch.empty(0, dtype=torch.uint8)  # the old one first
            self._scratch = torch.empty(entry.nbytes, dtype=torch.uint8)
        raw = self._scratch[: entry.nbytes]
        self._read(entry, 0, raw.numpy())
        return raw.view(DTYPES[entry.dtype]).view(entry.shape)

    def gather(
        self, found: list[TensorEntry], runs: list[Run], out: Tensor | None = None
    ) -> Tensor:
        """The elements of some runs from the pieces that have them; holes are 0.

        Args:
            found: pieces of one tensor.
            runs: what is wanted of it.
            out: flat and contiguous, on the CPU; overwritten if it is of the right size and dtype.
        Returns:
            out, or a new tensor.
        Raises:
            ValueError: as of whole().
        """
        dtype, numel = DTYPES[found[0].dtype], numel_of(runs)
        mine = intervals(runs)
        if out is None or out.dtype != dtype or out.numel() != numel:
            out = torch.empty(numel, dtype=dtype)
        if mine[:, 1].sum() < numel:
            out.zero_()
        raw, size = out.view(torch.uint8).numpy(), dtype.itemsize
        for entry in found:
            rows = _joined(overlaps(mine, intervals(entry.runs))) * size
            if not len(rows):
                continue
            if rows[:, 2].sum() >= _DIRECT_BYTES * len(rows):
                for at, there, n in rows.tolist():
                    self._read(entry, there, raw[at : at + n])
            else:
                self._pick(entry, rows[np.argsort(rows[:, 1], kind="stable")], raw)
        return out

    def _pick(self, entry: TensorEntry, rows: np.ndarray, raw: np.ndarray) -> None:
        """Copy many short rows, in bytes and in the order of the file."""
        first = 0
        while first < len(rows):
            start = rows[first, 1]
            stops = rows[first:, 1] + rows[first:, 2]
            last = first + max(1, int(np.searchsorted(stops, start + _SPAN_BYTES, side="right")))
            span = np.empty(stops[last - first - 1] - start, dtype=np.uint8)
            self._read(entry, int(start), span)
            for at, there, n in rows[first:last].tolist():
                raw[at : at + n] = span[there - start : there - start + n]
            first = last

    def _read(self, entry: TensorEntry, start: int, into: np.ndarray) -> None:
        """Bytes of a tensor from `start` on."""
        try:
            if entry.file not in self._files:
                descriptor = open_plain(self.folder / entry.file)
                self._files[entry.file] = descriptor, {}
                places = read_places(self.folder, self.manifest, entry.file, descriptor)
                self._files[entry.file] = descriptor, places
            descriptor, places = self._files[entry.file]
            at, left = places[entry.key].start + start, into.data
            while left:
                n = os.preadv(descriptor, [left], at)
                if n == 0:
                    raise ValueError(f"ends at byte {at}")
                at, left = at + n, left[n:]
        except (OSError, ValueError) as error:
            problem = reason(error) if isinstance(error, OSError) else str(error)
            raise ValueError(
                f"load_checkpoint: expected {entry.key} in {self.folder / entry.file}, got "
                f"{problem}; the checkpoint is damaged, use another one"
            ) from error


def _joined(rows: np.ndarray) -> np.ndarray:
    """overlaps(), where one follows the other on both sides taken as one."""
    if len(rows) < 2:
        return rows
    ends = rows[:, :2] + rows[:, 2:]
    new = np.concatenate(([True], (rows[1:, :2] != ends[:-1]).any(1)))
    firsts = np.flatnonzero(new)
    joined = rows[firsts]
    joined[:, 2] = np.add.reduceat(rows[:, 2], firsts)
    return joined
