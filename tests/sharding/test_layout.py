"""Buckets and shards: arithmetic, checked on random models without any rank."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastpar.settings.model import GPTConfig
from fastpar.sharding.layout import (
    ALIGN,
    ParamSpec,
    build_layout,
    default_bucket_mb,
    inventory,
    parameter_names,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

specs_of_a_model = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 4096, 50257])),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=40,
).map(lambda rows: [ParamSpec((f"p{i}",), (n,), d) for i, (n, d) in enumerate(rows)])
layouts = st.fixed_dictionaries(
    {
        "n_shards": st.integers(1, 9),
        "bucket_bytes": st.sampled_from([1, 1000, 4096, 1e5, float("inf")]),
        "first_bucket_bytes": st.sampled_from([1, 500, 1e5]),
        "grad_dtype": st.sampled_from([None, torch.float32]),
        "flags": st.booleans(),
    }
)


def bytes_of(layout, options, i):
    """What parameter i adds to its bucket."""
    spec = layout.slots[i].spec
    return -(-spec.numel // ALIGN) * ALIGN * (options["grad_dtype"] or spec.dtype).itemsize


def check_places(layout, specs, options):
    """Every parameter has one aligned place; nothing overlaps; buckets are covered."""
    assert sorted(slot.registered for slot in layout.slots) == list(range(len(specs)))
    for i, slot in enumerate(layout.slots):
        bucket = layout.buckets[slot.bucket]
        assert slot.spec is specs[slot.registered]
        assert slot.start % ALIGN == 0
        assert slot.stop - slot.start == slot.spec.numel
        assert i in bucket.slots
        assert bucket.dtype == slot.spec.dtype
    for bucket in layout.buckets:
        end = 0
        for i in bucket.slots:
            assert end <= layout.slots[i].start < end + ALIGN
            end = layout.slots[i].stop
        assert end <= bucket.used_start < end + ALIGN
        end = bucket.used_start + (len(bucket.slots) if options["flags"] else 0)
        assert end <= bucket.numel < end + options["n_shards"] * ALIGN


def check_shards(layout, specs, options):
    """Ranks own equal aligned slices; pieces of a parameter follow each other."""
    ranks = range(options["n_shards"])
    for bucket in layout.buckets:
        shards = [bucket.shard(rank) for rank in ranks]
        assert shards[0][0] == 0
        assert shards[-1][1] == bucket.numel
        assert all(a[1] == b[0] for a, b in pairwise(shards))
        assert {stop - start for start, stop in shards} == {bucket.shard_numel}
        assert all(start % ALIGN == 0 for start, _ in shards)
    for i, slot in enumerate(layout.slots):
        pieces = [layout.piece(i, rank) for rank in ranks]
        owned = [piece for piece in pieces if piece[0] < piece[1]]
        assert sum(stop - start for start, stop in pieces) == slot.spec.numel
        assert all(a[1] == b[0] for a, b in pairwise(owned))
        assert all(start % ALIGN == 0 for start, _ in owned)
        for rank, (start, stop) in enumerate(pieces):
            first, last = layout.buckets[slot.bucket].shard(rank)
            assert start == stop or first <= slot.start + start < slot.start + stop <= last


def check_order(layout, specs, options):
    """Reverse registration; buckets follow their last parameter, are full but not overfull."""
    last = [layout.slots[b.slots[-1]].registered for b in layout.buckets]
    assert last == sorted(last, reverse=True)
    assert [b.index for b in layout.buckets] == list(range(len(layout.buckets)))
    assert all(b.unit == -1 for b in layout.buckets)
    for dtype in DTYPES:
        order = [slot.registered for slot in layout.slots if slot.spec.dtype == dtype]
        assert order == sorted(order, reverse=True)
        buckets = [b for b in layout.buckets if b.dtype == dtype]
        for k, bucket in enumerate(buckets):
            cap = options["bucket_bytes"] if k else options["first_bucket_bytes"]
            sizes = [bytes_of(layout, options, i) for i in bucket.slots]
            assert sum(sizes) <= cap * 9 / 8 or sum(sizes[:-1]) < cap / 4
            if k + 1 < len(buckets):
                following = bytes_of(layout, options, buckets[k + 1].slots[0])
                assert sum(sizes) >= cap / 4
                assert sum(sizes) + following > cap * 9 / 8


@settings(max_examples=40)
@given(specs_of_a_model, layouts)
def test_any_model(specs, options):
    layout = build_layout(specs, **options)
    for check in (check_places, check_shards, check_order):
        check(layout, specs, options)


@settings(max_examples=30)
@given(specs_of_a_model, layouts, st.integers(1, 5), st.integers(1, 9))
def test_a_bucket_belongs_to_one_unit_and_ends_with_it(specs, options, n_units, run):
    """Units as runs of parameters, and a root unit (0) in between."""
    unit_of = [i // run % n_units for i in range(len(specs))]
    layout = build_layout(specs, unit_of=unit_of, **options)
    small = options["first_bucket_bytes"] / 4
    for bucket in layout.buckets:
        places = [layout.slots[i].registered for i in bucket.slots]
        assert {unit_of[i] for i in places} == {bucket.unit}
        size = 0
        for i, following, place in zip(bucket.slots, places[1:], places, strict=False):
            size += bytes_of(layout, options, i)
            between = [j for j in range(following, place) if specs[j].dtype == bucket.dtype]
            if any(unit_of[j] != bucket.unit for j in between):
                assert size < small


def test_padding_of_gpt2_is_small_and_its_embedding_has_its_own_bucket():
    from fastpar.models.gpt import GPT

    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt2"))
    names = parameter_names(model)
    specs = [ParamSpec(n, tuple(p.shape), p.dtype) for p, n in names.items()]
    numel = sum(spec.numel for spec in specs)
    for n_shards in (1, 2, 8, 64):
        layout = build_layout(specs, n_shards=n_shards)
        assert sum(b.numel for b in layout.buckets) < 1.003 * numel
        last = layout.buckets[-1]
        assert [layout.slots[i].spec.names[0] for i in last.slots] == ["wte.weight"]


def test_the_default_cap_grows_with_the_ranks_and_with_the_speed_of_the_link():
    caps = [default_bucket_mb(8, link) for link in ("gloo", "shm", "nccl")]
    assert caps == sorted(caps)
    assert caps[0] < caps[2]
    assert default_bucket_mb(2, "nccl") == default_bucket_mb(8, "nccl")
    assert default_bucket_mb(64, "nccl") == 8 * default_bucket_mb(8, "nccl")
    assert default_bucket_mb(16384, "nccl") == default_bucket_mb(64, "nccl") == 200.0


def test_names_of_tied_parameters_and_what_ranks_must_share():
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    model["b"].weight = model["a"].weight
    names = list(parameter_names(model).values())
    assert names == [("a.weight", "b.weight"), ("a.bias",), ("b.bias",)]
    model = nn.BatchNorm1d(3, affine=True)
    model.bias.requires_grad_(False)
    assert inventory(model) == [
        "parameter weight [3] torch.float32 requires_grad=True",
        "parameter bias [3] torch.float32 requires_grad=False",
        "buffer running_mean [3] torch.float32",
        "buffer running_var [3] torch.float32",
        "buffer num_batches_tracked [] torch.int64",
    ]
