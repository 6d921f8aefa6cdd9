"""Tensor-parallel training by torch's DTensor.

It trains stock.py's GPT-2 with its tokens as [N, C] (it then gathers and scatters without a
copy), the head as a module of its own, which its plan names, and the rows of c_attn by heads,
[H, 3, D] instead of [3, H, D], which is the layout in which a DTensor split along dim 0 is a split
by heads. Parameters have stock.py's names; weights() yields them whole in its layout.
parallelize_module with ColwiseParallel, RowwiseParallel, SequenceParallel and loss_parallel, local
tensors between the modules, FSDP2 over dp in the same mesh; its fused AdamW. Every split module has
its one collective in each direction, none is undone; without sequence parallelism norms are plain
modules.

Megatron-LM's and DeepSpeed's tensor parallelism need CUDA extensions that do not build for a CPU.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar
from bench.peers import stock
from fastpar.observe.strategies import Contender, Settings, decay_groups
from fastpar.settings.model import GPTConfig

TP = 2  # ranks that split the layers
# Title -> sequence parallel; FSDP2 beside it: None, or whether it frees after forward.
WAYS: dict[str, tuple[bool, bool | None]] = {
    "torch DTensor": (True, None), "torch DTensor, whole sequences": (False, None),
    "torch DTensor + FSDP2": (True, True), "torch DTensor + FSDP2, no reshard": (True, False),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.head_size
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        qkv = self.c_attn(x).unflatten(-1, (-1, 3, self.head_dim)).unflatten(0, (batch, -1))
        q, k, v = qkv.transpose(1, 2).unbind(3)  # [B, H/tp, T, D] each
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(o.transpose(1, 2).flatten(2).flatten(0, 1))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        plain = stock.Block(config)
        self.ln_1, self.attn = plain.ln_1, Attention(config)
        self.ln_2, self.mlp = plain.ln_2, plain.mlp

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x = x + self.attn(self.ln_1(x), batch)
        return x + self.mlp(self.ln_2(x))


class GPT(stock.GPT):
    """forward(idx, targets) -> the mean cross-entropy; see the top of the file."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device).repeat(len(idx))
        x = self.wte(idx.flatten()) + self.wpe(positions)  # [N, C], or this rank's tokens
        for block in self.h:
            x = block(x, len(idx))
        return F.cross_entropy(self.lm_head(self.ln_f(x)), targets.flatten())


def by_heads(state: dict[str, Tensor], n_head: int, *, back: bool = False) -> dict[str, Tensor]:
    """The rows of c_attn from [3, H, D] to [H, 3, D], or back."""
    groups = (n_head, 3) if back else (3, n_head)

    def move(x: Tensor) -> Tensor:
        return x.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)

    return {name: move(x) if ".c_attn." in name else x for name, x in state.items()}


def model_of(config: GPTConfig) -> GPT:
    """The weights that fastpar.GPT has with seed 0."""
    state = by_heads(fastpar.GPT(config, seed=0).state_dict(), config.n_head)
    state["wte.weight"] = state["wte.weight"][: config.vocab_size]
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(state, assign=True, strict=False)
    model.lm_head.weight = model.wte.weight
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
        model: Any = self.model
        for name, p in model.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            yield from by_heads({name: whole.detach()}, model.config.n_head, back=True).items()


def _split_by_torch(model: Any, tp_mesh: Any, sequence_parallel: bool) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor import parallel as way

    between = Split(0) if sequence_parallel else Replicate()
    column = way.ColwiseParallel(input_layouts=between)
    row = way.RowwiseParallel(output_layouts=between)
    embedding = way.RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = way.ColwiseParallel(
        input_layouts=between, output_layouts=Split(-1), use_local_output=False
    )
    way.parallelize_module(model, tp_mesh, {"wte": embedding, "lm_head": head})
    model.lm_head.weight = model.wte.weight
    layer = {"attn.c_attn": column, "attn.c_proj": row, "mlp.c_fc": column, "mlp.c_proj": row}
    if sequence_parallel:
        norm = way.SequenceParallel(sequence_dim=0, use_local_output=True)
        layer |= {"ln_1": norm, "ln_2": norm}
        way.parallelize_module(model.ln_f, tp_mesh, norm)
        layouts: Any = {"input_layouts": Replicate(), "desired_input_layouts": Split(0)}
        own_tokens = way.PrepareModuleInput(**layouts, use_local_output=False)
        way.parallelize_module(model.wpe, tp_mesh, own_tokens)
        way.parallelize_module(model.wpe, tp_mesh, norm)
    for block in model.h:
        way.parallelize_module(block, tp_mesh, layer)


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


def build(title: str, config: GPTConfig, settings: Settings, tp: int = TP) -> Contender:
    """The contender, on this rank. Ranks: all, with the same arguments."""
    from torch.distributed.fsdp import fully_shard  # slow to import

    # It warns of the two gathers that make a parameter whole, for the gate.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    sequence_parallel, reshard = WAYS[title]
    shape = (dist.get_world_size() // tp, tp)
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model: Any = model_of(config)
    _split_by_torch(model, mesh["tp"], sequence_parallel)
    if reshard is not None:
        for unit in (*model.h, model):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=reshard)
    made = _TorchTP(title, model, _adamw(model, settings), settings)
    made.dp_rank, made.dp_size = dist.get_rank() // tp, shape[0]
    return made
