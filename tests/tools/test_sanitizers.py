"""The compiled ops under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

tests/support/sanitize_driver.cpp calls them without Python. ThreadSanitizer does not see how
libgomp orders its threads, so there the loops run on a small OpenMP runtime of our own,
tests/support/sanitize_openmp.cpp.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX = os.environ.get("CXX", "c++")
# Arithmetic as setup.py compiles it.
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp"),
]
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def compile_and_link(folder, kind, sources):
    flags = SANITIZERS[kind]

    def compile_one(source):
        built = folder / f"{source.stem}.o"
        command = [CXX, *FLAGS, *flags, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(built)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = str(folder / "driver")
    # Without -fopenmp where our own runtime stands for libgomp.
    openmp = ["-fopenmp"] if kind == "memory" else []
    command = [CXX, *flags, *openmp, "-pthread", *objects, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module", params=list(SANITIZERS))
def driver(request, tmp_path_factory):
    """(kind, program)"""
    kind = request.param
    if shutil.which(CXX) is None:
        pytest.skip(f"needs a C++ compiler: there is no {CXX} here")
    folder = tmp_path_factory.mktemp(kind)
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    probe = [CXX, *SANITIZERS[kind], str(empty), "-o", str(folder / "empty")]
    if subprocess.run(probe, capture_output=True).returncode or run(folder / "empty").returncode:
        pytest.skip(f"{CXX} has no runtime for {' '.join(SANITIZERS[kind])} that works here")
    # Not called by the driver and slow to compile: attention, matrix products.
    left_out = ("attention_cpu.cpp", "gemm_cpu.cpp")
    sources = [p for p in sorted((ROOT / "csrc").glob("*_cpu.cpp")) if p.name not in left_out]
    sources.append(ROOT / "csrc" / "simd.cpp")
    sources.append(ROOT / "tests/support/sanitize_driver.cpp")
    if kind == "threads":
        sources.append(ROOT / "tests/support/sanitize_openmp.cpp")
    return kind, compile_and_link(folder, kind, sources)


def run(program, *args):
    env = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([program, *args], env=env, capture_output=True, text=True, timeout=900)


def test_ops_and_collectives_leave_no_report(driver):
    kind, program = driver
    done = run(program, *["threads"] * (kind == "threads"))
    assert done.returncode == 0, (done.stderr + done.stdout)[:4000]
    assert "baseline: done" in done.stdout
    assert "shm: done" in done.stdout
    assert "Sanitizer" not in done.stderr


def test_a_wrong_call_is_reported(driver):
    """The driver would see what it looks for."""
    kind, program = driver
    wrong = {
        "memory": {"overflow": "heap-buffer-overflow", "undefined": "signed integer overflow"},
        "threads": {"race": "data race", "loop race": "data race"},
    }
    for how, report in wrong[kind].items():
        done = run(program, how)
        assert done.returncode != 0, how
        assert report in done.stderr, how
