"""Bytes of collectives, counted where they pass, beside what they must be."""

import pytest
import torch
from cells import slow

from fastpar.comm.recorder import WireMeter, ring_bytes
from fastpar.models.gpt import GPT
from fastpar.observe.strategies import STRATEGIES, Settings, build
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)
NUMEL = sum(p.numel() for p in GPT(TINY).parameters())


def steps_on_rank(names):
    """Each strategy's third step: bytes, seconds in communication, what the engine says."""
    found = {}
    for name in names:
        made = build(name, lambda: GPT(TINY, seed=1), Settings(max_grad_norm=1.0))
        x = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
        batch = (x, x)
        for _ in range(2):
            made.train_step([batch], 1e-3)
        meter = WireMeter()
        ours = STRATEGIES[name].package == "fastpar"
        with meter.of_fastpar() if ours else meter.of_torch(2):
            made.train_step([batch], 1e-3)
        counted = meter.sent_bytes
        made.train_step([batch], 1e-3)
        assert meter.sent_bytes == counted, "it counts after its end"
        found[name] = (counted, meter.waited_s, made.report())
        made.close()
    return found


@pytest.mark.parametrize(
    "names",
    [["ddp", "fsdp2", "zero2", "zero3", "tp"], slow(["fsdp2-no-reshard", "dp", "zero1"])],
    ids=["some", "others"],
)
def test_a_step_sends_what_its_strategy_must(names):
    for found in run_ranks(steps_on_rank, 2, names, backend="gloo", timeout_s=120):
        once = 4 * NUMEL  # of 2 ranks an all-reduce sends each byte once, a gather half of them
        of_torch = {"ddp": once, "fsdp2-no-reshard": once, "fsdp2": once * 3 // 2}  # gathered twice
        for name in names:
            sent, waited, report = found[name]
            if name in of_torch:
                assert sent == of_torch[name], name
                continue
            assert waited > 0
            if name == "tp":
                assert sent > report["wire_bytes"] + 4 * 2 * 32 * 32  # activations of two layers
            else:  # the engine leaves out its small exchanges: norm and control
                assert report["wire_bytes"] <= sent <= report["wire_bytes"] + 2000, name


def test_ring_bytes():
    assert ring_bytes("allreduce_", 1000, 4) == 1500
    assert ring_bytes("all_reduce", 1000, 2) == 1000
    for name in ("_allgather_base_", "reduce_scatter", "_reduce_scatter_base_", "broadcast_"):
        assert ring_bytes(name, 1000, 4) == 750, name
    assert ring_bytes("wait_tensor", 1000, 4) == 0
    assert ring_bytes("all_reduce", 1000, 1) == 0


def test_a_call_that_raises_is_counted_no_further():
    from fastpar.comm.collectives import Collectives

    meter = WireMeter()
    with pytest.raises(RuntimeError, match="stop"), meter.of_fastpar():
        raise RuntimeError("stop")
    assert Collectives.observers == ()
