"""GPT-2 as published: learned positions, pre-norm blocks, tanh-GELU, head tied to the embedding.

Shape legend: B batch, T time, C n_embd, H heads, D head dim, F 4*C, V vocabulary (Vp padded).

[Note: delayed residual] A block hands on (x, delta): the residual stream without its MLP's output,
and that output. The next norm adds them, so that everywhere in the network the residual add, its
dropout and the LayerNorm after it are one op (residual_layer_norm).

[Note: padded vocabulary] wte has Vp rows, V rounded up to a multiple of 128 for the head's GEMMs.
Rows [V, Vp) start at 0 and their gradient is exactly 0: no valid id reads them, and
linear_cross_entropy masks their logits. AdamW leaves them at 0 (test_padding_rows_stay_zero).

[Note: dropout sites] A dropout's number goes into its random bits: 0 is the embedding, and layer i
has 3*i + 1 (attention), 3*i + 2 (attention's residual) and 3*i + 3 (the MLP's residual). The key
names the batch's first sample: a sample's masks do not depend on how a batch is cut over ranks.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastpar.config import GPTConfig
from fastpar.kernels import (
    Rng,
    attention_qkvpacked,
    bias_gelu,
    draw_key,
    embedding,
    layer_norm,
    linear,
    linear_cross_entropy,
    residual_layer_norm,
)
from fastpar.split_embedding import head_weight, note_tokens


def dropout_at(site: int, p: float, rng_key: Tensor | None) -> dict[str, Any]:
    """An op's dropout arguments at this site (none without a key); see [Note: dropout sites]."""
    return {} if rng_key is None else {"dropout_p": p, "rng": Rng(rng_key, site)}


class Weights(nn.Module):
    """weight[shape] and, unless bias=False, bias[shape[0]]; the ops of fastpar.kernels use them."""

    def __init__(self, *shape: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, bias={self.bias is not None}"


class LayerNorm(Weights):
    """The norm of x + dropout(delta + delta_bias), and that sum; see [Note: delayed residual]."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd)
        self.eps = config.layer_norm_eps

    def forward(
        self, x: Tensor, delta: Tensor | None, delta_bias: Tensor | None = None, **dropout: Any
    ) -> tuple[Tensor, Tensor]:
        if delta is None:
            return layer_norm(x, self.weight, self.bias, self.eps), x
        return residual_layer_norm(
            delta, x, self.weight, self.bias, x_bias=delta_bias, eps=self.eps, **dropout
        )


class Attention(nn.Module):
    """Causal self-attention, without c_proj's bias: the norm that follows adds it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Weights(3 * config.n_embd, config.n_embd)
        self.c_proj = Weights(config.n_embd, config.n_embd)

    def forward(self, y: Tensor, **dropout: Any) -> Tensor:
        qkv = linear(y, self.c_attn.weight, self.c_attn.bias)  # [B, T, 3*C]
        qkv = qkv.unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, D]
        o = attention_qkvpacked(qkv, causal=True, **dropout)  # [B, T, H, D]
        return linear(o.flatten(2), self.c_proj.weight)  # [B, T, C]


