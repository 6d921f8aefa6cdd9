"""linear(fp8=): formats and scales against arithmetic in fp64, layouts, overflow, what is kept."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import DelayedScales, Fp8, backend, linear
from fastpar.kernels.linear import fp8 as linear_fp8
from fastpar.kernels.linear.fp8 import BLOCK, DY, LARGEST, X, power_of_two, round_all, round_rows

E4M3, E5M2 = LARGEST
DIGITS = {E4M3: (3, -6), E5M2: (2, -14)}  # bits of a significand, least exponent
SCALINGS = ("row", "block", "tensor")


def grid(x, form):
    """x rounded to the format's numbers, nearest even, in fp64; larger ones stay larger."""
    digits, least = DIGITS[form]
    exponent = x.double().abs().clamp(min=2.0**-200).log2().floor().clamp(min=least)
    step = 2.0 ** (exponent - digits)
    return (x.double() / step).round() * step


def rounded(x, form, scaling, top=None):
    """Values of x[N, K] in fp64, by the definition of its scales."""
    k = x.shape[1]
    group = {"row": k, "block": BLOCK, "tensor": k}[scaling]
    parts = []
    for part in x.double().split(group, 1):
        tops = part.abs().amax(1, keepdim=True) if scaling != "tensor" else torch.tensor(top)
        scale = 2.0 ** (tops / LARGEST[form]).log2().ceil()
        parts.append(grid(part / scale, form).clamp(-LARGEST[form], LARGEST[form]) * scale)
    return torch.cat(parts, 1)


def make(n=40, c=272, f=144, dtype=torch.float32):
    x = torch.randn(n, c) * torch.logspace(-3, 3, n)[:, None]
    inputs = [x, torch.randn(f, c) * 0.02, torch.randn(f)]
    return [t.to(dtype).requires_grad_() for t in inputs]


def layer(scaling, *step, **options):
    """step: inputs and dy of a first step, in which tensors' scales become known."""
    how = Fp8(scaling, emulate=True, **options, scales=known(scaling))
    if step and how.scales is not None:
        linear(*(t.detach().requires_grad_() for t in step[:-1]), fp8=how).backward(step[-1])
        how.scales.update()
    return how


def known(scaling):
    return DelayedScales(1) if scaling == "tensor" else None


