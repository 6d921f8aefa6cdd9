"""make cuda-check: what it reads from machine code, what it calls broken, and that it says so."""

import subprocess
from pathlib import Path

import pytest

from bench.compiler import cuda_check, sass
from bench.compiler.sass import Instruction


def row(**changes):
    kernel = sass.Kernel(code("LDG.E.128", "STG.E.128"), 32, 0, 0)
    return {**cuda_check.measure("op", "80", "op_kernel<float>", kernel), **changes}


def code(*opcodes):
    return [Instruction(opcode) for opcode in opcodes]


def test_a_clean_kernel():
    assert cuda_check.judge([row()], {}) == []


@pytest.mark.parametrize(
    ("opcodes", "message"),
    [
        (["LDG.E.128", "STG.E.128", "LDL"], "spills: 1 LDL/STL, 0 bytes"),
        (["LDG.E", "LDG.E", "STG.E.128"], "16-byte loads: 2 narrower ones against 0"),
        (["LDG.E.128", "STG.E.64", "STG.E.64"], "16-byte stores: 2 narrower ones against 0"),
        (["LDG.E.128", "STG.E.128", "RED.E.ADD.F32"], "atomics: 1 sums in no fixed order"),
    ],
)
def test_broken_rules(opcodes, message):
    kernel = sass.Kernel(code(*opcodes), 32, 0, 0)
    (problem,) = cuda_check.judge([cuda_check.measure("op", "90a", "op_kernel", kernel)], {})
    assert problem.startswith(f"op_kernel sm_90a: {message}")


def test_exemptions_are_shown_and_must_be_needed():
    narrow = row(wide_load_bytes=0, wide_loads=0, narrow_loads=1, narrow_load_bytes=4)
    exempt = {"op_*": {"16-byte loads": "reads one number"}, "other": {"spills": "never"}}
    assert cuda_check.judge([narrow], exempt) == [
        "exemption: nothing breaks 'spills' under 'other'; delete it"
    ]
    assert "* `op_kernel<float>`: 16-byte loads: reads one number" in cuda_check.markdown([narrow])


def test_main_path_is_the_loop_with_the_wide_accesses():
    tail = [
        Instruction("LDG.E"),
        Instruction("STG.E"),
        Instruction("BRA", target=0, conditional=True),
    ]
    wide = [
        Instruction("LDG.E.128"),
        Instruction("STG.E.128"),
        Instruction("BRA", target=3, conditional=True),
    ]
    whole = [*tail, *wide, Instruction("EXIT")]
    assert cuda_check.main_path(whole) == wide
    assert cuda_check.main_path(tail) == tail


def test_without_nvcc_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("FASTPAR_CUDA", "0")
    assert cuda_check.main([]) == 0
    assert "skip: no nvcc found" in capsys.readouterr().out


def test_unknown_source(capsys):
    assert cuda_check.main(["gemm"]) == 2
    assert "bucket, " in capsys.readouterr().err


def test_other_kernels_than_the_table_lists(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_check, "TABLE", tmp_path)
    assert "expected bench/results/cuda/table.json, got none" in cuda_check.differences([row()])[0]
    cuda_check.write([row()], "nvcc 1")
    assert cuda_check.differences([row()]) == []
    assert cuda_check.differences([row(kernel="new_kernel")]) == [
        "table: lacks new_kernel sm_80; run `make cuda-check` and commit it",
        "table: still has op_kernel<float> sm_80; run `make cuda-check` and commit it",
    ]


SPILLING = """
__global__ void sum_kernel(const float* x, float* y, int i) {
  float row[64];
  for (int k = 0; k < 64; ++k) row[(k * i) % 64] = x[k];  // indices of run time: no registers
  float sum = 0;
  for (int k = 0; k < 64; ++k) sum += row[k] * row[(k + i) % 64];
  y[threadIdx.x] = sum;
}
"""


def test_a_kernel_that_spills_is_found(monkeypatch, tmp_path):
    nvcc, flags = cuda_check.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc: none found")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bad_cuda.cu").write_text(SPILLING)
    monkeypatch.setattr(cuda_check, "ROOT", tmp_path)
    rows = cuda_check.compile_source(nvcc, flags, "bad", "80")
    assert [r["kernel"].partition("(")[0] for r in rows] == ["sum_kernel"]
    problems = cuda_check.judge(rows, {})
    assert any("spills" in p and "256 bytes of stack" in p for p in problems), problems
    (tmp_path / "csrc" / "bad_cuda.cu").write_text("__global__ void k() { wrong; }")
    with pytest.raises(RuntimeError, match=r"expected bad_cuda.cu to compile for sm_80"):
        cuda_check.compile_source(nvcc, flags, "bad", "80")


def test_nvcc_is_the_one_of_the_build():
    nvcc, flags = cuda_check.find_nvcc()
    assert "--fmad=false" in flags
    if nvcc is not None:
        assert subprocess.run([nvcc, "--version"], capture_output=True).returncode == 0
        assert Path(nvcc).name == "nvcc"
