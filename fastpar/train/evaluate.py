"""The validation loss of a model that ranks share.

[Note: who forwards] At stage 3 a forward gathers weights, so all ranks forward together: a rank
whose share of the windows is used up goes through the model once more for nothing. Rows and depth
of a grid share out each batch, which is filled up with windows that do not count.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fastpar.data.batches import eval_batches
from fastpar.data.sources import Tokens
from fastpar.models.gpt import GPT
from fastpar.parallel.engine import Engine
from fastpar.parallel.pipeline import pipeline_loss


def validation_loss(
    model: GPT, engine: Engine, tokens: Tokens, *, rows: int, block_size: int, n_batches: int
) -> float:
    """Mean loss over the first n_batches batches of windows of the tokens, or as many as there are.

    Args:
        engine: of the model.
        rows: windows of a batch; each dp rank takes every dp_size-th batch.
    Ranks: all of the model's.
    """
    mesh = engine.mesh
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    batches = eval_batches(
        tokens,
        batch_size=rows,
        block_size=block_size,
        n_batches=n_batches,
        rank=mesh.dp_rank,
        world_size=mesh.dp_size,
        device=mesh.device,
    )
    windows = min((len(tokens) - 1) // block_size, n_batches * rows)
    sharing = mesh.size("depth", "rows")
    nothing = torch.zeros(sharing, block_size, dtype=torch.int64, device=mesh.device)
    with torch.no_grad():
        for _ in range(math.ceil(windows / (rows * mesh.dp_size))):
            x, y = next(batches, (nothing, None))  # see [Note: who forwards]
            missing = -len(x) % sharing
            if missing and y is not None:
                total[1] -= missing * block_size
                x, y = F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, 0, 0, missing), value=-100)
            if engine.shards.stages is not None:
                loss = pipeline_loss(model, x, x if y is None else y, reduction="sum")
            else:
                loss = model(x, x if y is None else y, reduction="sum")
            if y is None:
                continue
            total[0] += loss
            total[1] += y.numel()
    loss, count = engine.all_reduce_scalars(total).tolist()
    return loss / count
