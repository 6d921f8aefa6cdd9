"""Seconds from the start of a process to the end of its first training step.

Each run is a new process that trains one step of the same small GPT-2 and one more. Kernels that a
compiler makes are made anew, but for "torch.compile, cached"; extensions that a package compiles
once for a machine, ours and DeepSpeed's, are there. `fastpar train` is the command, until it has
written its first step. The notes have the parts: import, build (model, optimizer, engine), first
step, second step.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Bench
from bench.records import ROOT
from fastpar.comm.ranks import reason

TIME_LIMIT_S = {"cpu": 1500, "cuda": 900}
SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
QUICK = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32}
VOCAB, BATCH, ROUNDS = 256, 8, 3
COMPILED, CACHED, TRAIN = "torch.compile", "torch.compile, cached", "fastpar train"
SINGLE, DEEPSPEED = "one process", "DeepSpeed ZeRO-1"  # of bench/peers/contenders.py
VARIANTS = ("eager", COMPILED, CACHED, DEEPSPEED, "fastpar", "fastpar.patch", TRAIN)


def child(variant: str, shape: dict[str, int], device: str, begun: float) -> dict[str, float]:
    """In a new process: the parts in seconds since it was asked for."""
    marks = [begun]
    make = _MAKERS[variant](device)
    marks.append(time.time())
    import torch

    step: Callable[[Any, Any], Any] = make(shape)
    marks.append(time.time())
    x = torch.randint(VOCAB, (BATCH, shape["block_size"]), device=device)
    for _ in range(2):
        float(step(x, x))  # waits for it
        marks.append(time.time())
    names = ("import_s", "build_s", "first_step_s", "second_step_s")
    return dict(zip(names, (b - a for a, b in itertools.pairwise(marks))))


# What is imported, then, with the shape, built: a function of x and y that trains a step. Imports
# are in the functions: their seconds are a part of the result.


def _stock(device: str, title: str = SINGLE, compiled: bool = False) -> Callable[..., Any]:
    import torch

    from bench.peers import contenders
    from fastpar.observe.strategies import Settings, import_deepspeed
    from fastpar.settings.model import GPTConfig

    deepspeed = import_deepspeed(device) if title == DEEPSPEED else None

    def make(shape: dict[str, int]) -> Callable[..., Any]:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT="29555")
        if deepspeed is not None:
            backend = "nccl" if device == "cuda" else "gloo"
            deepspeed.init_distributed(dist_backend=backend, verbose=False)
        config = GPTConfig(vocab_size=VOCAB, **shape)
        made = contenders.build(title, config, Settings(device=device))
        if compiled:
            made.model = torch.compile(made.model)  # type: ignore[assignment]
        return made.step

    return make


def _fastpar(device: str) -> Callable[..., Any]:
    import fastpar

    def make(shape: dict[str, int]) -> Callable[..., Any]:
        model = fastpar.GPT(fastpar.GPTConfig(vocab_size=VOCAB, **shape)).to(device)
        return _loop(model, fastpar.AdamW(model.parameters(), lr=1e-3))

    return make


def _patched(device: str) -> Callable[..., Any]:
    import transformers

    import fastpar

    def make(shape: dict[str, int]) -> Callable[..., Any]:
        sizes: Any = {"n_positions" if n == "block_size" else n: v for n, v in shape.items()}
        sizes |= {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        model.to(device)
        fastpar.patch(model)
        optimizer = fastpar.AdamW(model.parameters(), lr=1e-3)
        return _loop(lambda x, y: model(input_ids=x, labels=y).loss, optimizer)

    return make


def _loop(forward: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


_MAKERS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "eager": _stock,
    COMPILED: partial(_stock, compiled=True),
    CACHED: partial(_stock, compiled=True),
    DEEPSPEED: partial(_stock, title=DEEPSPEED),
    "fastpar": _fastpar,
    "fastpar.patch": _patched,
}


def measure(
    variant: str, shape: dict[str, int], device: str, cache: str | None = None
) -> dict[str, float]:
    """One run in a new process; cache: a folder with what earlier ones compiled."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            n: str(Path(cache or folder) / n)
            for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        environment = {**os.environ, **caches, "PYTHONPATH": str(ROOT)}
        if variant == TRAIN:
            return _train(shape, device, folder, environment)
        code = "import sys, json; from bench.systems import bench_first_step as b\n"
        code += "print(json.dumps(b.child(*json.loads(sys.argv[1]))))"
        asked = json.dumps([variant, shape, device, time.time()])
        command, how = [sys.executable, "-c", code, asked], {"env": environment, "cwd": ROOT}
        done = subprocess.run(command, **how, capture_output=True, text=True)  # type: ignore[call-overload]
        if done.returncode:
            raise RuntimeError(f"measure: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def _train(
    shape: dict[str, int], device: str, folder: str, environment: dict[str, str]
) -> dict[str, float]:
    """Of the command: until its first step is in metrics.jsonl, and until the second."""
    out = Path(folder) / "run"
    sizes = [f"--{n.replace('_', '-')}={v}" for n, v in shape.items()]
    command = [sys.executable, "-m", "fastpar", "train", "--out", str(out), "--tokenizer", "bytes"]
    command += [*sizes, f"--batch-size={BATCH}", f"--micro-batch-size={BATCH}", "--logger", "none"]
    command += ["--max-steps=2", "--eval-batches=1", "--eval-every=0", "--num-samples=0"]
    command += ["--device", device, "--max-grad-norm=0"]
    begun = time.time()
    marks: list[float] = []
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None and len(marks) < 2:
        time.sleep(0.005)
        with_steps = out / "metrics.jsonl"
        found = with_steps.read_text().count('"loss"') if with_steps.exists() else 0
        marks += [time.time()] * (found - len(marks))
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"measure: {errors.decode().strip().splitlines()[-1]}")
    return {"import_s": 0.0, "build_s": 0.0, "first_step_s": marks[0] - begun}


def run(bench: Bench) -> None:
    import torch

    shape = QUICK if bench.quick else SHAPE
    case = "first_step {n_layer}x{n_embd} T={block_size}".format(**shape) + f" B={BATCH}"
    times: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(1 + (1 if bench.quick else ROUNDS)):
            for variant in VARIANTS if turn else (CACHED, DEEPSPEED):  # these fill their caches
                if variant in failed:
                    continue
                try:
                    given = cache if variant == CACHED else None
                    found = measure(variant, shape, bench.device, given)
                    times[variant] += [found] * bool(turn)
                except Exception as error:
                    failed[variant] = reason(error)
    total = {v: [1e3 * _until_first(t) for t in found] for v, found in times.items()}
    for variant in VARIANTS:
        some = times[variant]
        notes = {n: statistics.median(t[n] for t in some) for n in (some[0] if some else ())}
        base = (COMPILED, total[COMPILED] if variant != COMPILED else ())
        how: dict[str, Any] = {"refused": failed.get(variant), **notes}
        threads = torch.get_num_threads()
        ms = total[variant]
        bench.add(bench.timed_row(case, "first step", variant, ms, base, threads=threads, **how))


def _until_first(parts: dict[str, float]) -> float:
    return parts["import_s"] + parts["build_s"] + parts["first_step_s"]