@sweep("form", [E4M3, E5M2])
def test_codes_are_the_formats_own_and_scales_the_least_that_fit(form):
    tops = torch.tensor([448.0, 449.0, 224.0, 0.0, 1e-45, torch.inf, torch.nan])
    want = torch.tensor([1.0, 2.0, 0.5, 2.0**-126, 2.0**-126, 9.0, 9.0])
    assert torch.equal(power_of_two(tops, 448.0).nan_to_num(9.0), want)
    x = torch.randn(64, 304) * torch.logspace(-30, 30, 64)[:, None]
    x[3] = 0.0
    for group in (304, BLOCK):
        codes = round_rows(x, form, group)
        assert codes.codes.dtype == form
        assert codes.scales.shape == (64, -(-304 // group))
        want = rounded(x, form, "row" if group == 304 else "block")
        want[3] = 0.0
        assert torch.equal(codes.values(torch.float64), want)
        tops = x[:, :group].abs().amax(1)
        assert (tops / codes.scales[:, 0] <= LARGEST[form]).all()
        assert (tops / codes.scales[:, 0] > LARGEST[form] / 2).logical_or(tops == 0).all()


@sweep("scaling", SCALINGS)
def test_products_are_those_of_the_rounded_operands(scaling):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = make(dtype=dtype)
        dy = torch.randn(40, 144).to(dtype)
        for of_weight in ("bf16", "fp8") if scaling == "tensor" else ("bf16",):
            how = layer(scaling, x, weight, bias, dy, weight_gradient=of_weight)
            for t in (x, weight, bias):
                t.grad = None
            y = linear(x, weight, bias, fp8=how)
            y.backward(dy)
            tops = [t.detach().abs().max().item() for t in (x, weight, dy)]
            x8 = rounded(x.detach(), E4M3, scaling, tops[0])
            w8 = rounded(weight.detach(), E4M3, scaling, tops[1])
            wt8 = rounded(weight.detach().t(), E4M3, scaling, tops[1])
            dy8 = rounded(dy, E5M2, scaling, tops[2])
            of_dweight = dy8 if of_weight == "fp8" else dy.double()
            wants = (x8 @ w8.t() + bias.double(), dy8 @ wt8.t(), of_dweight.t() @ x8)
            for got, want in zip((y, x.grad, weight.grad), wants):
                assert got.dtype == dtype
                # Sums of 272 products at most, of which sqrt(272) of fp32's roundings stay of each
                # partial sum, times 2; and half a unit for storing them.
                sums, store = 2 * 272**0.5 * 2.0**-24, torch.finfo(dtype).eps / 2
                assert (got.double() - want).abs().max() <= want.abs().max() * (sums + store)
            assert torch.equal(bias.grad, dy.sum(0))


def test_what_overflows_becomes_the_largest_code_and_is_counted():
    x, weight, bias = (t.detach().requires_grad_() for t in make(c=32, f=16))
    x.data.clamp_(-1, 1)[0, :2] = 1.0
    dy, how = torch.ones(40, 16), layer("tensor")
    y = linear(x, weight, bias, fp8=how)
    y.backward(dy)
    assert torch.equal(y, linear(x, weight, bias))  # nothing is known in the first step
    how.scales.update()
    scale = how.scales.scale(0, X, x.device).item()
    assert scale == 2.0**-8
    big = x.detach().clone()
    big[1, :3], big[2, 0] = torch.tensor([-5.0, 5.0, -1.8]), 448 * scale
    out = linear(big.requires_grad_(), weight, bias, fp8=how)
    with torch.no_grad():
        capped = linear(big.clamp(-448 * scale, 448 * scale), weight, bias, fp8=how)
    assert torch.equal(out, capped)
    assert not how.scales.overflows.any()
    (largest,) = torch.autograd.grad(out, big, 1.75 * dy, retain_graph=True)
    how.scales.forget()
    out.backward(4 * dy)  # scale 2^-15
    how.scales.update()
    assert how.scales.overflows.tolist() == [[3, 0, 640]]
    assert torch.equal(big.grad, largest)
    assert how.scales.scale(0, X, x.device).item() == 2.0**-6  # the next step fits
    assert how.scales.scale(0, DY, x.device).item() == 2.0**-13


def test_the_largest_of_the_last_steps_counts():
    scales = DelayedScales(2)
    for step in range(18):
        top = 448.0 if step == 0 else 7.0
        scales.note(1, torch.tensor([[top, 0.0], [0.0, 1.0], [0.0, 0.0]]).double())
        scales.update()
        assert scales.scale(1, X, torch.device("cpu")) == (1.0 if step < 16 else 2.0**-6)
    assert scales.scale(0, X, torch.device("cpu")) == 1.0
    assert scales.overflows.tolist() == [[0, 0, 0], [0, 1, 0]]
    again = DelayedScales(2)
    again.load_state_dict(scales.state_dict())
    assert torch.equal(again.history, scales.history)
    scales.note(1, torch.ones(3, 2).double())
    scales.forget()
    scales.update()
    assert not scales.overflows.any()


@sweep("scaling", SCALINGS)
def test_what_is_not_finite_stays_so(scaling):
    x, weight, bias = make()
    how = layer(scaling, x, weight, bias, torch.ones(40, 144))
    for bad in (torch.inf, -torch.inf, torch.nan):
        broken = x.detach().clone()
        broken[5, 7] = bad
        y = linear(broken, weight, bias, fp8=how)
        assert y[5].isnan().all()
        assert y[torch.arange(40) != 5].isfinite().all()


def test_x_is_kept_in_8_bits_or_not_at_all():
    x, weight, _ = make(dtype=torch.bfloat16)

    def kept_bytes(how):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            linear(x, weight, fp8=how)
        own = (x.data_ptr(), weight.data_ptr())
        return sum(t.nbytes for t in kept if t.data_ptr() not in own)

    assert kept_bytes(layer("row")) == 40 * 272 + 40 * 4
    assert kept_bytes(layer("block")) == 40 * 272 + 40 * 3 * 4
    assert kept_bytes(layer("row", keeps=False)) == 0
    dy = torch.randn(40, 144).bfloat16()
    results = [
        torch.autograd.grad(linear(x, weight, fp8=layer("row", keeps=keeps)), (x, weight), dy)
        for keeps in (True, False)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results))


LEAF = torch.ones(16, 16, requires_grad=True)


class OfGpu(torch.Tensor):
    is_cuda = True


REFUSALS = [
    (lambda: linear(torch.ones(1, 16), torch.ones(40, 16), fp8=layer("row")),
     r"multiples of 16 with fp8, got weight=\[40, 16\]"),
    (lambda: linear(*make()[:2], fp8=Fp8()),
     r"8\.9 or newer with fp8, got device=cpu dtype=.*emulate"),
    (lambda: Fp8("rows"), "scaling row, block or tensor, got scaling=rows"),
    (lambda: Fp8("row", weight_gradient="fp8"), "got weight_gradient=fp8 with scaling=row"),
    (lambda: Fp8("tensor"), "scales with scaling=tensor only, got .*tensor"),
    (lambda: Fp8("row", scales=DelayedScales(1)), "scales with scaling=tensor only, got .*row"),
    (lambda: Fp8("block").check_split("column_linear", 64, 2),
     "with tp=2, got scaling=block with 64; change --fp8"),
    (lambda: Fp8("row").check_split("column_linear", 256, 2),
     "column_linear: .* got scaling=row with 256"),
    (lambda: Fp8()._check(torch.ones(2).bfloat16().as_subclass(OfGpu), torch.ones(16, 16)),
     r"got compute capability 8\.6 dtype=torch\.bfloat16"),
    (lambda: torch.autograd.grad(linear(LEAF, LEAF, fp8=layer("row")).sum(), LEAF,
                                 create_graph=True),
     "linear: expected one backward"),
]  # fmt: skip


@sweep(("call", "words"), REFUSALS)
def test_what_is_refused(call, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises((ValueError, RuntimeError), match=words):
        call()


def assert_same_codes(got, want):
    a, b = (codes.codes.float().cpu() for codes in (got, want))
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_triton_casts_have_the_same_bits(triton_device):
    x = torch.randn(37, 272) * torch.logspace(-30, 30, 37)[:, None]
    x[3], x[4, 5], x[5, 6], x[6, 7] = 0.0, torch.inf, -torch.inf, torch.nan
    x = x.to(triton_device)
    kernels = backend.triton_module("linear.fp8_triton")
    for form, group, values in ((E4M3, BLOCK, x), (E5M2, 272, x), (E4M3, 37, x.bfloat16().t())):
        want, got = round_rows(values, form, group), kernels.round_rows(values, form, group)
        assert torch.equal(got.scales.nan_to_num(), want.scales.nan_to_num())
        assert_same_codes(got, want)
    scale = torch.tensor(2.0**-5, device=triton_device)
    x = torch.where(x.abs() < 1e6, x, 0.0)[:, :144]
    x[7, 8], x[8, 9] = torch.inf, torch.nan
    for form, values in ((E4M3, x), (E5M2, x), (E4M3, x.bfloat16().t())):
        want, told = round_all(values, form, scale, True)
        got, found = kernels.round_all(values, form, scale, True)
        assert kernels.round_all(values, form, scale)[0].flipped is None
        assert found[0].amax() == told[0]
        assert found[1].sum() == told[1] > 0
        assert_same_codes(got, want)
        for each in (got, want):
            assert torch.equal(each.flipped.view(torch.uint8), each.codes.t().view(torch.uint8))
            assert each.flipped.is_contiguous()


def test_triton_notes_are_torchs(triton_device):
    """Parts of more tiles than a program has lanes, [2] of a first step; what was noted stays."""
    parts = torch.randint(0, 4097, (2, 1500)).float()
    parts[1] = 4096.0  # their sum is beyond fp32's integers
    parts[1, 3] = 1.0
    found = [x.to(triton_device) for x in (parts, torch.tensor([3.0, 5.0]).double(), parts[:, :7])]
    want = torch.full((2, 3, 3), 4.0, dtype=torch.float64)
    want[:, 1] = torch.tensor(
        [[parts[0].max(), 4.0, parts[0, :7].max()], [4 + 4096 * 1499 + 1, 9, 4 + 4096 * 6 + 1]]
    )
    for notes in (linear_fp8, backend.triton_module("linear.fp8_triton")):
        noted = torch.full((2, 3, 3), 4.0, dtype=torch.float64, device=triton_device)
        notes.note_(noted, 1, [x.contiguous() for x in found])
        assert torch.equal(noted.cpu(), want)


def on_hopper(a, b, scale_a, scale_b, **options):
    """torch._scaled_mm, with what cublasLt asks of its operands there."""
    assert a.stride() == (a.shape[1], 1), f"a[{list(a.shape)}] is not by rows: {a.stride()}"
    assert b.stride() == (1, b.shape[0]), f"b[{list(b.shape)}] is not by columns: {b.stride()}"
    assert not any(n % 16 for n in (a.shape[1], *b.shape)), (a.shape, b.shape)
    for scale, of in ((scale_a, (a.shape[0], 1)), (scale_b, (1, b.shape[1]))):
        assert scale.dtype == torch.float32
        assert scale.numel() == 1 or (scale.shape == of and scale.is_contiguous())
        assert scale.data_ptr() % 16 == 0, "an H200 refused a scale 4 bytes off"
    try:
        return SCALED_MM(a, b, scale_a, scale_b, **options)
    except RuntimeError as error:
        if "primitive" not in str(error):  # oneDNN has e4m3 from AVX-512 FP16 on
            raise
        y = (a.float() @ b.float()) * scale_a * scale_b
        bias = options["bias"]
        return (y if bias is None else y + bias.float()).to(options["out_dtype"])


SCALED_MM = torch._scaled_mm


CASTS = [  # scaling, weight_gradient, casts
    *((scaling, "bf16", "triton") for scaling in SCALINGS),
    ("tensor", "fp8", "triton"),
    *(("tensor", of_weight, "torch") for of_weight in ("bf16", "fp8")),
    ("row", "bf16", "torch"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scaling", "weight_gradient", "casts"), CASTS)
def test_a_gpus_layer_is_the_emulated(scaling, weight_gradient, casts, triton_device, monkeypatch):
    """torch's scaled products (they run on CPUs too): all but the order of sums, for any tokens."""
    if scaling == "row" and triton_device == "cpu" and torch.__version__ < "2.13":
        pytest.skip(f"torch {torch.__version__} has products with scales of rows on GPUs alone")
    if casts == "torch":
        monkeypatch.setattr(backend, "triton_module", lambda name: linear_fp8)
    monkeypatch.setattr(torch, "_scaled_mm", on_hopper)
    for n, keeps in ((48, True), (37, False)):
        step = [t.detach().to(triton_device) for t in make(n, f=48, dtype=torch.bfloat16)]
        dy, found = torch.randn(48, n).bfloat16().to(triton_device).t(), []
        for emulate in (True, False):
            scales = known(scaling)
            how = Fp8(scaling, weight_gradient, emulate, scales, keeps=keeps)
            for _ in range(2 if scales else 1):  # delayed scales are known in the second
                leaves = [t.clone().requires_grad_() for t in step]
                y = linear(*leaves, fp8=how)
                y.backward(dy)
                if scales is not None:
                    scales.update()
            found.append([y.detach(), *(t.grad for t in leaves)])
            assert scales is None or scales.overflows.sum() == 0
        for name, want, got in zip(("y", "dx", "dweight", "dbias"), *found):
            rows = want.float().abs().amax(-1, keepdim=True)
            assert ((got.float() - want.float()).abs() <= rows * 2.0**-8).all(), (name, n)


def test_triton_products_with_blocks(triton_device):
    x, weight, bias = (t.detach().to(triton_device) for t in make(n=130, c=272, f=144))
    kernels = backend.triton_module("linear.fp8_triton")
    a, b = round_rows(x, E5M2, BLOCK), round_rows(weight, E4M3, BLOCK)
    y = kernels.block_product(a, b, bias, torch.float32).cpu()
    want = (a.values(torch.float64) @ b.values(torch.float64).t()).cpu() + bias.double().cpu()
    rows = want.abs().amax(1, keepdim=True)
    assert ((y - want).abs() <= rows * 1e-6).all()
