"""Checks and measurements on a GPU, a cell each: `bench/gpu.sh right`, then `bench/gpu.sh fast`.

A cell is one function. It runs in a forked child of a process that has imported torch, Triton and
fastpar but never touched CUDA, under a limit of its own, so a hang, a segmentation fault, a CUDA
error or a wrong result ends one cell and nothing else. Cells that check run eight at a time; those
that time run alone. $OUT gets three files: report.json (whole after every cell), report.txt (a page
for a person) and logs.tar.gz. `python -m bench ingest report.json` makes results of the report.

[Note: order] Cells run in the order in which they stand here, which is by value. When time runs
short, those at the end are not started; cells with must=True keep their seconds to the last.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available() makes no context

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar
from bench.harness import Bench
from bench.records import ROOT, ResultFile, Row, commit, machine, machine_line, reason
from bench.systems import bench_train
from bench.systems.worker import Spec, Variant
from fastpar.config.config import GPTConfig, TrainConfig
from fastpar.doctor import doctor
from fastpar.doctor.cases import ErrorCase, attentions, experts, orthogonals
from fastpar.doctor.clocks import clock_for
from fastpar.doctor.proof_cases import proof_cases
from fastpar.doctor.report import row as proof_line
from fastpar.doctor.table import VERSION, environment, row_of
from fastpar.files.step_folders import list_checkpoints
from fastpar.kernels import attention_peers, backend
from fastpar.kernels.choice import OWN, Case, trying
from fastpar.measure.ceilings import Ceilings, measure_ceilings
from fastpar.train.metrics import read_metrics
from fastpar.train.trainer import Trainer, train

LIMIT_S = {"right": 270.0, "fast": 380.0}
AT_ONCE = 8
GPT2 = GPTConfig(12, 12, 768, 1024, 50304, dropout=0.0)
SMALL = GPTConfig(2, 4, 256, block_size=128, vocab_size=1000, dropout=0.0)
HALF = (torch.bfloat16, torch.float16)
QUICK = False  # tiny shapes: does the code run?
DEVICE = "cuda"
SCRATCH = Path(tempfile.gettempdir())  # of this run; the children's files


# Cells


@dataclass(frozen=True)
class Cell:
    """One check: run() returns what its row gets; note() adds to the row at once."""

    name: str
    run: Callable[[], dict[str, Any] | None]
    limit_s: float = 25.0
    alone: bool = False
    must: bool = False
    on_cpu: bool = True  # a rehearsal without a GPU can run it


CELLS: dict[str, list[Cell]] = {"right": [], "fast": [], "demo": []}
_row: dict[str, Any] = {}
_row_path: Path | None = None


def cell(mode: str, name: str, **how: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        CELLS[mode].append(Cell(name, run, **how))
        return run

    return add


def note(**found: Any) -> None:
    """What a cell has found so far: kept if it is stopped."""
    _row.update(found)
    if _row_path is not None:
        partial_path = _row_path.with_suffix(".tmp")
        partial_path.write_text(json.dumps(_row, default=str))
        os.replace(partial_path, _row_path)


def _child(one: Cell, path: Path, log: Path, until: float, blocking: bool) -> None:
    """Never returns."""
    global _row_path
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    faulthandler.dump_traceback_later(max(1.0, until - time.time() - 1), file=sys.__stderr__)
    _row_path, start, code = path, time.time(), 0
    torch.set_num_threads(2 if DEVICE == "cuda" else 1)
    note(status="stopped")
    try:
        found = one.run() or {}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of the last kernel is this cell's
            found["peak_mb"] = torch.cuda.max_memory_allocated() >> 20
        note(**{"status": "ok", **found})
    except BaseException as error:
        status = "wrong" if isinstance(error, AssertionError) else "error"
        text = f"{type(error).__name__}: {error}"[:3000]
        note(status=status, error=text, traceback=traceback.format_exc()[-12000:])
        code = 1
    note(seconds=round(time.time() - start, 2), blocking=blocking)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructors: CUDA may hang in them


class Runner:
    """Starts cells, ends those that are late, and keeps the report whole."""

    def __init__(self, out: Path, mode: str, started: float, limit_s: float) -> None:
        self.out, self.mode, self.started = out, mode, started
        self.deadline = started + limit_s
        self.rows: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {"mode": mode, "quick": QUICK, "commit": commit()[0]}
        self.dead = ""  # why nothing more can run
        self.running: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        first = row.get("error", "").partition("\n")[0][:110]
        print(f"{row['status']:8} {row['cell']:34} {row.get('seconds', '')} {first}", flush=True)
        for found in ("about", "ceilings"):
            if found in row:
                self.head[found] = row[found]
        self.head["seconds"] = round(time.time() - self.started, 1)
        partial_path = self.out / "report.tmp"
        partial_path.write_text(json.dumps({**self.head, "cells": self.rows}, indent=1))
        os.replace(partial_path, self.out / "report.json")

    def start(self, one: Cell, until: float, blocking: bool = False) -> dict[str, Any]:
        stem = one.name.replace("/", "_").replace(" ", "_") + "_again" * blocking
        path, log = SCRATCH / f"{stem}.json", SCRATCH / f"{stem}.log"
        slow = 1 if DEVICE == "cuda" else 2  # a CPU is a rehearsal
        limit = min(time.time() + slow * one.limit_s, until)
        pid = os.fork()
        if pid == 0:
            _child(one, path, log, limit, blocking)
        return {"cell": one, "pid": pid, "path": path, "log": log, "until": limit}

    def ended(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """The row of a child that is over; None while it runs."""
        pid, status = os.waitpid(run["pid"], os.WNOHANG)
        late = pid == 0 and time.time() > run["until"]
        if pid == 0 and not late:
            return None
        if late:
            os.killpg(run["pid"], signal.SIGKILL)
            give_up = time.time() + 5  # a process that is in the driver may not die at once
            while time.time() < give_up and os.waitpid(run["pid"], os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        row = {"cell": run["cell"].name}
        with contextlib.suppress(OSError, ValueError):
            row |= json.loads(run["path"].read_text())
        if late:
            row["status"] = "timeout"
        elif row.get("status", "stopped") == "stopped":
            row["status"] = "crash"
            row["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            row["rc"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if row["status"] != "ok" and run["log"].exists():
            row["stderr"] = run["log"].read_text(errors="replace")[-4000:]
        return row

    def run(self, cells: Sequence[Cell], at_once: int) -> None:
        """Runs cells: neighbours that need not be alone together, the others one by one."""
        todo = list(cells)
        self.running = running = list[dict[str, Any]]()
        while todo or running:
            while todo and not self.dead:
                one = todo[0]
                reserve = sum(c.limit_s for c in todo[1:] if c.must)
                until = self.deadline - (0 if one.must else reserve)
                most = 1 if one.alone else at_once
                if len(running) >= most or any(r["cell"].alone for r in running):
                    break
                todo.pop(0)
                if time.time() > until - 2:
                    self.keep({"cell": one.name, "status": "no time"})
                else:
                    running.append(self.start(one, until))
            if self.dead and not running:
                for one in todo:
                    self.keep({"cell": one.name, "status": "no time", "error": self.dead})
                return
            for run in list(running):
                row = self.ended(run)
                if row is None:
                    continue
                running.remove(run)
                sticky = "CUDA error" in row.get("error", "")
                if sticky and not row.get("blocking") and DEVICE == "cuda":
                    running.append(self.start(run["cell"], time.time() + 30, blocking=True))
                self.keep(row)
                if row["status"] in ("timeout", "crash") or sticky:
                    self.check_health()
            time.sleep(0.01)

    def check_health(self) -> None:
        """After a hang or a crash: does the GPU still answer? Two tries."""
        if DEVICE != "cuda":
            return
        for _ in range(2):
            run = self.start(Cell("health", lambda: (torch.zeros(1).cuda(), {})[1]), 1e18)
            while (row := self.ended(run)) is None:
                time.sleep(0.05)
            if row["status"] == "ok":
                return
            time.sleep(2)
        self.dead = "the GPU does not answer any more; start again on another machine"
        print(self.dead, flush=True)

    def stop(self, *_: Any) -> None:
        """On a signal: no child outlives this process, and what was found is written."""
        for run in self.running:
            os.killpg(run["pid"], signal.SIGKILL)
        self.finish()
        os._exit(1)

    def finish(self) -> int:
        """Writes the page and the logs; 1 if a cell is not ok."""
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as tar:
            for path in sorted(SCRATCH.glob("*.log")) + sorted(SCRATCH.glob("*.gz")):
                tar.add(path, arcname=path.name)
        page = "\n".join(report(self.head, self.rows)) + "\n"
        (self.out / "report.txt").write_text(page)
        print(page)
        return int(any(row["status"] != "ok" for row in self.rows))


def report(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A page: what failed first, with its first line; then figures."""
    about = head.get("about")
    lines = [machine_line(about) if about else f"commit {head['commit']}"]
    if "ceilings" in head:
        copy, product, what = head["ceilings"]
        lines.append(f"ceilings: copy {copy:.0f} GB/s, {what} {product:.0f} TFLOP/s")
    count = {s: sum(r["status"] == s for r in rows) for s in dict.fromkeys(r["status"] for r in rows)}
    lines += [f"{head['seconds']:.0f} s: " + ", ".join(f"{n} {s}" for s, n in count.items()), ""]
    for row in rows:
        if row["status"] not in ("ok", "no time"):
            said = [line for line in row.get("error", "").splitlines() if line.strip()][:3]
            said = said or [f"signal {row.get('signal')}, rc {row.get('rc')}"]
            lines += [f"{row['status'].upper():8} {row['cell']}: {said[0][:150]}"]
            lines += [f"         {line[:150]}" for line in said[1:]]
    for row in rows:
        if row["status"] == "ok":
            lines.append(f"ok       {row['cell']}: {row.get('shown', '')}"[:170])
    for row in rows:
        lines += [f"  {line[:170]}" for line in row.get("lines", ())]
    left = [row["cell"] for row in rows if row["status"] == "no time"]
    return lines + ([f"no time was left for: {', '.join(left)}"] if left else [])


