"""What a GPT is made of beside its attention: weights, their first values, norms, MLPs, dropout's
arguments, documents in a batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.experts.balance import Losses
from fastpar.experts.mixture import Experts, Router, Stack
from fastpar.kernels import Fp8, Rng, bias_gelu, layer_norm, residual_layer_norm
from fastpar.models.block import SPLIT, Part, block_parts, parameters_of, shapes_of
from fastpar.settings.config import VOCAB_MULTIPLE, GPTConfig
from fastpar.sharding.placements import Shard, State
from fastpar.tensor.functional import TensorParallel, column_linear, row_linear
from fastpar.tensor.grid import Grid, grid_norm


class Tokens(NamedTuple):
    """The tokens of a batch [B, T] that a rank has under sequence or context parallelism."""

    batch: int
    time: int
    first: int  # of those that are numbered: `rows` of each of the B samples
    rows: int
    moved: tuple[int, int]  # from such a number to a place in the sample: kernels.Rng

    def places(self, n: int, device: torch.device) -> Tensor:
        """Of this rank's n tokens in their samples, [n]."""
        numbers = torch.arange(self.first, self.first + n, device=device) % self.rows
        low, high = self.moved
        if low == high == 0:
            return numbers
        return numbers + torch.where(2 * numbers < self.rows, low, high)


def dropout_at(
    site: int, p: float, rng_key: Tensor | None, tokens: Tokens | None = None, first_head: int = 0
) -> dict[str, Any]:
    """An op's dropout arguments at this site (none without a key); see [Note: dropout sites]."""
    if rng_key is None:
        return {}
    rng = Rng(rng_key, site, first_head=first_head)
    if tokens is not None:
        rows, moved = tokens.rows, tokens.moved
        rng = Rng(rng_key, site, first_row=tokens.first, rows=rows, moved=moved)
    return {"dropout_p": p, "rng": rng}


