"""Which combinations of parameters `make test` runs, of more than it has time for."""

from itertools import combinations, product

import pytest


def cells(*axes):
    """Every combination of the axes' values; those that no new pair of values needs are slow.

    Two values that go wrong only together are so met in `make test`, in fewer cells.
    """
    places = list(product(*(range(len(axis)) for axis in axes)))
    wanted = {pair for place in places for pair in _pairs(place)}
    chosen = set()
    while wanted:
        best = max(places, key=lambda place: len(wanted & _pairs(place)))
        chosen.add(best)
        wanted -= _pairs(best)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=[] if place in chosen else [pytest.mark.slow],
        )
        for place in places
    ]


def _pairs(place):
    return set(combinations(enumerate(place), 2))
