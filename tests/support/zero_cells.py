"""The cells of the ZeRO matrix: 6 steps of a small model, and what must come out of them.

[Note: the reference] The expected run has no engine, no ranks and no buckets: autograd gives the
gradients of each micro-batch alone, and they are added in the order that the engine promises:

    deterministic: micro-batches and ranks in a pairwise tree, ((0 + 1) + (2 + 3)) + ...
    otherwise:     micro-batches of a rank one after another, ranks in that tree
    accumulate="full", or no_sync():  micro-batches first, then ranks
    accumulate="shard":               ranks first, then micro-batches

and the sum over ranks is divided by their number in one operation. Where it is not deterministic,
stage 0 adds a micro-batch to the mean of the earlier ones and averages again, as DDP does. Each
order is known to the bit, so there is no tolerance anywhere. Parameters of 16 bits are rounded
copies of fp32 ones that the optimizer sees. Micro-batches are numbered so that for powers of two
all deterministic orders are the same tree over the global batch (test_determinism).
"""

import contextlib
import functools
import itertools
import random
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import make_key
from fastpar.models.gpt import GPT
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import DynamicLossScale, param_groups
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

STEPS, T, V, C = 6, 6, 37, 16
OVERFLOW_STEP = 3  # fp16: the last micro-batch of this step has infinite gradients
EVALUATION_STEP = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    stage: int = 3
    world_size: int = 2
    shard_size: int | None = None
    accum: str = "once"  # see ACCUM
    precision: str = "fp32"
    model: str = "tied"  # gpt | tied | untied
    checkpoint: str = "none"  # none | non-reentrant
    clip: bool = False
    frozen: bool = False
    deterministic: bool = True

    def __str__(self):
        hsdp = f"of{self.shard_size}" if self.shard_size else ""
        flags = [n for n in ("clip", "frozen", "deterministic") if getattr(self, n)]
        first = f"zero{self.stage}-{self.world_size}ranks{hsdp}-{self.accum}-{self.precision}"
        return "-".join([first, self.model, self.checkpoint, *flags])


# name -> micro-batches per step, accumulate, grad_accum_steps, under no_sync()
ACCUM = {
    "once": (1, "shard", 1, False),
    "shard": (4, "shard", 1, False),
    "shard_no_sync": (4, "shard", 1, True),
    "full": (4, "full", 4, False),
    "full_no_sync": (4, "full", 1, True),
    "shard_2": (2, "shard", 1, False),
    "shard_8": (8, "shard", 1, False),
    "full_2": (2, "full", 2, False),
    "full_8": (8, "full", 8, False),
}
MATRIX_ACCUM = ("once", "shard", "shard_no_sync", "full", "full_no_sync")
LAYOUTS = [
    *((stage, ranks, None) for stage in range(4) for ranks in (1, 2, 3, 4)),
    *((stage, 4, 2) for stage in (1, 2, 3)),
]
REST = {
    "model": ("tied", "untied", "gpt"),
    "checkpoint": ("none", "non-reentrant"),
    "clip": (True, False),
    "frozen": (True, False),
    "deterministic": (True, False),
}


@functools.cache
def all_cells() -> tuple[Cell, ...]:
    """Every (layout, accumulation, precision) once; the rest by greedy covering of pairs, and of
    triples with a layout."""
    draw = random.Random(0)
    combinations = [dict(zip(REST, values)) for values in itertools.product(*REST.values())]
    seen: set[frozenset] = set()
    chosen: dict[tuple, dict] = {}  # two stages share a reference, which costs as much as a cell
    cells = []
    for (stage, world_size, shard_size), accum, precision in itertools.product(
        LAYOUTS, MATRIX_ACCUM, DTYPES
    ):
        layout = (stage, world_size, shard_size)
        fixed = {"layout": layout, "accum": accum, "precision": precision}
        key = (stage % 2, world_size, accum, precision)
        best, gained = {}, set()
        for rest in draw.sample(combinations, 36):
            if key in chosen:  # checkpointing changes no bit of the reference
                rest = {**chosen[key], "checkpoint": rest["checkpoint"]}
            new = interactions(fixed | rest) - seen
            if not best or len(new) > len(gained):
                best, gained = rest, new
        seen |= gained
        chosen.setdefault(key, best)
        cells.append(Cell(stage, world_size, shard_size, accum, precision, **best))
    return tuple(cells)


