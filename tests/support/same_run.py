"""same_run(layout, program): a short run on many ranks is the run of one process without an engine.

A Program is a model and its training loop, a Layout is how ranks split it. There is one maker
of models, one loop and one reference; what differs is how close a layout must come.

[Note: the reference] It has no engine, no ranks and no buckets: autograd's gradient of each
micro-batch by itself, for experts that of dense_experts.py, added up and stepped by AdamW or Muon.

[Note: bits] Layouts that split data only (dp) are compared bit for bit, because the order of their
sums is promised:

    deterministic: micro-batches and ranks in a pairwise tree, ((0 + 1) + (2 + 3)) + ...
    otherwise:     micro-batches of a rank one after another, ranks in that tree
    accumulate="full", or no_sync():  micro-batches first, then ranks
    accumulate="shard":               ranks first, then micro-batches

and the sum over ranks is divided by their number in one operation. Where it is not deterministic,
stage 0 adds a micro-batch to the mean of the earlier ones and averages again, as DDP does.
Parameters of 16 bits are rounded copies of fp32 ones that the optimizer sees. Micro-batches are
numbered so that for powers of two all deterministic orders are one tree over the global batch.

[Note: roundings] Other layouts split sums inside of products, whose order is not defined. In fp64
every value is within 1e-12 of the largest element of its tensor: rounding leaves some 1e-15, no
wrong factor, mask or missing part is that small. In other formats a bound is made of two numbers.
By backward error analysis (Higham, Accuracy and Stability, 3.1) a sum of n products computed in any
order is the exact sum with each weight changed by at most n roundings u. How far such changes
reach is measured: the run is repeated in fp64 with every element of every weight times 1 +- u at
random, anew in every micro-batch, and of its gradient too: the largest root mean square over all
steps of three such runs, times the roundings. With those of the value itself, one, of an fp32
parameter two a step, this is the bound.
Roundings are as many as the longest sum has terms in fp32 (64: 4 C features; batches have fewer
tokens). Products of 16-bit numbers are added up in fp32 and rounded once; with norms, residuals,
activations and parts of ranks at 16 places between two weights. Signs of roundings at n places know
nothing of each other, so that these reach as far as sqrt(n) of one (Higham and Mary 2019, SIAM J.
Sci. Comput. 41, A2815): 4, where a lost sample is 12 or more. No part of it depends on a CPU.
In deterministic mode the bits are those of the same split on one data-parallel rank: Layout.whole.

[Note: accumulation] KIND_N: N micro-batches a rank and step, with the arguments of parallelize():
shard and full are accumulate=, no_sync is shard under engine.no_sync(), local is full under it.

AdamW's eps is large because the exact gradient of a key's bias is 0: what rounding leaves of it
must not become movement of size lr.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from unittest import mock

import dense_experts
import torch
import torch.nn.functional as F
from late import Delays
from torch import Tensor, nn

from fastpar.axes.tensor.functional import TensorParallel
from fastpar.axes.tensor.vocabulary import vocab_embedding, vocab_linear_cross_entropy
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.comm.mesh import Mesh
from fastpar.comm.wires import FORMATS
from fastpar.engine.debug import Debug
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.engine.pipeline_step import pipeline_loss, pipeline_step
from fastpar.files.tensor_file import FLOATS
from fastpar.kernels import Rng, dropout, make_key
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.nn.tp_layers import ColumnParallelLinear, RowParallelLinear
from fastpar.optim.adamw import AdamW
from fastpar.optim.muon import Muon, muon_groups
from fastpar.optim.schedule import DynamicLossScale, param_groups
from fastpar.settings import rules
from fastpar.settings.fields import flat
from fastpar.settings.mesh import parse_grid
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Partial, Shard, State
from fastpar.testing import run_ranks

STEPS, V, C, HEADS, LAYERS = 3, 37, 16, 4, 2
LOSSLESS = replace(FORMATS["int8"], dtype=torch.float32, block=0)
EVALUATION_STEP = 0
OVERFLOW_STEP = 1  # fp16: the gradients of the last micro-batch are infinite
READ_STEPS = (0, 2)  # engine.grads() makes sums along tp that a step would make itself


@dataclass(frozen=True)
class Layout:
    """How ranks split a run: the mesh, arguments of parallelize(), micro-batches of a rank."""

    dp: int = 1
    stage: int = 0
    shard_size: int | None = None
    tp: int = 1
    grid: str | None = None
    cp: int = 1
    ep: int = 1
    pp: int = 1
    accum: str = "shard_1"  # see [Note: accumulation]
    deterministic: bool = False
    recompute: str = "none"
    sequence: bool | None = None
    method: str = "heads"
    schedule: str = "1f1b"
    offload: str | None = None
    keep_mb: float = 0.0
    buckets: tuple[float | None, float] = (0.015, 0.003)
    prefetch: int = 1
    units: str | None = None
    watched: bool = False  # late collectives, freed memory full of nans, replicas compared
    wire: str | None = None  # a key of WIRES
    inference: bool = False  # evaluations are under inference_mode()
    resumed: bool = False  # after the first step from a checkpoint, with models and optimizers anew

    # With LOSSLESS as int8: every code arrives, at its place, once.
    WIRES: ClassVar[dict[str, dict[str, Any]]] = {
        "gradients": {"wire_gradients": "int8"},
        "weights": {"wire_gradients": "int8", "wire_weights": "int8"},
        "second shards": {"node_size": 2, "secondary_shards": True},
    }

    def __str__(self) -> str:
        return changed(self) or "one process"

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp * math.prod(parse_grid(self.grid) or (1,))

    @property
    def micro(self) -> int:
        """Micro-batches of a rank and step."""
        return int(self.accum.rsplit("_", 1)[1])

    @property
    def micro_batches(self) -> int:
        return self.dp * self.micro

    @property
    def full(self) -> bool:
        return self.accum.startswith(("full", "local"))

    @property
    def under_no_sync(self) -> bool:
        return self.accum.startswith(("local", "no_sync"))

    @property
    def local(self) -> bool:
        """Whether a rank adds up its micro-batches before anything is sent."""
        return not self.accum.startswith("shard") or (self.pp > 1 and self.stage < 2)

    @property
    def splits_data_only(self) -> bool:
        return self.ranks == self.dp and self.ep == 1

    @property
    def whole(self) -> Layout:
        """The layout with the same bits: if not deterministic, the layout without formats on the
        wire, else the same split of products on one data-parallel rank, with nothing else."""
        if not self.deterministic:
            return replace(self, wire=None)
        kept = {n: getattr(self, n) for n in ("tp", "grid", "cp", "method", "sequence")}
        if self.ep > 1:  # a tied table is summed in another order by stages
            kept |= {"pp": self.pp, "schedule": self.schedule}
        return Layout(accum=f"shard_{self.micro_batches}", deterministic=True, **kept)

    @property
    def has_bits_of_whole(self) -> bool:
        """Not if ranks of cp, or rows of a grid, sum their parts after the micro-batches, or after
        the sequences of ep: another order, if there are several."""
        joined = self.micro == 1 or not (self.grid or (self.cp > 1 and self.local))
        joined = joined and (self.cp == 1 or self.ep == 1)
        return (
            (joined or self.wire is not None) and not self.splits_data_only and self != self.whole
        )

    def numbered(self, rank: int, j: int) -> int:
        """The global number of a rank's micro-batch j."""
        return rank * self.micro + j if self.local else j * self.dp + rank

    @property
    def on_wires(self) -> dict[str, Any]:
        return self.WIRES.get(self.wire or "", {})

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "zero_stage": self.stage, "shard_size": self.shard_size,
            "accumulate": "full" if self.full else "shard",
            "grad_accum_steps": self.micro if self.accum.startswith("full_") else 1,
            "deterministic": self.deterministic, "sequence_parallel": self.sequence,
            "cp_method": self.method, "schedule": self.schedule, "offload": self.offload,
            "offload_keep_mb": self.keep_mb, "bucket_mb": self.buckets[0],
            "first_bucket_mb": self.buckets[1], "prefetch": self.prefetch, **self.on_wires, **more,
        }  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A model, and what a loop does with it."""

    model: str = "gpt"  # fastpar.GPT; foreign, foreign tied: a plain model; or of EXPERTS or BLOCKS
    precision: str = "fp32"
    dropout: bool = False
    clip: bool = False
    frozen: bool = False
    documents: bool = False
    counted: bool = False  # sums of losses, some targets missing; divided by all ranks' tokens
    loss: str = "all"  # some: targets are missing; logits: a loop's own loss of these
    optimizer: str = "adamw"
    time: int = 6
    n_head: int = HEADS
    vocab_size: int = V

    EXPERTS: ClassVar[dict[str, dict[str, Any]]] = {
        "balance": {"balance_loss": 0.5, "router_z_loss": 0.02},
        # 96: torch's GELU of fp64 rounds the last numel % 16 elements otherwise.
        "bias": {"balance_loss": 0.0, "balance_rate": 0.05, "expert_every": 2, "expert_hidden": 96},
        "capacity": {"balance_loss": 0.5, "balance_rate": 0.01, "expert_capacity": 0.8},
        "Switch": {"top_k": 1, "balance_loss": 0.5},
        "all": {"top_k": 4, "activation": "relu2"},
        "swiglu": {"activation": "swiglu", "bias": False, "balance_loss": 0.5, "expert_hidden": 24},
    }
    # Blocks of today's models, with what these have at n_head 4.
    BLOCKS: ClassVar[dict[str, dict[str, Any]]] = {
        "nanochat": {
            "norm": "rms", "norm_weight": False, "norm_embedding": True, "rope_theta": 1e4,
            "qk_norm": True, "activation": "relu2", "tied": False, "logit_softcap": 2.0,
        },
        "llama": {"norm": "rms", "rope_theta": 100.0, "activation": "swiglu", "n_inner": 24},
        "qwen3": {
            "norm": "rms", "rope_theta": 1e4, "qk_norm": True, "activation": "swiglu",
            "n_inner": 40, "head_dim": 6,
        },
    }  # fmt: skip

    def __str__(self) -> str:
        return changed(self) or "gpt"

    @property
    def has_experts(self) -> bool:
        return self.model in self.EXPERTS

    @property
    def half(self) -> bool:
        return FLOATS[self.precision].itemsize == 2

    @property
    def config(self) -> GPTConfig:
        return _config(self.model, self.n_head, self.vocab_size, 0.2 if self.dropout else 0.0)


@functools.cache
def _config(model: str, n_head: int, vocab_size: int, p: float) -> GPTConfig:
    more = {"n_expert": 4, **Program.EXPERTS[model]} if model in Program.EXPERTS else {}
    if model in Program.BLOCKS:
        more = {"bias": False, **Program.BLOCKS[model]}
        if model != "nanochat" and n_head % 2 == 0:
            more["n_kv_head"] = 2
    return GPTConfig(LAYERS, n_head, 4 * n_head, 12, vocab_size, dropout=p, **more)


def changed(one: Any) -> str:
    """The fields of a dataclass that differ from their defaults."""
    changed = [(f.name, getattr(one, f.name)) for f in fields(one)]
    changed = [(n, v) for n, v in changed if v != getattr(type(one), n)]
    return "-".join(n if v is True else f"{n}={v}" for n, v in changed)


class ForeignBlock(nn.Module):
    """Plain layers until they are split. Heads share tau, so that each rank has a part of its
    gradient; gate is one per feature."""

    tp_states: ClassVar = {"tau": Partial(), "gate": Shard()}
    tp: TensorParallel | None = None

    def __init__(self, layer: int, p: float):
        super().__init__()
        self.p, self.site = p, 2 * layer
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = ColumnParallelLinear(C, 3 * C, groups=3), RowParallelLinear(C, C)
        self.fc, self.out = ColumnParallelLinear(C, 4 * C, bias=False), RowParallelLinear(4 * C, C)
        self.tau = nn.Parameter(torch.empty(C // HEADS))
        self.gate = nn.Parameter(torch.empty(4 * C))

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        names = ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")
        return dict.fromkeys(names, tp.per_token)

    def forward(self, x: Tensor, shape: torch.Size, key: Tensor | None) -> Tensor:
        qkv = self.qkv(self.ln_1(x)).view(*shape, 3, -1, C // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H/tp, T, D]
        y = F.scaled_dot_product_attention(q * self.tau, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.drop(self.proj(y.view(*x.shape[:-2], -1, y.shape[-1])), shape, key)
        y = self.out(F.gelu(self.fc(self.ln_2(x)) * self.gate))
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
    """A foreign GPT, in plain torch when nothing is split."""

    tp_states: ClassVar = {"wte.weight": Shard(pad_to=4), "head.weight": Shard(pad_to=2)}
    tp: TensorParallel | None = None

    def __init__(self, p: float, tied: bool):
        super().__init__()
        self.p = p
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(12, C)
        self.blocks = nn.ModuleList(ForeignBlock(layer, p) for layer in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        if tied:
            self.head.weight = self.wte.weight
            self.tp_states = dict.fromkeys(self.tp_states, Shard(pad_to=4))

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"wpe.weight": tp.per_token, "ln_f.weight": tp.per_token, "ln_f.bias": tp.per_token}

    def forward(self, idx: Tensor, targets: Tensor, rng_key: Tensor | None = None, **how: Any):
        tp, shape = self.tp, idx.shape
        key = rng_key if self.p and self.training else None
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
            logits = self.head(x).flatten(0, 1)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(wide, targets.flatten(), **how)
        return vocab_linear_cross_entropy(x, self.head.weight, targets, tp, vocab_size=V, **how)


def build(program: Program, seed: int) -> nn.Module:
    """Weights of a seed, drawn here: torch's own generator is shared by thread ranks."""
    model: nn.Module
    if not program.model.startswith("foreign"):
        model = GPT(program.config, seed=seed)
        first = getattr(model, "wpe", model.wte)  # none with rotary positions
        frozen = [first.weight, model.h[0].mlp.c_fc.weight]
        with torch.no_grad():
            for name, p in model.named_parameters() if program.has_experts else ():
                if "router" in name:  # wide apart, so that rounding changes no choice
                    p *= 20 * (4 / program.n_head) ** 0.5
                if name.endswith(("c_proj.bias", "c_fc.bias")):
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view(p.shape))
    else:
        model = Foreign(program.config.dropout, program.model == "foreign tied")
        frozen = [model.wpe.weight, model.blocks[0].fc.weight]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in model.named_parameters():
                ones = value.dim() == 1 and not name.endswith("bias")
                value.normal_(float(ones), 0.1, generator=generator)
    for p in frozen if program.frozen else []:
        p.requires_grad_(False)
    return model.to(FLOATS[program.precision])


