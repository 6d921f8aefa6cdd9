"""Mesh: how the ranks of a run are laid out, and the process group of each axis.

A mesh is a value: it is passed to whatever communicates, and nothing here is global. Ranks come
from torchrun's environment, or from a process group that exists already; without either the mesh
has one rank and no group.

The ranks of one tensor-parallel group are neighbours, rank = dp_rank * tp + tp_rank: they exchange
activations several times a layer, so they should share the fastest links.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastpar.comm.watchdog import waiting

# torch 2.13 warns about the old name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, eq=False, init=False)
class Mesh:
    """The ranks of this run along the axes dp (data parallel) and tp (tensor parallel).

    Under torchrun it initializes torch.distributed when nobody has: gloo for CPU tensors, NCCL for
    CUDA tensors, with the device of LOCAL_RANK bound to the process. A process group that exists is
    used as it is.

    Args:
        dp: ranks along the data-parallel axis; None takes all that tp leaves.
        tp: ranks along the tensor-parallel axis, neighbours, which split one model.
        device: where this rank computes; None takes cuda:LOCAL_RANK if there is a GPU, or the CPU.
        timeout_s: after this long without its peers a collective fails instead of hanging.
    Attributes:
        device: where this rank computes.
        world_size, rank: over all axes.
        is_main: whether this is rank 0, the one that prints and writes.
        dp_size, dp_rank, dp_group: of the axis dp; the group is None when dp_size is 1.
        tp_size, tp_rank, tp_group: of the axis tp, likewise.
        device_mesh: torch's DeviceMesh of the axes ("dp", "tp"); None with one rank.
        owns_process_group: whether the process group was made here; close() destroys it then.
        timeout_s: after so many seconds a collective whose peers are silent fails.
        start: a name of this start of the ranks, the same on all of them and new after a restart;
            empty unless a launcher keeps their store.
    Ranks: every rank constructs it, before any other collective.
    Raises:
        ValueError: dp or tp below 1, or their product different from the world size; incomplete or
            malformed environment; a LOCAL_RANK without a GPU of its own.
        RuntimeError: the other ranks could not be reached.
    """

    device: torch.device
    world_size: int
    rank: int
    dp_size: int
    dp_rank: int
    dp_group: dist.ProcessGroup | None
    tp_size: int
    tp_rank: int
    tp_group: dist.ProcessGroup | None
    device_mesh: DeviceMesh | None
    owns_process_group: bool  # made here, so close() destroys it
    timeout_s: float  # of every collective
    start: str  # names this start of the ranks; empty unless a launcher keeps their store

    def __init__(
        self,
        dp: int | None = None,
        tp: int = 1,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        for name, size in (("dp", dp), ("tp", tp)):
            if size is None and name == "dp":
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"Mesh: expected {name} to be a positive integer{' or None' * (name == 'dp')}, "
                    f"got {name}={size}; leave {name} out to "
                    + ("use every rank" if name == "dp" else "split no model")
                )
        if not timeout_s > 0:
            raise ValueError(
                f"Mesh: expected timeout_s > 0, got timeout_s={timeout_s}; "
                "give the seconds after which a silent peer counts as dead"
            )
        if dist.is_available() and dist.is_initialized():
            rank, world_size, owns = dist.get_rank(), dist.get_world_size(), False
            picked = _pick_device(device, dist.get_backend(), rank)
        else:
            rank, world_size, local_rank = _read_environment(os.environ)
            picked, owns = _pick_device(device, None, local_rank), world_size > 1
        # Before any connection: wrong sizes fail at once and on every rank.
        dp_size = world_size // tp if dp is None else dp
        if dp_size * tp != world_size:
            raise ValueError(_wrong_sizes(dp, tp, world_size))
        if picked.type == "cuda":
            torch.cuda.set_device(picked)
        start = _initialize(rank, world_size, picked, timeout_s) if owns else ""
        axes = _make_axes(picked, dp_size, tp, timeout_s) if world_size > 1 else None
        values = {
            "device": picked,
            "world_size": world_size,
            "rank": rank,
            "dp_size": dp_size,
            "dp_rank": rank // tp,
            "dp_group": axes.get_group("dp") if axes is not None and dp_size > 1 else None,
            "tp_size": tp,
            "tp_rank": rank % tp,
            "tp_group": axes.get_group("tp") if axes is not None and tp > 1 else None,
            "device_mesh": axes,
            "owns_process_group": owns,
            "timeout_s": timeout_s,
            "start": start,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def close(self) -> None:
        """Destroy the process group if this mesh made it. Ranks: all of them, at the end."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def check_same(self, caller: str, lines: Sequence[str]) -> None:
        """Raise, on every rank alike, unless all ranks pass the same lines. Ranks: all.

        Wire: 8 bytes per rank; the lines themselves only when they differ.
        """
        if self.world_size == 1:
            return
        digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=self.device)
        hashes = mine.new_empty(self.world_size)
        with waiting("comparing settings"):
            all_gather(hashes, mine)
            if bool((hashes == hashes[0]).all()):
                return
            everyone: list[Any] = [None] * self.world_size
            dist.all_gather_object(everyone, list(lines))
        for rank, theirs in enumerate(everyone):
            for i in range(max(len(theirs), len(everyone[0]))):
                line, expected = (x[i] if i < len(x) else "nothing" for x in (theirs, everyone[0]))
                if line != expected:
                    raise ValueError(
                        f"{caller}: expected the same on every rank, got '{line}' on rank {rank} "
                        f"where rank 0 has '{expected}'; give every rank the same model and "
                        "arguments"
                    )

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor], axis: str = "dp") -> None:
        """Give the tensors of every rank along an axis the values of its rank 0. Ranks: all.

        Wire: the bytes of the tensors, in one collective.
        """
        tensors = [t for t in tensors if t.numel()]
        group = self.dp_group if axis == "dp" else self.tp_group
        if group is None or not tensors:
            return
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        packed = torch.cat(raw) if len(raw) > 1 else raw[0].clone()
        with waiting("broadcast"):
            dist.broadcast(packed, group=group, group_src=0)
            if packed.device.type == "cuda":  # the host would go on, and wait where nobody looks
                torch.cuda.current_stream(packed.device).synchronize()
        for t, part in zip(tensors, packed.split([r.numel() for r in raw])):
            # clone: a part may start at an address that the wider dtype does not allow
            t.detach().copy_(part.clone().view(t.dtype).view(t.shape))

    def can_average(self) -> bool:
        """Whether the backend's collectives divide by the number of ranks. Ranks: all."""
        try:
            probe = torch.ones(1, device=self.device)
            dist.all_reduce(probe, op=dist.ReduceOp.AVG, group=self.dp_group)
        except (RuntimeError, ValueError):
            return False
        return True


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank of a group says, in rank order. Ranks: all of the group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with waiting("gathering objects"):
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _wrong_sizes(dp: int | None, tp: int, world_size: int) -> str:
    if tp == 1:
        return (
            f"Mesh: expected dp equal to the number of ranks, got dp={dp} with "
            f"world_size={world_size}; start {dp} ranks "
            f"(torchrun --nproc-per-node {dp}) or leave dp out"
        )
    if dp is None:
        return (
            f"Mesh: expected tp to divide the number of ranks, got tp={tp} with "
            f"world_size={world_size}; start a multiple of {tp} ranks"
        )
    return (
        f"Mesh: expected dp * tp equal to the number of ranks, got dp={dp}, tp={tp} with "
        f"world_size={world_size}; start {dp * tp} ranks (torchrun --nproc-per-node {dp * tp}) "
        "or leave dp out"
    )


