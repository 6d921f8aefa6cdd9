"""fp64 tensors are computed in fp64 throughout: outputs, statistics and gradients equal the
oracles', written in plain torch, to a few units of fp64."""

import torch
import torch.nn.functional as F
from cells import sweep

from fastpar import kernels
from fastpar.kernels import Rng, make_key, reference

RNG = Rng(make_key(3, 2**33 - 1), 5)
B, T, C, V = 3, 17, 40, 131
TARGETS = torch.tensor([[(7 * i * i + j) % 120 for j in range(T)] for i in range(B)])
TARGETS[0, 3] = TARGETS[2, 5] = -100
IDS = TARGETS.clamp(min=0)
CU = torch.tensor([0, 5, 17], dtype=torch.int32)


def draw(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def dropping(name, **kwargs):
    """The op and its oracle under the same options."""
    return [lambda *x, op=op: op(*x, **kwargs) for op in pair(name)]


def pair(name):
    return getattr(kernels, name), getattr(reference, f"{name}_ref")


P = {"dropout_p": 0.2, "rng": RNG}
QKV = [draw(B, T, 4, 10), draw(B, T + 3, 2, 10), draw(B, T + 3, 2, 10) + 1]
PACKED = [x[0, :T] for x in QKV]
ROW = [draw(C), draw(C) + 1, draw(C) - 1]
LOSS = {"vocab_size": V - 9, "label_smoothing": 0.1, "z_loss": 0.01}
CASES = {
    "attention": (*dropping("attention"), QKV),
    "attention dropout": (*dropping("attention", **P), QKV),
    "attention full": (*dropping("attention", causal=False), QKV),
    "attention documents": (*dropping("attention", cu_seqlens=CU, **P), PACKED),
    "layer_norm": (*pair("layer_norm"), [draw(B, T, C) * 9 + 5, *ROW[:2]]),
    "rms_norm": (*pair("rms_norm"), [draw(B, T, C), ROW[0]]),
    "residual_layer_norm": (
        *dropping("residual_layer_norm", **P),
        [draw(B, T, C), draw(B, T, C) + 1, *ROW[:2]],
    ),
    "residual_rms_norm": (
        *dropping("residual_rms_norm", x_bias=ROW[2], **P),
        [draw(B, T, C), draw(B, T, C) + 1, ROW[0]],
    ),
    "bias_gelu": (*pair("bias_gelu"), [draw(B, T, C), ROW[0]]),
    "linear": (*pair("linear"), [draw(B, T, C), draw(64, C), draw(64)]),
    "route": (
        *[lambda logits, f=f: f(logits, 3)[0] for f in pair("route")],
        [draw(50, 7)],
    ),
    "permute": (
        *[lambda x, f=f: f(x, torch.arange(24).view(12, 2) % 5, 5)[0] for f in pair("permute")],
        [draw(12, C)],
    ),
    "combine": (
        *[lambda r, w, f=f: f(r, w, torch.arange(12).flip(0)) for f in pair("combine")],
        [draw(12, C), draw(6, 2)],
    ),
    "grouped_linear": (
        *[lambda *x, f=f: f(*x, torch.tensor([11, 0, 19])) for f in pair("grouped_linear")],
        [draw(30, C), draw(3, 64, C), draw(3, 64)],
    ),
    "embedding": (
        *[lambda w, p, op=op: op(IDS, w, p, **P) for op in pair("embedding")],
        [draw(V, C), draw(T, C)],
    ),
    "dropout": (*[lambda x, op=op: op(x, 0.3, RNG) for op in pair("dropout")], [draw(B, T, C)]),
    **{
        f"{name} {reduction} {kind}": (
            *[lambda *x, op=op, options=options: op(*x, TARGETS, **options) for op in pair(name)],
            inputs,
        )
        for name, inputs in (
            ("cross_entropy", [draw(B, T, V) * 4]),
            ("linear_cross_entropy", [draw(B, T, C), draw(V, C)]),
        )
        for reduction in ("mean", "sum", "none")
        for kind, more in (("plain", {}), ("smooth", LOSS))
        for options in [{"reduction": reduction, **more}]
    },
}


def results(fn, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in outputs
    )
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def assert_exact(got, want):
    assert got.dtype == want.dtype == torch.float64
    assert (got - want).norm() <= 1e-13 * want.norm()


@sweep("case", CASES)
def test_equals_the_oracle(case):
    op, ref, inputs = CASES[case]
    for got, want in zip(results(op, inputs), results(ref, inputs), strict=True):
        assert_exact(got, want)


def test_qkvpacked():
    qkv = draw(B, T, 3, 4, 10)
    for options in ({}, P):
        got = results(lambda x, o=options: kernels.attention_qkvpacked(x, **o), [qkv])
        ref = lambda x, o=options: reference.attention_ref(*x.unbind(2), **o)  # noqa: E731
        for a, b in zip(got, results(ref, [qkv]), strict=True):
            assert_exact(a, b)


def test_in_place_and_buffers():
    """The loss that overwrites its logits, and gradients that are added to fp64 buffers."""
    logits = draw(B, T, V)
    got = results(lambda x: kernels.cross_entropy(x * 1.0, TARGETS, inplace=True), [logits])
    want = results(lambda x: reference.cross_entropy_ref(x, TARGETS), [logits])
    for a, b in zip(got, want, strict=True):
        assert_exact(a, b)
    x, w, start = draw(B, T, C), draw(V, C).requires_grad_(), draw(V, C) * 0.1
    buffer = start.clone()
    loss = kernels.linear_cross_entropy(x, w, TARGETS, chunk_rows=7, weight_grad=buffer)
    (loss * 3).backward()
    exact = reference.linear_cross_entropy_ref(x, w, TARGETS)
    assert_exact(buffer, start + torch.autograd.grad(exact * 3, w)[0])
    buffer = start.clone()
    kernels.embedding(IDS, w, wte_grad=buffer).cos().sum().backward()
    (exact,) = torch.autograd.grad(reference.embedding_ref(IDS, w).cos().sum(), w)
    assert_exact(buffer, start + exact)


def test_shards_of_the_loss():
    logits, flat = draw(B, T, V) * 4, TARGETS.flatten()
    options = {"first": 30, "vocab_size": 150}
    got = kernels.cross_entropy_shard(logits, TARGETS, **options)
    for a, b in zip(got, reference.cross_entropy_shard_ref(logits, TARGETS, **options)):
        assert_exact(a, b)
    lse, keep = logits.flatten(0, 1).logsumexp(-1) + 0.3, (flat != -100).nonzero()
    assert keep.numel() == flat.numel() - 2
    for scale in (torch.tensor(0.25), draw(B * T)):
        arguments, more = (logits, TARGETS, lse, scale), {**options, "z_loss": 0.01}
        want = reference.cross_entropy_shard_grad_ref(*arguments, **more)
        assert_exact(kernels.cross_entropy_shard_grad(*arguments, **more), want)
        work = logits.clone()
        kernels.cross_entropy_shard_grad(work, *arguments[1:], **more, out=work)
        assert_exact(work, want)
    top, total, hit = kernels.cross_entropy_shard(logits[..., :0], TARGETS)
    assert {t.dtype for t in (top, total, hit)} == {torch.float64}


def test_fp32_parameters_of_fp64_rows():
    """The one mixture that the checks let through keeps x in fp64."""
    x, w, b = draw(B, T, C), ROW[0].float(), ROW[1].float()
    assert_exact(kernels.layer_norm(x, w, b), reference.layer_norm_ref(x, w.double(), b.double()))
    want = F.gelu(x + b.double(), approximate="tanh")
    assert_exact(kernels.bias_gelu(x, b), want)
