"""What a run tells, by rank 0: its folder; a row of metrics.jsonl and a word a step.

config.json      settings (fastpar train --resume reads them), model, and each start
metrics.jsonl    one object a step or validation        loss.png   drawn from it
checkpoints/     see saver.py                           latest     link to the newest
tensorboard/     the same numbers, where tensorboard is installed; wandb/ with --logger wandb
samples.txt      text drawn from the model              run.lock   see runs.py

The other ranks have a journal too, which keeps silent, so that the loop is the same on every rank.
Of several replicas the first one tells how it goes, the others only, by name, what is unusual.

[Note: the two lines at the end] compare what a step took with what predict/run.py says.
Memory is measured in one early step, of every rank, by StepMemory, which slows that step and no
other; the fullest rank counts. The step's time is the median of all but the first ones, on the rank
where it is longest, as the engine's reports have it: from the first forward to the end of the
update. The figures stand in metrics.jsonl, as the row that has "prediction". The lines come only
where `fastpar plan --measure` has measured such ranks: by data sheets a step is a guess.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastpar._version import __version__
from fastpar.axes import every
from fastpar.axes.step import Setup
from fastpar.comm.host import memory_mb
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import TextData
from fastpar.data.tokenizer import IdTokenizer
from fastpar.engine.control import gather_numbers
from fastpar.engine.engine import Engine
from fastpar.files import runs
from fastpar.files.packages import import_package
from fastpar.files.plain_files import write_text
from fastpar.models.gpt import GPT
from fastpar.predict.memory import StepMemory, held_bytes
from fastpar.predict.run import lines_of, predict
from fastpar.settings.config import TrainConfig
from fastpar.settings.mesh import ranks_of_batch
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import MeshSettings
from fastpar.train.sample import sample


def mfu(device_name: str, tokens_per_s: float, flops_per_token: float) -> float | None:
    """Model FLOPs utilization of one GPU at bf16 or fp16, 0 to 1; None for a GPU not in the table.

    Args:
        device_name: as torch.cuda.get_device_name gives it.
        tokens_per_s: of this GPU alone.
        flops_per_token: forward and backward, without recomputation.
    """
    from fastpar.predict.machine import device_of  # needed on GPUs alone

    device = device_of(device_name)
    if device is None or device.kind != "cuda":
        return None
    return tokens_per_s * flops_per_token / device.peak_flops


def check_log(log: str) -> None:
    """Raises ImportError where what --logger asks for is not installed."""
    if log in ("tensorboard", "wandb"):
        import_package(log, "train", f" for --logger {log}", ", or leave --logger out")


# What writes the numbers of a step elsewhere, too, and what ends that.
Board = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


def _tensorboard(folder: Path, step: int, settings: dict[str, Any]) -> Board:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(folder: Path, step: int, settings: dict[str, Any]) -> Board:
    """A run of Weights & Biases; each start of a run of ours is one, all of one group.

    Without a key it is kept in the folder, which wandb sync sends later: nothing asks for one.
    """
    wandb = import_package("wandb", "train")
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.api.api_key:
        mode = "offline"
        print(f"wandb: no key, so curves stay on this machine; wandb sync {folder}/wandb/*")
    # A step cannot be written twice there: steps that come again are another run's.
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "fastpar"), dir=str(folder), mode=mode,
        group=folder.name, name=f"{folder.name}, from step {max(step, 0)}", config=settings,
        settings=wandb.Settings(console="off", silent=True),
    )  # fmt: skip
    return (lambda step, numbers: run.log(numbers, step=step)), run.finish


_BOARDS: dict[str, Callable[[Path, int, dict[str, Any]], Board]] = {
    "none": lambda *_: (lambda *_: None, lambda: None),
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


class MetricsLog:
    """metrics.jsonl: one object a training step or validation; curves elsewhere, too.

    Args:
        path: of metrics.jsonl; created where it is missing.
        resume_step: rows of later steps, written after the checkpoint that the run goes on from,
            are dropped: those steps come again.
        log: none; tensorboard or wandb, in the same folder; auto: tensorboard where installed.
        settings: of the run, shown beside its curves.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume_step: int = 0,
        log: str = "none",
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        if log == "auto":
            log = "none" if importlib.util.find_spec("tensorboard") is None else "tensorboard"
        kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        self._board, self._end = _BOARDS[log](self.path.parent, resume_step, settings or {})

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row that has "step"; a value that is not finite is written as null."""
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        numbers = {key: v for key, v in row.items() if isinstance(v, (int, float))}
        del numbers["step"]
        self._board(row["step"], numbers)

    def close(self) -> None:
        self._file.close()
        self._end()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a crash cut off is left out."""
    path = Path(path)
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def plot_loss(rows: list[dict[str, Any]], path: str | Path, *, title: str) -> None:
    """Draws training loss (each step faint, smoothed bold) and validation loss against steps.

    Raises:
        ImportError: matplotlib is not installed.
    """
    make_figure = import_package("matplotlib.figure", "plot_loss").Figure
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    val = [(r["step"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    figure = make_figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    if train:
        steps, losses = zip(*train)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
        window = min(20.0, max(1.0, len(losses) / 30))  # longer lags behind in a short run
        bold = runs.smoothed(losses, 1 - 1 / window)
        axes.plot(steps, bold, color="tab:blue", linewidth=2, label="train (smoothed)")
    if val:
        steps, losses = zip(*val)
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            textcoords="offset points",
            xytext=(0, -15),
            ha="center",
            color="tab:orange",
        )
    axes.margins(y=0.1)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    figure.savefig(str(path))


RULE = "=" * 60
_EXAMPLE_TOKENS = 400
TIME_IS_UP = -1  # why a run stopped early, beside the numbers of signals
_WORDS = ("bible", "stdlib", "bytes", "chars", "gpt2", "bpe", "auto")  # no paths
FILES = ("config.json", "metrics.jsonl", "checkpoints", "samples.txt", "loss.png", "latest")


def check_out(config: TrainConfig) -> None:
    """Raises ValueError if --out and --resume do not fit what is on disk, see check_log, too."""
    check_log(config.run.logger)
    out, resume = config.run.out, config.run.resume
    if resume and out is None:
        newest = runs.newest_run()
        raise ValueError(
            "train: expected --out with --resume, got out=None; name the folder of the run, as "
            f"{newest or 'runs/NAME'}"
        )
    if out is None:
        return
    present = [name for name in FILES if os.path.lexists(Path(out) / name)]
    if resume and "config.json" not in present:
        raise ValueError(
            f"train: expected a folder with a run to go on with, got out={out}; leave out --resume "
            "to start one there"
        )
    saved = bool(runs.list_checkpoints(out))
    if resume and not saved and not config.run.auto_resume:
        runs.check_free(out)
        hint = "start it again" if never_began(out) else "start one in another folder"
        raise ValueError(
            f"train: expected a run with a checkpoint to go on from, got out={out} without one; "
            f"leave out --resume to {hint}"
        )
    if present and not resume:
        runs.check_free(out)
        if never_began(out):
            return
        hint = "add --resume to go on with it, or choose another folder"
        if not saved:
            hint = "there is no checkpoint to go on from: choose another folder"
        elif config.run.auto_resume:  # it was free when the settings were read
            hint = "another start has just made it: give the same command again"
        raise ValueError(
            f"train: expected an --out without a run, got out={out} with {present[0]}; {hint}"
        )


def never_began(run: str | Path) -> bool:
    """Whether a folder has of a run only what its start writes: it failed in its first step."""
    run = Path(run)
    if any(os.path.lexists(run / name) for name in ("samples.txt", "loss.png", "latest")):
        return False
    checkpoints = run / "checkpoints"
    try:
        if os.path.lexists(checkpoints) and any(checkpoints.iterdir()):
            return False
        content = json.loads((run / "config.json").read_text(encoding="utf-8"))
        ours = {"settings", "model", "starts"} == set(content)
        return ours and not any(row["step"] > 0 for row in read_metrics(run / "metrics.jsonl"))
    except (OSError, ValueError, TypeError, KeyError):  # nothing of ours
        return False


class RunFolder:
    """Makes the folder, or opens that of a run to go on with.

    Args:
        config: of the run; --out names the folder, otherwise the first free one of runs/NAME,
            runs/NAME-2, ... is made.
        step: steps done; metrics of later ones are dropped, they come again.
        facts: what was chosen for this start: Setup.in_effect(); device, threads, block_size,
            n_shards, storage; graphs, with cuda_graphs.
    Attributes:
        path: of the folder.
        header: lines that say what runs where, every automatic choice among them.
        log: writes metrics.jsonl.
        notes: lines that finish() tells with its own.
        tell: print, or what prints nothing.
    """

    def __init__(
        self, config: TrainConfig, *, model: GPT, data: TextData, step: int, facts: dict[str, Any]
    ) -> None:
        self.config, self.data = config, data
        size, note = Path(config.shape.init_from or config.shape.model).name, ""
        if config.run.out is not None:
            self.path = Path(config.run.out)
            self.path.mkdir(parents=True, exist_ok=True)
        else:
            name = re.sub(r"[^\w.+-]+", "-", f"{size}-{Path(data.name).stem}").strip("-.")
            wanted = Path(runs.RUNS) / (config.run.name or name)
            self.path = runs.make_next_free(wanted)
            if self.path != wanted:
                note = f" ({wanted} is taken)"
        if not runs.hold(self.path):
            note += "; nobody else may write it: this file system has no locks"
        fresh = step == 0 and not config.run.resume
        if fresh and config.run.out is not None:
            check_out(config)  # another run may have had it meanwhile
        changes = self._write_config(model, step, facts)
        self.log = MetricsLog(
            self.path / "metrics.jsonl",
            resume_step=-1 if fresh else step,
            log=config.run.logger,
            settings=config.settings(),
        )
        self.notes: tuple[str, ...] = ()
        self.tell: Callable[..., None] = print
        shape, rows = model.config, config.text.batch_size
        tokens, known = rows * facts["block_size"], {**config.settings(), **facts}
        sizes = MeshSettings(**{name: known[name] for name in ("tp", "tp_grid", "cp", "pp")})
        together = math.prod(ranks_of_batch(sizes).values())
        dp = f"{'dp' if together > 1 else 'ranks'} {facts['world_size'] // together}"
        told = [tuple(axis.header(known, shape)) for axis in every()]
        split = [words[0] for words in told if words]
        ranks = ", ".join([dp] * (together > 1) + split) + ", " * bool(split)
        n, tp, cp = facts["replicas"], facts["tp"], facts["cp"]
        sparse = f"{shape.n_expert} experts (top {shape.top_k}) in {shape.expert_layers} layers, "
        parts = 1 if facts["cp_method"] == "keys" else cp  # that attend different heads
        heads, padded = shape.n_head, tp * parts * -(-shape.heads_of_rank(tp) // parts)
        by = " and ".join(["tp"] * (tp > 1) + ["cp"] * (parts > 1))
        padding = f" (padded to {padded} by {by})" if padded > heads else ""
        self.header = (
            f"fastpar  {__version__}, torch {torch.__version__}, {facts['device']}, "
            f"ranks {facts['world_size']}, threads a rank {facts['threads']}, {facts['dtype']}",
            f"model    {size}: {shape.n_layer} layers, {heads} heads{padding}, "
            f"{shape.n_embd} wide, {sparse * bool(shape.n_expert)}context {facts['block_size']}, "
            f"dropout {shape.dropout}, "
            f"{model.num_parameters():,} parameters",
            f"text     {data.describe()}",
            f"batch    {tokens:,} tokens a step: {rows} sequences = {f'replicas {n} * ' * (n > 1)}"
            f"{dp} * micro-batch "
            f"{facts['micro_batch_size']} * accumulation {facts['grad_accum_steps']}",
            f"ranks    {ranks}stage {facts['zero_stage']}, shards {facts['n_shards']}, transport "
            f"{facts['transport']}, accumulate {facts['accumulate']}; {facts['storage']}",
            f"run      {self.path}{note}, steps {step} to {config.run.max_steps}",
            *(line for words in told for line in words[1:]),
            *([f"graphs   {facts['graphs']}"] if "graphs" in facts else []),
            *(f"changed  {change}" for change in changes),
        )

    def finish(
        self, model: GPT, step: int, *, seconds: float, val_loss: float | None, stopped_by: int
    ) -> None:
        """The picture, a sample unless a signal stopped the run, and what to type next.

        All is saved: what goes wrong with these is told, and ends no run.

        Args:
            stopped_by: a signal, TIME_IS_UP or 0.
        """
        data, config, tell = self.data, self.config, self.tell
        picture = self.path / "loss.png"
        with self._telling("loss.png"):
            self.log.close()
            plot_loss(read_metrics(self.path / "metrics.jsonl"), picture, title=self.path.name)
        go_on = f"go on: fastpar train --resume --out {self.path}"
        if stopped_by > 0:
            name = signal.Signals(stopped_by).name
            tell("".join(f"{line}\n" for line in self.notes), end="")
            tell(f"stopped by {name} after step {step}, saved in {self.path}\n{go_on}", flush=True)
            return
        tell(RULE)
        with (
            self._telling("samples"),
            (self.path / "samples.txt").open("a", encoding="utf-8") as file,
        ):
            file.write(f"== step {step}\n")
            for piece in sample(model, data.tokenizer, config.sample, seed=config.run.seed):
                tell(piece, end="", flush=True)
                file.write(piece)
        tell(RULE)
        lines = [*self.notes, f"{step} steps, {runs.duration(seconds)}; see {picture}"]
        if val_loss is not None:
            lines[-1] = f"validation loss {val_loss:.4f} after {lines[-1]}"
            if data.val_bytes:  # a unit that does not depend on the tokenizer
                bits = val_loss * len(data.val) / data.val_bytes / math.log(2)
                lines.append(f"bits per byte of text {bits:.3f}")
        if stopped_by == TIME_IS_UP:
            lines.append(f"the time was up; {go_on}")
        reader = "fastpar alone" if model.config.n_expert else "transformers"
        lines.append(f"weights, as {reader} reads them: {self.path / runs.LATEST}")
        if (self.path / "tensorboard").is_dir():
            folder = shlex.quote(str(self.path / "tensorboard"))
            lines.append(f"curves: tensorboard --logdir {folder}")
        shipped = config.text.data == "bible"
        prompt = "In the beginning" if shipped else example_prompt(data)
        lines.append(
            f"next: fastpar sample {shlex.quote(str(self.path))}"
            + (f" --prompt {shlex.quote(prompt)}" if prompt else "")
        )
        tell("\n".join(lines), flush=True)

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tell(f"no {what}: {error}")

    def _write_config(self, model: GPT, step: int, facts: dict[str, Any]) -> list[str]:
        """Writes config.json; what of an earlier one it changes, a setting an entry."""
        file = self.path / "config.json"
        settings = self.config.settings()
        settings |= {"resume": False, "auto_resume": False, "out": str(self.path)}
        for name in ("data", "tokenizer", "init_from"):  # it may go on from another folder
            value = settings[name]
            if value and value not in _WORDS and os.path.exists(value):
                settings[name] = os.path.abspath(value)
        old: dict[str, Any] = {"settings": settings, "starts": []}
        if file.exists() and (step or self.config.run.resume):
            old = json.loads(file.read_text(encoding="utf-8"))
        # As JSON has them: a tuple comes back as a list.
        before, now = (json.loads(json.dumps(each)) for each in (old["settings"], settings))
        versions = {
            "fastpar": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        start = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "step": step, **facts, **versions}
        content = {
            "settings": settings,
            "model": asdict(model.config),
            "starts": [*old["starts"], start],
        }
        write_text(file, json.dumps(content, indent=1) + "\n")
        return [f"{k} {before.get(k)} -> {now[k]}" for k in now if now[k] != before.get(k)]


def example_prompt(data: TextData) -> str:
    """The first words of a line of the text held out; empty where it has none to type."""
    if isinstance(data.tokenizer, IdTokenizer):
        return ""
    text = data.tokenizer.decode(np.asarray(data.val[:_EXAMPLE_TOKENS]).tolist())
    for line in text.split("\n")[1:-1] or [text]:  # the first and last may be cut
        prompt = " ".join(line.split()[:4])[:40]
        if prompt.isprintable() and "\ufffd" not in prompt and any(map(str.isalpha, prompt)):
            return prompt
    return ""


T = TypeVar("T")

MEMORY_STEP = 2  # the first one makes the optimizer's state
SKIPPED = 3  # steps whose time does not count: first ones, and that in which memory is measured
MOST = 1000  # times that are kept, the newest


@dataclass
class Step:
    """What is known of a step once its numbers have arrived."""

    step: int
    lr: float
    tokens: int
    values: Tensor  # fp64 on the host: loss, grad_norm, then what the loop asked of all ranks
    ready: torch.cuda.Event | None
    scale: float | None
    of_experts: int = 0  # the last so many of the values

    def numbers(self) -> list[float]:
        """The values without those of experts; waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values[: len(self.values) - self.of_experts].tolist()

    def experts(self) -> Tensor:
        """What experts counted, after numbers()."""
        return self.values[len(self.values) - self.of_experts :]


class Journal:
    """Rank 0's folder and progress bar, and the clock of the run, which starts here.

    Attributes:
        folder: on rank 0, once it is open.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.began = self._clock = time.monotonic()
        self.folder: RunFolder | None = None
        self._progress = runs.Progress(config.run.max_steps, enabled=False)
        self._facts: dict[str, Any] = {}
        self._step = 0  # the last that was written
        self._full = False  # the disk
        self._told_host = False  # how fast it steps
        self._rate = 0.0  # tokens/s, smoothed
        self._flops_per_token = 0.0

    def open(self, *, model: GPT, data: TextData, step: int, facts: dict[str, Any]) -> None:
        """Make the folder, or open that of the run to go on with; says what runs where.

        Args:
            step: steps done before.
            facts: see RunFolder.
        """
        if not self.mesh.is_main:
            return
        self._facts, self._flops_per_token = facts, model.flops_per_token()
        first = self.mesh.replica == 0
        self._progress = runs.Progress(
            self.config.run.max_steps, step, bar=None if first else False
        )
        self.folder = RunFolder(self.config, model=model, data=data, step=step, facts=facts)
        if not first:
            self.folder.tell = lambda *text, **how: None
        for line in self.folder.header if first else ():
            self.say(line)

    @property
    def path(self) -> Path | None:
        """The run's folder, on rank 0 once it is open."""
        return None if self.folder is None else self.folder.path

    @property
    def seconds(self) -> float:
        """Since the start of this process' run."""
        return time.monotonic() - self.began

    def start_clock(self) -> None:
        """What was done since the last step does not count as time of the next one."""
        self._clock = time.monotonic()

    def say(self, text: str) -> None:
        """A line of its own on the terminal."""
        number = self.mesh.replica
        self._progress.say(f"replica {number}  {text}" if number else text)

    def note(self, step: int, text: str, **row: Any) -> None:
        """Something happened after a step: a line, and a row of metrics.jsonl."""
        self._write({"step": step, **row, "time_s": self.seconds})
        if self.mesh.replica == 0 or not {"val_loss", "save_mb"} & row.keys():
            self.say(f"step {step}  {text}")

    def keep(self, **row: Any) -> None:
        """A row of metrics.jsonl about the run so far, under its last step."""
        self._write({"step": self._step, **row, "time_s": self.seconds})

    def write_step(
        self, done: Step, *, loss: float, norm: float, engine: Engine, **more: Any
    ) -> None:
        """A step is done; `more` are further columns of its row."""
        self._step = done.step
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        if self.folder is None:
            return
        tokens = self.config.text.batch_size * self._facts["block_size"]
        rate = tokens / max(seconds, 1e-9)
        self._rate = 0.9 * self._rate + 0.1 * rate if self._rate else rate
        rss, peak = memory_mb()
        row: dict[str, Any] = {
            "step": done.step,
            "loss": loss,
            "lr": done.lr,
            "grad_norm": norm,
            "tokens_per_s": rate,
            **_costs(engine),
            "tokens": done.tokens,
            "time_s": self.seconds,
            "rss_mb": rss,
            "peak_rss_mb": peak,
            **more,
        }
        text = f"loss {loss:.3f}, {self._rate:,.0f} tokens/s"
        if done.scale is not None:
            row["loss_scale"] = done.scale
        if self.mesh.device.type == "cuda":
            row["cuda_peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
            per_gpu = self._rate / self.mesh.world_size
            used = mfu(torch.cuda.get_device_name(), per_gpu, self._flops_per_token)
            if used is not None and self._facts["dtype"] != "fp32":
                row["mfu"] = used
                text += f", MFU {used:.0%}"
        self._write(row)
        if self.mesh.replica:
            return
        self._progress.update(done.step, text)
        if engine.shards.storage.steps_later and not self._told_host:
            self._told_host = True
            self.say(f"offload  {engine.shards.storage.describe()}")

    def _write(self, row: dict[str, Any]) -> None:
        """A full disk ends no run: it is said once, until there is room again."""
        if self.folder is None:
            return
        try:
            self.folder.log.write(row)
        except OSError as error:
            if not self._full:
                self.say(f"metrics.jsonl cannot be written ({error}); training goes on")
            self._full = True
        else:
            self._full = False

    def close(self) -> None:
        """The bar ends."""
        self._progress.close()


class Predictions:
    """On every rank: measures steps, and reports at the end; see the note above.

    Attributes:
        peak_bytes: of this rank, in the step that was watched; 0 before.
        times_ms: of this rank's steps.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.engine, self.optimizer, self.peak_bytes = engine, optimizer, 0
        self.times_ms: deque[float] = deque(maxlen=MOST)
        self._steps, self._last = 0, engine.report

    def watched(self, step: Callable[[], T]) -> T:
        """Runs the step; measures its time, and the memory of one."""
        self._steps += 1
        if self._steps == MEMORY_STEP:
            held = held_bytes(self.engine, self.optimizer)
            with StepMemory(self.engine.mesh.device, alive_bytes=held) as memory:
                found = step()
            self.peak_bytes = memory.peak_bytes
        else:
            found = step()
        report = self.engine.report  # on a GPU of an earlier step
        new = report is not self._last and self._steps > SKIPPED
        if new and report is not None and report.step_ms is not None:
            self.times_ms.append(report.step_ms)
        self._last = report
        return found

    def tell(self, journal: Journal, shape: GPTConfig, setup: Setup, facts: dict[str, Any]) -> None:
        """The two lines, for the end of the run, and the row. Ranks: all.

        Args:
            shape: of the model; setup, facts: see start.py.
        """
        if not self._steps:
            return
        mine = statistics.median(self.times_ms) if self.times_ms else 0.0
        peak, ms = (
            max(gather_numbers(self.engine, value)) for value in (float(self.peak_bytes), mine)
        )
        if journal.folder is None:
            return
        try:
            found = predict(shape, setup, facts)
        except Exception as error:
            # The run is done and saved: what is wrong with its prediction must not fail it.
            known = isinstance(error, ValueError)
            why = f", {error}" if known else f" ({type(error).__name__}: {error})"
            journal.folder.notes += (f"predicted: not available{why}",)
            return
        row = {**found, "measured_bytes": int(peak) or None, "measured_ms": ms or None}
        if found["measured_rates"]:
            journal.folder.notes += tuple(lines_of(row))
        journal.keep(prediction=row)


def _costs(engine: Engine) -> dict[str, float | None]:
    """Times of this rank in ms and MB that it sent, in the newest step that is known."""
    report = engine.report
    names = ["step_ms", "compute_ms", "comm_ms", "exposed_ms"]
    names += ["offload_ms"] * (engine.shards.storage.steps_later)
    costs = {name: None if report is None else getattr(report, name) for name in names}
    return {**costs, "wire_mb": None if report is None else report.wire_bytes / 1e6}


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The values on the host, to be read after the event."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
