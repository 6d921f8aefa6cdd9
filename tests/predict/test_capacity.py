"""run.py: what a rank's states take, refusals that say what would hold the model."""

import pytest
import torch
from cells import sweep

from fastpar.axes.step import Setup
from fastpar.predict import run
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import PRESETS, count_parameters

GPT2 = PRESETS["gpt2"]
N = count_parameters(GPT2, padded=True)


def setup_of(world_size=1, dtype="fp32", **changes):
    return Setup(world_size, TrainConfig().replace(changes), "cpu", "shm", dtype=dtype)


# ranks, dtype, settings; bytes of weights, gradients, optimizer for each parameter. Other layouts
# and Muon are compared with real engines: test_memory_model.py.
STATES = [
    (1, "fp32", {}, (4, 4, 8)), (8, "fp32", {"zero": 1}, (4, 4, 1)),
    (8, "fp32", {"zero": 2}, (4, 0.5, 1)), (8, "fp32", {"zero": 3}, (0.5, 0.5, 1)),
    (1, "bf16", {}, (2, 4, 12)), (1, "bf16", {"grad_dtype": "bf16"}, (2, 2, 12)),
    (1, "bf16", {"master_weights": "remainder"}, (2, 4, 10)),
    (1, "bf16", {"master_weights": "remainder", "moment_dtype": "bf16"}, (2, 4, 6)),
    (1, "bf16", {"stochastic_rounding": True, "moment_dtype": "int8"}, (2, 4, 2)),
    (1, "fp16", {"optimizer": "adafactor"}, (2, 4, 4)),
    (8, "fp32", {"ema": 0.999, "zero": 1}, (4, 4, 1.5)),
]  # fmt: skip


@sweep(["ranks", "dtype", "changes", "expected"], STATES)
def test_bytes_of_a_rank(ranks, dtype, changes, expected):
    """Of N parameters. Scales of 8-bit moments and adafactor's means are below 2 %."""
    setup = setup_of(ranks, dtype, **changes)
    found = run.bytes_per_rank(GPT2, setup).values()
    for got, each, above in zip(found, expected, (0.002, 0.002, 0.02), strict=True):
        assert each * N - 1 <= got <= (1 + above) * each * N
    if ranks == 1:
        assert (setup.weight_bytes, setup.grad_bytes, setup.state_bytes) == expected


def test_bytes_of_an_element_on_the_wire():
    assert [setup_of(dtype=d).wire_bytes for d in ("fp32", "bf16")] == [4, 4]
    for name in ("grad_dtype", "reduce_dtype"):
        assert setup_of(dtype="bf16", **{name: "bf16"}).wire_bytes == 2


def test_a_refusal_names_the_need_and_what_there_is():
    def refusal(setup, gb, sharing=1):
        with pytest.raises(ValueError, match="train: expected a model whose states fit") as caught:
            run.check_capacity(
                GPT2, setup, limit_bytes=int(gb * 1e9), of_what="a GPU", sharing=sharing
            )
        return str(caught.value)

    words = refusal(setup_of(), 1)
    assert words.startswith(
        "train: expected a model whose states fit into 1.0 GB of a GPU, got 124,475,904 parameters "
        "that take 2.0 GB a rank (weights 0.5 GB, gradients 0.5 GB, optimizer 1.0 GB); use "
    )
    assert words.endswith("use 2 ranks with as much memory each and --zero 3, or a smaller model")
    assert "fit into 0.5 GB of a GPU for each of 4 ranks" in refusal(setup_of(4), 2, sharing=4)
    run.check_capacity(GPT2, setup_of(), limit_bytes=2 * 10**9, of_what="a GPU")
    # Every rank begins with the whole model.
    run.check_building(GPT2, limit_bytes=4 * N * 3, sharing=3)
    with pytest.raises(
        ValueError,
        match=r"a model of 124,475,904 parameters in fp32, 0.5 GB, on each of 4 ranks of a machi"
        r"ne, which all build the full model first, got 1.5 GB; use at most 3 ranks on a machine",
    ):
        run.check_building(GPT2, limit_bytes=4 * N * 3, sharing=4)
    with pytest.raises(ValueError, match=r"got 0.4 GB; use a smaller model"):
        run.check_building(GPT2, limit_bytes=4 * 10**8, sharing=1)


@sweep(
    ["ranks", "changes", "gb", "expected"],
    [
        (8, {}, 1.2, "use --zero 1 (1.1 GB a rank), or a smaller model"),
        (8, {}, 0.7, "use --zero 2 (0.7 GB a rank), or a smaller model"),
        (8, {"zero": 1}, 0.4, "use --zero 3 (0.2 GB a rank), or"),
        (8, {"zero": 3, "tp": 4}, 0.095, "use 24 ranks with as much memory each and --zero 3, or"),
        (2, {}, 0.1, "use 20 ranks with as much memory each and --zero 3, or a smaller model"),
    ],
)
def test_what_would_hold_it_does(ranks, changes, gb, expected):
    changes = {"model": "gpt2", **changes}
    words = run.what_would_hold(GPT2, setup_of(ranks, **changes), int(gb * 1e9))
    assert words.startswith(expected), words


def test_memory_of_this_machine(tmp_path, monkeypatch):
    assert run.host_memory(tmp_path) == 1 << 62  # unknown: nothing is refused
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nSwapTotal: 24 kB\n")
    assert run.host_memory(tmp_path) == 1024 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert run.host_memory(tmp_path) == 1024 * 1024
    (group / "memory.max").write_text("5000\n")
    assert run.host_memory(tmp_path) == 5000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    size, whose, sharing = run.memory_of(torch.device("cpu"))
    assert (size, whose, sharing) == (run.host_memory(), "this machine's memory", 3)
    assert size > 1 << 28


@pytest.mark.gpu
def test_memory_of_a_gpu():
    size, whose, sharing = run.memory_of(torch.device("cuda", 0))
    assert (whose, sharing) == (torch.cuda.get_device_name(0), 1)
    assert size > 1 << 30
