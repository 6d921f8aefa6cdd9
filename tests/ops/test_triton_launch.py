"""Launching and recording: what is recorded is what Triton's own launcher would compile."""

import os
import shutil
import subprocess
import sys
import threading

import fake_cuda
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpar.kernels import _C, triton_launch
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


@gluon.jit
def _gluon_kernel(a, b, c, d, e, f, n):  # of its arguments no one is a tensor
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
import random, struct, sys
sys.path[:0] = sys.argv[1:3]
import pytest, torch
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor
from fake_cuda import FakeCuda
from fastpar.kernels import _C, triton_launch
from fastpar.kernels.triton_launch import Boxed
import test_triton_launch as here

fake = FakeCuda.build(sys.argv[3])
state = SimpleNamespace(device=0, stream=7)
driver.set_active(SimpleNamespace(
    get_current_device=lambda: state.device,
    get_current_stream=lambda device: state.stream + device,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))

# What is recorded is what the launcher compiles, up to the point where it calls the compiler.
caught = []

def hook(*, compile, **_):
    options = {k: compile[k] for k in ("num_warps", "num_stages", "enable_fp_fusion")}
    caught.append([compile["signature"], compile["constants"], compile["configs"][0], options])
    return True  # stop here

knobs.runtime.jit_cache_hook = hook
here._kinds_kernel.run(
    *here.kinds("cpu"), grid=(1,), warmup=True, enable_fp_fusion=True, **here.CONSTANTS
)
knobs.runtime.jit_cache_hook = None
with triton_launch.record(90) as launches:
    triton_launch.launch(here._kinds_kernel, (7, 2), *here.kinds("meta"), **here.CONSTANTS)
(only,) = launches
assert (only.name, only.grid) == ("_kinds_kernel", (7, 2))
assert only.divisible == ("flags_ptr", "bytes_ptr", "index_ptr", "stride", "big")
assert only.constants == {"none_ptr": None, "one": 1, "CAUSAL": True, "BLOCK": 64}
recorded = repr([[only.signature, only.constexprs, only.attrs, only.options]])
assert repr(caught) == recorded and "tt.divisibility" in recorded, (caught, recorded)

