"""Machines on paper: devices and links by name, rates of data sheets, networks of the textbook."""

import json
import os
import re

import pytest
from cells import sweep

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.doctor.table import cpu_name
from fastpar.doctor.trial import Timing
from fastpar.predict import machine
from fastpar.predict.machine import (
    DEVICES,
    GENERATIONS,
    Cluster,
    DatasheetRates,
    Network,
    device_of,
    find_device,
    find_link,
    hierarchy,
    place,
    ring,
    tree,
)
from fastpar.predict.time import comm_ops_of, ops_of
from fastpar.settings.model import GPTConfig

MIB = 2**20
WORKLOAD = Workload(GPTConfig.preset("gpt2-xl", dropout=0.0), 64)


def test_a_result_names_machine_and_versions(monkeypatch):
    """Enough to compare, nothing private."""
    about = machine.about_machine("cpu")
    assert about["device"].startswith(f"CPU: {cpu_name()}, ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"])
    assert about["torch"] == machine.version_of("torch")
    text = json.dumps(about)
    assert os.path.expanduser("~") not in text
    assert os.getcwd() not in text
    assert machine.version_of("no-such-package-of-ours") is None
    with monkeypatch.context() as patch:  # changes of the checkout are marked
        answers = iter(["0123456789ab", " M fastpar/x.py"])
        patch.setattr(machine, "_output", lambda command: next(answers))
        assert machine.commit() == "0123456789ab+"
    monkeypatch.setenv("PATH", "")  # there is no git
    monkeypatch.setenv("FASTPAR_COMMIT", "abc")
    assert machine.commit() == "abc"


def test_ceilings(monkeypatch):
    ms = {"copy": 2.0, "torch": 4.0, "linear": 1.0}

    def interleave(variants, clock, *, budget_s):
        assert set(variants) == set(ms)
        return {name: Timing(ms[name], 0.0, 0.0, 1) for name in variants}

    monkeypatch.setattr(machine, "interleave", interleave)
    found = machine.measure_ceilings("cpu", quick=True)
    assert found.matmul == "fp32 256^3"
    assert found.copy_gb_per_s == pytest.approx(8 * 2**20 / 2e6)  # read and written, in 2 ms
    assert found.matmul_tflop_per_s == pytest.approx(2 * 256**3 / 1e9)


NAMES = """\
v100-16: Tesla V100-SXM2-16GB; v100: Tesla V100-SXM2-32GB; a100-40: NVIDIA A100-SXM4-40GB, A100_40
a100: NVIDIA A100-SXM4-80GB, a100-80; a100-40-pcie: NVIDIA A100-PCIE-40GB
a100-pcie: NVIDIA A100 80GB PCIe; h100: NVIDIA H100 80GB HBM3, H100
h100-pcie: NVIDIA H100 PCIe, h100 pcie; h100-nvl: NVIDIA H100 NVL
h200: NVIDIA H200, NVIDIA GH200 480GB; b200: NVIDIA B200; b300: NVIDIA B300
rtx-5090: NVIDIA GeForce RTX 5090, 5090; gb10: NVIDIA GB10; mi300x: AMD Instinct MI300X
rtx-pro-6000: NVIDIA RTX PRO 6000 Blackwell Workstation Edition; l40s: NVIDIA L40S; l40: NVIDIA L40
l4: NVIDIA L4; rtx-4090: NVIDIA GeForce RTX 4090, 4090; rtx-3090: NVIDIA GeForce RTX 3090
a10g: NVIDIA A10G; a10: NVIDIA A10; t4: Tesla T4; cpu: cpu"""


def test_names():
    for row in NAMES.replace("\n", "; ").split("; "):
        expected, names = row.split(": ")
        of_torch, *others = names.split(", ")
        assert device_of(of_torch).name == expected
        assert {find_device(name).name for name in (of_torch, *others)} == {expected}
    assert device_of("Radeon") is None
    assert find_link("Ethernet-100") is find_link("eth-100")
    assert find_link("infiniband_ndr") is find_link("ib-ndr")
    larger = [machine.larger_device(gib * machine.GIB) for gib in (30, 100, 1000)]
    assert larger == ["v100", "h200", None]
    assert machine.larger_device(79 * machine.GIB) in ("a100-pcie", "a100")