class MLP(nn.Module):
    """c_proj(gelu(c_fc(y)))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Weights(4 * config.n_embd, config.n_embd)
        self.c_proj = Weights(config.n_embd, 4 * config.n_embd)

    def forward(self, y: Tensor) -> Tensor:
        y = bias_gelu(linear(y, self.c_fc.weight), self.c_fc.bias)  # [B, T, F]
        return linear(y, self.c_proj.weight, self.c_proj.bias)  # [B, T, C]


class Block(nn.Module):
    """One layer; see [Note: delayed residual]."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.p, self.site = config.dropout, 3 * layer
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, delta: Tensor | None, rng_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The pair of the layer below -> this one's, [B, T, C] each; delta None: nothing to add.

        Dropout is applied exactly when rng_key is given.
        """
        y, x = self.ln_1(x, delta, **dropout_at(self.site, self.p, rng_key))
        delta = self.attn(y, **dropout_at(self.site + 1, self.p, rng_key))
        y, x = self.ln_2(
            x, delta, self.attn.c_proj.bias, **dropout_at(self.site + 2, self.p, rng_key)
        )
        return x, self.mlp(y)


class GPT(nn.Module):
    """GPT-2 of the given shape.

    Args:
        config: the sizes.
        seed: every weight is drawn from its own generator, seeded by (seed, the parameter's name),
            on the CPU in fp32: its values depend on its shape and n_layer, not on the device, the
            other tensors or the padding of the vocabulary. On the meta device nothing is drawn.
    """

    tied_embedding = "wte.weight"  # see fastpar/split_embedding.py

    def __init__(self, config: GPTConfig, *, seed: int = 0):
        super().__init__()
        self.config = config
        self.wte = Weights(config.padded_vocab_size, config.n_embd, bias=False)
        self.wpe = Weights(config.block_size, config.n_embd, bias=False)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config)
        self._init_weights(seed)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        rng_key: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Loss of `targets`, or logits without them.

        Args:
            idx: [B, T] int64 token ids in [0, vocab_size), 1 <= T <= block_size.
            targets: [B, T] int64; -100 marks positions without a loss.
            rng_key: key of the dropout masks (kernels.make_key); without one, a model in training
                mode draws it from torch's default generator. Without effect in eval mode.
            reduction: of the loss: "mean" over the valid targets or "sum".
        Returns:
            loss: [] fp32, or logits: [B, T, V] in the parameters' dtype (no padding).
        Raises:
            ValueError: a shape or dtype that differs from the above; T > block_size; on CPU also a
                token id outside the vocabulary (on a GPU that is a device-side assert).
        """
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(
                f"GPT: expected targets of idx's shape {list(idx.shape)}, got "
                f"targets.shape={list(targets.shape)}; pass one target a token (-100: none)"
            )
        if not self.training or self.config.dropout == 0.0:
            rng_key = None
        elif rng_key is None:
            rng_key = draw_key(idx.device)
        x = self.features(idx, rng_key)
        if targets is None:
            return self.logits(x)
        return linear_cross_entropy(
            x,
            head_weight(self.wte.weight),
            targets,
            vocab_size=self.config.vocab_size,
            reduction=reduction,
        )

    def features(self, idx: Tensor, rng_key: Tensor | None = None) -> Tensor:
        """[B, T] token ids -> [B, T, C], the head's input; dropout only when rng_key is given."""
        self._check_ids(idx)
        note_tokens(self.wte.weight, idx)
        p, site = self.config.dropout, 3 * self.config.n_layer
        x = embedding(
            idx, self.wte.weight, self.wpe.weight, **dropout_at(0, p, rng_key)
        )  # [B, T, C]
        delta = None
        for block in self.h:
            x, delta = block(x, delta, rng_key)
        y, _ = self.ln_f(x, delta, **dropout_at(site, p, rng_key))
        return y

    def logits(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., V]: the tied head."""
        return linear(x, head_weight(self.wte.weight)[: self.config.vocab_size])

    def num_parameters(self) -> int:
        """Weights of the published architecture: tied head once, vocabulary padding not counted."""
        padding = self.config.padded_vocab_size - self.config.vocab_size
        return sum(p.numel() for p in self.parameters()) - padding * self.config.n_embd

    def flops_per_token(self) -> int:
        """Model FLOPs of forward + backward a token at T = block_size: 6*P + 12*n_layer*T*C.

        Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B (attention without its mask).
        """
        c = self.config
        return 6 * self.num_parameters() + 12 * c.n_layer * c.block_size * c.n_embd

    def _check_ids(self, idx: Tensor) -> None:
        config = self.config
        if idx.dim() != 2 or idx.dtype != torch.int64:
            raise ValueError(
                f"GPT: expected idx as int64 [B, T], got idx.shape={list(idx.shape)}, "
                f"idx.dtype={idx.dtype}; add the batch dimension or convert with .long()"
            )
        if not 1 <= idx.shape[1] <= config.block_size:
            raise ValueError(
                f"GPT: expected 1 <= T <= block_size={config.block_size}, got T={idx.shape[1]}; "
                "crop the context or build the model with a larger block_size"
            )
        valid = (idx >= 0) & (idx < config.vocab_size)
        if torch.compiler.is_compiling() or idx.device.type != "cpu":
            # No wait for the device here; an id within the padding would train its rows.
            torch._assert_async(valid.all(), "GPT: expected token ids below vocab_size")
        elif not valid.all():
            raise ValueError(
                f"GPT: expected token ids in [0, {config.vocab_size}), got "
                f"id={idx[~valid][0].item()}; encode the text with the model's own tokenizer"
            )

    @torch.no_grad()
    def _init_weights(self, seed: int) -> None:
        """Normal(0, 0.02) (wpe 0.01; c_proj 0.02 / sqrt(2 * n_layer)), biases 0, norms 1."""
        if self.wte.weight.is_meta:
            return
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif ".ln_" in f".{name}":
                p.fill_(1.0)
            else:
                std = 0.01 if name == "wpe.weight" else 0.02
                if name.endswith("c_proj.weight"):
                    std /= math.sqrt(2 * self.config.n_layer)
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
                rows = self.config.vocab_size if name == "wte.weight" else p.shape[0]
                values = torch.empty(rows, p.shape[1], dtype=torch.float32, device="cpu")
                p[:rows] = values.normal_(0.0, std, generator=generator)
                p[rows:] = 0.0
