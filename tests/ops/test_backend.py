"""The backend report, forced choices, the compiled module's numerics, its packaging guards and
its instruction set."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cells import sweep

from fastpar import kernels
from fastpar.kernels import _C, backend

ROOT = Path(kernels.__file__).parent


def run_python(*args, cwd=None, **env):
    env = {**os.environ, **env}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True)


def report(monkeypatch, *, gpu=True, triton=True, cuda=True, choice="auto"):
    """backend.describe() of another machine: its text, and (op, device) -> what runs and why."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        patch.setattr(torch.cuda, "get_device_name", lambda: "H200")
        patch.setattr(backend, "has_triton", triton)
        patch.setattr(backend, "cuda_kernels", _C if cuda else None)
        patch.setattr(backend, "choice", choice)
        text = backend.describe()
    notes = dict(re.findall(r"^(\[\d+\]) (.*)$", text, re.M))
    runs, op = {}, ""
    for name, device, what, note in re.findall(
        r"^(\w*) +(cpu|cuda) +(.*?)(?: (\[\d+\]))?$", text, re.M
    ):
        op = name or op
        if op in backend.OPS:
            runs[op, device] = what, notes.get(note, "")
    return text, runs


FORCED = "FASTPAR_BACKEND=torch is set; unset it"
NVCC = r"the module is without CUDA \(.*put nvcc on the PATH \(or set CUDA_HOME\)"
BARE = {"triton": False, "cuda": False}
RUNS = [  # machine and choice, op, device, what runs, why
    ({"gpu": False}, "attention", "cpu", "cpp: attention_cpu.cpp", ""),
    ({}, "layer_norm", "cuda", "triton: norm/triton.py", ""),
    ({}, "adamw_step_", "cuda", "cuda: adamw_cuda.cu", ""),
    ({}, "linear", "cuda", "torch", "torch's kernel: "),
    (BARE, "layer_norm", "cuda", "refused", "no triton package; `pip install triton`"),
    (BARE, "adamw_step_", "cuda", "refused", NVCC),
    *(({"choice": "torch"}, op, on, "torch", FORCED) for op in backend.OPS
      for on in ("cpu", "cuda")),
    ({"choice": "cpp"}, "attention", "cuda", "refused", "FASTPAR_BACKEND=cpp is for CPU tensors"),
    ({"choice": "triton"}, "layer_norm", "cpu", "interpreted triton: norm/triton.py", ""),
    ({"choice": "triton"}, "sum_shards", "cpu", "torch", ""),
]  # fmt: skip


def test_the_report_names_only_what_can_run_and_why_not(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for machine, op, device, what, why in RUNS:
        text, runs = report(monkeypatch, **machine)
        assert {name for name, _ in runs} == set(backend.OPS)
        assert runs[op, device][0] == what, (machine, op)
        assert re.match(why, runs[op, device][1]), (machine, op)
        assert f"isa       {_C.isa()}" in text
    text, _ = report(monkeypatch, gpu=False)
    assert "\ncuda      no CUDA tensors here: " in text
    assert not re.search(r"triton: |\.cu\n", text)
    own = {name for name in kernels.__all__ if name[0].islower()} - {
        "draw_key", "keep_mask", "make_key", "quantize_p", "keep_freed_memory", "activation",
        "rope_turns",
    }  # fmt: skip
    assert {name.split("_qkv")[0] for name in own} <= set(backend.OPS)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    _, runs = report(monkeypatch, choice="triton")
    assert runs["layer_norm", "cpu"][0] == "refused"


def test_cuda_kernels_are_chosen_or_missed_with_a_message(monkeypatch):
    x = torch.ones(3)
    assert not backend.use_cuda("adamw_step_", x)
    assert backend.cuda_stream(x) == 0
    monkeypatch.setattr(backend, "cuda_on_cpu", True)  # as if x were a CUDA tensor
    monkeypatch.setattr(backend, "cuda_kernels", _C)
    assert backend.use_cuda("adamw_step_", x)
    monkeypatch.setattr(backend, "choice", "torch")
    assert not backend.use_cuda("adamw_step_", x)
    monkeypatch.setattr(backend, "choice", "auto")
    monkeypatch.setattr(backend, "cuda_kernels", None)
    with pytest.raises(
        RuntimeError, match=r"adamw_step_: expected fastpar.kernels._C with CUDA .* put nvcc on the"
    ):
        backend.use_cuda("adamw_step_", x)


@pytest.mark.parametrize(
    ("hip", "capability", "message"),
    [
        (None, (7, 5), r"expected a GPU of compute capability 8.0 or newer .* got a GPU of 7.5"),
        ("6.4", (9, 4), r"expected an NVIDIA GPU, got a GPU with ROCm 6.4; set FASTPAR_BACKEND="),
    ],
)
def test_a_gpu_without_kernels_is_refused(monkeypatch, hip, capability, message):
    monkeypatch.setattr(backend, "_able_gpus", set())
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "is_real", lambda x: True)
    monkeypatch.setattr(backend, "may_run", lambda op, x: True)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=f"layer_norm: {message}"):
        backend.use_triton("layer_norm", x)
    with pytest.raises(RuntimeError, match=f"adamw_step_: {message}"):
        backend.use_cuda("adamw_step_", x)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert backend.use_triton("layer_norm", x)