def samples(layout: Layout) -> int:
    """Of a step, over all ranks."""
    return 8 if 8 % layout.micro_batches == 0 else 12


@functools.cache
def micro_batch(program: Program, step: int, index: int, rows: int) -> dict[str, Any]:
    """Arguments of the model's forward: `rows` samples of tokens that count up by 1, 2 or 3.

    A function of the numbers of the samples, as are masks of dropout and where documents begin.
    """
    found, targets, places = [], [], []
    for sample in range(index * rows, (index + 1) * rows):
        generator = torch.Generator().manual_seed(1000 * step + sample)
        start = torch.randint(0, program.vocab_size, (1,), generator=generator)
        by = torch.randint(1, 4, (1,), generator=generator)
        row = (start + by * torch.arange(program.time + 1)) % program.vocab_size
        found.append(row[:-1])
        targets.append(row[1:].clone())
        if program.counted or program.loss == "some":
            # Unequally many on ranks, of all 4 a sample: an fp32 divisor is exact.
            most = min(6, program.time)
            targets[-1][: program.time - (8 - most if sample % 8 > 3 else most)] = -100
        begins = torch.rand(program.time, generator=generator) < 0.3
        begins[0] = True
        at = torch.arange(program.time)
        places.append(at - torch.where(begins, at, 0).cummax(0).values)
    given: dict[str, Any] = {"idx": torch.stack(found), "targets": torch.stack(targets)}
    given["rng_key"] = make_key(7 + step, index * rows)
    if program.documents:
        given["positions"] = torch.stack(places)
    if program.counted:
        given["reduction"] = "sum"
    return given


