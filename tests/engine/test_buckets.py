"""Buckets: what a rank owns of a parameter, whole tensors of it, and gradients on their way in.

tests/contracts/ has what a loop may do with parameters and their gradients.
"""

import contextlib
import copy
import sys

import pytest
import torch
from cells import sweep
from programs import assert_same
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.engine.bucket import BucketState
from fastpar.kernels import backend, embedding, linear, linear_cross_entropy, make_key
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

STAGES = [0, 1, 2, 3]


def managed(model, mesh=None, **options):
    model = parallelize(model, mesh or Mesh(device="cpu"), Parallel.of(**options))
    return model, engine_of(model)


class Some(nn.Linear):
    """It uses its bias alone."""

    def forward(self, x):
        return (self.bias * x).sum()


@sweep("stage", STAGES)
@sweep("dropped", [False, True])
def test_no_gradient_waits_longer_than_its_backward(stage, dropped):
    """Of backwards that use some parameters only, all that they left is there, once."""

    def of_rank():
        wide = {"zero_stage": stage, "grad_dtype": torch.float32}
        model, engine = managed(Some(3, 2).bfloat16(), **wide)
        for i in range(3):
            with engine.no_sync() if i < 2 else contextlib.nullcontext():
                model(1.0).backward()
            if dropped and i == 1:
                model.zero_grad()
        *_, (_, grad) = engine.grads()  # of the bias
        assert grad.tolist() == [1.0 if dropped else 3.0] * 2

    run_ranks(of_rank, 2)


# Backward ends with the embedding, so the gradient of a table that is tied to the head is complete
# when nothing is left to compute. No block may wait for that, only what is outside of the blocks.


def order_of_sends(stage):
    """Bytes of each reduction, and between them where the embedding's backward begins."""
    config = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=2000, dropout=0.0)
    small = {"bucket_mb": 0.01, "first_bucket_mb": 0.002}
    model, engine = managed(GPT(config), zero_stage=stage, **small)
    seen = []
    model.h[0].register_forward_pre_hook(
        lambda _, args: args[0].register_hook(lambda _: seen.append("embedding")) and None
    )
    group = engine.shards.buckets[0].groups.reduce
    group.observers += (lambda group, op, n_bytes, begin: seen.append(n_bytes) or begin(),)
    ids = torch.zeros(2, 8, dtype=torch.int64)  # repeated: nobody counts them
    model(ids, ids).backward()
    sizes = [b.spec.numel * 4 for b in engine.shards.buckets]
    return [x for x in seen if x == "embedding" or x in sizes], sizes


@sweep("stage", STAGES)
def test_nothing_but_the_last_buckets_waits_for_the_table(stage):
    for seen, sizes in run_ranks(order_of_sends, 2, stage):
        at = seen.index("embedding")
        assert len(sizes) > 4
        assert seen[:at] + seen[at + 1 :] == sizes  # each once, in their order
        assert len(sizes) - at == 1, seen
        assert max(sizes) == sizes[-1]


# Layers compute fp32 gradients of bf16 weights where the buckets keep them


SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30, "dropout": 0.1}
PRODUCTS = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
IN_PLACE = {f"h.{i}.{name}.weight" for i in range(2) for name in PRODUCTS}


def named_grads(engine):
    names = {p: b.name(i) for b in engine.buckets for i, p in enumerate(b.params)}
    return {names[p]: g.clone() for p, g in engine.grads()}


@pytest.fixture
def wide(monkeypatch):
    """Names of gradients that autograd has nothing of: they are in the bucket before."""
    found, take_all = set(), BucketState.take_all

    def noting(bucket, grads):
        placed = [i for i, grad in enumerate(grads) if grad is None and i in bucket.has]
        found.update(map(bucket.name, placed))
        return take_all(bucket, grads)

    monkeypatch.setattr(BucketState, "take_all", noting)
    return found


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


# Gradients in fp32 of bf16 products


@pytest.fixture
def wide_products(monkeypatch):
    module = sys.modules["fastpar.kernels.linear"]  # the function hides it
    monkeypatch.setattr(module, "use_wide", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(backend, "cuda_on_cpu", True)  # of the table, too


def wide_run(stage, how, accumulate, wide=True):
    """Gradients of a step of two micro-batches, of a bf16 model whose gradients are fp32."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES)).bfloat16()
    if how == "recompute":
        recompute(model, "full")
    options = {"zero_stage": stage, "accumulate": accumulate, "grad_dtype": torch.float32}
    model, engine = managed(model, bucket_mb=0.01, **options)
    for p in () if wide else model.parameters():
        vars(p).pop("fastpar_wide_place", None)
    for micro in range(2):
        ids = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(micro))
        model(ids, ids, rng_key=make_key(1, micro)).backward()
    return named_grads(engine)


@pytest.mark.parametrize("accumulate", ["full", "shard"])
@pytest.mark.parametrize("how", ["plain", "recompute"])
def test_wide_gradients_are_the_same_at_every_stage(wide_products, wide, how, accumulate):
    """Two ranks with the same batches: their mean has the bits of one."""
    alone = wide_run(0, how, "full")
    placed = IN_PLACE | {"wte.weight"}
    assert wide >= placed
    rounded = wide_run(0, how, "full", wide=False)
    for name in alone:
        assert torch.equal(alone[name], rounded[name]) == (name not in placed), name
    for stage in (0, 1) if accumulate == "full" else (2, 3):
        for found in run_ranks(wide_run, 2, stage, how, accumulate):
            assert_same(found, alone)


class Elsewhere(Layer):
    def forward(self, x):
        return super().forward(x) + (self.weight * 3).sum()


def test_a_wide_weight_that_is_used_twice_and_elsewhere_gets_the_sum(wide_products):
    layer, x = Elsewhere(times=3).bfloat16(), torch.randn(5, 6).bfloat16()
    exact = copy.deepcopy(layer).double()
    exact(x.double()).backward()
    model, _ = managed(layer, grad_dtype=torch.float32)
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
    model, engine = managed(Tied(), **options)
    for ids in table_ids(micro_batches):
        model(ids).backward()
    return named_grads(engine)["wte"]


def table_ids(micro_batches):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(30, (2, 8), generator=generator) for _ in range(micro_batches)]


@pytest.mark.parametrize(
    ("stage", "accumulate", "micro_batches"), [(0, "full", 2), (1, "full", 2), (2, "shard", 1)]
)
def test_on_a_gpu_the_gradient_of_a_tied_table_is_not_rounded(
    monkeypatch, wide, stage, accumulate, micro_batches
):
    """The loss writes it where it is kept, and the embedding adds to it: the bits of an fp32 buffer
    that is given to both."""
    model, buffer = Tied(), torch.zeros(30, 16)
    for ids in table_ids(micro_batches):
        model(ids, buffer).backward()
    given = stage, accumulate, micro_batches
    rounded = table_run(*given)
    assert not wide  # on a CPU autograd has it, in bf16
    assert not torch.equal(rounded.view_as(buffer), buffer)
    monkeypatch.setattr(backend, "cuda_on_cpu", True)
    for found in (table_run(*given), *run_ranks(table_run, 2, *given)):
        assert wide
        assert torch.equal(found.view_as(buffer), buffer)
