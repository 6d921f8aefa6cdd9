"""Proofs of kernels: the timer, the trial of one op, and compiling kernels before their trial.

A proof answers: is fastpar's kernel right on this machine, and is it faster than stock PyTorch?
Right: on ordinary and extreme inputs every result is within the 2x rule of cases.py, and later
calls give the same bits: on a GPU the last one is a recipe's (csrc/torch/recipes.cpp). Fast:
forward and backward are timed in turn with what would run instead, and with stock PyTorch's own
function if that is different. For attention, the other implementations of attention/peers.py are
tried as well, by the same rules except that of equal bits. On a busy machine one timing says
little: another implementation than fastpar's kernel is chosen only if two of at most TIMINGS
timings agree on it.

[Note: surroundings] The call that needs a proof may be in an autograd.Function's forward (no
gradients are recorded there), in a checkpointed block (whose hooks would see the trial's tensors),
under autocast, inference mode or a default device. All of these apply to one thread, so a trial
runs in a thread of its own. It uses its own random generators, so that a run draws the same random
numbers with a trial as without (tests/doctor/test_doctor.py).

[Note: timing on a GPU] Each sample is: flush the L2 cache, let the device sleep longer than the
host needs to enqueue the call, record an event, call, record an event. Without the sleep, a call
whose kernels are shorter than their launches is timed as host time, because the stream starves
between the two events (test_cuda_sample_hides_the_host). Host time is measured separately, on an
idle device, as the time until the call returns. Inputs are random: zeros run up to a third faster.

[Note: timing on a CPU] Variants run in turn, A B A B ..., so that noise from other programs affects
all alike; medians are compared within one run only. Every row states the number of threads.

[Note: compiled ahead] A Triton kernel takes a second or two to compile, and a first step would
compile them one after another on every rank. warm() makes the calls of a proof on CPU tensors and
records their launches for this GPU's architecture; each of its processes compiles every n-th
distinct launch that Triton's cache on disk does not hold. A launch compiled this way has the key
that Triton's own launcher looks up (tests/ops/test_triton_launch.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fastpar.doctor.table import parse_proofs, row_of
from fastpar.files.packages import call_command
from fastpar.kernels import backend
from fastpar.kernels.attention import peers as attention_peers
from fastpar.kernels.attention.peers import PEERS, left_out
from fastpar.kernels.cases import HEADS, OpCase, cases_of_many_rows, proof_cases
from fastpar.kernels.choice import OWN, STOCK, Case, PeerProof, Proof, trying
from fastpar.kernels.config_table import TABLES

Call = Callable[[], Any]
Result = TypeVar("Result")
CYCLES_PER_US = 2000.0  # of a GPU at 2 GHz; on slower GPUs the sleep is longer than intended


class Timing(NamedTuple):
    """Median and spread of samples."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        p20, median, p80 = np.quantile(np.asarray(samples_ms, dtype=np.float64), (0.2, 0.5, 0.8))
        return cls(float(median), float(p20), float(p80), len(samples_ms))


