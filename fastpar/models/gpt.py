"""GPT-2 as published, and the blocks of Llama, Qwen3 and NanoChat: fields of GPTConfig.

Shape legend: B batch, T time, C n_embd, H heads, D head dim, F inner, V vocabulary (Vp padded).

[Note: grouped heads] c_attn's rows are R + 2 equal groups: R of queries, keys, values, each of G
heads (R = 1, G = H in GPT-2). Head j of group i and j of the keys belong together, so tp splits all
groups alike, and attention sees the head i of G groups as head j * R + i.

[Note: shared keys] A tp of c times the heads of keys gives each of c neighbours 1/c of a head's
rows in every group of c_attn, so that every row is on one rank. In forward they gather them; a rank
uses its R / c heads of queries, and the key and the value. The gradient of what all c use is summed
where it is scattered again.

[Note: delayed residual] A block returns (x, delta): the residual stream without its MLP's output,
and that output. The next norm adds them, so that everywhere in the network the residual add, its
dropout and the following LayerNorm are one op (residual_layer_norm), which also adds the bias of
attention's last layer. The MLP's bias stays in its product: otherwise the next norm would sum its
gradient before it is rounded to 16 bits, but after that at a stage boundary
(tests/contracts/test_same_run.py).

[Note: padded vocabulary] wte has Vp rows, V rounded up to a multiple of 128 for the head's GEMMs.
Rows [V, Vp) start at 0 and their gradient is exactly 0: no valid id reads them, and
linear_cross_entropy masks their logits. AdamW leaves them at 0 (test_padding_rows_stay_zero).

[Note: dropout sites] A dropout's number is part of its random bits: 0 is the embedding, and layer i
has 3*i + 1 (attention), 3*i + 2 (attention's residual) and 3*i + 3 (the MLP's residual). The key
identifies the batch's first sample: a sample's masks do not depend on how ranks split a batch.

[Note: padded heads] A tp that does not divide the heads pads them: the last ranks have heads whose
weights are 0 (25 heads at tp=2: 13 and 12 + 1). Such a head's query, key and value are 0, so are
its attention output and its weights' gradients: an optimizer leaves them at 0.
Checkpoints, norms and full tensors exclude them (tests/contracts/test_reshard.py).

[Note: tensor parallel] parallelize() calls the modules' tensor_parallel(), which returns how their
parameters are split and stores the TensorParallel; None is one rank. Under sequence parallelism x
and delta are this rank's slice of the tokens, [N/tp, C]; Tokens holds the shape of the full batch.
A batch that the ranks do not divide is padded after its last position, where attention does not
look and targets do not count.

[Note: context parallel] With cp a rank has N/cp tokens of the batch, in one run or two of each row,
which the tp ranks split further; Tokens says which. Attention sees all of them (context/); a loss
is that of the full batch.

[Note: pipeline] One tensor is sent from a stage to the next: x + dropout(delta), as the next norm
would store it. The sender gets it from the norm's own op and drops the norm; the receiver adds
zeros in that op. So the sums of forward and backward are rounded where one process rounds them
(tests/contracts/test_same_run.py). With dropout in 16 bits the sender would compute delta's
gradient from one that is already rounded: with `pairs` the receiver's op makes both, and sends both
back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.axes.context.keys import attend_keys
from fastpar.axes.context.sequences import (
    ContextParallel,
    first_of,
    gather_tokens,
    sum_of_parts,
    to_heads,
    to_tokens,
)
from fastpar.axes.experts import balance
from fastpar.axes.experts.balance import Losses
from fastpar.axes.experts.mixture import Experts, Router, Stack
from fastpar.axes.grid import Grid, grid_dropout, grid_norm
from fastpar.axes.tensor.functional import TensorParallel, column_linear, gather, row_linear
from fastpar.axes.tensor.vocabulary import vocab_embedding, vocab_linear, vocab_linear_cross_entropy
from fastpar.doctor.doctor import expect_gpt
from fastpar.kernels import (
    DelayedScales,
    Fp8,
    Rng,
    activation,
    attention,
    attention_qkvpacked,
    draw_key,
    dropout,
    embedding,
    layer_norm,
    linear,
    linear_cross_entropy,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    rope,
    rope_turns,
)
from fastpar.settings.model import (
    SPLIT,
    VOCAB_MULTIPLE,
    GPTConfig,
    Part,
    block_parts,
    count_parameters,
    first_parts,
    flops_per_token,
    last_parts,
    parameters_of,
    part_flops,
    products,
    shapes_of,
)
from fastpar.sharding.placements import Partial, Shard, State


class Tokens(NamedTuple):
    """The tokens of a batch [B, T] that a rank has under sequence or context parallelism."""

    batch: int
    time: int
    first: int  # number of the first, counting `rows` tokens in each of the B samples
    rows: int
    moved: tuple[int, int]  # offsets from such a number to a position in the sample: kernels.Rng

    def places(self, n: int, device: torch.device) -> Tensor:
        """Positions of this rank's n tokens in their samples, [n]."""
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


def held(table: str, name: str) -> Any:
    """An attribute that is read from module._parameters or _modules at once: nn.Module looks there
    last, which takes 0.9 us, 290 times in a forward of 12 layers."""

    def get(module: nn.Module) -> Any:
        try:
            return module.__dict__[table][name]
        except KeyError:
            raise AttributeError(name) from None

    return property(get)


