"""What is refused of settings that contradict others: packing, offload, fp8, wires, experts."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import fields
from typing import Any, NamedTuple

from fastpar.settings.axes import parse_grid, sizes_of_grid
from fastpar.settings.files import option
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import FlagsT


class _Above(NamedTuple):
    """More than so many, and what to do to have that."""

    least: int
    advice: str


_PP, _DP = _Above(1, "add --pp 2"), _Above(1, "add ranks to --nproc")
_RANKS, _TEXTS = _Above(1, "add --nproc 2"), _Above(0, "add --num-samples 1")
_EXPERTS = _Above(0, "add --n-expert 8")
# Settings that only say how something works; of what they do, and what of it they need: more than
# so many, one of these, or (None) that it is left out. dp: ranks that have the same weights.
_HOW: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("model", "n_layer", "n_head", "n_embd"), ("init_from", None)),
    **dict.fromkeys(("schedule", "chunks", "pp_split"), ("pp", _PP)),
    "cp_method": ("cp", _Above(1, "add --cp 2")),
    "sequence_parallel": ("tp", _Above(1, "add --tp 2")),
    "muon_lr": ("optimizer", ("muon",)),
    "betas": ("optimizer", ("adamw", "muon")),
    "lr_decay_fraction": ("lr_schedule", ("wsd",)),
    "outer_wire": ("replicas", _Above(1, "add --replicas 2")),
    **dict.fromkeys(("wire_gradients", "wire_weights", "check_replicas_every"), ("dp", _DP)),
    **dict.fromkeys(("error_feedback", "error_buffer", "node_size"), ("dp", _DP)),
    **dict.fromkeys(("reduce_dtype", "bucket_mb", "transport", "max_restarts"), ("nproc", _RANKS)),
    "shard_size": ("shard_size", _Above(1, "add --zero 0")),
    "keep_every": ("save_every", _Above(0, "set --save-every")),
    "save_overlap": ("async_save", (True,)),
    **dict.fromkeys(
        ("prompt", "max_new_tokens", "temperature", "top_k"),
        ("num_samples", _Above(0, "add --num-samples 1")),
    ),
    **dict.fromkeys(("expert_top_k", "expert_every", "expert_hidden"), ("n_expert", _EXPERTS)),
    **dict.fromkeys(("expert_capacity", "balance_loss", "router_z_loss"), ("n_expert", _EXPERTS)),
    "balance_rate": ("n_expert", _EXPERTS),
}


def check_axes(shape: Any, parallel: Any, values: dict[str, Any]) -> None:
    """Refuse ranks of experts and grids that there cannot be, and what does not run beside them."""
    check_experts(shape, parallel, values)
    check_grid(parallel, values)


def without_idle(flags: FlagsT, inherited: Container[str], ranks: int) -> FlagsT:
    """The settings; refused are those that do nothing.

    Args:
        inherited: names that a run had, maybe on other ranks: they get their defaults instead.
        ranks: in all.
    """
    values, usual = flags.settings(), type(flags)().settings()
    grid = values["tp_grid"] is not None  # refuses what it cannot have itself
    splits = values["replicas"] * values["pp"] * values["tp"]
    values |= {"nproc": ranks, "dp": ranks if grid else ranks // max(1, splits)}
    # Weights that are read can have experts.
    elsewhere = {"n_expert": values["init_from"], "tp": grid}
    changes = {}
    for name, (of, needed) in _HOW.items():
        found = values[of]
        if isinstance(needed, _Above):
            here, rule, advice = (
                (found or 0) > needed.least,
                f"{of} > {needed.least}",
                needed.advice,
            )
        elif needed is None:
            here, rule, advice = found is None, f"no {of}", f"leave {option(of)} out"
        else:
            here, rule = found in needed, f"{of}={' or '.join(map(str, needed))}"
            advice = f"add {option(of)}" + f" {needed[0]}" * (needed[0] is not True)
        if here or values[name] == usual[name] or elsewhere.get(of):
            continue
        if name not in inherited:
            beside = f" with {name}={values[name]}" * (of != name)
            raise ValueError(
                f"train: expected {rule}{beside}, got {of}={found}, where it does nothing; "
                f"{advice}, or leave {option(name, values[name])} out"
            )
        changes[name] = usual[name]
    return flags.replace(changes)


def check_grid(parallel: Any, values: dict[str, Any]) -> None:
    """Refuse what does not run on a grid of ranks."""
    grid = parse_grid(parallel.tp_grid)
    if grid is None:
        return
    sizes_of_grid(grid, values)
    for name, usual in (
        *(("n_expert", 0), ("optimizer", "adamw"), ("compile", False), ("fp8", "none")),
        *(("sequence_parallel", None), ("offload", None), ("offload_activations", False)),
        *(("pack", "stream"), ("replicas", 1), ("node_size", None), ("secondary_shards", False)),
    ):
        if values[name] != usual:
            raise ValueError(
                f"train: expected {name}={usual} with tp_grid={parallel.tp_grid}, got {name}="
                f"{values[name]}; leave one of them out"
            )
    if values["moment_dtype"] == "int8":
        raise ValueError(
            "train: expected moment_dtype fp32 or bf16 with tp_grid, got moment_dtype=int8 with "
            f"tp_grid={parallel.tp_grid}; blocks of 8-bit numbers make no checkpoint there: use "
            "--moment-dtype bf16"
        )


def check_grid_widths(parallel: Any, shape: GPTConfig) -> None:
    """Refuse a grid that does not divide a model's width, or has more columns than heads."""
    rows, columns = (parse_grid(parallel.tp_grid) or (1, 1))[:2]
    if shape.n_embd % rows or shape.n_embd % columns:
        raise ValueError(
            f"train: expected rows and columns of tp_grid to divide n_embd={shape.n_embd}, got "
            f"tp_grid={parallel.tp_grid}; change --tp-grid"
        )
    if columns > shape.n_head:
        raise ValueError(
            f"train: expected at most n_head={shape.n_head} columns, which split the heads, got "
            f"tp_grid={parallel.tp_grid}; change --tp-grid"
        )


