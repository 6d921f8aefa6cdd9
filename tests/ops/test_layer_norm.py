"""layer_norm, rms_norm and their residual forms beyond test_cases.py: large means, masks, what is
used of the results, refusals; Triton's tiles and partial sums."""

import pytest
import torch
from cells import slow, sweep
from test_cases import check

from fastpar.kernels import (
    Rng,
    keep_mask,
    layer_norm,
    make_key,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    triton_launch,
)
from fastpar.kernels.cases import residual_norm
from fastpar.kernels.norm import TABLE, Config
from fastpar.kernels.reference import layer_norm_ref, residual_layer_norm_ref


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.usefixtures("poisoned")
@sweep(("c", "mean"), [(768, 1e2), (768, 1e4), (2500, -1e6)])
def test_large_mean_costs_no_accuracy(place, c, mean):
    """x - center is exact and the mean's rounding is corrected: a few roundings of y, whatever the
    mean. (Uncorrected, the error is half an ulp of the mean: 3e-2 at -1e6.) In Triton one warp to a
    row, and several."""
    x = (torch.randn(5, c) + mean).to(place)
    weight = torch.ones(c, device=place)
    exact = layer_norm_ref(x.double(), weight.double())
    error = (layer_norm(x, weight) - exact).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()


@sweep("shape", [(7, 40), (3, 2, 4, 40)])
def test_the_mask_is_keep_mask(form, shape):
    """Forward and backward, in every sample, head and row, whatever the key: so rows do not depend
    on how a batch is cut."""
    rng = Rng(make_key(1 << 40, (1 << 33) - 2), 32767)
    dtype = torch.float32 if len(shape) == 2 else torch.float16
    x, w = torch.ones(shape, dtype=dtype), torch.ones(40, dtype=dtype, device=form)
    x = x.to(form).requires_grad_()
    _, out = residual_layer_norm(x, torch.zeros_like(x), w, dropout_p=0.4, rng=rng)
    (dx,) = torch.autograd.grad(out.sum(), x)
    want = keep_mask(rng, 0.4, shape, device=form)
    assert torch.equal(out != 0, want)
    assert torch.equal(dx != 0, want)


def test_only_what_is_used():
    """Without a gradient of y; residual_out unused, as by the last norm of a model."""
    x, r, w = leaf(2, 3, 8), leaf(2, 3, 8), leaf(8)
    y, out = residual_layer_norm(x, r, w)
    for grad in torch.autograd.grad(out.sum(), (x, r), retain_graph=True):
        assert torch.equal(grad, torch.ones(2, 3, 8))
    want = residual_layer_norm_ref(x, r, w)[0]
    grads, wanted = (torch.autograd.grad(z.sin().sum(), (x, r, w)) for z in (y, want))
    torch.testing.assert_close(grads, wanted)


ONE, META = torch.ones(2, 4), torch.ones(4, device="meta")
REFUSALS = [  # words, arguments of the plain norms; two are of both
    (r"expected x of shape \[..., C\] .*got x=\[\]", torch.tensor(1.0), torch.ones(1)),
    (r"expected x of shape \[..., C\] .*got x=\[2, 0\]", torch.ones(2, 0), torch.ones(0)),
    (r"expected .* 1 <= C <= 16384, got x=\[1, 16385\]", torch.ones(1, 16385), torch.ones(16385)),
    (r"expected a floating dtype, got x=torch.int64", torch.ones(2, 4).long(), torch.ones(4)),
    (r"expected weight of shape \[C\]=\[4\], got weight=\[5\]", ONE, torch.ones(5)),
    (r"expected bias of shape \[C\]=\[4\], got bias=\[3\]", ONE, torch.ones(4), torch.ones(3)),
    (r"expected weight of x's dtype .*got weight=torch.float64", ONE, torch.ones(4).double()),
    (r"expected weight on x's device cpu, got .* on meta", ONE, META),
]
OF_RESIDUALS = [  # words, x, residual, x_bias
    (r"of one shape, got x=\[2, 3, 4\] residual=\[2, 4\]", torch.ones(2, 3, 4), ONE, None),
    (r"expected x of residual's dtype torch.float16", ONE, torch.ones(2, 4).half(), None),
    (r"or 16 bits with a float32 residual, got x=torch.f", torch.ones(2, 4).double(), ONE, None),
    (r"expected x on residual's device cpu, got", torch.ones(2, 4, device="meta"), ONE, None),
    (r"expected x_bias of shape \[C\]=\[4\], got x_bias=\[5\]", ONE, ONE, torch.ones(5)),
]


