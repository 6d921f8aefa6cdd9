"""Layouts on ranks of this host beside torch's and DeepSpeed's: zero, tp, pp, cp.

zero: GPT-2 124M, two ranks of one thread, T=256, one sequence a rank. For each stage fastpar beside
what does the same elsewhere, all in turns: torch's FSDP2 (fully_shard), at stage 2 without
resharding, torch's ZeroRedundancyOptimizer at stage 1, DeepSpeed's ZeRO, and DDP; at stage 0 DDP
and one process, which has the same batch and as many threads. Then fastpar on plain PyTorch's model
("stock model": the engine's share). live_bytes is what fastpar's engine holds between steps.

tp: its widths and vocabulary with four layers, two sequences a step: two ranks at tp=2, and four at
dp=2 x tp=2 (of which two share a core where there are two). torch talks over gloo, fastpar over
gloo and over shared memory.

pp: two ranks, eight sequences: the mini preset, and 12 layers of 384. Pipelines take a sequence as
a micro-batch; one process, dp=2 and tp=2 compute all rows of a rank at once. Then GPT-2 124M behind
a link, at several numbers of tokens a step: pp=2 by 1F1B, in micro-batches of one and two
sequences, dp=2 and tp=2, over gloo. dp sends the same bytes a step however many tokens it has.

cp: two ranks, two sequences of 4096 tokens, 2 layers of 256: cp=2 by both methods, tp=2 with
sequence parallelism, and dp=2, which has a sequence on each rank and, unlike the others, cannot
train a single one on both; on this host and behind the link. torch's own context parallel is
missing: on CPUs its attention has no sharding strategy (torch 2.13).

Memory does not hold all contenders: the first one stays for a whole case, others come a few at a
time beside it, and steps of such a group take turns. The first one's own row is of the first group.
`speedup` is its median over the row's, both of the row's group; `loss_difference` the largest of
all timed steps from the first one's, of the loss. bench/systems/steps.py has the gates. Links are
real ones (links.py, 1 Gbit/s); without network namespaces their rows are missing.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.harness import Bench
from bench.peers.contenders import DDP, PP, SINGLE, TP
from bench.peers.pipeline import DEEPSPEED, TORCH
from bench.systems.links import Link, NoLinkError
from bench.systems.steps import Trial, available_bytes, run_case
from fastpar.observe.strategies import Settings
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

_LIMITS_S = {"zero": 1800, "tp": 475, "pp": 3600, "cp": 900}
TIME_LIMIT_S = {name: {"cpu": limit, "cuda": 10} for name, limit in _LIMITS_S.items()}
GPT2 = GPTConfig(12, 12, 768, 256, 50304, dropout=0.0)
MINI = GPTConfig.preset("mini", vocab_size=4096)
LONG = GPTConfig(2, 4, 256, 4096, 1024, dropout=0.0)
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
MBIT = 1000
STOCK = ", stock model"
ZERO = {  # stage -> what stands beside fastpar's
    3: ("FSDP2", "DeepSpeed ZeRO-3", DDP),
    2: ("FSDP2, no reshard", "DeepSpeed ZeRO-2", DDP),
    1: ("DDP + ZeRO optimizer", "DeepSpeed ZeRO-1", DDP),
    0: (DDP, SINGLE),
}
ROOM_BYTES = (16e9, 23e9)  # free memory that two and three of them at a time need
DTENSOR, SHM = "torch DTensor", "fastpar, shm"
LINKED = {2: 256, 4: 256, 8: 256, 16: 256}  # sequences a step of `pp`: their length


@dataclass(frozen=True)
class Case:
    """Contenders beside `base`, in groups that run at the same time; mbit: behind such links."""

    title: str
    config: GPTConfig
    base: str
    groups: Sequence[Sequence[str]]
    rounds: int = 2
    ranks: int = 2
    rows: int = 2
    mbit: int = 0
    parallel: Parallel = field(default_factory=Parallel)

    def trial(self, name: str, folder: str) -> Trial:
        """One process has the threads of all ranks."""
        title, ranks = name.removesuffix(STOCK), 1 if name == SINGLE else self.ranks
        pieces = self.rows if name in (TORCH, DEEPSPEED) else None
        parallel = self.parallel.change(grad_accum_steps=pieces) if pieces else self.parallel
        return Trial(
            *(name, self.config, folder, ranks, 2 if name == SINGLE else 1, self.rows, title),
            stock=title != name,
            linked=bool(self.mbit),
            settings=Settings(parallel=parallel),
        )


def zero(quick: bool) -> Iterator[Case]:
    config = QUICK if quick else GPT2
    size = f"{'quick' if quick else 'GPT-2 124M'} T={config.block_size} B=1 a rank, 2 ranks"
    for stage, others in ZERO.items():
        ours = f"fastpar ZeRO-{stage}"
        many = 3 if quick else 1 + sum(available_bytes() >= room for room in ROOM_BYTES)
        groups = [others[i : i + many] for i in range(0, len(others), many)]
        groups.append((ours + STOCK,))
        yield Case(f"ZeRO-{stage}, {size}", config, ours, groups, 2 if quick else 7)


def tp(quick: bool) -> Iterator[Case]:
    config = QUICK if quick else replace(GPT2, n_layer=4)
    size = f"{'quick' if quick else 'GPT-2 124M of 4 layers'} T={config.block_size} B=2"
    whole = ", whole sequences"
    both = [("fastpar, gloo", SHM), (DTENSOR + whole, f"fastpar, gloo{whole}")]
    title, rounds = f"tp=2, {size}, 2 ranks", 2 if quick else 5
    yield Case(title, config, DTENSOR, both[:1] if quick else both, rounds)
    ours = [f"fastpar, ZeRO-{stage}, gloo" for stage in (3, 2, 1)]
    names = (*ours, "fastpar, ZeRO-3, shm", f"{DTENSOR} + FSDP2, no reshard")
    groups = [(name,) for name in (names[:1] if quick else names)]
    title, rounds = f"dp=2 tp=2, {size}, 4 ranks", 2 if quick else 3
    yield Case(title, config, f"{DTENSOR} + FSDP2", groups, rounds, ranks=4)


def pp(quick: bool) -> Iterator[Case]:
    configs = {"mini": MINI, "12 layers of 384": replace(MINI, n_layer=12, n_head=6, n_embd=384)}
    groups = ((PP, DEEPSPEED), ("fastpar ZeRO-0", TP), (SINGLE,))
    for size, config in ({"quick": QUICK} if quick else configs).items():
        title = f"{size} T={config.block_size} B=8, 2 ranks"
        yield Case(title, config, TORCH, groups, 2 if quick else 15, rows=8)
    for rows, length in ({2: QUICK.block_size} if quick else LINKED).items():
        config = replace(QUICK if quick else GPT2, block_size=length)
        size = "quick" if quick else "GPT-2 124M"
        title = f"{size} T={length} B={rows}, 2 ranks, {MBIT} Mbit/s"
        names = [PP, *[f"{PP}, 2 rows"] * (rows >= 4), TP]
        rounds = 1 if quick or rows > 8 else 2
        alone = [(name,) for name in names]
        yield Case(title, config, "fastpar ZeRO-0", alone, rounds, rows=rows, mbit=MBIT)


def cp(quick: bool) -> Iterator[Case]:
    config = replace(QUICK, block_size=64) if quick else LONG
    size = "quick" if quick else f"{config.n_layer} layers of {config.n_embd}"
    title = f"{size} T={config.block_size} B=2, 2 ranks"
    names = ("fastpar CP", "fastpar CP, keys", "fastpar ZeRO-0")
    yield Case(title, config, TP, [names], 2 if quick else 3)
    alone = [(name,) for name in names]
    yield Case(f"{title}, {MBIT} Mbit/s", config, TP, alone, 1 if quick else 2, mbit=MBIT)


CASES = {"zero": zero, "tp": tp, "pp": pp, "cp": cp}


def run(bench: Bench) -> None:
    """Case after case: those that have bench.only in their name, or contenders that do."""
    if bench.device == "cuda":
        return  # ranks on a CPU
    for case in CASES[bench.name](bench.quick):
        whole = bench.only in case.title
        groups = [[n for n in group if whole or bench.only in n] for group in case.groups]
        if not any(groups):
            continue
        if case.mbit:
            case = replace(case, parallel=Parallel(transport="torch"))
        try:
            with tempfile.TemporaryDirectory() as folder:
                base = case.trial(case.base, folder)
                trials = [[case.trial(name, folder) for name in group] for group in groups if group]
                if not case.mbit:
                    run_case(bench, case.title, base, trials, case.rounds)
                    continue
                with Link(case.mbit) as link:
                    run_case(bench, case.title, base, trials, case.rounds, link)
        except NoLinkError as error:
            print(f"no rows behind a link: {error}")
            return
