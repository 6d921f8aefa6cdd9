"""A GPU that computes nothing: CUDA tensors in host memory (fake_cuda_device.cpp), a driver that
writes down what it launches (fake_cuda_driver.c), and Triton with compiled kernels that say what
they would launch. For a process of its own, which loads the device first: run().
"""

import ctypes
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

HERE = Path(__file__).parent
_SIZES = {"u1": ("?", ".u8"), "i32": ("i", ".u32"), "i64": ("q", ".u64"), "fp32": ("f", ".f32")}
_TILE_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class Launched(NamedTuple):
    """A launch as the driver gets it."""

    by_triton: int  # 0: by a recipe
    function: int
    stream: int
    shape: tuple[int, ...]  # grid, threads, bytes of shared memory
    parameters: bytes


class Kernel:
    """In place of Triton's compiled kernel: knows its parameters, and says what it would launch."""

    packed_metadata = ()
    by_function: ClassVar[dict[int, "Kernel"]] = {}
    more_parameters = 0  # than kernels of the known versions of Triton take
    driver: Any = None

    def __init__(self, signature: dict[str, str], options: Any) -> None:
        self.src = SimpleNamespace(signature=signature)
        self.pointers: list[int] = []  # where addresses stand in the parameters
        sizes: list[int] = []
        text: list[str] = []
        metas = []
        for kind in signature.values():
            if kind.startswith("*"):
                self.pointers.append(sum(sizes))
                sizes.append(8)
                text.append(".u64 .ptr .global .align 1 p")
            elif kind.startswith("tensordesc"):
                box = [int(n) for n in re.search(r"\[([\d, ]+)\]", kind)[1].split(",")]
                self.pointers.append(sum(sizes) + 24)
                sizes += [128, *[4] * len(box), *[8] * len(box)]
                text += [".align 64 .b8 p[128]", *[".u32 p"] * len(box), *[".u64 p"] * len(box)]
                metas.append({"swizzle": 3, "block_size": box, "fp4_padded": False})
            elif kind != "constexpr":
                sizes.append(struct.calcsize(_SIZES[kind][0]))
                text.append(f"{_SIZES[kind][1]} p")
        text += [".u64 .ptr .global .align 1 p"] * (2 + self.more_parameters)
        self.asm = {
            "ptx": ".visible .entry k({}\n)".format(",".join("\n.param " + t for t in text))
        }
        self.memory = (ctypes.c_uint * (len(sizes) + 3))(len(sizes) + 2, *sizes, 8, 8)
        self.function = ctypes.addressof(self.memory)
        self.by_function[self.function] = self
        self.metadata = SimpleNamespace(
            num_warps=options.num_warps, shared=self.function // 64 % 1000, num_ctas=1,
            tensordesc_meta=metas or None,
        )  # fmt: skip

    def launch_metadata(self, *_: Any) -> None:
        pass

    def run(self, x, y, z, stream, function, metadata, about, enter, leave, *args):
        packed, metas = b"", iter(self.metadata.tensordesc_meta or ())
        for kind, value in zip(self.src.signature.values(), args):
            if kind.startswith("*"):
                packed += struct.pack("Q", value.data_ptr())
            elif kind.startswith("tensordesc"):
                packed += _tile_bytes(value, next(metas)["block_size"])
            elif kind != "constexpr":
                packed += struct.pack(_SIZES[kind][0], value)
        shape = (x, y, z, 32 * self.metadata.num_warps, 1, 1, self.metadata.shared)
        packed += bytes(16)
        long = ctypes.c_long
        self.driver.note(self.memory, long(stream), (ctypes.c_uint * 7)(*shape), packed,
                         long(len(packed)))  # fmt: skip


def _tile_bytes(tile: Any, box: list[int]) -> bytes:
    n, size = len(box), tile.base.element_size()
    numbers = [_TILE_TYPES[tile.base.dtype], n, 0, 3, 2, 0]
    strides = [step * size for step in tile.strides[-2::-1]]
    where = struct.pack(f"Q{2 * n - 1}Q", tile.base.data_ptr(), *tile.shape[::-1], *strides)
    about = struct.pack("6i", *numbers) + where + struct.pack(f"{n}I", *box[::-1]) + b"\1" * n
    return about.ljust(128, b"\0") + struct.pack(f"={n}i{n}q", *tile.shape, *tile.strides)


class FakeCuda:
    """The driver, and the device of the tensors."""

    def __init__(self, folder: str) -> None:
        self.driver = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        device = ctypes.CDLL(f"{folder}/fake_cuda_device.so")
        long = ctypes.c_long
        for name in ("device", "set_device", "stream", "set_stream", "base_of"):
            function = getattr(device, f"fake_{name}")
            function.restype = None if name.startswith("set") else long
            function.argtypes = [] if name == "device" else [long]
            setattr(self, name, function)
        Kernel.driver = self.driver
        torch.cuda._lazy_init = lambda: None  # what torch without CUDA does not have
        torch.cuda.current_device = lambda: self.device()
        torch.cuda.is_current_stream_capturing = lambda: False
        self._fake_triton()

    def to(self, x: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU."""
        return torch.ops.fake_cuda.to(x)

    def _fake_triton(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction

        from fastpar.kernels import backend, triton_launch

        driver.set_active(SimpleNamespace(
            get_current_device=self.device,
            get_current_stream=self.stream,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        ))  # fmt: skip

        def compiled(self, key, signature, device, constexprs, options, *rest):
            return self.device_caches[device][0].setdefault(key, Kernel(signature, options))

        JITFunction._do_compile = compiled
        triton_launch._properties = lambda device: (90, 132)
        backend.check_gpu = lambda *_: None
        backend._allowed = lambda *_: True

    def set(self, name: str, value: int) -> None:
        ctypes.c_long.in_dll(self.driver, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_long.in_dll(self.driver, name).value

    def launched(self) -> list[Launched]:
        """Since the last call of this."""
        used = self.get("used")
        written = ctypes.string_at(
            ctypes.addressof(ctypes.c_char.in_dll(self.driver, "written")), used
        )
        found, at = [], 0
        while at < used:
            by_triton, function, stream, *shape = struct.unpack_from("QQQ7I", written, at)
            end = at + 52 + sum(Kernel.by_function[function].memory[1:])
            found.append(
                Launched(by_triton, function, stream, tuple(shape), written[at + 52 : end])
            )
            at = end
        self.set("used", 0)
        return found


def build(folder: Path) -> None:
    """Compiles driver and device: some ten seconds."""
    root = Path(torch.__file__).parent
    libcuda, device = folder / "libcuda.so.1", folder / "fake_cuda_device.so"
    shared = ["-shared", "-fPIC"]
    subprocess.run(
        ["cc", *shared, "-Wl,-soname,libcuda.so.1", "-o", libcuda, HERE / "fake_cuda_driver.c"],
        check=True,
    )
    include = (root / "include", root / "include/torch/csrc/api/include")
    subprocess.run(
        ["c++", "-std=c++20", "-O1", *shared, *(f"-isystem{path}" for path in include),
        HERE / "fake_cuda_device.cpp", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}",
        "-ltorch", "-ltorch_cpu", "-lc10", "-o", device],
        check=True,
    )  # fmt: skip


def run(program: Path, folder: Path, *args: str, timeout: int = 300) -> str:
    """The output of a Python program that makes FakeCuda(folder), its first argument."""
    if not (folder / "fake_cuda_device.so").exists():
        build(folder)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"LD_PRELOAD": str(folder / "fake_cuda_device.so"), "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *args], env=env, capture_output=True,
        text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
