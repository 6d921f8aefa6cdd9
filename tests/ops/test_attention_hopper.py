"""The Hopper forward: its source as Python with numbers, every order of its barriers, and what it
compiles to. Only test_on_a_gpu runs the kernel itself."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cells import slow

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Triton with Gluon")

from gluon_roles import emulate, explore

from fastpar.kernels.attention import hopper_triton as hopper
from fastpar.kernels.attention import peers as attention_hopper
from fastpar.kernels.attention.peers import attention_forward_hopper, refusal_of_hopper
from fastpar.kernels.reference import attention_ref

ROOT = Path(__file__).parents[2]
BLOCK = 128


@pytest.fixture
def run(monkeypatch):
    """attention_hopper_fwd on CPU tensors; run.blocks: what each program did."""
    blocks = []
    monkeypatch.setattr(hopper, "launch", emulate(hopper, blocks))

    def run(*args, programs=3, kv_slots=2, q_slots=2):
        blocks.clear()
        monkeypatch.setattr(hopper, "sm_count", lambda device: programs)
        monkeypatch.setattr(hopper, "KV_SLOTS", kv_slots)
        monkeypatch.setattr(hopper, "Q_SLOTS", q_slots)
        return hopper.attention_hopper_fwd(*args)

    run.blocks = blocks
    return run


def draw(B, T, H, Hkv, D, dtype=torch.bfloat16, device="cpu"):
    """Parts of one projection's output, as a model has them."""
    x = torch.randn(B, T, H + 2 * Hkv, D).to(device, dtype)
    return x.split([H, Hkv, Hkv], 2)


def roundings(q, k, scale):
    """(u, r): of one rounding to q's dtype; and how far probabilities are off, relatively.

    A score is off by its sum of D products (D roundings of fp32 of sum |q| |k|) and its scaling,
    and a probability by twice that, an exponential and its share of the sum of T terms.
    """
    U, D, T = 2.0**-24, q.shape[3], k.shape[1]
    norms = (x.double().norm(dim=-1).max().item() for x in (q, k))
    score = (D + 2) * U * math.prod(norms) * scale
    return torch.finfo(q.dtype).eps / 2, 2 * score + (T + 8) * U


def check(o, lse, q, k, v, scale):
    """P is rounded to the inputs' dtype, and so is the result; all else is fp32's."""
    exact = attention_ref(q.double(), k.double(), v.double(), softmax_scale=scale)
    size = attention_ref(q.double(), k.double(), v.double().abs(), softmax_scale=scale)
    u, r = roundings(q, k, scale)
    assert ((o - exact).abs() <= 1.01 * (u + r) * size + u * exact.abs() + 1e-30).all()
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), keys) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    natural = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.double(), natural * hopper.LOG2_E.value, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize(
    ("sizes", "dtype", "programs"),
    [
        ((1, 1, 1, 1, 64), torch.float16, 1),
        ((2, 129, 2, 1, 128), torch.bfloat16, 3),
        ((1, 300, 4, 2, 64), torch.bfloat16, 2),
        ((2, 384, 1, 1, 64), torch.float16, 5),
        slow((1, 1024, 2, 2, 64), torch.bfloat16, 3),
        slow((3, 128, 2, 2, 128), torch.float16, 2),
        slow((1, 2000, 2, 1, 128), torch.bfloat16, 7),
        slow((2, 640, 3, 3, 64), torch.float16, 4),
    ],
)
def test_emulated_source_matches_oracle(run, poisoned, sizes, dtype, programs):
    """poisoned: every row of o and lse is written, and shared memory is read only when filled."""
    q, k, v = draw(*sizes, dtype=dtype)
    check(*run(q, k, v, 0.2, programs=programs), q, k, v, 0.2)


def test_rows_beyond_the_end_come_from_nowhere(run):
    """The next sample's keys and values, infinite here, begin where a tile of this one goes on."""
    q, k, v = draw(2, 130, 1, 1, 64)
    alone = run(q[:1].clone(), k[:1].clone(), v[:1].clone(), 0.1)
    k[1], v[1] = torch.inf, torch.nan
    o, lse = run(q, k, v, 0.1)
    assert torch.equal(o[:1], alone[0])
    assert torch.equal(lse[:1], alone[1])


def test_a_part_of_two_samples_is_not_written(run, monkeypatch):
    """Rows of o behind its own last one belong to the next sample."""
    q, k, v = draw(2, 130, 1, 1, 64)
    o, lse = run(q, k, v, 0.1)
    for i in range(2):
        one = run(*(x[i : i + 1] for x in (q, k, v)), 0.1)
        assert torch.equal(o[i : i + 1], one[0])
        assert torch.equal(lse[i : i + 1], one[1])


