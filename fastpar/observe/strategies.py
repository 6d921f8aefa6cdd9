"""The table of ways to train one model on several ranks: torch's, DeepSpeed's and fastpar's.

build(name, ...) wraps the module that a factory makes, with AdamW of the same hyper-parameters
(decay on matrices only) or with fastpar.Muon, which is repeated on every rank if the module is not
sharded; each rank computes its own rows, and forward(x, y) is the mean loss. torch.distributed must
be initialized, or there is one rank. The module's blocks are in `.h`; a tied head must use the
embedding's weight in the root's forward, where FSDP2 and ZeRO-3 hold it.

[Note: comparable updates] With Adam's usual eps of 1e-8, a weight whose gradient is only rounding
(the bias of the keys) moves by the whole learning rate in a random direction, in any framework.
Settings.eps is far above such gradients, so that an update is a smooth function of them and two
runs can be compared by their weights. A step costs the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpar.axes.replicas import Outer
from fastpar.comm.mesh import Mesh, gather_tensors
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.optim.adamw import AdamW
from fastpar.optim.muon import Muon, muon_groups
from fastpar.settings.mesh import axes_of
from fastpar.settings.options import OptimSettings
from fastpar.settings.parallel import MeshSettings, Parallel

ModelFactory = Callable[[], nn.Module]
Batch = tuple[Tensor, ...]  # x, y: no dropout, whose masks depend on how a step is split


@dataclass(frozen=True)
class Settings(OptimSettings):
    """What all contenders share: the optimizer's settings of `fastpar train`, and these.

    max_grad_norm: 0: the gradient's norm is not measured either.
    exact_norm: sum torch's norm in fp64; in fp32 it is off by a relative 1e-6 or so on a CPU.
    micro_rows: rows of a pipeline's micro-batch.
    parallel: fastpar's settings. Its bucket_mb also applies to DDP and DeepSpeed's stages 1 and 2,
        its grad_accum_steps are the micro-batches of train_step().
    deepspeed: its ZeRO options.
    """

    lr: float = 6e-4
    max_grad_norm: float = 0.0
    eps: float = 1e-3  # see [Note: comparable updates]
    device: str = "cpu"
    exact_norm: bool = False
    micro_rows: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of every AdamW."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay on matrices only, as nanoGPT configures it."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw_of(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """torch's fused AdamW over the model's current parameters."""
    groups = decay_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, fused=True, **settings.adamw)


def _optimizer_of(model: nn.Module, settings: Settings, ours: bool = False) -> Any:
    """An optimizer for an unsharded module, or (ours) fastpar's, which measures and clips."""
    limit: dict[str, Any] = {}
    if ours:
        half = any(p.dtype != torch.float32 for p in model.parameters())
        limit = {"max_grad_norm": settings.max_grad_norm or None, "master_weights": half}
    decay = settings.weight_decay
    if settings.optimizer == "muon":
        groups, adamw = muon_groups(model), {**settings.adamw, "weight_decay": decay}
        return Muon(groups, lr=settings.muon_lr, weight_decay=decay, adamw=adamw, **limit)
    if not ours:
        return adamw_of(model, settings)
    return AdamW(decay_groups(model, decay), **settings.adamw, **limit)


