"""bias_gelu against its oracle, on every instruction set, with hostile inputs."""

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import backend, bias_gelu, gelu_mlp
from fastpar.kernels.reference import bias_gelu_ref, gelu_mlp_ref
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager(x, bias=None, *, approximate="tanh"):
    u = x if bias is None else (x + bias).to(x.dtype)
    return F.gelu(u, approximate=approximate)


def make(shape, dtype, bias_dtype=None):
    x = (torch.randn(shape) * 3).to(dtype).requires_grad_()
    return x, torch.randn(shape[-1]).to(bias_dtype or dtype).requires_grad_()


def gradients(x, bias, dy):
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = bias_gelu(x, bias)
    y.backward(dy)
    return y.detach(), x.grad, None if bias is None else bias.grad


@pytest.mark.usefixtures("poisoned")
@sweep("approximate", ["tanh", "none"])
@sweep("dtype", DTYPES)
@sweep("shape", [(1, 1), (63, 127), (2, 3, 1000), (300, 17), (4, 3072)])
def test_matches_oracle(shape, dtype, approximate):
    x, bias = make(shape, dtype)

    def with_form(f):
        return lambda *args: f(*args, approximate=approximate)

    ours, ref, plain = (with_form(f) for f in (bias_gelu, bias_gelu_ref, eager))
    assert_matches_oracle(ours, ref, (x, bias), eager=plain)
    assert_matches_oracle(ours, ref, (x,), eager=plain)


@sweep("dtype", [torch.bfloat16, torch.float16])
def test_fp32_bias_of_a_16_bit_input(dtype):
    assert_matches_oracle(
        bias_gelu, bias_gelu_ref, make((33, 65), dtype, torch.float32), eager=eager
    )


def test_torch_backend_matches_oracle(monkeypatch):
    monkeypatch.setattr(backend, "choice", "torch")
    assert_matches_oracle(bias_gelu, bias_gelu_ref, make((33, 65), torch.float32), eager=eager)


@sweep("shape", [(0,), (0, 5), (5, 0), ()])
def test_empty_and_scalar(shape):
    x = torch.randn(shape, requires_grad=True)
    y = bias_gelu(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape


def test_far_out_values():
    x = torch.tensor([1e4, -1e4, 1e30, -torch.inf, torch.inf, torch.nan, 0.0, -0.0])
    y, dx, _ = gradients(x, None, torch.ones_like(x))
    want = torch.tensor([1e4, 0, 1e30, 0, torch.inf, torch.nan, 0, 0])
    assert torch.equal(y.nan_to_num(7.0, 8.0), want.nan_to_num(7.0, 8.0))
    slope = torch.tensor([1, 0, 1, 0, 1, torch.nan, 0.5, 0.5])
    torch.testing.assert_close(dx, slope, rtol=0, atol=1e-30, equal_nan=True)


def test_errors():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="expected tanh or none, got approximate=erf"):
        bias_gelu(x, approximate="erf")
    with pytest.raises(
        ValueError, match=r"expected bias of shape \[C\] .* got bias=\[2\] x=\[2, 3\]"
    ):
        bias_gelu(x, torch.ones(2))
    with pytest.raises(ValueError, match=r"expected a bias of x's dtype or float32, got bias"):
        bias_gelu(x, torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"expected bias on x's device cpu, got bias on meta"):
        bias_gelu(x, torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match=r"expected a floating dtype, got x=torch.int64"):
        bias_gelu(x.long())


@sweep("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_matches_its_oracle(dtype):
    x, weight1, weight2 = torch.randn(5, 7, 24), torch.randn(40, 24), torch.randn(16, 40)
    inputs = [x, weight1, torch.randn(40), weight2, torch.randn(16)]
    inputs = [t.to(dtype).requires_grad_() for t in inputs]

    def plain(x, weight1, bias1, weight2, bias2=None):
        return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)

    assert_matches_oracle(gelu_mlp, gelu_mlp_ref, inputs, eager=plain)
    assert_matches_oracle(gelu_mlp, gelu_mlp_ref, inputs[:4], eager=plain)
