"""`python -m bench tune`: the tables of kernels/ that a GPU decides, place by place.

A place has configs (tiles, warps, stages, L2 sections, kept masks). Places are worked through
longest expected gain first, as long as --minutes allow. A config that breaks the 2x rule or gives
other bits in a second call is refused, by the doctor's trial; those that are right are timed in
turn at GPT-2's shapes, and the fastest is chosen. Which implementation of an op runs is not decided
here: `fastpar doctor` proves it.

    python -m bench tune --minutes 10                   the whole list
    python -m bench tune "bwd_dq" gelu                  places whose name holds one of these

What was found is in build/bench/tune.json as soon as a place is done. With --commit-results winners
go to the tables. A place's configs are compiled by all cores before they are tried.
"""

import argparse
import contextlib
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.records import SCRATCH, device_of, machine, machine_line, parser_of
from fastpar.comm.ranks import reason
from fastpar.doctor.trial import DEFAULT_ROWS, Way, time_ways, warm, what_is_wrong
from fastpar.kernels.cases import proof_cases
from fastpar.kernels.choice import OWN, Case, trying
from fastpar.kernels.config_table import SHARED_BYTES, TABLES, ConfigTable
from fastpar.settings.model import GPTConfig

CHECKED_ROWS = 200  # a multiple of no tile, and more than one
FINALISTS = 4
LEAST_GAIN = 1.01  # below, the present entry stays: medians of two runs differ by as much
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Entry:
    """One place of the list. direction: which time counts, 0 forward, 1 backward; None: both.
    gain_ms: expected of a step of GPT-2 124M with 32 x 1024 tokens on an H200, from a count of
    instructions and bytes; it orders the list and decides nothing else."""

    case: Case
    gain_ms: float
    table: ConfigTable[Any]
    place: tuple[Any, ...] = ()
    direction: int | None = None

    @property
    def name(self) -> str:
        return " ".join([f"{self.case}:", self.table.name, *map(str, self.place)])

    def configs(self, arch: int) -> dict[str, Any]:
        """By name; the present one first."""
        present = self.table.get(arch, *self.place)
        return {shown(c): c for c in (present, *self.table.candidates(arch, *self.place))}


@dataclass
class Outcome:
    """What was found at one place, by the names of its configs."""

    chosen: str
    ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # forward, backward
    refused: dict[str, str] = field(default_factory=dict)


ATTENTION_TILES = (  # gain of the plain form, of the masked one, kernel; of GPT-2's head dim
    (2.0, 1.9, "bwd_dkdv"), (1.5, 1.4, "bwd_dq"), (1.0, 0.9, "fwd"),
)  # fmt: skip


def entries(arch: int) -> list[Entry]:
    """The whole list for a GPU: the places that its calls read. Where masks are kept in memory
    (attention_bits), the tiles of kernels that draw them are read by none."""
    gpt2, found = GPTConfig.preset("gpt2"), []
    masked = "bits" if TABLES["attention_bits"].get(arch).kept else "dropout"
    for (*gains, kernel), head_dim in itertools.product(ATTENTION_TILES, (64, 128)):
        for gain, op, variant in zip(gains, ("attention", "attention_masked"), ("plain", masked)):
            place, direction = (kernel, head_dim, variant), int(kernel != "fwd")
            case, gain_ms = Case("cuda", op, BF16, head_dim), gain * (head_dim == 64)
            found.append(Entry(case, gain_ms, TABLES["attention_configs"], place, direction))
    for gain, op, size, table in (
        (3.0, "attention_masked", 64, "attention_bits"),
        (0.5, "attention", 64, "attention_sections"),
        (0.3, "bias_gelu", 4 * gpt2.n_embd, "activation_configs"),
        (0.4, "residual_layer_norm", gpt2.n_embd, "layer_norm_configs"),
        (0.4, "cross_entropy", gpt2.padded_vocab_size, "cross_entropy_configs"),
    ):
        found.append(Entry(Case("cuda", op, BF16, size), gain, TABLES[table]))
    return sorted(found, key=lambda entry: -entry.gain_ms)


def shown(config: Any) -> str:
    """block_q 64 block_k 32 ..."""
    return " ".join(f"{name} {value}" for name, value in config._asdict().items())


@contextlib.contextmanager
def forced(entry: Entry, config: Any) -> Iterator[None]:
    """Calls inside run the own kernel with this config, whatever the table says."""
    with trying(entry.case.op, OWN), entry.table.trying(entry.place, config):
        yield


def choose(listed: Sequence[Entry], only: Sequence[str]) -> list[Entry]:
    """The requested places; ValueError: there are none."""
    found = [e for e in listed if not only or any(text in e.name for text in only)]
    if not found:
        raise ValueError(
            f"tune: expected a part of a place's name, got names={' '.join(only)}; one of "
            f"{'; '.join(e.name for e in listed)}"
        )
    return found


