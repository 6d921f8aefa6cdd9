"""layout.py: arithmetic, checked on random models without any rank."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastpar.config import GPTConfig
from fastpar.layout import ALIGN, ParamSpec, build_layout, inventory, parameter_names

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
        "world_size": st.integers(1, 9),
        "bucket_bytes": st.sampled_from([1, 1000, 4096, 1e5, float("inf")]),
        "first_bucket_bytes": st.sampled_from([1, 500, 1e5]),
        "grad_dtype": st.sampled_from([None, torch.float32]),
    }
)


@given(specs_of_a_model, layouts)
def test_every_parameter_has_one_aligned_place(specs, options):
    layout = build_layout(specs, **options)
    assert sorted(slot.registered for slot in layout.slots) == list(range(len(specs)))
    for i, slot in enumerate(layout.slots):
        bucket = layout.buckets[slot.bucket]
        assert slot.spec is specs[slot.registered]
        assert slot.start % ALIGN == 0
        assert slot.stop - slot.start == slot.spec.numel
        assert i in bucket.slots
        assert bucket.dtype == slot.spec.dtype


@given(specs_of_a_model, layouts)
def test_nothing_overlaps_and_buffers_are_covered(specs, options):
    layout = build_layout(specs, **options)
    for dtype, numel in layout.buffer_numel.items():
        end = 0
        for bucket in (b for b in layout.buckets if b.dtype == dtype):
            assert bucket.start == end
            for i in bucket.slots:
                assert end <= layout.slots[i].start < end + ALIGN
                end = layout.slots[i].stop
            assert end <= bucket.used_start < end + ALIGN
            end = bucket.used_start + len(bucket.slots)
            assert end <= bucket.stop < end + options["world_size"] * ALIGN
            end = bucket.stop
        assert end == numel


@given(specs_of_a_model, layouts)
def test_ranks_own_equal_aligned_slices(specs, options):
    layout = build_layout(specs, **options)
    for bucket in layout.buckets:
        shards = [bucket.shard(rank) for rank in range(options["world_size"])]
        assert shards[0][0] == bucket.start
        assert shards[-1][1] == bucket.stop
        assert all(a[1] == b[0] for a, b in pairwise(shards))
        assert len({stop - start for start, stop in shards}) == 1
        assert all(start % ALIGN == 0 for start, _ in shards)


@given(specs_of_a_model, layouts)
def test_order_is_reverse_registration_and_buckets_follow_their_last_parameter(specs, options):
    layout = build_layout(specs, **options)
    for dtype in layout.buffer_numel:
        order = [slot.registered for slot in layout.slots if slot.spec.dtype == dtype]
        assert order == sorted(order, reverse=True)
    last = [layout.slots[b.slots[-1]].registered for b in layout.buckets]
    assert last == sorted(last, reverse=True)
    assert [b.index for b in layout.buckets] == list(range(len(layout.buckets)))


@given(specs_of_a_model, layouts)
def test_a_bucket_is_full_but_not_overfull(specs, options):
    layout = build_layout(specs, **options)

    def n_bytes(i):
        spec = layout.slots[i].spec
        return -(-spec.numel // ALIGN) * ALIGN * (options["grad_dtype"] or spec.dtype).itemsize

    for dtype in layout.buffer_numel:
        buckets = [b for b in layout.buckets if b.dtype == dtype]
        for k, bucket in enumerate(buckets):
            cap = options["bucket_bytes"] if k else options["first_bucket_bytes"]
            size = sum(map(n_bytes, bucket.slots))
            assert size <= cap or len(bucket.slots) == 1
            if k + 1 < len(buckets):
                assert size + n_bytes(buckets[k + 1].slots[0]) > cap


def test_a_small_model_by_hand():
    specs = [
        ParamSpec(("wte.weight", "head.weight"), (10, 7), torch.float32),
        ParamSpec(("h.weight",), (64,), torch.float32),
        ParamSpec(("h.bias",), (1,), torch.float32),
    ]
    layout = build_layout(specs, world_size=2, bucket_bytes=600, first_bucket_bytes=300)
    places = [(s.spec.names[0], s.bucket, s.start, s.stop) for s in layout.slots]
    assert places == [
        ("h.bias", 0, 0, 1),
        ("h.weight", 1, 128, 192),
        ("wte.weight", 2, 256, 326),
    ]
    buckets = [(b.start, b.used_start, b.stop) for b in layout.buckets]
    assert buckets == [(0, 64, 128), (128, 192, 256), (256, 384, 512)]
    assert layout.buffer_numel == {torch.float32: 512}


def test_padding_of_gpt2_is_small_and_its_embedding_has_its_own_bucket():
    from fastpar.model import GPT

    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt2"))
    names = parameter_names(model)
    specs = [ParamSpec(n, tuple(p.shape), p.dtype) for p, n in names.items()]
    for world_size in (1, 2, 8, 64):
        layout = build_layout(specs, world_size=world_size)
        numel = sum(spec.numel for spec in specs)
        assert layout.buffer_numel[torch.float32] < 1.002 * numel
        last = layout.buckets[-1]
        assert [layout.slots[i].spec.names[0] for i in last.slots] == ["wte.weight"]


def test_parameter_names_lists_a_tied_parameter_once_with_all_names():
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    model["b"].weight = model["a"].weight
    names = list(parameter_names(model).values())
    assert names == [("a.weight", "b.weight"), ("a.bias",), ("b.bias",)]


def test_inventory_names_what_ranks_must_share():
    model = nn.BatchNorm1d(3, affine=True)
    model.bias.requires_grad_(False)
    assert inventory(model) == [
        "parameter weight [3] torch.float32 requires_grad=True",
        "parameter bias [3] torch.float32 requires_grad=False",
        "buffer running_mean [3] torch.float32",
        "buffer running_var [3] torch.float32",
        "buffer num_batches_tracked [] torch.int64",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, r"expected world_size >= 1, got world_size=0"),
        ({"bucket_bytes": 0}, r"expected bucket_bytes > 0, got bucket_bytes=0"),
        ({"first_bucket_bytes": -1}, r"expected first_bucket_bytes > 0, got .*=-1"),
        ({"bucket_bytes": float("nan")}, r"expected bucket_bytes > 0, got bucket_bytes=nan"),
    ],
)
def test_bad_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        build_layout([ParamSpec(("p",), (3,), torch.float32)], **options)
