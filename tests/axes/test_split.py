"""Cuts by cost: the best of all ways to cut, found by trying each."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpar.axes.pipeline.schedules import cut


def stage_costs(costs, counts):
    ends = [0, *itertools.accumulate(counts)]
    ends = [0, *(end + 1 for end in ends[1:-1]), len(costs)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9), st.sampled_from([1, 7])
)
def test_no_other_cut_is_better(costs, n_stages, head):
    costs = [0, *costs, head]
    n = len(costs) - 2
    n_stages = min(n_stages, n + 2)
    inner = n_stages - 2
    ways = [
        [n] if n_stages == 1 else [b - a for a, b in itertools.pairwise([0, *ends, n])]
        for ends in itertools.combinations_with_replacement(range(n + 1), n_stages - 1)
    ]
    ways = [way for way in ways if all(way[1 : 1 + max(0, inner)])]

    def order(way):
        each = stage_costs(costs, way)
        return max(each), sum(x * x for x in each)

    found = cut(costs, n_stages)
    assert len(found) == n_stages
    assert sum(found) == n
    assert all(found[1:-1])
    assert order(found) == min(map(order, ways))


@pytest.mark.parametrize(
    ("n_layer", "head", "n_stages", "expected"),
    [
        (12, 4.91, 2, [8, 4]),
        (12, 4.91, 4, [4, 4, 4, 0]),  # the head alone
        (48, 2.49, 4, [12, 13, 13, 10]),
        (48, 2.49, 1, [48]),
    ],
)
def test_the_shapes_of_gpt2(n_layer, head, n_stages, expected):
    assert cut([0.1, *[1.0] * n_layer, head], n_stages) == expected


def test_more_stages_than_parts_are_refused():
    with pytest.raises(ValueError, match=r"cut: expected 1 to 4 stages, .* n_stages=5; choose"):
        cut([0, 1, 1, 5], 5)
