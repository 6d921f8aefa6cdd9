"""The parts of a predicted step: a workload (what is trained), a setup (a layout), operations.

Axes and predict/time.py count Ops and CommOps; Rates know their durations on a machine.

Arithmetic only: no tensors, no ranks. Shape legend as in gpt.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fastpar.comm.wires import FORMATS
from fastpar.files.tensor_file import DTYPES
from fastpar.settings.config import TrainConfig
from fastpar.settings.fields import changed, flat, leaves
from fastpar.settings.mesh import parse_grid, pp_chunks, pp_split
from fastpar.settings.model import GPTConfig, count_parameters
from fastpar.settings.options import ModelSettings, OptimSettings, RecomputeSettings, TrainFlags
from fastpar.settings.parallel import MeshSettings, Parallel
from fastpar.sharding.layout import default_bucket_mb

ALIKE = 0.01  # the model does not resolve smaller differences, relative to a step's time


@dataclass(frozen=True)
class Workload:
    """What is trained, independent of the layout.

    Attributes:
        shape: its block_size is the tokens of a sequence.
        batch_size: sequences per step, over all ranks.
    """

    shape: GPTConfig
    batch_size: int

    @property
    def seq_len(self) -> int:
        return self.shape.block_size

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def n_parameters(self) -> int:
        """Stored parameters, with the vocabulary's padding, the tied head counted once."""
        return count_parameters(self.shape, padded=True)


