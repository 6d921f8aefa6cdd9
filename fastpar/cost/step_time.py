"""How long a step takes: operations and exchanges at a machine's rates, and what hides what.

[Note: what hides] An exchange that is `under` a pass hides as far as the machine's overlap lets it
in the compute time of the micro-batches that it has: sums of accumulate="full" have the last
backward, gathers of stages 1 and 2 the first forward, others all. What is under nothing, like the
last bucket, the rank waits for. Along tp only the products of column layers are beside exchanges.
[Note: bubble] p stages that each have m micro-batches wait (p - 1) / m of the time that they work,
with v parts of the layers in turns (p - 1) / (v m).

Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2 (the bubble)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastpar.cost.devices import Cluster
from fastpar.cost.operations import (
    Op,
    Rates,
    Send,
    ops_of,
    pass_key,
    passes_of,
    sends_of,
    updates_of,
)
from fastpar.cost.workload import Job, Setup

_COLUMN_SHARE = 7 / 12  # of a layer's products: 3 + 4 of 12 C**2 are in column layers
_PART = {"loss": "loss", "optimizer": "optimizer"}
_GROUP = {"dp": "dp", "shard": "dp", "copies": "dp", "tp": "tp", "pp": "pp", "control": "control"}


@dataclass(frozen=True)
class StepTime:
    """Of one optimizer step, in seconds.

    compute_s: of operations; comm_s: of exchanges, hidden or not; exposed_s: what of them the rank
    waits for; bubble_s: waiting for other pipeline stages. parts: forward, backward, recompute,
    loss, optimizer, exchanges that are exposed (dp, tp, pp, control), bubble and other; they add up
    to step_s. tokens_per_s: of all ranks; mfu: None without a known peak.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    bubble_s: float
    parts: dict[str, float]
    tokens_per_s: float
    mfu: float | None


def bubble_fraction(pp: int, n_micro: int, interleave: int = 1) -> float:
    """Waiting of a pipeline's stages, of the time that they work; see [Note: bubble].

    Raises:
        ValueError: a number below 1.
    """
    for name, value in (("pp", pp), ("n_micro", n_micro), ("interleave", interleave)):
        if value < 1:
            raise ValueError(
                f"bubble_fraction: expected {name} >= 1, got {name}={value}; count from 1"
            )
    return (pp - 1) / (n_micro * interleave)


def predict_step(job: Job, setup: Setup, rates: Rates) -> StepTime:
    """The step of a job in a setup.

    Raises:
        ValueError: a batch that is not dp * micro_batch_size * grad_accum_steps; ranks that tp and
            pp do not divide.
    """
    check(job, setup)
    return time_of(job, setup, rates, None, sends_of(job, setup))


def check(job: Job, setup: Setup) -> None:
    """Raise ValueError for what predict_step refuses."""
    for name in ("world_size", "tp", "pp", "micro_batch_size", "grad_accum_steps"):
        value = getattr(setup, name)
        if value < 1:
            raise ValueError(
                f"predict_step: expected {name} >= 1, got {name}={value}; count from 1"
            )
    if setup.world_size % (setup.tp * setup.pp):
        raise ValueError(
            f"predict_step: expected tp * pp to divide world_size={setup.world_size}, got "
            f"tp * pp={setup.tp * setup.pp}; choose another tp"
        )
    rows = setup.dp * setup.micro_batch_size * setup.grad_accum_steps
    if rows != job.batch_size:
        raise ValueError(
            "predict_step: expected batch_size = dp * micro_batch_size * grad_accum_steps = "
            f"{setup.dp} * {setup.micro_batch_size} * {setup.grad_accum_steps} = {rows}, got "
            f"batch_size={job.batch_size}; change one of them"
        )


