"""fastpar.observe.strategies by the names of bench's rows; the error of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from fastpar.observe import strategies
from fastpar.observe.strategies import STRATEGIES, Contender, ModelFactory, Settings

TITLES = {strategy.title: name for name, strategy in STRATEGIES.items()}
SINGLE, DDP = (STRATEGIES[name].title for name in (strategies.SINGLE, strategies.DDP))


def build(title: str, make: ModelFactory, settings: Settings | None = None) -> Contender:
    """The contender of that row, on this rank. Ranks: all, with the same arguments."""
    return strategies.build(TITLES.get(title, title), make, settings)


def update_error(
    weights: Iterator[tuple[str, Tensor]],
    exact: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
) -> float:
    """|w - exact| / |exact - start| over all tensors together, taken one after another."""
    wrong = moved = 0.0
    seen = set()
    for name, value in weights:
        there = value.double()[: len(exact[name])]  # without the rows that fastpar pads
        wrong += float((there - exact[name]).square().sum())
        moved += float((exact[name] - start[name]).double().square().sum())
        seen.add(name)
    if seen != set(exact):
        raise ValueError(
            f"update_error: expected the tensors {sorted(exact)}, got names={sorted(seen)}; "
            "compare models of one shape"
        )
    return (wrong / moved) ** 0.5