class Weights(nn.Module):
    """weight[shape] and, unless bias=False, bias[shape[0]]; the ops of fastpar.kernels use them."""

    fp8: Fp8 | None = None  # of products with the weight: fp8.py

    def __init__(self, *shape: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, bias={self.bias is not None}"


class LayerNorm(Weights):
    """The norm of x + dropout(delta + delta_bias), and that sum; see [Note: delayed residual]."""

    tp: TensorParallel | None = None

    def __init__(self, shape: tuple[int, ...], eps: float):
        super().__init__(*shape)
        self.eps = eps

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {"weight": tp.per_token, "bias": tp.per_token}

    def forward(
        self, x: Tensor, delta: Tensor | None, delta_bias: Tensor | None = None, **dropout: Any
    ) -> tuple[Tensor, Tensor]:
        if isinstance(self.tp, Grid):
            options: dict[str, Any] = {"x_bias": delta_bias, "eps": self.eps, **dropout}
            return grid_norm(x, delta, self.weight, self.bias, self.tp, **options)
        if delta is None:
            return layer_norm(x, self.weight, self.bias, self.eps), x
        return residual_layer_norm(
            delta, x, self.weight, self.bias, x_bias=delta_bias, eps=self.eps, **dropout
        )


def fill(
    module: nn.Module, parts: Iterable[Part], config: GPTConfig, *, within: str = "", **given: Any
) -> None:
    """Gives a model, a block or a module of it what the table (block.py) has for it, in its order.

    Args:
        within: the module's name in the block, with a dot.
        given: modules of parts that are made already, by name.
    """
    for part in parts:
        name = part.name.removeprefix(within).split(".")[0]
        if not part.parameters or not part.name.startswith(within) or name in module._modules:
            continue
        shape, *biases = shapes_of([part], config)
        made: Any = given.get(name)
        if made is None and part.op == "layer_norm":
            made = LayerNorm(shape, config.layer_norm_eps)
        elif made is None and part.out == "E":
            made = Router(config, shape)
        elif made is None and part.on == "experts":
            made = Stack(shape)
        setattr(module, name, made or Weights(*shape, bias=bool(biases)))


def states_of(
    parts: Iterable[Part], config: GPTConfig, tp: TensorParallel, within: str = ""
) -> dict[str, State]:
    """How ranks of tp share out a module's parameters; see fill()."""
    heads = config.head_dim if config.n_head % tp.size else None  # see gpt.py, [Note: padded heads]
    pads = {"A": heads, "3A": heads, "V": VOCAB_MULTIPLE}
    found: dict[str, State] = {}
    for name, dims in parameters_of(parts):
        if name.startswith(within):
            split = [i for i, letter in enumerate(dims) if letter in SPLIT]
            groups, pad = 3 if "3A" in dims else 1, [pads.get(dims[i]) for i in split]
            state = Shard(*split, groups=groups, pad_to=pad[0]) if split else tp.per_token
            found[name.removeprefix(within)] = state
    return found


class Parts(nn.Module):
    """A module of a block, whose weights are those that the table has under its name."""

    tp: TensorParallel | None = None
    within: str  # the name, with a dot

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        fill(self, block_parts(), config, within=self.within)

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return states_of(block_parts(), self.config, tp, within=self.within)


class MLP(Parts):
    """c_proj(gelu(c_fc(y)))."""

    within = "mlp."
    c_fc: Weights
    c_proj: Weights

    def forward(self, y: Tensor) -> Tensor:
        fc, proj = self.c_fc, self.c_proj
        y = column_linear(y, fc.weight, tp=self.tp, fp8=fc.fp8)
        y = bias_gelu(y, fc.bias)  # [..., F/tp]
        return row_linear(y, proj.weight, proj.bias, self.tp, fp8=proj.fp8)  # [..., C]


def losses_of(config: GPTConfig) -> Losses | None:
    """What the experts of one model share, None without experts."""
    if not config.n_expert:
        return None
    factors = config.balance_loss, config.router_z_loss, config.balance_rate
    return Losses(config.expert_layers, config.n_expert, *factors)


def make_mlp(config: GPTConfig, layer: int, losses: Losses | None) -> nn.Module:
    """The MLP of a layer, or its experts."""
    if losses is None or not config.has_experts(layer):
        return MLP(config)
    experts = Experts(config, losses, layer // config.expert_every)
    fill(experts, block_parts(experts=True), config, within="mlp.")
    losses.layers[experts.number] = experts.router
    return experts


def check_unpadded(idx: Tensor, shares: int, losses: Losses | None, cp: Any) -> None:
    """Refuse positions that pad a batch: a router would count them, and they would take places."""
    if losses is not None:
        rule = f"B * T divisible by {shares}"
        if cp is not None and cp.by_row:
            rule = f"T divisible by {math.lcm(cp.n_chunks, shares)}"
        raise ValueError(
            f"GPT: expected {rule} with experts on {shares} ranks that share out tokens, got idx="
            f"{list(idx.shape)}; pass another number of tokens, or, with tp, "
            "sequence_parallel=False to parallelize"
        )


@torch.no_grad()
def init_weights(model: Any, seed: int) -> None:
    """Normal(0, 0.02) (wpe 0.01; c_proj 0.02 / sqrt(2 * n_layer)), biases 0, norms 1.

    Each weight from a generator of its own, see GPT; experts are slices of one weight.
    """
    if model.wte.weight.is_meta:
        return
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.zero_()
        elif ".ln_" in f".{name}":
            p.fill_(1.0)
        else:
            std = 0.01 if name == "wpe.weight" else 0.02
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * model.config.n_layer)
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
            rows = model.config.vocab_size if name == "wte.weight" else p.shape[0]
            values = torch.empty(rows, *p.shape[1:], dtype=torch.float32, device="cpu")
            p[:rows] = values.normal_(0.0, std, generator=generator)
            p[rows:] = 0.0


class _Pair(torch.autograd.Function):
    """x + dropout(delta), twice, for the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, mask: dict[str, Any]) -> Tensor:
        total = hand_on(x, delta, mask)
        return total.expand(2, *total.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        return grads[0][0], grads[0][1], None


def take_over(stream: Tensor, *, pairs: bool) -> tuple[Tensor, Tensor]:
    """(x, delta) of what another stage handed on.

    pairs: stream is [2, ...]: the residual stream and zeros. The op that adds them has the mask of
    the other stage's delta, whose gradient it computes before that of the stream is rounded. The
    other stage gets both, [2, ...].
    """
    if pairs:
        x, delta = stream.unbind()
        return x, delta
    return stream, torch.zeros_like(stream)


def hand_on(x: Tensor, delta: Tensor, mask: dict[str, Any], *, pairs: bool = False) -> Tensor:
    """For take_over() of another stage; see gpt.py, [Note: pipeline]. pairs: [2, ...]."""
    if pairs:
        made: Tensor = _Pair.apply(x, delta, mask)
        return made
    return residual_layer_norm(delta, x, x.new_ones(x.shape[-1]), **mask)[1]


def bounds_of(positions: Tensor) -> Tensor:
    """cu_seqlens of the rows one after another: where positions are 0, and the end."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel()).int()


def pad_positions(positions: Tensor, behind: int) -> Tensor:
    """So many more in each row, of its last document: no other one gets another number."""
    more = torch.arange(1, behind + 1, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + more], 1)


def check_positions(idx: Tensor, positions: Tensor, block_size: int) -> None:
    """Refuse positions that are none of idx."""
    if positions.shape != idx.shape or (positions.is_cpu and positions[:, 0].any()):
        raise ValueError(
            f"GPT: expected positions of idx's shape {list(idx.shape)}, 0 where a row begins, got "
            f"positions.shape={list(positions.shape)}, first {positions[:, :1].tolist()}; take "
            "them from sample_batch"
        )
    fits = (positions < block_size).all()
    if not positions.is_cpu:  # no wait for the device here
        torch._assert_async(fits, "GPT: expected documents of at most block_size tokens")
    elif not fits:
        raise ValueError(
            f"GPT: expected documents of at most block_size={block_size} tokens, got a position of "
            f"{int(positions.max())}; cut them, as --pack documents does"
        )
