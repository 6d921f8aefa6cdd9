"""Ranks of this machine: start them, call functions in them, collect answers, name who failed.

    with Ranks(2, threads=1) as ranks:
        answers = ranks.call(function, argument)  # function(rank, argument) in all at once

Whatever starts the processes of a process group does it here: `fastpar plan --measure`, `compare`,
`run_ranks` of fastpar.testing, benches, and the launcher of `fastpar train --nproc`, which adds
signals and restarts (train/launch.py). A function is found by its module and name.

[Note: who is stopped] Fresh ranks have sessions of their own, so Ctrl-C reaches the starter alone,
which kills them; when it dies, the kernel does (files/packages.py). A rank that fails ends, and its
peers fail in the collective that waits for it; those that do not within GRACE_S are killed. So are
all where one does not answer in time.

[Note: the culprit] When one rank fails, the others fail because they have lost it. The one to name
is who tells of a hang (it has killed the rank that hung), else the first to fail by itself.

[Note: forked ranks] A fork server that has only imported torch (no thread pool is running in it, so
forking is safe) makes a rank in milliseconds; the first one pays the import. They are no children
of the starter: in each a thread waits for its end. OpenMP has read its variables before the fork,
so where times or memory are measured, ranks are fresh processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

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
    *("got the end of rank", "that closed its group", "that gave up waiting for rank"),
    "; its own message says why",
)


def is_rank() -> bool:
    """Whether this process was started as a rank, by this file, torchrun, srun or mpirun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_here() -> bool:
    """Whether this rank has the environment of this file, not torchrun's."""
    return _LAUNCHER in os.environ


def local_ranks(world_size: int) -> int:
    """Ranks of this machine."""
    return min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_cores() -> int:
    """Cores that this process may use: affinity and the container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2; "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def threads_per_rank(asked: int | None, ranks_here: int) -> int:
    """CPU threads of a rank: what was asked for, or this machine's cores shared by its ranks."""
    return asked or max(1, available_cores() // ranks_here)


def make_store() -> Any:
    """The TCPStore of ranks to come: its port is taken before they start, and it outlives them."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_environment(rank: int, nproc: int, port: int, threads: int) -> dict[str, str]:
    """What torchrun would set for one of nproc ranks on this machine; port: of make_store()."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to the starter's store too
        "OMP_NUM_THREADS": str(threads),
        _LAUNCHER: "1",
    }
    # By default gloo resolves the host's name, which many containers and laptops do not know.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


def start_rank(command: Sequence[str], environment: Mapping[str, str], **how: Any) -> Any:
    """A command in a session of its own; `how` and the result are subprocess.Popen's."""
    env = {**os.environ, **environment}
    return subprocess.Popen(command, env=env, start_new_session=True, **how)


# Who has failed


def lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone: then the cause is over there."""
    return any(text in str(error) for text in _LOST_PEER_TEXTS)


def without_paths(text: str) -> str:
    """An error in one line of ASCII that names no path of this machine."""
    text = re.sub(r"(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+", "<path>", " ".join(text.split()))
    return text.encode("ascii", "replace").decode()[:_REASON_LENGTH]


def reason(error: BaseException) -> str:
    """An exception in one line that fits a table and names no path of this machine."""
    return without_paths(f"{type(error).__name__}: {error}")


def cause_of_death(code: int) -> str:
    """The signal that ended a process; empty if it exited by itself."""
    died = f"died of {signal.Signals(-code).name}" if code < 0 else ""
    return died + " (out of memory?)" * (code == -signal.SIGKILL)


@dataclass(eq=False)
class RankFailed(RuntimeError):  # noqa: N818 - of a rank, not of all
    """How a rank failed.

    Attributes:
        reason: why, in one line that names no path.
        code: exit status of a process that ended without a word.
        error, trace: what the rank raised, and where.
        follows: the cause is another rank's failure. at: when, by the clock of the machine.
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
        """Of an error that is being handled. SystemExit ends ranks that are threads."""
        follows = isinstance(error, SystemExit) or lost_peer(error)
        return cls(rank, reason(error), None, error, traceback.format_exc(), follows)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


def culprit(failures: Sequence[RankFailed]) -> RankFailed:
    """The one to name: see [Note: the culprit]."""
    return min(failures, key=lambda one: (one.code != HUNG, one.follows, one.at))


def late(ranks: Sequence[int], timeout_s: float, *, follow: bool) -> list[RankFailed]:
    """Failures of ranks that did not answer in time; follow: another one had failed before."""
    why = f"gave no answer for {timeout_s:g} s"
    return [RankFailed(rank, why, follows=follow) for rank in ranks]


# In a rank