def time_of(
    job: Job, setup: Setup, rates: Rates, ops: Iterable[Op] | None, sends: Iterable[Send]
) -> StepTime:
    """The step of these operations and exchanges.

    Args:
        ops: None: those of ops_of(), whose times are remembered for the rates.
    """
    parts = _compute_parts(job, setup, rates) if ops is None else _add_up(ops, rates)
    column_s = parts.pop("products") * _COLUMN_SHARE
    compute_s = sum(parts.values())
    comm_s, exposed = _exposed(setup, rates, sends, parts, column_s)
    parts.update(exposed)
    working = sum(parts[p] for p in ("forward", "backward", "recompute", "loss", "tp", "pp"))
    wait = bubble_fraction(setup.pp, setup.grad_accum_steps, setup.pp_interleave)
    parts["bubble"] = wait * working
    parts["other"] = rates.overhead_s(job, setup)
    step_s = sum(parts.values())
    tokens_per_s, peak = job.tokens_per_step / step_s, rates.peak_flops
    mfu = None
    if peak is not None:
        mfu = tokens_per_s * job.flops_per_token / (setup.world_size * peak)
    exposed_s = sum(exposed.values())
    return StepTime(step_s, compute_s, comm_s, exposed_s, parts["bubble"], parts, tokens_per_s, mfu)


def _add_up(ops: Iterable[Op], rates: Rates) -> dict[str, float]:
    parts = dict.fromkeys(
        ("forward", "backward", "recompute", "loss", "optimizer", "products"), 0.0
    )
    for op in ops:
        seconds = rates.op_s(op) * op.count
        parts[_PART.get(op.name, op.direction)] += seconds
        if op.name == "matmul" and op.direction == "backward":
            parts["products"] += seconds
    return parts


_seconds: weakref.WeakKeyDictionary[Any, dict[Any, dict[str, float]]] = weakref.WeakKeyDictionary()


def _compute_parts(job: Job, setup: Setup, rates: Rates) -> dict[str, float]:
    """A search asks for many setups that compute the same and exchange differently."""
    try:
        known = _seconds.setdefault(rates, {})
    except TypeError:  # of an object without hash
        return _add_up(ops_of(job, setup), rates)
    key = (job.shape, pass_key(setup))
    if key not in known:
        known[key] = _add_up(passes_of(job, setup), rates)
    parts = dict(known[key])
    for name, seconds in _add_up(updates_of(job, setup), rates).items():
        parts[name] += seconds
    return parts


def _exposed(
    setup: Setup, rates: Rates, sends: Iterable[Send], parts: dict[str, float], column_s: float
) -> tuple[float, dict[str, float]]:
    """(all exchanges, what of them is waited for by part); see [Note: what hides]."""
    n_micro, overlap = setup.grad_accum_steps, rates.overlap
    exposed = dict.fromkeys(("dp", "tp", "pp", "control"), 0.0)
    comm = along_tp = 0.0
    once = {"forward": 0.0, "backward": 0.0}
    each = {"forward": 0.0, "backward": 0.0}
    for send in sends:
        seconds = rates.send_s(send) * send.count
        comm += seconds
        if not send.under:
            exposed[_GROUP[send.axis]] += seconds
        elif send.axis == "tp":
            along_tp += seconds
        elif _in_every_pass(send, setup):
            each[send.under] += seconds
        else:
            once[send.under] += seconds
    exposed["tp"] += max(0.0, along_tp - overlap * column_s)
    windows = {"forward": parts["forward"], "backward": parts["backward"] + parts["recompute"]}
    for name, window in windows.items():
        room, usual = overlap * window / n_micro, each[name] / n_micro
        exposed["dp"] += (n_micro - 1) * max(0.0, usual - room)
        exposed["dp"] += max(0.0, usual + once[name] - room)
    return comm, exposed


def _in_every_pass(send: Send, setup: Setup) -> bool:
    if send.kind == "all_gather":
        return setup.zero_stage == 3
    return setup.accumulate == "shard"


def cost_per_billion_tokens(
    time: StepTime, cluster: Cluster, price_per_hour: float | None = None
) -> float:
    """In the currency of the price.

    Args:
        price_per_hour: of one device; None: the table's.
    Raises:
        ValueError: a negative price.
    """
    price = cluster.device.price_per_hour if price_per_hour is None else price_per_hour
    if not price >= 0:
        raise ValueError(
            f"cost_per_billion_tokens: expected price_per_hour >= 0, got price_per_hour={price}; "
            "pass the price of one device"
        )
    return price * cluster.n_devices / 3600 * 1e9 / time.tokens_per_s
