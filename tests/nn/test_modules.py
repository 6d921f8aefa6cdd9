"""fastpar's nn.Modules against torch's: results, dtypes, keys, copies, compilation, errors."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cells import sweep
from torch import nn
from torch.nn.utils import parametrize

import fastpar
from fastpar.kernels import keep_mask, linear_cross_entropy
from fastpar.kernels.philox import Rng, draw_key
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every module that has a counterpart of its name in torch, and arguments.
PAIRS = [
    *(("LayerNorm", args, {}) for args in ((24,), (24, 1e-2), ((6, 24),))),
    *(("LayerNorm", (24,), {option: False}) for option in ("bias", "elementwise_affine")),
    *(("RMSNorm", args, {}) for args in ((24,), (24, 1e-2), ((6, 24),))),
    ("RMSNorm", (24,), {"elementwise_affine": False}),
    *(("GELU", args, {}) for args in ((), ("tanh",))),
]


def randomize(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.5)
    return module


def make(name, *args, dtype=torch.float32, **options):
    ours, torchs = (getattr(of, name)(*args, **options).to(dtype) for of in (fastpar.nn, nn))
    ours.load_state_dict(randomize(torchs).state_dict())
    return ours, torchs


def functional(module):
    names = [name for name, _ in module.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    return run


@pytest.mark.parametrize(("name", "args", "options"), PAIRS)
def test_matches_torch(name, args, options):
    """Keys and repr, results and gradients, dtypes under autocast."""
    for dtype in DTYPES:
        ours, torchs = make(name, *args, dtype=dtype, **options)
        # Small rows, so that eps counts.
        x = (torch.randn(3, 5, 6, 24) * 0.1).to(dtype).requires_grad_()
        inputs = (x, *torchs.parameters())
        report = assert_matches_oracle(functional(ours), functional(torchs), inputs)
        assert len(report) == 1 + len(inputs)
    ours, torchs = make(name, *args, **options)
    assert isinstance(ours, type(torchs))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert repr(ours) == repr(torchs)
    for x_dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 6, 24).to(x_dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, y = torchs(x), ours(x)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)


@sweep("dtype", DTYPES)
def test_the_default_eps_of_rms_norm_is_torchs(dtype):
    ours, torchs = make("RMSNorm", 24, dtype=dtype)
    x = (torch.randn(4, 24) * 1e-4).to(dtype)  # the mean square is far below fp16's epsilon
    eps = torch.finfo(torch.float32).eps
    exact = lambda x: F.rms_norm(x, (24,), torchs.weight.to(x.dtype), eps)  # noqa: E731
    assert_matches_oracle(ours, exact, (x,), eager=torchs)


class Double(nn.Module):
    def forward(self, w):
        return 2 * w


def everything():
    """One of each, with an input."""
    x = torch.randn(2, 5, 16)
    return [
        (fastpar.nn.LayerNorm(16), x), (fastpar.nn.RMSNorm(16), x), (fastpar.nn.GELU(), x),
        (fastpar.nn.Embedding(11, 16), torch.randint(11, (2, 5))), (fastpar.nn.MLP(16), x),
        (fastpar.nn.CausalSelfAttention(16, 2), x),
    ]  # fmt: skip


def test_copies_pickles_dtypes_and_no_grad():
    for module, x in everything():
        y = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is type(module)
            assert torch.equal(other(x), y)
        with torch.no_grad():
            kept = module(x)
        assert not kept.requires_grad
        assert torch.equal(y, kept)
        half = module.to(torch.bfloat16)
        assert half(x if x.dtype == torch.int64 else x.bfloat16()).dtype == torch.bfloat16


def test_compiles_without_graph_breaks():
    """All of them in one graph."""
    parts = {type(module).__name__: module for module, _ in everything()}
    module = nn.Sequential(parts.pop("Embedding"), *parts.values())
    idx = torch.randint(11, (2, 5))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(idx)
    assert torch.equal(y, module(idx))
    y.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_traces(grad, tmp_path):
    """By torch.jit.trace, with its own check; the recording is saved and read again."""
    for module, x in everything():
        with torch.set_grad_enabled(grad):
            recording = torch.jit.trace(module, (x,))
            torch.jit.save(recording, tmp_path / "module.pt")
            other = x.flip(1) if x.dtype == torch.int64 else x * 0.5
            for each in (recording, torch.jit.load(tmp_path / "module.pt")):
                assert torch.equal(each(other), module(other)), type(module)


def test_parametrized_weights_are_used():
    for module, x in everything():
        y = module(x)
        for part in module.modules():
            if isinstance(getattr(part, "weight", None), nn.Parameter):
                parametrize.register_parametrization(part, "weight", Double())
                assert not torch.equal(module(x), y), type(module).__name__
                parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)
                assert torch.equal(module(x), y)


@sweep("idx_dtype", [torch.int64, torch.int32])
def test_embedding_is_torchs_for_any_index(idx_dtype):
    ours, torchs = fastpar.nn.Embedding(11, 16), nn.Embedding(11, 16)
    ours.load_state_dict(torchs.state_dict())
    for shape in ((), (7,), (2, 5), (2, 3, 4), (0, 5), (2, 0)):
        idx = torch.randint(11, shape, dtype=idx_dtype)
        y, expected = ours(idx), torchs(idx)
        assert torch.equal(y, expected)
        ours.weight.grad = torchs.weight.grad = None
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(ours.weight.grad, torchs.weight.grad)
    given = fastpar.nn.Embedding.from_pretrained(torchs.weight.detach())
    assert not given.weight.requires_grad
    assert torch.equal(given(torch.tensor([3])), torchs.weight[3:4])


def cast(f):
    def run(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f(*inputs)

    return run


def stock_mlp(x, approximate):
    return F.gelu(x, approximate=approximate)


def stock_attention(qkv, softmax_scale):
    q, k, v = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale)
    return o.transpose(1, 2).flatten(2)


@sweep("bias", [True, False])
@sweep(
    ("module", "args", "first", "stock", "options"),
    [
        *((fastpar.nn.MLP, (16, 40), "c_fc", stock_mlp, {"approximate": form})
          for form in ("tanh", "none")),
        *((fastpar.nn.CausalSelfAttention, (16, 2), "c_attn", stock_attention,
           {"softmax_scale": scale}) for scale in (None, 0.7)),
    ],
)  # fmt: skip
def test_mlp_and_attention_match_torch(module, args, first, stock, options, bias):
    """Under autocast at most with twice the error of torch's own composition under it."""
    ours = randomize(module(*args, bias=bias, **options))
    kinds = ("weight", "bias") if bias else ("weight",)
    assert list(ours.state_dict()) == [f"{n}.{kind}" for n in (first, "c_proj") for kind in kinds]

    def torchs(x, *parameters):
        n = len(parameters) // 2
        return F.linear(stock(F.linear(x, *parameters[:n]), **options), *parameters[n:])

    inputs = (torch.randn(3, 7, 16, requires_grad=True), *ours.parameters())
    assert_matches_oracle(functional(ours), torchs, inputs)
    assert_matches_oracle(cast(functional(ours)), torchs, inputs, eager=cast(torchs))
    assert fastpar.nn.MLP(16).c_fc.out_features == 64


