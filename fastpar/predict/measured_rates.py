"""Rates of one machine as they were measured: seconds by operation and shape, kept in a file.

The file lies in the user's cache folder, one for each device, format, number of ranks and of
threads, and says where and when it was made; another machine's is refused.

[Note: shapes that were not measured] are taken from the nearest shape of the same operation, by the
larger of the ratios of arithmetic and of bytes; `scaled` lists them, so that whoever uses the
rates can say so.

[Note: overhead] What a step costs beyond its operations (Python, hooks, autograd, data, the
control exchange) is a constant each for a step, for a micro-batch, for a layer of a micro-batch and
for a layer of a step. They depend on what the engine has to do: stage, tp and checkpointing.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.doctor.table import cpu_name
from fastpar.files.plain_files import user_cache
from fastpar.predict.devices import device_of

VERSION = 1
MOST_SPREAD = 0.3  # of the operations; rates that vary more say little of the next run
FOLDER = "FASTPAR_RATES"  # environment: another folder
OpKey = tuple[str, tuple[int, ...], str]


class Rate(NamedTuple):
    """Seconds of one operation, and what it does in them."""

    seconds: float
    flops: float
    bytes: float


class Overhead(NamedTuple):
    """Seconds of [Note: overhead]."""

    step: float
    micro_batch: float
    layer: float  # of a micro-batch
    layer_step: float


def machine_name() -> str:
    """This machine's processor and number of logical CPUs."""
    return f"{cpu_name()}, {os.cpu_count()} CPUs"


def gpu_name() -> str:
    """The first GPU's name; "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def rates_folder() -> Path:
    """Where measured rates are kept: FASTPAR_RATES, or fastpar/rates in the user's cache."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).expanduser()
    return user_cache() / "rates"


def overhead_key(setup: Setup) -> str:
    """What the fixed costs depend on."""
    split = f"tp {setup.tp}" + (" sequence" if setup.tp > 1 and setup.sequence_parallel else "")
    split += f" cp {setup.cp}{' by keys' * setup.by_keys}" * (setup.cp > 1)
    return f"stage {setup.zero_stage}, {split}, {setup.activation_checkpointing}"


def comm_key(send: CommOp) -> str:
    """What an exchange's cost depends on beside its bytes.

    Along tp and cp ranks call and wait in one; others begin in another thread.
    """
    return f"{send.kind}, {send.ranks} ranks" + " at once" * (send.axis in ("tp", "cp"))


