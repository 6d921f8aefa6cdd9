"""`fastpar plan`: which layout, how large a micro-batch, how fast, how much memory, what it costs.

The machine is one of devices.py, taken from data sheets, or this one, measured (--measure). The
figures come from cost/memory_model.py and cost/step_time.py; the layouts from search.py.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from fastpar.config.config import PRESETS, GPTConfig, TrainConfig
from fastpar.config.settings import option
from fastpar.cost.capacity import host_memory
from fastpar.cost.datasheet import DatasheetRates
from fastpar.cost.devices import Cluster, device_table, find_device, larger_device
from fastpar.cost.measured_rates import gpu_name
from fastpar.cost.operations import Rates
from fastpar.cost.step_time import cost_per_billion_tokens
from fastpar.cost.workload import Setup, Workload, default_accumulate
from fastpar.data.tokenizer import GPT2_VOCABULARY, name_for
from fastpar.plan.search import (
    Estimate,
    families,
    possible_batches,
    refused,
    search,
    smallest_changes,
    why_not,
)

PUBLISHED_ERROR = 0.12  # of the time of a step, see bench/results/plan/published.md
TOKENS_PER_STEP = 524288  # of GPT-2's published batch, on GPUs
CPU_VOCABULARY = 4096  # of the tokenizer that the trainer learns by default
# Not for tensors: on a GPU the CUDA context, cuBLAS workspaces and NCCL's buffers, and what the
# allocator cannot use because of its blocks; on a CPU interpreter and libraries of a rank.
GPU_RESERVED_BYTES, GPU_USABLE = 1.5e9, 0.96
CPU_RESERVED_BYTES = 0.5e9


@dataclass(frozen=True)
class PlanCommand:
    """Which parallel layout for a GPT-2 on these GPUs: memory, step time, cost, and why."""

    model: str = "gpt2"
    """Size: gpt2, gpt2-medium, gpt2-large, gpt2-xl; for CPUs micro, mini, small-cpu."""
    n_layer: int | None = None
    """Layers, instead of the size's own."""
    n_head: int | None = None
    """Attention heads, instead of the size's own."""
    n_embd: int | None = None
    """Width, instead of the size's own."""
    vocab_size: int | None = None
    """Tokens of the tokenizer; unset: 50257, on a CPU 4096. Below 256: of characters."""
    seq_len: int | None = None
    """Tokens of a sequence; unset: the size's own."""
    batch_size: int | None = None
    """Sequences a step, over all GPUs; unset: 524288 tokens, on a CPU 8 sequences."""
    gpu: str = "h100"
    """Kind: v100, a100, a100-40, h100, h100-pcie, h200, b200, l40s, 4090, cpu; --gpu list."""
    gpus: int = 8
    """How many of them; of cpu: ranks."""
    gpus_per_node: int | None = None
    """In one machine; unset: as they are usually sold."""
    link: str | None = None
    """Between those of a machine: nvlink3, nvlink4, pcie4, ...; unset: as usual."""
    inter_link: str | None = None
    """Between machines: ib-hdr, ib-ndr, ethernet-100, ...; unset: as usual."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Format of weights and activations; auto: bf16 where the device has it."""
    master_weights: Literal["auto", "full", "remainder"] = "auto"
    """Like fastpar train's."""
    moment_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Like fastpar train's."""
    price: float | None = None
    """Dollars for a GPU and hour; unset: a usual price."""
    headroom: float = 0.1
    """Part of the memory that a layout leaves free: what no prediction knows takes some, too."""
    top: int = 6
    """Layouts to show."""
    json: str | None = None
    """Write everything to this file, too."""
    measure: bool = False
    """Measure this machine for half a minute instead of taking data sheets; sets --gpu."""
    check: bool = False
    """Run small layouts here and compare them with what is predicted."""
    quick: bool = False
    """Measure and check less."""


