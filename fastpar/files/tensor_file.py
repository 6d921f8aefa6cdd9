"""Tensors in files: names of number formats; reading and writing safetensors files.

Readers check a file's header before they use it. TensorFile writes one tensor at a time, because
safetensors' save_file needs all tensors at once, and a rank that collects shards would have to hold
the whole model and optimizer state. The header is written first, from dtypes and shapes; each
tensor is then written to its place in blocks, so that a transposed tensor needs no full copy. The
files are identical to those of save_file (test_the_same_bytes_as_save_file).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastpar.files.plain_files import JSON_BYTES, parse_object, read_into, shown

FLOATS = {  # formats of weights and gradients
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
DTYPES = {**FLOATS, "int8": torch.uint8}  # moments may have 8 bits, too
# safetensors' names, in its order of storing tensors: by alignment, then by name.
STORED = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in STORED.items()}
BLOCK_BYTES = 1 << 20  # read or written at once; small enough to stay in the cache for hashing
THREADS = min(4, os.cpu_count() or 1)  # threads that read or write files
TILE_ROWS = 64  # rows of a tensor that are transposed at once
HF_NAMES = {FLOATS[name]: str(FLOATS[name]).removeprefix("torch.") for name in list(FLOATS)[:3]}


class Spec(NamedTuple):
    """Dtype and shape of a tensor that is still to be written."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Writes a safetensors file, as a context manager: write() each tensor once.

    Several threads may write different tensors. Leaving the context checks that all were written.

    Args:
        path: created, or overwritten.
        specs: dtype and shape of each tensor, by name.
        metadata: strings for the header.
    Attributes:
        head: the bytes before the tensors' data.
        size: bytes of the file.
        order: names of the tensors in the order of the file; writing in this order is fastest.
    """

    def __init__(
        self, path: str | Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        dtypes, end = list(DTYPE_NAMES), 0
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._left: dict[str, tuple[Spec, int]] = {}  # tensors not written yet, and their offsets
        self.order = sorted(specs, key=lambda n: (dtypes.index(specs[n].dtype), n))
        for name in self.order:
            self._left[name] = spec, start = specs[name], end
            end += spec.nbytes
            what = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape)}
            header[name] = {**what, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.size = len(self.head) + end
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._put(memoryview(self.head), 0)
        self._file.truncate(self.size)  # in case the last tensors have no elements

    def write(
        self, name: str, tensor: Tensor, see: Callable[[memoryview], object] | None = None
    ) -> None:
        """Write one tensor.

        Args:
            see: called with each block of its bytes, in order.
        """
        spec, place = self._left.pop(name)
        assert (tensor.dtype, list(tensor.shape)) == (spec.dtype, list(spec.shape)), name
        offset = len(self.head) + place
        for block in _blocks(tensor.detach()):
            if see is not None:
                see(block)
            self._put(block, offset)
            offset += block.nbytes

    def _put(self, block: memoryview, offset: int) -> None:
        while block:
            n = os.pwrite(self._file.fileno(), block, offset)
            offset, block = offset + n, block[n:]

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            assert kind is not None or not self._left, f"not written: {[*self._left]}"


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, in blocks."""
    if tensor.dim() == 2 and tensor.t().is_contiguous() and tensor.device.type == "cpu":
        whole = bytes_of(tensor.t()).view(f"i{tensor.itemsize}").reshape(tensor.t().shape)
        for row in range(0, len(tensor), TILE_ROWS):
            tile = np.ascontiguousarray(whole[:, row : row + TILE_ROWS])  # transpose in the cache
            yield np.ascontiguousarray(tile.T).view(np.uint8).reshape(-1).data
        return
    tensor = tensor.contiguous().cpu()
    raw = bytes_of(tensor).data
    for start in range(0, raw.nbytes, BLOCK_BYTES):
        yield raw[start : start + BLOCK_BYTES]


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor as an array; the tensor must outlive it.

    This is used because a storage cannot be resized after numpy(), which ZeRO 3 needs.
    """
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


class Place(NamedTuple):
    """Byte range of a tensor in its file."""

    start: int
    stop: int


class Stored(NamedTuple):
    """A tensor in a file's header."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    place: Place


def read_header(descriptor: int) -> dict[str, Stored]:
    """Read the header of a file and check it against the file's size.

    Raises:
        ValueError: the header is damaged, or does not match the size.
        OSError: it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, JSON_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    read_into(descriptor, memoryview(text), 8)
    tensors = parse_header(head + text)
    stop = max((stored.place.stop for stored in tensors.values()), default=8 + length)
    if stop != size:
        raise ValueError(f"{size} bytes instead of {stop}")
    return tensors


def parse_header(head: bytes) -> dict[str, Stored]:
    """Parse the header of a file.

    Args:
        head: all bytes before those of the tensors.
    Raises:
        ValueError: not a header. The text states only the problem.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or len(head) != 8 + length:
        raise ValueError(f"a header of {length} bytes instead of {len(head)} - 8")
    try:
        header = parse_object(head[8:])
    except ValueError as error:
        raise ValueError(f"its header is {error}") from error
    header.pop("__metadata__", None)
    return {key: _stored(shown(key), raw, len(head)) for key, raw in header.items()}


def _stored(key: str, raw: Any, first: int) -> Stored:
    try:
        dtype, shape, (start, stop) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        fits = stop - start == math.prod(shape) * STORED[dtype].itemsize and start >= 0
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tensor {key} without dtype, shape and place") from error
    if not fits:
        raise ValueError(f"tensor {key} of {dtype}{shown(list(shape))} at {shown([start, stop])}")
    return Stored(dtype, shape, Place(first + start, first + stop))
