"""The training loop of one rank: batches by global sample index, one control exchange per step.

[Note: sample order] A step with W dp ranks and A micro-batches of b sequences uses the global
samples [n, n + A*W*b), where n samples were used before. Micro-batch m of the step takes the b
samples from n + m*b on, and its dropout key is made from the first one. Micro-batch j of rank r is
number j*W + r if every micro-batch is reduced (accumulate="shard"), and r*A + j if a rank first
sums its own ("full"). So the same samples are summed, with the same dropout masks, for every split
of W * A; in deterministic mode they are added in the same tree, which gives the same bits at every
ZeRO stage. The ranks that split one model have one dp rank, so they take the same samples. The
first replica has micro-batches 0 to A*W - 1 of the step, the second the next A*W, and so on.

[Note: control] A step has one small exchange, that of the engine. The trainer adds its loss and a
rank's requests to it: to stop, because of a signal or the time limit, or to save. Every rank reads
the same sums, so all stop after the same step; a rank that stopped alone would leave the others
waiting in a collective. On a GPU the numbers are read one step later, when they have arrived, so
that the host never waits for the device. With a loss scale they are read at once, because the next
step's scale depends on them.

[Note: final samples] Rank 0 alone generates text at the end. If it holds only a part of the
weights, it loads the last checkpoint for this.

[Note: nonfinite steps] All ranks judge a step by the same summed numbers, so they reach the same
verdict without another exchange.

[Note: skipped updates] An update has to be skipped on the device, because the step is over when
the host learns that a gradient was not finite. The optimizer does this as soon as it has a loss
scale, even 1. A loss that is not finite makes all gradients not finite (poison()), which reaches
all ranks.

[Note: completing saves] In the control exchange of every step each rank reports whether its part of
the last save failed, and whether it is still being written. All ranks read the same sums, so all
complete the save after the same step, usually without waiting. A save that is due earlier waits for
the one before, or is skipped (--save-overlap). A full disk does not end a run: the failed save is
reported, and the next one tries again.

[Note: validation forwards] At ZeRO 3 a forward gathers weights, so all ranks have to run it: a rank
without windows left runs the model on zeros and discards the result. Rows and depth of a grid split
each batch, which is padded with windows that do not count.

[Note: a batch's walk] The calls of one rank, from the text file to the loss and on to the next
batch (test_a_batch_takes_the_documented_walk follows them):

     1. `train/trainer.py` `train`: mesh and watchdog; creates a `Trainer`, which does 2 to 10
     2. `train/start.py` `load_model_and_data`: model, context length and tokens
     3. `data/batches.py` `load_data`: source, tokenizer and cache
     4. `data/sources.py` `open_source`: a user's words become documents, or files of token ids
     5. `data/sources.py` `tokenized`: the cache entry, created if missing
     6. `data/sources.py` `split`: each document is for training or validation
     7. `data/tokenizer.py` `encode_batch`: text becomes ids, written to train.bin and val.bin
     8. `data/sources.py` `map_array`: these files are mapped, not read
     9. `models/set_up.py` `set_up`: parallelize() and the optimizer
    10. `train/start.py` `samples_of`: tokens as one stream, or documents packed into rows
    11. `train/trainer.py` `_loop`: steps, validations, saves
    12. `train/trainer.py` `train_step`: which samples each micro-batch takes
    13. `data/batches.py` `sample_batch`: a pure function of the index of the first sample
    14. `data/batches.py` `_permute`: the index becomes a window in the order of this epoch
    15. `data/batches.py` `_gather`: windows are read from the map, as inputs and shifted targets
    16. `train/trainer.py` `_micro_batch`: forward and backward
    17. `models/gpt.py` `features`: embedding and blocks
    18. `models/gpt.py` `_loss`: output of the last norm and targets
    19. `kernels/loss/linear_cross_entropy.py` `linear_cross_entropy`: the loss without logits
    20. `train/trainer.py` `_target`: start of backward; for gradients see fastpar/engine/README.md
    21. `optim/schedule.py` `set_lr`: this step's learning rate
    22. `optim/base.py` `step`: norm and clip factor of all ranks, in one exchange with the loss
    23. `optim/adamw.py` `_update`: one kernel call for all parameters
    24. `train/trainer.py` `_read`: the step's numbers have arrived on the host
    25. `train/trainer.py` `judge`: whether they are finite
    26. `train/journal.py` `write_step`: a row of metrics.jsonl and the progress line
    27. `train/trainer.py` `train_step`: the next step
    28. `data/batches.py` `sample_batch`: the next batch
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
from fastpar.axes.replicas import Outer, agree_on_requests
from fastpar.axes.step import Setup
from fastpar.checkpoint.restore import load_checkpoint, read_run_state
from fastpar.checkpoint.saver import Result, Saver, try_folder
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import threads_per_rank
from fastpar.comm.recorder import BACKWARD, FORWARD, INPUT, OPTIMIZER
from fastpar.comm.watchdog import MARGIN_S, Watchdog, in_step
from fastpar.data.batches import eval_batches, sample_batch, to_device
from fastpar.data.sources import Tokens
from fastpar.doctor.doctor import prove_before_training
from fastpar.engine.control import broadcast_text, prove_together
from fastpar.engine.engine import Engine, engine_of
from fastpar.engine.pipeline_step import pipeline_loss, pipeline_step
from fastpar.files.runs import checkpoint_folder, release
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import keep_freed_memory, make_key
from fastpar.models.gpt import GPT, numbers_of, report_of, restore_scales, saved_scales
from fastpar.models.hf import load_hf
from fastpar.models.set_up import set_up
from fastpar.optim import graphs
from fastpar.optim.schedule import AveragedWeights, DynamicLossScale, forget_average, set_lr
from fastpar.predict.run import check_host_activations, check_ranks
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import parse_seconds
from fastpar.settings.mesh import axes_of
from fastpar.train import start
from fastpar.train.journal import TIME_IS_UP, Journal, RunFolder, Step, check_out, to_host
from fastpar.train.launch import SIGNALS, catching_save, catching_stop

STOPS = (*SIGNALS, TIME_IS_UP)  # reasons to stop early
IN_A_ROW = 10  # the run ends after this many skipped updates in a row
_LAST_WAIT_S = 3.0  # wait for a running save when a run fails; below launch.GRACE_S
_POLL_S = 0.05


def train(config: TrainConfig, run: Callable[[Trainer], int] | None = None) -> int:
    """Train as one rank of a run, until its end or until something stops it.

    Args:
        run: a function to call instead of Trainer.run.
    Returns:
        The exit status: 0, or 128 + signal after a stop by that signal.
    Ranks: all, with the same settings; creates the process group from torchrun's environment.
    Raises:
        ValueError: settings do not fit each other, the text, the machine or the run on disk.
        RuntimeError: the loss is not finite; the last checkpoint could not be written.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        check_out(config)
    system, ranks_here = config.system, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads_per_rank(system.threads, ranks_here))
    if system.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train: expected a GPU for device=cuda, got none; use --device cpu")
    if config.parallel.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # oneDNN reads it at its first product. With AMX, 16-bit products depend on the threads.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    timeout_s = parse_seconds(config.faults.timeout)
    mesh = Mesh(
        **axes_of(config.mesh),
        device="cpu" if system.device == "cpu" else None,
        timeout_s=timeout_s + MARGIN_S,  # the watchdog is first: its message is more precise
    )
    rank = mesh.replica * mesh.world_size + mesh.rank
    watched = mesh.replicas * mesh.world_size if mesh.owns_process_group else 1
    try:
        with Watchdog(rank, watched, timeout_s=timeout_s, start=mesh.start):
            if watched > 1:
                mesh.trust_watchdog()
            return _train(config, mesh, run or Trainer.run)
    finally:
        release()


