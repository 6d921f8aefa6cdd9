"""Kernels compiled before they are needed: those that calls launch, by several processes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cells import sweep

pytest.importorskip("triton", reason="needs triton")

from fastpar.doctor import doctor, trial
from fastpar.doctor.trial import launches_of, warm
from fastpar.kernels import backend, bias_gelu, triton_launch
from fastpar.kernels.choice import Case
from fastpar.settings.model import GPTConfig

DROPOUT = Case("cuda", "dropout", torch.bfloat16, 0)
GELU = Case("cuda", "bias_gelu", torch.bfloat16, 96)
ATTENTION = Case("cuda", "attention", torch.bfloat16, 64)
H100 = (90, 132)


def test_a_proof_launches_forward_and_backward_kernels_and_runs_none():
    names = {launch.name for launch in launches_of(GELU, H100)}
    assert any("fwd" in name for name in names)
    assert any("bwd" in name for name in names)
    assert (backend.choice, backend.recording) == ("auto", False)
    assert bias_gelu(torch.ones(2, 96)).isfinite().all()  # by C++ again
    # sm_89 has no default count of multiprocessors, and cards of one architecture differ in it.
    with triton_launch.record(89, 58):
        assert triton_launch.gpu_arch(torch.device("cpu")) == 89
        assert triton_launch.sm_count(torch.device("cpu")) == 58


@pytest.mark.slow
def test_processes_fill_tritons_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert warm([ATTENTION], H100, processes=2) == []
    names = {launch.name for launch in launches_of(ATTENTION, H100)}
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == names


LOOKS = """
from fastpar.doctor import trial

gpu, rows = (90, 132), [["dropout", "bfloat16", 0, None]]
first, _ = trial.missing(rows, gpu)
for launch in trial._launches(rows[0], gpu):
    trial.compile_launch(launch, gpu)
print(len(first), *trial.missing(rows, gpu))
"""


def test_what_tritons_cache_holds_is_not_compiled_again(tmp_path):
    """In a process without Triton's interpreter, whose kernels are not compiled."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-c", LOOKS], env=env, capture_output=True, text=True)
    assert re.fullmatch(r"[1-9] \[\] \[\]\n", run.stdout), run.stdout + run.stderr


KEYS = """
import sys
from fastpar.kernels.backend import triton_module

module = triton_module("activation.triton")
print(*(getattr(module, f"_activation_{name}_kernel").cache_key for name in sys.argv[1:]))
"""
OLDEST = Path(__file__).parents[2] / "build" / "triton-3.6"


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="needs build/triton-3.6: `make aot` puts it there")
def test_no_kernel_s_key_depends_on_what_was_compiled_before():
    """Triton 3.6 leaves out constants of a called function that has no key yet."""
    env = {**os.environ, "PYTHONPATH": str(OLDEST)}
    env.pop("TRITON_INTERPRET", None)
    asked = [("fwd", "bwd"), ("bwd", "fwd")]
    keys = []
    for order in asked:
        run = subprocess.run([sys.executable, "-c", KEYS, *order], env=env, capture_output=True)
        assert run.returncode == 0, run.stderr
        keys.append(set(run.stdout.split()))
    assert len(keys[0]) == 2
    assert keys[0] == keys[1]


@pytest.mark.parametrize("jobs", [0, 1, 3, 40])
def test_there_are_no_more_processes_than_launches_to_compile(monkeypatch, jobs):
    """Each imports torch, Triton and fastpar: seconds of a core, for nothing if all is cached."""
    shares = []

    def start(command, **how):
        shares.append(json.loads(command[-1])[2])
        return SimpleNamespace(communicate=lambda: ("",), returncode=0)

    listed = [[0, n] for n in range(jobs)]
    monkeypatch.setattr(trial, "missing", lambda rows, gpu: (listed, []))
    monkeypatch.setattr(trial.os, "sched_getaffinity", lambda process: range(64))
    monkeypatch.setattr(trial.subprocess, "Popen", start)
    assert warm([DROPOUT], H100) == []
    assert len(shares) == min(jobs, 16)
    assert sorted(job for share in shares for job in share) == listed


@pytest.mark.slow
def test_the_hopper_kernels_are_compiled_where_they_are_tried(monkeypatch):
    def hopper(case, gpu):
        return [launch.name for launch in launches_of(case, gpu) if "hopper" in launch.name]

    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
    both = ["_attention_hopper_fwd_kernel", "_attention_hopper_bwd_dkdv_kernel"]
    assert hopper(ATTENTION, H100) == both
    assert hopper(ATTENTION._replace(size=128), H100) == both[:1]
    for case, gpu in ((ATTENTION, (80, 108)), (ATTENTION._replace(dtype=torch.float32), H100)):
        assert hopper(case, gpu) == []
    monkeypatch.setattr(trial, "left_out", {"hopper"})
    assert hopper(ATTENTION, H100) == []


def test_every_kernel_that_a_run_calls_can_be_recorded():
    """Else a first step would wait until it is compiled. Here nothing is."""
    config = GPTConfig(n_layer=1, n_head=2, n_embd=128, vocab_size=1000, block_size=64)
    cases = {*doctor.cases_of_model("cuda", torch.bfloat16, config, fp8=True)}
    cases |= {*doctor.cases_of_model("cuda", torch.float16, config, tp=2)}
    rows = [[case.op, str(case.dtype).removeprefix("torch."), case.size, None] for case in cases]
    jobs, errors = trial.missing(rows, H100)
    assert errors == []
    assert {rows[i][0] for i, _ in jobs} == {
        op for op, *_ in rows if "triton" in backend.OPS.get(op.removesuffix("_masked"), "  ")[1]
    }


def test_a_process_that_fails_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert warm([DROPOUT], H100, processes=2) == ["a process ended with status 1"]


@pytest.mark.slow
@sweep(
    ("op", "size"),
    [("layer_norm", 768), ("residual_layer_norm", 768), ("attention", 64), ("attention_masked", 64),
     ("embedding", 768), ("bias_gelu", 768)],
)  # fmt: skip
def test_few_rows_launch_the_kernels_that_many_do(monkeypatch, op, size):
    """What a proof calls with many rows is compiled too."""

    def kernels():
        found = launches_of(Case("cuda", op, torch.bfloat16, size), H100)
        return {repr((x.name, x.signature, x.constexprs, x.attrs, x.options)) for x in found}

    compiled, many = kernels(), trial.cases_of_many_rows
    with monkeypatch.context() as patch:
        patch.setattr(trial, "ROWS", 4096)
        assert kernels() == compiled
        patch.undo()
        patch.setattr(trial, "proof_cases", lambda op, size, device, rows: many(op, size, device))
        assert kernels() <= compiled
