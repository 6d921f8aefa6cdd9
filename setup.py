"""Builds fastpar.kernels._C from csrc/ with ninja. Everything else is in pyproject.toml.

C++ sources are compiled always. CUDA sources (csrc/*_cuda.cu) are compiled when nvcc is found, for
the architectures named here; without nvcc the module is built for the CPU alone and says so at run
time (`python -m fastpar.kernels.backend`). No torch header is used, so the module binds to no torch
version.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CUDA_ARCHS = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_90,code=compute_90",  # PTX for later architectures
)


def find_nvcc() -> str | None:
    """Path of nvcc, or None. FASTPAR_CUDA=0 builds without it even when it is there."""
    if os.environ.get("FASTPAR_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home) / "bin") if home else None)


def quote(path: str | Path) -> str:
    """A path as a word of a ninja command."""
    return shlex.quote(str(path)).replace("$", "$$")


def escape(path: str | Path) -> str:
    """A path as a ninja input or output."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class NinjaBuild(build_ext):
    """Hands the compile and link commands to ninja: parallel, incremental by depfile."""

    def build_extension(self, ext: Extension) -> None:
        import ninja
        import pybind11

        cuda = [s for s in ext.sources if s.endswith(".cu")]
        nvcc = find_nvcc() if cuda else None
        out = (ROOT / self.get_ext_fullpath(ext.name)).resolve()
        work = (Path(self.build_temp) / "ninja").resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        include = " ".join(
            f"-isystem {quote(path)}"
            for path in (pybind11.get_include(), sysconfig.get_path("include"))
        )
        # -ffp-contract=off: a sum is fused into an FMA only where the source says std::fma, so that
        # every instruction set, vector width and loop tail gives the same bits. -fno-math-errno and
        # -fno-trapping-math let sqrt and selects be vectorized; they change no result.
        flags = (
            "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno "
            "-fno-trapping-math -Wall -Wextra"
        )
        openmp = "-fopenmp" if sys.platform != "darwin" else ""
        lines = [
            f"cxx = {os.environ.get('CXX', 'c++')}",
            f"flags = {flags} {openmp} {include} -DFASTPAR_CUDA={int(nvcc is not None)}",
            "rule cxx\n  command = $cxx -MMD -MF $out.d $flags -c $in -o $out\n"
            "  depfile = $out.d\n  deps = gcc",
            f"rule link\n  command = $cxx -shared {openmp} $in -o $out $libs",
        ]
        if nvcc:
            lines.append(
                f"rule nvcc\n  command = {quote(nvcc)} -MMD -MF $out.d -std=c++17 -O3 "
                f"-Xcompiler -fPIC -Xptxas -v --threads 2 {' '.join(CUDA_ARCHS)} -c $in -o $out\n"
                "  depfile = $out.d\n  deps = gcc"
            )
        objects = []
        for source in ext.sources:
            rule = "nvcc" if source.endswith(".cu") else "cxx"
            if rule == "nvcc" and not nvcc:
                continue
            obj = f"{Path(source).stem}.{rule}.o"
            objects.append(obj)
            lines.append(f"build {obj}: {rule} {escape(ROOT.resolve() / source)}")
        lines.append(f"build {escape(out)}: link {' '.join(objects)}")
        if nvcc:
            lib = Path(nvcc).resolve().parent.parent / "lib64"
            lines.append(f"  libs = -L{quote(lib)} -lcudart_static -ldl -lrt")
        (work / "build.ninja").write_text("\n".join(lines) + "\n")
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work)]
        if os.environ.get("MAX_JOBS"):
            command += ["-j", os.environ["MAX_JOBS"]]
        subprocess.run(command, check=True)


sources = sorted(
    str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.c*") if p.suffix in (".cpp", ".cu")
)
headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.h"))
setup(
    ext_modules=[Extension("fastpar.kernels._C", sources=sources, depends=headers)],
    cmdclass={"build_ext": NinjaBuild},
)
