"""The library of fake_cuda_driver.c, which records the last launch."""

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda_driver.c")


class FakeCuda:
    """The library, loaded where csrc/bindings_launch.cpp finds it."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.sizes = []

    @classmethod
    def build(cls, folder, more=""):
        path = Path(folder) / "libcuda.so.1"
        text = path.with_suffix(".c")
        text.write_text(f'#include "{SOURCE}"\n{more}\n')
        options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, "-o", str(path), str(text)], check=True)
        return cls(path)

    def set(self, name, value):
        ctypes.c_long.in_dll(self.library, name).value = value

    def expect(self, sizes):
        """Bytes of each parameter of the next launches."""
        self.sizes = list(sizes)
        (ctypes.c_uint * 128).in_dll(self.library, "sizes")[: len(sizes)] = sizes
        ctypes.c_uint.in_dll(self.library, "count").value = len(sizes)

    def get(self, name):
        return ctypes.c_long.in_dll(self.library, name).value

    @property
    def launches(self):
        return self.get("launches")

    def last(self):
        """(function, stream, grid and threads and shared memory, bytes of the parameters)"""
        function, stream = self.get("function"), self.get("stream")
        shape = tuple((ctypes.c_uint * 7).in_dll(self.library, "shape"))
        memory = (ctypes.c_ubyte * (1 << 14)).in_dll(self.library, "parameters")
        return function, stream, shape, bytes(memory[: sum(self.sizes)])
