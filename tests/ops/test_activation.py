"""Activations beyond the cases of kernels/cases.py: far-out values, tails, sums, configurations."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import activation, backend, bias_gelu
from fastpar.kernels.activation import TABLE
from fastpar.kernels.config_table import SHARED_BYTES
from fastpar.kernels.reference import bias_gelu_ref
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(x, bias, dy, kind="gelu"):
    leaves = [t.detach().requires_grad_() for t in (x, bias)]
    y = activation(*leaves, kind)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@sweep("shape", [(0,), (0, 5), (5, 0), ()])
def test_empty_and_scalar(shape, place):
    x = torch.randn(shape, device=place, requires_grad=True)
    y = bias_gelu(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape


@sweep("approximate", ["tanh", "none"])
@sweep("dtype", DTYPES)
def test_far_out_values(dtype, approximate, place):
    big = torch.finfo(dtype).max
    x = [1e4, -1e4, big, -big, -torch.inf, torch.inf, torch.nan, 0.0, -0.0, 21.0, -21.0]
    want = [1e4, 0, big, 0, 0, torch.inf, torch.nan, 0, 0, 21, 0]
    slope = [1, 0, 1, 0, 0, 1, torch.nan, 0.5, 0.5, 1, 0]
    if backend.choice != "triton":  # the erf form, and what rounds on its way, is torch's
        some = (0, 1, 6, 7, 8, *((4, 5) if approximate == "tanh" else ()))
        x, want, slope = ([t[i] for i in some] for t in (x, want, slope))
    x = torch.tensor(x, dtype=dtype, device=place, requires_grad=True)
    y = bias_gelu(x, approximate=approximate)
    y.sum().backward()
    for got, exact in ((y, want), (x.grad, slope)):
        exact = torch.tensor(exact).to(dtype)
        torch.testing.assert_close(got.cpu(), exact, rtol=0, atol=1e-30, equal_nan=True)


@sweep("dtype", DTYPES)
def test_far_out_values_of_relu2_and_swiglu(dtype, place):
    nan, inf = torch.nan, torch.inf
    x = [-1e4, -inf, 0.0, -0.0, 3.0, inf, nan]
    x = torch.tensor(x, dtype=dtype, device=place, requires_grad=True)
    activation(x, None, "relu2").sum().backward()
    assert_values(activation(x, None, "relu2"), [0, 0, 0, 0, 9, inf, nan])
    assert_values(x.grad, [0, 0, 0, 0, 6, inf, nan])
    gate, up = [-1e4, 1e4, -200.0, 0.0, nan, 2e4], [2.0, 2.0, 3.0, 5.0, 1.0, 0.5]
    x = torch.tensor([*gate, *up], dtype=dtype, device=place, requires_grad=True)
    y = activation(x, None, "swiglu")
    y.sum().backward()
    assert_values(y, [0, 2e4, 0, 0, nan, 1e4])
    assert_values(x.grad, [0, 2, 0, 2.5, nan, 0.5, 0, 1e4, 0, 0, nan, 2e4])


def assert_values(got, exact):
    exact = torch.tensor(exact).to(got.dtype)
    torch.testing.assert_close(got.detach().cpu(), exact, rtol=0, atol=1e-30, equal_nan=True)


def test_tails_are_as_accurate_as_torch(place):
    """Where y is small, the error of y itself: absolute errors of large elements hide it."""
    for low, high in ((-9.0, -3.0), (-3.0, -0.5), (-0.5, 0.5)):
        x = torch.linspace(low, high, 999, device=place, requires_grad=True)
        torchs = functools.partial(F.gelu, approximate="tanh")
        assert_matches_oracle(bias_gelu, bias_gelu_ref, (x,), eager=torchs)


def test_dbias_of_16_bits_is_summed_in_float32_and_then_rounded(place):
    """1000 terms of 1 + 1/128: bf16 sums stop growing at 256. y'(1) = 1.0830 lies between bf16's
    1.0781 and 1.0859; n fp32 additions err by n * eps / 2."""
    x = torch.full((1000, 4), 30.0, dtype=torch.bfloat16, device=place)
    dbias = gradients(x, torch.zeros_like(x[0]), torch.full_like(x, 1.0078125))[2]
    assert torch.equal(dbias.float().cpu(), torch.full((4,), 1008.0))
    x = torch.ones_like(x)
    dbias = gradients(x, torch.zeros(4, device=place), x)[2].cpu()
    one = torch.ones(1, dtype=torch.float64, requires_grad=True)
    want = 1000 * torch.autograd.grad(bias_gelu_ref(one), one)[0]
    assert ((dbias - want).abs() <= 1000 * torch.finfo(torch.float32).eps / 2 * want).all()


@sweep("kind", ["gelu", "swiglu"])
def test_every_config_and_number_of_programs_has_the_same_answer(kind, triton_device, monkeypatch):
    """For more programs than tiles, fewer, and one; each architecture's table, each candidate."""
    from fastpar.kernels.activation import triton as kernels

    x, dy = torch.randn(2, 150, 20).to(triton_device) * 3
    x = torch.cat([x, dy], -1) if kind == "swiglu" else x
    bias = torch.randn(x.shape[-1]).to(triton_device)
    want = gradients(x, bias, dy, kind)
    changes = [("sm_count", n) for n in (1, 2, 7, 200)] + [("gpu_arch", n) for n in SHARED_BYTES]
    for name, value in changes:
        monkeypatch.setattr(kernels, name, lambda device, value=value: value)
        y, dx, dbias = gradients(x, bias, dy, kind)
        assert torch.equal(y, want[0])
        assert torch.equal(dx, want[1])
        torch.testing.assert_close(dbias, want[2])
    for config in TABLE.candidates(90):
        with TABLE.trying((), config):
            assert torch.equal(activation(x, bias, kind), want[0])


X = torch.ones(2, 3)


@sweep(
    ("args", "options", "words"),
    [
        ((X,), {"approximate": "erf"}, "expected tanh or none, got approximate=erf"),
        ((X, X[:, 0]), {}, r"expected bias of shape \[C\]=\[3\], got bias=\[2\]"),
        ((X, X[0].half()), {}, "expected bias of x's dtype torch.float32 or float32, got bias"),
        ((X, X[0].to("meta")), {}, "expected bias on x's device cpu, got bias on meta"),
        ((X.long(),), {}, "expected a floating dtype, got x=torch.int64"),
        ((X, None), {"kind": "silu"}, "expected one of gelu, gelu_erf, relu2, swiglu, got kind=si"),
        (
            (X, None),
            {"kind": "swiglu"},
            r"expected x of shape \[..., 2 \* F\] with swiglu, got x=\[2, 3\]",
        ),
        (
            (X[0, 0], None),
            {"kind": "swiglu"},
            r"expected x of shape \[..., 2 \* F\] with swiglu, got x=\[\]",
        ),
        ((X, X[:, 0]), {"kind": "relu2"}, r"expected bias of shape \[C\]=\[3\], got bias=\[2\]"),
    ],
)
def test_what_is_refused(args, options, words):
    op = activation if "kind" in options else bias_gelu
    with pytest.raises(ValueError, match=f"{op.__name__}: {words}"):
        op(*args, **options)
