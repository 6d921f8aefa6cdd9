"""Devices: the table is consistent, names are found, and what is not is refused helpfully."""

import pytest

from fastpar.predict.machine import (
    DEVICES,
    GIB,
    LINKS,
    Cluster,
    device_of,
    find_device,
    find_link,
    larger_device,
)

TORCH_NAMES = {
    "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": "l40",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA A10G": "a10g",
    "NVIDIA A10": "a10",
    "Tesla T4": "t4",
    "cpu": "cpu",
}


def test_names_of_torch():
    for name, expected in TORCH_NAMES.items():
        assert device_of(name).name == find_device(name).name == expected


def test_other_names():
    for name, expected in {
        "H100": "h100",
        "h100 pcie": "h100-pcie",
        "a100-80": "a100",
        "A100_40": "a100-40",
        "4090": "rtx-4090",
        "NVIDIA L40S": "l40s",
    }.items():
        assert find_device(name).name == expected


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
        assert d.memory_bytes > GIB
    peaks = {"v100": 125, "a100": 312, "h100-pcie": 756, "h200": 989, "b200": 2250, "rtx-4090": 165}
    assert {name: find_device(name).peak_flops / 1e12 for name in peaks} == peaks
    speeds = {"v100": 900, "a100-40": 1555, "a100": 2039, "h100": 3350, "h200": 4800, "b200": 8000}
    assert {name: find_device(name).bytes_per_s / 1e9 for name in speeds} == speeds
    assert not find_device("v100").has_bf16
    assert find_device("a100").has_bf16
    assert find_device("cpu").kind == "cpu"
    assert find_device("t4").kind == "cuda"
    assert find_link("nvlink4").bytes_per_s == 450e9
    assert find_link("eth-100").bytes_per_s == 12.5e9
    assert find_link("eth-100").of_node
    assert all(0 < link.achieved < 1 and link.latency_s > 0 for link in LINKS)


def test_unknown_names_list_what_there_is():
    assert device_of("Radeon") is None
    with pytest.raises(ValueError, match=r"got name='h101'; did you mean h100\? There are b200, "):
        find_device("h101")
    with pytest.raises(ValueError, match=r"did you mean (\S+)\? There are .*\b\1\b") as e:
        find_device("rtx9090")  # an alias is near; its name is in the list
    assert "rtx4090" not in str(e.value)
    with pytest.raises(ValueError, match="find_device: expected a device of the table") as e:
        find_device("")
    assert "did you mean" not in str(e.value)
    with pytest.raises(ValueError, match=r"name='nvlink9'; did you mean nvlink\d\? There are "):
        find_link("nvlink9")
    with pytest.raises(ValueError, match="find_link: expected a link of the table"):
        Cluster.of("h100", 8, inter="pigeon")


def test_links_may_be_spelled_out():
    assert find_link("Ethernet-100") is find_link("eth-100")
    assert find_link("infiniband_ndr") is find_link("ib-ndr")


def test_larger_device():
    assert larger_device(30 * GIB) == "v100"
    assert larger_device(79 * GIB) in ("a100-pcie", "a100")
    assert larger_device(100 * GIB) == "h200"
    assert larger_device(1000 * GIB) is None


# Clusters


def test_cluster_has_what_is_usual():
    cluster = Cluster.of("h100", 16)
    assert (cluster.per_node, cluster.intra.name, cluster.inter.name) == (8, "nvlink4", "ib-ndr")
    assert str(cluster) == "16 x h100, 8 a node over nvlink4, 2 nodes over ib-ndr"
    assert str(Cluster.of("rtx-4090", 1)) == "1 x rtx-4090, 1 a node"
    assert Cluster.of("h100", 12).per_node == 6
    assert Cluster.of("a100", 8, per_node=4, inter="eth-100").inter.of_node


@pytest.mark.parametrize(
    ("n_devices", "per_node", "match"),
    [
        (0, None, "Cluster: expected a positive integer, got n_devices=0; set n_devices >= 1"),
        (-4, 8, "got n_devices=-4"),
        (8, 0, "got per_node=0"),
        (8.0, 8, "got n_devices=8.0"),
        (12, 8, "expected full nodes of per_node=8, got n_devices=12; use a multiple of per_node"),
    ],
)
def test_bad_counts(n_devices, per_node, match):
    with pytest.raises(ValueError, match=match):
        Cluster.of("h100", n_devices, per_node)
