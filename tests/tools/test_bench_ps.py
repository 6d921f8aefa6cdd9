"""Parameter servers of the bench: what a worker pushes is in what all pull."""

import pytest
from test_bench import make_bench

from bench.records import load
from bench.systems import bench_ps
from bench.systems.links import Link, NoLinkError


@pytest.mark.slow
def test_servers_add_up_what_workers_push(tmp_path):
    """On real links: the same loss by every synchronous way, bytes by the formula, headers beside
    them."""
    try:
        Link(100, 3).close()
    except NoLinkError as error:
        pytest.skip(str(error))
    bench = make_bench(tmp_path, "ps")
    bench_ps.run(bench)
    _, rows = load(tmp_path / "rows.json")
    found = {row.variant: row for row in rows}
    assert set(found) == set(bench_ps.VARIANTS)
    assert all(row.refused is None for row in rows), [row.refused for row in rows]
    losses = {v: row.notes["bits_per_byte"] for v, row in found.items()}
    assert losses[bench_ps.CENTRAL] == pytest.approx(losses[bench_ps.ALL_REDUCE], abs=1e-4)
    assert losses[bench_ps.ASYNC] != losses[bench_ps.ALL_REDUCE]
    central = found[bench_ps.CENTRAL].notes
    assert 1.8 < central["sent_bytes"] / central["worker_bytes"] < 2.2  # two workers
    assert 0 < found[bench_ps.ASYNC].notes["staleness"] < 2
