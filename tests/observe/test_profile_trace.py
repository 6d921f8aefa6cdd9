"""Times from a trace: own time of operations, phases, kernels by stream, gaps."""

import pytest

from fastpar.comm.recorder import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    HOST,
    INPUT,
    OPTIMIZER,
    REDUCE,
    WAIT,
    Span,
)
from fastpar.observe.trace import (
    COMMUNICATION,
    MEMORY,
    OpTime,
    kind_of,
    product_flops,
    times_of,
)


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def phase(name, ts, dur):
    return event(f"fastpar {name}", "user_annotation", ts, dur)


def op(name, ts, dur, dims=(), tid=1, **args):
    return event(name, "cpu_op", ts, dur, tid, **{"Input Dims": list(dims), **args})


def step(at):
    """1 ms: a tenth input, then forward, backward, optimizer; times in us."""
    return [
        phase(INPUT, at, 100),
        op("aten::copy_", at + 10, 30),
        phase(FORWARD, at + 100, 400),
        op("linear", at + 110, 200, [[4, 8, 16], [32, 16], []]),
        op("aten::view", at + 120, 50),  # inside of linear, and no work
        op("aten::add", at + 320, 100, [[32]]),
        phase(BACKWARD, at + 500, 300),
        op("linearBackward", at + 500, 250),
        op("fastpar::linear_bwd", at + 520, 150, [[4, 8, 32], [4, 8, 16], [32, 16]]),
        event("fastpar wait", "user_annotation", at + 680, 60),
        op("aten::mul", at + 700, 20),  # of the waiting thread
        op("aten::mm", at + 520, 200, tid=2),  # another thread's
        phase(OPTIMIZER, at + 800, 200),
        event("Optimizer.step#AdamW.step", "user_annotation", at + 800, 200),
        op("fastpar::adamw_step_", at + 850, 100),
    ]


def test_own_times_go_to_phases_and_the_rest_is_the_host():
    found = times_of(step(5000) + step(6000) + [{"ph": "M", "name": "thread_name"}])
    assert found.step_ms == pytest.approx(1.0)

    def parts(compute, memory, communication, host):
        kinds = {COMPUTE: compute, MEMORY: memory, COMMUNICATION: communication, HOST: host}
        return {kind: pytest.approx(ms) for kind, ms in kinds.items()}

    assert found.parts == {
        INPUT: parts(0, 0.03, 0, 0.07),
        FORWARD: parts(0.15, 0.1, 0, 0.15),
        BACKWARD: parts(0.15, 0.02, 0.04, 0.09),
        OPTIMIZER: parts(0, 0.1, 0, 0.1),
    }
    told = {(o.name, o.phase, o.calls): o for o in found.ops[:2]}
    assert set(told) == {("linear", FORWARD, 1), ("linear_bwd", BACKWARD, 1)}
    linear = told["linear", FORWARD, 1]
    assert linear.shape == ((4, 8, 16), (32, 16))
    assert linear.ms == pytest.approx(0.15)
    assert all(o.name not in ("aten::view", "linearBackward", "aten::mm") for o in found.ops)


def test_an_op_inside_of_itself_is_one_call():
    """torch.compile calls it so: through the dispatcher, autograd, and the dispatcher again."""
    dims = [[2, 3, 5], [7, 5]]
    events = [
        phase(FORWARD, 0, 100),
        op("fastpar::linear", 10, 60, dims),
        op("linear", 20, 40, dims),
        op("fastpar::linear", 30, 20, dims),
        op("fastpar::linear", 80, 10, dims),
        phase(OPTIMIZER, 100, 10),
    ]
    (found,) = times_of(events).ops
    assert (found.name, found.calls, found.ms) == ("linear", 2, pytest.approx(0.07))


def kernel(name, launch, ts, dur, number):
    return [
        event("cudaLaunchKernel", "cuda_runtime", launch, 1, tid=7, correlation=number),
        event(name, "kernel", ts, dur, tid=9, correlation=number, **{"External id": number}),
    ]