class CpuClock:
    """Wall time of one call."""

    def sample(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def host_us(self, call: Call, runs: int = 3) -> float:
        """CPU time of the calling thread, without that of the others."""
        times = []
        for _ in range(runs):
            start = time.thread_time()
            call()
            times.append((time.thread_time() - start) * 1e6)
        return float(np.median(times))


class CudaClock:
    """Device time of one call between two events; see [Note: timing on a GPU].

    Args:
        cuda: torch.cuda, or a test double.
        flush: overwrites the L2 cache; by default zeroes a buffer of four times its size.
    """

    def __init__(self, cuda: Any = None, flush: Call | None = None):
        self.cuda = torch.cuda if cuda is None else cuda
        if flush is None:
            l2_bytes = getattr(self.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
            flush = torch.empty(max(4 * l2_bytes, 64 << 20), dtype=torch.int8, device="cuda").zero_
        self.flush = flush
        self._ahead_us: WeakKeyDictionary[Call, float] = WeakKeyDictionary()

    def host_us(self, call: Call, runs: int = 15) -> float:
        times = []
        for _ in range(runs):
            self.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        self.cuda.synchronize()
        return float(np.median(times))

    def sample(self, call: Call) -> float:
        if call not in self._ahead_us:
            self._ahead_us[call] = min(2 * self.host_us(call, runs=3) + 20, 50_000)
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush()
        self.cuda._sleep(int(self._ahead_us[call] * CYCLES_PER_US))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def clock_for(device: str) -> CpuClock | CudaClock:
    """The clock of "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else CpuClock()


def synchronize(device: str) -> None:
    """Waits until the device has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleave(variants: Mapping[str, Sequence[Call]], clock: Any, **how: Any) -> dict[str, Timing]:
    """Times the variants in turn, round after round; arguments as of samples_in_turn()."""
    samples = samples_in_turn(variants, clock, **how)
    return {name: Timing.of(times) for name, times in samples.items()}


def samples_in_turn(
    variants: Mapping[str, Sequence[Call]],
    clock: Any,
    *,
    budget_s: float,
    min_runs: int = 7,
    max_runs: int = 200,
) -> dict[str, list[float]]:
    """Milliseconds of each round: the n-th ones of all variants are of one round.

    Args:
        variants: name -> the same call on several input sets, used in rotation.
        budget_s: wall time for all of them; the number of rounds is within [min_runs, max_runs],
            and no round begins after twice that time.
    """
    start = time.perf_counter()
    for calls in variants.values():
        for call in (calls[0], calls[-1]):
            clock.sample(call)
    spent = time.perf_counter() - start
    rounds = int(min(max_runs, max(min_runs, budget_s * 2 / max(spent, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds):
        if index >= min_runs and time.perf_counter() - start > spent + 2 * budget_s:
            break
        for name, calls in variants.items():
            samples[name].append(clock.sample(calls[index % len(calls)]))
    return samples


Way = Callable[[], AbstractContextManager[None]]
Times = dict[str, tuple[float, float]]  # ms of forward and backward
SLOWER = 1.03  # fastpar / instead: ratios below count as equally fast
SECONDS = 0.6  # of timing, per op and pass
TIMINGS = 4
MUCH_SLOWER = 8.0  # than fastpar's kernel: two calls are enough
MOST_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # of a timed tensor: 32 MB, 512 MB in fp32
FUSED_BY_COMPILE = frozenset({  # by torch.compile, from PyTorch's functions
    "layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm", "bias_gelu",
    "relu2", "swiglu", "cross_entropy",
})  # fmt: skip
DEFAULT_ROWS = {"cpu": 512, "cuda": 1 << 15}  # on a GPU 32 samples of 1024 tokens
NO_TIME = (0.0, 0.0)
# For the trial of a peer or a whole proof in a process of its own, and for that process to start.
LIMIT_S, TRIAL_S, START_S = 30, 300, 120
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)  # by the kernel
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)  # time limits, lack of memory
STARTED = "started"
MOST_LETTERS = 300  # of an error


def prove(case: Case, rows: int = 0, compiled: bool = False) -> Proof:
    """Tries fastpar's kernel on a case, in comparison with what would run instead.

    Args:
        case: op, dtype and last dimension; an op without cases counts as proven.
        rows: rows (tokens) of the timed call; 0: DEFAULT_ROWS, limited by MOST_ELEMENTS.
        compiled: also time PyTorch's functions under torch.compile, where it can fuse them.
    Raises:
        torch.OutOfMemoryError: too little memory is left, for instance by a large model.
    """

    def alone() -> Proof:
        proof = _prove(case, rows, compiled and case.op in FUSED_BY_COMPILE)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the oracle's memory
        return proof

    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:  # an oracle may have no deterministic form; that is not the kernel's fault
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _in_a_thread(alone)
    finally:
        if strict:  # else the call would import torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(True, warn_only=warns)


def _in_a_thread(call: Callable[[], Result]) -> Result:
    """call() with this thread's number of threads and GPU; see [Note: surroundings]."""
    threads = torch.get_num_threads()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def alone() -> Result:
        torch.set_num_threads(threads)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()


def _cases(case: Case, rows: int) -> tuple[list[OpCase], list[OpCase]]:
    """The cases of a proof, the timed one first, and those of them that are compared."""
    most = MOST_ELEMENTS[case.device] // max(case.size, 1)
    rows = min(rows or DEFAULT_ROWS[case.device], max(64, most))
    found = proof_cases(case.op, case.size, case.device, rows)
    found = [one for one in found if case.dtype in one.dtypes]
    return found, found[1:] + found[: _fits(case, rows)]


def _prove(case: Case, rows: int, compiled: bool) -> Proof:
    if not case.dtype.is_floating_point:  # bins of a norm
        case = case._replace(dtype=torch.float32)
    rows = rows or DEFAULT_ROWS[case.device]
    found, checked = _cases(case, rows)
    if not found:
        return Proof(OWN)
    wrong = what_is_wrong(case, checked)
    if wrong:
        return Proof(STOCK, wrong)
    others = {}
    for name in _others(case, found[0]):
        if not PEERS[name].in_subprocess:
            others[name] = what_is_wrong(case, checked, name)
        elif (why := wrong_in_subprocess(case, rows, name)) is not None:
            others[name] = why
    seen: list[Proof] = []
    while len(seen) < TIMINGS:
        right = [name for name, why in others.items() if not why]
        times, failed = _times(case, found[0], compiled, right)
        if OWN in failed:
            return Proof(STOCK, failed[OWN])
        others |= {name: why for name, why in failed.items() if name in others}
        able = {name: times[name] for name in (OWN, *right) if name in times}
        seen.append(_by_times(times, _fastest(case, checked, able), others))
        if _choice_of(seen[-1]) in (OWNS, *map(_choice_of, seen[:-1])):
            return _beside_stock(case, checked, seen[-1])
    return seen[-1]._replace(  # what is compiled is chosen by these times, later
        chosen=OWN,
        serves=(OWN, OWN),
        own_ms=min((proof.own_ms for proof in seen), key=sum),
        compiled_ms=max((proof.compiled_ms for proof in seen), key=sum),
    )


def _beside_stock(case: Case, checked: Sequence[OpCase], proof: Proof) -> Proof:
    """With whether PyTorch's own functions, if they were faster, are right, bits included."""
    fastest = min(sum(proof.own_ms), sum(proof.instead_ms) or sum(proof.own_ms))
    if case.op.startswith("attention") or not 0 < SLOWER * sum(proof.stock_ms) < fastest:
        return proof  # attention's are among the peers
    alone = [replace(one, fn=one.stock or one.eager) for one in checked]
    try:
        return proof._replace(stock_right=not what_is_wrong(case, alone))
    except torch.OutOfMemoryError:
        return proof


def _by_times(times: Times, serves: tuple[str, str], others: Mapping[str, str]) -> Proof:
    """The proof of a right kernel by one timing; others: why implementations are wrong, or ""."""
    best = times[serves[0]][0] + times[serves[1]][1]
    slower = "instead" in times and best > SLOWER * sum(times["instead"])
    peers = tuple(PeerProof(name, why, times.get(name, NO_TIME)) for name, why in others.items())
    own, instead, stock, fused = (
        times.get(name, NO_TIME) for name in (OWN, "instead", "stock", "compiled")
    )
    return Proof(STOCK if slower else OWN, "", own, instead, stock, fused, serves, peers)


def is_faster_compiled(proof: Proof) -> bool:
    """Whether PyTorch's functions under torch.compile were faster than fastpar's kernel."""
    return 0 < SLOWER * sum(proof.compiled_ms) < sum(proof.own_ms)


def _choice_of(proof: Proof) -> tuple[Any, ...]:
    """What a timing decides."""
    return proof.chosen, proof.serves, is_faster_compiled(proof)


OWNS = (OWN, (OWN, OWN), False)  # fastpar's kernel, in any case


def _fits(case: Case, rows: int) -> bool:
    """Whether the timed call is compared, too: attention on a GPU with memory for the oracle."""
    if case.op != "attention" or case.device != "cuda":
        return False
    scores_bytes = rows * min(rows, 1024) * HEADS * torch.float64.itemsize
    return 8 * scores_bytes < torch.cuda.mem_get_info()[0]  # an oracle keeps 5 such tensors


def _others(case: Case, timed: OpCase) -> list[str]:
    """Other implementations behind the op that can serve the timed call."""
    if case.op != "attention":
        return []
    q, k, v = (x.detach() for x in timed.inputs(case.dtype, case.device).values())
    return [name for name in PEERS if not attention_peers.refusal(name, q, k, v, causal=True)]


def _fastest(
    case: Case, found: Sequence[OpCase], times: Mapping[str, tuple[float, float]]
) -> tuple[str, str]:
    """Who runs forward and who backward: OWN unless another is faster, and right in this pair."""
    able = [name for name in times if times[name][1] or not times[OWN][1]]  # of backward

    def cost(pair: tuple[str, str]) -> float:
        return sum(times[who][i] * (SLOWER if who != OWN else 1) for i, who in enumerate(pair))

    for forward, backward in sorted(itertools.product(times, able), key=cost):
        if forward == backward or not what_is_wrong(case, found, f"{forward}/{backward}"):
            return forward, backward
    return OWN, OWN


def what_is_wrong(case: Case, found: Sequence[OpCase], what: str = OWN) -> str:
    """The first result that breaks a rule, with its numbers; "" if there is none.

    Raises:
        DeviceLost: this process can no longer use the GPU.
    """
    for one in found:
        where = f"at {one.shape}: "
        try:
            with trying(case.op, what):
                for result, errors in one.measure(case.dtype, case.device).items():
                    if not errors.max <= errors.bound:
                        limit = f"allowed is {errors.bound:.2e}"
                        return f"{where}error of {result} is {errors.max:.2e}, {limit}"
                if what != OWN:
                    continue
                first, second = (one.results(case.dtype, case.device) for _ in range(2))
            for result, value in first.items():
                a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (value, second[result]))
                if not torch.equal(a, b):
                    return f"{where}{result} differs between two calls"
        except torch.OutOfMemoryError:
            raise  # it says nothing about the kernel
        except Exception as error:
            return _failure(case, one, what, error)
    return ""


def wrong_in_subprocess(case: Case, rows: int, name: str) -> str | None:
    """what_is_wrong of a peer, found in a process of its own, which may hang or crash; None: the
    process did not start, ran out of memory or was ended from outside."""
    found = _child(case, rows, name, False, LIMIT_S)
    if found.status == 0:
        why: str | None = found.result
        return why
    if not found.started:
        text = f"{case}: {name} was not tried because its process did not start: {found.how}"
        warnings.warn(text, stacklevel=2)
        return None
    if found.status == -signal.SIGALRM:
        return f"its trial took more than {LIMIT_S} s"
    return None if found.status in FROM_OUTSIDE else f"its trial ended with {found.how}"


def prove_apart(case: Case, rows: int, compiled: bool) -> Proof | str:
    """prove() in a process of its own, because another process ended during this trial; or why
    nothing is known of the kernel: only a crash is its fault."""
    found = _child(case, rows, OWN, compiled, TRIAL_S)
    if found.status == 0 and found.result is not None:
        return parse_proofs(case.device, {"proofs": [found.result]})[case]
    if -(found.status or 0) in CRASHES:
        name = signal.Signals(-(found.status or 0)).name
        return Proof(STOCK, f"the process of its trial ended by {name}")
    if found.status == 0:
        return "out of memory during its trial"
    return f"the process of its trial ended with {found.how}"


class _Ended(NamedTuple):
    """How a process of main() ended."""

    status: int | None  # -SIGALRM also if it had to be killed
    started: bool
    result: Any
    how: str


def _child(case: Case, rows: int, name: str, compiled: bool, limit_s: int) -> _Ended:
    gpu = None
    if case.device == "cuda":
        gpu = torch.cuda.current_device()
        torch.cuda.empty_cache()  # for that process
    arguments = [*case, rows, name, compiled, gpu, torch.get_num_threads(), limit_s]
    arguments[2] = str(case.dtype).removeprefix("torch.")
    command = [*call_command("fastpar.doctor.trial.main"), json.dumps(arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    late = False
    try:
        out, err = process.communicate(timeout=START_S + limit_s)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        out, err = process.communicate()
    lines, status = out.splitlines(), process.returncode
    how = f"status {status} {_line(err, -1)}".strip()
    result = json.loads(lines[-1]) if status == 0 and STARTED in lines else None
    return _Ended(-signal.SIGALRM if late else status, STARTED in lines, result, how)


def main() -> None:
    """The process of _child: prints STARTED, then the result: of fastpar's kernel its proof, of a
    peer why it is wrong; None without memory."""
    device, op, dtype, size, rows, name, compiled, gpu, threads, limit_s = json.loads(sys.argv[1])
    case = Case(device, op, getattr(torch, dtype), size)
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)
        torch.cuda.synchronize()
    print(STARTED, flush=True)
    signal.alarm(limit_s)  # ends the process even inside a kernel
    proof: Proof | None = None
    result: Any = None
    with contextlib.suppress(torch.OutOfMemoryError):
        try:
            if name == OWN:
                proof = prove(case, rows, compiled)
            else:
                result = what_is_wrong(case, _cases(case, rows)[1], name)
        except DeviceLost as lost:
            proof, result = (lost.proof, None) if name == OWN else (None, lost.why)
    print(json.dumps(result if proof is None else row_of(case, proof)))


class DeviceLost(SystemExit):
    """An error after which each CUDA call of this process fails, such as an illegal access.

    Attributes:
        why: the error in one line.
        proof: what is known of the case on trial; None: stock PyTorch caused the error.
    """

    def __init__(self, case: Case, what: str, why: str) -> None:
        super().__init__(
            f"fastpar: {case} by {what} {why}; this process cannot use the GPU any more: restart"
        )
        self.why = why
        peers = tuple(PeerProof(name, why, NO_TIME) for name in what.split("/") if name in PEERS)
        known = Proof(OWN, peers=peers) if peers else None
        self.proof = Proof(STOCK, why) if what == OWN else known


def _line(text: str, index: int) -> str:
    """The first or last line, shortened for the table."""
    line = (text.strip().splitlines() or [""])[index][:MOST_LETTERS]
    return "".join(letter if letter.isprintable() else " " for letter in line)


def _failure(case: Case, one: OpCase, what: str, error: Exception) -> str:
    """Why `what`, which raised an error, is wrong; one line."""
    why = f"at {one.shape}: {type(error).__name__}: {_line(str(error), 0) or 'no message'}"
    if case.device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLost(case, what, why) from error
    return why


def _random_like(x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(6)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def _times(
    case: Case, one: OpCase, compiled: bool, others: Sequence[str]
) -> tuple[Times, dict[str, str]]:
    """Times of fastpar's kernel, of what runs instead, of stock PyTorch, of stock PyTorch under
    torch.compile, and of other implementations; see time_ways."""
    own, stock = (functools.partial(trying, case.op, what) for what in (OWN, STOCK))
    ways: dict[str, tuple[Way, Any]] = {OWN: (own, one.fn)}
    ways |= {name: (functools.partial(trying, case.op, name), one.fn) for name in others}
    ways |= {"instead": (stock, one.fn), "stock": (stock, one.stock or one.eager)}
    if compiled:
        from torch._functorch import config  # imports torch's compiler

        function = torch.compile(one.eager, dynamic=False)
        with config.patch(donated_buffer=False):  # backward is called repeatedly
            function(*one.inputs(case.dtype, case.device).values())
        ways["compiled"] = (stock, function)
    return time_ways(case, one, ways)


def time_ways(
    case: Case, one: OpCase, ways: Mapping[str, tuple[Way, Any]]
) -> tuple[Times, dict[str, str]]:
    """The times of each (way, function), which is called inside way(); why others have none.

    A variant that takes MUCH_SLOWER times as long as the first is called only twice.

    Raises:
        DeviceLost: this process can no longer use the GPU.
        torch.OutOfMemoryError: in the first variant; other variants without memory are skipped.
    """
    inputs = list(one.inputs(case.dtype, case.device).values())
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    calls: list[dict[str, list[Any]]] = [{}, {}]
    first: list[dict[str, float]] = [{}, {}]
    failed: dict[str, str] = {}
    clock = clock_for(case.device)
    for name, (way, fn) in ways.items():

        def forward(fn: Any = fn, way: Way = way) -> Any:
            with way():
                return fn(*inputs)

        try:
            outputs = forward()
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            smooth = [o for o in outputs if o.requires_grad]
            cotangents = [_random_like(o) for o in smooth]

            def backward(smooth: Any = smooth, cotangents: Any = cotangents, way: Way = way) -> Any:
                with way():
                    return torch.autograd.grad(
                        smooth, leaves, cotangents, retain_graph=True, allow_unused=True
                    )

            found: list[Any] = [forward, backward] if smooth else [forward]
            ms = [min(clock.sample(call) for _ in range(2)) for call in found]
        except torch.OutOfMemoryError:
            if name == next(iter(ways)):
                raise
            continue
        except Exception as error:
            failed[name] = _failure(case, one, name, error)
            continue
        for direction, call in enumerate(found):
            calls[direction][name], first[direction][name] = [call], ms[direction]
    for direction, times in enumerate(first):
        most = MUCH_SLOWER * next(iter(times.values()), 0.0)
        near = {name: call for name, call in calls[direction].items() if times[name] <= most}
        timed = interleave(near, clock, budget_s=SECONDS, min_runs=3) if near else {}
        times |= {name: timing.p20_ms for name, timing in timed.items()}
    return {name: (ms, first[1].get(name, 0.0)) for name, ms in first[0].items()}, failed


Forced = tuple[str, tuple[Any, ...], tuple[Any, ...]]  # name of a table, place, config
GLUON = "triton.experimental.gluon._runtime"  # its kernels have a compiler source of their own
ROWS = 128  # a kernel depends on the number of rows through its divisors only


def warm(
    cases: Sequence[Case],
    gpu: tuple[int, int],
    processes: int | None = None,
    forced: Sequence[Forced | None] = (),
) -> list[str]:
    """Compiles what proofs of these cases launch and Triton's cache does not hold; returns the
    errors, which the proof repeats.

    Args:
        forced: for each case, an entry that replaces one of its config tables'; default: none.
        gpu: compute capability (80 for sm_80) and count of multiprocessors, which determine grids
            and thus the arguments of kernels.
        processes: at most so many; by default one per core that this process may use, at most 16.
    """
    rows = [
        [case.op, str(case.dtype).removeprefix("torch."), case.size, instead]
        for case, instead in itertools.zip_longest(cases, forced)
    ]
    jobs, errors = _in_a_thread(functools.partial(missing, rows, gpu))
    count = min(processes or min(16, len(os.sched_getaffinity(0))), len(jobs))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    command = call_command("fastpar.doctor.trial.compile_part")
    running = [
        subprocess.Popen(
            [*command, json.dumps([gpu, rows, jobs[i::count]])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(count)
    ]
    errors += [line for process in running for line in process.communicate()[0].splitlines()]
    ended = {process.returncode for process in running} - {0}
    return errors + [f"a process ended with status {status}" for status in ended]


Jobs = list[tuple[int, int]]  # row, number of a launch


def missing(rows: Sequence[Any], gpu: tuple[int, int]) -> tuple[Jobs, list[str]]:
    """Each distinct launch that Triton's cache does not hold; and what could not be recorded."""
    found, seen, errors = Jobs(), set[str](), list[str]()
    for i, row in enumerate(rows):
        try:
            launches = _launches(row, gpu)
        except Exception as error:
            errors.append(f"{row[0]} {row[1]}: {_line(str(error), 0) or type(error).__name__}")
            continue
        for n, launch in enumerate(launches):
            kind = repr(
                (launch.name, launch.signature, launch.constexprs, launch.attrs, launch.options)
            )
            if kind not in seen and compile_launch(launch, gpu, only_look=True) is None:
                found.append((i, n))
            seen.add(kind)
    return found, errors


def _launches(row: Sequence[Any], gpu: tuple[int, int]) -> list[Any]:
    op, dtype, size, forced = row
    return launches_of(Case("cpu", op, getattr(torch, dtype), size), gpu, forced)


def compile_launch(launch: Any, gpu: tuple[int, int], only_look: bool = False) -> Any:
    """A launch, compiled by way of Triton's cache; only_look: None if it is not there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source_of = importlib.import_module(GLUON).GluonASTSource if launch.kernel.is_gluon() else None
    source = (source_of or ASTSource)(
        launch.kernel, launch.signature, launch.constexprs, launch.attrs
    )
    if only_look:
        source.make_ir = None  # which is called for what is not in the cache
    try:
        with contextlib.redirect_stdout(sys.stderr):
            target = GPUTarget("cuda", gpu[0], 32)
            return triton.compile(source, target=target, options=launch.options)
    except Exception:
        if not only_look:
            raise
        return None


def launches_of(case: Case, gpu: tuple[int, int], forced: Forced | None = None) -> list[Any]:
    """The launches of a proof's calls, forward and backward; none of an op without Triton."""
    if "triton" not in backend.OPS.get(case.op.removesuffix("_masked"), ("", ""))[1]:
        return []
    from fastpar.kernels.triton_launch import record

    found: list[Any] = []
    before = backend.choice, backend.recording
    backend.choice, backend.recording = "triton", True
    try:
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(record(*gpu))
            stack.enter_context(trying(case.op, OWN))
            if forced is not None:
                name, place, config = forced
                table = TABLES[name]
                stack.enter_context(table.trying(tuple(place), table.kind(*config)))
            calls = proof_cases(case.op, case.size, "cpu", ROWS)
            if case.op == "attention":  # has separate kernels for partial tiles
                calls += cases_of_many_rows(case.op, case.size, "cpu")
            for one in calls:
                if case.dtype in one.dtypes:
                    one.results(case.dtype, "cpu")
            if case.op == "attention" and gpu[0] == 90 and "hopper" not in left_out:
                _call_hopper_kernels(case)
    finally:
        backend.choice, backend.recording = before
    return found


def _call_hopper_kernels(case: Case) -> None:
    """Calls the Hopper kernels of this case; none if Triton is too old for them."""
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(case.dtype)
    with contextlib.suppress(ImportError):
        for module in ("attention.hopper_triton", "attention.hopper_bwd_triton"):
            for name, call in backend.triton_module(module).aot_calls():
                if name.startswith(f"D={case.size} {dtype} "):
                    call()


def compile_part() -> None:
    """One of warm()'s processes: compiles its share, prints what could not be compiled."""
    gpu, rows, jobs = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    for i, numbers in itertools.groupby(jobs, key=lambda job: job[0]):
        launches = _launches(rows[i], gpu)
        for _, n in numbers:
            try:
                compile_launch(launches[n], gpu)
            except Exception as error:
                first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"{launches[n].name}: {first_line}")
