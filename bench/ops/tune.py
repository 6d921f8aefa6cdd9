"""`python -m bench tune`: the tuning list, which a GPU decides: alternatives of ops, as data.

Alternatives of two kinds: configs of a table of kernels/ (tiles, warps, stages, L2 sections), and
implementations of an op (own, torch's, others' attention), which proofs choose. The list is worked
through longest expected gain first, as long as --minutes allow. An alternative that breaks the 2x
rule or gives other bits in a second call is refused, by the doctor's trial; those that are right
are timed in turn at GPT-2's shapes, and the fastest is chosen.

    python -m bench tune --minutes 10                   the whole list
    python -m bench tune "bwd_dq" gelu                  places whose name holds one of these
    python -m bench tune --alternative "load tma"       only alternatives whose name holds this
    python -m bench tune --compile 90                   all configs for sm_90, without a GPU
    python -m bench tune --device cpu                   the CPU's implementations

What was found is in build/bench/tune.json as soon as a place is done. With --commit-results winners
go to the tables of kernels/, and proofs to fastpar/doctor/shipped, so that a run that is stopped
keeps what it found. On a GPU a place's configs are compiled by all cores before they are tried.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.ingest import ship_proofs
from bench.records import (
    ROOT,
    SCRATCH,
    device_of,
    machine,
    machine_line,
    parser_of,
)
from fastpar.comm.ranks import reason
from fastpar.doctor import doctor, report
from fastpar.doctor.table import VERSION, environment, row_of
from fastpar.doctor.trial import DEFAULT_ROWS, Way, time_ways, warm, what_is_wrong
from fastpar.kernels import backend
from fastpar.kernels.attention import peers as attention_peers
from fastpar.kernels.cases import proof_cases
from fastpar.kernels.choice import OWN, STOCK, Case, Proof, trying
from fastpar.kernels.config_table import TABLES, ConfigTable
from fastpar.settings.model import GPTConfig

CHECKED_ROWS = 200  # a multiple of no tile, and more than one
FINALISTS = 4
LEAST_GAIN = 1.01  # below, the present entry stays: medians of two runs differ by as much


@dataclass(frozen=True)
class Entry:
    """One place of the list.

    gain_ms: expected of a step of GPT-2 124M with 32 x 1024 tokens on an H200, from a count of
        instructions and bytes; it orders the list and decides nothing else.
    table, place: whose configs are tried; None: implementations.
    direction: which time counts, 0 forward, 1 backward; None: both.
    """

    case: Case
    gain_ms: float
    table: ConfigTable[Any] | None = None
    place: tuple[Any, ...] = ()
    direction: int | None = None

    @property
    def name(self) -> str:
        what = "implementations" if self.table is None else self.table.name
        return " ".join([f"{self.case}:", what, *map(str, self.place)])

    def configs(self, arch: int) -> dict[str, Any]:
        """By name; the present one first."""
        assert self.table is not None
        present = self.table.get(arch, *self.place)
        return {shown(c): c for c in (present, *self.table.candidates(arch, *self.place))}


@dataclass
class Outcome:
    """What was found at one place, by the names of its alternatives."""

    chosen: str
    ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # forward, backward
    refused: dict[str, str] = field(default_factory=dict)


GAINS = {
    "attention": 6.0,
    "attention_masked": 1.0,
    "weight_gradient": 0.1,
    "layer_norm": 0.1,
}
# (gain, kernel, head dim, variant); GPT-2 has 64. fwd is direction 0.
ATTENTION_TILES = (
    (2.0, "bwd_dkdv", 64, "plain"), (1.5, "bwd_dq", 64, "plain"), (1.0, "fwd", 64, "plain"),
    (1.9, "bwd_dkdv", 64, "dropout"), (1.4, "bwd_dq", 64, "dropout"), (0.9, "fwd", 64, "dropout"),
    (0.0, "bwd_dkdv", 128, "plain"), (0.0, "bwd_dq", 128, "plain"), (0.0, "fwd", 128, "plain"),
    (0.0, "bwd_dkdv", 128, "dropout"), (0.0, "bwd_dq", 128, "dropout"),
    (0.0, "fwd", 128, "dropout"),
)  # fmt: skip


def entries(device: str, dtype: torch.dtype) -> list[Entry]:
    """The whole list for "cpu" or "cuda"; the CPU's kernels have no tables."""
    gpt2 = GPTConfig.preset("gpt2")
    cases = doctor.cases_of_model(device, dtype, gpt2)
    found = [Entry(case, GAINS.get(case.op, 0.2)) for case in cases]
    if device == "cuda":
        for gain, kernel, head_dim, variant in ATTENTION_TILES:
            op = "attention" if variant == "plain" else "attention_masked"
            case, direction = Case(device, op, dtype, head_dim), int(kernel != "fwd")
            place = (kernel, head_dim, variant)
            found.append(Entry(case, gain, TABLES["attention_configs"], place, direction))
        for gain, op, size, table in (
            (3.0, "attention_masked", 64, "attention_bits"),
            (0.5, "attention", 64, "attention_sections"),
            (0.3, "bias_gelu", 4 * gpt2.n_embd, "gelu_configs"),
            (0.4, "residual_layer_norm", gpt2.n_embd, "layer_norm_configs"),
            (0.4, "cross_entropy", gpt2.padded_vocab_size, "cross_entropy_configs"),
        ):
            found.append(Entry(Case(device, op, dtype, size), gain, TABLES[table]))
    return sorted(found, key=lambda entry: -entry.gain_ms)


