"""Builds fastpar.kernels._C from csrc/ with ninja. Everything else is in pyproject.toml.

C++ sources are compiled always. CUDA sources (csrc/*_cuda.cu) are compiled when nvcc is found, for
the architectures named here; without nvcc the module is built for the CPU alone and says so at run
time (`python -m fastpar.kernels.backend`). No torch header is used, so the module binds to no torch
version.

FASTPAR_CUDA=0 builds without nvcc even when it is there. FASTPAR_CUDA=emulated builds what the
tests of the CUDA kernels run on a CPU: the same sources, compiled as C++ (csrc/cuda_launch.h).
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


# --fmad=false: the device rounds each operation as the host does (-ffp-contract=off there).
NVCC_FLAGS = "-std=c++17 -O3 --fmad=false"


def find_nvcc() -> str | None:
    """Path of nvcc, or None."""
    if os.environ.get("FASTPAR_CUDA") in ("0", "emulated"):
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

        emulated = os.environ.get("FASTPAR_CUDA") == "emulated"
        nvcc = find_nvcc()
        with_cuda = bool(nvcc or emulated)
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
            f"flags = {flags} {openmp} {include}",
            "rule cxx\n  command = $cxx -MMD -MF $out.d $flags $more -c $in -o $out\n"
            "  depfile = $out.d\n  deps = gcc",
            # nvcc knows where its own libraries are.
            f"rule link\n  command = {quote(nvcc) + ' -Xcompiler' if nvcc else '$cxx'} "
            f"{openmp or '-O3'} -shared $in -o $out",
        ]
        if nvcc:
            lines.append(
                f"rule nvcc\n  command = {quote(nvcc)} -MMD -MF $out.d {NVCC_FLAGS} "
                f"-Xcompiler -fPIC,-fvisibility=hidden --threads 2 {' '.join(CUDA_ARCHS)} "
                "-c $in -o $out\n  depfile = $out.d\n  deps = gcc"
            )
        emulation = (  # compiled in each test run of a fresh clone: -O1 takes half the time
            "-O1 -DFASTPAR_EMULATED -Wno-unknown-pragmas "
            f"-I{quote(ROOT.resolve() / 'tests')} -x c++"
        )
        objects = []
        for source in ext.sources:
            stem, is_cuda = Path(source).stem, source.endswith(".cu")
            if is_cuda and not with_cuda:
                continue
            rule, more, name = "cxx", "", "cxx"
            if is_cuda:
                rule, more, name = (
                    ("cxx", emulation, "emulated") if emulated else ("nvcc", "", "nvcc")
                )
            elif stem.startswith("bindings"):
                more = f"-DFASTPAR_CUDA={int(with_cuda)}{' -O1' * emulated}"
                name = f"{'emulated' if emulated else 'cuda'}{int(with_cuda)}"
            obj = f"{stem}.{name}.o"
            objects.append(obj)
            lines.append(f"build {obj}: {rule} {escape(ROOT.resolve() / source)}")
            if more:
                lines.append(f"  more = {more}")
        lines.append(f"build {escape(out)}: link {' '.join(objects)}")
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
