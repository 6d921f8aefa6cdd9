"""Placements: slices of every rank, joined, are the whole tensor again, along any axes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastpar.sharding.placements import (
    HOLE,
    Partial,
    Placement,
    Replicate,
    Shard,
    check_cover,
    runs_of_placement,
)


def round_trip(state, whole, ranks):
    slices = [state.cut(whole, rank, ranks) for rank in range(ranks)]
    shape = state.local_shape(whole.shape, ranks)
    assert all(x.shape == shape and x.is_contiguous() for x in slices)
    joined = state.join(slices, whole.shape)
    assert joined.dtype == whole.dtype
    assert torch.equal(joined, whole)
    return slices


@given(
    dim=st.integers(0, 2),
    ranks=st.integers(1, 7),
    groups=st.integers(1, 4),
    each=st.integers(0, 3),
    others=st.tuples(st.integers(0, 3), st.integers(1, 5)),
    transposed=st.booleans(),
)
def test_slices_joined_are_the_whole(dim, ranks, groups, each, others, transposed):
    shape = list(others)
    shape.insert(dim, ranks * groups * each)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    if transposed:
        whole = whole.mT.contiguous().mT
    round_trip(Shard(dim, groups=groups), whole, ranks)


@given(
    dim=st.integers(0, 1),
    ranks=st.integers(1, 7),
    pad_to=st.integers(1, 9),
    size=st.integers(1, 40),
)
def test_padded_slices_joined_are_the_whole(dim, ranks, pad_to, size):
    whole = 1 + torch.arange(3 * size).view((size, 3) if dim == 0 else (3, size))
    state = Shard(dim, pad_to=pad_to)
    slices = round_trip(state, whole, ranks)
    local = state.local_size(size, ranks)
    assert local % pad_to == 0
    assert 0 <= local * ranks - size < ranks * pad_to
    padded = torch.cat(slices, dim)
    assert not padded.narrow(dim, size, local * ranks - size).any()


def test_fused_qkv_gives_each_rank_its_heads():
    """Two heads of two features: q, k and v are 0..3, 10..13 and 20..23."""
    whole = torch.cat([torch.arange(4), 10 + torch.arange(4), 20 + torch.arange(4)])
    state = Shard(0, groups=3)
    assert state.cut(whole, 0, 2).tolist() == [0, 1, 10, 11, 20, 21]
    assert state.cut(whole, 1, 2).tolist() == [2, 3, 12, 13, 22, 23]


def test_a_vocabulary_of_gpt2_on_eight_ranks():
    """The last rank's slice is mostly padding, and a small vocabulary leaves ranks nothing else."""
    assert Shard(0, pad_to=128).local_size(50257, 8) == 6400
    small = [Shard(0, pad_to=4).cut(torch.arange(1, 7), rank, 4).tolist() for rank in range(4)]
    assert small == [[1, 2, 3, 4], [5, 6, 0, 0], [0] * 4, [0] * 4]


def test_a_cut_is_a_copy():
    whole = torch.zeros(4, 2)
    for state in (Shard(0), Shard(1), Shard(0, groups=2), Shard(0, pad_to=4)):
        state.cut(whole, 0, 2).fill_(1.0)
    assert not whole.any()


def test_one_rank_has_everything():
    whole = torch.arange(12).view(3, 4)
    for state in (Shard(0), Shard(1), Shard(0, groups=3), Shard(1, pad_to=2)):
        assert torch.equal(state.cut(whole, 0, 1), whole)


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


def test_states_are_values():
    """Two modules that share a parameter may both declare it (declared.py compares)."""
    assert Shard(0) == Shard(0)
    assert Shard(0) != Shard(1)
    assert Partial() == Partial()
    assert Partial() != Replicate()


AXES = ("replicas", "dp", "cp", "ep", "tp")
SHARDS = st.one_of(
    st.builds(Shard, st.integers(0, 1), groups=st.integers(1, 2)),
    st.builds(Shard, st.integers(0, 1), pad_to=st.integers(1, 3)),
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

    counted = torch.cat(
        [local[tuple(at.values())].flatten() for at in places if placement.counts(at)]
    )
    assert sorted(counted[counted > 0].tolist()) == whole.flatten().tolist()

    for at in places:
        runs, mine = runs_of_placement(placement, shape, at), local[tuple(at.values())].flatten()
        indices = [
            1 + run.start + i * run.stride + j if run.start != HOLE else 0
            for run in runs
            for i in range(run.count)
            for j in range(run.length)
        ]
        assert indices == mine.tolist()
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
