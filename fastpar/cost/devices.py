"""Devices and links as data: peaks, memory, bandwidths, latencies, prices.

[Note: sources] Peaks are dense (the makers print twice as much for sparse matrices), of 16-bit
products with sums in fp32, and of products in fp32 proper: torch uses tf32 only when told. Peak and
bandwidth are from the makers' data sheets that `source` names. Memory is what torch reports of such
a device, a little less than what the sheet promises. Prices are list prices of an hour on demand at
clouds, rounded, of the middle of 2025: they change faster than this table, pass your own.

[Note: links] Bandwidth is that of one direction for each device; makers print both directions. A
link "of the node" is shared by its devices. `achieved` is what large collectives reach of it, and
latency what one hop of a ring or tree adds: rounded from what is reported of NCCL's tests (8 A100:
about 235 of 300 GB/s; 8 H100: 365 of 450; InfiniBand: 90 %); for shared memory and PCIe estimates.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """What connects devices; see [Note: links]."""

    name: str
    bytes_per_s: float
    latency_s: float
    achieved: float
    of_node: bool = False


@dataclass(frozen=True)
class Device:
    """One kind of device, see [Note: sources].

    peak_flops, peak_flops_fp32: operations a second. generation: orders makers' designs in time,
    for datasheet.py. pattern: of the names that torch has for it. intra, inter: usual links inside
    of a node and between nodes.
    """

    name: str
    aliases: tuple[str, ...]
    pattern: str
    generation: str
    peak_flops: float
    peak_flops_fp32: float
    memory_bytes: int
    bytes_per_s: float
    per_node: int
    intra: str
    inter: str
    price_per_hour: float
    source: str

    @property
    def kind(self) -> str:
        return "cpu" if self.generation == "cpu" else "cuda"

    @property
    def has_bf16(self) -> bool:
        return self.generation not in ("volta", "turing")


def _links() -> Iterable[Link]:
    for generation, bandwidth in ((2, 150e9), (3, 300e9), (4, 450e9), (5, 900e9)):
        yield Link(f"nvlink{generation}", bandwidth, 1.5e-6, 0.79)
    for generation, bandwidth in ((3, 15.75e9), (4, 31.5e9), (5, 63e9)):
        yield Link(f"pcie{generation}", bandwidth, 3e-6, 0.75)
    for name, bandwidth in (("hdr", 25e9), ("ndr", 50e9), ("xdr", 100e9)):
        yield Link(f"ib-{name}", bandwidth, 5e-6, 0.9)
    for gbit in (10, 25, 100, 400):
        yield Link(f"eth-{gbit}", gbit / 8 * 1e9, 30e-6, 0.8, of_node=True)
    yield Link("shm", 8e9, 5e-6, 0.5)


LINKS: tuple[Link, ...] = tuple(_links())


def _gpu(
    name: str,
    aliases: str,
    pattern: str,
    generation: str,
    tflops: tuple[float, float],
    memory: tuple[float, float],
    links: str,
    price: float,
    source: str,
) -> Device:
    """tflops: 16-bit, 32-bit. memory: GiB, GB/s. links: intra inter per_node."""
    intra, inter, per_node = links.split()
    return Device(
        name,
        tuple(aliases.split()),
        pattern,
        generation,
        tflops[0] * 1e12,
        tflops[1] * 1e12,
        int(memory[0] * GIB),
        memory[1] * 1e9,
        int(per_node),
        intra,
        inter,
        price,
        source,
    )


# The first pattern that matches a name counts.
DEVICES: tuple[Device, ...] = (
    _gpu(
        "b200", "gb200 b200-sxm", r"\bG?B200\b", "blackwell", (2250, 75), (178.3, 8000),
        "nvlink5 ib-ndr 8", 4.99, "NVIDIA DGX B200 data sheet, an eighth of it",
    ),
    _gpu(
        "h200", "h200-sxm", r"\bG?H200\b", "hopper", (989, 67), (139.8, 4800),
        "nvlink4 ib-ndr 8", 3.8, "NVIDIA H200 data sheet, SXM",
    ),
    _gpu(
        "h100-pcie", "", r"\bH[18]00 PCIe", "hopper", (756, 51), (79.2, 2000),
        "pcie5 ib-ndr 8", 2.5, "NVIDIA H100 data sheet, PCIe",
    ),
    _gpu(
        "h100-nvl", "", r"\bH100 NVL", "hopper", (835, 60), (93.1, 3900),
        "pcie5 ib-ndr 8", 2.8, "NVIDIA H100 data sheet, NVL",
    ),
    _gpu(
        "h100", "h100-sxm h100-80 h800", r"\bH[18]00\b", "hopper", (989, 67), (79.2, 3350),
        "nvlink4 ib-ndr 8", 3.0, "NVIDIA H100 data sheet, SXM",
    ),
    _gpu(
        "a100-40-pcie", "a100-pcie-40", r"A100-PCIE-40", "ampere", (312, 19.5), (39.4, 1555),
        "pcie4 ib-hdr 8", 1.3, "NVIDIA A100 data sheet, PCIe 40 GB",
    ),
    _gpu(
        "a100-pcie", "a100-80-pcie a100-pcie-80", r"A[18]00.*PCIe", "ampere", (312, 19.5),
        (79.2, 1935), "pcie4 ib-hdr 8", 1.6, "NVIDIA A100 data sheet, PCIe 80 GB",
    ),
    _gpu(
        "a100-40", "a100-40-sxm a100-sxm-40", r"A[18]00.*40\s?GB", "ampere", (312, 19.5),
        (39.4, 1555), "nvlink3 ib-hdr 8", 1.3, "NVIDIA A100 data sheet, SXM 40 GB",
    ),
    _gpu(
        "a100", "a100-80 a100-sxm a100-80-sxm a800", r"\bA[18]00\b", "ampere", (312, 19.5),
        (79.2, 2039), "nvlink3 ib-hdr 8", 1.8, "NVIDIA A100 data sheet, SXM 80 GB",
    ),
    _gpu(
        "l40s", "", r"\bL40S\b", "ada", (362, 91.6), (44.4, 864),
        "pcie4 eth-100 8", 1.0, "NVIDIA L40S data sheet",
    ),
    _gpu(
        "l40", "", r"\bL40\b", "ada", (181, 90.5), (44.4, 864),
        "pcie4 eth-100 8", 0.9, "NVIDIA L40 data sheet",
    ),
    _gpu(
        "l4", "", r"\bL4\b", "ada", (121, 30.3), (22.0, 300),
        "pcie4 eth-100 8", 0.8, "NVIDIA L4 data sheet",
    ),
    _gpu(
        "a40", "", r"\bA40\b", "ampere", (150, 37.4), (44.4, 696),
        "pcie4 eth-100 8", 0.6, "NVIDIA A40 data sheet",
    ),
    _gpu(
        "a30", "", r"\bA30\b", "ampere", (165, 10.3), (23.6, 933),
        "pcie4 eth-100 8", 0.6, "NVIDIA A30 data sheet",
    ),
    _gpu(
        "a10g", "", r"\bA10G\b", "ampere", (70, 31.2), (22.1, 600),
        "pcie4 eth-25 4", 1.0, "AWS: instances G5",
    ),
    _gpu(
        "a10", "", r"\bA10\b", "ampere", (125, 31.2), (22.1, 600),
        "pcie4 eth-25 4", 0.75, "NVIDIA A10 data sheet",
    ),
    _gpu(
        "a6000", "rtx-a6000", r"\bA6000\b", "ampere", (155, 38.7), (47.4, 768),
        "pcie4 eth-25 4", 0.8, "NVIDIA RTX A6000 data sheet",
    ),
    _gpu(
        "rtx-4090", "4090 rtx4090", r"RTX 4090", "ada", (165, 82.6), (23.6, 1008),
        "pcie4 eth-25 8", 0.5, "NVIDIA Ada GPU architecture white paper",
    ),
    _gpu(
        "rtx-3090", "3090 rtx3090", r"RTX 3090", "ampere", (71, 35.6), (23.6, 936),
        "pcie4 eth-25 4", 0.3, "NVIDIA GA102 white paper",
    ),
    _gpu(
        "v100-16", "v100-16-sxm", r"\bV100.*16\s?GB", "volta", (125, 15.7), (15.8, 900),
        "nvlink2 eth-25 8", 0.5, "NVIDIA V100 data sheet, SXM2",
    ),
    _gpu(
        "v100", "v100-32 v100-sxm v100-32-sxm", r"\bV100\b", "volta", (125, 15.7), (31.7, 900),
        "nvlink2 eth-100 8", 0.6, "NVIDIA V100 data sheet, SXM2",
    ),
    _gpu(
        "t4", "", r"\bT4\b", "turing", (65, 8.1), (14.6, 320),
        "pcie3 eth-25 4", 0.35, "NVIDIA T4 data sheet",
    ),
    # One core at 3 GHz with two 256-bit FMA units; its part of a server's memory.
    _gpu(
        "cpu", "cpu-core", r"^cpu$", "cpu", (0.096, 0.096), (4.0, 8),
        "shm eth-10 64", 0.04, "AMD EPYC 7003 and Intel Xeon data sheets, a core",
    ),
)  # fmt: skip


def device_of(torch_name: str) -> Device | None:
    """The device that torch.cuda.get_device_name() names; None: not in the table."""
    found = (device for device in DEVICES if re.search(device.pattern, torch_name))
    return next(found, None)


def find_device(name: str) -> Device:
    """By the table's name, another name for it, or torch's.

    Raises:
        ValueError: unknown; names the nearest and all.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    known = {other: device for device in DEVICES for other in (device.name, *device.aliases)}
    found = known.get(plain) or device_of(name)
    if found is None:
        raise ValueError(
            f"find_device: expected a device of the table, got name={name!r}; "
            f"{_nearest(plain, known, [device.name for device in DEVICES])}"
        )
    return found


