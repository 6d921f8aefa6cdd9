"""What a GPT's block has behind its attention: an MLP, or experts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from fastpar.experts.balance import Losses
from fastpar.experts.mixture import Experts
from fastpar.kernels import bias_gelu
from fastpar.models.block import block_parts
from fastpar.models.parts import Weights, fill, states_of
from fastpar.settings.config import GPTConfig
from fastpar.sharding.placements import State
from fastpar.tensor.functional import TensorParallel, column_linear, row_linear


class MLP(nn.Module):
    """c_proj(gelu(c_fc(y)))."""

    tp: TensorParallel | None = None
    c_fc: Weights
    c_proj: Weights

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        fill(self, block_parts(), config, within="mlp.")

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return states_of(block_parts(), self.config, tp, within="mlp.")

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
