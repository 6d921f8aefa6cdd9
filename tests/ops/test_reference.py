"""The oracles against torch's own functions in fp64, and against published test vectors."""

import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import reference as ref
from fastpar.kernels.philox import make_key

EXACT = {"rtol": 1e-12, "atol": 1e-13}  # fp64: some hundred roundings of 1.1e-16 each


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got, expected, **EXACT)


@sweep("bias", [None, draw(5, seed=2)])
def test_linear(bias):
    x, weight = draw(3, 7), draw(5, 7, seed=1)
    close(ref.linear_ref(x, weight, bias), F.linear(x, weight, bias))


@sweep("approximate", ["tanh", "none"])
def test_bias_gelu(approximate):
    x, bias = 4 * draw(9, 6), draw(6, seed=1)
    expected = F.gelu(x + bias, approximate=approximate)
    close(ref.bias_gelu_ref(x, bias, approximate=approximate), expected)


@sweep("reduction", ["mean", "sum", "none"])
@sweep("label_smoothing", [0.0, 0.1])
def test_linear_cross_entropy(reduction, label_smoothing):
    x, weight = draw(6, 8), draw(11, 8, seed=1)
    targets = torch.tensor([0, 9, -100, 4, 4, 1])
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    got = ref.linear_cross_entropy_ref(x, weight, targets, vocab_size=10, **options)
    close(got, F.cross_entropy((x @ weight.T)[:, :10], targets, **options))


def test_cross_entropy_z_loss():
    """The penalty is what log softmax leaves out: the square of the logits' common offset."""
    logits, targets = draw(4, 7), torch.tensor([0, 6, -100, 2])
    plain = ref.cross_entropy_ref(logits, targets, reduction="none")
    normalized = logits.log_softmax(-1)  # lse = 0
    close(ref.cross_entropy_ref(normalized, targets, reduction="none", z_loss=5.0), plain)
    moved = ref.cross_entropy_ref(normalized + 3.0, targets, reduction="none", z_loss=5.0)
    close(moved - plain, torch.tensor([45.0, 45.0, 0.0, 45.0], dtype=torch.float64))


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


@sweep("maximize", [False, True])
def test_adamw_step(maximize):
    p, grads = draw(13), [draw(13, seed=s) for s in range(5)]
    expected = p.clone().requires_grad_()
    options = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1, "maximize": maximize}
    adamw = torch.optim.AdamW([expected], betas=(0.9, 0.95), foreach=False, **options)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, grad in enumerate(grads, start=1):
        expected.grad = 0.5 * grad
        adamw.step()
        ref.adamw_step_ref(
            [p], [grad], [m], [v], beta1=0.9, beta2=0.95, step=step, grad_scale=0.5, **options
        )
    close(p, expected.detach())
    close(m, adamw.state[expected]["exp_avg"])


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


@sweep("causal", [False, True])
def test_attention(causal):
    q, k, v = (draw(2, 5, 3, 8, seed=s) for s in range(3))  # [B, T, H, D]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    close(ref.attention_ref(q, k, v, causal=causal), expected)


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


def test_layer_norm_and_residual():
    x, residual = 3 + draw(4, 6, 10), draw(4, 6, 10, seed=1)
    weight, bias, x_bias = draw(10, seed=2), draw(10, seed=3), draw(10, seed=4)
    close(ref.layer_norm_ref(x, weight, bias), F.layer_norm(x, (10,), weight, bias))
    y, total = ref.residual_layer_norm_ref(x, residual, weight, bias, x_bias=x_bias)
    close(total, residual + x + x_bias)
    close(y, F.layer_norm(total, (10,), weight, bias))


def test_embedding():
    idx, wte, wpe = torch.tensor([[4, 0, 4]]), draw(5, 6), draw(9, 6, seed=1)
    close(ref.embedding_ref(idx, wte, wpe, first_position=2), wte[idx] + wpe[2:5])
