"""One rank of one run of `fastpar compare`: python -m fastpar.compare.worker FOLDER.

FOLDER/spec.json says what to train; what was measured goes to FOLDER/rank<N>.json. Rank 0 prints a
line of JSON after each step. A failure is a traceback whose last line says why.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastpar.comm.wire_meter import WireMeter
from fastpar.compare.strategies import (
    STRATEGIES,
    Batch,
    Contender,
    Settings,
    build,
    import_deepspeed,
)
from fastpar.config.config import GPTConfig
from fastpar.cost.step_memory import StepMemory
from fastpar.data.batches import TextData, load_data, sample_batch
from fastpar.kernels import keep_freed_memory
from fastpar.measure.clocks import synchronize
from fastpar.models.gpt import GPT
from fastpar.optim.schedule import cosine_lr
from fastpar.train.launch import follow_launcher, launched_here
from fastpar.train.metrics import memory_mb

SPEC = "spec.json"
EPS = 1e-8  # as `fastpar train` has it
MAX_GRAD_NORM = 1.0
QUIET_STEPS = 20  # without communication, after the run


@dataclass(frozen=True)
class Spec:
    """What the ranks of a run train.

    untimed_steps: see comparison.py; bytes, of memory and on the wire, are counted in the last of
        them, or in the only step.
    """

    strategy: str
    shape: dict[str, Any]
    data: str
    tokenizer: str
    batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    steps: int
    untimed_steps: int
    lr: float
    seed: int
    device: str
    threads: int
    exact_norm: bool = False

    @property
    def warmup_steps(self) -> int:
        """A tenth of the run, but at least 20 or half of it: full speed after two steps made the
        norm of the gradient 50 and raised the loss."""
        return min(max(self.steps // 10, 20), self.steps // 2, 1000)

    @property
    def accumulate(self) -> str:
        """As `fastpar train` chooses it."""
        return "shard" if self.strategy.endswith(("zero2", "zero3")) else "full"


@dataclass
class Measured:
    """Of one rank; see comparison.Run."""

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_bytes: int | None = None
    rss_bytes: int = 0
    wire_bytes: int | None = None
    exposed_ms: float | None = None


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank's Measured goes."""
    return folder / f"rank{rank}.json"


