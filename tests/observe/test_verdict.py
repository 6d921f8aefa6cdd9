"""The verdict: constructed numbers in, words out."""

import re
from dataclasses import fields

import pytest
from cells import sweep

from fastpar.axes.step import Op, Setup, Workload
from fastpar.comm.recorder import (
    BACKWARD,
    COMPUTE,
    CONTROL,
    FORWARD,
    GATHER,
    HOST,
    INPUT,
    OPTIMIZER,
    REDUCE,
    TP,
)
from fastpar.comm.recorder import PP as PP_WAIT
from fastpar.observe.trace import COMMUNICATION, MEMORY
from fastpar.observe.verdict import (
    Measured,
    Phase,
    Situation,
    advise,
    fitted,
    table,
    verdict,
    work_of,
)
from fastpar.predict.machine import Ceilings
from fastpar.settings.model import GPTConfig

CEILINGS = Ceilings(10.0, 0.1, "fp32 1536^3")
# 100 ms: products at 80 % of 0.1 TFLOP/s, the rest at half of the copy.
PHASES = (
    Phase(INPUT, host_ms=1.0),
    Phase(FORWARD, 25.0, 4.0, 0.0, 1.0, flops=2.0e9, bytes=2e7),
    Phase(BACKWARD, 50.0, 8.0, 2.0, 2.0, flops=4.0e9, bytes=4e7),
    Phase(OPTIMIZER, 0.0, 6.0, 0.0, 1.0, bytes=3e7),
)
LARGE = {"micro_batch_size": 16, "dtype": "fp32", "device_type": "cpu", "transport": "none"}
SEEN = {field.name for field in fields(Situation)}


def measured(phases=PHASES, batch_size=16, **known):
    situation = Situation(**{name: known.pop(name) for name in SEEN & set(known)})
    setup = Setup(**{**LARGE, **known})
    return Measured(phases, CEILINGS, Workload(GPTConfig(), batch_size), setup, situation)


def test_a_good_step_is_compute_bound_and_nothing_is_to_change():
    found = measured()
    assert found.bound == COMPUTE
    shares = {COMPUTE: 0.75, MEMORY: 0.18, COMMUNICATION: 0.02, HOST: 0.04, INPUT: 0.01}
    assert found.shares == pytest.approx(shares)
    assert advise(found) == ["No rule applies: compute-bound, products at 80 % of the ceiling."]
    for other in (exposed(REDUCE, ms=5.0), measured(world_size=2, waited_ms={})):
        assert advise(other)[0].startswith("No rule applies")
    no_module = advise(exposed(REDUCE, transport="gloo", forced_backend="none"))
    assert not any("gloo" in line for line in no_module)  # no shared memory without it
    step, products, others = verdict(found)
    assert "compute-bound: 75 % of 100.0 ms" in step
    assert "80 %" in products
    assert "50 %" in others
    sent = measured(world_size=2, transport="shm", moving_ms=8.0, sent_bytes=16e6)
    assert "8.0 ms (2 GB/s sent a rank over shm), 75 %" in verdict(sent)[-1]
    # Each phase has its own bound.
    assert [p.bound for p in PHASES] == [INPUT, COMPUTE, COMPUTE, MEMORY]
    lines = [line.split() for line in table(found)]
    assert " ".join(lines[2]) == "forward 30.00 30 % 83 % 13 % 0 % 3 % 80 % 50 % compute"
    assert (lines[-1][:2], lines[-1][-1]) == (["step", "100.00"], COMPUTE)
    # What is not known has no fraction.
    found = measured((Phase(FORWARD, host_ms=5.0),))
    assert found.of_matmul(found.phases) is found.of_copy(found.phases) is None
    assert (found.bound, len(verdict(found))) == (HOST, 1)
    # The parts of Muon's update.
    phases = (Phase(FORWARD, compute_ms=60.0), Phase(OPTIMIZER, 30.0, 4.0, 5.0, 1.0))
    numbers = re.findall(r"\d+\.\d", verdict(measured(phases, optimizer="muon"))[-1])
    assert numbers == ["40.0", "30.0", "4.0", "5.0", "1.0"]


def on_host(share):
    """A step of 100 ms with this share of it on the host."""
    forward = PHASES[1]._replace(host_ms=100 * share, compute_ms=70.0 - 100 * share)
    return (PHASES[0], forward, *PHASES[3:])


def exposed(kind, ms=20.0, **situation):
    """Two ranks that wait so long."""
    waited = {REDUCE: 0.5, GATHER: 0.5, TP: 0.0, CONTROL: 0.5, kind: ms}
    phases = (*PHASES[:2], PHASES[2]._replace(communication_ms=ms), PHASES[3])
    return measured(phases, **{"world_size": 2, "waited_ms": waited, **situation})


def slow(factor):
    """The products take so much longer."""
    return tuple(p._replace(compute_ms=p.compute_ms * factor) for p in PHASES)


