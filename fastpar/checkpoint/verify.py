"""A checkpoint's files against its manifest: sizes, headers, and the SHA-256 of every byte.

The bytes of a file are those of its head, which FileEntry has a digest of, and those of its
tensors, each with a digest of its own; that they add up was checked by read_manifest. A rank takes
a share of them, and several threads hash it: hashlib lets go of the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fastpar.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from fastpar.files.plain_files import open_plain, reason, shown
from fastpar.files.tensor_header import Place, parse_header
from fastpar.sharding.ranges import HOLE, numel_of

_READ_BYTES = 1 << 20
_THREADS = 4


class Damage(NamedTuple):
    """What is wrong with a file."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} ({self.problem})"


def verify_files(
    folder: str | Path, manifest: Manifest, *, part: int = 0, n_parts: int = 1
) -> dict[str, dict[str, Place]]:
    """Read the files, or a share of them, and compare them with the manifest.

    Args:
        folder: of the checkpoint.
        manifest: from read_manifest.
        part: which share of the bytes; every size is compared, and the header of each file with a
            tensor of this share.
        n_parts: how many shares there are.
    Returns:
        File -> tensor -> where it lies, of the files whose header was read.
    Raises:
        ValueError: a file that is missing, truncated, changed, or has other tensors; names it, the
            tensor and its indices.
    """
    damage, places = find_damage(folder, manifest, part=part, n_parts=n_parts)
    _raise_first(folder, damage)
    return places


def find_damage(
    folder: str | Path, manifest: Manifest, *, part: int = 0, n_parts: int = 1
) -> tuple[list[Damage], dict[str, dict[str, Place]]]:
    """What verify_files raises, all of it and in the manifest's order, and what it returns."""
    tensors = _share(manifest, part, n_parts)
    files = list(manifest.files)
    heads = {name for i, name in enumerate(files) if i % n_parts == part or name in tensors}
    places: dict[str, dict[str, Place]] = {}
    descriptors: dict[str, int] = {}
    try:
        damage = _open_all(Path(folder), manifest, descriptors)
        for name in sorted(heads & descriptors.keys(), key=files.index):
            try:
                head = _check_head(descriptors[name], manifest.files[name])
                if _has_header(name, manifest.files[name]):
                    places[name] = _check_header(head, name, manifest)
            except OSError as error:
                damage.append(Damage(name, reason(error)))
            except ValueError as error:
                damage.append(Damage(name, str(error)))
        broken = {found.file for found in damage}
        todo = [t for name in files if name not in broken for t in tensors.get(name, ())]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            problems = pool.map(
                lambda t: _check_tensor(descriptors[t.file], t, places[t.file][t.key]), todo
            )
            damage += [Damage(t.file, found) for t, found in zip(todo, problems) if found]
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return sorted(damage, key=lambda found: files.index(found.file)), places


def check_small(folder: str | Path, manifest: Manifest) -> None:
    """Compare every file's size and kind, and the content of those without tensors.

    What comes before anything is read: afterwards no file of another size is mapped into memory,
    and no pipe is waited for.

    Raises:
        ValueError: as of verify_files.
    """
    descriptors: dict[str, int] = {}
    try:
        damage = _open_all(Path(folder), manifest, descriptors)
        for name, descriptor in descriptors.items():
            try:
                if not _has_header(name, manifest.files[name]):
                    _check_head(descriptor, manifest.files[name])
            except OSError as error:
                damage.append(Damage(name, reason(error)))
            except ValueError as error:
                damage.append(Damage(name, str(error)))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    _raise_first(folder, damage)


def _raise_first(folder: str | Path, damage: list[Damage]) -> None:
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise ValueError(
            f"verify_files: expected what its manifest has in {folder}, got {damage[0]}{more}; "
            "the checkpoint is damaged, use another one"
        )


def _open_all(folder: Path, manifest: Manifest, descriptors: dict[str, int]) -> list[Damage]:
    """Open every file of the right size into `descriptors`."""
    damage = []
    for name, entry in manifest.files.items():
        try:
            descriptor = open_plain(folder / name)
        except OSError as error:
            damage.append(Damage(name, reason(error)))
            continue
        size = os.fstat(descriptor).st_size
        if size == entry.size:
            descriptors[name] = descriptor
        else:
            os.close(descriptor)
            damage.append(Damage(name, f"{size} bytes instead of {entry.size}"))
    return damage


def _has_header(name: str, entry: FileEntry) -> bool:
    return entry.head < entry.size or name.endswith(".safetensors")


