"""What a model and a run are: frozen dataclasses that check themselves and name what they refuse.

The command line, the settings file and a run's config.json are made from the same classes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastpar.settings.axes import ranks_of_samples
from fastpar.settings.combinations import (
    check_axes,
    check_fp8,
    check_fp8_widths,
    check_grid_widths,
    check_offload,
    check_outer_settings,
    check_packing,
    check_wires,
)
from fastpar.settings.files import check_at_least, option, parse_seconds
from fastpar.settings.model import PRESETS as PRESETS
from fastpar.settings.model import VOCAB_MULTIPLE as VOCAB_MULTIPLE
from fastpar.settings.model import GPTConfig as GPTConfig
from fastpar.settings.options import TrainFlags


@dataclass(frozen=True)
class TrainConfig(TrainFlags):
    """What a run is: TrainFlags that are known to make sense.

    Raises:
        ValueError: a setting outside what its help says; names the setting.
    """

    def __post_init__(self) -> None:
        values = self.settings()
        every = SimpleNamespace(**values)
        check_at_least("train", values, _AT_LEAST)
        for name in ("lr", "muon_lr", "bucket_mb"):
            if values[name] is not None and not 0.0 < values[name] < math.inf:
                raise ValueError(
                    f"train: expected {name} > 0, got {name}={values[name]}; set {option(name)}"
                )
        if not all(0.0 <= beta < 1.0 for beta in self.optim.betas):
            raise ValueError(
                f"train: expected 0 <= betas < 1, got betas={self.optim.betas}; "
                "GPT-2 is trained with 0.9 0.95"
            )
        if self.optim.ema is not None and not 0.0 < self.optim.ema < 1.0:
            raise ValueError(
                f"train: expected 0 < ema < 1, got ema={self.optim.ema}; 0.999 is usual"
            )
        if not 0.0 < self.optim.lr_decay_fraction <= 1.0:
            raise ValueError(
                "train: expected 0 < lr_decay_fraction <= 1, got lr_decay_fraction="
                f"{self.optim.lr_decay_fraction}; 0.4 is usual"
            )
        if self.optim.min_lr is not None and self.optim.min_lr > self.optim.lr:
            raise ValueError(
                f"train: expected min_lr <= lr={self.optim.lr}, got min_lr={self.optim.min_lr}; "
                "lower --min-lr or raise --lr"
            )
        warmup, steps = self.optim.warmup_steps, self.run.max_steps
        if warmup is not None and warmup > steps:
            raise ValueError(
                f"train: expected warmup_steps <= max_steps={steps}, got warmup_steps={warmup}; "
                "lower --warmup-steps or raise --max-steps"
            )
        stage, tp, pp = every.zero_stage, every.tp, every.pp
        check_packing(self.text, compiled=self.system.compile)
        if self.optim.optimizer == "adafactor" and (stage or tp > 1):
            raise ValueError(
                "train: expected zero_stage=0 and tp=1 with optimizer=adafactor, whose means of "
                f"rows and columns need whole matrices, got zero_stage={stage}, tp={tp}; use "
                "--optimizer adamw, or leave --zero and --tp out"
            )
        if pp > 1 and (self.optim.optimizer == "adafactor" or self.system.compile):
            setting = "compile=True" if self.system.compile else "optimizer=adafactor"
            raise ValueError(
                f"train: expected adamw or muon and no compile with pp > 1, got {setting} with "
                f"pp={pp}; leave one of them out"
            )
        if self.optim.moment_dtype == "int8" and tp > 1:
            raise ValueError(
                "train: expected moment_dtype fp32 or bf16 with tp > 1, got moment_dtype=int8 with "
                f"tp={tp}; blocks of 8-bit numbers end with a rank's slice and make no checkpoint: "
                "use --moment-dtype bf16"
            )
        check_storage(self.optim, str(self.system.dtype))
        check_offload(every, every.optimizer)
        check_axes(every, every, values)
        check_parallel(every, every.dtype, deterministic=every.deterministic)
        check_outer_settings(self.optim, every, values)
        check_wires(every, every)
        self._check_system(every)
        if self.run.name is not None and not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", self.run.name):
            raise ValueError(
                f"train: expected name of letters, digits and . _ + -, got name={self.run.name!r}; "
                "use --out for a path"
            )
        if self.run.max_time is not None:
            parse_seconds(self.run.max_time)
        parse_seconds(self.faults.timeout, "timeout")
        if self.shape.init_from is None:
            # Sizes are refused before the text is read.
            check_split(every, self.model_config(vocab_size=1))

    def _check_system(self, every: Any) -> None:
        """Refuse fp8 where it is not computed, and what a CUDA graph cannot hold."""
        check_fp8(every, every, every)
        if self.system.fp8 != "none" and self.shape.init_from is None:
            check_fp8_widths(every, every.tp, self.model_config(vocab_size=1))
        why = self.why_no_graphs()
        if self.system.cuda_graphs and why:
            raise ValueError(f"train: expected {why}")

    def why_no_graphs(self) -> str:
        """What CUDA graphs would need in the place of a setting; "" where all settings fit."""
        values = self.settings()
        for name, allowed, why in _GRAPHED:
            if values[name] not in allowed:
                return (
                    f"{name} {' or '.join(map(str, allowed))} with cuda_graphs: {why}, got "
                    f"{name}={values[name]}; change {option(name)}, or leave --cuda-graphs out"
                )
        return ""

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The GPT-2 that these settings and a vocabulary describe; not for init_from."""
        names = ("n_layer", "n_head", "n_embd", "block_size", "dropout")
        overrides = {n: getattr(self.shape, n) for n in names}
        given = {name: value for name, value in overrides.items() if value is not None}
        given |= self.expert_settings()
        return GPTConfig.preset(self.shape.model, vocab_size=vocab_size, **given)

    def expert_settings(self) -> dict[str, Any]:
        """The fields of GPTConfig that say what experts a model has, and what balances them."""
        shape = self.shape
        if not shape.n_expert:
            return {}
        names = ("n_expert", "expert_every", "expert_hidden", "expert_capacity", "balance_loss")
        found = {n: getattr(shape, n) for n in (*names, "router_z_loss", "balance_rate")}
        return {**found, "top_k": shape.expert_top_k}

    def batch(self, block_size: int, dp_size: int) -> tuple[int, int]:
        """(micro_batch_size, grad_accum_steps) of a rank; see derive_batch()."""
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
    def min_lr(self) -> float:
        if self.optim.min_lr is not None:
            return self.optim.min_lr
        return self.optim.lr / 10 if self.optim.lr_schedule == "cosine" else 0.0

    @property
    def warmup_steps(self) -> int:
        given = self.optim.warmup_steps
        return min(self.run.max_steps // 10, 1000) if given is None else given

    @property
    def accumulate(self) -> str:
        """Whether each micro-batch is reduced ("shard") or their whole sum ("full")."""
        auto = "full" if self.parallel.zero_stage < 2 else "shard"
        return self.parallel.accumulate or auto


def check_storage(optim: Any, dtype: str) -> None:
    """Refuse storage of the optimizer's numbers that contradicts itself or the weights' format.

    Args:
        dtype: fp32, bf16, fp16, or auto where it is not known yet.
    """
    rounding, masters = optim.stochastic_rounding, optim.master_weights
    if optim.optimizer != "adamw" and (rounding or optim.moment_dtype != "fp32"):
        name = "stochastic_rounding" if rounding else "moment_dtype"
        raise ValueError(
            f"train: expected {name}={False if rounding else 'fp32'} with optimizer="
            f"{optim.optimizer}, got {name}={getattr(optim, name)}; use --optimizer adamw, or "
            f"leave {option(name)} out"
        )
    if masters != "auto" and dtype == "fp32":
        raise ValueError(
            f"train: expected 16-bit weights with master_weights={masters}, got dtype=fp32, where "
            "it does nothing; add --dtype bf16, or leave --master-weights out"
        )
    if rounding and masters != "auto":
        raise ValueError(
            "train: expected stochastic_rounding or master_weights, got both: master_weights="
            f"{masters}; leave one of them out"
        )
    if rounding and dtype not in ("auto", "bf16"):
        raise ValueError(
            "train: expected bf16 weights with stochastic_rounding, got "
            f"dtype={dtype}; use --dtype bf16, or leave --stochastic-rounding out"
        )
    if masters == "remainder" and dtype == "fp16":
        raise ValueError(
            "train: expected bf16 weights with master_weights=remainder, got dtype=fp16; use "
            "--master-weights full"
        )


def check_parallel(parallel: Any, dtype: str, *, deterministic: bool) -> None:
    """Refuse shards of nothing, and formats of gradients that do not fit the weights'.

    Args:
        dtype: fp32, bf16, fp16, or auto where it is not known yet.
    """
    if parallel.shard_size is not None and parallel.zero_stage == 0:
        raise ValueError(
            "train: expected zero_stage 1, 2 or 3 with shard_size, got zero_stage=0 with "
            f"shard_size={parallel.shard_size}; add --zero, or leave --shard-size out"
        )
    for name in ("grad_dtype", "reduce_dtype"):
        value = getattr(parallel, name)
        if deterministic and value not in (None, "fp32"):
            raise ValueError(
                f"train: expected {name}=fp32 with deterministic, got {name}={value}; sums of 16 "
                f"bits depend on how they are split: leave {option(name)} out"
            )
        # On the wire bf16 has fp32's range; fp16 needs gradients that a loss scale keeps in it.
        known = (None, "fp32", dtype, "bf16" if name == "reduce_dtype" else None)
        if dtype != "auto" and value not in known:
            raise ValueError(
                f"train: expected {name} to be fp32 or the weights' dtype={dtype}, got "
                f"{name}={value}; leave {option(name)} out"
            )


def pp_split(text: str | None) -> list[int] | None:
    """Layers of each stage as the setting pp_split says; None: by cost."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(
            f"train: expected pp_split as numbers of layers, such as 8,4, got pp_split={text}; "
            "correct --pp-split"
        )
    return [int(number) for number in text.split(",")]


def pp_chunks(schedule: str, chunks: int | None) -> int:
    """Stages on each rank of a pipeline."""
    usual = 2 if schedule in ("interleaved", "zb-v") else 1
    if chunks not in (None, usual) and schedule != "interleaved":
        raise ValueError(
            f"train: expected chunks={usual} with schedule={schedule}, got chunks={chunks}; leave "
            "--chunks out, or choose --schedule interleaved, which takes any"
        )
    return usual if chunks is None else chunks


def check_split(parallel: Any, shape: GPTConfig) -> None:
    """Refuse tp, cp and pp that cannot split a model; heads that they do not divide are padded."""
    pp, split = parallel.pp, pp_split(parallel.pp_split)
    chunks = pp_chunks(parallel.schedule, parallel.chunks)
    stages = f"pp={pp}" if chunks == 1 else f"pp * chunks = {pp} * {chunks}"
    if pp > 1 and pp * chunks > shape.n_layer + 2:
        raise ValueError(
            f"train: expected pp * chunks of at most {shape.n_layer + 2}, the {shape.n_layer} "
            f"layers, embedding and output layer, got {stages}; lower --pp, or --chunks"
        )
    if pp > 1 and split is not None and (len(split) != pp * chunks or sum(split) != shape.n_layer):
        raise ValueError(
            f"train: expected pp_split as {stages} numbers of layers that make {shape.n_layer}, "
            f"got pp_split={parallel.pp_split}; correct it, or leave --pp-split out"
        )
    if parallel.tp > shape.n_head:
        raise ValueError(
            f"train: expected tp of at most n_head={shape.n_head}, got tp={parallel.tp}; attention "
            "is split by heads: lower --tp"
        )
    by_heads = parallel.cp_method == "heads"
    if by_heads and parallel.cp > shape.heads_of_rank(parallel.tp):
        raise ValueError(
            f"train: expected cp of at most the {shape.heads_of_rank(parallel.tp)} heads that "
            f"tp={parallel.tp} leaves a rank, got cp={parallel.cp}; attention is exchanged by "
            "heads: lower --cp, or add --cp-method keys"
        )
    check_grid_widths(parallel, shape)
    if not shape.splits_by(parallel.tp):
        raise ValueError(
            f"train: expected tp to divide the MLP's width of {shape.hidden}, got "
            f"tp={parallel.tp}; change --tp"
        )
    if parallel.sequence_parallel is not False and shape.block_size % parallel.tp:
        raise ValueError(
            f"train: expected tp to divide block_size={shape.block_size} under sequence "
            f"parallelism, got tp={parallel.tp}; change --tp, or add --no-sequence-parallel"
        )


_AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("batch_size", "micro_batch_size", "grad_accum_steps", "max_steps"), 1),
    **dict.fromkeys(
        ("eval_batches", "nproc", "threads", "shard_size", "tp", "cp", "ep", "pp", "chunks"), 1
    ),
    **dict.fromkeys(("eval_every", "save_every", "keep_last", "warmup_steps", "min_lr"), 0),
    **dict.fromkeys(("weight_decay", "max_grad_norm", "num_samples", "max_new_tokens"), 0),
    **dict.fromkeys(("temperature", "top_k", "keep_every"), 0),
    **dict.fromkeys(("check_replicas_every", "max_restarts", "offload_keep_mb"), 0),
    "replicas": 1,
    "node_size": 2,
}


# Setting, its values under cuda_graphs, why it has no others.
_GRAPHED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("device", ("auto", "cuda"), "a CPU has no graphs"),
    ("pack", ("stream",), "rows have any number of documents"),
    ("zero_stage", (0, 1), "gradients or weights that are freed come back at other addresses"),
    ("outer_every", (None,), "the outer step is no part of them"),
    ("offload", (None,), "a forward waits for the host's step"),
    ("tp", (1,), "the host takes part in collectives inside of layers"),
    ("tp_grid", (None,), "the host takes part in collectives inside of layers"),
    ("cp", (1,), "the host takes part in the exchanges of attention"),
    ("n_expert", (0,), "the host reads how many rows each expert has"),
    ("pp", (1,), "the host sends and receives between stages"),
    ("compile", (False,), "compiled code may be compiled anew"),
    ("fp8", ("none",), "these products were not tried with them"),
    ("activation_checkpointing", ("none",), "the host reads the state of random generators"),
)
AUTO_MICRO_BATCH_TOKENS = 16384


MICRO_BATCHES_A_STAGE = 4  # where the batch allows it: then 1f1b waits for at most a fifth


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
        dp_size: ranks, or groups of tp, cp and pp ranks, that compute different sequences.
        micro_batch_size, grad_accum_steps: None: chosen.
        pp: stages of a pipeline, which are the busier the more micro-batches there are.
        share: ranks that share out the samples of a micro-batch, the rows and depth of a grid.
    Raises:
        ValueError: batch_size has fewer sequences than these, or does not divide.
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
            f"train: expected micro_batch_size as a multiple of the {share} rows and depth of "
            f"tp_grid, which share out its samples, got micro_batch_size={micro}; change "
            "--micro-batch-size, --batch-size or --tp-grid"
        )
    if accum is None:
        accum = max(1, rows // (dp_size * micro))
    if rows != dp_size * micro * accum:
        hint = "change --batch-size, or leave out --micro-batch-size and --grad-accum-steps"
        if rows % dp_size:
            fit = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            hint = f"use one of dp={fit}, or change --batch-size"
        raise ValueError(
            "train: expected batch_size = dp (ranks / tp / cp / pp) * micro_batch_size * "
            f"grad_accum_steps = {dp_size} * {micro} * {accum} = {dp_size * micro * accum}, got "
            f"batch_size={rows}; {hint}"
        )
    return micro, accum
