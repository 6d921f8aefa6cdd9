"""The Triton kernels of cross_entropy: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from cells import cells, slow

pytest.importorskip("triton", reason="needs triton")

from fastpar.kernels import cross_entropy
from fastpar.kernels.loss import TABLE
from fastpar.kernels.loss import triton as cross_entropy_triton
from fastpar.kernels.reference import cross_entropy_ref
from fastpar.kernels.triton_launch import record
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 1.0, "z_loss": 0.1})
REDUCTIONS = ("mean", "sum", "none")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's


def make(n, v, device, *, pad=0, dtype=torch.float32, ignored=True):
    logits = (torch.randn(n, v + pad) * 3).to(device, dtype)
    targets = torch.randint(0, v, (n,))
    if ignored:
        targets[::5] = -100
    return logits.requires_grad_(), targets.to(device)


def gradients(logits, targets, dloss=1.0, **kwargs):
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy(leaf * 1.0 if kwargs.get("inplace") else leaf, targets, **kwargs)
    loss.backward(torch.as_tensor(dloss, dtype=torch.float32).to(loss.device).expand(loss.shape))
    return loss.detach(), leaf.grad


def check(inputs, **kwargs):
    def eager(logits, targets):
        return cross_entropy_ref(logits.float(), targets, **kwargs)

    return assert_matches_oracle(
        lambda *a: cross_entropy(*a, **kwargs),
        lambda *a: cross_entropy_ref(*a, **kwargs),
        inputs,
        eager=eager,
    )


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32 lanes, so that small rows have every kind of tile; in the interpreter only."""
    if torch.cuda.is_available():
        pytest.skip("tiles of 32 lanes are for the interpreter: a GPU runs the shipped ones")
    config = {"U": 2, "W": 32, "num_warps": 1, "maxnreg": 64}
    monkeypatch.setattr(cross_entropy_triton, "config", lambda row_bytes, size, how: config)


@pytest.mark.usefixtures("poisoned", "small_tiles")
@pytest.mark.parametrize(
    ("v", "pad", "dtype"), cells([31, 32, 57, 64, 65, 96, 127, 200], [0, 1, 40], DTYPES, strength=1)
)
def test_every_kind_of_tile(v, pad, dtype, triton_device):
    """Heads, unrolled and single tiles, tails and tiles of padding, at every alignment."""
    inputs = make(9, v, triton_device, pad=pad, dtype=dtype)
    check(inputs, vocab_size=v, label_smoothing=0.1, reduction="none")


@pytest.mark.parametrize(
    ("pad", "dtype"), [(47, torch.float32), slow(0, torch.bfloat16), slow(47, torch.float16)]
)
def test_gpt2_vocabulary(pad, dtype, triton_device):
    check(make(3, 50257, triton_device, pad=pad, dtype=dtype), vocab_size=50257)


@pytest.mark.parametrize("v", [8193, 32769, slow(8192), slow(50257)])
def test_every_configuration(v, triton_device):
    """4, 8 and 16 warps in 16 bits; 50257 columns of fp32, above, have 32."""
    warps = cross_entropy_triton.config(2 * v, 2, TABLE.get(90))["num_warps"]
    assert warps == {8192: 4, 8193: 8, 32769: 16, 50257: 16}[v]
    check(make(3, v, triton_device, dtype=torch.float16), z_loss=1e-3)


