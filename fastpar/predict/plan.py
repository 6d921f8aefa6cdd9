"""`fastpar plan`: the best parallel layout and micro-batch, with step time, memory and cost.

The machine is one of devices.csv. memory.py and time.py predict the figures; search.py lists the
layouts; with --measure the best of them train a few steps on this machine.
"""

from __future__ import annotations

import difflib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fastpar.axes import every, layout_text, number_text, size_text
from fastpar.axes.step import Setup, Workload
from fastpar.data.tokenizer import name_for
from fastpar.files.plain_files import write_text
from fastpar.predict.folder import is_folder, make_fits
from fastpar.predict.machine import (
    Cluster,
    DatasheetRates,
    Device,
    device_table,
    find_device,
    gpu_name,
    larger_device,
)
from fastpar.predict.memory import host_bytes
from fastpar.predict.run import host_memory
from fastpar.predict.search import (
    Estimate,
    families,
    possible_batches,
    ranked,
    refused,
    search,
    smallest_changes,
    why_not,
)
from fastpar.predict.time import (
    cost_per_billion_tokens,
    ops_of,
    predict_step,
)
from fastpar.settings.config import TrainConfig
from fastpar.settings.fields import leaves
from fastpar.settings.files import check_at_least, option
from fastpar.settings.model import PRESETS, GPTConfig
from fastpar.settings.options import ModelSize, TrainFlags
from fastpar.settings.parallel import MeshSettings, Parallel

PUBLISHED_ERROR = 0.12  # of a step's time, see bench/results/plan/published.md
TOKENS_PER_STEP = 524288  # GPT-2's published batch, on GPUs
CPU_VOCABULARY = 4096  # of the tokenizer that the trainer learns by default
# Memory that tensors cannot use. On a GPU: the CUDA context, cuBLAS workspaces, NCCL's buffers and
# the allocator's fragmentation. On a CPU: a rank's interpreter and libraries.
GPU_RESERVED_BYTES, GPU_USABLE = 1.5e9, 0.96
CPU_RESERVED_BYTES = 0.5e9
MOST_MEASURED = 12  # layouts that --measure runs


