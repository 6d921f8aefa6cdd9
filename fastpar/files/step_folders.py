"""The folders of a run's checkpoints: run/checkpoints/step_NNNNNN, and the link run/latest."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

LATEST = "latest"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: linux/fcntl.h, linux/fs.h
_STEP = re.compile(r"step_\d{6,}")


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run) / "checkpoints" / f"step_{step:06d}"


def is_step_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint."""
    return _STEP.fullmatch(name) is not None


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done at a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """Committed checkpoints of a run by step, oldest first; not verified."""
    found = (Path(run) / "checkpoints").glob("step_*")
    return sorted((p for p in found if is_step_name(p.name) and p.is_dir()), key=step_of)


def put_folder(folder: Path, final: Path) -> Path | None:
    """Give a folder its final name; where one had it before, that one's new name.

    The two names are exchanged at once where the system can (Linux, not over NFS).
    """
    if not final.exists():
        os.replace(folder, final)
        return None
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(folder.absolute()), os.fsencode(final.absolute())
    if exchange is not None and exchange(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0:
        return folder
    old = folder.with_suffix(".old.tmp")
    os.replace(final, old)
    os.replace(folder, final)
    return old


def point_latest(run: Path, checkpoint: Path) -> None:
    """run/latest -> the checkpoint. Only people and transformers need it: see newest_checkpoint."""
    temporary = run / f".{LATEST}.tmp"
    with contextlib.suppress(OSError):  # a file system without links
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.relative_to(run), target_is_directory=True)
        os.replace(temporary, run / LATEST)