def _make_axes(device: torch.device, dp: int, tp: int, timeout_s: float) -> DeviceMesh:
    axes = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    set_timeout: Any = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    for axis in ("dp", "tp"):  # torch makes them with its default of half an hour
        if set_timeout is not None and dist.get_backend() not in ("threaded", "fake"):
            set_timeout(timedelta(seconds=timeout_s), axes.get_group(axis))
    return axes


def _read_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world_size, local_rank) as torchrun sets them; a plain process is rank 0 of 1."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return 0, 1, 0
    missing = [name for name in _ENVIRONMENT if name not in environment]
    if missing:
        raise ValueError(
            f"Mesh: expected torchrun's environment, got no {missing[0]}; start with "
            "`torchrun --nproc-per-node N ...`, or unset RANK and WORLD_SIZE for one process"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name, environment["RANK"])
        if not text.isdecimal():
            raise ValueError(
                f"Mesh: expected an integer in the environment, got {name}={text}; "
                "start with torchrun, which sets it"
            )
        numbers[name] = int(text)
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world_size:
        raise ValueError(
            f"Mesh: expected RANK below WORLD_SIZE={world_size}, got RANK={rank}; "
            "start with torchrun, which sets both"
        )
    return rank, world_size, numbers["LOCAL_RANK"]


