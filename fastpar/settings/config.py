"""TrainConfig: the checked settings of a run.

The command line, the settings file and a run's config.json are made from the same classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastpar.settings.mesh import ranks_of_samples
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import TrainFlags
from fastpar.settings.rules import broken, check, known


@dataclass(frozen=True)
class TrainConfig(TrainFlags):
    """The settings of a run, checked: TrainFlags that pass all rules.

    Raises:
        ValueError: a rule of rules.py is broken; names the setting.
    """

    def __post_init__(self) -> None:
        read = self.shape.init_from is not None  # its sizes are known later
        values = known(self, None if read else self.model_config(vocab_size=1))
        check("train", values | {"lr": self.lr})

    def learn(self, **facts: Any) -> None:
        """Check the rules about these facts, which are known only now, such as the dtype."""
        check("train", known(self, None) | facts, facts)

    def runs_in_graphs(self) -> bool:
        """Whether CUDA graphs can hold a step with these settings."""
        values = known(self, None) | {"cuda_graphs": True}
        return not any(broken("train", values, ("cuda_graphs",)))

    def in_folder(self, out: str) -> TrainConfig:
        """The same run in another folder; no rule depends on it."""
        other = copy.copy(self)
        vars(other)["run"] = replace(self.run, out=out)
        return other

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The model's GPTConfig for a vocabulary size; not for init_from."""
        sizes = {**self.shape.sizes(), **self.expert_settings()}
        if self.shape.dropout is not None:
            sizes["dropout"] = self.shape.dropout
        return GPTConfig.preset(self.shape.model, vocab_size=vocab_size, **sizes)

    def expert_settings(self) -> dict[str, Any]:
        """The fields of GPTConfig about experts; empty without experts."""
        shape = self.shape
        if not shape.n_expert:
            return {}
        names = ("n_expert", "expert_every", "expert_hidden", "expert_capacity", "balance_loss")
        settings = {n: getattr(shape, n) for n in (*names, "router_z_loss", "balance_rate")}
        return {**settings, "top_k": shape.expert_top_k}

    def batch(self, block_size: int, dp_size: int) -> tuple[int, int]:
        """(micro_batch_size, grad_accum_steps) per rank; see derive_batch()."""
        return derive_batch(
            self.text.batch_size,
            block_size,
            dp_size,
            micro_batch_size=self.text.micro_batch_size,
            grad_accum_steps=self.parallel.grad_accum_steps,
            pp=self.mesh.pp,
            share=ranks_of_samples(self.mesh),
        )

    @property
    def lr(self) -> float:
        """The peak rate: that of a new model would undo what given weights know."""
        if self.optim.lr is not None:
            return self.optim.lr
        return 2.5e-3 if self.shape.init_from is None else 3e-4

    @property
    def min_lr(self) -> float:
        if self.optim.min_lr is not None:
            return self.optim.min_lr
        return self.lr / 10 if self.optim.lr_schedule == "cosine" else 0.0

    @property
    def warmup_steps(self) -> int:
        steps = self.optim.warmup_steps
        return usual_warmup(self.run.max_steps) if steps is None else steps

    @property
    def accumulate(self) -> Literal["shard", "full"]:
        """When gradients are reduced: each micro-batch ("shard") or once per step ("full")."""
        return self.parallel.accumulate or ("full" if self.parallel.zero_stage < 2 else "shard")


def usual_warmup(steps: int) -> int:
    """A tenth of a run, at most 1000 steps, but at least 20 or half of it: full speed after two
    steps raised the gradient's norm to 50, the loss, and roundings between layouts a hundredfold.
    """
    return min(max(steps // 10, 20), steps // 2, 1000)


AUTO_MICRO_BATCH_TOKENS = 16384
MICRO_BATCHES_A_STAGE = 4  # if the batch allows it: limits the bubble of 1f1b to a fifth


def derive_batch(
    batch_size: int,
    block_size: int,
    dp_size: int,
    *,
    micro_batch_size: int | None = None,
    grad_accum_steps: int | None = None,
    pp: int = 1,
    share: int = 1,
) -> tuple[int, int]:
    """(micro_batch_size, grad_accum_steps) with batch_size = dp_size * both.

    Args:
        dp_size: data-parallel ranks, or groups of tp, cp and pp ranks.
        micro_batch_size, grad_accum_steps: None: chosen here.
        pp: stages of a pipeline; more micro-batches make its bubble smaller.
        share: ranks that split the samples of a micro-batch (rows * depth of a grid).
    Raises:
        ValueError: batch_size is smaller than dp_size, or does not equal the product.
    """
    rows, micro, accum = batch_size, micro_batch_size, grad_accum_steps
    if rows < dp_size:
        raise ValueError(
            f"train: expected at least one sequence for each of dp={dp_size} (ranks / tp / cp / "
            f"pp), got batch_size={rows}; use fewer ranks or raise --batch-size"
        )
    if micro is None:
        micro = max(1, rows // dp_size // (accum or 1))
        limit = micro if accum else max(1, AUTO_MICRO_BATCH_TOKENS // block_size)
        if pp > 1 and not accum:
            limit = min(limit, max(1, micro // (MICRO_BATCHES_A_STAGE * pp)))
        sizes = [m for m in range(1, min(micro, max(limit, share)) + 1) if micro % m == 0]
        micro = max([m for m in sizes if m % share == 0] or sizes)
    if micro % share:
        raise ValueError(
            f"train: expected micro_batch_size to be a multiple of rows * depth = {share} of "
            f"tp_grid, got micro_batch_size={micro}; change --micro-batch-size, --batch-size or "
            "--tp-grid"
        )
    if accum is None:
        accum = max(1, rows // (dp_size * micro))
    if rows != dp_size * micro * accum:
        hint = "change --batch-size, or drop --micro-batch-size and --grad-accum-steps"
        if rows % dp_size:
            fit = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            hint = f"use one of dp={fit}, or change --batch-size"
        raise ValueError(
            "train: expected batch_size = dp (ranks / tp / cp / pp) * micro_batch_size * "
            f"grad_accum_steps = {dp_size} * {micro} * {accum} = {dp_size * micro * accum}, got "
            f"batch_size={rows}; {hint}"
        )
    return micro, accum
