"""A trial: its timer, on a double of a GPU's clock too; who serves attention, by a trial of all."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cells import slow

from fastpar.doctor import doctor, report, trial
from fastpar.doctor.table import ProofTable
from fastpar.doctor.trial import CYCLES_PER_US, CpuClock, CudaClock, Timing, interleave
from fastpar.kernels import choice
from fastpar.kernels.attention import peers as attention_peers
from fastpar.kernels.cases import proof_cases
from fastpar.kernels.choice import OWN, STOCK, Case

PLAIN = Case("cpu", "attention", torch.float32, 32)
TIMES = {  # forward, backward
    "own": (2.0, 2.0), "cpu": (1.0, 3.0), "instead": (3.0, 3.0), "stock": (9.0, 9.0),
}  # fmt: skip


class ScriptedClock:
    """Returns what the call returns, and keeps the order of calls."""

    def __init__(self):
        self.order = []

    def sample(self, call):
        name, ms = call()
        self.order.append(name)
        return ms


def test_interleave_takes_turns_and_rotates_inputs():
    clock = ScriptedClock()
    variants = {
        "a": [lambda: ("a0", 1.0), lambda: ("a1", 3.0)],
        "b": [lambda: ("b0", 10.0), lambda: ("b1", 30.0)],
    }
    timings = interleave(variants, clock, budget_s=0.0, min_runs=4, max_runs=9)
    assert clock.order[:4] == ["a0", "a1", "b0", "b1"]  # warm-up, not counted
    assert clock.order[4:] == ["a0", "b0", "a1", "b1"] * 2
    assert timings["a"].median_ms == 2.0
    assert timings["b"].median_ms == 20.0
    assert timings["a"].runs == 4
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert (timing.median_ms, timing.p20_ms, timing.p80_ms, timing.runs) == (3.5, 2.0, 5.0, 6)
    sleeping = {"a": [lambda: time.sleep(0.005)]}
    assert 2 <= interleave(sleeping, CpuClock(), budget_s=0.05, min_runs=2)["a"].runs <= 11


class FakeCuda:
    """A stream and the host's clock: an operation starts when the host enqueues it, or after the
    last one."""

    def __init__(self):
        self.now, self.free_at, self.log = 0.0, 0.0, []

    def perf_counter(self):
        return self.now

    def enqueue(self, name, seconds):
        self.free_at = max(self.free_at, self.now) + seconds
        self.log.append(name)
        return self.free_at

    def synchronize(self):
        self.now = max(self.now, self.free_at)

    def _sleep(self, cycles):
        self.enqueue("sleep", cycles / CYCLES_PER_US / 1e6)

    def Event(self, enable_timing):  # noqa: N802
        event = SimpleNamespace(synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", self.enqueue("event", 0.0))
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event


def test_cuda_sample_hides_the_host(monkeypatch):
    """Two kernels of 1 ms whose launches take 4 ms each are timed as 2 ms."""
    cuda = FakeCuda()
    monkeypatch.setattr(trial, "time", cuda)
    clock = CudaClock(cuda, flush=lambda: cuda.enqueue("flush", 0.0))

    def call():
        for _ in range(2):
            cuda.now += 0.004
            cuda.enqueue("kernel", 0.001)

    assert clock.sample(call) == pytest.approx(2.0)
    assert cuda.log[-6:] == ["flush", "sleep", "event", "kernel", "kernel", "event"]
    assert clock.host_us(call, runs=3) == pytest.approx(8000)  # the enqueueing alone


@pytest.mark.parametrize(
    ("cpu_ms", "serves"),
    [
        ((1.0, 3.0), ("cpu", "own")),
        ((3.0, 1.0), ("own", "cpu")),
        ((1.0, 1.0), ("cpu", "cpu")),
        ((1.97, 1.97), ("own", "own")),  # as good as equal
    ],
)
def test_attentions_passes_are_by_whoever_is_faster(monkeypatch, no_proofs, cpu_ms, serves):
    monkeypatch.setattr(trial, "_times", lambda *_: (TIMES | {"cpu": cpu_ms}, {}))
    monkeypatch.setattr(trial, "what_is_wrong", lambda *_: "")
    proof = doctor.adopt([PLAIN])[PLAIN]
    assert (proof.chosen, proof.serves) == (OWN, serves)
    assert [(peer.name, peer.ms) for peer in proof.peers] == [("cpu", cpu_ms)]
    assert ProofTable("cpu").proofs == {PLAIN: proof}
    assert [choice.server("attention", torch.ones(2, 32), i) for i in (0, 1)] == list(serves)
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())
    said = f"{PLAIN}: forward by {serves[0]}" in "\n".join(report.known_choices())
    assert said or serves == ("own", "own")


OWN_IS_SLOW = TIMES | {"own": (9.0, 9.0), "cpu": (9.0, 9.0)}
CPU_IS_FAST = TIMES | {"cpu": (1.0, 1.0)}
SEEN = {  # timings one after another, what is chosen
    "noise is not repeated": ([OWN_IS_SLOW, TIMES | {"cpu": (4.0, 4.0)}], (OWN, OWN, OWN)),
    "two agree": ([OWN_IS_SLOW, OWN_IS_SLOW], (STOCK, OWN, OWN)),
    "two agree later": ([CPU_IS_FAST, TIMES, CPU_IS_FAST], (OWN, "cpu", "cpu")),
    "each says something else": (
        [CPU_IS_FAST, TIMES, OWN_IS_SLOW, TIMES | {"cpu": (3.0, 1.0)}], (OWN, OWN, OWN)
    ),
}  # fmt: skip


def proof_by(monkeypatch, *timings, wrong=lambda *_: ""):
    """The proof of a trial that has these timings, one after another."""
    given = iter(timings)
    monkeypatch.setattr(trial, "_times", lambda *_: (next(given), {}))
    monkeypatch.setattr(trial, "what_is_wrong", wrong)
    proof = trial.prove(PLAIN)
    assert next(given, None) is None
    return proof


@pytest.mark.parametrize("case", SEEN)
def test_one_timing_of_a_busy_machine_decides_nothing(monkeypatch, case):
    timings, (chosen, *serves) = SEEN[case]
    proof = proof_by(monkeypatch, *timings)
    assert (proof.chosen, *proof.serves) == (chosen, *serves)


def test_one_timing_of_torch_compile_decides_nothing(monkeypatch):
    fast, slow = (TIMES | {"cpu": (4.0, 4.0), "compiled": (ms, ms)} for ms in (1.0, 3.0))
    assert not trial.is_faster_compiled(proof_by(monkeypatch, fast, slow))
    assert trial.is_faster_compiled(proof_by(monkeypatch, fast, fast))


@pytest.mark.parametrize("broken", ["cpu", "cpu/own"])
def test_an_implementation_that_is_wrong_serves_nothing(monkeypatch, broken):
    """Alone, or as a forward for the own backward."""
    wrong = lambda case, found, what=OWN: "dq" * (what == broken)  # noqa: E731
    proof = proof_by(monkeypatch, TIMES, wrong=wrong)
    assert proof.serves == ("own", "own")
    assert [peer.wrong for peer in proof.peers] == ["dq" * (broken == "cpu")]


def proof_with(monkeypatch, rows=64, **changes):
    """The proof of a quick trial in which torch's attention has these changes."""
    monkeypatch.setattr(trial, "SECONDS", 0.01)
    peers = attention_peers.PEERS
    monkeypatch.setitem(peers, "cpu", peers["cpu"]._replace(**changes))
    return trial.prove(PLAIN._replace(size=64), rows=rows)


