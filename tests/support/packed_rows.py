"""Rows of a batch as if documents were packed into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def positions_of(cell: Any, x: Tensor, key: Tensor) -> dict[str, Tensor]:
    """The argument positions of a model's forward; {} for a cell without documents.

    One begins with each row and at some tokens inside, drawn for each row by itself: key names the
    step and the first row's number.
    """
    if not cell.documents:
        return {}
    seed, first = key.tolist()
    rows = []
    for row in range(first, first + len(x)):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        begins = torch.rand(x.shape[1], generator=generator) < 0.3
        begins[0] = True
        places = torch.arange(x.shape[1])
        rows.append(places - torch.where(begins, places, 0).cummax(0).values)
    return {"positions": torch.stack(rows)}
