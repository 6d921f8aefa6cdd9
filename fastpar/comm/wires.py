"""Compressed collectives: another transport's, with numbers encoded in fewer bytes.

    reduce_scatter   each slice for a peer is encoded once; all-to-all; decoded, and summed in fp32
                     by the fixed tree (collectives.py, [Note: order of a sum])
    all_reduce       the same with slices of whole blocks; then the means are encoded and gathered
    all_gather       encoded once to nearest; the owner uses the same rounded values as its peers

A rank's own slice is not sent and enters the sum unrounded. No sum is encoded twice on its way, as
a ring would. A non-finite value makes its block nan on every rank.

Threads: on a CPU the caller encodes x, and one thread for all buckets decodes. The second half of
an all_reduce, which the thread sends, uses its own group, so that ranks need not agree on how fast
their threads are; without such a group the thread does all of it. On a GPU both halves are enqueued
on their own stream.

Messages: n elements are an fp32 scale for each block, then their codes, padded to 16 bytes; or n
bf16 numbers. Blocks begin with the message, and slices of a bucket and its parameters begin at
multiples of a block (ALIGN, sharding/layout.py): no two parameters share a scale.

Rounding: codes of gradients are rounded stochastically, without bias (kernels/quantize.py), by
random bits of (step, bucket, rank) and the element's index; bf16 and weights to nearest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.collectives import (
    Begun,
    Call,
    Collectives,
    FutureHandle,
    Handle,
    Rest,
    StreamHandle,
    TaskThread,
    run_task,
    started,
    sum_rows_in_tree,
    through,
)
from fastpar.kernels import dequantize_blockwise, quantize_blockwise

_PAD = 16


@dataclass(frozen=True)
class WireFormat:
    """The encoding of a number; block: elements that share a scale, 0: no scales."""

    name: str
    dtype: torch.dtype
    block: int = 0

    def nbytes(self, n: int) -> int:
        """Bytes of a message of n elements."""
        scales = -(-n // self.block) * 4 if self.block else 0
        return -(-(scales + n * self.dtype.itemsize) // _PAD) * _PAD

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of long messages."""
        return self.dtype.itemsize + (4 / self.block if self.block else 0)

    def encode(
        self,
        x: Tensor,
        message: Tensor,
        *,
        seed: int | None = None,
        index: int = 0,
    ) -> None:
        """Write x[n] into message[nbytes].

        Args:
            seed: None rounds to nearest; index: of x's first element in its bucket.
        """
        if not self.block:
            message[: self.dtype.itemsize * x.numel()].view(self.dtype).copy_(x)
            return
        codes, scales = quantize_blockwise(x, block=self.block, seed=seed, first_index=index)
        start = scales.nbytes
        message[:start].view(torch.float32).copy_(scales)
        message[start : start + codes.numel()].copy_(codes.view(torch.uint8))

    def decode(self, message: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The n elements of a message, as a peer reads them."""
        if not self.block:
            return message[: self.dtype.itemsize * n].view(self.dtype).to(dtype)
        start = -(-n // self.block) * 4
        scales = message[:start].view(torch.float32)
        codes = message[start : start + n].view(self.dtype)
        return dequantize_blockwise(codes, scales, out_dtype=dtype, block=self.block)


FORMATS = {
    f.name: f
    for f in (
        WireFormat("bf16", torch.bfloat16),
        WireFormat("int8", torch.int8, 256),
    )
}
OF_GRADIENTS = ("fp32", *FORMATS)


class Wire(Collectives):
    """A transport whose messages are encoded.

    Args:
        inner: sends them.
    """

    def __init__(self, inner: Collectives, name: str) -> None:
        self.inner = inner
        self.rank, self.world_size, self.device = inner.rank, inner.world_size, inner.device
        self.transport, self.in_caller = inner.transport, inner.in_caller
        self.why = f"{inner.why}; {name} on the wire"

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.empty(numel, dtype)

    def _run(
        self, op: str, largest: Tensor, async_op: bool, call: Callable[[], Handle]
    ) -> Handle | None:
        """Without observers, which observe the inner operations: they are what is sent."""
        handle = call()
        if async_op:
            return handle
        handle.wait()
        return None

    @property
    def exact(self) -> Collectives:
        return self.inner

    def _unsupported(self, *args: Any) -> Any:
        raise AssertionError("only compressed operations are defined; use `exact` for others")

    _rest: Any = _unsupported
    _all_reduce = _reduce_scatter = _all_gather = _broadcast = _all_to_all = _send = _recv = _rest


class Worker:
    """Finishes the operations of one direction: in a thread, on a stream, or in the caller."""

    def __init__(self, inner: Collectives) -> None:
        on_gpu = inner.device.type == "cuda"
        self._stream = torch.cuda.Stream(inner.device, priority=-1) if on_gpu else None
        self._thread = None if on_gpu or inner.in_caller else TaskThread()

    def submit(self, op: str, call: Call, *of: Tensor, later: bool = False) -> Handle:
        """Begin an operation; later: the thread begins it, too."""
        if self._stream is not None:
            return StreamHandle(self._stream, lambda: through(call()), of, op)
        future: Future = Future()
        task = (future, functools.partial(_without_graph, call), (), of)
        if self._thread is None:
            run_task(task)
        else:
            self._thread.put(task if later else Begun(task))
        return FutureHandle(op, future, self)


def _without_graph(call: Call) -> Rest:
    """Run every part of an operation without autograd, in any thread."""
    with torch.inference_mode(False), torch.no_grad():
        rest = call()
    return None if rest is None else functools.partial(_without_graph, rest)


_Sent = tuple[Handle, Tensor]  # (of the exchange, memory for the received messages)


def _others(items: Iterable[Any], me: int) -> list[Any]:
    return [item for i, item in enumerate(items) if i != me]


def _send_rows(group: Collectives, rows: Tensor, tag: int) -> _Sent:
    """Send row r of [W - 1, ...] to the r-th other rank; receives equally many rows."""
    received = torch.empty_like(rows)
    sizes = [rows.numel() // max(1, len(rows)) * (r != group.rank) for r in range(group.world_size)]
    args = received.view(-1), rows.view(-1), sizes, sizes
    return started(group.all_to_all(*args, async_op=True, tag=tag)), received


def _gather_rows(group: Collectives, row: Tensor, tag: int) -> _Sent:
    """Gather every rank's row into [W, n]."""
    whole = row.new_empty(group.world_size, row.numel())
    return started(group.all_gather(whole.view(-1), row, async_op=True, tag=tag)), whole


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=torch.float32)


