"""The folders of a run's checkpoints: run/checkpoints/step_NNNNNN, and the link run/latest."""

from __future__ import annotations

import re
from pathlib import Path

LATEST = "latest"
_STEP = re.compile(r"step_\d{6,}")


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run) / "checkpoints" / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done at a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """Committed checkpoints of a run by step, oldest first; not verified."""
    found = (Path(run) / "checkpoints").glob("step_*")
    return sorted((p for p in found if _STEP.fullmatch(p.name) and p.is_dir()), key=step_of)
