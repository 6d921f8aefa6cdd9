"""testing.py: ranks that fail, hang or die are reported and cleaned up; the 2x rule can say no."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fastpar.testing import assert_matches_oracle, gpu_arithmetic, measure_errors, run_ranks

BACKENDS = ["threads", "gloo"]


def add_ranks(offset):
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank(backend, world_size):
    results = run_ranks(add_ranks, world_size, 0.5, backend=backend)
    expected = sum(range(world_size)) + 0.5 * world_size
    assert results == [(r, torch.tensor([expected])) for r in range(world_size)]
    assert not dist.is_initialized()


class StrangeError(Exception):
    """Pickles, and cannot be made again from what was pickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def fail(kind):
    if dist.get_rank() == 1:
        raise kind("no luck") if kind is not StrangeError else StrangeError("no", "luck")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_failure_is_raised_with_its_rank(backend):
    with pytest.raises(KeyError, match="no luck") as caught:
        run_ranks(fail, 2, KeyError, backend=backend, timeout_s=3600)  # longer than a test may take
    assert "rank 1 failed:" in str(caught.value.__cause__)
    assert "in fail" in str(caught.value.__cause__)
    assert len(run_ranks(add_ranks, 2, 0.0, backend=backend)) == 2


def test_an_exception_that_does_not_travel_becomes_a_runtime_error():
    with pytest.raises(RuntimeError, match="StrangeError: no luck"):
        run_ranks(fail, 2, StrangeError, backend="gloo")


@pytest.mark.parametrize("backend", BACKENDS)
def test_failures_can_be_returned(backend):
    first, second = run_ranks(fail, 2, KeyError, backend=backend, return_exceptions=True)
    assert isinstance(first, RuntimeError | SystemExit)
    assert isinstance(second, KeyError)


def leave():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def test_a_process_that_dies_is_named():
    message = r"expected a result from rank 1, got exit code 7; the process was killed or left"
    results = run_ranks(leave, 2, backend="gloo", return_exceptions=True)
    with pytest.raises(RuntimeError, match=message):
        raise results[1]


def sleep_on_rank_1(seconds):
    if dist.get_rank() == 1:
        time.sleep(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "timeout_s", "hangs_s"), [("threads", 1, 2), ("gloo", 4, 600)])
def test_a_rank_that_hangs_is_named(backend, timeout_s, hangs_s):
    """Threads cannot be killed: that one ends by itself."""
    message = rf"expected every rank to end within {timeout_s} s, got no answer from rank 1; a coll"
    with pytest.raises(TimeoutError, match=message):
        run_ranks(sleep_on_rank_1, 2, hangs_s, backend=backend, timeout_s=timeout_s)


def pid():
    return os.getpid()


def forever():
    os.write(1, b"pid %d\n" % os.getpid())
    time.sleep(600)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc to look for processes")
def test_every_thread_has_the_callers_number_of_cores():
    """Also one that starts while another computes with fewer, as fastpar.patch does."""
    fewer, done = threading.Event(), threading.Event()

    def rank():
        if dist.get_rank() == 0:
            before = torch.get_num_threads()
            torch.set_num_threads(before + 1)
            fewer.set()
            done.wait(20)
            torch.set_num_threads(before)
            return before
        fewer.wait(20)
        found = torch.get_num_threads()
        done.set()
        return found

    expected = torch.get_num_threads()
    assert run_ranks(rank, 2) == [expected] * 2


def test_no_process_is_left_behind():
    assert not any(map(is_running, run_ranks(pid, 2, backend="gloo")))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc to look for processes")
def test_a_killed_parent_takes_its_ranks_along(tmp_path):
    (tmp_path / "killed_parent.py").write_text(
        textwrap.dedent(
            """
            from test_testing import forever
            from fastpar.testing import run_ranks
            if __name__ == "__main__":
                run_ranks(forever, 2, backend="gloo", timeout_s=600)
            """
        )
    )
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "killed_parent.py")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
        assert all(map(is_running, pids))
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    return dist.is_initialized(), [os.environ[name] for name in names]


def test_without_init_only_the_environment_is_set():
    results = run_ranks(environment, 2, backend="gloo", init=False)
    assert results == [(False, [str(r), str(r), "2", "127.0.0.1"]) for r in range(2)]


