"""Every test starts from the same seeds and thread count; a missing GPU is a visible skip."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before the first <op>_triton module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ImportError):
    import hypothesis

    # The same examples in every run: a red test stays red until its cause is gone.
    hypothesis.settings.register_profile("fastpar", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("fastpar")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_start():
    """LayerNorm's gradient and long sums change their last bits with the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def triton_device(monkeypatch) -> Iterator[str]:
    """Ops run their Triton kernels: on a GPU where there is one, else on CPU tensors in Triton's
    interpreter, with a GPU's rounding."""
    pytest.importorskip("triton", reason="needs triton")
    from fastpar.kernels import backend
    from fastpar.testing import gpu_arithmetic

    monkeypatch.setattr(backend, "choice", "triton")
    if torch.cuda.is_available():
        yield "cuda"
        return
    with gpu_arithmetic():
        yield "cpu"