class Weights(nn.Module):
    """weight[shape] and, unless bias=False, bias[shape[0]]; the ops of fastpar.kernels use them.

    Attributes:
        matrices: heights of the matrices that the weight holds, relative to each other: (1,), or
            those of q, k and v, or of gate and up. For Muon.
    """

    fp8: Fp8 | None = None  # for products with the weight
    matrices: tuple[int, ...] = (1,)
    weight: Any = held("_parameters", "weight")
    bias: Any = held("_parameters", "bias")

    def __init__(self, *shape: int, bias: bool = True, weight: bool = True):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.empty(shape)) if weight else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(shape[0])) if bias else None)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else list(self.weight.shape)
        return f"{shape}, bias={self.bias is not None}"


class Norm(Weights):
    """The norm of x + dropout(delta + delta_bias), and that sum; see [Note: delayed residual]."""

    tp: TensorParallel | None = None

    def __init__(self, config: GPTConfig, part: Part):
        super().__init__(config.n_embd, bias=part.bias, weight=part.weight)
        self.eps, self.rms = config.layer_norm_eps, part.op == "rms_norm"

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {name: tp.per_token for name, _ in self.named_parameters()}

    def forward(
        self, x: Tensor, delta: Tensor | None, delta_bias: Tensor | None = None, **dropout: Any
    ) -> tuple[Tensor, Tensor]:
        if self.rms and delta is None:
            return rms_norm(x, self.weight, self.eps), x
        if self.rms:
            assert delta is not None
            more = {"x_bias": delta_bias, "eps": self.eps, **dropout}
            return residual_rms_norm(delta, x, self.weight, **more)
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
    """Adds the modules of the table in settings/model.py to a model, block or part, in order.

    Args:
        within: the module's name in the block, with a dot.
        given: modules that are made already, by name.
    """
    for part in parts:
        name = part.name.removeprefix(within).split(".")[0]
        has_module = part.parameters or part.op in ("layer_norm", "rms_norm")
        if not has_module or not part.name.startswith(within) or name in module._modules:
            continue
        made: Any = given.get(name)
        if made is None and part.op in ("layer_norm", "rms_norm"):
            made = Norm(config, part)
        elif made is None and part.out == "E":
            made = Router(config, shapes_of([part], config)[0])
        elif made is None and part.on == "experts":
            made = Stack(shapes_of([part], config)[0], part.bias, matrices_of(part, config))
        elif made is None:
            shape, *biases = shapes_of([part], config)
            made = Weights(*shape, bias=bool(biases))
            made.matrices = matrices_of(part, config)
        setattr(module, name, made)


def matrices_of(part: Part, config: GPTConfig) -> tuple[int, ...]:
    """See Weights."""
    if part.out == "QKV":
        return config.queries_per_key, 1, 1
    return (1, 1) if part.out in ("2F", "2H") else (1,)


def states_of(
    parts: Iterable[Part], config: GPTConfig, tp: TensorParallel, within: str = ""
) -> dict[str, State]:
    """How tp ranks split a module's parameters; see fill()."""
    heads = config.head_size if config.n_head % tp.size else None  # see [Note: padded heads]
    pads = {"A": heads, "QKV": heads, "V": VOCAB_MULTIPLE}
    groups = {"QKV": config.queries_per_key + 2, "2F": 2}
    found: dict[str, State] = {}
    for name, dims in parameters_of(parts):
        if name.startswith(within):
            split = [i for i, letter in enumerate(dims) if letter in SPLIT]
            state = Partial() if dims == ("D",) else tp.per_token  # of norms of its own heads
            if split:
                at = dims[split[0]]
                state = Shard(split[0], groups=groups.get(at, 1), pad_to=pads.get(at))
            found[name.removeprefix(within)] = state
    return found


class Parts(nn.Module):
    """A module of a block; its weights are the table's rows under its name."""

    tp: TensorParallel | None = None
    within: str  # the name, with a dot

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        fill(self, block_parts(config), config, within=self.within)

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return states_of(block_parts(self.config), self.config, tp, within=self.within)


class MLP(Parts):
    """c_proj(activation(c_fc(y)))."""

    within = "mlp."
    c_fc: Weights = held("_modules", "c_fc")
    c_proj: Weights = held("_modules", "c_proj")

    def forward(self, y: Tensor) -> Tensor:
        fc, proj = self.c_fc, self.c_proj
        y = column_linear(y, fc.weight, tp=self.tp, fp8=fc.fp8)
        y = activation(y, fc.bias, self.config.activation)  # [..., F/tp]
        return row_linear(y, proj.weight, proj.bias, self.tp, fp8=proj.fp8)  # [..., C]


def losses_of(config: GPTConfig) -> Losses | None:
    """State shared by the experts of a model; None without experts."""
    if not config.n_expert:
        return None
    factors = config.balance_loss, config.router_z_loss, config.balance_rate
    return Losses(config.expert_layers, config.n_expert, *factors)


