"""The gate in front of every row, and the rows: what the benches have in common.

[Note: the gate] Before a variant is timed, its output and gradients are compared with the op's fp64
oracle by fastpar.testing.assert_matches_oracle, on the row's device and dtype. A red check, an
exception and a missing backend give a row without a time that says why.
Times are taken by fastpar/doctor/trial.py, variants in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from bench.records import ResultFile, Row
from fastpar.comm.ranks import reason
from fastpar.doctor.trial import Call, Timing, clock_for, samples_in_turn, synchronize
from fastpar.predict.machine import Ceilings, measure_ceilings
from fastpar.testing import assert_matches_oracle

Inputs = tuple[Any, ...]
Calls = Mapping[str, Sequence[Call]]
# A peer must compute the same function; how well it rounds is not ours to judge. Sums over
# thousands of rows one after another, as torch.compile writes them on a CPU, lose an fp32 digit.
PEER_FACTOR = {torch.float32: 64.0, torch.bfloat16: 8.0}


def stopwatch(call: Call, device: str) -> tuple[float, Any]:
    """(wall ms, result) of one call including the device's work; for whole training steps."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, result


@dataclass
class Case:
    """One shape of one op, and who computes it.

    make_inputs(generator, small): fresh random inputs; small: few rows, for the fp64 oracle.
    variants: name -> function of the inputs; "eager" is plain PyTorch.
    oracle: function of the inputs in fp64; None only where `check` judges instead.
    bytes_moved, flops: direction -> per call. Percent of the ceiling is that of flops when given.
    directions: "forward", "backward", "forward+backward", or "call" for what no gradient flows
        through.
    """

    name: str
    make_inputs: Callable[[torch.Generator, bool], Inputs]
    variants: dict[str, Callable[..., Any]]
    oracle: Callable[..., Any] | None
    dtype: torch.dtype
    bytes_moved: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    directions: tuple[str, ...] = ("forward", "forward+backward")
    compiled: bool = True  # adds "torch.compile" of variants["eager"], dynamic=False
    check: Callable[[str], None] | None = None  # variant name -> raises when it is wrong
    track_peak: bool = False  # peak memory of one call (GPU only)
    baseline: str = "eager"  # what speedup compares with
    in_place: tuple[str, ...] = ()  # variants that overwrite their inputs
    yardstick: Callable[..., Any] | None = None  # of the gate; None: variants["eager"]
    unjudged: tuple[str, ...] = ()  # variants that are not comparable, element by element
    # variant -> instead of bytes_moved, where it stores less than the others
    own_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Bench:
    """One run of one bench file: where it runs, how long it may take, where its rows go."""

    name: str
    device: str
    quick: bool
    results: ResultFile
    only: str = ""  # a part of the case names to run
    clock: Any = None
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        self.clock = self.clock or clock_for(self.device)
        self.ceilings = self.ceilings or measure_ceilings(self.device, self.quick)

    def row(self, case: str, direction: str, variant: str, dtype: torch.dtype, **values) -> Row:
        form, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
        return Row(self.name, case, direction, variant, self.device, form, threads, **values)

    def timed_row(
        self, case: str, direction: str, variant: str, ms: Sequence[float],
        base: tuple[str, Sequence[float]] = ("", ()), dtype: torch.dtype = torch.float32,
        threads: int = 1, refused: str | None = None, **notes: Any,
    ) -> Row:  # fmt: skip
        """A row of these times; base: the variant that it took turns with, and its times."""
        row = self.row(case, direction, variant, dtype, refused=refused, notes=notes)
        row.threads = threads
        if ms and refused is None:
            row.median_ms, row.p20_ms, row.p80_ms, row.runs = Timing.of(ms)
            if base[1]:
                row.compare(*base, ms)
        return row

    def add(self, *rows: Row) -> None:
        self.results.add(*rows)
        for row in rows:
            print(format_row(row, judged=not self.quick), flush=True)

    def run(self, cases: Iterable[Case]) -> None:
        """Every case in every direction; rows are written after each direction."""
        for case in cases:
            if self.only in case.name:
                for direction in case.directions:
                    if case.compiled:
                        torch._dynamo.reset()  # its limit is of recompilations
                    # Where one graph is run backward again and again, its buffers must stay.
                    with functorch_config.patch(donated_buffer=direction != "backward"):
                        self._run_direction(case, direction)

    def _run_direction(self, case: Case, direction: str) -> None:
        functions = dict(case.variants)
        if case.compiled:
            functions["torch.compile"] = torch.compile(case.variants["eager"], dynamic=False)
        # Those that overwrite their input come last, after all others were judged and bound.
        functions = {n: functions[n] for n in sorted(functions, key=case.in_place.__contains__)}
        inputs = self._input_sets(case)

        def maker(name: str) -> Callable[[], list[Call]]:
            return lambda: bind(functions[name], inputs, direction)

        def judge(name: str) -> None:
            self._judge(case, name, functions[name], direction, inputs[0])

        self.run_calls(case, direction, {name: maker(name) for name in functions}, judge)

    def run_calls(
        self, case: Case, direction: str, makers: Mapping[str, Callable[[], list[Call]]],
        judge: Callable[[str], None] = lambda name: None,
    ) -> None:  # fmt: skip
        """Gate and warm up each variant, then time those that may be timed. The first call, which
        compiles, takes the last inputs: the gate's are the first."""
        calls: dict[str, list[Call]] = {}
        first_ms: dict[str, float] = {}
        refused: dict[str, str] = {}
        for name, make in makers.items():
            try:
                if case.check is not None:
                    case.check(name)
                made = make()
                try:
                    first_ms[name] = stopwatch(made[-1], self.device)[0]
                finally:
                    judge(name)  # says best what is wrong
                for call in (made[0], made[-1], made[0]):
                    call()
                synchronize(self.device)
                calls[name] = made
            except Exception as error:
                refused[name] = reason(error)
        self.measure(case, direction, calls, refused, first_ms)
        calls.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _input_sets(self, case: Case) -> list[Inputs]:
        """Two to 64 input sets: 256 MB, so that no bandwidth is that of a warm cache."""
        generator = torch.Generator(self.device).manual_seed(1)
        sets = [case.make_inputs(generator, self.quick)]
        size = sum(t.numel() * t.element_size() for t in sets[0] if isinstance(t, Tensor))
        count = min(64, max(2, math.ceil((256 << 20) / max(size, 1))))
        if self.quick or case.flops:
            count = 2
        return sets + [case.make_inputs(generator, self.quick) for _ in range(count - 1)]

    def _judge(
        self, case: Case, name: str, function: Callable[..., Any], direction: str, inputs: Inputs
    ) -> None:
        """Raises unless the variant agrees with the oracle; see [Note: the gate]."""
        if case.oracle is None or name in ("eager", *case.unjudged):
            return  # eager is plain PyTorch, by whose error the others are judged
        if name != "torch.compile":  # that one would compile a second time for the small shape
            inputs = case.make_inputs(torch.Generator(self.device).manual_seed(2), True)
        grad = direction not in ("forward", "call")
        judged = function if grad else torch.no_grad()(function)  # as it will be timed
        eager = case.yardstick or case.variants["eager"]
        if "eager" in case.in_place:  # each has to see what the first one saw
            judged, eager = on_copies(judged), on_copies(eager)
        factor = 2.0 if name.startswith("fastpar") else PEER_FACTOR[case.dtype]
        assert_matches_oracle(judged, case.oracle, inputs, eager=eager, grad=grad, factor=factor)

    def measure(
        self, case: Case, direction: str, calls: Calls, refused: Mapping[str, str],
        first_ms: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Time the calls in turn and write a row for each, and one for each refused variant."""
        samples: dict[str, list[float]] = {}
        if calls:
            seconds, least = (0.05, 2) if self.quick else (0.4, 7)
            budget_s = seconds * len(calls)
            samples = samples_in_turn(calls, self.clock, budget_s=budget_s, min_runs=least)
        base = case.baseline, samples.get(case.baseline, ())
        rows = []
        for name, ms in samples.items():
            row = self.timed_row(case.name, direction, name, ms, base, case.dtype)
            row.threads = torch.get_num_threads()
            row.host_us = self.clock.host_us(calls[name][0])
            row.add_first(first_ms[name])
            if case.track_peak and self.device == "cuda":
                row.peak_bytes = _peak_bytes(calls[name][0])
            moved = case.own_bytes.get(name, case.bytes_moved.get(direction))
            self.rate(row, moved, case.flops.get(direction))
            rows.append(row)
        for name, why in refused.items():
            rows.append(self.row(case.name, direction, name, case.dtype, refused=why))
        self.add(*rows)

    def rate(self, row: Row, bytes_moved: float | None, flops: float | None) -> None:
        """Fill in GB/s, TFLOP/s and the percent of this process's own ceiling."""
        assert row.median_ms is not None
        assert self.ceilings is not None
        copy_gb_per_s, tflop_per_s, matmul = self.ceilings
        if bytes_moved:
            row.gb_per_s = bytes_moved / row.median_ms / 1e6
            row.percent_of_ceiling = 100 * row.gb_per_s / copy_gb_per_s
            row.ceiling = f"copy {copy_gb_per_s:.0f} GB/s"
        if flops:
            row.tflop_per_s = flops / row.median_ms / 1e9
            row.percent_of_ceiling = 100 * row.tflop_per_s / tflop_per_s
            row.ceiling = f"matmul {matmul} {tflop_per_s:.3g} TFLOP/s"


def bind(function: Callable[..., Any], inputs: Sequence[Inputs], direction: str) -> list[Call]:
    """One call without arguments per input set: forward under no_grad, with its backward, or the
    backward alone of a forward that ran once."""

    def forward(args: Inputs) -> Call:
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)

        def call() -> Any:
            with torch.no_grad():
                return function(*args)

        return call

    def with_gradients(args: Inputs) -> Call:
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        outputs = _tensors(function(*args))
        # A loss gets 1, as in training: ops may spare themselves that product.
        cotangents = [torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in outputs]
        if direction == "backward":
            return lambda: torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
        return lambda: torch.autograd.grad(_tensors(function(*args)), leaves, cotangents)

    make = forward if direction in ("forward", "call") else with_gradients
    return [make(args) for args in inputs]


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, reading and overwriting copies of its tensors."""
    return lambda *args: function(*(a.clone() if isinstance(a, Tensor) else a for a in args))


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _peak_bytes(call: Call) -> int:
    """Memory of the GPU that one call needs beyond what lives before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def short(count: int) -> str:
    """1500000000 -> 1.5B"""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.4g}{letter}"
    return str(count)