def test_attention_of_documents_is_that_of_each():
    attention, x = fastpar.nn.CausalSelfAttention(16, 2), torch.randn(12, 16)
    y = attention(x, cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32))
    torch.testing.assert_close(y[:5], attention(x[None, :5])[0])
    torch.testing.assert_close(y[5:], attention(x[None, 5:])[0])


def test_dropout_follows_training_and_the_seed():
    module, x = fastpar.nn.CausalSelfAttention(16, 2, dropout=0.5), torch.randn(2, 9, 16)
    assert torch.equal(module.eval()(x), module(x))
    module.train()
    torch.manual_seed(5)
    y = module(x)
    assert not torch.equal(module(x), y)
    torch.manual_seed(5)
    assert torch.equal(module(x), y)
    # The probabilities' mask is the one that the key drawn first names.
    module.resid_dropout.p = 0.0
    torch.manual_seed(5)
    y = module(x)
    torch.manual_seed(5)
    keep = keep_mask(Rng(draw_key(), 0), 0.5, (2, 2, 9, 9))
    q, k, v = module.c_attn(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    o = (scores.softmax(-1) * keep * 2) @ v
    torch.testing.assert_close(y, module.c_proj(o.transpose(1, 2).flatten(2)))

    mlp = fastpar.nn.MLP(16, dropout=0.5)
    assert (mlp(x) == 0).float().mean() > 0.3
    assert not (mlp.eval()(x) == 0).any()


def test_parts_with_hooks_or_another_forward_are_called():
    for module, x in everything():
        expected, seen = module(x), []
        parts = [p for p in module.children() if isinstance(p, nn.Linear | nn.GELU)]
        for part in parts:
            part.register_forward_hook(lambda m, i, o, seen=seen: seen.append(m))
        torch.testing.assert_close(module(x), expected)
        assert seen == parts
    mlp, x = fastpar.nn.MLP(16), torch.randn(2, 3, 16)
    own = mlp.c_fc.forward
    mlp.c_fc.forward = lambda x: own(x) + 1  # as offloading libraries wrap it
    expected = mlp.c_proj(F.gelu(own(x) + 1, approximate="tanh"))
    torch.testing.assert_close(mlp(x), expected)
    mlp.gelu = nn.SiLU()
    torch.testing.assert_close(mlp(x), mlp.c_proj(F.silu(own(x) + 1)))


@sweep("reduction", ["mean", "sum", "none"])
def test_loss_is_the_op(reduction):
    options = {"reduction": reduction, "ignore_index": 3, "label_smoothing": 0.1, "z_loss": 1e-2}
    loss = fastpar.nn.LinearCrossEntropyLoss(**options, vocab_size=13)
    assert not loss.state_dict()
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((4, 5, 8), (16, 8)))
    targets = torch.randint(13, (4, 5))
    found = [loss(x, weight, targets)]
    found.append(linear_cross_entropy(x, weight, targets, **options, vocab_size=13))
    grads = [torch.autograd.grad(y.sum(), (x, weight)) for y in found]
    assert torch.equal(*found)
    assert all(map(torch.equal, *grads))


