"""Measures this machine: the costs of compute and communication while all ranks are busy.

    rates = measure(workload, setups)          about 30 s; stored for later runs

Ranks on one machine share its cores, caches and memory, so all of them measure at once, with the
threads that training would give them. Three things are measured: operations within a model (Chain),
exchanges of the sizes that the setups send, and steps of models so small that nearly all of a step
is Python, hooks and control: their cost beyond their operations is the overhead of a step, a
micro-batch and a layer (machine.py, [Note: overhead]).

Variants are interleaved, and the median counts; if ranks must share cores it is the mean, because
then most operations are interrupted.

[Note: a busy machine] shows in the spread of the samples, which the rates record. They are stored
unless it is above MOST_SPREAD.

[Note: in their places] Run alone and repeatedly, an operation finds its inputs, weights and memory
in the cache. In a model it finds the previous op's output there, but not its weights, if they are
larger than the cache. So a GPT's operations run one after the other, through their public functions
and autograd, as often as the model has layers, and between any two is a stamp: an identity that
records the time in forward and backward. Exchanges between tp ranks are left out: if the next
operation needs another size, a cheap torch op outside the stamps provides it.
"""

from __future__ import annotations

import datetime
import functools
import gc
import itertools
import math
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import Rank, Ranks, available_cores, threads_per_rank
from fastpar.comm.transports import make_collectives
from fastpar.data.batches import sample_batch, to_device
from fastpar.doctor.trial import stopwatch, synchronize
from fastpar.engine.engine import engine_of
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import (
    Rng,
    attention_qkvpacked,
    bias_gelu,
    embedding,
    layer_norm,
    linear,
    linear_cross_entropy,
    make_key,
    residual_layer_norm,
)
from fastpar.kernels.orthogonalize import orthogonalize
from fastpar.models.gpt import GPT
from fastpar.models.set_up import set_up
from fastpar.optim.adamw import AdamW
from fastpar.predict.machine import (
    MeasuredRates,
    OpKey,
    Overhead,
    Rate,
    comm_key,
    gpu_name,
    machine_name,
    overhead_key,
)
from fastpar.predict.time import comm_ops_of, ops_of
from fastpar.settings.model import (
    GPTConfig,
    Part,
    block_parts,
    first_parts,
    last_parts,
    shapes_of,
    widths,
)

SEED = 1


