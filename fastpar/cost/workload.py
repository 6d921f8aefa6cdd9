"""What the planner speaks of: a job (what is trained) and a setup (one way to train it on ranks).

Arithmetic only: no torch, no ranks. Shape legend as in model.py; t is tp, d is dp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastpar.config.config import GPTConfig, TrainConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp64": 8}


def count_parameters(shape: GPTConfig) -> int:
    """Of a GPT, without making one; the padding of the vocabulary counts."""
    width = shape.n_embd
    block = 12 * width * width + 13 * width  # matrices; their biases and two norms
    return (shape.padded_vocab_size + shape.block_size + 2) * width + shape.n_layer * block


@dataclass(frozen=True)
class Job:
    """What is trained; the same whatever the ranks do.

    shape: block_size is the tokens of a sequence. batch_size: sequences a step, over all ranks.
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
        return count_parameters(self.shape)

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward: 6*P + 12*n_layer*T*C, as GPT.flops_per_token."""
        s = self.shape
        layer = 12 * s.n_embd**2 + 13 * s.n_embd
        n = (s.vocab_size + s.block_size + 2) * s.n_embd + s.n_layer * layer
        return 6 * n + 12 * s.n_layer * s.block_size * s.n_embd


@dataclass(frozen=True)
class Setup:
    """One way to train a job on world_size ranks; the words are those of `fastpar train`.

    accumulate: "shard" or "full", as parallelize has it. bucket_mb: None is the runtime's default.
    master_weights: "none", "full" or "remainder". pp: pipeline stages; the runtime has none, only
    figures published by others need them, and pp_interleave: parts of the layers that each stage
    has, in turns with the others. device_type: "cuda" or "cpu". transport: "nccl",
    "shm" or "gloo".
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    pp_interleave: int = 1
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
    device_type: str = "cuda"
    transport: str = "nccl"

    @property
    def dp(self) -> int:
        """Ranks, or groups of tp * pp ranks, that compute different sequences."""
        return self.world_size // (self.tp * self.pp)

    @property
    def n_shards(self) -> int:
        """Ranks that share one copy of what the stage shares out."""
        return min(self.dp, self.shard_size or self.dp) if self.zero_stage else 1

    @property
    def weight_bytes(self) -> int:
        """Of an element of the weights; activations have the same."""
        return BYTES[self.dtype]

    @property
    def grad_bytes(self) -> int:
        return BYTES[self.grad_dtype]

    @property
    def wire_bytes(self) -> int:
        """Of an element of a gradient that is sent."""
        return BYTES[self.reduce_dtype]

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's numbers for an element: moments and what 16-bit weights lack."""
        moments = 2 * BYTES[self.moment_dtype] if self.optimizer == "adamw" else 0
        return moments + {"none": 0, "full": 4, "remainder": 2}[self.master_weights]

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        *,
        dtype: str,
        world_size: int,
        micro_batch_size: int = 1,
        grad_accum_steps: int = 1,
        device_type: str = "cpu",
        transport: str = "shm",
    ) -> Setup:
        """Of a run.

        Args:
            dtype: of its weights: fp32, bf16 or fp16.
        """
        optim, parallel = config.optim, config.parallel
        half = BYTES[dtype] == 2
        masters = "none"
        if half and not optim.stochastic_rounding:
            masters = "remainder" if optim.master_weights == "remainder" else "full"
        grads = "fp32" if parallel.grad_dtype == "auto" else parallel.grad_dtype
        accumulate: str = parallel.accumulate
        if accumulate == "auto":
            accumulate = "full" if parallel.zero_stage < 2 else "shard"
        return cls(
            world_size=world_size,
            tp=parallel.tp,
            zero_stage=parallel.zero_stage,
            shard_size=parallel.shard_size,
            sequence_parallel=parallel.sequence_parallel,
            micro_batch_size=micro_batch_size,
            grad_accum_steps=grad_accum_steps,
            activation_checkpointing=parallel.activation_checkpointing,
            accumulate=accumulate,
            bucket_mb=parallel.bucket_mb,
            optimizer=optim.optimizer,
            dtype=dtype,
            grad_dtype=grads,
            reduce_dtype=grads if parallel.reduce_dtype == "auto" else parallel.reduce_dtype,
            master_weights=masters,
            moment_dtype=optim.moment_dtype,
            device_type=device_type,
            transport=transport,
        )

    def settings(self, job: Job) -> dict[str, Any]:
        """As settings of `fastpar train`, which refuses what the runtime cannot do."""
        shape = job.shape
        return {
            "n_layer": shape.n_layer,
            "n_head": shape.n_head,
            "n_embd": shape.n_embd,
            "block_size": shape.block_size,
            "dropout": shape.dropout,
            "batch_size": job.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "grad_accum_steps": self.grad_accum_steps,
            "tp": self.tp,
            "zero_stage": self.zero_stage,
            "shard_size": self.shard_size,
            "sequence_parallel": self.sequence_parallel,
            "accumulate": self.accumulate,
            "activation_checkpointing": self.activation_checkpointing,
            "bucket_mb": self.bucket_mb,
            "optimizer": self.optimizer,
            "dtype": self.dtype,
            "moment_dtype": self.moment_dtype,
            "grad_dtype": self.grad_dtype,
            "reduce_dtype": self.reduce_dtype,
            "master_weights": ("remainder" if self.master_weights == "remainder" else "auto"),
        }

    def config(self, job: Job) -> TrainConfig:
        """The run's settings.

        Raises:
            ValueError: what `fastpar train` refuses for them.
        """
        return TrainConfig().replace(self.settings(job))
