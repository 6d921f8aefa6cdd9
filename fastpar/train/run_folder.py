"""The folder of a run, which rank 0 alone writes: settings, metrics, picture, samples.

config.json      settings (fastpar train --resume reads them), model, and each start
metrics.jsonl    one object a step or validation        loss.png   drawn from it
checkpoints/     see saver.py                           latest     link to the newest
tensorboard/     the same numbers, where tensorboard is installed; wandb/ with --log wandb
samples.txt      text drawn from the model              run.lock   see runs.py
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastpar._version import __version__
from fastpar.axes.pipeline.simulator import Costs, time_of
from fastpar.data.batches import TextData
from fastpar.data.tokenizer import IdTokenizer
from fastpar.files.plain_files import write_text
from fastpar.files.progress import duration
from fastpar.files.runs import (
    LATEST,
    RUNS,
    check_free,
    hold,
    list_checkpoints,
    make_next_free,
    newest_run,
)
from fastpar.models.gpt import GPT
from fastpar.settings.block import part_flops
from fastpar.settings.config import GPTConfig, TrainConfig
from fastpar.settings.mesh import parse_grid
from fastpar.train.metrics import MetricsLog, check_log, plot_loss, read_metrics
from fastpar.train.sample import sample

RULE = "=" * 60
_EXAMPLE_TOKENS = 400
TIME_IS_UP = -1  # why a run stopped early, beside the numbers of signals
_WORDS = ("bible", "stdlib", "bytes", "chars", "gpt2", "bpe", "auto")  # no paths
FILES = ("config.json", "metrics.jsonl", "checkpoints", "samples.txt", "loss.png", "latest")


def check_out(config: TrainConfig) -> None:
    """Raises ValueError if --out and --resume do not fit what is on disk, see check_log, too."""
    check_log(config.run.log)
    out, resume = config.run.out, config.run.resume
    if resume and out is None:
        newest = newest_run()
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
    saved = bool(list_checkpoints(out))
    if resume and not saved and not config.run.auto_resume:
        check_free(out)
        hint = "start it again" if never_began(out) else "start one in another folder"
        raise ValueError(
            f"train: expected a run with a checkpoint to go on from, got out={out} without one; "
            f"leave out --resume to {hint}"
        )
    if present and not resume:
        check_free(out)
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
            wanted = Path(RUNS) / (config.run.name or name)
            self.path = make_next_free(wanted)
            if self.path != wanted:
                note = f" ({wanted} is taken)"
        if not hold(self.path):
            note += "; nobody else may write it: this file system has no locks"
        fresh = step == 0 and not config.run.resume
        if fresh and config.run.out is not None:
            check_out(config)  # another run may have had it meanwhile
        changes = self._write_config(model, step, facts)
        self.log = MetricsLog(
            self.path / "metrics.jsonl",
            resume_step=-1 if fresh else step,
            log=config.run.log,
            settings=config.settings(),
        )
        self.notes: tuple[str, ...] = ()
        self.tell: Callable[..., None] = print
        shape, rows = model.config, config.text.batch_size
        tp, cp, pp, ep = (facts[axis] for axis in ("tp", "cp", "pp", "ep"))
        tokens, axes = rows * facts["block_size"], ""
        dp = f"ranks {facts['world_size']}"
        grid = parse_grid(facts["tp_grid"])
        if grid is not None:
            dp = f"dp {facts['world_size'] // math.prod(grid)}"
            axes = f"{dp} * grid {facts['tp_grid']} (samples by rows, features by columns), "
        elif tp * cp * pp > 1:
            dp = f"dp {facts['world_size'] // (tp * cp * pp)}"
            keys = " by keys" if facts["cp_method"] == "keys" else ""
            kind = "sequence parallel" if facts["sequence_parallel"] else "no sequence parallelism"
            axes = f"{dp}{f' * tp {tp} ({kind})' * (tp > 1)}{f' * cp {cp}{keys}' * (cp > 1)}"
            axes += f"{f' * pp {pp}' * (pp > 1)}, "
        n, every = facts["replicas"], config.optim.outer_every
        if every is not None:
            axes = f"replicas {n}, which meet every {every} steps, of {axes}"
        axes += f"experts over {ep} of dp, " * (ep > 1)
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
            f"ranks    {axes}stage {facts['zero_stage']}, shards {facts['n_shards']}, transport "
            f"{facts['transport']}, accumulate {facts['accumulate']}; {facts['storage']}",
            f"run      {self.path}{note}, steps {step} to {config.run.max_steps}",
            *([_pipeline(facts, shape)] if pp > 1 else []),
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
        lines = [*self.notes, f"{step} steps, {duration(seconds)}; see {picture}"]
        if val_loss is not None:
            lines[-1] = f"validation loss {val_loss:.4f} after {lines[-1]}"
            if data.val_bytes:  # a unit that does not depend on the tokenizer
                bits = val_loss * len(data.val) / data.val_bytes / math.log(2)
                lines.append(f"bits per byte of text {bits:.3f}")
        if stopped_by == TIME_IS_UP:
            lines.append(f"the time was up; {go_on}")
        reader = "fastpar alone" if model.config.n_expert else "transformers"
        lines.append(f"weights, as {reader} reads them: {self.path / LATEST}")
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


def _pipeline(facts: dict[str, Any], shape: GPTConfig) -> str:
    """The line on a pipeline's stages, with the part of the time in which a rank waits."""
    split, m = facts["pp_split"], facts["grad_accum_steps"]
    name, pp = facts["schedule"], facts["pp"]
    ends = [0, *itertools.accumulate([split[0] + 1, *split[1:-1], split[-1] + 1])]
    flops = [sum(part_flops(shape)[a:b]) for a, b in itertools.pairwise(ends)]
    makespan, _ = time_of(name, pp, m, len(split) // pp, Costs(flops, flops, flops), 0.0)
    bubble = 1 - 3 * m * sum(flops) / (pp * makespan)
    return (
        f"stages   {' + '.join(map(str, split))} layers, {name} over {m} micro-batches: "
        f"ranks wait for {bubble:.0%} of a step, by the floating-point operations of stages"
    )
