"""`fastpar compare`: the same GPT-2 on the same text by a list of strategies, measured in turn.

Every run is a start of fresh processes (worker.py). Repeats take turns, each in another order, so
that a machine that warms up or gets busy hits all alike. The results are written after every run:
what was measured stays, whatever ends the command.

[Note: one rank's share] Every strategy trains the same sequences in a step. A rank computes its
share in as few micro-batches as `fastpar train` would. `single` is one rank, that is one device (on
a CPU: one rank's threads), and computes all of them in micro-batches of one rank's share.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from fastpar.comm.host import threads_per_rank
from fastpar.comm.ranks import RankFailed
from fastpar.data.batches import TextData, load_data, n_samples_per_epoch, sample_batch
from fastpar.files.progress import Progress, duration
from fastpar.files.runs import RUNS, make_next_free
from fastpar.observe.comparison_report import TABLE, markdown, summary
from fastpar.observe.pictures import draw_all
from fastpar.observe.results import RESULTS, Comparison, Run
from fastpar.observe.strategies import SINGLE, STRATEGIES
from fastpar.observe.worker import Spec, measure
from fastpar.predict.machine import about_machine
from fastpar.settings.block import count_parameters
from fastpar.settings.config import AUTO_MICRO_BATCH_TOKENS, GPTConfig, derive_batch
from fastpar.settings.files import check_at_least, option
from fastpar.settings.options import ModelSize, TextSettings
from fastpar.settings.rules import check_synchronous

DEFAULT = (  # side by side what does the same: torch's, then fastpar's
    *(SINGLE, "ddp", "dp", "zero1", "fsdp2-no-reshard", "zero2", "fsdp2", "zero3"),
    *("tp", "tp-zero1", "tp-zero2", "tp-zero3", "cp", "cp-keys", "pp", "dp-pp"),
    *("deepspeed1", "deepspeed2", "deepspeed3"),
)
EXPERTS_LINE = "experts  {n_expert} in each layer, of {expert_hidden} features, top {top_k}"
UNTIMED_STEPS = 3
LENGTHS = {"epochs": (3, 2), "epoch_steps": (80, 12), "repeats": (3, 1)}  # in full, and quick
START_S = 6.0  # of a run's processes, on two cores; only for the expected time
STEP_OVER_GRADIENTS = 1.6  # a step over its forward and backward; only for the expected time
_PROBE_STEPS = 3
_AT_LEAST = {
    "nproc": 1, "batch_size": 1, "epochs": 1, "epoch_steps": 0, "repeats": 1, "threads": 1,
}  # fmt: skip


@dataclass(frozen=True)
class CompareCommand:
    """Train the same GPT-2 with several parallel strategies: which one, by measurement."""

    strategies: str | None = None
    """Names with commas: single, ddp, ddp-zero, fsdp2, fsdp2-no-reshard, dp, zero1, zero2, zero3,
    zero2-int8, diloco (ranks that meet every 20 steps), hsdp, tp, tp-zero1, tp-zero2, tp-zero3, cp,
    cp-keys (two share sequences), pp (every rank a stage), dp-pp (two stages), deepspeed1,
    deepspeed2, deepspeed3, experts (in the place of MLPs, of as many flops a token), ep (which the
    ranks share out); unset: all that run here, but for ddp-zero, zero2-int8, diloco, hsdp, experts
    and ep."""
    n_expert: int = 8
    """Of experts and ep: in each layer."""
    expert_top_k: int = 2
    """Of these a token's; each has 4 * n_embd / expert_top_k features."""
    nproc: int = 2
    """Ranks of every strategy but single, which has one."""
    epochs: int | None = None
    """Epochs of a run; unset: 3, quick 2."""
    epoch_steps: int | None = None
    """Steps of an epoch; 0: one pass of the text; unset: 80, quick 12."""
    repeats: int | None = None
    """Runs of each strategy; unset: 3, quick 1."""
    quick: bool = False
    """Fewer steps and one run each: under two minutes on two cores."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: fastpar.Muon for the blocks' matrices, also of single and ddp; fsdp2, ddp-zero and
    deepspeed have none."""
    lr: float = 2.5e-3
    """Peak learning rate; a warm-up before it, a cosine after it."""
    muon_lr: float = 0.02
    """Peak learning rate of muon's matrices."""
    seed: int = 1
    """Fixes weights and batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda where there is one. Each rank needs a GPU of its own."""
    threads: int | None = None
    """CPU threads a rank, of single too; unset: cores / nproc."""
    out: str | None = None
    """Folder of the results; unset: the first free one of runs/compare, runs/compare-2, ..."""
    shape: ModelSize = field(default_factory=lambda: ModelSize(model="micro"))
    text: TextSettings = field(default_factory=TextSettings)


