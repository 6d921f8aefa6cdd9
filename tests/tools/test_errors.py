"""The error ledger: ratios, the 2x rule, what is covered, and its door."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastpar.kernels
from bench import __main__ as door
from bench.ops import errors
from bench.ops.errors import ErrorRow
from bench.records import load
from fastpar.doctor.cases import ErrorCase
from fastpar.kernels import backend, bias_gelu
from fastpar.kernels.reference import bias_gelu_ref

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = [2.0, 1.0, 0.75, 0.5, 0.5, 64]  # at the bound: 2 * 0.75 + 0.5


def make_row(**results):
    return ErrorRow("op", "N=1", "float32", "cpp", "cpu", results)


def test_ratios_are_those_of_the_largest_and_of_the_rms_error():
    row = make_row(y=ALLOWED, loss=[1.0, 1.0, 0.5, 0.5, 0.0, 1], dx=[0.0, 0.0, 0.0, 0.0, 0.5, 64])
    assert row.ratios() == {"y": (2.0 / 0.75, 2.0)}


def test_a_row_fails_above_the_2x_rule_or_without_results():
    assert not make_row(y=ALLOWED).fails
    assert make_row(y=ALLOWED, dx=[2.1, *ALLOWED[1:]]).fails
    refused = make_row()
    refused.refused = "RuntimeError: no"
    assert refused.fails
    assert errors.format_row(refused).endswith("refused: RuntimeError: no")
    text = errors.format_row(make_row(y=ALLOWED, loss=[1.0, 1.0, 0.25, 0.5, 0.0, 1]))
    assert text.endswith("y 2.67/2.00  loss 1.0e+00 (2.5e-01)  FAILS")


def gelu_case(fn, **changes):
    values = {
        "op": "bias_gelu",
        "shape": "N=8 F=16",
        "make": lambda draw: {"x": draw(8, 16), "bias": draw(16)},
        "fn": fn,
        "ref": bias_gelu_ref,
        "eager": bias_gelu_ref,
        "dtypes": (torch.float32,),
    }
    return ErrorCase(**{**values, **changes})


def by_cases(monkeypatch, *cases):
    monkeypatch.setattr(errors, "cases", lambda *args, **kwargs: list(cases))


def test_measured_errors_are_named_by_input_and_judged(monkeypatch):
    def wrong(x, bias):
        return bias_gelu_ref(x, bias) * 1.001

    def broken(x, bias):
        raise RuntimeError("no kernel")

    by_cases(monkeypatch, gelu_case(bias_gelu), gelu_case(wrong), gelu_case(broken))
    right, off, raised = errors.measure("cpp", "cpu")
    assert list(right.results) == ["y", "dx", "dbias"]
    assert all(
        len(r) == 7 and r[5] == (16 if n == "dbias" else 128) for n, r in right.results.items()
    )
    assert not right.fails
    assert off.fails
    assert off.ratios()["y"][0] > 100
    assert raised.refused == "RuntimeError: no kernel"


def test_each_implementation_is_what_runs(monkeypatch):
    chosen = []

    def spy(x, bias):
        chosen.append(backend.choice)
        return bias_gelu_ref(x, bias)

    by_cases(monkeypatch, gelu_case(spy))
    before = backend.choice
    for implementation in ("cpp", "torch"):
        (row,) = errors.measure(implementation, "cpu")
        assert row.implementation == implementation
    assert chosen == ["cpp", "torch"]
    assert backend.choice == before


def test_every_public_op_is_in_the_ledger():
    apart = {  # no numerical result of their own, or another form of one that is there
        "adamw_step_flat_", "attention_qkvpacked", "cross_entropy_shard",
        "cross_entropy_shard_grad", "draw_key", "gelu_mlp", "keep_freed_memory", "keep_mask",
        "make_key", "quantize_p",
    } | {  # rounded once: their tests know every bit
        "accumulate_", "dequantize_blockwise", "global_norm", "pack_", "quantize_blockwise",
        "sum_shards", "unpack_",
    }  # fmt: skip
    public = {n for n in fastpar.kernels.__all__ if re.match("[a-z]", n)} - apart
    public.add("weight_gradient")  # of linear, where it is kept in fp32
    assert {case.op for case in errors.cases("cpu")} == public
    assert {case.op for case in errors.cases("cpu", quick=True)} == public
    keys = [(case.op, case.shape) for case in errors.cases("cpu")]
    assert len(set(keys)) == len(keys)


def test_quick_ledger_is_complete_and_written(tmp_path, capsys):
    """Every op, dtype and hostile shape in small; judging few elements is the ops' own tests'."""
    out = tmp_path / "ledger.json"
    status = door.main(["errors", "--quick", "--device", "cpu", "--out", str(out)])
    printed = capsys.readouterr().out
    _, rows = load(out, ErrorRow)
    assert status == any(row.fails for row in rows)
    assert {row.op for row in rows} == {case.op for case in errors.cases("cpu")}
    assert all(row.results and not row.refused for row in rows)
    assert f"{len(rows)} rows in " in printed


@pytest.mark.slow
def test_triton_ledger_from_the_command_line(tmp_path):
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="needs triton")
    out = tmp_path / "ledger.json"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-m", "bench", "errors", "bias_gelu", "--quick", "--device", device]
    ran = subprocess.run(
        [*command, "--implementation", "triton", "--out", str(out)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    _, rows = load(out, ErrorRow)
    assert {row.implementation for row in rows} == {"triton"}
    assert {row.dtype for row in rows} >= {"float32", "float16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--commit-results"], "errors: expected full shapes and no --out with"),
        (["--device", "cuda"], "errors: expected a GPU, got device=cuda without one"),
        (
            ["--device", "cuda", "--implementation", "cpp"],
            "errors: expected --implementation triton",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cpp" in arguments)
    assert errors.main(arguments) == 2
    assert message in capsys.readouterr().err
