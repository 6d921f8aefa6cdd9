"""The bench of host time runs Triton's own launcher over a driver that does nothing."""

import os
import re
import shutil
import subprocess
import sys

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