def test_an_implementation_that_fails_at_the_timed_size_serves_nothing(monkeypatch):
    forward = attention_peers.PEERS["cpu"].forward

    def refuse(q, *rest):
        if q.shape[1] > 96:
            raise RuntimeError("too many rows")
        return forward(q, *rest)

    proof = proof_with(monkeypatch, rows=128, forward=refuse)
    assert proof.serves == (OWN, OWN)
    (peer,) = proof.peers
    assert peer.wrong == "at B=1 T=128 D=64 H=4: RuntimeError: too many rows"


@pytest.mark.parametrize(
    ("ms", "changes", "right"), [(0.5, 0.0, True), (0.5, 1e-3, False), (0.98, 0.0, False)]
)
def test_pytorch_alone_is_named_where_it_is_right_and_faster(monkeypatch, ms, changes, right):
    """Not the fallback, which keeps fastpar's promises: both are timed."""
    case, calls = Case("cpu", "bias_gelu", torch.float32, 96), []

    def alone(x, bias):
        calls.append(1)
        return F.gelu(x + bias, approximate="tanh") + changes * len(calls)

    found = proof_cases("bias_gelu", 96, "cpu", 64)[:2]
    for one in found:
        monkeypatch.setattr(one, "stock", alone)
    monkeypatch.setattr(trial, "proof_cases", lambda *_: found)
    times = {"own": (1.0, 1.0), "instead": (1.0, 1.0), "stock": (ms, 1.0)}
    monkeypatch.setattr(trial, "_times", lambda *_: (times, {}))
    proof = trial.prove(case)
    assert (proof.chosen, proof.stock_right) == (OWN, right)
    said = "\n".join(report.notes({case: proof}))
    assert ("1.500, and are as right, with the same bits twice" in said) == right