def forget_peak() -> None:
    """Freed memory goes back to the system, and the peak of this process starts anew."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Rank:
    """A rank of a run: its contender, and what is measured of it.

    Args:
        say: gets the number of each finished step, its loss on this rank and its seconds.
    """

    def __init__(self, spec: Spec, say: Callable[[int, float, float], None]) -> None:
        self.spec, self.say = spec, say
        self.strategy = STRATEGIES[spec.strategy]
        self.ours = self.strategy.package == "fastpar"
        self.measured = Measured()
        self.meter = WireMeter()
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data: TextData = load_data(
            spec.data, spec.tokenizer, block_size=spec.shape["block_size"], progress=False
        )
        if spec.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        else:
            keep_freed_memory()  # under every strategy, as under `fastpar train`
        if not self.strategy.one_rank and (self.world_size > 1 or not self.ours):
            dist.init_process_group("nccl" if spec.device == "cuda" else "gloo")
        if self.strategy.package == "deepspeed":
            import_deepspeed(spec.device)
        self.strategy.import_all()
        forget_peak()
        self.before_mb = memory_mb()[0]
        # From here on, with nothing alive: DDP's buckets belong to C++, where Python sees none.
        self.measuring = ExitStack()  # to the end of the counted step
        self.memory = self.measuring.enter_context(
            StepMemory(torch.device(spec.device), alive_bytes=0)
        )
        self.contender: Contender = build(
            spec.strategy,
            lambda: GPT(GPTConfig(**spec.shape), seed=spec.seed),
            Settings(
                lr=spec.lr,
                eps=EPS,
                device=spec.device,
                max_grad_norm=MAX_GRAD_NORM,
                exact_norm=spec.exact_norm,
                grad_accum_steps=spec.grad_accum_steps,
                fastpar={"accumulate": spec.accumulate},
            ),
        )

    def run(self) -> Measured:
        """All steps, then what can only be measured after them."""
        spec, exposed = self.spec, []
        with self.measuring, ExitStack() as stack:
            if self.strategy.tp > 1:
                stack.enter_context(self.meter.of_fastpar())
            for step in range(spec.steps):
                waited, sent = self.meter.waited_s, self.meter.sent_bytes
                counts = step == max(0, spec.untimed_steps - 1)
                with self._counting() if counts else nullcontext():
                    self._step(step)
                if counts:
                    forget_peak()  # of what counting itself took
                said = self.contender.report()
                if self.strategy.tp > 1:
                    self.measured.wire_bytes = self.meter.sent_bytes - sent
                    if spec.device == "cpu":
                        exposed.append(1e3 * (self.meter.waited_s - waited))
                elif self.ours and "wire_bytes" in said:
                    self.measured.wire_bytes = int(said["wire_bytes"])
                    exposed += [said["exposed_ms"]] if "exposed_ms" in said else []
                elif counts:
                    self.measured.wire_bytes = self.meter.sent_bytes
        self.measured.rss_bytes = round(1e6 * (memory_mb()[1] - self.before_mb))
        if self.ours:
            timed = exposed[spec.untimed_steps :]
            self.measured.exposed_ms = statistics.median(timed) if timed else None
        else:
            self.measured.exposed_ms = self._exposed_ms()
        return self.measured

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Memory of one step, and torch's collectives; fastpar's engine says what it sent."""
        theirs = not self.ours and not self.strategy.one_rank
        self.memory.begin_step()
        with self.meter.of_torch(self.world_size) if theirs else nullcontext():
            yield
        self.measuring.close()
        self.measured.step_bytes = self.memory.peak_bytes

    def _step(self, step: int) -> None:
        """One step, timed to its end on the device."""
        start = time.perf_counter()
        loss = self._train_step(step)
        norm = self.contender.grad_norm
        values = loss.item(), math.nan if norm is None else float(norm)
        synchronize(self.spec.device)
        seconds = time.perf_counter() - start
        if not math.isfinite(values[0]):
            raise RuntimeError(
                f"compare: expected a finite loss, got loss={values[0]} in step {step + 1}; "
                "lower --lr"
            )
        self.measured.step_s.append(seconds)
        self.measured.losses.append(values[0])
        self.measured.grad_norms.append(values[1])
        self.say(step + 1, values[0], seconds)

    def _train_step(self, step: int) -> torch.Tensor:
        spec = self.spec
        lr = cosine_lr(
            step,
            lr=spec.lr,
            min_lr=spec.lr / 10,
            warmup_steps=spec.warmup_steps,
            max_steps=spec.steps,
        )
        return self.contender.train_step([self._batch(step, j) for j in self._numbers()], lr)

    def _numbers(self) -> list[int]:
        """Of this rank's micro-batches in a step: [Note: who takes which samples] in train.py."""
        made, accum = self.contender, self.spec.grad_accum_steps
        if self.spec.accumulate == "full":
            return [made.dp_rank * accum + j for j in range(accum)]
        return [j * made.dp_size + made.dp_rank for j in range(accum)]

    def _batch(self, step: int, number: int) -> Batch:
        spec, rows = self.spec, self.spec.micro_batch_size
        x, y = sample_batch(
            self.data.train,
            seed=spec.seed,
            first_sample=step * spec.batch_size + number * rows,
            n_samples=rows,
            block_size=spec.shape["block_size"],
            device=spec.device,
        )
        return x, y, None  # no dropout: its masks depend on how a step is split

    def _exposed_ms(self) -> float | None:
        """A step less one that does all but communicate, in these processes; None: not known."""
        if self.strategy.one_rank:
            return 0.0
        quiet = self.contender.quiet()
        timed = self.measured.step_s[self.spec.untimed_steps :]
        if quiet is None or not timed:
            return None
        alone = []
        dist.barrier()
        with quiet:
            for step in range(min(QUIET_STEPS, self.spec.steps)):
                start = time.perf_counter()
                self._train_step(step).item()
                synchronize(self.spec.device)
                alone.append(time.perf_counter() - start)
        return 1e3 * max(0.0, statistics.median(timed) - statistics.median(alone))


def main(folder: Path) -> None:
    """The rank that torchrun's environment names."""
    if launched_here():
        follow_launcher()
    warnings.simplefilter("ignore")  # of torch and DeepSpeed, about their own calls
    rank = int(os.environ.get("RANK", "0"))
    spec = Spec(**json.loads((folder / SPEC).read_text()))
    torch.set_num_threads(spec.threads)

    def say(step: int, loss: float, seconds: float) -> None:
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss, "seconds": seconds}), flush=True)

    made = Rank(spec, say)
    path = result_path(folder, rank)
    path.write_text(json.dumps(asdict(made.run())))
    made.contender.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
