"""Runs of global indices, against plain lists of indices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastpar.sharding.placements import (
    HOLE,
    Run,
    Shard,
    check_cover,
    cut_runs,
    intervals,
    numel_of,
    overlaps,
    runs_of_slice,
    share_of,
    whole_run,
)


def indices(runs):
    """Global index of every element, HOLE where there is none."""
    return [
        HOLE if run.start == HOLE else run.start + i * run.stride + j
        for run in runs
        for i in range(run.count)
        for j in range(run.length)
    ]


STATES = [
    (Shard(0), (8, 6)),
    (Shard(1), (4, 8)),
    (Shard(1), (3, 8, 5)),
    (Shard(0, groups=3), (24, 5)),
    (Shard(1, groups=2), (3, 16)),
    (Shard(0, pad_to=4), (10, 3)),
    (Shard(0, pad_to=4), (3, 2)),
    (Shard(1, pad_to=4), (2, 10)),
    (Shard(0), (4,)),
]
states = pytest.mark.parametrize(("state", "shape"), STATES, ids=str)


@states
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_slice_holds_what_cut_takes(state, shape, ranks):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = []
    for rank in range(ranks):
        runs = runs_of_slice(state, shape, rank, ranks)
        expected = state.cut(whole + 1, rank, ranks).reshape(-1) - 1  # padding is HOLE
        assert indices(runs) == expected.tolist()
        pieces.append(runs)
    assert check_cover(pieces, whole.numel()) is None


@states
@given(data=st.data())
def test_a_cut_of_a_piece_is_a_cut_of_its_indices(state, shape, data):
    runs = runs_of_slice(state, shape, data.draw(st.integers(0, 1)), 2)
    n = numel_of(runs)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert indices(cut_runs(runs, start, stop)) == indices(runs)[start:stop]


@states
@given(data=st.data())
def test_overlaps_copy_what_both_have(state, shape, data):
    mine = runs_of_slice(state, shape, 0, 2)
    start = data.draw(st.integers(0, torch.Size(shape).numel()))
    theirs = cut_runs(whole_run(torch.Size(shape).numel()), start, start + 9)
    a, b = indices(mine), indices(theirs)
    found = {}
    for at, there, n in overlaps(intervals(mine), intervals(theirs)).tolist():
        for i in range(n):
            assert a[at + i] == b[there + i]
            found[at + i] = a[at + i]
    assert found == {i: x for i, x in enumerate(a) if x in set(b)}


@pytest.mark.parametrize(
    ("pieces", "numel", "problem"),
    [
        ([[Run(0, 4)], [Run(4, 4)]], 8, None),
        ([[Run(4, 4)], [Run(0, 2, 2, 2)]], 8, None),
        ([[Run(0, 2, 4, 2)], [Run(2, 2, 4, 2), Run(HOLE, 7)]], 8, None),
        ([], 0, None),
        ([], 3, "no element 0"),
        ([[Run(0, 4)], [Run(5, 3)]], 8, "no element 4"),
        ([[Run(0, 4)], [Run(3, 5)]], 8, "element 3 twice"),
        ([[Run(0, 4)]], 8, "no element 4"),
        ([[Run(0, 9)]], 8, "element 8 of 8"),
    ],
)
def test_what_is_missing_or_twice_is_told(pieces, numel, problem):
    assert check_cover(pieces, numel) == problem


@pytest.mark.parametrize("numel", [0, 1, 255, 4096, 12289, 100_000])
@pytest.mark.parametrize("copies", [1, 2, 3, 8])
@pytest.mark.parametrize("index", [0, 1, 7])
def test_copies_share_out_a_piece(numel, copies, index):
    parts = [share_of(numel, copy, copies, index) for copy in range(copies)]
    covered = sorted(i for part in parts for i in range(*part))
    assert covered == list(range(numel))
    assert all(start % 256 == 0 for start, stop in parts if start < stop)
    if numel >= 4096 * copies:
        assert max(b - a for a, b in parts) <= -(-numel // copies) + 256
