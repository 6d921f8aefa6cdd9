"""datasheet.Network: what textbooks say of rings, trees and hierarchies, and where ranks are."""

import pytest

from fastpar.cost.datasheet import KINDS, Group, Network, place
from fastpar.cost.devices import Cluster, find_link

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
    levels = 2 * 7 * net.between_s
    assert many - few == pytest.approx(levels, rel=1e-6)
    at = place(16384, 1, net.cluster.per_node)
    assert net.ring_s(8.0, at) > 50 * net.tree_s(8.0, at)
    assert net.seconds("all_gather", 8.0, 16384) < 1e-3


@pytest.mark.parametrize("inter", ["eth-100", "eth-10", "eth-400"])
def test_hierarchy_beats_a_ring_over_slow_links(inter):
    """Through the slow link each byte goes (nodes-1)/nodes times instead of (n-1)/n."""
    net = network(16, inter=inter)
    at = place(16, 1, net.cluster.per_node)
    ring, levels = (f(1e10, at) for f in (net.ring_s, net.hierarchical_s))
    assert levels < ring
    if inter == "eth-10":
        assert ring / levels == pytest.approx((15 / 16) / (1 / 2), rel=0.02)
    assert net.seconds("all_reduce", 1e10, 16) <= levels + net.start_s


def test_inside_of_a_node_a_ring_is_a_hierarchy():
    net = network()
    at = place(8, 1, net.cluster.per_node)
    assert net.ring_s(1e9, at) == pytest.approx(net.hierarchical_s(1e9, at))
    assert net.ring_s(1e9, at) < net.tree_s(1e9, at)


def test_every_device_has_an_adapter_or_its_part_of_one():
    """Groups of one rank a node: with adapters of its own a rank has all of one, otherwise 1/8."""
    own, shared = network(inter="ib-hdr"), network(inter="eth-400")
    n_bytes = 1e11
    assert own.seconds("send", n_bytes, 2, 8) == pytest.approx(n_bytes / (25e9 * 0.9), rel=1e-3)
    expected = n_bytes / (50e9 * 0.8 / 8)
    assert shared.seconds("send", n_bytes, 2, 8) == pytest.approx(expected, rel=1e-3)


def test_more_bytes_ranks_and_distance_are_never_faster():
    net = network(16384)
    for kind in KINDS:
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
