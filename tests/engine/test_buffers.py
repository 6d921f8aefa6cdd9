"""bucket.py: one bucket at each stage: where parameters and gradients are, and what is freed."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.collectives import PairwiseSum
from fastpar.engine import bucket as copies_module
from fastpar.engine.bucket import STAGES, BucketGroups, BucketPhase, BucketState, Settings
from fastpar.settings.parallel import Parallel
from fastpar.sharding.layout import ALIGN, ParamSpec, build_layout, parameter_names

CPU = torch.device("cpu")
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
sharded = pytest.mark.parametrize("stage", [1, 2, 3])


class Tied(nn.Module):
    """A tied embedding, a frozen layer, a buffer."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(91, 6)
        self.mlp = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 91, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, idx):
        return self.head(self.frozen(self.mlp(self.wte(idx))) * self.scale)


def flatten(model, stage=0, *, rank=0, n_shards=2, grad_dtype=None, deterministic=False):
    """The buckets of a model, one a dtype, on one rank that never communicates."""
    named = {p: n for p, n in parameter_names(model).items() if p.requires_grad}
    layout = build_layout(
        [ParamSpec(names, tuple(p.shape), p.dtype) for p, names in named.items()],
        n_shards=n_shards if stage else 1,
        bucket_bytes=1e9,
        first_bucket_bytes=1e9,
        grad_dtype=grad_dtype,
        flags=stage == 0,
    )
    asked = Parallel.of(grad_dtype=grad_dtype, deterministic=deterministic)
    settings = Settings(asked, STAGES[stage], layout.n_shards, bucket_mb=1.0)
    params, buckets = list(named), []
    for spec in layout.buckets:
        bucket = BucketState(
            layout,
            spec,
            [params[layout.slots[i].registered] for i in spec.slots],
            settings,
            BucketGroups(),
            rank=rank if stage else 0,
            device=CPU,
        )
        for view, p in zip(bucket.views, bucket.params):
            view.copy_(p.detach())
        bucket.attach()
        buckets.append(bucket)
    return buckets


def one(model, stage=0, **options):
    (bucket,) = flatten(model, stage, **options)
    return bucket


# Parameters


@stages
def test_values_stay_and_parameters_become_views_of_one_memory(stage):
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    bucket = one(model, stage)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.head.weight is model.wte.weight
    for p in bucket.params:
        assert p.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        assert (p.data_ptr() - bucket.flat.data_ptr()) % (ALIGN * 4) == 0
    assert [bucket.name(i) for i in range(3)] == ["mlp.bias", "mlp.weight", "wte.weight"]
    assert all(bucket.is_in_place(i) for i in range(3))
    model.mlp.weight.data = model.mlp.weight.data.clone()
    assert [bucket.is_in_place(i) for i in range(3)] == [True, False, True]


@stages
def test_a_non_contiguous_parameter_becomes_contiguous_with_its_values(stage):
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.arange(15.0).view(3, 5).t())
    one(model, stage)
    assert model.weight.is_contiguous()
    assert model.weight[1, 2] == 11.0


def test_parameters_of_two_dtypes_have_a_bucket_each():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3).bfloat16())
    buckets = flatten(model)
    assert {b.flat.dtype for b in buckets} == {torch.float32, torch.bfloat16}
    assert all(b.grad.dtype == b.flat.dtype for b in buckets)


