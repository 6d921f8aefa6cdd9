"""The table of the block is what the model is, and what is predicted and measured of it."""

import pytest
import torch
from memory_cells import setup, workload
from own_product import use_own_product
from torch.utils.flop_counter import FlopCounterMode

from fastpar.axes import data, pipeline
from fastpar.models.gpt import GPT
from fastpar.models.hf import list_weights
from fastpar.predict import time
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.memory import predict_memory
from fastpar.predict.time import predict_step
from fastpar.settings import model as block
from fastpar.settings.model import GPTConfig

DENSE = GPTConfig(2, 4, 32, 16, 200, dropout=0.0)
SPARSE = GPTConfig(3, 2, 16, 8, 50, n_expert=4, expert_every=2, expert_hidden=24)
GATED = GPTConfig.preset("qwen3-tiny", n_layer=3, n_expert=4, expert_hidden=24)


def listed(shape):
    """(name, shape) of all weights, by the table."""
    experts = enumerate(map(shape.has_experts, range(shape.n_layer)))
    layers = [(f"h.{i}.", block.block_parts(shape, experts=each)) for i, each in experts]
    return [
        (before + name, sizes)
        for before, some in [("", block.first_parts(shape)), *layers, ("", block.last_parts(shape))]
        for (name, _), sizes in zip(block.parameters_of(some), block.shapes_of(some, shape))
    ]


@pytest.mark.parametrize("shape", [DENSE, SPARSE, GATED], ids=["dense", "experts", "gated"])
def test_names_and_shapes_are_the_models(shape):
    model = GPT(shape)
    named = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert listed(shape) == named
    whole = sum(p.numel() for p in model.parameters())
    assert block.count_parameters(shape, padded=True) == whole
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.n_embd
    assert model.num_parameters() == whole - padding
    experts = [p for name, p in model.named_parameters() if p.dim() == 3 or "1.mlp.c_" in name]
    unused = sum(p.numel() // 2 for p in experts if shape.n_expert)  # half of them
    assert block.count_parameters(shape, active=True) == whole - padding - unused


@pytest.mark.parametrize("own_product", [False, True])
def test_flops_are_those_that_torch_counts(own_product, request):
    """Also where linear's product is our own. Backward counts twice as many, and attention's scores
    once more."""
    if own_product:
        use_own_product(request)
    model, idx = GPT(DENSE), torch.zeros(3, 16, dtype=torch.int64)
    forward = 3 * 16 * sum(block.part_flops(DENSE))
    with FlopCounterMode(display=False) as counter:
        model(idx)
    assert counter.get_total_flops() == forward
    scores = 3 * 16 * 2 * DENSE.block_size * DENSE.n_embd * DENSE.n_layer
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    assert counter.get_total_flops() == 3 * forward + scores


def seen():
    """What is made from the table, and what is predicted from it."""
    for cached in (time._passes, data._buckets, pipeline._cut):
        cached.cache_clear()
    work, kind = workload(n_layer=2), setup(micro_batch_size=4)
    model = GPT(work.shape)
    memory = predict_memory(work, kind)
    return {
        "elements": sum(p.numel() for p in model.parameters()),
        "stored": {weight.name: weight.shape for weight in list_weights(model)},
        "flops": model.flops_per_token(),
        "seconds": predict_step(work, kind, DatasheetRates(Cluster.of("h100", 1), kind)).step_s,
        "states": memory.parameters,
        "kept": memory.activations,
        "buckets": data.buckets_of(work, kind).elements,
    }


def test_a_part_more_is_everywhere(monkeypatch):
    before = seen()
    part = block.Part("mlp.gate", "matmul", "C", "F", ("C",))
    parts = block.mlp_parts
    monkeypatch.setattr(block, "mlp_parts", lambda shape: (part, *parts(shape)))
    after = seen()
    width, layers = 128, 2
    gate = 4 * width * width + 4 * width
    names = {f"h.{i}.mlp.gate.{name}" for i in range(layers) for name in ("weight", "bias")}
    assert after["stored"].keys() - before["stored"].keys() == names
    assert after["stored"]["h.1.mlp.gate.weight"] == (width, 4 * width), "as transformers' Conv1D"
    for what in ("elements", "buckets"):
        assert after[what] - before[what] == layers * gate, what
    assert after["flops"] - before["flops"] == 6 * layers * gate
    assert after["states"] - before["states"] >= 4 * layers * gate
    tokens = 4 * 128
    assert after["kept"] - before["kept"] == layers * 4 * tokens * width, "its input"
    assert after["seconds"] > before["seconds"]