def test_every_row_is_whole():
    """Makers print both directions of a link and sparse peaks: none of these here."""
    names = [n for d in DEVICES for n in (d.name, *d.aliases)]
    assert len(set(names)) == len(names)
    for d in DEVICES:
        assert d.source
        assert find_link(d.intra)
        assert find_link(d.inter)
        assert find_device(d.name) is d
        assert d.peak_flops >= d.peak_flops_fp32 > 0
        assert d.price_per_hour > 0
        assert d.memory_bytes > machine.GIB
    assert not find_device("v100").has_bf16
    assert find_device("a100").has_bf16
    assert find_device("cpu").kind == "cpu"
    assert find_device("t4").kind == "cuda"
    assert find_link("nvlink4").bytes_per_s == 450e9
    assert find_link("eth-100").bytes_per_s == 12.5e9
    assert find_link("eth-100").of_node
    assert all(0 < link.achieved < 1 and link.latency_s > 0 for link in machine.LINKS)


def test_cluster_has_what_is_usual():
    cluster = Cluster.of("h100", 16)
    assert (cluster.per_node, cluster.intra.name, cluster.inter.name) == (8, "nvlink4", "ib-ndr")
    assert str(cluster) == "16 x h100, 8 per node over nvlink4, 2 nodes over ib-ndr"
    assert str(Cluster.of("rtx-4090", 1)) == "1 x rtx-4090, 1 per node"
    assert Cluster.of("h100", 12).per_node == 6
    assert Cluster.of("a100", 8, per_node=4, inter="eth-100").inter.of_node


def network(n_devices=64, per_node=8, inter="ib-hdr"):
    return Network(Cluster.of("a100", n_devices, per_node, inter=inter))


REFUSED = [
    (lambda: find_device("h101"), r"got name='h101'; did you mean h100\? choose one of b300, "),
    (lambda: find_device("rtx9090"), r"did you mean (rtx-\S+)\? choose one of .*\b\1\b"),
    (lambda: find_device(""), "find_device: expected a device of the table, got name=''; choose"),
    (lambda: find_link("nvlink9"), r"name='nvlink9'; did you mean nvlink\d\? choose one of "),
    (lambda: Cluster.of("h100", 8, inter="pigeon"), "find_link: expected a link of the table"),
    (lambda: Cluster.of("h100", 12, 8), "expected full nodes of per_node=8, got n_devices=12; use"),
]


@sweep(["act", "words"], REFUSED)
def test_what_is_refused(act, words):
    with pytest.raises(ValueError, match=words):
        act()


def rates_of(name="a100", n=8, **options):
    return DatasheetRates(Cluster.of(name, n), Setup(world_size=n, **options))


def product(m, k, n, direction="forward"):
    return Op("matmul", (m, k, n), direction, 2.0 * m * k * n, 0.0, 1)


@pytest.mark.parametrize("device", [d.name for d in DEVICES])
def test_nothing_is_faster_than_the_sheet(device):
    rates, d = rates_of(device), find_device(device)
    assert set(GENERATIONS) == {other.generation for other in DEVICES}
    for op in ops_of(WORKLOAD, Setup(8, micro_batch_size=8, activation_checkpointing="full")):
        assert rates.op_s(op) >= op.flops / d.peak_flops
        if op.name not in ("matmul", "attention"):
            assert rates.op_s(op) >= op.bytes / d.bytes_per_s
    for m, k, n in ((1, 1, 1), (128, 64, 128), (8192, 8192, 8192), (333, 777, 555)):
        assert 0 < rates.utilization(m, k, n) < 1