class Loop:
    """What is the same in one process and in a rank of many: losses, scale, optimizer, records."""

    def __init__(self, program: Program, layout: Layout, model: nn.Module, holder: nn.Module, **o):
        self.program, self.layout = program, layout
        self.begin(model, holder, **o)
        self.dynamic = (
            DynamicLossScale(2.0**10, OVERFLOW_STEP) if program.precision == "fp16" else None
        )
        self.scale = 1.0
        self.losses: dict[Any, float] = {}
        self.grads: dict[tuple[int, str], Tensor] = {}
        self.norms: list[float] = []
        self.scales: list[float] = []
        self.announce()

    def begin(self, model: nn.Module, holder: nn.Module, **o: Any) -> None:
        self.model, limit = model, 0.25 if self.program.clip else float("inf")
        if self.program.half and model is holder:  # of the reference the holder has the masters
            o = {"master_weights": True, **o}
        if self.program.optimizer == "muon":
            groups = muon_groups(holder)
            self.optimizer: Any = Muon(groups, lr=1e-2, max_grad_norm=limit, **o)
        else:
            groups = param_groups(holder, 0.1)
            self.optimizer = AdamW(groups, lr=2e-2, eps=1e-3, max_grad_norm=limit, **o)

    def announce(self) -> None:
        if self.dynamic is not None:
            self.scale = self.optimizer.grad_scale = self.dynamic.scale
        self.scales.append(self.scale)

    @property
    def rows(self) -> int:
        return samples(self.layout) // self.layout.micro_batches

    def given(self, step: int, index: int) -> dict[str, Any]:
        return micro_batch(self.program, step, index, self.rows)

    def target(self, loss: Tensor, step: int, index: int) -> Tensor:
        """What backward starts from, of a loss that is divided already."""
        scaled = loss * self.scale
        last = index == self.layout.micro_batches - 1
        return scaled * float("inf") if self.dynamic and step == OVERFLOW_STEP and last else scaled

    def backward(self, step: int, index: int) -> None:
        given = dict(self.given(step, index))
        if self.program.loss == "logits":
            targets = given.pop("targets").flatten()
            loss = F.cross_entropy(self.model(**given).flatten(0, 1), targets)
        else:
            loss = self.model(**given)
        share = 1 if self.program.counted else self.layout.micro
        self.target(loss / share, step, index).backward()
        self.losses[step, index] = loss.item()

    def read(self, step: int, grads: Mapping[str, Tensor]) -> None:
        """Gradients of this step, without the scale and as means."""
        by = self.scale
        if self.program.counted:  # what the step divides by, one rank's share of it
            by *= self.tokens(step) / self.layout.dp
        self.grads.update({(step, n): g.detach().clone() / by for n, g in grads.items()})

    def tokens(self, step: int, ranks: range | None = None) -> int:
        """Targets of some ranks' micro-batches, of all by default."""
        own = itertools.product(ranks or range(self.layout.dp), range(self.layout.micro))
        every = (self.given(step, self.layout.numbered(r, j))["targets"] for r, j in own)
        return sum(int((y >= 0).sum()) for y in every)

    def step(self) -> None:
        self.optimizer.step()
        self.norms.append(self.optimizer.grad_norm.item())
        if self.dynamic is not None:
            self.dynamic.update(self.optimizer.skipped)
        self.announce()
        self.optimizer.zero_grad()

    def evaluate(self, loss_of: Callable[..., Tensor]) -> None:
        given = micro_batch(self.program, 99, 0, samples(self.layout))
        given = {n: v for n, v in given.items() if n not in ("rng_key", "positions")}
        self.model.eval()
        with torch.inference_mode() if self.layout.inference else torch.no_grad():
            self.losses["evaluation"] = loss_of(**given).item()
        self.model.train()

    def result(self, start: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Any]:
        names = ("losses", "grads", "norms", "scales")
        found = {name: getattr(self, name) for name in names}
        found["state"] = self.optimizer.state_dict()["state"]
        return {**found, "start": start, "parameters": parameters}


