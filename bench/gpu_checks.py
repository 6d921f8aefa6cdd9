"""What bench/gpu.sh runs: the cells of gpu_cells.py, in their order.

First all kernels that later cells call are proven, which are their times, too; then what a user of
GPT-2 124M waits for; then what is right, several cells at once; then torch.compile, 1.5B, fp8 and
tiles.
pack: on a machine without a GPU, compiles for sm_90 what these launch.

Limits are what a cell took on the slower of two machines with an H200 (bench/results/gpu), where
imports and host code took up to twice as long, and half as much again.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available() makes no context

import torch
import torch.nn.functional as F
from torch import Tensor

import fastpar
from bench.gpu_cells import AT_ONCE, CELLS, GOOD, LIMIT_S, RUN, Cell, Runner, cell, note, serves
from bench.harness import Bench
from bench.records import RESULTS, ROOT, ResultFile, Row, commit, homes, machine
from bench.systems import bench_train
from bench.systems.bench_train import Spec, Variant
from fastpar.comm.ranks import reason
from fastpar.doctor import doctor, trial
from fastpar.doctor.report import row as proof_line
from fastpar.doctor.sources import digest_of
from fastpar.doctor.table import VERSION, environment, row_of
from fastpar.files.runs import list_checkpoints
from fastpar.kernels import backend
from fastpar.kernels.attention import peers as attention_peers
from fastpar.kernels.cases import OpCase, attention_case, experts, orthogonal_case, proof_cases
from fastpar.kernels.choice import OWN, Case, trying
from fastpar.predict.machine import Ceilings, measure_ceilings
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer, train

GPT2 = GPTConfig(12, 12, 768, 1024, 50304, dropout=0.0)
SMALL = GPTConfig(2, 4, 256, block_size=128, vocab_size=1000, dropout=0.0)
HALF, WIDE = (torch.bfloat16, torch.float16), torch.float32
Found = dict[str, Any]


def dtype_here() -> torch.dtype:
    return HALF[0] if RUN.device == "cuda" else WIDE


@cell("facts", "facts", 15)
def facts() -> Found:
    if RUN.device == "cuda":
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC,PERFORMANCE"])
    note(about=machine(RUN.device), built=backend.describe())
    host = trial.clock_for(RUN.device).host_us(torch.zeros(1, device=RUN.device).zero_)
    found = list(measure_ceilings(RUN.device, RUN.quick))
    return {"ceilings": found, "shown": f"a launch takes {host or 0:.1f} us of the host"}


@cell("facts", "module", 10)
def module() -> Found:
    """The compiled module, a kernel of csrc/ and a Triton launch, cold and warm."""
    from fastpar.kernels import _C, global_norm, layer_norm

    assert _C is not None, "no module that this torch can use: torch computes everything"
    assert RUN.device != "cuda" or _C.built_with_cuda, "the module has no CUDA"
    x, ms = torch.randn(1000, 768, device=RUN.device), []
    torch.testing.assert_close(global_norm([x]).norm.double().cpu(), x.double().norm().cpu())
    weight, bias = x.new_ones(768), x.new_zeros(768)
    for _ in range(3):
        start = time.perf_counter()
        with trying("layer_norm", OWN):
            y = layer_norm(x, weight, bias)
        y.sum().item()
        ms.append(f"{(time.perf_counter() - start) * 1e3:.2f} ms")
    torch.testing.assert_close(y, F.layer_norm(x, (768,)))
    return {"shown": f"layer_norm, first calls: {', '.join(ms)}"}


def classes() -> list[Case]:
    """All that later cells call; those of 124M first."""
    if RUN.device == "cpu":
        return doctor.cases_of_model("cpu", WIDE, SMALL)[:4]
    of = functools.partial(doctor.cases_of_model, "cuda")
    large = replace(GPT2, n_embd=1600, n_head=25)
    found = [*of(HALF[0], GPT2, fp8=True), *of(HALF[0], large), *of(HALF[0], TINY_GPT, fp8=True)]
    return list(dict.fromkeys([*found, *of(HALF[1], TINY_GPT)]))


@cell("prove", "prove", 110)
def prove() -> Found:
    """Every class: own, stock and peers, as the doctor times them; later cells find the proofs."""
    torch.zeros(1, device=RUN.device)
    found: dict[Case, Any] = {}
    lines: list[str] = []
    listed = classes()
    if RUN.device == "cuda" and "TRITON_CACHE_DIR" not in os.environ:  # nothing was carried
        print(*trial.warm(listed, gpu_here()), sep="\n")
    for number, case in enumerate(listed):
        note(at=f"{number} of {len(listed)}: {case}")
        start = time.perf_counter()
        with mock.patch.object(doctor, "warm", return_value=[]):  # a look takes half a second
            found |= doctor.adopt([case], rows=64 if RUN.quick else 32768)
        proof, seconds = found[case], time.perf_counter() - start
        lines.append(f"{proof_line(case, proof)} {' / '.join(proof.serves)}, {seconds:.1f} s")
        lines += [f"    {p.name} {p.ms[0]:.4f} {p.ms[1]:.4f} {p.wrong}" for p in proof.peers]
        rows = [row_of(case, proof) for case, proof in found.items()]
        about = environment(RUN.device)
        note(proofs={"version": VERSION, "about": about, "proofs": rows}, lines=lines)
    wrong = [f"{case}: {proof.wrong}" for case, proof in found.items() if proof.wrong]
    assert not wrong, "\n".join(wrong)
    own = sum(proof.chosen == OWN for proof in found.values())
    return {"shown": f"{len(found)} classes, {own} run own kernels"}


def gpu_here() -> tuple[int, int]:
    about = torch.cuda.get_device_properties()
    return 10 * about.major + about.minor, about.multi_processor_count


# Every op against fp64


@contextlib.contextmanager
def guarded() -> Iterator[Callable[[], None]]:
    """Memory that ops ask for is NaN, with canaries around it; yields what looks at them."""
    pad, kept = 512, list[Tensor]()
    real = torch.empty, torch.empty_like, Tensor.new_empty

    def make(shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        flat = real[0](size + 2 * pad, dtype=torch.uint8, device=device).fill_(255)
        kept.append(flat)
        return flat[pad : pad + size].view(dtype).view(shape)

    def empty(*size: Any, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        where = torch.device(device or "cpu")
        if more or where.type != RUN.device or not all(shape):
            return real[0](*size, dtype=dtype, device=device, **more)
        return make(shape, dtype or torch.get_default_dtype(), where)

    def empty_like(x: Tensor, *, dtype: Any = None, **more: Any) -> Tensor:
        if more or x.device.type != RUN.device or not x.is_contiguous() or not x.numel():
            return real[1](x, dtype=dtype, **more)
        return make(x.shape, dtype or x.dtype, x.device)

    def new_empty(self: Tensor, *size: Any, **more: Any) -> Tensor:
        return torch.empty(*size, **{"dtype": self.dtype, "device": self.device, **more})

    def check() -> None:
        for flat in kept:
            edges = torch.cat((flat[:pad], flat[-pad:]))
            assert (edges == 255).all(), "memory beside an output was written"
        kept.clear()

    torch.empty, torch.empty_like, Tensor.new_empty = empty, empty_like, new_empty  # type: ignore
    try:
        yield check
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = real  # type: ignore


def judge(cases: Sequence[OpCase], dtypes: Sequence[torch.dtype], what: str = OWN) -> Found:
    """Every result within the 2x rule, in two calls with the same bits; all that fails."""
    worst: dict[str, list[Any]] = {}
    wrong: list[str] = []

    def look(one: OpCase, dtype: torch.dtype, where: str) -> None:
        with trying(one.op, what), guarded() as check:
            for result, e in one.measure(dtype, RUN.device).items():
                share = e.max / e.bound if e.bound else float(e.max > 0) * 1e9
                if not share <= worst.get(result, [0.0])[0]:
                    worst[result] = [share, e.max, e.bound, where]
                if not e.max <= e.bound:
                    wrong.append(f"{where}: error of {result} {e.max:.2e}, at most {e.bound:.2e}")
            if what == OWN or "hopper" in what:
                first, second = (one.results(dtype, RUN.device) for _ in range(2))
                for name, value in first.items():
                    both = (x.contiguous().view(-1) for x in (value, second[name]))
                    if not torch.equal(*(x.view(torch.uint8) for x in both)):
                        wrong.append(f"{where}: {name} differs between two calls")
            check()

    checked = [(one, dtype) for one in cases for dtype in dtypes if dtype in one.dtypes]
    for number, (one, dtype) in enumerate(checked):
        where = f"{one.op} {one.shape} {str(dtype).removeprefix('torch.')}"
        note(at=f"{number} of {len(checked)}: {where}")
        try:
            look(one, dtype, where)
        except Exception as error:
            if "CUDA error" in str(error):
                raise RuntimeError(f"{where}: {error}") from error
            traceback.print_exc()
            wrong.append(f"{where}: {type(error).__name__}: {str(error)[:400]}")
        note(errors={name: found[1:] for name, found in worst.items()}, wrong=wrong)
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:12])
    share = max(found[0] for found in worst.values())  # of nothing: an error
    return {"shown": f"{len(checked)} cases, the worst at {share:.2f} of what is allowed"}


LISTED = [  # op, last dimension, rows of the plain case
    ("layer_norm", 768, 8192), ("residual_layer_norm", 768, 8192),
    ("linear_cross_entropy", 50304, 2048), ("cross_entropy", 50304, 1024),
    ("bias_gelu", 3072, 8192),
    ("embedding", 768, 8192), ("attention_masked", 64, 256),
    ("dropout", 0, 48), ("adamw_step_", 0, 1024), ("sum_shards", 0, 8192), ("global_norm", 0, 8192),
    ("linear_fp8", 768, 2048), ("linear_fp8", 3072, 512), ("grouped_linear", 768, 2048),
    ("rms_norm", 1600, 2048), ("residual_rms_norm", 768, 2048), ("layer_norm", 1600, 2048),
    ("attention_masked", 128, 256), ("cross_entropy", 257, 2048),
    ("cross_entropy_shard", 25152, 2048), ("quantize_blockwise", 0, 8192),
    ("dequantize_blockwise", 0, 8192),
]  # fmt: skip
LENGTHS = (64, 2, 129, 320, 1024)  # of one token dq is 0, no error is
WHO = OWN, "hopper", f"{OWN}/hopper", f"hopper/{OWN}", "cudnn"


def device_code(cases: Sequence[Case]) -> str:
    """A digest of what these cases run on this GPU: PTX without its debug information, and of ops
    without Triton their sources and csrc/."""
    digest = hashlib.sha256()
    for case in cases:
        compiled = [
            trial.compile_launch(one, gpu_here()) for one in trial.launches_of(case, gpu_here())
        ]
        texts = sorted({without_debug(one.asm["ptx"]) for one in compiled})
        texts = texts or [digest_of(case.op), environment("cuda")["csrc"]]
        digest.update("".join([str(case), *texts]).encode())
    return digest.hexdigest()[:16]


def without_debug(ptx: str) -> str:
    """PTX without lines and labels of its source, which move with every comment."""
    code = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.M)[0]
    return re.sub(r"^\s*(\.loc|\.file|//|\$L__(tmp|func|info|pack)).*\n", "", code, flags=re.M)


def unless_known(name: str, cases: Sequence[Case], check: Callable[[], Found], *also: str) -> Found:
    """check(), unless an earlier report found the same device code right. also: what else runs."""
    if RUN.device == "cpu":
        return check()
    code = " ".join([device_code(cases), *also])
    note(code=code)
    if (name, code) in RUN.known:
        where = RUN.known[name, code]
        return {"status": "proven", "shown": f"the same device code as in {where}: not run"}
    return check()


def known_code(folder: Path) -> dict[tuple[str, str], str]:
    """(cell, device code) -> the report that found it right."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["cells"]:
            if "code" in row and row["status"] in GOOD:
                found[row["cell"], row["code"]] = path.name
    return found