def test_products():
    """Large ones reach the rate; one tile more costs a wave; thin ones wait for memory."""
    for name in ("a100", "h100", "v100"):
        rates, n = rates_of(name), 16384
        reached = 2 * n**3 / rates.op_s(product(n, n, n)) / rates.peak_flops
        assert reached == pytest.approx(GENERATIONS[find_device(name).generation].reached, rel=0.05)
    rates = rates_of()
    full, more = 108 * 128, 109 * 128
    assert rates.utilization(full, 64, 128) > 1.5 * rates.utilization(more, 64, 128)
    assert rates.utilization(4096, 4096, 130) < rates.utilization(4096, 4096, 128)
    long = [rates.utilization(128, k, 128) for k in (256, 4096, 65536)]
    assert long == sorted(long)
    seconds = rates.op_s(product(1, 8192, 8192)) - machine.LAUNCH_S["cuda"]
    assert seconds == pytest.approx(2 * 8192 * 8192 / (2039e9 * 0.85), rel=0.01)
    backward, again, forward = (
        rates.op_s(product(8192, 4096, 4096, d)) for d in ("backward", "recompute", "forward")
    )
    assert backward == pytest.approx(2 * forward, rel=0.1)
    assert again == forward
    assert (rates.peak_flops, rates_of(dtype="fp32").peak_flops) == (312e12, 19.5e12)


def test_small_ops_wait_for_the_host_and_exchanges_are_the_networks():
    tiny = Op("bias_gelu", (1, 64), "forward", 0.0, 256.0, 1)
    assert rates_of().op_s(tiny) == 25e-6
    assert rates_of("cpu").op_s(tiny) == pytest.approx(5e-6, rel=0.02)
    rates = rates_of(n=16)
    send = CommOp("all_reduce", "dp", 1e9, 16, 1, 1, "")
    assert rates.comm_s(send) == rates.network.seconds("all_reduce", 1e9, 16)
    assert rates.comm_s(send._replace(count=5)) == rates.comm_s(send)
    assert sum(map(rates.comm_s, comm_ops_of(WORKLOAD, Setup(16, zero_stage=3)))) > 0
    assert (rates.overlap, rates_of("cpu").overlap) == (0.8, 0.0)


@sweep("ranks", [2, 4, 8])
def test_large_ring_moves_two_parts_less_one(ranks):
    """2 (n-1)/n of the bytes pass each link, for one direction half; so too inside of a node."""
    net, n_bytes = network(), 1e12
    link = find_link("nvlink3")
    expected = 2 * (ranks - 1) / ranks * n_bytes / (link.bytes_per_s * link.achieved)
    assert net.seconds("all_reduce", n_bytes, ranks) == pytest.approx(expected, rel=1e-4)
    for kind in ("all_gather", "reduce_scatter"):
        assert net.seconds(kind, n_bytes, ranks) == pytest.approx(expected / 2, rel=1e-4)
    at = place(ranks, 1, net.cluster.per_node)
    around = net.traffic_s(ring(at, 1e9, 2))
    assert around == pytest.approx(net.traffic_s(hierarchy(at, 1e9, 2)))
    assert ranks < 8 or around < net.traffic_s(tree(at, 1e9, 2))


def test_small_messages_are_latency():
    """A ring's grows with the ranks, a tree's with their logarithm."""
    net = network(16384)
    few, many = (net.seconds("all_reduce", 8.0, n) for n in (128, 16384))
    levels = 2 * 7 * net.cluster.inter.latency_s
    assert many - few == pytest.approx(levels, rel=1e-6)
    at = place(16384, 1, net.cluster.per_node)
    assert net.traffic_s(ring(at, 8.0, 2)) > 50 * net.traffic_s(tree(at, 8.0, 2))


def test_more_bytes_ranks_and_distance_are_never_faster():
    net = network(16384)
    for kind in machine.WAYS:
        by_bytes = [net.seconds(kind, n, 16) for n in (0, MIB, 64 * MIB)]
        assert by_bytes == sorted(by_bytes)
        by_ranks = [net.seconds(kind, 64 * MIB, 2**i) for i in range(15)]
        assert by_ranks == sorted(by_ranks)
        assert net.seconds(kind, MIB, 8, 1) < net.seconds(kind, MIB, 8, 8)
        assert net.seconds(kind, 1e9, 1) == 0.0
    assert net.seconds("all_reduce", 350e9, 16384) < 10.0
