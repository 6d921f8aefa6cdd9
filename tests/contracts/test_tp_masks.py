"""Dropout masks of a model are those of one process, bit for bit, on every mesh.

Each op that drops is called once more, with the arguments that the model gives it and inputs that
show the mask: ones to drop, and for attention values that pick out one probability each.
"""

import functools
import threading

import pytest
import torch
from tp_cells import HEADS, LAYERS, Cell, build

from fastpar.comm.mesh import Mesh
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import make_key
from fastpar.models import gpt
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

OPS = ("attention_qkvpacked", "dropout", "embedding", "residual_layer_norm")


def of_attention(op, qkv, *, causal, **dropout):
    seen = torch.zeros(*qkv.shape[:-1], 16)
    time = qkv.shape[1]
    seen[:, :, 2, :, :time] = torch.eye(time)[:, None]
    return op(seen, causal=causal, **dropout)[..., :time]  # [B, T, H/tp, T]


def of_dropout(op, x, p, rng):
    return op(torch.ones_like(x), p, rng)


def of_embedding(op, idx, wte, wpe, **dropout):
    return op(idx, torch.ones_like(wte), torch.zeros_like(wpe), **dropout)


def of_residual(op, delta, x, weight, bias, *, eps, x_bias, **dropout):
    return op(torch.ones_like(delta), torch.zeros_like(x), weight, bias, eps=eps, **dropout)[1]


@pytest.fixture
def masks(monkeypatch):
    """list, for each thread: (op, where x is kept) in the order of the calls."""
    found = threading.local()
    for name, show in zip(OPS, (of_attention, of_dropout, of_embedding, of_residual)):
        op = getattr(gpt, name)
        monkeypatch.setattr(gpt, name, functools.partial(watched, found, name, op, show))
    return found


def watched(found, name, op, show, *args, **kwargs):
    if kwargs.get("dropout_p") or name == "dropout":
        with torch.no_grad():
            found.list.append((name, show(op, *args, **kwargs) != 0))
    return op(*args, **kwargs)


def forward(found, cell, samples, backward):
    """The masks of this rank's forward, and of its recomputation in backward."""
    mesh = Mesh(dp=cell.dp, tp=cell.tp)
    model = build(cell, 0)
    parallelize(model, mesh, Parallel.of(sequence_parallel=cell.sequence))
    recompute(model, "full" if backward else "none")
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(0, cell.vocab_size, (samples * cell.dp, cell.time), generator=generator)
    first = samples * mesh.dp_rank
    idx, found.list = idx[first : first + samples], []
    loss = model(idx, idx, rng_key=make_key(3, first))
    if backward:
        forward_only, found.list = found.list, []
        loss.backward()
        return forward_only, found.list
    return found.list, []


def joined(cell, samples, of_ranks):
    """Of the ranks of one tp group, the mask of their batch."""
    name = of_ranks[0][0]
    if name == "attention_qkvpacked":
        return torch.cat([mask for _, mask in of_ranks], 2)[:, : cell.time, :, : cell.time]
    if not cell.sequence:
        for _, mask in of_ranks:
            assert torch.equal(mask, of_ranks[0][1])
        return of_ranks[0][1]
    rows = torch.cat([mask for _, mask in of_ranks])
    return rows.view(samples, -1, rows.shape[-1])[:, : cell.time]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(
    ("tp", "dp", "samples", "time"),
    [
        (2, 1, 3, 6),  # the cut goes through a sample
        (4, 1, 3, 7),  # batches that the ranks do not divide
        (2, 2, 3, 5),
        (3, 1, 2, 7),
        (4, 2, 1, 6),
        (2, 2, 2, 6),
    ],
)
def test_masks_have_the_bits_of_one_process(masks, tp, dp, samples, time, sequence):
    cell = Cell(
        tp,
        dp,
        sequence=sequence,
        dropout=True,
        precision="fp32",
        time=time,
        n_head=12 if tp == 3 else HEADS,
    )
    whole = Cell(1, 1, dropout=True, precision="fp32", time=time, n_head=cell.n_head)
    expected, _ = run_ranks(forward, 1, masks, whole, samples * dp, False)[0]
    assert len(expected) == 1 + 3 * LAYERS
    results = [r for r, _ in run_ranks(forward, tp * dp, masks, cell, samples, False)]
    for i, (name, mask) in enumerate(expected):
        assert 0.05 < 1 - mask.float().mean() < 0.9
        for d in range(dp):
            of_ranks = [result[i] for result in results[d * tp : (d + 1) * tp]]
            part = mask[d * samples : (d + 1) * samples]
            assert torch.equal(joined(cell, samples, of_ranks), part), (i, name)


@pytest.mark.parametrize("sequence", [True, False])
def test_recomputation_draws_the_same_masks(masks, sequence):
    cell = Cell(2, 1, sequence=sequence, dropout=True, precision="fp32")
    for stored, again in run_ranks(forward, 2, masks, cell, 3, True):
        # Of the first block 2, its first norm adds nothing; backward begins with the last block.
        expected = stored[3:6] + stored[1:3]
        assert [name for name, _ in again] == [name for name, _ in expected]
        for (_, mask), (_, other) in zip(again, expected):
            assert torch.equal(mask, other)
