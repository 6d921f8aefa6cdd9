"""Where to cut a model, so that the stage with most to do has as little as possible.

cut([embedding, layer, ..., layer, head], 4) -> layers on each stage, as pp_split has them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence


def cut(costs: Sequence[float], n_stages: int) -> list[int]:
    """Layers on each stage: of all ways the one whose slowest stage is fastest, then the most even.

    The first stage has the embedding, the last one the head; each may have no layer besides.

    Args:
        costs: of each part, such as seconds of forward and backward: the embedding, the layers, the
            head.
        n_stages: of all ranks and chunks.
    Raises:
        ValueError: more stages than parts, or fewer than one.
    """
    if not 1 <= n_stages <= len(costs):
        raise ValueError(
            f"cut: expected 1 to {len(costs)} stages, as many as the model has parts, got "
            f"n_stages={n_stages}; choose a smaller pp, or fewer chunks"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    limit, _ = _best(sums, n_stages, max, lambda cost: cost)
    _, ends = _best(sums, n_stages, lambda a, b: a + b, lambda c: c * c if c <= limit else _TOO_BIG)
    counts = [b - a for a, b in itertools.pairwise(ends)]
    counts[0] -= 1  # the embedding
    counts[-1] -= 1  # the head
    return counts


_TOO_BIG = float("inf")


def _best(
    sums: Sequence[float],
    n_stages: int,
    join: Callable[[float, float], float],
    price: Callable[[float], float],
) -> tuple[float, list[int]]:
    """The least price of all stages, joined; the part with which each begins, and the end."""
    n = len(sums) - 1
    best = {end: (price(sums[end]), [0, end]) for end in range(1, n + 1)}
    for stage in range(2, n_stages + 1):
        best = {
            end: min(
                (join(best[start][0], price(sums[end] - sums[start])), [*best[start][1], end])
                for start in range(stage - 1, end)
            )
            for end in range(stage, n + 1)
        }
    return best[n]
