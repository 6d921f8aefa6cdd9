"""Reads times of phases and operations from a Chrome trace of torch's profiler.

[Note: whose time it is] Profiled steps carry ranges "fastpar PHASE" and, around waits for other
ranks, "fastpar wait". On a CPU an operation's time excludes the operations nested in it; the rest
of a phase is the host: Python and dispatch. On a GPU a kernel belongs to the phase in which it was
launched; a phase lasts from the end of the previous phase's last kernel to the end of its own; time
in it with no stream at work is the host's, which launched too late. Communication is the time in
which only NCCL's kernels run.

[Note: kinds] Matrix products and attention are limited by arithmetic at any useful size, all
other operations by memory. Views and allocations move nothing: they count as host.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastpar.comm.recorder import (
    COMPUTE,
    GATHER,
    HOST,
    OPTIMIZER,
    PHASES,
    PP,
    PREFIX,
    REDUCE,
    WAIT,
    Span,
    window,
)

MEMORY, COMMUNICATION = "memory", "communication"
KINDS = (COMPUTE, MEMORY, COMMUNICATION, HOST)
_PRODUCT = re.compile(
    r"linear|matmul|addmm|\bb?mm\b|attention|cross_entropy|gemm|cutlass|nvjet|xmma|flash|fmha", re.I
)
_NO_WORK = re.compile(
    r"^(autograd::engine|torch::autograd|Optimizer\.|ProfilerStep|\w+Backward\d*$|aten::("
    r"view|t|transpose|permute|reshape|_unsafe_view|as_strided|detach|expand|select|slice|split|"
    r"unbind|unsqueeze|squeeze|narrow|alias|empty|empty_like|empty_strided|new_empty|resize_|set_|"
    r"new_empty_strided|lift_fresh|result_type|item|_local_scalar_dense|is_nonzero|unfold)$)"
)
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_GAP = 0.002  # of a step: bars of one phase that are closer are drawn as one


class OpTime(NamedTuple):
    """Operations of one name, phase and shape: times per step."""

    name: str
    phase: str
    kind: str
    shape: tuple[tuple[int, ...], ...]  # of the inputs
    calls: float
    ms: float


@dataclass
class TraceTimes:
    """The average step of a trace.

    Attributes:
        parts: phase -> kind -> ms; they add up to the step.
        spans: of the last step on a GPU, for its picture.
    """

    parts: dict[str, dict[str, float]]
    ops: list[OpTime] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        return sum(sum(kinds.values()) for kinds in self.parts.values())


class _Range(NamedTuple):
    """A phase on the host, in microseconds."""

    phase: str
    begin: float
    end: float


class _Sums:
    """Microseconds summed over all steps: by phase and kind, and calls and time of operations."""

    def __init__(self) -> None:
        self.parts = {p: dict.fromkeys(KINDS, 0.0) for p in PHASES}
        self.ops: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add_op(self, *key: Any, us: float, calls: int = 1) -> None:
        self.ops[key][0] += calls
        self.ops[key][1] += us

    def times(self, steps: int, spans: list[Span]) -> TraceTimes:
        """Averages per step; the longest operation first."""
        items = self.ops.items()
        ops = [OpTime._make((*key, n / steps, us / 1e3 / steps)) for key, (n, us) in items]
        ops.sort(key=lambda op: -op.ms)
        parts = self.parts.items()
        ms = {p: {k: us / 1e3 / steps for k, us in kinds.items()} for p, kinds in parts}
        return TraceTimes(ms, ops, spans)


def times_of(events: Iterable[dict[str, Any]]) -> TraceTimes:
    """Times of phases and operations, from the events of one or several steps.

    Raises:
        ValueError: the events contain no step.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    marks = [e for e in complete if e.get("cat") == "user_annotation"]
    named = [(e["name"].removeprefix(PREFIX), e["ts"], e["ts"] + e["dur"]) for e in marks]
    ranges = sorted((_Range(*n) for n in named if n[0] in PHASES), key=lambda r: r.begin)
    steps = sum(r.phase == OPTIMIZER for r in ranges)
    if not steps:
        raise ValueError(
            "times_of: expected ranges of phases in the trace, got none; record the steps with "
            "`fastpar profile`"
        )
    on_gpu, sums = any(e.get("cat") == "kernel" for e in complete), _Sums()
    spans = (_add_gpu if on_gpu else _add_cpu)(sums, complete, ranges)
    return sums.times(steps, spans)


