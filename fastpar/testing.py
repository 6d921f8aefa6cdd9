"""What tests and benches share: ranks without a cluster, and the rule that judges numerical error.

`run_ranks` starts the same function on every rank, as threads of this process (milliseconds, for
breadth) or as gloo processes on the loopback device (seconds, for reality).
`assert_matches_oracle` compares with fp64.

[Note: how ranks are started]
Threads use torch's threaded process group. It needs torch's thread isolation mode: without it
the groups of all threads share one registry. Torch's default random generator is shared by
threads too: a function that draws numbers needs its own torch.Generator. A new thread computes with
as many cores as whichever thread said last (fastpar.patch says 1 for a while), and bits of products
depend on it, so each rank is given the caller's number.
Processes come from a fork server that has only imported torch (no thread pool is running in it,
so forking is safe): the first call pays the import, later ones a fork. A thread of each worker
watches its parent and ends the process when the parent is gone, so that a killed test run leaves
nobody behind (the fork server itself lives as long as its workers).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastpar.doctor.errors import measure_errors

_GRACE_S = 3.0  # after the first failure the other ranks may still report theirs


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "threads",
    timeout_s: float = 60.0,
    init: bool = True,
    return_exceptions: bool = False,
) -> list[Any]:
    """Call fn(*args) on world_size ranks of a fresh process group and return the results by rank.

    Args:
        fn: called once per rank; with "gloo" it must be picklable (a function at the top of a
            module) and so must args and results (tensors travel by value).
        backend: "threads" (one process, torch's threaded group, no send/recv) | "gloo" (one
            process per rank).
        timeout_s: for the whole call; also the process group's own timeout.
        init: False leaves torch.distributed alone; torchrun's environment is set all the same
            ("gloo" only).
        return_exceptions: put a failed rank's exception into the list instead of raising it.
    Raises:
        ValueError: unknown backend, world_size below 1.
        RuntimeError: a process died without a word.
        TimeoutError: ranks that did not answer in time, named; processes are killed.
        Otherwise the first exception that a rank raised, with its rank and traceback as the cause.
    """
    if world_size < 1:
        raise ValueError(
            f"run_ranks: expected world_size >= 1, got world_size={world_size}; "
            "use at least one rank"
        )
    if backend not in ("threads", "gloo"):
        raise ValueError(
            f"run_ranks: expected backend threads or gloo, got backend={backend}; "
            "choose one of these"
        )
    if backend == "threads":
        outcomes = _run_threads(fn, world_size, args, timeout_s)
    else:
        outcomes = _run_processes(fn, world_size, args, timeout_s, init)
    failures = [o for o in outcomes if o.error is not None]
    if failures and not return_exceptions:
        first = min(failures, key=lambda o: (o.follows, o.at))
        assert first.error is not None
        raise first.error from RuntimeError(f"rank {first.rank} failed:\n{first.trace}")
    return [o.value if o.error is None else o.error for o in outcomes]


@dataclass
class _Outcome:
    """What one rank ended with."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = float("inf")  # when it failed: the first failure is the cause, the others follow
    follows: bool = False  # stopped by the harness because another rank failed
    done: bool = False

    def fail(self, error: BaseException, trace: str = "", *, follows: bool = False) -> None:
        self.error, self.trace, self.follows = error, trace, follows
        self.at, self.done = time.monotonic(), True


def _run_threads(
    fn: Callable[..., Any], world_size: int, args: tuple, timeout_s: float
) -> list[_Outcome]:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    outcomes = [_Outcome(rank) for rank in range(world_size)]
    c10d: Any = torch._C._distributed_c10d
    isolate = c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    store = dist.HashStore()

    n_threads = torch.get_num_threads()

    def worker(outcome: _Outcome) -> None:
        torch.get_num_threads()  # the first call takes the process's number, set by anybody
        torch.set_num_threads(n_threads)  # see [Note: how ranks are started]
        try:
            dist.init_process_group(
                "threaded",
                rank=outcome.rank,
                world_size=world_size,
                store=store,
                timeout=timedelta(seconds=timeout_s),
            )
            outcome.value, outcome.done = fn(*args), True
        except BaseException as error:
            follows = isinstance(error, SystemExit)  # raised inside a collective by the line below
            outcome.fail(error, traceback.format_exc(), follows=follows)
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for us
        finally:
            if dist.is_initialized():
                # The threads' world of torch 2.11 has no list of communicators, which this reads.
                with contextlib.suppress(AttributeError):
                    dist.destroy_process_group()

    threads = [threading.Thread(target=worker, args=(o,), daemon=True) for o in outcomes]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            late = [o for o in outcomes if not o.done]
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            for thread in threads:
                thread.join(_GRACE_S)
            for outcome in late:
                outcome.fail(_late(late, timeout_s))
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    return outcomes


