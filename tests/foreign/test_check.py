"""patch(check=batch): parts that only look like nanoGPT's, in names, parts and shapes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cells import sweep
from foreign_models import GPT, gpt2, ids_for, random_weights, state_of
from nanogpt_cells import MLP, Block, CausalSelfAttention, LayerNorm

import fastpar
from fastpar.foreign import fused

BASES = {"attn": CausalSelfAttention, "mlp": MLP, "ln_2": LayerNorm, "block": Block}


def bidirectional(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def interleaved(self, x):
    """q, k and v of a head stand together in c_attn's output."""
    return self.c_attn(x).unflatten(-1, (3, 3, -1)).permute(3, 0, 2, 1, 4)


def post_norm(self, x):
    x = self.ln_1(x + self.attn(x))
    return self.ln_2(x + self.mlp(x))


# In place of what, which of its methods, what that does, the first gradient that shows it.
IMPOSTORS = [
    ("attn", "attend", bidirectional),
    ("attn", "heads", interleaved),
    ("attn", "attend", lambda self, q, k, v: CausalSelfAttention.attend(self, q, 0.5 * k, v)),
    ("mlp", "forward", lambda self, x: self.c_proj(self.gelu(self.c_fc(x)) ** 2)),
    ("mlp", "forward", lambda self, x: self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))),
    ("ln_2", "forward", lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, None)),
    ("block", "forward", post_norm),
]


def batch(T=23):
    ids = ids_for(T=T + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def impostor(part, method, instead):
    """A model whose second block is one, or has one."""
    base = BASES[part]
    made = type(base.__name__, (base,), {method: instead})()
    model = GPT()
    if part == "block":
        model.transformer.h[1] = made
    else:
        setattr(model.transformer.h[1], part, made)
    return random_weights(model)


@sweep(("part", "method", "instead"), IMPOSTORS)
def test_another_result_undoes_the_patch_and_names_a_parameter(part, method, instead):
    model = impostor(part, method, instead)
    classes, state = [*map(type, model.modules())], state_of(model)
    message = (
        r"patch: expected the loss and gradients of check as before, got \S+ between (the losses|"
        r"the gradients of \S+), where roundings explain .*; the patch was undone: train"
    )
    with pytest.raises(ValueError, match=message):
        fastpar.patch(model, check=batch())
    assert [*map(type, model.modules())] == classes
    assert [(name, number) for name, number, _ in state_of(model)] == [row[:2] for row in state]
    assert fastpar.patch(model).replaced  # which nothing shows without a check


def test_an_earlier_patch_stays_when_a_later_one_is_undone():
    model = impostor(*IMPOSTORS[0])
    fastpar.patch(model.transformer.h[0])
    with pytest.raises(ValueError, match="the patch was undone"):
        fastpar.patch(model, check=batch())
    assert isinstance(model.transformer.h[0], fused.Block)
    assert type(model.transformer.h[1].attn).__mro__[1] is CausalSelfAttention


def ids_and_labels():
    return {"input_ids": ids_for(), "labels": ids_for()}


RIGHT = {
    "nanoGPT": (lambda: random_weights(GPT(dropout=0.3)), batch, {}),
    "nanoGPT, its loss": (lambda: random_weights(GPT(bias=False)), batch, {"fused_loss": True}),
    "transformers": (functools.partial(gpt2, dropout=0.3), ids_and_labels, {}),
    "transformers, its loss": (functools.partial(gpt2, "D8"), ids_and_labels, {"fused_loss": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_and_leaves_no_trace(name, dtype):
    """Neither gradients, modes, rates nor generators notice it."""
    make, given, options = RIGHT[name]
    model = make().to(dtype)
    model.transformer.h[0].mlp.eval()
    modes, generator = [m.training for m in model.modules()], torch.get_rng_state()
    state = state_of(model)
    report = fastpar.patch(model, check=given(), **options)
    assert len(report.replaced) > 4
    assert not report.fallbacks
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a[2], b[2]) for a, b in zip(state_of(model), state))


def test_a_batch_without_a_loss_is_refused_before_anything_is_swapped():
    for model, given in ((GPT(), batch()[0]), (gpt2("D8"), {"input_ids": ids_for()})):
        with pytest.raises(ValueError, match="expected a batch with targets as check, for which"):
            fastpar.patch(model, check=given)
        assert not fastpar.unpatch(model)
