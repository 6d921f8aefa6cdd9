"""Training runs that others published, and what fastpar's planner says of them on paper.

[Note: sources] Narayanan et al. 2021, arXiv 2104.04473, table 1 (all ten rows; "percentage of peak"
counts recomputation, its formula 3). Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5
(iteration times; MFU by its appendix) and abstract. llm.c: its scripts for GPT-2 and their step
times, as repeated in its discussions and in modded-nanogpt's records. Every prediction is compared
with its source's own measure: the same operations of the model over the time. torchtitan:
benchmarks/llama3_h100_202412, table 5: Llama 3.1 405B with products in fp8, which the planner does
not price; compared is what the schedule gains. There are 8 micro-batches, its default; a GPT of as
many layers, as wide, stands for the model.

[Note: stacks] The planner gets what a software does, not how fast it is. llm.c does what fastpar's
own ops do. Megatron-LM of 2021 and 2022 kept whole matrices of attention scores, made by batched
products, a softmax and a dropout; its residual dropout, transposes and vocabulary-parallel loss are
passes through memory of their own; no exchange ran beside a product.

[Note: what the sources leave out] Table 1 has neither micro-batches nor the interleaving that its
text says was used. Taken for it: micro-batches of 4 where there are no stages and of 1 where there
are, and the smallest number of parts above 1 that divides a stage's layers.

[Note: calibration] GENERATIONS of predict/machine.py, "ampere" and "hopper", were set with these
rows in view, one set of numbers for all of a device's rows. With `reached` fitted to the other
families alone, each family stays within TOLERANCE.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastpar.axes.step import Op, Setup, Workload
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.time import StepTime, comm_ops_of, ops_of, predict_step, time_of
from fastpar.settings.model import GPTConfig, flops_per_token

TOLERANCE = 0.2  # of a predicted fraction of peak, relative to the reported


@dataclass(frozen=True)
class Published:
    """One run: what was trained, how, and what came out. family: of rows from one source and
    software; reported: fraction of the devices' peak; core: Megatron recomputes the core of
    attention only ("selective" there)."""

    family: str
    name: str
    device: str
    workload: Workload
    setup: Setup
    reported: float
    core: bool = False

    @property
    def counted_flops(self) -> float:
        """FLOPs of a step, as the source counts them."""
        if self.family == "llm.c":
            return float(flops_per_token(self.workload.shape) * self.workload.tokens_per_step)
        shape, seq_len = self.workload.shape, self.workload.seq_len
        passes = 96 if self.family == "arXiv 2104.04473" else 72
        layers, width = shape.n_layer, shape.n_embd
        head = shape.vocab_size / (passes / 6 * layers * width)
        per_token = passes * layers * width**2 * (1 + seq_len / (6 * width) + head)
        return per_token * self.workload.tokens_per_step


def _gpt(layers: int, heads: int, width: int, seq_len: int, vocab: int) -> GPTConfig:
    return GPTConfig(layers, heads, width, seq_len, vocab, dropout=0.0)


# arXiv 2104.04473, table 1: billions of parameters, heads, width, layers, tensor and pipeline
# parallel size, GPUs, batch, percent of peak.
_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 44), (3.6, 32, 3072, 30, 2, 1, 64, 512, 44),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 46), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 43),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 44), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 45),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 47), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 50),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 52),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 52),
)  # fmt: skip
# arXiv 2205.05198, tables 3 and 5: as above, interleaving, micro-batch; seconds of an iteration
# with full recomputation, and with sequence parallelism and selective recomputation.
_TABLE_5 = (
    (22, 64, 6144, 48, 8, 1, 8, 4, 1, 4, 1.42, 1.10),
    (175, 96, 12288, 96, 8, 8, 64, 64, 3, 1, 18.13, 13.75),
    (530, 128, 20480, 105, 8, 35, 280, 280, 3, 1, 49.05, 37.83),
    (1000, 160, 25600, 128, 8, 64, 512, 512, 1, 1, 94.42, 71.49),
)
_EIGHT_COPIES = (0.421, 0.542)  # its abstract: MFU of the 530B rows on 2240 GPUs
# llm.c on 8 GPUs: size, layers, heads, width, device, batch of a GPU, tokens a step, seconds.
_LLM_C = (
    ("124M", 12, 12, 768, "a100", 64, 524288, 0.300),
    ("350M", 24, 16, 1024, "a100", 64, 524288, 0.820),
    ("774M", 36, 20, 1280, "a100", 32, 524288, 1.70),
    ("124M", 12, 12, 768, "h100", 64, 524288, 0.140),
    ("350M", 24, 16, 1024, "h100", 64, 524288, 0.348),
    ("1558M", 48, 25, 1600, "h100", 16, 1048576, 2.80),
)
# torchtitan, 405B on 512 GPUs: tokens/s a GPU by schedule and chunks.
_TITAN = {("1f1b", 1): 100, ("interleaved", 2): 128}
FULL: dict[str, Any] = {"activation_checkpointing": "full", "sequence_parallel": False}
_MEGATRON: dict[str, Any] = {"dtype": "fp16", "grad_dtype": "fp16", "reduce_dtype": "fp16"}


def published() -> Iterator[Published]:
    """All rows."""
    for size, heads, width, layers, tp, pp, gpus, batch, percent in _TABLE_1:
        per_stage = layers // pp
        smallest = next(k for k in range(2, per_stage + 1) if per_stage % k == 0)
        micro, parts = (4, 1) if pp == 1 else (1, smallest)
        axes: Any = {"tp": tp, "pp": pp, "schedule": _schedule(parts), "chunks": parts}
        steps = batch * tp * pp // gpus // micro
        batches: Any = {"micro_batch_size": micro, "grad_accum_steps": steps}
        setup = Setup(gpus, **axes, **batches, **FULL, **_MEGATRON)
        workload = Workload(_gpt(layers, heads, width, 2048, 51200), batch)
        yield Published("arXiv 2104.04473", f"{size:g}B", "a100", workload, setup, percent / 100)
    for billions, heads, width, layers, tp, pp, gpus, batch, parts, micro, slow, fast in _TABLE_5:
        workload = Workload(_gpt(layers, heads, width, 2048, 51200), batch)
        for core, step_s in ((False, slow), (True, fast)):
            axes = {"tp": tp, "pp": pp, "schedule": _schedule(parts), "chunks": parts}
            batches = {"micro_batch_size": micro, "grad_accum_steps": batch // micro}
            kept = {"sequence_parallel": True} if core else FULL
            setup = Setup(gpus, **axes, **batches, **kept, **_MEGATRON)
            kind = "selective, sp" if core else "full"
            name = f"{billions}B {kind}"
            row = Published("arXiv 2205.05198", name, "a100", workload, setup, 0.0, core)
            yield _with_seconds(row, step_s)
            if billions == 530:
                setup = setup.change(world_size=8 * gpus)
                job8 = replace(workload, batch_size=8 * batch)
                yield replace(row, workload=job8, setup=setup, reported=_EIGHT_COPIES[core])
    for name, layers, heads, width, device, micro, tokens, step_s in _LLM_C:
        batches = {"micro_batch_size": micro, "grad_accum_steps": tokens // 1024 // 8 // micro}
        setup = Setup(8, zero_stage=1, **batches, grad_dtype="bf16", reduce_dtype="bf16")
        workload = Workload(_gpt(layers, heads, width, 1024, 50257), tokens // 1024)
        yield _with_seconds(Published("llm.c", name, device, workload, setup, 0.0), step_s)


def _schedule(parts: int) -> str:
    return "interleaved" if parts > 1 else "1f1b"


def _with_seconds(row: Published, step_s: float) -> Published:
    return replace(row, reported=_fraction(row, step_s))


def _fraction(row: Published, step_s: float) -> float:
    peak = Cluster.of(row.device, row.setup.world_size).device.peak_flops
    return row.counted_flops / step_s / row.setup.world_size / peak


def predict(row: Published, rates: DatasheetRates | None = None) -> tuple[StepTime, float]:
    """The step on paper, and its fraction of peak in the source's measure."""
    workload, setup = row.workload, row.setup
    rates = rates or DatasheetRates(Cluster.of(row.device, setup.world_size), setup)
    ops, sends = list(ops_of(workload, setup)), list(comm_ops_of(workload, setup))
    if row.family != "llm.c":
        ops, sends = list(_megatron_ops(row, ops)), [send._replace(under="") for send in sends]
    time = time_of(workload, setup, rates, ops, sends)
    return time, _fraction(row, time.step_s)


