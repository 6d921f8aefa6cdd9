"""Every way to train that benches compare, by the name of its rows: build(title, config, ...).

Those of `fastpar compare` (fastpar/observe/strategies.py) by their titles, and what is added to
them here: VARIANTS, which change a setting of one of these, and the pipelines and tensor
parallelism of torch and DeepSpeed. Ways of fastpar train fastpar.GPT, all others stock.py's model,
from the same weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import fastpar
from bench.peers import pipeline, tensor_parallel
from bench.peers.stock import stock_model
from fastpar.models.gpt import use_fp8
from fastpar.observe import strategies
from fastpar.observe.strategies import STRATEGIES, Contender, Settings
from fastpar.settings.model import GPTConfig

NAMES = {strategy.title: name for name, strategy in STRATEGIES.items()}
SINGLE, DDP = (STRATEGIES[name].title for name in (strategies.SINGLE, strategies.DDP))
TP, PP = "fastpar TP", "fastpar PP"


@dataclass(frozen=True)
class Variant:
    """A strategy, by its title, with settings of fastpar and of DeepSpeed's ZeRO. hook: of DDP's
    gradients, by torch's name; fp8: the layers that multiply in 8 bits, emulated; outer: of
    replicas that train apart."""

    of: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    micro_rows: int = 1
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    hook: str = ""
    fp8: str = ""
    outer: Mapping[str, Any] = field(default_factory=dict)


INT8 = {"wire_gradients": "int8", "wire_weights": "int8"}
ZERO_PP = ("zero_quantized_weights", "zero_quantized_gradients")
VARIANTS: dict[str, Variant] = {
    "no communication": Variant(SINGLE),
    "DDP, same buckets": Variant(DDP),
    "DDP, 25 MB buckets": Variant(DDP, {"bucket_mb": 25.0}),
    "DDP, fp16 hook": Variant(DDP, hook="fp16_compress_hook"),
    "DDP, bf16 hook": Variant(DDP, hook="bf16_compress_hook"),  # torch refuses it on gloo
    "DeepSpeed ZeRO++, weights and gradients quantized": Variant(
        "DeepSpeed ZeRO-3", deepspeed=dict.fromkeys(ZERO_PP, True)
    ),
    f"{PP}, 2 rows": Variant(PP, {"schedule": "1f1b"}, micro_rows=2),
    **{
        f"fastpar{stage}, {wire}{', whole sequences' * (not split)}": (
            Variant(TP + stage, {"transport": transport, "sequence_parallel": split})
        )
        for stage in ("", ", ZeRO-1", ", ZeRO-2", ", ZeRO-3")
        for wire, transport in (("gloo", "torch"), ("shm", "shm"))
        for split in (True, False)
    },
    "fastpar ZeRO-2, bf16 both": Variant("fastpar ZeRO-2", dict.fromkeys(INT8, "bf16")),
    "fastpar ZeRO-2, int8 both": Variant("fastpar ZeRO-2", INT8),
    "fastpar ZeRO-3, int8 both": Variant("fastpar ZeRO-3", INT8),
    "fastpar ZeRO-0, int8": Variant("fastpar ZeRO-0", {"wire_gradients": "int8"}),
    "fastpar ZeRO-3, fp8 products": Variant("fastpar ZeRO-3", fp8="all"),
    "fastpar, DiLoCo every 10": Variant("", outer={"every": 10}),
    "fastpar, DiLoCo every 50": Variant("", outer={"every": 50}),
    "fastpar, DiLoCo every 50, int8": Variant("", outer={"every": 50, "wire": "int8"}),
}


def build(title: str, config: GPTConfig, settings: Settings, *, stock: bool = False) -> Contender:
    """The contender of that row, on this rank. Ranks: all, with the same arguments. stock: fastpar
    trains stock.py's model too."""
    for others in (pipeline, tensor_parallel):
        if title in others.WAYS:
            return others.build(title, config, settings)
    variant = VARIANTS.get(title, Variant(title))
    own = title.startswith("fastpar") and not stock

    def make() -> nn.Module:
        model: Any = fastpar.GPT(config, seed=0) if own else stock_model(config)
        if variant.fp8:
            use_fp8(model, variant.fp8, scaling="tensor", emulate=True)
        return model

    if variant.outer:
        apart = fastpar.Mesh(replicas=dist.get_world_size(), device="cpu")
        model = fastpar.parallelize(make(), apart, settings.parallel)
        optimizer = fastpar.AdamW(model.parameters(), **settings.adamw)
        fastpar.Outer(optimizer, **variant.outer)
        return Contender(title, model, optimizer, settings)
    parallel = settings.parallel.change(**variant.parallel)
    how: Any = {"micro_rows": variant.micro_rows, "deepspeed": variant.deepspeed}
    settings = replace(settings, parallel=parallel, **how)
    made = strategies.build(NAMES.get(variant.of, variant.of), make, settings)
    if variant.hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp: Any = made.model
        ddp.register_comm_hook(dist.group.WORLD, getattr(default_hooks, variant.hook))
    return made


def update_error(
    weights: Iterator[tuple[str, Tensor]], exact: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> float:
    """|w - exact| / |exact - start| over all tensors together, taken one after another."""
    wrong, moved, seen = 0.0, 0.0, set()
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
