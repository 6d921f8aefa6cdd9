"""dk and dv of the Hopper backward: the source as Python with numbers, every order of its barriers,
and what it compiles to. Only test_on_a_gpu runs the kernel itself."""

import json
from pathlib import Path

import pytest
import torch
from cells import slow

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Triton with Gluon")

from gluon_roles import emulate, explore
from test_attention_hopper import draw, fake_gpu, moved, roundings, without

from fastpar.kernels.attention import hopper_bwd_triton as hopper
from fastpar.kernels.attention.peers import (
    attention_backward_hopper,
    attention_forward_hopper,
    refusal_of_backward,
    refusal_of_hopper,
)
from fastpar.kernels.reference import attention_ref

ROOT = Path(__file__).parents[2]
BLOCK = 128


@pytest.fixture
def run(monkeypatch):
    """dk and dv on CPU tensors; run.blocks: what each program did."""
    blocks = []
    monkeypatch.setattr(hopper, "launch", emulate(hopper, blocks))

    def run(do, q, k, v, scale, programs=3, slots=3, kv_slots=2):
        blocks.clear()
        monkeypatch.setattr(hopper, "sm_count", lambda device: programs)
        monkeypatch.setattr(hopper, "SLOTS", slots)
        monkeypatch.setattr(hopper, "KV_SLOTS", kv_slots)
        lse, delta = statistics(do, q, k, v, scale)
        packed = torch.empty(*q.shape[:2], 2 * k.shape[2], 64, dtype=q.dtype)
        dk, dv = packed.chunk(2, 2)
        hopper.attention_hopper_dkdv(do, q, k, v, lse, delta, dk, dv, scale)
        return dk, dv

    run.blocks = blocks
    return run


def statistics(do, q, k, v, scale):
    """lse in base 2 and delta, [B, H, T], as the forward and the dq kernel leave them."""
    group, T = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * scale
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    o = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
    delta = (do.double() * o).sum(-1).transpose(1, 2)
    lse = scores.logsumexp(-1) * hopper.LOG2_E.value
    return lse.float().contiguous(), delta.float().contiguous()


def grads_of(do, q, k, v, scale):
    """dq, dk and dv by the formula, in the tensors' dtype."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention_ref(*inputs, softmax_scale=scale), inputs, do)


def check(found, do, q, k, v, scale):
    """P, dS, o (for delta) and the results are rounded to the inputs' dtype; all else is fp32's."""
    exact = grads_of(*(x.double() for x in (do, q, k, v)), scale)
    u, r = roundings(q, k, scale)
    group, T, D = q.shape[2] // k.shape[2], *q.shape[1::2]
    do, q, k, v = (x.double() for x in (do, q, k, v))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    dp, size = (torch.einsum("bthd,bshd->bhts", *x) for x in ((do, v), (do.abs(), v.abs())))
    ds = (p * (dp - (p * dp).sum(-1, True))).abs()
    fp32 = (D + T + 4) * 2.0**-24 * p * (size + (p * size).sum(-1, True))
    o = torch.einsum("bhts,bshd->bthd", p, v)
    delta = (do.abs() * o.abs()).sum(-1).transpose(1, 2)[..., None]
    off = (u + r) * ds + u * p * delta + fp32
    bounds = [
        torch.einsum("bhts,bshd->bthd", off, k.abs()) * scale,
        torch.einsum("bhts,bthd->bshd", off, q.abs()) * scale,
        torch.einsum("bhts,bthd->bshd", (u + r) * p, do.abs()),
    ]
    bounds[1:] = [x.unflatten(2, (-1, group)).sum(3) for x in bounds[1:]]
    for got, want, bound in zip(found, exact[-len(found) :], bounds[-len(found) :]):
        assert ((got - want).abs() <= 1.01 * bound + (u + 2**-20) * want.abs() + 1e-30).all()


@pytest.mark.parametrize(
    ("sizes", "dtype", "programs"),
    [
        ((1, 4, 1, 1), torch.float16, 1),
        ((2, 132, 2, 1), torch.bfloat16, 3),
        ((1, 300, 4, 2), torch.bfloat16, 2),
        ((2, 384, 1, 1), torch.float16, 5),
        slow((1, 1024, 2, 2), torch.bfloat16, 3),
        slow((3, 128, 2, 2), torch.float16, 2),
        slow((1, 2000, 2, 1), torch.bfloat16, 7),
    ],
)
def test_emulated_source_matches_oracle(run, poisoned, sizes, dtype, programs):
    """poisoned: every row of dk and dv is written, and shared memory is read only when filled."""
    q, k, v = draw(*sizes, 64, dtype=dtype)
    do = torch.randn(q.shape).to(dtype)
    check(run(do, q, k, v, 0.2, programs=programs), do, q, k, v, 0.2)


def test_rows_beyond_the_end_come_from_nowhere(run):
    """The next sample's rows, infinite here, begin where a tile of this one goes on."""
    q, k, v = draw(2, 132, 1, 1, 64)
    do = torch.randn(q.shape).to(q.dtype)
    alone = run(*(x[:1].clone() for x in (do, q, k, v)), 0.1)
    for x in (do, q, k, v):
        x[1] = torch.inf
    for got, want in zip(run(do, q, k, v, 0.1), alone):
        assert torch.equal(got[:1], want)