# right: facts


@cell("right", "facts", limit_s=40, alone=True, must=True)
@cell("fast", "facts", limit_s=40, alone=True)
def facts() -> dict[str, Any]:
    if DEVICE == "cuda":
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC,MEMORY,PERFORMANCE"])
    note(about=machine(DEVICE), built=backend.describe())
    found = measure_ceilings(DEVICE, QUICK)
    x = torch.zeros(1, device=DEVICE)
    host = clock_for(DEVICE).host_us(x.zero_)
    shown = f"a launch takes {host or 0:.1f} us of the host"
    return {"ceilings": list(found), "shown": shown}


@cell("right", "module", limit_s=40, alone=True)
def module() -> dict[str, Any]:
    """The compiled module, a kernel of csrc/ and a Triton launch, cold and warm."""
    from fastpar.kernels import _C, global_norm, layer_norm

    assert DEVICE != "cuda" or _C.built_with_cuda, "the module has no CUDA"
    x = torch.randn(1000, 768, device=DEVICE)
    norm = global_norm([x]).norm.item()
    assert abs(norm - x.double().norm().item()) < 1e-4 * norm
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with trying("layer_norm", OWN):
            y = layer_norm(x, torch.ones(768, device=DEVICE), torch.zeros(768, device=DEVICE))
        y.sum().item()
        seconds.append(time.perf_counter() - start)
    torch.testing.assert_close(y, F.layer_norm(x, (768,)))
    return {"shown": "layer_norm, first call and warm: " + ", ".join(f"{s * 1e3:.2f} ms" for s in seconds)}


# right: every op against fp64