@dataclass(frozen=True, init=False)
class Setup:
    """One way to train a workload: the effective settings of a run on world_size ranks.

    Settings are read where they stand: setup.parallel.zero_stage, setup.flags.system.fp8. What a
    run decides, or omits, is an attribute with the effective value, never "auto": setup.dtype.

    Args:
        flags: the settings; those in `settings` override them.
        device_type: "cuda" or "cpu".
        transport: in effect: "nccl", "shm" or "gloo".
        settings: by name; dtype defaults to bf16, micro_batch_size and grad_accum_steps to 1.
    """

    world_size: int
    flags: TrainFlags
    device_type: str
    transport: str

    def __init__(
        self,
        world_size: int = 1,
        flags: TrainFlags | None = None,
        device_type: str = "cuda",
        transport: str = "nccl",
        **settings: Any,
    ) -> None:
        if type(flags) is not TrainFlags:  # a TrainConfig would check each change
            flags = TrainFlags(**({} if flags is None else vars(flags)))
        flags = changed(flags, settings, "Setup") if settings else flags
        facts = {"world_size": world_size, "device_type": device_type, "transport": transport}
        vars(self).update(facts, flags=flags)

    @property
    def mesh(self) -> MeshSettings:
        return self.flags.mesh

    @property
    def parallel(self) -> Parallel:
        return self.flags.parallel

    @property
    def optim(self) -> OptimSettings:
        return self.flags.optim

    @property
    def recompute(self) -> RecomputeSettings:
        return self.flags.recompute

    def change(self, **values: Any) -> Setup:
        """A copy with some settings, or facts, changed."""
        facts = {"world_size": self.world_size, "device_type": self.device_type}
        facts |= {"flags": self.flags, "transport": self.transport}
        return Setup(**{**facts, **values})

    def in_effect(self) -> dict[str, Any]:
        """The settings of the layout by name, as in `fastpar plan --json`."""
        optim, system = self.optim, self.flags.system
        return {
            **flat(self.mesh),
            **flat(self.parallel),
            **flat(self.recompute),
            **{"tp": self.tp, "chunks": self.chunks, "pp_split": self.pp_split},
            **{"grad_accum_steps": self.grad_accum_steps, "accumulate": self.accumulate},
            **{"grad_dtype": self.grad_dtype, "reduce_dtype": self.reduce_dtype},
            **{"sequence_parallel": self.sequence_parallel, "transport": self.transport},
            **{"micro_batch_size": self.micro_batch_size, "optimizer": optim.optimizer},
            **{"dtype": self.dtype, "master_weights": self.master_weights, "ema": optim.ema},
            **{"moment_dtype": optim.moment_dtype, "fp8": system.fp8},
            **{"fp8_scaling": system.fp8_scaling, "fp8_emulate": system.fp8_emulate},
            **{"world_size": self.world_size, "device_type": self.device_type},
        }

    def workload(self, shape: GPTConfig) -> Workload:
        """The workload of a run with these settings, for each replica."""
        shape = replace(shape, block_size=self.flags.shape.block_size or shape.block_size)
        return Workload(shape, self.flags.text.batch_size // self.mesh.replicas)

    def config(self, workload: Workload) -> TrainConfig:
        """The run's settings.

        Raises:
            ValueError: `fastpar train` refuses them.
        """
        return TrainConfig(**vars(self.with_sizes(workload)))

    def with_sizes(self, workload: Workload) -> TrainFlags:
        """The settings with those of the workload."""
        sizes = {n: v for n, v in vars(workload.shape).items() if n in leaves(ModelSettings)}
        sizes["expert_top_k"] = workload.shape.top_k
        return self.flags.replace({**sizes, "batch_size": workload.batch_size})

    @cached_property
    def tp(self) -> int:
        """Ranks that split each layer; of a grid, its columns."""
        grid = parse_grid(self.mesh.tp_grid)
        return self.mesh.tp if grid is None else grid[1]

    @cached_property
    def chunks(self) -> int:
        return pp_chunks(self.parallel.pipeline.schedule, self.parallel.pipeline.chunks)

    @cached_property
    def pp_split(self) -> tuple[int, ...] | None:
        """Layers on each of the pp * chunks stages; None: by their FLOPs."""
        split = pp_split(self.parallel.pipeline.split)
        return None if split is None else tuple(split)

    @cached_property
    def micro_batch_size(self) -> int:
        value = self.flags.text.micro_batch_size
        return 1 if value is None else value

    @cached_property
    def grad_accum_steps(self) -> int:
        value = self.parallel.grad_accum_steps
        return 1 if value is None else value

    @cached_property
    def accumulate(self) -> str:
        return self.parallel.accumulate or ("full" if self.parallel.zero_stage < 2 else "shard")

    @cached_property
    def dtype(self) -> str:
        value = self.flags.system.dtype
        return "bf16" if value == "auto" else value

    @cached_property
    def grad_dtype(self) -> str:
        return self.parallel.precision.grad_dtype or "fp32"

    @cached_property
    def reduce_dtype(self) -> str:
        return self.parallel.precision.reduce_dtype or self.grad_dtype

    @cached_property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel is not False

    @cached_property
    def master_weights(self) -> str:
        """none, full or remainder."""
        if self.weight_bytes > 2 or self.optim.stochastic_rounding:
            return "none"
        value = self.optim.master_weights
        return "full" if value == "auto" else value

    @cached_property
    def dp(self) -> int:
        """Ranks, or groups of tp * cp * pp ranks, that compute different sequences."""
        return self.data // (self.mesh.cp * self.depth)

    @cached_property
    def data(self) -> int:
        """Ranks, or groups of tp * pp ranks, with the same weights and different tokens."""
        return self.world_size // (self.tp * self.rows * self.mesh.pp)

    @cached_property
    def rows(self) -> int:
        """Rows of the grid of ranks, whose columns are tp; 1 without a grid."""
        return (parse_grid(self.mesh.tp_grid) or (1,))[0]

    @cached_property
    def depth(self) -> int:
        """Number of grids over which a batch is split."""
        return (*(parse_grid(self.mesh.tp_grid) or (1, 1)), 1)[2]

    @property
    def samples_of_rank(self) -> int:
        """Samples of a micro-batch on a rank; rows and depth of a grid split them."""
        return max(1, self.micro_batch_size // (self.rows * self.depth))

    @cached_property
    def n_shards(self) -> int:
        """Ranks that shard one replica."""
        shards = min(self.data, self.parallel.shard_size or self.data)
        return shards if self.parallel.zero_stage else 1

    def tokens_of_rank(self, workload: Workload) -> int:
        """Tokens of a micro-batch on a rank, before tp splits them."""
        if self.by_keys:  # two chunks of each row
            return 2 * self.micro_batch_size * -(-workload.seq_len // (2 * self.mesh.cp))
        ranks = self.mesh.cp * self.rows * self.depth
        return -(-self.micro_batch_size * workload.seq_len // ranks)

    @cached_property
    def by_keys(self) -> bool:
        """Whether ranks of cp attend all heads of their own tokens."""
        return self.mesh.cp > 1 and self.parallel.cp_method == "keys"

    @cached_property
    def stage(self) -> int:
        """The stage in effect: 0 without ranks to shard over, unless offload is on."""
        shards = self.n_shards > 1 or self.parallel.offload.what is not None
        return self.parallel.zero_stage if shards else 0

    @cached_property
    def bucket_bytes(self) -> float:
        """The cap of a bucket."""
        usual = default_bucket_mb(self.data, self.transport if self.data > 1 else "none")
        size = self.parallel.bucket_mb
        return (usual if size is None else size) * 2**20

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes per element of weights and activations."""
        return DTYPES[self.dtype].itemsize

    @cached_property
    def grad_bytes(self) -> int:
        return DTYPES[self.grad_dtype].itemsize

    @property
    def wire_bytes(self) -> float:
        """Bytes per element of a gradient that is sent."""
        form = FORMATS.get(self.parallel.wires.gradients)
        return DTYPES[self.reduce_dtype].itemsize if form is None else form.bytes_per_element

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per element: moments, average, and the rest of 16-bit weights.

        Matrices of muon have 4 less: see predict_states().
        """
        optim, factored = self.optim, self.optim.optimizer == "adafactor"
        moments = 0 if factored else 2 * DTYPES[optim.moment_dtype].itemsize
        moments += 4 if optim.ema else 0
        return moments + {"none": 0, "full": 4, "remainder": 2}[self.master_weights]


# Operations of a step


class Op(NamedTuple):
    """One kind of operation of a rank, `count` times in a step.

    name, shape (per rank):
        matmul         (M, K, N): x[M, K] @ w[N, K].T; backward is both products, dx and dw
        attention      (B, H, T, D), causal
        layer_norm     (N, C): residual_layer_norm
        bias_gelu      (N, F)
        embedding      (N, C)
        loss           (N, C, V): linear_cross_entropy, whose forward also computes the gradients;
                       backward scales them
        optimizer      (elements,): norm and update of so many elements
        orthogonalize  (short, long): muon's product of a matrix with these sides
        matrix_update  (elements,): muon's other work on so many elements of matrices
        copy           (bytes,): read and written, of gradients into buckets and of messages
        permute        (N * top_k, C): rows to experts, or combine, back to tokens
    direction: "forward" or "backward" ("forward" of updates and of messages with weights,
        "backward" of other copies), and
        "recompute": a forward repeated in backward.
    flops, bytes: of one of them; bytes that must move through memory at least.
    """

    name: str
    shape: tuple[int, ...]
    direction: str
    flops: float
    bytes: float
    count: float  # type: ignore[assignment]  # hides tuple.count

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """What determines its duration: recomputation takes as long as forward."""
        return self.name, self.shape, self.direction.replace("recompute", "forward")


class CommOp(NamedTuple):
    """One kind of communication of a rank, `count` times in a step.

    kind: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast or send.
    axis: "dp", "shard", "copies" (of shards), "tp", "cp", "ep", "pp" or "control".
    bytes: of the whole tensor (all_gather: the result; reduce_scatter: the input; all_to_all: of
        the rank that sends most, with its own part if all parts are equal).
    ranks: of the group; stride: distance of neighbours in the group, in global ranks.
    under: what can hide it: "forward", "backward", "update" (products of other matrices),
        "schedule" (a pipeline's other operations) or "" (nothing: the rank waits). Along tp: the
        concurrent product, else the pass of the communicating micro-batches.
    """

    kind: str
    axis: str
    bytes: float
    ranks: int
    stride: int
    count: float  # type: ignore[assignment]  # hides tuple.count
    under: str