def check_packing(settings: Any, *, compiled: bool) -> None:
    """Refuse packed documents in compiled models."""
    if settings.pack == "documents" and compiled:
        raise ValueError(
            "train: expected no compile with pack=documents, got compile=True; leave it out, or "
            "use --pack stream"
        )


def check_offload(parallel: Any, optimizer: str) -> None:
    """Refuse weights on the host that stay on the GPU, and an optimizer without a host's step."""
    if parallel.offload == "parameters" and parallel.zero_stage < 3:
        raise ValueError(
            "train: expected zero_stage=3 with offload=parameters, got zero_stage="
            f"{parallel.zero_stage}; add --zero 3, also for one rank, or use --offload optimizer"
        )
    if parallel.offload_activations and parallel.activation_checkpointing != "full":
        raise ValueError(
            "train: expected activation_checkpointing=full with offload_activations, got "
            f"{parallel.activation_checkpointing}; add --activation-checkpointing full"
        )
    nothing = parallel.offload is None and not parallel.offload_activations
    for name, default in (("offload_keep_mb", 0), ("offload_pinned", True)):
        alone = nothing or (name == "offload_keep_mb" and parallel.offload is None)
        if alone and getattr(parallel, name) != default:
            raise ValueError(
                f"train: expected {name}={default} without offload, got {name}="
                f"{getattr(parallel, name)}; leave it out, or add --offload optimizer"
            )
    if parallel.offload is not None and optimizer != "adamw":
        raise ValueError(
            f"train: expected optimizer=adamw with offload={parallel.offload}, got optimizer="
            f"{optimizer}, which computes on whole matrices; leave --offload out"
        )


def check_fp8(system: Any, shape: Any, parallel: Any) -> None:
    """Refuse how fp8 is computed where it is not, and what no code runs beside it."""
    for name, default in (("scaling", "row"), ("weight_gradient", "bf16"), ("emulate", False)):
        value = getattr(system, f"fp8_{name}")
        if system.fp8 == "none" and value != default:
            raise ValueError(
                f"train: expected fp8 with fp8_{name}, got fp8=none fp8_{name}={value}; add --fp8 "
                "mlp, or leave it out"
            )
    if system.fp8_weight_gradient == "fp8" and system.fp8_scaling != "tensor":
        raise ValueError(
            "train: expected fp8_scaling=tensor with fp8_weight_gradient=fp8, got fp8_scaling="
            f"{system.fp8_scaling}; sums over tokens need one scale for all ranks"
        )
    beside: dict[str, tuple[bool, Any]] = {
        "n_expert": (shape.n_expert > 0, shape.n_expert),
        "compile": (system.compile, True),
        "activation_checkpointing": (parallel.activation_checkpointing == "selective", "selective"),
        "schedule": (parallel.pp > 1 and parallel.schedule.startswith("zb"), parallel.schedule),
    }
    for name, (found, value) in beside.items():
        if found and system.fp8 != "none":
            raise ValueError(
                f"train: expected {name} left out or another with fp8={system.fp8}, got {name}="
                f"{value}; it does not know these products: change it, or drop --fp8"
            )


