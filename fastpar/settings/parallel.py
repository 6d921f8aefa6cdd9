"""Settings of parallel training, for fastpar.parallelize() and `fastpar train`.

Each setting is declared here once. Its name, or the one in called(), is its flag, its key in files
and its keyword of Parallel.of(). The text under a field is its help. None: the runtime decides, or
the feature is off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastpar.settings.fields import More, called, changed, for_tyro, more, of_axes

_FORMATS = {
    **{"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"},
    "torch.float64": "fp64",
}


@dataclass(frozen=True)
class MeshSettings:
    """Mesh: how many ranks each axis has. The remaining factor of nproc is data parallel."""

    tp: int = 1
    """Tensor parallelism: number of neighbouring ranks that split each layer."""
    tp_grid: str | None = None
    """2-D (2.5-D) tensor parallelism instead of tp: ROWSxCOLUMNS(xDEPTH) ranks, such as 2x2."""
    cp: int = 1
    """Context parallelism: number of ranks that split each sequence, for long contexts."""
    ep: int = 1
    """Expert parallelism: number of data-parallel ranks among which experts are distributed."""
    pp: int = 1
    """Pipeline parallelism: number of ranks, each with a part of the layers."""
    replicas: int = 1
    """Number of replicas that synchronize only every outer-every steps (DiLoCo, local SGD).
    Each has nproc / replicas ranks."""

    def __post_init__(self) -> None:
        if self.tp_grid == "none":  # a file, or a run of an earlier version
            object.__setattr__(self, "tp_grid", None)


@dataclass(frozen=True)
class Precision:
    """Precision of gradients. In Python, a torch.dtype is accepted as well."""

    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format in which gradients are accumulated; unset: fp32.
    Unset in parallelize(): the format of the parameters."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format in which gradients are sent; they are summed in fp32. Unset: grad-dtype."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _FORMATS.get(str(value), value))


@dataclass(frozen=True)
class Wires:
    """Compressed communication, for slow links."""

    gradients: Annotated[Literal["fp32", "bf16", "int8"], called("wire_gradients")] = "fp32"
    """Compress sent gradients, with stochastic rounding; sums are fp32.
    fp32: no compression, send in reduce-dtype."""
    weights: Annotated[Literal["bf16", "int8"] | None, called("wire_weights")] = None
    """Format of gathered weights (ZeRO 1 to 3); unset: not compressed."""
    node_size: int | None = None
    """Data-parallel ranks per node, for secondary-shards."""
    secondary_shards: bool = False
    """At ZeRO 3, each rank keeps 1 / node-size of gathered weights.
    Backward then gathers within the node only."""


@dataclass(frozen=True)
class Offload:
    """Offload to host memory; the results are the same bit for bit."""

    what: Annotated[Literal["optimizer", "parameters"] | None, called("offload")] = None
    """Keep the optimizer state in host memory, or weights too (parameters); unset: off."""
    keep_mb: Annotated[float, called("offload_keep_mb")] = 0.0
    """MiB of optimizer state to keep on the GPU, for the weights that forward needs first."""
    pinned: Annotated[bool, called("offload_pinned")] = True
    """Use pinned (page-locked) host memory; without it, copies run at half the speed."""


@dataclass(frozen=True)
class Pipeline:
    """Pipeline schedule. In Python, the split may be a sequence of numbers."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """1f1b keeps activations of at most pp micro-batches, gpipe of all.
    interleaved has smaller bubbles."""
    chunks: int | None = None
    """With schedule interleaved: number of stages on each rank; unset: 2."""
    split: Annotated[str | None, called("pp_split")] = None
    """Layers in each stage, such as 8,4; unset: balanced by cost, with the output layer counted."""

    def __post_init__(self) -> None:
        if self.split == "auto":  # a file, or a run of an earlier version
            object.__setattr__(self, "split", None)
        elif self.split is not None and not isinstance(self.split, str):
            object.__setattr__(self, "split", ",".join(map(str, self.split)))


@dataclass(frozen=True)
class Parallel:
    """Sharding and communication."""

    zero_stage: Annotated[Literal[0, 1, 2, 3], for_tyro(lambda c: c.arg(aliases=["--zero"]))] = 0
    """What data-parallel ranks shard. 0: nothing (DDP), 1: optimizer state,
    2: gradients too, 3: weights too (FSDP)."""
    shard_size: int | None = None
    """Ranks per sharding group (HSDP): the groups replicate each other.
    Unset: all data-parallel ranks are one group."""
    grad_accum_steps: int | None = None
    """Micro-batches per rank and step; unset: as many as needed (parallelize(): 1)."""
    accumulate: Literal["shard", "full"] | None = None
    """Reduce gradients of each micro-batch (shard), or once per step (full: more memory).
    Unset: full at ZeRO 0 and 1, shard at 2 and 3; in parallelize(): shard."""
    deterministic: bool = False
    """Sum gradients in a fixed order: the same bits for every ZeRO stage,
    and for every split of a batch into data-parallel ranks and micro-batches."""
    precision: Precision = field(default_factory=Precision)
    wires: Wires = field(default_factory=Wires)
    offload: Offload = field(default_factory=Offload)
    pipeline: Pipeline = field(default_factory=Pipeline)
    sequence_parallel: bool | None = None
    """With tp: split tokens across tp ranks between layers. Unset: on if possible."""
    cp_method: Literal["heads", "keys"] = "heads"
    """heads: exchange heads by all-to-all (Ulysses); needs at least cp heads per tp rank.
    keys: all-gather keys and values; works for any cp."""
    transport: Literal["auto", "shm", "torch"] = "auto"
    """shm: shared memory between CPU ranks of one machine; torch: gloo or NCCL.
    auto: shm if possible."""
    bucket_mb: float | None = None
    """Bucket size in MB: gradients per collective; unset: chosen by the number of ranks."""
    first_bucket_mb: float = 1.0
    """Size of the first bucket in MB; smaller modules share a bucket with their neighbours."""
    prefetch: int = 1
    """At ZeRO 3: number of blocks whose weights are gathered ahead of use."""
    more: Annotated[More, of_axes()] = field(default_factory=more)
    """Settings of additionally registered axes; see fastpar/axes."""

    @classmethod
    def of(cls, **values: Any) -> Parallel:
        """Build from settings by their names in `fastpar train`, such as wire_gradients="int8".

        Raises:
            ValueError: unknown setting.
        """
        return changed(cls(), values)

    def change(self, **values: Any) -> Parallel:
        """A copy with some settings changed, by the same names as of()."""
        return changed(self, values)
