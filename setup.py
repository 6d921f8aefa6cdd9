"""Builds fastpar.kernels._C from csrc/ with ninja. Everything else is in pyproject.toml.

C++ sources are compiled always, CUDA sources (csrc/*_cuda.cu) for the architectures named here when
nvcc is found and torch was built with CUDA. No torch header is used, so the module binds to no
torch version. `python setup.py -q describe_build` says what a build would compile, and how long.

Beside it stands a library for the torch that is installed, _torch<major>_<minor>, from csrc/torch/:
the ops as torch's dispatcher and autograd have them. torch's C++ interface changes with each minor
version, so kernels/__init__.py loads the one of its torch and no other. FASTPAR_TORCHES=<folders of
torch, with : between> builds one for each of them instead, as .ci/wheels does.

FASTPAR_CPP=0 installs without the module, so without a compiler: torch computes everything.
FASTPAR_CUDA=0 builds without nvcc, =1 with it whatever torch was built with. =emulated builds what
the tests of the CUDA kernels run on a CPU: the same sources, compiled as C++ (csrc/cuda_launch.h).
FASTPAR_CUDA_ARCHS="90a" builds for one GPU alone: half of the time.
"""

import contextlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ARCHS = os.environ.get("FASTPAR_CUDA_ARCHS") or "80 90a 90+PTX"  # +PTX: for later ones, too
CUDA_ARCHS = [
    f"-gencode=arch=compute_{a.removesuffix('+PTX')},code={'compute' if 'PTX' in a else 'sm'}_"
    f"{a.removesuffix('+PTX')}"
    for a in ARCHS.split()
]


# --fmad=false: the device rounds each operation as the host does (-ffp-contract=off there).
NVCC_FLAGS = "-std=c++17 -O3 --fmad=false"