class Contender:
    """One rank of one way to train. Ranks: all call the same methods together.

    Attributes:
        dp_rank, dp_size: which rows this rank computes, and how many such ranks there are.
        grad_norm: of the last train_step(), over all ranks, before clipping; None: not known.
        no_sync: makes a context in which backward sends nothing; None: not available.
        quiet: makes a context in which steps do all but communicate; None: not available.
    """

    dp_rank, dp_size = 0, 1
    grad_norm: Tensor | None = None
    no_sync: Callable[[], AbstractContextManager] | None = None
    quiet: Callable[[], AbstractContextManager] | None = None

    def __init__(
        self, name: str, model: nn.Module, optimizer: Any = None, settings: Settings | None = None
    ):
        self.name, self.model, self.optimizer = name, model, optimizer
        self.settings = settings or Settings()
        if dist.is_initialized():
            self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update, zero_grad; returns this rank's loss before the update."""
        return self._train([(x, y)])

    def train_step(self, batches: Sequence[Batch], lr: float) -> Tensor:
        """A step of several micro-batches at this rate; returns the mean of this rank's losses."""
        of_muon = self.settings.muon_lr / self.settings.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr if group.get("adamw", True) else lr * of_muon
        return self._train(batches)

    def _train(self, batches: Sequence[Batch]) -> Tensor:
        loss = self._gradients(batches)
        self._update()
        return loss

    def _gradients(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of the micro-batches; returns the mean of their losses."""
        losses = []
        for j, (x, y) in enumerate(batches):
            is_last = self.no_sync is None or j == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.no_sync():  # type: ignore[misc]
                loss = self.model(x, y)
                self._backward(loss, len(batches))
            losses.append(loss.detach())
        return torch.stack(losses).double().mean()

    def _backward(self, loss: Tensor, n: int) -> None:
        (loss / n).backward()

    def _update(self) -> None:
        limit = self.settings.max_grad_norm
        if limit:
            params = [p for p in self.model.parameters() if p.grad is not None]
            grads = [p.grad for p in params if p.grad is not None]
            if self.settings.exact_norm:
                grads = [grad.double() for grad in grads]
            norm: Any = nn.utils.get_total_norm(grads)
            nn.utils.clip_grads_with_norm_(params, limit, norm)  # as clip_grad_norm_ does
            self.grad_norm = whole(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every full parameter under the module's own name, one after another."""
        for name, p in self.model.named_parameters():
            yield name.removeprefix("module."), whole(p.detach())  # of DDP; of FSDP2

    def report(self) -> dict[str, float]:
        """For fastpar only: exposed_ms, wire_bytes, ... of the last step; live_bytes now."""
        return {}

    def close(self) -> None:
        self.model = self.optimizer = self.no_sync = self.quiet = None  # type: ignore[assignment]


def whole(x: Any) -> Any:
    """The full tensor of one that FSDP2 has sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class _DeepSpeed(Contender):
    """`model` is DeepSpeed's engine, which also steps the optimizer."""

    def _backward(self, loss: Tensor, n: int) -> None:
        """DeepSpeed divides by the number of micro-batches, and updates after the last one."""
        self.model.backward(loss)  # type: ignore[operator]
        self.model.step()  # type: ignore[operator]

    def _update(self) -> None:
        norm = self.model.get_global_grad_norm()  # type: ignore[operator]
        self.grad_norm = (
            None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device="cpu")
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        gathered = importlib.import_module("deepspeed").zero.GatheredParameters
        whole = self.model.zero_optimization_stage() < 3  # type: ignore[operator]
        for name, p in self.model.module.named_parameters():  # type: ignore[union-attr]
            with contextlib.nullcontext() if whole else gathered([p]):
                yield name, p.detach()

    def close(self) -> None:
        self.model.destroy()  # type: ignore[operator]
        super().close()


class _Fastpar(Contender):
    outer: Outer | None = None

    @property
    def engine(self) -> Any:
        return engine_of(self.model)

    def _update(self) -> None:
        self.optimizer.step()  # it measures and clips
        self.optimizer.zero_grad()
        self.grad_norm = self.optimizer.grad_norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        mesh = STRATEGIES[self.name].mesh
        if mesh.tp > 1 or mesh.ep != 1:
            yield from self.model.state_dict().items()
            return
        with self.engine.gathered():
            yield from super().weights()

    def report(self) -> dict[str, float]:
        names = ("step_ms", "compute_ms", "comm_ms", "exposed_ms", "wire_bytes")
        numbers = {name: getattr(self.engine.report, name, None) for name in names}
        values = {name: value for name, value in numbers.items() if value is not None}
        values["live_bytes"] = sum(self.engine.memory().values())
        if self.outer is not None and (steps := self.outer.steps):  # the mean per step
            values["wire_bytes"] = values.get("wire_bytes", 0) + self.outer.sent_bytes / steps
            waited_ms = self.outer.waited_s * 1e3 / steps
            values["exposed_ms"] = values.get("exposed_ms", 0.0) + waited_ms
        return values


class _Pipeline(_Fastpar):
    """Each rank has some of the layers; the micro-batches of a step run one after another."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.settings.micro_rows
        return self._train(list(zip(x.split(rows), y.split(rows))))

    def _gradients(self, batches: Sequence[Batch]) -> Tensor:
        x, y = map(torch.cat, zip(*batches))
        return pipeline_step(self.model, x, y, micro_batches=len(batches))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = {name: w.clone() for name, w in super().weights()}  # gathered only until the end
        for theirs in gather_tensors(weights, self.engine.mesh.group("pp")):
            yield from theirs.items()


def _single(strategy: Strategy, model: nn.Module, settings: Settings) -> Contender:
    return Contender(strategy.name, model, _optimizer_of(model, settings), settings)


def _ddp(strategy: Strategy, model: nn.Module, settings: Settings) -> Contender:
    if not dist.is_initialized():
        raise ValueError(
            "build: expected torch.distributed to be initialized, got initialized=False; "
            "start the ranks with torchrun or fastpar.testing.run_ranks"
        )
    how: dict[str, Any] = {"bucket_cap_mb": settings.parallel.bucket_mb}
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **how)
    made = Contender(strategy.name, ddp, None, settings)
    made.no_sync = ddp.no_sync
    if not strategy.parallel:
        made.optimizer, made.quiet = _optimizer_of(model, settings), ddp.no_sync
        return made
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    groups, adamw = decay_groups(ddp, settings.weight_decay), torch.optim.AdamW  # sends weights
    made.optimizer = ZeroRedundancyOptimizer(groups, adamw, fused=True, **settings.adamw)
    return made


def _fsdp2(strategy: Strategy, model: nn.Module, settings: Settings) -> Contender:
    """A unit per block; the root's holds both embeddings, the tied head and ln_f."""
    from torch.distributed.fsdp import fully_shard  # slow to import

    mesh = dist.device_mesh.init_device_mesh(settings.device, (dist.get_world_size(),))
    reshard = strategy.parallel["zero_stage"] == 3
    for unit in (*model.h, model):  # type: ignore[misc]
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    return Contender(strategy.name, model, adamw_of(model, settings), settings)


def _deepspeed(strategy: Strategy, model: nn.Module, settings: Settings) -> Contender:
    deepspeed = import_deepspeed(settings.device)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    ours, stage = settings.parallel, strategy.parallel["zero_stage"]
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, **settings.deepspeed}
    if ours.bucket_mb is not None:
        zero["reduce_bucket_size"] = int(ours.bucket_mb * 2**20 / 4)  # elements
    config = {
        "train_micro_batch_size_per_gpu": 1,  # names a number, moves no data
        "gradient_accumulation_steps": ours.grad_accum_steps or 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": settings.max_grad_norm,  # its default is 1.0
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    optimizer = adamw_of(model, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if stage == 3:  # the tied head is used outside of its own module
        deepspeed.zero.register_external_parameter(engine.module, engine.module.wte.weight)
    return _DeepSpeed(strategy.name, engine, engine.optimizer, settings)


def import_deepspeed(device: str) -> Any:
    """Imports DeepSpeed for a device; raises a one-line ImportError if it is missing."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "deepspeed":
            raise
        raise ImportError("deepspeed is not installed") from None
    deepspeed.utils.logger.setLevel("ERROR")
    return deepspeed


def _fastpar(strategy: Strategy, model: nn.Module, settings: Settings) -> Contender:
    world = dist.get_world_size() if dist.is_initialized() else 1
    axes = axes_of(strategy.mesh)
    axes |= {name: world for name, size in axes.items() if size == 0}
    mesh = Mesh(**axes, device=settings.device)
    parallel = settings.parallel.change(**strategy.parallel)
    if parallel.shard_size and (mesh.dp_size < 4 or mesh.dp_size % 2):
        raise ValueError(
            "build: expected 4, 6, 8, ... ranks for HSDP, got "
            f"world_size={mesh.dp_size}; start more ranks"
        )
    model = parallelize(model, mesh, parallel)
    optimizer = _optimizer_of(model, settings, ours=True)
    kind = _Fastpar if strategy.mesh.pp == 1 else _Pipeline
    made = kind(strategy.name, model, optimizer, settings)
    made.dp_rank, made.dp_size = mesh.dp_rank, mesh.dp_size
    if strategy.steps_apart:
        made.dp_rank, made.dp_size = mesh.replica, mesh.replicas
        made.outer = Outer(optimizer, every=strategy.steps_apart)
    return made


_IMPORTS = {
    "torch": ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"),
    "deepspeed": ("torch._dynamo", "deepspeed"),
}


@dataclass(frozen=True)
class Strategy:
    """A way to train.

    name: as typed; title: in tables of bench. package: what it needs, besides torch.
    parallel: settings of fastpar by name; for others, their equivalent ZeRO stage.
    mesh: sizes of the axes; 0: all ranks. ranks: it runs on multiples of this, at least `at_least`;
    one_rank: always on one. adamw_only: it cannot step whole matrices. sparse: it trains the model
    with experts instead of MLPs. steps_apart: steps between exchanges, during which each rank
    trains its own weights; 0: none.
    """

    name: str
    title: str
    build: Callable[[Strategy, nn.Module, Settings], Contender]
    package: str = "fastpar"
    parallel: Mapping[str, Any] = field(default_factory=dict)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    ranks: int = 1
    at_least: int = 1
    one_rank: bool = False
    adamw_only: bool = False
    sparse: bool = False
    steps_apart: int = 0

    @property
    def other_run(self) -> bool:
        """Whether its losses are not expected to equal those of one process."""
        return self.sparse or self.steps_apart > 0

    def model_ranks(self, nproc: int) -> int:
        """Ranks that compute the same sequences together."""
        return self.mesh.tp * self.mesh.cp * (self.mesh.pp or nproc)

    def import_all(self) -> None:
        """Imports what the first step would import: memory that is not part of training."""
        for name in _IMPORTS.get(self.package, ()):
            importlib.import_module(name)

    def why_not(self, nproc: int, optimizer: str = "adamw") -> str | None:
        """Why it cannot run on `nproc` ranks of this machine; None: it can."""
        if self.adamw_only and optimizer != "adamw":
            return f"shards matrices, which {optimizer} does not support"
        if nproc < self.at_least:
            return f"needs {self.at_least} ranks, got {nproc}"
        if nproc % self.ranks:
            return f"needs a multiple of {self.ranks} ranks, got {nproc}"
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None


SINGLE, DDP = "single", "ddp"
_STAGES = (1, 2, 3)
_2: dict[str, Any] = {"at_least": 2}
_PAIRS: dict[str, Any] = {"at_least": 2, "ranks": 2}
_4: dict[str, Any] = {"at_least": 4, "ranks": 2}
_INT8 = {"wire_gradients": "int8", "wire_weights": "int8"}
# Name, title, settings, axes, more.
_OURS: tuple[Any, ...] = (
    ("dp", "ZeRO-0", {}, {}, {}),
    *((f"zero{n}", f"ZeRO-{n}", {"zero_stage": n}, {}, {}) for n in _STAGES),
    ("zero2-int8", "ZeRO-2, int8 wires", {"zero_stage": 2, **_INT8}, {}, {}),
    ("diloco", "DiLoCo", {}, {"replicas": 0}, {"steps_apart": 20, **_2}),
    ("hsdp", "HSDP", {"zero_stage": 3, "shard_size": 2}, {}, _4),
    ("tp", "TP", {}, {"tp": 2}, _PAIRS),
    *((f"tp-zero{n}", f"TP, ZeRO-{n}", {"zero_stage": n}, {"tp": 2}, _4) for n in _STAGES),
    ("cp", "CP", {}, {"cp": 2}, _PAIRS),
    ("cp-keys", "CP, keys", {"cp_method": "keys"}, {"cp": 2}, _PAIRS),
    ("pp", "PP", {}, {"pp": 0}, _2),
    ("dp-pp", "DP x PP", {}, {"pp": 2}, _4),
    ("experts", "experts", {}, {}, {"sparse": True}),
    ("ep", "EP", {}, {"ep": 0}, {"sparse": True, **_2}),
)
_ALL = (
    Strategy(SINGLE, "one process", _single, "torch", one_rank=True),
    Strategy(DDP, "DDP", _ddp, "torch"),
    *(
        Strategy(name, title, make, package, {"zero_stage": stage}, adamw_only=True)
        for name, title, make, package, stage in (
            ("ddp-zero", "DDP + ZeRO optimizer", _ddp, "torch", 1),
            ("fsdp2", "FSDP2", _fsdp2, "torch", 3),
            ("fsdp2-no-reshard", "FSDP2, no reshard", _fsdp2, "torch", 2),
            *(
                (f"deepspeed{n}", f"DeepSpeed ZeRO-{n}", _deepspeed, "deepspeed", n)
                for n in _STAGES
            ),
        )
    ),
    *(
        Strategy(name, f"fastpar {title}", _fastpar, "fastpar", own, MeshSettings(**axes), **more)
        for name, title, own, axes, more in _OURS
    ),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}


def build(name: str, make: ModelFactory, settings: Settings | None = None) -> Contender:
    """The contender of that name, on this rank.

    Args:
        make: makes the module on the CPU, with the same weights on every rank.
    Raises:
        ValueError: an unknown name, or one that cannot run here.
    Ranks: all, with the same arguments.
    """
    if name not in STRATEGIES:
        raise ValueError(
            f"build: expected one of {', '.join(STRATEGIES)}, got name={name}; choose one of these"
        )
    strategy, settings = STRATEGIES[name], settings or Settings()
    if strategy.adamw_only and settings.optimizer != "adamw":
        raise ValueError(
            f"build: expected optimizer=adamw for {name}, which shards matrices, got "
            f"optimizer={settings.optimizer}; choose another strategy"
        )
    return strategy.build(strategy, make().to(settings.device), settings)
