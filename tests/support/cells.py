"""Selects combinations of values that `make test` runs; the others are slow."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations, product

import pytest
import torch


def slow(*values):
    """A value of parametrize that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def few(candidates, groups, effort=lambda candidate: 1):
    """The fewest candidates that together have every group; groups(candidate) is a set. Of two
    that bring as many groups it takes the one of less effort."""
    of = {candidate: groups(candidate) for candidate in candidates}
    wanted = set().union(*of.values())
    chosen = []
    while wanted:
        chosen.append(max(of, key=lambda one: len(wanted & of[one]) / effort(one)))
        wanted -= of[chosen[-1]]
    return chosen


def cells(*axes, strength=2):
    """Every combination of the axes' values; those that no new pair of values needs are slow.

    `make test` so finds two values that fail only together, in fewer cells. With
    strength=1 each value occurs once: for what is slow to compute, such as interpreted kernels.
    An axis is a list, or a dict of id -> value.
    """
    with_ids = any(isinstance(axis, dict) for axis in axes)
    rows = [list(axis.items() if isinstance(axis, dict) else zip(axis, axis)) for axis in axes]
    places = list(product(*(range(len(row)) for row in rows)))
    chosen = few(places, lambda place: set(combinations(enumerate(place), strength)))
    found = []
    for place in places:
        names, values = zip(*(row[i] for row, i in zip(rows, place, strict=True)), strict=True)
        marks = [] if place in chosen else [pytest.mark.slow]
        name = "-".join(map(str, names)) if with_ids else None
        found.append(pytest.param(*values, id=name, marks=marks))
    return found


def covering(strength, *axes):
    """parametrize by cells() of these axes, each (names, values) as parametrize has them."""
    names = [n for of_axis, _ in axes for n in ([of_axis] if isinstance(of_axis, str) else of_axis)]
    rows = [
        [(value,) if isinstance(of_axis, str) else tuple(value) for value in values]
        for of_axis, values in axes
    ]
    found = [
        pytest.param(*chain.from_iterable(cell.values), marks=cell.marks)
        for cell in cells(*rows, strength=strength)
    ]
    return pytest.mark.parametrize(names, found)


def sweep(names: str | Sequence[str], values: Iterable) -> Callable:
    """pytest.mark.parametrize as a loop inside one test, for what takes milliseconds.

    Each value starts from the same seed, and a failure names the value. Fixtures are made once.
    """
    names = [names] if isinstance(names, str) else list(names)
    values = list(values)

    def decorate(test):
        parameters = inspect.signature(test).parameters
        assert set(names) <= parameters.keys(), names

        @functools.wraps(test)
        def loop(**fixtures):
            for value in values:
                given = dict(zip(names, [value] if len(names) == 1 else value, strict=True))
                torch.manual_seed(0)
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    raise AssertionError(f"with {given}: {error}") from error

        rest = [p for name, p in parameters.items() if name not in names]
        loop.__signature__ = inspect.Signature(rest)  # what pytest passes: fixtures
        return loop

    return decorate


@functools.cache
def torch_attends(dtype):
    """Whether torch's own attention runs on this CPU: made to use AVX2 where there is AMX, torch
    2.13 raises in 16 bits."""
    x = torch.ones(1, 1, 512, 64, dtype=dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError:
        return False
    return True
