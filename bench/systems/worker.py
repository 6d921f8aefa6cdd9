"""Processes that hold one training-step variant each and run k steps when told to.

A variant lives in processes of its own, so that its peak memory is its own; the processes are told
in turn to run a few steps, never two at once, so that times are side by side (bench_train.py).

[Note: the gate of a training step] After its timed steps a fastpar variant computes the gradients
of one small batch; their error against plain PyTorch in fp64 on the same weights, as a vector norm,
may be at most twice that of plain PyTorch in the same precision, plus one rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.peers import stock
from bench.systems.links import Ranks
from fastpar.comm.host import memory_mb
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import eval_batches, load_data, sample_batch
from fastpar.doctor.trial import stopwatch
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import keep_freed_memory
from fastpar.models.gpt import GPT
from fastpar.optim.adamw import AdamW
from fastpar.optim.muon import Muon, muon_groups
from fastpar.optim.schedule import cosine_lr, param_groups
from fastpar.settings.model import GPTConfig

BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.99), 0.1, 1.0
CHECK_TOKENS = 32


@dataclass(frozen=True)
class Spec:
    """What a worker builds."""

    kind: str  # "stock" | "fastpar"
    config: GPTConfig
    batch_size: int  # sequences of a step, over all ranks
    device: str = "cpu"
    threads: int = 1  # of each rank
    world_size: int = 1
    compiled: bool = False
    keep_memory: bool = False  # glibc keeps freed memory, as fastpar's trainer asks it to
    text: bool = False  # characters of fastpar's text instead of random tokens
    lr: float = 6e-4
    schedule: tuple[int, int, float] | None = None  # warm-up steps, all steps, last lr
    muon_lr: float | None = None  # fastpar.Muon for the blocks' matrices, both rates down by a line

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.config.block_size


def start(spec: Any, make: type) -> Ranks:
    """The processes of one variant; each holds make(spec), which names at least world_size and
    threads."""
    target = f"{make.__module__}:{make.__name__}"
    return Ranks(None, target, spec, ranks=spec.world_size, threads=spec.threads)


class Variant:
    """Model, optimizer and data of one rank of one variant; public methods are the commands."""

    def __init__(self, spec: Spec):
        self.spec, self.rank = spec, int(os.environ.get("RANK", "0"))
        self.module, self.optimizer = self._build()
        self.model: Callable[..., Tensor] = self.module
        if spec.compiled:
            self.model = torch.compile(self.module, dynamic=False)
        self.data = load_text() if spec.text else None

    def _build(self) -> tuple[nn.Module, Any]:
        spec = self.spec
        model = GPT(spec.config, seed=0)
        if spec.keep_memory:
            keep_freed_memory()
        if spec.kind == "stock":
            plain: nn.Module = stock.GPT(spec.config).load_fastpar(model.state_dict())
            plain.to(spec.device)
            optimizer = stock.adamw(plain, spec.lr, BETAS, WEIGHT_DECAY)
            if spec.world_size > 1:
                torch.distributed.init_process_group("nccl" if spec.device == "cuda" else "gloo")
                plain = nn.parallel.DistributedDataParallel(
                    plain, bucket_cap_mb=25, gradient_as_bucket_view=True
                )
            return plain, optimizer

        on_gpu = spec.device == "cuda"
        model.to(spec.device, torch.bfloat16 if on_gpu else torch.float32)
        mesh = Mesh(device=None if on_gpu else "cpu")
        parallelize(model, mesh, grad_dtype=torch.float32 if on_gpu else None)
        common: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM, "master_weights": on_gpu}
        if spec.muon_lr is not None:
            adamw = {"lr": spec.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
            return model, Muon(muon_groups(model), weight_decay=WEIGHT_DECAY, adamw=adamw, **common)
        groups = param_groups(model, WEIGHT_DECAY)
        return model, AdamW(groups, lr=spec.lr, betas=BETAS, **common)

    def steps(self, first: int, count: int) -> dict[str, list]:
        """Run steps first .. first + count - 1; ms of each (CPU) or their mean (GPU), losses.

        On a GPU the first two of more than four are not timed: they take the memory back that
        was handed to the other variants, and training waits for nothing between steps.
        """
        batches = [self._batch(first + i) for i in range(count)]
        on_gpu = self.spec.device == "cuda"
        losses: list[Any] = []
        exposed: list[float | None] = []

        def one(index: int) -> None:
            losses.append(self._step(first + index, *batches[index]))
            if not on_gpu:
                losses[-1] = losses[-1].item()
                exposed.append(self._exposed_comm_ms())

        if on_gpu:
            untimed = 2 if count > 4 else 0
            for i in range(untimed):
                one(i)
            total, _ = stopwatch(lambda: list(map(one, range(untimed, count))), "cuda")
            times = [total / (count - untimed)]
            losses = [loss.item() for loss in losses]
            torch.cuda.empty_cache()  # the next variant's turn: same GPU
        else:
            times = [stopwatch(lambda i=i: one(i), "cpu")[0] for i in range(count)]  # type: ignore
        return {"ms": times, "losses": losses, "exposed_comm_ms": exposed}

    def _step(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        lr, muon_lr = self._lr(index), self.spec.muon_lr
        for group in self.optimizer.param_groups:
            of_muon = 1.0 if muon_lr is None or group["adamw"] else muon_lr / self.spec.lr
            group["lr"] = lr * of_muon
        loss = self._loss(x, y)
        loss.backward()
        if self.spec.kind == "stock":
            nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.spec.device == "cuda" and self.spec.kind == "stock":
            with torch.autocast("cuda", torch.bfloat16):
                return self.model(x, y)
        return self.model(x, y)

    def _lr(self, index: int) -> float:
        if self.spec.schedule is None:
            return self.spec.lr
        warmup, steps, last = self.spec.schedule
        if self.spec.muon_lr is not None and index >= warmup:
            left = (steps - index) / (steps - warmup)
            return last + (self.spec.lr - last) * max(0.0, left)
        return cosine_lr(index, lr=self.spec.lr, min_lr=last, warmup_steps=warmup, max_steps=steps)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the step's batch; the same batch for every variant."""
        batch_size = self.spec.batch_size
        rows = batch_size // self.spec.world_size
        if self.data is not None:
            first = step * batch_size + self.rank * rows
            x, y = sample_batch(
                self.data.train,
                seed=1337,
                first_sample=first,
                n_samples=rows,
                block_size=self.spec.config.block_size,
                device=self.spec.device,
            )
            return x, y
        generator = torch.Generator().manual_seed(step)
        shape = (batch_size, self.spec.config.block_size + 1)
        tokens = torch.randint(self.spec.config.vocab_size, shape, generator=generator)
        tokens = tokens[self.rank * rows : (self.rank + 1) * rows].to(self.spec.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _exposed_comm_ms(self) -> float | None:
        if self.spec.kind == "stock" or self.spec.world_size == 1:
            return None
        report = engine_of(self.module).report
        return report.exposed_ms if report is not None else None

    @torch.no_grad()
    def val_loss(self) -> float:
        """Mean loss over 64 batches from the start of the validation text."""
        assert self.data is not None
        batches = eval_batches(
            self.data.val,
            batch_size=self.spec.batch_size,
            block_size=self.spec.config.block_size,
            n_batches=64,
            device=self.spec.device,
        )
        losses = [self._loss(x, y).item() * len(x) for x, y in batches]
        return sum(losses) / (64 * self.spec.batch_size)

    def reset_peak(self) -> None:
        if self.spec.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Highest memory so far: of the GPU's allocator, or resident in this process."""
        if self.spec.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return round(1e6 * memory_mb()[1])

    def check(self) -> dict[str, float]:
        """Gradient error of this variant and of plain PyTorch; see [Note: the gate ...]."""
        spec, config = self.spec, self.spec.config
        length = min(CHECK_TOKENS, config.block_size)
        generator = torch.Generator().manual_seed(9)
        shape = (spec.world_size, length + 1)
        tokens = torch.randint(config.vocab_size, shape, generator=generator).to(spec.device)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer.zero_grad()
        model = self.module  # never the compiled one: it would compile for this shape
        model(x[self.rank : self.rank + 1], y[self.rank : self.rank + 1]).backward()
        ours = self._gradients()
        self.optimizer.zero_grad()

        state = self.module.state_dict()
        precision = next(self.module.parameters()).dtype
        grads = {}
        for dtype in (torch.float64, precision):
            plain = stock.GPT(config).load_fastpar(state).to(spec.device, dtype)
            plain(x, y).backward()
            grads[dtype] = {n: p.grad.double() for n, p in plain.named_parameters()}  # type: ignore
        exact = grads[torch.float64]
        return {
            "error": relative_error(ours, exact),
            "stock_error": relative_error(grads[precision], exact),
            "eps": torch.finfo(precision).eps,
        }

    def _gradients(self) -> dict[str, Tensor]:
        """Name -> gradient (mean over ranks) in fp64, without the vocabulary's padding."""
        engine = engine_of(self.module)
        engine.reduce_rest()
        names = {id(p): name for name, p in self.module.named_parameters()}
        found = {names[id(p)]: grad.double() for p, grad in engine.grads()}
        found["wte.weight"] = found["wte.weight"][: self.spec.config.vocab_size]
        return {name: grad.clone() for name, grad in found.items()}


def relative_error(value: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """|value - exact| / |exact| over all tensors together."""
    if value.keys() != exact.keys():
        raise ValueError(
            f"relative_error: expected the tensors {sorted(exact)}, got names={sorted(value)}; "
            "compare models of one shape"
        )
    difference = sum(float((value[n] - exact[n]).square().sum()) for n in exact)
    return (difference / sum(float(t.square().sum()) for t in exact.values())) ** 0.5


def load_text() -> Any:
    """The text that ships with fastpar's dependency, as characters."""
    return load_data("bible", "chars", val_fraction=0.1, progress=False)