def shown(config: Any) -> str:
    """block_q 64 block_k 32 ..."""
    return " ".join(f"{name} {value}" for name, value in config._asdict().items())


@contextlib.contextmanager
def forced(entry: Entry, config: Any) -> Iterator[None]:
    """Calls inside run the own kernel with this config, whatever the table says."""
    assert entry.table is not None
    with trying(entry.case.op, OWN), entry.table.trying(entry.place, config):
        yield


def why_not(entry: Entry, alternative: str, arch: int) -> str | None:
    """Why no alternative of this name can run here, "" if one can, None if there is none."""
    if entry.table is not None:
        if any(alternative in name for name in entry.configs(arch)):
            return ""
        archs = [a for a in entry.table.archs if any(alternative in n for n in entry.configs(a))]
        return f"is for {', '.join(f'sm_{a}' for a in archs)}" if archs else None
    if alternative in (OWN, STOCK):
        return ""
    if entry.case.op != "attention" or alternative not in attention_peers.PEERS:
        return None
    q = torch.empty(1, 16, 1, entry.case.size, dtype=entry.case.dtype, device=entry.case.device)
    return attention_peers.refusal(alternative, q, q, q, causal=True)


def choose(
    listed: Sequence[Entry], only: Sequence[str], alternative: str, arch: int
) -> list[Entry]:
    """The places that are asked for.

    Raises:
        ValueError: there are none, or none has an alternative that this machine can run.
    """
    found = [e for e in listed if not only or any(text in e.name for text in only)]
    if not found:
        raise ValueError(
            f"tune: expected a part of a place's name, got names={' '.join(only)}; one of "
            f"{'; '.join(e.name for e in listed)}"
        )
    if not alternative:
        return found
    reasons = [(e, why) for e in found if (why := why_not(e, alternative, arch)) is not None]
    able = [e for e, why in reasons if not why]
    if not able:
        why = f"it {reasons[0][1]}" if reasons else "no place has one of this name"
        raise ValueError(
            "tune: expected an alternative that this machine can run, got "
            f"alternative={alternative}: {why}; leave --alternative out, or name another"
        )
    return able


