"""The oracles against torch's own functions in fp64. What torch has not is shown by ops that agree
with an oracle: shards that make a whole loss (test_cross_entropy.py), documents that are samples
(test_attention.py), published words of Philox and what its mask keeps (test_philox.py)."""

import functools

import pytest
import torch

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


def test_attention_drops_probabilities():
    q, k, v = (draw(1, 4, 2, 8, seed=s) for s in range(3))
    rng = (make_key(1, 0), 1)
    keep = ref.keep_mask_ref(rng, 0.5, (1, 2, 4, 4)).double()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1) * keep * 2, v)
    close(ref.attention_ref(q, k, v, dropout_p=0.5, rng=rng), expected)
