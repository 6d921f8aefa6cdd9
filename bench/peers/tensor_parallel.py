"""Tensor-parallel training by torch's DTensor and by fastpar behind one door: build(way, ...).

Both train the same model: stock.py's GPT-2 with its tokens as [N, C] (each contender then gathers
and scatters without a copy) and the rows of c_attn by heads, [H, 3, D] instead of [3, H, D], which
is the layout in which a DTensor split along dim 0 is a split by heads. Parameters have stock.py's
names; weights() yields them whole in its layout.

torch: parallelize_module with ColwiseParallel, RowwiseParallel, SequenceParallel and loss_parallel,
local tensors between the modules, FSDP2 over dp in the same mesh; its fused AdamW. Every split
module has its one collective in each direction, none is undone; without sequence parallelism norms
are plain modules. fastpar: the layers of tensor_parallel.py and vocab_parallel.py instead of
nn.Linear, everything else the same modules, and torch's own matrix products, so that what differs
is the runtime; or fastpar.GPT with its kernels.

Megatron-LM's and DeepSpeed's tensor parallelism need CUDA extensions that do not build for a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar
from fastpar.comm.mesh import Mesh
from fastpar.compare.strategies import Contender, Settings, decay_groups
from fastpar.config.config import GPTConfig
from fastpar.kernels import backend
from fastpar.sharding.placements import Shard, State
from fastpar.tensor.functional import TensorParallel, column_linear, row_linear
from fastpar.tensor.vocabulary import vocab_embedding, vocab_linear_cross_entropy

TORCH, STOCK, OWN = "torch", "fastpar, stock model", "fastpar"


@dataclass(frozen=True)
class Way:
    """A way to train on tp * dp ranks; str() is the row's variant.

    kind: TORCH, STOCK or OWN; zero_stage: 3 is FSDP2 that frees after forward, 2 one that does not.
    transport: of fastpar.
    """

    kind: str
    tp: int = 2
    sequence_parallel: bool = True
    zero_stage: int = 0
    transport: str = "torch"

    def __str__(self) -> str:
        name = self.kind
        if self.kind == TORCH:
            fsdp = {0: "", 2: " + FSDP2, no reshard", 3: " + FSDP2"}
            name = f"torch DTensor{fsdp[self.zero_stage]}"
        elif self.zero_stage:
            name += f", ZeRO-{self.zero_stage}"
        name += "" if self.kind == TORCH else f", {'gloo' if self.transport == 'torch' else 'shm'}"
        return name + ("" if self.sequence_parallel else ", whole sequences")


class Column(nn.Linear):
    tp: TensorParallel | None = None

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.tp)


class Row(nn.Linear):
    tp: TensorParallel | None = None

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"weight": Shard(1), "bias": tp.per_token}

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.bias, self.tp)


class Norm(nn.LayerNorm):
    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        return {"weight": tp.per_token, "bias": tp.per_token}


class Tokens(nn.Embedding):
    tp: TensorParallel | None = None

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"weight": Shard(0)}

    def forward(self, idx: Tensor) -> Tensor:
        assert self.tp is not None
        return vocab_embedding(idx[None], self.weight, self.tp).view(-1, self.embedding_dim)


class Positions(nn.Embedding):
    tp: TensorParallel | None = None

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"weight": tp.per_token}

    def forward(self, idx: Tensor) -> Tensor:
        assert self.tp is not None
        return super().forward(self.tp.slice(idx, 0) if self.tp.sequence_parallel else idx)


@dataclass(frozen=True)
class Layers:
    """The modules that a model is made of."""

    column: type[nn.Linear] = nn.Linear
    row: type[nn.Linear] = nn.Linear
    norm: type[nn.LayerNorm] = nn.LayerNorm
    tokens: type[nn.Embedding] = nn.Embedding
    positions: type[nn.Embedding] = nn.Embedding


PLAIN = Layers()
SPLIT = Layers(Column, Row, Norm, Tokens, Positions)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layers: Layers):
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = layers.column(config.n_embd, 3 * config.n_embd)
        self.c_proj = layers.row(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        qkv = self.c_attn(x).unflatten(-1, (-1, 3, self.head_dim)).unflatten(0, (batch, -1))
        q, k, v = qkv.transpose(1, 2).unbind(3)  # [B, H/tp, T, D] each
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(o.transpose(1, 2).flatten(2).flatten(0, 1))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, layers: Layers):
        super().__init__()
        self.c_fc = layers.column(config.n_embd, 4 * config.n_embd)
        self.c_proj = layers.row(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layers: Layers):
        super().__init__()
        self.ln_1 = layers.norm(config.n_embd, eps=config.layer_norm_eps)
        self.attn = Attention(config, layers)
        self.ln_2 = layers.norm(config.n_embd, eps=config.layer_norm_eps)
        self.mlp = MLP(config, layers)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x = x + self.attn(self.ln_1(x), batch)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """forward(idx, targets) -> the mean cross-entropy; see the top of the file."""

    def __init__(self, config: GPTConfig, layers: Layers):
        super().__init__()
        self.config = config
        self.wte = layers.tokens(config.vocab_size, config.n_embd)
        self.wpe = layers.positions(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layers) for _ in range(config.n_layer))
        self.ln_f = layers.norm(config.n_embd, eps=config.layer_norm_eps)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device).repeat(len(idx))
        x = self.wte(idx.flatten()) + self.wpe(positions)  # [N, C], or this rank's tokens
        for block in self.h:
            x = block(x, len(idx))
        return self.loss(self.ln_f(x), targets.flatten())

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        tp = self.wte.tp
        assert isinstance(tp, TensorParallel)
        return vocab_linear_cross_entropy(
            x, self.wte.weight, targets, tp, vocab_size=self.config.vocab_size
        )


class WithHead(GPT):
    """The head as a module of its own, which torch's plan names; its weight is the embedding's."""

    def __init__(self, config: GPTConfig, layers: Layers):
        super().__init__(config, layers)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x), targets)


def by_heads(state: dict[str, Tensor], n_head: int, *, back: bool = False) -> dict[str, Tensor]:
    """The rows of c_attn from [3, H, D] to [H, 3, D], or back."""
    groups = (n_head, 3) if back else (3, n_head)

    def move(x: Tensor) -> Tensor:
        return x.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)

    return {name: move(x) if ".c_attn." in name else x for name, x in state.items()}


def model_of(config: GPTConfig, kind: str) -> nn.Module:
    """The weights that fastpar.GPT has with seed 0, in the model that this kind trains."""
    own = fastpar.GPT(config, seed=0)
    if kind == OWN:
        return own
    state = by_heads(own.state_dict(), config.n_head)
    state["wte.weight"] = state["wte.weight"][: config.vocab_size]
    with torch.device("meta"):
        model = WithHead(config, PLAIN) if kind == TORCH else GPT(config, SPLIT)
    model.load_state_dict(state, assign=True, strict=False)
    if kind == TORCH:
        model.lm_head.weight = model.wte.weight  # type: ignore[union-attr]
    return model


class _TorchTP(Contender):
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel  # slow to import

        with loss_parallel():
            loss = self.model(x, y)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().to_local()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            yield from by_heads({name: whole.detach()}, _heads(self.model), back=True).items()


def _heads(model: nn.Module) -> int:
    return model.config.n_head  # type: ignore[union-attr,return-value]


def _split_by_torch(model: Any, tp_mesh: Any, sequence_parallel: bool) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Split(0) if sequence_parallel else Replicate()
    column = ColwiseParallel(input_layouts=between)
    row = RowwiseParallel(output_layouts=between)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Split(-1), use_local_output=False)
    parallelize_module(model, tp_mesh, {"wte": embedding, "lm_head": head})
    model.lm_head.weight = model.wte.weight
    layer = {"attn.c_attn": column, "attn.c_proj": row, "mlp.c_fc": column, "mlp.c_proj": row}
    if sequence_parallel:
        norm = SequenceParallel(sequence_dim=0, use_local_output=True)
        layer |= {"ln_1": norm, "ln_2": norm}
        parallelize_module(model.ln_f, tp_mesh, norm)
        own_tokens = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Split(0), use_local_output=False
        )
        parallelize_module(model.wpe, tp_mesh, own_tokens)
        parallelize_module(model.wpe, tp_mesh, norm)
    for block in model.h:
        parallelize_module(block, tp_mesh, layer)


def _adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """torch's fused AdamW, a call for each kind of tensor: it does not take them together."""
    groups: dict[Any, dict[str, Any]] = {}
    for group in decay_groups(model, settings.weight_decay):
        for p in group["params"]:
            key = (group["weight_decay"], getattr(p, "device_mesh", None))
            same = groups.setdefault(key, {"params": [], "weight_decay": group["weight_decay"]})
            same["params"].append(p)
    return torch.optim.AdamW(
        list(groups.values()), lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )


