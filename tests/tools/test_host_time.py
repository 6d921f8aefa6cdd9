"""The bench of host time runs Triton's own launcher over a driver that does nothing."""

import os
import re
import shutil
import subprocess
import sys

import fake_cuda
import pytest

pytest.importorskip("triton", reason="needs triton")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_op_is_measured_and_its_launches_counted():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.compiler.host_time", "--only", "bias_gelu"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    row = run.stdout.splitlines()[-1]
    assert re.match(r"bias_gelu +forward +[\d.]+ +recorded +[\d.]+ +backward +[\d.]+ ", row), row
    assert row.endswith("launches 3")  # forward, backward, the sum of dbias


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import bench.compiler.host_time as host_time
from fake_cuda import SOURCE, FakeCuda
from pathlib import Path
from fastpar.kernels import triton_launch
from fastpar.kernels.backend import triton_module

names = ("attention", "attention_bwd", "layer_norm", "layer_norm_bwd", "gelu", "embedding",
         "cross_entropy")
host_time.FOLDER = Path(sys.argv[2])
with host_time.no_op_driver(SOURCE.read_text()):
    fake = FakeCuda(host_time.FOLDER / "libcuda.so.1")
    again = triton_launch.launch
    compared = []

    def both(kernel, grid, *args, **kwargs):
        before = fake.launches
        fake.expect([])
        compiled = triton_launch._through_triton(kernel, grid, *args, **kwargs)
        if fake.launches == before:
            return  # an empty grid
        fake.expect(triton_launch._parameter_bytes(compiled.asm["ptx"]))
        triton_launch._through_triton(kernel, grid, *args, **kwargs)
        want = fake.last()
        for _ in range(2):  # the first of all opens the driver, the first of each is kept
            again(kernel, grid, *args, **kwargs)
        before = fake.get("direct")
        again(kernel, grid, *args, **kwargs)
        assert fake.get("direct") == before + 1, kernel
        assert fake.last() == want, (kernel, fake.last(), want)
        compared.append(kernel.__name__)

    for name in names:
        triton_module(name).launch = both
    for case in host_time.cases().values():
        host_time.backward_of(case)()
assert len(set(compared)) >= 11, sorted(set(compared))
print(len(compared))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_every_kernel_gets_from_us_what_it_gets_from_triton(tmp_path):
    """The compiled kernels of all ops, their parameters byte for byte, descriptors included."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = os.path.dirname(fake_cuda.__file__)
    command = [sys.executable, "-c", REAL, folder, str(tmp_path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