class Rank:
    """The process of a rank, for the functions that are called in it.

    Attributes:
        rank, world_size; kept: what functions leave for later calls.
    """

    def __init__(self, pipe: Connection, device: str) -> None:
        self.rank, self.world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        self.kept: dict[str, Any] = {}
        self._pipe, self._device = pipe, device
        self._meshes: dict[tuple[int, int], Any] = {}

    def say(self, value: Any) -> None:
        """Sends a value to who waits for the call's end."""
        self._pipe.send_bytes(pickle.dumps(("said", value)))

    def mesh(self, tp: int = 1, cp: int = 1) -> Any:
        """The Mesh with this tp and cp. Ranks: all."""
        from fastpar.comm.mesh import Mesh

        if (tp, cp) not in self._meshes:
            device = "cpu" if self._device == "cpu" else None
            self._meshes[tp, cp] = Mesh(tp=tp, cp=cp, device=device, timeout_s=TIMEOUT_S)
        return self._meshes[tp, cp]

    def barrier(self) -> None:
        """Return when every rank is here."""
        import torch.distributed as dist

        if self.world_size > 1:
            self.mesh()
            dist.barrier()

    def of_first(self, value: Any) -> Any:
        """The value that rank 0 has. Ranks: all."""
        from fastpar.comm.mesh import gather_objects

        if self.world_size == 1:
            return value
        self.mesh()
        return gather_objects(value)[0]


def serve() -> None:
    """The life of a fresh rank. Its arguments: the pipe to the starter, the device."""
    _live(Connection(int(sys.argv[1])), sys.argv[2])


def _forked(pipe: Connection, environment: Mapping[str, str], device: str) -> None:
    """The life of a forked rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(FAILED)  # also out of a collective that waits for a peer

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment)
    _live(pipe, device)


def _live(pipe: Connection, device: str) -> NoReturn:
    """Do what comes through the pipe until it ends, or something fails."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if device == "cpu":
        from fastpar.kernels import keep_freed_memory

        keep_freed_memory()
    rank, status = Rank(pipe, device), 0
    with contextlib.suppress(EOFError, OSError):  # of the pipe
        while not status:
            asked = pipe.recv_bytes()
            try:
                function, args = pickle.loads(asked)
                message = pickle.dumps(("answer", function(rank, *args)))
            except BaseException as error:
                failure, status = vars(RankFailed.of(rank.rank, error)), FAILED
                message = pickle.dumps(("failure", failure | {"error": _travels(error)}))
            pipe.send_bytes(message)
    os._exit(status)  # no orderly exit: gloo's destructor can wait for peers that are gone


def _travels(error: BaseException) -> BaseException:
    """The error, or a RuntimeError for one that could not be made again from what is pickled."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


# In the starter


class _Forked(multiprocessing.context.ForkServerProcess):
    """A process of the fork server that is waited for as for subprocess.Popen."""

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self.exitcode


class _Started(NamedTuple):
    """A rank as the starter sees it."""

    process: subprocess.Popen | _Forked
    pipe: Connection
    log: IO[str] | None = None

    def end(self) -> int:
        """The exit status; kills it where it does not end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(END_S)
        self.process.kill()
        return self.process.wait()


Place = Callable[[int, list[str]], tuple[list[str], dict[str, str]]]


class Ranks:
    """nproc processes, each a rank of one process group on this machine.

    Args:
        threads: of each rank; device: "cpu" or "cuda", of Rank.mesh(); "" for what there is.
        quiet: what the ranks print is not shown.
        fork: see [Note: forked ranks].
        place: (rank, command) -> the command that runs it elsewhere, and its environment there.
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
        log = tempfile.TemporaryFile("w+") if self._quiet else None  # noqa: SIM115 - close() does it
        command = [*call_command("fastpar.comm.ranks.serve"), str(theirs.fileno()), self.device]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if place is not None:
            command, there = place(rank, command)
            environment |= there
        process = start_rank(
            command, environment, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        theirs.close()  # so that the process' death shows as the end of the pipe
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
        """function(rank, *args) in every rank at once; what each returned. how: as for outcomes."""
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
        heard: Callable[[Any], None] | None = None,
    ) -> tuple[dict[int, Any], list[RankFailed]]:
        """As call(): the answers by rank, and the failures, after which all ranks are gone.

        Args:
            timeout_s: for which no rank answers nor says anything.
            heard: is called with what ranks say meanwhile.
        """
        if not self._ranks:
            raise RankFailed(0, "the processes are gone")
        asked = pickle.dumps((function, args))
        for one in self._ranks:
            with contextlib.suppress(OSError):  # it is gone: that is found below
                one.pipe.send_bytes(asked)
        answers: dict[int, Any] = {}
        failures: list[RankFailed] = []
        waiting: dict[Any, int] = {one.pipe: rank for rank, one in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), left_s)
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
                    deadline = deadline if failures else time.monotonic() + timeout_s
                    if heard is not None:
                        heard(value)
                    continue
                del waiting[pipe]
                if kind == "answer":
                    answers[rank] = value
                else:
                    failures.append(RankFailed(**value))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self.close(at_once=True)
        return answers, failures

    def _gone(self, rank: int) -> RankFailed:
        code, log, words = self._ranks[rank].end(), self._ranks[rank].log, ""
        if log is not None:
            log.seek(0)
            words = without_paths(log.read().strip().rpartition("\n")[2])
        return RankFailed(rank, cause_of_death(code) or words or f"exit status {code}", code)

    def close(self, *, at_once: bool = False) -> None:
        """The processes end."""
        for one in self._ranks:
            if at_once:
                one.process.kill()
            one.pipe.close()  # the end of a rank's life
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
    """The first call of a fresh rank: it has come up."""