def _train(config: TrainConfig, mesh: Mesh, run: Callable[[Trainer], int]) -> int:
    if mesh.device.type == "cpu":
        keep_freed_memory()
    else:
        torch.use_deterministic_algorithms(config.parallel.deterministic)
        # Otherwise torch fills all new memory with NaN, which every op overwrites anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    settings = {k: v for k, v in config.settings().items() if k not in ("nproc", "threads")}
    versions = [f"fastpar {__version__}", f"torch {torch.__version__}"]
    mesh.check_same("train", [*versions, *(f"{name}={value}" for name, value in settings.items())])
    return run(Trainer(config, mesh))


class Trainer:
    """One rank of a run: model, data, optimizer and the loop. See the notes above."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        if config.system.cuda_graphs and not graphs.has_graphs(mesh.device):
            raise ValueError(
                "train: expected a GPU for --cuda-graphs, got none; drop --cuda-graphs"
            )
        self.journal = Journal(config, mesh)
        checkpoint = start.checkpoint_of(config, mesh)
        state = read_run_state(checkpoint) if checkpoint is not None else None
        kind, name = mesh.device.type, start.pick_dtype(config, mesh, state)
        self.setup, dtype = Setup(mesh.world_size, config, kind, "shm", dtype=name), DTYPES[name]
        torch.manual_seed(config.run.seed)
        check = partial(check_ranks, setup=self.setup, device=mesh.device)
        model, self.block_size, self.data = start.load_model_and_data(
            config,
            state,
            progress=start.reports_progress(mesh),
            meet=partial(start.meet, mesh),
            check=check,
        )
        mesh.check_same("train", [f"tokens of {config.text.data}: {start.digest(self.data)[:16]}"])
        self.n_sample_ranks = mesh.dp_size * mesh.replicas  # number of ranks with different samples
        batch = config.batch(self.block_size, self.n_sample_ranks)
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
            Outer(  # registers itself with the optimizer
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
            pp_split=stage_layers(model.config, self.setup) if self.setup.mesh.pp > 1 else None,
        )
        self._facts = start.facts_of(self.setup)
        self.loss_scale = DynamicLossScale() if dtype == torch.float16 else None
        self.guards = Guards(config.faults.on_nonfinite, scaled=self.loss_scale is not None)
        self.forward: Any = torch.compile(self.model) if config.system.compile else self.model
        self.step_graph = self._graph_of_steps()
        self.step = self.next_sample = self.tokens = 0
        self.samples = start.samples_of(config, self.data, self.block_size)
        self.changed = getattr(self.samples, "description", "")  # changes that config.json lacks
        self.folder: Path | None = None  # the run folder, once rank 0 has created it
        self.val: tuple[int, float] | None = None  # (step, loss) of the last validation
        if checkpoint is not None:
            self._load(checkpoint)
        self.saves = RunSaves(self.engine, self.journal, self.step if checkpoint else -1)
        self.pending: deque[Step] = deque()  # steps whose numbers are not read yet
        self.keep_pending = int(mesh.device.type == "cuda" and self.loss_scale is None)
        self.stop_signals: list[int] = []

    def _graph_of_steps(self) -> graphs.StepGraph | None:
        """The graph of whole steps; None where there can be none, or none is wanted."""
        requested = self.config.system.cuda_graphs
        why = graphs.why_none(self.model, self.engine, self.optimizer, requested)
        if requested and why:
            raise ValueError(
                f"train: no CUDA graph can hold these steps: {why}; drop --cuda-graphs"
            )
        if why or requested is False or not self.config.runs_in_graphs():
            return None
        several = " and its collectives; NCCL inside graphs never ran in fastpar's tests"
        self._facts["graphs"] = "of the whole step" + several * (self.mesh.world_size > 1)
        return graphs.StepGraph(self._micro_batch, self.model, self.engine, self.optimizer)

    def _load(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer)
        if self.average is None:
            forget_average(self.optimizer)
        if state["dtype"] != self.setup.dtype:
            self.changed += f"\nchanged  format of weights {state['dtype']} -> {self.setup.dtype}"
        start.check_samples(state, checkpoint, self.config, self.data)
        self.step = state["step"]
        self.next_sample, self.tokens = state["next_sample"], state["tokens"]
        set_rng_state(state["rng"])
        restore_scales(self.model, state)
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        if "guards" in state:  # not in checkpoints of earlier versions
            self.guards.skipped = int(state["guards"]["skipped"])

    def run(self) -> int:
        """Train to the end or until something stops it; return the exit status. Closes the mesh."""
        self._open()
        last = "this step" if self.mesh.replicas == 1 else "steps until replicas synchronize"
        with (
            catching_stop(loud=start.reports_progress(self.mesh), last=last) as self.stop_signals,
            catching_save() as self.saves.signals,
        ):
            try:
                stop = self._loop()
            except BaseException:
                self.saves.wait_briefly()
                raise
            finally:
                self.step_graph = None  # NCCL closes no group while a graph has its operations
            if stop <= 0 and (self.val is None or self.val[0] != self.step):
                self.validate()
            self.saves.settle()
            if self.saves.committed != self.step:
                self.save()
                self.saves.settle()
            if self.saves.committed != self.step:
                older = f"--resume continues from step {self.saves.committed}"
                if self.saves.committed < 0:
                    older = "no older checkpoint exists"
                raise RuntimeError(
                    f"train: expected a checkpoint of the last step, but saving step {self.step} "
                    f"failed ({self.saves.why}); {older}"
                )
        self.journal.close()
        self.mesh.close()  # only rank 0 continues
        if self.journal.folder is not None:
            self._finish(self.journal.folder, stop)
        return 128 + stop if stop > 0 else 0

    def _finish(self, folder: RunFolder, stop: int) -> None:
        """Finish the run on rank 0; see [Note: final samples]."""
        model: GPT = self.model
        if (self.engine.shares or model.cp is not None) and stop <= 0:
            model = load_hf(checkpoint_folder(folder.path, self.step))
        seconds, val_loss = self.journal.seconds, self.val[1] if self.val else None
        model = model.to(self.mesh.device)
        folder.finish(model, self.step, seconds=seconds, val_loss=val_loss, stopped_by=stop)

    def _open(self) -> None:
        """Create the run folder: by the first replica, then the others create theirs inside it."""
        about: Any = {"data": self.data, "step": self.step, "facts": self._facts}
        mesh, first = self.mesh, self.mesh.replica == 0
        if first:
            self.journal.open(self.setup, model=self.model, **about)
        if mesh.replicas > 1:
            config = start.in_replica_folder(self.config, mesh, self.journal.path)
            self.config = self.journal.config = config
        if not first:
            self.journal.open(self.setup, model=self.model, **about)
        if self.changed:
            self.journal.say(self.changed.strip())
        self.folder = Path(broadcast_text(self.engine, str(self.journal.path or "")))
        start.check_folder(self.folder, self.engine)
        saved = {"model": self.model, "optimizer": self.optimizer}
        self.saves.open(self.folder, self.config, tokenizer=self.data.tokenizer, **saved)

    def _loop(self) -> int:
        """Run steps, validations and saves; return the reason of an early stop, or 0."""
        config, run = self.config, self.config.run
        if self.step == 0 and run.eval_every:
            self.validate()
        self.journal.start_clock()
        begin = self.step
        stop = requested = 0  # reasons to stop: agreed by all replicas, requested in this one
        while self.step < run.max_steps and not stop:
            self.pending.append(self.train_step())
            step = self.step
            compares = is_due(config.faults.check_replicas_every, step)
            validates, saves = is_due(run.eval_every, step), is_due(run.save_every, step)
            last = step == run.max_steps or compares or validates or saves
            requested = self._read(0 if last else self.keep_pending) or requested
            if self.saves.requested:
                requested = self._read(0) or requested
            every, save_requested = config.optim.outer_every, self.saves.requested
            stop, save = agree_on_requests(self.mesh, every, step, requested, save_requested)
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
        """Run one optimizer step; returns without waiting for the device."""
        config, mesh, optimizer = self.config, self.mesh, self.optimizer
        graph, rows, seed = self.step_graph, self.micro_batch_size, config.run.seed
        scale = self.loss_scale.scale if self.loss_scale is not None else None
        skips = config.faults.on_nonfinite == "skip"
        in_step(self.step + 1)
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        whole: list[tuple[torch.Tensor, ...]] = []  # batches of a pipeline or a step's graph
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
                loss += self._micro_batch(x, y, key, scale, *documents)
            else:
                whole.append((x, y, key, *documents))
        lr = set_lr(optimizer, self.step, config)
        if graph is not None and not self._fits_graph(graph, whole, scale):
            graph = None
            for x, y, key in whole:
                loss += self._micro_batch(x, y, key, scale)
        elif whole and graph is None:
            loss += self._through_stages(whole, scale)
        if scale is not None or skips:
            optimizer.grad_scale = scale or 1.0  # see [Note: skipped updates]
        requests = to_device(
            torch.tensor(self._requests(), dtype=torch.float64, device="cpu"), mesh.device
        )
        if graph is not None:
            control: Any = graph.run(requests)
        else:
            self.engine.contribute(torch.cat((loss.reshape(1) / mesh.world_size, requests)))
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

    def _fits_graph(self, graph: graphs.StepGraph, batches: list[Any], scale: float | None) -> bool:
        """Whether the graph can run this step; without --cuda-graphs, drop a graph that cannot."""
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
        """Forward and backward of a micro-batch; returns its share of the step's loss.

        In a CUDA graph, scale is a tensor.
        """
        positions = dict(zip(("positions",), at))
        self.engine.on_phase(FORWARD)
        part = self.forward(x, y, rng_key=key, **positions) / self.grad_accum_steps
        self.engine.on_phase(BACKWARD)
        self._target(part, scale).backward()
        return part.detach()

    def _target(self, part: torch.Tensor, scale: float | None) -> torch.Tensor:
        """The tensor to differentiate, from a micro-batch's share of the loss."""
        target = part if scale is None else part * scale
        return target * poison(part) if self.config.faults.on_nonfinite == "skip" else target

    def _through_stages(
        self, batches: list[tuple[torch.Tensor, ...]], scale: float | None
    ) -> torch.Tensor:
        """Run all micro-batches of a step through the pipeline; return the step's loss."""
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
        """The number within the step of this rank's micro-batch j; see [Note: sample order]."""
        dp_size, dp_rank = self.mesh.dp_size, self.mesh.dp_rank
        first = self.mesh.replica * dp_size * self.grad_accum_steps
        if self.config.accumulate == "full":
            return first + dp_rank * self.grad_accum_steps + j
        return first + j * dp_size + dp_rank

    def validate(self) -> None:
        """Report the mean loss over the first eval_batches * batch_size validation windows."""
        per_batch = self.n_sample_ranks * self.grad_accum_steps
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
            text += f", with averaged weights {more['ema_val_loss']:.4f}"
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
        """1 for each reason in STOPS for which this rank requests to stop; then those of saves."""
        limit = self.config.run.max_time
        late = self.mesh.is_main and limit and self.journal.seconds > parse_seconds(limit)
        stops = [float(bool(late) if r == TIME_IS_UP else r in self.stop_signals) for r in STOPS]
        return [*stops, *self.saves.requests()]

    def _read(self, keep: int) -> int:
        """Read pending steps until `keep` are left; return the reason to stop in STOPS, or 0."""
        stop = 0
        while len(self.pending) > keep:
            done = self.pending.popleft()
            loss, norm, *requests = done.numbers()
            stop = next((reason for reason, n in zip(STOPS, requests) if n), stop)
            self.saves.take_requests(*requests[len(STOPS) :])
            with self._on_all_ranks():
                skipped = self.guards.judge(done.step, loss, norm)
            if self.loss_scale is not None:
                self.loss_scale.update(not math.isfinite(norm))
            more = {"skipped": self.guards.skipped} if skipped else {}
            row = {"loss": loss, "norm": norm, **more, **report_of(self.model, done.experts())}
            self.journal.write_step(done, engine=self.engine, **row)
            if skipped:
                self.journal.say(f"step {done.step}  {skipped}")
        return stop

    @contextlib.contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """For errors that all ranks raise: complete the running save first."""
        try:
            yield
        except RuntimeError:
            self.saves.settle()
            raise


