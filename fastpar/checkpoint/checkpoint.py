"""Checkpoints: folders per step that transformers loads, and the newest one that is whole.

saver.py writes them, restore.py reads them, manifest.py describes their content.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastpar.checkpoint.manifest import Manifest, VersionError, read_manifest
from fastpar.checkpoint.saver import Saver
from fastpar.checkpoint.verify import verify_files
from fastpar.files.runs import list_checkpoints, step_of


def save_checkpoint(
    run: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Any,
    tokenizer: Any = None,
    state: dict[str, Any] | None = None,
    keep_last: int = 0,
) -> Path:
    """Writes run/checkpoints/step_NNNNNN, then points the link run/latest at it.

    Args:
        run: folder of the run, on a file system that all ranks share; the rest as in Saver.
    Returns:
        The checkpoint's folder. One of the same step that was there before is replaced.
    Raises:
        OSError: on every rank, the disk is full or not writable; older checkpoints are as before.
    Ranks: all of the model's.
    Wire: at stage 3 and with tp the weights.
    """
    saver = Saver(
        run,
        model=model,
        optimizer=optimizer,
        tokenizer=tokenizer,
        keep_last=keep_last,
        asynchronous=False,
    )
    saver.save(step, state or {})
    result = saver.last
    assert result is not None
    if result.path is None:
        raise OSError("; ".join(result.errors))
    return result.path


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


def rng_state() -> dict[str, str]:
    """State of torch's generators on this process, as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(bytes(v.tolist())).decode() for k, v in states.items()}


def set_rng_state(state: dict[str, str]) -> None:
    """Back to what rng_state() returned."""
    for key, text in state.items():
        value = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if key == "cpu":
            torch.set_rng_state(value)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(value)
