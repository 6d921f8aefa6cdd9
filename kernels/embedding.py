"""Token plus position embedding, with dropout."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.philox import Rng, dropout


def embedding(
    idx: Tensor,
    wte: Tensor,
    wpe: Tensor | None = None,
    *,
    first_position: int = 0,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Tensor:
    """dropout(wte[idx] + wpe[first_position : first_position + T]): idx [B, T] -> [B, T, C]."""
    if idx.device.type == "cpu" and idx.numel():
        low, high = int(idx.min()), int(idx.max())
        if low < 0 or high >= wte.shape[0]:
            raise ValueError(
                f"embedding: expected token ids in [0, {wte.shape[0]}), got id="
                f"{low if low < 0 else high}; tokenize with the model's own tokenizer"
            )
    x = F.embedding(idx, wte)
    if wpe is not None:
        x = x + wpe[first_position : first_position + idx.shape[1]]
    return dropout(x, dropout_p, rng)
