"""Launching and recording: what is recorded is what Triton's own launcher would compile."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpar.kernels import triton_launch
from fastpar.kernels.triton_launch import launch, record

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + y, mask=at < n)


@triton.jit
def _double_kernel(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]) * 2)


@triton.jit(do_not_specialize=["site", "threshold"])
def _kinds_kernel(
    x_ptr, flags_ptr, bytes_ptr, index_ptr, none_ptr, tile, site, threshold, one, n, stride, big,
    scale, switch, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pass


def kinds(device):
    """Arguments of every kind a kernel of ours takes."""
    x = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    return [
        x[:, 1:],  # not aligned to 16 bytes
        torch.empty(4, dtype=torch.bool, device=device),
        torch.empty(4, dtype=torch.uint8, device=device),
        torch.empty(4, dtype=torch.int64, device=device),
        None,
        TensorDescriptor(x, [64, 64], [64, 1], [16, 32]),
        1,
        16,
        1,
        50257,
        768,
        1 << 40,
        1.0,
        True,
    ]


CONSTANTS = {"CAUSAL": True, "BLOCK": 64, "num_warps": 8, "num_stages": 2}


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_add(x, y, out, **options):
    launch(_add_kernel, (triton.cdiv(x.numel(), 64),), x, y, out, x.numel(), BLOCK=64, **options)


# Launching


def test_launch_runs_the_kernel():
    x, y = torch.randn(2, 1000, device=DEVICE)
    out = torch.full_like(x, float("nan"))
    launch_add(x, y, out, num_warps=4)
    assert torch.equal(out, x + y)


def test_an_empty_grid_launches_nothing():
    launch(_add_kernel, (4, 0), "not an argument", BLOCK=64)  # a launch would raise


def test_a_kernel_that_takes_descriptors_only():
    x = torch.randn(64, 32, device=DEVICE)
    out = torch.full_like(x, float("nan"))
    tiles = [TensorDescriptor(t, [64, 32], [32, 1], [16, 32]) for t in (x, out)]
    launch(_double_kernel, (4,), *tiles, ROWS=16, COLUMNS=32)
    assert torch.equal(out, 2 * x)


def test_device_key_moves_only_when_it_must():
    key = torch.tensor([1, 2])
    assert triton_launch.device_key(key, torch.device("cpu")) is key
    assert triton_launch.device_key(key, torch.device("meta")).is_meta


def test_integer_helpers():
    assert [triton_launch.cdiv(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [triton_launch.next_power_of_2(n) for n in (1, 3, 768, 1024)] == [1, 4, 1024, 1024]


# Recording


def test_record_describes_every_kind_of_argument():
    with record(90) as launches:
        launch(_kinds_kernel, (7, 2), *kinds("meta"), **CONSTANTS)
    (only,) = launches
    assert only.name == "_kinds_kernel"
    assert only.grid == (7, 2)
    assert only.signature == {
        "x_ptr": "*bf16",
        "flags_ptr": "*u1",
        "bytes_ptr": "*u8",
        "index_ptr": "*i64",
        "none_ptr": "constexpr",
        "tile": "tensordesc<bf16[16, 32]>",
        "site": "i32",
        "threshold": "i32",
        "one": "constexpr",
        "n": "i32",
        "stride": "i32",
        "big": "i64",
        "scale": "fp32",
        "switch": "u1",
        "CAUSAL": "constexpr",
        "BLOCK": "constexpr",
    }
    assert only.constants == {"none_ptr": None, "one": 1, "CAUSAL": True, "BLOCK": 64}
    assert only.divisible == ("flags_ptr", "bytes_ptr", "index_ptr", "stride", "big")
    assert only.options == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}


AS_JIT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, triton
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from fastpar.kernels.triton_launch import launch, record
import test_triton_launch as here

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
caught = []

def hook(*, compile, **_):
    options = {k: compile[k] for k in ("num_warps", "num_stages", "enable_fp_fusion")}
    caught.append([compile["signature"], compile["constants"], compile["configs"][0], options])
    return True  # stop here

knobs.runtime.jit_cache_hook = hook
here._kinds_kernel.run(
    *here.kinds("cpu"), grid=(1,), warmup=True, enable_fp_fusion=True, **here.CONSTANTS
)
with record(90) as launches:
    launch(here._kinds_kernel, (1,), *here.kinds("meta"), **here.CONSTANTS)
(only,) = launches
recorded = [only.signature, only.constexprs, only.attrs, only.options]
print(json.dumps({"jit": repr(caught), "recorded": repr([recorded])}))
"""


@pytest.mark.slow
def test_recorded_is_what_the_launcher_compiles():
    """The launcher itself, up to the point where it calls the compiler, which needs no GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", AS_JIT, folder], env=env, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    both = json.loads(run.stdout.splitlines()[-1])
    assert "tt.divisibility" in both["jit"]
    assert both["jit"] == both["recorded"]


AGAIN = """
import json, random, sys
sys.path.insert(0, sys.argv[1])
import torch
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from fastpar.kernels import triton_launch
import test_triton_launch as here