def _torch(way: Way, config: GPTConfig, settings: Settings) -> Contender:
    from torch.distributed.fsdp import fully_shard  # slow to import

    # It warns of the two gathers that make a parameter whole, for the gate.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    shape = (dist.get_world_size() // way.tp, way.tp)
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model: Any = model_of(config, TORCH)
    _split_by_torch(model, mesh["tp"], way.sequence_parallel)
    if way.zero_stage:
        for block in model.h:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=way.zero_stage == 3)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=way.zero_stage == 3)
    return _TorchTP(str(way), model, _adamw(model, settings))


class _Fastpar(Contender):
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        state = dict(self.model.state_dict())
        stock_model = isinstance(self.model, GPT)
        yield from (
            by_heads(state, _heads(self.model), back=True) if stock_model else state
        ).items()

    def report(self) -> dict[str, float]:
        return {"live_bytes": float(sum(fastpar.engine_of(self.model).memory().values()))}


def _fastpar(way: Way, config: GPTConfig, settings: Settings) -> Contender:
    if way.kind == STOCK:
        backend.choice = "torch"  # its products too
    model = fastpar.parallelize(
        model_of(config, way.kind),
        Mesh(tp=way.tp),
        zero_stage=way.zero_stage,
        transport=way.transport,
        sequence_parallel=way.sequence_parallel,
    )
    optimizer = fastpar.AdamW(
        [
            {"params": group["params"], "weight_decay": group["weight_decay"]}
            for group in decay_groups(model, settings.weight_decay)
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
    )
    return _Fastpar(str(way), model, optimizer)


def build(way: Way, config: GPTConfig, settings: Settings | None = None) -> Contender:
    """The contender, on this rank. Ranks: all, with the same arguments."""
    make = _torch if way.kind == TORCH else _fastpar
    return make(way, config, settings or Settings())