@sharded
def test_the_shards_of_all_ranks_are_the_bucket(stage):
    models = [Tied() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    buckets = [one(model, stage, rank=r, n_shards=3) for r, model in enumerate(models)]
    assert torch.equal(torch.cat([b.shard for b in buckets]), buckets[0].flat)
    for position, p in enumerate(buckets[0].params):
        pieces = [b.piece(position) for b in buckets]
        assert torch.equal(torch.cat([values for values, _, _ in pieces]), p.flatten())
        at = 0
        for values, grad, start in pieces:
            assert grad is None
            assert start == at or not values.numel()
            at += values.numel()


# Gradients


def backward(model):
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()


@pytest.mark.parametrize("state", ["none", "zeroed", "foreign"])
@stages
def test_take_brings_any_gradient_into_the_bucket(state, stage):
    model = Tied()
    plain = copy.deepcopy(model)
    bucket = one(model, stage)
    if bucket.grad is not None:
        bucket.grad.fill_(float("nan"))
    backward(plain)
    if state == "zeroed" and stage == 0:  # what zero_grad(set_to_none=False) leaves
        for p, view in zip(bucket.params, bucket.grad_views):
            p.grad = view.zero_()
    backward(model)
    if state == "foreign":
        for p in bucket.params:
            p.grad = p.grad.clone()
    for i, p in enumerate(bucket.params):
        bucket.take(i)
        twin = plain.get_parameter(bucket.name(i)).grad
        slot = bucket.slots[i]
        assert torch.equal(bucket.grad[slot.start : slot.stop], twin.flatten())
        assert p.grad is (bucket.grad_views[i] if stage == 0 else None)
        if stage == 0:
            assert torch.equal(bucket.grad_of(i), twin)


def test_a_missing_gradient_is_zero_and_one_that_was_set_by_hand_is_refused():
    model = nn.Linear(3, 2)
    bucket = one(model)
    bias, weight = bucket.params
    bucket.grad.fill_(float("nan"))
    weight.grad = torch.full((2, 3), 5.0)
    with pytest.raises(RuntimeError, match=r"p\.grad of 'weight' as backward left it, got another"):
        bucket.fill_missing(flags=True)
    bucket.take(1)
    assert bucket.fill_missing(flags=True) == [0]
    assert bucket.used().tolist() == [0.0, 1.0]
    assert (bias.grad, weight.grad) == (None, bucket.grad_views[1])
    assert bucket.grad_views[0].tolist() == [0.0, 0.0]
    assert bucket.grad_views[1].tolist() == [[5.0] * 3] * 2
    bucket.adopt(0)
    assert bias.grad is bucket.grad_views[0]
    bucket.zero_grad(True)
    assert (bias.grad, weight.grad) == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@stages
def test_gradients_in_fp32_add_up_in_fp32(dtype, stage):
    model = nn.Linear(3, 2).to(dtype)
    bucket = one(model, stage, grad_dtype=torch.float32)
    if bucket.grad is not None:
        bucket.grad.fill_(float("nan"))
    bias = bucket.params[0]
    for value in (1.0, 2.0**-12):  # lost in 16 bits
        bias.grad = torch.full((2,), value, dtype=dtype)
        bucket.take(0)
        assert bias.grad is None
    assert bucket.fill_missing(flags=stage == 0) == [1]
    assert bucket.grad.dtype == torch.float32
    assert bucket.grad[:2].tolist() == [1.0 + 2.0**-12] * 2
    if stage == 0:
        assert bucket.grad_of(0) is bias.main_grad
    assert hasattr(bias, "main_grad") == (stage == 0)
    bucket.zero_grad(True)
    bias.grad = torch.full((2,), 3.0, dtype=dtype)
    bucket.take(0)
    assert bucket.grad[:2].tolist() == [3.0, 3.0]


class Copies(TorchDispatchMode):
    """The copies of one gradient, and of several at once."""

    def __init__(self):
        super().__init__()
        self.one, self.several = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.one += func is torch.ops.aten.copy_.default
        if func is torch.ops.aten._foreach_copy_.default:
            self.several.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wait_bytes", "one", "several"),
    [(0, 4, []), (1 << 20, 0, [4]), (20, 2, [1, 1]), (40, 0, [3, 1])],
)
@stages
def test_gradients_wait_to_be_copied_together(stage, wait_bytes, one, several, monkeypatch):
    """One launch for many; no more than wait_bytes are kept, and larger ones do not wait."""
    monkeypatch.setitem(copies_module.WAIT_BYTES, "cpu", wait_bytes)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).bfloat16()  # 6, 24, 8, 24 from the last
    (bucket,) = flatten(model, stage, grad_dtype=torch.float32)
    if bucket.grad is not None:
        bucket.grad.fill_(float("nan"))
    bucket.enter(BucketPhase.COLLECTING)
    with Copies() as copies:
        for i, p in enumerate(bucket.params):
            p.grad = torch.full(p.shape, i + 1.0, dtype=p.dtype)
            assert bucket.take(i) == (i == 3)
    assert (copies.one, copies.several) == (one, several)
    for i in range(4):
        assert (bucket.grad_view(i) == i + 1.0).all()