@pytest.mark.parametrize("n_tiles", range(1, 18))
def test_every_tile_belongs_to_one_program_and_pairs_are_of_equal_length(n_tiles):
    steps, tile_at = hopper.n_steps.fn, hopper.tile_at.fn
    for n_heads in (1, 2, 5):
        pairs = n_heads * ((n_tiles + 1) // 2)
        for programs in range(1, min(pairs, 7) + 1):
            found, lengths = [], set()
            for program in range(programs):
                mine = [
                    tile_at(s, program, programs, n_tiles)
                    for s in range(steps(program, programs, n_heads, n_tiles))
                ]
                found += [place for place in mine if place[1] >= 0]
                for (_, long), (_, short) in zip(mine[::2], mine[1::2]):
                    assert long >= short
                    lengths.add(long + 1 + short + 1)  # blocks of keys
            assert sorted(found) == [(h, t) for h in range(n_heads) for t in range(n_tiles)]
            assert lengths == {n_tiles + 1 - n_tiles % 2}


def roles_of(run, tiles, **slots):
    q, k, v = draw(1, BLOCK * tiles, 1, 1, 64)
    run(q, k, v, 0.1, programs=1, **slots)
    (block,) = run.blocks
    return block.roles, block.counts


@pytest.mark.parametrize(
    ("tiles", "kv_slots", "q_slots"),
    [(1, 2, 2), (2, 2, 2), (3, 1, 1), *(slow(n, 2, 2) for n in range(3, 9)), slow(4, 3, 1)],
)
def test_every_order_of_barriers_copies_and_products(run, tiles, kv_slots, q_slots):
    """Nobody waits for ever, no slot is filled while it is read or before both consumers have read
    it, and every product reads the block whose turn it is."""
    roles, counts = roles_of(run, tiles, kv_slots=kv_slots, q_slots=q_slots)
    assert explore(roles, counts) > 300
    for consumer in roles[:2]:
        for operand in (0, 1):  # the rings of QK's keys and of PV's values
            loads = [
                s.reads[-1] for s in consumer if s.what == "read" and len(s.reads) == 2 - operand
            ]
            assert [number for _, number in loads] == list(range(tiles * (tiles + 1) // 2))


def moved(role, what, to):
    """The role with its third step of a kind, of those that are not the first, moved by `to`."""
    role = list(role)
    at = [i for i, step in enumerate(role) if step.what == what][2]
    role.insert(at + to, role.pop(at))
    return role


def without(role, what, which):
    at = [i for i, step in enumerate(role) if step.what == what][which]
    return [step for i, step in enumerate(role) if i != at]


FAULTS = {
    "filled while|overwritten before": [
        lambda first, second, producer: [moved(first, "arrive", -2), second, producer],
        lambda first, second, producer: [first, second, without(producer, "wait", 6)],
    ],
    "before or after": [
        lambda first, second, producer: [without(first, "wait", 1), second, producer],
        lambda first, second, producer: [first, without(second, "wait", 2), producer],
    ],
    "deadlock": [
        lambda first, second, producer: [without(first, "arrive", 0), second, producer],
        lambda first, second, producer: [
            first, second,
            [replace(s, number=1 - s.number) if s.what == "wait" else s for s in producer],
        ],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "fault"), [(message, fault) for message in FAULTS for fault in FAULTS[message]]
)
def test_faults_of_the_protocol_are_found(run, message, fault):
    roles, counts = roles_of(run, 2)
    with pytest.raises(AssertionError, match=message):
        explore(fault(*roles), counts)


def fake_gpu(*shape, dtype=torch.bfloat16, cuda=True):
    x = torch.empty(shape, dtype=dtype)
    return SimpleNamespace(
        is_cuda=cuda, device="cuda", shape=x.shape, dtype=dtype, stride=x.stride,
        element_size=x.element_size, numel=x.numel, data_ptr=x.data_ptr,
    )  # fmt: skip


def test_what_it_cannot_serve_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x = fake_gpu(2, 128, 4, 64)
    assert refusal_of_hopper(x, x, x) == ""
    assert "causal" in refusal_of_hopper(x, x, x, causal=False)
    assert "as many keys" in refusal_of_hopper(x, *[fake_gpu(2, 64, 4, 64)] * 2)
    assert "not 80" in refusal_of_hopper(*[fake_gpu(2, 128, 4, 80)] * 3)
    assert "float32" in refusal_of_hopper(*[fake_gpu(2, 128, 4, 64, dtype=torch.float32)] * 3)
    assert "16 bytes" in refusal_of_hopper(*[fake_gpu(0, 128, 4, 64)] * 3)
    monkeypatch.setattr(attention_hopper, "_gluon_found", lambda: False)
    assert "Triton 3.6" in refusal_of_hopper(x, x, x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "sm_90" in refusal_of_hopper(x, x, x)
    with pytest.raises(RuntimeError, match=r"cannot: it needs a GPU of sm_90 .*; call attention"):
        attention_forward_hopper(*draw(1, 8, 1, 1, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("T", [1, 128, 300, 1024, 2000])
def test_on_a_gpu(T, D):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = draw(3, T, 12, 4, D, dtype=dtype, device="cuda")
        why = refusal_of_hopper(q, k, v)
        if why:
            pytest.skip(f"the Hopper forward {why}")
        o, lse = attention_forward_hopper(q, k, v)
        check(o, lse, q, k, v, D**-0.5)
        again = attention_forward_hopper(q, k, v)
        assert torch.equal(o, again[0])
        assert torch.equal(lse, again[1])


def test_softmax_runs_while_a_product_is_in_flight():
    """In both Triton versions' machine code. `make aot` refuses spills and broken products."""
    rows = json.loads((ROOT / "bench" / "results" / "aot" / "table.json").read_text())["rows"]
    rows = [row for row in rows if row["module"] == "attention_hopper"]
    assert len({(row["triton"], row["calls"][0]) for row in rows}) == 8
    for row in rows:
        assert row["arch"] == 90
        assert row["overlapped_mufu"] == row["loop_mufu"] == 66  # 64 scores a thread, 2 rows