def parallel_model(layout: Layout, program: Program, beside: dict, seed: int) -> nn.Module:
    """This rank's. Every rank starts from other weights, which rank 0 replaces."""
    axes, beside = {n: getattr(layout, n) for n in ("dp", "tp", "cp", "ep", "pp")}, dict(beside)
    mesh = Mesh(device="cpu", tp_grid=parse_grid(layout.grid), **axes)
    model = build(program, seed if layout.pp > 1 or layout.ep > 1 else seed + mesh.rank)
    asked = layout.settings(grad_dtype=torch.float32 if program.half else None)
    debug = Debug(poison=True, bus_gb_s=0.5) if layout.offload else None
    if layout.watched:
        late = functools.partial(Delays, seed=mesh.world_size)
        debug = Debug(poison=True, check_replicas=True, observe=late)
    kinds = {"layers": nn.Linear, "blocks": (ForeignBlock, type(getattr(model, "h", [0])[0]))}
    more = {"units": kinds.get(layout.units or ""), "debug": debug}
    if beside.pop("meta", False):
        values = build(program, 0).state_dict()
        with torch.device("meta"):
            model = build(program, 0)
        more["materialize"] = lambda name, out: out.copy_(values[name])
    parallelize(model, mesh, Parallel.of(**asked | beside), **more)
    return recompute(model, layout.recompute)


