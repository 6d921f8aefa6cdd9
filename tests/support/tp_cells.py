"""The cells of the tensor-parallel matrix: 6 steps of a small model, and what must come out.

[Note: the reference] The expected run has no engine, no ranks and nothing split: autograd's
gradients of the whole global batch. Where a dimension is split its sums have another order, so
values are equal and bits are not; how close they must be is nobody's choice:

    fp64    every value within 1e-12 of the largest element of its tensor. Rounding leaves some
            1e-15; no wrong factor, mask or missing part of a sum is that small.
    others  the 2x rule of fastpar.testing: at most twice as far from fp64 as one process in the
            same dtype, plus one rounding. Tensors here have as few as 4 elements, and one run is
            one draw of its roundings: distances are root mean squares over all steps, and the
            yardstick is the largest of four runs, with the batch cut into micro-batches and each
            first weight moved by one rounding.

AdamW's eps is 1e-3 because Adam divides by the size of a gradient: the exact gradient of a key's
bias is 0, and with eps near 0 what rounding leaves of it would become movement of size lr.

[Note: who reads gradients] engine.grads() makes sums along tp that a step would otherwise make
itself, so only every other step's gradients are read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from cells import few
from packed_rows import positions_of
from torch import Tensor, nn

from fastpar.axes.tensor.functional import TensorParallel, column_linear, row_linear
from fastpar.axes.tensor.vocabulary import vocab_embedding, vocab_linear_cross_entropy
from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.files.tensor_file import FLOATS
from fastpar.kernels import Rng, dropout, make_key
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import DynamicLossScale, param_groups
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Partial, Shard, State
from fastpar.testing import run_ranks

STEPS, T, V, C, HEADS, LAYERS = 6, 6, 37, 16, 4, 2
OVERFLOW_STEP = 3  # fp16: gradients of the last micro-batch are infinite
YARDSTICK = ((1, 0), (1, 1), (2, 2), (4, 3))  # micro-batches, seed of the roundings


@dataclass(frozen=True)
class Cell:
    tp: int = 2
    dp: int = 1
    stage: int = 0
    sequence: bool = True
    model: str = "tied"  # tied: GPT | untied: Foreign
    dropout: bool = False
    clip: bool = False
    precision: str = "fp64"
    # The matrix leaves these alone, test_tp_modes.py does not.
    shard_size: int | None = None
    accum: str = "once"  # see ACCUM
    recompute: str = "none"
    deterministic: bool = False
    time: int = T
    vocab_size: int = V
    n_head: int = HEADS
    head_dim: int = C // HEADS
    # Nor does it cp; test_cp_matrix.py does not.
    cp: int = 1
    method: str = "heads"
    documents: bool = False
    grid: tuple[int, ...] | None = None  # test_grid_matrix.py: in place of tp

    def __str__(self) -> str:
        hsdp = f"of{self.shard_size}" if self.shard_size else ""
        words = [f"tp{self.tp}-dp{self.dp}{hsdp}-zero{self.stage}", self.model, self.precision]
        named = ("sequence", "dropout", "clip", "deterministic", "documents")
        words += [n for n in named if getattr(self, n)]
        words += [w for w in (self.accum, self.recompute) if w not in ("once", "none")]
        words += [f"cp{self.cp}-{self.method}"] * (self.cp > 1)
        if self.grid is not None:
            words[0] = f"grid{'x'.join(map(str, self.grid))}-dp{self.dp}-zero{self.stage}"
        return "-".join(words)

    @property
    def micro_batches(self) -> int:
        """Of a step, over all ranks."""
        return self.dp * ACCUM[self.accum][0]

    @property
    def samples(self) -> int:
        """Of a step, over all ranks."""
        return max(4, self.micro_batches)


# name -> micro-batches per step, accumulate, grad_accum_steps, under no_sync()
ACCUM = {
    "once": (1, "shard", 1, False),
    "shard": (2, "shard", 1, False),
    "full": (2, "full", 2, False),
    "no_sync": (2, "shard", 1, True),
    "shard_4": (4, "shard", 1, False),
    "full_4": (4, "full", 4, False),
}
AXES: dict[str, tuple] = {
    "tp": (1, 2, 4),
    "dp": (1, 2),
    "stage": (0, 1, 2, 3),
    "sequence": (True, False),
    "model": ("tied", "untied"),
    "dropout": (True, False),
    "clip": (True, False),
    "precision": ("fp64", "fp32"),
}


@functools.cache
def all_cells() -> tuple[tuple[Cell, bool], ...]:
    """The product of AXES, and of each cell whether it is one of the few that together have every
    pair of values."""
    left = [Cell(*values) for values in itertools.product(*AXES.values())]
    left = [c for c in left if c.tp > 1 or c.sequence]  # one rank has no tokens to share out
    random.Random(0).shuffle(left)
    quick = few(left, pairs, lambda c: (c.tp * c.dp + 1) ** 0.4)
    return tuple((c, c in quick) for c in left)


def pairs(cell: Cell) -> set[tuple]:
    return set(itertools.combinations([(n, getattr(cell, n)) for n in AXES], 2))


# Somebody's model: untied, in plain torch when nothing is split


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


class ForeignBlock(nn.Module):
    """Heads share tau, so that each rank has a part of its gradient; gate is one per feature."""

    tp_states: ClassVar = {"tau": Partial(), "gate": Shard()}
    tp: TensorParallel | None = None

    def __init__(self, layer: int, p: float):
        super().__init__()
        self.p, self.site = p, 2 * layer
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.out = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C)
        self.tau, self.gate = (
            nn.Parameter(torch.empty(C // HEADS)),
            nn.Parameter(torch.empty(4 * C)),
        )

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        columns = {"qkv.weight": Shard(0, groups=3), "qkv.bias": Shard(0, groups=3)}
        rows = {"proj.weight": Shard(1), "out.weight": Shard(1), "fc.weight": Shard(0)}
        names = ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "proj.bias", "out.bias")
        return {**columns, **rows, **dict.fromkeys(names, tp.per_token)}

    def column(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if self.tp is None:
            return linear(x, layer)
        return column_linear(x, layer.weight, layer.bias, self.tp)

    def row(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if self.tp is None:
            return linear(x, layer)
        return row_linear(x, layer.weight, layer.bias, self.tp)

    def forward(self, x: Tensor, shape: torch.Size, key: Tensor | None) -> Tensor:
        qkv = self.column(self.ln_1(x), self.qkv).view(*shape, 3, -1, C // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H/tp, T, D]
        y = F.scaled_dot_product_attention(q * self.tau, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.drop(self.row(y.view(*x.shape[:-2], -1, y.shape[-1]), self.proj), shape, key)
        y = self.row(F.gelu(self.column(self.ln_2(x), self.fc) * self.gate), self.out)
        return x + self.drop(y, shape, key, 1)

    def drop(self, x: Tensor, shape: torch.Size, key: Tensor | None, n: int = 0) -> Tensor:
        if key is None:
            return x
        if x.dim() == 3:
            return dropout(x, self.p, Rng(key, self.site + n))
        assert self.tp is not None
        at = Rng(key, self.site + n, first_row=self.tp.rank * x.shape[0], rows=shape[1])
        return dropout(x, self.p, at)


class Foreign(nn.Module):
    tp_states: ClassVar = {"wte.weight": Shard(pad_to=4), "head.weight": Shard(pad_to=2)}
    tp: TensorParallel | None = None

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(ForeignBlock(layer, p) for layer in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"wpe.weight": tp.per_token, "ln_f.weight": tp.per_token, "ln_f.bias": tp.per_token}

    def forward(self, idx: Tensor, targets: Tensor, rng_key: Tensor | None = None) -> Tensor:
        tp, shape = self.tp, idx.shape
        key = rng_key if self.p else None
        x = self.wte(idx) if tp is None else vocab_embedding(idx, self.wte.weight, tp)
        if tp is None or not tp.sequence_parallel:
            x = x + self.wpe.weight[: shape[1]]
        else:
            first = tp.rank * x.shape[0]
            x = x + self.wpe(torch.arange(first, first + x.shape[0]) % shape[1])
        for block in self.blocks:
            x = block(x, shape, key)
        x = self.ln_f(x)
        if tp is None:
            return F.cross_entropy(linear(x, self.head).flatten(0, 1), targets.flatten())
        return vocab_linear_cross_entropy(x, self.head.weight, targets, tp, vocab_size=V)


def build(cell: Cell, seed: int) -> nn.Module:
    """Weights of a seed; torch's own generator is shared by thread ranks."""
    p = 0.2 if cell.dropout else 0.0
    if cell.model == "tied":
        sizes = {"n_layer": LAYERS, "n_head": cell.n_head, "n_embd": cell.n_head * cell.head_dim}
        vocab = {"block_size": 12, "vocab_size": cell.vocab_size}
        return GPT(GPTConfig(dropout=p, **sizes, **vocab), seed=seed).to(FLOATS[cell.precision])
    model = Foreign(p)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            ones = value.dim() == 1 and not name.endswith("bias")
            value.normal_(float(ones), 0.1, generator=generator)
    return model.to(FLOATS[cell.precision])