# Seconds of one core, measured.
CORE_SECONDS = {"C++": 180, "CUDA": 80}
# What stands in the module's place where it was left out on request; kernels/__init__.py reads it.
STAND_IN = (
    '"""Installed with FASTPAR_CPP=0, without the compiled module: torch computes everything."""\n'
)
BUILDS = {"bdist_egg", "bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


def without_cpp() -> bool:
    """Whether the module is to be left out."""
    value = os.environ.get("FASTPAR_CPP", "")
    if value not in ("", "0", "1"):
        sys.exit(f"setup.py: expected 0 or 1, got FASTPAR_CPP={value}; 0 leaves C++ out")
    return value == "0"


def check_compiler() -> None:
    """Ends the build with one line, instead of ninja's, where there is no C++ compiler."""
    cxx = os.environ.get("CXX", "c++")
    if shutil.which((shlex.split(cxx) or [""])[0]) is None:
        sys.exit(
            f"setup.py: expected a C++ compiler, got no {cxx}; install g++ or set CXX, or set "
            "FASTPAR_CPP=0 to install without the compiled module: torch then computes everything"
        )


def torch_folders() -> list[Path]:
    """The folders of FASTPAR_TORCHES, or of the torch that is installed; it is not imported: that
    takes seconds. pip's isolated builds hide it, but run the Python of its environment."""
    asked = os.environ.get("FASTPAR_TORCHES")
    if asked:
        folders = [Path(each) for each in asked.split(os.pathsep)]
        for folder in folders:
            if not (folder / "version.py").exists():
                sys.exit(
                    f"setup.py: expected folders of torch in FASTPAR_TORCHES, got {folder}, which "
                    "has no version.py; name site-packages/torch of an environment"
                )
        return folders
    found = importlib.util.find_spec("torch")
    origins = [Path(found.origin).parent] if found and found.origin else []
    hidden = [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    return [each for each in (*origins, *hidden) if (each / "version.py").exists()][:1]


def torch_version(folder: Path) -> tuple[str, bool]:
    """(version, whether it has CUDA)."""
    names = runpy.run_path(str(folder / "version.py"))
    return names["__version__"], names.get("cuda") is not None


def choose_cuda() -> tuple[str | None, str]:
    """(path of nvcc, "") where CUDA sources are compiled, else (None, why they are not)."""
    asked = os.environ.get("FASTPAR_CUDA", "")
    if asked not in ("", "0", "1", "emulated"):
        sys.exit(f"setup.py: expected 0, 1 or emulated, got FASTPAR_CUDA={asked}; correct it")
    nvcc, torches = find_nvcc(), [torch_version(folder) for folder in torch_folders()]
    if asked in ("0", "emulated"):
        return None, f"FASTPAR_CUDA={asked} when it was built"
    if nvcc is None and asked == "1":
        sys.exit(
            "setup.py: expected nvcc with FASTPAR_CUDA=1, got none; put it on the PATH or set "
            "CUDA_HOME to the toolkit's folder"
        )
    if nvcc is None:
        return None, "no nvcc when it was built"
    if torches and not any(cuda for _, cuda in torches) and asked != "1":
        return None, f"torch {torches[0][0]} when it was built, which has no CUDA"
    return nvcc, ""


def describe() -> str:
    """What a build compiles, and about how long that takes from scratch."""
    if without_cpp():
        return "nothing to compile: FASTPAR_CPP=0, torch computes everything"
    nvcc, why = choose_cuda()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = int(os.environ.get("MAX_JOBS") or cores or 1)
    seconds = (CORE_SECONDS["C++"] + (CORE_SECONDS["CUDA"] if nvcc else 0)) / jobs
    spent = f"{seconds / 60:.0f} minutes" if seconds >= 90 else "a minute"
    archs = ", ".join(re.findall(r"code=(sm_\w+)", " ".join(CUDA_ARCHS)))
    what = (
        f"C++ and CUDA for {archs}"
        if nvcc
        else f"C++ only ({why.replace(' when it was built', '')})"
    )
    return f"compiling {what}: about {spent} on {jobs} core{'s' * (jobs != 1)}"


def say(line: str) -> None:
    """Prints a line, also on the terminal where pip keeps what a build prints to itself."""
    print(line, flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(f"\n{line}", file=terminal)


def find_nvcc(root: Path = Path("/")) -> str | None:
    """Path of nvcc, or None: CUDA_HOME's, else that on the PATH, else of the newest toolkit in the
    folders that NVIDIA's installers, distributions and conda use."""
    if os.environ.get("FASTPAR_CUDA") in ("0", "emulated"):
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    versions = (root / "usr" / "local").glob("cuda-*")
    newest = sorted(versions, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])[::-1]
    usual = [root / "usr/local/cuda", *newest, root / "opt/cuda", root / "usr/lib/cuda"]
    folders = [Path(sys.prefix), *usual]
    return shutil.which("nvcc") or shutil.which(
        "nvcc", path=os.pathsep.join(f"{f}/bin" for f in folders)
    )


def quote(path: str | Path) -> str:
    """A path as a word of a ninja command."""
    return shlex.quote(str(path)).replace("$", "$$")


def escape(path: str | Path) -> str:
    """A path as a ninja input or output."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def name_of(module: Path, nvcc: bool) -> str:
    """The linker's option for the name of a shared library."""
    if sys.platform == "darwin":
        return f"-Wl,-install_name,@rpath/{module.name}"
    return f"{'-Xlinker ' if nvcc else '-Wl,'}-soname={module.name}"


def torch_library(torch: Path, out: Path, module: Path, work: Path, flags: str) -> list[str]:
    """ninja's lines for the library beside the module, whose kernels it calls."""
    # One unit: most of its time goes into torch's headers.
    parts = sorted((ROOT.resolve() / "csrc" / "torch").glob("*.cpp"))
    unit, name = work / "torch_ops.cpp", out.name.split(".")[0]
    text = "".join(f'#include "{part}"\n' for part in parts)
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
    include = f"-isystem {quote(torch / 'include')} -isystem " + quote(
        torch / "include" / "torch" / "csrc" / "api" / "include"
    )
    flags = flags.replace("c++17", "c++20").replace("-O3", "-O2")  # torch's headers ask for C++20
    here = "@loader_path" if sys.platform == "darwin" else "\\$$ORIGIN"
    libraries = f"-L{quote(torch / 'lib')} -ltorch -ltorch_cpu -lc10"
    return [
        f"rule {name}_cxx\n  command = $cxx -MMD -MF $out.d {flags} {include} -c $in -o $out\n"
        "  depfile = $out.d\n  deps = gcc",
        f"rule {name}_link\n  command = $cxx -shared $in {libraries} -Wl,-rpath,{here} -o $out",
        f"build {name}.o: {name}_cxx torch_ops.cpp",
        f"build {escape(out)}: {name}_link {name}.o {escape(module)}",
    ]


class NinjaBuild(build_ext):
    """Hands the compile and link commands to ninja: parallel, incremental by depfile."""

    def build_extension(self, ext: Extension) -> None:
        if ext is not self.extensions[0]:
            return  # all are built with the first
        import ninja
        import pybind11

        say(f"fastpar: {describe()}")
        emulated = os.environ.get("FASTPAR_CUDA") == "emulated"
        nvcc, why = choose_cuda()
        with_cuda = bool(nvcc or emulated)
        out = (ROOT / self.get_ext_fullpath(ext.name)).resolve()
        # One folder for every build of a checkout: an unchanged source is compiled once, for the
        # installed module and for the one with emulated CUDA kernels.
        work = ROOT.resolve() / "build" / "ninja"
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
            # nvcc knows where its own libraries are. The module's name is what the library for
            # torch finds it by, in this process.
            f"rule link\n  command = {quote(nvcc) + ' -Xcompiler' if nvcc else '$cxx'} "
            f"{openmp or '-O3'} -shared $in {name_of(out, bool(nvcc))} -o $out",
        ]
        if nvcc:
            lines.append(
                f"rule nvcc\n  command = {quote(nvcc)} -MMD -MF $out.d {NVCC_FLAGS} "
                f"-Xcompiler -fPIC,-fvisibility=hidden --threads 2 {' '.join(CUDA_ARCHS)} "
                "-c $in -o $out\n  depfile = $out.d\n  deps = gcc"
            )
        emulation = (  # compiled in each test run of a fresh clone: -O1 takes half the time
            "-O1 -DFASTPAR_EMULATED -Wno-unknown-pragmas "
            f"-I{quote(ROOT.resolve() / 'tests' / 'support')} -x c++"
        )
        for library, torch in zip(self.extensions[1:], torch_folders()):
            path = (ROOT / self.get_ext_fullpath(library.name)).resolve()
            lines += torch_library(torch, path, out, work, flags)
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
                if stem == "bindings":
                    more += " " + quote(f'-DFASTPAR_WITHOUT_CUDA="{why}"')
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


class Modules(build_py):
    """Leaves the stand-in where the compiled module is left out, and takes it away elsewhere."""

    def run(self) -> None:
        super().run()
        editable = getattr(self, "editable_mode", False)
        folder = ROOT / "kernels" if editable else Path(self.build_lib) / "fastpar" / "kernels"
        stand_in = folder / "_C.py"
        if without_cpp():
            for name in ("_C", "_torch*"):
                for old in folder.glob(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"):
                    old.unlink()  # it would be found first
            stand_in.write_text(STAND_IN)
        else:
            stand_in.unlink(missing_ok=True)


class DescribeBuild(Command):
    """Prints what a build would compile."""

    description = "say what a build compiles, and about how long it takes"
    user_options: ClassVar[list] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        print(describe())


if BUILDS & set(sys.argv) and not without_cpp():
    check_compiler()  # here: from inside a command the line would stand below pages of others'
sources = sorted(
    str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.c*") if p.suffix in (".cpp", ".cu")
)
headers = sorted(
    str(p.relative_to(ROOT))
    for p in (*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc").glob("torch/*"))
)
modules = [Extension("fastpar.kernels._C", sources=sources, depends=headers)]
for folder in torch_folders() if os.environ.get("FASTPAR_CUDA") != "emulated" else ():
    minor = "_".join(torch_version(folder)[0].split(".")[:2])
    modules.append(Extension(f"fastpar.kernels._torch{minor}", sources=[], depends=headers))
setup(
    license="Apache-2.0",
    ext_modules=[] if without_cpp() else modules,
    cmdclass={"build_ext": NinjaBuild, "build_py": Modules, "describe_build": DescribeBuild},
)