def train(layout: Layout, program: Program, beside: Mapping, folder: str | None = None) -> dict:
    """This rank's run; folder: of a checkpoint, where it is resumed."""
    model = parallel_model(layout, program, beside, 0)
    start, loop = whole_state(model), Loop(program, layout, model, model)
    counts = []
    for step in range(STEPS):
        passes(loop, step)
        engine = engine_of(model)
        if step in READ_STEPS and layout.pp == 1:
            names = {p: engine.shards.name_of(p) for p in engine.shards.params}
            loop.read(step, {names[p]: g for p, g in engine.grads()})
        loop.step()
        if program.has_experts:
            counts.append(model.experts.last.clone())
        if step == EVALUATION_STEP and not program.has_experts:
            loop.evaluate(functools.partial(pipeline_loss, model) if layout.pp > 1 else model)
        if step == EVALUATION_STEP and folder is not None:
            held = {"model": model, "optimizer": loop.optimizer}
            path = save_checkpoint(folder, step=step, **held)
            model = parallel_model(layout, program, beside, 7)
            loop.begin(model, model)
            load_checkpoint(path, model=model, optimizer=loop.optimizer)
            loop.optimizer.grad_scale = loop.scale
    return {**loop.result(start, whole_state(model)), "counts": counts}


def passes(loop: Loop, step: int) -> None:
    """All forward and backward passes of a step on this rank."""
    layout, engine = loop.layout, engine_of(loop.model)
    rank = engine.mesh.dp_rank
    mine = [layout.numbered(rank, j) for j in range(layout.micro)]
    if loop.program.counted:
        engine.count_tokens(loop.tokens(step, range(rank, rank + 1)))
    if layout.pp > 1:
        loop.losses[step, mine[0]] = staged_step(loop, step, mine)
        return
    for j, index in enumerate(mine):
        quiet = layout.under_no_sync and j < layout.micro - 1
        with engine.no_sync() if quiet else contextlib.nullcontext():
            loop.backward(step, index)
        if step == READ_STEPS[1] and layout.accum.startswith("shard"):
            engine.grads()  # who looks changes nothing


def staged_step(loop: Loop, step: int, mine: list[int]) -> float:
    """The loss of this rank's micro-batches, all of which are on the stages at once."""
    given = [loop.given(step, index) for index in mine]
    names = {"idx", "targets", "positions"} & given[0].keys()
    joined = {name: torch.cat([one[name] for one in given]) for name in names}
    loss = pipeline_step(
        loop.model,
        **joined,
        micro_batches=len(mine),
        rng_keys=[g["rng_key"] for g in given],
        reduction=given[0].get("reduction", "mean"),
    )
    return loss.item()


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in model.state_dict().items()}


