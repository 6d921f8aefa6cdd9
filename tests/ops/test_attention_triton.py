"""Attention's Triton kernels beyond test_cases.py: tiles of every kind, masks kept as bits,
strides, what is written and what is not; in the interpreter or on a GPU."""

import functools
import math

import pytest
import torch
from cells import cells, slow, sweep
from test_cases import check

pytest.importorskip("triton", reason="needs triton")

from fastpar.kernels import Rng, attention, attention_qkvpacked, keep_mask, make_key, triton_launch
from fastpar.kernels.attention import BITS, Mask, _attention_bits, bits_shape, bits_triton, plans
from fastpar.kernels.attention import triton as host
from fastpar.kernels.attention.plans import Config, tma_reads
from fastpar.kernels.cases import attention_case

F32, F16 = torch.float32, torch.float16
RNG = Rng(make_key(3, 2**32 - 1), 4)
ARCHS = [80, 86, 90]
NO_MASK = (None, 0, 0)


@pytest.fixture
def arch(request, monkeypatch):
    """Whose configurations run; on a GPU its own, whatever the parameter."""
    if torch.cuda.is_available() and request.param != 90:
        pytest.skip("a GPU runs its own configurations")
    monkeypatch.setattr(triton_launch, "INTERPRETED_ARCH", request.param)
    return request.param


def draw(device, *shape, dtype=torch.float16):
    return torch.randn(shape).to(device, dtype).requires_grad_()


def run(q, k, v, do, *, cu=None, causal=True):
    """o, lse, dq, dk, dv by the host functions."""
    scale = q.shape[-1] ** -0.5
    o, lse = host.attention_fwd(q, k, v, causal, scale, *NO_MASK, cu)
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    host.attention_bwd(do, q, k, v, o, lse, *grads, causal, scale, *NO_MASK, cu)
    return o, lse, *grads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "variant", "D"),
    cells(ARCHS, ["plain", "dropout", "fp32"], [16, 32, 64, 128], strength=1),
    indirect=["arch"],
)
def test_every_configuration(triton_device, arch, variant, D):
    """Lengths that leave a tile of every kind: full, cut by the diagonal, cut by the end."""
    p, dtype = 0.0 if variant == "plain" else 0.3, F32 if variant == "fp32" else F16
    check(attention_case(1, 130, D, 1, triton_device, Tk=140, p=p), dtype, triton_device)


@pytest.mark.slow
@pytest.mark.parametrize("D", range(16, 129, 8))
def test_every_head_dim(triton_device, D):
    check(attention_case(1, 40, D, 2, triton_device, p=0.2), F16, triton_device)


@pytest.mark.parametrize("p", [127 / 256, 0.5, 200 / 256, slow(1 / 256), slow(255 / 256)])
def test_every_kind_of_threshold(triton_device, p):
    """Below, at and above 128: four bytes are compared at once."""
    check(attention_case(1, 33, 16, 1, triton_device, p=p), F32, triton_device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "tile"),
    [(0, (64, 16)), (1, (64, 128)), *(slow(0, t) for t in ((32, 32), (16, 64), (64, 128))),
     *(slow(1, t) for t in ((32, 16), (16, 64), (128, 32)))],
)  # fmt: skip
def test_the_mask_does_not_depend_on_the_tile(triton_device, monkeypatch, kept, tile):
    """Drawn or kept as bits."""
    config = Config(*tile, 4, 1, "tma")  # which dropout must not take for its keys
    monkeypatch.setattr(host, "get_config", lambda *_: config)
    with BITS.trying((), Mask(kept)):
        check(attention_case(1, 140, 16, 1, triton_device, p=0.4), F32, triton_device)


