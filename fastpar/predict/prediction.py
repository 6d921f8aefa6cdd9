"""What a run should take, from its settings and what was chosen at its start: memory and step time.

    memory   predicted 52.1 MB, measured 51.0 MB (+2.2 %): parameters 12.0 MB, ...
    step     predicted 61.0 ms (measured on this machine, ...), measured 58.2 ms (+4.8 %)

`fastpar train` loads this when it prints the two lines, at its end.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastpar.axes.step import Setup, Workload
from fastpar.predict.machine import Cluster, DatasheetRates, MeasuredRates, device_of, find_rates
from fastpar.predict.memory import format_bytes, predict_memory
from fastpar.predict.time import Rates, predict_step
from fastpar.settings.config import GPTConfig


def predict(shape: GPTConfig, setup: Setup, facts: dict[str, Any]) -> dict[str, Any]:
    """Bytes and ms of a run, their parts, and whose rates.

    Args:
        setup: with the run's settings; facts: device and threads, see RunFolder.
    """
    if setup.transport == "none":  # of one rank
        setup = setup.change(transport="shm")
    workload = setup.workload(shape)
    memory = predict_memory(workload, setup)
    rates, whose = rates_of(workload, setup, facts)
    step = predict_step(workload, setup, rates)
    return {
        "predicted_bytes": memory.total,
        "memory": {name: int(size) for name, size in asdict(memory).items() if size},
        "predicted_ms": step.step_s * 1e3,
        "step_ms": {name: seconds * 1e3 for name, seconds in step.parts.items() if seconds},
        "rates": whose,
        "measured_rates": isinstance(rates, MeasuredRates),
    }


def rates_of(workload: Workload, setup: Setup, facts: dict[str, Any]) -> tuple[Rates, str]:
    """The rates of this machine if such ranks have been measured, else a data sheet's; which.

    Raises:
        ValueError: the measured ones are of no use, see find_rates.
    """
    note, on_gpu = "", setup.device_type == "cuda"
    found = find_rates(
        device_type=setup.device_type,
        dtype=setup.dtype,
        ranks=setup.world_size,
        threads=facts["threads"],
        dropout=workload.shape.dropout > 0,
    )
    if found is not None:
        return found, str(found)
    device = device_of(facts["device"]) if on_gpu else "cpu"
    if device is None:
        device, note = "h100", f"; {facts['device']} is not in the table"
    name = device if isinstance(device, str) else device.name
    rates = DatasheetRates(Cluster.of(device, setup.world_size), setup)
    return rates, f"data sheet of {name}{note}; `fastpar plan --measure` makes it exact"


def lines_of(row: dict[str, Any]) -> list[str]:
    """The two lines for the end of the run."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in row["memory"].items())
    memory = f"predicted {format_bytes(row['predicted_bytes'])}"
    if row["measured_bytes"]:
        error = row["predicted_bytes"] / row["measured_bytes"] - 1
        memory += f", measured {format_bytes(row['measured_bytes'])} ({error:+.1%})"
    step = f"predicted {row['predicted_ms']:.1f} ms ({row['rates']})"
    if row["measured_ms"]:
        error = row["predicted_ms"] / row["measured_ms"] - 1
        step += f", measured {row['measured_ms']:.1f} ms ({error:+.1%})"
    return [f"memory   {memory}: {parts}", f"step     {step}"]