def _pick_device(
    device: torch.device | str | None, backend: str | None, local_rank: int
) -> torch.device:
    """The device asked for, or the GPU of this rank where there is one that the backend serves."""
    if device is not None:
        picked = torch.device(device)
        if picked.type != "cuda" or picked.index is not None:
            return picked
    elif not torch.cuda.is_available() or (backend is not None and "nccl" not in backend):
        return torch.device("cpu")
    if backend is not None:  # whoever made the group has bound the device
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"Mesh: expected a GPU for every local rank, got LOCAL_RANK={local_rank} with "
            f"{count} GPUs; start at most {count} ranks here, or use device='cpu'"
        )
    return torch.device("cuda", local_rank)


def _initialize(rank: int, world_size: int, device: torch.device, timeout_s: float) -> str:
    """Make the default process group from the environment; the name of this start of the ranks."""
    on_gpu = device.type == "cuda"
    name = ""
    there: dict[str, Any] = {}
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            store, name = _meet(rank, world_size, timeout_s)
            there = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # small objects travel as CPU tensors
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
            **there,
        )
        return name
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RuntimeError(
            f"Mesh: expected {world_size} ranks to meet at {address}, got an error on rank {rank} "
            f"({error}); check that every rank runs and can reach this address"
        ) from error


def _meet(rank: int, world_size: int, timeout_s: float) -> tuple[dist.Store, str]:
    """The launcher's store, for this start of the ranks alone, and the name of the start.

    torchrun starts failed ranks again with the same store, in which they would find the addresses
    of those before: gloo then connects to ports where nobody listens, now and then. The count of
    restarts tells starts apart on one host only. So rank 0 makes a name, and tells it to each rank
    under a number that only this process can have drawn (test_a_store_that_was_used_before).
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    mine, deadline = uuid.uuid4().hex, monotonic() + timeout_s
    if rank:
        store.set(f"fastpar/here/{rank}", mine)
        name = store.get(f"fastpar/name/{mine}").decode()
        store.add(f"fastpar/ready/{name}", 1)
        return dist.PrefixStore(f"fastpar/start/{name}", store), name
    told: dict[int, str] = {}
    while store.add(f"fastpar/ready/{mine}", 0) < world_size - 1:
        for other in range(1, world_size):
            key = f"fastpar/here/{other}"
            number = store.get(key).decode() if store.check([key]) else None
            if number is not None and told.get(other) != number:
                store.set(f"fastpar/name/{number}", mine)
                told[other] = number
        if monotonic() > deadline:
            raise RuntimeError(f"{world_size - 1} other ranks have not come in {timeout_s:g} s")
        sleep(0.01)
    return dist.PrefixStore(f"fastpar/start/{mine}", store), mine