@dataclass(frozen=True)
class PlanCommand(ModelSize):
    """Find the best parallel layout for a GPT on these GPUs: memory, step time, cost, reasons."""

    model: str = "gpt2"
    """A preset of `fastpar train`, such as gpt2-xl or qwen3-0.6b; or a folder with config.json of
    a Hugging Face model: then only memory is predicted."""
    n_expert: int = 0
    """Experts per layer instead of an MLP; 0: none."""
    expert_top_k: int = 2
    """Experts per token."""
    expert_hidden: int | None = None
    """Width of an expert, instead of 4 * n-embd."""
    vocab_size: int | None = None
    """Tokens in the vocabulary; unset: the preset's, on a CPU 4096. Below 256: characters."""
    batch_size: int | None = None
    """Sequences per step over all GPUs; unset: 524288 tokens, on a CPU 8 sequences."""
    gpu: str = "h100"
    """GPU type: v100, a100, a100-40, h100, h100-pcie, h200, b200, l40s, 4090, cpu; --gpu list."""
    gpus: int = 8
    """Number of GPUs; with --gpu cpu: ranks."""
    gpus_per_node: int | None = None
    """GPUs per node; unset: as usually sold."""
    pp: int | None = None
    """Pipeline stages; unset: the best number."""
    tp_grid: str | None = None
    """Ranks that split each layer by rows and columns, 2x2 or 2x2x2; unset: the best."""
    link: str | None = None
    """Link inside a node: nvlink3, nvlink4, pcie4, ...; unset: the usual one."""
    inter_link: str | None = None
    """Link between nodes: ib-hdr, ib-ndr, ethernet-100, ...; unset: the usual one."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Format of weights and activations; auto: bf16 if the device has it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """As in fastpar train."""
    master_weights: Literal["auto", "full", "remainder"] = "auto"
    """As in fastpar train."""
    moment_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """As in fastpar train."""
    fp8: Literal["none", "mlp", "all"] = "none"
    """Matrix products in fp8, as in fastpar train; refused if it saves too little time."""
    price: float | None = None
    """Dollars per GPU hour; unset: a usual price."""
    headroom: float = 0.1
    """Fraction of the memory to leave free for what the prediction does not cover."""
    top: int = 6
    """Number of layouts to show."""
    json: str | None = None
    """Also write all results to this file."""
    measure: bool = False
    """Rank the best layouts by real steps on this machine, half a minute or more; sets --gpu."""
    quick: bool = False
    """Measure fewer steps."""

    @property
    def fixed(self) -> dict[str, Any]:
        """Settings of parallelize() that the command line fixes for all layouts."""
        names = (*leaves(MeshSettings), *leaves(Parallel))
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Plan:
    """A command and its results.

    Attributes:
        template: the settings that all layouts share.
        limit_bytes: the most memory that a layout may take, per rank.
        estimates: the layouts, the best first.
    """

    command: PlanCommand
    workload: Workload
    template: Setup
    cluster: Cluster
    limit_bytes: float
    rates: DatasheetRates
    rates_text: str
    estimates: Sequence[Estimate] = ()


def run(command: PlanCommand) -> int:
    """Runs the command; returns the exit status.

    Raises:
        ValueError: an unknown model or device, counts below 1, a batch that no layout divides, a
            model that fits nowhere; each message names a remedy.
    """
    if command.gpu == "list":
        print(device_table())
        return 0
    if is_folder(command.model):
        return _run_folder(command)
    plan = make_plan(command)
    print(report(plan))
    if command.json is not None:
        _write_json(plan, Path(command.json))
    return 0


def _run_folder(command: PlanCommand) -> int:
    """Which layouts of a Hugging Face model fit."""
    check_at_least("plan", vars(command), _AT_LEAST)
    device = find_device(command.gpu)
    cluster = Cluster.of(device, command.gpus, command.gpus_per_node)
    limit = usable_bytes(cluster) * (1 - command.headroom)
    fits = make_fits(command, _template(command, device), cluster.per_node, limit)
    print("\n".join([f"machine  {cluster}", *fits.lines(limit)]))
    if command.json is not None:
        content = {"command": asdict(command), "limit_bytes": limit, "layouts": fits.rows()}
        write_text(Path(command.json), json.dumps(content, indent=1) + "\n")
    if fits.fits[0].fits:
        return 0
    least = min(fit.memory.total for fit in fits.fits)
    larger = larger_device((least / (1 - command.headroom) + GPU_RESERVED_BYTES) / GPU_USABLE)
    ways = [f"--gpus {2 * command.gpus}", *([f"--gpu {larger}"] if larger else [])]
    raise ValueError(
        f"plan: expected a model that fits into {limit / 1e9:,.1f} GB a rank, got {command.model}, "
        f"which takes {least / 1e9:,.1f} GB; use {', '.join(ways)}, a shorter --block-size, or a "
        "smaller model"
    )


def make_plan(command: PlanCommand) -> Plan:
    """Finds every layout that fits and that `fastpar train` accepts.

    Raises:
        ValueError: as run().
    """
    _check_counts(command)
    if command.measure:  # this machine's device; a GPU's own name if there is one
        command = replace(command, gpu=gpu_name() or "cpu")
    device = find_device(command.gpu)
    workload, template = _workload(command, device), _template(command, device)
    for axis in every():
        axis.check(command, workload)
    links = command.link, command.inter_link
    cluster = Cluster.of(device, command.gpus, command.gpus_per_node, *links)
    limit = usable_bytes(cluster) * (1 - command.headroom)
    setup = template.change(**command.fixed)
    among: dict[str, Any] = {"per_node": cluster.per_node, "fixed": command.fixed}
    rates = DatasheetRates(cluster, template)
    rates_text = (
        f"data sheet of {device.name}; with data sheets the predicted step times of published runs "
        f"on A100 and H100 are off by up to {PUBLISHED_ERROR:.0%}"
    )
    estimates = search(workload, setup, rates=rates, limit_bytes=limit, **among)
    plan = Plan(command, workload, template, cluster, limit, rates, rates_text, estimates)
    if not estimates:
        near = " or ".join(map(str, possible_batches(workload, setup, **among)))
        raise ValueError(
            f"plan: expected batch_size to be a multiple of the data-parallel ranks, got "
            f"batch_size={workload.batch_size} with gpus={command.gpus}; use --batch-size {near}, "
            "or another --gpus"
        )
    if estimates[0].time is None:
        raise ValueError(_nothing_fits(plan))
    check_fp8(workload, estimates[0].setup, rates, command.gpu)
    problem = refused(workload, estimates[0].setup)
    assert problem is None, problem
    return _measured(plan) if command.measure else plan


def _measured(plan: Plan) -> Plan:
    """The best layouts with the median times of real steps."""
    from fastpar.predict.measure import QUICK_SECONDS, SECONDS, measure

    fitting = [e for e in families(plan.estimates) if e.time is not None]
    some = fitting[:MOST_MEASURED]
    seconds = QUICK_SECONDS if plan.command.quick else SECONDS
    measured, spreads = [], []
    for e, times in zip(some, measure(plan.workload, [e.setup for e in some], seconds=seconds)):
        assert e.time is not None
        step_s = statistics.median(times)
        measured.append(replace(e, time=e.time.measured(step_s)))
        spreads.append((max(times) - min(times)) / step_s)
    text = (
        f"real steps on this machine, of {len(some)} of {len(fitting)} layouts that fit; steps of "
        f"the same layout differ by {statistics.median(spreads):.0%}"
    )
    return replace(plan, rates_text=text, estimates=ranked(measured))


_AT_LEAST = {
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "batch_size"), 1),
    **{"gpus": 1, "gpus_per_node": 1, "top": 1, "price": 0},
}


def _check_counts(command: PlanCommand) -> None:
    """Refuse numbers outside their range, and an unknown model."""
    check_at_least("plan", vars(command), _AT_LEAST)
    if not 0 <= command.headroom < 1:
        raise ValueError(
            "plan: expected headroom >= 0 and < 1, a fraction of the memory, got headroom="
            f"{command.headroom}; set --headroom"
        )
    if command.vocab_size is not None:
        try:
            name_for(command.vocab_size)
        except ValueError:
            raise ValueError(
                "plan: expected a vocab_size of a tokenizer of `fastpar train`, got "
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


def _workload(command: PlanCommand, device: Device) -> Workload:
    on_cpu = device.kind == "cpu"
    vocab = command.vocab_size or (CPU_VOCABULARY if on_cpu else PRESETS[command.model].vocab_size)
    overrides = command.sizes()
    if command.n_expert:
        experts: dict[str, Any] = {"top_k": command.expert_top_k}
        experts["expert_hidden"] = command.expert_hidden
        overrides |= {"n_expert": command.n_expert, **experts}
    shape = GPTConfig.preset(command.model, vocab_size=vocab, **overrides)
    rows = command.batch_size
    if rows is None:
        rows = 8 if on_cpu else max(1, TOKENS_PER_STEP // shape.block_size)
    return Workload(shape, rows)


def _template(command: PlanCommand, device: Device) -> Setup:
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
    # The settings of the run itself, so that contradictions are refused here as there.
    config = TrainConfig().replace(
        {"master_weights": command.master_weights, "moment_dtype": command.moment_dtype,
         "optimizer": command.optimizer, "dtype": dtype, "fp8": command.fp8,
         "n_expert": command.n_expert},
        "plan",
    )  # fmt: skip
    device_type, transport = ("cpu", "shm") if on_cpu else ("cuda", "nccl")
    return Setup(command.gpus, config, device_type, transport)


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a rank's memory that tensors can use."""
    device = cluster.device
    if device.kind == "cpu":
        return host_memory() / cluster.per_node - CPU_RESERVED_BYTES
    return device.memory_bytes * GPU_USABLE - GPU_RESERVED_BYTES


