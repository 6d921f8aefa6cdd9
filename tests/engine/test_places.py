"""gradients.py: layers compute weights' gradients where the buckets keep them."""

import contextlib
import copy
import sys

import pytest
import torch
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize, pipeline_step
from fastpar.engine.bucket import BucketPhase, BucketState
from fastpar.engine.engine import Engine
from fastpar.engine.gradients import LEAST_BYTES, LEAST_WIDE_BYTES
from fastpar.kernels import backend, embedding, linear, linear_cross_entropy, make_key
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30, "dropout": 0.1}
PRODUCTS = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
IN_PLACE = {f"h.{i}.{name}.weight" for i in range(2) for name in PRODUCTS}


def withdraw(model):
    """Nobody offers a place any more."""
    for p in model.parameters():
        vars(p).pop("fastpar_place", None)
        vars(p).pop("fastpar_wide_place", None)


def noting_take(bucket, position, given=None, take=BucketState.take):
    """BucketState.take, which notes the gradients that are in their places before it comes."""
    bucket.open_grad()
    grad, view = bucket.params[position].grad, bucket.grad_view(position)
    if grad is not None and grad.data_ptr() == view.data_ptr():
        bucket.noted.add(bucket.name(position))
    return take(bucket, position, given)


def run(offered, stage, how):
    """Gradients of two micro-batches and of the next one; names in place in each of the three."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES))
    if how == "recompute":
        recompute(model, "full")
    options = {"deterministic": how == "deterministic", "bucket_mb": 0.01}
    model = parallelize(model, Mesh(device="cpu"), Parallel.of(zero_stage=stage, **options))
    engine = engine_of(model)
    if not offered:
        withdraw(model)
    grads, in_place = [], []
    for micro in range(3):
        for bucket in engine.buckets:
            bucket.noted = set()
        ids = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(micro))
        with engine.no_sync() if micro == 0 else contextlib.nullcontext():
            model(ids, ids, rng_key=make_key(1, micro)).backward()
        in_place.append(set().union(*(bucket.noted for bucket in engine.buckets)))
        if micro > 0:
            grads.append({n: g.clone() for n, g in named_grads(engine)})
            model.zero_grad()
    return grads, in_place


def named_grads(engine):
    names = {p: b.name(i) for b in engine.buckets for i, p in enumerate(b.params)}
    return [(names[p], g) for p, g in engine.grads()]


@pytest.mark.parametrize("how", ["plain", "deterministic", "recompute"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_have_the_bits_of_copied_ones(stage, how, monkeypatch):
    monkeypatch.setattr(BucketState, "take", noting_take)
    ranks = 1 if stage == 0 else 2
    (old, copied), (new, placed) = (run_ranks(run, ranks, x, stage, how)[0] for x in (False, True))
    for one, other in zip(old, new, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert placed[0] >= IN_PLACE  # the first of a step
    assert placed[2] >= IN_PLACE  # and of the next
    assert not (copied[0] | copied[2]) & IN_PLACE


class Layer(nn.Module):
    """A linear layer of fastpar.kernels, and before it one whose gradient comes first."""

    def __init__(self, times=1):
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.randn(6, 6)), times
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for _ in range(self.times):
            x = linear(x, self.weight).tanh()
        return (x * self.scale).sum()


def managed(layer, **options):
    return parallelize(copy.deepcopy(layer), Mesh(device="cpu"), Parallel.of(**options))


def test_a_weight_that_is_used_twice_gets_the_sum():
    layer, x = Layer(times=3), torch.randn(5, 6)
    model = managed(layer)
    layer(x).backward()
    model(x).backward()
    assert torch.equal(model.weight.grad, layer.weight.grad)


def test_who_asks_autograd_for_a_gradient_owns_it():
    model, x = managed(Layer(), deterministic=True), torch.randn(5, 6)
    _, grad = torch.autograd.grad(model(x), [model.scale, model.weight])
    bucket = engine_of(model).buckets[0]
    before = grad.clone()
    bucket.grad.fill_(7.0)
    assert torch.equal(grad, before)


def test_a_hook_may_keep_what_it_sees():
    model, kept = managed(Layer(), deterministic=True), []
    model.weight.register_hook(kept.append)
    for scale in (1.0, 2.0):
        model(torch.full((5, 6), scale)).backward()
        model.zero_grad()
    first = copy.deepcopy(kept[0])
    model(torch.randn(5, 6)).backward()
    assert torch.equal(kept[0], first)
    assert not torch.equal(kept[0], kept[1])


def test_a_gradient_of_another_dtype_is_offered_no_place():
    model = managed(Layer().bfloat16(), grad_dtype=torch.float32)
    assert not hasattr(model.weight, "fastpar_place")
    model(torch.randn(5, 6).bfloat16()).backward()
    assert model.weight.main_grad.abs().sum() > 0


def test_a_copy_of_a_model_writes_into_its_own_gradients():
    model, x = managed(Layer()), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    twin(x).backward()
    assert model.weight.grad is None
    model(x).backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)
    assert model.weight.grad.data_ptr() != twin.weight.grad.data_ptr()


def test_on_a_gpu_only_large_weights_are_offered_a_place(monkeypatch):
    monkeypatch.setitem(LEAST_BYTES, "cpu", LEAST_BYTES["cuda"])
    assert not hasattr(managed(Layer()).weight, "fastpar_place")
    monkeypatch.setitem(LEAST_BYTES, "cpu", 6 * 6 * 4)
    model = managed(Layer())
    assert hasattr(model.weight, "fastpar_place")
    assert not hasattr(model.scale, "fastpar_place")


def test_on_a_gpu_layers_of_gpt2_are_offered_wide_places(monkeypatch):
    """2 bytes of 768 x 2304 and 768 x 3072 elements; the 768 x 768 projection is too small."""
    monkeypatch.setitem(LEAST_WIDE_BYTES, "cpu", LEAST_WIDE_BYTES["cuda"])
    sizes = {"n_layer": 1, "n_head": 12, "n_embd": 768, "block_size": 8, "vocab_size": 30}
    model = managed(GPT(GPTConfig(**sizes)).bfloat16(), grad_dtype=torch.float32)
    offered = {n for n, p in model.named_parameters() if hasattr(p, "fastpar_wide_place")}
    assert offered == {f"h.0.{name}.weight" for name in PRODUCTS - {"attn.c_proj"}}


def wide_run(stage, how, accumulate, wide, options):
    """Gradients of a step of two micro-batches, of a bf16 model whose gradients are fp32."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES)).bfloat16()
    if how == "recompute":
        recompute(model, "full")
    options = {"zero_stage": stage, "bucket_mb": 0.01, "accumulate": accumulate, **options}
    model = parallelize(model, Mesh(device="cpu"), Parallel.of(grad_dtype=torch.float32, **options))
    if not wide:
        withdraw(model)
    engine, taken = engine_of(model), []
    for micro in range(2):
        ids = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(micro))
        model(ids, ids, rng_key=make_key(1, micro)).backward()
        taken.append({n for b in engine.buckets for n in getattr(b, "noted", ())})
    return {n: g.clone() for n, g in named_grads(engine)}, taken


