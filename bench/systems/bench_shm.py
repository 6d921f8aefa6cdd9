"""Collectives of CPU ranks on one host: shared memory beside gloo, in turn, a process a rank.

GB/s count what all ranks together have to read and write at least: an all-reduce of n bytes by W
ranks 2 W n, reduce-scatter and all-gather W n + n. "gloo" is torch.distributed's own collective,
"gloo all-to-all" the way that fastpar takes over gloo: shards exchanged and summed in rank order.
"fastpar" works on tensors in shared memory, "fastpar copied" on any others.
Every rank has one thread; a sample is the slowest rank's.
"""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import Bench
from bench.records import Row
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import gather_objects
from fastpar.comm.ranks import reason
from fastpar.comm.transports import make_collectives
from fastpar.doctor.trial import Call
from fastpar.testing import run_ranks

TIME_LIMIT_S = {"cpu": 300, "cuda": 30}
OPS = ("all_reduce", "reduce_scatter", "all_gather")
VARIANTS = ("gloo", "gloo all-to-all", "fastpar", "fastpar copied")
SMALL = 10_007  # elements of a rank's part in the gate


def call_of(op: str, by: Collectives | None, whole: Tensor, part: Tensor) -> Call:
    """The collective on these tensors; by None: torch.distributed's."""
    names = ("reduce_scatter_tensor", "all_gather_into_tensor")
    if by is not None:
        names = ("reduce_scatter", "all_gather")
    elif hasattr(dist, "reduce_scatter_single"):  # torch >= 2.13
        names = ("reduce_scatter_single", "all_gather_single")
    reduce, scatter, gather = (getattr(by or dist, name) for name in ("all_reduce", *names))
    return {
        "all_reduce": lambda: reduce(whole),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_gather": lambda: gather(whole, part),
    }[op]


def values_of(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


class Subject:
    """One variant's tensors and call; fill() gives them this rank's values back."""

    def __init__(self, op: str, variant: str, by: Collectives | None, numel: int):
        self.op, size = op, numel // dist.get_world_size()
        shared = variant == "fastpar" and by is not None
        make = partial(by.empty, dtype=torch.float32) if shared else torch.empty  # type: ignore[union-attr]
        self.whole, self.part = make(numel), make(size)
        self.call = call_of(op, by, self.whole, self.part)

    def fill(self, values: Tensor) -> None:
        self.whole.copy_(values)
        self.part.copy_(values[: self.part.numel()])

    def judge(self, exact: bool) -> None:
        """The result against sums in rank order; exact: bit by bit."""
        size = self.part.numel()
        given = [values_of(rank, self.whole.numel()) for rank in range(dist.get_world_size())]
        self.fill(given[dist.get_rank()])
        self.call()
        total = sum(given[1:], given[0])
        got, wanted = self.whole, total
        if self.op == "all_gather":
            wanted = torch.cat([values[:size] for values in given])
        elif self.op == "reduce_scatter":
            got, wanted = self.part, total[dist.get_rank() * size :][:size]
        if exact or self.op == "all_gather":
            same = torch.equal(got, wanted)
            assert same, f"{self.op}: expected the bits of the sum in rank order"
        else:
            torch.testing.assert_close(got, wanted)


def attempt(make: Any) -> tuple[Any, str | None]:
    """What make() returns, or why some rank could not: the same reason on every rank."""
    result, why = None, None
    try:
        result = make()
    except Exception as error:
        why = reason(error)
    return result, next((w for w in gather_objects(why) if w is not None), None)


def measure(op: str, numel: int, rounds: int, timeout_s: float) -> dict[str, Any]:
    """On every rank: variant -> ms of each round, or why it was refused."""
    transports: dict[str, Collectives] = {}
    refused: dict[str, str] = {}
    for transport, names in (("torch", VARIANTS[1:2]), ("shm", VARIANTS[2:])):
        made, why = attempt(lambda t=transport: make_collectives(transport=t, timeout_s=timeout_s))
        if why is None:
            transports |= dict.fromkeys(names, made)
        else:
            refused |= dict.fromkeys(names, why)
    subjects: dict[str, Subject] = {}
    world_size = dist.get_world_size()
    for variant in VARIANTS:
        if variant in refused or (variant == "gloo all-to-all" and op == "all_gather"):
            continue  # torch.distributed's own all-gather is what fastpar takes over gloo

        def make(variant: str = variant) -> Subject:
            by = transports.get(variant)
            Subject(op, variant, by, SMALL * world_size).judge(exact=variant != "gloo")
            return Subject(op, variant, by, numel)

        made, why = attempt(make)
        if why is None:
            subjects[variant] = made
        else:
            refused[variant] = why
    values = values_of(dist.get_rank(), numel)
    samples: dict[str, Any] = {variant: [] for variant in subjects}
    for index in range(rounds + 1):
        for variant, subject in subjects.items():
            subject.fill(values)
            dist.barrier()
            start = time.perf_counter()
            subject.call()
            if index:  # the first round touches the memory
                samples[variant].append((time.perf_counter() - start) * 1e3)
    for made in {id(by): by for by in transports.values()}.values():
        made.close()
    return {**samples, **refused}


def rows_of(bench: Bench, op: str, world_size: int, numel: int, ranks: list[Any]) -> list[Row]:
    case = f"{op} {4 * numel / 1e6:.4g} MB, {world_size} ranks"
    ms = {  # of the slowest rank
        name: [max(each) for each in zip(*(rank[name] for rank in ranks))]
        for name, first in ranks[0].items()
        if not isinstance(first, str)
    }
    rows = []
    for variant in sorted(ranks[0], key=VARIANTS.index):
        why = None if variant in ms else ranks[0][variant]
        base = "gloo", ms.get("gloo", ())
        how: dict[str, Any] = {"refused": why, "ranks": world_size}
        row = bench.timed_row(case, "call", variant, ms.get(variant, ()), base, **how)
        if row.median_ms is not None:
            times = 2 * world_size if op == "all_reduce" else world_size + 1
            bench.rate(row, times * 4.0 * numel, None)
        rows.append(row)
    return rows


def run(bench: Bench) -> None:
    if bench.device != "cpu":
        return  # ranks on a CPU; GPUs have NCCL
    sizes, rounds, worlds = [25, 100, 400], 9, [2, 4]
    if bench.quick:
        sizes, rounds, worlds = [1], 2, [2]
    for world_size in worlds:
        for size in sizes:
            numel = size * 250_000  # a million bytes in fp32
            for op in OPS:
                if bench.only in f"{op} {size} MB, {world_size} ranks":
                    call: Any = measure, world_size, op, numel, rounds, 60.0
                    ranks = run_ranks(*call, backend="gloo", timeout_s=120)
                    bench.add(*rows_of(bench, op, world_size, numel, ranks))