def run(command: PlanCommand) -> int:
    """The command; the exit status.

    Raises:
        ValueError: an unknown model or device, counts below 1, a batch that nothing divides, a
            model that fits nowhere; each says what would do.
    """
    if command.gpu == "list":
        print(device_table())
        return 0
    if command.check:
        from fastpar.plan.check import run_check

        return run_check(quick=command.quick)
    _check_counts(command)
    if command.measure:
        command = _this_machine(command)
    workload, template = _workload(command), _template(command)
    cluster = _cluster(command)
    rates, rates_text = _rates(command, workload, template, cluster)
    limit = limit_bytes(command, cluster)
    estimates = search(
        workload, template, rates=rates, limit_bytes=limit, per_node=cluster.per_node
    )
    if not estimates:
        near = " or ".join(map(str, possible_batches(workload, template, cluster.per_node)))
        raise ValueError(
            "plan: expected a batch_size that the ranks divide, got "
            f"batch_size={workload.batch_size} with gpus={command.gpus}; use --batch-size {near}, "
            "or another --gpus"
        )
    if estimates[0].time is None:
        _nothing_fits(command, workload, template, cluster, estimates)
    winner = estimates[0]
    problem = refused(workload, winner.setup)
    assert problem is None, problem
    whose_peak = peak_text(command, cluster, rates, template.dtype)
    text = report(command, workload, cluster, estimates, limit, rates_text, whose_peak)
    print(text)
    if command.json is not None:
        _write_json(Path(command.json), command, workload, cluster, estimates, limit, rates_text)
    return 0


def _check_counts(command: PlanCommand) -> None:
    for name in ("n_layer", "n_head", "n_embd", "vocab_size", "seq_len", "batch_size", "gpus",
                 "gpus_per_node", "top"):  # fmt: skip
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"plan: expected {name} >= 1, got {name}={value}; set {option(name)}")
    if command.price is not None and not command.price >= 0:
        raise ValueError(f"plan: expected price >= 0, got price={command.price}; set --price")
    if not 0 <= command.headroom < 1:
        raise ValueError(
            "plan: expected headroom from 0 to below 1, a part of the memory, got headroom="
            f"{command.headroom}; set --headroom"
        )
    if command.vocab_size is not None:
        try:
            name_for(command.vocab_size)
        except ValueError:
            raise ValueError(
                "plan: expected a vocab_size that a tokenizer of `fastpar train` has, got "
                f"vocab_size={command.vocab_size}; the largest is 1000000, set --vocab-size"
            ) from None
    if command.model not in PRESETS:
        near = difflib.get_close_matches(command.model, PRESETS, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "set --n-layer, --n-head, --n-embd for others"
        )
        raise ValueError(
            f"plan: expected model to be one of {', '.join(PRESETS)}, got model={command.model}; "
            f"{hint}"
        )


def _this_machine(command: PlanCommand) -> PlanCommand:
    """The command for the device that is here; a GPU's own name where there is one."""
    return replace(command, gpu=gpu_name() or "cpu")