# Megatron-LM, see [Note: stacks]


def _megatron_ops(row: Published, ops: list[Op]) -> Iterator[Op]:
    for op in ops:
        if op.name == "attention":
            yield from _scores(op)
            if row.core and op.direction == "forward":
                first, _, *passes = _scores(op._replace(direction="recompute"))
                yield from (first, *passes)
            continue
        yield op
        if op.name == "layer_norm":
            # Bias, dropout and residual sum apart from the norm, and masks of a byte.
            more = {"forward": 1.5, "recompute": 1.5, "backward": 3.0}[op.direction]
            yield _through_memory(op, more * 2 * op.shape[0] * op.shape[1])
        if op.name == "loss" and op.direction == "forward":
            n, _, vocab = op.shape
            yield _through_memory(op, 40.0 * n * vocab)  # logits in fp32, an op at a time


def _scores(op: Op) -> Iterator[Op]:
    """Attention by batched products: q k and p v of all tokens; softmax, mask, dropout between."""
    batch, heads, time, dim = op.shape
    rows = batch * heads * time
    flops = 2.0 * rows * time * dim * (2 if op.direction == "backward" else 1)
    for shape in ((rows, dim, time), (rows, time, dim)):
        yield op._replace(name="matmul", shape=shape, flops=flops, bytes=0.0)
    passes = 5.5 if op.direction == "backward" else 4.5
    yield _through_memory(op, 2.0 * passes * rows * time)
    yield _through_memory(op, 2.0 * 8 * rows * dim)  # transposes of q, k, v and the output


