"""Attention's Triton kernels beyond test_cases.py: tiles, strides, what is written and what is not;
in the interpreter or on a GPU."""

import math
from itertools import accumulate

import pytest
import torch
from cells import cells, covering, sweep

pytest.importorskip("triton", reason="needs triton")

import pytest

from fastpar.kernels import Rng, attention, make_key, triton_launch
from fastpar.kernels.attention import plans
from fastpar.kernels.attention import triton as host
from fastpar.kernels.attention.plans import SECTIONS, Config, tma_reads
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle

RNG = Rng(make_key(3, 2**32 - 1), 4)
ARCHS = [80, 86, 90]
HEAD_DIMS = [d for d in range(16, 129, 8) if d not in (24, 104)]
SLOW = pytest.mark.slow
Mask = tuple[torch.Tensor | None, int, int]
NO_MASK: Mask = (None, 0, 0)


@pytest.fixture
def arch(request, monkeypatch):
    """Whose configurations run; on a GPU its own, whatever the parameter."""
    if torch.cuda.is_available() and request.param != 90:
        pytest.skip("a GPU runs its own configurations")
    monkeypatch.setattr(triton_launch, "INTERPRETED_ARCH", request.param)
    return request.param


def draw(device, *shape, dtype=torch.float16, scale=1.0):
    return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()


def check(inputs, **settings):
    def call(op):
        return lambda q, k, v: op(q, k, v, **settings)

    return assert_matches_oracle(call(attention), call(attention_ref), inputs)


def run(q, k, v, do, *, mask: Mask = NO_MASK, cu=None, causal=True):
    """o, lse, dq, dk, dv by the host functions."""
    scale = q.shape[-1] ** -0.5
    o, lse = host.attention_fwd(q, k, v, causal, scale, *mask, cu)
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    host.attention_bwd(do, q, k, v, o, lse, *grads, causal, scale, *mask, cu)
    return o, lse, *grads


def test_one_query_and_one_key(triton_device):
    q, k, v, do = (torch.randn(4, 1, 2, 16).to(triton_device) for _ in range(4))
    o, lse, dq, dk, dv = run(q, k, v, do)
    assert torch.equal(o, v)
    assert torch.equal(dv, do)
    torch.testing.assert_close(lse[:, :, 0], (q * k).sum(-1)[:, 0] * 16**-0.5 / math.log(2))
    # dp and delta are the same sum of 16 products in two orders: each is rounded 16 times.
    bound = 2 * 16 * 2**-24 * (do * v).abs().sum(-1, keepdim=True) * 16**-0.5
    assert (dq.abs() <= bound * k.abs()).all()
    assert (dk.abs() <= bound * q.abs()).all()


@pytest.mark.parametrize(
    ("arch", "variant", "D"),
    cells(ARCHS, ["plain", "dropout", "fp32"], [16, 32, 64, 128], strength=1),
    indirect=["arch"],
)
def test_every_configuration(triton_device, arch, variant, D):
    """Lengths that leave a tile of every kind: full, cut by the diagonal, cut by the end."""
    dtype = torch.float32 if variant == "fp32" else torch.float16
    inputs = [draw(triton_device, 1, n, 1, D, dtype=dtype) for n in (130, 140, 140)]
    check(inputs, dropout_p=0.0 if variant == "plain" else 0.3, rng=RNG)


@pytest.mark.parametrize("D", [24, *(pytest.param(d, marks=SLOW) for d in (*HEAD_DIMS, 104))])
def test_every_head_dim(triton_device, D):
    inputs = [draw(triton_device, 1, 40, 2, D) for _ in range(3)]
    check(inputs, dropout_p=0.2, rng=RNG)


@pytest.mark.parametrize(
    "p", [127 / 256, 0.5, 200 / 256, *(pytest.param(x / 256, marks=SLOW) for x in (1, 255))]
)
def test_every_kind_of_threshold(triton_device, p):
    """Below, at and above 128: four bytes are compared at once."""
    inputs = [draw(triton_device, 1, 60, 1, 16, dtype=torch.float32) for _ in range(3)]
    check(inputs, dropout_p=p, rng=RNG)


