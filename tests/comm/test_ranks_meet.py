"""start.py: how ranks find each other."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fastpar.comm.mesh import Mesh, gather_objects
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


def start_over(rank, world_size, port, first):
    """A rank of one start; those of the first one leave without a word."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    mesh = Mesh(timeout_s=60.0, device="cpu")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    if first:
        return mesh.start, x.item()
    y = gather_objects(rank, dist.group.WORLD)
    return mesh.start, y


@pytest.mark.slow
def test_a_store_that_was_used_before():
    """torchrun's store is so after a restart: nobody meets a rank of the start before."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = set()
    for start, world_size in enumerate((2, 3)):
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import sys; sys.path.insert(0, 'tests/comm'); "
                    "from test_ranks_meet import start_over; "
                    f"print(*start_over({rank}, {world_size}, {store.port}, {start == 0}), "
                    "flush=True); import os; os._exit(0)",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in reversed(range(world_size))  # the others find what is old
        ]
        told = []
        for rank in ranks:
            out, err = rank.communicate(timeout=100)
            assert rank.returncode == 0, err
            assert "failed to connect" not in err
            told.append(out)
        assert len(set(told)) == 1
        names.add(told[0].split()[0])
    assert len(names) == 2
