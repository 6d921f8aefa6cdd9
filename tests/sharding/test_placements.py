"""Placements and runs of indices: slices of every rank, joined, are the whole tensor again."""

import itertools

import pytest
import torch
from cells import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import indices

from fastpar.sharding.placements import (
    HOLE,
    Partial,
    Placement,
    Replicate,
    Run,
    Shard,
    check_cover,
    cut_runs,
    intervals,
    numel_of,
    overlaps,
    runs_of_placement,
    runs_of_slice,
    share_of,
    whole_run,
)


def test_heads_and_vocabularies_by_hand():
    """Two heads of two features: q, k and v are 0..3, 10..13 and 20..23. On eight ranks the last
    slice of GPT-2's vocabulary is mostly padding, and a small one leaves ranks nothing else."""
    whole = torch.cat([torch.arange(4), 10 + torch.arange(4), 20 + torch.arange(4)])
    parts = [Shard(0, groups=3).cut(whole, rank, 2).tolist() for rank in range(2)]
    assert parts == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]
    assert Shard(0, pad_to=128).local_size(50257, 8) == 6400
    small = [Shard(0, pad_to=4).cut(torch.arange(1, 7), rank, 4).tolist() for rank in range(4)]
    assert small == [[1, 2, 3, 4], [5, 6, 0, 0], [0] * 4, [0] * 4]


def test_a_cut_is_a_copy_and_one_rank_has_everything():
    whole = torch.arange(24).view(6, 4)
    for state in (Shard(0), Shard(1), Shard(0, groups=3), Shard(1, pad_to=2)):
        assert torch.equal(state.cut(whole, 0, 1), whole)
        slices = [state.cut(whole.mT.contiguous().mT, rank, 2) for rank in range(2)]
        assert all(x.shape == state.local_shape(whole.shape, 2) for x in slices)
        assert all(x.is_contiguous() for x in slices)
        assert torch.equal(state.join(slices, whole.shape), whole)
        state.cut(whole, 0, 2).fill_(-1)
    assert (whole >= 0).all()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (Shard(0), r"dimension 0 of size 6 does not divide by 4"),
        (Shard(1, groups=3), r"dimension 1 of size 8 does not divide by 3 groups of 4"),
        (Shard(2), r"there is no dimension 2 in \[6, 8\]"),
    ],
)
def test_what_does_not_split(state, message):
    for call in (
        lambda: state.local_shape(torch.Size([6, 8]), 4),
        lambda: state.cut(torch.zeros(6, 8), 0, 4),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    # States are values: two modules that share a parameter may both declare it.
    assert state == Shard(state.dim, groups=state.groups)
    assert state not in (Shard(3), Partial(), Replicate())


AXES = ("replicas", "dp", "cp", "ep", "tp")
SHARDS = st.one_of(
    st.builds(Shard, st.integers(0, 1), groups=st.integers(1, 3)),
    st.builds(Shard, st.integers(0, 1), pad_to=st.integers(1, 4)),
)
STATES = st.one_of(SHARDS, st.just(Replicate()), st.just(Partial()))


@given(
    states=st.dictionaries(st.sampled_from(AXES), STATES, max_size=4),
    counts=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    data=st.data(),
)
def test_any_axes_against_brute_force(states, counts, data):
    """Slices, index runs and the norm's mask of every rank of a mesh, against the whole tensor."""
    sizes = dict(zip(AXES, counts))
    placement = Placement(states, sizes)
    shape = [1, 1]
    for axis, state in states.items():
        if isinstance(state, Shard) and state.pad_to is None:
            shape[state.dim] *= sizes[axis] * state.groups
    # A cut that does not divide follows only cuts that do.
    cuts = [s for s, _, _ in placement.shard_steps()]
    for dim in range(2):
        along = [s for s in cuts if s.dim == dim]
        if all(s.pad_to is not None for s in along):
            shape[dim] = data.draw(st.integers(1, 13))
        elif any(s.pad_to is not None for s in along):
            return
    whole = 1 + torch.arange(shape[0] * shape[1]).view(shape)
    places = [dict(zip(AXES, at)) for at in itertools.product(*map(range, counts))]
    local = {tuple(at.values()): placement.cut(whole, at) for at in places}
    assert {x.shape for x in local.values()} == {placement.local_shapes(shape)[-1]}

    counted = torch.cat([local[tuple(x.values())].flatten() for x in places if placement.counts(x)])
    assert sorted(counted[counted > 0].tolist()) == whole.flatten().tolist()

    for at in places:
        runs, mine = runs_of_placement(placement, shape, at), local[tuple(at.values())].flatten()
        assert [0 if i == HOLE else 1 + i for i in indices(runs)] == mine.tolist()
        same = [x for x in places if all(x[a] == at[a] for a in placement.gather_axes)]
        assert placement.copy_of(at) == (same.index(at), len(same))
        if placement.copy_of(at)[0] == 0:
            slices = [x for x in places if placement.copy_of(x)[0] == 0]
            joined = placement.join([local[tuple(x.values())] for x in slices], shape)
            assert torch.equal(joined, whole)
    owners = [runs_of_placement(placement, shape, at) for at in places if placement.counts(at)]
    assert check_cover(owners, whole.numel()) is None
    summed = {axis for axis, state in states.items() if isinstance(state, Partial)}
    assert set(placement.reduce_axes) == summed


CUTS = [
    (Shard(0), (8, 6)), (Shard(1), (4, 8)), (Shard(1), (3, 8, 5)), (Shard(0, groups=3), (24, 5)),
    (Shard(1, groups=2), (3, 16)), (Shard(0, pad_to=4), (10, 3)), (Shard(0, pad_to=4), (3, 2)),
    (Shard(1, pad_to=4), (2, 10)), (Shard(0), (4,)),
]  # fmt: skip


@settings(max_examples=100)
@given(cut=st.sampled_from(CUTS), data=st.data())
def test_a_cut_of_a_piece_is_a_cut_of_its_indices_and_overlaps_copy_what_both_have(cut, data):
    state, shape = cut
    runs = runs_of_slice(state, shape, data.draw(st.integers(0, 1)), 2)
    n = numel_of(runs)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert indices(cut_runs(runs, start, stop)) == indices(runs)[start:stop]
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


@sweep(
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


@sweep("numel", [0, 1, 255, 4096, 12289, 100_000])
def test_copies_share_out_a_piece(numel):
    for copies, index in itertools.product((1, 2, 3, 8), (0, 1, 7)):
        parts = [share_of(numel, copy, copies, index) for copy in range(copies)]
        assert sorted(i for part in parts for i in range(*part)) == list(range(numel))
        assert all(start % 256 == 0 for start, stop in parts if start < stop)
        if numel >= 4096 * copies:
            assert max(b - a for a, b in parts) <= -(-numel // copies) + 256