def kind_of(name: str, kernel: str = "") -> str:
    """What limits an operation, from its name and its kernel's name; see [Note: kinds]."""
    if "nccl" in kernel.lower():
        return COMMUNICATION
    if not kernel and _NO_WORK.match(name):
        return HOST
    return COMPUTE if _PRODUCT.search(name) or _PRODUCT.search(kernel) else MEMORY


def _shape(event: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    dims = event.get("args", {}).get("Input Dims", ())
    return tuple(tuple(d) for d in dims if d and all(isinstance(n, int) for n in d))


def _add_cpu(sums: _Sums, events: list[dict[str, Any]], ranges: Sequence[_Range]) -> list[Span]:
    names = {PREFIX + phase for phase in PHASES}
    thread = next(e["tid"] for e in events if e["name"] in names)
    own = [e for e in events if e["tid"] == thread and e["name"] not in names]
    own = [e for e in own if e.get("cat") in ("cpu_op", "user_annotation")]
    own.sort(key=lambda e: (e["ts"], -e["dur"]))
    begins = [r.begin for r in ranges]
    for event, own_us, nested in _own_times(own):
        now = ranges[max(0, bisect.bisect_right(begins, event["ts"]) - 1)]
        name, kind = _short(event["name"]), kind_of(event["name"])
        kind = COMMUNICATION if event["name"] == PREFIX + WAIT else kind
        if kind == HOST or not now.begin <= event["ts"] < now.end:
            continue
        sums.parts[now.phase][kind] += own_us
        if kind != COMMUNICATION and event.get("cat") == "cpu_op":
            sums.add_op(name, now.phase, kind, _shape(event), us=own_us, calls=not nested)
    for r in ranges:
        sums.parts[r.phase][HOST] += r.end - r.begin
    for kinds in sums.parts.values():
        kinds[HOST] = max(0.0, kinds[HOST] - sum(kinds[k] for k in KINDS if k != HOST))
    return []


def _short(name: str) -> str:
    """The name of an op; fastpar's appear in a trace as fastpar::NAME, as NAME, or as both."""
    return name.removeprefix("fastpar::")


def _own_times(events: Sequence[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], float, bool]]:
    """Events of one thread by begin, each with its time excluding nested events.

    The flag says whether an event is nested in one of its own name: then it is not another call.
    """
    left_us = [float(e["dur"]) for e in events]
    nested = [False] * len(events)
    open_: list[int] = []
    for i, event in enumerate(events):
        while open_ and event["ts"] >= events[open_[-1]]["ts"] + events[open_[-1]]["dur"]:
            open_.pop()
        if open_:
            left_us[open_[-1]] -= event["dur"]
        nested[i] = any(_short(events[j]["name"]) == _short(event["name"]) for j in open_)
        open_.append(i)
    return ((event, max(0.0, us), again) for event, us, again in zip(events, left_us, nested))