class Guards:
    """The check for --on-nonfinite.

    Args:
        policy: stop or skip.
        scaled: there is a loss scale, which handles nonfinite gradients.
    Attributes:
        skipped: number of updates skipped so far.
    """

    def __init__(self, policy: str, *, scaled: bool) -> None:
        self.policy, self.scaled = policy, scaled
        self.skipped = self._in_a_row = 0

    def judge(self, step: int, loss: float, norm: float) -> str:
        """The message about a skipped update; "" if the step is finite.

        Raises:
            RuntimeError: the run has to end.
        """
        if math.isfinite(loss if self.scaled else loss + norm):
            self._in_a_row = 0
            return ""
        reason = f"loss={loss}, grad_norm={norm}"
        if self.policy == "skip":
            self.skipped += 1
            self._in_a_row += 1
            if self._in_a_row < IN_A_ROW:
                return f"{reason}; update skipped, {self.skipped} in total"
            raise RuntimeError(
                f"train: expected a finite step among {IN_A_ROW}, got {reason} in step {step} and "
                "nonfinite numbers before; lower --lr, then --resume from the last checkpoint"
            )
        if self.scaled:
            return ""
        raise RuntimeError(
            f"train: expected finite numbers, got {reason} in step {step}; lower --lr, then "
            "--resume from the last checkpoint, or see --on-nonfinite"
        )