def tune_configs(
    entry: Entry, arch: int, deadline: float, alternative: str, rows: int, checked_rows: int
) -> Outcome:
    """Tries the configs of a place; its present one stays where no other is faster."""
    assert entry.table is not None
    case, found = entry.case, Outcome("")
    configs = entry.configs(arch)
    present = next(iter(configs))
    configs = {n: c for n, c in configs.items() if n == present or alternative in n}
    if case.device == "cuda":
        compile_ahead([(entry, config) for config in configs.values()], arch)
    judged = proof_cases(case.op, case.size, case.device, checked_rows)
    (timed, *_) = proof_cases(case.op, case.size, case.device, rows)
    ways: dict[str, tuple[Way, Any]] = {}
    for name, config in configs.items():
        if ways and time.monotonic() > deadline:
            print(f"{entry.name}: out of time, {len(configs) - len(ways)} configs are left out")
            break
        with entry.table.trying(entry.place, config):
            why = what_is_wrong(case, judged)
        if why:
            found.refused[name] = why
            print(f"{name} refused: {why}", flush=True)
        else:
            ways[name] = (functools.partial(forced, entry, config), timed.fn)

    def ms(name: str) -> float:
        each = found.ms[name]
        return sum(each) if entry.direction is None else each[entry.direction]

    found.ms, failed = time_ways(case, timed, ways)
    found.refused |= failed
    if not found.ms:
        raise RuntimeError(
            f"tune: expected a right config of {entry.name}, got none; see the reasons above"
        )
    finalists = sorted(found.ms, key=ms)[:FINALISTS]
    finalists += [present] if present in found.ms and present not in finalists else []
    found.ms |= time_ways(case, timed, {name: ways[name] for name in finalists})[0]
    best = min(finalists, key=ms)
    stays = present in found.ms and ms(present) < LEAST_GAIN * ms(best)
    found.chosen = present if stays else best
    for name, why in failed.items():
        print(f"{name} refused: {why}", flush=True)
    for name in sorted(found.ms, key=ms):
        marks = " present" * (name == present) + " chosen" * (name == found.chosen)
        print(f"{name} {ms(name):9.4f} ms{marks}", flush=True)
    return found


def compile_ahead(jobs: Sequence[tuple[Entry, Any]], arch: int) -> list[str]:
    """Compiles entries with configs by all cores; told and returned: what cannot be."""
    from fastpar.kernels.triton_launch import SMS

    sms = SMS[arch] if arch in SMS else torch.cuda.get_device_properties().multi_processor_count
    tables = [(e.table.name, e.place, tuple(config)) for e, config in jobs if e.table is not None]
    errors = warm([entry.case for entry, _ in jobs], (arch, sms), forced=tables)
    for line in errors:
        print(f"not compiled: {line}", flush=True)
    return errors


def tune_implementations(entry: Entry, rows: int) -> tuple[Outcome, Proof]:
    """A proof of the case, which compares all implementations that can serve it."""
    proof = doctor.adopt([entry.case], again=True, rows=rows)[entry.case]
    print(report.row(entry.case, proof), flush=True)
    ms = {OWN: proof.own_ms, "instead": proof.instead_ms, STOCK: proof.stock_ms}
    ms |= {peer.name: peer.ms for peer in proof.peers}
    refused = {peer.name: peer.wrong for peer in proof.peers if peer.wrong}
    refused |= {OWN: proof.wrong} if proof.wrong else {}
    for name, why in refused.items():
        print(f"{name} refused: {why}", flush=True)
    chosen = " / ".join(dict.fromkeys(proof.serves)) if proof.chosen == OWN else STOCK
    return Outcome(chosen, {n: t for n, t in ms.items() if any(t)}, refused), proof


class Session:
    """One run through the list: what it found, and where that is kept after each place."""

    def __init__(self, device: str, arch: int, write: bool, out: Path, package: Path) -> None:
        self.device, self.arch, self.write = device, arch, write
        self.out, self.package = out, package
        self.found: dict[str, Outcome] = {}
        self.proofs: dict[Case, Proof] = {}

    def keep(self, entry: Entry, outcome: Outcome, proof: Proof | None = None) -> None:
        """Writes what was found so far; a table's winner into the table."""
        self.found[entry.name] = outcome
        if proof is not None:
            self.proofs[entry.case] = proof
        elif self.write and entry.table is not None and outcome.ms:
            config = entry.configs(self.arch)[outcome.chosen]
            if self.arch not in entry.table.archs:
                print(f"not written: {entry.table.path.name} has no part for sm_{self.arch}")
            elif config != entry.table.get(self.arch, *entry.place):
                entry.table.write(self.arch, entry.place, config)
                environment.cache_clear()  # proofs are of kernels with their tables
                # Of the ops that run the same kernels: all norms, both losses, GELU.
                kind = entry.case.op.removesuffix("_masked").rpartition("_")[2]
                self.proofs = {c: p for c, p in self.proofs.items() if kind not in c.op}
        rows = [row_of(case, proof) for case, proof in self.proofs.items()]
        content = {"version": VERSION, "about": environment(self.device), "proofs": rows}
        places = {name: asdict(one) for name, one in self.found.items()}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"places": places, **content}, indent=1) + "\n")
        if self.write and rows:
            ship_proofs(content, self.package)


