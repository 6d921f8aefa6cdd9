from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.predict.measure import ShortRun, slowest
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

SHAPE = GPTConfig(2, 2, 32, 16, 128, dropout=0.1)


def loss_after_steps(world_size, tp=1, **changes):
    setup = Setup(
        world_size=world_size,
        tp=tp,
        dtype="fp32",
        device_type="cpu",
        transport="shm",
        **changes,
    )
    workload = Workload(SHAPE, setup.dp * setup.micro_batch_size * setup.grad_accum_steps)
    run = ShortRun(workload, setup, Mesh(tp=tp, device="cpu"))
    assert len(run.seconds(3)) == 3
    run.step()
    return run.engine.control.contributed.item() / world_size


def test_steps_train_the_same_model_in_every_layout():
    """A step of 4 sequences: the samples, and so the loss after three steps, are the same."""
    alone = loss_after_steps(1, micro_batch_size=4)
    split = loss_after_steps(
        1, micro_batch_size=2, grad_accum_steps=2, activation_checkpointing="full"
    )
    ranks = run_ranks(losses_of_two_ranks, 2, backend="gloo")
    assert abs(alone - split) < 1e-4
    for found in ranks:
        for loss in found:
            assert abs(loss - alone) < 1e-4


def losses_of_two_ranks():
    return [
        loss_after_steps(2, micro_batch_size=2, zero_stage=3, accumulate="shard"),
        loss_after_steps(2, tp=2, micro_batch_size=4),
    ]


def test_the_slowest_rank_counts():
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