def check_op(name: str, op: str, size: int, rows: int) -> Found:
    small = RUN.quick and size >= 128 and not op.startswith("attention")
    cases = [Case("cpu", op, dtype, size) for dtype in (*HALF, WIDE)]

    def check() -> Found:
        found = proof_cases(op, 128 if small else size, RUN.device, 64 if RUN.quick else rows)
        return judge(found, (*HALF, WIDE))

    return unless_known(name, cases, check)


def check_attention(name: str, D: int, what: str) -> Found:
    q = torch.empty(1, 128, 4, D, dtype=HALF[0], device=RUN.device)
    peer = next((name for name in what.split("/") if name != OWN), None)
    why = attention_peers.refusal(peer, q, q, q, True) if peer else ""
    if why:
        return {"shown": f"left out: it {why}"}
    lengths = LENGTHS[:3] if RUN.quick else LENGTHS
    cases = [attention_case(2, T, D, 4, RUN.device) for T in lengths]
    if not peer:
        cases.append(attention_case(1, 300, D, 6, RUN.device, Hkv=2))
        cases.append(attention_case(1, 48, D, 4, RUN.device, p=0.1))
    other: list[Found] = [{"causal": False}, {"scale": 6.0}, *[{"Tk": 96}] * (not peer)]
    cases += [attention_case(2, 64, D, 4, RUN.device, **how) for how in other]
    code, who = [Case("cpu", "attention", HALF[0], D)], (what, torch.__version__)
    return unless_known(name, code, lambda: judge(cases, HALF[:1], what), *who)


