"""The training loop of one rank: batches by global sample index, one control exchange a step.

[Note: who takes which samples] A step of W dp ranks with A micro-batches of b sequences uses the
global samples [n, n + A*W*b), n being how many were used before; micro-batch m of the step takes b
of them from n + m*b on, and its dropout key names the first. Micro-batch j of rank r is number
j*W + r where each is reduced when it is there (accumulate="shard"), r*A + j where a rank first adds
up its own ("full"). So the same samples are summed, with the same masks, however W * A is split,
and in deterministic mode they are added in the same tree: the same bits, at every stage. The ranks
that split one model have one dp rank, so they take the same samples. Replicas take turns: the first
has micro-batches 0 to A*W - 1 of the step, the second the next A*W.

[Note: control] A step has one small exchange, the engine's: the trainer adds its loss to it, and
what a rank requests: to stop, because of a signal or of rank 0's clock, or to save. Every rank
reads the same sums, so all stop after the same step; a rank that left by itself would leave the
others waiting in a collective.
On a GPU the numbers are read one step later, when they are there anyway: the host never waits for
the device. With a loss scale they are read at once, because the next step's scale depends on them.

[Note: the sample at the end] is rank 0's alone, which may have a part of the weights: there the
model of the last checkpoint draws.

[Note: everyone decides alike] Whether a step's loss and gradient are finite is judged by its agreed
numbers, the same bits on every rank: all ranks reach the same verdict without talking about it.

[Note: an update that is left out] has to be left out on the device: when the host learns that a
gradient was not finite, the step is over. The optimizer does so as soon as it has a loss scale, be
it 1. A loss that is not finite makes the gradients so (poison), which tells all ranks at once.

[Note: who settles] In the control exchange of every step each rank tells whether its part of the
last save failed, and whether it is still being written. All read the same sums, so all settle after
the same step, and mostly when there is nothing left to wait for; a save that is due before that
waits for the one before, or is left out (--save-overlap). A disk that is full ends no run: the save
is reported, and the next one tries again.

[Note: who forwards] At stage 3 a forward gathers weights, so all ranks forward together: a rank
whose share of the windows is used up goes through the model once more for nothing. Rows and depth
of a grid share out each batch, which is filled up with windows that do not count.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastpar._version import __version__
from fastpar.axes.pipeline import stage_layers
from fastpar.axes.step import Setup
from fastpar.checkpoint.manifest import STATE
from fastpar.checkpoint.restore import load_checkpoint, naming_damaged_file, read_run_state
from fastpar.checkpoint.saver import Result, Saver, try_folder
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import threads_per_rank
from fastpar.comm.recorder import BACKWARD, FORWARD, INPUT, OPTIMIZER
from fastpar.comm.watchdog import MARGIN_S, Watchdog, in_step
from fastpar.data.batches import eval_batches, sample_batch, to_device
from fastpar.data.sources import Tokens
from fastpar.doctor.doctor import prove_before_training
from fastpar.engine.control import broadcast_text, gather_numbers, prove_together
from fastpar.engine.engine import Engine, engine_of
from fastpar.engine.pipeline_step import pipeline_loss, pipeline_step
from fastpar.files.runs import checkpoint_folder, release
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import keep_freed_memory, make_key
from fastpar.models.gpt import GPT, numbers_of, report_of, restore_scales, saved_scales
from fastpar.models.hf import load_hf
from fastpar.models.set_up import set_up
from fastpar.optim.outer import Outer
from fastpar.optim.schedule import AveragedWeights, DynamicLossScale, forget_average, set_lr
from fastpar.predict.run import check_host_activations, check_ranks
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import parse_seconds
from fastpar.settings.mesh import axes_of
from fastpar.train import start
from fastpar.train.cuda_graphs import StepGraph, captured
from fastpar.train.journal import (
    TIME_IS_UP,
    Journal,
    Predictions,
    RunFolder,
    Step,
    check_out,
    to_host,
)
from fastpar.train.launch import SIGNALS, catching_save, catching_stop

STOPS = (*SIGNALS, TIME_IS_UP)  # reasons to stop early
IN_A_ROW = 10  # updates that may be left out
_LAST_WAIT_S = 3.0  # for a save when a run fails; below launch.GRACE_S
_POLL_S = 0.05


def train(config: TrainConfig, run: Callable[[Trainer], int] | None = None) -> int:
    """Trains as one rank of a run, to its end or until something stops it.

    Args:
        run: what to do with the trainer instead of Trainer.run.
    Returns:
        The exit status: 0, or 128 + signal after a stop by that signal.
    Ranks: all, with the same settings; under torchrun's environment the process group is made here.
    Raises:
        ValueError: settings that do not fit together, the text, the machine or the run on disk.
        RuntimeError: the loss is not finite; the last checkpoint could not be written; cuBLAS was
            used before a deterministic run.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        check_out(config)
    system, ranks_here = config.system, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads_per_rank(system.threads, ranks_here))
    if system.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "train: expected a GPU for device=cuda, got none that torch can use; use --device cpu"
        )
    if config.parallel.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # see _check_cublas
        # Read by oneDNN's first product. With AMX the bits of 16-bit products depend on threads.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    timeout_s = parse_seconds(config.faults.timeout)
    mesh = Mesh(
        **axes_of(config.mesh),
        device="cpu" if system.device == "cpu" else None,
        timeout_s=timeout_s + MARGIN_S,  # the watchdog speaks first: it knows more
    )
    rank = mesh.replica * mesh.world_size + mesh.rank
    watched = mesh.replicas * mesh.world_size if mesh.owns_process_group else 1
    try:
        with Watchdog(rank, watched, timeout_s=timeout_s, start=mesh.start):
            return _train(config, mesh, run or Trainer.run)
    finally:
        release()


