"""A tp that does not divide the heads: they are padded, and nothing else changes."""

from dataclasses import replace

import pytest
import torch
from cells import slow
from saved import bits
from tp_cells import Cell, assert_same_run, batch, build, run

from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.comm.mesh import Mesh
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import make_key
from fastpar.optim.adamw import AdamW
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

FIVE = Cell(2, n_head=5, dropout=True, clip=True)
XL = Cell(2, n_head=25, head_dim=8, clip=True)  # GPT-2 XL's heads, cut down


@pytest.mark.parametrize(
    "cell",
    [
        FIVE,  # 3 + 2 heads and 1 of padding
        replace(FIVE, tp=4, stage=3),  # 2 + 2 + 1 + 0: the last rank has padding only
        replace(FIVE, dp=2, stage=2, sequence=False, accum="full"),
        *(slow(replace(FIVE, tp=4, stage=stage, dp=2)) for stage in range(3)),
        slow(replace(FIVE, stage=1, dp=2, recompute="full", accum="shard")),
        slow(replace(FIVE, stage=3, dp=2, recompute="selective", sequence=False)),
        slow(replace(FIVE, stage=3, dp=4, shard_size=2, deterministic=True)),
        slow(replace(FIVE, precision="fp32")),
        slow(replace(FIVE, precision="bf16", stage=2, dp=2)),
        slow(replace(FIVE, precision="fp16", tp=4)),
        slow(XL),
        slow(replace(XL, tp=4, stage=3, dropout=True)),
        slow(replace(XL, tp=4, dp=2, stage=1, precision="fp32")),
    ],
    ids=str,
)
def test_the_same_run_as_one_process(cell):
    assert_same_run(cell, run(cell))


def take_steps(model, n=3):
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.25)
    for step in range(n):
        x, y = batch(FIVE, step)
        model(x, y, rng_key=make_key(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_padding_stays_zero_and_is_nowhere_else():
    """Weights, gradients and optimizer states behind the last head; whole tensors are without."""

    def one():
        mesh = Mesh(tp=4)
        model = build(FIVE, mesh.rank)
        parallelize(model, mesh)
        optimizer = take_steps(model)
        qkv, proj = (model.get_parameter(f"h.0.attn.{n}.weight") for n in ("c_attn", "c_proj"))
        heads = min(2, max(0, 5 - 2 * mesh.tp_rank))
        behind = qkv.unflatten(0, (3, 8))[:, 4 * heads :], proj[:, 4 * heads :]
        assert [x.numel() for x in behind] == [3 * 4 * (2 - heads) * 20, 20 * 4 * (2 - heads)]
        assert not any(x.any() for x in behind)
        return model.state_dict(), optimizer.state_dict()["state"]

    model = build(FIVE, 0)
    optimizer = take_steps(model)
    for state, states in run_ranks(one, 4):
        for name, p in model.named_parameters():
            assert state[name].shape == p.shape
            assert (state[name] - p).abs().max() <= 1e-11 * p.abs().max(), name
        for index, expected in optimizer.state_dict()["state"].items():
            assert expected.keys() == states[index].keys()
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    got = states[index][key]
                    assert got.shape == value.shape
                    assert (got - value).abs().max() <= 1e-11 * value.abs().max(), (index, key)


@pytest.mark.parametrize("stage", [1, slow(0), slow(3)])
def test_a_checkpoint_is_that_of_five_heads(tmp_path, stage):
    """Trained with two ranks, loaded and saved by one and by four: the same bytes."""

    def one(tp, source):
        mesh = Mesh(tp=tp)
        model = build(replace(FIVE, precision="fp32"), mesh.rank + 1)
        parallelize(model, mesh, zero_stage=stage)
        optimizer = take_steps(model, 2 if source is None else 0)
        if source is not None:
            load_checkpoint(source, model=model, optimizer=optimizer)
        return save_checkpoint(tmp_path / f"tp {tp}", model=model, optimizer=optimizer, step=2)

    ours = run_ranks(one, 2, 2, None)[0]
    verify_checkpoint(ours)
    for tp in (1, 4):
        path = run_ranks(one, tp, tp, ours)[0]
        verify_checkpoint(path)
        assert bits(path) == bits(ours), tp


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, r"parallelize: expected tp to divide the MLP's width of 80, got tp=3; change tp"),
        (8, r"parallelize: expected tp of at most n_head=5, got tp=8; lower tp"),
    ],
)
def test_what_padding_does_not_mend(tp, message):
    def one():
        parallelize(build(FIVE, 0), Mesh(tp=tp), Parallel.of(sequence_parallel=False))

    with pytest.raises(ValueError, match=message):
        run_ranks(one, tp)
