"""Sends the gradients of buckets, in one order on all ranks, and waits for their means.

[Note: when a bucket is launched]
A bucket is ready when its node, and each parameter without a gradient from it, had its turn in this
backward. Ready buckets are launched in index order, bucket i only after i - 1: autograd comes to
them in another order under torch.compile and for other inputs, and ranks that launch collectives in
different orders would add different buckets. A unit that this rank's forward skipped has no
gradient: its buckets are ready from the beginning. At the end of a backward the rest is launched
and everything is awaited.

If whole gradients are freed, the host waits for the oldest reduction when too many are in flight.
Ranks whose forwards differ may each wait for a gather that the other has not begun: on a CPU at
stage 3 such a wait inside a backward ends after a second, and the rest of the backward waits no
more.

A parameter that no rank used is not stepped; one that only other ranks used has a gradient. Where
p.grad is read after backward, each bucket carries one element per parameter, 1 if this rank has a
gradient; only ranks without one read it back, so the usual step never waits. With sharded gradients
the control exchange carries this (tests/contracts/test_programs.py).

Partial gradients: gradients whose state along tp is Partial are packed and summed along tp after
their reduction along dp: at the end of each backward if p.grad can be read, otherwise once before
the step. A backward that adds to such a sum would make the next sum count it again, so the first
rank keeps it and the others begin with 0. A tied table on the first and the last stage of a
pipeline is summed in the same way: one stage has the head's part of its gradient, the other the
embedding's.

With tp, a norm of p.grad is the norm of one rank's part of the model. torch's clip_grad_norm_ would
scale each rank's gradients by another factor, and replicated parameters would drift apart, so a
step refuses gradients that were changed in place.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import Collectives, Handle, started
from fastpar.comm.recorder import CollectiveLog
from fastpar.engine.bucket import BucketState, Settings
from fastpar.engine.shards import Shards

IN_FLIGHT = 3  # bytes of whole gradients that may be in flight, in bucket sizes
_PATIENCE_S = 1.0  # see [Note: when a bucket is launched]


def refuse_missing(name: str) -> NoReturn:
    """Raise: a graph of a step would have to know who has gradients of a parameter."""
    raise RuntimeError(
        f"StepGraph: expected a gradient of every parameter, got none of '{name}'; use all "
        "parameters in every forward, or train without CUDA graphs"
    )


class StepPhase(enum.Enum):
    """The state of the gradients of a step."""

    EMPTY = "empty"  # there are none
    BACKWARD = "backward"  # a backward runs
    LOCAL = "local"  # some belong to this rank only
    REDUCED = "reduced"  # they are means over the ranks
    STEPPING = "stepping"  # an optimizer that knows no engine uses them
    STEPPED = "stepped"  # an optimizer has used them


STEP_PHASES = {
    StepPhase.EMPTY: frozenset({StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.REDUCED}),
    StepPhase.BACKWARD: frozenset({StepPhase.LOCAL}),
    StepPhase.LOCAL: frozenset({StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.REDUCED}),
    StepPhase.REDUCED: frozenset(
        {StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.STEPPING, StepPhase.STEPPED}
    ),
    StepPhase.STEPPING: frozenset({StepPhase.STEPPED}),
    StepPhase.STEPPED: frozenset(StepPhase) - {StepPhase.LOCAL},
}


class MicroBatches:
    """Counts the micro-batches of a step, and knows which backward passes reduce.

    See engine.py, [Note: micro-batches].
    """

    def __init__(self, accumulate: str, grad_accum_steps: int) -> None:
        self._reduced_at = grad_accum_steps if accumulate == "full" else 1
        self._of_step = grad_accum_steps
        self.begun = 0  # since the last step
        self.explicit = False  # begin() was called: backward passes belong to that micro-batch
        self.part: int | None = None  # the chunk of the model that runs; None: all
        self.last = True  # gradients are reduced after its backward passes
        self.synchronize = True  # False under no_sync()

    @property
    def final(self) -> bool:
        """Whether no further micro-batch is expected in this step."""
        return self.last and (self.explicit or self.begun >= self._of_step)

    @property
    def finished(self) -> int:
        """Number of micro-batches before the present one."""
        return self.begun - self.explicit

    def begin(self, last: bool, part: int | None) -> None:
        """Begin a micro-batch, as the training loop says."""
        self.begun += 1
        self.explicit, self.last, self.part = True, last, part

    def begin_backward(self) -> None:
        """Begin a backward, which is a micro-batch unless begin() was called."""
        if not self.explicit:
            self.begun += 1
            self.last = self.synchronize and self.begun >= self._reduced_at

    def forget(self) -> None:
        """Forget the micro-batches whose gradients were dropped."""
        self.begun = int(self.explicit)

    def end_step(self) -> None:
        """End a step."""
        self.begun, self.explicit, self.part = 0, False, None


class Reducer:
    """The reductions of one backward; see [Note: when a bucket is launched].

    Args:
        log: records every collective.
        on_cpu: whether a wait blocks the host.
    Attributes:
        active: the buckets that this backward writes or sends, in the order of their reductions.
        n_sent: how many of them were sent in this backward.
    """

    def __init__(
        self,
        buckets: Sequence[BucketState],
        settings: Settings,
        log: CollectiveLog,
        *,
        on_cpu: bool,
    ) -> None:
        self._buckets, self._settings, self._log = buckets, settings, log
        self._on_cpu = on_cpu
        self.reset()

    def reset(self) -> None:
        """Forget the last backward; nothing is in flight."""
        self.n_sent = 0
        self._sends = self._in_backward = self._final = False
        self._patient, self.active = True, self._buckets
        self._in_flight: deque[tuple[BucketState, Handle, Tensor]] = deque()
        self._between_copies: list[tuple[BucketState, Handle, Tensor]] = []
        self._unused: list[tuple[BucketState, int]] = []  # without a gradient of this rank

    def check_rests(self, rank: int) -> None:
        """Raise RuntimeError if a backward stopped after it began to send."""
        if self.n_sent:
            raise RuntimeError(
                f"Engine: an earlier backward stopped with {self.n_sent} of {len(self.active)} "
                f"buckets sent on rank {rank}, so the ranks are out of step; restart from a "
                "checkpoint"
            )

    def check_collects(self, bucket: BucketState, positions: Iterable[int]) -> None:
        """Raise RuntimeError for a gradient of a bucket that was sent."""
        for position in positions if bucket in self.active[: self.n_sent] else ():
            raise RuntimeError(
                f"Engine: parameter '{bucket.name(position)}' got another gradient after bucket "
                f"{bucket.spec.index} was sent (it is 'in flight', not 'collecting'); call the "
                "module that owns the parameter in every forward, or in none, and use its "
                "parameters in the model's forward or after it"
            )

    def begin_backward(self, buckets: Sequence[BucketState], *, last: bool, final: bool) -> None:
        """Begin a backward into these buckets; last: it reduces; final: no other in this step."""
        self._sends, self._final = last and self._buckets[0].groups.reduce is not None, final
        self._in_backward, self.active = True, buckets

    def launch_ready(self) -> None:
        """Launch the ready buckets in order; see [Note: when a bucket is launched]."""
        while self._sends and self.n_sent < len(self.active) and self.active[self.n_sent].ready:
            self._launch()

    def finish(self) -> None:
        """Launch the rest and wait for everything: afterwards gradients are means."""
        self._in_backward = False
        if self._buckets[0].groups.reduce is None:
            self._finish_alone()
        else:
            while self.n_sent < len(self.active):
                self._launch()
            while self._in_flight:
                self._finish_oldest()
            for bucket, handle, target in self._between_copies:
                self._log.wait(handle, "waiting for the replicas' mean of", bucket.spec.index)
                self._take_reduced(bucket, target)
        if not self._settings.stage.shards:
            self._show_gradients()
        self.reset()

    def _launch(self) -> None:
        """Start the next bucket's reduction; `grad` must not change until it is done."""
        bucket = self.active[self.n_sent]
        index, group = bucket.spec.index, bucket.groups.reduce
        assert group is not None
        scatters = self._settings.stage.shards
        missing = bucket.fill_missing(flags=not scatters)
        if missing and self._log.timer.off:
            refuse_missing(bucket.name(missing[0]))
        self._unused.extend((bucket, position) for position in missing)
        bucket.add_local()
        target, grad = bucket.target(), bucket.grad
        assert grad is not None
        wire = grad if grad.dtype == bucket.wire_dtype else grad.to(bucket.wire_dtype)
        self._log.note(0, index)
        with self._log.naming("starting", index):
            if scatters:
                handle = group.reduce_scatter(target, wire, mean=True, async_op=True, tag=index)
            else:
                handle = group.all_reduce(wire, mean=True, async_op=True, tag=index)
                target = wire
        assert handle is not None
        self._log.add(handle, wire, group, both_ways=not scatters)
        self._in_flight.append((bucket, handle, target))
        self.n_sent += 1
        # Offload sends soon; means over replicas are launched in one order on all ranks.
        while bucket.storage.steps_later and self._in_flight and bucket.groups.copies is None:
            if not self._in_flight[0][1].is_completed():
                break
            self._finish_oldest()
        if self._settings.stage.frees_gradients:
            self._limit_in_flight()

    def _limit_in_flight(self) -> None:
        """Wait for reductions until few whole gradients are in flight; two are always allowed."""
        settings = self._settings
        hurried = settings.stage.frees_parameters and self._on_cpu and self._in_backward
        most = IN_FLIGHT * settings.bucket_mb * 2**20
        while self._patient and len(self._in_flight) > 2:
            if sum(bucket.grad_bytes for bucket, _, _ in self._in_flight) <= most:
                return
            try:
                self._finish_oldest(_PATIENCE_S if hurried else None)
            except TimeoutError:
                self._patient = False

    def _finish_oldest(self, timeout_s: float | None = None) -> None:
        bucket, handle, target = self._in_flight[0]
        self._log.wait(handle, "waiting for", bucket.spec.index, timeout_s)
        self._in_flight.popleft()
        copies = bucket.groups.copies
        if copies is None:
            self._take_reduced(bucket, target)
            return
        bucket.free_grad()
        index = bucket.spec.index
        with self._log.naming("starting the replicas' mean of", index):
            again = started(copies.all_reduce(target, mean=True, async_op=True, tag=index))
        self._log.add(again, target, copies, both_ways=True)
        self._between_copies.append((bucket, again, target))

    def _take_reduced(self, bucket: BucketState, target: Tensor) -> None:
        shared = self._settings.stage.shards
        if bucket.grad is not None and not shared and target is not bucket.grad:
            target = bucket.grad.copy_(target)  # another dtype on the wire
        bucket.storage.bring_back(bucket)
        bucket.add_reduced(target)
        if self._final:
            bucket.storage.send(bucket)

    def _finish_alone(self) -> None:
        """Without other ranks: only sum the tree over micro-batches."""
        for bucket in self.active if self._settings.deterministic else ():
            bucket.fill_missing(flags=False)
            bucket.add_local()
            bucket.add_reduced(bucket.target())

    def _show_gradients(self) -> None:
        """Set p.grad of parameters that other ranks used, or whose sum was kept for the tree."""
        for bucket in self._buckets if self._settings.deterministic else ():
            for position in sorted(bucket.seen):
                bucket.adopt(position)
        if self._unused:  # the host waits for the device, once
            flags = [bucket.used[position].float() for bucket, position in self._unused]
            for (bucket, position), used in zip(self._unused, torch.stack(flags).tolist()):
                if used > 0:
                    bucket.adopt(position)


