"""Data sheets: rates stay below the sheet's, and move as the rules say."""

import pytest

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.predict.machine import (
    DEVICES,
    GENERATIONS,
    LAUNCH_S,
    Cluster,
    DatasheetRates,
    find_device,
)
from fastpar.predict.time import comm_ops_of, ops_of
from fastpar.settings.model import GPTConfig

WORKLOAD = Workload(GPTConfig.preset("gpt2-xl", dropout=0.0), 64)


def rates_of(name="a100", n=8, **options):
    return DatasheetRates(Cluster.of(name, n), Setup(world_size=n, **options))


def product(m, k, n, direction="forward"):
    return Op("matmul", (m, k, n), direction, 2.0 * m * k * n, 0.0, 1)


@pytest.mark.parametrize("device", [d.name for d in DEVICES])
def test_nothing_is_faster_than_the_sheet(device):
    """Neither in operations nor in bytes."""
    rates, d = rates_of(device), find_device(device)
    assert set(GENERATIONS) == {other.generation for other in DEVICES}
    for op in ops_of(WORKLOAD, Setup(8, micro_batch_size=8, activation_checkpointing="full")):
        assert rates.op_s(op) >= op.flops / d.peak_flops
        if op.name not in ("matmul", "attention"):
            assert rates.op_s(op) >= op.bytes / d.bytes_per_s
    for m, k, n in ((1, 1, 1), (128, 64, 128), (8192, 8192, 8192), (333, 777, 555)):
        assert 0 < rates.utilization(m, k, n) < 1


def test_large_products_reach_what_the_generation_does():
    for name in ("a100", "h100", "v100"):
        rates, n = rates_of(name), 16384
        reached = 2 * n**3 / rates.op_s(product(n, n, n)) / rates.peak_flops
        assert reached == pytest.approx(GENERATIONS[find_device(name).generation].reached, rel=0.05)
    assert GENERATIONS["hopper"].reached < GENERATIONS["ampere"].reached


def test_waves_edges_and_depth():
    """One tile more than fits costs a wave; a short inner dimension costs its ends."""
    rates = rates_of()
    full, more = 108 * 128, 109 * 128
    assert rates.utilization(full, 64, 128) > 1.5 * rates.utilization(more, 64, 128)
    assert rates.utilization(4096, 64, 4096) < 0.6 * rates.utilization(4096, 4096, 4096)
    assert rates.utilization(4096, 4096, 130) < rates.utilization(4096, 4096, 128)
    long = [rates.utilization(128, k, 128) for k in (256, 4096, 65536)]
    assert long == sorted(long)


def test_thin_products_wait_for_memory():
    rates, n_bytes = rates_of(), 2 * 8192 * 8192
    seconds = rates.op_s(product(1, 8192, 8192)) - LAUNCH_S["cuda"]
    assert seconds == pytest.approx(n_bytes / (2039e9 * 0.85), rel=0.01)


def test_backward_of_a_product_is_two():
    rates = rates_of()
    forward, backward = (rates.op_s(product(8192, 4096, 4096, d)) for d in ("forward", "backward"))
    assert backward == pytest.approx(2 * forward, rel=0.1)
    assert rates.op_s(product(8192, 4096, 4096, "recompute")) == forward


def test_small_ops_wait_for_the_host():
    tiny = Op("bias_gelu", (1, 64), "forward", 0.0, 256.0, 1)
    assert rates_of().op_s(tiny) == 25e-6
    assert rates_of("cpu").op_s(tiny) == pytest.approx(5e-6, rel=0.02)


def test_formats_choose_the_peak():
    assert rates_of().peak_flops == 312e12
    assert rates_of(dtype="fp32").peak_flops == 19.5e12
    wide, half = (rates_of("v100", dtype=d).op_s(product(*[4096] * 3)) for d in ("fp32", "fp16"))
    assert wide > 5 * half


def test_exchanges_are_the_networks():
    rates = rates_of(n=16)
    send = CommOp("all_reduce", "dp", 1e9, 16, 1, 1, "")
    assert rates.comm_s(send) == rates.network.seconds("all_reduce", 1e9, 16)
    assert rates.comm_s(send._replace(count=5)) == rates.comm_s(send)
    assert sum(map(rates.comm_s, comm_ops_of(WORKLOAD, Setup(16, zero_stage=3)))) > 0
    assert (rates.overlap, rates_of("cpu").overlap) == (0.8, 0.0)
