"""Shared by tests and benches: ranks without a cluster, and the rule for numerical errors.

`run_ranks` runs the same function on every rank, as threads of this process (milliseconds, for
many cases) or as gloo processes on the loopback device (seconds, for realism; comm/ranks.py).
`assert_matches_oracle` compares with fp64.

[Note: ranks that are threads]
They use torch's threaded process group. It needs torch's thread isolation mode: without it the
groups of all threads share one registry. Threads also share torch's default random generator: a
function that draws numbers needs its own torch.Generator. A new thread uses the number of cores
that any thread set last (fastpar.patch sets 1 for a while), and bits of products depend on it, so
each rank sets the caller's number.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastpar.comm.ranks import GRACE_S, START_S, Rank, RankFailed, Ranks, culprit, late
from fastpar.kernels.cases import measure_errors


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "threads",
    timeout_s: float = 60.0,
    init: bool = True,
    return_exceptions: bool = False,
) -> list[Any]:
    """Calls fn(*args) on world_size ranks of a fresh process group; returns the results by rank.

    Args:
        fn: called once per rank; with "gloo" it must be picklable (a function at the top of a
            module) and so must args and results (tensors travel by value).
        backend: "threads" (one process, torch's threaded group, no send/recv) | "gloo" (one
            process per rank).
        timeout_s: for the calls, after processes have started; also the process group's timeout.
        init: False does not initialize torch.distributed; torchrun's environment is set anyway
            ("gloo" only).
        return_exceptions: put a failed rank's exception into the list instead of raising it.
    Raises:
        ValueError: unknown backend, world_size below 1.
        RuntimeError: a process died without an exception.
        TimeoutError: names the ranks that did not return in time; processes are killed.
        Otherwise the exception of the rank that failed first, other than by another's failure; the
        rank and traceback are the cause.
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
        answers, failures = _in_threads(fn, world_size, args, timeout_s)
    else:
        with Ranks(world_size, fork=True) as ranks:
            answers, failures = ranks.outcomes(_import, fn, timeout_s=START_S)
            if not failures:
                answers, failures = ranks.outcomes(
                    _in_group, fn, args, timeout_s if init else None, timeout_s=timeout_s
                )
    # A rank without an exception died, or did not return in time.
    late_text = "a collective was skipped somewhere, or timeout_s is too short"
    errors: dict[int, BaseException] = {
        one.rank: one.error or (TimeoutError(f"{one}; {late_text}") if one.code is None else one)
        for one in failures
    }
    if failures and not return_exceptions:
        first = culprit(failures)
        raise errors[first.rank] from RuntimeError(f"rank {first.rank} failed:\n{first.trace}")
    return [errors[rank] if rank in errors else answers[rank] for rank in range(world_size)]


def _import(rank: Rank, fn: Callable[..., Any]) -> None:
    """A process has imported fn's module, which takes long on a busy machine."""


def _in_group(rank: Rank, fn: Callable[..., Any], args: tuple, timeout_s: float | None) -> Any:
    """Runs fn(*args) in a process; timeout_s: of its process group, None: no group."""
    if timeout_s is not None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        dist.barrier()  # a rank that fails at once would break connections still being made
    return fn(*args)


def _in_threads(
    fn: Callable[..., Any], world_size: int, args: tuple, timeout_s: float
) -> tuple[dict[int, Any], list[RankFailed]]:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    answers: dict[int, Any] = {}
    heard: list[RankFailed] = []
    c10d: Any = torch._C._distributed_c10d
    isolate = c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    store = dist.HashStore()
    n_threads = torch.get_num_threads()

    def wake(error: BaseException) -> None:
        """Ends the ranks that wait for a failed one, or for each other."""
        with threaded.ProcessLocalGroup._coll_lock:  # else a new waiter ends the iteration
            threaded.ProcessLocalGroup.exception_handle(error)

    def worker(rank: int) -> None:
        torch.get_num_threads()  # the first call reads the process's number, set by any thread
        torch.set_num_threads(n_threads)  # see [Note: ranks that are threads]
        try:
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(
                "threaded", rank=rank, world_size=world_size, store=store, timeout=timeout
            )
            answers[rank] = fn(*args)
        except BaseException as error:
            heard.append(RankFailed.of(rank, error))
            wake(error)
        finally:
            if dist.is_initialized():
                # The threads' world of torch 2.11 has no list of communicators, which this reads.
                with contextlib.suppress(AttributeError):
                    dist.destroy_process_group()

    threads = [threading.Thread(target=worker, args=(n,), daemon=True) for n in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            failed = list(heard)  # before the ranks woken below add their errors
            silent = set(range(world_size)) - answers.keys() - {one.rank for one in failed}
            wake(TimeoutError())
            for thread in threads:
                thread.join(GRACE_S)
            return answers, failed + late(sorted(silent), timeout_s, follow=bool(failed))
        return answers, heard
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)


def assert_matches_oracle(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    eager: Callable[..., Any] | None = None,
    grad: bool = True,
    factor: float = 2.0,
) -> dict[str, tuple[float, float]]:
    """Checks fn against Errors.bound, for every result that measure_errors compares.

    Args:
        factor: replaces the 2 of Errors.bound.
    Returns:
        name -> (error, bound), for printing.
    Raises:
        AssertionError: names the result, its error and its bound; also for a wrong shape or dtype,
            or a non-finite value where the oracle is finite.
    """
    report = {}
    measured = measure_errors(fn, ref, inputs, eager=eager, grad=grad)
    for name, errors in measured.items():
        bound = factor / 2 * (errors.bound - errors.rounding) + errors.rounding
        report[name] = (errors.max, bound)
        assert errors.max <= bound, f"{name}: expected error <= {bound:.3e}, got {errors.max:.3e}"
    return report
