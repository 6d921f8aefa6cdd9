"""What textbooks say of rings, trees and hierarchies, and where ranks are."""

import pytest
import torch
from lone_rank import LoneRun

from fastpar.axes.step import Setup, Workload
from fastpar.predict.machine import (
    WAYS,
    Cluster,
    Group,
    Network,
    find_link,
    hierarchy,
    pairs,
    place,
    ring,
    tree,
)
from fastpar.predict.time import comm_ops_of
from fastpar.settings.model import GPTConfig

MIB = 2**20


def network(n_devices=64, per_node=8, inter="ib-hdr"):
    return Network(Cluster.of("a100", n_devices, per_node, inter=inter))


@pytest.mark.parametrize(
    ("ranks", "stride", "expected"),
    [
        (8, 1, (8, 8, 1)),
        (16, 1, (16, 8, 2)),
        (8, 8, (8, 1, 8)),
        (8, 4, (8, 2, 4)),
        (2, 4, (2, 2, 1)),
        (2, 16, (2, 1, 2)),
        (16384, 1, (16384, 8, 2048)),
    ],
)
def test_where_ranks_are(ranks, stride, expected):
    assert place(ranks, stride, 8) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_large_ring_moves_two_parts_less_one(ranks):
    """2 (n-1)/n of the bytes through one link; half of it for one direction."""
    net, n_bytes = network(), 1e12
    link = find_link("nvlink3")
    expected = 2 * (ranks - 1) / ranks * n_bytes / (link.bytes_per_s * link.achieved)
    assert net.seconds("all_reduce", n_bytes, ranks) == pytest.approx(expected, rel=1e-4)
    for kind in ("all_gather", "reduce_scatter"):
        assert net.seconds(kind, n_bytes, ranks) == pytest.approx(expected / 2, rel=1e-4)


def test_small_messages_are_latency():
    """A ring's grows with the ranks, a tree's with their logarithm."""
    net = network(16384)
    few, many = (net.seconds("all_reduce", 8.0, n) for n in (128, 16384))
    levels = 2 * 7 * net.cluster.inter.latency_s
    assert many - few == pytest.approx(levels, rel=1e-6)
    at = place(16384, 1, net.cluster.per_node)
    assert net.traffic_s(ring(at, 8.0, 2)) > 50 * net.traffic_s(tree(at, 8.0, 2))
    assert net.seconds("all_gather", 8.0, 16384) < 1e-3


@pytest.mark.parametrize("inter", ["eth-100", "eth-10", "eth-400"])
def test_hierarchy_beats_a_ring_over_slow_links(inter):
    """Through the slow link each byte goes (nodes-1)/nodes times instead of (n-1)/n."""
    net = network(16, inter=inter)
    at = place(16, 1, net.cluster.per_node)
    around, levels = (net.traffic_s(way(at, 1e10, 2)) for way in (ring, hierarchy))
    assert levels < around
    if inter == "eth-10":
        assert around / levels == pytest.approx((15 / 16) / (1 / 2), rel=0.02)
    assert net.seconds("all_reduce", 1e10, 16) <= levels + net.start_s


def test_inside_of_a_node_a_ring_is_a_hierarchy():
    net = network()
    at = place(8, 1, net.cluster.per_node)
    around = net.traffic_s(ring(at, 1e9, 2))
    assert around == pytest.approx(net.traffic_s(hierarchy(at, 1e9, 2)))
    assert around < net.traffic_s(tree(at, 1e9, 2))


def test_every_device_has_an_adapter_or_its_part_of_one():
    """Groups of one rank a node: with adapters of its own a rank has all of one, otherwise 1/8."""
    own, shared = network(inter="ib-hdr"), network(inter="eth-400")
    n_bytes = 1e11
    assert own.seconds("send", n_bytes, 2, 8) == pytest.approx(n_bytes / (25e9 * 0.9), rel=1e-3)
    expected = n_bytes / (50e9 * 0.8 / 8)
    assert shared.seconds("send", n_bytes, 2, 8) == pytest.approx(expected, rel=1e-3)


