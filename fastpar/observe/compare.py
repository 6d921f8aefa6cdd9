"""`fastpar compare`: trains the same GPT-2 on the same text with several strategies, in rotation.

Every run starts fresh processes. Repeats rotate the order of strategies, so that a machine that
warms up or gets busy affects all alike. The results are written after every run, so that finished
runs survive whatever ends the command.

[Note: one rank's share] Every strategy trains the same sequences in a step. A rank computes its
share in as few micro-batches as `fastpar train` would. `single` is one rank on one device (on a
CPU: one rank's threads), and computes all sequences in micro-batches of one rank's share.
"""

from __future__ import annotations

import difflib
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fastpar.comm import ranks
from fastpar.comm.ranks import threads_per_rank
from fastpar.comm.recorder import WireMeter
from fastpar.data.batches import TextData, load_data, n_samples_per_epoch, sample_batch
from fastpar.doctor.trial import synchronize
from fastpar.files.runs import RUNS, Progress, is_taken, make_next_free
from fastpar.kernels import keep_freed_memory
from fastpar.models.gpt import GPT
from fastpar.observe.pictures import draw_all
from fastpar.observe.report import TABLE, markdown, summary
from fastpar.observe.results import RESULTS, Comparison, Run
from fastpar.observe.strategies import SINGLE, STRATEGIES, Batch, Settings, build, import_deepspeed
from fastpar.optim.schedule import cosine_lr
from fastpar.predict.machine import about_machine
from fastpar.predict.measure import StepMemory
from fastpar.settings.config import AUTO_MICRO_BATCH_TOKENS, derive_batch, usual_warmup
from fastpar.settings.files import check_at_least, option
from fastpar.settings.model import GPTConfig, count_parameters
from fastpar.settings.options import ModelSize, TextSettings
from fastpar.settings.parallel import Parallel

DEFAULT = (  # equivalent strategies in a row: torch's, then fastpar's
    *(SINGLE, "ddp", "dp", "zero1", "fsdp2-no-reshard", "zero2", "fsdp2", "zero3"),
    *("tp", "tp-zero1", "tp-zero2", "tp-zero3", "cp", "cp-keys", "pp", "dp-pp"),
    *("deepspeed1", "deepspeed2", "deepspeed3"),
)
EXPERTS_LINE = "experts  {n_expert} per layer, {expert_hidden} wide, top {top_k}"
UNTIMED_STEPS = 3
_COPIED = ("nproc", "optimizer", "lr", "muon_lr", "seed")  # settings of the command
LENGTHS = {"epochs": (3, 2), "epoch_steps": (80, 12), "repeats": (3, 1)}  # in full, and quick
SILENCE_S = 300.0  # a run is stopped after this time without a step
EPS = 1e-8  # as in `fastpar train`
MAX_GRAD_NORM = 1.0
QUIET_STEPS = 20  # without communication, after the run

StepListener = Callable[[int, float, float], None]  # step, loss of rank 0, seconds


@dataclass(frozen=True)
class CompareCommand:
    """Train the same GPT-2 with several parallel strategies and measure which is best."""

    strategies: str | None = None
    """Comma-separated names: single, ddp, ddp-zero, fsdp2, fsdp2-no-reshard, dp, zero1, zero2,
    zero3, zero2-int8, diloco (exchange every 20 steps), hsdp, tp, tp-zero1, tp-zero2, tp-zero3, cp,
    cp-keys, pp (a stage per rank), dp-pp (two stages), deepspeed1, deepspeed2, deepspeed3, experts
    (instead of MLPs, as many FLOPs per token), ep (experts split over ranks); unset: all that run
    here except ddp-zero, zero2-int8, diloco, hsdp, experts and ep."""
    n_expert: int = 8
    """For experts and ep: experts per layer."""
    expert_top_k: int = 2
    """Experts per token; each is 4 * n_embd / expert_top_k wide."""
    nproc: int = 2
    """Ranks of every strategy except single, which has one."""
    epochs: int | None = None
    """Epochs per run; unset: 3, quick 2."""
    epoch_steps: int | None = None
    """Steps per epoch; 0: one pass over the text; unset: 80, quick 12."""
    repeats: int | None = None
    """Runs per strategy; unset: 3, quick 1."""
    quick: bool = False
    """Fewer steps and one run each: under two minutes on two cores."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: fastpar.Muon for the blocks' matrices, also in single and ddp; not for fsdp2, ddp-zero
    and deepspeed."""
    lr: float = 2.5e-3
    """Peak learning rate, after a warm-up and before a cosine decay."""
    muon_lr: float = 0.02
    """Peak learning rate of muon's matrices."""
    seed: int = 1
    """Seed of weights and batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if available. Each rank needs its own GPU."""
    threads: int | None = None
    """CPU threads per rank, also of single; unset: cores / nproc."""
    out: str | None = None
    """Folder for the results; unset: the first unused of runs/compare, runs/compare-2, ..."""
    shape: ModelSize = field(default_factory=lambda: ModelSize(model="micro"))
    text: TextSettings = field(default_factory=TextSettings)