@pytest.mark.parametrize(
    ("block_q", "block_k"),
    [(64, 16), *(pytest.param(*b, marks=SLOW) for b in ((32, 32), (16, 64), (64, 128)))],
)
def test_the_mask_does_not_depend_on_the_tile(triton_device, monkeypatch, block_q, block_k):
    config = Config(block_q, block_k, 4, 1, "tma")  # which dropout must not take for its keys
    monkeypatch.setattr(host, "get_config", lambda *_: config)
    inputs = [draw(triton_device, 1, 140, 1, 16, dtype=torch.float32) for _ in range(3)]
    check(inputs, dropout_p=0.4, rng=RNG)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("causal", [True, False])
def test_every_output_is_written(triton_device, causal):
    """NaN in fresh memory and in the gradients reaches no result; unseeing queries included. lse is
    the logarithm of the sum in base 2."""
    q, k, v = (torch.randn(1, n, 2, 40).to(triton_device) for n in (70, 65, 65))
    o, lse, *grads = run(q, k, v, torch.randn_like(q), causal=causal)
    for x in (o, *grads):
        assert x.isfinite().all()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 40**-0.5
    if causal:
        assert (o[:, :5] == 0).all()
        assert (grads[0][:, :5] == 0).all()
        scores.masked_fill_(~torch.ones(70, 65, dtype=torch.bool).tril(-5).to(q.device), -math.inf)
    want = scores.logsumexp(-1) / math.log(2)
    want[want == -math.inf] = math.inf  # probabilities 2**(s - lse) of unseeing queries are 0
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=1e-6)


def documents(device, lengths, H=2, D=32, dtype=torch.float16, Hkv=None):
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    shapes = [(sum(lengths), h, D) for h in (H, Hkv or H, Hkv or H, H)]
    return cu, [torch.randn(s).to(device, dtype) for s in shapes]


@covering(
    1, ("lengths", [(5,), (1, 63, 64, 65, 7)]), ("causal", [True, False]), ("threshold", [0, 77])
)
def test_documents_are_samples(triton_device, lengths, causal, threshold):
    """A document has the bits that it has alone, as sample d of a batch."""
    cu, (q, k, v, do) = documents(triton_device, lengths, H=2, Hkv=1)
    mask: Mask = (RNG.key, 4, threshold) if threshold else NO_MASK
    o, lse, *grads = run(q, k, v, do, mask=mask, cu=cu, causal=causal)
    assert lse.shape == (2, sum(lengths))
    for d, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        alone: Mask = (make_key(3, 2**32 - 1 + d), 4, threshold) if threshold else NO_MASK
        parts = [x[a:b][None] for x in (q, k, v, do)]
        o_d, lse_d, *grads_d = run(*parts, mask=alone, causal=causal)
        assert torch.equal(lse[:, a:b], lse_d[0])
        for x, y in zip((o, *grads), (o_d, *grads_d)):
            assert torch.equal(x[a:b], y[0])


@pytest.mark.parametrize("arch", ARCHS, indirect=True)
def test_a_document_does_not_see_its_neighbours(triton_device, arch):
    cu, tensors = documents(triton_device, (30, 45, 40))
    for x in tensors:
        x[:30] = math.nan
        x[75:] = math.inf
    o, lse, *grads = run(*tensors, cu=cu)
    for x in (o, lse.T, *grads):
        assert x[30:75].isfinite().all()


@sweep(
    "cu",
    [
        [5, 30, 70],
        [0, 30, 200],
        [0, 60, 20, 70],
        [-(2**31), 2**31 - 1, 40],
        [70, 35, 0],
        [0, 0, 0, 70],
        [2**31 - 1, 2**31 - 1],
    ],
)
def test_wrong_cu_seqlens_write_nowhere_else(triton_device, cu):
    _, (q, k, v, do) = documents(triton_device, (70,))
    cu = torch.tensor(cu, dtype=torch.int32).to(triton_device)
    o, lse = host.attention_fwd(q, k, v, True, 0.2, *NO_MASK, cu)
    room = torch.full((3, 70 + 400, 2, 32), 7.0).to(q)
    grads = [x[200:270] for x in room]
    host.attention_bwd(do, q, k, v, o, lse, *grads, True, 0.2, *NO_MASK, cu)
    assert (room[:, :200] == 7).all()
    assert (room[:, 270:] == 7).all()


def test_infinite_and_nan_inputs_stay_in_their_rows(triton_device):
    q, k, v, do = (torch.randn(1, 90, 1, 64).to(triton_device, torch.float16) for _ in range(4))
    clean = run(q, k, v, do)
    q[0, 40], q[0, 50] = math.nan, math.inf
    o, lse, *_ = run(q, k, v, do)
    others = torch.ones(90, dtype=torch.bool)
    others[[40, 50]] = False
    assert torch.equal(o[0, others], clean[0][0, others])
    assert o[0, 40].isnan().all()
    assert not lse[0, 0, 50].isfinite()


