"""One training step (forward, backward, clip, AdamW): fastpar beside plain PyTorch.

Plain PyTorch is bench/peers/stock.py, eager and under torch.compile, with fused AdamW and
clip_grad_norm_; for two ranks it is DDP with 25 MB buckets. Same weights, batches and threads, in
turns (bench/systems/steps.py). Cases: 6x384 and 12x768 on a CPU, one process in fp32, with AMX in
bf16 (fastpar with fp32 masters, plain PyTorch under autocast), and two ranks; on a GPU 124M and
1.5B. "model NAME" are MODELS, on a CPU in fp32 those that find memory; NanoChat and Qwen3 stand
beside transformers' classes.

[Note: the gate of a training step] After its timed steps a fastpar variant computes the gradients
of one small batch; their error against plain PyTorch in fp64 on the same weights, as a vector norm,
may be at most twice that of plain PyTorch in the same precision, plus one rounding. Models of
transformers compute in fp32 at most; there the losses are compared, see steps.py.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Bench, stopwatch
from bench.peers import stock
from bench.peers.contenders import update_error
from bench.records import Row
from bench.systems.steps import (
    LOSS_BOUND,
    Log,
    Turns,
    available_bytes,
    batch,
    judge_error,
    judge_losses,
    row_of,
    start,
)
from fastpar.comm.host import memory_mb
from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import keep_freed_memory
from fastpar.kernels.backend import has_bf16_gemm
from fastpar.models.gpt import GPT
from fastpar.observe.strategies import Settings, adamw_of
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import param_groups
from fastpar.settings.model import GPTConfig

TIME_LIMIT_S = {"cpu": 3600, "cuda": 1200}
CONFIGS = {
    "6x384": (GPTConfig(6, 6, 384, 256, 50304, dropout=0.0), 8),
    "12x768": (GPTConfig(12, 12, 768, 256, 50304, dropout=0.0), 4),
    "124M": (GPTConfig(12, 12, 768, 1024, 50304, dropout=0.0), 32),
    "1.5B": (GPTConfig(48, 25, 1600, 1024, 50304, dropout=0.0), 4),
}
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
MODELS = {  # preset -> what runs with --quick
    "gpt2": QUICK, "gpt2-medium": QUICK, "gpt2-large": QUICK, "gpt2-xl": QUICK,
    "nanochat-d12": GPTConfig.preset("nanochat-tiny", vocab_size=256),
    "qwen3-0.6b": GPTConfig.preset("qwen3-tiny", vocab_size=256),
}  # fmt: skip
BYTES = 24  # of a parameter in fp32: weight, gradient, two moments; the rest for activations
GPU_CASES = ("124M", "1.5B")
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.99), 0.1, 1.0
CHECK_TOKENS = 32


@dataclass(frozen=True)
class Spec:
    """What a worker builds."""

    kind: str  # "stock" | "fastpar"
    config: GPTConfig
    rows: int  # sequences of a step, over all ranks
    device: str = "cpu"
    threads: int = 1  # of each rank
    ranks: int = 1
    compiled: bool = False
    keep_memory: bool = False  # glibc keeps freed memory, as fastpar's trainer asks it to
    lr: float = 6e-4
    bf16: bool = False  # weights of fastpar with fp32 masters; autocast of plain PyTorch; a GPU's

    @property
    def half(self) -> bool:
        return self.bf16 or self.device == "cuda"

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.config.block_size


class Variant:
    """Model, optimizer and data of one rank of one variant; public methods are the commands."""

    def __init__(self, spec: Spec):
        self.spec, self.rank, self.count = spec, int(os.environ.get("RANK", "0")), 0
        self.module, self.optimizer = self._build()
        self.model: Callable[..., Tensor] = self.module
        if spec.compiled:
            self.model = torch.compile(self.module, dynamic=False)

    def _build(self) -> tuple[nn.Module, Any]:
        spec = self.spec
        if spec.keep_memory:
            keep_freed_memory()
        if spec.kind == "stock":
            plain: nn.Module = stock.plain_model(spec.config).to(spec.device)
            how: Any = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "eps": 1e-8}
            optimizer = adamw_of(plain, Settings(lr=spec.lr, **how))
            if spec.ranks > 1:
                torch.distributed.init_process_group("nccl" if spec.device == "cuda" else "gloo")
                buckets: Any = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True}
                plain = nn.parallel.DistributedDataParallel(plain, **buckets)
            return plain, optimizer
        on_gpu = spec.device == "cuda"
        model = GPT(spec.config, seed=0)
        model.to(spec.device, torch.bfloat16 if spec.half else torch.float32)
        mesh = Mesh(device=None if on_gpu else "cpu")
        parallelize(model, mesh, grad_dtype=torch.float32 if on_gpu else None)
        common: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM, "master_weights": spec.half}
        groups = param_groups(model, WEIGHT_DECAY)
        return model, AdamW(groups, lr=spec.lr, betas=BETAS, **common)

    def steps(self, count: int) -> dict[str, list]:
        """Run the next steps; ms of each (CPU) or their mean (GPU), losses. On a GPU the first two
        of more than four are not timed: they take the memory back that was handed to the other
        variants, and training waits for nothing between steps."""
        first, self.count = self.count, self.count + count
        batches = [self._batch(first + i) for i in range(count)]
        on_gpu = self.spec.device == "cuda"
        losses: list[Any] = []
        reports: list[dict[str, float]] = []
        host: list[float] = []

        def one(index: int) -> None:
            begin = time.thread_time()
            losses.append(self._step(first + index, *batches[index]))
            host.append(time.thread_time() - begin)
            if not on_gpu:
                losses[-1] = losses[-1].item()
                reports.append(self._report())

        if on_gpu:
            untimed = 2 if count > 4 else 0
            for i in range(untimed):
                one(i)
            total, _ = stopwatch(lambda: list(map(one, range(untimed, count))), "cuda")
            times, host = [total / (count - untimed)], host[untimed:]
            losses = [loss.item() for loss in losses]
            torch.cuda.empty_cache()  # the next variant's turn: same GPU
        else:
            times = [stopwatch(lambda i=i: one(i), "cpu")[0] for i in range(count)]  # type: ignore
        return {"ms": times, "losses": losses, "reports": reports, "host_s": host}

    def _step(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        loss = self._loss(x, y)
        loss.backward()
        if self.spec.kind == "stock":
            nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.spec.half and self.spec.kind == "stock":
            with torch.autocast(self.spec.device, torch.bfloat16):
                return self.model(x, y)
        return self.model(x, y)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the step's batch; the same batch for every variant."""
        spec = self.spec
        x, y = batch(spec.config, step, self.rank, spec.ranks, spec.rows)
        return x.to(spec.device), y.to(spec.device)

    def _report(self) -> dict[str, float]:
        if self.spec.kind == "stock" or self.spec.ranks == 1:
            return {}
        report = engine_of(self.module).report
        return {} if report is None else {"exposed_comm_ms": report.exposed_ms or 0.0}

    def reset_peak(self) -> None:
        if self.spec.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Highest memory so far: of the GPU's allocator, or resident in this process."""
        if self.spec.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return round(1e6 * memory_mb()[1])

    def check(self) -> dict[str, float]:
        """Gradient error of this variant and of plain PyTorch; see [Note: the gate ...]."""
        spec, config = self.spec, self.spec.config
        length = min(CHECK_TOKENS, config.block_size)
        generator = torch.Generator().manual_seed(9)
        shape = (spec.ranks, length + 1)
        tokens = torch.randint(config.vocab_size, shape, generator=generator).to(spec.device)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer.zero_grad()
        model = self.module  # never the compiled one: it would compile for this shape
        model(x[self.rank : self.rank + 1], y[self.rank : self.rank + 1]).backward()
        ours = self._gradients()
        self.optimizer.zero_grad()

        state = self.module.state_dict()
        precision = next(self.module.parameters()).dtype
        grads = {}
        for dtype in (torch.float64, precision):
            with torch.device(spec.device):  # filling 1.5B on a CPU takes 25 s
                plain = stock.GPT(config).load_fastpar(state).to(dtype)
            plain(x, y).backward()
            grads[dtype] = {n: p.grad.double() for n, p in plain.named_parameters()}  # type: ignore
        exact = grads[torch.float64]
        zero = dict.fromkeys(exact, torch.zeros((), dtype=torch.float64))
        both = {"error": ours, "stock_error": grads[precision]}
        errors = {name: update_error(iter(g.items()), exact, zero) for name, g in both.items()}
        return {**errors, "eps": torch.finfo(precision).eps}

    def _gradients(self) -> dict[str, Tensor]:
        """Name -> gradient (mean over ranks) in fp64, without the vocabulary's padding."""
        engine = engine_of(self.module)
        engine.reduce_rest()
        names = {id(p): name for name, p in self.module.named_parameters()}
        found = {names[id(p)]: grad.double() for p, grad in engine.grads()}
        found["wte.weight"] = found["wte.weight"][: self.spec.config.vocab_size]
        return {name: grad.clone() for name, grad in found.items()}