def chosen(command: CompareCommand) -> list[str]:
    """The strategies asked for, each once.

    Raises:
        ValueError: a name that is none.
    """
    if command.strategies is None:
        return list(DEFAULT)
    names = [name.strip() for name in command.strategies.split(",") if name.strip()]
    for name in names:
        check_synchronous("compare", "strategy", name, "zero1, a server that all ranks share")
        if name not in STRATEGIES:
            near = difflib.get_close_matches(name, STRATEGIES, n=1)
            raise ValueError(
                f"compare: expected strategies of {', '.join(STRATEGIES)}, got strategy={name}; "
                f"{f'did you mean {near[0]}?' if near else 'choose of these'}"
            )
    if not names:
        raise ValueError(
            f"compare: expected names with commas, got strategies={command.strategies!r}; leave "
            "--strategies out to run all"
        )
    return list(dict.fromkeys(names))


def check(command: CompareCommand) -> None:
    """Refuses what needs no torch to be seen.

    Raises:
        ValueError: names the setting.
    """
    chosen(command)
    check_at_least("compare", {**vars(command), **vars(command.text)}, _AT_LEAST)
    for name in ("lr", "muon_lr"):
        value = getattr(command, name)
        if not 0 < value < float("inf"):
            raise ValueError(
                f"compare: expected {name} > 0, got {name}={value}; set {option(name)}"
            )
    rows, nproc = command.text.batch_size, command.nproc
    if rows % nproc:
        raise ValueError(
            f"compare: expected batch_size to be a multiple of nproc={nproc}, got "
            f"batch_size={rows}; use --batch-size {-(-rows // nproc) * nproc}"
        )
    out = Path(command.out) if command.out is not None else None
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"compare: expected a new or an empty folder, got out={command.out}; a comparison "
            "is not gone on with: choose another --out"
        )


def why_not(name: str, command: CompareCommand, shape: GPTConfig, gpus: int | None) -> str | None:
    """Why a strategy cannot run with these settings; None: it can.

    Args:
        gpus: of this machine; None: ranks are on the CPU.
    """
    strategy, mesh = STRATEGIES[name], STRATEGIES[name].mesh
    reason = strategy.why_not(command.nproc, command.optimizer)
    heads = max(mesh.tp, 1 if name == "cp-keys" else mesh.cp)
    if reason is None and (not shape.splits_by(mesh.tp) or shape.n_head < heads):
        reason = f"needs {heads} heads or more, got {shape.n_head}"
    if reason is None and shape.block_size % mesh.tp:
        reason = f"needs a context that is a multiple of {mesh.tp}, got {shape.block_size}"
    ranks, stages = 1 if strategy.one_rank else command.nproc, mesh.pp or command.nproc
    if reason is None and shape.n_layer < stages:
        reason = f"needs {stages} layers or more, got {shape.n_layer}"
    if reason is None and mesh.ep != 1 and command.n_expert % command.nproc:
        reason = f"needs a multiple of {command.nproc} experts, got {command.n_expert}"
    if reason is None and gpus is not None and command.device != "cpu" and gpus < ranks:
        reason = f"needs a GPU for each of {ranks} ranks, got {gpus}"
    return reason


def experts_of(command: CompareCommand, shape: GPTConfig) -> dict[str, int]:
    """Fields of GPTConfig of a model with experts that takes as many flops a token as a dense one.

    Raises:
        ValueError: a top_k that does not divide the features of an MLP, or above n_expert.
    """
    top_k = command.expert_top_k
    if top_k < 1 or 4 * shape.n_embd % top_k:
        raise ValueError(
            f"compare: expected expert_top_k to divide the {4 * shape.n_embd} features of an MLP, "
            f"got expert_top_k={top_k}; set --expert-top-k"
        )
    found = {
        "n_expert": command.n_expert, "top_k": top_k, "expert_hidden": 4 * shape.n_embd // top_k,
    }  # fmt: skip
    replace(shape, **found)
    return found


