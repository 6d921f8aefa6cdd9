"""attention in torch ops: blocks of any size give the same attention, and scores stay few.

What it computes is judged by tests/ops/test_attention.py, which runs every test in this form too.
"""

import torch
from cells import sweep
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.kernels import Rng, attention, backend, make_key
from fastpar.kernels.attention.composed import (
    BLOCK_BYTES,
    BLOCK_QUERIES,
    Dropout,
    composed_bwd,
    composed_fwd,
)
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle

RNG = Rng(make_key(3, 2**32 - 1), 4)


@sweep(
    ("kilobytes", "queries", "causal"),
    [
        (1, 7, True),
        (1, 64, False),
        (40, 7, False),
        (40, 64, True),
        (100, 7, True),
        (100, 64, False),
    ],
)
def test_many_blocks(monkeypatch, kilobytes, queries, causal):
    """One key head a block, some heads, all heads: the same attention and mask."""
    monkeypatch.setattr(backend, "choice", "torch")
    monkeypatch.setitem(BLOCK_BYTES, "cpu", kilobytes << 10)
    monkeypatch.setitem(BLOCK_QUERIES, "cpu", queries)
    inputs = [torch.randn(3, 70, n, 16).requires_grad_() for n in (4, 2, 2)]

    def call(op):
        return lambda q, k, v: op(q, k, v, causal=causal, dropout_p=0.3, rng=RNG)

    assert_matches_oracle(call(attention), call(attention_ref), inputs)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an op returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@sweep("bounds", [None, [0, 500, 512]])
def test_scores_are_never_all_alive(bounds):
    T, H, D = 512, 8, 16
    qkv = torch.randn(*([T] if bounds else [2, T]), 3, H, D)
    drop = Dropout(make_key(1, 2), 3, 26)
    inputs, grads = qkv.unbind(-3), torch.empty_like(qkv).unbind(-3)
    with LargestTensor() as mode:
        o = composed_fwd(inputs, bounds, True, 0.25, drop)
        composed_bwd(o, inputs, grads, bounds, True, 0.25, drop)
    assert 0 < mode.numel <= max(3 * BLOCK_BYTES["cpu"] // 4, qkv.numel())
    assert mode.numel < H * T * T / 4
