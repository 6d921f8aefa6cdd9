"""Buckets: what a rank owns of a parameter, whole tensors of it, and gradients on their way in.

tests/contracts/ has what a loop may do with parameters and their gradients.
"""

import contextlib

import torch
from cells import sweep
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
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
def order_of_sends(stage, name):
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
    getattr(model, name)(ids, ids).backward()
    sizes = [b.spec.numel * 4 for b in engine.shards.buckets]
    return [x for x in seen if x == "embedding" or x in sizes], sizes


@sweep(("stage", "name"), [*((stage, "__call__") for stage in STAGES), (0, "forward")])
def test_nothing_but_the_last_buckets_waits_for_the_table(stage, name):
    """Also of forwards that have no hooks and so use the parameters themselves."""
    for seen, sizes in run_ranks(order_of_sends, 2, stage, name):
        at = seen.index("embedding")
        assert len(sizes) > 4
        assert seen[:at] + seen[at + 1 :] == sizes  # each once, in their order
        assert len(sizes) - at == 1, seen
        assert max(sizes) == sizes[-1]
