"""What offload costs: memory of the host, and the time that the device waits for the host's step.

Gradients go down as backward makes them, the last unit's first. The host steps units in the order
in which the next forward needs them (axes/offload.py), so the device waits for a unit only
where the host's work on all units before it, and its way up, take longer than the forward up to
there. The first unit's gradients are the last to come down.

[Note: hosts] of data centre machines, a GPU's share of the memory of both sockets, from the makers'
sheets: DGX B200 (Xeon 8570, 8 channels of DDR5-5600 each), DGX H100 (Xeon 8480C, DDR5-4800), DGX
A100 (EPYC 7742, 8 of DDR4-3200), DGX-1 (Xeon E5-2698 v4, 4 of DDR4-2400). `achieved` is the part
that loops like AdamW's reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastpar.axes.data import buckets_of
from fastpar.axes.offload import state_bytes
from fastpar.axes.step import Setup, Workload
from fastpar.predict.machine import LINKS

ACHIEVED = 0.7


class Host(NamedTuple):
    """A GPU's share of its host: memory's bytes a second, and the link that joins them."""

    bytes_per_s: float
    link: str


HOSTS = {  # by generation of the device
    "blackwell": Host(716.8e9 / 8, "pcie5"),
    "hopper": Host(614.4e9 / 8, "pcie5"),
    "ada": Host(614.4e9 / 8, "pcie4"),
    "ampere": Host(409.6e9 / 8, "pcie4"),
    "volta": Host(153.6e9 / 8, "pcie3"),
    "turing": Host(153.6e9 / 8, "pcie3"),
}


class UnitStep(NamedTuple):
    """Seconds of one unit: of the host's step, its ways down and up, its forward and backward."""

    host_s: float
    down_s: float
    up_s: float
    forward_s: float
    backward_s: float


def exposed_s(units: Sequence[UnitStep]) -> float:
    """How long a step waits for the bus and the host, units in the order of a forward."""
    bus = backward = 0.0
    for unit in reversed(units):
        backward += unit.backward_s
        bus = max(bus, backward) + unit.down_s
    device = waited = there = 0.0
    host = bus - backward
    for unit in units:
        host += unit.host_s
        there = max(host, there) + unit.up_s
        wait = max(0.0, there - device)
        waited += wait
        device += wait + unit.forward_s
    return waited


def stepped_elements(workload: Workload, setup: Setup) -> list[float]:
    """Elements of each unit that this rank's host steps, in the order of a forward."""
    buckets = buckets_of(workload, setup)
    kept = setup.offload_keep_mb * 2**20 / state_bytes(setup.weight_bytes)
    found = []
    for n in (units / setup.n_shards for units in buckets.units):
        found.append(max(0.0, n - kept))
        kept = max(0.0, kept - n)
    return found


def host_step_s(
    workload: Workload, setup: Setup, generation: str, forward_s: float, backward_s: float
) -> float:
    """What a step waits for the host and the bus.

    Args:
        generation: of the device.
        forward_s, backward_s: of one micro-batch.
    """
    host = HOSTS.get(generation, HOSTS["hopper"])
    link = next(link for link in LINKS if link.name == host.link)
    bus = link.bytes_per_s * link.achieved
    touched = 2 * (setup.state_bytes + setup.weight_bytes) + setup.grad_bytes
    elements = stepped_elements(workload, setup)
    blocks = max(1, len(elements) - 1)
    units = [
        UnitStep(
            n * touched / (ACHIEVED * host.bytes_per_s),
            n * setup.grad_bytes / bus,
            n * setup.weight_bytes / bus,
            forward_s / blocks if i else 0.0,
            backward_s / blocks if i else 0.0,
        )
        for i, n in enumerate(elements)
    ]
    again = 0.0
    if setup.offload == "parameters":  # gathers of forward and backward read the host's shards
        once = sum(elements) * setup.weight_bytes / bus
        again = max(0.0, once - forward_s) + max(0.0, once - backward_s)
        again *= setup.grad_accum_steps
    return exposed_s(units) + again
