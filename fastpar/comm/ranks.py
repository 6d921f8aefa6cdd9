"""Rank processes on this machine: starts them, calls functions in them, collects results, and names
the rank that failed.

    with Ranks(2, threads=1) as ranks:
        answers = ranks.call(function, argument)  # function(rank, argument) on all ranks at once

All processes of process groups are started here: those of `fastpar plan --measure`, `compare`,
`run_ranks` of fastpar.testing, benches, and the launcher of `fastpar train --nproc`, which adds
signals and restarts (train/launch.py). A function is found by its module and name.

Ends: fresh ranks have their own sessions, so Ctrl-C reaches only the starter, which kills them; if
the starter dies, the kernel does (files/packages.py). A rank that fails ends, and its peers fail in
the collective that waits for it; peers that do not fail within GRACE_S are killed. If a rank does
not answer in time, all are killed.

The rank to name: when one rank fails, the others fail because it is gone. The report names the one
that reported a hang, else the first that failed by itself.

Forked ranks: a fork server that has only imported torch (without a running thread pool, so forking
is safe) makes a rank in milliseconds; the first one pays for the import. Forked ranks are not
children of the starter: a thread in each waits for the starter's end. OpenMP reads its variables
before the fork, so measurements of time or memory use fresh processes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing.connection
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn

from fastpar.comm.nodes import LOOPBACK, loopback, plain_words, serve_store
from fastpar.comm.watchdog import HUNG
from fastpar.files.packages import call_command

START_S, CALL_S, END_S, GRACE_S = 120.0, 600.0, 5.0, 5.0
TIMEOUT_S = 300.0  # of a collective
FAILED, USER_MISTAKE = 1, 2  # exit statuses
LOST_PEER = 3  # exit status of a rank that failed because another one was gone
_LAUNCHER = "FASTPAR_LAUNCHER"  # in the ranks' environment
_REASON_LENGTH = 300  # characters of an error
_LOST_PEER_TEXTS = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused"),
    *("Broken pipe", "Socket closed", "NCCL communicator was aborted", "remote process exited"),
    # csrc/shm_cpu.cpp:
    *(": the process of rank", " closed its group", " gave up waiting for rank"),
    "; its own message says why",
)


def is_rank() -> bool:
    """Whether this process was started as a rank: by this file, torchrun, srun or mpirun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_here() -> bool:
    """Whether this file started this rank, not torchrun."""
    return _LAUNCHER in os.environ