def chosen(command: CompareCommand) -> list[str]:
    """The requested strategies, without duplicates.

    Raises:
        ValueError: an unknown name.
    """
    if command.strategies is None:
        return list(DEFAULT)
    names = [name.strip() for name in command.strategies.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES:
            near = difflib.get_close_matches(name, STRATEGIES, n=1)
            raise ValueError(
                f"compare: expected strategies among {', '.join(STRATEGIES)}, got strategy={name}; "
                f"{f'did you mean {near[0]}?' if near else 'choose from these'}"
            )
    if not names:
        raise ValueError(
            f"compare: expected comma-separated names, got strategies={command.strategies!r}; drop "
            "--strategies to run all"
        )
    return list(dict.fromkeys(names))


def check(command: CompareCommand) -> None:
    """Refuses bad settings before torch is imported.

    Raises:
        ValueError: names the setting.
    """
    chosen(command)
    lowest = dict.fromkeys(("nproc", "batch_size", "epochs", "repeats", "threads"), 1)
    check_at_least("compare", {**vars(command), **vars(command.text)}, lowest | {"epoch_steps": 0})
    for name, value in (("lr", command.lr), ("muon_lr", command.muon_lr)):
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
    if command.out is not None and is_taken(Path(command.out)):
        raise ValueError(
            f"compare: expected a new or an empty folder, got out={command.out}; choose another "
            "--out (a comparison cannot be resumed)"
        )


def why_not(name: str, command: CompareCommand, shape: GPTConfig, gpus: int | None) -> str | None:
    """Why a strategy cannot run with these settings; None: it can.

    Args:
        gpus: number of GPUs here; None: ranks run on the CPU.
    """
    strategy, mesh, nproc = STRATEGIES[name], STRATEGIES[name].mesh, command.nproc
    heads = max(mesh.tp, 1 if name == "cp-keys" else mesh.cp)
    n_ranks, stages = 1 if strategy.one_rank else nproc, mesh.pp or nproc
    has_heads = shape.splits_by(mesh.tp) and shape.n_head >= heads
    uneven = shape.block_size % mesh.tp
    shares, gpus = mesh.ep != 1, nproc if gpus is None or command.device == "cpu" else gpus
    needs = (
        (not has_heads, f"{heads} heads or more", shape.n_head),
        (uneven, f"a context that is a multiple of {mesh.tp}", shape.block_size),
        (shape.n_layer < stages, f"{stages} layers or more", shape.n_layer),
        (shares and command.n_expert % nproc, f"a multiple of {nproc} experts", command.n_expert),
        (gpus < n_ranks, f"a GPU for each of {n_ranks} ranks", gpus),
    )
    missing = (f"needs {what}, got {got}" for lacks, what, got in needs if lacks)
    return strategy.why_not(nproc, command.optimizer) or next(missing, None)


def experts_of(command: CompareCommand, shape: GPTConfig) -> dict[str, int]:
    """Fields of GPTConfig for experts that take as many FLOPs per token as the dense model.

    Raises:
        ValueError: top_k does not divide the width of an MLP, or is above n_expert.
    """
    top_k = command.expert_top_k
    if top_k < 1 or 4 * shape.n_embd % top_k:
        raise ValueError(
            f"compare: expected expert_top_k to divide the MLP's width of {4 * shape.n_embd}, "
            f"got expert_top_k={top_k}; set --expert-top-k"
        )
    experts: dict[str, Any] = {"n_expert": command.n_expert, "top_k": top_k}
    experts["expert_hidden"] = 4 * shape.n_embd // top_k
    replace(shape, **experts)
    return experts


@dataclass
class Schedule:
    """A comparison before its first run."""

    text: TextSettings
    shape: GPTConfig
    data: TextData
    comparison: Comparison

    @classmethod
    def of(cls, command: CompareCommand) -> Schedule:
        """Reads the text and decides which runs to make.

        Raises:
            ValueError: unknown model or text; no GPU; no strategy can run.
        """
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
        lengths = {name: usual[command.quick] for name, usual in LENGTHS.items()}
        lengths |= {name: n for name in LENGTHS if (n := getattr(command, name)) is not None}
        if lengths["epoch_steps"] == 0:
            windows = n_samples_per_epoch(data.train, shape.block_size)
            lengths["epoch_steps"] = max(1, windows // command.text.batch_size)
        settings = {
            "strategies": names,
            **{name: getattr(command, name) for name in _COPIED},
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
        """All runs, in rotation: each repeat starts with another strategy; yardsticks last."""
        settings = self.comparison.settings
        names, repeats = settings["strategies"], settings["repeats"]
        runs = []
        for repeat in range(repeats):
            first = repeat * len(names) // repeats
            runs += [self._run(name, repeat + 1) for name in names[first:] + names[:first]]
        return runs + self._yardsticks()

    def _run(self, name: str, repeat: int) -> Run:
        """A run of a strategy; its micro-batches: [Note: one rank's share]."""
        settings, strategy = self.comparison.settings, STRATEGIES[name]
        rows, nproc = settings["batch_size"], settings["nproc"]
        dp = nproc // strategy.model_ranks(nproc)
        micro, accum = derive_batch(rows, self.shape.block_size, dp, pp=strategy.mesh.pp or nproc)
        if strategy.one_rank:
            return Run(name, repeat, 1, settings["threads"], micro, rows // micro)
        return Run(name, repeat, nproc, settings["threads"], micro, accum)

    def _yardsticks(self) -> list[Run]:
        """`single` with the smallest and largest other micro-batch; the latter with exact norm."""
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

    def lines(self, runs: Sequence[Run]) -> list[str]:
        """What is about to run, for the terminal."""
        s = self.comparison.settings
        n_orders = sum(run.yardstick for run in runs)
        more = f", {n_orders} of them {SINGLE} with sums in another order" * (n_orders > 0)
        return [
            f"compare  {', '.join(s['strategies'])}",
            *(f"skipped  {name}: {why}" for name, why in self.comparison.skipped.items()),
            f"model    {s['model']}, {s['parameters']:,} parameters, fp32, no dropout",
            *(EXPERTS_LINE.format(**experts) for experts in [s["experts"]] if experts),
            f"data     {self.data.describe()}",
            *["optim    fastpar.Muon, repeated by ddp's ranks"] * (s["optimizer"] == "muon"),
            f"steps    {s['batch_size']} sequences of {s['block_size']} tokens; {s['epochs']} "
            f"epochs of {s['epoch_steps']} steps, {s['repeats']} runs per strategy",
            f"ranks    {s['nproc']} on {s['device']}, {s['threads']} threads each; {SINGLE} is "
            "one rank",
            f"time     {len(runs)} runs of {self.steps} steps{more}",
        ]


class Rank:
    """A rank of a run: its contender, and what is measured of it.

    Args:
        settings: of the Comparison.
        run: as planned; it is filled in.
        text: as `fastpar train` takes it; its path is in no file of results.
        on_step: called after each step with its number, its loss on this rank and its seconds.
    """

    def __init__(
        self, settings: dict[str, Any], run: Run, text: TextSettings, on_step: StepListener
    ) -> None:
        self.settings, self.run, self.on_step = settings, run, on_step
        self.steps: int = settings["epochs"] * settings["epoch_steps"]
        self.untimed: int = settings["untimed_steps"]
        self.device: str = settings["device"]
        self.strategy, self.meter = STRATEGIES[run.strategy], WireMeter()
        self.ours = self.strategy.package == "fastpar"
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        # Whether several ranks share a model: then the engine does not see all that is sent.
        self.within = self.strategy.model_ranks(self.world_size) > 1 or self.strategy.mesh.ep != 1
        self.data: TextData = load_data(
            text.data, text.tokenizer, block_size=settings["block_size"], progress=False
        )
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        else:
            keep_freed_memory()  # under every strategy, as under `fastpar train`
        if not self.strategy.one_rank and (self.world_size > 1 or not self.ours):
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
        if self.strategy.package == "deepspeed":
            import_deepspeed(self.device)
        self.strategy.import_all()
        # Memory is measured from here, with nothing alive: DDP's buckets are invisible to Python.
        self.measuring = ExitStack()  # to the end of the counted step
        memory = StepMemory(torch.device(self.device), alive_bytes=0)
        self.memory = self.measuring.enter_context(memory)
        shape = GPTConfig(
            **settings["shape"] | (settings["experts"] if self.strategy.sparse else {})
        )
        parallel = Parallel(grad_accum_steps=run.grad_accum_steps, accumulate=self.accumulate)
        own = Settings(
            **{name: settings[name] for name in ("optimizer", "lr", "muon_lr", "device")},
            eps=EPS,
            max_grad_norm=MAX_GRAD_NORM,
            exact_norm=run.exact_norm,
            parallel=parallel,
        )
        self.contender = build(run.strategy, lambda: GPT(shape, seed=settings["seed"]), own)

    @property
    def accumulate(self) -> Literal["shard", "full"]:
        """When gradients are reduced; chosen as in `fastpar train`."""
        return "shard" if self.run.strategy.endswith(("zero2", "zero3")) else "full"

    def train(self) -> Run:
        """Runs all steps, then what can only be measured after them."""
        run, exposed, counted = self.run, [], max(0, self.untimed - 1)
        theirs = not (self.ours or self.strategy.one_rank)
        with self.measuring, self.meter.of_fastpar() if self.within else nullcontext():
            for step in range(self.steps):
                waited, sent = self.meter.waited_s, self.meter.sent_bytes
                if step == counted:
                    self.memory.begin_step()
                of_torch = theirs and step == counted
                with self.meter.of_torch(self.world_size) if of_torch else nullcontext():
                    self._step(step)
                if step == counted:
                    self.measuring.close()
                    run.step_bytes = [self.memory.peak_bytes]
                report = self.contender.report()
                if self.within:
                    run.wire_bytes = self.meter.sent_bytes - sent
                    exposed += [1e3 * (self.meter.waited_s - waited)] * (self.device == "cpu")
                else:  # torch's collectives of one step; fastpar's engine reports what it sent
                    run.wire_bytes = int(report.get("wire_bytes", self.meter.sent_bytes))
                    exposed += [ms for name, ms in report.items() if name == "exposed_ms"]
        if self.ours:
            timed = exposed[self.untimed :]
            run.exposed_ms = statistics.median(timed) if timed else None
        else:
            run.exposed_ms = self._exposed_ms()
        return run

    def _step(self, step: int) -> None:
        """Runs one step, timed to its end on the device."""
        start = time.perf_counter()
        loss = self._train_step(step)
        norm = self.contender.grad_norm
        values = loss.item(), math.nan if norm is None else float(norm)
        synchronize(self.device)
        seconds = time.perf_counter() - start
        if not math.isfinite(values[0]):
            raise RuntimeError(
                f"compare: expected a finite loss, got loss={values[0]} in step {step + 1}; "
                "lower --lr"
            )
        self.run.step_s.append(seconds)
        self.run.losses.append(values[0])
        self.run.grad_norms.append(values[1])
        self.on_step(step + 1, values[0], seconds)

    def _train_step(self, step: int) -> torch.Tensor:
        lr, warmup = self.settings["lr"], usual_warmup(self.steps)
        lr = cosine_lr(step, lr=lr, min_lr=lr / 10, warmup_steps=warmup, max_steps=self.steps)
        return self.contender.train_step([self._batch(step, j) for j in self._numbers()], lr)

    def _numbers(self) -> list[int]:
        """This rank's micro-batches of a step; [Note: sample order] in trainer.py."""
        made, accum = self.contender, self.run.grad_accum_steps
        if self.accumulate == "full":
            return [made.dp_rank * accum + j for j in range(accum)]
        return [j * made.dp_size + made.dp_rank for j in range(accum)]

    def _batch(self, step: int, number: int) -> Batch:
        rows = self.run.micro_batch_size
        return sample_batch(
            self.data.train,
            seed=self.settings["seed"],
            first_sample=step * self.settings["batch_size"] + number * rows,
            n_samples=rows,
            block_size=self.settings["block_size"],
            device=self.device,
        )

    def _exposed_ms(self) -> float | None:
        """A step minus one without communication, in these processes; None: not known."""
        if self.strategy.one_rank:
            return 0.0
        quiet, timed, alone = self.contender.quiet, self.run.step_s[self.untimed :], []
        if quiet is None or not timed:
            return None
        dist.barrier()
        with quiet():
            for step in range(min(QUIET_STEPS, self.steps)):
                start = time.perf_counter()
                self._train_step(step).item()
                synchronize(self.device)
                alone.append(time.perf_counter() - start)
        return 1e3 * max(0.0, statistics.median(timed) - statistics.median(alone))


def measure(settings: dict[str, Any], run: Run, text: TextSettings, on_step: StepListener) -> None:
    """Trains a run in fresh processes and fills it in.

    Raises:
        RankFailed: a rank failed or finished no step for SILENCE_S.
    """
    start, how = time.monotonic(), {"threads": run.threads, "device": settings["device"]}
    with ranks.Ranks(run.ranks, **how, quiet=True) as pool:
        heard = {"timeout_s": SILENCE_S, "on_value": lambda said: on_step(*said)}
        run.merge(pool.call(_train, settings, run, text, **heard))
    run.seconds = round(time.monotonic() - start, 3)


def _train(process: ranks.Rank, settings: dict[str, Any], run: Run, text: TextSettings) -> Run:
    """The run as this rank measured it; rank 0 reports each step."""
    warnings.simplefilter("ignore")  # of torch and DeepSpeed, about their own calls
    say = process.say if process.rank == 0 else lambda said: None
    rank = Rank(settings, run, text, lambda *step: say(step))
    measured = rank.train()
    rank.contender.close()
    return measured


def compare(command: CompareCommand) -> int:
    """Measures and writes the folder; returns the exit status: 1 if a strategy failed.

    Raises:
        ValueError: contradictory settings, or an unsuitable machine or folder.
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
    """One run; its failure does not end the others."""
    comparison = schedule.comparison
    where += f" {run.strategy}" + f", micro-batches of {run.micro_batch_size}" * run.yardstick

    def on_step(step: int, loss: float, seconds: float) -> None:
        speed = comparison.tokens_per_step / seconds
        progress.update(first_step + step, f"{where}  loss {loss:.3f}  {speed:,.0f} tokens/s")

    try:
        measure(comparison.settings, run, schedule.text, on_step)
    except ranks.RankFailed as error:
        run.error = f"rank {error.rank}: {error.reason}" if run.ranks > 1 else error.reason
    comparison.runs.append(run)
    said = f"failed: {run.error}"
    if run.error is None:
        speed = f"{comparison.tokens_per_s(run):,.0f} tokens/s"
        said = f"{speed}, last loss {run.losses[-1]:.4f}, {run.seconds:.0f} s"
    progress.say(f"{where}: {said}")


def write_report(comparison: Comparison, folder: Path) -> None:
    """Writes table and pictures from the results; without matplotlib prints a line instead."""
    try:
        draw_all(comparison, folder)
    except ImportError as error:
        print(f"no pictures: {error}", flush=True)
    (folder / TABLE).write_text(markdown(comparison))
