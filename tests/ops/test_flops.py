"""torch's counter counts for an op what it counts for the op's stock form."""

import subprocess
import sys

import pytest
import torch
from more_cases import cases_of
from own_product import use_own_product
from torch.utils.flop_counter import FlopCounterMode

from fastpar import kernels
from fastpar.kernels.cases import MAKERS, evaluate


def count(call, inputs):
    """FLOPs of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        evaluate(call, inputs)
    return counter.get_total_flops()


def torchs_attention(q, k, v):
    """That of a GPU, without memory: torch's kernels for a CPU have no formula."""
    q, k, v = (t.detach().to("meta").requires_grad_().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0].sum()


def of_attention(case, inputs):
    """The attention of each document, or of the batch."""
    tensors = [t for t in inputs if t.is_floating_point()]
    q, k, v = tensors[0].unbind(-3) if len(tensors) == 1 else tensors
    bounds = case.fn.keywords.get("cu_seqlens")
    if bounds is None:
        documents = [(q, k, v)]
    else:
        cut = [t.tensor_split(bounds[1:-1].long()) for t in (q, k, v)]
        documents = [[t[None] for t in part] for part in zip(*cut)]
    with FlopCounterMode(display=False) as counter:
        for part in documents:
            torchs_attention(*part).backward()
    return counter.get_total_flops()


PRODUCTS = {
    *("attention", "attention_masked", "linear", "linear_fp8", "grouped_linear"),
    *("linear_cross_entropy", "orthogonalize"),
}


@pytest.mark.parametrize("own_product", [False, True])
def test_every_case_counts_as_its_stock_form(own_product, request):
    if own_product:
        use_own_product(request)
    counted = set()
    for op in PRODUCTS if own_product else MAKERS:
        for case in cases_of(op, 6, 32, **({"V": 7} if op == "embedding" else {})):
            if "T=0" in case.shape or "B=0" in case.shape:
                continue
            dtype = torch.float32 if torch.float32 in case.dtypes else torch.bfloat16
            inputs = list(case.inputs(dtype, "cpu").values())
            got = count(case.fn, inputs)
            if op.startswith("attention"):
                want = of_attention(case, inputs)
            else:
                want = count(case.stock or case.eager, inputs)
            assert got == want, (op, case.shape, got, want)
            counted |= {op} if want else set()
    assert counted == PRODUCTS


def test_what_is_frozen_is_not_counted(request):
    use_own_product(request)
    x, weight, targets = torch.randn(6, 8), torch.randn(5, 8), torch.randint(0, 5, (6,))
    product = 2 * 6 * 8 * 5
    for needed in ((), (x,), (weight,), (x, weight)):
        for t in (x, weight):
            t.requires_grad_(any(t is one for one in needed))
        for call in (
            kernels.linear,
            lambda x, w: kernels.linear_cross_entropy(x, w, targets),
            lambda x, w: kernels.linear_cross_entropy(x, w, targets, reduction="none"),
        ):
            assert count(call, [x, weight]) == product * (1 + len(needed))


LATER = """
import sys, torch, fastpar.kernels
assert "torch.utils.flop_counter" not in sys.modules, "its import takes long"
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    fastpar.kernels.attention(*torch.ones(3, 1, 4, 2, 8))
assert counter.get_total_flops() == 4 * 2 * 4 * 4 * 8
"""


def test_a_counter_that_is_imported_later_knows_the_ops():
    subprocess.run([sys.executable, "-c", LATER], check=True)