def _nothing_fits(plan: Plan) -> str:
    """Error text: the least memory that the model takes, and the smallest changes that help."""
    command, limit = plan.command, plan.limit_bytes
    least = min(plan.estimates, key=lambda e: e.memory.total)
    whole, used = usable_bytes(plan.cluster), 1 - command.headroom
    ways = smallest_changes(
        plan.workload,
        plan.template,
        limit_bytes=limit,
        per_node=plan.cluster.per_node,
        larger=lambda size: larger_device((size / used + GPU_RESERVED_BYTES) / GPU_USABLE),
    )
    if least.memory.total <= whole:
        ways.insert(0, "--headroom 0 (leaves no memory free)")
    for name in command.fixed:
        ways.insert(0, f"no {option(name)}, to compare all layouts")
    return (
        f"plan: expected a model that fits into {limit / 1e9:,.1f} GB a rank ({whole / 1e9:,.1f} "
        f"GB minus a headroom of {command.headroom:.0%}), got {plan.workload.n_parameters:,} "
        f"parameters, which on {layout_text(least.setup)} with {_recompute(least.setup)} take "
        f"{least.memory}; use " + ", or ".join([*ways, "a smaller model"])
    )


def report(plan: Plan) -> str:
    """The report: tables and explanations."""
    command, workload, estimates = plan.command, plan.workload, plan.estimates
    shape, winner = workload.shape, estimates[0]
    best = families(estimates)
    fitting = [e for e in best if e.time is not None]
    lines = [
        f"model    {command.model}: {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} "
        f"wide, {workload.n_parameters:,} parameters with a vocabulary of {shape.vocab_size:,} "
        "(--vocab-size)",
        f"step     {workload.tokens_per_step:,} tokens: {workload.batch_size} sequences of "
        f"{workload.seq_len:,}",
        f"machine  {plan.cluster}; {plan.limit_bytes / 1e9:,.1f} GB per rank for tensors, "
        f"{command.headroom:.0%} headroom subtracted (--headroom)",
        f"rates    {plan.rates_text}",
        f"layouts  {len(fitting)} of {len(best)} parallel layouts fit; the best:",
        "",
    ]
    head = ["layout", "micro-batch", "recompute", "memory", "step ms", "tokens/s", "MFU"]
    rows = [[*head, "exposed ms", "bubble", "$ / 1e9 tokens"]]
    rows += [_row(plan, estimate) for estimate in fitting[: command.top]]
    lines += _columns(rows)
    device = plan.cluster.device
    lines += [
        "",
        "MFU      FLOPs of the model per step, without recomputation, as a share of "
        f"{plan.rates.peak_flops / 1e12:,.4g} TFLOP/s per rank, the {plan.template.dtype} peak of "
        f"{device.name} ({device.source}), which no training reaches",
        *["exposed  time of a step that only waits for communication"] * (not command.measure),
    ]
    losers = {layout_text(e.setup): e for e in best[1 : 2 * command.top]}
    n_more = len(best) - 1 - len(losers)
    for e in estimates[1:]:
        if e.family == winner.family:
            losers[f"{layout_text(e.setup)}, {_recompute(e.setup)}"] = e
    why = [f"  {name}: {why_not(e, winner, plan.limit_bytes)}" for name, e in losers.items()]
    assert winner.time is not None
    parts = [f"{k} {number_text(s * 1e3)} ms" for k, s in winner.time.parts.items() if s > 0]
    lines += [
        *["", "why not the others"] * bool(why),
        *why,
        *[f"  and {n_more} more layouts; --top shows more, --json all"] * (n_more > 0),
        "",
        f"memory   {winner.memory}",
        *[f"time     {', '.join(parts)}"] * bool(parts),
    ]
    if on_host := host_bytes(workload, winner.setup):
        lines.append(f"host     {size_text(on_host)} of host memory per rank")
    return "\n".join([*lines, "", *command_lines(plan, winner.setup)])