def _workload(command: PlanCommand) -> Workload:
    on_cpu = find_device(command.gpu).kind == "cpu"
    vocab = command.vocab_size or (CPU_VOCABULARY if on_cpu else GPT2_VOCABULARY)
    given = {n: getattr(command, n) for n in ("n_layer", "n_head", "n_embd")}
    overrides = {name: value for name, value in given.items() if value is not None}
    if command.seq_len is not None:
        overrides["block_size"] = command.seq_len
    shape = GPTConfig.preset(command.model, vocab_size=vocab, **overrides)
    rows = command.batch_size
    if rows is None:
        rows = 8 if on_cpu else max(1, TOKENS_PER_STEP // shape.block_size)
    return Workload(shape, rows)


def _template(command: PlanCommand) -> Setup:
    device = find_device(command.gpu)
    on_cpu, dtype = device.kind == "cpu", command.dtype
    if dtype == "auto":
        dtype = "fp32" if on_cpu else "bf16" if device.has_bf16 else "fp16"
    if dtype == "bf16" and not device.has_bf16:
        raise ValueError(
            f"plan: expected fp16 or fp32 on {device.name}, which has no bf16, got dtype=bf16; use "
            "--dtype fp16"
        )
    if dtype == "fp16" and on_cpu:
        raise ValueError(
            "plan: expected dtype fp32 or bf16 on the CPU, got dtype=fp16; use --dtype bf16"
        )
    # What the run would be, storage and all: contradictions are refused as there.
    config = TrainConfig().replace(
        {"master_weights": command.master_weights, "moment_dtype": command.moment_dtype,
         "dtype": dtype},
        "plan",
    )  # fmt: skip
    return Setup.of(
        config,
        dtype=dtype,
        world_size=command.gpus,
        device_type="cpu" if on_cpu else "cuda",
        transport="shm" if on_cpu else "nccl",
    )


def _cluster(command: PlanCommand) -> Cluster:
    links = {"intra": command.link, "inter": command.inter_link}
    return Cluster.of(command.gpu, command.gpus, command.gpus_per_node, **links)


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a rank's memory for tensors."""
    device = cluster.device
    if device.kind == "cpu":
        return host_memory() / cluster.per_node - CPU_RESERVED_BYTES
    return device.memory_bytes * GPU_USABLE - GPU_RESERVED_BYTES


def limit_bytes(command: PlanCommand, cluster: Cluster) -> float:
    """The most that a layout may take: what is usable less the headroom."""
    return usable_bytes(cluster) * (1 - command.headroom)


def _rates(
    command: PlanCommand, workload: Workload, template: Setup, cluster: Cluster
) -> tuple[Rates, str]:
    """What the machine does, and where that is known from."""
    sheet = DatasheetRates(cluster, template)
    if not command.measure:
        return sheet, (
            f"data sheet of {cluster.device.name}; in this way published runs on A100 and H100 are "
            f"predicted with errors up to {PUBLISHED_ERROR:.0%}"
        )
    from fastpar.measure.measure import measure

    limit = limit_bytes(command, cluster)
    first = search(workload, template, rates=sheet, limit_bytes=limit, per_node=cluster.per_node)
    setups = [e.setup for e in first if e.time is not None][:12]
    if not setups:
        return sheet, f"data sheet of {cluster.device.name}"
    measured = measure(workload, setups, quick=command.quick)
    return measured, str(measured)


def _nothing_fits(
    command: PlanCommand,
    workload: Workload,
    template: Setup,
    cluster: Cluster,
    estimates: Sequence[Estimate],
) -> None:
    least, limit = min(estimates, key=lambda e: e.memory.total), limit_bytes(command, cluster)
    whole, used = usable_bytes(cluster), 1 - command.headroom
    ways = smallest_changes(
        workload,
        template,
        limit_bytes=limit,
        per_node=cluster.per_node,
        larger=lambda size: larger_device((size / used + GPU_RESERVED_BYTES) / GPU_USABLE),
    )
    if least.memory.total <= whole:
        ways.insert(0, "--headroom 0 (nothing stays free)")
    raise ValueError(
        f"plan: expected a model that fits into {limit / 1e9:,.1f} GB a rank ({whole / 1e9:,.1f} "
        f"GB less a headroom of {command.headroom:.0%}), got {workload.n_parameters:,} parameters, "
        f"which on {layout_text(least.setup)} with {_recompute(least.setup)} take {least.memory}; "
        "use " + ", or ".join([*ways, "a smaller model"])
    )


def layout_text(setup: Setup) -> str:
    """A layout in words: dp 4 x tp 2, ZeRO-3 in groups of 8."""
    axes = [f"{name} {n}" for name, n in (("dp", setup.dp), ("tp", setup.tp)) if n > 1]
    text = " x ".join(axes) or ("one GPU" if setup.device_type == "cuda" else "one rank")
    if setup.dp > 1:
        text += f", ZeRO-{setup.zero_stage}"
    if setup.shard_size is not None:
        text += f" in groups of {setup.shard_size}"
    return text


def report(
    command: PlanCommand,
    workload: Workload,
    cluster: Cluster,
    estimates: Sequence[Estimate],
    limit: float,
    rates_text: str,
    whose_peak: str,
) -> str:
    """Tables and words for people."""
    shape, winner = workload.shape, estimates[0]
    best = families(estimates)
    fitting = [e for e in best if e.time is not None]
    lines = [
        f"model    {command.model}: {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} "
        f"wide, {workload.n_parameters:,} parameters",
        f"step     {workload.tokens_per_step:,} tokens: {workload.batch_size} sequences of "
        f"{workload.seq_len:,}",
        f"machine  {cluster}; {limit / 1e9:,.1f} GB a rank for tensors, "
        f"{command.headroom:.0%} less than there are (--headroom)",
        f"rates    {rates_text}",
        f"layouts  {len(fitting)} of {len(best)} ways to cut it fit; the best of each:",
        "",
    ]
    head = ["layout", "micro-batch", "recompute", "memory", "step ms", "tokens/s", "MFU"]
    rows = [[*head, "exposed ms", "$ / 1e9 tokens"]]
    for estimate in fitting[: command.top]:
        rows.append(_row(command, cluster, estimate))
    lines += _columns(rows)
    if rows[1][head.index("MFU")]:
        lines += ["", f"MFU      {whose_peak}"]
    lines += ["", "why not"]
    losers = best[1 : max(command.top, len(fitting)) + 4]
    lines += [f"  {layout_text(e.setup)}: {why_not(e, winner, limit)}" for e in losers]
    same_split = [e for e in estimates[1:] if e.family == winner.family]
    lines += [
        f"  {layout_text(e.setup)}, {_recompute(e.setup)}: {why_not(e, winner, limit)}"
        for e in same_split
    ]
    lines += ["", f"memory   {winner.memory}"]
    assert winner.time is not None
    lines += [
        "time     "
        + ", ".join(f"{k} {s * 1e3:.3g} ms" for k, s in winner.time.parts.items() if s > 0),
        "",
        *command_lines(command, workload, cluster, winner.setup),
    ]
    return "\n".join(lines)


def peak_text(command: PlanCommand, cluster: Cluster, rates: Rates, dtype: str) -> str:
    """The peak that MFU is a percentage of, and where that is known from."""
    peak, device = rates.peak_flops, cluster.device
    if peak is None:
        return ""
    size = f"{peak / 1e12:,.4g} TFLOP/s" if peak >= 1e12 else f"{peak / 1e9:,.4g} GFLOP/s"
    whose = "of the fastest matrix product measured here"
    if not command.measure:
        whose = f"the {dtype} peak of {device.name} ({device.source}), which no training reaches"
    return (
        "the model's floating-point operations of a step, recomputation not counted, in percent of "
        f"{size} a rank, {whose}"
    )


def _recompute(setup: Setup) -> str:
    mode = setup.activation_checkpointing
    return "no recomputation" if mode == "none" else f"{mode} recomputation"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.0f} MB"


