"""One run of `fastpar compare`: each of its ranks, in a process of its own, trains and measures."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fastpar.comm import ranks
from fastpar.comm.host import memory_mb
from fastpar.comm.recorder import WireMeter
from fastpar.data.batches import TextData, load_data, sample_batch
from fastpar.doctor.clocks import synchronize
from fastpar.kernels import keep_freed_memory
from fastpar.models.gpt import GPT
from fastpar.observe.results import Run
from fastpar.observe.strategies import (
    STRATEGIES,
    Batch,
    Contender,
    Settings,
    build,
    import_deepspeed,
)
from fastpar.optim.schedule import cosine_lr
from fastpar.predict.step_memory import StepMemory
from fastpar.settings.config import GPTConfig
from fastpar.settings.parallel import Parallel

SILENCE_S = 300.0  # without a step: then a run is stopped
EPS = 1e-8  # as `fastpar train` has it
MAX_GRAD_NORM = 1.0
QUIET_STEPS = 20  # without communication, after the run

StepListener = Callable[[int, float, float], None]  # step, loss of rank 0, seconds


@dataclass(frozen=True)
class Spec:
    """What the ranks of a run train.

    settings: of the Comparison. run: as it was planned; nothing in it is measured yet.
    data, tokenizer: as `fastpar train` takes them; the text's path is in no file of results.
    """

    settings: dict[str, Any]
    run: Run
    data: str
    tokenizer: str

    @property
    def steps(self) -> int:
        return self.settings["epochs"] * self.settings["epoch_steps"]

    @property
    def warmup_steps(self) -> int:
        """A tenth of the run, but at least 20 or half of it: full speed after two steps made the
        norm of the gradient 50 and raised the loss."""
        return min(max(self.steps // 10, 20), self.steps // 2, 1000)

    @property
    def accumulate(self) -> Literal["shard", "full"]:
        """When gradients are reduced; chosen as `fastpar train` does."""
        return "shard" if self.run.strategy.endswith(("zero2", "zero3")) else "full"


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
        on_step: is called after each step with its number, its loss on this rank and its seconds.
    """

    def __init__(self, spec: Spec, on_step: StepListener) -> None:
        self.spec, self.on_step = spec, on_step
        self.settings, self.measured = spec.settings, copy.deepcopy(spec.run)
        self.device: str = self.settings["device"]
        self.untimed: int = self.settings["untimed_steps"]
        self.strategy = STRATEGIES[spec.run.strategy]
        self.ours = self.strategy.package == "fastpar"
        self.meter = WireMeter()
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data: TextData = load_data(
            spec.data, spec.tokenizer, block_size=self.settings["block_size"], progress=False
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
        forget_peak()
        self.before_mb = memory_mb()[0]
        # From here on, with nothing alive: DDP's buckets belong to C++, where Python sees none.
        self.measuring = ExitStack()  # to the end of the counted step
        self.memory = self.measuring.enter_context(
            StepMemory(torch.device(self.device), alive_bytes=0)
        )
        shape = self.settings["shape"] | (self.settings["experts"] if self.strategy.sparse else {})
        self.contender: Contender = build(
            spec.run.strategy,
            lambda: GPT(GPTConfig(**shape), seed=self.settings["seed"]),
            Settings(
                optimizer=self.settings["optimizer"],
                lr=self.settings["lr"],
                muon_lr=self.settings["muon_lr"],
                eps=EPS,
                device=self.device,
                max_grad_norm=MAX_GRAD_NORM,
                exact_norm=spec.run.exact_norm,
                parallel=Parallel(
                    grad_accum_steps=spec.run.grad_accum_steps, accumulate=spec.accumulate
                ),
            ),
        )

    def run(self) -> Run:
        """All steps, then what can only be measured after them."""
        exposed: list[float] = []
        with self.measuring, self.meter.of_fastpar() if self._within else nullcontext():
            for step in range(self.spec.steps):
                waited, sent = self.meter.waited_s, self.meter.sent_bytes
                counts = step == max(0, self.untimed - 1)
                with self._counting() if counts else nullcontext():
                    self._step(step)
                if counts:
                    forget_peak()  # of what counting itself took
                report = self.contender.report()
                if self._within:
                    self.measured.wire_bytes = self.meter.sent_bytes - sent
                    exposed += [1e3 * (self.meter.waited_s - waited)] * (self.device == "cpu")
                elif self.ours and "wire_bytes" in report:
                    self.measured.wire_bytes = int(report["wire_bytes"])
                    exposed += [report["exposed_ms"]] if "exposed_ms" in report else []
                elif counts:
                    self.measured.wire_bytes = self.meter.sent_bytes
        self.measured.rss_bytes = [round(1e6 * (memory_mb()[1] - self.before_mb))]
        if self.ours:
            timed = exposed[self.untimed :]
            self.measured.exposed_ms = statistics.median(timed) if timed else None
        else:
            self.measured.exposed_ms = self._exposed_ms()
        return self.measured

    @property
    def _within(self) -> bool:
        """Whether ranks have one model together: then the engine does not see all that is sent."""
        return self.strategy.model_ranks(self.world_size) > 1 or self.strategy.mesh.ep != 1

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Memory of one step, and torch's collectives; fastpar's engine reports what it sent."""
        theirs = not self.ours and not self.strategy.one_rank
        self.memory.begin_step()
        with self.meter.of_torch(self.world_size) if theirs else nullcontext():
            yield
        self.measuring.close()
        self.measured.step_bytes = [self.memory.peak_bytes]

    def _step(self, step: int) -> None:
        """One step, timed to its end on the device."""
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
        self.measured.step_s.append(seconds)
        self.measured.losses.append(values[0])
        self.measured.grad_norms.append(values[1])
        self.on_step(step + 1, values[0], seconds)

    def _train_step(self, step: int) -> torch.Tensor:
        lr = cosine_lr(
            step,
            lr=self.settings["lr"],
            min_lr=self.settings["lr"] / 10,
            warmup_steps=self.spec.warmup_steps,
            max_steps=self.spec.steps,
        )
        return self.contender.train_step([self._batch(step, j) for j in self._numbers()], lr)

    def _numbers(self) -> list[int]:
        """This rank's micro-batches of a step; [Note: who takes which samples] in trainer.py."""
        made, accum = self.contender, self.spec.run.grad_accum_steps
        if self.spec.accumulate == "full":
            return [made.dp_rank * accum + j for j in range(accum)]
        return [j * made.dp_size + made.dp_rank for j in range(accum)]

    def _batch(self, step: int, number: int) -> Batch:
        rows = self.spec.run.micro_batch_size
        x, y = sample_batch(
            self.data.train,
            seed=self.settings["seed"],
            first_sample=step * self.settings["batch_size"] + number * rows,
            n_samples=rows,
            block_size=self.settings["block_size"],
            device=self.device,
        )
        return x, y, None  # no dropout: its masks depend on how a step is split

    def _exposed_ms(self) -> float | None:
        """A step less one that does all but communicate, in these processes; None: not known."""
        if self.strategy.one_rank:
            return 0.0
        quiet = self.contender.quiet
        timed = self.measured.step_s[self.untimed :]
        if quiet is None or not timed:
            return None
        alone = []
        dist.barrier()
        with quiet():
            for step in range(min(QUIET_STEPS, self.spec.steps)):
                start = time.perf_counter()
                self._train_step(step).item()
                synchronize(self.device)
                alone.append(time.perf_counter() - start)
        return 1e3 * max(0.0, statistics.median(timed) - statistics.median(alone))


def measure(spec: Spec, on_step: StepListener) -> None:
    """Trains spec.run in fresh processes and fills it in.

    Raises:
        RankFailed: a rank failed or finished no step for SILENCE_S.
    """
    run, start = spec.run, time.monotonic()
    device = spec.settings["device"]
    with ranks.Ranks(run.ranks, threads=run.threads, device=device, quiet=True) as pool:
        run.merge(pool.call(_train, spec, timeout_s=SILENCE_S, heard=lambda said: on_step(*said)))
    run.seconds = round(time.monotonic() - start, 3)


def _train(process: ranks.Rank, spec: Spec) -> Run:
    """The run as this rank has measured it; rank 0 tells of each step."""
    warnings.simplefilter("ignore")  # of torch and DeepSpeed, about their own calls

    def say(*step: float) -> None:
        if process.rank == 0:
            process.say(step)

    rank = Rank(spec, say)
    found = rank.run()
    rank.contender.close()
    return found