state = SimpleNamespace(device=0, stream=7)
driver.set_active(SimpleNamespace(
    get_current_device=lambda: state.device,
    get_current_stream=lambda device: state.stream + device,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
ran = []

class Compiled:  # says which kernel ran, and with what
    function, packed_metadata = "function", "metadata"
    def run(self, x, y, z, stream, function, metadata, about, enter, leave, *args):
        ran.append((id(self), x, y, z, stream, function, metadata, *args))
    def launch_metadata(self, *args):
        return None

def compile(self, key, signature, device, *rest):
    return self.device_caches[device][0].setdefault(key, Compiled())

JITFunction._do_compile = compile
memory = {kind: torch.empty(64, 64, dtype=kind) for kind in (torch.bfloat16, torch.float32)}
flags = torch.empty(4, dtype=torch.bool)
pointers = [m for m in memory.values()] + [m[:, 1:] for m in memory.values()] + [flags, None]
pointers += [torch.nn.Parameter(memory[torch.float32])]
tiles = [
    TensorDescriptor(m, [64, 64], [64, 1], [rows, 32]) for m in memory.values() for rows in (16, 32)
]
numbers = [0, 1, 2, 8, 16, 17, 1 << 31, 1 << 40, -1, -16, True, False, None, 1.0, 2.0, 0.5, 16.0]
draw = random.Random(1)
hits = slow = 0
for _ in range(6000):
    args = [draw.choice(pointers) for _ in range(5)] + [draw.choice(tiles)]
    args += [draw.choice(numbers) if draw.random() < 0.2 else 16 for _ in range(8)]
    if draw.random() < 0.6:  # most calls repeat
        args[:6], state.device = [memory[torch.float32]] * 5 + [tiles[0]], 0
    else:
        state.device = draw.randrange(2)
    grid = draw.choice([(3,), (3, 2), (3, 2, 5)])
    state.stream = draw.randrange(100)
    options = {"CAUSAL": draw.choice([True, False]), "BLOCK": draw.choice([32, 64])}
    options |= {"num_warps": draw.choice([4, 8]), "enable_fp_fusion": True}
    before = len(triton_launch._known)
    ran.clear()
    triton_launch.launch(here._kinds_kernel, grid, *args, **options)
    hits += len(triton_launch._known) == before
    here._kinds_kernel[grid](*args, **options)
    mine, jit = ran
    assert len(mine) == len(jit), (mine, jit)
    assert all(a is b or (type(a) is type(b) and a == b) for a, b in zip(mine, jit)), (mine, jit)
assert hits > 500, hits  # or nothing was shown

seen = []
knobs.runtime.launch_enter_hook = lambda about: seen.append(about)  # a profiler's
original, Compiled.run = Compiled.run, lambda self, *a: seen.append(a[7])
before = len(triton_launch._known)
triton_launch.launch(here._kinds_kernel, grid, *args, **options)
assert seen and seen[0] is knobs.runtime.launch_enter_hook, seen
print(hits, before)
"""


@pytest.mark.slow
def test_a_launch_again_is_what_triton_would_launch():
    """Which compiled kernel, arguments, grid and stream: those of Triton's own launch, in calls of
    random types, alignments, integers, constants, devices and streams; hooks are called."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", AGAIN, folder], env=env, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr


def test_fp_fusion_can_be_refused():
    with record(80) as launches:
        launch_add(meta(64), meta(64), meta(64), enable_fp_fusion=False)
    assert launches[0].options == {"enable_fp_fusion": False}


def test_an_option_that_triton_does_not_know():
    with record(80), pytest.raises(KeyError, match="num_warp was specified but unrecognised"):
        launch_add(meta(64), meta(64), meta(64), num_warp=4)


def test_nothing_runs_while_recording():
    out = torch.full((64,), 7.0)
    with record(80) as launches:
        launch_add(torch.ones(64), torch.ones(64), out)
    assert len(launches) == 1
    assert torch.equal(out, torch.full((64,), 7.0))


def test_the_recorded_gpu_is_the_one_asked_for():
    device = torch.device("cpu")
    outside = triton_launch.gpu_arch(device), triton_launch.sm_count(device)
    assert outside[0] == triton_launch.INTERPRETED_ARCH
    with record(80):
        assert (triton_launch.gpu_arch(device), triton_launch.sm_count(device)) == (80, 108)
        with record(90) as inner:
            assert (triton_launch.gpu_arch(device), triton_launch.sm_count(device)) == (90, 132)
            launch_add(meta(64), meta(64), meta(64))
        assert len(inner) == 1
        assert triton_launch.gpu_arch(device) == 80
    assert (triton_launch.gpu_arch(device), triton_launch.sm_count(device)) == outside


def test_recording_ends_with_an_error_inside():
    with record(80) as outer:
        with pytest.raises(ZeroDivisionError), record(90):
            raise ZeroDivisionError
        launch_add(meta(64), meta(64), meta(64))
    assert len(outer) == 1
    out = torch.full((64,), float("nan"), device=DEVICE)
    launch_add(torch.ones_like(out), torch.ones_like(out), out)
    assert torch.equal(out, torch.full_like(out, 2.0))


def test_other_threads_are_not_recorded():
    out = torch.full((64,), float("nan"), device=DEVICE)
    with record(80) as launches:
        worker = threading.Thread(
            target=launch_add, args=(*torch.ones_like(out).expand(2, 64), out)
        )
        worker.start()
        worker.join()
    assert launches == []
    assert torch.equal(out, torch.full_like(out, 2.0))


def test_record_of_a_gpu_without_configurations():
    expected = r"record: expected arch in \[80, 86, .*\], got arch=75; choose one"
    with pytest.raises(ValueError, match=expected), record(75):
        pass


def test_a_key_on_the_cpu_is_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"expected a key on cuda:0 while a CUDA graph .* cpu"):
        triton_launch.device_key(torch.tensor([1, 2]), gpu)
