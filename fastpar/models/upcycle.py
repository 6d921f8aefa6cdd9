"""A dense GPT-2 made one with experts, each of which begins as the dense MLP.

Source: Komatsuzaki et al. 2022, arXiv 2212.05055
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastpar.models.gpt import GPT


@torch.no_grad()
def upcycled(dense: GPT, experts: dict[str, Any], *, seed: int = 0) -> GPT:
    """The same function with experts in the place of MLPs: equal ones, and a router drawn by seed.

    A token's weights add up to 1, so at first the loss is that of the dense model, to rounding.

    Args:
        experts: fields of GPTConfig: n_expert, top_k, ...
    Raises:
        ValueError: a model that has experts; top_k below 2, whose one weight is no 1; features of
            an expert that are not those of the MLP.
    """
    if dense.config.n_expert:
        raise ValueError(
            "upcycled: expected a dense model to make experts of, got one with n_expert="
            f"{dense.config.n_expert}; leave --n-expert out: its own experts are kept"
        )
    config = replace(dense.config, **experts)
    if config.top_k < 2 or config.hidden != 4 * config.n_embd:
        raise ValueError(
            "upcycled: expected top_k >= 2, whose weights add up to 1, and experts as wide as the "
            f"MLP, got top_k={config.top_k} expert_hidden={config.expert_hidden}; change them, or "
            "start without --init-from"
        )
    model = GPT(config, seed=seed).to(next(dense.parameters()).dtype)
    given = dict(dense.named_parameters())
    for name, p in model.named_parameters():
        if name in given:  # of an expert's layer the MLP's, for each of them
            p.copy_(given[name])
    return model