@dataclass
class Schedule:
    """A comparison before its first run."""

    text: TextSettings
    shape: GPTConfig
    data: TextData
    comparison: Comparison

    @classmethod
    def of(cls, command: CompareCommand) -> Schedule:
        """Reads the text and decides what runs.

        Raises:
            ValueError: no such model, text or GPU; nothing is left to run.
        """
        import torch

        on_gpu = torch.cuda.is_available()
        device = command.device if command.device != "auto" else "cuda" if on_gpu else "cpu"
        if device == "cuda" and not on_gpu:
            raise ValueError(
                "compare: expected a GPU for device=cuda, got none that torch can use; use "
                "--device cpu"
            )
        sizes = command.shape.sizes()
        shape = GPTConfig.preset(command.shape.model, vocab_size=1, dropout=0.0, **sizes)
        gpus = torch.cuda.device_count() if on_gpu else None
        reasons = {name: why_not(name, command, shape, gpus) for name in chosen(command)}
        skipped = {name: why for name, why in reasons.items() if why is not None}
        names = [name for name in reasons if name not in skipped]
        if not names:
            why = "; ".join(f"{name} {why}" for name, why in skipped.items())
            raise ValueError(
                f"compare: expected a strategy that can run here, got none: {why}; change "
                "--strategies or --nproc"
            )
        data = load_data(command.text.data, command.text.tokenizer, block_size=shape.block_size)
        shape = replace(shape, vocab_size=data.vocab_size)
        experts = experts_of(command, shape) if any(STRATEGIES[n].sparse for n in names) else {}
        given = {name: getattr(command, name) for name in LENGTHS}
        lengths = {name: usual[command.quick] for name, usual in LENGTHS.items()}
        lengths |= {name: n for name, n in given.items() if n is not None}
        if lengths["epoch_steps"] == 0:
            windows = n_samples_per_epoch(data.train, shape.block_size)
            lengths["epoch_steps"] = max(1, windows // command.text.batch_size)
        settings = {
            "strategies": names,
            "nproc": command.nproc,
            "model": command.shape.model,
            "shape": asdict(shape),
            "parameters": count_parameters(shape, padded=True),
            "experts": experts,
            "data": data.name,
            "tokenizer": data.tokenizer.name,
            "batch_size": command.text.batch_size,
            "block_size": shape.block_size,
            **lengths,
            "untimed_steps": min(UNTIMED_STEPS, lengths["epoch_steps"] - 1),
            "optimizer": command.optimizer,
            "lr": command.lr,
            "muon_lr": command.muon_lr,
            "seed": command.seed,
            "device": device,
            "threads": threads_per_rank(command.threads, command.nproc),
        }
        comparison = Comparison(settings, about_machine(device), skipped)
        return cls(command.text, shape, data, comparison)

    @property
    def steps(self) -> int:
        """Steps of one run."""
        return self.comparison.settings["epochs"] * self.comparison.settings["epoch_steps"]

    def runs(self) -> list[Run]:
        """All, in turn: each repeat begins with another strategy; other orders of sums last."""
        settings = self.comparison.settings
        names, repeats = settings["strategies"], settings["repeats"]
        runs = []
        for repeat in range(repeats):
            first = repeat * len(names) // repeats
            runs += [self._run(name, repeat + 1) for name in names[first:] + names[:first]]
        return runs + self._yardsticks()

    def _run(self, name: str, repeat: int) -> Run:
        """A run of a strategy; how it splits a step: [Note: one rank's share]."""
        settings, strategy = self.comparison.settings, STRATEGIES[name]
        rows, nproc = settings["batch_size"], settings["nproc"]
        dp = nproc // strategy.model_ranks(nproc)
        micro, accum = derive_batch(rows, self.shape.block_size, dp, pp=strategy.mesh.pp or nproc)
        if strategy.one_rank:
            return Run(name, repeat, 1, settings["threads"], micro, rows // micro)
        return Run(name, repeat, nproc, settings["threads"], micro, accum)

    def _yardsticks(self) -> list[Run]:
        """`single` in the smallest and largest other micro-batches, these with an exact norm."""
        rows, base = self.comparison.settings["batch_size"], self._run(SINGLE, 1)
        most = max(1, AUTO_MICRO_BATCH_TOKENS // self.shape.block_size)
        sizes = [n for n in range(1, min(rows, most) + 1) if rows % n == 0]
        sizes = [n for n in sizes if n != base.micro_batch_size] or [base.micro_batch_size]
        orders = [(sizes[-1], True), *((n, False) for n in sizes[:1] if len(sizes) > 1)]
        if SINGLE not in self.comparison.settings["strategies"]:
            orders.append((base.micro_batch_size, False))
        return [
            Run(SINGLE, 1, 1, base.threads, n, rows // n, yardstick=True, exact_norm=exact)
            for n, exact in orders
        ]

    def spec(self, run: Run) -> Spec:
        """What the ranks of a run are told."""
        return Spec(self.comparison.settings, run, self.text.data, self.text.tokenizer)

    def lines(self, runs: Sequence[Run]) -> list[str]:
        """What is about to happen, for people."""
        s = self.comparison.settings
        n_orders = sum(run.yardstick for run in runs)
        more = f", {n_orders} of them {SINGLE} with other sums" * (n_orders > 0)
        time_line = f"time     {len(runs)} runs of {self.steps} steps{more}"
        if s["device"] == "cpu":
            time_line += f"; expected: about {duration(self.expected_s(runs))} (a step was tried)"
        return [
            f"compare  {', '.join(s['strategies'])}",
            *(f"skipped  {name}: {why}" for name, why in self.comparison.skipped.items()),
            f"model    {s['model']}, {s['parameters']:,} parameters, fp32, no dropout",
            *(EXPERTS_LINE.format(**experts) for experts in [s["experts"]] if experts),
            f"data     {self.data.describe()}",
            *["optim    fastpar.Muon, repeated by ddp's ranks"] * (s["optimizer"] == "muon"),
            f"steps    {s['batch_size']} sequences of {s['block_size']} tokens; {s['epochs']} "
            f"epochs of {s['epoch_steps']} steps, {s['repeats']} runs each",
            f"ranks    {s['nproc']} on {s['device']}, threads of each: {s['threads']}; {SINGLE} is "
            "one rank",
            time_line,
        ]

    def expected_s(self, runs: Sequence[Run]) -> float:
        """Seconds of all runs, by a few micro-batches on this process's CPU."""
        import torch

        from fastpar.models.gpt import GPT

        s = self.comparison.settings
        before = torch.get_num_threads()
        torch.set_num_threads(s["threads"])
        model, rows = GPT(self.shape), max(1, s["batch_size"] // s["nproc"])
        x, y = sample_batch(
            self.data.train, seed=0, first_sample=0, n_samples=rows, block_size=s["block_size"]
        )
        model(x, y).backward()
        start = time.perf_counter()
        for _ in range(_PROBE_STEPS):
            model(x, y).backward()
        sequence_s = (time.perf_counter() - start) / _PROBE_STEPS / rows
        torch.set_num_threads(before)
        step_s = sequence_s * STEP_OVER_GRADIENTS * s["batch_size"]
        return sum(START_S + self.steps * step_s / run.ranks for run in runs)


def compare(command: CompareCommand) -> int:
    """Measures, and writes the folder; the exit status: 1 where a strategy failed.

    Raises:
        ValueError: settings that do not fit together, the machine or the folder.
    """
    check(command)
    schedule = Schedule.of(command)
    folder = make_next_free(Path(RUNS) / "compare") if command.out is None else Path(command.out)
    folder.mkdir(parents=True, exist_ok=True)
    comparison, runs = schedule.comparison, schedule.runs()
    print(*schedule.lines(runs), f"results  {folder}", sep="\n", flush=True)
    progress = Progress(schedule.steps * len(runs))
    stopped = False
    try:
        for n, run in enumerate(runs):
            _measure_one(schedule, run, f"run {n + 1}/{len(runs)}", n * schedule.steps, progress)
            comparison.complete = n + 1 == len(runs)
            comparison.save(folder / RESULTS)
    except KeyboardInterrupt:
        stopped = True
    finally:
        progress.close()
    if comparison.names:
        write_report(comparison, folder)
    print("", *summary(comparison), "", folder / TABLE, sep="\n", flush=True)
    return 130 if stopped else int(bool(comparison.failed))


def _measure_one(
    schedule: Schedule, run: Run, where: str, first_step: int, progress: Progress
) -> None:
    """One run, whose failure ends no other."""
    comparison = schedule.comparison
    where += f" {run.strategy}"
    where += f", micro-batches of {run.micro_batch_size}" if run.yardstick else ""

    def on_step(step: int, loss: float, seconds: float) -> None:
        speed = comparison.tokens_per_step / seconds
        progress.update(first_step + step, f"{where}  loss {loss:.3f}  {speed:,.0f} tokens/s")

    try:
        measure(schedule.spec(run), on_step)
    except RankFailed as error:
        run.error = f"rank {error.rank}: {error.reason}" if run.ranks > 1 else error.reason
    comparison.runs.append(run)
    if run.error is not None:
        progress.say(f"{where}: failed: {run.error}")
    else:
        progress.say(
            f"{where}: {comparison.tokens_per_s(run):,.0f} tokens/s, last loss "
            f"{run.losses[-1]:.4f}, {run.seconds:.0f} s"
        )


def write_report(comparison: Comparison, folder: Path) -> None:
    """Table and pictures from the results; without matplotlib a line and no pictures."""
    try:
        draw_all(comparison, folder)
    except ImportError as error:
        print(f"no pictures: {error}", flush=True)
    (folder / TABLE).write_text(markdown(comparison))