def check_fp8_widths(system: Any, tp: int, shape: GPTConfig) -> None:
    """Refuse widths that products of 8-bit floats, or their scales on ranks of tp, do not have."""
    if system.fp8 == "none":
        return
    width = shape.n_embd
    if width % 16:
        raise ValueError(
            f"train: expected n_embd to be a multiple of 16 with fp8, got n_embd={width}; drop "
            "--fp8, or change --n-embd"
        )
    if tp == 1:
        return
    least = width if system.fp8 == "all" else 4 * width
    by_tensor = system.fp8_scaling == "tensor"
    if system.fp8_scaling == "row" or (not by_tensor and least % (128 * tp)):
        raise ValueError(
            f"train: expected fp8_scaling=tensor, or block with {128 * tp} dividing the {least} "
            f"features that tp={tp} splits, got fp8_scaling={system.fp8_scaling}; scales would "
            "depend on tp"
        )
    of_rank = [shape.hidden // tp]
    if system.fp8 == "all":
        of_rank.append(shape.heads_of_rank(tp) * width // shape.n_head)
    if any(features % 16 for features in of_rank):
        raise ValueError(
            f"train: expected a rank's features to be multiples of 16 with fp8={system.fp8}, got "
            f"{' and '.join(map(str, of_rank))} with tp={tp}; lower --tp, or drop --fp8"
        )


def check_wires(parallel: Any, system: Any) -> None:
    """Refuse formats on the wire where nothing is sent in them, and beside what they contradict."""
    _check_nodes(parallel)
    gradients, weights = parallel.wire_gradients, parallel.wire_weights
    keeps, stage = parallel.error_feedback or parallel.error_buffer, parallel.zero_stage
    if keeps and gradients == "fp32":
        raise ValueError(
            "train: expected wire_gradients with error_feedback, got wire_gradients=fp32, which "
            "loses nothing; add --wire-gradients int8, or leave --error-feedback out"
        )
    if parallel.error_feedback and stage > 1 and not parallel.error_buffer:
        raise ValueError(
            "train: expected error_buffer with error_feedback at stages 2 and 3, got zero_stage="
            f"{stage}, which frees the gradients that would keep errors; use --zero 1, where they "
            "cost nothing, or add --error-buffer, 4 bytes a parameter on every rank"
        )
    if weights is not None and stage == 0:
        raise ValueError(
            "train: expected zero_stage 1, 2 or 3 with wire_weights, got zero_stage=0, where no "
            "weights are sent; add --zero, or leave --wire-weights out"
        )
    if gradients == "fp32" and weights is None:
        return
    if weights == "fp8" and (stage < 3 or system.fp8 == "none" or system.fp8_scaling != "tensor"):
        raise ValueError(
            "train: expected zero_stage=3, fp8 and fp8_scaling=tensor with wire_weights=fp8, which "
            f"sends the codes of these products, got zero_stage={stage}, fp8={system.fp8}, "
            f"fp8_scaling={system.fp8_scaling}; add them, or use --wire-weights int8"
        )
    changes = gradients != "fp32" or weights != "fp8"  # nothing is lost that products keep
    for name, value, found in (
        ("deterministic", False, system.deterministic),
        ("offload", None, parallel.offload),
        ("reduce_dtype", None, parallel.reduce_dtype),
    ):
        if found != value and (changes or name == "offload"):
            raise ValueError(
                f"train: expected {name}={value} with wire_gradients={gradients} and wire_weights="
                f"{weights}, got {name}={found}; leave one of them out"
            )


def _check_nodes(parallel: Any) -> None:
    """Refuse nodes that nothing asks for."""
    size, second, stage = parallel.node_size, parallel.secondary_shards, parallel.zero_stage
    sends = parallel.wire_gradients != "fp32" and stage > 0
    if second and (stage != 3 or size is None):
        raise ValueError(
            "train: expected zero_stage=3 and node_size with secondary_shards, got zero_stage="
            f"{stage} and node_size={size}; add --zero 3 and --node-size, the ranks of a copy on "
            "each node"
        )
    if size is not None and not (second or sends):
        raise ValueError(
            "train: expected secondary_shards at stage 3, or wire_gradients bf16, int8 or int4 "
            f"at stages 1 to 3, with node_size={size}, got zero_stage={stage} and "
            f"wire_gradients={parallel.wire_gradients}; nothing else asks for nodes: leave it out"
        )


def check_experts(shape: Any, parallel: Any, values: dict[str, Any]) -> None:
    """Refuse ranks of experts that there are not, and what no code runs beside experts."""
    ep, n_expert = parallel.ep, shape.n_expert
    if ep > 1 and shape.init_from is None and (n_expert == 0 or n_expert % ep):
        raise ValueError(
            f"train: expected n_expert to be a multiple of ep={ep}, got n_expert={n_expert}; "
            f"set --n-expert {-(-max(n_expert, 1) // ep) * ep}, or change --ep"
        )
    others = {
        "optimizer": values["optimizer"] == "adafactor",
        "moment_dtype": values["moment_dtype"] == "int8",
    }
    beside = [name for name, found in others.items() if found and ep > 1]
    if beside:
        name = beside[0]
        raise ValueError(
            f"train: expected {name} left out with ep={ep}, got {name}={values[name]}; drop it, or "
            "--ep"
        )
    if n_expert and parallel.cp > 1 and values["expert_capacity"] is not None:
        raise ValueError(
            f"train: expected no expert_capacity with cp={parallel.cp}, whose ranks have parts of "
            f"sequences, got expert_capacity={values['expert_capacity']}; drop one of them"
        )


def check_outer_settings(optim: Any, parallel: Any, values: dict[str, Any]) -> None:
    """Refuse replicas that never meet, an outer step of nothing, and what no replica does alone."""
    every, replicas = optim.outer_every, parallel.replicas
    if every is None:
        given = [f for f in fields(optim) if f.name.startswith("outer_")]
        changed = [f.name for f in given if getattr(optim, f.name) != f.default]
        if replicas > 1 or changed:
            name = changed[0] if changed else "replicas"
            raise ValueError(
                f"train: expected outer_every with {name}, got {name}={values[name]} alone; add "
                "--outer-every 50, the steps after which replicas meet"
            )
        return
    check_outer("train", "outer_", every, optim.outer_lr, optim.outer_momentum)
    if values["deterministic"] and optim.outer_wire != "fp32":
        raise ValueError(
            f"train: expected deterministic False with outer_wire={optim.outer_wire}, got "
            "deterministic=True; leave one of them out"
        )


def check_outer(who: str, prefix: str, every: int, lr: float, momentum: float) -> None:
    """Refuse numbers of an outer optimizer that are out of range.

    Args:
        prefix: of the names in messages.
    """
    for name, value, fine, rule, advice in (
        ("every", every, every >= 1, ">= 1", "these are the steps between two exchanges"),
        ("lr", lr, 0 < lr <= 2, "in (0, 2]", "1 takes the mean; 0.7 is usual with momentum"),
        ("momentum", momentum, 0 <= momentum < 1, "in [0, 1)", "0.9 is usual; 0 takes no momentum"),
    ):
        if not fine:
            raise ValueError(
                f"{who}: expected {prefix}{name} {rule}, got {prefix}{name}={value}; {advice}"
            )


_STALE = re.compile("async|hogwild|parameter.?server|ps$|pipedream", re.IGNORECASE)


def check_synchronous(caller: str, what: str, value: str, instead: str) -> None:
    """Refuse names of ways to train in which gradients change other weights than their own."""
    if _STALE.match(value):
        raise ValueError(
            f"{caller}: expected a {what} whose gradients are those of the weights that they "
            f"change, got {what}={value!r}; use {instead}: servers, asynchronous training and "
            "stale pipelines were measured, see bench/results/parameter_server.md"
        )
