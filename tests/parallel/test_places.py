"""split_backward.py: layers compute weights' gradients where the buckets keep them."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.kernels import linear, make_key
from fastpar.nn.recompute import recompute
from fastpar.parallel.bucket import BucketState
from fastpar.parallel.split_backward import LEAST_BYTES
from fastpar.testing import run_ranks

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30, "dropout": 0.1}
PRODUCTS = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
IN_PLACE = {f"h.{i}.{name}.weight" for i in range(2) for name in PRODUCTS}


def withdraw(model):
    """Nobody offers a place any more."""
    for p in model.parameters():
        vars(p).pop("fastpar_place", None)


def noting_take(bucket, position, given=None, take=BucketState.take):
    """BucketState.take, which notes the gradients that are in their places before it comes."""
    bucket.open_grad()
    grad, view = bucket.params[position].grad, bucket._grad_view(position)
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
    model = parallelize(model, Mesh(device="cpu"), zero_stage=stage, **options)
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
    return parallelize(copy.deepcopy(layer), Mesh(device="cpu"), **options)


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