def tune(entry: Entry, arch: int, deadline: float) -> Outcome:
    """Tries the configs of a place; its present one stays where no other is faster."""
    case, found = entry.case, Outcome("")
    configs = entry.configs(arch)
    present = next(iter(configs))
    forms = [(entry.table.name, entry.place, tuple(config)) for config in configs.values()]
    sms = torch.cuda.get_device_properties().multi_processor_count
    for line in warm([case] * len(forms), (arch, sms), forced=forms):
        print(f"not compiled: {line}", flush=True)
    judged = proof_cases(case.op, case.size, case.device, CHECKED_ROWS)
    (timed, *_) = proof_cases(case.op, case.size, case.device, DEFAULT_ROWS[case.device])
    ways: dict[str, tuple[Way, Any]] = {}
    for name, config in configs.items():
        if ways and time.monotonic() > deadline:
            print(f"{entry.name}: out of time, {len(configs) - len(ways)} configs are left out")
            break
        with entry.table.trying(entry.place, config):
            why = what_is_wrong(case, judged)
        if why:
            found.refused[name] = why
        else:
            ways[name] = (functools.partial(forced, entry, config), timed.fn)

    def ms(name: str) -> float:
        each = found.ms[name]
        return sum(each) if entry.direction is None else each[entry.direction]

    found.ms, failed = time_ways(case, timed, ways)
    found.refused |= failed
    for name, why in found.refused.items():
        print(f"{name} refused: {why}", flush=True)
    if not found.ms:
        raise RuntimeError(f"tune: expected a right config of {entry.name}, got none; see above")
    finalists = sorted(found.ms, key=ms)[:FINALISTS]
    finalists += [present] if present in found.ms and present not in finalists else []
    found.ms |= time_ways(case, timed, {name: ways[name] for name in finalists})[0]
    best = min(finalists, key=ms)
    stays = present in found.ms and ms(present) < LEAST_GAIN * ms(best)
    found.chosen = present if stays else best
    for name in sorted(found.ms, key=ms):
        marks = " present" * (name == present) + " chosen" * (name == found.chosen)
        print(f"{name} {ms(name):9.4f} ms{marks}", flush=True)
    return found


class Session:
    """One run through the list: what it found, and where that is kept after each place."""

    def __init__(self, arch: int, write: bool, out: Path) -> None:
        self.arch, self.write, self.out = arch, write, out
        self.found: dict[str, Outcome] = {}

    def keep(self, entry: Entry, outcome: Outcome) -> None:
        """Writes what was found so far; a table's winner into the table."""
        self.found[entry.name] = outcome
        if self.write and outcome.ms:
            config = entry.configs(self.arch)[outcome.chosen]
            if self.arch not in SHARED_BYTES:
                print(f"not written: {entry.table.path.name} has no part for sm_{self.arch}")
            elif config != entry.table.get(self.arch, *entry.place):
                entry.table.write(self.arch, entry.place, config)
        places = {name: asdict(one) for name, one in self.found.items()}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"places": places}, indent=1) + "\n")


def run(listed: Sequence[Entry], session: Session, *, minutes: float) -> None:
    """Works through a list, longest expected gain first; a place that fails fails alone."""
    deadline = time.monotonic() + 60 * minutes
    for entry in sorted(listed, key=lambda entry: -entry.gain_ms):
        if time.monotonic() > deadline:
            session.found.setdefault(entry.name, Outcome("not tuned: out of time"))
            continue
        print(f"== {entry.name}, {entry.gain_ms:g} ms expected", flush=True)
        try:
            outcome = tune(entry, session.arch, deadline)
        except Exception as error:
            print(f"{entry.name}: {reason(error)}", flush=True)
            outcome = Outcome(f"not tuned: {reason(error)}")
        session.keep(entry, outcome)


def main(argv: list[str] | None = None) -> int:
    """Runs the list; 2 for what cannot be."""
    parser = parser_of("bench tune", __doc__, device=True)
    parser.add_argument("names", nargs="*", metavar="TEXT", help="parts of names of places")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the whole list")
    parser.add_argument("--commit-results", action="store_true", help="write the tables that ship")
    parser.add_argument("--out", type=Path, default=SCRATCH / "tune.json", help="what was found")
    args = parser.parse_args(argv)
    try:
        return _main(args)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


def _arch() -> int:
    """The GPU's compute capability; without one an H100's."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _main(args: argparse.Namespace) -> int:
    if args.minutes <= 0:
        raise ValueError(f"tune: expected minutes > 0, got minutes={args.minutes:g}; 10 is usual")
    listed = choose(entries(_arch()), args.names)
    if device_of(args, "tune") == "cpu":
        raise ValueError("tune: expected a GPU, got device=cpu, whose kernels have no tables")
    print(machine_line(machine("cuda")), flush=True)
    session = Session(_arch(), args.commit_results, args.out)
    try:
        run(listed, session, minutes=args.minutes)
    except KeyboardInterrupt:
        print("stopped; what was found is kept")
    for name, outcome in session.found.items():
        print(f"{name:48} {outcome.chosen}")
    print(f"kept in {args.out}{'' if args.commit_results else '; no table that ships was written'}")
    return 0
