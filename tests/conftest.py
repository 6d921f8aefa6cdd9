"""Every test starts from the same seeds and thread count; a missing GPU is a visible skip."""

import contextlib
import os
import random

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
def triton_device(monkeypatch) -> str:
    """Ops run their Triton kernels: on a GPU where there is one, else on CPU tensors in Triton's
    interpreter (where bf16 matrix products are wrong: use fp16 and fp32 for kernels with tl.dot).
    """
    pytest.importorskip("triton", reason="needs triton")
    from fastpar.kernels import backend

    monkeypatch.setattr(backend, "choice", "triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
