"""What formats on the wire would make of a layout: bytes, time, and where they pay."""

from __future__ import annotations

from fastpar.axes.step import Setup, Workload
from fastpar.comm.recorder import ring_bytes
from fastpar.comm.wires import CODES, FORMATS, OF_WEIGHTS
from fastpar.predict.estimate import size_text
from fastpar.predict.time import Rates, comm_ops_of, ops_of, predict_step

_AXES = ("dp", "shard", "copies")


def candidates(setup: Setup) -> dict[str, Setup]:
    """The layout with other formats, by their flags."""
    found = {f"--wire-gradients {n}": setup.change(wire_gradients=n) for n in FORMATS}
    for name in OF_WEIGHTS if setup.stage else ():
        if name != CODES:
            found[f"--wire-weights {name}"] = setup.change(wire_weights=name)
    if setup.stage == 3 and setup.fp8 != "none":
        coded = {"fp8_scaling": "tensor", "wire_weights": CODES}
        found[f"--fp8-scaling tensor --wire-weights {CODES}"] = setup.change(**coded)
    return found


def sent_bytes(workload: Workload, setup: Setup) -> float:
    """What a rank sends in a step of gradients and weights."""
    comms = (c for c in comm_ops_of(workload, setup) if c.axis in _AXES)
    return sum(c.count * ring_bytes(c.kind, int(c.bytes), c.ranks) for c in comms)


def codes_s(workload: Workload, setup: Setup, rates: Rates) -> float:
    """Seconds of a step in which messages are made and read."""
    plain = setup.change(wire_gradients="fp32", wire_weights=None)
    both = (ops_of(workload, s) for s in (setup, plain))
    with_codes, without = (sum(rates.op_s(op) * op.count for op in ops) for ops in both)
    return with_codes - without


def wires_text(workload: Workload, setup: Setup, rates: Rates) -> list[str]:
    """A line for each format: it pays where a rank sends more slowly than it saves bytes."""
    lines, plain = [], sent_bytes(workload, setup)
    for flag, other in candidates(setup).items():
        sent, codes = sent_bytes(workload, other), codes_s(workload, other, rates)
        if sent >= plain:
            continue
        step_ms = predict_step(workload, other, rates).step_s * 1e3
        pays = 8e-9 * (plain - sent) / codes
        lines.append(
            f"  {flag}: a rank sends {size_text(sent)} a step instead of {size_text(plain)}, codes "
            f"{codes * 1e3:.3g} ms, step {step_ms:,.4g} ms; pays below {pays:,.4g} Gbit/s a rank"
        )
    return lines
