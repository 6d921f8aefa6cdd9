"""Buckets: what a rank owns of a parameter, whole tensors of it, and gradients on their way in.

tests/contracts/test_zero_parameters.py has what a loop may do with parameters and their gradients.
"""

import contextlib
import math

import torch
import torch.distributed as dist
from cells import sweep
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.axes.data import buckets_of
from fastpar.axes.step import Setup, Workload
from fastpar.engine import bucket
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.002, "first_bucket_mb": 0.001}
STAGES = [0, 1, 2, 3]


def model_of():
    model = nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 3), nn.Linear(3, 50))
    for i, p in enumerate(model.parameters()):
        p.data = torch.arange(p.numel(), dtype=torch.float32).view(p.shape) + 1000 * i
    return model


def managed(stage, model=None, **options):
    model = parallelize(model or model_of(), Mesh(), Parallel.of(zero_stage=stage, **options))
    return model, engine_of(model)


@sweep("stage", STAGES)
@sweep("ranks", [2, 3, 4])
def test_pieces_make_up_each_parameter(ranks, stage):
    def of_rank():
        found, shards = [], managed(stage, **SMALL)[1].shards
        for p, slot in zip(shards.params, shards.layout.slots):
            piece = shards.piece(p)
            found.append((slot.spec.names[0], piece.param.detach().clone().view(-1)))
            assert piece.start % 256 == 0 or not piece.param.numel()  # blocks of 8-bit moments fit
        return found

    expected = dict(model_of().named_parameters())
    for rows in zip(*run_ranks(of_rank, ranks), strict=True):
        name, parts = rows[0][0], [values for _, values in rows]
        whole = parts[2 % ranks] if stage == 0 else torch.cat(parts)
        assert torch.equal(whole, expected[name].detach().view(-1))


@sweep("block", [1, 256])
@sweep("dtype", [torch.float32, torch.uint8, torch.float64])
@sweep("stage", [0, 1, 3])
def test_whole_tensors_of_parts_and_back(stage, dtype, block):
    def of_rank():
        _, engine = managed(stage, **SMALL)
        for p in engine.shards.params:
            shape = p.shape if block == 1 else (-(-p.numel() // block),)
            whole = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1))
            whole = whole.to(dtype)
            part = engine.shards.shard_of(whole, p, block=block)
            assert torch.equal(engine.shards.full(part, p, block=block), whole)

    run_ranks(of_rank, 3)


class Mixed(nn.Module):
    """Of two dtypes; a tied weight, one that is not contiguous, a frozen one, a buffer."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(91, 6)
        self.head = nn.Linear(6, 91, bias=False)
        self.head.weight = self.wte.weight
        self.turned = nn.Linear(5, 3)
        self.turned.weight = nn.Parameter(torch.arange(15.0).view(5, 3).t())
        self.narrow = nn.Linear(3, 2).bfloat16()
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))


@sweep("stage", STAGES)
def test_values_stay_and_may_be_written(stage):
    model = Mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    models = [model, Mixed()]

    def of_rank():
        model, engine = managed(stage, models[dist.get_rank()])
        assert model.head.weight is model.wte.weight
        assert {b.flat.dtype for b in engine.buckets} == {torch.float32, torch.bfloat16}
        assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
        with engine.gathered(), torch.no_grad():
            for p in model.parameters():
                assert p.is_contiguous()
                p.mul_(2)
        assert model.turned.weight.isnan().all() == (stage == 3)
        after = model.state_dict()
        assert all(torch.equal(after[n], 2 * v) for n, v in before.items() if n != "scale")

    run_ranks(of_rank, 2)


# Gradients


class Some(nn.Linear):
    """It uses its bias alone."""

    def forward(self, x):
        return (self.bias * x).sum()


def sums(engine):
    """The whole gradients."""
    return [g.clone() for _, g in engine.grads()]


@sweep("dtype", [torch.bfloat16, torch.float16])
@sweep("stage", STAGES)
def test_gradients_in_fp32_add_up_in_fp32(dtype, stage):
    def of_rank():
        model, engine = managed(stage, Some(3, 2).to(dtype), grad_dtype=torch.float32)
        for values in ((1.0, 2.0**-12), (3.0,)):  # the small one is lost in 16 bits
            for value in values:
                model(value).backward()
            grad = sums(engine)[-1]  # of the bias
            assert (grad.dtype, grad.tolist()) == (torch.float32, [sum(values)] * 2)
            if stage == 0:
                assert torch.equal(model.bias.main_grad, grad)
            model.zero_grad()
        assert hasattr(model.bias, "main_grad") == (stage == 0)

    run_ranks(of_rank, 2)
    assert not hasattr(managed(0, nn.Linear(3, 2), grad_dtype=torch.float32)[0].bias, "main_grad")


@sweep("stage", STAGES)
@sweep("dropped", [False, True])
def test_no_gradient_waits_longer_than_its_backward(stage, dropped, monkeypatch):
    """Of backwards that use some parameters only, all that they left is there, once."""
    monkeypatch.setitem(bucket.WAIT_BYTES, "cpu", 1 << 20)

    def of_rank():
        model, engine = managed(stage, Some(3, 2).bfloat16(), grad_dtype=torch.float32)
        for i in range(3):
            with engine.no_sync() if i < 2 else contextlib.nullcontext():
                model(1.0).backward()
            if dropped and i == 1:
                model.zero_grad()
        grad = sums(engine)[-1]  # of the bias
        assert grad.tolist() == [1.0 if dropped else 3.0] * 2

    run_ranks(of_rank, 2)


# When the gradient of an embedding that is tied to the head is sent, and what is sent with it.
# Backward ends with the embedding, so the table's gradient is complete when nothing is left to
# compute. No block may wait for that, only what is small and outside of the blocks: so it is with
# FSDP2, while DDP (and nanoGPT with it) sends what is left of the first block in that bucket, too.


def order_of_sends(stage):
    """Bytes of each reduction, and between them where the embedding's backward begins."""
    config = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=2000, dropout=0.0)
    model, engine = managed(stage, GPT(config), bucket_mb=0.01, first_bucket_mb=0.002)
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


@sweep("stage", STAGES)
def test_what_the_table_of_gpt2_is_sent_with(stage):
    """124M in fp32: 154 MB, and the positions' 3 MB."""
    workload = Workload(GPTConfig.preset("gpt2"), 8)
    buckets = buckets_of(workload, Setup(world_size=8, zero_stage=stage))
    last = buckets.layout.buckets[-1]
    table, positions = (math.prod(buckets.shapes[i]) for i in (0, 1))
    assert {0, 1} <= {buckets.layout.slots[i].registered for i in last.slots}
    assert 0 <= last.numel - table - positions < 0.001 * table