# A step's batch


def batch(cell: Cell, step: int) -> tuple[Tensor, Tensor]:
    """[B, T] tokens that count up by 1, 2 or 3; some have no target."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, cell.vocab_size, (cell.samples, 1), generator=generator)
    by = torch.randint(1, 4, (cell.samples, 1), generator=generator)
    rows = (start + by * torch.arange(cell.time + 1)) % cell.vocab_size
    return rows[:, :-1], rows[:, 1:]


def micro_batch(cell: Cell, step: int, index: int, of: int) -> tuple[Tensor, Tensor, Tensor]:
    """Part index of the batch; the key of its masks names its first sample."""
    n = cell.samples // of
    x, y = (t[index * n : (index + 1) * n] for t in batch(cell, step))
    return x, y, make_key(7 + step, index * n)


def numbered(cell: Cell, rank: int, j: int) -> int:
    """The global number of a dp rank's micro-batch j, as deterministic mode counts them."""
    n_accum, accumulate, _, no_sync = ACCUM[cell.accum]
    return rank * n_accum + j if accumulate == "full" or no_sync else j * cell.dp + rank


def reads_gradients(step: int) -> bool:
    return step % 2 == 0


class Loop:
    """What one process and a rank of many do alike: losses, scale, optimizer, records."""

    def __init__(self, cell: Cell, model: nn.Module, holder: nn.Module, **options: Any) -> None:
        self.cell, self.model = cell, model
        limit = 0.25 if cell.clip else float("inf")
        groups = param_groups(holder, 0.1)
        self.optimizer = AdamW(groups, lr=2e-2, eps=1e-3, max_grad_norm=limit, **options)
        self.dynamic = DynamicLossScale(2.0**10, 3) if cell.precision == "fp16" else None
        self.scale = 1.0
        self.record: dict[str, Any] = {"losses": [], "grads": {}, "norms": [], "scales": []}
        self.announce()

    def announce(self) -> None:
        if self.dynamic is not None:
            self.scale = self.optimizer.grad_scale = self.dynamic.scale
        self.record["scales"].append(self.scale)

    def backward(self, step: int, index: int, of: int, share: int) -> float:
        """The loss of a micro-batch, of which a rank has `share`."""
        x, y, key = micro_batch(self.cell, step, index, of)
        loss = self.model(x, y, rng_key=key, **positions_of(self.cell, x, key))
        scaled = loss / share * self.scale
        if self.dynamic is not None and step == OVERFLOW_STEP and index == of - 1:
            scaled = scaled * float("inf")
        scaled.backward()
        return loss.item()

    def step(self, step: int, loss: float, grads: dict[str, Tensor] | None) -> None:
        self.record["losses"].append(loss)
        if grads is not None:
            scaled = {n: g.double() / self.scale for n, g in grads.items()}
            self.record["grads"].update({(step, n): g for n, g in scaled.items()})
        self.optimizer.step()
        self.record["norms"].append(self.optimizer.grad_norm.item())
        if self.dynamic is not None:
            self.dynamic.update(self.optimizer.skipped)
        self.announce()
        self.optimizer.zero_grad()


