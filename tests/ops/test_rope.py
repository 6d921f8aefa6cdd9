"""rope beyond the cases of kernels/cases.py: parts of a batch, what is kept, what is refused."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import rms_norm, rope, rope_turns
from fastpar.kernels.reference import rope_turns_ref

D = 16


def gradients(qkv, turns, **options):
    leaf = qkv.clone().requires_grad_()
    outs = rope(leaf, turns, **options)
    return [*outs, torch.autograd.grad([o.sum() for o in outs], leaf)[0]]


@sweep("norm", [False, True])
def test_bits_of_a_token_do_not_depend_on_the_others(norm, place):
    """What context parallelism, documents and pipelines rely on."""
    qkv = torch.randn(3, 40, 4, 2, D).to(place)
    turns = rope_turns(torch.arange(40), 1e4, D).to(place)
    whole = gradients(qkv, turns, norm=norm)
    part = gradients(qkv[1:, 7:30], turns[7:30], norm=norm)
    flat = gradients(qkv.flatten(0, 1), turns.repeat(3, 1), norm=norm)
    each = gradients(qkv, turns.expand(3, 40, D), norm=norm)
    for a, b, c, d in zip(whole, part, flat, each):
        assert torch.equal(a[1:, 7:30], b)
        assert torch.equal(a.flatten(0, 1), c)
        assert torch.equal(a, d)
    turned = gradients(qkv, turns[None, :1], norm=norm)  # one position for all
    assert torch.equal(turned[0][:, 0], whole[0][:, 0])


def test_heads_are_where_attention_looks_for_them(place):
    """Head h of queries belongs to the keys h // R; values are not touched."""
    qkv = torch.randn(1, 2, 5, 2, D).to(place)
    q, k, v = rope(qkv, None, norm=True)
    for r in range(3):
        for g in range(2):
            want = rms_norm(qkv[:, :, r, g])
            torch.testing.assert_close(q[:, :, 3 * g + r], want)
    torch.testing.assert_close(k, rms_norm(qkv[:, :, 3]))
    assert torch.equal(v, qkv[:, :, 4])


def test_scores_depend_on_distances_alone(place):
    x = torch.randn(1, 1, 3, 1, 64).to(place).expand(1, 9, 3, 1, 64)
    q, k, _ = rope(x, rope_turns(torch.arange(100, 109), 1e4, 64).to(place))
    scores = (q[0, :, 0] @ k[0, :, 0].T).cpu()
    for distance in range(-8, 9):
        line = torch.diagonal(scores, distance)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=0, atol=1e-4)


def test_turns_are_cosines_and_sines_of_positions():
    positions = torch.tensor([[0, 1, 7], [1000, 0, 3]])
    found = rope_turns(positions, 1e4, D)
    assert found.dtype == torch.float32
    # An angle of 1000 has a rounding of 3e-5.
    torch.testing.assert_close(found.double(), rope_turns_ref(positions, 1e4, D), rtol=0, atol=1e-4)


def test_only_a_norm_keeps_the_projection():
    qkv = torch.randn(2, 8, 3, 2, D, requires_grad=True)
    turns, kept = rope_turns(torch.arange(8), 1e4, D), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        rope(qkv, turns)
        assert kept == [turns.shape]
        rope(qkv, turns, norm=True)
        assert kept[1:] == [qkv.shape, turns.shape]


def test_an_output_that_nobody_uses_has_no_gradient():
    qkv = torch.randn(2, 8, 4, 2, D, requires_grad=True)
    turns = rope_turns(torch.arange(8), 1e4, D)
    for i, where in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
        dqkv = torch.autograd.grad(rope(qkv, turns, norm=True)[i].square().sum(), qkv)[0]
        assert dqkv[:, :, where].abs().sum() > 0
        dqkv[:, :, where] = 0
        assert not dqkv.any()


X, TURNS, W = torch.ones(2, 5, 3, 2, 4), torch.ones(5, 4), torch.ones(4)


@sweep(
    ("qkv", "turns", "options", "words"),
    [
        (X[:, :, :2], None, {}, r"expected qkv of shape \[..., R \+ 2, G, D\] with .*=\[2, 5, 2"),
        (X[..., :0, :], None, {}, "of at least 1, got qkv"),
        (X.long(), None, {}, "expected a floating dtype, got qkv=torch.int64"),
        (X, TURNS[:4], {}, r"turns \[..., D\] for the rows and the even D of qkv=.*turns=\[4, 4\]"),
        (X, TURNS[:, :2], {}, r"got turns=\[5, 2\]; make them by rope_turns"),
        (X[..., :3], TURNS[:, :3], {}, "even D"),
        (X, TURNS[None, None, None], {}, r"got turns=\[1, 1, 1, 5, 4\]"),
        (X, TURNS.half(), {}, "expected turns of float32, got turns=torch.float16"),
        (X, TURNS.to("meta"), {}, "expected turns on qkv's device cpu, got turns on meta"),
        (
            X,
            TURNS,
            {"q_weight": W},
            "expected weights of queries and keys, .*, got weights of q wi",
        ),
        (X, TURNS, {"q_weight": W, "k_weight": W}, "got weights of q and k with norm=False; give"),
        (X, TURNS, {"norm": True, "q_weight": W[:2], "k_weight": W}, "expected q_weight of shape"),
        (X, TURNS, {"norm": True, "eps": -1.0}, "expected a finite eps >= 0, got eps=-1.0"),
    ],
)
def test_what_is_refused(qkv, turns, options, words):
    with pytest.raises(ValueError, match=f"rope: .*{words}"):
        rope(qkv, turns, **options)