@pytest.mark.slow
def test_heads_by_sections_are_all_computed(triton_device, monkeypatch):
    """Sections that do not divide the number of heads; see [Note: order]."""
    inputs = [torch.randn(1, 20, h, 16).to(triton_device) for h in (6, 3, 3)]
    do = torch.randn_like(inputs[0])
    want = run(*inputs, do)
    for heads in (2,) if triton_device == "cpu" else (2, 5):
        monkeypatch.setattr(plans, "heads_per_section", lambda *_, n=heads: n)
        # Without what was planned before.
        monkeypatch.setattr(host, "fwd_plan", plans.fwd_plan.__wrapped__)
        monkeypatch.setattr(host, "bwd_plan", plans.bwd_plan.__wrapped__)
        for a, b in zip(run(*inputs, do), want):
            assert torch.equal(a, b)


WRONG = [
    *([5, 30, 70], [0, 30, 200], [0, 60, 20, 70], [70, 35, 0], [0, 0, 0, 70]),
    *([-(2**31), 2**31 - 1, 40], [2**31 - 1, 2**31 - 1]),
]


@sweep("cu", WRONG)
def test_wrong_cu_seqlens_write_nowhere_else(triton_device, cu):
    q, k, v, do = (torch.randn(70, 1, 32).to(triton_device, torch.float16) for _ in range(4))
    cu = torch.tensor(cu, dtype=torch.int32).to(triton_device)
    o, lse = host.attention_fwd(q, k, v, True, 0.2, *NO_MASK, cu)
    room = torch.full((3, 70 + 400, 1, 32), 7.0).to(q)
    grads = [x[200:270] for x in room]
    host.attention_bwd(do, q, k, v, o, lse, *grads, True, 0.2, *NO_MASK, cu)
    assert (room[:, :200] == 7).all()
    assert (room[:, 270:] == 7).all()


def test_what_is_not_finite_stays_in_its_rows(triton_device):
    """And keys whose scores are -inf weigh nothing."""
    q, k, v, do = (torch.randn(1, 70, 1, 16).to(triton_device, torch.float16) for _ in range(4))
    clean = run(q, k, v, do)
    q[0, 40], q[0, 50] = math.nan, math.inf
    o, lse, *_ = run(q, k, v, do)
    others = torch.ones(70, dtype=torch.bool)
    others[[40, 50]] = False
    assert torch.equal(o[0, others], clean[0][0, others])
    assert o[0, 40].isnan().all()
    assert not lse[0, 0, 50].isfinite()
    q, k, v = torch.ones_like(q), torch.ones_like(k), v.float()
    k[0, 3:20] = -math.inf
    o, *_ = run(q.float(), k.float(), v, do.float(), causal=False)
    seen = torch.cat([v[:, :3], v[:, 20:]], 1)
    torch.testing.assert_close(o, seen.mean(1, keepdim=True).expand_as(o))


@pytest.mark.slow
def test_strides_are_read_and_written_in_place(triton_device):
    """Packed, and at addresses that no descriptor can hold; gradients of a packed tensor leave
    their neighbours alone. More layouts are in test_op.py."""
    B, T, H, D = 1, 40, 2, 40
    packed = torch.randn(B, T, 3, H, D).to(triton_device)
    do = torch.randn(B, T, H, D).to(triton_device)
    want = run(*(x.contiguous() for x in packed.unbind(2)), do)
    odd = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in packed.unbind(2)]
    for layout in (packed.unbind(2), odd):
        assert tma_reads(layout[1]) == (layout is not odd)
        for a, b in zip(run(*layout, do), want):
            torch.testing.assert_close(a, b)
    room = torch.full((3, T + 2, 5, H + 1, D + 8), 7.0).to(triton_device)
    grads = [room[1:2, 1 : T + 1, i, :H, :D] for i in (1, 2, 3)]
    scale = D**-0.5
    host.attention_bwd(do, *packed.unbind(2), *want[:2], *grads, True, scale, *NO_MASK, None)
    for got, grad in zip(grads, want[2:]):
        torch.testing.assert_close(got, grad)
        got.fill_(7.0)
    assert (room == 7.0).all()


