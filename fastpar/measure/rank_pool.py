"""Ranks of this machine that stay and do one thing after the other: to measure, start once.

    with RankPool(2, threads=1) as pool:
        times = pool.call(function, argument)  # what every rank returned

The function is called as function(rank, argument) and found by its module and name; `rank` is the
process' own Rank, which keeps what later calls need. The ranks have the environment of the
launcher's (launch.py), so a Mesh made in them forms their process group.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from fastpar.comm.mesh import Mesh
from fastpar.kernels import keep_freed_memory
from fastpar.train.launch import rank_environment

START_S, CALL_S, END_S = 120.0, 600.0, 5.0
TIMEOUT_S = 300.0  # of a collective


class Rank:
    """A process of the pool.

    Attributes:
        rank, world_size, threads; kept: what functions leave for later calls.
    """

    def __init__(self, rank: int, world_size: int, threads: int, device: str) -> None:
        self.rank, self.world_size, self.threads = rank, world_size, threads
        self.device = device
        self.kept: dict[str, Any] = {}
        self._meshes: dict[int, Mesh] = {}

    def mesh(self, tp: int = 1) -> Mesh:
        """The mesh with this tp. Ranks: all."""
        if tp not in self._meshes:
            device = "cpu" if self.device == "cpu" else None
            self._meshes[tp] = Mesh(tp=tp, device=device, timeout_s=TIMEOUT_S)
        return self._meshes[tp]

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


class RankPool:
    """nproc processes, each a rank of one process group on this machine.

    Args:
        threads: of each rank; device: "cpu" or "cuda".
    Raises:
        RuntimeError: a rank could not start, died or raised; then all are gone.
    """

    def __init__(self, nproc: int, *, threads: int = 1, device: str = "cpu") -> None:
        self.nproc, self.threads, self.device = nproc, threads, device
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        # The parent holds the store: its port is taken before a rank starts.
        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_S),
        )
        context = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        try:
            for rank in range(nproc):
                # Set before the process starts: OpenMP reads its variables when torch is loaded.
                os.environ.update(rank_environment(rank, nproc, self._store.port, threads))
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, rank, nproc, threads, device), daemon=True
                )
                process.start()
                theirs.close()  # so that the process' death shows as the end of the pipe
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._collect("start", START_S)

    def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S
    ) -> list[Any]:
        """function(rank, *args) in every rank at once; what each returned."""
        message = pickle.dumps((function, args))
        for number, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._give_up(f"rank {number} is gone")
        return self._collect(function.__name__, timeout_s)

    def _collect(self, what: str, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.nproc:
            left = {self._pipes[n]: n for n in range(self.nproc) if n not in answers}
            ready: list[Any] = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(f"{what} took more than {timeout_s:g} s on rank {min(left.values())}")
            for pipe in ready:
                number = left[pipe]
                try:
                    value, error = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[number].join(END_S)
                    code = self._processes[number].exitcode
                    self._give_up(f"rank {number} left with exit code {code} in {what}")
                if error is not None:
                    self._give_up(f"rank {number} in {what}: {error}")
                answers[number] = value
        return [answers[n] for n in range(self.nproc)]

    def _give_up(self, why: str) -> None:
        self.close(at_once=True)
        raise RuntimeError(
            f"RankPool: expected an answer of {self.nproc} ranks, got {why}; its last line says "
            "the cause"
        )

    def close(self, *, at_once: bool = False) -> None:
        """The processes end."""
        for pipe in self._pipes:
            pipe.close()  # the end of a rank's loop
        for process in self._processes:
            if not at_once:
                process.join(END_S)
            if process.is_alive():
                process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, number: int, world_size: int, threads: int, device: str) -> None:
    """A rank's life: do what comes through the pipe, until it ends."""
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    rank = Rank(number, world_size, threads, device)
    message = pickle.dumps((None, None))
    while True:
        try:
            pipe.send_bytes(message)
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # no orderly exit: gloo's destructor can wait for peers that are gone
        try:
            message = pickle.dumps((function(rank, *args), None))
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(last.filename)}:{last.lineno}"
            message = pickle.dumps((None, f"{type(error).__name__}: {error} ({where})"))
