"""Patched models under ZeRO: the fused ops run at every stage, with the bits of stage 0."""

import copy
import functools
from collections import Counter

import pytest
import torch
from foreign_models import gpt2, nano
from nanogpt_cells import NanoGPT
from torch.utils._python_dispatch import TorchDispatchMode

import fastpar
from fastpar import AdamW, Mesh, parallelize
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("error:fastpar.patch")
SMALL = {"bucket_mb": 0.01, "first_bucket_mb": 0.005}


class Ops(TorchDispatchMode):
    """Counts the calls of fastpar's ops, by their names and the tensors that they are given."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastpar":
            given = sum(isinstance(x, torch.Tensor) for x in (*args, *(kwargs or {}).values()))
            self.calls[f"{func.name().removeprefix('fastpar::')} {given}"] += 1
        return func(*args, **(kwargs or {}))


BUILD = {
    "transformers": (lambda: gpt2("D8"), {}),
    "transformers, fused loss": (lambda: gpt2("D8"), {"fused_loss": True}),
    "nanoGPT": (nano, {}),
}


@functools.cache
def patched(name):
    make, options = BUILD[name]
    model = make()
    fastpar.patch(model, **options)
    return model


def loss_of(model, ids):
    if isinstance(model, NanoGPT):
        logits = model(ids)
    else:
        output = model(ids, labels=ids, use_cache=False)
        if output.logits is None:
            return output.loss
        logits = output.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batch(seed):
    return torch.randint(67, (2, 11), generator=torch.Generator().manual_seed(seed))


def run(name, stage, mode="none"):
    """Per pass what was called, and the final weights."""
    model, rank = copy.deepcopy(patched(name)), 0
    if mode != "none":
        recompute(model, mode)
    if stage is not None:
        mesh = Mesh(dp=2)
        rank = mesh.dp_rank
        parallelize(model, mesh, Parallel.of(zero_stage=stage, **SMALL))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(2):
        with Ops() as ops:
            loss = loss_of(model, batch(2 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), Ops() as evaluation:
            loss_of(model, batch(2 * step + rank))
        model.train()
        seen.append((ops.calls, evaluation.calls))
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BUILD)
def test_a_patched_model_stays_fused_at_every_stage(name, mode):
    """The same numbers of calls of ops as in one process, the same weights at all stages."""
    once, _ = run(name, None, mode)
    for calls in once[0]:
        assert calls["layer_norm 5"] == calls["bias_gelu 2"] == 2, calls  # with residual; with bias
    weights = None
    for stage in range(4):
        for seen, state in run_ranks(run, 2, name, stage, mode):
            assert seen == once, stage
            weights = weights or state
            for key, value in state.items():
                assert torch.equal(value, weights[key]), (stage, key)


def compiled(stage):
    model = copy.deepcopy(patched("transformers"))
    parallelize(model, Mesh(), Parallel.of(zero_stage=stage, **SMALL))
    with torch.no_grad():
        want = loss_of(model, batch(0))
    for block in model.transformer.h:
        block.compile(backend="aot_eager")
    loss = loss_of(model, batch(0))
    loss.backward()
    return (loss - want).abs().item() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks_stay_fused(stage):
    """Traced code runs no hooks that gather: the unit waits for all of its weights."""
    assert all(run_ranks(compiled, 2, stage, backend="gloo", timeout_s=300))
