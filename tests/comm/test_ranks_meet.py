"""start.py: how ranks find each other."""

import time

import pytest
import torch
import torch.distributed as dist

from fastpar.comm.mesh import Mesh, gather_objects
from fastpar.comm.ranks import Ranks, make_store
from fastpar.testing import run_ranks


def make_mesh_from_environment():
    assert not dist.is_initialized()
    mesh = Mesh(dp=2, timeout_s=20, device="cpu")
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


def mesh_from_torchruns_environment():
    mesh = Mesh(dp=1, tp=2, timeout_s=20, device="cpu")
    values = [torch.full((3,), mesh.tp_rank + 1.0)]
    mesh.broadcast_(values, "tp")
    mesh.broadcast_(values)  # nobody along dp
    mesh.close()
    return mesh.tp_rank, values[0].tolist()


@pytest.mark.slow
def test_torchruns_environment_with_tp():
    results = run_ranks(mesh_from_torchruns_environment, 2, backend="gloo", init=False)
    assert results == [(0, [1.0] * 3), (1, [1.0] * 3)]


def start_over(rank, first):
    """A rank of one start; those of the first one leave without a word."""
    if rank.rank == 0:
        time.sleep(0.5)  # the others find what is old
    mesh = Mesh(timeout_s=60.0, device="cpu")
    x = torch.tensor([float(rank.rank)])
    dist.all_reduce(x)
    return mesh.start, x.item() if first else gather_objects(rank.rank, dist.group.WORLD)


@pytest.mark.slow
def test_a_store_that_was_used_before(capfd):
    """torchrun's store is so after a restart: nobody meets a rank of the start before."""
    store, names = make_store(), []
    for start, world_size in enumerate((2, 3)):
        with Ranks(
            world_size, place=lambda rank, command: (command, {"MASTER_PORT": str(store.port)})
        ) as ranks:
            told = ranks.call(start_over, start == 0)
        assert all(one == told[0] for one in told)
        names.append(told[0][0])
    assert names[0] != names[1]
    assert "failed to connect" not in capfd.readouterr().err
