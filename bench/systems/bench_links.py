"""Steps on rate-limited links: overlap (what hides behind computation), wires (formats).

Two ranks with one thread each, in two network namespaces (bench/systems/links.py), over gloo. The
first step of a turn is not timed; the others run from start to start, so that a gather which a step
leaves to the next forward is paid by someone. The gate is that of losses (bench/systems/steps.py).

overlap: a GPT-2 of 25.6 million parameters. The link's rate follows from a first measurement of
compute: an all-reduce of all gradients takes COMM_RATIO of a backward. The vocabulary is small on
purpose: a tied embedding's gradient is final only when backward ends, so that with 50k tokens half
of the bytes could not overlap with anything. All contenders live side by side.

wires: 25.4 million parameters on few tokens, so that the link decides, at 1 Gbit/s and 100 Mbit/s.
One contender runs after the other (two processes take 1 GB), in groups that each have one process
alone and DDP; replicas are measured on a link of FREE too, which holds nothing up.

[Note: what the columns mean] comm_ms is the time that the link needs for the bytes that this
contender was seen to send, at the rate of a bare all-reduce; exposed_ms is the step's time beyond
that of the same step without communication, so the processor time that sending takes counts as
exposed, and a sharded optimizer, which has half of the work, as a gain. cpu_ms is the processor
time of a rank's step: where the ranks fill the cores, what it has beyond that of the step without
communication cannot be hidden. For fastpar the engine's own account stands beside it. sent_bytes
left the busier end of the link, headers included.
"""

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench.harness import Bench
from bench.peers import stock
from bench.peers.contenders import VARIANTS
from bench.records import Row
from bench.systems.links import PROBE_BYTES, Link, NoLinkError, all_reduce_ms
from bench.systems.steps import Rank, Trial, Turns, judge_losses, row_of, start
from fastpar.comm.ranks import reason
from fastpar.observe.strategies import Settings
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

TIME_LIMIT_S = {"overlap": {"cpu": 720, "cuda": 30}, "wires": {"cpu": 600, "cuda": 30}}
WIDE = GPTConfig(8, 8, 512, 256, 512, dropout=0.0)
SHORT = GPTConfig(8, 8, 512, 64, 512, dropout=0.0)
QUICK = GPTConfig(2, 2, 64, 32, 256, dropout=0.0)
TIMEOUT_S = 90.0
BUCKET_MB = 4.0  # of DDP, DeepSpeed and fastpar alike
ALONE = "no communication"
FSDP2 = ("FSDP2", "FSDP2, no reshard")

# overlap
COMM_RATIO = 0.75  # all-reduce of the gradients / backward
SAME = "DDP, same buckets"
DEEPSPEED = tuple(f"DeepSpeed ZeRO-{stage}" for stage in (1, 2, 3))
PEERS = (SAME, "DDP, 25 MB buckets", "DDP + ZeRO optimizer", *FSDP2, *DEEPSPEED)
STAGES = tuple(f"fastpar ZeRO-{stage}" for stage in range(4))
OWN = "fastpar ZeRO-2, fastpar.GPT"
QUICK_OVERLAP = (ALONE, SAME, FSDP2[0], *STAGES)

# wires
RATES, FREE = (1000, 100), 40_000  # Mbit/s
EXACT_BOUND, WIDE_BOUND = 1e-3, 0.2  # of losses; wide where something is rounded on the way
DDP = "DDP"
CODED = ("fastpar ZeRO-3", *(n for n, v in VARIANTS.items() if v.fp8))
RARE = tuple(n for n, v in VARIANTS.items() if v.outer)
WIRED = tuple(n for n, v in VARIANTS.items() if {*v.parallel} & {"wire_gradients"})
PLUS = "DeepSpeed ZeRO++, weights and gradients quantized"
GROUPS = {
    "torch": (ALONE, DDP, "DDP, fp16 hook", "DDP, bf16 hook", *FSDP2),
    "DeepSpeed": (ALONE, DDP, FSDP2[0], *DEEPSPEED[1:], PLUS),
    "fastpar": (ALONE, DDP, FSDP2[0], "fastpar ZeRO-2", *WIRED),
    "fp8": (ALONE, DDP, FSDP2[0], *CODED),
    "replicas": (ALONE, DDP, *RARE),
}
EXACT = (*FSDP2, *DEEPSPEED[1:], "fastpar ZeRO-2")


def trial_of(name: str, config: GPTConfig, rows: int) -> Trial:
    """All train plain PyTorch's model but one."""
    title, own = name.partition(", fastpar.GPT")[:2]
    # Not "auto": ranks of two namespaces of one host could share memory.
    settings = Settings(parallel=Parallel(bucket_mb=BUCKET_MB, transport="torch"))
    how: dict[str, Any] = {"rows": rows, "stock": not own, "settings": settings}
    return Trial(name, config, title=title, linked=True, gated=False, timeout_s=TIMEOUT_S, **how)


def turns_on(link: Link) -> Turns:
    return Turns(lambda trial: start(trial, Rank, link), link, TIMEOUT_S)