def test_what_is_refused():
    for words, *args in REFUSALS:
        for op in (layer_norm, rms_norm)[: 4 - len(args)]:
            with pytest.raises(ValueError, match=f"^{op.__name__}: {words}"):
                op(*args)
    for words, x, residual, x_bias in OF_RESIDUALS:
        for op in (residual_layer_norm, residual_rms_norm):
            with pytest.raises(ValueError, match=f"^{op.__name__}: .*{words}"):
                op(x, residual, torch.ones(4), x_bias=x_bias)
    with pytest.raises(ValueError, match=r"dropout: expected 0 <= p < 1, got p=1.0"):
        residual_layer_norm(ONE, ONE, torch.ones(4), dropout_p=1.0)


def test_rows_apart_are_not_copied(recorded, triton_device):
    """A slice of a wider tensor is read in place."""
    from fastpar.kernels.norm import triton

    launches = recorded(triton, "launch")
    part = torch.randn(2, 5, 96, device=triton_device)[..., 32:64]
    layer_norm(part, torch.randn(32, device=triton_device))
    assert launches[0][2].data_ptr() == part.data_ptr()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("how", [Config(16, 16, 2), Config(64, 24, 8)])
def test_every_kind_of_config(triton_device, how):
    """Several warps a row, one, and several rows a program."""
    with TABLE.trying((), how):
        check(residual_norm(10, 300, 0.0, triton_device), torch.float32, triton_device)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("c", [4100, slow(2500), slow(16384)])
def test_wide_rows(c, triton_device):
    """Rows that warps share; from 4096 on rows whose columns programs share in backward."""
    # fp16, because the interpreter adds what warps exchange one after another, a GPU in a tree.
    dtype = torch.float32 if triton_device == "cuda" else torch.float16
    check(residual_norm(2, c, 0.1, triton_device), dtype, triton_device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("arch", [90, *(slow(a) for a in triton_launch.SMS if a != 90)])
def test_every_arch(monkeypatch, triton_device, arch):
    """Its number of programs, and so few that each walks over several tiles, some over one more."""
    monkeypatch.setattr(triton_launch, "INTERPRETED_ARCH", arch)
    for sms in (1, triton_launch.SMS[arch]):
        monkeypatch.setattr(triton_launch, "_INTERPRETED_SMS", sms)
        check(residual_norm(26, 200, 0.0, triton_device), torch.float32, triton_device)


@pytest.mark.slow
def test_more_programs_than_one_block_of_partials(monkeypatch, triton_device):
    """Counts rows: exact in fp32."""
    monkeypatch.setattr(triton_launch, "_INTERPRETED_SMS", 132)
    x, weight, rstd = (torch.ones(s, device=triton_device) for s in ((4300, 3), 3, (1, 4300)))
    given = torch.ops.fastpar.layer_norm_bwd(x, None, x, weight, rstd, x.dtype, None, None, True)
    assert torch.equal(given[2], torch.full_like(weight, 4300.0))


def test_no_weight_is_a_weight_of_ones_that_nobody_makes(place):
    """Bits, as 1 * x is x; nothing of it is kept, and it has no gradient."""
    x, residual, dy = (torch.randn(3, 5, 40).to(place) for _ in range(3))
    ones, kept = torch.ones(40, device=place), []

    def found(weight):
        leaves = [t.clone().requires_grad_() for t in (x, residual)]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.shape) or t, lambda t: t
        ):
            outs = [rms_norm(leaves[0], weight), layer_norm(leaves[0], weight)]
            outs += [*residual_rms_norm(*leaves, weight), *residual_layer_norm(*leaves, weight)]
        return *outs, *torch.autograd.grad(outs, leaves, [dy] * 6)

    assert all(map(torch.equal, found(None), found(ones)))
    assert kept.count(ones.shape) == 4  # of the second call
