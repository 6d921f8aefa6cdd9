"""workload.py: sizes of a workload, a setup from settings and back."""

import subprocess
import sys

import pytest

from fastpar.axes.step import Setup, Workload
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig

MICRO = GPTConfig.preset("micro", vocab_size=300)


def test_groups_of_ranks():
    setup = Setup(world_size=16, tp=2, zero_stage=3, shard_size=4)
    assert (setup.dp, setup.n_shards) == (8, 4)
    assert Setup(world_size=16, tp=2, zero_stage=0).n_shards == 1
    assert Setup(world_size=16, tp=2, pp=4, zero_stage=1).dp == 2


@pytest.mark.parametrize(
    ("changes", "dtype", "n_bytes"),
    [
        ({}, "fp32", (4, 4, 4, 8)),
        ({}, "bf16", (2, 4, 4, 12)),
        ({"master_weights": "remainder"}, "bf16", (2, 4, 4, 10)),
        ({"stochastic_rounding": True, "moment_dtype": "int8"}, "bf16", (2, 4, 4, 2)),
        ({"grad_dtype": "bf16"}, "bf16", (2, 2, 2, 12)),
        ({"reduce_dtype": "bf16", "optimizer": "adafactor"}, "bf16", (2, 4, 2, 4)),
    ],
)
def test_bytes_of_an_element(changes, dtype, n_bytes):
    setup = Setup(1, TrainConfig().replace(changes), dtype=dtype)
    found = (setup.weight_bytes, setup.grad_bytes, setup.wire_bytes, setup.state_bytes)
    assert found == n_bytes


def test_a_setup_is_what_its_settings_say():
    setup = Setup(
        world_size=4, tp=2, zero_stage=2, shard_size=2, micro_batch_size=2, grad_accum_steps=4,
        activation_checkpointing="selective", accumulate="shard", bucket_mb=2.0, dtype="bf16",
        master_weights="remainder", moment_dtype="bf16", device_type="cpu", transport="shm",
    )  # fmt: skip
    config = setup.config(Workload(MICRO, batch_size=16))
    assert Setup(4, config, "cpu", "shm").in_effect() == setup.in_effect()
    assert config.model_config(300) == MICRO


def test_settings_that_the_trainer_refuses():
    with pytest.raises(
        ValueError, match=r"train: expected tp to divide the MLP's width of 512, got tp=3"
    ):
        Setup(world_size=3, tp=3).config(Workload(MICRO, 3))


def test_the_help_of_train_loads_no_planner():
    """Its lines at the end are loaded when they are printed."""
    code = (
        "import sys\n"
        "from fastpar.cli import main\n"
        "try:\n"
        "    main(['train', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('fastpar.')}\n"
        "print(sorted(rooms & {'predict', 'observe'}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "[]", ran.stdout + ran.stderr
