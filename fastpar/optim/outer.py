"""Outer: an optimizer of the differences that many steps of another optimizer have made.

Every `every` steps of the inner optimizer, of M replicas with weights x_m that began at weight:

    mean     = mean of x_m over the replicas
    delta    = weight - mean
    momentum = mu * momentum + delta
    weight   = weight - lr * (delta + mu * momentum)

and each replica goes on from the new weight. lr=1, momentum=0 is local SGD, or post-local averaging
when a run that averaged gradients goes on so; 0.7, 0.9 is DiLoCo; M = 1 is Lookahead. The weight is
computed as mean + (1 - lr) * delta - lr * mu * momentum, so with lr=1 and momentum=0 it is the
mean, and of one replica, or of equal ones, the inner run to the bit.

[Note: state] weight and momentum are entries of the inner optimizer's state, views of one flat
tensor each: cut as it is along dp and tp, and saved with it; so is, with a wire, what that has
lost. Each replica has a checkpoint of its own; without these entries the loaded weights are those
that it begins at.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import first_difference, gather_objects
from fastpar.comm.transports import TorchCollectives
from fastpar.comm.watchdog import waiting
from fastpar.comm.wires import FORMATS, OF_GRADIENTS, CompressedSums, Worker
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.optim.state import new_step, store_values, values_of
from fastpar.settings.rules import check

WEIGHT, MOMENTUM, ERROR = "outer_weight", "outer_momentum", "outer_error"
STEPS, MEMBERS = "outer_steps", "outer_members"


class Outer:
    """Makes replicas of one model train apart, and meet every so many steps; see the notes above.

    It listens to the steps of an optimizer, which is used as before; the loop stays as it was:

        model = fastpar.parallelize(model, fastpar.Mesh(replicas=4), zero_stage=2)
        opt = fastpar.AdamW(model.parameters(), lr=6e-4)
        fastpar.Outer(opt, every=50)

    Args:
        optimizer: of the parameters of one parallelized model, or of parameters without an engine:
            one replica.
        every: inner steps between two exchanges.
        lr, momentum: of the outer step.
        wire: "bf16", "int8", "int4": differences are sent so, with what they lose added to
            the next ones; "fp32": weights are sent, and none of them rounded.
    Attributes:
        steps: inner steps so far, of checkpoints too.
        sent_bytes: by this rank, to other replicas.
        waited_s: for other replicas, so far.
    Ranks: all of all replicas, with the same arguments; then they step equally often.
    Wire: 2 * (M - 1) / M * P values in `every` steps, P being what this rank steps.
    Memory: 8 bytes for each element that this rank steps, 4 more with a wire, where its piece is.
    Raises:
        ValueError: a number out of range; two engines; replicas with other arguments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        wire: str = "fp32",
    ) -> None:
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        engines = {id(e): e for e in map(engine_of_parameter, self._params) if e is not None}
        given = {"outer_every": every, "outer_lr": lr, "outer_momentum": momentum}
        check("Outer", given)
        if wire not in OF_GRADIENTS:
            raise ValueError(
                f"Outer: expected wire to be one of {', '.join(OF_GRADIENTS)}, got wire={wire}; "
                "fp32 rounds nothing"
            )
        if len(engines) > 1:
            raise ValueError(
                f"Outer: expected one engine, got {len(engines)} engines; build one optimizer and "
                "Outer for each model"
            )
        self.optimizer, self.every, self.lr, self.mu = optimizer, every, lr, momentum
        self.engine: Engine | None = next(iter(engines.values()), None)
        self.sent_bytes, self.waited_s = 0, 0.0
        self._begun = False
        # Entries of the state of each parameter: counts, and views of flat tensors.
        self._steps, self._members = new_step(), new_step()
        pieces = [self._piece(p) for p in self._params]
        wide = torch.promote_types(pieces[0].dtype, torch.float32)
        self._form = FORMATS.get(wire) if wide == torch.float32 else None
        names = [WEIGHT, MOMENTUM, *[ERROR] * (self._form is not None)]
        n, device = sum(piece.numel() for piece in pieces), pieces[0].device
        self._flats = {name: torch.zeros(n, dtype=wide, device=device) for name in names}
        self._group: Collectives | None = None  # this rank and those like it in other replicas
        if self.engine is not None and self.engine.mesh.replicas > 1:
            mesh = self.engine.mesh
            settings = f"every={every} lr={lr} momentum={momentum} wire={wire} elements={n}"
            told = gather_objects(settings, mesh.outer_group)
            replica, found, expected = first_difference([[each] for each in told])
            if replica >= 0:
                raise ValueError(
                    f"Outer: expected the same on every replica, got '{found}' on replica "
                    f"{replica} where replica 0 has '{expected}'; start all with the same settings"
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
        """What has no outer state yet begins at its present weights."""
        state, pieces = self.optimizer.state, self._pieces()
        for i, (p, value) in enumerate(zip(self._params, self._values())):
            entries = state.get(p, {})
            if WEIGHT not in entries and (entries or not self._begun):
                for name, flat in self._flats.items():
                    view = _views(flat, pieces)[i]
                    view.copy_(value) if name == WEIGHT else view.zero_()
        self._show()
        if not self._begun:
            self._begun = True
            self._drop_errors_of_others()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        self._show()
        if self.steps % self.every == 0:
            self._meet()

    def _drop_errors_of_others(self) -> None:
        """What a checkpoint's differences had lost, if other replicas, or a format, go on."""
        held, now = int(self._members), 0
        if self._form is not None:
            now = 1 if self._group is None else self._group.world_size
        if held == now:
            return
        self._members.zero_()
        if ERROR in self._flats:
            self._flats[ERROR].zero_()
        mesh = None if self.engine is None else self.engine.mesh
        if held and (mesh is None or (mesh.is_main and mesh.replica == 0)):
            warnings.warn(
                f"Outer: what differences of {held} replicas had lost on the wire is dropped: "
                + (f"{now} go on" if now else "weights are sent, which lose nothing"),
                stacklevel=2,
            )

    def _meet(self) -> None:
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

    def _mean(self, mine: Tensor, group: Collectives) -> Tensor:
        """Of the replicas' weights."""
        began = self._now()
        weight, form = self._flats[WEIGHT], self._form
        x = (mine if form is None else mine - weight).to(group.device)
        if form is not None:
            error = self._flats[ERROR].to(group.device)  # itself, but for state on the host
            key = (0, group.rank)
            group = CompressedSums(group, form, Worker(group), error=error, key=key)
            group.calls = self.steps // self.every - 1
        self.sent_bytes += group.sent_bytes("all_reduce", x.nbytes, x.numel())
        with waiting("a meeting of replicas"):
            group.all_reduce(x, mean=True)
        mean = x.to(mine.device)
        if form is not None:
            self._flats[ERROR].copy_(error)
            self._members.fill_(group.world_size)
            mean += weight
        self.waited_s += self._now() - began
        return mean

    def _now(self) -> float:
        """When all that this rank computes is there."""
        if self.engine is not None and self.engine.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.engine.mesh.device)
        return time.perf_counter()

    # Parameters and their outer state

    def _piece(self, p: Tensor) -> Tensor:
        """What this rank steps of a parameter."""
        return p.detach() if self.engine is None else self.engine.shards.piece(p).param.detach()

    def _pieces(self) -> list[Tensor]:
        return [self._piece(p) for p in self._params]

    def _values(self) -> list[Tensor]:
        """This rank's weights, of 16-bit ones their masters."""
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
        """The outer state is in that of the optimizer; what was loaded there is taken over."""
        pieces = self._pieces()
        flats = {name: _views(flat, pieces) for name, flat in self._flats.items()}
        for i, p in enumerate(self._params):
            entries = self.optimizer.state.get(p)
            if not entries:
                continue
            mine = {name: views[i] for name, views in flats.items()}
            for name, view in {**mine, STEPS: self._steps, MEMBERS: self._members}.items():
                if name in entries and entries[name].data_ptr() != view.data_ptr():
                    view.copy_(entries[name])
                entries[name] = view


def _views(flat: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, as these pieces."""
    parts = flat.split([piece.numel() for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces)]
