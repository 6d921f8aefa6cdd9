"""A checkpoint of any layout is loaded at any other: the same bits, and the same run goes on."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from cells import slow
from programs import assert_same

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.engine.debug import Debug
from fastpar.optim.schedule import param_groups
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=8, vocab_size=301, dropout=0.1)
DATA = torch.randint(0, 301, (3 * 12, 2, 9), generator=torch.Generator().manual_seed(3))


class Rank:
    """A model and an optimizer on one rank; rows: micro-batches a step, of two sequences each."""

    def __init__(self, layout, rows):
        grid = {"tp_grid": layout.tp} if isinstance(layout.tp, tuple) else {"tp": layout.tp}
        self.mesh = Mesh(**grid, device="cpu")
        self.config = replace(CONFIG, n_head=layout.n_head, n_embd=8 * layout.n_head)
        self.model = GPT(self.config, seed=layout.ranks + layout.stage).to(layout.dtype)
        self.rows, self.rounds = rows, rows // self.mesh.dp_size
        options = {"grad_dtype": torch.float32, "deterministic": True, "bucket_mb": 0.02}
        options |= {"accumulate": "shard", "grad_accum_steps": self.rounds}
        asked = Parallel.of(zero_stage=layout.stage, **{**options, **(layout.options or {})})
        debug = Debug(bus_gb_s=2.0) if "offload" in (layout.options or {}) else None
        parallelize(self.model, self.mesh, asked, debug=debug)
        groups = param_groups(self.model, 0.1)
        self.optimizer = AdamW(groups, lr=1e-2, max_grad_norm=1.0, **(layout.optimizer or {}))

    def train(self, first, last):
        """Steps first .. last - 1; their losses."""
        losses = []
        for step in range(first, last):
            total = torch.zeros(1, dtype=torch.float64)
            for j in range(self.rounds):
                row = step * self.rows + j * self.mesh.dp_size + self.mesh.dp_rank
                x = DATA[row]
                loss = self.model(x[:, :-1], x[:, 1:], rng_key=torch.tensor([5, 2 * row]))
                (loss / self.rounds).backward()
                total += loss.detach().double()
            self.optimizer.step()
            self.optimizer.zero_grad()
            engine = self.optimizer.engines()[0]
            rows = self.rows * self.mesh.world_size // self.mesh.dp_size
            losses.append(engine.all_reduce_scalars(total).item() / rows)
        return losses

    def whole(self):
        """Name -> whole tensor, of the weights and the optimizer's state, without padding."""
        found = {name: x.clone() for name, x in self.model.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        params = [p for g in self.optimizer.param_groups for p in g["params"]]
        names = {p: name for name, p in self.model.named_parameters()}
        for i, p in enumerate(params):
            for entry, value in state[i].items():
                found[f"{names[p]}/{entry}"] = torch.as_tensor(value).clone()
        return found


class Layout(NamedTuple):
    ranks: int
    stage: int = 0
    tp: int | tuple = 1  # of a grid: its rows and columns
    options: dict | None = None  # of parallelize()
    dtype: torch.dtype = torch.float32
    optimizer: dict | None = None
    n_head: int = 4

    @property
    def tree(self):
        """What the bits of sums over tokens and features depend on."""
        tp = math.prod(self.tp) if isinstance(self.tp, tuple) else self.tp
        return (
            self.tp,
            self.ranks // tp % 3 == 0,
            (self.options or {}).get("sequence_parallel"),
        )

    def run(self, work, rows):
        """work(Rank) on every rank; rank 0's result."""
        return run_ranks(lambda: work(Rank(self, rows)), self.ranks, timeout_s=120)[0]


MASTERS = {"dtype": torch.bfloat16, "optimizer": {"master_weights": True}}
REMAINDER = {
    **MASTERS,
    "optimizer": {"master_weights": "remainder", "moment_dtype": torch.bfloat16},
}
CODES = {"optimizer": {"moment_dtype": torch.uint8}}
AMSGRAD = {"optimizer": {"amsgrad": True}}
HOST = {"offload": "optimizer"}
FIVE = {"n_head": 5}  # padded to 6 and to 8 where tp does not divide them
PAIRS = [
    ((4, 3), (1,), {}),
    ((3, 2), (2, 3), {}),
    ((4, 1), (4, 2, 1, {"shard_size": 2}), {}),
    ((2, 1, 2), (4, 0, 4), FIVE),
    ((4, 3, 2), (2,), MASTERS),
    ((2, 2), (4, 3), REMAINDER),
    ((2, 1), (1, 0, 1, HOST), {}),
    ((4, 3, (2, 2)), (2, 0, 2), FIVE),
]
MORE_PAIRS = [
    ((1,), (4, 0, 4), {}),
    ((1,), (4,), {}),
    ((4, 3, 2), (2,), {}),
    ((4,), (3,), {}),
    ((1,), (3, 3), {}),
    ((2, 1), (4, 2, 1, {"bucket_mb": 0.1}), {}),
    ((2, 3), (2,), {}),
    ((4, 3, 1, {"shard_size": 2}), (4, 3), {}),
    ((2, 0, 2), (1,), {}),
    ((2, 0, 2), (1,), FIVE),
    ((4, 2, 2), (4, 3, 2, {"sequence_parallel": False}), {}),
    ((4, 1, 4), (4, 3, 2), {}),
    ((4, 3), (2, 1), MASTERS),
    ((2, 3), (4, 1), CODES),
    ((2, 3, 1, HOST), (1,), {}),
    ((2,), (2, 3, 1, {"offload": "parameters"}), {}),
    ((1,), (4, 1, (2, 2)), {}),
    ((2, 0, (2, 1)), (1,), FIVE),
    ((2, 0, 2), (4, 2, (2, 2)), {}),
    ((2, 1), (4, 3), AMSGRAD),
]


@pytest.mark.parametrize(("before", "after", "more"), [*PAIRS, *(slow(*row) for row in MORE_PAIRS)])
def test_the_same_state_and_the_same_run(tmp_path, before, after, more):
    """In deterministic mode the same bits, where the sums have the same tree.

    They have not in groups of three, nor where tp or its cut of the tokens changes. A layout is
    ranks, stage, tp and options.
    """
    before, after = Layout(*before)._replace(**more), Layout(*after)._replace(**more)
    rows = 12 if 3 in (before.ranks, after.ranks) else 4

    def first(rank):
        rank.train(0, 1)
        held = {"model": rank.model, "optimizer": rank.optimizer}
        path = save_checkpoint(tmp_path, step=1, state={"tokens": 7}, **held)
        return path, rank.whole(), rank.train(1, 3), rank.whole()

    def second(rank):
        state = load_checkpoint(path, model=rank.model, optimizer=rank.optimizer)
        assert (state["step"], state["tokens"]) == (1, 7)
        return rank.whole(), rank.train(1, 3), rank.whole()

    path, saved, losses, end = before.run(first, rows)
    verify_checkpoint(path)
    loaded, again, its_end = after.run(second, rows)
    assert_same(loaded, saved)
    if before.tree == after.tree:
        assert losses == again
        assert_same(its_end, end)
    else:
        rel = 1e-5 if before.dtype == torch.float32 else 1e-3
        assert losses == pytest.approx(again, rel=rel)
