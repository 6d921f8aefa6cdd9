"""The predicted peak of products in 8-bit floats against the measured one.

What a GPU's casts and products allocate is what they leave; on a CPU emulation has temporaries of
its own. So here they leave codes and outputs of zeros, and everything around them is real.
"""

import pytest
import torch
from cells import covering
from memory_cells import SHAPES, measure, measure_first_rank, setup, workload

from fastpar.comm.mesh import Mesh
from fastpar.kernels import linear_fp8
from fastpar.kernels.linear_fp8 import Codes, Fp8
from fastpar.predict.memory import predict_memory


def rounded_rows(x, form, group):
    n, k = x.shape
    return Codes(torch.zeros(n, k, dtype=form), torch.ones(n, -(-k // group)), group)


def rounded(x, form, scale, flip=False):
    n, k = x.shape
    flipped = torch.zeros(k, n, dtype=form) if flip else None
    found = torch.zeros(2, dtype=torch.float64)
    return Codes(torch.zeros(n, k, dtype=form), scale, flipped=flipped), found


product = Fp8._product


def of_zeros(how, a, b, bias, like, own):
    if a.scales is None or b.scales is None:  # the first step of delayed scales
        return product(how, a, b, bias, like, own)
    return like.new_zeros(len(a.codes), len(b.codes))


def leave_zeros(monkeypatch):
    monkeypatch.setattr(linear_fp8, "round_rows", rounded_rows)
    monkeypatch.setattr(linear_fp8, "round_all", rounded)
    monkeypatch.setattr(Fp8, "_product", of_zeros)


@covering(
    1,
    ("shape", ["balanced", "deep", "wide"]),
    ("layers", ["mlp", "all"]),
    ("scaling", ["row", "block", "tensor"]),
    ("mode", ["none", "full"]),
    ("dtype", ["fp32", "bf16"]),
)
def test_predicted_within_five_percent(shape, layers, scaling, mode, dtype, monkeypatch):
    leave_zeros(monkeypatch)
    s = setup(
        fp8=layers,
        fp8_scaling=scaling,
        fp8_emulate=True,
        dtype=dtype,
        micro_batch_size=8,
        activation_checkpointing=mode,
    )
    one = workload(**SHAPES[shape], batch=8)
    predicted = predict_memory(one, s)
    measured = measure(one, s, Mesh(device="cpu"))
    assert predicted.total == pytest.approx(measured, rel=0.05), str(predicted)


@pytest.mark.parametrize(("shape", "dtype"), [("deep", "fp32"), ("wide", "bf16")])
def test_weights_that_are_gathered_as_codes(shape, dtype, monkeypatch):
    """At stage 3 their messages are gone when a step has most."""
    leave_zeros(monkeypatch)
    s = setup(
        world_size=2,
        zero_stage=3,
        wire_weights="fp8",
        fp8="all",
        fp8_scaling="tensor",
        fp8_emulate=True,
        dtype=dtype,
        micro_batch_size=8,
        transport="torch",
    )
    one = workload(**SHAPES[shape], batch=16)
    predicted = predict_memory(one, s)
    assert predicted.total == pytest.approx(measure_first_rank(one, s), rel=0.05), str(predicted)