def noting_wide(bucket, position, given=None, take=BucketState.take):
    """BucketState.take, which notes what autograd gives no gradient of."""
    if bucket.params[position].grad is None:
        bucket.noted = {*getattr(bucket, "noted", ()), bucket.name(position)}
    return take(bucket, position, given)


@pytest.fixture
def wide_products(monkeypatch):
    module = sys.modules["fastpar.kernels.linear"]  # the function hides it
    monkeypatch.setattr(module, "use_wide", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(backend, "cuda_on_cpu", True)  # of the table, too
    monkeypatch.setattr(BucketState, "take", noting_wide)


@pytest.mark.usefixtures("wide_products")
@pytest.mark.parametrize("accumulate", ["full", "shard"])
@pytest.mark.parametrize("how", ["plain", "recompute"])
def test_wide_gradients_are_the_same_at_every_stage(how, accumulate):
    """Two ranks with the same batches: their mean has the bits of one."""
    stages = (0, 1) if accumulate == "full" else (2, 3)
    alone, taken = wide_run(0, how, "full", True, {})
    placed = IN_PLACE | {"wte.weight"}
    assert all(names >= placed for names in taken), taken
    rounded, _ = wide_run(0, how, "full", False, {})
    for name in alone:
        same = torch.equal(alone[name], rounded[name])
        assert same == (name not in placed), name
    for stage in stages:
        for found, _ in run_ranks(wide_run, 2, stage, how, accumulate, True, {}):
            assert found.keys() == alone.keys()
            assert all(torch.equal(found[name], alone[name]) for name in alone), stage


@pytest.mark.usefixtures("wide_products")
def test_deterministic_runs_and_others_dtypes_have_no_wide_places():
    plain, _ = wide_run(0, "plain", "full", False, {"deterministic": True})
    found, _ = wide_run(0, "plain", "full", True, {"deterministic": True})
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    layer = managed(Layer().bfloat16())  # gradients are bf16
    assert not hasattr(layer.weight, "fastpar_wide_place")
    assert hasattr(layer.weight, "fastpar_place")


@pytest.mark.usefixtures("wide_products")
def test_a_wide_weight_that_is_used_twice_and_elsewhere_gets_the_sum():
    class Elsewhere(Layer):
        def forward(self, x):
            return super().forward(x) + (self.weight * 3).sum()

    layer, x = Elsewhere(times=3).bfloat16(), torch.randn(5, 6).bfloat16()
    exact = copy.deepcopy(layer).double()
    exact(x.double()).backward()
    model = managed(layer, grad_dtype=torch.float32)
    for times in (1, 2):
        model(x).backward()
        error = (model.weight.main_grad - times * exact.weight.grad).abs().max()
        assert error < 0.02 * exact.weight.grad.abs().max(), error


class Tied(nn.Module):
    """A table that is read, and multiplied with."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # ranks may be threads
        self.wte = nn.Parameter(torch.randn(30, 16, generator=generator).bfloat16())

    def forward(self, ids, buffer=None):
        x = embedding(ids, self.wte, wte_grad=buffer).sin()
        return linear_cross_entropy(x, self.wte, ids, weight_grad=buffer)


def table_run(stage, accumulate, micro_batches):
    options = {"zero_stage": stage, "accumulate": accumulate, "grad_dtype": torch.float32}
    model = parallelize(Tied(), Mesh(device="cpu"), Parallel.of(**options))
    for ids in table_ids(micro_batches):
        model(ids).backward()
    [bucket] = engine_of(model).buckets
    [(_, grad)] = named_grads(engine_of(model))
    return grad.clone(), bool(getattr(bucket, "noted", ()))


def table_ids(micro_batches):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(30, (2, 8), generator=generator) for _ in range(micro_batches)]


@pytest.mark.parametrize(
    ("stage", "accumulate", "micro_batches"), [(0, "full", 2), (1, "full", 2), (2, "shard", 1)]
)
def test_on_a_gpu_the_gradient_of_a_tied_table_is_not_rounded(
    monkeypatch, stage, accumulate, micro_batches
):
    """The loss writes it where it is kept, and the embedding adds to it: the bits of an fp32 buffer
    that is given to both."""
    monkeypatch.setattr(BucketState, "take", noting_wide)
    model, buffer = Tied(), torch.zeros(30, 16)
    for ids in table_ids(micro_batches):
        model(ids, buffer).backward()
    given = stage, accumulate, micro_batches
    rounded, noted = table_run(*given)
    assert not noted  # on a CPU autograd has it, in bf16
    assert not torch.equal(rounded.view_as(buffer), buffer)
    monkeypatch.setattr(backend, "cuda_on_cpu", True)
    wide, noted = table_run(*given)
    assert noted
    assert torch.equal(wide.view_as(buffer), buffer)
    for found, _ in run_ranks(table_run, 2, *given):
        assert torch.equal(found.view_as(buffer), buffer)


def calls_hooks_without_a_gradient():
    """Whether this torch does."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy, None

    weight, called = nn.Parameter(torch.ones(1)), []
    weight.register_post_accumulate_grad_hook(called.append)
    Nothing.apply(torch.ones(1, requires_grad=True), weight).backward()
    return bool(called)


@pytest.mark.usefixtures("wide_products")
def test_buckets_of_wide_gradients_are_sent_under_the_backward(monkeypatch):
    if not calls_hooks_without_a_gradient():
        pytest.skip("needs a torch that calls hooks of parameters without a gradient: 2.13 does")
    late, end = [], Engine.end_backward

    def noting(engine):
        late.append([b.spec.index for b in engine.buckets if b.phase is BucketPhase.COLLECTING])
        end(engine)

    monkeypatch.setattr(Engine, "end_backward", noting)
    run_ranks(wide_run, 2, 2, "plain", "shard", True, {})
    assert late == [[]] * 4  # of two ranks and micro-batches


def stages_run(schedule):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SIZES, "dropout": 0.0})).bfloat16()
    options = {"grad_dtype": torch.float32, "schedule": schedule}
    model = parallelize(model, Mesh(pp=2, device="cpu"), Parallel.of(**options))
    ids = torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(0))
    pipeline_step(model, ids, ids, micro_batches=2)
    return {n: g.clone() for n, g in named_grads(engine_of(model))}


@pytest.mark.usefixtures("wide_products")
def test_a_split_backward_has_the_same_wide_gradients():
    for one, other in zip(run_ranks(stages_run, 2, "1f1b"), run_ranks(stages_run, 2, "zb-h1")):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("wide_products")
def test_torch_that_calls_no_hook_without_a_gradient(monkeypatch):
    """Older versions: the bucket is complete at the end of the backward."""
    monkeypatch.setattr(
        BucketState, "take", lambda *a: bool(a[0].params[a[1]].grad is not None) and noting_wide(*a)
    )
    found, _ = wide_run(0, "plain", "full", True, {})
    monkeypatch.setattr(BucketState, "take", noting_wide)
    expected, _ = wide_run(0, "plain", "full", True, {})
    assert all(torch.equal(found[name], expected[name]) for name in expected)
