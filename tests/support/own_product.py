"""The matrix product of other machines, linear's own, where this CPU runs torch's."""

import importlib

import pytest
import torch
from torch import Tensor


def in_memory(t: Tensor) -> Tensor:
    """What t's memory holds."""
    raw = torch.empty(0, dtype=t.dtype)
    return raw.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())


def use_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on fp32 products are linear's own, which reads memory by its address."""

    def gemm(a, b, out, accumulate, bias, threads):
        a, b, bias = (None if t is None else in_memory(t) for t in (a, b, bias))
        product = a @ b if bias is None else a @ b + bias
        in_memory(out).copy_(out + product if accumulate else product)

    module = importlib.import_module("fastpar.kernels.linear")
    monkeypatch.setattr(module, "has_gemm", True)
    monkeypatch.setattr(module, "use_gemm", lambda x, *_, **__: x.dtype == torch.float32)
    monkeypatch.setattr(module._C, "gemm", gemm)