def _recompute(setup: Setup) -> str:
    mode = setup.recompute.activation_checkpointing
    return "no recomputation" if mode == "none" else f"{mode} recomputation"


def _row(plan: Plan, estimate: Estimate) -> list[str]:
    setup, time = estimate.setup, estimate.time
    assert time is not None
    cost = cost_per_billion_tokens(time, plan.cluster, plan.command.price)
    return [
        layout_text(setup),
        f"{setup.micro_batch_size} x {setup.grad_accum_steps}",
        setup.recompute.activation_checkpointing,
        size_text(estimate.memory.total),
        number_text(time.step_s * 1e3, 4),
        f"{time.tokens_per_s:,.0f}",
        f"{time.mfu:.1%}",
        number_text(time.exposed_s * 1e3) * bool(time.parts),
        f"{time.bubble_s / time.step_s:.1%}" if setup.mesh.pp > 1 and time.parts else "",
        f"{cost:,.2f}",
    ]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines, without columns that have a title only."""
    rows = list(zip(*(column for column in zip(*rows) if any(column[1:]))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def flags(plan: Plan, setup: Setup) -> list[str]:
    """Flags of `fastpar train` for a layout, without those equal to the trainer's defaults."""
    model, vocabulary = plan.command.model, plan.workload.shape.vocab_size
    usual = Workload(PRESETS[model], TrainFlags().text.batch_size)
    defaults = Setup().with_sizes(usual).settings()
    words = ["--model", model]
    if vocabulary != CPU_VOCABULARY:
        words += ["--tokenizer", name_for(vocabulary)]
    for name, value in setup.with_sizes(plan.workload).settings().items():
        if value == defaults[name] or value is None:
            continue
        if isinstance(value, bool):
            words.append(option(name) if value else option(f"no_{name}"))
        else:
            words += [{"zero_stage": "--zero"}.get(name, option(name)), f"{value}"]
    return words


