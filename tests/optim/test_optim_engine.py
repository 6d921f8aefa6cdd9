"""optim.py on parameters of an engine: reductions are finished, main gradients are found."""

import pytest
import torch
from test_optim import HYPER, build, vector

import fastpar
from fastpar.comm.mesh import Mesh
from fastpar.kernels.adamw import master_split
from fastpar.optim.adamw import AdamW
from fastpar.testing import run_ranks


def test_step_finishes_the_engines_reduction():
    def ranks():
        mesh = Mesh()
        model = fastpar.parallelize(build(seed=mesh.rank), mesh)
        optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
        engine = fastpar.engine_of(model)
        for step in range(4):
            with engine.no_sync():
                model(torch.full((2, 7), step + mesh.rank + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.check_replicas()
        return vector(model), optimizer.grad_norm

    plain = build()
    optimizer = AdamW(plain.parameters(), **HYPER, max_grad_norm=1.0)
    for step in range(4):
        for rank in range(2):
            (plain(torch.full((2, 7), step + rank + 1.0)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values, norm in run_ranks(ranks, 2):
        assert torch.equal(values, vector(plain))
        assert torch.equal(norm, optimizer.grad_norm)


def test_a_rank_without_a_batch_takes_part_in_every_step():
    def ranks():
        mesh = Mesh()
        model = fastpar.parallelize(build(), mesh)
        optimizer = AdamW(model.parameters(), **HYPER)
        for step in range(3):
            if mesh.rank == 0 or step == 0:
                model(torch.full((2, 7), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fastpar.engine_of(model).check_replicas()
        return vector(model)

    plain = build()
    optimizer = AdamW(plain.parameters(), **HYPER)
    for step in range(3):
        share = 1.0 if step == 0 else 0.5
        (plain(torch.full((2, 7), step + 1.0)).square().mean() * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(run_ranks(ranks, 2, timeout_s=20)[1], vector(plain))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_main_gradients_are_used_and_cleared(set_to_none):
    model, single = build(torch.bfloat16), build(torch.bfloat16).float()
    fastpar.parallelize(model, Mesh(), grad_dtype=torch.float32)
    a = AdamW(model.parameters(), **HYPER, master_weights=True)
    b = AdamW(single.parameters(), **HYPER)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), single.parameters()):
            q.grad = torch.zeros_like(q)
            for _ in range(3):
                g = torch.randn(p.shape, generator=generator).bfloat16()
                (p * g).sum().backward()
                q.grad += g.float()
        a.step()
        b.step()
        a.zero_grad(set_to_none=set_to_none)
        for p, q in zip(model.parameters(), single.parameters()):
            assert torch.equal(a.state[p]["master_weight"], q)
            assert torch.equal(p, master_split(q)[0])