def run(
    listed: Sequence[Entry],
    session: Session,
    *,
    minutes: float,
    alternative: str = "",
    rows: int = 0,
    checked_rows: int = CHECKED_ROWS,
) -> dict[str, Outcome]:
    """Works through a list, longest expected gain first; a place that fails fails alone."""
    deadline = time.monotonic() + 60 * minutes
    todo = sorted(listed, key=lambda entry: -entry.gain_ms)
    while todo:
        entry = todo.pop(0)
        if time.monotonic() > deadline:
            session.found.setdefault(entry.name, Outcome("not tuned: out of time"))
            continue
        print(f"== {entry.name}, {entry.gain_ms:g} ms expected", flush=True)
        size, proven = rows or DEFAULT_ROWS[session.device], set(session.proofs)
        try:
            if entry.table is None:
                session.keep(entry, *tune_implementations(entry, size))
                continue
            how = session.arch, deadline, alternative, size, checked_rows
            session.keep(entry, tune_configs(entry, *how))
        except Exception as error:
            print(f"{entry.name}: {reason(error)}", flush=True)
            session.keep(entry, Outcome(f"not tuned: {reason(error)}"))
        stale = proven - session.proofs.keys()  # their own kernel has another config now
        todo += [e for e in listed if e.table is None and e.case in stale]
    return session.found


def main(argv: list[str] | None = None) -> int:
    """Runs the list; 2 for what cannot be, 1 where something could not be compiled."""
    parser = parser_of("bench tune", __doc__, device=True)
    parser.add_argument("names", nargs="*", metavar="TEXT", help="parts of names of places")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the whole list")
    parser.add_argument("--alternative", default="", metavar="TEXT", help="only those named so")
    parser.add_argument("--compile", type=int, metavar="ARCH", help="90: compile for sm_90 only")
    parser.add_argument("--commit-results", action="store_true", help="write what ships")
    parser.add_argument("--out", type=Path, default=SCRATCH / "tune.json", help="what was found")
    args = parser.parse_args(argv)
    try:
        return _main(args, "cuda" if args.compile else device_of(args, "tune"))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


def _main(args: argparse.Namespace, device: str) -> int:
    if args.minutes <= 0:
        raise ValueError(f"tune: expected minutes > 0, got minutes={args.minutes:g}; 10 is usual")
    if args.commit_results and device == "cpu":
        raise ValueError(
            "tune: expected a GPU with --commit-results, got device=cpu; tables that ship are "
            "measured on the GPU that they serve"
        )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if args.compile:
        from fastpar.kernels.triton_launch import SMS

        if args.compile not in SMS:
            raise ValueError(f"tune: expected arch in {sorted(SMS)}, got arch={args.compile}")
        tiles = [entry for entry in entries("cuda", dtype) if entry.table is not None]
        listed = choose(tiles, args.names, args.alternative, args.compile)
        named = [(e, item) for e in listed for item in e.configs(args.compile).items()]
        jobs = [(e, config) for e, (name, config) in named if args.alternative in name]
        errors = compile_ahead(jobs, args.compile)
        print(f"sm_{args.compile}: {len(jobs)} configs of {len(listed)} places compiled")
        return int(bool(errors))
    arch = 0
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    listed = choose(entries(device, dtype), args.names, args.alternative, arch)
    if device == "cpu":
        backend.keep_freed_memory()  # as training does: else page faults are what is timed
    print(machine_line(machine(device)), flush=True)
    session = Session(device, arch, args.commit_results, args.out, ROOT)
    try:
        run(listed, session, minutes=args.minutes, alternative=args.alternative)
    except KeyboardInterrupt:
        print("stopped; what was found is kept")
    for name, outcome in session.found.items():
        print(f"{name:48} {outcome.chosen}")
    print(f"kept in {args.out}{'' if args.commit_results else '; no table that ships was written'}")
    return 0
