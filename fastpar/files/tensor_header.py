"""The header of a safetensors file that others may have written: checked before it is believed."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from fastpar.files.dtypes import STORED
from fastpar.files.plain_files import JSON_BYTES, parse_object, read_into, shown


class Place(NamedTuple):
    """Where a tensor's bytes lie in its file."""

    start: int
    stop: int


class Stored(NamedTuple):
    """A tensor of a file."""

    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    place: Place


def read_header(descriptor: int) -> dict[str, Stored]:
    """The tensors of a whole file.

    Raises:
        ValueError: its header is damaged, or not that of a file of this size.
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
    """The tensors that the first bytes of a file announce.

    Args:
        head: all bytes before those of the tensors.
    Raises:
        ValueError: no such header; tensors overlap or leave bytes out. The text is to be put
            behind the file's name.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or len(head) != 8 + length:
        raise ValueError(f"a header of {length} bytes where {len(head)} - 8 are due")
    try:
        header = parse_object(head[8:])
    except ValueError as error:
        raise ValueError(f"its header is {error}") from error
    header.pop("__metadata__", None)
    tensors = {key: _stored(shown(key), raw, len(head)) for key, raw in header.items()}
    at = len(head)
    for key, stored in sorted(tensors.items(), key=lambda item: item[1].place):
        if stored.place.start != at:
            raise ValueError(f"tensor {shown(key)} at {stored.place.start} where {at} is due")
        at = stored.place.stop
    return tensors


def _stored(key: str, raw: object, first: int) -> Stored:
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {key} without dtype, shape and place")
    dtype, shape, place = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED:
        raise ValueError(f"tensor {key} of an unknown dtype, {shown(dtype)}")
    for numbers in (shape, place):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"tensor {key} with {shown(numbers)}")
    nbytes = math.prod(shape) * STORED[dtype].itemsize if len(shape) <= 16 else -1
    if len(place) != 2 or place[1] - place[0] != nbytes:
        raise ValueError(f"tensor {key} of {dtype}{shown(shape)} at {shown(place)}")
    return Stored(dtype, tuple(shape), Place(first + place[0], first + place[1]))