def take_turns(
    specs: Mapping[str, Spec], *, rounds: int, steps: int, warmup: int,
    begin: Callable[[Spec], Any] = lambda spec: start(spec, Variant),
) -> dict[str, Log]:  # fmt: skip
    """Every variant runs `steps` steps in each of `rounds` rounds; a failure stops only its own."""
    with Turns(begin, timeout_s=900.0) as turns:
        logs = turns.logs

        def reset(name: str) -> None:
            for count in (1, warmup - 1) if warmup else ():  # the first one compiles
                turns.turn(name, count, None)
            turns.ask(name, "reset_peak")

        def finish(name: str) -> None:
            logs[name].peak_bytes = max(turns.ask(name, "peak_bytes"))
            if specs[name].kind != "fastpar":
                turns.close(name)  # the gate below needs memory for fp64 gradients

        def gate(name: str) -> None:
            own, what = specs[name].kind == "fastpar", "gradients: expected an error against fp64"
            for rank, answer in enumerate(turns.ask(name, "check") if own else ()):
                bound = 2 * answer["stock_error"] + answer["eps"]
                judge_error(rank, what, answer["error"], bound)

        for name, spec in specs.items():
            turns.start({name: spec})
            turns.each(reset, [name])
        turns.run(rounds, steps)
        turns.each(finish)
        first = next(iter(specs))
        if specs[first].config.is_gpt2:
            turns.each(gate)
        else:
            eps = torch.finfo(torch.bfloat16).eps if specs[first].half else 0.0
            bound = max(LOSS_BOUND, eps * max(logs[first].losses, default=0.0))
            judge_losses(logs, first, lambda _: bound)
    return logs


