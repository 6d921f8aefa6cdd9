"""torch.compile over context parallelism: one graph, the same losses."""

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.kernels import make_key
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=3, n_embd=24, block_size=16, vocab_size=301, dropout=0.1)


def losses(cp, stage, method):
    mesh = Mesh(cp=cp)
    idx = torch.randint(0, 301, (4, 16), generator=torch.Generator().manual_seed(3))
    found = []
    for compiled in (False, True):
        model = parallelize(GPT(CONFIG), mesh, Parallel.of(zero_stage=stage, cp_method=method))
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
@pytest.mark.parametrize("method", ["heads", "keys"])
@pytest.mark.parametrize(("cp", "stage"), [(2, 0), (2, 3)])
def test_a_compiled_model_has_the_losses_of_an_eager_one(cp, stage, method):
    results = run_ranks(losses, cp, cp, stage, method, backend="gloo", timeout_s=300)
    for found in results:
        assert found[3:] == pytest.approx(found[:3], rel=1e-6)
        assert found == results[0]