def pairwise(values: list[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ...: a binary counter's partial sums, the rest from the right."""
    partial: list[Tensor] = []
    for i, value in enumerate(values, 1):
        while i % 2 == 0:
            value, i = partial.pop() + value, i // 2
        partial.append(value)
    return functools.reduce(lambda right, left: left + right, reversed(partial))


sequential = functools.partial(functools.reduce, torch.add)


def reduced(layout: Layout, gradients: list[Tensor]) -> Tensor:
    """The engine's sum over gradients[m], m the global number, divided by the ranks."""
    ranks, micro_batches, at = range(layout.dp), range(layout.micro), layout.numbered
    local = pairwise if layout.deterministic else sequential
    if layout.local:
        mine = [local([gradients[at(r, j)] for j in micro_batches]) for r in ranks]
        return pairwise(mine) / layout.dp
    if layout.stage == 0 and not layout.deterministic:
        mean = None
        for j in micro_batches:
            own = [gradients[at(r, j)] for r in ranks]
            mean = pairwise(own if mean is None else [mean + g for g in own]) / layout.dp
        assert mean is not None
        return mean
    steps = [pairwise([gradients[at(r, j)] for r in ranks]) for j in micro_batches]
    return local([total / layout.dp for total in steps])


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """As AdamW's masters are: bf16 to nearest, ties away from zero; fp16 ties to even."""
    if dtype == torch.bfloat16:
        return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(dtype)
    return master.to(dtype)


@functools.cache
def _expected(layout: Layout, program: Program, exact: bool, noise: int = 0) -> dict[str, Any]:
    """exact: in fp64, from the weights that the program's format has; noise: the seed of changes by
    one rounding of that format, 0 for none."""
    model = build(program, seed=0)
    start = whole_state(model)
    if exact:
        model = model.double()
    half = program.half and not exact
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    wide = {n: nn.Parameter(p.detach().float()) if half else p for n, p in trained.items()}
    holder = nn.Module()
    for n, p in wide.items():
        holder.register_parameter(n.replace(".", "/"), p)
    loop = Loop(program, layout, model, model if program.optimizer == "muon" else holder)
    counts = []
    u = torch.finfo(FLOATS[program.precision]).eps / 2
    generator = torch.Generator().manual_seed(noise)

    def moved(x: Tensor) -> Tensor:
        return x * (1 + u * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1))

    for step in range(STEPS):
        gradients: dict[str, list[Tensor]] = {n: [] for n in wide}
        if program.has_experts:
            counts.append(of_experts(loop, step, gradients))
        for index in () if program.has_experts else range(layout.micro_batches):
            clean = {n: p.detach().clone() for n, p in trained.items()} if noise else {}
            for n in clean:
                trained[n].data.copy_(moved(clean[n]))
            loop.backward(step, index)
            for n, p in trained.items():
                grad = p.grad.float() if half else p.grad
                gradients[n].append(moved(grad) if noise else grad)
                p.grad = None
            for n, value in clean.items():
                trained[n].data.copy_(value)
        for n, p in wide.items():
            p.grad = reduced(layout, gradients[n])
        if step in READ_STEPS:
            loop.read(step, {n: p.grad for n, p in wide.items()})
        if program.counted:
            for p in wide.values():
                p.grad.mul_(layout.dp / loop.tokens(step))
        loop.step()
        for n, p in trained.items() if half else ():
            p.data.copy_(rounded(wide[n].detach(), p.dtype))
        if step == EVALUATION_STEP and not program.has_experts:
            loop.evaluate(model)
    found = loop.result(start, whole_state(model))
    trained_in_order = [p for group in loop.optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(trained_in_order) if half else ():
        found["state"][i]["master_weight"] = p.detach()
    return {**found, "counts": counts}


def of_experts(loop: Loop, step: int, gradients: dict[str, list[Tensor]]) -> tuple[Tensor, int]:
    """Gradients of the dense oracle; how often each expert was chosen, and how many it dropped."""
    state = {n: p.detach().clone() for n, p in loop.model.state_dict().items()}
    n = loop.layout.micro_batches
    every = [loop.given(step, index) for index in range(n)]
    batches = [(g["idx"], g["targets"]) for g in every]
    loss, grads, counts, dropped = dense_experts.step(state, loop.program.config, batches)
    share = loop.tokens(step) if loop.program.counted else 1
    for name, grad in grads.items():  # of the mean over all tokens
        gradients[name] = [grad * (share / n)] * n
    for name, value in loop.model.state_dict().items():
        if "router.load" in name or "router.steps" in name:
            value.copy_(state[name])
    share = share / n if loop.program.counted else 1
    loop.losses.update({(step, index): loss.item() * share for index in range(n)})
    return counts, dropped


def expected(layout: Layout, program: Program) -> dict[str, Any]:
    """The run without an engine; with the order of this layout's sums where bits are compared."""
    if not layout.splits_data_only or program.has_experts:
        cut = Layout(accum=f"full_{layout.micro_batches}")
        return _expected(cut, program, True)
    stage = min(layout.stage, 1) if not layout.local and not layout.deterministic else 0
    kept = {name: getattr(layout, name) for name in ("dp", "accum", "deterministic")}
    return _expected(Layout(stage=stage, **kept), program, program.precision == "fp64")


def values_of(program: Program, run: dict[str, Any]) -> dict[Any, Tensor]:
    """Every number of a run in fp64: (kind, parameter) -> [steps, ...]."""
    found: dict[Any, Any] = {("parameter", n): p[None] for n, p in run["parameters"].items()}
    names = {name for _, name in run["grads"]}
    found |= {("gradient", n): torch.stack([run["grads"][s, n] for s in READ_STEPS]) for n in names}
    of_steps: dict[Any, list[float]] = {}
    for key, loss in run["losses"].items():
        of_steps.setdefault(key if key == "evaluation" else key[0], []).append(loss)
    found["loss", ""] = [  # sums, or means over equal parts
        sum(parts) / (1 if program.counted else len(parts)) for parts in of_steps.values()
    ]
    norms = torch.tensor(run["norms"], dtype=torch.float64)
    found["norm", ""] = norms.where(norms.isfinite(), 0.0)
    return {key: torch.as_tensor(value, dtype=torch.float64) for key, value in found.items()}


def largest(value: Tensor) -> Tensor:
    """Of each step."""
    return value.abs().view(len(value), -1).amax(1) if value.numel() else torch.zeros(1)


def error(value: Tensor, exact: Tensor, precision: str, least: float = 1e-300) -> float:
    """What is bounded, see [Note: roundings]."""
    assert value.shape == exact.shape
    if precision != "fp64":
        return (value - exact).square().mean().sqrt().item()
    return (largest(value - exact) / largest(exact).clamp_min(least)).max().item()


@functools.cache
def bounds(micro_batches: int, program: Program) -> dict[Any, float]:
    """How far from fp64 each value may be."""
    layout = Layout(accum=f"full_{micro_batches}")
    truth = values_of(program, _expected(layout, program, True))
    if program.precision == "fp64":
        found = dict.fromkeys(truth, 1e-12)
        found["norm", ""] += 2.0**-24  # an fp32 number
        return found
    noisy = (_expected(layout, program, True, noise) for noise in (1, 2, 3))
    runs = [values_of(program, run) for run in noisy]
    u, roundings = torch.finfo(FLOATS[program.precision]).eps / 2, 4 if program.half else 64
    kept = 1 if program.half else 2 * STEPS  # of a parameter: by decay and update
    return {
        key: roundings * max(error(run[key], value, program.precision) for run in runs)
        + u * (kept if key[0] == "parameter" else 1) * largest(value).max().item()
        for key, value in truth.items()
    }


def assert_same_run(layout: Layout, program: Program, results: list[dict[str, Any]]) -> None:
    """Every loss, gradient, norm, scale and parameter of every rank is that of the reference."""
    first, truth = results[0], expected(layout, program)
    for rank, result in enumerate(results):
        for name, p in result["start"].items():
            assert torch.equal(p, truth["start"][name]), f"rank {rank}: first {name}"
        for name, p in result["parameters"].items():
            same = first["parameters"].get(name, p)
            assert torch.equal(p, same), f"rank {rank}: {name} of rank 0"
        assert same_numbers(result["norms"], first["norms"]), f"rank {rank}"
        assert result["scales"] == truth["scales"], f"rank {rank}"
        for step, (counts, dropped) in enumerate(truth["counts"]):
            found, n = result["counts"][step], counts.shape[-1]
            assert torch.equal(found[:, :n].long(), counts), f"rank {rank}: counts of step {step}"
            assert int(found[:, 2 * n].sum()) == dropped, f"rank {rank}: dropped in step {step}"
    assert set().union(*(r["parameters"] for r in results)) == set(truth["parameters"])
    if layout.splits_data_only and not program.has_experts and not program.counted:
        for rank, result in enumerate(results):
            assert_same_bits(result, truth, f"rank {rank}")
    else:
        _assert_within(bounds(layout.micro_batches, program), program, results, truth)


def same_numbers(a: list[float], b: list[float]) -> bool:
    """Equal bits; the norm of an overflow may be nan."""
    return list(map(str, a)) == list(map(str, b))


def assert_same_bits(result: dict[str, Any], truth: dict[str, Any], who: str) -> None:
    for key, loss in result["losses"].items():
        assert loss == truth["losses"][key], f"{who}: loss of (step, micro-batch) {key}"
    assert same_numbers(result["norms"], truth["norms"]), who
    for kind in ("grads", "parameters"):
        for key, value in result[kind].items():
            assert torch.equal(value, truth[kind][key]), f"{who}: {kind} {key}"
    for key, entries in result["state"].items():
        for name, value in entries.items():
            other = truth["state"][key][name]
            assert torch.equal(torch.as_tensor(value).view_as(torch.as_tensor(other)), other), name


def _assert_within(limits: dict, program: Program, results: list[dict], truth: dict) -> None:
    exact, least = values_of(program, truth), 1e-300
    if program.has_experts:  # their oracle is another formula, and Muon steps by singular vectors
        least = 1.0
    losses: dict[Any, float] = {}
    for result in results:
        for key, loss in result["losses"].items():
            assert losses.setdefault(key, loss) == loss, f"loss {key} along tp, cp or pp"
    for rank, result in enumerate(results):
        for key, value in values_of(program, {**result, "losses": losses}).items():
            off = error(value, exact[key], program.precision, least)
            assert off <= limits[key], f"rank {rank}: {key}: {off:.2e} above {limits[key]:.2e}"


@functools.cache
def _run_whole(layout: Layout, program: Program) -> dict[str, Any]:
    results = run(layout, program)  # of a pipeline each stage has its own parameters
    every = {name: p for result in results for name, p in result["parameters"].items()}
    return {**results[0], "parameters": every}


def run(layout: Layout, program: Program, *, backend: str = "threads", **beside: Any) -> list[dict]:
    """The results of all ranks. The limit is for ranks that hang: 8 take 7 s alone."""
    given = (layout, program, beside)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(FORMATS, int8=LOSSLESS):
        given += (folder,) if layout.resumed else ()
        return run_ranks(train, layout.ranks, *given, backend=backend, timeout_s=240.0)


def same_run(layout: Layout, program: Program, **beside: Any) -> list[dict[str, Any]]:
    """Runs the program on the layout's ranks and asserts that it is the run of one process.

    Args:
        beside: more settings of parallelize(); backend: of run_ranks.
    """
    results = run(layout, program, **beside)
    assert_same_run(layout, program, results)
    if layout.has_bits_of_whole:
        whole = _run_whole(layout.whole, program)
        for rank, result in enumerate(results):
            assert same_numbers(result["norms"], whole["norms"]), f"rank {rank}: of the whole"
            for name, p in result["parameters"].items():
                assert torch.equal(p, whole["parameters"][name]), f"rank {rank}: {name}"
    return results


_UNTOLD = flat(Parallel())


def refused(layout: Layout, program: Program, most: int = 8) -> bool:
    """Whether the rules of settings or the model refuse this layout."""
    config, foreign = program.config, program.model.startswith("foreign")
    rows = samples(layout) // layout.micro_batches
    splits = layout.grid or max(layout.cp, layout.pp, layout.ep) > 1
    grid = [*(parse_grid(layout.grid) or (1, 1)), 1]
    never = (
        layout.ranks > most,
        layout.dp % layout.ep or samples(layout) % layout.micro_batches,
        rows % (grid[0] * grid[2]),
        layout.shard_size and (not layout.stage or layout.shard_size >= layout.dp),
        # What does nothing without another setting.
        layout.method != "heads" and layout.cp == 1,
        layout.schedule != "1f1b" and layout.pp == 1,
        (layout.sequence is None) == (layout.tp > 1),
        layout.accum in ("full_1", "no_sync_1", "local_1"),
        layout.watched and layout.offload,
        layout.wire is not None and (layout.dp == 1 or program.precision == "fp64"),
        layout.resumed and program.precision == "fp64",  # no checkpoint has it
        # What models cannot do.
        foreign and (splits or program.documents or program.n_head != HEADS),
        foreign and (program.optimizer == "muon" or layout.units == "layers"),
        foreign and layout.sequence and rows * program.time % layout.tp,
        program.has_experts and (program.dropout or program.documents or program.frozen),
        program.has_experts and program.precision != "fp64",
        program.documents and layout.grid,
        program.optimizer == "muon" and (program.half or program.frozen),
        program.counted and layout.splits_data_only and program.precision != "fp64",
        program.counted and layout.dp % 3 == 0,
        program.loss != "all" and (program.counted or layout.pp > 1),
        program.loss == "logits" and foreign,
        # A step on stages is one call.
        layout.pp > 1 and (layout.under_no_sync or program.precision == "fp16"),
        layout.schedule == "interleaved" and layout.micro % layout.pp,
    )
    if any(never):
        return True
    values = {**_UNTOLD, **layout.settings(), "dtype": program.precision}
    values |= {n: getattr(layout, n) for n in ("dp", "tp", "cp", "ep", "pp")}
    values |= {"tp_grid": layout.grid, "optimizer": program.optimizer, "n_expert": config.n_expert}
    values |= {"expert_capacity": config.expert_capacity} | rules.of_shape(config)
    return any(True for _ in rules.broken("parallelize", values))


def covering_array(
    settings: Mapping[str, tuple], is_refused: Callable[[dict[str, Any]], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Rows that together have every pair of values of two settings that is not refused: greedily.

    Each row begins with a pair that is missing; the other settings follow in a random order, each
    with the value that brings most pairs and is not refused. First values are the usual ones.
    """
    draw = random.Random(seed)
    usual = {name: values[0] for name, values in settings.items()}
    items = [(name, value) for name, values in settings.items() for value in values]
    pairs = itertools.combinations(items, 2)
    missing = {frozenset(pair): None for pair in pairs if pair[0][0] != pair[1][0]}
    rows = []
    while missing:
        pair = draw.choice([*missing])
        row = _begin(dict(pair), usual, settings, is_refused, draw)
        if row is None:
            del missing[pair]
            continue
        others = [name for name in settings if name not in dict(pair)]
        draw.shuffle(others)
        fixed = dict(pair)
        for name in others:
            row[name] = fixed[name] = next(
                value
                for value in _best_first(name, settings[name], fixed, missing, draw)
                if value == row[name] or not is_refused({**row, name: value})
            )
        for both in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(both), None)
        rows.append(row)
    return rows


def _best_first(name, values, fixed, missing, draw):
    """Values by the missing pairs that they bring; of equal ones few ranks, else any."""

    def rank(value):
        brings = sum(frozenset([(name, value), other]) in missing for other in fixed.items())
        few = values.index(value) if name in ("dp", "tp", "grid", "cp", "ep", "pp") else 0
        return -brings, few, draw.random()

    return sorted(values, key=rank)


def _begin(fixed, usual, settings, is_refused, draw):
    """A row with these values that is not refused, near the usual one; None: there seems none."""
    names = [name for name in settings if name not in fixed]
    for changes in (0, *[1] * 12, *[2] * 12, *[3] * 12):
        row = {**usual, **fixed}
        for name in draw.sample(names, min(changes, len(names))):
            row[name] = draw.choice(settings[name])
        if not is_refused(row):
            return row
    return None


_OF_LAYOUT = {f.name for f in fields(Layout)}


def of_row(row: Mapping[str, Any]) -> tuple[Layout, Program]:
    layout = {n: v for n, v in row.items() if n in _OF_LAYOUT}
    return Layout(**layout), Program(**{n: v for n, v in row.items() if n not in _OF_LAYOUT})


def covering(settings: Mapping[str, tuple], seed: int = 0, most: int = 8) -> list[tuple]:
    """Layouts of at most so many ranks and programs, which together have every pair of values."""
    rows = covering_array(settings, lambda row: refused(*of_row(row), most), seed)
    return [of_row(row) for row in rows]