def test_autocast_rules_large_products_and_the_loss():
    """From a size on, fp32 products on CPU are fastpar's own, which autocast does not see."""
    wide = torch.randn(4, 64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fastpar.nn.MLP(64)(wide).dtype == torch.bfloat16
        assert fastpar.nn.CausalSelfAttention(64, 2)(wide).dtype == torch.bfloat16
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    targets = torch.randint(13, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fastpar.nn.LinearCrossEntropyLoss()(x, weight, targets)
    loss.backward()
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    expected = fastpar.nn.LinearCrossEntropyLoss()(x.bfloat16(), weight.bfloat16(), targets)
    assert torch.equal(loss, expected)


REFUSED = [
    (lambda: fastpar.nn.LayerNorm((3, 4))(torch.ones(2, 6, 2)),
     r"LayerNorm: expected x of shape \[..., 3, 4\], got x="),
    (lambda: fastpar.nn.RMSNorm(4)(torch.ones(2, 3)),
     r"RMSNorm: expected x of shape \[..., 4\], got x=\[2, 3"),
    (lambda: fastpar.nn.CausalSelfAttention(10, 3),
     "n_embd to be a multiple of n_head, got n_embd=10 n_hea"),
    (lambda: fastpar.nn.CausalSelfAttention(16, 2)(torch.ones(3, 16)),
     r"CausalSelfAttention: expected x \[B, T, 16\].* got x=\["),
    (lambda: fastpar.nn.LinearCrossEntropyLoss(torch.ones(5)),
     r"expected weight=None, got weight=Tensor .*; use torch"),
    *((lambda name=name, value=value: fastpar.nn.Embedding(11, 16, **{name: value}),
       f"Embedding: expected no {name}, got {name}={value}; use torch.nn.Embedding")
      for name, value in [("padding_idx", 0), ("max_norm", 1.0), ("scale_grad_by_freq", True),
                          ("sparse", True)]),
]  # fmt: skip


@sweep(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
