"""How ranks share out a training run: the settings of fastpar.parallelize and of `fastpar train`.

Each is declared here once. Its name, or the one in called(), is its flag, its name in files and in
Parallel.of(). The text under a field is its help. None is what the runtime decides, or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastpar.settings.fields import More, called, changed, for_tyro

_FORMATS = {
    **{"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"},
    "torch.float64": "fp64",
}


@dataclass(frozen=True)
class MeshSettings:
    """How many ranks split what: the axes of the mesh; the others of nproc are data parallel."""

    tp: int = 1
    """Neighbouring ranks that split each layer."""
    tp_grid: str | None = None
    """Rows x columns (x depth) of ranks that split each layer both ways, in place of tp: 2x2."""
    cp: int = 1
    """Ranks that share every sequence, for long contexts."""
    ep: int = 1
    """Data-parallel ranks that share out the experts."""
    pp: int = 1
    """Ranks that each have some of the layers, as a pipeline."""
    replicas: int = 1
    """Models that train apart and meet every outer-every steps, each on nproc / replicas ranks."""

    def __post_init__(self) -> None:
        if self.tp_grid == "none":  # of a file, or of a run of an earlier version
            object.__setattr__(self, "tp_grid", None)


@dataclass(frozen=True)
class Precision:
    """Formats of gradients.

    Each is given by its name or as a torch.dtype, and kept as its name.
    """

    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format in which gradients are summed; unset: fp32 (parallelize(): the parameters')."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format of gradients on the wire; unset: grad-dtype's. Sums are fp32."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _FORMATS.get(str(value), value))


@dataclass(frozen=True)
class Wires:
    """Formats of what is sent, for slow links."""

    gradients: Annotated[Literal["fp32", "bf16", "int8", "int4"], called("wire_gradients")] = "fp32"
    """Send gradients so, rounded without bias, added up in fp32; fp32: in reduce-dtype."""
    weights: Annotated[Literal["bf16", "int8", "fp8"] | None, called("wire_weights")] = None
    """Gather weights so at stages 1 to 3; fp8, at 3 with fp8-scaling tensor, keeps all bits."""
    error_feedback: bool = False
    """Add what a gradient lost on the wire to the next; free at stage 1, 4 bytes each at 0."""
    error_buffer: bool = False
    """The same at stages 2 and 3, for 4 bytes a parameter on every rank."""
    node_size: int | None = None
    """Ranks of a copy on one node: wire-gradients are added up there before they leave it."""
    secondary_shards: bool = False
    """Stage 3 keeps 1 / node-size of gathered weights, and gathers again inside of the node."""


@dataclass(frozen=True)
class Offload:
    """What waits in the host's memory. The bits are the same as without."""

    what: Annotated[Literal["optimizer", "parameters"] | None, called("offload")] = None
    """The optimizer's state on the host, or weights too."""
    keep_mb: Annotated[float, called("offload_keep_mb")] = 0.0
    """MiB of that state that stay on the GPU: of what a forward needs first."""
    pinned: Annotated[bool, called("offload_pinned")] = True
    """Lock the memory that copies use; --no-offload-pinned: half the speed."""


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline. Its split may also be given as numbers."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    """Order of a pipeline's work: 1f1b holds pp micro-batches at once, gpipe all; others wait less.
    """
    chunks: int | None = None
    """Stages on each rank with schedule interleaved; unset: 2."""
    split: Annotated[str | None, called("pp_split")] = None
    """Layers of each stage of a pipeline, such as 8,4; unset: by cost, the output layer counted."""

    def __post_init__(self) -> None:
        if self.split == "auto":  # of a file, or of a run of an earlier version
            object.__setattr__(self, "split", None)
        elif self.split is not None and not isinstance(self.split, str):
            object.__setattr__(self, "split", ",".join(map(str, self.split)))


@dataclass(frozen=True)
class Parallel:
    """What ranks share out, and how gradients are summed."""

    zero_stage: Annotated[Literal[0, 1, 2, 3], for_tyro(lambda c: c.arg(aliases=["--zero"]))] = 0
    """Ranks share 0: nothing, 1: the optimizer's state, 2: and gradients, 3: and weights."""
    shard_size: int | None = None
    """Ranks that share one of several copies; unset: all."""
    grad_accum_steps: int | None = None
    """Micro-batches a rank and step; unset: as many as needed (parallelize(): one)."""
    accumulate: Literal["shard", "full"] | None = None
    """Reduce each micro-batch (shard), or once; unset: full at 0 and 1 (parallelize(): shard)."""
    deterministic: bool = False
    """The same bits at every stage and split of a step into dp ranks and micro-batches."""
    precision: Precision = field(default_factory=Precision)
    wires: Wires = field(default_factory=Wires)
    offload: Offload = field(default_factory=Offload)
    pipeline: Pipeline = field(default_factory=Pipeline)
    sequence_parallel: bool | None = None
    """Ranks of tp share out tokens, too, where layers are not split; unset: where they can."""
    cp_method: Literal["heads", "keys"] = "heads"
    """heads: ranks of cp exchange heads; keys: they gather keys, and may be more than the heads."""
    transport: Literal["auto", "shm", "torch"] = "auto"
    """auto: shared memory of CPU ranks, else gloo or NCCL."""
    bucket_mb: float | None = None
    """MB of gradients a collective; unset: by number of ranks."""
    first_bucket_mb: float = 1.0
    """MB of the first collective; modules below it are merged with their neighbours."""
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of their use, at stage 3."""
    more: Annotated[More, More.of_command()] = field(default_factory=More)
    """Settings of axes that were registered; see fastpar/axes."""

    def __post_init__(self) -> None:
        if not isinstance(self.more, More):  # as a command line makes it
            object.__setattr__(self, "more", More(**vars(self.more)))

    @classmethod
    def of(cls, **values: Any) -> Parallel:
        """Of settings by the names that `fastpar train` has, such as wire_gradients="int8".

        Raises:
            ValueError: no such setting.
        """
        return changed(cls(), values)

    def change(self, **values: Any) -> Parallel:
        """A copy with some settings changed, by the same names."""
        return changed(self, values)
