"""What `fastpar plan` refuses of its numbers."""

from __future__ import annotations

import difflib
from typing import Any

from fastpar.data.tokenizer import name_for
from fastpar.settings.config import PRESETS
from fastpar.settings.files import check_at_least

_AT_LEAST = {
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "batch_size"), 1),
    **{"gpus": 1, "gpus_per_node": 1, "top": 1, "price": 0},
}


def check_counts(command: Any) -> None:
    """Refuse numbers of a PlanCommand outside their range, and an unknown model."""
    check_at_least("plan", vars(command), _AT_LEAST)
    if not 0 <= command.headroom < 1:
        raise ValueError(
            "plan: expected headroom from 0 to below 1, a part of the memory, got headroom="
            f"{command.headroom}; set --headroom"
        )
    if command.vocab_size is not None:
        try:
            name_for(command.vocab_size)
        except ValueError:
            raise ValueError(
                "plan: expected a vocab_size that a tokenizer of `fastpar train` has, got "
                f"vocab_size={command.vocab_size}; the largest is 1000000, set --vocab-size"
            ) from None
    if command.model not in PRESETS:
        near = difflib.get_close_matches(command.model, PRESETS, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "set --n-layer, --n-head, --n-embd for others"
        )
        raise ValueError(
            f"plan: expected model to be one of {', '.join(PRESETS)}, got model={command.model}; "
            f"{hint}"
        )
    given = {
        "pp": command.pp,
        "tp_grid": command.tp_grid,
        "json": command.json,
        "measure": command.measure or None,
        "fp8": None if command.fp8 == "none" else command.fp8,
        "optimizer": None if command.optimizer == "adamw" else command.optimizer,
    }
    beside = [f"{name}={value}" for name, value in given.items() if value is not None]
    if command.n_expert and beside:
        raise ValueError(
            f"plan: expected no {beside[0].partition('=')[0]} with n_expert={command.n_expert}, "
            f"whose table is of tp, ep, ZeRO and AdamW, got {beside[0]}; leave it out"
        )
