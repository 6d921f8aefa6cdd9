"""A run of replicas that train apart: which folder and checkpoint each of them has, when they stop.

Every replica is a run of its own ranks, with samples of its own: see [Note: who takes which
samples] in trainer.py. The first writes the run's folder, each other one the same in replica_N
inside of it.

[Note: the same steps] Between two meetings replicas are in different steps. One that ended alone
would leave the others waiting, and checkpoints of different steps do not fit together. So what
somebody asks of a run in the middle, to stop or to save, is done after the next meeting, by all;
saves that are due by their step are of the same steps anyhow.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from fastpar.checkpoint.verify import newest_checkpoint
from fastpar.comm.mesh import Mesh, gather_objects
from fastpar.files.runs import checkpoint_folder, hold, list_checkpoints, step_of
from fastpar.settings.config import TrainConfig
from fastpar.train.start import find_checkpoint, found_by_main


def leads(mesh: Mesh) -> bool:
    """Whether this rank tells on the terminal how the run goes."""
    return mesh.is_main and mesh.replica == 0


def folder_of(run: str | Path, replica: int) -> Path:
    """Of a replica, in the run's folder, which is that of the first one."""
    return Path(run, f"replica_{replica}") if replica else Path(run)


def checkpoint_of(config: TrainConfig, mesh: Mesh) -> Path | None:
    """The checkpoint to go on from: this replica's of the step that the first one goes on from.

    Ranks: all of all replicas. Of a number of replicas that has grown, the new ones begin as copies
    of the first.
    """
    if mesh.replicas == 1 or not config.run.resume:
        return find_checkpoint(config, mesh)
    run = Path(config.run.out or "")
    own, steps = folder_of(run, mesh.replica), _common_steps(run)
    if mesh.replica == 0:
        mine = find_checkpoint(config, mesh, steps)
    else:
        step = -1
        if mesh.is_main:
            own.mkdir(parents=True, exist_ok=True)
            hold(own)
            with contextlib.suppress(ValueError):  # none, or damaged ones only
                step = step_of(newest_checkpoint(own, lambda line: None, steps))
        mine = found_by_main(own, step, mesh)
    step = -1 if mine is None else step_of(mine)
    first = gather_objects(step, mesh.outer_group)[0]
    return mine if step == first else checkpoint_folder(run, first) if first >= 0 else None


def _common_steps(run: Path) -> set[int] | None:
    """Steps of which all replicas of the last start have a checkpoint; None if there are none.

    One that was killed may not have committed its newest one.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        last = json.loads((run / "config.json").read_text(encoding="utf-8"))["starts"][-1]
        folders = [folder_of(run, i) for i in range(last["replicas"])]
        found = [set(map(step_of, list_checkpoints(folder))) for folder in folders]
        return set.intersection(*found) or None
    return None


def in_own_folder(config: TrainConfig, mesh: Mesh, first: Path | None) -> TrainConfig:
    """The settings of this rank's replica, once the first one has made its folder.

    Ranks: all of all replicas. first: that folder, on rank 0 of the first replica.
    """
    run = gather_objects(str(first), mesh.outer_group)[0]
    return config.in_folder(str(folder_of(run, mesh.replica)))


def granted(mesh: Mesh, every: int | None, step: int, stop: int, asked: bool) -> tuple[int, bool]:
    """A reason to stop after this step, or 0, and whether to save; see [Note: the same steps].

    Args:
        every: steps between two meetings.
        stop, asked: what this replica was asked for since the last one, the same on its ranks.
    Ranks: all of all replicas, after each step.
    """
    if mesh.replicas == 1:
        return stop, asked
    if every is None or step % every:
        return 0, False
    everyone = gather_objects((stop, asked), mesh.outer_group)
    return next((reason for reason, _ in everyone if reason), 0), any(save for _, save in everyone)
