"""Devices and links as data: peaks, memory, bandwidths, latencies, prices.

[Note: sources] devices.csv has a row for each kind of device. Peaks are dense (the makers print
twice as much for sparse matrices): 16-bit products with sums in fp32, and products in fp32 proper,
since torch uses tf32 only when told. Peak and bandwidth are from the data sheet that `source`
names. Memory is what torch reports of such a device, a little less than what the sheet promises.
Prices are rounded list prices of an hour on demand at clouds, from the middle of 2025: they change
faster than this table, pass your own.

[Note: links] links.csv has a row for each. Bandwidth is that of one direction for each device;
makers print both directions. A link "of the node" is shared by its devices. `achieved` is the part
that large collectives reach, and latency what one hop of a ring or tree adds: rounded from what is
reported of NCCL's tests (8 A100: about 235 of 300 GB/s; 8 H100: 365 of 450; InfiniBand: 90 %); for
shared memory and PCIe estimates.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """What connects devices; [Note: links]."""

    name: str
    bytes_per_s: float
    latency_s: float
    achieved: float
    of_node: bool = False


@dataclass(frozen=True)
class Device:
    """One kind of device; [Note: sources].

    Attributes:
        pattern: regular expression that matches torch's names for it.
        generation: the maker's design, a key of datasheet.GENERATIONS.
        peak_flops, peak_flops_fp32: operations a second.
        intra, inter: usual links inside a node and between nodes.
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


def _read(name: str) -> Iterable[dict[str, str]]:
    """The rows of a table of this folder."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    lines = [re.sub(r" *\| *", "|", line) for line in text.splitlines()]
    return csv.DictReader(lines, delimiter="|")


LINKS = tuple(
    Link(
        row["name"],
        float(row["gb_per_s"]) * 1e9,
        float(row["latency_us"]) / 1e6,
        float(row["achieved"]),
        row["of"] == "node",
    )
    for row in _read("links.csv")
)
DEVICES = tuple(  # the first pattern that matches counts
    Device(
        row["name"],
        tuple(row["aliases"].split()),
        row["pattern"],
        row["generation"],
        float(row["tflops"]) * 1e12,
        float(row["tflops_fp32"]) * 1e12,
        int(float(row["memory_gib"]) * GIB),
        float(row["gb_per_s"]) * 1e9,
        int(row["per_node"]),
        row["intra"],
        row["inter"],
        float(row["usd_per_hour"]),
        row["source"],
    )
    for row in _read("devices.csv")
)


def device_of(torch_name: str) -> Device | None:
    """The device that torch.cuda.get_device_name() names; None: not in the table."""
    found = (device for device in DEVICES if re.search(device.pattern, torch_name))
    return next(found, None)


def find_device(name: str) -> Device:
    """The device with this name: the table's, another one for it, or torch's.

    Raises:
        ValueError: unknown; names the nearest and all.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    known = {other: device for device in DEVICES for other in (device.name, *device.aliases)}
    found = known.get(plain) or device_of(name)
    if found is None:
        raise _unknown("device", name, plain, known, [device.name for device in DEVICES])
    return found


def find_link(name: str) -> Link:
    """The link with this name of the table; ethernet and infiniband may be spelled out.

    Raises:
        ValueError: unknown; names the nearest and all.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = plain.replace("ethernet", "eth").replace("infiniband", "ib")
    known = {link.name: link for link in LINKS}
    if plain not in known:
        raise _unknown("link", name, plain, known, list(known))
    return known[plain]


def _unknown(
    what: str, name: str, plain: str, known: Mapping[str, Any], listed: list[str]
) -> ValueError:
    close = difflib.get_close_matches(plain, list(known), n=1, cutoff=0.3)
    hint = f"did you mean {known[close[0]].name}? " if close else ""
    return ValueError(
        f"find_{what}: expected a {what} of the table, got name={name!r}; "
        f"{hint}There are {', '.join(listed)}"
    )


def larger_device(n_bytes: float) -> str | None:
    """The GPU with the least memory that still has n_bytes; None: there is none."""
    fit = [d for d in DEVICES if d.kind == "cuda" and d.memory_bytes >= n_bytes]
    return min(fit, key=lambda d: (d.memory_bytes, d.price_per_hour)).name if fit else None


def device_table() -> str:
    """All devices and links as text: `fastpar plan --gpu list`."""
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
        intra: str | None = None,
        inter: str | None = None,
    ) -> Cluster:
        """A cluster with what is usual for the device where nothing is said.

        Args:
            per_node: None: as many as usual, or fewer so that nodes are full.
        Raises:
            ValueError: an unknown name; a count below 1; nodes that are not full.
        """
        device = find_device(device) if isinstance(device, str) else device
        if per_node is None:
            most = min(device.per_node, n_devices) if n_devices > 0 else 1
            per_node = next(n for n in range(most, 0, -1) if n_devices % n == 0)
        links = find_link(intra or device.intra), find_link(inter or device.inter)
        return cls(device, n_devices, per_node, *links)

    def __str__(self) -> str:
        nodes = -(-self.n_devices // self.per_node)
        between = f", {nodes} nodes over {self.inter.name}" if nodes > 1 else ""
        over = f" over {self.intra.name}" if self.per_node > 1 else ""
        return f"{self.n_devices} x {self.device.name}, {self.per_node} a node{over}{between}"
