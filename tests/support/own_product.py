"""The matrix product of other machines, linear's own, where this CPU runs torch's."""

import importlib

import pytest
import torch

from fastpar.kernels import _C, backend
from fastpar.kernels.choice import ignoring_times


def use_own_product(request: pytest.FixtureRequest) -> None:
    """Until the test ends, fp32 products of any size are linear's own, on a CPU that makes them."""
    if _C is None or _C.isa() not in ("avx512", "amx"):
        pytest.skip("needs AVX-512: our product has no other form")
    module, monkeypatch = (
        importlib.import_module("fastpar.kernels.linear"),
        request.getfixturevalue("monkeypatch"),
    )
    monkeypatch.setattr(module, "has_gemm", True)
    strict = ignoring_times()  # which makes small ones ours, too
    strict.__enter__()
    request.addfinalizer(lambda: strict.__exit__(None, None, None))
    torch.ops.fastpar._set_gemm(True, backend.has_bf16_gemm)
    request.addfinalizer(backend.tell_library)