def unpacked(bits, T, Tk):
    """bool [B, H, T, Tk] of [Note: kept bits], with the note's numbers."""
    key = torch.arange(64)
    place = 16 * (key // 2 % 4) + 8 * (key % 2) + 7 - key // 8
    keep = (bits.cpu().view(torch.int64)[..., None] >> place) & 1  # [B, H, blocks, rows, 64]
    return keep.bool().transpose(2, 3).flatten(3)[:, :, :T, :Tk]


@pytest.mark.parametrize(
    ("sizes", "causal", "p"),
    [
        ((1, 2, 5, 70), True, 0.1),
        ((2, 1, 5, 70), False, 0.5),
        *(slow((1, 2, 70, 300), causal, p) for causal in (0, 1) for p in (1 / 256, 0.5, 0.9)),
    ],
)
def test_kept_bits_are_the_mask(triton_device, sizes, causal, p):
    rng = Rng(make_key(3, 2**32 - 1, triton_device), 4)
    bits = torch.zeros(bits_shape(*sizes), dtype=torch.int64, device=triton_device)
    mask = rng.key, rng.site_head, round(256 * p)
    bits_triton.attention_bits_fwd(*mask, bool(causal), bits.view(torch.uint64), sizes)
    got, want = unpacked(bits, *sizes[2:]), keep_mask(rng, p, sizes).cpu()
    if causal:
        seen = torch.ones(sizes[2:], dtype=torch.bool).tril(sizes[3] - sizes[2])
        got, want = got & seen, want & seen
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("B", "T", "Tk", "D", "Hkv", "dtype", "causal"),
    [
        (2, 1, 9, 16, 1, F16, True),
        (1, 40, 40, 40, 2, F32, False),
        slow(1, 130, 140, 64, 2, F16, True),
        slow(1, 70, 5, 24, 1, F32, True),
    ],
)
def test_attention_with_kept_bits_is_the_oracles(triton_device, B, T, Tk, D, Hkv, dtype, causal):
    case = attention_case(B, T, D, 2, triton_device, Tk=Tk, Hkv=Hkv, p=0.3, causal=causal)
    with BITS.trying((), Mask(1)):
        check(case, dtype, triton_device)


def test_bits_are_drawn_once_for_three_kernels(triton_device, recorded):
    """For calls with a mask and without documents, which draw theirs."""
    calls = recorded(bits_triton, "attention_bits_fwd")
    q, k, v = (draw(triton_device, 1, 20, 1, 16) for _ in range(3))
    with BITS.trying((), Mask(1)):
        first = attention(q, k, v, dropout_p=0.3, rng=RNG)
        grads, again = (
            torch.autograd.grad(first.sum(), (q, k, v), retain_graph=True) for _ in range(2)
        )
        assert all(map(torch.equal, grads, again))
        attention(q, k, v)
        flat = [x[0] for x in (q, k, v)]
        cu = torch.tensor([0, 20], dtype=torch.int32, device=triton_device)
        documents = attention(*flat, dropout_p=0.3, rng=RNG, cu_seqlens=cu)
    assert len(calls) == 1
    # fp16: the sums of the two ways differ, and are rounded once each.
    torch.testing.assert_close(documents, first[0], rtol=2.0**-10, atol=2.0**-11)


@pytest.mark.slow
def test_the_op_with_bits_passes_torchs_checks(triton_device):
    args = (make_key(3, 0, triton_device), 4, 77, True, [1, 2, 20, 30], torch.device(triton_device))
    with BITS.trying((), Mask(1)):
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(_attention_bits.overload, args, test_utils=tests)
        qkv = draw(triton_device, 1, 20, 3, 1, 16)
        eager = functools.partial(attention_qkvpacked, dropout_p=0.3, rng=RNG)
        got = torch.compile(eager, backend="aot_eager", fullgraph=True)(qkv)
        want = eager(qkv)
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(x.sum(), qkv)[0] for x in (got, want)))


def test_bits_take_an_eighth_of_a_byte_an_element_and_are_kept_on_hopper():
    assert 8 * math.prod(bits_shape(8, 12, 1024, 1024)) == 8 * 12 * 1024 * 1024 // 8
    assert [BITS.get(arch).kept for arch in (80, 90, 120)] == [0, 1, 0]
