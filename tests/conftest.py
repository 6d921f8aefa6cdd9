"""Every test starts from the same seeds and thread count; a missing GPU is a visible skip."""

import contextlib
import random

import numpy as np
import pytest
import torch

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
