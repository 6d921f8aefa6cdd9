"""Fixtures that several kernels' tests share."""

import pytest
import torch

from fastpar.kernels import backend


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that kernels are given is NaN, or the largest integer, until they write it."""

    def fill(allocate):
        def allocate_and_fill(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(float("nan"))
            return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

        return allocate_and_fill

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, fill(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", fill(torch.Tensor.new_empty))


@pytest.fixture
def draw(triton_device):
    """Makes leaves where Triton's kernels run."""

    def draw(*shape, dtype=torch.float32, mean=0.0):
        x = (torch.randn(shape) + mean).to(dtype)
        return x.to(triton_device).requires_grad_()

    return draw


@pytest.fixture(params=["cpp", "torch", "cuda"])
def device(request, monkeypatch):
    """Every test that uses it runs the compiled CPU kernels, the composed path and CUDA's."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "choice", "torch")
    return request.getfixturevalue("cuda_device") if request.param == "cuda" else "cpu"


@pytest.fixture(params=["cpu", "triton"])
def place(request):
    """Where tensors are: with the CPU's own kernels, with Triton's."""
    return request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"