def train(cell: Cell, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """This rank's run of a cell. Every rank starts from other weights, which rank 0 replaces."""
    split: dict[str, Any] = {"tp": cell.tp} if cell.grid is None else {"tp_grid": cell.grid}
    mesh = Mesh(dp=cell.dp, cp=cell.cp, device="cpu", **split)
    n_accum, accumulate, grad_accum_steps, no_sync = ACCUM[cell.accum]
    model = build(cell, seed=mesh.rank)
    half = FLOATS[cell.precision].itemsize == 2
    parallelize(
        model,
        mesh,
        Parallel.of(
            **{
                "zero_stage": cell.stage,
                "shard_size": cell.shard_size,
                "bucket_mb": 0.01,
                "first_bucket_mb": 0.003,
                "grad_dtype": torch.float32 if half else None,
                "accumulate": accumulate,
                "grad_accum_steps": grad_accum_steps,
                "deterministic": cell.deterministic,
                "sequence_parallel": cell.sequence if cell.grid is None else None,
                "cp_method": cell.method,
                **(options or {}),
            }
        ),
    )
    recompute(model, cell.recompute)
    engine = engine_of(model)
    start = whole_state(model)
    loop = Loop(cell, model, model, master_weights=half)
    names = {p: n for n, p in model.named_parameters()}
    for step in range(STEPS):
        losses = []
        for j in range(n_accum):
            index = numbered(cell, mesh.dp_rank, j)
            quiet = no_sync and j < n_accum - 1
            with engine.no_sync() if quiet else contextlib.nullcontext():
                losses.append(loop.backward(step, index, cell.micro_batches, n_accum))
        grads = {names[p]: g for p, g in engine.grads()} if reads_gradients(step) else None
        loop.step(step, sum(losses) / n_accum, grads)
    return {**loop.record, "start": start, "parameters": whole_state(model)}


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in model.state_dict().items()}


