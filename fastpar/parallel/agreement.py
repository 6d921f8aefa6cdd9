"""What the ranks of a model agree on outside of a step: numbers, and what went wrong where."""

from __future__ import annotations

import torch

from fastpar.parallel.engine import Engine

_TEXT_BYTES = 2048


def everyone(engine: Engine | None, mine: float) -> list[float]:
    """A number of every rank, on all of them, in rank order. Ranks: all."""
    if engine is None:
        return [mine]
    mesh = engine.mesh
    values = torch.zeros(mesh.world_size, dtype=torch.float64, device=mesh.device)
    values[mesh.rank] = mine
    return engine.all_reduce_scalars(values).tolist()


def text_of_main(engine: Engine | None, text: str) -> str:
    """What rank 0 says, on every rank. Ranks: all."""
    if engine is None:
        return text
    return _texts(engine, text if engine.mesh.is_main else "").get(0, "")


def everyones_errors(engine: Engine | None, mine: str | None) -> dict[int, str]:
    """Rank -> what went wrong there, of the ranks that have something to say. Ranks: all.

    Wire: 8 bytes a rank; 16 kB more where there is an error.
    """
    if not any(everyone(engine, float(mine is not None))):
        return {}
    return {0: str(mine)} if engine is None else _texts(engine, mine or "")


def _texts(engine: Engine, mine: str) -> dict[int, str]:
    mesh = engine.mesh
    rows = torch.zeros(mesh.world_size, _TEXT_BYTES, dtype=torch.float64)
    raw = mine.encode()[:_TEXT_BYTES]
    rows[mesh.rank, : len(raw)] = torch.tensor(list(raw), dtype=torch.float64)
    sums = engine.all_reduce_scalars(rows.to(mesh.device)).to("cpu", torch.uint8).numpy()
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in sums]
    return {rank: text for rank, text in enumerate(texts) if text}
