"""Which checkpoint is whole: its files against its manifest, sizes, headers, SHA-256 of every byte.

The bytes of a file are those of its head, which FileEntry has a digest of, and those of its
tensors, each with a digest of its own; that they add up was checked by read_manifest. A rank takes
a share of them, and several threads hash it: hashlib lets go of the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fastpar.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    TensorEntry,
    VersionError,
    read_manifest,
)
from fastpar.checkpoint.tensor_reader import TensorReader, describe
from fastpar.files.plain_files import read_object, reason
from fastpar.files.runs import is_step_name, list_checkpoints, step_of
from fastpar.models.hf import INDEX_FILE, WEIGHTS_FILE

_THREADS = 4


class Damage(NamedTuple):
    """What is wrong with a file."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} ({self.problem})"


def verify_files(folder: str | Path, manifest: Manifest, **options: Any) -> None:
    """Raise the first damage; the arguments are those of find_damage.

    Raises:
        ValueError: a file that is missing, truncated, changed, or has other tensors; names it, the
            tensor and its indices.
    """
    damage = find_damage(folder, manifest, **options)
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise ValueError(
            f"verify_files: expected what its manifest has in {folder}, got {damage[0]}{more}; "
            "the checkpoint is damaged, use another one"
        )


def newest_checkpoint(
    run: str | Path, say: Callable[[str], None] = print, steps: Collection[int] | None = None
) -> Path:
    """The newest checkpoint of a run that verifies; each damaged one on the way is named by `say`.

    Args:
        steps: those that count; None: all.
    Raises:
        ValueError: there is none; VersionError: another fastpar reads it.
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
            problems.append(str(error))
            say(f"damaged, trying the one before: {error}")
            continue
        return path
    raise ValueError(
        f"newest_checkpoint: expected a run with a complete checkpoint, got run={run} with "
        + (f"damaged ones only; the newest: {problems[0]}" if problems else "none; start a new run")
    )


def verify_checkpoint(path: str | Path) -> Manifest:
    """Reads every byte of a checkpoint and compares it with the manifest, which is returned.

    Raises:
        ValueError: not a checkpoint, one of another version, or a file that is missing, truncated
            or changed; names the file.
    """
    manifest = read_manifest(path)
    verify_files(path, manifest)
    return manifest


def verify_weights(folder: Path) -> Manifest | None:
    """What load_hf reads of a checkpoint against its manifest; None for other folders.

    Raises:
        ValueError: the checkpoint is damaged, or a file that is not its own would be read.
    """
    if not is_checkpoint(folder) or _is_another(folder / MANIFEST):
        return None
    manifest = read_manifest(folder)
    states = {tensor.file for tensor in manifest.optimizer}
    files = {name: entry for name, entry in manifest.files.items() if name not in states}
    verify_files(folder, replace(manifest, files=files, optimizer=()))
    for name in (WEIGHTS_FILE, INDEX_FILE):
        if name not in files and os.path.lexists(folder / name):
            raise ValueError(
                f"verify_weights: expected the weights of the checkpoint {folder}, got {name} "
                "beside them, which its manifest does not have; delete it"
            )
    return manifest


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, or the name of a folder that should have one."""
    return os.path.lexists(folder / MANIFEST) or is_step_name(folder.resolve().name)


def _is_another(file: Path) -> bool:
    """Whether this is another program's file."""
    try:
        return read_object(file).get("format") != FORMAT
    except ValueError:
        return False


def find_damage(
    folder: str | Path, manifest: Manifest, *, part: int = 0, n_parts: int = 1, tensors: bool = True
) -> list[Damage]:
    """Read the files, or a share of them, and compare them with the manifest.

    Args:
        folder: of the checkpoint.
        manifest: from read_manifest.
        part: which share of the bytes; every size is compared, and the header of each file with a
            tensor of this share.
        n_parts: how many shares there are.
        tensors: False: every file's size and kind, and the content of those without tensors, which
            has to be known before anything is read: afterwards no pipe is waited for.
    Returns:
        All damage, in the manifest's order.
    """
    share = _share(manifest, part, n_parts) if tensors else []
    shared_files = {tensor.file for tensor in share}
    files, damage = list(manifest.files), []
    with TensorReader(Path(folder), manifest) as reader:
        for i, file in enumerate(files):
            inside = i % n_parts == part or file in shared_files
            inside = inside if tensors else not reader.has_tensors(file)
            damage += _try(reader.compare_file if inside else reader.open, file, file)
        broken = {found.file for found in damage}
        sound = [tensor for tensor in share if tensor.file not in broken]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            for found in pool.map(lambda t: _try(reader.compare, t, t.file, describe(t)), sound):
                damage += found
    return sorted(damage, key=lambda found: files.index(found.file))


def _try(act: Callable[[Any], object], what: Any, file: str, where: str = "") -> list[Damage]:
    try:
        act(what)
    except (OSError, ValueError) as error:
        return [Damage(file, f"{reason(error)} in {where}" if where else reason(error))]
    return []


def _share(manifest: Manifest, part: int, n_parts: int) -> list[TensorEntry]:
    """The tensors of one of n shares of nearly the same size, the same on every rank."""
    tensors = manifest.weights + manifest.optimizer
    load = [0] * n_parts
    mine = []
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes):
        least = load.index(min(load))
        load[least] += tensors[i].nbytes
        if least == part:
            mine.append(i)
    return [tensors[i] for i in sorted(mine)]