def format_row(row: Row, *, judged: bool = True) -> str:
    """A row as a line of the console's table; judged=False: that it ran, for tiny shapes."""
    what = f"{row.case:34} {row.direction:17} {row.variant:24}"
    if row.refused:
        return f"{what} refused: {row.refused}"
    if not judged:
        return f"{what} ran"
    cells = []
    if row.median_ms is not None:
        cells.append(f"{row.median_ms:10.4f} ms [{row.p20_ms:.4f} .. {row.p80_ms:.4f}]")
    if row.host_us is not None:
        cells.append(f"host {row.host_us:.0f} us")
    if row.compile_s is not None and row.compile_s > 0.1:
        cells.append(f"compiled {row.compile_s:.1f} s")
    if row.tokens_per_s is not None:
        cells.append(f"{row.tokens_per_s:.0f} tokens/s")
    if row.tflop_per_s is not None:
        cells.append(f"{row.tflop_per_s:.3g} TFLOP/s")
    elif row.gb_per_s is not None:
        cells.append(f"{row.gb_per_s:.3g} GB/s")
    if row.percent_of_ceiling is not None:
        cells.append(f"{row.percent_of_ceiling:.0f} % of {row.ceiling or 'the ceiling'}")
    if row.peak_bytes is not None:
        cells.append(f"peak {row.peak_bytes / 1e6:.0f} MB")
    if row.speedup is not None:
        cells.append(f"{row.times} beside {row.baseline}")
    return f"{what} {'  '.join(cells)}"
