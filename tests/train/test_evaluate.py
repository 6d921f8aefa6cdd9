"""The validation loss: one number however the windows are shared out."""

import numpy as np
import pytest
import torch

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.trainer import validation_loss

SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=130, dropout=0.5)
TOKENS = np.random.default_rng(0).integers(0, 130, 7 * 8 + 1).astype(np.uint16)  # seven windows


def loss_of(options, rows, n_batches):
    options = dict(options)
    mesh = Mesh(tp=options.pop("tp", 1), device="cpu")
    model = parallelize(GPT(SHAPE).double(), mesh, Parallel.of(**options))
    return validation_loss(
        model, engine_of(model), TOKENS, rows=rows, block_size=8, n_batches=n_batches
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {}), (3, {"zero_stage": 3}), (4, {"zero_stage": 3}), (4, {"tp": 2})],
)
def test_all_windows_count_once(ranks, options):
    """Some ranks get fewer of the seven windows; dropout is off."""
    model = GPT(SHAPE).double().eval()
    ids = torch.from_numpy(TOKENS.astype(np.int64))
    with torch.no_grad():
        expected = model(ids[:-1].view(7, 8), ids[1:].view(7, 8)).item()
        first = model(ids[:32].view(4, 8), ids[1:33].view(4, 8)).item()
    for rows in (1, 2, 4):
        found = run_ranks(loss_of, ranks, options, rows, 100)
        assert len(set(found)) == 1
        assert found[0] == pytest.approx(expected, rel=1e-12)
    assert run_ranks(loss_of, ranks, options, 1, 4)[0] == pytest.approx(first, rel=1e-12)