def overlap(bench: Bench) -> None:
    config, rows, rounds, steps = (QUICK, 4, 1, 2) if bench.quick else (WIDE, 8, 2, 3)
    names = QUICK_OVERLAP if bench.quick else (ALONE, *PEERS, *STAGES, OWN)
    size = "quick GPT-2" if bench.quick else "GPT-2 25.6M"
    title = f"{size} B={rows // 2} T={config.block_size} V={config.vocab_size}, 2 ranks"
    trials = {name: trial_of(name, config, rows) for name in names}
    if bench.only not in title:
        return
    with Link(1000) as link, turns_on(link) as turns:
        turns.start({ALONE: trials[ALONE]})
        phases = turns.ask(ALONE, "phases", 3)
        about = {name: max(rank[name] for rank in phases) for name in phases[0]}
        # All gradients, which two ranks send once each, take COMM_RATIO of a backward.
        numel = sum(shape.numel() for shape in stock.shapes_of(config))
        link.set_rate(8e-3 * 4 * numel / (COMM_RATIO * about["backward_ms"]))
        probe = statistics.median(all_reduce_ms(link))
        about["link_mbit"] = link.mbit
        about["link_bytes_per_ms"] = PROBE_BYTES / probe
        about["all_reduce_25MiB_ms"] = probe
        order = sorted(names[1:], key=lambda name: name not in STAGES)  # while there is memory
        turns.start({name: trials[name] for name in order})
        turns.run(rounds, steps, warm=1)
    judge_losses(turns.logs, SAME, aside=[ALONE])
    alone_ms, base_ms = (statistics.median(turns.logs[name].ms or [0]) for name in (ALONE, SAME))
    for name in names:
        log = turns.logs[name]
        row = row_of(bench, title, trials[name], log, SAME, [base_ms] if base_ms else [])
        row.tokens_per_s = None
        bench.add(_exposed(row, about, alone_ms))
    print(", ".join(f"{name} {value:.0f}" for name, value in about.items()), flush=True)


def _exposed(row: Row, about: dict[str, float], alone_ms: float) -> Row:
    """See [Note: what the columns mean]."""
    if row.variant == ALONE:
        row.notes |= about
    elif row.median_ms is not None:
        row.notes["comm_ms"] = comm_ms = row.notes["sent_bytes"] / about["link_bytes_per_ms"]
        if row.variant != OWN:  # another model than the one that ran alone
            exposed_ms = row.median_ms - alone_ms
            row.notes |= {"exposed_ms": exposed_ms, "exposed_percent": 100 * exposed_ms / comm_ms}
    return row


def wires(bench: Bench) -> None:
    for mbit, group in [*itertools.product(RATES, GROUPS), (FREE, "replicas")]:
        config, steps = (QUICK, 1) if bench.quick else (SHORT, 1 if mbit == RATES[1] else 5)
        size = "quick GPT-2" if bench.quick else "GPT-2 25.4M B=1 T=64 a rank"
        title = f"{size}, 2 ranks, {mbit} Mbit/s"
        if bench.only not in f"{title}, {group}":
            continue
        trials = {name: trial_of(name, config, 2) for name in GROUPS[group]}
        with Link(mbit) as link, turns_on(link) as turns:
            for name, trial in trials.items():
                count = max(5, steps) if name == ALONE else steps
                if name in RARE:  # of replicas two rounds from one meeting to the next
                    count = 2 * VARIANTS[name].outer["every"]
                turns.start({name: trial})
                turns.each(lambda name, n=count: turns.turn(name, n, 1), [name])  # type: ignore[misc]
                turns.close(name)
        judge_losses(turns.logs, DDP, lambda v: EXACT_BOUND if v in EXACT else WIDE_BOUND, [ALONE])
        for row in _wire_rows(bench, title, turns, mbit):
            bench.add(row)


def _wire_rows(bench: Bench, title: str, turns: Turns, mbit: int) -> Sequence[Row]:
    """exposed_ms is beyond one process alone; speed-ups are over FSDP2, where that ran."""
    logs = turns.logs
    base = next((p for p in FSDP2 if p in logs and logs[p].refused is None), "")
    alone_ms, rows = statistics.median(logs[ALONE].ms or [0]), []
    for name, log in logs.items():
        if name in RARE and log.ms:  # the mean from one meeting to the next
            log.ms = [statistics.fmean(log.ms[-VARIANTS[name].outer["every"] :])]
        over = (base, logs[base].ms) if base and name != ALONE else ("", [])
        row = row_of(bench, title, turns.trials[name], log, *over)
        row.notes["link_mbit"] = mbit
        if row.median_ms is not None and name != ALONE and alone_ms:
            row.notes["exposed_ms"] = row.median_ms - alone_ms
        rows.append(row)
    return rows


def run(bench: Bench) -> None:
    if bench.device != "cpu":
        return  # the link is between CPU ranks
    try:
        {"overlap": overlap, "wires": wires}[bench.name](bench)
    except NoLinkError as error:
        missing = functools.partial(bench.row, "behind a link", "step", "link", torch.float32)
        bench.add(missing(refused=reason(error)))