def interactions(factors):
    pairs = {frozenset(pair) for pair in itertools.combinations(factors.items(), 2)}
    rest = [item for item in factors.items() if item[0] != "layout"]
    with_layout = itertools.combinations(rest, 2)
    return pairs | {frozenset([("layout", factors["layout"]), *pair]) for pair in with_layout}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.out = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class Module(nn.Module):
    """Somebody's GPT: nothing of ours in it."""

    def __init__(self, mode, *, tied):
        super().__init__()
        self.mode = mode
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, idx, targets, rng_key=None):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for block in self.blocks:
            x = recomputed(self.mode, block, x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def recomputed(mode, fn, *args):
    if mode == "none" or not torch.is_grad_enabled():
        return fn(*args)
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def build(cell, seed):
    """Weights of seed; torch's generator is shared by thread ranks, so they are drawn here."""
    if cell.model == "gpt":
        config = GPTConfig(n_layer=2, n_head=2, n_embd=C, block_size=T, vocab_size=V, dropout=0.1)
        model = GPT(config, seed=seed)
        frozen = [model.wpe.weight, model.h[0].mlp.c_fc.weight]
        if cell.checkpoint != "none":  # inside of the unit; Module has it around the unit
            for block in model.h:
                block.forward = functools.partial(recomputed, cell.checkpoint, block.forward)
    else:
        with torch.device("meta"):
            model = Module(cell.checkpoint, tied=cell.model == "tied")
        model.to_empty(device="cpu")
        if cell.model == "tied":
            model.head.weight = model.wte.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".ln_" in f".{name}":
                    p.fill_(float(name.endswith("weight")))
                else:
                    p.normal_(0.0, 0.1, generator=generator)
        frozen = [model.wpe.weight, model.blocks[0].fc.weight]
    for p in frozen if cell.frozen else []:
        p.requires_grad_(False)
    return model.to(DTYPES[cell.precision])


def micro_batch(step, index):
    """[2, T] tokens that count up by 1, 2 or 3: a function of the step and the global index."""
    generator = torch.Generator().manual_seed(step * 1000 + index)
    start = torch.randint(0, V, (2, 1), generator=generator)
    by = torch.randint(1, 4, (2, 1), generator=generator)
    rows = (start + by * torch.arange(T + 1)) % V
    return rows[:, :-1], rows[:, 1:], make_key(7, step * 1000 + index)


def make_optimizer(cell, model, **options):
    limit = 0.25 if cell.clip else None
    return AdamW(
        param_groups(model, 0.1),
        lr=4e-2,
        betas=(0.9, 0.95),
        eps=1e-5,
        max_grad_norm=limit,
        **options,
    )


def loss_of(cell, model, step, index, n_accum, scale, is_last):
    """(loss of a micro-batch, what its backward starts from)."""
    x, y, key = micro_batch(step, index)
    loss = model(x, y, rng_key=key)
    scaled = loss / n_accum * scale
    if cell.precision == "fp16" and step == OVERFLOW_STEP and is_last:
        scaled = scaled * 1e30
    return loss.item(), scaled


def evaluate(model):
    x, y, _ = micro_batch(99, 0)
    model.eval()
    with torch.no_grad():
        loss = model(x, y).item()
    model.train()
    return loss


class Scaler:
    """The loss scale of a cell: dynamic for fp16, else 1."""

    def __init__(self, cell, optimizer):
        self.optimizer = optimizer
        self.state = DynamicLossScale(2.0**10, 3) if cell.precision == "fp16" else None
        self.value, self.seen = 1.0, []
        self.announce()

    def announce(self):
        if self.state is not None:
            self.value = self.optimizer.grad_scale = self.state.scale
            self.seen.append(self.value)

    def update(self):
        if self.state is not None:
            self.state.update(self.optimizer.skipped)
            self.announce()


def train(cell: Cell, options: dict, with_state: bool = False) -> dict:
    """This rank's run of a cell. Every rank starts from other weights, which rank 0 replaces."""
    mesh = Mesh(device="cpu")
    n_accum, accumulate, grad_accum_steps, no_sync = ACCUM[cell.accum]
    model = build(cell, seed=mesh.rank)
    half = cell.precision != "fp32"
    options = {
        "zero_stage": cell.stage,
        "shard_size": cell.shard_size,
        "bucket_mb": 0.015,
        "first_bucket_mb": 0.003,
        "grad_dtype": torch.float32 if half else None,
        "accumulate": accumulate,
        "grad_accum_steps": grad_accum_steps,
        "deterministic": cell.deterministic,
        **options,
    }
    beside = {name: options.pop(name, None) for name in ("units", "debug")}
    parallelize(model, mesh, Parallel.of(**options), **beside)
    engine = engine_of(model)
    optimizer = make_optimizer(cell, model, master_weights=half)
    scaler = Scaler(cell, optimizer)
    losses, norms = {}, []
    for step in range(STEPS):
        for j in range(n_accum):
            index = numbered(cell, mesh.dp_rank, j)
            quiet = no_sync and j < n_accum - 1
            is_last = index == cell.world_size * n_accum - 1
            with engine.no_sync() if quiet else contextlib.nullcontext():
                loss, scaled = loss_of(cell, model, step, index, n_accum, scaler.value, is_last)
                scaled.backward()
            losses[step, index] = loss
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        if optimizer.grad_norm is not None:
            norms.append(optimizer.grad_norm.item())
        if step == EVALUATION_STEP:
            losses["evaluation"] = evaluate(model)
    with engine.gathered():
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {
        "parameters": parameters,
        "losses": losses,
        "norms": norms,
        "scales": scaler.seen,
        "state": optimizer.state_dict()["state"] if with_state else {},
    }


def numbered(cell, rank, j):
    """The global number of a rank's micro-batch j."""
    n_accum, accumulate, _, no_sync = ACCUM[cell.accum]
    if accumulate == "full" or no_sync:
        return rank * n_accum + j
    return j * cell.world_size + rank


def pairwise(values):
    """((0 + 1) + (2 + 3)) + ...: a binary counter's partial sums, the rest from the right."""
    partial = []
    for i, value in enumerate(values, 1):
        while i % 2 == 0:
            value, i = partial.pop() + value, i // 2
        partial.append(value)
    return functools.reduce(lambda right, left: left + right, reversed(partial))


def sequential(values):
    return functools.reduce(torch.add, values)


def reduced(cell, gradients):
    """The engine's sum over gradients[m], m the global number, divided by the ranks."""
    n_accum, accumulate, _, no_sync = ACCUM[cell.accum]
    ranks, micro_batches = range(cell.world_size), range(n_accum)
    local = pairwise if cell.deterministic else sequential
    at = functools.partial(numbered, cell)
    if accumulate == "full" or no_sync:
        mine = [local([gradients[at(r, j)] for j in micro_batches]) for r in ranks]
        return pairwise(mine) / cell.world_size
    if cell.stage == 0 and not cell.deterministic:
        mean = None
        for j in micro_batches:
            mine = [gradients[at(r, j)] for r in ranks]
            mean = pairwise(mine if mean is None else [mean + g for g in mine]) / cell.world_size
        return mean
    steps = [pairwise([gradients[at(r, j)] for r in ranks]) for j in micro_batches]
    return local([total / cell.world_size for total in steps])


def rounded(master, dtype):
    """As AdamW's masters are: bf16 to nearest, ties away from zero; fp16 ties to even."""
    if dtype == torch.bfloat16:
        return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(dtype)
    return master.to(dtype)


@functools.cache
def _expected(cell: Cell) -> dict:
    n_accum = ACCUM[cell.accum][0]
    n = cell.world_size * n_accum
    model = build(cell, seed=0)
    wide = {  # what the optimizer trains: the parameters, or fp32 ones that they are roundings of
        name: nn.Parameter(p.detach().clone().float()) if cell.precision != "fp32" else p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    holder = nn.Module()
    for name, p in wide.items():
        holder.register_parameter(name.replace(".", "/"), p)
    optimizer = make_optimizer(cell, holder)
    scaler = Scaler(cell, optimizer)
    losses, norms = {}, []
    for step in range(STEPS):
        gradients: dict[str, list] = {name: [] for name in wide}
        for index in range(n):
            args = (step, index, n_accum, scaler.value, index == n - 1)
            losses[step, index], scaled = loss_of(cell, model, *args)
            scaled.backward()
            for name, p in model.named_parameters():
                if p.requires_grad:
                    gradients[name].append(p.grad.float())
                    p.grad = None
        for name, p in wide.items():
            p.grad = reduced(cell, gradients[name])
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        if cell.precision != "fp32":
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        p.copy_(rounded(wide[name], p.dtype))
        if optimizer.grad_norm is not None:
            norms.append(optimizer.grad_norm.item())
        if step == EVALUATION_STEP:
            losses["evaluation"] = evaluate(model)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {
        "parameters": parameters,
        "losses": losses,
        "norms": norms,
        "scales": scaler.seen,
        "state": optimizer.state_dict()["state"],
    }


def expected(cell: Cell) -> dict:
    """The run without an engine; the same for all stages, except as the note says."""
    stage = cell.stage if cell.accum.startswith("shard") and not cell.deterministic else 0
    key = {"stage": min(stage, 1), "shard_size": None, "checkpoint": "none"}
    return _expected(replace(cell, **key))


def run(cell: Cell, *, backend="threads", with_state=False, **options) -> list[dict]:
    """The results of all ranks of a cell."""
    fn = functools.partial(train, cell, options, with_state)
    return run_ranks(fn, cell.world_size, backend=backend, timeout_s=60.0)


def same(a: list[float], b: list[float]) -> bool:
    """Equal bits; the norm of an overflow may be nan."""
    return list(map(str, a)) == list(map(str, b))


def assert_same_run(cell: Cell, results: list[dict]) -> None:
    """Every loss, norm, loss scale and parameter of every rank has the bits of the reference."""
    truth = expected(cell)
    for rank, result in enumerate(results):
        for key, loss in result["losses"].items():
            assert loss == truth["losses"][key], f"rank {rank}: loss of (step, micro-batch) {key}"
        assert same(result["norms"], truth["norms"]), f"rank {rank}"
        assert result["scales"] == truth["scales"], f"rank {rank}"
        for name, p in truth["parameters"].items():
            assert torch.equal(result["parameters"][name], p), f"rank {rank}: {name}"