def test_more_bytes_ranks_and_distance_are_never_faster():
    net = network(16384)
    for kind in WAYS:
        by_bytes = [net.seconds(kind, n, 16) for n in (0, MIB, 64 * MIB)]
        assert by_bytes == sorted(by_bytes)
        by_ranks = [net.seconds(kind, 64 * MIB, 2**i) for i in range(15)]
        assert by_ranks == sorted(by_ranks)
        assert net.seconds(kind, MIB, 8, 1) < net.seconds(kind, MIB, 8, 8)
        assert net.seconds(kind, 1e9, 1) == 0.0
    assert net.seconds("all_reduce", 350e9, 16384) < 10.0


def test_bad_input():
    net = network()
    with pytest.raises(ValueError, match=r"expected a kind of all_reduce, .* got kind='gossip'"):
        net.seconds("gossip", 1.0, 2)
    with pytest.raises(ValueError, match="place: expected ranks >= 1, got ranks=0; count from 1"):
        net.seconds("send", 1.0, 0)
    with pytest.raises(ValueError, match="expected stride >= 1, got stride=0"):
        place(2, 0, net.cluster.per_node)
    assert place(1, 1, net.cluster.per_node) == Group(1, 1, 1)


@pytest.mark.parametrize("inter", ["ib-ndr", "eth-100"])
@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "of_node"),
    [
        # Bytes of a tensor that leave a node of 8: a ring's, and pairs' of all of its ranks.
        ("reduce_scatter", 64, 1, 63 / 64),
        ("all_reduce", 64, 1, 2),  # trees send both ways all of it
        ("all_to_all", 64, 1, 8 * 56 / 64),
        ("reduce_scatter", 8, 8, 8 * 7 / 8),  # 8 groups of one rank a node
        ("all_to_all", 8, 8, 8 * 7 / 8),
        ("all_to_all", 16, 4, 4 * 2 * 14 / 16),  # 4 groups of two ranks a node
        ("reduce_scatter", 8, 1, 0.0),
        ("all_to_all", 8, 1, 0.0),
        ("reduce_scatter", 1, 1, 0.0),
    ],
)
def test_bytes_of_each_adapter(kind, ranks, stride, of_node, inter):
    """Of the node one adapter sends all, of 8 each sends an eighth; hierarchies save little."""
    net = network(inter=inter)
    found = net.nic_bytes(net.traffic(kind, 1e9, ranks, stride))
    found *= 8 if inter == "ib-ndr" else 1
    near = 0.0 if inter == "ib-ndr" else 0.13  # where the adapter is slow, NCCL saves bytes of it
    assert of_node * 1e9 * (1 - near) <= found * (1 + 1e-9)
    assert found <= of_node * 1e9 * (1 + 1e-9)


def test_pairs_bring_each_adapter_seven_times_the_bytes_of_a_ring():
    """The review's table: 8 x 8 ranks, 56/64 of the tensor through each of 64 adapters."""
    at = place(64, 1, 8)
    assert pairs(at, 64.0).adapter == 56
    assert ring(at, 64.0).adapter == 63 / 8
    net = network(inter="ib-ndr")
    slower = net.seconds("all_to_all", 1e9, 64) / net.seconds("reduce_scatter", 1e9, 64)
    assert 3 < slower < 7.2  # inside of an A100's node a ring goes no faster than NVLink
    one_a_node = place(8, 8, 8)
    assert pairs(one_a_node, 64.0).adapter == ring(one_a_node, 64.0).adapter == 56


@pytest.mark.parametrize(("tp", "stage"), [(1, 0), (1, 2), (2, 3), (2, 1)])
def test_an_engine_s_step_sends_what_the_planner_says(tp, stage):
    """The collectives of a real step, as one of 16 ranks on 4 nodes, and those of comm_ops_of."""
    shape = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
    idx = torch.arange(64).view(2, 32)
    with LoneRun(shape, idx, 16, 0, {"tp": tp}, zero_stage=stage) as run:
        run.train()
        said = [op for phase in run.train() for op in phase]
    setup = Setup(
        world_size=16, tp=tp, zero_stage=stage, micro_batch_size=2, dtype="fp32",
        device_type="cpu", transport="gloo",
    )  # fmt: skip
    network = Network(Cluster.of("h100", 16, 4, inter="ib-ndr"))
    sent = [network.traffic(op.kind, op.tensor_bytes, op.world_size, op.stride) for op in said]
    comms = comm_ops_of(Workload(shape, 2 * 16 // tp), setup)
    assert sum(map(network.nic_bytes, sent)) == pytest.approx(
        network.step_nic_bytes(comms), rel=0.02
    )