@pytest.mark.parametrize("then", ["mark", "zero", "backward", "missing", "again"])
@stages
def test_no_gradient_waits_longer_than_its_backward(stage, then, monkeypatch):
    """Of a backward that stops, or that uses some parameters only, all that it left is there."""
    monkeypatch.setitem(copies_module.WAIT_BYTES, "cpu", 1 << 20)
    bucket = one(nn.Linear(3, 2).bfloat16(), stage, grad_dtype=torch.float32)
    bias = bucket.params[0]
    bucket.enter(BucketPhase.COLLECTING)
    bias.grad = torch.ones_like(bias)
    bucket.take(0)
    if then == "again":  # adds to what waits
        bias.grad = torch.ones_like(bias)
        bucket.take(0)
    if then == "mark":
        bucket.mark()
    elif then == "zero":
        bucket.zero_grad(False)
        bucket.fill_missing(flags=False)
    elif then == "backward":
        bucket.forget_cleared(None)
    else:
        bucket.fill_missing(flags=False)
    expected = {"zero": 0.0, "again": 2.0}.get(then, 1.0)
    assert bucket.grad[:2].tolist() == [expected] * 2


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_zero_grad_can_keep_gradients_as_zeros(grad_dtype):
    model = nn.Linear(3, 2).bfloat16()
    bucket = one(model, grad_dtype=grad_dtype)
    bias = bucket.params[0]
    bias.grad = torch.ones(2, dtype=torch.bfloat16)
    bucket.take(0)
    bucket.zero_grad(False)
    assert bucket.grad_of(0) is bucket.grad_views[0]
    assert bucket.grad_views[0].tolist() == [0.0, 0.0]
    assert bucket.grad_of(1) is None


def test_fp32_gradients_of_fp32_parameters_stay_in_grad():
    bucket = one(nn.Linear(3, 2), grad_dtype=torch.float32)
    assert not hasattr(bucket.params[0], "main_grad")


def reduce(bucket):
    """What the engine does, without other ranks: this rank's slice is the mean."""
    bucket.fill_missing(flags=False)
    target, own = bucket.target(), slice(*bucket.spec.shard(1))
    bucket.add_reduced(target.copy_(bucket.grad[own]))


@pytest.mark.parametrize("deterministic", [False, True])
@sharded
def test_reductions_add_up_in_the_shard_and_whole_gradients_are_freed(stage, deterministic):
    model = nn.Linear(8, 64)
    bucket = one(model, stage, rank=1, deterministic=deterministic)
    for value in (1.0, 2.0, 4.0):
        for i, p in enumerate(bucket.params):
            p.grad = torch.full_like(p, value)
            bucket.take(i)
        reduce(bucket)
        assert (bucket.grad is None) == (stage >= 2)
    assert bucket.reduced.numel() == bucket.spec.shard_numel
    assert (bucket.piece(1)[1] == 7.0).all()
    bucket.zero_grad(True)
    assert bucket.piece(1)[1] is None


@sharded
def test_marks_say_that_the_gradient_is_elsewhere_and_hear_zero_grad(stage):
    model = nn.Linear(8, 64)
    bucket = one(model, stage, rank=1)
    weight = bucket.params[1]

    def step():
        for i, p in enumerate(bucket.params):
            p.grad = torch.ones_like(p)
            bucket.take(i)
        reduce(bucket)
        bucket.mark()

    step()
    assert weight.grad.isnan().all()
    bucket.marks.lift()
    assert weight.grad is None
    assert (bucket.piece(1)[1] == 1.0).all()  # kept: it goes on
    bucket.mark()
    weight.grad = None  # one of two was cleared by hand
    assert bucket.forget_cleared(None) == {1}
    bucket.marks.lift()
    assert (bucket.piece(1)[1] == 0.0).all()
    bucket.zero_grad(True)
    step()
    model.zero_grad()
    assert bucket.forget_cleared(None) == {0, 1}
    assert bucket.reduced is None


def sparse(p):
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 6), p.shape, check_invariants=True)


def with_graph(p):
    x = torch.ones((), requires_grad=True)
    p.grad = torch.ones(91, 6) * x


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (sparse, r"expected a dense gradient for parameter 'wte\.weight', got layout=torch.sparse"),
        (with_graph, r"expected backward without create_graph, .* parameter 'wte\.weight'"),
    ],
)
@stages
def test_gradients_that_do_not_fit(put, message, stage):
    model = Tied()
    bucket = one(model, stage)
    put(model.wte.weight)
    with pytest.raises(RuntimeError, match=message):
        bucket.take(2)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8])
def test_pairwise_sums_have_the_order_of_the_tree(count):
    """fp32 numbers for which each order has other bits."""
    generator = torch.Generator().manual_seed(count)
    terms = [torch.randn(500, generator=generator) * 10.0**k for k in range(count)]
    total = PairwiseSum()
    for term in terms:
        total.push(term.clone())
    level = list(terms)
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    assert torch.equal(total.total(), level[0])
    total.zero_(slice(0, 100))
    assert (total.total()[:100] == 0).all()
    assert torch.equal(total.total()[100:], level[0][100:])
