"""Parameter servers beside all-reduce, on links of 1 Gbit/s: bytes, ms, loss for 1 to 4 workers.

Every worker and the server have a network namespace of their own with a link to a switch
(bench/systems/links.py). The workers train a small GPT on the bytes of the text that ships with a
dependency, each on its own sequences:

    all-reduce           stage 0: every worker sends 2 (W - 1) / W of the gradients, and so on
    sharded servers      stage 1: each worker is the server of 1 / W of the parameters: a push is a
                         reduce-scatter, a pull an all-gather
    central server       the same engine at stage 0; its collectives push each bucket to the server,
                         which adds up, and pull the sum
    asynchronous server  the server steps with each gradient when it comes, and answers with its
                         weights; staleness is how many other steps lie between a worker's pull and
                         the step with its gradient

All see as many sequences: the asynchronous server makes a step of each gradient, the others one
of W. loss is that of the final weights on fixed sequences of the end of the text.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import Bench
from bench.records import Row, reason
from bench.systems.bench_overlap import busy_cores, priority, settled_bytes
from bench.systems.links import ADDRESSES, Link, NoLinkError, RankError, Ranks
from bench.systems.study import read_bytes
from fastpar import GPT, AdamW, Mesh, engine_of, parallelize
from fastpar.comm.handles import Handle
from fastpar.comm.torch_collectives import TorchCollectives
from fastpar.comm.wires import Worker
from fastpar.config.config import GPTConfig
from fastpar.doctor.clocks import Timing

TIME_LIMIT_S = {"cpu": 900, "cuda": 30}
MBIT, TIMEOUT_S, PORT, LR, ROWS, WARMUP = 1000, 120.0, 29400, 1e-3, 4, 20
CONFIG, STEPS = GPTConfig(4, 4, 192, 64, 256, dropout=0.0), 80
QUICK, QUICK_STEPS = GPTConfig(1, 2, 32, 16, 256, dropout=0.0), 2
ALL_REDUCE, SHARDED = "all-reduce", "sharded servers (ZeRO-1)"
CENTRAL, ASYNC = "central server", "asynchronous server"
VARIANTS = (ALL_REDUCE, SHARDED, CENTRAL, ASYNC)


def warm_up(optimizer: AdamW, rounds: float) -> None:
    """The learning rate after so many gradients of every worker."""
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (rounds + 1) / WARMUP)


def receive(connection: socket.socket, x: Tensor) -> None:
    """Fill x, fp32 on the CPU."""
    view = memoryview(x.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while len(view):
        n = connection.recv_into(view)
        if not n:
            raise ConnectionError("the other end is gone")
        view = view[n:]


def send(connection: socket.socket, x: Tensor) -> None:
    """Send x, fp32 on the CPU."""
    connection.sendall(x.view(torch.uint8).numpy())  # type: ignore[arg-type]


class Server:
    """Rank 0: adds up what the workers push, or steps with it."""

    def __init__(self, variant: str, config: GPTConfig, workers: int) -> None:
        self.workers = workers
        self.sizes: list[int] = []
        if variant not in (CENTRAL, ASYNC):
            return
        with socket.create_server((ADDRESSES[0], PORT)) as listener:
            listener.settimeout(TIMEOUT_S)
            self.connections = [listener.accept()[0] for _ in range(workers)]
        for connection in self.connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if variant == ASYNC:
            flat = torch.cat([p.detach().view(-1) for p in GPT(config, seed=0).parameters()])
            self.weights = torch.nn.Parameter(flat)
            self.optimizer = AdamW([self.weights], lr=LR, weight_decay=0.0)
            self.version, self.lock = 0, threading.Lock()
            self.staleness: list[int] = []

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Serve so many steps of every worker."""
        serve = {CENTRAL: self._central, ASYNC: self._asynchronous}.get(variant)
        if serve is None:
            return {}
        return serve(steps)

    def _central(self, steps: int) -> dict[str, Any]:
        """Push and pull bucket by bucket, until the workers say that they are done (0 elements)."""
        pushed: list[queue.Queue[Tensor]] = [queue.Queue() for _ in self.connections]

        def read(connection: socket.socket, of: queue.Queue[Tensor]) -> None:
            while True:
                size = torch.empty(1)
                receive(connection, size)
                x = torch.empty(int(size))
                receive(connection, x)
                of.put(x)
                if not len(x):
                    return

        readers = [
            threading.Thread(target=read, args=pair) for pair in zip(self.connections, pushed)
        ]
        for reader in readers:
            reader.start()
        while len(parts := [of.get(timeout=TIMEOUT_S) for of in pushed]) and len(parts[0]):
            total = functools.reduce(torch.add, parts)
            writers = [threading.Thread(target=send, args=(c, total)) for c in self.connections]
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
        for reader in readers:
            reader.join()
        return {}

    def _asynchronous(self, steps: int) -> dict[str, Any]:
        def serve(connection: socket.socket) -> None:
            seen, grad = self.version, torch.empty_like(self.weights)
            send(connection, self.weights.detach().clone())
            for _ in range(steps):
                receive(connection, grad)
                with self.lock:
                    self.staleness.append(self.version - seen)
                    self.weights.grad = grad
                    warm_up(self.optimizer, self.version // self.workers)
                    self.optimizer.step()
                    self.version += 1
                    seen, values = self.version, self.weights.detach().clone()
                send(connection, values)

        threads = [threading.Thread(target=serve, args=(c,)) for c in self.connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for connection in self.connections:
            send(connection, self.weights.detach())
        return {"staleness": statistics.fmean(self.staleness)}


class Served(TorchCollectives):
    """All-reduces of gradients go through the server; all else goes as usual."""

    def __init__(self, group: Any, connection: socket.socket) -> None:
        super().__init__(group)
        self._connection, self._worker = connection, Worker(self)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int = 0) -> Handle:
        call = functools.partial(self._through_server, x.view(-1), mean)
        return self._worker.submit("all_reduce", call, x, later=True)

    def _through_server(self, x: Tensor, mean: bool) -> None:
        send(self._connection, torch.tensor([float(x.numel())]))
        send(self._connection, x)
        receive(self._connection, x)
        if mean:
            x.div_(self.world_size)


class Trainer:
    """Rank 0 is the server, the others are workers; called through bench.systems.links.Ranks."""

    def __init__(self, variant: str, config: GPTConfig, workers: int) -> None:
        self.variant, self.config, self.workers = variant, config, workers
        self.rank = int(os.environ["RANK"]) - 1
        if self.rank < 0:
            self.server = Server(variant, config, workers)
            return
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{ADDRESSES[1]}:{os.environ['MASTER_PORT']}",
            rank=self.rank,
            world_size=workers,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self.text = read_bytes(1_000_000)
        self.model: Any = GPT(config, seed=0)
        if variant in (CENTRAL, ASYNC):
            self.connection = self._connect()
        if variant == ASYNC:
            return
        how: dict[str, Any] = {"zero_stage": int(variant == SHARDED), "bucket_mb": 4.0}
        if variant == CENTRAL:
            how["collectives"] = lambda group, role: Served(group, self.connection)
        self.model = parallelize(self.model, Mesh(device="cpu"), transport="torch", **how)
        self.optimizer = AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)

    def _connect(self) -> socket.socket:
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                connection = socket.create_connection((ADDRESSES[0], PORT))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _rows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.text[starts[:, None] + torch.arange(self.config.block_size + 1)]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step * self.workers + self.rank)
        return self._rows(torch.randint(900_000, (ROWS,), generator=generator))

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """ms of each step but the first; loss of the final weights."""
        if self.rank < 0:
            return self.server.run(variant, steps)
        step, begins = self._asynchronous if variant == ASYNC else self._step, []
        if variant == ASYNC:
            self._pull()
        for number in range(steps):
            begins.append(time.perf_counter())
            if variant != ASYNC:
                warm_up(self.optimizer, number)
            step(*self._batch(number))
        begins.append(time.perf_counter())
        if variant == CENTRAL:
            send(self.connection, torch.zeros(1))
        if variant == ASYNC:
            self._pull()  # what all have made together
        ms = [1e3 * (b - a) for a, b in itertools.pairwise(begins)]
        return {"ms": ms[1:], "loss": self._loss(variant)}

    def _step(self, x: Tensor, y: Tensor) -> None:
        self.model(x, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _asynchronous(self, x: Tensor, y: Tensor) -> None:
        self.model.zero_grad()
        self.model(x, y).backward()
        grads = [p.grad.view(-1) for p in self.model.parameters() if p.grad is not None]
        send(self.connection, torch.cat(grads))
        self._pull()

    @torch.no_grad()
    def _pull(self) -> None:
        params = list(self.model.parameters())
        flat = torch.empty(sum(p.numel() for p in params))
        receive(self.connection, flat)
        for p, values in zip(params, flat.split([p.numel() for p in params])):
            p.copy_(values.view_as(p))

    @torch.no_grad()
    def _loss(self, variant: str) -> float:
        """In bits a byte."""
        x, y = self._rows(torch.arange(900_000, 990_000, 90_000 // 128))
        if variant == ASYNC:
            return self.model(x, y).item() / math.log(2)
        with engine_of(self.model).gathered():
            whole = {name: p.clone() for name, p in self.model.state_dict().items()}
        plain = GPT(self.config)
        plain.load_state_dict(whole)
        return plain(x, y).item() / math.log(2)


def measure(bench: Bench, title: str, variant: str, workers: int, link: Link) -> Row:
    """One variant with so many workers."""
    config, steps = (QUICK, QUICK_STEPS) if bench.quick else (CONFIG, STEPS)
    row = bench.row(title, "step", variant, torch.float32)
    row.threads, row.notes = 1, {"workers": workers, "link_mbit": MBIT, "steps": steps}
    target = "bench.systems.bench_ps:Trainer"
    try:
        with Ranks(link, target, variant, config, workers, timeout_s=TIMEOUT_S) as ranks:
            before = settled_bytes(link)
            server, *answers = ranks.call("run", variant, steps, timeout_s=3 * TIMEOUT_S)
            sent = [now - then for now, then in zip(settled_bytes(link), before)]
    except RankError as error:
        row.refused = reason(error)
        return row
    row.median_ms, row.p20_ms, row.p80_ms, row.runs = Timing.of(
        [max(each) for each in zip(*(a["ms"] for a in answers))]
    )
    row.notes |= {
        "tokens_per_s": 1e3 * workers * ROWS * config.block_size / row.median_ms,
        "sent_bytes": max(sent) / steps,
        "worker_bytes": max(sent[1:]) / steps,
        "bits_per_byte": answers[0]["loss"],
        "busy_cores": busy_cores(),
        "priority": priority(),
    }
    if "staleness" in server:
        row.notes["staleness"] = server["staleness"]
    return row


def gate(rows: Sequence[Row]) -> None:
    """What is synchronous must have learned what all-reduce did, but for the order of sums."""
    same = [r for r in rows if r.variant != ASYNC and r.refused is None]
    for row in same[1:]:
        off = abs(row.notes["bits_per_byte"] - same[0].notes["bits_per_byte"])
        if off > 1e-2:
            row.refused, row.median_ms = f"loss: {off:.2e} off that of {same[0].variant}", None


def run(bench: Bench) -> None:
    if bench.device != "cpu":
        return  # the links are between CPU ranks
    for workers in (2,) if bench.quick else (1, 2, 3, 4):
        title = f"GPT 1.9M B={ROWS} T=64, {workers} worker{'s' * (workers > 1)}, {MBIT} Mbit/s"
        if bench.only not in title:
            continue
        try:
            with Link(MBIT, workers + 1) as link:
                rows = [measure(bench, title, v, workers, link) for v in VARIANTS]
        except NoLinkError as error:
            bench.add(bench.row(title, "step", "link", torch.float32, refused=reason(error)))
            return
        gate(rows)
        bench.add(*rows)
