"""Kernel launches of a training step are counted without a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from bench.compiler.launches import Launches, as_on_a_gpu, count, row
from fastpar.config.config import GPTConfig
from fastpar.kernels import bias_gelu


def test_views_and_memory_launch_nothing():
    x = torch.ones(4, 6)
    with Launches() as mode:
        y = x.t().reshape(24)[3:].new_empty(5).view(5, 1)
        assert mode.found.total() == 1  # reshape of a transposed matrix copies
        y.add_(1).sum().item()
        torch.empty(0).add_(1)
    assert dict(+mode.found) == {("forward", n): 1 for n in ("clone", "add_", "sum")}


def test_our_ops_launch_what_a_gpu_would_run():
    x, bias = torch.ones(4, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    with as_on_a_gpu(), Launches() as mode:
        y = bias_gelu(x, bias)
        mode.part = "backward"
        y.backward(torch.ones_like(y))
    kernels = {name for part, name in +mode.found if part == "backward"}
    assert ("forward", "_bias_gelu_fwd_kernel") in mode.found
    assert {"_bias_gelu_bwd_kernel", "_bias_gelu_bwd_dbias_kernel"} <= kernels


SMALL = {"n_head": 2, "n_embd": 128, "vocab_size": 512, "block_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, 9, 18.5),  # one for the bits of attention's mask; of 30, 12 copied one gradient each
        ({"fp8": "tensor-fp8"}, 17, 31.5),  # of four layers: 8 casts; 8 casts, 4 notes
    ],
)
def test_a_layer_has_as_many_launches_as_it_should(options, forward, backward):
    found = row(GPTConfig(n_layer=4, **SMALL), **options)
    assert found["layer"]["forward"] == forward
    assert found["layer"]["backward"] <= backward


@pytest.mark.slow
def test_a_step_of_twelve_layers_has_at_most_380_launches():
    found = count(GPTConfig(n_layer=12, **SMALL))
    assert found.total() <= 380
    for kernel in ("_attention_fwd_kernel", "_bias_gelu_fwd_kernel"):
        assert found["forward", kernel] == 12
