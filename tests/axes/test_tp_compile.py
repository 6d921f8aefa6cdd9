"""torch.compile over tensor parallelism and grids: one graph, the same losses."""

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.kernels import make_key
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=301, dropout=0.1)


def losses(axes, options):
    mesh = Mesh(**axes)
    idx = torch.randint(0, 301, (4, 16), generator=torch.Generator().manual_seed(3))
    found = []
    for compiled in (False, True):
        model = GPT(CONFIG)
        parallelize(model, mesh, Parallel.of(**options))
        optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        forward = model
        if compiled:
            whole = not options.get("zero_stage")
            forward = torch.compile(model, backend="aot_eager", fullgraph=whole)
        for step in range(3):
            loss = forward(idx, idx, rng_key=make_key(1, 4 * step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "axes", "options"),
    [
        (2, {"tp": 2}, {"sequence_parallel": True}),
        (2, {"tp": 2}, {"sequence_parallel": False}),
        (4, {"tp": 2}, {"sequence_parallel": True, "zero_stage": 3}),
        (2, {"tp_grid": (1, 2)}, {}),
        (2, {"tp_grid": (2, 1)}, {}),
        (4, {"tp_grid": (2, 1)}, {"zero_stage": 3}),
        (4, {"tp_grid": (2, 2)}, {}),
    ],
    ids=str,
)
def test_a_compiled_model_has_the_losses_of_an_eager_one(world_size, axes, options):
    results = run_ranks(losses, world_size, axes, options, backend="gloo", timeout_s=300)
    for found in results:
        assert found[3:] == found[:3] == results[0][:3]