def gpu_step(at):
    """1000 us on the device: 100 us wait for NCCL, 250 us wait for the host."""
    return [
        phase(INPUT, at, 50),
        *kernel("Memcpy", at + 10, at + 20, 30, at + 1),
        phase(FORWARD, at + 50, 100),
        op("aten::addmm", at + 60, 20, [[32], [8, 16], [16, 32]], **{"External id": at + 2}),
        *kernel("ampere_gemm", at + 70, at + 200, 300, at + 2),  # 150 us of nothing before
        phase(BACKWARD, at + 150, 100),
        *kernel("vectorized_elementwise", at + 160, at + 500, 200, at + 3),
        *kernel("ncclDevKernel_AllReduce", at + 170, at + 600, 200, at + 4),
        phase(OPTIMIZER, at + 250, 50),
        *kernel("adamw", at + 260, at + 900, 100, at + 5),
    ]


def test_on_a_gpu_kernels_belong_to_the_phase_that_launched_them():
    found = times_of(gpu_step(0) + gpu_step(1000))
    assert found.step_ms == pytest.approx(1.0)
    forward, backward = found.parts[FORWARD], found.parts[BACKWARD]
    assert forward[COMPUTE] == pytest.approx(0.3)
    assert forward[HOST] == pytest.approx(0.15)
    assert backward[MEMORY] == pytest.approx(0.2)
    assert backward[COMMUNICATION] == pytest.approx(0.1)  # the half that nothing hides
    assert found.parts[OPTIMIZER][MEMORY] == pytest.approx(0.1)
    assert found.parts[OPTIMIZER][HOST] == pytest.approx(0.1)
    assert found.ops[0] == OpTime(
        "aten::addmm", FORWARD, COMPUTE, ((32,), (8, 16), (16, 32)), 1.0, pytest.approx(0.3)
    )
    # Spans are those of the last step.
    rows = {row: [s for s in found.spans if s.row == row] for row in (HOST, COMPUTE, REDUCE, WAIT)}
    assert [s.name for s in rows[COMPUTE]] == [INPUT, FORWARD, BACKWARD, OPTIMIZER]
    (wait,) = rows[WAIT]
    assert (wait.begin_ms, wait.end_ms) == (pytest.approx(0.7), pytest.approx(0.8))
    assert rows[REDUCE] == [Span(REDUCE, REDUCE, pytest.approx(0.6), pytest.approx(0.8))]
    assert rows[HOST][0].begin_ms == pytest.approx(0.0)


def test_kinds_and_flops_of_operations():
    for name, kernel, kind in (
        ("linear", "", COMPUTE),
        ("fastpar::attention_bwd", "", COMPUTE),
        ("aten::mm", "", COMPUTE),
        ("aten::mul", "", MEMORY),
        ("aten::sum", "", MEMORY),
        ("aten::new_empty", "", HOST),
        ("autograd::engine::evaluate_function: linearBackward", "", HOST),
        ("linearBackward", "", HOST),
        ("", "_attention_fwd_kernel", COMPUTE),
        ("aten::linear", "nvjet_hsh_128x256", COMPUTE),
        ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum", COMMUNICATION),
    ):
        assert kind_of(name, kernel) == kind, name
    for name, shape, flops in (
        ("linear", ((2, 3, 5), (7, 5)), 2 * 6 * 5 * 7),
        ("linear_bwd", ((2, 3, 7), (2, 3, 5), (7, 5)), 4 * 6 * 5 * 7),
        ("aten::mm", ((3, 5), (5, 7)), 2 * 3 * 5 * 7),
        ("aten::bmm", ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        ("aten::addmm", ((7,), (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        ("aten::mul", ((3,), (3,)), None),
        ("linear", (), None),
    ):
        assert product_flops(OpTime(name, FORWARD, COMPUTE, shape, 1, 1.0)) == flops, name
    with pytest.raises(ValueError, match="times_of: expected ranges of phases in the trace, got n"):
        times_of([op("aten::mm", 0, 5)])