def test_scores_of_minus_infinity_weigh_nothing(triton_device):
    q, k, v = (torch.ones(1, 70, 1, 16, device=triton_device) for _ in range(3))
    v[:] = torch.randn(v.shape)
    k[0, 3:20] = -math.inf
    o, *_ = run(q, k, v, torch.ones_like(q), causal=False)
    seen = torch.cat([v[:, :3], v[:, 20:]], 1)
    torch.testing.assert_close(o, seen.mean(1, keepdim=True).expand_as(o))


def test_a_section_is_of_the_heads_that_fit():
    k = (2, 1024, 3, 64), 2  # of bf16: 256 KB a head
    assert plans.heads_per_section(*k, SECTIONS.get(80).megabytes) == 64
    with SECTIONS.trying((), SECTIONS.kind(1)):
        assert plans.heads_per_section(*k, SECTIONS.get(80).megabytes) == 4
    with pytest.raises(ValueError, match="attention_sections: expected 1 to 1024, got megabytes=0"):
        SECTIONS.write(90, (), SECTIONS.kind(0))


def test_heads_by_sections_are_all_computed(triton_device, monkeypatch):
    """Sections that do not divide the number of heads; see [Note: order]."""
    inputs = [torch.randn(2, 20, h, 16).to(triton_device) for h in (6, 3, 3)]
    do = torch.randn_like(inputs[0])
    want = run(*inputs, do)
    for heads in (2,) if triton_device == "cpu" else (2, 5):
        monkeypatch.setattr(plans, "heads_per_section", lambda *_, n=heads: n)
        # Without what was planned before.
        monkeypatch.setattr(host, "fwd_plan", plans.fwd_plan.__wrapped__)
        monkeypatch.setattr(host, "bwd_plan", plans.bwd_plan.__wrapped__)
        for a, b in zip(run(*inputs, do), want):
            assert torch.equal(a, b)


@pytest.mark.parametrize("recorded", [80, 90])
def test_descriptors_are_hoppers(recorded):
    used: dict[str, set[bool]] = {"fwd": set(), "bwd": set()}
    for label, call in host.aot_calls():
        with triton_launch.record(recorded) as launches:
            call()
        assert len(launches) == 3, label
        for launch in launches:
            used["fwd" if "_fwd_" in launch.name else "bwd"].add(launch.constants["TMA"])
    expected = {True, False} if recorded == 90 else {False}
    assert used == {"fwd": expected, "bwd": expected}


def test_strides_are_read_and_written_in_place(triton_device):
    """Packed, heads before rows, steps over samples, and addresses no descriptor can hold."""
    B, T, H, D = 2, 40, 1, 32
    packed = torch.randn(B, T, 3, H, D).to(triton_device)
    ones = torch.ones(B, T, H, D, device=triton_device)
    want = run(*(x.contiguous() for x in packed.unbind(2)), ones)
    layouts = {
        "packed": packed.clone().unbind(2),
        "heads first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed.unbind(2)],
        "every other sample": [x.repeat_interleave(2, 0)[::2] for x in packed.unbind(2)],
        "odd address": [torch.cat([x[..., :1], x], -1)[..., 1:] for x in packed.unbind(2)],
    }
    for name, (q, k, v) in layouts.items():
        expanded = ones[:1, :1, :1, :1].expand(B, T, H, D)
        assert tma_reads(k) == (name != "odd address")
        for a, b in zip(run(q, k, v, ones if name == "packed" else expanded), want):
            torch.testing.assert_close(a, b, msg=name)


def test_gradients_of_a_packed_tensor_leave_their_neighbours_alone(triton_device):
    T, H, D = 70, 2, 40
    q, k, v = (torch.randn(1, T, H, D).to(triton_device) for _ in range(3))
    do = torch.randn_like(q)
    o, lse, *want = run(q, k, v, do)
    room = torch.full((3, T + 2, 5, H + 1, D + 8), 7.0).to(triton_device)
    grads = [room[1:2, 1 : T + 1, i, :H, :D] for i in (1, 2, 3)]
    host.attention_bwd(do, q, k, v, o, lse, *grads, True, D**-0.5, *NO_MASK, None)
    for got, grad in zip(grads, want):
        assert torch.equal(got, grad)
        got.fill_(7.0)
    assert (room == 7.0).all()