def command_lines(plan: Plan, setup: Setup) -> list[str]:
    """The command that trains with this layout, on one node or several."""
    cluster, words = plan.cluster, " ".join(flags(plan, setup))
    nodes = -(-cluster.n_devices // cluster.per_node)
    if nodes == 1:
        nproc = f" --nproc {cluster.n_devices}" if cluster.n_devices > 1 else ""
        return [f"fastpar train{nproc} {words}"]
    return [
        "run on each node, with HOST the address of the first:",
        f"torchrun --nnodes {nodes} --nproc-per-node {cluster.per_node} "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        f"-m fastpar train {words}",
    ]


def _write_json(plan: Plan, path: Path) -> None:
    content = {
        "command": asdict(plan.command),
        "shape": asdict(plan.workload.shape),
        "batch_size": plan.workload.batch_size,
        "parameters": plan.workload.n_parameters,
        "machine": str(plan.cluster),
        "rates": plan.rates_text,
        "limit_bytes": plan.limit_bytes,
        "layouts": [
            {
                **e.setup.in_effect(),
                "fits": e.time is not None,
                "host_bytes": host_bytes(plan.workload, e.setup),
                "memory_bytes": {**vars(e.memory), "total": e.memory.total},
                "time": None if e.time is None else asdict(e.time),
            }
            for e in plan.estimates
        ],
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


# Matrix products in fp8

LEAST_GAIN = 0.03  # of a step: with less, no published run of such a model was faster


def saved_s(workload: Workload, setup: Setup, rates: DatasheetRates, layers: str) -> float:
    """Seconds of a step that fp8 saves in "mlp" or "all" layers: products minus casts."""
    hidden, total = 4 * workload.shape.n_embd // setup.tp, 0.0
    for op in ops_of(workload, setup):
        if op.name != "matmul" or op.direction != "forward":
            continue
        m, k, n = op.shape
        if layers == "all" or hidden in (k, n):
            total += op.count * rates.fp8_saves_s(m, k, n)
    return total


def check_fp8(workload: Workload, setup: Setup, rates: DatasheetRates, device: str) -> None:
    """Refuses fp8 if it cannot pay, and states the figures.

    Raises:
        ValueError: a device without fp8 products, or without known rates for them; a layout that
            gains less than LEAST_GAIN.
    """
    layers = setup.flags.system.fp8
    if layers == "none":
        return
    if not rates.has_fp8:
        raise ValueError(
            "plan: expected a GPU with fp8 products (l40s, h100, b200) and dtype=bf16 for "
            f"fp8={layers}, got gpu={device} dtype={setup.dtype}; drop --fp8, or change --gpu"
        )
    plain = setup.change(fp8="none")
    step_s = predict_step(workload, plain, rates).step_s
    gain_s = saved_s(workload, plain, rates, layers)
    if gain_s < LEAST_GAIN * step_s:
        raise ValueError(
            f"plan: expected fp8 to save at least {LEAST_GAIN:.0%} of a step, got fp8={layers} "
            f"with n_embd={workload.shape.n_embd}: {number_text(gain_s * 1e3)} of "
            f"{number_text(step_s * 1e3, 4)} ms, {gain_s / step_s:.1%} (products minus casts); "
            "drop --fp8, which pays in wider models"
        )
