"""The first values of a GPT's weights."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch


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