def to_rows(
    bench: Bench, case: str, specs: Mapping[str, Spec], logs: Mapping[str, Log], baseline: str
) -> list[Row]:
    """A row for each variant, compared with the baseline of the same run."""
    rows, base = [], logs[baseline]
    base_ms = base.ms if base.refused is None else []
    for name, log in logs.items():
        spec = specs[name]
        row = row_of(bench, case, spec, log, baseline, base_ms, name=name)
        row.dtype = "bfloat16" if spec.half else "float32"
        row.notes["batch_size"] = spec.rows
        rows.append(row)
        if row.speedup is not None and base.peak_bytes and log.peak_bytes:
            row.notes["memory_ratio"] = log.peak_bytes / base.peak_bytes
    return rows


def run_cpu(bench: Bench, name: str) -> None:
    """One process with all cores, then two ranks with one thread each."""
    config, batch_size = (QUICK, 4) if bench.quick else CONFIGS[name]
    cores = torch.get_num_threads()
    rounds, steps = (1, 2) if bench.quick else (6, 2 if name == "6x384" else 1)
    title = f"{'quick' if bench.quick else name} T={config.block_size} B={batch_size}"
    one = Spec("stock", config, batch_size, threads=cores)
    specs = {
        "eager": one,
        "torch.compile": replace(one, compiled=True),
        "fastpar": replace(one, kind="fastpar", keep_memory=True),
        "eager, freed memory kept": replace(one, keep_memory=True),
    }
    logs = take_turns(specs, rounds=rounds, steps=steps, warmup=2)
    bench.add(*to_rows(bench, title, specs, logs, "eager"))
    if bench.quick or has_bf16_gemm:
        half = replace(one, keep_memory=True, bf16=True)
        specs = {"eager, autocast": half, "fastpar": replace(half, kind="fastpar")}
        logs = take_turns(specs, rounds=rounds, steps=steps, warmup=2)
        bench.add(*to_rows(bench, f"{title}, bf16", specs, logs, "eager, autocast"))
    two = replace(one, threads=max(1, cores // 2), ranks=2)
    specs = {"DDP": two, "fastpar": replace(two, kind="fastpar", keep_memory=True)}
    specs["DDP, freed memory kept"] = replace(two, keep_memory=True)
    logs = take_turns(specs, rounds=rounds, steps=steps, warmup=2)
    bench.add(*to_rows(bench, f"{title}, 2 ranks", specs, logs, "DDP"))


def run_model(bench: Bench, name: str) -> None:
    """A model as it is, at a batch that fits; on a CPU without torch.compile, which takes minutes
    for each."""
    on_gpu = bench.device == "cuda"
    config = MODELS[name] if bench.quick else GPTConfig.preset(name, dropout=0.0)
    length = min(config.block_size, 1024 if on_gpu else 256)
    run_pairs(bench, f"model {name}", replace(config, block_size=length), 8 if on_gpu else 1)


def run_gpu(bench: Bench, name: str) -> None:
    """One size at one batch size."""
    size = ("quick", QUICK, 4) if bench.quick else (name, *CONFIGS[name])
    run_pairs(bench, *size)


def run_pairs(bench: Bench, name: str, config: GPTConfig, batch_size: int) -> None:
    """Two variants at a time: so much memory is there."""
    on_gpu = bench.device == "cuda"
    rounds, steps = (1, 2) if bench.quick else (6, 5 if on_gpu else 1)
    title = f"{name} T={config.block_size} B={batch_size}"
    eager = Spec("stock", config, batch_size, device=bench.device)
    eager = replace(eager, threads=1 if on_gpu else torch.get_num_threads())
    bases = {"eager": eager, "torch.compile": replace(eager, compiled=True)}
    if not on_gpu and name.startswith("model"):
        del bases["torch.compile"]
        with torch.device("meta"):
            parameters = GPT(config).num_parameters()
        needed = 2 * BYTES * parameters
        if needed > available_bytes():
            why = f"two variants need {needed / 1e9:.0f} GB of memory"
            for variant in ("eager", "fastpar"):
                bench.add(bench.timed_row(title, "step", variant, (), refused=why))
            return
    for base, spec in bases.items():
        specs = {base: spec, "fastpar": replace(eager, kind="fastpar", keep_memory=not on_gpu)}
        logs = take_turns(specs, rounds=rounds, steps=steps, warmup=3)
        case = f"{title}, compiled" if spec.compiled else title
        bench.add(*to_rows(bench, case, specs, logs, base))


def run(bench: Bench) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    jobs = {name: partial(run_cpu, bench, name) for name in ("6x384", "12x768")}
    names = {MODELS[n] if bench.quick else n: n for n in MODELS}.values()  # each tiny shape once
    models = {f"model {name}": partial(run_model, bench, name) for name in names}
    if bench.device == "cuda" or (bench.quick and bench.only in GPU_CASES):
        jobs = {name: partial(run_gpu, bench, name) for name in GPU_CASES}
    for name, job in (jobs | models).items():
        if bench.only in name and not (bench.quick and name == "12x768"):  # tiny as well
            job()