def poison(loss: torch.Tensor) -> torch.Tensor:
    """1 for a finite loss, else NaN; multiplied with the loss, it makes all gradients NaN."""
    return loss.detach() * 0 + 1


class RunSaves:
    """The Saver of a run, created by open(), and its reports.

    Args:
        committed: step of the checkpoint that the run resumes; -1: none.
    Attributes:
        committed: step of the newest checkpoint.
        why: the error of the last failed save.
        requested: whether a save was requested by SIGUSR1 on any rank; the same on every rank.
        signals: signals that this rank received; see launch.catching_save.
    """

    def __init__(self, engine: Engine, journal: Journal, committed: int = -1) -> None:
        self.engine, self.journal, self.committed = engine, journal, committed
        self.requested, self.why = False, ""
        self.signals: list[int] = []
        self._saver: Saver | None = None
        self._waited_ms = self._pause_ms = 0.0

    def open(self, folder: Path, config: TrainConfig, **saved: Any) -> None:
        """Create the Saver for the run folder; saved: model, optimizer, tokenizer."""
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
        """Allocate the host copy's memory in the background; best after the first step."""
        if self._saver is not None:
            self._saver.prepare()

    def requests(self) -> list[float]:
        """This rank's contribution to the control exchange: the arguments of take_requests()."""
        saver = self._saver
        failed, busy = (False, False) if saver is None else (saver.failed, saver.busy)
        return [float(failed), float(busy), float(bool(self.signals))]

    def take_requests(self, failed: float, busy: float, requested: float) -> None:
        """Take the sums of requests() over all ranks. Ranks: all, after that step."""
        self.requested = self.requested or requested > 0
        if failed or not busy:
            self.settle()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin a checkpoint of this step. Ranks: all, once all earlier steps are read."""
        saver = self._saver
        assert saver is not None
        self.requested = False
        self.signals.clear()
        began = time.perf_counter()
        if saver.overlap == "wait":
            self.settle()
        waited, before = time.perf_counter(), saver.last
        if not saver.save(step, state):
            text = "save skipped: the previous one is still running (--save-overlap skip)"
            self.journal.note(step, text, save_skipped=1)
            return
        self._waited_ms = (waited - began) * 1e3
        self._pause_ms = (time.perf_counter() - waited) * 1e3
        if saver.last is not None and saver.last is not before:
            self._report(saver.last)
        self.journal.start_clock()

    def settle(self) -> None:
        """Wait for the last save if it is not complete, and report its result. Ranks: all."""
        result = None if self._saver is None else self._saver.settle()
        if result is not None:
            self._report(result)

    def wait_briefly(self) -> None:
        """When the run fails: wait a moment for a save that is nearly complete. For one rank."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while self._saver is not None and self._saver.busy and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _report(self, result: Result) -> None:
        if not result.ok:
            self.why = "; ".join(result.errors)
            older = "older ones are intact" if self.committed >= 0 else "there is no older one"
            text = f"saving the checkpoint failed ({self.why}); {older}"
            self.journal.note(result.step, text, save_error=self.why)
            return
        self.committed = result.step
        mb = result.nbytes / 1e6
        paused = f"training paused for {self._pause_ms:,.0f} ms"
        if self._waited_ms >= 1:
            paused += f" and {self._waited_ms:,.0f} ms for the previous save"
        rate = mb / max(result.seconds, 1e-9)
        self.journal.note(
            result.step,
            f"saved: {mb:,.1f} MB in {result.seconds:.2f} s ({rate:,.0f} MB/s), {paused}",
            save_mb=mb,
            save_s=result.seconds,
            save_mb_per_s=rate,
            save_pause_ms=self._pause_ms,
            save_wait_ms=self._waited_ms,
        )


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every N steps is due after this step; every=0: never."""
    return every > 0 and step % every == 0


def validation_loss(
    model: GPT, engine: Engine, tokens: Tokens, *, rows: int, block_size: int, n_batches: int
) -> float:
    """Mean loss over the first n_batches batches of windows, or as many as the tokens have.

    Args:
        engine: the model's engine.
        rows: windows per batch; each dp rank takes every dp_size-th batch.
    Ranks: all ranks of the model.
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
            x, y = next(batches, (nothing, None))  # see [Note: validation forwards]
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
    """State of torch's random generators in this process, as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(bytes(v.tolist())).decode() for k, v in states.items()}


def set_rng_state(state: dict[str, str]) -> None:
    """Restore the state that rng_state() returned."""
    for key, text in state.items():
        value = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if key == "cpu":
            torch.set_rng_state(value)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(value)
