"""What `fastpar plan` says of products in 8 bits: memory as kept, time by arithmetic, refusals."""

from dataclasses import replace

import pytest
import torch
from cells import sweep

from fastpar.axes.step import Setup, Workload
from fastpar.models.gpt import GPT, use_fp8
from fastpar.predict.machine import FP8_SPEED, LAUNCH_S, Cluster, DatasheetRates, find_device
from fastpar.predict.memory import predict_memory
from fastpar.predict.plan import (
    LEAST_GAIN,
    PlanCommand,
    fp8_text,
    make_plan,
    pays_from,
    report,
    saved_s,
)
from fastpar.settings.model import GPTConfig

# The vocabulary is such that the loss is the fullest moment, when all layers keep what they keep.
SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=256, block_size=64, vocab_size=50000, dropout=0.0)


def kept_bytes(layers, scaling):
    """What autograd keeps between forward and backward of a GPT, weights not counted."""
    model = GPT(SHAPE).bfloat16()
    use_fp8(model, layers, scaling=scaling, emulate=True)
    model(*torch.zeros(2, 1, 64, dtype=torch.int64)).backward()
    if model.fp8_scales is not None:
        model.fp8_scales.update()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*torch.zeros(2, 4, 64, dtype=torch.int64))
    return sum(size for size, _ in found.values())


@sweep("scaling", ["row", "block", "tensor"])
def test_memory_is_told_to_the_byte(scaling):
    workload, plain = Workload(SHAPE, 4), kept_bytes("none", "row")
    setup = Setup(micro_batch_size=4, device_type="cpu", transport="shm")
    whole = predict_memory(workload, setup).activations
    for layers in ("mlp", "all"):
        less = predict_memory(workload, replace(setup, fp8=layers, fp8_scaling=scaling))
        table = 16 * 3 * 8 if scaling == "tensor" else 0  # the scales of all tensors, 16 bytes each
        assert plain - kept_bytes(layers, scaling) == whole - less.activations - table


def rates_of(gpu, **settings):
    setup = Setup(micro_batch_size=16, **settings)
    return DatasheetRates(Cluster.of(find_device(gpu), 1, None), setup), setup


def test_time_is_that_of_products_less_casts():
    rates, _ = rates_of("h100")
    m, k, n = 16384, 1600, 6400
    products = rates._product_s(m, k, n) + rates._product_s(m, n, k)
    casts = 3 * (2 * m * k + m * n + 2 * n * k) / rates._stream + 5 * LAUNCH_S["cuda"]
    want = products - products / FP8_SPEED - casts
    assert rates.fp8_saves_s(m, k, n) == pytest.approx(want, rel=1e-12)
    assert rates.fp8_saves_s(64, 256, 256) < 0
    shape = GPTConfig.preset("gpt2-xl")
    workload, setup = Workload(shape, 16), Setup(micro_batch_size=16)
    mlp = 48 * (rates.fp8_saves_s(m, k, n) + rates.fp8_saves_s(m, n, k))
    assert saved_s(workload, setup, rates, "mlp") == pytest.approx(mlp, rel=1e-12)
    more = rates.fp8_saves_s(m, k, 3 * k) + rates.fp8_saves_s(m, k, k)
    assert saved_s(workload, setup, rates, "all") == pytest.approx(mlp + 48 * more, rel=1e-12)


def test_a_plan_says_where_it_pays():
    found = report(make_plan(PlanCommand(model="gpt2", gpus=1)))
    assert found.count("does not pay: less than 3%") >= 1
    wide = PlanCommand(model="gpt2-xl", n_embd=4096, n_head=32, n_layer=8, gpus=1, fp8="all")
    plan = make_plan(wide)
    text = report(plan)
    assert "--fp8 all: products less casts save " in text
    assert "less a rank; pays" in text
    assert " --fp8 all" in text.rpartition("fastpar train")[2]
    assert all(e.setup.fp8 == "all" for e in plan.estimates)
    for gpu, dtype in (("a100", "bf16"), ("h100", "fp32")):
        rates, setup = rates_of(gpu, dtype=dtype)
        assert fp8_text(Workload(SHAPE, 16), setup, rates) == []


def test_the_width_from_which_it_pays():
    rates, setup = rates_of("h100")
    workload = Workload(GPTConfig.preset("gpt2"), 16)
    width = pays_from(workload, setup, rates, "mlp")
    assert 768 < width <= 2048
    few = replace(workload, batch_size=1), replace(setup, micro_batch_size=1)
    assert pays_from(*few, rates, "mlp") is None  # casts of weights are not shared by many tokens
    assert LEAST_GAIN == 0.03


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"save at least 3% of a step, got fp8=mlp with n_embd=768: [-\d.]+ of [\d.]+ ms, "),
        ({}, r"leave --fp8 out, it would pay from n_embd=\d+ on"),
        ({"gpu": "a100"}, "expected a data sheet of a GPU with products .*, got gpu=a100"),
        ({"gpu": "cpu"}, r"\(l40s, h100, b200\) and bf16 with fp8=mlp, got gpu=cpu dtype=fp32"),
        ({"n_expert": 4}, "p8 does not run with --n-expert"),
    ],
)
def test_plans_that_are_refused(settings, said):
    with pytest.raises(ValueError, match=f"^(plan: |--).*{said}"):
        make_plan(PlanCommand(**{"model": "gpt2", "gpus": 1, "fp8": "mlp", **settings}))
