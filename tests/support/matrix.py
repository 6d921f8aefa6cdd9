"""Cells of a test's matrix: enough of them in the default run, all of them in the slow one."""

import itertools

import pytest


def cells(*axes, together=2):
    """Every combination of the axes' values; those that show nothing new are slow.

    Args:
        axes: lists of values, or dicts of id -> value.
        together: a combination stays in the default run if so many of its values (1 or 2) have not
            been seen together in one before it.
    """
    seen, found = set(), []
    axes = [axis if isinstance(axis, dict) else {str(v): v for v in axis} for axis in axes]
    for ids in itertools.product(*axes):
        parts = set(itertools.combinations(enumerate(ids), together))
        marks = [pytest.mark.slow] if parts <= seen else []
        seen |= parts
        values = [axis[i] for axis, i in zip(axes, ids)]
        found.append(pytest.param(*values, id="-".join(ids), marks=marks))
    return found
