"""Offload over a stand-in bus beside DeepSpeed's ZeRO-Offload (stage 2, its CPU Adam).

One CPU rank, gradients clipped: fastpar without offload, with it over buses of PCIe's speeds (a
thread for each direction copies at a given speed, comm/host.py), and DeepSpeed, which finds the
"device" in the same memory and copies nothing over a bus. Steps take turns.

- GPT-2's width, where the host's step takes cores from what would be the device. How much of a step
  that is depends on its tokens alone. Of GPT-2 XL with 16k tokens on an H100 (45 % of its peak)
  forward and backward take 1.5 to 3 times what a host of 200 to 400 GB/s needs for its step; here
  that is so with about 32 tokens.
- As many weights, and a device with cores of its own: its blocks sleep, forward as long as the
  host's step takes here.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from time import perf_counter, sleep
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness import Bench
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import reason
from fastpar.engine.debug import Debug
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.models.gpt import GPT
from fastpar.observe.strategies import import_deepspeed
from fastpar.optim.adamw import AdamW
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

TIME_LIMIT_S = {"cpu": 600, "cuda": 120}
BUSES = {"pcie3": 12.0, "pcie5": 47.0}  # GB/s that large copies reach
CONFIG = GPTConfig(6, 12, 768, 128, 8192, dropout=0.0)
TOKENS = ((4, 128), (1, 128), (1, 64), (1, 32))  # rows and their length
ELSEWHERE = (12, 2048, 0.003)  # blocks, their width, seconds of a forward
QUICK = GPTConfig(2, 2, 32, 16, 64, dropout=0.0)
STEPS, TURNS = 7, 5


class _Sleep(torch.autograd.Function):
    """The work of a block, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sleep(2 * ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    """One weight, needed when forward begins; its gradient is there when backward ends."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width, bias=False), seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.seconds)


class Elsewhere(nn.Module):
    """As many weights as CONFIG has, on a device that computes with cores of its own."""

    def __init__(self, blocks: int, width: int, seconds: float) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.Sequential(*(Block(seconds, width) for _ in range(blocks)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        given = (x[:, :1] - y[:, :1]).float().expand(-1, self.width)
        return self.blocks(given).square().mean()


class Contender:
    """One way to train a model that makes a loss of tokens, a step at a time."""

    def __init__(self, name: str, model: nn.Module, rows: int, length: int) -> None:
        self.name, self.shape, self.model = name, (rows, length + 1), cast(Any, model)
        self.losses: list[float] = []
        self.ms: list[float] = []  # of a step, in each turn
        if name == "deepspeed":
            deepspeed = import_deepspeed("cpu")
            os.environ.setdefault("LOCAL_RANK", "0")
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            settings = {
                "train_micro_batch_size_per_gpu": rows,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }
            self.model, *_ = deepspeed.initialize(model=self.model, config=settings)
            return
        bus = BUSES.get(name.rpartition(" ")[2])
        options: dict[str, Any] = {"zero_stage": 2, "offload": "optimizer"} if bus else {}
        parallelize(
            self.model, Mesh(device="cpu"), Parallel.of(**options), debug=Debug(bus_gb_s=bus or 0)
        )
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, max_grad_norm=1.0)

    def step(self) -> None:
        g = torch.Generator().manual_seed(len(self.losses) + 1)
        x = torch.randint(0, 64, self.shape, generator=g)
        loss = self.model(x[:, :-1].contiguous(), x[:, 1:].contiguous())
        if self.name == "deepspeed":
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def turn(self, count: int) -> None:
        """ms of a step in a row of count + 1, start to start; the first is not counted.

        Nothing waits between steps: what a step leaves to the next one is hidden as in training.
        """
        self.step()
        begin = perf_counter()
        for _ in range(count):
            self.step()
        self.ms.append((perf_counter() - begin) * 1e3 / count)


def steps(bench: Bench, case: str, make: Callable[[], nn.Module], rows: int, length: int) -> None:
    """Rows of whole steps, which take turns."""
    if bench.only not in case:
        return
    made: list[Contender] = []
    for name in ("deepspeed", "fastpar", *(f"fastpar offload {bus}" for bus in BUSES)):
        try:
            made.append(Contender(name, make(), rows, length))
        except Exception as error:
            bench.add(bench.timed_row(case, "step", name, (), refused=reason(error)))
    for _ in range(1 if bench.quick else TURNS):
        for contender in made:
            contender.turn(1 if bench.quick else STEPS)
    first = made[0]
    for one in made:
        notes: dict[str, Any] = {
            "loss_difference": max(abs(a - b) for a, b in zip(one.losses, first.losses))
        }
        if one.name != "deepspeed":
            report = engine_of(one.model).report
            notes["exposed_ms"] = report.offload_ms if report else None
        base, threads = (first.name, first.ms), torch.get_num_threads()
        row = bench.timed_row(case, "step", one.name, one.ms, base, threads=threads, **notes)
        row.tokens_per_s = rows * length / (row.median_ms or 1.0) * 1e3
        bench.add(row)


def run(bench: Bench) -> None:
    if bench.device != "cpu":
        return  # the stand-in bus is between threads of a CPU
    config = QUICK if bench.quick else CONFIG
    for rows, length in TOKENS[: 1 if bench.quick else None]:
        length = min(length, config.block_size)
        shape = f"{config.n_layer} layers of {config.n_embd}, {rows} x {length} tokens"
        steps(bench, shape, partial(GPT, config, seed=0), rows, length)
    blocks, width, seconds = (2, 16, 0.001) if bench.quick else ELSEWHERE
    shape = f"{blocks} matrices of {width}, a device that sleeps {1e3 * blocks * seconds:.0f} ms"
    torch.manual_seed(0)
    model = Elsewhere(blocks, width, seconds)
    steps(bench, f"{shape} in forward", partial(copy.deepcopy, model), 1, 32)