def _check_cublas(device: torch.device) -> None:
    """cuBLAS reads its variable once, at the first product of a process."""
    x = torch.ones(1, 1, device=device, dtype=torch.float32)
    try:
        torch.mm(x, x)
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        raise RuntimeError(
            "train: a product ran on the GPU before --deterministic was asked for; start the "
            "process with CUBLAS_WORKSPACE_CONFIG=:4096:8"
        ) from error


def _train(config: TrainConfig, mesh: Mesh, run: Callable[[Trainer], int]) -> int:
    if mesh.device.type == "cpu":
        keep_freed_memory()
    else:
        torch.use_deterministic_algorithms(config.parallel.deterministic)
        # Otherwise torch writes nan into all new memory then; every op fills its results.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if config.parallel.deterministic:
            _check_cublas(mesh.device)
    settings = {k: v for k, v in config.settings().items() if k not in ("nproc", "threads")}
    versions = [f"fastpar {__version__}", f"torch {torch.__version__}"]
    mesh.check_same("train", [*versions, *(f"{name}={value}" for name, value in settings.items())])
    return run(Trainer(config, mesh))


class Trainer:
    """One rank of a run: all that its settings describe, and the loop. See the notes above."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.journal = Journal(config, mesh)
        checkpoint = start.checkpoint_of(config, mesh)
        state = read_run_state(checkpoint) if checkpoint is not None else None
        kind, name = mesh.device.type, start.pick_dtype(config, mesh, state)
        self.setup, dtype = Setup(mesh.world_size, config, kind, "shm", dtype=name), DTYPES[name]
        torch.manual_seed(config.run.seed)
        check = partial(check_ranks, setup=self.setup, device=mesh.device)
        model, self.block_size, self.data = start.load_model_and_data(
            config, state, progress=start.leads(mesh), check=check
        )
        mesh.check_same("train", [f"tokens of {config.text.data}: {start.digest(self.data)[:16]}"])
        self.ways = mesh.dp_size * mesh.replicas  # ranks that take different samples
        batch = config.batch(self.block_size, self.ways)
        self.micro_batch_size, self.grad_accum_steps = batch
        self.setup = self.setup.change(
            block_size=self.block_size, micro_batch_size=batch[0], grad_accum_steps=batch[1]
        )
        self.model = model.to(mesh.device, dtype)
        prove_together(mesh)
        prove_before_training(
            mesh.device.type,
            dtype,
            self.model.config,
            tp=mesh.size("tp"),
            rows=self.micro_batch_size * self.block_size,
            compiled=config.system.compile,
            fp8=config.system.fp8 != "none" and not config.system.fp8_emulate,
        )
        if config.recompute.offload_activations:
            check_host_activations(model.config, self.setup)
        self.optimizer = set_up(self.model, mesh, config, dtype=dtype, grad_accum_steps=batch[1])
        optim = config.optim
        if optim.outer_every is not None:
            Outer(  # the optimizer keeps it
                self.optimizer,
                every=optim.outer_every,
                lr=optim.outer_lr,
                momentum=optim.outer_momentum,
                wire=optim.outer_wire,
            )
        self.average = None if optim.ema is None else AveragedWeights(self.optimizer, optim.ema)
        self.engine = engine_of(self.model)
        self.setup = self.setup.change(
            transport=getattr(self.engine.control_group, "transport", "none"),
            zero_stage=self.engine.stage.number,
            accumulate=config.accumulate,
            pp_split=stage_layers(model.config, self.setup) if self.setup.pp > 1 else None,
        )
        self._facts = start.facts_of(self.setup, self.engine)
        self.loss_scale = DynamicLossScale() if dtype == torch.float16 else None
        self.predictions = Predictions(self.engine, self.optimizer)
        self.guards = Guards(config.faults.on_nonfinite, scaled=self.loss_scale is not None)
        self.forward: Any = torch.compile(self.model) if config.system.compile else self.model
        asked = config.system.cuda_graphs if config.runs_in_graphs() else False
        self.micro_batch, self.step_graph, graphs = captured(
            self._micro_batch, self.model, self.engine, self.optimizer, asked
        )
        if graphs:
            self._facts["graphs"] = graphs
        self.step = self.next_sample = self.tokens = 0
        self.samples = start.samples_of(config, self.data, self.block_size)
        self.changed = getattr(self.samples, "told", "")  # what config.json does not tell
        self.folder: Path | None = None  # of the run, once rank 0 has made it
        self.val: tuple[int, float] | None = None  # (step, loss) of the last validation
        if checkpoint is not None:
            self._load(checkpoint)
        self.saves = RunSaves(self.engine, self.journal, self.step if checkpoint else -1)
        self.pending: deque[Step] = deque()  # steps whose numbers have not been read
        self.keep_pending = int(mesh.device.type == "cuda" and self.loss_scale is None)
        self.stop_signals: list[int] = []

    def _load(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer)
        if self.average is None:
            forget_average(self.optimizer)
        if state["dtype"] != self.setup.dtype:
            self.changed += f"\nchanged  format of weights {state['dtype']} -> {self.setup.dtype}"
        start.check_samples(state, checkpoint, self.config, self.data)
        with naming_damaged_file(checkpoint / STATE):
            self.step = state["step"]
            self.next_sample, self.tokens = state["next_sample"], state["tokens"]
            set_rng_state(state["rng"])
            restore_scales(self.model, state)
            if self.loss_scale is not None and state["loss_scale"] is not None:
                self.loss_scale.load_state_dict(state["loss_scale"])
            if "guards" in state:  # earlier versions had none
                self.guards.skipped = int(state["guards"]["skipped"])

    def run(self) -> int:
        """Trains to the end or until something stops it; the exit status. Closes the mesh."""
        self._open()
        last = "this step" if self.mesh.replicas == 1 else "the steps until replicas meet"
        with (
            catching_stop(loud=start.leads(self.mesh), last=last) as self.stop_signals,
            catching_save() as self.saves.signals,
        ):
            try:
                stop = self._loop()
            except BaseException:
                self.saves.wait_briefly()
                raise
            if stop <= 0 and (self.val is None or self.val[0] != self.step):
                self.validate()
            self.saves.settle()
            if self.saves.committed != self.step:
                self.save()
                self.saves.settle()
            if self.saves.committed != self.step:
                older = f"--resume goes on from step {self.saves.committed}"
                if self.saves.committed < 0:
                    older = "there is none to go on from"
                raise RuntimeError(
                    f"train: expected a checkpoint of the last step, got none of step {self.step} "
                    f"({self.saves.why}); {older}"
                )
        self.predictions.tell(self.journal, self.model.config, self.setup, self._facts)
        self.journal.close()
        self.mesh.close()  # what follows is rank 0's alone
        if self.journal.folder is not None:
            self._finish(self.journal.folder, stop)
        return 128 + stop if stop > 0 else 0

    def _finish(self, folder: RunFolder, stop: int) -> None:
        """The end of the run, by rank 0; see [Note: the sample at the end]."""
        model: GPT = self.model
        if (self.engine.shares or model.cp is not None) and stop <= 0:
            model = load_hf(checkpoint_folder(folder.path, self.step))
        seconds, val_loss = self.journal.seconds, self.val[1] if self.val else None
        model = model.to(self.mesh.device)
        folder.finish(model, self.step, seconds=seconds, val_loss=val_loss, stopped_by=stop)

    def _open(self) -> None:
        """The first replica makes the run's folder, then the others theirs inside of it."""
        about: Any = {"data": self.data, "step": self.step, "facts": self._facts}
        mesh, first = self.mesh, self.mesh.replica == 0
        if first:
            self.journal.open(model=self.model, **about)
        if mesh.replicas > 1:
            config = start.in_own_folder(self.config, mesh, self.journal.path)
            self.config = self.journal.config = config
        if not first:
            self.journal.open(model=self.model, **about)
        if self.changed:
            self.journal.say(self.changed.strip())
        self.folder = Path(broadcast_text(self.engine, str(self.journal.path or "")))
        start.check_folder(self.folder, self.engine)
        saved = {"model": self.model, "optimizer": self.optimizer}
        self.saves.open(self.folder, self.config, tokenizer=self.data.tokenizer, **saved)

    def _loop(self) -> int:
        """Steps, validations and saves to the end, or to a reason to stop, which is returned."""
        config, run = self.config, self.config.run
        if self.step == 0 and run.eval_every:
            self.validate()
        self.journal.start_clock()
        begin = self.step
        stop = wish = 0  # a reason to stop, as asked of this replica and as granted
        while self.step < run.max_steps and not stop:
            self.pending.append(self.predictions.watched(self.train_step))
            step = self.step
            compares = is_due(config.faults.check_replicas_every, step)
            validates, saves = is_due(run.eval_every, step), is_due(run.save_every, step)
            last = step == run.max_steps or compares or validates or saves
            wish = self._read(0 if last else self.keep_pending) or wish
            if self.saves.asked:
                wish = self._read(0) or wish
            every, asked = config.optim.outer_every, self.saves.asked
            stop, save = start.granted(self.mesh, every, step, wish, asked)
            if compares:
                with self._on_all_ranks():
                    self.engine.check_replicas(self.optimizer, step=step)
            if validates:
                self.validate()
            if saves or save:
                self.save()
            if run.save_every and step == begin + 1:
                self.saves.prepare()
        return self._read(0) or stop

    def train_step(self) -> Step:
        """One optimizer step; returns without waiting for the device."""
        config, mesh, optimizer = self.config, self.mesh, self.optimizer
        graph, rows, seed = self.step_graph, self.micro_batch_size, config.run.seed
        scale = self.loss_scale.scale if self.loss_scale is not None else None
        skips = config.faults.on_nonfinite == "skip"
        in_step(self.step + 1)
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        whole: list[tuple[torch.Tensor, ...]] = []  # for what takes all at once
        for j in range(self.grad_accum_steps):
            first = self.next_sample + self._number(j) * rows
            self.engine.on_phase(INPUT)
            x, y, *documents = sample_batch(
                self.samples,
                seed=seed,
                first_sample=first,
                n_samples=rows,
                block_size=self.block_size,
                device=mesh.device,
            )
            key = to_device(make_key(seed, first), mesh.device)
            if self.engine.shards.stages is None and graph is None:
                loss += self.micro_batch(x, y, key, scale, *documents)
            else:
                whole.append((x, y, key, *documents))
        lr = set_lr(optimizer, self.step, config)
        if graph is not None and not self._takes(graph, whole, scale):
            graph = None
            for x, y, key in whole:
                loss += self.micro_batch(x, y, key, scale)
        elif whole and graph is None:
            loss += self._through_stages(whole, scale)
        if scale is not None or skips:
            optimizer.grad_scale = scale or 1.0  # see [Note: an update that is left out]
        requests = to_device(
            torch.tensor(self._requests(), dtype=torch.float64, device="cpu"), mesh.device
        )
        loss = loss / mesh.world_size if graph is None else graph.run()
        control: Any = torch.cat((loss.reshape(1), requests))
        if graph is None:
            self.engine.contribute(control)
            self.engine.on_phase(OPTIMIZER)
            optimizer.step()
            control = self.engine.control.contributed
        if self.average is not None:
            self.average.update(self.step)
        optimizer.zero_grad()
        self.step += 1
        self.next_sample += config.text.batch_size
        self.tokens += config.text.batch_size * self.block_size
        norm: Any = optimizer.grad_norm
        counts = numbers_of(self.model, control)
        values = to_host(torch.cat((control[:1], norm.double().reshape(1), control[1:], counts)))
        return Step(self.step, lr, self.tokens, *values, scale, counts.numel())

    def _takes(self, graph: StepGraph, batches: list[Any], scale: float | None) -> bool:
        """Whether it can run this step; where nobody asked for graphs the run goes on without."""
        if self.config.system.cuda_graphs:
            graph.fill(batches, scale)
            return True
        why = graph.why_not(batches, scale)
        if why:
            self.step_graph = None
            self.journal.say(f"graphs   none from step {self.step + 1} on: {why}")
        return not why

    def _micro_batch(
        self, x: torch.Tensor, y: torch.Tensor, key: torch.Tensor, scale: Any, *at: torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward; its part of the step's loss. In a CUDA graph scale is a tensor."""
        positions = dict(zip(("positions",), at))
        self.engine.on_phase(FORWARD)
        part = self.forward(x, y, rng_key=key, **positions) / self.grad_accum_steps
        self.engine.on_phase(BACKWARD)
        self._target(part, scale).backward()
        return part.detach()

    def _target(self, part: torch.Tensor, scale: float | None) -> torch.Tensor:
        """What is differentiated, of a micro-batch's part of the loss."""
        target = part if scale is None else part * scale
        return target * poison(part) if self.config.faults.on_nonfinite == "skip" else target

    def _through_stages(
        self, batches: list[tuple[torch.Tensor, ...]], scale: float | None
    ) -> torch.Tensor:
        """All micro-batches of a step through the stages of a pipeline; the step's loss."""
        x, y, keys, *documents = zip(*batches)
        return pipeline_step(
            self.model,
            torch.cat(x),
            torch.cat(y),
            micro_batches=len(batches),
            rng_keys=keys,
            target=partial(self._target, scale=scale),
            positions=torch.cat(documents[0]) if documents else None,
        )

    def _number(self, j: int) -> int:
        """Number in the step of this rank's micro-batch j: see [Note: who takes which samples]."""
        dp_size, dp_rank = self.mesh.dp_size, self.mesh.dp_rank
        first = self.mesh.replica * dp_size * self.grad_accum_steps
        if self.config.accumulate == "full":
            return first + dp_rank * self.grad_accum_steps + j
        return first + j * dp_size + dp_rank

    def validate(self) -> None:
        """Mean loss over the first eval_batches * batch_size windows of the validation tokens."""
        per_batch = self.ways * self.grad_accum_steps
        loss_now = partial(
            validation_loss,
            self.model,
            self.engine,
            self.data.val,
            rows=self.micro_batch_size,
            block_size=self.block_size,
            n_batches=self.config.run.eval_batches * per_batch,
        )
        loss = loss_now()
        self.val = (self.step, loss)
        text, more = f"validation loss {loss:.4f}", {"val_loss": loss}
        if self.average is not None and self.step:
            with self.average.in_the_model():
                more["ema_val_loss"] = loss_now()
            text += f", of the average {more['ema_val_loss']:.4f}"
        self.journal.note(self.step, text, **more)
        self.journal.start_clock()

    def save(self) -> None:
        """Begin a checkpoint of this step, on every rank."""
        settings = json.dumps(self.config.settings(), sort_keys=True)
        state = {
            "next_sample": self.next_sample,
            "tokens": self.tokens,
            "dtype": self.setup.dtype,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
            "rng": rng_state(),
            "data": start.digest(self.data),
            "pack": self.config.text.pack,
            "world_size": self.mesh.world_size,
            "guards": {"skipped": self.guards.skipped},
            "fp8": saved_scales(self.model),
            "settings_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        }
        self.saves.save(self.step, state)

    def _requests(self) -> list[float]:
        """1 for each reason in STOPS for which this rank would stop now; then those of saves."""
        limit = self.config.run.max_time
        late = self.mesh.is_main and limit and self.journal.seconds > parse_seconds(limit)
        stops = [float(bool(late) if r == TIME_IS_UP else r in self.stop_signals) for r in STOPS]
        return [*stops, *self.saves.requests()]

    def _read(self, keep: int) -> int:
        """Takes in finished steps until `keep` are left; the reason to stop, one of STOPS, or 0."""
        stop = 0
        while len(self.pending) > keep:
            done = self.pending.popleft()
            loss, norm, *requests = done.numbers()
            stop = next((reason for reason, n in zip(STOPS, requests) if n), stop)
            self.saves.take_requests(*requests[len(STOPS) :])
            with self._on_all_ranks():
                left_out = self.guards.judge(done.step, loss, norm)
            if self.loss_scale is not None:
                self.loss_scale.update(not math.isfinite(norm))
            more = {"skipped": self.guards.skipped} if left_out else {}
            row = {"loss": loss, "norm": norm, **more, **report_of(self.model, done.experts())}
            self.journal.write_step(done, engine=self.engine, **row)
            if left_out:
                self.journal.say(f"step {done.step}  {left_out}")
        return stop

    @contextlib.contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """What is raised inside is raised on all ranks: they wait for the save that is running."""
        try:
            yield
        except RuntimeError:
            self.saves.settle()
            raise


class Guards:
    """The rule of --on-nonfinite.

    Args:
        policy: stop or skip.
        scaled: there is a loss scale: then gradients that are not finite are its business.
    Attributes:
        skipped: updates that were left out so far.
    """

    def __init__(self, policy: str, *, scaled: bool) -> None:
        self.policy, self.scaled = policy, scaled
        self.skipped = self._in_a_row = 0

    def judge(self, step: int, loss: float, norm: float) -> str:
        """What to say of an update that was left out; "" of a step that is fine.

        Raises:
            RuntimeError: the run cannot go on.
        """
        if math.isfinite(loss if self.scaled else loss + norm):
            self._in_a_row = 0
            return ""
        reason = f"loss={loss}, grad_norm={norm}"
        if self.policy == "skip":
            self.skipped += 1
            self._in_a_row += 1
            if self._in_a_row < IN_A_ROW:
                return f"{reason}; the update is left out, {self.skipped} by now"
            raise RuntimeError(
                f"train: expected a finite step among {IN_A_ROW}, got {reason} in step {step} as "
                "in those before it; lower --lr, then --resume from the last checkpoint"
            )
        if self.scaled:
            return ""
        raise RuntimeError(
            f"train: expected finite numbers, got {reason} in step {step}; lower --lr, then "
            "--resume from the last checkpoint, or see --on-nonfinite"
        )


def poison(loss: torch.Tensor) -> torch.Tensor:
    """1 for a finite loss, else NaN; a factor that hands this on to all gradients."""
    return loss.detach() * 0 + 1


class RunSaves:
    """The Saver of a run, made by open(), and its reports.

    Args:
        committed: step of the checkpoint that the run goes on from; -1: none.
    Attributes:
        committed: step of the newest checkpoint.
        why: what made the last save fail.
        asked: a save is asked for, by SIGUSR1 on any rank; the same on every rank.
        signals: of this rank; see launch.catching_save.
    """

    def __init__(self, engine: Engine, journal: Journal, committed: int = -1) -> None:
        self.engine, self.journal, self.committed = engine, journal, committed
        self.asked, self.why = False, ""
        self.signals: list[int] = []
        self._saver: Saver | None = None
        self._waited_ms = self._pause_ms = 0.0

    def open(self, folder: Path, config: TrainConfig, **saved: Any) -> None:
        """From now on it saves to the run's folder; saved: model, optimizer, tokenizer."""
        run, faults = config.run, config.faults
        try_folder(folder, self.engine.mesh.rank)
        self._saver = Saver(
            folder,
            keep_last=run.keep_last,
            keep_every=run.keep_every,
            asynchronous=faults.async_save,
            overlap=faults.save_overlap,
            **saved,
        )

    def prepare(self) -> None:
        """Memory for the host copy, in the background; best after the first step."""
        if self._saver is not None:
            self._saver.prepare()

    def requests(self) -> list[float]:
        """What this rank tells all others in a step: the arguments of take_requests."""
        saver = self._saver
        failed, busy = (False, False) if saver is None else (saver.failed, saver.busy)
        return [float(failed), float(busy), float(bool(self.signals))]

    def take_requests(self, failed: float, busy: float, asked: float) -> None:
        """Sums over all ranks of what they told in a step. Ranks: all, after that step."""
        self.asked = self.asked or asked > 0
        if failed or not busy:
            self.settle()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin a checkpoint of this step. Ranks: all, the numbers of all earlier steps read."""
        saver = self._saver
        assert saver is not None
        self.asked = False
        self.signals.clear()
        began = time.perf_counter()
        if saver.unsettled:
            if saver.overlap == "skip" and any(gather_numbers(self.engine, float(saver.busy))):
                self.journal.note(
                    step,
                    "no checkpoint: the one before is still being written (--save-overlap skip)",
                    save_skipped=1,
                )
                return
            self.settle()
        waited = time.perf_counter()
        saver.save(step, state)
        self._waited_ms = (waited - began) * 1e3
        self._pause_ms = (time.perf_counter() - waited) * 1e3
        if not saver.unsettled and saver.last is not None:  # not asynchronous
            self._report(saver.last)
        self.journal.start_clock()

    def settle(self) -> None:
        """Wait for the last save, if it is not settled, and say how it ended. Ranks: all."""
        result = None if self._saver is None else self._saver.settle()
        if result is not None:
            self._report(result)

    def wait_briefly(self) -> None:
        """The run fails: give a save that is nearly there a moment. For one rank."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while self._saver is not None and self._saver.busy and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _report(self, result: Result) -> None:
        if not result.ok:
            self.why = "; ".join(result.errors)
            older = "the older ones are intact" if self.committed >= 0 else "there is no older one"
            text = f"no checkpoint of step {result.step} ({self.why}); {older}"
            self.journal.note(result.step, text, save_error=self.why)
            return
        self.committed = result.step
        mb = result.nbytes / 1e6
        stood = f"training stood for {self._pause_ms:,.0f} ms"
        if self._waited_ms >= 1:
            stood += f" and {self._waited_ms:,.0f} ms for the save before"
        rate = mb / max(result.seconds, 1e-9)
        self.journal.note(
            result.step,
            f"saved: {mb:,.1f} MB in {result.seconds:.2f} s ({rate:,.0f} MB/s), {stood}",
            save_mb=mb,
            save_s=result.seconds,
            save_mb_per_s=rate,
            save_pause_ms=self._pause_ms,
            save_wait_ms=self._waited_ms,
        )


def is_due(every: int, step: int) -> bool:
    """Whether something is done after this step; every 0: never."""
    return every > 0 and step % every == 0


def validation_loss(
    model: GPT, engine: Engine, tokens: Tokens, *, rows: int, block_size: int, n_batches: int
) -> float:
    """Mean loss over the first n_batches batches of windows of the tokens, or as many as there are.

    Args:
        engine: of the model.
        rows: windows of a batch; each dp rank takes every dp_size-th batch.
    Ranks: all of the model's.
    """
    mesh = engine.mesh
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    batches = eval_batches(
        tokens,
        batch_size=rows,
        block_size=block_size,
        n_batches=n_batches,
        rank=mesh.dp_rank,
        world_size=mesh.dp_size,
        device=mesh.device,
    )
    windows = min((len(tokens) - 1) // block_size, n_batches * rows)
    sharing = mesh.size("depth", "rows")
    nothing = torch.zeros(sharing, block_size, dtype=torch.int64, device=mesh.device)
    with torch.no_grad():
        for _ in range(math.ceil(windows / (rows * mesh.dp_size))):
            x, y = next(batches, (nothing, None))  # see [Note: who forwards]
            missing = -len(x) % sharing
            if missing and y is not None:
                total[1] -= missing * block_size
                x, y = F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, 0, 0, missing), value=-100)
            if engine.shards.stages is not None:
                loss = pipeline_loss(model, x, x if y is None else y, reduction="sum")
            else:
                loss = model(x, x if y is None else y, reduction="sum")
            if y is None:
                continue
            total[0] += loss
            total[1] += y.numel()
    loss, count = engine.all_reduce_scalars(total).tolist()
    return loss / count


def rng_state() -> dict[str, str]:
    """State of torch's generators on this process, as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(bytes(v.tolist())).decode() for k, v in states.items()}


def set_rng_state(state: dict[str, str]) -> None:
    """Back to what rng_state() returned."""
    for key, text in state.items():
        value = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if key == "cpu":
            torch.set_rng_state(value)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(value)