def check_orthogonal() -> Found:
    shapes = [(100, 257)] if RUN.quick else [(768, 768), (768, 3072), (100, 257)]
    many = [orthogonal_case(*shape, many=6) for shape in shapes]
    return judge([*map(orthogonal_case, *zip(*shapes)), *many], (WIDE, HALF[0]))


def cells_of_ops() -> list[Cell]:
    found = [
        Cell(name, partial(check_op, name, op, size, n), 60)
        for op, size, n in LISTED
        for name in [f"{op} {size}".removesuffix(" 0")]
    ]
    found += [
        Cell(name, partial(check_attention, name, D, what), 40)
        for D, what in itertools.product((64, 128), WHO)
        for name in [f"attention {D} {what}"]
    ]
    experts_here = partial(experts, 256, 128)
    found += [
        Cell("experts", lambda: judge(list(experts_here(RUN.device)), (*HALF, WIDE)), 40),
        Cell("orthogonalize", check_orthogonal, 30),
    ]
    first = "attention_masked"  # never whole on a GPU so far
    return sorted(found, key=lambda one: not one.name.startswith(first))


# Models, engine, trainer


def tokens() -> Tensor:
    """[4, T + 1], of a pattern that can be learned."""
    ids = torch.arange(4)[:, None] * 7 + 3 * torch.arange(SMALL.block_size + 1)
    return (ids % SMALL.vocab_size).to(RUN.device)


