"""Rows of saving and loading: the gate, and the table."""

import pytest
import torch
from cells import slow
from test_records import make_row

from bench.peers.checkpoint import DCP, FLUSHED, OWN, Rank, Trial
from bench.report import tables
from bench.targets import faster, note
from fastpar.config.config import GPTConfig

TINY = GPTConfig(1, 2, 32, 16, 200, dropout=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("way", [OWN, slow(FLUSHED), slow(DCP)])
def test_what_is_loaded_is_what_was_saved_or_the_row_is_refused(tmp_path, way):
    rank = Rank(Trial(way == OWN, TINY, str(tmp_path)), 0)
    if way == OWN:
        rank.prepare()
    assert rank.save(way)["ms"] > 0
    assert rank.load(way, False)["ms"] > 0
    with torch.no_grad():
        next(iter(rank.made.model.parameters())).add_(1.0)
    with pytest.raises(RuntimeError, match="other weights or moments than before the save"):
        rank.load(way, False)


def test_the_table_says_what_is_missed():
    values = {"bench": "checkpoint", "case": "GPT-2", "direction": "save", "gb_per_s": 1.0}
    rows = [
        make_row(**values, variant="fastpar", median_ms=2.0, notes=note([faster(1.0, "torch")])),
        make_row(**values, variant="torch", median_ms=1.0),
    ]
    text = tables.TABLES["checkpoint"](rows)
    assert "| fastpar | 2 | 1 GB/s |" in text
    assert text.count("not >= 1x torch") == 1
