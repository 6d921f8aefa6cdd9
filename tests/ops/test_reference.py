"""The oracles against torch's own functions in fp64, and against published test vectors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import reference as ref
from fastpar.kernels.cases import cases_of, evaluate
from fastpar.kernels.philox import make_key

# fp64: some hundred roundings of 1.1e-16 each, times the cases' conditions of up to 1e4.
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got, expected, **EXACT)


PLAIN = ("attention", "layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm")
OPS = (*PLAIN, "bias_gelu", "gelu_mlp", "embedding", "linear", "cross_entropy", "adamw_step_",
       "linear_cross_entropy", "permute", "combine", "grouped_linear")  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_equals_what_torch_writes(op):
    """The oracle of every case of kernels/cases.py, and its gradients, beside torch's functions."""
    judged = 0
    for case in cases_of(op, 6, 32, more=True, **({"V": 7} if op == "embedding" else {})):
        torchs = case.stock if op == "attention" else case.eager
        lengths = " Tk=" in case.shape  # which torch aligns to the first key
        if lengths or torchs is case.ref or "T=0" in case.shape:
            continue
        inputs = list(case.inputs(torch.float32, "cpu").values())
        want, got = (evaluate(f, inputs, double=True) for f in (torchs, case.ref))
        assert want.keys() == got.keys()
        for name, value in want.items():
            # torch keeps the step of AdamW in fp32: 1 - beta^step is off by some roundings of it.
            how = {"rtol": 1e-6, "atol": 1e-6} if op == "adamw_step_" else EXACT
            message = functools.partial("{}: {}: {}".format, case.shape, name)
            torch.testing.assert_close(got[name], value, **how, msg=message, equal_nan=True)
        judged += 1
    assert judged


def test_cross_entropy_shards():
    logits = draw(5, 12).requires_grad_()
    targets = torch.tensor([0, 9, -100, 4, 5])
    loss = ref.cross_entropy_ref(logits, targets, vocab_size=10, reduction="sum", z_loss=0.1)
    (expected,) = torch.autograd.grad(loss, logits)
    logits = logits.detach()
    cuts = [(0, logits[:, :5]), (5, logits[:, 5:])]
    parts = [ref.cross_entropy_shard_ref(c, targets, first=f, vocab_size=10) for f, c in cuts]
    tops, sums, target_logits = (torch.stack(p) for p in zip(*parts))
    top = tops.amax(0)
    lse = top + (sums * (tops - top).exp()).sum(0).log()
    losses = (lse - target_logits.sum(0) + 0.1 * lse**2)[targets != -100]
    close(losses.sum(), loss.detach())
    options = {"vocab_size": 10, "z_loss": 0.1}
    one = torch.ones((), dtype=torch.float64)
    grads = [
        ref.cross_entropy_shard_grad_ref(c, targets, lse, one, first=f, **options) for f, c in cuts
    ]
    close(torch.cat(grads, 1), expected)


@sweep(
    ("counter", "key", "expected"),
    [  # Random123's known answers of philox4x32 with 10 rounds
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter, key, expected):
    assert ref.philox_ref(counter, key) == expected


def test_dropout_scales_what_the_mask_keeps():
    x, rng = draw(2, 3, 40), (make_key(3, 5), 4)
    keep = ref.keep_mask_ref(rng, 0.25, (2, 3, 40)).bool()
    close(ref.dropout_ref(x, 0.25, rng), torch.where(keep, x / 0.75, 0.0))
    assert 0 < keep.sum() < keep.numel()


def test_attention_drops_probabilities():
    q, k, v = (draw(1, 4, 2, 8, seed=s) for s in range(3))
    rng = (make_key(1, 0), 1)
    keep = ref.keep_mask_ref(rng, 0.5, (1, 2, 4, 4)).double()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1) * keep * 2, v)
    close(ref.attention_ref(q, k, v, dropout_p=0.5, rng=rng), expected)


@sweep("causal", [False, True])
def test_attention_of_documents(causal):
    """torch's form of it: a mask that is 1 where query and key are of one document."""
    q, k, v = (draw(9, 2, 8, seed=s) for s in range(3))  # [total, H, D]
    cu_seqlens = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    document = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    seen = document[:, None] == document
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    mask = seen.tril() if causal else seen
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(0, 1)
    close(ref.attention_ref(q, k, v, causal=causal, cu_seqlens=cu_seqlens), expected)


def test_attention_drops_as_document_i_what_sample_i_drops():
    q, k, v = (draw(2, 4, 2, 8, seed=s) for s in range(3))
    settings = {"dropout_p": 0.5, "rng": (make_key(1, 2**32 - 1), 3)}
    expected = ref.attention_ref(q, k, v, **settings).flatten(0, 1)
    cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    close(ref.attention_ref(*flat, **settings, cu_seqlens=cu_seqlens), expected)
