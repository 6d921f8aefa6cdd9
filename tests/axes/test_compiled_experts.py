"""torch.compile over a model with experts, which run between its graphs: the same numbers."""

import pytest
import torch

import fastpar
from fastpar.kernels import make_key
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

SIZES = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 41, "dropout": 0.1,
    "n_expert": 4, "balance_loss": 0.5, "router_z_loss": 0.02, "balance_rate": 0.05,
}  # fmt: skip


def steps(compiled, ep, stage, mode, changes):
    """Loss, norm and counts of each."""
    mesh, model = fastpar.Mesh(ep=ep), GPT(GPTConfig(**{**SIZES, **changes}), seed=3).double()
    fastpar.parallelize(model, mesh, zero_stage=stage)
    recompute(model, mode)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    opt = fastpar.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=0.5)
    generator = torch.Generator().manual_seed(mesh.rank)
    for step in range(3):
        for part in range(2):
            idx = torch.randint(0, 41, (2, 8), generator=generator)
            loss = forward(idx, idx, rng_key=make_key(1, 4 * step + 2 * part))
            loss.backward()
        opt.step()
        opt.zero_grad()
        yield loss.item(), opt.grad_norm.item(), *model.experts.last.flatten().tolist()


def both(*cell):
    return [list(steps(compiled, *cell)) for compiled in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ep", "stage", "mode", "changes"),
    [
        (1, 0, "none", {}),
        (1, 0, "full", {}),
        (2, 3, "none", {"expert_capacity": 1.0}),
        (2, 1, "selective", {"top_k": 1}),
    ],
)
def test_a_compiled_model_is_the_eager_one(ep, stage, mode, changes):
    """In processes: what a compiler has seen belongs to one."""
    for eager, compiled in run_ranks(both, ep, ep, stage, mode, changes, backend="gloo"):
        for found, want in zip(compiled, eager, strict=True):
            assert found == pytest.approx(want, rel=1e-12, abs=1e-12)