def _row(command: PlanCommand, cluster: Cluster, estimate: Estimate) -> list[str]:
    setup, time = estimate.setup, estimate.time
    assert time is not None
    cost = cost_per_billion_tokens(time, cluster, command.price)
    return [
        layout_text(setup),
        f"{setup.micro_batch_size} x {setup.grad_accum_steps}",
        setup.activation_checkpointing,
        _size(estimate.memory.total),
        f"{time.step_s * 1e3:,.4g}",
        f"{time.tokens_per_s:,.0f}",
        "" if time.mfu is None else f"{time.mfu:.1%}",
        f"{time.exposed_s * 1e3:.3g}",
        f"{cost:,.2f}",
    ]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def flags(command: PlanCommand, workload: Workload, setup: Setup) -> list[str]:
    """Flags of `fastpar train` for a layout, without what is the trainer's default anyway."""
    defaults = {**TrainConfig().settings(), **asdict(PRESETS[command.model])}
    # Decided in the same way by the trainer itself.
    automatic = {"accumulate": default_accumulate(setup.zero_stage)}
    automatic |= {"grad_dtype": "fp32", "reduce_dtype": "fp32"}
    words = ["--model", command.model]
    vocabulary = workload.shape.vocab_size
    if vocabulary != CPU_VOCABULARY:
        words += ["--tokenizer", name_for(vocabulary)]
    for name, value in setup.settings(workload).items():
        if value == defaults[name] or value is None or automatic.get(name) == value:
            continue
        if isinstance(value, bool):
            words.append(option(name) if value else option(f"no_{name}"))
        else:
            words += [{"zero_stage": "--zero"}.get(name, option(name)), f"{value}"]
    return words


def command_lines(
    command: PlanCommand, workload: Workload, cluster: Cluster, setup: Setup
) -> list[str]:
    """What to type, on one machine or on several."""
    words = " ".join(flags(command, workload, setup))
    nodes = -(-cluster.n_devices // cluster.per_node)
    if nodes == 1:
        nproc = f" --nproc {cluster.n_devices}" if cluster.n_devices > 1 else ""
        return [f"fastpar train{nproc} {words}"]
    return [
        "on each machine, with the first one's address:",
        f"torchrun --nnodes {nodes} --nproc-per-node {cluster.per_node} "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        f"-m fastpar train {words}",
    ]


def _write_json(
    path: Path,
    command: PlanCommand,
    workload: Workload,
    cluster: Cluster,
    estimates: Sequence[Estimate],
    limit: float,
    rates_text: str,
) -> None:
    content = {
        "command": asdict(command),
        "shape": asdict(workload.shape),
        "batch_size": workload.batch_size,
        "parameters": workload.n_parameters,
        "machine": str(cluster),
        "rates": rates_text,
        "limit_bytes": limit,
        "layouts": [
            {
                **asdict(e.setup),
                "fits": e.time is not None,
                "memory_bytes": {**vars(e.memory), "total": e.memory.total},
                "time": None if e.time is None else asdict(e.time),
            }
            for e in estimates
        ],
    }
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