# A launch again is what Triton would launch.
ran = []
POINTER = ".u64 .ptr .global .align 1 p", 8  # in PTX, in bytes
PARAMETERS = {  # by what a kind starts with
    "*": [POINTER], "constexpr": [], "u1": [(".u8 p", 1)], "i32": [(".u32 p", 4)],
    "i64": [(".u64 p", 8)], "fp32": [(".f32 p", 4)],
    "tensordesc": [(".align 64 .b8 p[128]", 128), *[(".u32 p", 4)] * 2, *[(".u64 p", 8)] * 2],
}
META = {"swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [16, 32], "fp4_padded": False}

class Compiled:  # says which kernel ran, and with what
    packed_metadata = ()
    launch_metadata = lambda *_: None

    def __init__(self, signature, constexprs, options):
        self.src = SimpleNamespace(signature=signature)
        self.function = id(self)
        tiles = sum(kind.startswith("tensordesc") for kind in signature.values())
        self.metadata = SimpleNamespace(
            num_warps=options.num_warps, shared=self.function % 1000, num_ctas=1,
            tensordesc_meta=[META] * tiles or None,
        )
        found = [p for kind in signature.values() for start, some in PARAMETERS.items()
                 if kind.startswith(start) for p in some] + [POINTER] * 2
        self.sizes = [size for _, size in found]
        text = ",".join("\\n.param " + kind for kind, _ in found + [POINTER] * MORE)
        self.asm = {"ptx": f".visible .entry k({text}\\n)"}

    def run(self, x, y, z, stream, function, metadata, about, enter, leave, *args):
        # the bytes that the kernel would get
        packed, kinds = b"", list(self.src.signature.values())
        for kind, value in zip(kinds, args):
            if kind.startswith("*"):
                packed += struct.pack("Q", value.data_ptr())
            elif kind.startswith("tensordesc"):
                n, size = value.base.dtype, value.base.element_size()
                numbers = [{torch.bfloat16: 9, torch.float32: 7}[n], 2, 0, 3, 2, 0]
                box = struct.pack("II", *META["block_size"][::-1]) + bytes([1, 1])
                where = struct.pack("QQQQ", value.base.data_ptr(), *value.shape[::-1],
                                    value.strides[0] * size)
                packed += (struct.pack("6i", *numbers) + where + box).ljust(128, bytes(1))
                packed += struct.pack("=iiqq", *value.shape, *value.strides)
            elif kind != "constexpr":
                packed += struct.pack({"u1": "?", "i32": "i", "i64": "q", "fp32": "f"}[kind], value)
        about = self.metadata
        shape = (x, y, z, 32 * about.num_warps, 1, 1, about.shared)
        ran.append((function, stream, shape, packed + bytes(16), self.sizes))

MORE = 0

def compile(self, key, signature, device, constexprs, options, *rest):
    return self.device_caches[device][0].setdefault(
        key, Compiled(signature, constexprs, options)
    )

JITFunction._do_compile = compile
memory = {kind: torch.empty(512, 512, dtype=kind) for kind in (torch.bfloat16, torch.float32)}
flags = torch.empty(4, dtype=torch.bool)
pointers = [m for m in memory.values()] + [m[:, 1:] for m in memory.values()] + [flags, None]
pointers += [torch.nn.Parameter(memory[torch.float32])]
small = torch.empty(64, 64, dtype=torch.bfloat16)

def boxed(m):
    layout = TensorDescriptor(torch.empty(0, dtype=m.dtype, device="meta"), [*m.shape],
                              [*m.stride()], [16, 32])
    return Boxed(m, layout)

tiles = [boxed(m) for m in (*memory.values(), memory[torch.float32][64:], small)]
numbers = [0, 1, 2, 8, 16, 17, 1 << 31, 1 << 40, -1, -16, True, False, None, 1.0, 2.0, 0.5, 16.0]
draw = random.Random(1)

def plain(args):
    return [a.descriptor() if type(a) is Boxed else a for a in args]

def call():
    args = [draw.choice(pointers) for _ in range(5)] + [draw.choice(tiles)]
    args += [draw.choice(numbers) if draw.random() < 0.2 else 16 for _ in range(8)]
    if draw.random() < 0.6:  # most calls repeat
        args[:6], state.device = [memory[torch.float32]] * 5 + [draw.choice(tiles[:3])], 0
    else:
        state.device = draw.randrange(2)
    fake.set("context", 1 + state.device)
    state.stream = draw.randrange(100)
    options = {"CAUSAL": draw.choice([True, False]), "BLOCK": draw.choice([32, 64])}
    options |= {"num_warps": draw.choice([4, 8]), "enable_fp_fusion": True}
    return draw.choice([(3,), (3, 2), (3, 2, 5)]), args, options

hits = slow = 0
for _ in range(3000):
    grid, args, options = call()
    ran.clear()
    here._kinds_kernel[grid](*plain(args), **options)
    *want, sizes = ran.pop()
    fake.expect(sizes)
    before = fake.launches
    triton_launch.launch(here._kinds_kernel, grid, *args, **options)
    if fake.launches > before:
        assert not ran
        assert list(fake.last()) == want, (fake.last(), want, args, options)
        hits += 1
        assert args[5].base is not small  # Triton mends descriptors of little memory
    else:
        assert ran.pop()[:4] == tuple(want)
        slow += 1
assert hits > 300 and slow > 300, (hits, slow)  # or nothing was shown

def again(last=16, **changes):  # a call that was launched before
    args = [memory[torch.float32]] * 5 + [tiles[0]] + [16] * 7 + [last]
    options = {"CAUSAL": True, "BLOCK": 64, "num_warps": 4, "enable_fp_fusion": True} | changes
    before = fake.launches
    ran.clear()
    triton_launch.launch(here._kinds_kernel, (3,), *args, **options)
    return fake.launches - before, len(ran)

fake.set("context", 1)
state.device = 0
again()
fake.expect([])
assert again() == (1, 0)
calls = []
for owner, name, value in (  # the first is a profiler's
    (knobs.runtime, "launch_enter_hook", print), (knobs.runtime, "debug", True),
    (here._kinds_kernel, "pre_run_hooks", [lambda *args, **kwargs: calls.append(0)]),
):
    before = getattr(owner, name)
    setattr(owner, name, value)
    assert again() == (0, 1)
    setattr(owner, name, before)
    assert again() == (1, 0)
assert calls == [0]
fake.set("context", 0)  # a thread without one
assert again() == (0, 1)
fake.set("context", 1)
with triton_launch.record(90) as recorded:
    assert again() == (0, 0) and len(recorded) == 1
assert again() == (1, 0)
MORE = 1  # a Triton whose kernels take one parameter more
assert again(BLOCK=128) == again(BLOCK=128) == again(BLOCK=128) == (0, 1)
MORE = 0
for result, words in ((700, "a kernel with error 700 .CUDA_ERROR_OF_A_TEST"),
                      (2, "a descriptor with error 2")):
    fake.set("result", result)
    with pytest.raises(RuntimeError, match="launch: the driver refused " + words):
        again()
fake.set("result", 0)
assert again() == (1, 0)
with pytest.raises(TypeError, match="launch: expected a kernel and a grid"):
    triton_launch.launch(here._kinds_kernel, 3)
gluon_tile = GluonDescriptor(
    torch.empty(0, dtype=torch.bfloat16, device="meta"), [512, 512], [512, 1], [16, 32],
    gl.NVMMASharedLayout.get_default_for([16, 32], gl.bfloat16),
)
args = [*[Boxed(memory[torch.bfloat16], gluon_tile)] * 6, 20]
ran.clear()
here._gluon_kernel[(3,)](*plain(args), num_warps=4, enable_fp_fusion=True)
*want, sizes = ran.pop()
fake.expect(sizes)
for direct in (0, 1, 1):
    before = fake.get("direct")
    triton_launch.launch(here._gluon_kernel, (3,), *args, num_warps=4)
    assert fake.get("direct") - before == direct
assert list(fake.last()) == want
before = _C.known_launches()
for n in range(9000):  # integers that never repeat do not fill the memory
    again(last=n + 100)
assert before < _C.known_launches() <= 8192
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(_C is None, reason="without the compiled module all goes through Triton")
def test_a_launch_again_is_what_triton_would_launch(tmp_path):
    """Function, grid, threads, stream and every byte of the parameters: those of Triton's own
    launch, in calls of random types, alignments, integers, constants, devices and streams. What is
    unusual goes through Triton; the driver's errors are raised. What is recorded is what the
    launcher compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [os.path.dirname(__file__), os.path.dirname(fake_cuda.__file__), str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders], env=env, capture_output=True, text=True,
        timeout=200,
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
