"""make aot: kernels are compiled and judged, the committed table is whole, the command says so."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
from test_aot_rules import GOOD, rules_broken

from bench.compiler import aot, aot_table
from bench.compiler.aot_rules import GPUS
from fastpar.kernels.triton_launch import Launch, launch

# Kernels


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
def _product_kernel(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        a = tl.load(a_ptr + row[:, None] * n + first + column[None, :])
        b = tl.load(b_ptr + (first + column)[:, None] * BLOCK + column[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    c_at = c_ptr + row[:, None] * BLOCK + column[None, :]
    tl.store(c_at, total.to(c_ptr.dtype.element_ty))


@triton.jit
def _wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), undefined_name)  # noqa: F821


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def copy(rows=4, stride=1, dtype=torch.bfloat16):
    x, y = meta(rows, 1024 * stride, dtype=dtype), meta(rows, 1024, dtype=dtype)
    launch(_copy_kernel, (rows,), x, y, 1024, stride, BLOCK=1024, num_warps=4)


def product(dtype=torch.bfloat16, block=64, **options):
    a, b, c = (meta(*shape, dtype=dtype) for shape in ((256, 512), (512, block), (256, block)))
    launch(_product_kernel, (256 // block,), a, b, c, 512, BLOCK=block, **options)


def total():
    launch(_sum_kernel, (1,), meta(4096), meta(1, dtype=torch.float32), 4096, BLOCK=1024)


REAL = {
    "copy": copy,
    "strided": lambda: copy(stride=2),
    "product": product,
    "product fp32": lambda: product(torch.float32, 32),
    "product spilled": lambda: product(torch.float32, 32, maxnreg=24),
    "total": total,
    "wrong": lambda: launch(_wrong_kernel, (1,), meta(64), BLOCK=64),
}


def compile_real():
    """For the test below, in a process without the interpreter."""
    jobs = aot.distinct(aot.collect(list(REAL.items())))
    rows = aot.compile_all(jobs, 2)
    print(json.dumps(rows))


@pytest.fixture(scope="module")
def real_rows(tmp_path_factory):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    code = "import sys; sys.path.insert(0, 'tests/tools'); import test_aot; test_aot.compile_real()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=aot.ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    return {(row["calls"][0], row["arch"]): {**row, "triton": triton.__version__} for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("call", "broken"),
    [
        ("copy", []),
        ("strided", ["16-byte loads"]),
        ("product", []),
        ("product fp32", []),
        ("product spilled", ["spills"]),
        ("total", ["atomics"]),
        ("wrong", ["compiles"]),
    ],
)
def test_real_kernels_are_judged(real_rows, call, arch, broken):
    assert rules_broken(real_rows[call, arch]) == broken


WGMMA = """\
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out) {
  .reg .f32 %f<4>;
  .reg .u64 %a, %b, %o;
  mov.u64 %a, 1;
  mov.u64 %b, 2;
  mov.f32 %f0, 0f00000000;
  mov.f32 %f1, %f0;
  mov.f32 %f2, %f0;
  mov.f32 %f3, %f0;
  wgmma.fence.sync.aligned;
  PRODUCT
  BETWEEN
  PRODUCT
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  ld.param.u64 %o, [out];
  st.global.v4.f32 [%o], {%f0, %f1, %f2, %f3};
  ret;
}
""".replace(
    "PRODUCT",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%f0, %f1, %f2, %f3}, %a, %b, 1, 1, 1, 0, 0;",
)


def test_what_the_assembler_says_of_serialized_products():
    """Sums that are changed between two products of one group, and those that are not."""
    assert aot.warnings(WGMMA.replace("BETWEEN", ""), 90, {"num_warps": 4}) == []
    changed = WGMMA.replace("BETWEEN", "mul.f32 %f1, %f1, %f0;")
    assert "C7517" in aot.warnings(changed, 90, {"num_warps": 4})


# Collecting and compiling


def test_alignment_tells_launches_apart():
    def shifted():
        x = meta(4, 1032)
        launch(_copy_kernel, (4,), x[:, 1:], x, 1024, 1, BLOCK=1024, num_warps=4)

    jobs = aot.distinct(aot.collect([("aligned", copy), ("shifted", shifted)]))
    assert [j.calls for j in jobs if j.arch == 80] == [["aligned"], ["shifted"]]


def test_a_call_that_launches_nothing():
    expected = "collect: expected a launch, got none from call=empty; give it tensors that"
    with pytest.raises(ValueError, match=expected):
        aot.collect([("empty", lambda: copy(rows=0))])


def job(name):
    def kernel():
        pass

    kernel.__name__ = name
    return aot.Job(90, Launch(kernel, (1,), {"x": "*bf16"}, {}, {}, {}), ["call"])


def test_a_compiler_that_dies_hangs_or_raises_fails_alone(monkeypatch):
    def compile_one(job):
        if job.launch.name == "dies":
            os.abort()
        if job.launch.name == "hangs":
            time.sleep(60)
        if job.launch.name == "raises":
            raise RuntimeError("PassManager::run failed")
        return {**job.row(), "registers": 10}

    monkeypatch.setattr(aot, "compile_one", compile_one)
    monkeypatch.setattr(aot, "LIMIT_S", 3.0)
    names = ["works", "dies", "hangs", "raises", "works too"]
    rows = aot.compile_all([job(name) for name in names], 2)
    assert {row["kernel"]: row.get("error") for row in rows} == {
        "works": None,
        "works too": None,
        "dies": "the compiler ended with exit code -6",
        "hangs": "the compiler took more than 3 s",
        "raises": "RuntimeError: PassManager::run failed",
    }


# The table


@pytest.fixture(scope="module")
def committed():
    return aot_table.load(aot.TABLE)


def test_the_committed_table_covers_every_module(committed):
    assert aot.MINIMUM in committed["triton"]
    assert len(committed["triton"]) == 2
    for version in committed["triton"]:
        rows = [row for row in committed["rows"] if row["triton"] == version]
        for arch in GPUS:
            wanted = {name for name in aot.modules() if arch in aot.archs(aot.imported(name))}
            assert {row["module"] for row in rows if row["arch"] == arch} == wanted
    for row in committed["rows"]:
        assert set(rules_broken(row)) <= set(row["exempt"]), row


# The command


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """main() with a table of its own and rows that no compiler made."""
    (tmp_path / "triton-3.6" / "triton").mkdir(parents=True)
    monkeypatch.setattr(aot, "TABLE", tmp_path / "table")
    monkeypatch.setattr(aot, "MINIMUM_FOLDER", tmp_path / "triton-3.6")
    monkeypatch.setattr(aot, "modules", lambda: ["toy"])
    given = {"rows": [GOOD], "exempt": {}, "errors": []}

    def run_version(folder, names, processes, *more):
        version = "3.6.0" if folder else "3.9.0"
        rows = [{**row, "triton": version} for row in given["rows"]]
        exempt = {"toy": given["exempt"]}
        return {"triton": version, "rows": rows, "exempt": exempt, "errors": given["errors"]}

    monkeypatch.setattr(aot, "run_version", run_version)
    return given


def test_the_command_writes_and_checks_the_table(fake, capsys):
    assert aot.main(["--check"]) == 1  # there is none yet
    assert "got path=table.json (FileNotFoundError)" in capsys.readouterr().out
    assert aot.main([]) == 0
    assert aot.main(["--check"]) == 0
    fake["rows"] = [{**GOOD, "launch": "other"}]
    assert aot.main(["--check"]) == 1
    assert "broken: toy: table: lacks 1 launches" in capsys.readouterr().out


def test_the_command_fails_for_a_broken_rule(fake, capsys):
    fake["rows"] = [{**GOOD, "stack_bytes": 8}]
    assert aot.main([]) == 1
    assert "spills: 0 LDL/STL, 0 of them in the main loop; 8 bytes" in capsys.readouterr().out
    fake["exempt"] = {"_toy_kernel *": {"spills": "measured: faster than without"}}
    assert aot.main([]) == 0
    fake["rows"] = [GOOD]
    assert aot.main([]) == 1
    assert "nothing breaks 'spills'" in capsys.readouterr().out


def test_other_gpus_name_every_spill(fake, capsys):
    """An exemption was measured on the table's GPUs; it says nothing about another."""
    aot.TABLE.mkdir()
    fake["rows"] = [{**GOOD, "arch": 89, "spill_instructions": 265, "stack_bytes": 240}]
    fake["exempt"] = {"_toy_kernel *": {"spills": "at most 16 bytes"}}
    assert aot.main(["--others"]) == 1
    assert "spills: 265 LDL/STL" in capsys.readouterr().out
    named = (aot.TABLE / "others.md").read_text()
    assert "- toy _toy_kernel (fwd bf16; bf16; BLOCK=64 w4 s2): spills: 265 LDL/STL" in named
    assert "[sm_89 triton 3.9.0]" in named


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "aot: expected one of toy, got module=nothing; choose one"),
        (["toy", "--check"], "aot: expected all modules and versions with --check, got modules="),
        (["--installed", "--check"], r"got modules=[] installed=True others=False; drop one"),
    ],
)
def test_wrong_arguments(fake, capsys, argv, message):
    assert aot.main(argv) == 2
    assert message in capsys.readouterr().err