def find_link(name: str) -> Link:
    """By the table's name; ethernet and infiniband may be spelled out.

    Raises:
        ValueError: unknown; names the nearest and all.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = plain.replace("ethernet", "eth").replace("infiniband", "ib")
    known = {link.name: link for link in LINKS}
    if plain not in known:
        raise ValueError(
            f"find_link: expected a link of the table, got name={name!r}; "
            f"{_nearest(plain, known, list(known))}"
        )
    return known[plain]


def _nearest(plain: str, known: Iterable[str], listed: list[str]) -> str:
    close = difflib.get_close_matches(plain, list(known), n=1, cutoff=0.3)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}There are {', '.join(listed)}"


def larger_device(n_bytes: float) -> str | None:
    """The GPU with the least memory that still has n_bytes; None: there is none."""
    fit = [d for d in DEVICES if d.kind == "cuda" and d.memory_bytes >= n_bytes]
    return min(fit, key=lambda d: (d.memory_bytes, d.price_per_hour)).name if fit else None


def device_table() -> str:
    """All devices and links, for people."""
    lines = ["device        TFLOP/s  fp32   GiB    GB/s  links             USD/h  source"]
    for d in DEVICES:
        lines.append(
            f"{d.name:12s}  {d.peak_flops / 1e12:7.5g}  {d.peak_flops_fp32 / 1e12:5.4g}  "
            f"{d.memory_bytes / GIB:5.1f}  {d.bytes_per_s / 1e9:5.0f}  "
            f"{d.intra + ', ' + d.inter:16s}  {d.price_per_hour:5.2f}  {d.source}"
        )
    lines.append("link      GB/s a direction  of    latency us  achieved")
    for link in LINKS:
        owner = "node" if link.of_node else "device"
        lines.append(
            f"{link.name:8s}  {link.bytes_per_s / 1e9:16.4g}  {owner:6s}  "
            f"{link.latency_s * 1e6:8.3g}  {link.achieved:8.0%}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in nodes of per_node each.

    Raises:
        ValueError: a count below 1; nodes that are not full.
    """

    device: Device
    n_devices: int
    per_node: int
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        for name in ("n_devices", "per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Cluster: expected a positive integer, got {name}={value}; set {name} >= 1"
                )
        if self.n_devices > self.per_node and self.n_devices % self.per_node:
            raise ValueError(
                f"Cluster: expected full nodes of per_node={self.per_node}, got "
                f"n_devices={self.n_devices}; use a multiple of per_node, or pass another"
            )

    @classmethod
    def of(
        cls,
        device: Device | str,
        n_devices: int,
        per_node: int | None = None,
        intra: Link | str | None = None,
        inter: Link | str | None = None,
    ) -> Cluster:
        """With what is usual for the device where nothing is said.

        Args:
            per_node: None: as many as usual, or fewer so that nodes are full.
        Raises:
            ValueError: an unknown name; a count below 1; nodes that are not full.
        """
        device = find_device(device) if isinstance(device, str) else device
        if per_node is None:
            most = min(device.per_node, n_devices) if n_devices > 0 else 1
            per_node = next(n for n in range(most, 0, -1) if n_devices % n == 0)
        intra, inter = intra or device.intra, inter or device.inter
        return cls(
            device,
            n_devices,
            per_node,
            find_link(intra) if isinstance(intra, str) else intra,
            find_link(inter) if isinstance(inter, str) else inter,
        )

    def with_devices(self, n_devices: int) -> Cluster:
        """The same nodes, more or fewer of them."""
        return replace(self, n_devices=n_devices, per_node=min(self.per_node, n_devices))

    def __str__(self) -> str:
        nodes = -(-self.n_devices // self.per_node)
        between = f", {nodes} nodes over {self.inter.name}" if nodes > 1 else ""
        over = f" over {self.intra.name}" if self.per_node > 1 else ""
        return f"{self.n_devices} x {self.device.name}, {self.per_node} a node{over}{between}"
