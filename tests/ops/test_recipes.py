"""Calls on CUDA tensors that csrc/torch/recipes.cpp repeats: they do what Python's calls do."""

import shutil
from pathlib import Path

import fake_cuda
import pytest

from fastpar.kernels import _C

pytest.importorskip("triton", reason="needs triton")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(_C is None, reason="without the compiled module there are no recipes")
def test_a_recipe_does_what_python_does(tmp_path):
    """Every case of these ops, forward and backward, with other memory, on another stream:
    function, grid, threads, shared memory and every byte of the parameters are those of Python's
    call, up to where new memory lies; so are the results. Which calls stay in Python, and why.
    Arguments in one memory, numbers, devices, threads, hooks of a profiler, trials of the doctor;
    the driver's errors are raised with the op's name."""
    driver = Path(fake_cuda.__file__).with_name("recipe_driver.py")
    print(fake_cuda.run(driver, tmp_path))
