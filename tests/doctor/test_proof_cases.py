"""What a proof on a GPU calls: it reaches the loops and sums of kernels, which few rows do not."""

import sys

import pytest
import torch

from fastpar.doctor import cases as module
from fastpar.doctor.cases import cases_of_many_rows, proof_cases
from fastpar.doctor.trial import what_is_wrong
from fastpar.kernels.choice import Case

H100_SMS = 132


def shapes(op, size):
    return [case.shape for case in cases_of_many_rows(op, size, "cpu")]


def test_on_a_gpu_kernels_are_proven_with_many_rows_too():
    on_cpu, on_gpu = (
        [c.shape for c in proof_cases("weight_gradient", 96, d, 64)] for d in ("cpu", "cuda")
    )
    assert on_gpu[: len(on_cpu)] == on_cpu
    assert [text for text in on_gpu[len(on_cpu) :] if text.endswith("288")] == [
        "N=208 96->288",
        "N=1024 96->288",
    ]


def test_attention_walks_over_tiles_and_programs_take_several_pairs_of_them():
    found = cases_of_many_rows("attention", 64, "cpu")
    q = [one.inputs(torch.bfloat16, "cpu")["q"].shape for one in found]
    assert any(T == 320 for _, T, _, _ in q)  # tiles of 128: the last one is partial
    assert any(T == 1024 and B * H * (T // 256) > H100_SMS for B, T, H, _ in q)
    assert "B=1 T=320 D=64 H=2 dropout 0.1" in shapes("attention_masked", 64)


@pytest.mark.parametrize("size", [64, 768, 1600])
def test_rows_of_norms_are_more_than_all_programs_hold(size):
    pytest.importorskip("triton", reason="needs triton")
    from fastpar.kernels.norm import TABLE
    from fastpar.kernels.norm.triton import bwd_tile_of

    tile, programs, _ = bwd_tile_of(size, 2, 2, 2, False, TABLE.get(90))
    rows = max(int(text.split()[0][2:]) for text in shapes("layer_norm", size))
    assert rows > programs * H100_SMS * tile.rows
    assert shapes("layer_norm", size)[0] == f"N=208 C={size}"


def test_tokens_of_an_embedding_fill_several_stretches_of_64_sorted_ids():
    idx = cases_of_many_rows("embedding", 96, "cpu")[0].inputs(torch.float32, "cpu")["idx"]
    assert idx.unique(return_counts=True)[1].max() > 4 * 64


def test_a_loss_of_several_chunks_is_compared(monkeypatch):
    chunks = []
    loss_module = sys.modules["fastpar.kernels.loss.linear_cross_entropy"]  # the op has its name
    real = loss_module.accumulate
    monkeypatch.setattr(
        loss_module, "accumulate", lambda *args: chunks.append(args[0]) or real(*args)
    )
    one = cases_of_many_rows("linear_cross_entropy", 1024, "cpu")[0]
    one.results(torch.float32, "cpu")
    assert sum(total is not None for total in chunks) == 4


def test_a_product_that_is_added_is_compared(monkeypatch):
    case = Case("cpu", "weight_gradient", torch.bfloat16, 96)
    found = [c for c in cases_of_many_rows("weight_gradient", 96, "cpu") if "N=208" in c.shape]
    assert what_is_wrong(case, found) == ""
    product = module.wide_product
    monkeypatch.setattr(module, "wide_product", lambda a, b, out, add: product(a, b))
    assert "N=208 96->288 added: error of dweight is" in what_is_wrong(case, found)
