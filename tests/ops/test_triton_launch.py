"""Launching and recording: what is recorded is what Triton's own launcher would compile."""

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
        *(torch.empty(4, dtype=d, device=device) for d in (torch.bool, torch.uint8, torch.int64)),
        None,
        TensorDescriptor(x, [64, 64], [64, 1], [16, 32]),
        *(1, 16, 1, 50257, 768, 1 << 40, 1.0, True),
    ]


CONSTANTS = {"CAUSAL": True, "BLOCK": 64, "num_warps": 8, "num_stages": 2}


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_add(x, y, out, **options):
    launch(_add_kernel, (triton.cdiv(x.numel(), 64),), x, y, out, x.numel(), BLOCK=64, **options)


def test_launch_runs_the_kernel():
    x, y = torch.randn(2, 1000, device=DEVICE)
    out = torch.full_like(x, float("nan"))
    launch_add(x, y, out, num_warps=4)
    assert torch.equal(out, x + y)
    launch(_add_kernel, (4, 0), "not an argument", BLOCK=64)  # an empty grid launches nothing
    key = torch.tensor([1, 2])
    assert triton_launch.device_key(key, torch.device("cpu")) is key
    assert triton_launch.device_key(key, torch.device("meta")).is_meta
    assert [triton_launch.cdiv(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [triton_launch.next_power_of_2(n) for n in (1, 3, 768, 1024)] == [1, 4, 1024, 1024]


def test_a_kernel_that_takes_descriptors_only():
    x = torch.randn(64, 32, device=DEVICE)
    out = torch.full_like(x, float("nan"))
    tiles = [TensorDescriptor(t, [64, 32], [32, 1], [16, 32]) for t in (x, out)]
    launch(_double_kernel, (4,), *tiles, ROWS=16, COLUMNS=32)
    assert torch.equal(out, 2 * x)


SCRIPT = """
import sys
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
sys.path.insert(0, sys.argv[1])
import test_triton_launch as here

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
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
with here.record(90) as launches:
    here.launch(here._kinds_kernel, (7, 2), *here.kinds("meta"), **here.CONSTANTS)
(only,) = launches
assert (only.name, only.grid) == ("_kinds_kernel", (7, 2))
assert only.divisible == ("flags_ptr", "bytes_ptr", "index_ptr", "stride", "big")
assert only.constants == {"none_ptr": None, "one": 1, "CAUSAL": True, "BLOCK": 64}
recorded = repr([[only.signature, only.constexprs, only.attrs, only.options]])
assert repr(caught) == recorded and "tt.divisibility" in recorded, (caught, recorded)
"""


@pytest.mark.slow
def test_what_is_recorded_is_what_the_launcher_compiles():
    """Up to the point where Triton calls its compiler."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, os.path.dirname(__file__)], env=env, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_which_gpu_a_kernel_is_for(monkeypatch):
    """The recorded one; one without a number is the current one."""

    def of(device):
        return triton_launch.gpu_arch(device), triton_launch.sm_count(device)

    cpu = torch.device("cpu")
    outside = of(cpu)
    assert outside[0] == triton_launch.INTERPRETED_ARCH
    with record(80):
        assert of(cpu) == (80, 108)
        with record(90) as inner:
            assert of(cpu) == (90, 132)
            launch_add(meta(64), meta(64), meta(64))
        assert len(inner) == 1
        assert of(cpu) == (80, 108)
    assert of(cpu) == outside
    known = {0: (80, 108), 1: (90, 132)}
    monkeypatch.setattr(triton_launch, "_properties", lambda device: known[device.index])
    for current, expected in known.items():
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert of(torch.device("cuda")) == expected
    assert of(torch.device("cuda", 0)) == known[0]


def test_recording_runs_nothing_and_is_of_its_thread_until_its_end():
    out = torch.full((64,), 7.0, device=DEVICE)
    ones = torch.ones_like(out)
    with record(80) as outer:
        with pytest.raises(ZeroDivisionError), record(90):
            raise ZeroDivisionError
        launch_add(ones, ones, out, enable_fp_fusion=False)
        assert torch.equal(out, torch.full_like(out, 7.0))
        worker = threading.Thread(target=launch_add, args=(ones, ones, out))
        worker.start()
        worker.join()
    assert torch.equal(out, 2 * ones)
    assert [only.options for only in outer] == [{"enable_fp_fusion": False}]
    launch_add(out, ones, out)
    assert torch.equal(out, 3 * ones)


def test_what_is_refused(monkeypatch):
    with record(80), pytest.raises(KeyError, match="num_warp was specified but unrecognised"):
        launch_add(meta(64), meta(64), meta(64), num_warp=4)
    words = r"record: expected arch in \[80, 86, .*\], got arch=75; choose one"
    with pytest.raises(ValueError, match=words), record(75):
        pass
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"expected a key on cuda:0 while a CUDA graph .* cpu"):
        triton_launch.device_key(torch.tensor([1, 2]), torch.device("cuda", 0))
