"""Data-parallel training by torch, DeepSpeed and fastpar behind one door: build(name, ...).

Every contender trains the module that the factory makes, with AdamW of the same hyper-parameters
(decay on matrices only, no clipping), each rank on its own rows; forward(x, y) is the mean loss.
torch.distributed is initialized before, or there is one rank. The module has its blocks in `.h`;
a tied head must use the embedding's weight in the root's forward, as bench/stock.py and
fastpar.model.GPT do, so that FSDP2's root unit and ZeRO-3's root module hold it there.

[Note: comparable updates] With Adam's usual eps of 1e-8 a weight whose gradient is nothing but
rounding (the bias of the keys) moves by the whole learning rate in a random direction, in any
framework. Settings.eps is far above such gradients, so that an update is a smooth function of them
and two runs can be compared by their weights. A step costs the same.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar
from bench import stock
from fastpar.mesh import Mesh

ModelFactory = Callable[[], nn.Module]


@dataclass(frozen=True)
class Settings:
    """What all contenders share, and what fastpar alone is given.

    bucket_mb: of DDP, of DeepSpeed's stages 1 and 2, and of fastpar; None leaves each its own.
    fastpar: further arguments of fastpar.parallelize.
    """

    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3  # see [Note: comparable updates]
    weight_decay: float = 0.1
    device: str = "cpu"
    bucket_mb: float | None = None
    fastpar: Mapping[str, Any] = field(default_factory=dict)


def adamw_of(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """torch's fused AdamW over the model's parameters as they are now."""
    optimizer = stock.adamw(model, settings.lr, settings.betas, settings.weight_decay)
    for group in optimizer.param_groups:
        group["eps"] = settings.eps
    return optimizer


class Contender:
    """One rank of one way to train. Ranks: all call step(), weights() and close() together."""

    def __init__(self, name: str, model: nn.Module, optimizer: Any = None):
        self.name, self.model, self.optimizer = name, model, optimizer

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update, gradients dropped; this rank's loss before the update."""
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole under the module's own name, one after another."""
        for name, p in self.model.named_parameters():
            yield name, p.detach()

    def report(self) -> dict[str, float]:
        """Of fastpar's engine: exposed_ms, wire_bytes, ... of the last step, live_bytes now."""
        return {}

    def close(self) -> None:
        self.model = self.optimizer = None  # type: ignore[assignment]


class _DDP(Contender):
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.module.named_parameters():  # type: ignore[union-attr]
            yield name, p.detach()


class _FSDP2(Contender):
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in super().weights():
            yield name, p.full_tensor() if hasattr(p, "full_tensor") else p


