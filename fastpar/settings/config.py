"""What a model and a run are: frozen dataclasses that check themselves and name what they refuse.

The command line, the settings file and a run's config.json are made from the same classes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

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
from fastpar.settings.files import check_at_least, describe, fits, option, parse_seconds
from fastpar.settings.model import PRESETS as PRESETS
from fastpar.settings.model import VOCAB_MULTIPLE as VOCAB_MULTIPLE
from fastpar.settings.model import GPTConfig as GPTConfig
from fastpar.settings.options import DataSettings, OptimSettings, ParallelSettings, TrainFlags


@dataclass(frozen=True)
class TrainConfig(TrainFlags):
    """What a run is: TrainFlags that are known to make sense.

    Raises:
        ValueError: a setting outside what its help says; names the setting.
    """

    def __post_init__(self) -> None:
        values = self.settings()
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
        stage, tp, pp = self.parallel.zero_stage, self.parallel.tp, self.parallel.pp
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
        check_offload(self.parallel, self.optim.optimizer)
        check_axes(self.shape, self.parallel, values)
        check_parallel(
            self.parallel, str(self.system.dtype), deterministic=self.system.deterministic
        )
        check_outer_settings(self.optim, self.parallel, values)
        check_wires(self.parallel, self.system)
        self._check_system()
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
            check_split(self.parallel, self.model_config(vocab_size=1))

    def _check_system(self) -> None:
        """Refuse fp8 where it is not computed, and what a CUDA graph cannot hold."""
        check_fp8(self.system, self.shape, self.parallel)
        if self.system.fp8 != "none" and self.shape.init_from is None:
            check_fp8_widths(self.system, self.parallel.tp, self.model_config(vocab_size=1))
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

    def settings(self) -> dict[str, Any]:
        """Every setting by its own name, without the groups: what config.json holds."""
        return {name: value for group in asdict(self).values() for name, value in group.items()}

    def replace(self, changes: Mapping[str, Any], source: str = "settings") -> TrainConfig:
        """A copy with the named settings changed; `source` is where errors say they stand."""
        groups: dict[str, dict[str, Any]] = {f.name: {} for f in fields(self)}
        for key, value in changes.items():
            name = setting_name(key)
            known = _settings_by_name()
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                raise ValueError(
                    f"train: expected a setting of `fastpar train --help-all` in {source}, got "
                    f"key={key}; {f'did you mean {near[0]}?' if near else 'remove it'}"
                )
            group, hint = known[name]
            if not fits(value, hint):
                raise ValueError(
                    f"train: expected {describe(hint)} for {name} in {source}, got "
                    f"{name}={value!r}; see `fastpar train --help-all`"
                )
            groups[group][name] = tuple(value) if isinstance(value, list) else value
        return TrainConfig(
            **{name: type(old)(**{**vars(old), **groups[name]}) for name, old in vars(self).items()}
        )

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
        return auto if self.parallel.accumulate == "auto" else self.parallel.accumulate


def setting_name(key: str) -> str:
    """A setting as it is spelled in a file or, without its dashes, as a flag."""
    name = key.replace("-", "_")
    return {"zero": "zero_stage"}.get(name, name)


def check_storage(optim: OptimSettings, dtype: str) -> None:
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


def check_parallel(parallel: ParallelSettings, dtype: str, *, deterministic: bool) -> None:
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
        if deterministic and value not in ("auto", "fp32"):
            raise ValueError(
                f"train: expected {name}=fp32 with deterministic, got {name}={value}; sums of 16 "
                f"bits depend on how they are split: leave {option(name)} out"
            )
        # On the wire bf16 has fp32's range; fp16 needs gradients that a loss scale keeps in it.
        known = ("auto", "fp32", dtype, "bf16" if name == "reduce_dtype" else "auto")
        if dtype != "auto" and value not in known:
            raise ValueError(
                f"train: expected {name} to be fp32 or the weights' dtype={dtype}, got "
                f"{name}={value}; leave {option(name)} out"
            )


def pp_split(parallel: ParallelSettings) -> list[int] | None:
    """Layers of each stage as the settings say; None: by cost."""
    text = parallel.pp_split
    if text == "auto":
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(
            f"train: expected pp_split as numbers of layers, such as 8,4, or auto, got "
            f"pp_split={text}; correct --pp-split"
        )
    return [int(number) for number in text.split(",")]


def pp_chunks(parallel: ParallelSettings) -> int:
    """Stages on each rank of a pipeline."""
    usual = 2 if parallel.schedule in ("interleaved", "zb-v") else 1
    if parallel.chunks not in (None, usual) and parallel.schedule != "interleaved":
        raise ValueError(
            f"train: expected chunks={usual} with schedule={parallel.schedule}, got chunks="
            f"{parallel.chunks}; leave --chunks out, or choose --schedule interleaved, which takes "
            "any"
        )
    return usual if parallel.chunks is None else parallel.chunks


def check_split(parallel: ParallelSettings, shape: GPTConfig) -> None:
    """Refuse tp, cp and pp that cannot split a model; heads that they do not divide are padded."""
    pp, split, chunks = parallel.pp, pp_split(parallel), pp_chunks(parallel)
    stages = f"pp={pp}" if chunks == 1 else f"pp * chunks = {pp} * {chunks}"
    if pp > 1 and pp * chunks > shape.n_layer + 2:
        raise ValueError(
            f"train: expected pp * chunks of at most {shape.n_layer + 2}, the {shape.n_layer} "
            f"layers, embedding and output layer, got {stages}; lower --pp, or --chunks"
        )
    if pp > 1 and split is not None and (len(split) != pp * chunks or sum(split) != shape.n_layer):
        raise ValueError(
            f"train: expected pp_split as {stages} numbers of layers that make {shape.n_layer}, "
            f"got pp_split={parallel.pp_split}; correct it, or use --pp-split auto"
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
    if parallel.sequence_parallel and shape.block_size % parallel.tp:
        raise ValueError(
            f"train: expected tp to divide block_size={shape.block_size} under sequence "
            f"parallelism, got tp={parallel.tp}; change --tp, or add --no-sequence-parallel"
        )


@functools.cache
def _settings_by_name() -> dict[str, tuple[str, Any]]:
    """Name of every setting -> (its group, its type)."""
    groups = get_type_hints(TrainConfig)
    return {
        name: (group, hint)
        for group, cls in groups.items()
        for name, hint in get_type_hints(cls).items()
    }


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
    ("offload", ("none",), "a forward waits for the host's step"),
    ("tp", (1,), "the host takes part in collectives inside of layers"),
    ("tp_grid", ("none",), "the host takes part in collectives inside of layers"),
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
    settings: DataSettings, block_size: int, dp_size: int, pp: int = 1, share: int = 1
) -> tuple[int, int]:
    """(micro_batch_size, grad_accum_steps) with batch_size = dp_size * both.

    Args:
        dp_size: ranks, or groups of tp, cp and pp ranks, that compute different sequences.
        pp: stages of a pipeline, which are the busier the more micro-batches there are.
        share: ranks that share out the samples of a micro-batch, the rows and depth of a grid.
    Raises:
        ValueError: batch_size has fewer sequences than these, or does not divide.
    """
    rows, micro, accum = settings.batch_size, settings.micro_batch_size, settings.grad_accum_steps
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
