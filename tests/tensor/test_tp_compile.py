"""torch.compile over tensor parallelism: one graph, the same losses."""

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.kernels import make_key
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=301, dropout=0.1)


def losses(sequence_parallel, stage):
    mesh = Mesh(tp=2)
    idx = torch.randint(0, 301, (4, 16), generator=torch.Generator().manual_seed(3))
    found = []
    for compiled in (False, True):
        model = GPT(CONFIG)
        parallelize(model, mesh, zero_stage=stage, sequence_parallel=sequence_parallel)
        optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        forward = model
        if compiled:
            forward = torch.compile(model, backend="aot_eager", fullgraph=stage == 0)
        for step in range(3):
            loss = forward(idx, idx, rng_key=make_key(1, 4 * step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "sequence_parallel", "stage"),
    [(2, True, 0), (2, False, 0), (4, True, 3)],
)
def test_a_compiled_model_has_the_losses_of_an_eager_one(world_size, sequence_parallel, stage):
    results = run_ranks(losses, world_size, sequence_parallel, stage, backend="gloo", timeout_s=300)
    for found in results:
        assert found[3:] == found[:3] == results[0][:3]