@functools.cache
def _plain(cell: Cell, precision: str, parts: int, moved: int) -> dict[str, Any]:
    """One process; the weights are those of the cell's precision, the arithmetic is another's."""
    model = build(cell, seed=0)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(moved)
    for p in model.parameters() if moved else ():
        signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
        p.data.mul_(1 + signs * torch.finfo(p.dtype).eps)
    model = model.to(FLOATS[precision])
    half = FLOATS[precision].itemsize == 2
    wide = {  # gradients of 16 bits are added up and stepped with in fp32
        n: nn.Parameter(p.detach().float()) if half else p for n, p in model.named_parameters()
    }
    holder = nn.Module()
    for n, p in wide.items():
        holder.register_parameter(n.replace(".", "/"), p)
    loop = Loop(cell, model, holder)
    for step in range(STEPS):
        losses = []
        for p in wide.values():
            p.grad = torch.zeros_like(p)
        for index in range(parts):
            losses.append(loop.backward(step, index, parts, parts))
            for n, p in model.named_parameters() if half else ():
                wide[n].grad += p.grad.float()
                p.grad = None
        grads = {n: p.grad.clone() for n, p in wide.items()}
        loop.step(step, sum(losses) / parts, grads if reads_gradients(step) else None)
        for n, p in model.named_parameters() if half else ():
            p.data.copy_(wide[n].detach())
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {**loop.record, "start": start, "parameters": parameters}


def plain(cell: Cell, precision: str, parts: int = 1, moved: int = 0) -> dict[str, Any]:
    """The run without an engine, which knows nothing of a mesh."""
    asked = {n: getattr(cell, n) for n in ("model", "dropout", "clip", "precision")}
    sizes = {n: getattr(cell, n) for n in ("time", "vocab_size", "n_head", "head_dim", "documents")}
    dp = cell.samples // 4 * 4  # has as many samples
    return _plain(replace(Cell(), **asked, **sizes, dp=dp), precision, parts, moved)


# Comparison