def _through_memory(op: Op, n_bytes: float) -> Op:
    return op._replace(name="copy", shape=(int(n_bytes),), flops=0.0, bytes=n_bytes)


def schedules() -> tuple[float, float]:
    """What torchtitan's run gained by interleaving, and what the planner says of it."""
    workload, speeds = Workload(_gpt(126, 128, 16384, 8192, 128256), 256), []
    for schedule, chunks in _TITAN:
        axes: Any = {"tp": 8, "pp": 8, "zero_stage": 2, "schedule": schedule, "chunks": chunks}
        full: Any = {"accumulate": "full", "activation_checkpointing": "full"}
        setup = Setup(512, **axes, **full, micro_batch_size=4, grad_accum_steps=8)
        rates = DatasheetRates(Cluster.of("h100", setup.world_size), setup)
        speeds.append(predict_step(workload, setup, rates).tokens_per_s)
    slow, fast = _TITAN.values()
    return fast / slow, speeds[1] / speeds[0]


def table() -> str:
    """Markdown: every row, reported and predicted."""
    lines = [
        "| run | GPUs | tp x pp x dp | micro-batch | reported | predicted | difference | step |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in published():
        time, fraction = predict(row)
        s = row.setup
        lines.append(
            f"| {row.family}: {row.name} | {s.world_size} {row.device} | "
            f"{s.tp} x {s.mesh.pp} x {s.dp} | {s.micro_batch_size} | {row.reported:.1%} | "
            f"{fraction:.1%} | {fraction / row.reported - 1:+.1%} | {time.step_s:.3g} s |"
        )
    gain, ours = schedules()
    lines.append(
        "| torchtitan: 405B, interleaved over 1f1b | 512 h100 | 8 x 8 x 8 | 4 | "
        f"{gain:.2f}x | {ours:.2f}x | {ours / gain - 1:+.1%} | |"
    )
    return "\n".join(lines)