@pytest.mark.parametrize("v", [127, 8192, slow(50257)])
def test_bf16_is_the_rounded_fp32(v, triton_device):
    """Rounded once."""
    logits, targets = make(3, v, triton_device, dtype=torch.bfloat16)
    loss, dlogits = gradients(logits, targets, label_smoothing=0.1)
    want = gradients(logits.float(), targets, label_smoothing=0.1)
    assert dlogits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, want[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(dlogits.float(), want[1], rtol=2.0**-8, atol=0)


def test_configurations_fit_the_notes():
    config = cross_entropy_triton.config
    configs = [config(*row, TABLE.get(90)) for row in ((1, 2), (1 << 16, 2), (100608, 2))]
    assert [c["num_warps"] for c in configs] == [4, 8, 16]
    assert config(50304 * 4, 4, TABLE.get(90))["num_warps"] == 32
    for c, size in zip([*configs, config(201216, 4, TABLE.get(90))], (2, 2, 2, 4)):
        assert c["W"] == c["num_warps"] * 32 * 16 // size  # 16 bytes a thread
        assert c["maxnreg"] * 32 * c["num_warps"] <= 65536
    for how in TABLE.candidates(90):
        for row in ((1, 2), (1 << 16, 2), (100608, 2), (201216, 4)):
            c = config(*row, how)
            assert 4 <= c["num_warps"] <= 32
            assert c["maxnreg"] * 32 * c["num_warps"] <= 65536


@pytest.mark.parametrize("how", [0, 4, *map(slow, (1, 2, 3))])
def test_every_alternative_of_the_tuning_list(how, triton_device):
    with TABLE.trying((), TABLE.candidates(90)[how]):
        check(make(3, 8193, triton_device, dtype=torch.float16), z_loss=1e-3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_incoming_gradient(reduction, triton_device):
    logits, targets = make(6, 70, triton_device)
    _, plain = gradients(logits, targets, reduction=reduction)
    _, scaled = gradients(logits, targets, -3.0, reduction=reduction)
    assert torch.equal(scaled, plain * -3.0)
    if reduction == "none":
        dloss = torch.tensor([1.0, 2.0, 1.0, 0.0, -1.0, 1.0])
        _, rows = gradients(logits, targets, dloss, reduction=reduction)
        assert torch.equal(rows, plain * dloss.to(triton_device)[:, None])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace(reduction, triton_device):
    logits, targets = make(6, 70, triton_device, pad=3, dtype=torch.float16)
    options = {"reduction": reduction, "vocab_size": 70, "label_smoothing": 0.1}
    expected = gradients(logits, targets, 2.0, **options)
    got = gradients(logits, targets, 2.0, inplace=True, **options)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("options", OPTIONS)
def test_all_targets_ignored_and_no_rows(options, triton_device):
    logits, targets = make(3, 10, triton_device)
    targets = torch.full_like(targets, -100)
    for reduction in REDUCTIONS:
        loss, dlogits = gradients(logits, targets, reduction=reduction, **options)
        assert loss.isnan().all() == (reduction == "mean")
        assert not loss.nan_to_num(0.0).any()
        assert not dlogits.any()
    loss, dlogits = gradients(logits[:0], targets[:0], reduction="sum", **options)
    assert loss == 0
    assert dlogits.shape == (0, 10)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_hostile_logits(label_smoothing, triton_device):
    """-inf as torch has it, 1e4, non-finite rows that say so, ignored rows of anything."""
    logits, targets = make(7, 300, "cpu", ignored=False)
    logits = logits.detach()
    logits[0, ::3] = -torch.inf
    targets[0] = 1
    logits[1, ::3] = -torch.inf
    targets[1] = 3
    logits[2] *= 3000
    logits[3, 5] = torch.nan
    logits[4, 5] = torch.inf
    logits[5] = -torch.inf
    logits[6] = torch.nan
    targets[6] = -100
    options = {"reduction": "none", "label_smoothing": label_smoothing}
    leaf = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, targets, **options)
    (expected,) = torch.autograd.grad(want.sum(), leaf)
    got = gradients(logits.to(triton_device), targets.to(triton_device), **options)
    loss, dlogits = (t.cpu().double() for t in got)
    torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(dlogits[:3], expected[:3], rtol=1e-5, atol=1e-7)
    assert dlogits[3:6].isnan().all()
    assert not dlogits[6].any()


def test_padding_holds_anything(triton_device):
    logits, targets = make(6, 100, triton_device, pad=28)
    logits = logits.detach()
    expected = gradients(logits, targets, vocab_size=100, label_smoothing=0.1)
    for value in (1e4, -torch.inf, torch.inf, torch.nan):
        logits[:, 100:] = value
        loss, dlogits = gradients(logits, targets, vocab_size=100, label_smoothing=0.1)
        assert torch.equal(loss, expected[0])
        assert torch.equal(dlogits, expected[1])
        assert not dlogits[:, 100:].any()


def test_targets_out_of_range_are_safe(triton_device):
    """nan and no gradient; memory around the rows stays as it is."""
    around = torch.full((7, 64), 7.0, device=triton_device)
    logits = torch.randn(5, 40).to(triton_device)
    targets = torch.tensor([3, 40, -1, 2**40, -(2**40)]).to(triton_device)
    around[1:6, 8:48] = logits
    view = around[1:6, 8:48]
    one = torch.ones((), device=triton_device)
    losses = cross_entropy_triton.cross_entropy_rows(view, targets, view, 40, -100, 0.1, 0.01, one)
    assert losses.isnan().tolist() == [False, True, True, True, True]
    assert view[0].any()
    assert not view[1:].any()
    around[1:6, 8:48] = 7.0
    assert torch.equal(around.cpu(), torch.full((7, 64), 7.0))


def test_launches_are_recorded():
    """Every call of aot_calls() launches a kernel for each architecture, and computes nothing."""
    for arch in (80, 90):
        for label, call in cross_entropy_triton.aot_calls():
            with record(arch) as launches:
                call()
            assert len(launches) == (3 if label in ("bf16", "fp32") else 1), label