def test_the_compiled_module_checks_what_it_writes():
    """A wrong dtype, size or layout would reach memory that is another's."""
    x, y, q = torch.zeros(6, 4), torch.zeros(6, 4), torch.zeros(1, 3, 2, 16)
    of = torch.ops.fastpar
    targets, one = torch.zeros(6, dtype=torch.int64), torch.ones(())
    rows = (4, -100, 0.0, 0.0, 0.0, 1)
    stats, rows_of = torch.zeros(1, 2, 3, 2), torch.zeros(2, 6)
    exp, loss, foreign = _C.exp_array, _C.cross_entropy_rows, "expected what its forward returned"
    for words, call, *args in (
        *((f"y of 24 contiguous elements of float32, got {got}", exp, x, wrong)
          for wrong, got in (
            (y.double(), "24 of float64"), (y.bfloat16(), "24 of bfloat16"),
            (y[:5], "20 of float32"), (y.t(), "24 of float32, strided"),
            (None, "0 of another dtype, strided"),
          )),
        ("expected logits of float32, bfloat16 or float16, got int64", loss,
         x.long(), targets, one, None, torch.zeros(6), *rows),
        (r"Tensor \| None", exp, x.data_ptr(), y),
        ("expected loss of 6 .* float32, got 6 of bfloat16", loss,
         x, targets, one, None, torch.zeros(6).bfloat16(), *rows),
        *(("expected grad of 2 dimensions that fit .* float32", loss,
           x, targets, one, grad, torch.zeros(6), *rows)
          for grad in (y.t(), y[:, :3], y.half(), torch.zeros(6, 8)[:, ::2])),
        (foreign, of.attention_bwd, q, q, q, q, None, stats[:, :1], True, 1.0),
        (foreign, of.attention_bwd, q[:, :2], q, q, q, None, stats, True, 1.0),
        (foreign, of.activation_bwd, y[:5], x, None, 0),
        (foreign, of.activation_bwd, y, x, None, 3),
        (foreign, of.rope_bwd, q, q[:, :2], q, None, None, None, None, False, 1e-6),
        (foreign, of.rope_bwd, q, q, q, q[:, None], None, None, None, True, 1e-6),
        (foreign, of.layer_norm_bwd, y, None, x, x[0], rows_of[:1], x.dtype, None, None, False),
        ("expected dtype code 0, 1 or 2, got code=7", _C.round_array, x, y, 7),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=words):
            call(*args)