class PartialGradients:
    """Sums the partial gradients of one model along tp, and of a table on two stages."""

    def __init__(self, shards: Shards) -> None:
        self._shards, declared, stages = shards, shards.declared, shards.stages
        self._sums: list[tuple[Collectives, list[nn.Parameter]]] = []
        if declared is not None and declared.tp is not None:
            for axis, group in declared.tp.groups.items():
                axes_of = {p: declared.placement(p).reduce_axes for p in shards.params}
                self._sums.append((group, [p for p in shards.params if axis in axes_of[p]]))
        if stages is not None and stages.pair is not None:
            self._sums.append((stages.pair, list(stages.tied)))
        self._summed = False

    def sum(self) -> None:
        """Sum them unless that was done. Ranks: all of tp."""
        if self._summed:
            return
        self._summed = True
        for group, params in self._sums:
            self._add_up(group, params)

    def _add_up(self, group: Collectives, params: list[nn.Parameter]) -> None:
        shards, last = self._shards, self._shards.buckets[-1].spec.index
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            bucket, start, stop = shards.place(p)
            grad, dtype = shards.piece(p).grad, bucket.grad_dtype
            if grad is None:
                grad = torch.zeros(stop - start, dtype=dtype, device=bucket.device)
            by_dtype.setdefault(dtype, []).append(grad.view(-1))
        for grads in by_dtype.values():
            packed = torch.cat(grads) if grads[1:] else grads[0]
            shards.log.all_reduce(group, packed, "summing partial gradients after", last)
            for grad, total in zip(grads, packed.split([grad.numel() for grad in grads])):
                if grads[1:]:
                    grad.copy_(total)

    def split(self) -> None:
        """Prepare for a backward that adds to them; see "Partial gradients" above."""
        for group, params in self._sums if self._summed else ():
            for p in params if group.rank else ():
                if (grad := self._shards.piece(p).grad) is not None:
                    grad.zero_()
        self.forget()

    def forget(self) -> None:
        """Forget the sum: gradients were dropped or change."""
        self._summed = False

    def check(self) -> None:
        """Refuse gradients that were changed in place; see "Partial gradients" above."""
        for bucket in self._shards.buckets if self._sums else ():
            if bucket.written:
                raise RuntimeError(
                    f"Engine: p.grad of '{bucket.name(0)}' was changed in place with "
                    f"tp={self._shards.mesh.tp_size}, where a rank sees only its part of the norm; "
                    "clip with fastpar.AdamW(max_grad_norm=...)"
                )