def read_places(
    folder: str | Path, manifest: Manifest, name: str, descriptor: int | None = None
) -> dict[str, Place]:
    """Where the tensors of one file lie, from its header, which is compared with the manifest.

    Raises:
        ValueError: the header is damaged or has other tensors.
        OSError: the file cannot be read.
    """
    opened = open_plain(Path(folder) / name) if descriptor is None else descriptor
    try:
        return _check_header(_check_head(opened, manifest.files[name]), name, manifest)
    except ValueError as error:
        raise ValueError(
            f"read_places: expected what its manifest has in {folder}, got {name} ({error}); the "
            "checkpoint is damaged, use another one"
        ) from error
    finally:
        if descriptor is None:
            os.close(opened)


def extra_files(folder: str | Path, manifest: Manifest, manifest_name: str) -> list[str]:
    """What lies in the folder and is not part of the checkpoint."""
    return sorted(set(os.listdir(folder)) - set(manifest.files) - {manifest_name})


def _share(manifest: Manifest, part: int, n_parts: int) -> dict[str, list[TensorEntry]]:
    """File -> the tensors of one of n shares of nearly the same size, the same on every rank."""
    tensors = manifest.weights + manifest.optimizer
    load = [0] * n_parts
    mine: set[int] = set()
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes):
        least = load.index(min(load))
        load[least] += tensors[i].nbytes
        if least == part:
            mine.add(i)
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for i in sorted(mine):
        by_file[tensors[i].file].append(tensors[i])
    return dict(by_file)


def _check_head(descriptor: int, entry: FileEntry) -> bytes:
    """The bytes under the file's own digest."""
    if entry.head > _HEAD_BYTES:
        known, problem = _hash(descriptor, Place(0, entry.head))
        head = b""
    else:
        head, problem = b"", None
        while len(head) < entry.head:
            more = os.pread(descriptor, entry.head - len(head), len(head))
            if not more:
                raise ValueError(f"ends at byte {len(head)}")
            head += more
        known = hashlib.sha256(head).hexdigest()
    if problem or known != entry.sha256:
        tensors = "" if entry.head == entry.size else " in its header"
        raise ValueError(problem or f"other content{tensors}")
    return head


_HEAD_BYTES = 1 << 26  # a file without tensors can be larger; it is not kept in memory


def _check_header(head: bytes, name: str, manifest: Manifest) -> dict[str, Place]:
    """Where the tensors lie, from a header that has those of the manifest and no others."""
    header = parse_header(head)
    due = {t.key: t for t in manifest.weights + manifest.optimizer if t.file == name}
    for key in sorted(header.keys() ^ due.keys()):
        raise ValueError(f"{'no' if key in due else 'an unlisted'} tensor {shown(key)}")
    whole = {t.key for t in manifest.weights if t.file == name}
    for key, tensor in due.items():
        dtype, shape, _ = header[key]
        if dtype != tensor.dtype:
            raise ValueError(f"tensor {shown(key)} of {dtype} instead of {tensor.dtype}")
        if (key in whole and shape != tensor.shape) or math.prod(shape) != numel_of(tensor.runs):
            wanted = list(tensor.shape) if key in whole else f"{numel_of(tensor.runs)} elements"
            raise ValueError(f"tensor {shown(key)} of shape {list(shape)} instead of {wanted}")
    return {key: stored.place for key, stored in header.items()}


def _check_tensor(descriptor: int, tensor: TensorEntry, place: Place) -> str | None:
    known, problem = _hash(descriptor, place)
    if problem is None and known == tensor.sha256:
        return None
    return f"{problem or 'other content'} in {describe(tensor)}"


def describe(tensor: TensorEntry) -> str:
    """A tensor or piece by name and first and last index of the whole."""
    runs = [run for run in tensor.runs if run.start != HOLE]
    if not runs:
        return f"{tensor.key}, no elements"
    first, last = min(run.start for run in runs), max(run.stop for run in runs) - 1
    return f"{tensor.key}, elements {first} to {last}"


def _hash(descriptor: int, place: Place) -> tuple[str, str | None]:
    """SHA-256 of a part of a file; and what kept it from being read."""
    digest, at = hashlib.sha256(), place.start
    buffer = memoryview(bytearray(min(_READ_BYTES, place.stop - place.start)))
    while at < place.stop:
        try:
            n = os.preadv(descriptor, [buffer[: place.stop - at]], at)
        except OSError as error:
            return "", f"{error.strerror} at byte {at}"
        if n == 0:
            return "", f"ends at byte {at}"
        digest.update(buffer[:n])
        at += n
    return digest.hexdigest(), None
