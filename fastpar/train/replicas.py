"""A run of replicas that train apart: which samples, folder and checkpoint each of them has.

Every replica is a run of its own ranks, with samples of its own: see [Note: who takes which
samples] in trainer.py. The first writes the run's folder, each other one the same in replica_N
inside of it. A replica that joins the others later goes on from where they are; see
fastpar/outer/meeting.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from fastpar.comm.mesh import Mesh
from fastpar.config.config import TrainConfig
from fastpar.config.settings import parse_seconds
from fastpar.outer.outer import Outer
from fastpar.train.journal import Journal
from fastpar.train.run_lock import hold
from fastpar.train.start import find_checkpoint, newest_of_all

_FOLDER = "fastpar/folder"


class Trainer(Protocol):
    """The trainer, as far as replicas have to do with it."""

    config: TrainConfig
    mesh: Mesh
    optimizer: Any
    outer: Outer | None
    journal: Journal
    folder: Path | None
    step: int
    next_sample: int
    tokens: int
    block_size: int


def leads(mesh: Mesh) -> bool:
    """Whether this rank tells on the terminal how the run goes."""
    return mesh.is_main and mesh.replica == 0


def in_own_folder(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """The settings of this rank's replica; without --out it waits until the first has a folder."""
    if mesh.replica == 0:
        return config
    out, store = config.run.out, mesh.store
    if out is None and store is not None:
        store.wait([_FOLDER], timedelta(seconds=mesh.timeout_s))
        out = store.get(_FOLDER).decode()
    return config.replace({"out": str(Path(out or "") / f"replica_{mesh.replica}")})


def checkpoint_of(config: TrainConfig, mesh: Mesh) -> Path | None:
    """The checkpoint to go on from: its own if it is of the same step as the first replica's.

    Ranks: all. Of a number of replicas that has grown, the new ones begin as copies of the first.
    """
    if mesh.replica == 0 or not config.run.resume:
        return find_checkpoint(config, mesh)
    own = Path(config.run.out or "")
    if mesh.is_main:
        own.mkdir(parents=True, exist_ok=True)
        hold(own)
    first, mine = (newest_of_all(run, mesh) for run in (own.parent, own))
    return mine if mine is not None and (first is None or first.name == mine.name) else first


def make_outer(trainer: Trainer) -> Outer | None:
    """The outer optimizer of a run, None without one."""
    optim = trainer.config.optim
    if optim.outer_every is None:
        return None
    return Outer(
        trainer.optimizer,
        every=optim.outer_every,
        lr=optim.outer_lr,
        momentum=optim.outer_momentum,
        fragments=optim.outer_fragments,
        delay=optim.outer_delay,
        wire=optim.outer_wire,
        silent_s=parse_seconds(trainer.config.faults.replica_timeout, "replica_timeout"),
        tell=lambda: {"progress": _progress(trainer)},
    )


def meet(trainer: Trainer) -> None:
    """Replicas begin together; one that comes later goes on from where the others are.

    Ranks: all of all replicas, when the first one has its folder.
    """
    mesh, outer = trainer.mesh, trainer.outer
    if mesh.store is not None and mesh.replica == 0 and mesh.is_main:
        mesh.store.set(_FOLDER, str(trainer.folder))
    told = None if outer is None else outer.meet()
    if told is not None:
        trainer.step, trainer.next_sample, trainer.tokens = map(int, told["progress"])
        text = f"replica {mesh.replica} goes on from here, as a copy of another"
        trainer.journal.note(trainer.step, text, joined=trainer.step)


def _progress(trainer: Trainer) -> list[int]:
    """In a step: steps, samples and tokens after it."""
    samples = trainer.config.text.batch_size
    tokens = trainer.tokens + samples * trainer.block_size
    return [trainer.step + 1, trainer.next_sample + samples, tokens]
