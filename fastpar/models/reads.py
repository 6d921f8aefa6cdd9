"""What a model keeps of tokens that it has read, so that generation computes each token once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.settings.config import GPTConfig


class LayerRead:
    """Keys and values of one layer, [B, room, H, D] each; the first `length` tokens are there."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values, self.length = keys, values, 0

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, H, D] of the next T tokens -> those of all tokens until then."""
        start, self.length = self.length, self.length + k.shape[1]
        if self.length > self.keys.shape[1]:
            raise ValueError(
                f"LayerRead: expected at most {self.keys.shape[1]} tokens, got {self.length}; "
                "begin anew with the last tokens"
            )
        self.keys[:, start : self.length] = k
        self.values[:, start : self.length] = v
        return self.keys[:, : self.length], self.values[:, : self.length]


def nothing_read(config: GPTConfig, batch: int, like: Tensor) -> list[LayerRead]:
    """Room for block_size tokens in every layer, 2 * B * block_size * C elements each."""
    shape = (2, batch, config.block_size, config.n_head, config.head_dim)
    return [
        LayerRead(*torch.empty(shape, dtype=like.dtype, device=like.device))
        for _ in range(config.n_layer)
    ]
