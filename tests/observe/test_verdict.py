"""The verdict: constructed numbers in, words out."""

import re
from dataclasses import fields

import pytest

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
    assert found.shares == {
        COMPUTE: pytest.approx(0.75),
        MEMORY: pytest.approx(0.18),
        COMMUNICATION: pytest.approx(0.02),
        HOST: pytest.approx(0.04),
        INPUT: pytest.approx(0.01),
    }
    assert advise(found) == ["No rule applies: compute-bound, products at 80 % of the ceiling."]
    step, products, others = verdict(found)
    assert "compute-bound: 75 % of 100.0 ms" in step
    assert "80 %" in products
    assert "50 %" in others
    found = measured(world_size=2, transport="shm", moving_ms=8.0, sent_bytes=16e6)
    assert "8.0 ms (2 GB/s sent a rank over shm), 75 %" in verdict(found)[-1]


def test_each_phase_has_its_own_bound():
    found = measured()
    assert [p.bound for p in PHASES] == [INPUT, COMPUTE, COMPUTE, MEMORY]
    rows = [line.split() for line in table(found)]
    assert rows[1][0] == INPUT
    assert rows[2] == [
        FORWARD,
        "30.00",
        *["30", "%", "83", "%", "13", "%", "0", "%", "3", "%", "80", "%", "50", "%", "compute"],
    ]
    assert rows[-1][:2] == ["step", "100.00"]
    assert rows[-1][-1] == COMPUTE