def _run_processes(
    fn: Callable[..., Any], world_size: int, args: tuple, timeout_s: float, init: bool
) -> list[_Outcome]:
    # The parent holds the store: its port is taken before a worker starts; it outlives any rank.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    payload = pickle.dumps((fn, args))
    outcomes = [_Outcome(rank) for rank in range(world_size)]
    processes, pipes = [], {}
    try:
        for outcome in outcomes:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker,
                args=(payload, outcome.rank, world_size, store.port, timeout_s, init, sender),
                daemon=True,
            )
            process.start()
            sender.close()  # so that the worker's death shows as the end of the pipe
            processes.append(process)
            pipes[receiver] = outcome
        _collect(pipes, processes, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return outcomes


def _collect(pipes: dict[Any, _Outcome], processes: list, timeout_s: float) -> None:
    """Read one message per worker; after a first failure the others get a moment only."""
    deadline = time.monotonic() + timeout_s
    waiting: dict[Any, _Outcome] = dict(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting), timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            late = list(waiting.values())
            failed = any(o.error is not None for o in pipes.values())
            for outcome in late:
                outcome.fail(_late(late, timeout_s), follows=failed)
            return
        pipe: Any
        for pipe in ready:
            outcome = waiting.pop(pipe)
            try:
                outcome.value, error, trace = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process = processes[outcome.rank]
                process.join(_GRACE_S)
                trace = "(no traceback: the process is gone)"
                error = RuntimeError(
                    f"run_ranks: expected a result from rank {outcome.rank}, got exit code "
                    f"{process.exitcode}; the process was killed or left with os._exit"
                )
            if error is not None:
                outcome.fail(error, trace)
                deadline = min(deadline, time.monotonic() + _GRACE_S)


def _late(late: Sequence[_Outcome], timeout_s: float) -> TimeoutError:
    ranks = ", ".join(str(o.rank) for o in late)
    return TimeoutError(
        f"run_ranks: expected every rank to end within {timeout_s:g} s, got no answer from rank "
        f"{ranks}; a collective was skipped somewhere, or timeout_s is too short"
    )


def _worker(payload, rank, world_size, port, timeout_s, init, sender) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the parent's: rank 0 is a client too
        GLOO_SOCKET_IFNAME="lo",
    )
    error: BaseException | None = None
    try:
        fn, args = pickle.loads(payload)
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
            # A rank that ends at once would break the connections its peers are still making.
            dist.barrier()
        message = pickle.dumps((fn(*args), None, ""))
    except BaseException as caught:
        error = caught
        message = _pickle_error(error, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        sender.send_bytes(message)
    sender.close()
    if dist.is_initialized() and error is None:
        dist.destroy_process_group()
    # No orderly exit after a failure: gloo's destructor can wait for peers that will never answer.
    os._exit(0 if error is None else 1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)  # also out of a collective that waits for a peer


def _pickle_error(error: BaseException, trace: str) -> bytes:
    message = pickle.dumps((None, error, trace))
    with contextlib.suppress(Exception):
        pickle.loads(message)  # an exception with its own __init__ may pickle and not come back
        return message
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    return pickle.dumps((None, plain, trace))


def assert_matches_oracle(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    eager: Callable[..., Any] | None = None,
    grad: bool = True,
    seed: int = 0,
    factor: float = 2.0,
) -> dict[str, tuple[float, float]]:
    """Judge fn by Errors.bound, for every result that measure_errors (see its arguments) compares.

    Args:
        factor: instead of Errors.bound's 2.
    Returns:
        name -> (error, bound), for printing.
    Raises:
        AssertionError: naming the result, its error and its bound; also on a wrong shape, dtype or
            non-finite value where the oracle is finite.
    """
    report = {}
    measured = measure_errors(fn, ref, inputs, eager=eager, grad=grad, seed=seed)
    for name, errors in measured.items():
        bound = factor / 2 * (errors.bound - errors.rounding) + errors.rounding
        report[name] = (errors.max, bound)
        assert errors.max <= bound, f"{name}: expected error <= {bound:.3e}, got {errors.max:.3e}"
    return report


@contextlib.contextmanager
def gpu_arithmetic() -> Iterator[None]:
    """Makes Triton's interpreter round as a GPU does, where it does not by itself.

    fp32 -> bf16 or 8 bits is rounded to nearest (the interpreter cuts bits off; of 8 it loses NaN).
    Matrix products of bf16 are
    products of its values (the interpreter multiplies their bits as integers). Matrix products of
    fp32 are summed in fp64 and rounded once, so that an element has the same bits in tiles of any
    shape, which a GPU's order of sums gives, too (BLAS chooses an order by the shape); kernels that
    compute scores twice rely on it.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    tl, handle = interpreter.tl, interpreter.TensorHandle
    cast, dot, convert = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp
    eights = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16)
        return handle(rounded.numpy().view("uint16"), dst_type.scalar)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        form = eights.get(dst_type.scalar)
        if form is None or src.dtype.scalar != tl.float32:
            return convert(self, src, dst_type, rounding_mode)
        codes = torch.from_numpy(src.data.copy()).to(form).view(torch.uint8)
        return handle(codes.numpy(), dst_type.scalar)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, x, tl.float32) for x in (a, b))
        elif a.dtype.scalar != tl.float32:
            return dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        total = a.data.astype("float64") @ b.data.astype("float64") + d.data
        return handle(total.astype(d.data.dtype), d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    builder.create_fp_to_fp = create_fp_to_fp
    try:
        yield
    finally:
        builder.cast_impl, builder.create_dot = cast, dot
        builder.create_fp_to_fp = convert