def roles_of(run, tiles, **slots):
    q, k, v = draw(1, BLOCK * tiles, 1, 1, 64)
    run(torch.ones_like(q), q, k, v, 0.1, programs=1, **slots)
    (block,) = run.blocks
    return block.roles, block.counts


@pytest.mark.parametrize(
    ("tiles", "slots", "kv_slots"),
    [(1, 3, 2), (2, 2, 1), *(slow(n, 3, 2) for n in range(2, 9)), slow(4, 4, 1)],
)
def test_every_order_of_barriers_copies_and_products(run, tiles, slots, kv_slots):
    """Nobody waits for ever, no slot is filled while it is read or before both consumers have read
    it, and every product and every row's statistics are of the block whose turn it is."""
    roles, counts = roles_of(run, tiles, slots=slots, kv_slots=kv_slots)
    assert explore(roles, counts) > 300
    blocks = tiles * (tiles + 1)  # of queries, for all tiles of keys
    for consumer in roles[:2]:
        looks = [s.reads[0][1] for s in consumer if s.what == "look"]
        assert looks == [i for i in range(blocks) for _ in range(2)]
        seen = [s.reads[-1][1] for s in consumer if s.what == "read"]
        assert seen == [i for i in range(blocks) for _ in range(4)]


FAULTS = {
    "filled while|overwritten before": [
        lambda first, second, producer: [moved(first, "arrive", -3), second, producer],
        lambda first, second, producer: [first, second, without(producer, "wait", 4)],
    ],
    "before or after": [
        lambda first, second, producer: [without(first, "wait", 1), second, producer],
        lambda first, second, producer: [first, without(second, "wait", 0), producer],
    ],
    "deadlock": [
        lambda first, second, producer: [without(first, "arrive", 0), second, producer],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "fault"), [(message, fault) for message in FAULTS for fault in FAULTS[message]]
)
def test_faults_of_the_protocol_are_found(run, message, fault):
    roles, counts = roles_of(run, 2)
    with pytest.raises(AssertionError, match=message):
        explore(fault(*roles), counts)


def test_what_it_cannot_serve_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert refusal_of_backward(fake_gpu(2, 128, 4, 64)) == ""
    assert "head dimension 64, not 128" in refusal_of_backward(fake_gpu(2, 128, 4, 128))
    assert "16 bytes, not T=130" in refusal_of_backward(fake_gpu(2, 130, 4, 64))
    x = torch.empty(1, 8, 1, 64)
    with pytest.raises(RuntimeError, match=r"attention_backward_hopper: .* sm_90 .*; call att"):
        attention_backward_hopper(*[x] * 5, torch.empty(1, 1, 8), *[x] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [4, 128, 300, 1024, 2000])
def test_on_a_gpu(T):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = draw(3, T, 12, 4, 64, dtype=dtype, device="cuda")
        why = refusal_of_hopper(q, k, v)
        if why:
            pytest.skip(f"the Hopper backward {why}")
        o, lse = attention_forward_hopper(q, k, v)
        do = torch.randn(q.shape).to(q)
        results = [[torch.empty_like(x) for x in (q, k, v)] for _ in range(2)]
        for grads in results:
            attention_backward_hopper(do, q, k, v, o, lse, *grads)
        check(results[0], do, q, k, v, 0.125)
        assert all(map(torch.equal, *results))


def test_exponentials_run_while_a_product_is_in_flight():
    """In both Triton versions' machine code. `make aot` refuses spills and broken products."""
    rows = json.loads((ROOT / "bench" / "results" / "aot" / "table.json").read_text())["rows"]
    rows = [row for row in rows if row["module"] == "attention_hopper_bwd"]
    assert len({(row["triton"], row["calls"][0]) for row in rows}) == 4
    for row in rows:
        assert row["arch"] == 90
        assert row["loop_mufu"] == 32  # scores a thread
        assert row["overlapped_mufu"] == 32