@dataclass(eq=False)  # hashable: step_time.py remembers by the object
class MeasuredRates:
    """Rates of this machine.

    Attributes:
        about: machine, gpu, device_type, dtype, dropout, ranks, threads, torch, date, spread
            (relative, of the operations), busy (why the machine seemed so; "").
        ops: seconds and size by name, shape and direction.
        sends: (bytes, seconds) by kind and ranks, in order of bytes.
        overheads: by what they depend on.
        scaled: operations that were asked for and had not been measured.
    """

    about: dict[str, Any]
    ops: dict[OpKey, Rate] = field(default_factory=dict)
    sends: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    overheads: dict[str, Overhead] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)

    @property
    def generation(self) -> str:
        """See Rates."""
        device = device_of(self.about.get("gpu") or "")
        return "cpu" if device is None else device.generation

    def __str__(self) -> str:
        about = self.about
        ranks, threads = about["ranks"], about["threads"]
        text = (
            f"measured on this machine, {ranks} rank{'s' * (ranks > 1)} x {threads} "
            f"thread{'s' * (threads > 1)}, {about['date']}, spread {about['spread']:.0%}"
        )
        text += f"; busy: {about['busy']}" if about.get("busy") else ""
        if not self.steady:
            text += (
                f"; a spread above {MOST_SPREAD:.0%}: what follows is a rough guess, and not kept "
                "for later runs; end what else runs here and measure again"
            )
        return text

    @property
    def steady(self) -> bool:
        """Whether the rates vary so little that they are worth keeping."""
        return bool(self.about["spread"] <= MOST_SPREAD)

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation; see [Note: shapes that were not measured]."""
        known = self.ops.get(op.key)
        if known is not None:
            return known.seconds
        near = [
            (_distance(op, shape, rate), rate)
            for (name, shape, way), rate in self.ops.items()
            if (name, way) == (op.name, op.key[2])
        ]
        self.scaled.add(f"{op.name} {op.shape} {op.key[2]}")
        if not near:
            return self._unknown(op)
        rate = min(near, key=lambda each: each[0])[1]
        ratios = [op.bytes / rate.bytes if rate.bytes else 0.0]
        ratios += [op.flops / rate.flops] if rate.flops else []
        return rate.seconds * max(ratios)

    def _unknown(self, op: Op) -> float:
        """An operation of which no shape was measured: the machine's peak, and its copy."""
        copies = [r.bytes / r.seconds for (name, _, _), r in self.ops.items() if name == "copy"]
        moved = op.bytes / max(copies) if copies else 0.0
        return max(op.flops / self.peak_flops if self.peak_flops else 0.0, moved)

    def comm_s(self, send: CommOp) -> float:
        """Seconds of one such exchange: on the line between the nearest measured sizes."""
        if send.ranks <= 1 or send.axis == "control":  # that is part of the overhead
            return 0.0
        points = self.sends.get(comm_key(send)) or self._other_sends(send)
        if not points:
            return 0.0
        sizes = [size for size, _ in points]
        if len(points) == 1 or send.bytes <= sizes[0]:
            return points[0][1]
        if send.bytes >= sizes[-1]:
            return points[-1][1] * send.bytes / sizes[-1]
        i = bisect_left(sizes, send.bytes)
        (low, low_s), (high, high_s) = points[i - 1], points[i]
        return low_s + (high_s - low_s) * (send.bytes - low) / (high - low)

    def _other_sends(self, send: CommOp) -> list[tuple[float, float]]:
        """The same kind on the nearest number of ranks; else any."""
        self.scaled.add(f"{send.kind} of {send.ranks} ranks")
        same = [key for key in self.sends if key.startswith(f"{send.kind},")]
        keys = same or list(self.sends)
        if not keys:
            return []
        ranks = {key: int(key.rpartition(", ")[2].split()[0]) for key in keys}
        return self.sends[min(keys, key=lambda key: abs(ranks[key] - send.ranks))]

    def overhead_s(self, workload: Workload, setup: Setup) -> float:
        """Seconds of a step beyond its operations and exchanges; see [Note: overhead]."""
        of = self.overheads.get(overhead_key(setup)) or self._nearest_overhead(setup)
        if of is None:
            return 0.0
        micro_batches, layers = setup.grad_accum_steps, workload.shape.n_layer / setup.pp
        return (
            of.step + micro_batches * (of.micro_batch + layers * of.layer) + layers * of.layer_step
        )

    def _nearest_overhead(self, setup: Setup) -> Overhead | None:
        if not self.overheads:
            return None
        wanted = overhead_key(setup).split(", ")

        def differences(key: str) -> int:
            return sum(a != b for a, b in zip(wanted, key.split(", ")))

        self.scaled.add(f"overhead of {overhead_key(setup)}")
        return self.overheads[min(self.overheads, key=differences)]

    @property
    def peak_flops(self) -> float | None:
        """The best rate of a matmul, FLOP/s of a rank."""
        rates = [r.flops / r.seconds for (name, _, _), r in self.ops.items() if name == "matmul"]
        return max(rates, default=None)

    @property
    def overlap(self) -> float:
        """CPU ranks send with the cores that compute: nothing hides. On a GPU others do it."""
        return 0.0 if self.about["device_type"] == "cpu" else 1.0

    # The file

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return _path(**self.about)

    def save(self, path: Path | None = None) -> Path:
        """Write the file; where it is."""
        path = path or self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "version": VERSION,
            "about": self.about,
            "ops": [[*key, *rate] for key, rate in self.ops.items()],
            "sends": self.sends,
            "overheads": self.overheads,
        }
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return path

    @classmethod
    def load(cls, path: Path) -> MeasuredRates:
        """The rates of a file.

        Raises:
            ValueError: the file is damaged, of another version, or of another machine.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["version"]
            about = dict(content["about"])
            made_on = about["machine"], about["gpu"] if about["device_type"] == "cuda" else ""
            if version == VERSION:
                found = cls(
                    about,
                    {(n, tuple(s), w): Rate(*map(_number, r)) for n, s, w, *r in content["ops"]},
                    {
                        key: sorted((_number(size), _number(s)) for size, s in points)
                        for key, points in content["sends"].items()
                    },
                    {key: Overhead(*of) for key, of in content["overheads"].items()},
                )
                str(found), found.path  # what they need is there
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"MeasuredRates.load: expected a file of measured rates, got path={path} "
                f"({type(error).__name__}); delete it and run `fastpar plan --measure` again"
            ) from error
        if version != VERSION:
            raise ValueError(
                f"MeasuredRates.load: expected version={VERSION}, got version={version} in {path}; "
                "run `fastpar plan --measure` again"
            )
        here = machine_name(), gpu_name() if about["device_type"] == "cuda" else ""
        if made_on != here:
            where = " with ".join(filter(None, made_on))
            raise ValueError(
                f"MeasuredRates.load: expected rates of this machine, got path={path} of "
                f"{where}; run `fastpar plan --measure` here"
            )
        return found

    def update(self, other: MeasuredRates) -> None:
        """Takes over what another measurement of the same ranks has; its values count."""
        self.about = other.about
        self.ops.update(other.ops)
        self.sends.update(other.sends)
        self.overheads.update(other.overheads)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(value)  # load() says what the file is
    return number


def _distance(op: Op, shape: Sequence[int], rate: Rate) -> float:
    """How far a measured shape is from the one asked for."""
    far = sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(op.shape, shape, strict=False))
    flops = abs(math.log(op.flops / rate.flops)) if op.flops and rate.flops else 0.0
    return far + flops


def _path(**about: Any) -> Path:
    """The file of rates of this device_type, dtype, ranks, threads and dropout."""
    name = "{device_type}_{dtype}_{ranks}x{threads}".format(**about)
    return rates_folder() / f"{name}{'_dropout' * bool(about['dropout'])}.json"


def find_rates(**about: Any) -> MeasuredRates | None:
    """Rates measured here before for such ranks, if there are any.

    Args:
        about: device_type, dtype, ranks, threads, dropout.
    Raises:
        ValueError: see MeasuredRates.load; their spread is too large (earlier versions kept such).
    """
    path = _path(**about)
    if not path.exists():
        return None
    found = MeasuredRates.load(path)
    if not found.steady:
        raise ValueError(
            f"find_rates: expected rates with a spread of at most {MOST_SPREAD:.0%}, got spread="
            f"{found.about['spread']:.0%} in {path}; run `fastpar plan --measure` when nothing "
            "else runs here"
        )
    return found
