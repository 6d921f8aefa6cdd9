"""What a run tells: metrics.jsonl, TensorBoard, W&B, loss.png, MFU."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import IO, Any

from fastpar.files.packages import import_package
from fastpar.files.plain_files import write_text
from fastpar.files.progress import smoothed


def mfu(device_name: str, tokens_per_s: float, flops_per_token: float) -> float | None:
    """Model FLOPs utilization of one GPU at bf16 or fp16, 0 to 1; None for a GPU not in the table.

    Args:
        device_name: as torch.cuda.get_device_name gives it.
        tokens_per_s: of this GPU alone.
        flops_per_token: forward and backward, without recomputation.
    """
    from fastpar.predict.devices import device_of  # needed on GPUs alone

    device = device_of(device_name)
    if device is None or device.kind != "cuda":
        return None
    return tokens_per_s * flops_per_token / device.peak_flops


def check_log(log: str) -> None:
    """Raises ImportError where what --log asks for is not installed."""
    if log in ("tensorboard", "wandb"):
        import_package(log, "train", f" for --log {log}", ", or leave --log out")


class _TensorBoard:
    """Curves of the numbers of each row."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; each start of a run of ours is one, all of one group.

    Without a key it is kept in the folder, which wandb sync sends later: nothing asks for one.
    """

    def __init__(self, folder: Path, step: int, settings: dict[str, Any]) -> None:
        wandb = import_package("wandb", "train")
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.api.api_key:
            mode = "offline"
            print(f"wandb: no key, so curves stay on this machine; wandb sync {folder}/wandb/*")
        # A step cannot be written twice there: steps that come again are another run's.
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fastpar"), dir=str(folder), mode=mode,
            group=folder.name, name=f"{folder.name}, from step {max(step, 0)}", config=settings,
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


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
        self._board: _TensorBoard | _Wandb | None = None
        if log == "tensorboard":
            self._board = _TensorBoard(self.path.parent, resume_step)
        elif log == "wandb":
            self._board = _Wandb(self.path.parent, resume_step, settings or {})

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row that has "step"; a value that is not finite is written as null."""
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            numbers = {key: v for key, v in row.items() if isinstance(v, (int, float))}
            del numbers["step"]
            self._board.write(row["step"], numbers)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


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
        bold = smoothed(losses, 1 - 1 / window)
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
