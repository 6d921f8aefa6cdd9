"""Outer: an optimizer of the differences that many steps of another optimizer have made.

Every `every` steps of the inner optimizer, of M replicas with weights x_m that began at weight:

    mean     = mean of x_m over the replicas
    delta    = weight - mean
    momentum = mu * momentum + delta
    weight   = weight - lr * (delta + mu * momentum)

and each replica goes on from the new weight. lr=1, momentum=0 is local SGD, or post-local averaging
when a run that averaged gradients goes on so; 0.7, 0.9 is DiLoCo; M = 1 is Lookahead, or Snoo with
momentum. The weight is computed as mean + (1 - lr) * delta - lr * mu * momentum, so with lr=1 and
momentum=0 it is the mean, and of one replica, or of equal ones, the inner run to the bit.

[Note: fragments] Parameters are cut into so many flat fragments, of about equal size, whose turns
are spread over `every` steps. With a delay the exchange of one runs in a thread under the next
steps, and what these have changed is added to the new weight.

[Note: state] weight and momentum are entries of the inner optimizer's state, views of the flat
fragments: cut as it is along dp and tp, and saved with it; so are, with a delay, what was sent and
the mean, which a checkpoint waits for, and with a wire what that has lost. Each replica has a
checkpoint of its own; without these entries the loaded weights are those that it begins at.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.wire_formats import FORMATS, OF_GRADIENTS
from fastpar.comm.wires import CompressedSums, Worker
from fastpar.config.combinations import check_outer
from fastpar.optim.average import write_pieces
from fastpar.optim.state import new_step, store_values, values_of
from fastpar.outer.meeting import Meeting
from fastpar.parallel.control import broadcast_text
from fastpar.parallel.engine import Engine, engine_of_parameter

WEIGHT, STEPS, DUE, HELD = "outer_weight", "outer_steps", "outer_due", "outer_members"
SILENT_S = 10.0


class Fragment:
    """Some parameters, and the outer state of this rank's pieces of them.

    Args:
        turn: it is exchanged after steps of which `every` leaves this rest.
        like: [P] of all pieces. delayed, lossy: there is a delay, or a wire.
    Attributes:
        flats: [P] each, by the names of entries of the optimizer's state.
        due: step after which the result of an exchange is used, 0 without one.
        held: the members of the group for which `error` is what it has not sent, 0: none.
    """

    def __init__(
        self, params: list[Tensor], turn: int, like: Tensor, *, delayed: bool, lossy: bool
    ) -> None:
        self.params, self.turn = params, turn
        names = [WEIGHT, "outer_momentum", *["outer_sent", "outer_mean"] * delayed]
        self.flats = {name: torch.zeros_like(like) for name in names + ["outer_error"] * lossy}
        self.due, self.held = new_step(), new_step()
        self.group: Collectives | None = None  # the one that `held` counts
        self.exchange: Future[Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        return self.flats[WEIGHT]

    def views(self, flat: Tensor, pieces: list[Tensor]) -> list[Tensor]:
        """The parts of a flat tensor, as these pieces."""
        parts = flat.split([piece.numel() for piece in pieces])
        return [part.view(piece.shape) for part, piece in zip(parts, pieces)]


class Outer:
    """Makes replicas of one model train apart, and meet every so many steps; see the notes above.

    It listens to the steps of an optimizer, which is used as before; the loop stays as it was:

        model = fastpar.parallelize(model, fastpar.Mesh(replicas=4), zero_stage=2)
        opt = fastpar.AdamW(model.parameters(), lr=6e-4)
        fastpar.Outer(opt, every=50)

    Args:
        optimizer: of the parameters of one parallelized model, or of parameters without an engine:
            one replica.
        every: inner steps between two exchanges of a parameter.
        lr, momentum: of the outer step.
        fragments: exchanged at different steps.
        delay: steps under which an exchange runs before its result is used.
        wire: "bf16", "int8", "int4", "fp8": differences are sent so, with what they lose added to
            the next ones; "fp32": weights are sent, and none of them rounded.
        silent_s: a replica that says nothing for so long is dead, and the others go on.
        tell: what a replica that joins is told beside the state, as JSON can hold it.
    Attributes:
        steps: inner steps so far, of checkpoints too.
        sent_bytes: by this rank, to other replicas.
        waited_s: for other replicas, so far.
        members: replicas that took part in the last exchange.
    Ranks: all of all replicas, at the same steps. A replica may die, or join: see meeting.py.
    Wire: 2 * (M - 1) / M * P values in `every` steps, P being what this rank steps.
    Memory: 8 bytes for each element that this rank steps, 8 more with a delay, 4 with a wire; where
        its piece is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        wire: str = "fp32",
        silent_s: float = SILENT_S,
        tell: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        engines = {id(e): e for e in map(engine_of_parameter, params) if e is not None}
        check_outer("Outer", "", every, lr, momentum, fragments, delay)
        if wire not in OF_GRADIENTS:
            raise ValueError(
                f"Outer: expected wire to be one of {', '.join(OF_GRADIENTS)}, got wire={wire}; "
                "fp32 rounds nothing"
            )
        if len(engines) > 1 or fragments > len(params):
            what = f"{len(engines)} engines" if len(engines) > 1 else f"fragments={fragments}"
            raise ValueError(
                f"Outer: expected one engine, and at most as many fragments as the {len(params)} "
                f"parameters, got {what}; build one optimizer and Outer for each model"
            )
        self.optimizer, self.every, self.lr, self.mu = optimizer, every, lr, momentum
        self.delay, self.wire, self.tell = delay, FORMATS.get(wire), tell
        self.engine: Engine | None = next(iter(engines.values()), None)
        self._count = new_step()  # an entry of the state of each parameter
        self._met = self._started = False
        self.waited_s = 0.0
        self._mesh = mesh = None if self.engine is None else self.engine.mesh
        self._meeting = None if mesh is None else Meeting(mesh, silent_s)
        self._settings = f"{every} {lr} {momentum} {fragments} {delay} {wire}"
        self._fragments = self._cut(params, fragments)
        self._last: Future[Tensor] | None = None  # exchange that runs under the next steps
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._settle)

    @property
    def steps(self) -> int:
        return int(self._count)

    @property
    def sent_bytes(self) -> int:
        return 0 if self._meeting is None else self._meeting.sent

    @property
    def members(self) -> list[int]:
        return [0] if self._meeting is None else self._meeting.members

    def meet(self) -> dict[str, Any] | None:
        """Begin, once a checkpoint is loaded: wait for the other replicas, or join them.

        Returns:
            None, or what `tell` of another replica has said, of which this one is now a copy.
        Ranks: all of all replicas. The first step does it by itself.
        """
        self._met = True
        self._start()
        self._drop_errors_of_others()
        meeting = self._meeting
        numel = [f.weight.numel() for f in self._fragments]
        settings = f"{self._settings} {zlib.crc32(json.dumps(numel).encode())}"
        if meeting is None or not meeting.open(self._number(), settings):
            return None
        told = self._take(meeting.become_copy())
        self._take_turn()
        write_pieces(self.optimizer, {p: self._piece(p).clone() for p in self._params()})
        return told

    def _drop_errors_of_others(self) -> None:
        """What a checkpoint's differences had lost, if other replicas, or a format, go on."""
        mesh, held = self._mesh, {int(f.held) for f in self._fragments} - {0}
        now = 0 if self.wire is None else 1 if mesh is None else mesh.replicas
        if not held - {now}:
            return
        for fragment in self._fragments:
            fragment.held.zero_()
        if mesh is None or (mesh.is_main and mesh.replica == 0):
            warnings.warn(
                f"Outer: what differences of {max(held)} replicas had lost on the wire is dropped: "
                + (f"{now} go on" if now else "weights are sent, which lose nothing"),
                stacklevel=2,
            )

    def close(self) -> None:
        """This replica has come to its end."""
        if self._last is not None:
            wait([self._last])
        if self._meeting is not None:
            self._meeting.leave(ended=True)

    # The steps of the inner optimizer

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if not self._met:
            self.meet()
        self._start()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._count += 1
        self._show()
        for fragment in self._fragments:
            if 0 < int(fragment.due) <= self.steps:
                self._merge(fragment)
        if self._due() is not None:
            self._give_copies()
            self._take_turn()

    def _due(self) -> int | None:
        """The fragment that is exchanged after this step."""
        turn = self.steps % self.every
        return next((i for i, f in enumerate(self._fragments) if f.turn == turn), None)

    def _number(self) -> int:
        """Exchanges up to this step."""
        steps, every = self.steps, self.every
        return sum((steps - f.turn) // every + (f.turn > 0) for f in self._fragments)

    def _take_turn(self) -> None:
        """The exchange of this step."""
        if (due := self._due()) is None:
            return
        fragment, number = self._fragments[due], self._number() - 1
        sent = torch.cat([v.reshape(-1).to(fragment.weight) for v in self._values(fragment)])
        fragment.due.fill_(self.steps + self.delay)
        mean: Future[Tensor] = Future()
        fragment.exchange = mean
        if not self.delay:
            began = time.perf_counter()
            mean.set_result(self._mean(fragment, sent, number))
            self.waited_s += time.perf_counter() - began
            self._merge(fragment)
            return
        given = (self._last, mean, fragment, fragment.flats["outer_sent"].copy_(sent), number)
        # A daemon: a process that ends does not wait for other replicas.
        threading.Thread(target=self._mean_after, args=given, daemon=True).start()
        self._last = mean

    @torch.no_grad()
    def _mean_after(
        self, before: Future[Tensor] | None, mean: Future[Tensor], fragment: Fragment, *of: Any
    ) -> None:
        if before is not None:
            wait([before])
        try:
            mean.set_result(fragment.flats["outer_mean"].copy_(self._mean(fragment, *of)))
        except BaseException as error:
            mean.set_exception(error)

    def _settle(self, *_: Any) -> None:
        """Wait for the exchanges under way: their means are a part of the state."""
        if self._last is not None:
            self._last.result()

    def _mean(self, fragment: Fragment, sent: Tensor, number: int) -> Tensor:
        """Of the replicas' weights."""
        meeting = self._meeting
        if meeting is None or meeting.replicas == 1:
            return sent
        compressed = self.wire is not None and sent.dtype == torch.float32

        def sums(group: Collectives) -> Tensor:
            if group.world_size == 1 or not sent.numel():
                return sent
            x = (sent - fragment.weight if compressed else sent).to("cpu", copy=True)
            if compressed:
                group = self._compressed(group, fragment, x.numel(), number)
            group.all_reduce(x, mean=True)
            if group.error is not None:
                fragment.flats["outer_error"].copy_(group.error)
            return x.to(sent.device) + fragment.weight if compressed else x.to(sent.device)

        with torch.no_grad():
            return meeting.exchange(number, sums)

    def _compressed(
        self, group: Collectives, fragment: Fragment, numel: int, number: int
    ) -> Collectives:
        """Errors belong to slices: those of other members would be added in wrong places."""
        assert self.wire is not None
        error, alike = fragment.flats["outer_error"], int(fragment.held) == group.world_size
        if fragment.group is not group and not (fragment.group is None and alike):
            error.zero_()
        fragment.group = group
        fragment.held.fill_(group.world_size)
        key = (fragment.turn, group.rank)
        error = error.cpu()  # itself on a CPU
        wire = CompressedSums(group, self.wire, Worker(group), error=error, key=key)
        wire.calls = number
        return wire

    def _merge(self, fragment: Fragment) -> None:
        """The outer step of a fragment, whose exchange is over."""
        began = time.perf_counter()
        assert fragment.exchange is not None
        mean, fragment.exchange = fragment.exchange.result(), None
        fragment.due.zero_()
        self.waited_s += time.perf_counter() - began
        weight, momentum = fragment.weight, fragment.flats["outer_momentum"]
        delta = weight - mean
        momentum.mul_(self.mu).add_(delta)
        new = mean.add(delta, alpha=1.0 - self.lr).sub_(momentum, alpha=self.lr * self.mu)
        weight.copy_(new)
        values = self._values(fragment)
        if self.delay:
            change = new.sub_(fragment.flats["outer_sent"])
            new = torch.cat([v.reshape(-1).to(change) for v in values]).add_(change)
        self._write(fragment, values, new)

    # Parameters and their outer state

    def _params(self) -> Iterator[Tensor]:
        for fragment in self._fragments:
            yield from fragment.params

    def _piece(self, p: Tensor) -> Tensor:
        """What this rank steps of a parameter."""
        return p.detach() if self.engine is None else self.engine.shards.piece(p).param.detach()

    def _pieces(self, fragment: Fragment) -> list[Tensor]:
        return [self._piece(p) for p in fragment.params]

    def _values(self, fragment: Fragment) -> list[Tensor]:
        """This rank's weights, of 16-bit ones their masters."""
        state = self.optimizer.state
        return [values_of(self._piece(p), state.get(p, {})) for p in fragment.params]

    def _write(self, fragment: Fragment, values: list[Tensor], new: Tensor) -> None:
        buckets = {} if self.engine is None else self.engine.shards.by_bucket(fragment.params)
        hosts = [bucket for bucket in buckets if bucket.host is not None]
        for bucket in hosts:
            bucket.host.write_weights(bucket)
        for p, old, view in zip(fragment.params, values, fragment.views(new, values)):
            old.copy_(view)
            store_values(self._piece(p), self.optimizer.state.get(p, {}), old)
        for bucket in hosts:
            if bucket.shard is not bucket.stepped:
                bucket.shard.copy_(bucket.stepped)

    def _cut(self, params: list[Tensor], n: int) -> list[Fragment]:
        """Fragments of consecutive parameters, the same on every rank of all replicas."""
        rest = sum(p.numel() for p in params)
        fragments, todo = [], deque(params)
        for i in range(n):
            mine, size, goal = [todo.popleft()], 0, rest / (n - i)
            size = mine[0].numel()
            while todo and len(todo) > n - i - 1 and (i == n - 1 or size + todo[0].numel() <= goal):
                mine.append(todo.popleft())
                size += mine[-1].numel()
            rest -= size
            pieces = [self._piece(p) for p in mine]
            wide = torch.promote_types(mine[0].dtype, torch.float32)
            flat = torch.empty(sum(p.numel() for p in pieces), dtype=wide, device=pieces[0].device)
            turn, lossy = (i + 1) * self.every // n % self.every, self.wire is not None
            how = {"delayed": self.delay > 0, "lossy": lossy and wide == torch.float32}
            fragments.append(Fragment(mine, turn, flat, **how))
        return fragments

    def _start(self) -> None:
        """Before a step: what has no outer state yet begins at its present weights."""
        state = self.optimizer.state
        for fragment in self._fragments:
            values, pieces = self._values(fragment), self._pieces(fragment)
            for i, (p, value) in enumerate(zip(fragment.params, values)):
                entries = state.get(p, {})
                if WEIGHT not in entries and (entries or not self._started):
                    for name, flat in fragment.flats.items():
                        view = fragment.views(flat, pieces)[i]
                        view.copy_(value) if name == WEIGHT else view.zero_()
        self._started = True
        self._show()

    def _show(self) -> None:
        """The outer state is in that of the optimizer; what was loaded there is taken over."""
        for fragment in self._fragments:
            pieces = self._pieces(fragment)
            flats = {name: fragment.views(x, pieces) for name, x in fragment.flats.items()}
            counts = {STEPS: self._count, DUE: fragment.due, HELD: fragment.held}
            for i, p in enumerate(fragment.params):
                entries = self.optimizer.state.get(p)
                if not entries:
                    continue
                for name, view in {**{k: v[i] for k, v in flats.items()}, **counts}.items():
                    if name in entries and entries[name].data_ptr() != view.data_ptr():
                        view.copy_(entries[name])
                    entries[name] = view
            if fragment.due and fragment.exchange is None:  # loaded
                self._go_on(fragment)

    def _go_on(self, fragment: Fragment) -> None:
        """An exchange that was over when a checkpoint was written is merged in its turn."""
        if not self.delay:
            fragment.due.zero_()
            return
        fragment.exchange = Future()
        fragment.exchange.set_result(fragment.flats["outer_mean"])

    # Copies, see meeting.py

    def _give_copies(self) -> None:
        if self._meeting is None or self._meeting.replicas == 1:
            return
        assert self.engine is not None
        asking = self._meeting.asking() if self.engine.mesh.is_main else []
        if self.engine.mesh.world_size > 1:
            asking = json.loads(broadcast_text(self.engine, json.dumps(asking)) or "[]")
        for replica in asking:
            self._meeting.give(replica, self._state(), self._number() - 1)

    def _state(self) -> dict[str, Any]:
        """All that a copy of this rank needs."""
        self._settle()
        hidden = {STEPS, DUE, HELD, *self._fragments[0].flats}
        states = [self.optimizer.state.get(p, {}) for p in self._params()]
        return {
            "steps": self.steps,
            "pieces": [_copy(self._piece(p)) for p in self._params()],
            "outer": [{k: _copy(v) for k, v in f.flats.items()} for f in self._fragments],
            "due": [int(f.due) for f in self._fragments],
            "states": [{k: _copy(v) for k, v in s.items() if k not in hidden} for s in states],
            "told": json.dumps(self.tell()),
        }

    @torch.no_grad()
    def _take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Become a copy; returns what was told."""
        self._count.fill_(state["steps"])
        for p, piece, entries in zip(self._params(), state["pieces"], state["states"]):
            mine = self._piece(p)
            mine.copy_(piece)
            self.optimizer.state[p] = {k: _placed(v, mine.device) for k, v in entries.items()}
        for fragment, flats, due in zip(self._fragments, state["outer"], state["due"]):
            for name, flat in flats.items():
                fragment.flats[name].copy_(flat)
            fragment.due.fill_(due)
        self._show()
        return json.loads(state["told"])


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _placed(value: Any, device: torch.device) -> Any:
    """An entry where its optimizer has it: counts are on the host."""
    return value.to(device) if isinstance(value, Tensor) and value.dim() else value