def make_mlp(config: GPTConfig, layer: int, losses: Losses | None) -> nn.Module:
    """The MLP of a layer, or its experts."""
    if losses is None or not config.has_experts(layer):
        return MLP(config)
    experts = Experts(config, losses, layer // config.expert_every)
    fill(experts, block_parts(config, experts=True), config, within="mlp.")
    losses.layers[experts.number] = experts.router
    return experts


def check_unpadded(idx: Tensor, shares: int, losses: Losses | None, cp: Any) -> None:
    """Refuses positions that pad a batch: a router would count them and use capacity for them."""
    if losses is not None:
        rule = f"B * T divisible by {shares}"
        if cp is not None and cp.by_row:
            rule = f"T divisible by {math.lcm(cp.n_chunks, shares)}"
        raise ValueError(
            f"GPT: expected {rule} with experts on {shares} ranks that split tokens, got idx="
            f"{list(idx.shape)}; pass another number of tokens, or, with tp, "
            "sequence_parallel=False to parallelize"
        )


TABLES = "wte.weight", "lm_head.weight"  # with a row for each token


@torch.no_grad()
def init_weights(model: Any, seed: int) -> None:
    """Normal(0, 0.02) (wpe 0.01; c_proj 0.02 / sqrt(2 * n_layer)), biases 0, norms 1.

    Each weight has its own generator, see GPT; experts are slices of one weight.
    """
    if model.wte.weight.is_meta:
        return
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.zero_()
        elif ".ln_" in f".{name}" or name.endswith(("q_norm.weight", "k_norm.weight")):
            p.fill_(1.0)
        else:
            std = 0.01 if name == "wpe.weight" else 0.02
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * model.config.n_layer)
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
            rows = model.config.vocab_size if name in TABLES else p.shape[0]
            values = torch.empty(rows, *p.shape[1:], dtype=torch.float32, device="cpu")
            p[:rows] = values.normal_(0.0, std, generator=generator)
            p[rows:] = 0.0


class _Pair(torch.autograd.Function):
    """x + dropout(delta), twice, to receive the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, mask: dict[str, Any]) -> Tensor:
        total = hand_on(x, delta, mask)
        return total.expand(2, *total.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        return grads[0][0], grads[0][1], None


def take_over(stream: Tensor, *, pairs: bool) -> tuple[Tensor, Tensor]:
    """(x, delta) from the tensor that another stage sent.

    pairs: stream is [2, ...]: the residual stream and zeros. The op that adds them has the mask of
    the sender's delta, whose gradient it computes before that of the stream is rounded. The sender
    gets both gradients, [2, ...].
    """
    if pairs:
        return stream.unbind()  # type: ignore[return-value]
    return stream, torch.zeros_like(stream)


def hand_on(x: Tensor, delta: Tensor, mask: dict[str, Any], *, pairs: bool = False) -> Tensor:
    """The tensor to send to another stage's take_over(); see [Note: pipeline]. pairs: [2, ...]."""
    if pairs:
        made: Tensor = _Pair.apply(x, delta, mask)
        return made
    return residual_layer_norm(delta, x, x.new_ones(x.shape[-1]), **mask)[1]