def on_host(share):
    """A step of 100 ms with this share of it on the host."""
    return (
        PHASES[0],
        PHASES[1]._replace(host_ms=100 * share, compute_ms=70.0 - 100 * share),
        *PHASES[3:],
    )


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
CASES = {
    "no module": (measured(forced_backend="none"), "There is no compiled module, so torch"),
    "forced": (measured(forced_backend="torch"), "FASTPAR_BACKEND=torch forces a backend: unset"),
    "fp32 on a GPU": (measured(device_type="cuda"), "--dtype bf16 is several times"),
    "input": (measured(LATE), "Batches take 17 % of the step: keep the token cache on a local"),
    "host, accumulating": (measured(on_host(0.4), micro_batch_size=4, grad_accum_steps=4),
        "The host takes 50 % of the step: --micro-batch-size 8 does the same samples"),
    "host, odd accumulation": (
        measured(on_host(0.4), micro_batch_size=4, grad_accum_steps=3, batch_size=12),
        "--micro-batch-size 12 does the same samples in fewer"),
    "host": (measured(on_host(0.4)), "a larger --batch-size (now 16)"),
    "small products": (measured(slow(4), micro_batch_size=1),
        "Products of 1024 rows reach 20 % of the ceiling: a larger --batch-size"),
    "compile": (measured(on_host(0.4), **GPU),
        "The GPU waits for the host, here without CUDA graphs: a run whose"),
    "threads": (measured(idle_cores=3), "3 cores of this machine belong to no rank: leave --thr"),
    "gloo": (exposed(REDUCE, transport="gloo"), "--transport auto uses shared memory"),
    "uneven": (exposed(CONTROL), "20.0 ms a step wait for the slowest rank"),
    "tp": (exposed(TP, tp=2), "inside of layers: --tp 1 with a higher --zero stage"),
    "cp": (exposed(TP, cp=2), "of sequences: --cp 1 with --activation-checkpointing full"),
    "cp by keys": (exposed(TP, cp=2, cp_method="keys"), "--cp-method heads sends 67% as much"),
    "pp, few micro-batches": (exposed(PP_WAIT, pp=2, micro_batch_size=4, grad_accum_steps=4),
        "wait for other stages of the pipeline: --micro-batch-size 2 gives them more"),
    "pp, 1f1b": (exposed(PP_WAIT, **PP), "--schedule zb-v has"),
    "pp, zb-v": (exposed(PP_WAIT, **PP, schedule="zb-v", chunks=2),
        "a larger --batch-size has more micro-batches; --pp-split moves layers"),
    "gather 3": (exposed(GATHER, zero_stage=3),
        "wait for gathered weights: --zero 2 keeps them whole, for 249 MB more a rank"),
    "gather 2": (exposed(GATHER, zero_stage=2), "wait for updated weights: --zero 0 keeps the"),
    "reduced often": (exposed(REDUCE, grad_accum_steps=4, accumulate="shard"),
        "which are sent 4 times: --accumulate full sends their sum once"),
    "wide wire": (exposed(REDUCE, dtype="bf16"), "--reduce-dtype bf16 halves the bytes"),
    "one bucket": (exposed(REDUCE, n_buckets=1, bucket_mb=8.0),
        "in 1 buckets, the first of which leaves late: --bucket-mb 2."),
    "small buckets": (exposed(REDUCE, n_buckets=40, bucket_mb=0.25),
        "in 40 buckets of 0.25 MB: --bucket-mb 1."),
    "reduce": (exposed(REDUCE, n_buckets=5, bucket_mb=4.0),
        "a larger --batch-size per step with --grad-accum-steps sends them less often"),
    "fixed sums": (exposed(REDUCE, deterministic=True), "leave --deterministic out"),
    "update, ranks": (measured(UPDATE, world_size=4),
        "The optimizer takes 30 % of the step: --zero 1 gives each of 4 ranks its part"),
    "update, GPU": (measured(UPDATE, **GPU), "--moment-dtype bf16 moves half the bytes"),
    "update": (measured(UPDATE), "--grad-accum-steps updates less often"),
    "recomputing": (measured(activation_checkpointing="full"),
        "(--activation-checkpointing full): selective does less of it"),
    "recomputing some": (measured(activation_checkpointing="selective"), "none does less of it"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_rule_speaks_where_its_numbers_say_so(case):
    found, words = CASES[case]
    assert any(words in text for text in advise(found)), advise(found)


def test_advice_that_is_not_given():
    """No shared memory without the module; small waits and one rank are no reason to change."""
    assert not any(
        "gloo" in line for line in advise(exposed(REDUCE, transport="gloo", forced_backend="none"))
    )
    assert advise(exposed(REDUCE, ms=5.0))[0].startswith("No rule applies")
    assert advise(measured(world_size=2, waited_ms={}))[0].startswith("No rule applies")


def test_what_is_not_known_has_no_fraction():
    found = measured((Phase(FORWARD, host_ms=5.0),))
    assert found.of_matmul(found.phases) is found.of_copy(found.phases) is None
    assert found.bound == HOST
    assert len(verdict(found)) == 1


def test_work_goes_to_phases_by_direction():
    ops = [
        Op("matmul", (1, 1, 1), "forward", 10.0, 1.0, 2),
        Op("matmul", (1, 1, 1), "recompute", 10.0, 1.0, 1),
        Op("loss", (1, 1, 1), "forward", 5.0, 1.0, 1),
        Op("layer_norm", (1, 1), "backward", 3.0, 7.0, 2),
        Op("optimizer", (4,), "forward", 1.0, 9.0, 1),
        Op("copy", (4,), "backward", 0.0, 2.0, 1),
    ]
    assert work_of(ops) == {
        FORWARD: {"flops": 25.0, "bytes": 0.0},
        BACKWARD: {"flops": 10.0, "bytes": 16.0},
        OPTIMIZER: {"flops": 0.0, "bytes": 9.0},
    }


@pytest.mark.parametrize(
    ("ms", "waited", "expected"),
    [
        (24.0, 4.0, (10.0, 6.0, 4.0, 4.0)),  # the host gives way first
        (12.0, 4.0, (5.0, 3.0, 4.0, 0.0)),  # then operations
        (64.0, 4.0, (20.0, 12.0, 4.0, 28.0)),  # another program: all grow alike
        (3.0, 5.0, (0.0, 0.0, 3.0, 0.0)),
    ],
)
def test_a_profiled_phase_is_fitted_to_one_without_the_profiler(ms, waited, expected):
    found = fitted(Phase(FORWARD, 10.0, 6.0, 9.0, 14.0, flops=1.0), ms, waited)
    assert tuple(found)[1:5] == pytest.approx(expected)
    assert found.ms == pytest.approx(ms)
    assert found.flops == 1.0
    assert fitted(Phase(INPUT), 2.0, 0.5) == Phase(INPUT, communication_ms=0.5, host_ms=1.5)


def test_the_parts_of_muons_update():
    phases = (Phase(FORWARD, compute_ms=60.0), Phase(OPTIMIZER, 30.0, 4.0, 5.0, 1.0))
    found = measured(phases, optimizer="muon")
    numbers = re.findall(r"\d+\.\d", verdict(found)[-1])
    assert numbers == ["40.0", "30.0", "4.0", "5.0", "1.0"]
    op = Op("orthogonalize", (4, 8), "forward", 100.0, 10.0, 3)
    assert work_of([op])[OPTIMIZER] == {"flops": 300.0, "bytes": 0.0}
