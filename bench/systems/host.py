"""Host time of a step: CPU time of the thread that trains, where the kernels take next to none.

    python -m bench host            a table, a minute: forward, backward, optimizer in ms
    python -m bench host --rounds 200 --clip 1

12 layers of 64, 16 tokens: 148 parameters. All rows of one number of ranks train in one process
(in each rank) in turns of a few steps, with one thread; a figure is the lower quartile of the
steps. Waiting for other ranks costs no CPU time of the thread. A row's name says the model, `stock`
(bench/peers) or `fastpar.GPT`, and what trains it: without a stage, a loop of plain torch with
fused AdamW for `stock`, fastpar.AdamW for `fastpar.GPT`.
"""

import itertools
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn

from bench.peers import stock
from bench.records import machine, machine_line, parser_of
from bench.report.tables import markdown
from bench.systems.links import Ranks
from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.kernels import keep_freed_memory

SHAPE = GPTConfig(n_layer=12, n_head=4, n_embd=64, block_size=16, vocab_size=64, dropout=0.0)
PHASES = ("forward", "backward", "optimizer")
ROWS: dict[
    int, dict[str, int | None]
] = {  # of each number of ranks: name -> ZeRO stage, None: no engine
    1: {"stock": None, "stock, stage 0": 0, "fastpar.GPT": None, "fastpar.GPT, stage 0": 0},
    2: {"stock": None} | {f"stock, stage {stage}": stage for stage in (0, 1, 2, 3)},
}
TURN = 4  # steps


class Contenders:
    """The rows of one number of ranks, in this rank; public methods are called from outside."""

    def __init__(self, ranks: int, clip: float | None) -> None:
        self.clip = clip
        warnings.filterwarnings("ignore", "AdamW.step: the Mesh has")  # of `stock` on two ranks
        keep_freed_memory()  # for every row, as `fastpar train` does: else page faults are timed
        torch.manual_seed(0)
        self.idx = torch.randint(SHAPE.vocab_size, (1, SHAPE.block_size))
        mesh = Mesh(device="cpu")
        self.trained = {name: made(name, stage, mesh, clip) for name, stage in ROWS[ranks].items()}

    def run(self, rounds: int) -> dict[str, list[float]]:
        """CPU ms of the phases of each row."""
        times: dict[str, list[list[float]]] = {name: [] for name in self.trained}
        for _ in range(-(-rounds // TURN)):
            for name, (model, optimizer) in self.trained.items():
                times[name] += [self._step(model, optimizer) for _ in range(TURN)]
        return {name: [low(x) for x in zip(*rows[rounds // 5 :])] for name, rows in times.items()}

    def _step(self, model: nn.Module, optimizer: Any) -> list[float]:
        at = [time.thread_time()]
        loss = model(self.idx, self.idx)
        at.append(time.thread_time())
        loss.backward()
        at.append(time.thread_time())
        if self.clip and isinstance(optimizer, torch.optim.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad()
        at.append(time.thread_time())
        return [1e3 * (b - a) for a, b in itertools.pairwise(at)]


def low(values: Any) -> float:
    """The lower quartile."""
    return statistics.quantiles(values, n=4)[0]


def made(name: str, stage: int | None, mesh: Mesh, clip: float | None) -> tuple[nn.Module, Any]:
    """The model of a row and its optimizer."""
    torch.manual_seed(1)
    model: nn.Module = GPT(SHAPE) if name.startswith("fastpar") else stock.GPT(SHAPE)
    if stage is None and name.startswith("stock"):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if stage is not None:
        model = parallelize(model, mesh, zero_stage=stage)
    return model, AdamW(model.parameters(), lr=1e-3, max_grad_norm=clip)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("bench host", __doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each row")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm")
    args = parser.parse_args(argv)
    rows = []
    for ranks in ROWS:
        with Ranks(None, "bench.systems.host:Contenders", ranks, args.clip, ranks=ranks) as started:
            for name, phases in started.ask("run", args.rounds)[0].items():
                rows.append([name, str(ranks), *(f"{ms:.2f}" for ms in (*phases, sum(phases)))])
    print(machine_line(machine("cpu")))
    print(markdown(["CPU ms of a step", "ranks", *PHASES, "sum"], rows))
    return 0