@pytest.mark.parametrize(
    ("world_size", "backend", "message"),
    [
        (0, "threads", r"expected world_size >= 1, got world_size=0"),
        (2, "mpi", r"expected backend threads or gloo, got backend=mpi"),
    ],
)
def test_bad_calls(world_size, backend, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(pid, world_size, backend=backend)


# The 2x rule


def square(x):
    return x * x


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(200, generator=generator).to(dtype).requires_grad_()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_eager_does_passes(dtype):
    report = assert_matches_oracle(square, square, inputs(dtype))
    assert list(report) == ["output 0", "gradient of input 0"]
    assert all(0 < error <= bound for error, bound in report.values())
    assert inputs()[0].grad is None


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2.00001 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x * x * (1 + 2e-6), r"output 0: expected error <= .*, got"),
        (WrongGradient.apply, r"gradient of input 0: expected error <= .*, got"),
        (lambda x: (x * x).where(x != x.max(), torch.nan), r"output 0: expected error .* got inf"),
        (lambda x: (x * x)[:-1], r"output 0: expected shape torch.Size\(\[200\]\), got"),
        (lambda x: (x * x).double(), r"output 0: expected dtype torch.float32, got torch.float64"),
        (lambda x: (x * x, x), r"results: expected \['output 0', 'gradient"),
        (lambda x: (x * x).detach(), r"results: expected .*, got \['output 0'\]"),
    ],
)
def test_what_is_wrong_fails(fn, message):
    with pytest.raises(AssertionError, match=message):
        assert_matches_oracle(fn, square, inputs())


def test_infinities_of_the_oracle_are_expected():
    x = [torch.tensor([0.0, 1.0, -1.0])]
    log = torch.log
    assert_matches_oracle(log, log, x)
    with pytest.raises(AssertionError, match="expected the oracle's infinities and NaNs"):
        assert_matches_oracle(lambda x: log(x).nan_to_num(), log, x)


def test_strides_integers_and_several_outputs_are_kept():
    def gather(x, index, scale):
        assert x.stride() == (1, 3)
        return x[index] * scale, x.sum()

    x = torch.randn(5, 3).t().requires_grad_()
    report = assert_matches_oracle(gather, gather, [x, torch.tensor([0, 2, 2]), 3.0])
    assert list(report) == ["output 0", "output 1", "gradient of input 0"]


def test_the_yardstick_can_be_another_function():
    def rough(x):
        return (x * x).bfloat16().float()

    with pytest.raises(AssertionError, match="output 0"):
        assert_matches_oracle(rough, square, inputs(), grad=False)
    assert_matches_oracle(rough, square, inputs(), eager=rough, grad=False)


def test_errors_are_those_of_each_against_fp64():
    """fn is off by 3 in one of four elements, the yardstick by 1 in all; inf is left out."""
    exact = torch.tensor([1.0, -4.0, 2.0, 3.0, torch.inf])
    ours = exact + torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0])
    (errors,) = measure_errors(
        lambda x: ours.clone(), lambda x: x.clone(), [exact], eager=lambda x: x + 1
    ).values()
    assert errors == (3.0, 1.5, 1.0, 1.0, 4.0 * 2.0**-24, 5, 4.0 * 2.0**-24)


def take_away(x):
    return x[:1] - x[1:]


def test_a_yardstick_without_error_leaves_the_condition_of_the_inputs():
    """A difference of sums: one rounding of 100 moves it by up to 2 * 100 * 2^-24."""
    x = [torch.tensor([100.0, 99.0])]
    for off, passes in ((2.0**-16, True), (2.0**-14, False)):
        (errors,) = measure_errors(lambda x, e=off: x[:1] - x[1:] + e, take_away, x).values()
        assert errors.eager_max == 0.0
        assert (errors.max <= errors.bound) == passes


def test_a_nan_is_an_infinite_error():
    (errors,) = measure_errors(lambda x: x * torch.nan, square, inputs(), grad=False).values()
    assert errors.max == errors.rms == float("inf")


def test_gpu_arithmetic_of_the_interpreter():
    """bf16 rounds to nearest even, its products are those of its values, and an element of an fp32
    product has the same bits in tiles of any shape."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs triton")
    tl, builder = interpreter.tl, interpreter.InterpreterBuilder()

    def handle(x, dtype):
        return interpreter.TensorHandle(x, dtype)

    wide = torch.randn(64, 32)
    before = builder.cast_impl
    with gpu_arithmetic():
        cut = builder.cast_impl(
            handle(wide.numpy(), tl.float32), tl.block_type(tl.bfloat16, [64, 32])
        )
        assert torch.equal(
            torch.from_numpy(cut.data.view("int16")).view(torch.bfloat16), wide.bfloat16()
        )
        zero = handle(torch.zeros(64, 64).numpy(), tl.float32)
        turned = handle(cut.data.T, tl.bfloat16)
        product = builder.create_dot(cut, turned, zero, None, 0).data
        want = wide.bfloat16().float() @ wide.bfloat16().float().T
        torch.testing.assert_close(torch.from_numpy(product), want, rtol=1e-5, atol=1e-5)
        whole = handle(wide.numpy(), tl.float32), handle(wide.T.numpy(), tl.float32)
        part = handle(wide[:3].numpy(), tl.float32), handle(wide.T[:, :5].numpy(), tl.float32)
        corner = builder.create_dot(*part, handle(torch.zeros(3, 5).numpy(), tl.float32), None, 0)
        assert (builder.create_dot(*whole, zero, None, 0).data[:3, :5] == corner.data).all()
    assert builder.cast_impl == before