def values_of(run: dict[str, Any]) -> dict[Any, Tensor]:
    """Every number of a run in fp64: (kind, parameter) -> [steps, ...]."""
    found: dict[Any, Any] = {("loss", ""): torch.tensor(run["losses"])}
    for name in run["parameters"]:
        of_steps = [run["grads"][step, name] for step in range(0, STEPS, 2)]
        found["gradient", name] = torch.stack(of_steps)
        found["parameter", name] = run["parameters"][name][None]
    grads = [value.flatten(1) for (kind, _), value in found.items() if kind == "gradient"]
    found["norm", ""] = torch.cat(grads, 1).norm(dim=1)
    return {key: torch.as_tensor(value, dtype=torch.float64) for key, value in found.items()}


def largest(value: Tensor) -> Tensor:
    """Of each step."""
    return value.abs().view(len(value), -1).amax(1)


def error(value: Tensor, exact: Tensor, precision: str) -> float:
    """What is bounded, see [Note: the reference]."""
    assert value.shape == exact.shape
    if precision != "fp64":
        return (value - exact).square().mean().sqrt().item()
    return (largest(value - exact) / largest(exact).clamp_min(1e-300)).max().item()


@functools.cache
def _bounds(cell: Cell, precision: str) -> dict[Any, float]:
    truth = values_of(plain(cell, "fp64"))
    if precision == "fp64":
        return dict.fromkeys(truth, 1e-12)
    runs = [values_of(plain(cell, precision, *draw)) for draw in YARDSTICK]
    rounding = torch.finfo(FLOATS[precision]).eps / 2
    return {
        key: 2 * max(error(run[key], value, precision) for run in runs)
        + rounding * largest(value).max().item()
        for key, value in truth.items()
    }


def bounds(cell: Cell) -> dict[Any, float]:
    """How far from fp64 each value may be."""
    names = ("model", "dropout", "clip", "precision", "time", "vocab_size", "n_head", "documents")
    same = {n: getattr(cell, n) for n in names}
    return _bounds(replace(Cell(), **same, dp=cell.samples), cell.precision)


def run(cell: Cell, *, backend: str = "threads", **options: Any) -> list[dict[str, Any]]:
    """The results of all ranks of a cell. The limit is for ranks that hang: 8 take 7 s alone."""
    n_ranks = cell.tp * cell.cp * cell.dp
    return run_ranks(train, n_ranks, cell, options, backend=backend, timeout_s=600.0)


def joined(cell: Cell, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of the global batch on every rank, from those of the ranks' micro-batches."""
    alike = cell.tp * cell.cp
    firsts = [results[dp * alike]["losses"] for dp in range(cell.dp)]
    losses = [sum(of_step) / cell.dp for of_step in zip(*firsts)]
    for rank, result in enumerate(results):
        assert result["losses"] == firsts[rank // alike], f"rank {rank}: loss along tp and cp"
    return [{**result, "losses": losses} for result in results]


def assert_same_run(cell: Cell, results: list[dict[str, Any]]) -> float:
    """Every loss, gradient, norm and parameter of every rank is one process'; the first weights and
    what ranks must agree on has the same bits. Returns the largest share of a bound."""
    expected, truth, bound = plain(cell, cell.precision), plain(cell, "fp64"), bounds(cell)
    exact, worst = values_of(truth), 0.0
    for rank, result in enumerate(joined(cell, results)):
        for name, p in expected["start"].items():
            assert torch.equal(result["start"][name], p), f"rank {rank}: first {name}"
        for name, p in results[0]["parameters"].items():
            assert torch.equal(result["parameters"][name], p), f"rank {rank}: {name} of rank 0"
        assert list(map(str, result["norms"])) == list(map(str, results[0]["norms"])), rank
        assert result["scales"] == expected["scales"], f"rank {rank}"
        values = values_of(result)
        assert values.keys() == exact.keys()
        for key, value in exact.items():
            off = error(values[key], value, cell.precision)
            assert off <= bound[key], f"rank {rank}: {key}: {off:.2e} above {bound[key]:.2e}"
            worst = max(worst, off / bound[key])
        for norm, own in zip(values["norm", ""].tolist(), result["norms"][::2]):
            close = abs(own - norm) <= (2**-24 + 1e-12) * norm  # an fp32 number
            assert close or str(own) == str(norm), f"rank {rank}: norm {own} where it is {norm}"
    return worst
