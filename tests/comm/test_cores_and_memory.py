"""Cores and memory of this machine."""

import os
import subprocess
import sys

from fastpar.comm.ranks import available_cores, threads_per_rank


def test_threads_share_the_cores():
    assert 1 <= available_cores() <= os.cpu_count()
    assert threads_per_rank(3, 100) == 3
    assert threads_per_rank(None, 1) == available_cores()
    assert threads_per_rank(None, 10_000) == 1


HOLD = """
import mmap
from fastpar.comm.host import memory_mb

before, _ = memory_mb()
with mmap.mmap(-1, 64_000_000) as held:  # new pages, whatever the heap has kept
    held.write(b"x" * 64_000_000)
    now, peak = memory_mb()
assert 50 < now - before < 80, (before, now)
assert peak >= now - 1
"""


def test_memory_grows_with_what_is_held():
    """In a process of its own: threads that other tests have left take memory too."""
    done = subprocess.run([sys.executable, "-c", HOLD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
