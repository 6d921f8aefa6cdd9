import gc
from collections import Counter
from typing import Any

import pytest
import torch

from fastpar.axes.step import Setup, Workload
from fastpar.predict.measure import Chain, Clock, fitted
from fastpar.predict.memory import alive_bytes
from fastpar.predict.time import ops_of
from fastpar.settings.model import GPTConfig

WORKLOAD = Workload(GPTConfig(2, 4, 32, 16, 200, dropout=0.0), 4)


def setup(**changes):
    values = {"dtype": "fp32", "device_type": "cpu", "transport": "shm"}
    return Setup(**{**values, "micro_batch_size": 4, **changes})


@pytest.mark.parametrize("tp", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_chain_has_the_operations_that_a_step_has(tp, dropout):
    workload = Workload(GPTConfig(2, 4, 32, 16, 200, dropout=dropout), 4)
    kind = setup(world_size=tp.get("tp", 1), **tp)
    chain = Chain(workload, kind, torch.device("cpu"))
    chain.step()
    times = chain.times()
    asked = Counter[Any]()
    for o in ops_of(workload, kind):
        asked[o.name, o.shape, o.direction] += o.count
    optimizer = ("optimizer", (chain.n_elements,), "forward")
    assert set(asked) == {*times, optimizer}
    assert asked[optimizer] == 1
    for key, seconds in times.items():
        assert all(s > 0 for s in seconds), key
        if key[0] == "layer_norm":
            assert len(seconds) == asked[key] - 1, "the first one has no residual"
        else:
            assert len(seconds) == asked[key], key


def test_gradients_are_copied_or_added_where_the_engine_has_them():
    chain = Chain(WORKLOAD, setup(), torch.device("cpu"))
    chain.step()
    first = chain.buffer.clone()
    assert first.count_nonzero() > 0.5 * first.numel()
    assert all(p.grad is None for p in chain.parameters)
    chain.adding = True
    chain.step()
    assert torch.allclose(chain.buffer, 2 * first, rtol=1e-4, atol=1e-7)
    assert ("copy", (chain.added_bytes,), "backward") in chain.times()
    two = {"grad_accum_steps": 2, "accumulate": "full"}
    asked = {o.shape for o in ops_of(Workload(WORKLOAD.shape, 8), setup(**two)) if o.name == "copy"}
    assert asked == {(chain.copied_bytes,), (chain.added_bytes,)}


def test_intervals_are_between_marks():
    clock = Clock(torch.device("cpu"))
    for name in ("a", None, "b", "c", None):
        clock.mark(name)
    assert [name for name, _ in clock.intervals()] == ["a", "b", "c"]
    clock.mark("d")
    assert clock.intervals() == []


def test_fitted_cuts_and_repeats():
    x = torch.arange(6.0, requires_grad=True)
    assert fitted(x, (2, 2)).tolist() == [[0, 1], [2, 3]]
    assert fitted(x, (8,)).tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    fitted(x, (8,)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 1, 1, 1, 1]


def test_a_chain_leaves_nothing_behind():
    gc.collect()
    before = alive_bytes()
    chain = Chain(WORKLOAD, setup(), torch.device("cpu"))
    chain.step()
    assert alive_bytes() > before
    del chain
    gc.collect()
    assert alive_bytes() <= before  # of other tests more may have gone