def test_a_peer_is_timed_in_both_directions_unless_it_cannot_serve_the_call(monkeypatch):
    """The own kernel would run under its name."""
    (peer,) = proof_with(monkeypatch).peers
    assert (peer.name, peer.wrong, min(peer.ms) > 0) == ("cpu", "", True)
    monkeypatch.setattr(attention_peers, "refusal", lambda *a, **k: "needs a GPU of sm_90")
    assert proof_with(monkeypatch).peers == ()


CHILD = """
import ctypes, os, sys, time
from fastpar.doctor import trial
from fastpar.kernels.attention.peers import PEERS
how = sys.argv.pop(1)
forward = PEERS["cpu"].forward
faults = {
    "hangs": lambda: time.sleep(1e6), "crashes": lambda: ctypes.string_at(0), "is right": str,
    "is killed": lambda: os.kill(os.getpid(), 9),
}
PEERS["cpu"] = PEERS["cpu"]._replace(forward=lambda *args: (faults[how](), forward(*args))[1])
trial.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("hangs", "its trial took more than 2 s"),
        ("is killed", None),
        slow("crashes", "its trial ended with status -11"),
        slow("is right", ""),
    ],
)
def test_one_that_may_hang_is_tried_in_a_process_of_its_own(monkeypatch, tmp_path, how, why):
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py"), how]
    monkeypatch.setattr(trial, "call_command", lambda function: command)
    monkeypatch.setattr(trial, "LIMIT_S", 2 if how == "hangs" else 600)
    assert trial.wrong_in_subprocess(PLAIN._replace(size=64), 64, "cpu") == why


def test_a_process_that_does_not_start_says_nothing_about_what_it_would_have_tried(monkeypatch):
    code = "import sys; sys.exit('no module')"
    monkeypatch.setattr(trial, "call_command", lambda function: [sys.executable, "-c", code])
    words = "cpu was not tried because .* did not start: status 1 no module"
    with pytest.warns(UserWarning, match=words):
        assert trial.wrong_in_subprocess(PLAIN, 64, "cpu") is None


def test_what_was_wrong_in_a_process_of_its_own_is_kept_and_serves_nothing(monkeypatch):
    for why, peers in (("it hangs", ["it hangs"]), (None, [])):
        monkeypatch.setattr(trial, "wrong_in_subprocess", lambda *_, why=why: why)
        proof = proof_with(monkeypatch, in_subprocess=True)
        assert [peer.wrong for peer in proof.peers] == peers
        assert proof.serves == (OWN, OWN)