class ShortRun:
    """The model of a workload, set up on the ranks, and steps of it.

    Args:
        mesh: with setup.world_size ranks, setup.tp and setup.pp.
    Ranks: all.
    """

    def __init__(self, workload: Workload, setup: Setup, mesh: Mesh) -> None:
        self.workload, self.setup, self.mesh = workload, setup, mesh
        config, dtype = setup.config(workload), DTYPES[setup.dtype]
        if setup.transport == "gloo":
            config = config.replace({"transport": "torch"})
        self.model = GPT(workload.shape, seed=SEED).to(mesh.device, dtype)
        many = setup.grad_accum_steps
        self.optimizer = set_up(self.model, mesh, config, dtype=dtype, grad_accum_steps=many)
        self.engine = engine_of(self.model)
        n_tokens = (max(4 * workload.batch_size, 8) + 1) * workload.seq_len + 1
        vocabulary = workload.shape.vocab_size
        self._tokens = np.random.default_rng(SEED).integers(vocabulary, size=n_tokens)
        self._tokens = self._tokens.astype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self._next = 0

    def step(self) -> None:
        """Runs one optimizer step, like Trainer.train_step()."""
        workload, setup, mesh = self.workload, self.setup, self.mesh
        self.model.train()
        many, piped = setup.grad_accum_steps, self.engine.shards.stages is not None
        loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        batches = []
        for j in range(many):
            first = self._next + (j * mesh.dp_size + mesh.dp_rank) * setup.micro_batch_size
            x, y = sample_batch(
                self._tokens,
                seed=SEED,
                first_sample=first,
                n_samples=setup.micro_batch_size,
                block_size=workload.seq_len,
                device=mesh.device,
            )
            key = to_device(make_key(SEED, first), mesh.device)
            if piped:  # its stages take all micro-batches at once
                batches.append((x, y, key))
                continue
            part = self.model(x, y, rng_key=key) / many
            part.backward()
            loss += part.detach()
        if piped:
            xs, ys, keys = zip(*batches)
            rows = torch.cat(xs), torch.cat(ys)
            loss += pipeline_step(self.model, *rows, micro_batches=many, rng_keys=keys)
        self.engine.contribute(loss.reshape(1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._next += workload.batch_size
        assert self.optimizer.grad_norm is not None
        if mesh.device.type == "cpu":
            self.optimizer.grad_norm.item()  # the trainer reads every step's numbers

    def seconds(self, count: int) -> list[float]:
        """Seconds of `count` steps on this rank; on a GPU their mean, repeated."""
        synchronize(self.mesh.device.type)
        marks = [time.perf_counter()]
        for _ in range(count):
            self.step()
            marks.append(time.perf_counter())
        if self.mesh.device.type != "cuda":
            return [end - start for start, end in pairwise(marks)]
        torch.cuda.synchronize()
        return [(time.perf_counter() - marks[0]) / count] * count


def slowest(ranks: list[list[float]]) -> list[float]:
    """The seconds of each step on its slowest rank."""
    return [max(each) for each in zip(*ranks)]


Key = tuple[str, tuple[int, ...], str]  # name, shape and direction of an Op
EMPTY = ("empty", ())  # two stamps with nothing between them: the cost of a stamp
COPY = ("copy", ())
FIRST_NORM = "first layer_norm"  # without a residual: the model has one


class Clock:
    """Records the times of stamps; on a GPU events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []  # (what begins or None, time)

    def mark(self, begins: Any) -> None:
        """`begins` starts here, and what began at the last mark ends."""
        at: Any
        if self._on_gpu:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        else:
            at = time.perf_counter()
        self._marks.append((begins, at))

    def intervals(self) -> list[tuple[Any, float]]:
        """(what, seconds) of all named intervals, in order; clears them."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found = []
        for (what, start), (_, end) in zip(self._marks, self._marks[1:]):
            if what is not None:
                seconds = start.elapsed_time(end) * 1e-3 if self._on_gpu else end - start
                found.append((what, seconds))
        self._marks = []
        return found


class _Stamp(torch.autograd.Function):
    """Identity of tensors that records the time: what begins here in forward, and in backward."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, forward: Any, backward: Any, *tensors: Tensor) -> Any:
        ctx.clock, ctx.begins = clock, backward
        clock.mark(forward)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.mark(ctx.begins)
        return None, None, None, *grads


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The elements of x, cut or repeated, as a tensor of this shape."""
    numel, flat = math.prod(shape), x.reshape(-1)
    if flat.numel() < numel:
        flat = torch.cat([flat] * -(-numel // flat.numel()))
    return flat[:numel].view(*shape)


class Chain:
    """One rank's operations of a micro-batch: a GPT without exchanges between ranks.

    Args:
        seed: of weights and tokens.
    """

    def __init__(
        self, workload: Workload, setup: Setup, device: torch.device, seed: int = 0
    ) -> None:
        shape, tp, block = workload.shape, setup.tp, block_parts(workload.shape)
        self.rows, self.time = setup.micro_batch_size, workload.seq_len  # B, T
        self.heads, self.letters = shape.heads_of_rank(tp), widths(shape, tp)
        tokens = self.rows * self.time
        self.on = {"tokens": tokens, "own": -(-tokens // tp) if setup.sequence_parallel else tokens}
        self.dropout, self.eps = shape.dropout, shape.layer_norm_eps
        self.clock, self.device, self.dtype = Clock(device), device, DTYPES[setup.dtype]
        torch.manual_seed(seed)
        self._key = make_key(seed, 0).to(device)
        self.parameters: list[Tensor] = []
        self.parts = [
            (part, [self._weight(*sizes) for sizes in shapes_of([part], shape, tp)])
            for part in (*first_parts(shape), *block * shape.n_layer, *last_parts(shape))
        ]
        # Products whose bias the next op in the block adds.
        self.without_bias = {
            a.name for a, b in itertools.pairwise(block) if a.op == "matmul" and b.cheap
        }
        self._hook_gradients(DTYPES[setup.grad_dtype])
        size = 2, self.rows, self.time
        self.idx, self.targets = torch.randint(self.letters["V"], size, device=device)

    def _weight(self, *shape: int) -> Tensor:
        weight = torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(0.02)
        self.parameters.append(weight.to(self.dtype).requires_grad_())
        return self.parameters[-1]

    def _hook_gradients(self, dtype: torch.dtype) -> None:
        """Copies every gradient into one buffer as soon as it exists, as the engine does."""
        self.n_elements = sum(p.numel() for p in self.parameters)
        self.buffer = torch.empty(self.n_elements, dtype=dtype, device=self.device)
        self.adding = False  # add to the buffer, as in a later micro-batch
        item, wide = self.dtype.itemsize, dtype.itemsize
        self.copied_bytes = self.n_elements * (item + wide)
        self.added_bytes = self.n_elements * (item + 2 * wide)
        at, me = 0, weakref.ref(self)  # torch keeps hooks where the garbage collector cannot look

        def take(p: Tensor, view: Tensor) -> None:
            chain = me()
            if chain is None:
                return
            assert p.grad is not None
            chain.clock.mark(COPY)
            view.add_(p.grad) if chain.adding else view.copy_(p.grad)
            p.grad = None
            chain.clock.mark(None)

        for p in self.parameters:
            view = self.buffer[at : at + p.numel()].view_as(p)
            at += p.numel()
            p.register_post_accumulate_grad_hook(functools.partial(take, view=view))

    def _at(self, begins: Any, ends: Any, *tensors: Tensor) -> Any:
        """Stamp: `begins` begins here in forward; `ends` in backward."""
        found = _Stamp.apply(self.clock, begins, ends, *tensors)
        return found if len(tensors) > 1 else found[0]

    def _timed(self, name: str, shape: tuple[int, ...], function: Any, *inputs: Tensor) -> Any:
        """function(*inputs) between two stamps."""
        key = (name, shape)
        # What follows the embedding's backward belongs to it: the head's gradient is added.
        inputs = self._at(key, key if name == "embedding" else None, *inputs)
        out = function(*inputs) if isinstance(inputs, tuple) else function(inputs)
        return self._at(None, key, *out) if isinstance(out, tuple) else self._at(None, key, out)

    def _drop(self, site: int) -> dict[str, Any]:
        return {"dropout_p": self.dropout, "rng": Rng(self._key, site)} if self.dropout else {}

    def _call(
        self, part: Part, weights: list[Tensor], bias: Tensor | None, site: int
    ) -> tuple[tuple[int, ...], Callable[..., Any]]:
        """The sizes of a part's Op, and its function; bias: of the product before it."""
        rows, into, out = self.on[part.on], self.letters[part.into], self.letters[part.out]
        drop = self._drop(site)
        if part.op == "layer_norm":
            options = {"x_bias": bias, "eps": self.eps, **drop}
            return (rows, out), lambda y, x: residual_layer_norm(y, x, *weights, **options)
        if part.op == "bias_gelu":
            return (rows, out), lambda y: bias_gelu(y, bias)
        if part.op == "loss":
            wte, targets = self.parameters[0], self.targets.reshape(-1)
            return (rows, into, out), lambda y: linear_cross_entropy(y, wte, targets)
        if part.op == "matmul":
            return (rows, into, out), lambda y: linear(y, *weights)
        heads = self.rows, self.time, 3, self.heads, -1
        shape = self.rows, self.heads, self.time, out // self.heads
        return shape, lambda y: attention_qkvpacked(y.view(heads), causal=True, **drop).flatten(2)

    def step(self) -> Tensor:
        """Forward and backward of one micro-batch, stamped."""
        wte, wpe, *_ = self.parameters
        drop, size = self._drop(0), (self.on["tokens"], self.letters["C"])
        x = self._timed("embedding", size, lambda w: embedding(self.idx, w, wpe, **drop), wte)
        y: Any = None
        before: Tensor | None = None
        for site, (part, weights) in enumerate(self.parts[2:]):
            bias = None
            if part.name in self.without_bias:
                weights, bias = weights[:1], weights[1]
            shape, call = self._call(part, weights, before, site)
            before = bias
            if part.op != "layer_norm":
                y = fitted(y, (self.on[part.on], self.letters[part.into]))
                y = self._timed(part.op, shape, call, y)
            elif y is None:
                x = fitted(x, shape)
                y = self._timed(
                    FIRST_NORM, shape, lambda v, w=weights: layer_norm(v, w[0], w[1], self.eps), x
                )
            else:
                y, x = self._timed(part.op, shape, call, fitted(y, shape), x)
                x = self._at(None, EMPTY, self._at(EMPTY, None, x))
        found = [(k, "forward", s) for k, s in self.clock.intervals()]
        y.backward()
        self.clock.mark(None)
        found += [(k, "backward", s) for k, s in self.clock.intervals()]
        self.found = found
        return y.detach()

    def times(self) -> dict[Key, list[float]]:
        """Seconds of every operation of the last step, without the stamps' own cost."""
        empty = {
            way: statistics.median([s for k, w, s in self.found if k == EMPTY and w == way])
            for way in ("forward", "backward")
        }
        out: dict[Key, list[float]] = defaultdict(list)
        copied = 0.0
        for key, way, seconds in self.found:
            if key == COPY:
                copied += seconds
            elif key != EMPTY and key[0] != FIRST_NORM:
                samples = out[key[0], key[1], way]
                samples.append(max(seconds - empty[way], 1e-9))
                if key[0] == "embedding":
                    samples[:] = [sum(samples)]
        moved = self.added_bytes if self.adding else self.copied_bytes
        out["copy", (moved,), "backward"] = [copied]
        return out


SECONDS, QUICK_SECONDS = 30.0, 6.0
LEAST_ROUNDS = 3
KEPT_ELEMENTS = 60_000_000  # of chains that stay between their turns, on a rank
MOST_SENT = 64 << 20  # bytes; larger exchanges take proportionally longer
LONG_S = 1e-4  # operations whose spread shows other programs, not the clock and the interpreter
WHOLE = ("chain", (), "forward")  # key of the total among the operations' times
TINY = 8  # sequence length of the models whose steps are overhead

Cell = tuple[Workload, Setup]
Samples = dict[Any, list[float]]


def measure(
    workload: Workload,
    setups: Sequence[Setup],
    *,
    threads: int | None = None,
    quick: bool = False,
    seconds: float | None = None,
) -> MeasuredRates:
    """Rates of this machine for several setups of a workload with the same number of ranks.

    They are stored in the user's cache, next to earlier results for other shapes.

    Args:
        threads: CPU threads per rank; None: as `fastpar train` would choose.
        quick: fewer rounds.
        seconds: approximate duration, without the start of the ranks.
    Raises:
        ValueError: no setups, or of different ranks, devices or formats.
        RuntimeError: a rank died.
    """
    ranks = setups[0].world_size if setups else 0
    kinds = {(s.world_size, s.device_type, s.dtype) for s in setups}
    if len(kinds) != 1:
        raise ValueError(
            "measure: expected setups of the same ranks, device and format, got "
            f"setups={sorted(kinds)}; measure them in separate calls"
        )
    threads = threads_per_rank(threads, ranks)
    seconds = seconds or (QUICK_SECONDS if quick else SECONDS)
    with Ranks(ranks, threads=threads, device=setups[0].device_type) as pool:
        rates = measure_cells(pool, [(workload, s) for s in setups], seconds=seconds)
    keep_rates(rates)
    return rates


def keep_rates(rates: MeasuredRates) -> None:
    """Writes the rates into the user's cache; earlier results for other shapes stay.

    Rates with a large spread are not written; their text says so (MeasuredRates.steady).
    """
    if not rates.steady:
        return
    try:
        kept = MeasuredRates.load(rates.path)
    except ValueError:  # missing, or of another machine
        kept = MeasuredRates(rates.about)
    kept.update(rates)
    kept.save()


def measure_cells(pool: Ranks, cells: Sequence[Cell], *, seconds: float) -> MeasuredRates:
    """Rates for these workloads and setups, measured by the ranks of a pool."""
    tiny = {overhead_key(setup): _tiny_cells(setup) for _, setup in cells}
    chains = _distinct_chains([*cells, *(cell for four in tiny.values() for cell in four[:2])])
    shared = pool.device == "cpu" and pool.nproc * pool.threads > available_cores()
    samples = _time_chains(pool, chains, 0.6 * seconds, shared=shared)
    ops = _rates_of_ops(samples, chains, statistics.fmean if shared else statistics.median)
    sends = _time_collectives(pool, cells, 0.15 * seconds)
    long = [times for times in samples.values() if statistics.median(times) > LONG_S]
    spread = statistics.median(_spread(times) for times in long or samples.values())
    about = {
        "machine": machine_name(),
        "gpu": gpu_name() if pool.device == "cuda" else "",
        "device_type": pool.device,
        "dtype": cells[0][1].dtype,
        "dropout": cells[0][0].shape.dropout > 0,
        "ranks": pool.nproc,
        "threads": pool.threads,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "spread": spread,
    }
    rates = MeasuredRates(about, ops, sends)
    rates.overheads = _overheads(pool, tiny, rates, 0.25 * seconds)
    return rates


def _spread(samples: Sequence[float]) -> float:
    """(p80 - p20) / median."""
    if len(samples) < 2:
        return 0.0
    p20, *_, p80 = statistics.quantiles(samples, n=5)
    return (p80 - p20) / max(statistics.median(samples), 1e-12)


# Operations


def _distinct_chains(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups cells with the same operations: one chain serves a group."""
    found: dict[Any, list[Cell]] = {}
    for workload, s in cells:
        split, adds = (s.tp, s.sequence_parallel and s.tp > 1), s.grad_accum_steps > 1
        key = (workload.shape, s.micro_batch_size, split, adds, synchronizes_often(s))
        found.setdefault(key, []).append((workload, s))
    return list(found.values())


def _time_chains(
    pool: Ranks, chains: Sequence[list[Cell]], seconds: float, *, shared: bool
) -> Samples:
    """Mean seconds of each operation in each step of its chain, on the rank that others wait for.

    shared: ranks take turns on the cores. A waiting rank then leaves its core to others, so that
    pauses of single operations do not add up.
    """
    found: Samples = defaultdict(list)
    stop, rounds = time.monotonic() + seconds, 0
    while rounds < LEAST_ROUNDS or time.monotonic() < stop:
        for number, same in enumerate(chains):
            workload, setup = same[0]
            shards = sorted({s.n_shards for _, s in same})
            adds = any(s.grad_accum_steps > 1 for _, s in same)
            ranks = pool.call(_run_chain, number, workload, setup, shards, adds)
            often = synchronizes_often(setup) and not shared
            for key, values in waited_for(ranks, each_operation=often).items():
                found[key].extend(values)
        rounds += 1
    pool.call(_forget)
    return found


def synchronizes_often(setup: Setup) -> bool:
    """Whether ranks wait for each other in every layer: along tp, and for gathered weights."""
    return setup.tp > 1 or (setup.zero_stage == 3 and setup.n_shards > 1)


def waited_for(ranks: Sequence[Samples], *, each_operation: bool) -> Samples:
    """The times that a step consists of: ranks end a chain together, so the slowest rank's.

    each_operation: ranks synchronize often in it, so for each operation the slowest rank's.
    """
    if each_operation:
        return {key: slowest([times[key] for times in ranks]) for key in ranks[0]}
    return max(ranks, key=lambda times: sum(times[WHOLE]))


def _run_chain(
    rank: Rank, number: int, workload: Workload, setup: Setup, shards: list[int], adds: bool
) -> Samples:
    """One turn of a chain on a rank: a warm-up step, and two measured steps."""
    chains = rank.kept.setdefault("chains", {})
    device = rank.mesh().device
    if number not in chains:
        if sum(c.n_elements for c, _ in chains.values()) > KEPT_ELEMENTS:
            chains.clear()
            gc.collect()
        chain = Chain(workload, setup, device)
        chains[number] = chain, [_Update(chain, n) for n in shards]
    chain, updates = chains[number]
    found: Samples = defaultdict(list)
    for count in range(3):
        chain.adding = adds and count == 2
        rank.barrier()
        whole = _seconds(chain.step, device)
        times = chain.times()
        times[WHOLE] = [whole]
        for update in updates:
            key = "optimizer", (update.elements,), "forward"
            times[key] = [_seconds(update.optimizer.step, device)]
        for op in ops_of(workload, setup):
            if op.name == "orthogonalize":
                call = functools.partial(
                    orthogonalize, torch.randn(op.shape, device=device, dtype=torch.float32)
                )
                times[op.name, op.shape, "forward"] = [_seconds(call, device)]
        if count:
            for key, values in times.items():
                found[key].append(statistics.fmean(values))
    return found


def _forget(rank: Rank) -> None:
    rank.kept.clear()
    gc.collect()


class _Update:
    """AdamW, with the norm, on the parameters of a chain that one of n_shards ranks would have."""

    def __init__(self, chain: Chain, n_shards: int) -> None:
        self.params: list[torch.nn.Parameter] = []
        self.elements = -(-chain.n_elements // n_shards)
        left, at = self.elements, 0
        for p in chain.parameters:
            n = min(p.numel(), left)
            part = torch.nn.Parameter(p.detach().reshape(-1)[:n] if n < p.numel() else p.detach())
            part.grad = chain.buffer[at : at + n].view(part.shape).to(part.dtype)
            self.params.append(part)
            at, left = at + p.numel(), left - n
            if not left:
                break
        self.optimizer = AdamW(self.params, lr=1e-9, weight_decay=0.0, max_grad_norm=1.0)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, including the device's work."""
    return stopwatch(call, device.type)[0] / 1e3


def _rates_of_ops(
    samples: Samples, chains: Sequence[list[Cell]], average: Callable[[Any], float]
) -> dict[OpKey, Rate]:
    """Measured rates, by the names and sizes of ops_of()."""
    found: dict[OpKey, Rate] = {}
    for op in (op for same in chains for workload, setup in same for op in ops_of(workload, setup)):
        key = op.name, op.shape, op.direction
        if samples.get(key):
            found[key] = Rate(average(samples[key]), op.flops, op.bytes)
    return found


# Exchanges


def _time_collectives(
    pool: Ranks, cells: Sequence[Cell], seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """(bytes, seconds) by kind and ranks."""
    requested: dict[str, tuple[CommOp, Setup, set[float]]] = {}
    for workload, setup in cells:
        for send in comm_ops_of(workload, setup):
            if send.axis != "control" and send.ranks > 1:
                _, _, sizes = requested.setdefault(comm_key(send), (send, setup, set()))
                sizes.add(min(send.bytes, MOST_SENT))
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, (send, setup, sizes) in requested.items():
        for size in spaced(min(sizes), max(sizes)):
            share = seconds / len(requested) / 4
            ranks = pool.call(_run_collective, send, size, setup.transport, share)
            # Ranks leave the barrier one after the other: the last one waits for no other.
            times = [min(each) for each in zip(*ranks)][1:]
            found[key].append((float(size), statistics.median(times)))
    pool.call(_forget)
    return found


def spaced(low: float, high: float, count: int = 4) -> list[int]:
    """Sizes from a quarter of low to high, evenly spaced on a log scale, in multiples of 1 KB."""
    low = max(1024.0, low / 4)
    ratio = (max(high, low) / low) ** (1 / (count - 1))
    return sorted({int(-(-low * ratio**i // 1024) * 1024) for i in range(count)})


def _run_collective(
    rank: Rank, send: CommOp, size: int, transport: str, seconds: float
) -> list[float]:
    """Seconds of repeated exchanges on a rank; all groups of that many ranks run at once.

    A message goes from one of two ranks to the other and back. Ranks beyond the last group:
    infinite.
    """
    groups = rank.kept.setdefault("groups", {})
    ranks = 2 if send.kind == "send" else send.ranks
    device = rank.mesh().device
    if ranks not in groups:
        made = [
            dist.new_group(list(range(first, first + ranks)))
            for first in range(0, rank.world_size - ranks + 1, ranks)
        ]
        transport = "torch" if transport == "gloo" else "auto"
        mine = [group for i, group in enumerate(made) if i == rank.rank // ranks]
        groups[ranks] = [make_collectives(g, device=device, transport=transport) for g in mine]
    exchange = _exchange(groups[ranks][0], send, size) if groups[ranks] else (lambda: None)
    passes = 2 if send.kind == "send" else 1

    def once() -> float:
        found = _seconds(exchange, device) / passes
        return found if groups[ranks] else math.inf

    rank.barrier()
    guess = rank.of_first(max(once(), once()))  # all do as many
    count = max(5, min(50, int(seconds / max(guess, 1e-6))))
    found = []
    for _ in range(count):
        rank.barrier()
        found.append(once())
    return found


def _exchange(group: Collectives, send: CommOp, size: int) -> Callable[[], None]:
    """A function that runs one exchange of `size` bytes on this rank."""
    numel = -(-size // 4 // group.world_size) * group.world_size
    whole = group.empty(numel, torch.float32).zero_()
    part = numel // group.world_size
    mine = whole[group.rank * part : (group.rank + 1) * part]
    later = send.axis not in ("tp", "cp")  # see comm_key()
    arguments = {
        "reduce_scatter": (mine, whole),
        "all_gather": (whole, mine),
        "broadcast": (whole, 0),
        "all_to_all": (torch.empty_like(whole), whole),
    }

    def exchange() -> None:
        if send.kind == "send":
            first, second = (group.send, group.recv)[:: 1 if group.rank == 0 else -1]
            first(whole, 1 - group.rank)
            second(whole, 1 - group.rank)
            return
        call = getattr(group, send.kind)
        handle = call(*arguments.get(send.kind, (whole,)), async_op=later)
        if handle is not None:
            handle.wait()

    return exchange


# Overhead


def _tiny_cells(setup: Setup) -> list[Cell]:
    """(1 or 3 layers) * (1 or 3 micro-batches) of tiny models, set up in the same way.

    Without stages, for which there are too few layers: a layer's overhead is that of its rank;
    without experts, whose overhead is not in the rates.
    """
    setup = setup.change(pp=1, pp_split=None, schedule="1f1b", chunks=None, ep=1)
    heads = 2 * setup.tp
    cells = []
    for layers, micro in itertools.product((1, 3), (1, 3)):
        shape = GPTConfig(layers, heads, 8 * heads, TINY, 128, dropout=0.0)
        tiny = setup.change(micro_batch_size=setup.tp, grad_accum_steps=micro, bucket_mb=None)
        cells.append((Workload(shape, tiny.dp * tiny.micro_batch_size * micro), tiny))
    return cells


def _overheads(
    pool: Ranks, tiny: dict[str, list[Cell]], rates: MeasuredRates, seconds: float
) -> dict[str, Overhead]:
    """For each kind of setup, the cost of its tiny steps beyond their operations."""
    found = {}
    for key, cells in tiny.items():
        steps = pool.call(_run_tiny, cells, seconds / max(1, len(tiny)))
        beyond = []
        for number, cell in enumerate(cells):
            took = statistics.median(slowest([times[number] for times in steps]))
            beyond.append(took - known_s(*cell, rates))
        found[key] = solve(beyond)
    rates.scaled.clear()
    return found


def known_s(workload: Workload, setup: Setup, rates: MeasuredRates) -> float:
    """Seconds of the operations and exchanges of a step, one after the other."""
    ops = sum(op.count * rates.op_s(op) for op in ops_of(workload, setup))
    return ops + sum(send.count * rates.comm_s(send) for send in comm_ops_of(workload, setup))


def solve(beyond: Sequence[float]) -> Overhead:
    """The four constants from steps of (1, 3) layers * (1, 3) micro-batches, micro-batches first.

    step + micro * (micro_batch + layers * layer) + layers * layer_step, none below 0.
    """
    one_one, one_three, three_one, three_three = beyond
    layer = max(0.0, (three_three - three_one - one_three + one_one) / 4)
    layer_step = max(0.0, (three_one - one_one) / 2 - layer)
    micro_batch = max(0.0, (one_three - one_one) / 2 - layer)
    step = max(0.0, one_one - micro_batch - layer - layer_step)
    return Overhead(step, micro_batch, layer, layer_step)


def _run_tiny(rank: Rank, cells: list[Cell], seconds: float) -> list[list[float]]:
    """Seconds of steps of every cell on a rank, interleaved."""
    runs = [ShortRun(workload, setup, rank.mesh(setup.tp, setup.cp)) for workload, setup in cells]
    found: list[list[float]] = [[] for _ in cells]
    for run in runs:
        run.seconds(3)
    rank.barrier()
    start = time.perf_counter()
    for run in runs:
        run.seconds(1)
    once = rank.of_first(time.perf_counter() - start)
    for _ in range(max(8, min(60, int(seconds / max(once, 1e-6))))):
        for number, run in enumerate(runs):
            found[number] += run.seconds(1)
    del runs
    gc.collect()
    return found