class CompressedSums(Wire):
    """Sums of gradients.

    Args:
        worker: finishes the operations of all buckets of a direction.
        again: like inner, for the second half of an all_reduce.
        exact: number of elements at the end of x that an all_reduce sends unrounded.
        key: of the random bits: bucket and rank.
    Attributes:
        calls: number of operations, the step of the random bits.
    Wire: per rank (W - 1) / W * bytes of the messages for reduce_scatter, twice for all_reduce.
    """

    def __init__(
        self,
        inner: Collectives,
        form: WireFormat,
        worker: Worker,
        *,
        again: Collectives | None = None,
        exact: int = 0,
        key: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(inner, form.name)
        self.form, self._worker = form, worker
        self._again, self._exact = again or inner, exact
        self._key, self.calls = key, 0

    def sent_bytes(self, op: str, n_bytes: int, numel: int) -> int:
        if op == "reduce_scatter":
            return (self.world_size - 1) * self.form.nbytes(numel // self.world_size)
        size = self._slice(numel)
        return (self.world_size - 1) * (self.form.nbytes(size) + self._gathered_bytes(size))

    def _seed(self, part: int) -> int:
        """Seed of the random bits of a call: part 0 for x, 1 for the means."""
        bucket, rank = self._key
        return (((self.calls * 2 + part) * 0x100000 + bucket) * 0x100000 + rank) % 2**64

    def _slice(self, numel: int) -> int:
        """Elements of a slice of an all_reduce: whole blocks, at least one, as a row of messages
        without bytes is not aligned.
        """
        block = self.form.block or 1
        return max(1, -(-(numel - self._exact) // (self.world_size * block))) * block

    def _gathered_bytes(self, size: int) -> int:
        return self.form.nbytes(size) + 4 * self._exact

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        call = functools.partial(self._scatter, out.view(-1), x.view(-1), mean, tag)
        return self._worker.submit("reduce_scatter", call, out, x)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        call = functools.partial(self._reduce, x.view(-1), mean, tag)
        return self._worker.submit("all_reduce", call, x, later=self._again is self.inner)

    def _scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Rest:
        self.calls += 1
        n = out.numel()
        places = [slice(r * n, (r + 1) * n) for r in range(self.world_size)]
        under_way = self._exchange(x, places, self.form.nbytes(n), tag)
        return lambda: self._add_up(under_way, x[places[self.rank]], out, mean)

    def _exchange(self, x: Tensor, places: list[slice], n_bytes: int, tag: int) -> _Sent:
        """Encode slices of x and send them to their ranks; receives [W - 1, n_bytes]."""
        rows = torch.empty(self.world_size - 1, n_bytes, dtype=torch.uint8, device=x.device)
        for row, place in zip(rows, _others(places, self.rank)):
            self.form.encode(x[place], row, seed=self._seed(0), index=place.start)
        return _send_rows(self.inner, rows, tag)

    def _add_up(self, under_way: _Sent, local: Tensor, out: Tensor, mean: bool) -> None:
        """out = the sum of this rank's slice over all ranks."""
        handle, received = under_way
        handle.wait()
        parts = _floats(local, self.world_size, len(local))
        parts[self.rank].copy_(local)
        for row, part in zip(received, _others(parts, self.rank)):
            part.copy_(self.form.decode(row, len(part)))
        sum_rows_in_tree(parts, out, mean)

    def _reduce(self, x: Tensor, mean: bool, tag: int) -> Rest:
        self.calls += 1
        n, size, second = x.numel() - self._exact, self._slice(x.numel()), self._seed(1)
        starts = [min(r * size, n) for r in range(self.world_size + 1)]
        places = [slice(*ends) for ends in itertools.pairwise(starts)]
        under_way = self._exchange(x, places, self.form.nbytes(size), tag)

        def gather() -> Rest:
            place = places[self.rank]
            total = _floats(x, place.stop - place.start)
            self._add_up(under_way, x[place], total, mean)
            codes = torch.zeros(self._gathered_bytes(size), dtype=torch.uint8, device=x.device)
            self.form.encode(total, codes, seed=second, index=place.start)
            codes[self.form.nbytes(size) :].view(torch.float32).copy_(x[n:])
            return functools.partial(spread, *_gather_rows(self._again, codes, tag))

        def spread(handle: Handle, whole: Tensor) -> None:
            handle.wait()
            for row, place in zip(whole, places):
                x[place] = self.form.decode(row, place.stop - place.start)
            tails = whole[:, self.form.nbytes(size) :].contiguous().view(torch.float32)
            if self._exact:
                sum_rows_in_tree(tails, x[n:], mean)

        return gather


class CompressedGathers(Wire):
    """Gathers of weights.

    Wire: per rank (W - 1) * bytes of its message.
    """

    rounds = True

    def __init__(self, inner: Collectives, worker: Worker, form: WireFormat) -> None:
        super().__init__(inner, form.name)
        self.form, self._worker = form, worker

    def sent_bytes(self, op: str, n_bytes: int, numel: int) -> int:
        return (self.world_size - 1) * self.form.nbytes(numel // self.world_size)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        call = functools.partial(self._gather, out.view(-1), x.view(-1), tag)
        return self._worker.submit("all_gather", call, out, x)

    def _gather(self, out: Tensor, x: Tensor, tag: int) -> Rest:
        codes = torch.empty(self.form.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        self.form.encode(x, codes)
        handle, whole = _gather_rows(self.inner, codes, tag)

        def rest() -> None:
            handle.wait()
            for row, part in zip(whole, out.view(self.world_size, -1)):
                part.copy_(self.form.decode(row, x.numel(), x.dtype))

        return rest


class Encoders:
    """The wire formats of the buckets of one model.

    Args:
        gradients: one of OF_GRADIENTS; weights: of FORMATS, None: unchanged.
        rank: for the random bits: among all ranks with the same parameters.
    """

    def __init__(self, gradients: str, weights: str | None, rank: int) -> None:
        self._gradients = FORMATS.get(gradients)
        self._weights = FORMATS.get(weights or "")
        self._rank = rank
        self._workers: dict[int, Worker] = {}

    def _worker(self, inner: Collectives) -> Worker:
        return self._workers.setdefault(id(inner), Worker(inner))

    def sums(
        self,
        inner: Collectives | None,
        index: int,
        *,
        again: Collectives | None = None,
        exact: int = 0,
    ) -> Collectives | None:
        """Collectives of the gradients of bucket `index`; other arguments as in CompressedSums."""
        if inner is None or inner.world_size == 1 or self._gradients is None:
            return inner
        worker, key = self._worker(inner), (index, self._rank)
        return CompressedSums(inner, self._gradients, worker, again=again, exact=exact, key=key)

    def gathers(self, inner: Collectives | None, dtype: torch.dtype) -> Collectives | None:
        """Collectives of the weights of a bucket of that dtype."""
        form = self._weights
        if inner is None or inner.world_size == 1 or form is None or form.dtype == dtype:
            return inner
        return CompressedGathers(inner, self._worker(inner), form)