def test_one_openmp_library():
    """Two would keep two thread pools that spin against each other."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps: not a Linux system")
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(libraries) == 1, libraries


def test_exp_is_within_rounding(isas):
    x = torch.cat([torch.linspace(-86.5, 88.7, 200_001), torch.linspace(-1, 1, 100_003)])
    ends = torch.tensor([-torch.inf, -1e30, -87.0, 0.0, 88.8, 1e30, torch.inf, torch.nan])
    want = torch.tensor([0, 0, 0, 1, torch.inf, torch.inf, torch.inf, torch.nan])
    for isa in isas():
        y, found = torch.empty_like(x), torch.empty_like(ends)
        _C.exp_array(x, y)
        _C.exp_array(ends, found)
        assert torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0)), isa
        ulp = torch.nextafter(y, torch.full_like(y, torch.inf)).double() - y.double()
        assert ((y.double() - x.double().exp()) / ulp).abs().max() < 1.5, isa


@sweep("dtype", [torch.bfloat16, torch.float16])
def test_storage_types_round_like_torch(isas, dtype):
    bits = torch.randint(-(2**31), 2**31, (400_000,), dtype=torch.int64).to(torch.int32)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = (every[1:] + every[:-1]) / 2  # ties
    edges = torch.tensor([65519.9, 65520.0, 2.0**-25, 2.0**-24 * 1.5, 0.0, -0.0])
    x = torch.cat([bits.view(torch.float32), every, between, edges])
    expected = x.to(dtype).float()
    nan = expected.isnan()
    for isa in isas():
        y = torch.empty_like(x)
        _C.round_array(x, y, backend.DTYPE_CODES[dtype])
        assert torch.equal(y.isnan(), nan), isa
        assert torch.equal(y[~nan].view(torch.int32), expected[~nan].view(torch.int32)), isa


@pytest.mark.slow
def test_freed_memory_stays_mapped():
    """Large buffers stop causing page faults. In a child, because it cannot be undone."""
    code = """
import resource, torch
from fastpar.kernels import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# The allocator's slack around an aligned block makes the first few blocks land apart.
print(kept, *(faults() for _ in range(40)))
"""
    kept, first, *_, last = run_python("-c", code).stdout.split()
    if kept == "False":
        pytest.skip("needs glibc: this C library has no mallopt")
    assert int(first) > 1000
    assert int(last) < 100


def test_the_profiler_sees_ops_with_and_without_gradients():
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    with torch.profiler.profile(record_shapes=True) as profiler:
        kernels.layer_norm(x, weight, None).sum().backward()
        with torch.no_grad():
            kernels.layer_norm(x, weight, None)
    shapes = {event.name: event.input_shapes for event in profiler.events()}
    assert shapes["LayerNormBackward"][0] == [4, 8]
    assert shapes["fastpar::layer_norm"][0] == [4, 8]
    assert shapes["fastpar::layer_norm_bwd"][0] == [4, 8]


@pytest.mark.slow
def test_the_module_as_a_program_and_imports_that_are_refused():
    settings = {"FASTPAR_BACKEND": "torch", "FASTPAR_ISA": "baseline"}
    run = run_python("-m", "fastpar.kernels.backend", **settings)
    assert (run.returncode, run.stderr) == (0, "")
    assert "isa       baseline (FASTPAR_ISA=baseline" in run.stdout
    assert not re.search("gemm_cpu|adamw_cuda", run.stdout)
    probe = """
import sys
def failure(statement):
    try:
        exec(statement)
    except ImportError as error:
        print(type(error).__name__, error)
import kernels; print(hasattr(kernels, "__version__"))
failure("from kernels import attention")
failure("import kernels.activation")
sys.modules["fastpar.kernels._C"] = None
failure("import fastpar.kernels")
"""
    run = run_python("-c", probe, cwd=ROOT.parent)
    assert run.stdout.startswith("False\n"), run.stderr
    for words in (
        "imported as fastpar.kernels, got kernels; run `pip install",
        "ModuleNotFoundError",
        "expected the compiled module _C",
        "pip install -e .",
    ):
        assert words in run.stdout


def test_choices_that_cannot_be(monkeypatch):
    with pytest.raises(ValueError, match="torch, cpp or triton, got FASTPAR_BACKEND=cuda"):
        backend.read_backend("cuda")
    x = torch.ones(3, dtype=torch.float64)
    assert kernels.bias_gelu(x).dtype == torch.float64
    monkeypatch.setattr(backend, "choice", "cpp")
    with pytest.raises(RuntimeError, match=r"bias_gelu: expected a CPU tensor .*=torch.float64"):
        kernels.bias_gelu(x)


def test_the_instruction_set(isas):
    names = [name for name in isas() if _C.isa() == name]
    _C.set_isa("auto")
    assert _C.isa() == names[-1]
    with pytest.raises(ValueError, match="auto, baseline, avx2, avx512 or amx, got isa=sse9"):
        _C.set_isa("sse9")
    for name in {"avx2", "avx512", "amx"} - {*names}:
        with pytest.raises(RuntimeError, match="expected an instruction set of this machine"):
            _C.set_isa(name)
