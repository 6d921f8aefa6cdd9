"""Fixtures that several kernels' tests share."""

import functools
import sys

import pytest
import torch

from fastpar.kernels import _C, backend, reference


@pytest.fixture(scope="session", autouse=True)
def _masks_are_drawn_once():
    """The oracle draws in Python, and each case has it drawn a dozen times."""
    draw = reference._keep_ref
    reference._keep_ref = functools.lru_cache(64)(draw)
    yield
    reference._keep_ref = draw


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
    yield
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.get_torch_obj_rule_map.cache_clear()  # it knows functions, torch's own no more


@pytest.fixture
def recorded(monkeypatch):
    """recorded(owner, name): the arguments of the function's calls from here on."""

    def record(owner, name):
        calls, run = [], getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kw: calls.append(args) or run(*args, **kw))
        return calls

    return record


@pytest.fixture
def isas():
    """isas(): this machine's instruction sets, each in use while the loop is at it."""
    before = _C.isa()

    def each():
        for isa in filter(_C.isa_supported, ("baseline", "avx2", "avx512", "amx")):
            _C.set_isa(isa)
            yield isa

    yield each
    _C.set_isa(before)


def place_of(implementation, request):
    """Where tensors are, that this implementation's kernels run on."""
    if implementation == "torch":
        request.getfixturevalue("monkeypatch").setattr(backend, "choice", "torch")
    if implementation in ("cuda", "triton"):
        return request.getfixturevalue(f"{implementation}_device")
    return "cpu"


@pytest.fixture(params=["cpp", "torch", "cuda"])
def device(request):
    """Every test that uses it runs the compiled CPU kernels, the composed path and CUDA's."""
    return place_of(request.param, request)


@pytest.fixture(params=["cpp", "torch", "triton"])
def form(request):
    """The same, with Triton's kernels in the place of CUDA's; backend.choice says which run."""
    return place_of(request.param, request)


@pytest.fixture(params=["cpu", "triton"])
def place(request):
    """Where tensors are: with the CPU's own kernels, with Triton's."""
    return place_of(request.param, request)
