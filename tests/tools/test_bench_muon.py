"""bench.systems.muon: rows of both ways to step, whose bytes are the formula's."""

import json

from bench.systems import muon


def test_a_row(tmp_path):
    small = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 64}
    arguments = ["--ranks", "2", "--stages", "0", "2", "--rounds", "2", "--into", str(tmp_path)]
    assert muon.main(arguments, small) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["zero_stage"] for row in rows] == [0, 2]
    for row in rows:
        assert row["sent_bytes"] == row["formula_bytes"]
        assert min(row["sent_bytes"]) > 0
        assert row["sharded_ms"] > 0
        assert row["repeated_ms"] > 0
