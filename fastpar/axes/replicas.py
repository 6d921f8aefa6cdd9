"""Replicas that train independently and average every few steps: local SGD, DiLoCo.

What it does  M replicas of a run, each on world_size / M ranks with its own batches. Every
              outer_every steps they average their weights (local SGD, DiLoCo).
Bytes         one all-reduce of fp32 weights, 8 (M - 1) / M bytes per parameter of a rank, every
              outer_every steps; less with outer_wire. The outer optimizer keeps 8 bytes per
              parameter: the last common weight, and a momentum.
Use it        over links too slow for gradients. The loss curve differs from that of data
              parallelism: compare it first.
Not with      tp_grid, CUDA graphs; outer_wire not with deterministic.
Source: Douillard et al. 2023 (DiLoCo), arXiv 2311.08105; Lin et al. 2018 (local SGD),
arXiv 1808.07217

fastpar.Outer, the outer optimizer: every `every` steps of the inner optimizer, with M replicas
whose weights x_m all began at weight:

    mean     = mean of x_m over the replicas
    delta    = weight - mean
    momentum = mu * momentum + delta
    weight   = weight - lr * (delta + mu * momentum)

Each replica then continues from the new weight. lr=1, momentum=0 is local SGD (post-local averaging
if the run averaged gradients before); 0.7, 0.9 is DiLoCo; M = 1 is Lookahead. The weight is
computed as mean + (1 - lr) * delta - lr * mu * momentum, so with lr=1 and momentum=0 it is the
mean, and with one replica, or equal ones, the inner run bit for bit.

State: weight and momentum are entries of the inner optimizer's state, views of one flat tensor
each: split along dp and tp and saved with it. Each replica has its own checkpoint; without these
entries the outer state begins at the loaded weights.

Choices: DiLoCo (the default) with `every` from 30 to 500. With few exchanges use less momentum:
after 40 of them a small GPT had 2.513 bits per byte with 0.9, 2.400 with 0.5, local SGD 2.433, and
fp32 without replicas 2.341 (bench/results/README.md). It pays when the link is most of a step: on
100 Mbit/s a step of GPT-2 25.4M took 8977 ms data parallel, 2229 with ZeRO and int8 wires,
525 with replicas and every=50; on 40 Gbit/s 334 and 237. The loss of a short run is higher, so
between the GPUs of one machine train without replicas.

[Note: replicas of a run] Each replica trains on its own ranks with its own samples, see [Note:
sample order] in train/trainer.py. The first replica writes the run folder; replica N writes the
same files to replica_N inside it.

[Note: stopping replicas] Between synchronizations, replicas are at different steps. If one ended
alone, the others would wait for it, and checkpoints of different steps do not belong together.
Therefore all replicas stop, or save on request, after the next synchronization. Saves that are due
by their step number are of the same step anyway.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.axes import Axis, engine_of_parameter
from fastpar.axes.step import Setup
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh, first_difference, gather_objects
from fastpar.comm.transports import TorchCollectives
from fastpar.comm.watchdog import waiting
from fastpar.comm.wires import FORMATS, OF_GRADIENTS, CompressedSums, Worker
from fastpar.files.runs import list_checkpoints, step_of
from fastpar.kernels.adamw import store_values, values_of
from fastpar.settings.model import GPTConfig
from fastpar.settings.rules import check

WEIGHT, MOMENTUM, STEPS = "outer_weight", "outer_momentum", "outer_steps"


class Outer:
    """Train replicas of one model independently and average them every so many steps.

    It hooks into the steps of an optimizer; the training loop does not change:

        model = fastpar.parallelize(model, fastpar.Mesh(replicas=4), zero_stage=2)
        opt = fastpar.AdamW(model.parameters(), lr=6e-4)
        fastpar.Outer(opt, every=50)

    Args:
        optimizer: of the parameters of one parallelized model, or of parameters without an engine
            (one replica).
        every: inner steps between two exchanges.
        lr, momentum: of the outer step.
        wire: format of the exchange. "bf16", "int8": differences are sent, rounded; "fp32":
            weights are sent unrounded.
    Attributes:
        steps: number of inner steps, including those of a loaded checkpoint.
        sent_bytes: by this rank, to other replicas.
        waited_s: seconds spent in exchanges.
    Ranks: all of all replicas, with the same arguments; then they step equally often.
    Wire: 2 * (M - 1) / M * P values per `every` steps, P being the elements that this rank steps.
    Memory: 8 bytes per element that this rank steps, next to its piece.
    Raises:
        ValueError: a number out of range; two engines; replicas with different arguments; in a
            step, a group that was added later.
    """

    every: int

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        wire: str = "fp32",
    ) -> None:
        self._params = _params_of(optimizer)
        engines = {id(e): e for e in map(engine_of_parameter, self._params) if e is not None}
        values = {"outer_every": every, "outer_lr": lr, "outer_momentum": momentum}
        check("Outer", values)
        if wire not in OF_GRADIENTS:
            raise ValueError(
                f"Outer: expected wire to be one of {', '.join(OF_GRADIENTS)}, got wire={wire}; "
                "fp32 does not round"
            )
        if len(engines) > 1:
            raise ValueError(
                f"Outer: expected one engine, got {len(engines)}; build an optimizer and an Outer "
                "for each model"
            )
        self.optimizer, self.every, self.lr, self.mu = optimizer, every, lr, momentum
        self.engine: Any = next(iter(engines.values()), None)
        self.sent_bytes, self.waited_s = 0, 0.0
        self._begun = False
        # Entries of the state of each parameter: the count, and views of flat tensors.
        self._steps = torch.zeros((), dtype=torch.float32, device="cpu")
        pieces = [self._piece(p) for p in self._params]
        wide = torch.promote_types(pieces[0].dtype, torch.float32)
        self._form = FORMATS.get(wire) if wide == torch.float32 else None
        n, device = sum(piece.numel() for piece in pieces), pieces[0].device
        self._flats = {
            name: torch.zeros(n, dtype=wide, device=device) for name in (WEIGHT, MOMENTUM)
        }
        self._group: Collectives | None = None  # the ranks with this rank's number in each replica
        if self.engine is not None and self.engine.mesh.replicas > 1:
            mesh = self.engine.mesh
            settings = f"every={every} lr={lr} momentum={momentum} wire={wire} elements={n}"
            everyone = gather_objects(settings, mesh.outer_group)
            replica, got, expected = first_difference([[each] for each in everyone])
            if replica >= 0:
                raise ValueError(
                    f"Outer: replicas differ: '{got}' on replica {replica}, '{expected}' on "
                    "replica 0; start all with the same settings"
                )
            self._group = TorchCollectives(
                mesh.outer_group, device=mesh.device, in_rank_order=True, in_caller=True
            )
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def steps(self) -> int:
        return int(self._steps)

    # The steps of the inner optimizer

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        """Begin the outer state at the present weights, where there is none."""
        now = _params_of(self.optimizer)
        if [*map(id, now)] != [*map(id, self._params)]:
            raise ValueError(
                f"Outer: its optimizer had {len(self._params)} parameters when Outer was made, and "
                f"now has {len(now)}, which would not all be averaged; add all groups before Outer"
            )
        state, pieces = self.optimizer.state, self._pieces()
        for i, (p, value) in enumerate(zip(self._params, self._values())):
            entries = state.get(p, {})
            if WEIGHT not in entries and (entries or not self._begun):
                for name, flat in self._flats.items():
                    view = _views(flat, pieces)[i]
                    view.copy_(value) if name == WEIGHT else view.zero_()
        self._show()
        self._begun = True

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        self._show()
        if self.steps % self.every == 0:
            self._exchange()

    def _exchange(self) -> None:
        """The outer step."""
        weight, momentum, values = self._flats[WEIGHT], self._flats[MOMENTUM], self._values()
        mean = torch.cat([v.reshape(-1).to(weight) for v in values])
        if self._group is not None and mean.numel():
            mean = self._mean(mean, self._group)
        delta = weight - mean
        momentum.mul_(self.mu).add_(delta)
        new = mean.add(delta, alpha=1.0 - self.lr).sub_(momentum, alpha=self.lr * self.mu)
        weight.copy_(new)
        self._write(values, new)

    def _mean(self, delta: Tensor, group: Collectives) -> Tensor:
        """The mean of the replicas' weights."""
        began = self._now()
        weight, form = self._flats[WEIGHT], self._form
        x = (delta if form is None else delta - weight).to(group.device)
        if form is not None:
            group = CompressedSums(group, form, Worker(group), key=(0, group.rank))
            group.calls = self.steps // self.every - 1
        self.sent_bytes += group.sent_bytes("all_reduce", x.nbytes, x.numel())
        with waiting("the exchange of replicas"):
            group.all_reduce(x, mean=True)
        mean = x.to(delta.device)
        if form is not None:
            mean += weight
        self.waited_s += self._now() - began
        return mean

    def _now(self) -> float:
        """The time after all queued work of this rank."""
        if self.engine is not None and self.engine.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.engine.mesh.device)
        return time.perf_counter()

    # Parameters and their outer state

    def _piece(self, p: Tensor) -> Tensor:
        """This rank's piece of a parameter."""
        return p.detach() if self.engine is None else self.engine.shards.piece(p).param.detach()

    def _pieces(self) -> list[Tensor]:
        return [self._piece(p) for p in self._params]

    def _values(self) -> list[Tensor]:
        """This rank's weights; of 16-bit ones the masters."""
        state = self.optimizer.state
        return [values_of(self._piece(p), state.get(p, {})) for p in self._params]

    def _write(self, values: list[Tensor], new: Tensor) -> None:
        buckets = {} if self.engine is None else self.engine.shards.by_bucket(self._params)
        for bucket in buckets:
            bucket.storage.write_weights(bucket)
        for p, old, view in zip(self._params, values, _views(new, values)):
            old.copy_(view)
            store_values(self._piece(p), self.optimizer.state.get(p, {}), old)
        for bucket in buckets:
            if bucket.shard is not bucket.stepped:
                bucket.shard.copy_(bucket.stepped)

    def _show(self) -> None:
        """Put the outer state into the optimizer's; loaded entries there replace it."""
        pieces = self._pieces()
        flats = {name: _views(flat, pieces) for name, flat in self._flats.items()}
        for i, p in enumerate(self._params):
            entries = self.optimizer.state.get(p)
            if not entries:
                continue
            entry = {name: views[i] for name, views in flats.items()}
            for name, view in {**entry, STEPS: self._steps}.items():
                if name in entries and entries[name].data_ptr() != view.data_ptr():
                    view.copy_(entries[name])
                entries[name] = view


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _views(flat: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of these pieces."""
    parts = flat.split([piece.numel() for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces)]


# The folders of a run, and its end


def folder_of(run: str | Path, replica: int) -> Path:
    """The folder of a replica: replica_N inside the run folder; the run folder for the first."""
    return Path(run, f"replica_{replica}") if replica else Path(run)


def common_steps(run: Path) -> set[int] | None:
    """Steps for which all replicas of the last start have a checkpoint; None: no such step.

    A killed replica may lack the newest one.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        last = json.loads((run / "config.json").read_text(encoding="utf-8"))["starts"][-1]
        folders = [folder_of(run, i) for i in range(last["replicas"])]
        steps_of_each = [set(map(step_of, list_checkpoints(folder))) for folder in folders]
        return set.intersection(*steps_of_each) or None
    return None


def agree_on_requests(
    mesh: Mesh, every: int | None, step: int, stop: int, save: bool
) -> tuple[int, bool]:
    """(reason to stop after this step or 0, whether to save); see [Note: stopping replicas].

    Args:
        every: steps between synchronizations of replicas.
        stop, save: requests to this replica since the last one, the same on its ranks.
    Ranks: all of all replicas, after each step.
    """
    if mesh.replicas == 1:
        return stop, save
    if every is None or step % every:
        return 0, False
    everyone = gather_objects((stop, save), mesh.outer_group)
    return next((reason for reason, _ in everyone if reason), 0), any(save for _, save in everyone)


class Replicas(Axis):
    """Replicas that exchange weights every few steps."""

    name = "replicas"
    order = 10

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        replicas, steps = setup.mesh.replicas, setup.optim.outer_every
        return {"ranks": f"replicas {replicas}, averaged every {steps} steps"} if steps else {}


AXIS = Replicas()
