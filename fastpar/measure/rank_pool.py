"""Ranks of this machine that stay and do one thing after the other: to measure, start once.

    with RankPool(2, threads=1) as pool:
        times = pool.call(function, argument)  # what every rank returned

The function is called as function(rank, argument) and found by its module and name; `rank` is the
process' own Rank, which keeps what later calls need. The ranks have the environment of the
launcher's (launch.py), so a Mesh made in them forms their process group.

[Note: who is stopped] The ranks have sessions of their own, so Ctrl-C reaches the command alone,
which kills them. A rank that fails leaves the others waiting: after GRACE_S they are killed. So are
all where one does not answer in time. A rank that lost a peer is not the cause of a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from fastpar.comm.mesh import Mesh
from fastpar.files.packages import call_command
from fastpar.kernels import keep_freed_memory
from fastpar.measure.machine import without_paths
from fastpar.train.launch import lost_peer, rank_environment

START_S, CALL_S, END_S, GRACE_S = 120.0, 600.0, 5.0, 5.0
TIMEOUT_S = 300.0  # of a collective


class RankFailed(RuntimeError):  # noqa: N818 - of a rank, not of the pool
    """A rank did not end well.

    Attributes:
        rank: the one that failed first; reason: why, in one line that names no path.
    """

    def __init__(self, rank: int, what: str, reason: str) -> None:
        super().__init__(
            f"RankPool: expected an answer of every rank, got rank {rank} in {what}: {reason}; its "
            "error says the cause"
        )
        self.rank, self.reason = rank, reason


class Rank:
    """A process of the pool.

    Attributes:
        rank, world_size, threads; kept: what functions leave for later calls.
        say: sends a value to who waits for the call's end.
    """

    def __init__(
        self, rank: int, world_size: int, threads: int, device: str, say: Callable[[Any], None]
    ) -> None:
        self.rank, self.world_size, self.threads = rank, world_size, threads
        self.device, self.say = device, say
        self.kept: dict[str, Any] = {}
        self._meshes: dict[tuple[int, int], Mesh] = {}

    def mesh(self, tp: int = 1, cp: int = 1) -> Mesh:
        """The mesh with this tp and cp. Ranks: all."""
        if (tp, cp) not in self._meshes:
            device = "cpu" if self.device == "cpu" else None
            self._meshes[tp, cp] = Mesh(tp=tp, cp=cp, device=device, timeout_s=TIMEOUT_S)
        return self._meshes[tp, cp]

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self.world_size > 1:
            self.mesh()
            dist.barrier()

    def of_first(self, value: Any) -> Any:
        """The value that rank 0 has. Ranks: all."""
        values = [value]
        if self.world_size > 1:
            self.mesh()
            dist.broadcast_object_list(values, 0)
        return values[0]


class _Process(NamedTuple):
    """A rank as the pool sees it."""

    process: subprocess.Popen
    pipe: Connection
    log: IO[str] | None

    def why(self) -> str:
        """Why it is gone: the signal, its last words or its status."""
        code = self.process.wait(END_S)
        if code < 0:
            name = signal.Signals(-code).name
            return f"died of {name}" + " (out of memory?)" * (name == "SIGKILL")
        words: list[str] = []
        if self.log is not None:
            self.log.seek(0)
            words = [line for line in self.log.read().splitlines() if line.strip()]
        return without_paths(words[-1]) if words else f"exit status {code}"


class RankPool:
    """nproc processes, each a rank of one process group on this machine.

    Args:
        threads: of each rank; device: "cpu" or "cuda".
        quiet: what the ranks print is not shown.
    Raises:
        RankFailed: a rank could not start, died, raised or did not answer; then all are gone.
    """

    def __init__(
        self, nproc: int, *, threads: int = 1, device: str = "cpu", quiet: bool = False
    ) -> None:
        self.nproc, self.threads, self.device = nproc, threads, device
        # The parent holds the store: its port is taken before a rank starts.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        self._ranks: list[_Process] = []
        try:
            for rank in range(nproc):
                self._ranks.append(self._start(rank, quiet))
            self._collect("start", START_S)
        except BaseException:
            self.close(at_once=True)
            raise

    def _start(self, rank: int, quiet: bool) -> _Process:
        ours, theirs = Pipe()
        log = tempfile.TemporaryFile("w+") if quiet else None  # noqa: SIM115 - close() does it
        # Set before the process starts: OpenMP reads its variables when torch is loaded.
        environment = rank_environment(rank, self.nproc, self._store.port, self.threads)
        process = subprocess.Popen(
            [*call_command("fastpar.measure.rank_pool.serve"), str(theirs.fileno())],
            env={
                **os.environ,
                **environment,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        theirs.close()  # so that the process' death shows as the end of the pipe
        ours.send((rank, self.nproc, self.threads, self.device))
        return _Process(process, ours, log)

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = CALL_S,
        heard: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """function(rank, *args) in every rank at once; what each returned.

        Args:
            timeout_s: for which no rank answers nor says anything.
            heard: is called with what ranks say meanwhile.
        """
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it is gone: _collect() says why
                rank.pipe.send((function, args))
        return self._collect(function.__name__, timeout_s, heard)

    def _collect(
        self, what: str, timeout_s: float, heard: Callable[[Any], None] | None = None
    ) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) + len(errors) < self.nproc:
            waiting = set(range(self.nproc)) - answers.keys() - errors.keys()
            pipes = {self._ranks[n].pipe: n for n in waiting}
            ready: list[Any] = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready and not errors:
                errors[min(waiting)] = f"gave no answer for {timeout_s:g} s"
            if not ready:
                break
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    kind, value = "error", self._ranks[pipes[pipe]].why()
                if kind == "said":
                    deadline = deadline if errors else time.monotonic() + timeout_s
                    if heard is not None:
                        heard(value)
                elif kind == "answer":
                    answers[pipes[pipe]] = value
                else:
                    errors[pipes[pipe]] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            self.close(at_once=True)
            causes = [rank for rank, text in errors.items() if not lost_peer(RuntimeError(text))]
            first = (causes or list(errors))[0]
            raise RankFailed(first, what, errors[first])
        return [answers[n] for n in range(self.nproc)]

    def close(self, *, at_once: bool = False) -> None:
        """The processes end."""
        for rank in self._ranks:
            if at_once:
                rank.process.kill()
            rank.pipe.close()  # the end of a rank's loop
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(END_S)
            rank.process.kill()
            rank.process.wait()
            if rank.log is not None:
                rank.log.close()
        self._ranks = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


def serve() -> None:
    """A rank's life: do what comes through the pipe, until it ends."""
    pipe = Connection(int(sys.argv[1]))
    number, world_size, threads, device = pipe.recv()
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    rank = Rank(number, world_size, threads, device, lambda value: pipe.send(("said", value)))
    message: tuple[str, Any] = "answer", None
    while True:
        try:
            pipe.send(message)
            function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # no orderly exit: gloo's destructor can wait for peers that are gone
        try:
            message = "answer", function(rank, *args)
        except BaseException as error:
            traceback.print_exc()
            message = "error", without_paths(f"{type(error).__name__}: {error}")
