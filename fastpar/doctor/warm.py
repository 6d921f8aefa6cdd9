"""Compiles Triton kernels before they are needed, on all cores: into Triton's cache on disk.

A kernel takes a second or two to compile, and a first step would compile them one after another on
every rank. Here the calls of a proof are made on CPU tensors with their launches recorded for this
GPU's architecture, and each process compiles every n-th distinct launch. A launch that is compiled
so has the key that Triton's own launcher looks up (tests/ops/test_triton_launch.py).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastpar.doctor.proof_cases import cases_of_many_rows, proof_cases
from fastpar.files.packages import call_command
from fastpar.kernels import (  # noqa: F401  the tables fill TABLES
    attention_bits,
    attention_configs,
    backend,
    cross_entropy_configs,
    gelu_configs,
    layer_norm_configs,
)
from fastpar.kernels.attention_peers import left_out
from fastpar.kernels.choice import OWN, Case, trying
from fastpar.kernels.config_table import TABLES

Forced = tuple[str, tuple[Any, ...], tuple[Any, ...]]  # name of a table, place, config
GLUON = "triton.experimental.gluon._runtime"  # its kernels have a compiler source of their own
ROWS = 128  # a kernel depends on the number of rows by its divisors only


def warm(
    cases: Sequence[Case],
    gpu: tuple[int, int],
    processes: int | None = None,
    forced: Sequence[Forced | None] = (),
) -> list[str]:
    """Compiles what proofs of these cases launch; the errors, which a proof meets too.

    Args:
        forced: for each case, what one of its tables is to say instead; none by default.
        gpu: compute capability (80 for sm_80) and count of multiprocessors, by which grids and with
            them the arguments of kernels are chosen.
        processes: by default one for each core that this process may use, at most 16.
    """
    count = processes or min(16, len(os.sched_getaffinity(0)))
    rows = [
        [case.op, str(case.dtype).removeprefix("torch."), case.size, instead]
        for case, instead in itertools.zip_longest(cases, forced)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    running = [
        subprocess.Popen(
            [*call_command("fastpar.doctor.warm.main"), json.dumps([gpu, i, count, rows])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(count)
    ]
    errors = [line for process in running for line in process.communicate()[0].splitlines()]
    ended = {process.returncode for process in running} - {0}
    return errors + [f"a process ended with status {status}" for status in ended]


def launches_of(case: Case, gpu: tuple[int, int], forced: Forced | None = None) -> list[Any]:
    """What the calls of a proof launch, forward and backward."""
    from fastpar.kernels.triton_launch import record

    found: list[Any] = []
    before = backend.choice, backend.recording
    backend.choice, backend.recording = "triton", True
    try:
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(record(*gpu))
            stack.enter_context(trying(case.op, OWN))
            if forced is not None:
                name, place, config = forced
                table = TABLES[name]
                stack.enter_context(table.trying(tuple(place), table.kind(*config)))
            calls = proof_cases(case.op, case.size, "cpu", ROWS)
            if case.op == "attention":  # has kernels for partial tiles
                calls += cases_of_many_rows(case.op, case.size, "cpu")
            for one in calls:
                if case.dtype in one.dtypes:
                    one.results(case.dtype, "cpu")
            if case.op == "attention" and gpu[0] == 90 and "hopper" not in left_out:
                _call_hopper_kernels(case)
    finally:
        backend.choice, backend.recording = before
    return found


def _call_hopper_kernels(case: Case) -> None:
    """Those that a proof of this case tries; none where Triton is too old for them."""
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(case.dtype)
    with contextlib.suppress(ImportError):
        for module in ("attention_hopper", "attention_hopper_bwd"):
            for name, call in backend.triton_module(module).aot_calls():
                if name.startswith(f"D={case.size} {dtype} "):
                    call()


def _distinct(launches: Sequence[Any]) -> Iterator[Any]:
    known = set()
    for launch in launches:
        key = repr((launch.name, launch.signature, launch.constexprs, launch.attrs, launch.options))
        if key not in known:
            known.add(key)
            yield launch


def main() -> None:
    """One of `count` processes: compiles its part, prints what could not be compiled."""
    gpu, index, count, rows = json.loads(sys.argv[1])
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    torch.set_num_threads(1)
    step = count if len(rows) >= count else 1  # of many each process takes its own
    launches = [
        launch
        for op, dtype, size, forced in (rows[index::count] if step > 1 else rows)
        for launch in launches_of(Case("cpu", op, getattr(torch, dtype), size), gpu, forced)
    ]
    target = GPUTarget("cuda", gpu[0], 32)
    for i, launch in enumerate(_distinct(launches)):
        if step > 1 or i % count == index:
            source_of = ASTSource
            if launch.kernel.is_gluon():
                source_of = importlib.import_module(GLUON).GluonASTSource
            source = source_of(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    triton.compile(source, target=target, options=launch.options)
            except Exception as error:
                first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"{launch.name}: {first_line}")