def _add_gpu(sums: _Sums, events: list[dict[str, Any]], ranges: Sequence[_Range]) -> list[Span]:
    by_id = {e.get("args", {}).get("External id"): e for e in events if e.get("cat") == "cpu_op"}
    by_id.pop(None, None)
    work = _by_range(events, ranges)
    spans = [_span(HOST, r.phase, r.begin, r.end) for r in ranges]
    begins = [min((e["ts"] for e in part), default=math.inf) for part in work]
    until = first = min(ranges[0].begin, *begins)
    for i, (r, part) in enumerate(zip(ranges, work)):
        if i and ranges[i - 1].phase == OPTIMIZER:
            first = until
        intervals: list[tuple[str, float, float]] = []
        for event in part:
            op = by_id.get(event["args"].get("External id"), {})
            name = _short(op.get("name", event["name"]))
            kind, kernel = kind_of(name, event["name"]), event["name"].lower()
            begin, end = event["ts"], event["ts"] + event["dur"]
            intervals.append((kind, begin, end))
            if kind == COMMUNICATION:
                row = GATHER if "gather" in kernel else PP if "sendrecv" in kernel else REDUCE
                spans.append(_span(row, row, begin, end))
            else:
                spans.append(_span(COMPUTE, r.phase, begin, end))
                sums.add_op(name, r.phase, kind, _shape(op), us=event["dur"])
        stop = max([until, *(end for _, _, end in intervals)])
        if not part:  # only the host, as long as nothing runs
            stop = max(until, min([r.end, *begins[i + 1 :]]))
        for kind, begin, end in _by_priority(intervals, until, stop):
            sums.parts[r.phase][kind] += end - begin
            if kind == COMMUNICATION:
                spans.append(_span(WAIT, "nccl", begin, end))
        until = stop
    return _merged(window(spans, first / 1e3, until / 1e3))


def _by_range(events: list[dict[str, Any]], ranges: Sequence[_Range]) -> list[list[dict[str, Any]]]:
    """For each range the kernels and copies that were launched in it, by begin."""
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    begins = [r.begin for r in ranges]
    work: list[list[dict[str, Any]]] = [[] for _ in ranges]
    for event in sorted((e for e in events if e.get("cat") in _GPU_WORK), key=lambda e: e["ts"]):
        launch_us = launched.get(event["args"].get("correlation"), event["ts"])
        index = bisect.bisect_right(begins, launch_us) - 1
        if index >= 0:
            work[index].append(event)
    return work


def _span(row: str, name: str, begin_us: float, end_us: float) -> Span:
    return Span(row, name, begin_us / 1e3, end_us / 1e3)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Joins spans across gaps too small to see."""
    longest = _LONGEST_GAP * max((s.end_ms for s in spans), default=0.0)
    merged: list[Span] = []
    newest: dict[tuple[str, str], Span] = {}
    for span in sorted(spans, key=lambda s: s.begin_ms):
        before = newest.get((span.row, span.name))
        if before is not None and span.begin_ms - before.end_ms <= longest:
            before.end_ms = max(before.end_ms, span.end_ms)
        else:
            newest[span.row, span.name] = span
            merged.append(span)
    return merged


def _by_priority(
    intervals: Iterable[tuple[str, float, float]], begin: float, end: float
) -> Iterator[tuple[str, float, float]]:
    """The time from begin to end in intervals, each with the first of KINDS that runs in it."""
    changes = sorted(
        (min(max(at, begin), end), kind, step)
        for kind, first, last in intervals
        for at, step in ((first, 1), (last, -1))
    )
    running = dict.fromkeys(KINDS, 0)
    for at, kind, step in [*changes, (end, HOST, 0)]:
        if at > begin:
            yield next((k for k in KINDS if running[k]), HOST), begin, at
            begin = at
        running[kind] += step


def product_flops(op: OpTime) -> float | None:
    """FLOPs of one call of a matrix product, from its input shapes; None for other operations."""
    name, dims = op.name, op.shape
    if name in ("linear", "aten::linear") and len(dims) >= 2 and len(dims[1]) == 2:
        return 2.0 * math.prod(dims[0]) * dims[1][0]  # x [.., K], w [N, K]
    if name == "linear_bwd" and len(dims) >= 3:
        return 4.0 * math.prod(dims[0]) * dims[2][1]  # dy [.., N], x, w: two products
    if name in ("aten::addmm", "aten::baddbmm"):  # the addend comes first
        dims = dims[1:]
    if name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm") and len(dims) >= 2:
        return 2.0 * math.prod(dims[0]) * dims[1][-1]
    return None