def bounds_of(positions: Tensor) -> Tensor:
    """cu_seqlens of the concatenated rows: where positions are 0, and the end."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel()).int()


def pad_positions(positions: Tensor, behind: int) -> Tensor:
    """Extends each row by `behind` positions of its last document; others are unchanged."""
    more = torch.arange(1, behind + 1, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + more], 1)


def check_positions(idx: Tensor, positions: Tensor, block_size: int) -> None:
    """Refuses positions that do not fit idx."""
    if positions.shape != idx.shape or (positions.is_cpu and positions[:, 0].any()):
        raise ValueError(
            f"GPT: expected positions of idx's shape {list(idx.shape)}, 0 where a row begins, got "
            f"positions.shape={list(positions.shape)}, first {positions[:, :1].tolist()}; take "
            "them from sample_batch"
        )
    fits = (positions < block_size).all()
    if not positions.is_cpu:  # without waiting for the device
        torch._assert_async(fits, "GPT: expected documents of at most block_size tokens")
    elif not fits:
        raise ValueError(
            f"GPT: expected documents of at most block_size={block_size} tokens, got a position of "
            f"{int(positions.max())}; cut them, as --pack documents does"
        )


class LayerRead:
    """Keys and values of one layer, [B, block_size, H, D] each; the first `length` are filled."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values, self.length = keys, values, 0

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, T, H, D] of T tokens; returns those of all tokens so far."""
        start, self.length = self.length, self.length + k.shape[1]
        if self.length > self.keys.shape[1]:
            raise ValueError(
                f"LayerRead: expected at most {self.keys.shape[1]} tokens, got {self.length}; "
                "start a new cache with the last tokens"
            )
        self.keys[:, start : self.length] = k
        self.values[:, start : self.length] = v
        return self.keys[:, : self.length], self.values[:, : self.length]


def nothing_read(config: GPTConfig, batch: int, like: Tensor) -> list[LayerRead]:
    """An empty cache of block_size tokens per layer, 2 * B * block_size * C elements each."""
    heads = config.n_head // config.queries_per_key
    shape = (2, batch, config.block_size, heads, config.head_size)
    return [
        LayerRead(*torch.empty(shape, dtype=like.dtype, device=like.device))
        for _ in range(config.n_layer)
    ]


class Attention(Parts):
    """Causal self-attention, without c_proj's bias: the norm that follows adds it."""

    within = "attn."
    cp: ContextParallel | None = None
    c_attn: Weights = held("_modules", "c_attn")
    c_proj: Weights = held("_modules", "c_proj")

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.n_head, self.head_dim = config.n_head, config.head_size

    @property
    def first_head(self) -> int:
        """The first of this rank's heads."""
        of_tp = self.n_head if self.tp is None else -(-self.n_head // self.tp.size)
        first = 0 if self.tp is None else self.tp.rank * of_tp
        return first if self.cp is None else first + self.cp.first_head(of_tp)

    def forward(
        self,
        y: Tensor,
        tokens: Tokens | None = None,
        documents: Tensor | None = None,
        read: LayerRead | None = None,
        turns: Tensor | None = None,
        **dropout: Any,
    ) -> Tensor:
        c_attn, fp8, config = self.c_attn, self.c_proj.fp8, self.config
        if config.attention_scale is not None:
            dropout["softmax_scale"] = config.attention_scale
        weight, groups = c_attn.weight, config.queries_per_key + 2
        bias: Tensor | None = c_attn.bias
        if self.tp is not None and (near := self.tp.same_keys) is not None:
            weight, bias = self._gathered(weight, near), self._gathered(bias, near)
            groups = config.queries_per_key // near.size + 2
        qkv = column_linear(y, weight, bias, self.tp, c_attn.fp8)  # [B, T, QKV/tp]
        qkv = qkv.view(*qkv.shape[:-1], groups, -1, self.head_dim)
        each = self._apart(qkv, turns)  # [B, T, 3, H/tp, D], or q, k and v
        heads = each[0].shape[-2]
        if self.cp is not None and self.cp.by_keys:
            assert tokens is not None
            o = attend_keys(each[0], tokens.batch, self.cp, documents=documents, **dropout)
            return row_linear(o.flatten(-2), self.c_proj.weight, tp=self.tp, fp8=fp8)
        if self.cp is not None:
            each = [to_heads(each[0], self.cp)]
        if documents is not None:
            each = each if tokens is not None else [x.flatten(0, 1) for x in each]  # [N, ...]
        elif tokens is not None:
            each = [x.unflatten(0, (tokens.batch, tokens.time)) for x in each]
        if read is not None:
            q, k, v = each[0].unbind(-3) if len(each) == 1 else each
            o = attention(q, *read.add(k, v), causal=True, **dropout)
        elif len(each) == 1:
            o = attention_qkvpacked(each[0], causal=True, cu_seqlens=documents, **dropout)
        else:
            o = attention(*each, causal=True, cu_seqlens=documents, **dropout)
        if documents is None:
            o = o if tokens is None else o.flatten(0, 1)
        elif tokens is None:
            o = o.unflatten(0, y.shape[:2])  # [B, T, H/tp, D]
        if self.cp is not None:
            o = to_tokens(o[:, None], heads, self.cp)[:, 0]
        return row_linear(o.flatten(-2), self.c_proj.weight, tp=self.tp, fp8=fp8)  # [B, T, C]

    def _gathered(self, own: Tensor | None, near: TensorParallel) -> Tensor | None:
        """Rows of this rank's queries and of their key and value; see [Note: shared keys]."""
        if own is None:
            return None
        many = self.config.queries_per_key
        whole = gather(own.unflatten(0, (many + 2, -1)), 1, near, partial=True)  # [R + 2, D, ...]
        *queries, k, v = whole.unbind()
        n = many // near.size
        return torch.cat([*queries[near.rank * n : (near.rank + 1) * n], k, v])

    def _apart(self, qkv: Tensor, turns: Tensor | None) -> list[Tensor]:
        """[qkv] as GPT-2's attention takes it, or [q, k, v], normalized and rotated."""
        config, many = self.config, qkv.shape[-3] - 2
        if turns is None and not config.qk_norm and config.queries_per_key == 1:
            return [qkv]
        options: dict[str, Any] = {"norm": config.qk_norm, "eps": config.layer_norm_eps}
        for name in ("q_norm", "k_norm"):
            if name in self._modules:
                options[f"{name[0]}_weight"] = getattr(self, name).weight
        q, k, v = rope(qkv, turns, **options)
        if self.cp is None:
            return [q, k, v]
        # Ranks of cp exchange as many heads of keys as of queries.
        return [torch.stack([q, *(x.repeat_interleave(many, -2) for x in (k, v))], -3)]


class Block(nn.Module):
    """One layer; see [Note: delayed residual]."""

    ln_1: Norm = held("_modules", "ln_1")
    attn: Attention = held("_modules", "attn")
    ln_2: Norm = held("_modules", "ln_2")
    mlp: nn.Module = held("_modules", "mlp")

    def __init__(self, config: GPTConfig, mlp: nn.Module):
        super().__init__()
        self.p = config.dropout
        fill(self, block_parts(config), config, attn=Attention(config), mlp=mlp)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rng_key: Tensor | None = None,
        tokens: Tokens | None = None,
        site: int = 0,
        documents: Tensor | None = None,
        read: LayerRead | None = None,
        turns: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Maps the pair of the layer below to this layer's, [B, T, C] each; delta None: no add.

        Dropout is applied exactly if rng_key is given, from this site on: an argument rather than
        an attribute, because torch.compile would compile every block separately
        (test_nothing_is_compiled_after_the_second_block). Under sequence parallelism the pair is
        [N/tp, C] each, and tokens describes the batch. documents: cu_seqlens of attention().
        read: keys and values of earlier tokens. turns: for rope.
        """
        p, attn = self.p, self.attn
        y, x = self.ln_1(x, delta, **dropout_at(site, p, rng_key, tokens))
        heads = dropout_at(site + 1, p, rng_key, first_head=attn.first_head)
        delta = attn(y, tokens, documents, read, turns, **heads)
        y, x = self.ln_2(x, delta, attn.c_proj.bias, **dropout_at(site + 2, p, rng_key, tokens))
        return x, self.mlp(y)


class GPT(nn.Module):
    """A GPT of the given shape.

    Args:
        config: the sizes.
        seed: every weight is drawn from its own generator, seeded by (seed, the parameter's name),
            on the CPU in fp32: its values depend on its shape and n_layer, not on the device, the
            other tensors or the vocabulary padding. On the meta device nothing is drawn.
    """

    tp: TensorParallel | None = None
    cp: ContextParallel | None = None
    fp8_scales: DelayedScales | None = None
    splits_on_grid: bool  # axes/grid.py needs no more than what its modules declare for tp
    wte: Weights
    wpe: Weights  # without rope_theta
    ln_e: Norm  # with norm_embedding
    ln_f: Norm
    lm_head: Weights  # unless tied

    def __init__(self, config: GPTConfig, *, seed: int = 0):
        if not isinstance(config, GPTConfig):
            raise ValueError(
                f"GPT: expected config as a GPTConfig, got config={config!r}; pass "
                'GPTConfig.preset("gpt2") or GPTConfig(n_layer=..., ...)'
            )
        super().__init__()
        self.config, self.splits_on_grid = config, config.is_gpt2
        fill(self, first_parts(config), config)
        self.experts = losses_of(config)
        mlps = (make_mlp(config, layer, self.experts) for layer in range(config.n_layer))
        self.h = nn.ModuleList(Block(config, mlp) for mlp in mlps)
        fill(self, last_parts(config), config)
        init_weights(self, seed)
        expect_gpt(config)

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        expect_gpt(self.config, tp.size)
        ends = first_parts(self.config) + last_parts(self.config)
        tables = [part for part in ends if part.op in ("embedding", "loss")]
        states = states_of(tables, self.config, tp)
        here = {name for name, _ in self.named_parameters()}  # of this pipeline stage
        return {name: state for name, state in states.items() if name in here}

    def context_parallel(self, cp: ContextParallel | None) -> None:
        """Splits sequences over these ranks; None: no longer."""
        self.cp = cp
        for module in self.modules():
            if isinstance(module, Attention):
                module.cp = cp

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        rng_key: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        parts: range | None = None,
        stream: Tensor | None = None,
        pairs: bool = False,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss of `targets`, or logits without them.

        Args:
            idx: [B, T] int64 token ids in [0, vocab_size), 1 <= T <= block_size.
            targets: [B, T] int64; -100 marks positions without a loss.
            rng_key: key of the dropout masks (kernels.make_key); if missing, a model in training
                mode draws it from torch's default generator, of the first rank of tp and cp.
                Ignored in eval mode.
            reduction: of the loss: "mean" over the valid targets or "sum".
            parts: run these of pipeline_parts() only; stream: the output of the parts before them;
            pairs: a stream after a layer is [2, ...], see take_over().
            positions: [B, T] int64, of each token in its document: attention stays within a
                document, which begins where it is 0. None: each row is a document.
        Returns:
            loss: [] fp32 (fp64 for fp64 parameters), or logits: [B, T, V] in the parameters' dtype
                (no padding). Without the last part: the residual stream for the next parts.
            Experts' auxiliary losses appear only in the gradients
            (fastpar/axes/experts/balance.py).
        Raises:
            ValueError: a shape or dtype that differs from the above; T > block_size; on CPU also a
                token id outside the vocabulary (on a GPU that is a device-side assert).
        """
        for name, given in (("idx", idx), ("targets", targets), ("positions", positions)):
            if not isinstance(given, Tensor) and (given is not None or name == "idx"):
                raise ValueError(
                    f"GPT: expected {name} as a tensor, got {type(given).__name__}; convert it "
                    "with torch.as_tensor"
                )
        if idx.dim() and idx.shape[0] == 0 and (targets is None or reduction == "mean"):
            raise ValueError(
                f"GPT: expected at least one sample, got idx.shape={list(idx.shape)}; leave out "
                "empty batches"
            )
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(
                f"GPT: expected targets of idx's shape {list(idx.shape)}, got "
                f"targets.shape={list(targets.shape)}; pass one target per token (-100: none)"
            )
        if not self.training or self.config.dropout == 0.0:
            rng_key = None
        elif rng_key is None:
            rng_key = draw_key(idx.device)
            if self.tp is not None:  # its ranks' generators may differ
                rng_key = gather(rng_key[None], 0, self.tp, partial=False)[0]
            if self.cp is not None:
                rng_key = first_of(rng_key, self.cp)
        if self.cp is not None:  # before padding, which may exceed the context
            self._check_ids(idx, self.config.block_size)
        if positions is not None:
            check_positions(idx, positions, self.config.block_size)
        grid, every = self._grid, targets
        if grid is not None:
            grid.check_batch(idx, positions)
            rng_key = None if rng_key is None else grid.key(rng_key, len(idx))
            idx = grid.batch.slice(idx, 0)
            targets = targets if targets is None else grid.batch.slice(targets, 0)
        length, behind = idx.shape[-1], self._padding(idx)
        if behind:
            check_unpadded(idx, self._shares, self.experts, self.cp)
            idx = F.pad(idx, (0, behind))
            targets = targets if targets is None else F.pad(targets, (0, behind), value=-100)
            positions = positions if positions is None else pad_positions(positions, behind)
        x = self.features(idx, rng_key, parts, stream, positions, pairs=pairs)
        if parts is not None and len(self.h) + 1 not in parts:
            return x
        if targets is None:
            logits = self.logits(x)
            if self.cp is not None:
                logits = gather_tokens(logits, len(idx), self.cp)
            logits = logits.view(*idx.shape, -1)[:, :length]
            return logits if grid is None else grid.whole_batch(logits)
        if self.cp is None and grid is None:
            return self._loss(x, targets, reduction)
        total = self._loss(x, targets if self.cp is None else self.cp.slice(targets), "sum")
        if reduction == "mean":
            assert every is not None
            total = total / (every != -100).sum()
        if grid is not None:
            return grid.sum_of_parts(total)
        assert self.cp is not None
        return sum_of_parts(total, self.cp)

    @property
    def _head(self) -> Tensor:
        """The weight of the head, [V, C]."""
        return self.wte.weight if self.config.tied else self.lm_head.weight

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        options: dict[str, Any] = {"vocab_size": self.config.vocab_size, "reduction": reduction}
        options["softcap"] = self.config.logit_softcap
        if self.tp is not None:
            loss = vocab_linear_cross_entropy(x, self._head, targets, self.tp, **options)
        else:
            loss = linear_cross_entropy(x, self._head, targets, **options)
        if self.experts is None or not (self.training and torch.is_grad_enabled()):
            return loss
        self.experts.check()
        return self.experts.note_scale(loss, (targets != -100).sum() if reduction == "mean" else 1)

    @property
    def _grid(self) -> Grid | None:
        return self.tp if isinstance(self.tp, Grid) else None

    @property
    def _shares(self) -> int:
        """Ranks that split the tokens of a batch between layers."""
        of_tp = self.tp.size if self.tp is not None and self.tp.sequence_parallel else 1
        return of_tp * (1 if self.cp is None else self.cp.size)

    def _padding(self, idx: Tensor) -> int:
        """Number of positions to add, see [Note: tensor parallel]."""
        if self.cp is not None:
            batch, time = idx.shape
            return self.cp.padding(batch, time, self._shares)
        return -idx.shape[-1] % self._shares if idx.numel() % self._shares else 0

    def pipeline_parts(self) -> list[tuple[str, ...]]:
        """The modules of each part between which a pipeline may split: embedding, layers, head."""
        layers = [(f"h.{layer}",) for layer in range(len(self.h))]
        ends = [first_parts(self.config), last_parts(self.config)]
        first, last = (tuple(part.name for part in parts if part.name) for parts in ends)
        first, last = (tuple(n for n in names if n in self._modules) for names in (first, last))
        return [first, *layers, (*last, "wte") if self.config.tied else last]

    def pipeline_costs(self) -> list[float]:
        """FLOPs of each part, by which stages are balanced."""
        return part_flops(self.config)

    def new_stream(self, idx: Tensor) -> Tensor:
        """Memory for the residual stream of idx [B, T] between two parts."""
        batch, time = idx.shape[0], idx.shape[1] + self._padding(idx)
        shape = (batch, time) if self._shares == 1 else (batch * time // self._shares,)
        return next(self.parameters()).new_empty(*shape, self.config.n_embd)

    @property
    def needs_pairs(self) -> bool:
        """Whether pairs are needed for the bits of one process."""
        drops = self.training and self.config.dropout > 0.0
        return drops and next(self.parameters()).dtype.itemsize == 2

    def draw_keys(self, count: int, device: torch.device) -> Tensor | None:
        """Keys of the dropout masks of `count` batches, one per row; None: dropout is off."""
        if not self.training or self.config.dropout == 0.0:
            return None
        return torch.stack([draw_key(device) for _ in range(count)])

    def features(
        self,
        idx: Tensor,
        rng_key: Tensor | None = None,
        parts: range | None = None,
        stream: Tensor | None = None,
        positions: Tensor | None = None,
        read: list[LayerRead] | None = None,
        pairs: bool = False,
    ) -> Tensor:
        """[B, T] token ids -> [B, T, C], the head's input; dropout only if rng_key is given.

        Under sequence and context parallelism this rank's tokens, [N/(cp*tp), C]. parts, stream,
        positions, pairs: as in forward(). read: each layer's cache of earlier tokens, to which
        idx's are appended; not with dropout, tp, cp, parts or positions.
        """
        spare = 0 if self.cp is None else 2 * self._shares
        self._check_ids(idx, self.config.block_size + spare)
        tokens = self._tokens(*idx.shape)
        p, n_layer = self.config.dropout, len(self.h)
        parts = range(n_layer + 2) if parts is None else parts
        if stream is None:
            mask = dropout_at(0, p, rng_key, tokens)
            first = read[0].length if read else 0
            x = self._embed(idx, tokens, mask, positions, first)  # [B, T, C]
        else:
            x = stream
        x, delta = take_over(x, pairs=pairs) if parts.start > 1 else (x, None)
        documents = None if positions is None else bounds_of(positions)
        turns = self._turns(idx, tokens, positions, read)
        first, last = max(parts.start - 1, 0), min(parts.stop - 1, n_layer)
        for layer, block in enumerate([*self.h][first:last], first):
            more = documents, None if read is None else read[layer], turns
            x, delta = block(x, delta, rng_key, tokens, 3 * layer, *more)
        mask = dropout_at(3 * min(parts.stop - 1, n_layer), p, rng_key, tokens)
        if n_layer + 1 in parts:
            return self.ln_f(x, delta, **mask)[0]
        if delta is None:
            return x
        return hand_on(x, delta, mask, pairs=pairs)

    def _turns(
        self,
        idx: Tensor,
        tokens: Tokens | None,
        positions: Tensor | None,
        read: list[LayerRead] | None,
    ) -> Tensor | None:
        """For rope, of the tokens that attention's layers see on this rank."""
        config = self.config
        if config.rope_theta is None:
            return None
        if self.cp is not None:
            if positions is not None:
                places = self.cp.slice(positions).flatten()
            else:
                whole = Tokens(idx.shape[0], idx.shape[1], *self.cp.runs(*idx.shape))
                places = whole.places(idx.numel() // self.cp.size, idx.device)
        elif positions is None:
            first = read[0].length if read else 0
            places = torch.arange(first, first + idx.shape[1], device=idx.device)
            places = places if tokens is None else places.repeat(idx.shape[0])
        else:
            places = positions if tokens is None else positions.flatten()
        return rope_turns(places, config.rope_theta, config.head_size)

    def _tokens(self, batch: int, time: int) -> Tokens | None:
        if self._shares == 1:
            return None
        first, rows, moved = 0, time, (0, 0)
        if self.cp is not None:
            first, rows, moved = self.cp.runs(batch, time)
        if self.tp is not None and self.tp.sequence_parallel:
            first += self.tp.rank * (batch * time // self._shares)
        return Tokens(batch, time, first, rows, moved)

    def _embed(
        self,
        idx: Tensor,
        tokens: Tokens | None,
        mask: dict[str, Any],
        positions: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        x = self._looked_up(idx, tokens, mask, positions, first)
        return self.ln_e(x, None)[0] if self.config.norm_embedding else x

    def _looked_up(
        self,
        idx: Tensor,
        tokens: Tokens | None,
        mask: dict[str, Any],
        positions: Tensor | None,
        first: int,
    ) -> Tensor:
        wte, wpe = self.wte.weight, None if self.config.rope_theta else self.wpe.weight
        if self._shares == 1 and self.tp is None and positions is None:
            return embedding(idx, wte, wpe, first_position=first, **mask)
        spot = 0 if tokens is None else tokens.first  # of this rank's tokens among those of cp
        if self.cp is not None and tokens is not None:
            idx = self.cp.slice(idx)[None]
            positions = positions if positions is None else self.cp.slice(positions)
            spot -= self.cp.runs(tokens.batch, tokens.time)[0]
        x = embedding(idx, wte) if self.tp is None else vocab_embedding(idx, wte, self.tp)
        if tokens is not None:
            x = x.view(-1, x.shape[-1])
        if wpe is not None and tokens is None:
            x = x + (wpe[: idx.shape[1]] if positions is None else embedding(positions, wpe))
        elif wpe is not None and tokens is not None:
            if positions is None:
                places = tokens.places(x.shape[0], idx.device)
            else:
                places = positions.flatten()[spot : spot + x.shape[0]]
            x = x + embedding(places[None].clamp(max=len(wpe) - 1), wpe)[0]  # clamps padding
        if self._grid is not None:
            return grid_dropout(x, self._grid, **mask)
        return dropout(x, mask["dropout_p"], mask["rng"]) if mask else x

    def logits(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., V]: the head. For all tokens, also under sequence parallelism."""
        weight, vocab_size, cap = self._head, self.config.vocab_size, self.config.logit_softcap
        if self.tp is not None:
            logits = vocab_linear(x, weight, self.tp)[..., :vocab_size]
        else:
            logits = linear(x, weight[:vocab_size])
        return cap * torch.tanh(logits / cap) if cap else logits

    def num_parameters(self) -> int:
        """Weights of the published architecture: tied head once, without vocabulary padding."""
        return count_parameters(self.config)

    def flops_per_token(self) -> int:
        """FLOPs of forward + backward per token at T = block_size; see settings/model.py."""
        return flops_per_token(self.config)

    def _check_ids(self, idx: Tensor, longest: int) -> None:
        config = self.config
        if idx.dim() != 2 or idx.dtype != torch.int64:
            raise ValueError(
                f"GPT: expected idx as int64 [B, T], got idx.shape={list(idx.shape)}, "
                f"idx.dtype={idx.dtype}; add the batch dimension or convert with .long()"
            )
        if not 1 <= idx.shape[1] <= longest:
            raise ValueError(
                f"GPT: expected 1 <= T <= block_size={config.block_size}, got T={idx.shape[1]}; "
                "crop the context or build the model with a larger block_size"
            )
        valid = (idx >= 0) & (idx < config.vocab_size)
        if torch.compiler.is_compiling() or idx.device.type != "cpu":
            # Without waiting for the device; an id within the padding would train its rows.
            torch._assert_async(valid.all(), "GPT: expected token ids below vocab_size")
        elif not valid.all():
            raise ValueError(
                f"GPT: expected token ids in [0, {config.vocab_size}), got "
                f"id={idx[~valid][0].item()}; encode the text with the model's own tokenizer"
            )


LAYERS = ("none", "mlp", "all")


def use_fp8(
    model: GPT,
    layers: str,
    *,
    scaling: str = "row",
    weight_gradient: str = "bf16",
    emulate: bool = False,
) -> None:
    """Rounds the operands of linear layers of all blocks to 8 bits from now on.

    Args:
        model: before parallelize(), whose engine then reduces the values for delayed scales;
            without parallelize() call model.fp8_scales.update() after each step.
        layers: "mlp", "all" of a block, or "none": no rounding.
        scaling, weight_gradient, emulate: as in kernels.Fp8.
    Raises:
        ValueError: other layers; a model with experts; arguments that Fp8 refuses.
    """
    if layers not in LAYERS:
        raise ValueError(
            f"use_fp8: expected one of {', '.join(LAYERS)}, got layers={layers}; choose one"
        )
    if layers != "none" and model.config.n_expert:
        raise ValueError(
            f"use_fp8: expected a model without experts, got n_expert={model.config.n_expert}; "
            "drop fp8 (grouped products do not support it)"
        )
    names, kinds = products(), products(layers)
    delayed = scaling == "tensor" and bool(kinds)
    model.fp8_scales = DelayedScales(len(names) * model.config.n_layer) if delayed else None
    for i, block in enumerate(model.h):
        for j, name in enumerate(names):
            how: dict[str, Any] = {"scaling": scaling, "weight_gradient": weight_gradient}
            how |= {"emulate": emulate, "scales": model.fp8_scales, "layer": len(names) * i + j}
            keeps = name != "attn.c_proj"  # attention keeps its input
            part: Any = block.get_submodule(name)
            part.fp8 = Fp8(**how, keeps=keeps) if name in kinds else None


def numbers_of(model: Any, like: Tensor) -> Tensor:
    """What a model itself counted in the last step, flat: by its experts, or overflows of fp8."""
    scales: DelayedScales | None = model.fp8_scales
    if scales is None:
        return balance.sums_of(model, like)
    return scales.overflows.sum().reshape(1).to(like)


def report_of(model: Any, numbers: Tensor) -> dict[str, Any]:
    """numbers_of() a step as columns of a row of metrics."""
    if model.fp8_scales is None:
        return balance.report_of(model, numbers)
    return {"fp8_overflows": int(numbers.sum())}


def saved_scales(model: Any) -> dict[str, Any] | None:
    """fp8 scales for a checkpoint's run state."""
    return None if model.fp8_scales is None else model.fp8_scales.state_dict()


def restore_scales(model: Any, state: dict[str, Any]) -> None:
    """Loads a run state's fp8 scales; without them the next step measures values first."""
    if model.fp8_scales is not None and state.get("fp8") is not None:
        model.fp8_scales.load_state_dict(state["fp8"])


@torch.no_grad()
def upcycled(dense: GPT, experts: dict[str, Any], *, seed: int = 0) -> GPT:
    """A model with equal experts instead of MLPs that computes the same; routers drawn by seed.

    A token's expert weights add up to 1, so the initial loss equals the dense model's, to rounding.

    Args:
        experts: fields of GPTConfig: n_expert, top_k, ...
    Raises:
        ValueError: a model with experts; top_k below 2, whose single weight is not 1; experts that
            are not as wide as the MLP.
    """
    if dense.config.n_expert:
        raise ValueError(
            "upcycled: expected a dense model, got one with n_expert="
            f"{dense.config.n_expert}; drop --n-expert to keep its own experts"
        )
    config = replace(dense.config, **experts)
    if config.top_k < 2 or config.hidden != config.inner:
        raise ValueError(
            "upcycled: expected top_k >= 2, so that weights add up to 1, and experts as wide as "
            f"the MLP, got top_k={config.top_k} expert_hidden={config.expert_hidden}; change them, "
            "or drop --init-from"
        )
    model = GPT(config, seed=seed).to(next(dense.parameters()).dtype)
    given = dict(dense.named_parameters())
    for name, p in model.named_parameters():
        if name in given:  # for experts the MLP's, broadcast to each
            p.copy_(given[name])
    return model
