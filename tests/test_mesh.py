"""mesh.py: where ranks come from, and what is refused before anything can hang."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from fastpar.mesh import Mesh
from fastpar.testing import run_ranks

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    def set_environment(**values):
        for name in (*TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    set_environment()
    return set_environment


def test_one_process_needs_no_group(environment):
    mesh = Mesh()
    assert (mesh.dp_size, mesh.dp_rank, mesh.dp_group) == (1, 0, None)
    assert (mesh.world_size, mesh.rank, mesh.is_main) == (1, 0, True)
    assert mesh.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not dist.is_initialized()
    mesh.close()


def test_one_rank_under_torchrun_needs_no_group(environment):
    environment(**{**TORCHRUN, "WORLD_SIZE": "1"})
    assert Mesh(dp=1, device="cpu").dp_group is None
    assert not dist.is_initialized()


def test_a_mesh_is_frozen(environment):
    with pytest.raises(dataclasses.FrozenInstanceError):
        Mesh().dp_size = 2


def test_an_existing_group_is_used():
    def ranks():
        mesh = Mesh(dp=4)
        mesh.close()  # not ours: stays
        assert dist.is_initialized()
        return mesh.dp_rank, mesh.dp_size, mesh.is_main, mesh.dp_group is dist.group.WORLD

    assert run_ranks(ranks, 4) == [(r, 4, r == 0, True) for r in range(4)]


def make_mesh_from_environment():
    assert not dist.is_initialized()
    mesh = Mesh(dp=2, timeout_s=20)
    total = torch.tensor([mesh.dp_rank + 1.0])
    dist.all_reduce(total, group=mesh.dp_group)
    again = Mesh()
    result = (mesh.rank, mesh.dp_size, str(mesh.device), dist.get_backend(), total.item())
    assert (mesh.owns_process_group, again.owns_process_group) == (True, False)
    mesh.close()
    assert not dist.is_initialized()
    return result


def test_torchruns_environment_initializes_gloo():
    results = run_ranks(make_mesh_from_environment, 2, backend="gloo", init=False)
    assert results == [(0, 2, "cpu", "gloo", 3.0), (1, 2, "cpu", "gloo", 3.0)]


def mesh_of_three():
    Mesh(dp=3)


@pytest.mark.parametrize("init", [True, False])
def test_dp_must_be_the_number_of_ranks(init):
    errors = run_ranks(
        mesh_of_three, 2, backend="gloo", init=init, return_exceptions=True, timeout_s=30
    )
    message = r"expected dp equal to the number of ranks, got dp=3 with world_size=2; start 3 ranks"
    for error in errors:
        with pytest.raises(ValueError, match=message):
            raise error


@pytest.mark.parametrize("dp", [0, -1, True, 2.0])
def test_dp_must_be_a_positive_integer(dp):
    with pytest.raises(ValueError, match=rf"expected dp to be a positive integer.*got dp={dp}"):
        Mesh(dp=dp)


def test_timeout_must_be_positive():
    with pytest.raises(ValueError, match=r"expected timeout_s > 0, got timeout_s=0"):
        Mesh(timeout_s=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None}, r"expected torchrun's environment, got no MASTER_ADDR"),
        ({"RANK": None}, r"expected torchrun's environment, got no RANK"),
        ({"WORLD_SIZE": "two"}, r"expected an integer in the environment, got WORLD_SIZE=two"),
        ({"RANK": "-1"}, r"expected an integer in the environment, got RANK=-1"),
        ({"RANK": "2"}, r"expected RANK below WORLD_SIZE=2, got RANK=2"),
    ],
)
def test_bad_environment(environment, change, message):
    values = {**TORCHRUN, **change}
    environment(**{k: v for k, v in values.items() if v is not None})
    with pytest.raises(ValueError, match=message):
        Mesh(device="cpu")
    assert not dist.is_initialized()


def test_unreachable_ranks_are_reported(environment):
    environment(**{**TORCHRUN, "RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    message = r"expected 2 ranks to meet at 127\.0\.0\.1:1, got an error on rank 1"
    with pytest.raises(RuntimeError, match=message):
        Mesh(device="cpu", timeout_s=1)
    assert not dist.is_initialized()


def test_two_local_ranks_on_one_gpu_are_refused(environment, monkeypatch):
    environment(**TORCHRUN, LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"expected a GPU for every local rank, got LOCAL_RANK=1"):
        Mesh()


def test_check_same_names_the_first_difference_on_every_rank():
    def ranks():
        mesh = Mesh()
        lines = ["a", "b", "c"]
        mesh.check_same("load", lines)
        if mesh.dp_rank == 2:
            lines = ["a", "x"]
        mesh.check_same("load", lines)

    message = r"load: expected the same on every rank, got 'x' on rank 2 where rank 0 has 'b'"
    for error in run_ranks(ranks, 3, return_exceptions=True):
        if not isinstance(error, SystemExit):  # a thread that was stopped by the others' failure
            with pytest.raises(ValueError, match=message):
                raise error


def test_check_same_sees_a_missing_line():
    def ranks():
        mesh = Mesh()
        mesh.check_same("load", ["a"] if mesh.dp_rank else ["a", "b"])

    with pytest.raises(ValueError, match=r"got 'nothing' on rank 1 where rank 0 has 'b'"):
        run_ranks(ranks, 2)


def test_broadcast_copies_any_dtype_shape_and_stride():
    def ranks():
        mesh = Mesh()
        r = mesh.dp_rank
        tensors = [
            torch.tensor(r == 0),
            torch.full((3,), 7 - r, dtype=torch.int64),
            torch.full((2, 3), 1.5 + r, dtype=torch.bfloat16).t(),
            torch.zeros(0),
            torch.full((5,), float(r), dtype=torch.float64),
        ]
        mesh.broadcast_(tensors)
        mesh.broadcast_([])
        one = torch.full((4, 4), float(r))
        mesh.broadcast_([one.t()])
        return [*tensors, one]

    first, second = run_ranks(ranks, 2)
    assert [t.float().flatten().tolist() for t in second] == [
        [1.0], [7.0] * 3, [1.5] * 6, [], [0.0] * 5, [0.0] * 16,
    ]  # fmt: skip
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def die_in_the_middle():
    mesh = Mesh(timeout_s=20)
    if mesh.rank == 1:
        os._exit(3)
    dist.barrier(group=mesh.dp_group)


def test_a_dead_rank_does_not_hang_the_others():
    results = run_ranks(
        die_in_the_middle, 2, backend="gloo", init=False, timeout_s=20, return_exceptions=True
    )
    assert all(isinstance(r, RuntimeError) for r in results)
    assert not any(isinstance(r, TimeoutError) for r in results)
