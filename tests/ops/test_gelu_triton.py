"""bias_gelu's Triton kernels against the oracle, with hostile inputs, on each table's tiles."""

import pytest
import torch
from cells import covering

pytest.importorskip("triton", reason="needs triton")

from test_gelu import DTYPES, eager, gradients, make

from fastpar.kernels import bias_gelu, triton_launch
from fastpar.kernels.gelu import TABLE, Config
from fastpar.kernels.gelu import triton as gelu_triton
from fastpar.kernels.reference import bias_gelu_ref
from fastpar.testing import assert_matches_oracle

# One tile and less, many tiles both ways, several row ranges a program, no multiple of 16.
SHAPES = [(1, 1), (63, 127), (2, 3, 1000), (300, 17), (50, 256), (2, 3072)]


@pytest.fixture(params=TABLE.archs)
def arch(request, monkeypatch):
    """Each architecture's table (on a GPU, too)."""
    monkeypatch.setattr(triton_launch, "INTERPRETED_ARCH", request.param)
    monkeypatch.setattr(gelu_triton, "gpu_arch", lambda device: request.param)
    return request.param


@pytest.mark.usefixtures("poisoned")
@covering(1, ("shape", SHAPES), ("dtype", DTYPES), ("approximate", ["tanh", "none"]))
def test_matches_oracle(triton_device, shape, dtype, approximate):
    def with_form(f):
        return lambda *args: f(*args, approximate=approximate)

    ours, ref, plain = (with_form(f) for f in (bias_gelu, bias_gelu_ref, eager))
    x, bias = (t.detach().to(triton_device).requires_grad_() for t in make(shape, dtype))
    assert len(assert_matches_oracle(ours, ref, (x, bias), eager=plain)) == 3
    assert len(assert_matches_oracle(ours, ref, (x,), eager=plain)) == 2


@pytest.mark.usefixtures("poisoned", "arch")
def test_each_architecture_matches_oracle(triton_device):
    inputs = [t.detach().to(triton_device) for t in make((70, 600), torch.float16)]
    inputs = [t.requires_grad_() for t in inputs]
    assert_matches_oracle(bias_gelu, bias_gelu_ref, inputs, eager=eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_bias_of_a_16_bit_input(triton_device, dtype):
    inputs = [t.detach().to(triton_device) for t in make((33, 65), dtype, torch.float32)]
    inputs = [t.requires_grad_() for t in inputs]
    assert_matches_oracle(bias_gelu, bias_gelu_ref, inputs, eager=eager)
    assert gradients(*inputs, torch.ones_like(inputs[0]))[2].dtype == torch.float32


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), ()])
def test_empty_and_scalar(triton_device, shape):
    x = torch.randn(shape, device=triton_device, requires_grad=True)
    y = bias_gelu(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape


@covering(1, ("dtype", DTYPES), ("approximate", ["tanh", "none"]))
def test_far_out_values(triton_device, dtype, approximate):
    big = torch.finfo(dtype).max
    x = [1e4, -1e4, big, -big, -torch.inf, torch.inf, torch.nan, 0.0, -0.0, 21.0, -21.0]
    x = torch.tensor(x, dtype=dtype, device=triton_device, requires_grad=True)
    y = bias_gelu(x, approximate=approximate)
    y.sum().backward()
    want = torch.tensor([1e4, 0, big, 0, 0, torch.inf, torch.nan, 0, 0, 21, 0]).to(dtype)
    torch.testing.assert_close(y.cpu(), want, rtol=0, atol=0, equal_nan=True)
    slope = torch.tensor([1, 0, 1, 0, 0, 1, torch.nan, 0.5, 0.5, 1, 0]).to(dtype)
    torch.testing.assert_close(x.grad.cpu(), slope, rtol=0, atol=0, equal_nan=True)


def test_tails_are_as_accurate_as_torch(triton_device):
    """Where y is small, the error of y itself: absolute errors of large elements hide it."""
    for low, high in ((-9.0, -3.0), (-3.0, -0.5), (-0.5, 0.5)):
        x = torch.linspace(low, high, 999, device=triton_device, requires_grad=True)
        assert_matches_oracle(bias_gelu, bias_gelu_ref, (x,), eager=eager)


def test_dbias_of_16_bits_is_summed_in_float32(triton_device):
    """1000 terms of 1 + 1/128: bf16 sums stop growing at 256."""
    x = torch.full((1000, 4), 30.0, dtype=torch.bfloat16, device=triton_device)
    dy = torch.full_like(x, 1.0078125)
    dbias = gradients(x, torch.zeros_like(x[0]), dy)[2]
    assert torch.equal(dbias.float().cpu(), torch.full((4,), 1008.0))


def test_dbias_sums_terms_before_they_are_rounded(triton_device):
    """y'(1) = 1.0830 lies between bf16's 1.0781 and 1.0859; n fp32 additions err by n * eps / 2."""
    x = torch.ones(1000, 4, dtype=torch.bfloat16, device=triton_device)
    dbias = gradients(x, torch.zeros(4, device=triton_device), torch.ones_like(x))[2].cpu()
    one = torch.ones(1, dtype=torch.float64, requires_grad=True)
    bias_gelu_ref(one).backward()
    want = 1000 * one.grad
    assert ((dbias - want).abs() <= 1000 * torch.finfo(torch.float32).eps / 2 * want).all()


def test_row_ranges_cover_every_row_once(triton_device, monkeypatch):
    """For more programs than tiles, fewer, and one."""
    x, bias = (t.detach().to(triton_device) for t in make((150, 20), torch.float32))
    dy = torch.randn(150, 20, device=triton_device)
    want = gradients(x, bias, dy)
    for sms in (1, 2, 7, 200):
        monkeypatch.setattr(gelu_triton, "sm_count", lambda device, sms=sms: sms)
        _, dx, dbias = gradients(x, bias, dy)
        assert torch.equal(dx, want[1])
        torch.testing.assert_close(dbias, want[2])


def test_configurations():
    widths = {C: gelu_triton.block_columns(C) for C in (1, 17, 127, 173, 768, 1000, 3072, 6400)}
    assert widths == {1: 16, 17: 32, 127: 128, 173: 128, 768: 256, 1000: 512, 3072: 512, 6400: 256}
    assert TABLE.get(75) == TABLE.get(86) == TABLE.get(80) == Config(2048, 4, 4)
    assert TABLE.get(100) == TABLE.get(90) == Config(2048, 4, 5)
    for arch in TABLE.archs:
        for config in TABLE.candidates(arch):
            assert TABLE.check((arch,), config._asdict()) == config


@pytest.mark.parametrize(
    ("field", "rule"),
    [("tile", "a power of 2"), ("num_warps", "1, 2, 4 or 8"), ("programs_per_sm", "1 to 16")],
)
def test_an_impossible_configuration_is_named(field, rule):
    entry = {**TABLE.get(90)._asdict(), field: 33}
    with pytest.raises(ValueError, match=f"gelu_configs: expected {rule}.* got {field}=33 at 90"):
        TABLE.check((90,), entry)


def test_every_candidate_matches_oracle(triton_device, monkeypatch):
    x, bias = (t.detach().to(triton_device) for t in make((50, 256), torch.float32))
    want = bias_gelu(x, bias)
    for config in TABLE.candidates(90):
        with TABLE.trying((), config):
            assert torch.equal(bias_gelu(x, bias), want)