UPDATE = (*PHASES[:3], Phase(OPTIMIZER, memory_ms=40.0, bytes=2e8))
LATE = (Phase(INPUT, host_ms=20.0), *PHASES[1:])
GPU = {"device_type": "cuda", "dtype": "bf16"}
PP = {"pp": 2, "micro_batch_size": 1, "grad_accum_steps": 4}
CASES = [
    (measured(forced_backend="none"), "The compiled module is missing, so torch"),
    (measured(forced_backend="torch"), "FASTPAR_BACKEND=torch forces a backend: unset"),
    (measured(device_type="cuda"), "--dtype bf16 makes products several times"),
    (measured(LATE), "Fetching batches takes 17 % of the step: keep the token"),
    (measured(on_host(0.4), micro_batch_size=4, grad_accum_steps=4), "--micro-batch-size 8 does"),
    (measured(on_host(0.4), 12, micro_batch_size=4, grad_accum_steps=3), "--micro-batch-size 12"),
    (measured(on_host(0.4)), "a larger --batch-size (now 16)"),
    (measured(slow(4), micro_batch_size=1), "Products of 1024 rows reach 20 % of the ceiling"),
    (measured(on_host(0.4), **GPU), "The GPU waits for the host, here without CUDA graphs"),
    (measured(idle_cores=3), "3 cores of this machine are unused: drop --threads"),
    (exposed(REDUCE, transport="gloo"), "--transport auto uses shared memory"),
    (exposed(CONTROL), "20.0 ms a step wait for the slowest rank"),
    (exposed(TP, tp=2), "tensor-parallel exchanges: --tp 1 with a higher --zero stage"),
    (exposed(TP, cp=2), "context-parallel exchanges: --cp 1 with --activation-checkpointing full"),
    (exposed(TP, cp=2, cp_method="keys"), "--cp-method heads sends 67% as much"),
    (exposed(PP_WAIT, **{**PP, "micro_batch_size": 4}), "--micro-batch-size 2 gives more"),
    (exposed(PP_WAIT, **PP), "--schedule zb-v runs two"),
    (exposed(PP_WAIT, **PP, schedule="zb-v", chunks=2), "--pp-split moves layers"),
    (exposed(GATHER, zero_stage=3), "--zero 2 keeps them whole, for 249 MB more a rank"),
    (exposed(GATHER, zero_stage=2), "wait for updated weights: --zero 0 keeps"),
    (exposed(REDUCE, grad_accum_steps=4, accumulate="shard"), "--accumulate full sends their sum"),
    (exposed(REDUCE, dtype="bf16"), "--reduce-dtype bf16 halves the bytes"),
    (exposed(REDUCE, n_buckets=1, bucket_mb=8.0), "in 1 buckets, .* sent late: --bucket-mb 2."),
    (exposed(REDUCE, n_buckets=40, bucket_mb=0.25), "in 40 buckets of 0.25 MB: --bucket-mb 1."),
    (exposed(REDUCE, n_buckets=5, bucket_mb=4.0), "with --grad-accum-steps sends them less often"),
    (exposed(REDUCE, deterministic=True), "drop --deterministic"),
    (measured(UPDATE, world_size=4), "30 % of the step: --zero 1 shards the update over 4 ranks"),
    (measured(UPDATE, **GPU), "--moment-dtype bf16 halves the bytes"),
    (measured(UPDATE), "--grad-accum-steps updates less often"),
    (measured(activation_checkpointing="full"), "(--activation-checkpointing full): selective"),
    (measured(activation_checkpointing="selective"), "none recomputes less"),
]


@sweep(("found", "words"), CASES)
def test_each_rule_speaks_where_its_numbers_say_so(found, words):
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), "\n".join(advise(found)))


def test_work_goes_to_phases_by_direction():
    ops = [
        Op("matmul", (1, 1, 1), "forward", 10.0, 1.0, 2),
        Op("matmul", (1, 1, 1), "recompute", 10.0, 1.0, 1),
        Op("loss", (1, 1, 1), "forward", 5.0, 1.0, 1),
        Op("layer_norm", (1, 1), "backward", 3.0, 7.0, 2),
        Op("optimizer", (4,), "forward", 1.0, 9.0, 1),
        Op("orthogonalize", (4, 8), "forward", 100.0, 10.0, 3),
        Op("copy", (4,), "backward", 0.0, 2.0, 1),
    ]
    assert work_of(ops) == {
        FORWARD: {"flops": 25.0, "bytes": 0.0},
        BACKWARD: {"flops": 10.0, "bytes": 16.0},
        OPTIMIZER: {"flops": 300.0, "bytes": 9.0},
    }


def test_a_profiled_phase_is_fitted_to_one_without_the_profiler():
    for ms, waited, expected in (
        (24.0, 4.0, (10.0, 6.0, 4.0, 4.0)),  # the host gives way first
        (12.0, 4.0, (5.0, 3.0, 4.0, 0.0)),  # then operations
        (64.0, 4.0, (20.0, 12.0, 4.0, 28.0)),  # another program: all grow alike
        (3.0, 5.0, (0.0, 0.0, 3.0, 0.0)),
    ):
        found = fitted(Phase(FORWARD, 10.0, 6.0, 9.0, 14.0, flops=1.0), ms, waited)
        assert tuple(found)[1:5] == pytest.approx(expected)
        assert (found.ms, found.flops) == pytest.approx((ms, 1.0))
    assert fitted(Phase(INPUT), 2.0, 0.5) == Phase(INPUT, communication_ms=0.5, host_ms=1.5)