def local_ranks(world_size: int) -> int:
    """Number of ranks on this machine."""
    return min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_cores() -> int:
    """Cores that this process may use: affinity and the container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return int(min(cores, max(1.0, quota_cores())))


def quota_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """The container's CPU quota in cores, of cgroup v2 or v1; inf: none."""
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2; "max"
        quota, period = (cgroup / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        v1 = cgroup / "cpu"
        quota, period = ((v1 / f"cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf  # -1: none
    return math.inf


def threads_per_rank(threads: int | None, ranks_here: int) -> int:
    """CPU threads of a rank: the request, or an equal part of this machine's cores."""
    return threads or max(1, available_cores() // ranks_here)


def make_store() -> Any:
    """The TCPStore of later ranks: reserves a port before they start, and outlives them."""
    return serve_store(LOOPBACK, 0)


def rank_environment(rank: int, nproc: int, port: int, threads: int) -> dict[str, str]:
    """The variables that torchrun would set for a rank on this machine; port: of make_store()."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 too connects to the starter's store
        "OMP_NUM_THREADS": str(threads),
        _LAUNCHER: "1",
    }
    if nproc * threads > available_cores():  # ranks share cores: waiting threads must not spin
        environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
    # By default gloo resolves the host name, which many containers and laptops cannot resolve.
    if (interface := os.environ.get("GLOO_SOCKET_IFNAME", loopback())) is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def start_rank(command: Sequence[str], environment: Mapping[str, str], **how: Any) -> Any:
    """Start a command in its own session; `how` and the result are subprocess.Popen's."""
    env = {**os.environ, **environment}
    return subprocess.Popen(command, env=env, start_new_session=True, **how)


# Failures


def lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone, which then has the cause."""
    return any(text in str(error) for text in _LOST_PEER_TEXTS)


def without_paths(text: str) -> str:
    """The text in one line of ASCII, without paths of this machine."""
    text = re.sub(r"(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+", "<path>", " ".join(text.split()))
    return text.encode("ascii", "replace").decode()[:_REASON_LENGTH]


def reason(error: BaseException) -> str:
    """An exception in one short line, without paths of this machine."""
    return without_paths(f"{type(error).__name__}: {plain_words(error)}")


def cause_of_death(code: int) -> str:
    """The signal that ended a process; "" if it exited by itself."""
    died = f"died of {signal.Signals(-code).name}" if code < 0 else ""
    return died + " (out of memory?)" * (code == -signal.SIGKILL)


@dataclass(eq=False)
class RankFailed(RuntimeError):  # noqa: N818 - of a rank, not of all
    """How a rank failed.

    Attributes:
        reason: one line without paths.
        code: exit status of a process that ended without an error message.
        error, trace: the exception and its traceback.
        follows: another rank's failure is the cause. at: time, by the machine's clock.
    """

    rank: int
    reason: str
    code: int | None = None
    error: BaseException | None = None
    trace: str = "(no traceback: the process is gone)"
    follows: bool = False
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailed:
        """From an error that is being handled. SystemExit ends ranks that are threads."""
        follows = isinstance(error, SystemExit) or lost_peer(error)
        return cls(rank, reason(error), None, error, traceback.format_exc(), follows)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


def culprit(failures: Sequence[RankFailed]) -> RankFailed:
    """The failure to report; see "The rank to name" above."""
    return min(failures, key=lambda one: (one.code != HUNG, one.follows, one.at))


def late(ranks: Sequence[int], timeout_s: float, *, follow: bool) -> list[RankFailed]:
    """Failures of ranks that did not answer in time; follow: another rank failed before."""
    why = f"gave no answer for {timeout_s:g} s"
    return [RankFailed(rank, why, follows=follow) for rank in ranks]


# In a rank


class Rank:
    """The process of a rank, as called functions see it.

    Attributes:
        rank, world_size.
    """

    def __init__(self, pipe: Connection, device: str) -> None:
        self.rank, self.world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        self._pipe, self._device = pipe, device

    def say(self, value: Any) -> None:
        """Send a value to the starter during a call."""
        self._pipe.send_bytes(pickle.dumps(("said", value)))

    @functools.cached_property
    def mesh(self) -> Any:
        """The Mesh of all ranks along dp, made by the first one that asks. Ranks: all."""
        from fastpar.comm.mesh import Mesh

        return Mesh(device="cpu" if self._device == "cpu" else None, timeout_s=TIMEOUT_S)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        import torch.distributed as dist

        if self.mesh.world_size > 1:
            dist.barrier()


def serve() -> None:
    """Main function of a fresh rank. Its arguments: the pipe to the starter, the device."""
    _live(Connection(int(sys.argv[1])), sys.argv[2])


def _forked(pipe: Connection, environment: Mapping[str, str], device: str) -> None:
    """Main function of a forked rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(FAILED)  # also out of a collective that waits for a peer

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment)
    _live(pipe, device)


def _live(pipe: Connection, device: str) -> NoReturn:
    """Run the calls from the pipe until it closes or one fails."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if device == "cpu":
        from fastpar.kernels import keep_freed_memory

        keep_freed_memory()
    rank, status = Rank(pipe, device), 0
    with contextlib.suppress(EOFError, OSError):  # of the pipe
        while not status:
            request = pipe.recv_bytes()
            try:
                function, args = pickle.loads(request)
                message = pickle.dumps(("answer", function(rank, *args)))
            except BaseException as error:
                failure, status = vars(RankFailed.of(rank.rank, error)), FAILED
                message = pickle.dumps(("failure", failure | {"error": _picklable(error)}))
            pipe.send_bytes(message)
    os._exit(status)  # gloo's destructor could wait for peers that are gone


def _picklable(error: BaseException) -> BaseException:
    """The error, or a RuntimeError if it cannot be unpickled."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


# In the starter


@contextlib.contextmanager
def stopping_with(processes: Sequence[Any]) -> Iterator[list[float]]:
    """Ctrl-Z (SIGTSTP) of this process stops these ones first, and they go on with it.

    Yields the list of the seconds that each stop took. Does nothing outside of the main thread, and
    where SIGTSTP is ignored or handled.
    """
    stood: list[float] = []

    def tell(number: int) -> None:
        for process in processes:
            process.send_signal(number)

    def stand(number: int, frame: FrameType | None) -> None:
        began = time.monotonic()
        tell(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # returns when this process goes on
        signal.signal(number, stand)
        tell(signal.SIGCONT)
        stood.append(time.monotonic() - began)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield stood
        return
    signal.signal(signal.SIGTSTP, stand)
    try:
        yield stood
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


class _Forked(multiprocessing.context.ForkServerProcess):
    """A process of the fork server with some methods of subprocess.Popen."""

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Started(NamedTuple):
    """A rank in the starter."""

    process: subprocess.Popen | _Forked
    pipe: Connection
    log: IO[str] | None = None

    def end(self) -> int:
        """Wait for the exit status; kills the process if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(END_S)
        self.process.kill()
        return self.process.wait()


Place = Callable[[int, list[str]], tuple[list[str], dict[str, str]]]


class Ranks:
    """nproc processes, each a rank of one process group on this machine.

    Args:
        threads: of each rank; device: "cpu" or "cuda", of Rank.mesh(); "": the GPU if there is one.
        quiet: hide the ranks' output.
        fork: see "Forked ranks" above.
        place: (rank, command) -> the command that runs it elsewhere, and its environment.
    Raises:
        RankFailed: a rank could not start, died, raised or did not answer; then all are gone.
    """

    def __init__(
        self,
        nproc: int,
        *,
        threads: int = 1,
        device: str = "",
        quiet: bool = False,
        fork: bool = False,
        place: Place | None = None,
    ) -> None:
        self.nproc, self.threads, self.device, self._quiet = nproc, threads, device, quiet
        self._store = make_store()
        self._ranks: list[_Started] = []
        for rank in range(nproc):
            environment = rank_environment(rank, nproc, self._store.port, threads)
            started = self._fork(environment) if fork else self._start(rank, environment, place)
            self._ranks.append(started)
        if not fork:
            self.call(start, timeout_s=START_S)

    def _start(self, rank: int, environment: dict[str, str], place: Place | None) -> _Started:
        ours, theirs = multiprocessing.Pipe()
        log = tempfile.TemporaryFile("w+") if self._quiet else None  # noqa: SIM115 - see close()
        command = [*call_command("fastpar.comm.ranks.serve"), str(theirs.fileno()), self.device]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if place is not None:
            command, there = place(rank, command)
            environment |= there
        process = start_rank(
            command, environment, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        theirs.close()  # so that the pipe closes when the process dies
        return _Started(process, ours, log)

    def _fork(self, environment: dict[str, str]) -> _Started:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        ours, theirs = context.Pipe()
        process = _Forked(target=_forked, args=(theirs, environment, self.device), daemon=True)
        process.start()
        theirs.close()
        return _Started(process, ours)

    def call(self, function: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """function(rank, *args) on every rank at once; the results. how: options of outcomes()."""
        answers, failures = self.outcomes(function, *args, **how)
        if failures:
            first = culprit(failures)
            if first.error is not None and not self._quiet:
                print(first.trace, file=sys.stderr, flush=True)
            raise first
        return [answers[rank] for rank in range(self.nproc)]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = CALL_S,
        on_value: Callable[[Any], None] | None = None,
    ) -> tuple[dict[int, Any], list[RankFailed]]:
        """Like call(): results by rank, and failures, after which all ranks are gone.

        Args:
            timeout_s: the longest time without an answer or a value of any rank.
            on_value: is called with the values that ranks send during the call.
        """
        if not self._ranks:
            raise RankFailed(0, "the rank processes have ended; make new Ranks")
        request = pickle.dumps((function, args))
        for one in self._ranks:
            with contextlib.suppress(OSError):  # it is gone, which is noticed below
                one.pipe.send_bytes(request)
        with stopping_with([one.process for one in self._ranks]) as stood:
            answers, failures = self._collect(timeout_s, on_value, stood)
        if failures:
            self.close(at_once=True)
        return answers, failures

    def _collect(
        self, timeout_s: float, on_value: Callable[[Any], None] | None, stood: Sequence[float]
    ) -> tuple[dict[int, Any], list[RankFailed]]:
        def now() -> float:
            return time.monotonic() - sum(stood)

        answers: dict[int, Any] = {}
        failures: list[RankFailed] = []
        waiting: dict[Any, int] = {one.pipe: rank for rank, one in enumerate(self._ranks)}
        deadline = now() + timeout_s
        while waiting:
            left_s = max(0.0, deadline - now())
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), left_s)
            if not ready and now() < deadline:
                continue
            if not ready:
                failures += late(sorted(waiting.values()), timeout_s, follow=bool(failures))
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    kind, value = "failure", vars(self._gone(rank))
                if kind == "said":
                    deadline = deadline if failures else now() + timeout_s
                    if on_value is not None:
                        on_value(value)
                    continue
                del waiting[pipe]
                if kind == "answer":
                    answers[rank] = value
                else:
                    failures.append(RankFailed(**value))
                    deadline = min(deadline, now() + GRACE_S)
        return answers, failures

    def _gone(self, rank: int) -> RankFailed:
        code, log, words = self._ranks[rank].end(), self._ranks[rank].log, ""
        if log is not None:
            log.seek(0)
            words = without_paths(log.read().strip().rpartition("\n")[2])
        return RankFailed(rank, cause_of_death(code) or words or f"exit status {code}", code)

    def close(self, *, at_once: bool = False) -> None:
        """End the processes."""
        for one in self._ranks:
            if at_once:
                one.process.kill()
            one.pipe.close()  # ends the rank's loop
        for one in self._ranks:
            one.end()
            if one.log is not None:
                one.log.close()
        self._ranks = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


def start(rank: Rank) -> None:
    """The first call of a fresh rank, which checks that it runs."""
