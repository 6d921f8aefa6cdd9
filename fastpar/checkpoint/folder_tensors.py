"""The tensors of a folder, of a checkpoint or of transformers, read in chunks of bounded size.

What fastpar inspect and export work on: no model is built and no tensor is in memory as a whole
unless it is asked for. Bytes of a checkpoint are compared with their digest as they pass, so what
was read to the end is what was written.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.checkpoint.manifest import Manifest, TensorEntry
from fastpar.checkpoint.verify import describe, read_places
from fastpar.files.plain_files import open_plain, reason
from fastpar.files.tensor_file import DTYPE_NAMES
from fastpar.files.tensor_header import Place, read_header
from fastpar.models.hf import weight_files
from fastpar.sharding.ranges import HOLE, Run, whole_run

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CHUNK_BYTES = 1 << 22


class Piece(NamedTuple):
    """A part of a tensor in a file."""

    path: Path
    place: Place
    runs: tuple[Run, ...]
    entry: TensorEntry | None  # of a manifest, with its digest


class StoredTensor(NamedTuple):
    """A tensor, in one piece or several."""

    name: str  # of a weight, or PARAMETER/ENTRY of the optimizer's state
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def chunks(self) -> Iterator[Tensor]:
        """Its elements, each once, flat and in no particular order.

        Raises:
            ValueError: bytes that cannot be read, or are not those of the manifest.
        """
        for piece in self.pieces:
            at = 0
            for chunk in _chunks(piece, self.dtype):
                yield from _without_holes(piece.runs, at, chunk)
                at += len(chunk)

    def whole(self) -> Tensor:
        """All of it, in memory.

        Raises:
            ValueError: as of chunks().
        """
        out = torch.empty(math.prod(self.shape), dtype=self.dtype)
        for piece in self.pieces:
            values = torch.cat([*_chunks(piece, self.dtype), torch.empty(0, dtype=self.dtype)])
            for run, at in zip(piece.runs, _starts(piece.runs)):
                if run.start == HOLE:
                    continue
                part = values[at : at + run.numel].view(run.count, run.length)
                stride = run.stride or run.length
                out.as_strided((run.count, run.length), (stride, 1), run.start).copy_(part)
        return out.view(self.shape)


def stored_tensors(folder: Path, manifest: Manifest | None) -> list[StoredTensor]:
    """Weights in the order of their files, then the optimizer's state.

    Args:
        folder: of a checkpoint or of transformers.
        manifest: of a checkpoint.
    Raises:
        ValueError: a file that is missing, or whose header is damaged.
    """
    if manifest is None:
        return [tensor for path in weight_files(folder) for tensor in _plain(path)]
    places: dict[str, dict[str, Place]] = {}
    pieces: dict[str, list[Piece]] = {}
    entries: dict[str, TensorEntry] = {}
    for entry in manifest.weights + manifest.optimizer:
        if entry.file not in places:
            try:
                places[entry.file] = read_places(folder, manifest, entry.file)
            except OSError as error:
                raise _unreadable(folder / entry.file, reason(error)) from error
        piece = Piece(folder / entry.file, places[entry.file][entry.key], entry.runs, entry)
        entries.setdefault(entry.key, entry)
        pieces.setdefault(entry.key, []).append(piece)
    return [
        StoredTensor(key, DTYPES[entry.dtype], entry.shape, tuple(pieces[key]))
        for key, entry in entries.items()
    ]


def _plain(path: Path) -> list[StoredTensor]:
    try:
        descriptor = open_plain(path, links=True)
        try:
            header = read_header(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, reason(error)) from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    return [
        StoredTensor(
            key,
            DTYPES[dtype],
            shape,
            (Piece(path, place, tuple(whole_run(math.prod(shape))), None),),
        )
        for key, (dtype, shape, place) in header.items()
    ]


def _unreadable(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"stored_tensors: expected a complete safetensors file, got {path} ({problem}); copy or "
        "save it again"
    )


def _chunks(piece: Piece, dtype: torch.dtype) -> Iterator[Tensor]:
    """A piece's elements in the order of the file, each chunk in memory of its own."""
    digest = hashlib.sha256()
    try:
        descriptor = open_plain(piece.path, links=piece.entry is None)
        try:
            at = piece.place.start
            while at < piece.place.stop:
                buffer = bytearray(min(CHUNK_BYTES, piece.place.stop - at))
                filled = 0
                while filled < len(buffer):
                    n = os.preadv(descriptor, [memoryview(buffer)[filled:]], at + filled)
                    if n == 0:
                        raise OSError(None, f"ends at byte {at + filled}")
                    filled += n
                digest.update(buffer)
                at += filled
                yield torch.frombuffer(buffer, dtype=dtype)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(piece.path, reason(error)) from error
    if piece.entry is not None and digest.hexdigest() != piece.entry.sha256:
        raise ValueError(
            f"stored_tensors: expected {describe(piece.entry)} as the manifest has it, got other "
            f"content in {piece.path}; the checkpoint is damaged, use another one"
        )


def _starts(runs: tuple[Run, ...]) -> list[int]:
    starts, at = [], 0
    for run in runs:
        starts.append(at)
        at += run.numel
    return starts


def _without_holes(runs: tuple[Run, ...], at: int, chunk: Tensor) -> Iterator[Tensor]:
    """The parts of elements [at, at + len(chunk)) of a piece that some tensor has."""
    if all(run.start != HOLE for run in runs):
        yield chunk
        return
    for run, start in zip(runs, _starts(runs)):
        first, last = max(start - at, 0), min(start + run.numel - at, len(chunk))
        if run.start != HOLE and first < last:
            yield chunk[first:last]