def within_twice(gradients: Callable[[torch.dtype, bool], dict[str, Tensor]]) -> Found:
    """gradients(dtype, ours): norms of errors at most twice plain PyTorch's and one rounding."""
    dtype, worst = dtype_here(), 0.0
    exact, plain = gradients(torch.float64, False), gradients(dtype, False)
    ours, eps = gradients(dtype, True), torch.finfo(dtype).eps
    for name, value in exact.items():
        error, allowed = ((g[name].double() - value).norm().item() for g in (ours, plain))
        worst = max(worst, error / (2 * allowed + eps * value.norm().item()))
    assert worst <= 1, f"an error of {worst:.2f} times what is allowed"
    return {"shown": f"{len(exact)} results, the worst at {worst:.2f} of what is allowed"}


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def gpt_against_fp64() -> Found:
    def gradients(dtype: torch.dtype, ours: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = fastpar.GPT(SMALL).to(RUN.device, dtype)
        before, backend.choice = backend.choice, "auto" if ours else "torch"
        try:
            return gradients_of(model, model(tokens()[:, :-1], tokens()[:, 1:]))
        finally:
            backend.choice = before

    return within_twice(gradients)


def patched_gpt2() -> Found:
    import transformers

    shape: Found = {"n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 128}
    shape["vocab_size"] = 1000
    no_dropout: Found = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

    def gradients(dtype: torch.dtype, ours: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        config = transformers.GPT2Config(**shape, **no_dropout)
        model = transformers.GPT2LMHeadModel(config).to(RUN.device, dtype)
        if ours:
            print(fastpar.patch(model))
        x = tokens()[:, :-1]
        return gradients_of(model, model(x, labels=x).loss)

    return within_twice(gradients)


TINY: Found = {
    "tokenizer": "ids", "model": "micro", "n_layer": 2, "n_head": 4, "n_embd": 256, "lr": 1e-3,
    "block_size": 128, "batch_size": 8, "micro_batch_size": 4, "max_steps": 12, "eval_every": 6,
    "eval_batches": 2, "save_every": 6, "keep_last": 0, "num_samples": 0, "logger": "none",
    "dropout": 0.1,
}  # fmt: skip


TINY_GPT = GPTConfig(
    **{name: TINY[name] for name in ("n_layer", "n_head", "n_embd", "block_size")}, vocab_size=1000
)


def write_ids(folder: str, vocab_size: int = 1000) -> None:
    """train.bin and val.bin of a pattern; the largest number occurs."""
    ids = (torch.arange(1 << 16) * 3 % vocab_size).to(torch.uint16)
    ids[::97] = vocab_size - 1
    for name in ("train", "val"):
        ids.numpy().tofile(f"{folder}/{name}.bin")


def losses_of(folder: str, name: str, **changes: Any) -> list[float]:
    """Losses of one run of the trainer, validations too."""
    settings = {**TINY, "data": folder, "device": RUN.device, "out": f"{folder}/{name}"}
    settings |= {"n_embd": 32, "block_size": 16} if RUN.quick else {}
    settings |= {"dtype": "bf16"} if RUN.device == "cuda" else {}
    note(at=f"run {name}")
    try:
        assert train(TrainConfig().replace({**settings, **changes})) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    rows = read_metrics(Path(folder) / name / "metrics.jsonl")
    return [row[key] for row in rows for key in ("loss", "val_loss") if key in row]


def same_run(base: Found, changes: Found, within: float = 0.0) -> Found:
    """A run with changes has the losses of the run without: bit for bit, or within a distance."""
    with tempfile.TemporaryDirectory() as folder:
        write_ids(folder)
        plain = losses_of(folder, "a", **base)
        changed = losses_of(folder, "b", **{**base, **changes})
    off = max(abs(a - b) for a, b in zip(plain, changed, strict=True))
    assert off <= within, f"losses differ by {off:.3g}: {plain} {changed}"
    assert RUN.quick or plain[-1] < plain[0] - 0.1, f"the loss did not fall: {plain}"
    return {"shown": f"{len(plain)} losses differ by {off:.2g}, {plain[0]:.3f} to {plain[-1]:.3f}"}


def resumed(base: Found) -> Found:
    """A run that lost its last checkpoint goes on from the one before, with the same losses."""
    with tempfile.TemporaryDirectory() as folder:
        write_ids(folder)
        whole = losses_of(folder, "a", **base)
        shutil.copytree(f"{folder}/a", f"{folder}/b", symlinks=True)
        for path in list_checkpoints(Path(folder) / "b")[1:]:
            shutil.rmtree(path)
        again = losses_of(folder, "b", **base, resume=True)
    assert whole == again, f"resumed at other losses: {whole} {again}"
    return {"shown": f"the same losses after a resume, {whole[0]:.3f} to {whole[-1]:.3f}"}


ON_HOST = {"offload_activations": True, "activation_checkpointing": "full"}
IN_FP8 = {"fp8": "all", "fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}
ON_CPU: dict[str, Callable[[], Found]] = {
    "zero_stage 2": partial(same_run, {"deterministic": True}, {"zero_stage": 2}),
    "recomputation": partial(same_run, {}, {"activation_checkpointing": "full"}),
    "resume, deterministic": partial(resumed, {"deterministic": True}),
    "muon": partial(resumed, {"optimizer": "muon"}),
}
ENGINE: dict[str, Callable[[], Found]] = {
    **ON_CPU,
    "cuda_graphs": partial(same_run, {"cuda_graphs": False}, {"cuda_graphs": True}),
    "offload optimizer": partial(same_run, {}, {"offload": "optimizer"}),
    "offload parameters": partial(same_run, {}, {"offload": "parameters", "zero_stage": 3}),
    "activations on the host": partial(same_run, {}, ON_HOST),
    "resume, fp16 with a loss scale": partial(resumed, {"dtype": "fp16"}),
    "compile": partial(same_run, {}, {"compile": True}, 0.05),
    "fp8 row": partial(same_run, {}, {"fp8": "all"}, 0.2),
    "fp8 block": partial(same_run, {}, {"fp8": "all", "fp8_scaling": "block"}, 0.2),
    "fp8 tensor": partial(same_run, {}, IN_FP8, 0.2),
}


def nccl() -> Found:
    import torch.distributed as dist

    from fastpar.comm.transports import TorchCollectives

    gpu = torch.device("cuda:0")
    torch.cuda.set_device(gpu)
    alone: Any = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", device_id=gpu, **alone)
    for ordered in (False, True):
        comm = TorchCollectives(device=gpu, in_rank_order=ordered)
        for dtype in (WIDE, HALF[0], torch.uint8):
            x = torch.randn(1000, device=gpu).mul_(30).to(dtype)
            kept, out = x.clone(), torch.empty_like(x)
            handles = comm.all_gather(out, x, async_op=True), comm.broadcast(x, 0, async_op=True)
            for handle in handles:
                assert handle is not None
                handle.wait()
            if dtype.is_floating_point:
                comm.all_reduce(x, mean=True)
                comm.reduce_scatter(out, x, mean=True)
            assert torch.equal(torch.cat((out, x)), torch.cat((kept, kept))), f"{dtype} {ordered}"
    return {"shown": "all_gather, broadcast, all_reduce and reduce_scatter, synchronous and not"}


def run_tests(files: Sequence[str], *chosen: str) -> Found:
    """pytest here; a CUDA error ends the cell, as every later test would fail by it."""
    import pytest

    failed: list[str] = []
    count = {"passed": 0, "failed": 0, "skipped": 0}

    class Watch:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            note(at=f"{nodeid}, {count}")

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when != "call" and report.outcome == "passed":
                return
            count[report.outcome] += 1
            if report.failed:
                failed.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")
                if "CUDA error" in str(report.longrepr):
                    print(report.longrepr, flush=True)
                    raise SystemExit(f"CUDA error in {report.nodeid}")

    os.chdir(ROOT)
    how = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=60"]
    pytest.main([*how, "--timeout-method=thread", *(chosen or ("-m", "gpu")), *files], [Watch()])
    assert not failed, f"{len(failed)} tests failed\n" + "\n".join(failed[:10])
    assert count["passed"] or RUN.device != "cuda", "no test ran"
    return {"shown": ", ".join(f"{n} {what}" for what, n in count.items())}


GPU_TESTS = {
    "csrc": ("ops/test_adamw", "ops/test_flat_memory", "ops/test_philox"),  # bits of the CPU's
    "graphs": ("optim/test_steps", "train/test_cuda_graphs"),
    "engine": ("engine/test_engine", "comm/test_recorder", "engine/test_replicas"),
    "hopper": ("ops/test_attention_hopper",),
    "ops": ("ops/test_attention_peers", "ops/test_embedding"),
    "memory": ("predict/test_memory_model", "predict/test_capacity"),
}


def cell_of_tests(name: str, *chosen: str, **how: Any) -> Cell:
    files = [f"tests/{file}.py" for file in GPU_TESTS[name]]
    return Cell(f"tests of {name}", partial(run_tests, files, *chosen), 90, **how)


WITH_CUDA = ("-m", "gpu or not slow", "-k", "cuda or gpu")


# How fast


class NotedBench(Bench):
    """Its rows go into the cell's row at once."""

    def add(self, *rows: Row) -> None:
        super().add(*rows)
        note(
            at=f"{len(self.results.rows)} rows",
            rows=[row.to_json() for row in self.results.rows.values()],
        )


def bench_of(name: str, only: str) -> Bench:
    found: Any = [float("inf"), float("inf"), "not measured"]
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads((RUN.scratch / "facts.json").read_text())["ceilings"]
    path = RUN.scratch / f"rows_{os.getpid()}.json"
    results = ResultFile(path, machine(RUN.device))
    only = "" if RUN.quick else only
    return NotedBench(name, RUN.device, RUN.quick, results, only, ceilings=Ceilings(*found))


def run_bench(name: str, only: str) -> Found:
    """The bench of one op at one shape."""
    torch._dynamo.config.disable = RUN.quick
    one = bench_of(name, only)
    importlib.import_module(homes()[name]).run(one)
    rows = list(one.results.rows.values())
    refused = [f"{r.variant}: {r.refused}" for r in rows if r.refused and "fastpar" in r.variant]
    assert not refused, "\n".join(refused)
    lines = [f"{r.case} {r.direction} {r.variant} {r.median_ms:.3f}" for r in rows if r.median_ms]
    return {"shown": f"{len(lines)} rows", "lines": [] if RUN.quick else lines}


class Here(contextlib.AbstractContextManager["Here"]):
    """A variant in this process, with the methods of Ranks."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self._peak, before = spec, 0, torch.cuda.memory_allocated()  # 0 without a GPU
        self.cpu_ms = 0.0  # of a step of the last turn, all threads
        self._variant: Any = Variant(spec)
        self._own = torch.cuda.memory_allocated() - before

    def ask(self, command: str, *args: Any, timeout_s: float = 0.0) -> list[Any]:
        if command == "peak_bytes":
            return [self._peak]
        others = torch.cuda.memory_allocated() - self._own
        if RUN.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = time.process_time()
        answer = getattr(self._variant, command)(*args)
        if command == "steps":
            self.cpu_ms = (time.process_time() - before) / args[0] * 1e3
        if RUN.device == "cuda" and command == "steps":
            self._own = torch.cuda.memory_allocated() - others
            self._peak = max(self._peak, torch.cuda.max_memory_allocated() - others)
        return [answer]

    def close(self) -> None:
        self._variant = None
        gc.collect()
        torch.cuda.empty_cache()

    def __exit__(self, *_: object) -> None:
        self.close()


def in_turns(name: str, batch_size: int, *names: str) -> Found:
    """Steps of several variants in this process, in turns; rows as those of `bench train`."""
    config = SMALL if RUN.quick else bench_train.CONFIGS[name][0]
    rounds, steps = 2, 6
    if RUN.quick:
        batch_size, rounds, steps = 4, 1, 2
        names = tuple(n for n in names if n != "torch.compile")
    stock = Spec("stock", config, batch_size, device=RUN.device)
    known = {"eager": stock, "torch.compile": replace(stock, compiled=True)}
    known["fastpar"] = replace(stock, kind="fastpar")
    specs = {n: known[n] for n in names}
    here: dict[str, Here] = {}

    def begin(spec: Spec) -> Here:
        name = next(n for n, known in specs.items() if known == spec)
        note(at=f"build of {name}")
        return here.setdefault(name, Here(spec))

    logs = bench_train.take_turns(specs, rounds=rounds, steps=steps, warmup=4, begin=begin)
    one = bench_of("train", "")
    one.add(*bench_train.to_rows(one, f"{name} T=1024 B={batch_size}", specs, logs, names[0]))
    refused = [f"{n}: {log.refused}" for n, log in logs.items() if log.refused]
    lines = []
    for r in (row for row in one.results.rows.values() if row.median_ms):
        speed = f"{r.median_ms:.2f} ms, {r.tokens_per_s:.0f} tokens/s"
        more = f"peak {(r.peak_bytes or 0) / 1e9:.1f} GB, {r.times or '1.00x'} {names[0]}"
        more += f", {here[r.variant].cpu_ms:.1f} ms of CPU" if r.variant in here else ""
        lines.append(f"{r.case}: {r.variant} {speed}, {more}")
    note(lines=lines)
    assert not refused, "\n".join(refused)
    return {"shown": lines[-1]}


TIMED = [
    ("cross_entropy", ""), ("linear_cross_entropy", "N=16384 C=768"),
    ("layer_norm", "layer_norm N=32768 C=768"), ("gelu", "F=3072"),
    ("attention", "H=12 T=1024 D=64"), ("adamw", "bf16 124M"), ("embedding", "C=768"),
    ("global_norm", "GPT-2"), ("linear_fp8", "c_fc"), ("quantize", "int8"), ("sum_shards", ""),
    ("philox", ""), ("grouped_linear", ""), ("orthogonalize", "768x3072"),
]  # fmt: skip


def compile_124m() -> None:
    """Fills the compiler's cache, for the cell that times it."""
    config, batch_size = (SMALL, 4) if RUN.quick else (GPT2, 32)
    spec = Spec("stock", config, batch_size, device=RUN.device, compiled=not RUN.quick)
    Variant(spec).steps(1)


Look = Callable[[Trainer], Found]  # at a trainer whose steps have been timed


def trainers(table: dict[str, Found], steps: int, look: Look | None = None) -> Found:
    """ms of a step of the trainer with each of these settings, its host's work included, and ms of
    CPU of all its threads."""
    ms: dict[str, Any] = {}
    found: Found = {}

    def run(trainer: Trainer) -> int:
        for count in (6, steps):
            note(at=f"{name}: {count} steps, {'timed' if count == steps else 'first'}")
            trial.synchronize(RUN.device)
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(2 if RUN.quick else count):
                trainer.train_step()
            trial.synchronize(RUN.device)
        each = 1e3 / (2 if RUN.quick else count)
        cpu_ms = (time.process_time() - cpu) * each
        ms[name] = round((time.perf_counter() - start) * each, 3), round(cpu_ms, 3)
        if look is not None and not found:  # at the first
            found.update(look(trainer))
        trainer.mesh.close()
        return 0

    shape: Found = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "dropout": 0.0}
    shape |= {"dtype": "bf16"}
    if RUN.quick:
        shape = {"n_embd": 32, "block_size": 16}
    with tempfile.TemporaryDirectory() as folder:
        write_ids(folder, 1000 if RUN.quick else 50257)
        where = {"data": folder, "device": RUN.device, "max_steps": 1000}
        for name, settings in table.items():
            note(at=f"build of {name}")
            small = {"n_layer": 2, "n_head": 4, "n_embd": 32} if RUN.quick else {}
            try:
                train(TrainConfig().replace({**TINY, **where, **shape, **settings, **small}), run)
            except Exception as error:
                traceback.print_exc()
                ms[name] = reason(error)
            gc.collect()
            lines = [line_of(name, value) for name, value in ms.items()]
            note(ms=ms, lines=lines, serves=serves(), **found)
    bad = {name: why for name, why in ms.items() if isinstance(why, str)}
    assert not bad, str(bad)
    return {"shown": ", ".join(f"{name} {value[0]}" for name, value in ms.items()), **found}


def line_of(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{name}: {value}"
    return f"{name}: {value[0]} ms a step, {value[1]} of CPU"


def kernels_of(trainer: Trainer) -> Found:
    """Two steps' time of kernels, by name, and from the first to the last."""
    with torch.profiler.profile() as trace:
        for _ in range(2):
            trainer.train_step()
        trial.synchronize(RUN.device)
    trace.export_chrome_trace(str(RUN.scratch / "trace.json.gz"))
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    kernels = [[e.key[:90], round(e.self_device_time_total / 2e3, 3), e.count // 2] for e in events]
    total = round(sum(ms for _, ms, _ in kernels), 2)
    ran = [e.time_range for e in trace.events() if "cuda" in str(e.device_type).lower()]
    span = (max(t.end for t in ran) - min(t.start for t in ran)) / 2e3 if ran else 0.0
    said = f"kernels {total} ms a step, {span:.2f} from first to last"
    return {"kernels_ms_a_step": kernels[:60], "kernels": said}


@cell("headline", "124M in the trainer", 38)
def headline() -> Found:
    """With graphs, the trainer's default, and a trace of that; then without."""
    can = RUN.device == "cuda"  # a CPU has no graphs
    table = {
        f"B={B}{', graphs' * how}": {"batch_size": B, "micro_batch_size": B, "cuda_graphs": how}
        for B, how in ((32, can), (32, False), (8, False), (4, False))
    }
    found = trainers(table, 20, kernels_of)
    return {**found, "shown": f"{found['shown']}; {found['kernels']}"}


BESIDE = partial(in_turns, "124M", 32, "eager", "fastpar")
CELLS.append(Cell("124M, B=32 beside eager", BESIDE, 35, "headline"))


# Right? Those that failed or never ended on a GPU come first; torch.compile behind them.

FAILED = ("resume, fp16 with a loss scale", "compile", "cuda_graphs")
OPS = cells_of_ops()
CELLS += [
    *OPS[:2],
    *(cell_of_tests(name) for name in ("graphs", "engine", "ops", "memory")),
    *(Cell(name, ENGINE[name], 60, on_cpu=False) for name in FAILED),
    Cell("compile 124M", compile_124m, 130),
    *(
        Cell(name, run, 60, on_cpu=name in ON_CPU)
        for name, run in ENGINE.items()
        if name not in FAILED
    ),
    Cell("GPT against fp64", gpt_against_fp64, 60),
    Cell("transformers GPT-2, patched", patched_gpt2, 60),
    Cell("NCCL of one rank", nccl, 30, on_cpu=False),
    cell_of_tests("csrc", *WITH_CUDA, on_cpu=False),
    cell_of_tests("hopper"),
    *OPS[2:],
]
COMPILED = partial(in_turns, "124M", 32, "torch.compile", "fastpar")
CELLS.append(Cell("124M, B=32 beside torch.compile", COMPILED, 35, "compiled"))


@cell("large", "1.5B with graphs", 45)
def one_and_a_half_b() -> Found:
    """Eager's 125.4 ms are known."""
    at: Found = {"n_layer": 48, "n_head": 25, "n_embd": 1600, "cuda_graphs": RUN.device == "cuda"}
    return trainers({"1.5B, B=4": {**at, "batch_size": 4, "micro_batch_size": 4}}, 10)


@cell("large", "fp8 with graphs", 25, on_cpu=False)
def fp8_steps() -> Found:
    at: Found = {"batch_size": 32, "micro_batch_size": 32, "cuda_graphs": True}
    return trainers({"fp8 tensor": {**at, "fp8": "all", "fp8_scaling": "tensor"}}, 10)


@cell("tune", "tune", 48, on_cpu=False)
def tune() -> Found:
    """The places with the most to gain; all times are kept."""
    from bench.ops import tune as tuning

    arch = gpu_here()[0]
    session = tuning.Session(arch, False, RUN.scratch / "tune.json")
    timed = "bwd_dkdv 64 plain"  # on an H200
    listed = [e for e in tuning.entries(arch) if e.gain_ms >= 0.3 and timed not in e.name]
    tuning.run(listed, session, minutes=0.65)
    note(tuned={name: vars(one) for name, one in session.found.items()})
    return {"lines": [f"{name}: {one.chosen}" for name, one in session.found.items()]}


@cell("tune", "products", 12)
def products() -> Found:
    """Each product of a layer of 124M at B=32 in three forms, which cuBLAS may serve by different
    algorithms, and two forms of the bias's gradient."""
    N, C = (64, 32) if RUN.quick else (32768, GPT2.n_embd)
    clock, lines = trial.clock_for(RUN.device), list[str]()
    layers = {"qkv": (C, 3 * C), "proj": (C, C), "c_fc": (C, 4 * C), "c_proj": (4 * C, C)}
    for layer, (K, M) in layers.items():
        x, w, dy = (
            torch.randn(shape, device=RUN.device, dtype=dtype_here())
            for shape in ((N, K), (M, K), (N, M))
        )
        for what, a, b in (("y", x, w.t()), ("dx", dy, w), ("dw", dy.t(), x)):
            ways = {
                "mm": partial(torch.mm, a, b),
                "linear": partial(F.linear, a, b.t()),
                "transposed": partial(torch.mm, b.t(), a.t()),
            }
            timed = trial.interleave({n: [call] for n, call in ways.items()}, clock, budget_s=0.15)
            rates = {n: 2e-9 * N * K * M / t.median_ms for n, t in timed.items()}
            lines.append(f"{layer} {what}: {', '.join(f'{n} {r:.0f}' for n, r in rates.items())}")
            note(lines=lines)
        ones = dy.new_ones(1, N)
        sums = {"sum": [partial(dy.sum, 0)], "mm": [partial(torch.mm, ones, dy)]}
        timed = trial.interleave(sums, clock, budget_s=0.1)
        rates = {n: 1e-6 * dy.nbytes / t.median_ms for n, t in timed.items()}
        lines.append(f"{layer} dbias, GB/s: {', '.join(f'{n} {r:.0f}' for n, r in rates.items())}")
    return {"lines": lines, "shown": f"TFLOP/s of the products of {len(layers)} layers"}


ON_REQUEST = [  # by --only; torch.compile takes most of the time
    Cell(f"time {n}", partial(run_bench, n, only), 90, "on request") for n, only in TIMED
]


def fail(error: Exception) -> None:
    raise error


def hang() -> None:
    note(at="the second of three sleeps")
    time.sleep(1000)


DEMO = [  # what a rehearsal adds
    Cell("demo hangs", hang, 2),
    Cell("demo ends by a signal", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    Cell("demo raises a CUDA error", lambda: fail(RuntimeError("CUDA error: a demo"))),
    Cell("demo is wrong", lambda: fail(AssertionError("error of dq is 3e-2, at most 1e-2"))),
]


def pack() -> int:
    """Compiles for an H100, without a GPU, what the cells launch: into TRITON_CACHE_DIR."""
    cases = [Case("cuda", op, dtype, size) for op, size, _ in LISTED for dtype in (*HALF, WIDE)]
    cases += [Case("cuda", "attention", dtype, D) for D in (64, 128) for dtype in HALF]
    cases += classes()
    print("\n".join(trial.warm(list(dict.fromkeys(cases)), (90, 132))))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the cells; 1 if one is not ok."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("run", "pack"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, and cells that go wrong")
    parser.add_argument("--only", action="append", help="cells whose name holds this")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds, from --started")
    parser.add_argument("--again", action="store_true", help="also what an earlier call found ok")
    parser.add_argument("--started", type=float, default=time.time())
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    args = parser.parse_args(argv)
    RUN.quick, RUN.device = args.quick, args.device
    if args.mode == "pack":
        return pack()
    if RUN.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu.sh: expected a GPU that torch can use, got none from {sys.executable}; set "
            "PYTHON, or use --device cpu --quick",
            file=sys.stderr,
        )
        return 2
    RUN.scratch = Path(tempfile.mkdtemp(prefix="fastpar_cells_"))
    kept = ROOT / "build" if RUN.device == "cuda" else RUN.scratch  # for the next call
    os.environ.setdefault("FASTPAR_PROOFS", str(kept / "gpu_proofs"))
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read before a process's first product
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept / "gpu_inductor")  # one for all cells
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    commit()  # asks git once, for all children
    RUN.known = known_code(RESULTS / "gpu")
    cells = CELLS + DEMO * RUN.quick
    if args.only:  # in the order of the command line
        listed = [*CELLS, *ON_REQUEST, *DEMO]
        cells = list({c.name: c for text in args.only for c in listed if text in c.name}.values())
    runner = Runner(args.out, args.started, args.limit)
    cells = cells if args.again else runner.not_done(cells)
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, runner.stop)
    able = [c for c in cells if c.on_cpu or RUN.device == "cuda"]
    runner.run(able, 2 if RUN.device == "cpu" else AT_ONCE)
    return runner.finish()


if __name__ == "__main__":
    sys.exit(main())