@contextlib.contextmanager
def guarded() -> Iterator[Callable[[], None]]:
    """Memory that ops ask for is full of NaN, with canaries before and behind; yields their check."""
    pad, kept = 512, []
    real = torch.empty, torch.empty_like, Tensor.new_empty

    def make(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        flat = real[0](size + 2 * pad, dtype=torch.uint8, device=device).fill_(255)
        kept.append(flat)
        return flat[pad : pad + size].view(dtype).view(shape)

    def empty(*size: Any, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if more or torch.device(device or "cpu").type != DEVICE or not all(map(int, shape)):
            return real[0](*size, dtype=dtype, device=device, **more)
        return make(shape, dtype or torch.get_default_dtype(), torch.device(device or "cpu"))

    def empty_like(x: Tensor, *, dtype: Any = None, **more: Any) -> Tensor:
        if more or x.device.type != DEVICE or not x.is_contiguous() or not x.numel():
            return real[1](x, dtype=dtype, **more)
        return make(x.shape, dtype or x.dtype, x.device)

    def new_empty(self: Tensor, *size: Any, **more: Any) -> Tensor:
        return torch.empty(*size, **{"dtype": self.dtype, "device": self.device, **more})

    def check() -> None:
        for flat in kept:
            assert (flat[:pad] == 255).all(), "memory before an output was written"
            assert (flat[-pad:] == 255).all(), "memory behind an output was written"
        kept.clear()

    torch.empty, torch.empty_like, Tensor.new_empty = empty, empty_like, new_empty  # type: ignore
    try:
        yield check
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = real  # type: ignore


def judge(cases: Sequence[ErrorCase], dtypes: Sequence[torch.dtype], what: str = OWN) -> dict[str, Any]:
    """Every result of these cases within the 2x rule, twice with the same bits; all failures."""
    worst: dict[str, list[Any]] = {}
    wrong: list[str] = []
    checked = 0
    for one in cases:
        for dtype in (d for d in dtypes if d in one.dtypes):
            where = f"{one.op} {one.shape} {str(dtype).removeprefix('torch.')}"
            try:
                with trying(one.op, what), guarded() as check:
                    for result, e in one.measure(dtype, DEVICE).items():
                        checked += 1
                        share = e.max / e.bound if e.bound else float(e.max > 0) * 1e9
                        if not share <= worst.get(result, [0.0])[0]:
                            worst[result] = [share, e.max, e.bound, where]
                        if not e.max <= e.bound:
                            wrong.append(f"{where}: error of {result} is {e.max:.2e}, at most {e.bound:.2e}")
                    if what == OWN or "hopper" in what:
                        first, second = (one.results(dtype, DEVICE) for _ in range(2))
                        for name, value in first.items():
                            if not torch.equal(*(v.contiguous().view(-1).view(torch.uint8) for v in (value, second[name]))):
                                wrong.append(f"{where}: {name} differs between two calls")
                    check()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                wrong.append(f"{where}: out of memory")
            except Exception as error:
                if "CUDA error" in str(error):
                    raise RuntimeError(f"{where}: {error}") from error
                traceback.print_exc()
                wrong.append(f"{where}: {type(error).__name__}: {str(error)[:400]}")
            note(errors={k: v[1:] for k, v in worst.items()}, checked=checked, wrong=wrong)
    if wrong:
        raise AssertionError(f"{len(wrong)} wrong\n" + "\n".join(wrong[:12]))
    share = max((v[0] for v in worst.values()), default=0.0)
    assert checked, "nothing was checked"
    return {"shown": f"{checked} results, the worst at {share:.2f} of what is allowed"}


def proofs_of(op: str, size: int, rows: int) -> list[ErrorCase]:
    rows = 64 if QUICK else rows
    size = size if not QUICK or op.startswith("attention") or size < 128 else 128
    found = [one for one in proof_cases(op, size, DEVICE, rows) if one.op == op.removesuffix("_masked")]
    return [one for one in found if "dropout" not in one.shape or "T=512" not in one.shape]  # a mask in Python


LISTED = [  # op, last dimension, rows of the plain case
    ("layer_norm", 768, 8192), ("residual_layer_norm", 768, 8192), ("linear_cross_entropy", 50304, 2048),
    ("cross_entropy", 50304, 1024), ("bias_gelu", 3072, 8192), ("embedding", 768, 8192),
    ("gelu_mlp", 768, 4096), ("linear", 768, 4096), ("weight_gradient", 768, 4096),
    ("attention_masked", 64, 512), ("dropout", 0, 48), ("adamw_step_", 0, 1024), ("pack_", 0, 8192),
    ("unpack_", 0, 8192), ("accumulate_", 0, 8192), ("sum_shards", 0, 8192), ("global_norm", 0, 8192),
    ("linear_fp8", 768, 2048), ("linear_fp8", 3072, 512), ("grouped_linear", 768, 2048), ("rms_norm", 1600, 2048),
    ("residual_rms_norm", 768, 2048), ("layer_norm", 1600, 2048), ("attention_masked", 128, 512),
    ("cross_entropy", 257, 2048),
]  # fmt: skip


def op_cells() -> None:
    for op, size, rows in LISTED:
        def run(op: str = op, size: int = size, rows: int = rows) -> dict[str, Any]:
            return judge(proofs_of(op, size, rows), (*HALF, torch.float32))

        CELLS["right"].append(Cell(f"{op} {size}".removesuffix(" 0"), run, 40))
    lengths = (64, 2, 128, 129, 200, 320, 1000, 1024, 2048)  # of one token dq is 0, no error is
    who = [OWN, "hopper", f"{OWN}/hopper", f"hopper/{OWN}", "cudnn", "flash", "cudnn/" + OWN, f"{OWN}/cudnn", "efficient"]
    for D in (64, 128):
        for what in who:
            def run(D: int = D, what: str = what) -> dict[str, Any]:
                shapes = [(2, T, T, 4, 4, D) for T in (lengths[:3] if QUICK else lengths)]
                shapes += [(1, 300, 300, 6, 2, D), (2, 64, 96, 4, 4, D)] * (what == OWN)
                found = [c for c in attentions(tuple(shapes), DEVICE) if "documents" not in c.shape]
                found = [c for c in found if "dropout" not in c.shape or what == OWN]
                q = torch.empty(1, 128, 4, D, dtype=HALF[0], device=DEVICE)
                why = "" if what == OWN else [attention_peers.refusal(n, q, q, q, True) for n in what.split("/") if n != OWN][0]
                return {"shown": f"left out: it {why}"} if why else judge(found, HALF, what)

            CELLS["right"].append(Cell(f"attention {D} {what}", run, 40 if what == OWN else 25))
    CELLS["right"].append(Cell("experts", lambda: judge(list(experts(256, 128)), (*HALF, torch.float32)), 40))
    shapes = ((768, 768), (768, 3072), (100, 257))
    CELLS["right"].append(Cell("orthogonalize", lambda: judge(list(orthogonals(shapes)), (torch.float32, HALF[0])), 30))


op_cells()


# right: engine, optimizer, trainer


def tokens(step: int = 0) -> Tensor:
    """[4, T + 1], of a pattern that can be learned."""
    start = torch.arange(4)[:, None] * 7 + step
    return ((start + 3 * torch.arange(SMALL.block_size + 1)) % SMALL.vocab_size).to(DEVICE)


def model_gradients(dtype: torch.dtype, how: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = fastpar.GPT(SMALL).to(DEVICE, dtype)
    before, backend.choice = backend.choice, how
    try:
        loss = model(tokens()[:, :-1], tokens()[:, 1:])
        loss.backward()
    finally:
        backend.choice = before
    named = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **named}


def within_twice(exact: dict[str, Tensor], ours: dict[str, Tensor], plain: dict[str, Tensor], eps: float) -> dict[str, Any]:
    """Norms of errors at most twice plain PyTorch's and one rounding."""
    worst = 0.0
    for name, value in exact.items():
        error, allowed = ((g[name] - value).norm().item() for g in (ours, plain))
        worst = max(worst, error / (2 * allowed + eps * value.norm().item()))
    assert worst <= 1, f"an error of {worst:.2f} times what is allowed"
    return {"shown": f"{len(exact)} results, the worst at {worst:.2f} of what is allowed"}


@cell("right", "GPT against fp64", limit_s=60)
def gpt_against_fp64() -> dict[str, Any]:
    dtype = HALF[0] if DEVICE == "cuda" else torch.float32
    exact = model_gradients(torch.float64, "torch")
    ours, plain = model_gradients(dtype, "auto"), model_gradients(dtype, "torch")
    return within_twice(exact, ours, plain, torch.finfo(dtype).eps)


@cell("right", "transformers GPT-2, patched", limit_s=60)
def patched_gpt2() -> dict[str, Any]:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=256, n_positions=128, vocab_size=1000,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    dtype = HALF[0] if DEVICE == "cuda" else torch.float32

    def gradients(dtype: torch.dtype, patched: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).to(DEVICE, dtype)
        if patched:
            print(fastpar.patch(model))
        loss = model(tokens()[:, :-1], labels=tokens()[:, :-1]).loss
        loss.backward()
        return {"loss": loss.detach().double()} | {n: p.grad.double() for n, p in model.named_parameters()}

    found = gradients(torch.float64, False), gradients(dtype, True), gradients(dtype, False)
    return within_twice(*found, torch.finfo(dtype).eps)


TINY = {
    "tokenizer": "ids", "model": "micro", "n_layer": 2, "n_head": 4, "n_embd": 256, "block_size": 128,
    "batch_size": 8, "micro_batch_size": 4, "max_steps": 12, "eval_every": 6, "eval_batches": 2,
    "save_every": 6, "keep_last": 0, "num_samples": 0, "lr": 1e-3, "log": "none", "dropout": 0.1,
}  # fmt: skip


def write_ids(folder: Path, vocab_size: int = 1000) -> str:
    """train.bin and val.bin of a pattern; the largest number occurs."""
    ids = (torch.arange(1 << 16) * 3 % vocab_size).to(torch.uint16)
    ids[::97] = vocab_size - 1
    for name in ("train", "val"):
        ids.numpy().tofile(folder / f"{name}.bin")
    return str(folder)


def losses_of(folder: str, name: str, **changes: Any) -> list[float]:
    """Losses of one run of the trainer, validations too."""
    settings = {**TINY, "data": folder, "device": DEVICE, "out": f"{folder}/{name}", **changes}
    if DEVICE == "cuda":
        settings = {"dtype": "bf16", **settings}
    if QUICK:
        settings |= {"n_embd": 32, "block_size": 16}
    try:
        assert train(TrainConfig().replace(settings)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    rows = read_metrics(Path(folder) / name / "metrics.jsonl")
    return [row[key] for row in rows for key in ("loss", "val_loss") if key in row]


def same_run(base: dict[str, Any], changes: dict[str, Any], within: float = 0.0) -> dict[str, Any]:
    """A run with changes has the losses of the run without: bit for bit, or within a distance."""
    with tempfile.TemporaryDirectory() as folder:
        write_ids(Path(folder))
        plain, changed = losses_of(folder, "a", **base), losses_of(folder, "b", **base, **changes)
    off = max(abs(a - b) for a, b in zip(plain, changed))
    assert len(plain) == len(changed) and off <= within, f"losses differ by {off:.3g}: {plain} {changed}"
    assert plain[-1] < plain[0] - 0.1 or QUICK, f"the loss did not fall: {plain}"
    return {"shown": f"{len(plain)} losses differ by {off:.2g}, {plain[0]:.3f} to {plain[-1]:.3f}", "losses": plain}


def resumed(**base: Any) -> dict[str, Any]:
    """A run that lost its last checkpoint goes on from the one before, with the same losses."""
    with tempfile.TemporaryDirectory() as folder:
        write_ids(Path(folder))
        whole = losses_of(folder, "a", **base)
        shutil.copytree(f"{folder}/a", f"{folder}/b", symlinks=True)
        for path in list_checkpoints(Path(folder) / "b")[1:]:
            shutil.rmtree(path)
        again = losses_of(folder, "b", **base, resume=True)
    assert whole == again, f"resumed at other losses: {whole} {again}"
    return {"shown": f"the same losses after a resume, {whole[0]:.3f} to {whole[-1]:.3f}"}


def engine_cells() -> None:
    """Trainer against trainer: settings of both, and of the second."""
    from fastpar.kernels.linear_fp8 import LEAST_CAPABILITY  # noqa: F401

    pairs: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
        ("cuda_graphs", {"cuda_graphs": False}, {"cuda_graphs": True}, 0.0),
        ("zero_stage 2", {"deterministic": True}, {"zero_stage": 2}, 0.0),
        ("offload optimizer", {}, {"offload": "optimizer"}, 0.0),
        ("offload parameters", {}, {"offload": "parameters", "zero_stage": 3}, 0.0),
        ("activations on the host", {}, {"offload_activations": True, "activation_checkpointing": "full"}, 0.0),
        ("recomputation", {}, {"activation_checkpointing": "full"}, 0.0),
        ("compile", {}, {"compile": True}, 0.05),
        ("fp8 row", {}, {"fp8": "all"}, 0.2),
        ("fp8 block", {}, {"fp8": "all", "fp8_scaling": "block"}, 0.2),
        ("fp8 tensor", {}, {"fp8": "all", "fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}, 0.2),
    ]
    for name, base, changes, within in pairs:
        on_cpu = name in ("zero_stage 2", "recomputation")
        CELLS["right"].append(Cell(name, partial(same_run, base, changes, within), 60, on_cpu=on_cpu))
    CELLS["right"].append(Cell("resume, deterministic", partial(resumed, deterministic=True), 60))
    CELLS["right"].append(Cell("resume, fp16 with a loss scale", partial(resumed, dtype="fp16"), 60, on_cpu=False))
    CELLS["right"].append(Cell("muon", partial(resumed, optimizer="muon"), 60))


engine_cells()


@cell("right", "NCCL of one rank", limit_s=40, on_cpu=False)
def nccl() -> dict[str, Any]:
    import torch.distributed as dist

    from fastpar.comm.torch_collectives import TorchCollectives

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=where, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    for ordered in (False, True):
        comm = TorchCollectives(device="cuda:0", in_rank_order=ordered)
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            x = torch.randn(1000, device="cuda").mul_(30).to(dtype)
            kept, out = x.clone(), torch.empty_like(x)
            for handle in (comm.all_gather(out, x, async_op=True), comm.broadcast(x, 0, async_op=True)):
                handle.wait()
            assert torch.equal(out, kept) and torch.equal(x, kept)
            if dtype.is_floating_point:
                comm.all_reduce(x, mean=True)
                comm.reduce_scatter(out, x, mean=True)
                wide = torch.empty(1000, device="cuda")
                assert torch.equal(out, kept) and torch.equal(x, kept), f"{dtype} {ordered}"
                del wide
    torch.cuda.synchronize()
    return {"shown": "all_gather, broadcast, all_reduce and reduce_scatter, synchronous and not"}


@cell("right", "optimizer against the CPU", limit_s=60, on_cpu=False)
def tests_of_csrc() -> dict[str, Any]:
    """The tests of the CUDA kernels, which compare bits with the CPU's, on the real kernels."""
    files = ["test_adamw_cuda", "test_bucket", "test_global_norm", "test_quantize", "test_philox"]
    return run_tests([f"tests/ops/{name}.py" for name in files], "gpu or (cuda and not slow)")


def run_tests(files: Sequence[str], chosen: str = "gpu") -> dict[str, Any]:
    """pytest here; a CUDA error ends the cell, as every later test would fail by it."""
    import pytest

    failed: list[str] = []
    count = {"passed": 0, "failed": 0, "skipped": 0}

    class Watch:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed or report.skipped:
                count[report.outcome] += 1
                if report.failed:
                    failed.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")
                note(tests=count, wrong=failed[:20])
            if report.failed and "CUDA error" in str(report.longrepr):
                print(report.longrepr, flush=True)
                raise SystemExit(f"CUDA error in {report.nodeid}")

    os.chdir(ROOT)
    marks = "gpu" if chosen == "gpu" else "gpu or not slow"
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=25", "--timeout-method=thread", "-m", marks]
    if chosen != "gpu":
        arguments += ["-k", "cuda or gpu"]
    pytest.main([*arguments, *files], plugins=[Watch()])
    assert not failed, f"{len(failed)} tests failed\n" + "\n".join(failed[:10])
    assert count["passed"] or DEVICE != "cuda", "no test ran"
    return {"shown": ", ".join(f"{n} {what}" for what, n in count.items())}


# right: how fast


@cell("right", "proofs", limit_s=110, alone=True)
@cell("fast", "proofs", limit_s=100, alone=True)
def proofs() -> dict[str, Any]:
    """Every class of a step of GPT-2 124M: own, stock and peers, as the doctor times them."""
    dtype = HALF[0] if DEVICE == "cuda" else torch.float32
    shape = SMALL if QUICK else GPT2
    torch.zeros(1, device=DEVICE)
    cases = doctor.cases_of_model(DEVICE, dtype, shape, fp8=True)
    about, found, lines = environment(DEVICE), {}, []
    for case in cases if DEVICE == "cuda" else cases[:4]:
        start = time.perf_counter()
        found |= doctor.adopt([case], rows=64 if QUICK else 32768, again=True)
        spent = time.perf_counter() - start
        lines.append(f"{proof_line(case, found[case])} {spent:6.1f} s {found[case].serves}")
        lines += [f"    {p.name} {p.ms[0]:.4f} {p.ms[1]:.4f} {p.wrong}" for p in found[case].peers]
        rows = [row_of(c, p) for c, p in found.items()]
        note(proofs={"version": VERSION, "about": about, "proofs": rows}, lines=lines)
    wrong = [f"{case}: {proof.wrong}" for case, proof in found.items() if proof.wrong]
    assert not wrong, "\n".join(wrong)
    return {"shown": f"{len(found)} classes, {sum(p.chosen == OWN for p in found.values())} run own kernels"}


class NotedBench(Bench):
    """Its rows go into the cell's row at once."""

    def add(self, *rows: Row) -> None:
        super().add(*rows)
        note(rows=[row.to_json() for row in self.results.rows.values()])


class DryBench(NotedBench):
    """Compiles and judges, and times nothing: so that a later cell finds what it compiles."""

    def measure(self, *_: Any) -> None:
        pass


def bench_of(name: str, only: str, kind: type[Bench] = NotedBench) -> Bench:
    stem = f"{name}_{only}".replace(" ", "_").replace("/", "_")
    found = [float("inf"), float("inf"), "not measured"]
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads((SCRATCH / "facts.json").read_text())["ceilings"]
    results = ResultFile(SCRATCH / f"rows_{kind.__name__}_{stem}.json", machine(DEVICE), Row)
    return kind(name, DEVICE, QUICK, results, only="" if QUICK else only, ceilings=Ceilings(*found))


def run_bench(name: str, only: str, kind: type[Bench] = NotedBench) -> dict[str, Any]:
    """The bench of one op at one shape."""
    from importlib import import_module

    if QUICK:
        torch._dynamo.config.disable = True
    one = bench_of(name, only, kind)
    import_module(f"bench.ops.bench_{name}").run(one)
    rows = list(one.results.rows.values())
    times = [f"{r.direction[:8]} {r.variant} {r.median_ms:.3f}" for r in rows if r.median_ms]
    refused = [f"{r.variant}: {r.refused}" for r in rows if r.refused and "fastpar" in r.variant]
    assert not refused, "\n".join(refused)
    return {"shown": ", ".join(times)[:150], "lines": [f"{name}: {t}" for t in times] if not QUICK else []}


TIMED = [
    ("attention", "H=12 T=1024 D=64"), ("cross_entropy", ""), ("linear_cross_entropy", "N=16384 C=768"),
    ("layer_norm", "layer_norm N=32768 C=768"), ("gelu", "F=3072"), ("adamw", "bf16 124M"), ("gelu_mlp", "C=768"),
    ("linear", "c_fc"), ("embedding", "C=768"), ("global_norm", "GPT-2"), ("linear_fp8", "c_fc"), ("quantize", "int8"),
    ("bucket", ""), ("philox", ""), ("grouped_linear", ""),
]  # fmt: skip
COMPILED = TIMED[1:5]  # beside torch.compile, which other cells compile first
for _name, _only in COMPILED:
    CELLS["right"].append(Cell(f"compile {_name}", partial(run_bench, _name, _only, DryBench), 60, on_cpu=False))


def in_turns(config: GPTConfig, batch_size: int, names: Sequence[str], rounds: int, steps: int, title: str) -> dict[str, Any]:
    """Steps of several variants in this process, in turns; rows as those of `bench train`."""
    stock = Spec("stock", config, batch_size, device=DEVICE)
    known = {"eager": stock, "torch.compile": replace(stock, compiled=True), "fastpar": replace(stock, kind="fastpar")}
    specs = {name: known[name] for name in names}
    logs = bench_train.take_turns(specs, rounds=rounds, steps=steps, warmup=4, worker=Here)
    one = bench_of("train", title)
    one.add(*bench_train.to_rows(one, title, specs, logs, names[0]))
    refused = [f"{name}: {log.refused}" for name, log in logs.items() if log.refused]
    rows = one.results.rows.values()
    lines = [
        f"{title}: {r.variant} {r.median_ms:.2f} ms, {r.tokens_per_s:.0f} tokens/s, peak {(r.peak_bytes or 0) / 1e9:.1f} GB, {r.speedup or 1:.2f}x {names[0]}"
        for r in rows if r.median_ms
    ]  # fmt: skip
    assert not refused, "\n".join(refused)
    return {"shown": lines[-1] if lines else "", "lines": lines}


class Here:
    """A variant in this process, told as a Worker is."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self._peak, before = spec, 0, self._live()
        self._variant = Variant(spec, 0)
        self._own = self._live() - before

    def _live(self) -> int:
        return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0

    def call(self, command: str, *args: Any, timeout_s: float = 0.0) -> list[Any]:
        if command == "peak_bytes":
            return [self._peak]
        others = max(0, self._live() - self._own)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        answer = getattr(self._variant, command)(*args)
        if DEVICE == "cuda" and command == "steps":
            self._own = self._live() - others
            self._peak = max(self._peak, torch.cuda.max_memory_allocated() - others)
        return [answer]

    def close(self) -> None:
        self._variant = None  # type: ignore[assignment]
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cell("right", "step of 124M", limit_s=60, alone=True, must=True)
def step_of_124m() -> dict[str, Any]:
    """B = 32 beside eager, then a trace of two steps."""
    config, batch_size = (SMALL, 4) if QUICK else (GPT2, 32)
    found = in_turns(config, batch_size, ("eager", "fastpar"), 2, 2 if QUICK else 5, f"124M T=1024 B={batch_size}")
    spec = Spec("fastpar", config, batch_size, device=DEVICE)
    variant = Variant(spec, 0)
    variant.steps(0, 3)
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE == "cuda")
    with profile(activities=kinds) as trace:
        variant.steps(3, 2)
    trace.export_chrome_trace(str(SCRATCH / "trace.json.gz"))
    table = trace.key_averages()
    busy = sorted(table, key=lambda e: -e.self_device_time_total if DEVICE == "cuda" else -e.self_cpu_time_total)
    kernels = [(e.key[:90], round(e.self_device_time_total / 2e3, 3), e.count // 2) for e in busy[:60] if e.self_device_time_total > 0]
    return {**found, "kernels_ms_a_step": kernels}


for _name, _only in TIMED:
    CELLS["right"].append(Cell(f"time {_name}", partial(run_bench, _name, _only), 25, alone=True))
GPU_TESTS = [
    ["tests/optim/test_optim_graphs.py", "tests/train/test_cuda_graphs.py"], ["tests/parallel/test_engine.py", "tests/comm/test_step_report.py"],
    ["tests/ops/test_attention_hopper.py"], ["tests/ops/test_attention_hopper_bwd.py"],
    ["tests/ops/test_attention.py", "tests/ops/test_attention_peers.py", "tests/ops/test_embedding.py", "tests/ops/test_layer_norm.py"],
    ["tests/data/test_data.py", "tests/parallel/test_replicas.py"], ["tests/cost/test_memory_model.py", "tests/cost/test_capacity.py"],
]  # fmt: skip
for _files in GPU_TESTS:
    CELLS["right"].append(Cell(f"tests {Path(_files[0]).stem}", partial(run_tests, _files), 60))


@cell("right", "memcheck of the hopper kernels", limit_s=40, alone=True, on_cpu=False)
def memcheck() -> dict[str, Any]:
    code = (
        "import torch; from fastpar.kernels import attention; from fastpar.kernels.choice import trying\n"
        "x = [torch.randn(1, 300, 4, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]\n"
        "with trying('attention', 'hopper'):\n    attention(*x).sum().backward()\ntorch.cuda.synchronize()"
    )
    run = subprocess.run(["compute-sanitizer", sys.executable, "-c", code], capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert "ERROR SUMMARY: 0 errors" in run.stdout, (run.stdout + run.stderr)[-600:]
    return {"shown": "no bad access"}


# fast


@cell("fast", "fp8 probe", limit_s=20, on_cpu=False)
def fp8_probe() -> dict[str, Any]:
    """Which calls of _scaled_mm with a scale a tensor cublasLt serves."""
    a, b = (torch.randn(256, 768, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scales, bias = torch.ones(8, device="cuda"), torch.ones(256, device="cuda", dtype=HALF[0])
    found = {}
    for at, where in ((0, "aligned"), (1, "4 bytes off")):
        for with_bias in (False, True):
            for fast in (False, True):
                name = f"{where}{', bias' * with_bias}{', fast' * fast}"
                try:
                    torch._scaled_mm(
                        a, b.t(), scales[at], scales[4 + at], bias=bias if with_bias else None,
                        out_dtype=HALF[0], use_fast_accum=fast,
                    )  # fmt: skip
                    torch.cuda.synchronize()
                    found[name] = "ok"
                except RuntimeError as error:
                    found[name] = str(error)[:80]
    return {"lines": [f"{name}: {what}" for name, what in found.items()], "shown": f"{sum(v == 'ok' for v in found.values())} of {len(found)} run"}


@cell("fast", "compile 124M", limit_s=100)
def compile_124m() -> dict[str, Any]:
    """Fills the compiler's cache; the headline's variant finds it."""
    config, batch_size = (SMALL, 4) if QUICK else (GPT2, 32)
    Variant(Spec("stock", config, batch_size, device=DEVICE, compiled=DEVICE == "cuda"), 0).steps(0, 1)
    return {}


@cell("fast", "124M, B=32", limit_s=100, alone=True, must=True)
def headline() -> dict[str, Any]:
    config, batch_size = (SMALL, 4) if QUICK else (GPT2, 32)
    names = ("eager", "fastpar") if QUICK else ("eager", "torch.compile", "fastpar")
    return in_turns(config, batch_size, names, 1 if QUICK else 4, 2 if QUICK else 6, f"124M T=1024 B={batch_size}")


def trainer_ms(folder: str, steps: int, **settings: Any) -> float:
    """Mean ms of a step of the trainer, its host's work included."""
    found: list[float] = []

    def run(trainer: Trainer) -> int:
        for _ in range(6):
            trainer.train_step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            trainer.train_step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / steps * 1e3)
        trainer.mesh.close()
        return 0

    shape = {} if QUICK else {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "dropout": 0.0, "dtype": "bf16"}
    train(TrainConfig().replace({**TINY, "data": folder, "device": DEVICE, **shape, "max_steps": 1000, **settings}), run)
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return found[0]


def trainers(table: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """ms of a trainer's step with each of these settings."""
    ms: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_ids(Path(folder), 1000 if QUICK else 50257)
        for name, settings in table.items():
            try:
                ms[name] = round(trainer_ms(folder, 2 if QUICK else steps, **settings), 3)
            except Exception as error:
                traceback.print_exc()
                ms[name] = reason(error)  # type: ignore[assignment]
            note(ms=ms)
    bad = {name: why for name, why in ms.items() if isinstance(why, str)}
    assert not bad, str(bad)
    return {"shown": ", ".join(f"{n} {v}" for n, v in ms.items()), "lines": [f"{n}: {v} ms a step" for n, v in ms.items()]}


@cell("fast", "small batches and graphs", limit_s=60, alone=True)
def small_batches() -> dict[str, Any]:
    both = {", no graphs": {"cuda_graphs": False}, "": {}} if DEVICE == "cuda" else {"": {}}
    table = {f"B={B}{name}": {"batch_size": B, "micro_batch_size": B, **more} for B in (4, 8) for name, more in both.items()}
    return trainers(table, 30)


@cell("fast", "eager at small batches", limit_s=40, alone=True)
def small_eager() -> dict[str, Any]:
    lines: list[str] = []
    for batch_size in (4, 8):
        config = SMALL if QUICK else GPT2
        found = in_turns(config, batch_size, ("eager", "fastpar"), 2, 8, f"124M T=1024 B={batch_size}")
        lines += found["lines"]
    return {"shown": lines[-1], "lines": lines}


@cell("fast", "fp8 steps", limit_s=60, alone=True, on_cpu=False)
def fp8_steps() -> dict[str, Any]:
    at = {"batch_size": 32, "micro_batch_size": 32}
    table = {"bf16": at} | {f"fp8 {s}": {**at, "fp8": "all", "fp8_scaling": s} for s in ("row", "block", "tensor")}
    table["fp8 tensor, weight gradients too"] = {**table["fp8 tensor"], "fp8_weight_gradient": "fp8"}
    return trainers(table, 10)


@cell("fast", "tune", limit_s=75, alone=True, on_cpu=False)
def tune() -> dict[str, Any]:
    """The places with the most to gain; all times are kept."""
    from bench.ops import tune as tuning

    dtype = HALF[0]
    wanted = [e for e in tuning.entries(DEVICE, dtype) if e.table is not None and e.gain_ms >= 0.3]
    session = tuning.Session(DEVICE, 90, False, SCRATCH / "tune.json", ROOT)
    keep = session.keep

    def kept(*args: Any) -> None:
        keep(*args)
        note(tuned={name: vars(one) for name, one in session.found.items()})

    session.keep = kept  # type: ignore[method-assign]
    tuning.run(wanted, session, minutes=1.0)
    lines = []
    for name, one in session.found.items():
        best = sorted(one.ms.items(), key=lambda item: sum(item[1]))[:4]
        lines += [f"{name}: {one.chosen}", *(f"   {what}: {ms}" for what, ms in best)]
    return {"lines": lines, "shown": f"{len(session.found)} places"}


@cell("fast", "124M, best batch", limit_s=50, alone=True)
def best_batch() -> dict[str, Any]:
    batch_size = 4 if QUICK else 64
    return in_turns(SMALL if QUICK else GPT2, batch_size, ("eager", "fastpar"), 2, 5, f"124M T=1024 B={batch_size}")


@cell("fast", "1.5B", limit_s=60, alone=True)
def one_and_a_half_b() -> dict[str, Any]:
    """One variant after another: both together do not fit."""
    config, batch_size = bench_train.CONFIGS["1.5B"] if not QUICK else (SMALL, 4)
    lines: list[str] = []
    for name in ("eager", "fastpar"):
        found = in_turns(config, batch_size, (name,), 1, 6, f"1.5B T=1024 B={batch_size} {name}")
        lines += found["lines"]
        gc.collect()
        note(lines=lines)
    return {"lines": lines, "shown": "; ".join(lines)[:160]}


@cell("fast", "ncu", limit_s=45, alone=True, on_cpu=False)
def ncu() -> dict[str, Any]:
    """Where the time of single kernels goes: one launch of each."""
    code = (
        "import torch, fastpar; from fastpar.kernels import attention, layer_norm, cross_entropy\n"
        "from fastpar.kernels.choice import trying\n"
        "r = lambda *s: torch.randn(*s, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "for what in ('hopper', 'own'):\n"
        "    x = [r(16, 1024, 12, 64) for _ in range(3)]\n"
        "    with trying('attention', what):\n        attention(*x).sum().backward()\n"
        "with trying('layer_norm', 'own'):\n    layer_norm(r(32768, 768), r(768), r(768)).sum().backward()\n"
        "with trying('cross_entropy', 'own'):\n"
        "    cross_entropy(r(8192, 50304), torch.randint(50304, (8192,), device='cuda')).backward()\n"
        "torch.cuda.synchronize()"
    )
    sections = [w for s in ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats") for w in ("--section", s)]
    kernels = "regex:attn|attention|norm|cross_entropy|dkdv|_dq|_fwd|_bwd"
    command = ["ncu", "--clock-control", "none", *sections, "-k", kernels, "-c", "12", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert "SpeedOfLight" in run.stdout or "Speed Of Light" in run.stdout, (run.stdout + run.stderr)[-500:]
    wanted = ("Duration", "Compute (SM) Throughput", "Memory Throughput", "Registers Per", "Achieved Occupancy")
    lines = [
        line.strip() for line in run.stdout.splitlines() if any(w in line for w in wanted) or "Context 1" in line
    ]
    return {"lines": lines[:80], "shown": f"{len(lines)} lines"}


CELLS["right"].sort(key=lambda c: (c.name != "facts", c.name != "module", c.name[:7] != "compile"))


# What a rehearsal adds: cells that go wrong in every way


@cell("demo", "demo hangs", limit_s=2)
def _hangs() -> None:
    time.sleep(1000)


@cell("demo", "demo ends by a signal")
def _crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@cell("demo", "demo raises a CUDA error")
def _raises() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@cell("demo", "demo is wrong")
def _is_wrong() -> None:
    raise AssertionError("error of dq is 3.1e-02, at most 1.0e-02 was allowed")


def pack() -> int:
    """Compiles for an H100, without a GPU, what the cells launch: into TRITON_CACHE_DIR."""
    from fastpar.doctor.warm import warm

    cases = [Case("cuda", op, HALF[0], size) for op, size, _ in LISTED]
    cases += [Case("cuda", op, dtype, size) for op, size, _ in LISTED[:4] for dtype in (HALF[1], torch.float32)]
    cases += [Case("cuda", "attention", dtype, D) for D in (64, 128) for dtype in HALF]
    cases += doctor.cases_of_model("cuda", HALF[0], GPT2, fp8=True)
    errors = warm(list(dict.fromkeys(cases)), (90, 132))
    print("\n".join(errors))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the cells of a mode; 1 if one is not ok."""
    global QUICK, DEVICE, SCRATCH
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("right", "fast", "pack"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, and cells that go wrong")
    parser.add_argument("--only", action="append", help="cells whose name holds this")
    parser.add_argument("--limit", type=float, help="seconds, from --started")
    parser.add_argument("--started", type=float, default=time.time())
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    args = parser.parse_args(argv)
    QUICK, DEVICE = args.quick, args.device
    if args.mode == "pack":
        return pack()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu.sh: expected a GPU that torch can use, got none from {sys.executable}; set "
            "PYTHON, or use --device cpu --quick",
            file=sys.stderr,
        )
        return 2
    SCRATCH = Path(tempfile.mkdtemp(prefix="fastpar_cells_"))
    os.environ.setdefault("FASTPAR_PROOFS", str(SCRATCH / "proofs"))
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read once a process, before its first product
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(SCRATCH / "inductor")  # one for all cells
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    commit()
    runner = Runner(args.out, args.mode, args.started, args.limit or LIMIT_S[args.mode])
    cells = CELLS[args.mode] + CELLS["demo"] * QUICK
    if args.only:  # in the order in which they are asked for, of both modes
        known = {c.name: c for c in [*CELLS["fast"], *CELLS["right"], *CELLS["demo"]]}
        cells = list({n: c for text in args.only for n, c in known.items() if text in n}.values())
    cells = [c for c in cells if c.on_cpu or DEVICE == "cuda"]
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, runner.stop)
    runner.run(cells, 2 if DEVICE == "cpu" else AT_ONCE)
    return runner.finish()


if __name__ == "__main__":
    sys.exit(main())
