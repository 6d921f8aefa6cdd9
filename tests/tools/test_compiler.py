"""make aot, make cuda-check: machine code is read right, and every rule can be broken."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from bench.compiler import aot, aot_table, cuda_check, sass
from bench.compiler.aot_rules import GPUS, judge
from bench.compiler.sass import Instruction
from fastpar.kernels.triton_launch import launch

# A loop from .L_x_1 whose wait for a barrier was moved behind the kernel's end (.L_x_3), a shorter
# one behind it, the trap at the end, and a comment with an address that is no instruction.
LISTING = """\
        .section        .text._kernel,"ax",@progbits
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R2, desc[UR8][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*0040*/              @!P0 BRA `(.L_x_3) ;
.L_x_4:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/              @!P1 LDG.E.128.CONSTANT R8, desc[UR8][R2.64+0x10] ;
        /*0070*/                   STL [R1], R8 ;
        /*0080*/                   BRA.U UP0, `(.L_x_1) ;
.L_x_2:
        /*0090*/                   STG.E.U16 desc[UR8][R4.64], R8 ;
        /*00a0*/                   STG.E desc[UR8][R4.64], R8 ;
        /*00b0*/               @P2 BRA `(.L_x_2) ;
        /*00c0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR8][R4.64], R8 ;
        /*00d0*/                   EXIT ;
.L_x_3:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*00f0*/              @!P0 BRA `(.L_x_3) ;
        /*0100*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*0110*/                   BRA `(.L_x_5);
"""


def test_instructions_and_loops_of_a_listing():
    """Loops are natural ones: not the jump back from the wait at 14 into the middle of the loop,
    nor the trap at 17."""
    code = sass.parse(LISTING)
    assert len(code) == 18
    assert [i.target for i in code if i.name == "BRA"] == [9, 14, 3, 9, 14, 5, 17]
    assert [i.conditional for i in code if i.name == "BRA"] == [True] * 5 + [False] * 2
    assert sass.accesses(code, code) == {
        **{"wide_loads": 1, "wide_load_bytes": 16, "narrow_loads": 1, "narrow_load_bytes": 8},
        **{"wide_stores": 0, "wide_store_bytes": 0, "narrow_stores": 2, "narrow_store_bytes": 6},
    }
    assert (sass.count(code, "LDL", "STL"), sass.float_atomics(code)) == (1, 1)
    assert sass.loops(code) == [[3, 4, 5, 6, 7, 8, 14, 15, 16], [9, 10, 11], [14, 15]]
    assert [i.name for i in sass.main_loop(code)].count("HGMMA") == 1
    assert len(sass.main_loop(code)) == 9


def test_what_happens_while_a_product_is_in_flight():
    """R24 to R55 are the sums of the first group, R60 to R63 a part of the second's input."""
    lines = """\
FMUL R24, R1, R2 ;
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
MUFU.EX2 R1, R2 ;
HGMMA.64x8x16.F32.BF16 R64, R60, gdesc[UR8].tnspB, R64, gsb0 ;
F2FP.BF16.F32.PACK_AB R55, R3, R2 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
FMUL R24, R24, R2 ;
@P0 LDS.128 R57, [R60] ;
MUFU.EX2 R64, R2 ;
STS.128 [R4], R60 ;
WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
MUFU.EX2 R60, R2 ;""".splitlines()
    code = sass.parse("".join(f"        /*{i:04x}*/  {line}\n" for i, line in enumerate(lines)))
    assert len(code) == len(lines)
    assert sass.in_flight(code, "MUFU") == (2, 3)


@pytest.mark.parametrize(
    ("arch", "registers", "shared_bytes", "warps", "ctas"),
    [
        (90, 32, 0, 4, 16),  # the warps: 64 of them
        (90, 16, 0, 1, 32),  # the CTAs
        (90, 167, 0, 4, 3),  # registers: 168 a thread, 3 warps on each scheduler
        (90, 255, 0, 16, 0),
        (90, 32, 73 * 1024, 4, 3),  # shared memory
        (80, 32, 82 * 1024, 4, 1),
        (90, 64, 0, 12, 2),
    ],
)
def test_ctas_on_a_multiprocessor(arch, registers, shared_bytes, warps, ctas):
    assert GPUS[arch].ctas_per_sm(registers, shared_bytes, warps) == ctas


# Rules

GOOD = {
    **dict.fromkeys(aot_table.COUNTS, 0),
    **{"module": "toy", "kernel": "_toy_kernel", "calls": ["fwd bf16", "fwd fp16"]},
    **{"config": "BLOCK=64 w4 s2", "types": "bf16", "arch": 90, "launch": "0123456789"},
    **{"triton": "3.9.0", "grid": [4, 65535], "kind": "memory", "dots": [], "registers": 64},
    **{"shared_bytes": 1024, "warps": 4, "ctas_per_sm": 8, "instructions": 100, "warnings": []},
    **{"loop_instructions": 40, "tile_loads": 1, "tile_stores": 1, "wide_loads": 2},
    **{"narrow_loads": 2, "wide_load_bytes": 32, "narrow_load_bytes": 8, "wide_stores": 1},
    **{"wide_store_bytes": 16, "mufu": 3},
}
MATRIX = {**GOOD, "kind": "matrix", "dots": ["bf16"], "hgmma": 4, "waits": 2, "groups": 2}
NARROW = {"narrow_load_bytes": 64, "narrow_loads": 16}
AMPERE = {"arch": 80, "hgmma": 0}
RULES = [  # the rule that breaks; "": none does
    ("", GOOD, {}),
    ("", MATRIX, {}),
    ("", MATRIX, {**AMPERE, "hmma": 8}),
    ("", MATRIX, {"dots": ["f32"], "hgmma": 0}),  # exact products
    ("", MATRIX, {"dots": ["f8E5M2"], "e4m3_products": 4}),
    ("", GOOD, {"tile_loads": 0, "wide_load_bytes": 0}),  # reads a key and writes tiles
    ("", GOOD, {"tile_stores": 0, "wide_store_bytes": 0}),  # reads tiles and writes a loss
    ("spills", GOOD, {"spill_instructions": 2, "stack_bytes": 8}),
    ("spills", MATRIX, {"stack_bytes": 8}),
    ("shared memory", GOOD, {"shared_bytes": 232448 + 1}),
    ("shared memory", GOOD, {"arch": 80, "shared_bytes": 166912 + 1}),
    ("resident", MATRIX, {"ctas_per_sm": 0}),
    ("grid", GOOD, {"grid": [1, 65536]}),
    ("atomics", GOOD, {"float_atomics": 1}),
    ("products in flight", MATRIX, {"product_writes": 1}),
    ("pipelined products", MATRIX, {"warnings": ["C7513"]}),
    ("waits for products", MATRIX, {"waits": 4}),
    ("tensor cores", MATRIX, {"hgmma": 0, "hmma": 8}),  # Ampere's instruction on Hopper
    ("tensor cores", MATRIX, AMPERE),
    ("8-bit products", MATRIX, {"dots": ["f8E4M3FN"]}),
    ("16-byte loads", GOOD, {"narrow_load_bytes": 32}),
    ("16-byte loads", GOOD, {"wide_load_bytes": 0, "wide_loads": 0}),
    ("16-byte stores", GOOD, {"narrow_store_bytes": 16, "narrow_stores": 2}),
]


def rules_broken(row, exempt=None):
    return [b.rule for b in judge(dict(row), exempt or {})[0]]


@pytest.mark.parametrize(("rule", "row", "change"), RULES)
def test_each_rule_can_be_broken(rule, row, change):
    assert rules_broken({**row, **change}) == [rule] * bool(rule)


def test_an_exemption_is_for_its_calls_and_its_rule():
    row, why = {**GOOD, **NARROW}, {"16-byte loads": "rows of odd length"}
    for pattern, reasons, broken in (
        ("_toy_kernel *", why, []),
        ("_toy_kernel fwd bf16", why, ["16-byte loads"]),  # not fp16
        ("_other_kernel *", why, ["16-byte loads"]),
        ("_toy_kernel *", {"spills": "?"}, ["16-byte loads"]),
    ):
        assert rules_broken(row, {pattern: reasons}) == broken
    judge(row, {"_toy_kernel *": why})
    assert row["exempt"] == why


# make aot


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * n + at * stride, mask=at < n)
    tl.store(y_ptr + row * n + at, x * 2, mask=at < n)


@triton.jit
def _sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        total += tl.load(x_ptr + first + tl.arange(0, BLOCK))
    tl.atomic_add(y_ptr, tl.sum(total, 0))


@triton.jit
def _wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), undefined_name)  # noqa: F821


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def copy(rows=4, stride=1, **options):
    x, y = meta(rows, 1024 * stride), meta(rows, 1024)
    launch(_copy_kernel, (rows,), x, y, 1024, stride, BLOCK=1024, num_warps=4, **options)


def total():
    launch(_sum_kernel, (1,), meta(4096), meta(1, dtype=torch.float32), 4096, BLOCK=1024)


REAL = {
    "copy": (copy, []),
    "strided": (lambda: copy(stride=2), ["16-byte loads"]),
    "total": (total, ["atomics"]),
    "wrong": (lambda: launch(_wrong_kernel, (1,), meta(64), BLOCK=64), ["compiles"]),
}


def compile_real():
    """For the test below, in a process without the interpreter."""
    jobs = aot.distinct(aot.collect([(name, call) for name, (call, _) in REAL.items()]))
    print(json.dumps(aot.compile_all(jobs, 2)))


@pytest.mark.slow
def test_real_kernels_are_judged(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    code = "import sys; sys.path[:0] = ['tests/tools', 'tests/support']; import test_compiler as t"
    command = [sys.executable, "-c", f"{code}; t.compile_real()"]
    run = subprocess.run(command, cwd=aot.ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows) == 2 * len(REAL)
    for row in rows:
        assert rules_broken({**row, "triton": triton.__version__}) == REAL[row["calls"][0]][1]


def test_alignment_tells_launches_apart_and_a_call_must_launch():
    def shifted():
        x = meta(4, 1032)
        launch(_copy_kernel, (4,), x[:, 1:], x, 1024, 1, BLOCK=1024, num_warps=4)

    jobs = aot.distinct(aot.collect([("aligned", copy), ("shifted", shifted)]))
    assert [j.calls for j in jobs if j.arch == 80] == [["aligned"], ["shifted"]]
    with pytest.raises(ValueError, match="collect: expected a launch, got none from call=empty"):
        aot.collect([("empty", lambda: copy(rows=0))])


def test_the_committed_table_covers_every_module():
    committed = aot_table.load(aot.TABLE)
    assert aot.MINIMUM in committed["triton"]
    assert len(committed["triton"]) == 2
    for version in committed["triton"]:
        rows = [row for row in committed["rows"] if row["triton"] == version]
        for arch in GPUS:
            wanted = {name for name in aot.modules() if arch in aot.archs(aot.imported(name))}
            assert {row["module"] for row in rows if row["arch"] == arch} == wanted
    for row in committed["rows"]:
        assert set(rules_broken(row)) <= set(row["exempt"]), row


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """main() with a table of its own and rows that no compiler made."""
    (tmp_path / "triton-3.6" / "triton").mkdir(parents=True)
    monkeypatch.setattr(aot, "TABLE", tmp_path / "table")
    monkeypatch.setattr(aot, "MINIMUM_FOLDER", tmp_path / "triton-3.6")
    monkeypatch.setattr(aot, "modules", lambda: ["toy"])
    given = {"rows": [GOOD], "exempt": {}}

    def run_version(folder, names, processes):
        version = "3.6.0" if folder else "3.9.0"
        rows = [{**row, "triton": version} for row in given["rows"]]
        return {"triton": version, "rows": rows, "exempt": {"toy": given["exempt"]}, "errors": []}

    monkeypatch.setattr(aot, "run_version", run_version)
    return given


def test_the_command_writes_the_table_and_fails_for_what_is_broken(fake, capsys):
    spilled = {"spill_instructions": 265, "stack_bytes": 8}
    exempt = {"_toy_kernel *": {"spills": "measured: faster than without"}}
    for argv, row, exempted, status, said in (
        (["--check"], {}, {}, 1, "got path=table.json (FileNotFoundError)"),
        ([], {}, {}, 0, "0 broken rules"),
        (["--check"], {}, {}, 0, "0 broken rules"),
        (["--check"], {"launch": "other"}, {}, 1, "broken: toy: table: lacks 1 launches"),
        ([], spilled, {}, 1, "spills: 265 LDL/STL, 0 of them in the main loop; 8 bytes"),
        ([], spilled, exempt, 0, "0 broken rules"),
        ([], {}, exempt, 1, "nothing breaks 'spills'"),
    ):
        fake["rows"], fake["exempt"] = [{**GOOD, **row}], exempted
        assert aot.main(argv) == status
        assert said in capsys.readouterr().out
    for argv, said in (
        (["nothing"], "aot: expected one of toy, got module=nothing; choose one"),
        (["toy", "--check"], "aot: expected all modules and versions with --check, got modules="),
    ):
        assert aot.main(argv) == 2
        assert said in capsys.readouterr().err


# make cuda-check


def cuda_row(*opcodes, **changes):
    kernel = sass.Kernel([Instruction(opcode) for opcode in opcodes], 32, 0, 0)
    return {**cuda_check.measure("op", "80", "op_kernel<float>", kernel), **changes}


CLEAN = ("LDG.E.128", "STG.E.128")


@pytest.mark.parametrize(
    ("opcodes", "message"),
    [
        (CLEAN, None),
        ((*CLEAN, "LDL"), "spills: 1 LDL/STL, 0 bytes"),
        (("LDG.E", "LDG.E", "STG.E.128"), "16-byte loads: 2 narrower ones against 0"),
        (("LDG.E.128", "STG.E.64", "STG.E.64"), "16-byte stores: 2 narrower ones against 0"),
        ((*CLEAN, "RED.E.ADD.F32"), "atomics: 1 floating-point atomics: sums in no fixed order"),
    ],
)
def test_rules_of_cuda_kernels(opcodes, message):
    problems = cuda_check.judge([cuda_row(*opcodes)], {})
    assert [p.partition("sm_80: ")[2].startswith(message or "") for p in problems] == (
        [True] if message else []
    )


def test_exemptions_and_tables_of_cuda_kernels(monkeypatch, tmp_path, capsys):
    narrow = cuda_row("LDG.E", "STG.E.128")
    exempt = {"op_*": {"16-byte loads": "reads one number"}, "other": {"spills": "never"}}
    assert cuda_check.judge([narrow], exempt) == [
        "exemption: nothing breaks 'spills' under 'other'; delete it"
    ]
    assert "* `op_kernel<float>`: 16-byte loads: reads one number" in cuda_check.markdown([narrow])
    row = cuda_row(*CLEAN)
    monkeypatch.setattr(cuda_check, "TABLE", tmp_path)
    assert "expected bench/results/cuda/table.json, got none" in cuda_check.differences([row])[0]
    cuda_check.write([row], "nvcc 1")
    assert cuda_check.differences([row]) == []
    assert cuda_check.differences([{**row, "kernel": "new_kernel"}]) == [
        "table: lacks new_kernel sm_80; run `make cuda-check` and commit it",
        "table: still has op_kernel<float> sm_80; run `make cuda-check` and commit it",
    ]
    assert cuda_check.main(["gemm"]) == 2
    assert "bucket, " in capsys.readouterr().err
    monkeypatch.setenv("FASTPAR_CUDA", "0")
    assert cuda_check.main([]) == 0
    assert "skip: no nvcc found" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kernel_that_spills_is_found(monkeypatch, tmp_path):
    nvcc, flags = cuda_check.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc: none found")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bad_cuda.cu").write_text(
        "__global__ void sum_kernel(const float* x, float* y, int i) {\n"
        "  float row[64];\n"  # indices of run time: no registers
        "  for (int k = 0; k < 64; ++k) row[(k * i) % 64] = x[k];\n"
        "  float sum = 0;\n"
        "  for (int k = 0; k < 64; ++k) sum += row[k] * row[(k + i) % 64];\n"
        "  y[threadIdx.x] = sum;\n}\n"
    )
    monkeypatch.setattr(cuda_check, "ROOT", tmp_path)
    rows = cuda_check.compile_source(nvcc, flags, "bad", "80")
    problems = cuda_check.judge(rows, {})
    assert any("spills" in p and "256 bytes of stack" in p for p in problems), problems
    (tmp_path / "csrc" / "bad_cuda.cu").write_text("__global__ void k() { wrong; }")
    with pytest.raises(RuntimeError, match=r"expected bad_cuda.cu to compile for sm_80"):
        cuda_check.compile_source(nvcc, flags, "bad", "80")
