"""What `fastpar plan` says of replicas that train apart."""

import re
from dataclasses import replace

import pytest
from cells import sweep

from fastpar.axes.replicas import AXIS, apart, replicas_of
from fastpar.axes.step import Setup, Workload
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.search import MachinePrices
from fastpar.settings.model import GPTConfig

SHAPE = GPTConfig.preset("gpt2")


@sweep(
    ["changes", "nodes", "n"],
    [
        ({}, 1, 2),  # halves
        ({"world_size": 16}, 2, 2),  # machines
        ({"world_size": 24}, 3, 3),
        ({"world_size": 24, "tp": 8}, 3, 3),
        ({"world_size": 3}, 1, 1),
        ({"world_size": 1}, 1, 1),
        ({"pp": 2}, 1, 1),
    ],
)
def test_how_many(changes, nodes, n):
    assert replicas_of(Setup(**{"world_size": 8, **changes}), nodes) == n


@sweep("stage", [0, 1, 2, 3])
def test_one_replica_has_its_part_of_the_ranks_and_of_the_batch(stage):
    setup = Setup(world_size=8, zero_stage=stage, shard_size=8 if stage else None)
    workload, one = apart(Workload(SHAPE, 32), setup, 2)
    assert (workload.batch_size, one.world_size, one.dp) == (16, 4, 4)
    assert one.n_shards == (4 if stage else 1)


@sweep("nodes", [1, 2])
def test_bytes_and_where_they_pay(nodes):
    """By hand: of P parameters fp32 a ring of two sends 4 P an exchange."""
    setup = Setup(world_size=2, device_type="cpu", transport="gloo", dtype="fp32")
    rates = DatasheetRates(Cluster.of("cpu", 2), setup)
    prices = MachinePrices(rates, nodes)
    heading, *lines = AXIS.what_if(Workload(SHAPE, 2), setup, prices)
    assert heading == "replicas, with a loss curve of their own"
    assert len(lines) == 3
    sent = []
    for line, every in zip(lines, (10, 50, 200), strict=True):
        found = re.match(
            rf"  --replicas 2 --outer-every {every}: a rank sends ([\d.,]+) MB a step to other "
            r"replicas and 0 MB inside, not [\d.,]+ MB; outer step ([\d.]+) ms, step [\d.,e+]+ ms; "
            r"pays below ([\d.,e+]+) Gbit/s a rank",
            line,
        )
        assert found, line
        mb, outer_ms, pays = (float(x.replace(",", "")) for x in found.groups())
        sent.append(mb)
        assert mb == pytest.approx(4 * 124.4 / every, abs=1)
        saved = 4 * 124.4e6 * (1 - 1 / every)
        assert pays == pytest.approx(8 * saved / (outer_ms * 1e-3) / 1e9, rel=0.2)
    assert sent == sorted(sent, reverse=True)
    # What a replica of two ranks sends inside is on the same link of one machine only.
    four, rows = replace(setup, world_size=4), Workload(SHAPE, 4)
    pays = [
        float(re.search(r"below ([\d.,e+]+)", line)[1].replace(",", ""))
        for _, line, *_ in (AXIS.what_if(rows, four, MachinePrices(rates, n)) for n in (1, 2))
    ]
    assert pays[0] < 0.5 * pays[1]
    assert AXIS.what_if(Workload(SHAPE, 3), setup, prices) == ()
