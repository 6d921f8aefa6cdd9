"""What is predicted: a workload (what is trained) and a setup (one way to train it on ranks).

Arithmetic only: no tensors, no ranks. Shape legend as in gpt.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fastpar.comm.wires import CODES, FORMATS
from fastpar.files.dtypes import DTYPES
from fastpar.models.block import count_parameters
from fastpar.settings.axes import parse_grid
from fastpar.settings.config import GPTConfig, TrainConfig, pp_chunks, pp_split


@dataclass(frozen=True)
class Workload:
    """What is trained; the same whatever the ranks do.

    Attributes:
        shape: its block_size is the tokens of a sequence.
        batch_size: sequences a step, over all ranks.
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
        """Stored: the vocabulary's padding counts, the tied head once."""
        return count_parameters(self.shape, padded=True)


@dataclass(frozen=True)
class Setup:
    """One way to train a workload on world_size ranks.

    Fields that `fastpar train` has too are named like its settings, but hold what is in effect, so
    none is "auto".

    Attributes:
        cp: ranks that share every sequence. cp_method: they exchange "heads", or gather "keys".
        ep: of the dp ranks, those that share out experts.
        pp: ranks of a pipeline. schedule, chunks: see pipeline/schedules.py; the micro-batches are
            those of grad_accum_steps.
        pp_split: layers on each of the pp * chunks stages; None: by their flops.
        bucket_mb: None: the runtime's default.
        master_weights: "none", "full" or "remainder".
        device_type: "cuda" or "cpu".
        transport: "nccl", "shm" or "gloo".
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    pp_split: tuple[int, ...] | None = None
    zero_stage: int = 0
    shard_size: int | None = None
    sequence_parallel: bool = True
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    activation_checkpointing: str = "none"
    accumulate: str = "full"
    bucket_mb: float | None = None
    optimizer: str = "adamw"
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    master_weights: str = "full"
    moment_dtype: str = "fp32"
    ema: float | None = None
    device_type: str = "cuda"
    transport: str = "nccl"
    cp: int = 1
    cp_method: str = "heads"
    ep: int = 1
    offload: str | None = None
    offload_keep_mb: float = 0.0
    offload_activations: bool = False
    wire_gradients: str = "fp32"
    wire_weights: str | None = None
    error_feedback: bool = False
    error_buffer: bool = False
    node_size: int | None = None
    secondary_shards: bool = False
    fp8: str = "none"
    fp8_scaling: str = "row"
    fp8_emulate: bool = False
    tp_grid: str | None = None

    @property
    def dp(self) -> int:
        """Ranks, or groups of tp * cp * pp ranks, that compute different sequences."""
        return self.data // (self.cp * self.depth)

    @property
    def data(self) -> int:
        """Ranks, or groups of tp * pp ranks, that have the same weights and other tokens."""
        return self.world_size // (self.tp * self.rows * self.pp)

    @property
    def rows(self) -> int:
        """Of the grid of ranks, whose columns are tp; 1 without one."""
        return (parse_grid(self.tp_grid) or (1,))[0]

    @property
    def depth(self) -> int:
        """Grids that share out a batch."""
        return (*(parse_grid(self.tp_grid) or (1, 1)), 1)[2]

    @property
    def samples_of_rank(self) -> int:
        """Of a micro-batch; rows and depth of a grid share them out."""
        return max(1, self.micro_batch_size // (self.rows * self.depth))

    @property
    def n_shards(self) -> int:
        """Ranks that share one copy of what the stage shares out."""
        return min(self.data, self.shard_size or self.data) if self.zero_stage else 1

    def tokens_of_rank(self, workload: Workload) -> int:
        """Of a micro-batch, before tp shares them out."""
        if self.by_keys:  # two chunks of each row
            return 2 * self.micro_batch_size * -(-workload.seq_len // (2 * self.cp))
        return -(-self.micro_batch_size * workload.seq_len // (self.cp * self.rows * self.depth))

    @property
    def by_keys(self) -> bool:
        """Whether ranks of cp attend all heads of their own tokens."""
        return self.cp > 1 and self.cp_method == "keys"

    def attended_heads(self, shape: GPTConfig) -> int:
        """Heads of all tokens that a rank of tp attends with its peers along cp, padding counts."""
        heads = shape.heads_of_rank(self.tp)
        return heads if self.by_keys else -(-heads // self.cp) * self.cp

    @property
    def stage(self) -> int:
        """The stage in effect: with nobody to share with it is 0, but with offload."""
        return self.zero_stage if self.n_shards > 1 or self.offload is not None else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights, and of activations."""
        return DTYPES[self.dtype].itemsize

    @property
    def grad_bytes(self) -> int:
        return DTYPES[self.grad_dtype].itemsize

    @property
    def wire_bytes(self) -> float:
        """Bytes of an element of a gradient that is sent."""
        form = FORMATS.get(self.wire_gradients)
        return DTYPES[self.reduce_dtype].itemsize if form is None else form.bytes_per_element

    @property
    def gathers_codes(self) -> bool:
        """Whether weights of 8-bit products are gathered as their codes."""
        return self.wire_weights == CODES and self.stage == 3

    def gathered_bytes(self, rounded: bool = False) -> float:
        """Bytes of an element of a weight that is gathered; rounded: as such codes."""
        if self.wire_weights == CODES:
            return 1 if rounded else self.weight_bytes
        form = FORMATS.get(self.wire_weights) if self.stage else None
        return self.weight_bytes if form is None else min(form.bytes_per_element, self.weight_bytes)

    @property
    def code_bytes(self) -> tuple[float, float]:
        """Bytes that making and reading messages moves, of an element of gradients, of weights."""
        gradients = self.grad_bytes + 2 * self.wire_bytes + 8  # decoded, then added up
        sent = self.gathered_bytes(self.gathers_codes)
        weights = (2 * self.weight_bytes + 2 * sent) * (sent < self.weight_bytes)
        return (gradients if self.wire_gradients in FORMATS else 0.0), weights

    @property
    def error_bytes(self) -> int:
        """Bytes of an element of what gradients lost on the wire, in a buffer."""
        keeps = self.error_buffer or (self.error_feedback and self.stage == 0)
        return 4 if keeps and self.data > 1 else 0

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for an element: moments, average, what 16-bit weights lack.

        Of muon's matrices 4 less: see predict_states().
        """
        moments = 2 * DTYPES[self.moment_dtype].itemsize if self.optimizer != "adafactor" else 0
        moments += 4 if self.ema else 0
        return moments + {"none": 0, "full": 4, "remainder": 2}[self.master_weights]

    @classmethod
    def of(cls, config: TrainConfig, *, dtype: str, world_size: int, **in_effect: Any) -> Setup:
        """The setup of a run, whose micro-batch is one sequence unless said otherwise.

        Args:
            dtype: format of its weights: fp32, bf16 or fp16.
            in_effect: fields that are not what the settings say, or that they leave open.
        """
        names, grid = {field.name for field in fields(cls)}, parse_grid(config.mesh.tp_grid)
        values = {name: value for name, value in config.settings().items() if name in names}
        if DTYPES[dtype].itemsize > 2 or config.optim.stochastic_rounding:
            values["master_weights"] = "none"
        elif values["master_weights"] == "auto":
            values["master_weights"] = "full"
        values["accumulate"] = config.accumulate
        values["grad_dtype"] = values["grad_dtype"] or "fp32"
        values["reduce_dtype"] = values["reduce_dtype"] or values["grad_dtype"]
        values["sequence_parallel"] = values["sequence_parallel"] is not False
        values["tp"] = config.mesh.tp if grid is None else grid[1]
        split = pp_split(values["pp_split"])
        values["pp_split"] = split and tuple(split)
        values["chunks"] = pp_chunks(values["schedule"], values["chunks"])
        values |= {"micro_batch_size": 1, "grad_accum_steps": 1}
        values |= {"device_type": "cpu", "transport": "shm"}
        return cls(**{**values, "dtype": dtype, "world_size": world_size, **in_effect})

    def settings(self, workload: Workload) -> dict[str, Any]:
        """The same as settings of `fastpar train`."""
        known = TrainConfig().settings().keys() - {"transport"}
        values = {**asdict(workload.shape), **asdict(self), "batch_size": workload.batch_size}
        values["tp"] = self.tp if self.tp_grid is None else 1
        values["pp_split"] = ",".join(map(str, self.pp_split or ())) or None
        values["sequence_parallel"] = None if self.sequence_parallel else False
        if self.master_weights != "remainder":
            values["master_weights"] = "auto"
        return {name: value for name, value in values.items() if name in known}

    def config(self, workload: Workload) -> TrainConfig:
        """The run's settings.

        Raises:
            ValueError: what `fastpar train` refuses for them.
        """
        return TrainConfig().replace(self.settings(workload))


def default_accumulate(zero_stage: int) -> str:
    """What `accumulate = auto` means."""
    return "full" if zero_stage < 2 else "shard"