class _DeepSpeed(Contender):
    """`model` is DeepSpeed's engine, which steps the optimizer too."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.model(x, y)
        self.model.backward(loss)  # type: ignore[operator]
        self.model.step()  # type: ignore[operator]
        return loss.detach()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        deepspeed = importlib.import_module("deepspeed")
        module: Any = self.model.module
        whole = self.model.zero_optimization_stage() < 3  # type: ignore[operator]
        for name, p in module.named_parameters():
            gather = contextlib.nullcontext() if whole else deepspeed.zero.GatheredParameters([p])
            with gather:
                yield name, p.detach()

    def close(self) -> None:
        self.model.destroy()  # type: ignore[operator]
        super().close()


class _Fastpar(Contender):
    @property
    def engine(self) -> Any:
        return fastpar.engine_of(self.model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.engine.gathered():
            yield from super().weights()

    def report(self) -> dict[str, float]:
        found = getattr(self.engine, "report", None)
        names = ("step_ms", "compute_ms", "comm_ms", "exposed_ms", "wire_bytes")
        values = {n: getattr(found, n, None) for n in names}
        values["live_bytes"] = sum(self.engine.memory().values())
        return {n: v for n, v in values.items() if v is not None}


def _single(name: str, make: ModelFactory, settings: Settings) -> Contender:
    model = make().to(settings.device)
    return Contender(name, model, adamw_of(model, settings))


def _wrapped(make: ModelFactory, settings: Settings) -> nn.parallel.DistributedDataParallel:
    if not dist.is_initialized():
        raise ValueError(
            "build: expected torch.distributed to be initialized, got initialized=False; "
            "start the ranks with torchrun or fastpar.testing.run_ranks"
        )
    cap: dict[str, Any] = {}
    if settings.bucket_mb is not None:
        cap["bucket_cap_mb"] = settings.bucket_mb
    model = make().to(settings.device)
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **cap)


def _ddp(name: str, make: ModelFactory, settings: Settings) -> Contender:
    model = _wrapped(make, settings)
    return _DDP(name, model, adamw_of(model, settings))


def _ddp_zero(name: str, make: ModelFactory, settings: Settings) -> Contender:
    """One ZeroRedundancyOptimizer for each group of hyper-parameters: it takes only one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    model = _wrapped(make, settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = {
        settings.weight_decay: [p for p in trained if p.dim() >= 2],
        0.0: [p for p in trained if p.dim() < 2],
    }
    optimizers = [
        ZeroRedundancyOptimizer(
            params,
            torch.optim.AdamW,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=decay,
            fused=True,
        )
        for decay, params in groups.items()
        if params
    ]
    return _DDP(name, model, _Together(optimizers))


class _Together:
    """Several optimizers as one."""

    def __init__(self, optimizers: list[Any]):
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def _fsdp2(reshard: bool) -> Callable[[str, ModelFactory, Settings], Contender]:
    def build(name: str, make: ModelFactory, settings: Settings) -> Contender:
        """A unit for each block; the root's holds both embeddings, the tied head and ln_f."""
        from torch.distributed.fsdp import fully_shard  # slow to import

        mesh = dist.device_mesh.init_device_mesh(settings.device, (dist.get_world_size(),))
        model = make().to(settings.device)
        for block in model.h:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return _FSDP2(name, model, adamw_of(model, settings))

    return build


def _deepspeed(stage: int) -> Callable[[str, ModelFactory, Settings], Contender]:
    def build(name: str, make: ModelFactory, settings: Settings) -> Contender:
        deepspeed = import_deepspeed(settings.device)
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        model = make().to(settings.device)
        zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
        if settings.bucket_mb is not None:
            zero["reduce_bucket_size"] = int(settings.bucket_mb * 2**20 / 4)  # elements
        config = {
            "train_micro_batch_size_per_gpu": 1,  # names a number, moves no data
            "gradient_accumulation_steps": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is 1.0
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        optimizer = adamw_of(model, settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if stage == 3:  # the tied head is used outside of its own module
            deepspeed.zero.register_external_parameter(engine.module, engine.module.wte.weight)
        return _DeepSpeed(name, engine)

    return build


def import_deepspeed(device: str) -> Any:
    """The package, told which device to serve; ImportError in one line where it is missing."""
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


def _fastpar(
    stage: int, hybrid: bool = False
) -> Callable[[str, ModelFactory, Settings], Contender]:
    def build(name: str, make: ModelFactory, settings: Settings) -> Contender:
        """hybrid: pairs of ranks share one copy, replicas across."""
        mesh = Mesh(device=settings.device)
        options: dict[str, Any] = {"zero_stage": stage, **settings.fastpar}
        if hybrid:
            if mesh.dp_size < 4 or mesh.dp_size % 2:
                raise ValueError(
                    "build: expected 4, 6, 8, ... ranks for HSDP, got "
                    f"world_size={mesh.dp_size}; start more ranks"
                )
            options["shard_size"] = 2
        if settings.bucket_mb is not None:
            options["bucket_mb"] = settings.bucket_mb
        model = fastpar.parallelize(make().to(settings.device), mesh, **options)
        optimizer = fastpar.AdamW(
            [
                {"params": group["params"], "weight_decay": group["weight_decay"]}
                for group in stock.decay_groups(model, settings.weight_decay)
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )
        return _Fastpar(name, model, optimizer)

    return build


SINGLE, DDP = "one process", "DDP"
CONTENDERS: dict[str, Callable[[str, ModelFactory, Settings], Contender]] = {
    SINGLE: _single,
    DDP: _ddp,
    "DDP + ZeRO optimizer": _ddp_zero,
    "FSDP2": _fsdp2(reshard=True),
    "FSDP2, no reshard": _fsdp2(reshard=False),
    "DeepSpeed ZeRO-1": _deepspeed(1),
    "DeepSpeed ZeRO-2": _deepspeed(2),
    "DeepSpeed ZeRO-3": _deepspeed(3),
    "fastpar ZeRO-0": _fastpar(0),
    "fastpar ZeRO-1": _fastpar(1),
    "fastpar ZeRO-2": _fastpar(2),
    "fastpar ZeRO-3": _fastpar(3),
    "fastpar HSDP": _fastpar(3, hybrid=True),
}


def build(name: str, make: ModelFactory, settings: Settings | None = None) -> Contender:
    """The contender of that name, on this rank; raises where it cannot run here.

    Args:
        make: the module on the CPU, with the same weights on every rank.
    Ranks: all, with the same arguments.
    """
    if name not in CONTENDERS:
        raise ValueError(
            f"build: expected one of {', '.join(CONTENDERS)}, got name={name}; choose one of these"
        )
    return CONTENDERS[name](name, make, settings or Settings())


def update_error(
    weights: Iterator[tuple[str, Tensor]],
    exact: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
) -> float:
    """|w - exact| / |exact - start| over all tensors together, taken one after another."""
    wrong = moved = 0.0
    seen = set()
    for name, value in weights:
        there = value.double()[: len(exact[name])]  # without the rows that fastpar pads
        wrong += float((there - exact[name]).square().sum())
        moved += float((exact[name] - start[name]).double().square().sum())
        seen.add(name)
    if seen != set(exact):
        raise ValueError(
            f"update_error: expected the tensors {sorted(exact)}, got names={sorted(seen)}; "
            "compare models of one shape"
        )
    return (wrong / moved) ** 0.5
