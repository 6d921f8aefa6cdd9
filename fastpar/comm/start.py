"""How the ranks of a mesh find each other: torchrun's environment, a store, a process group."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
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


def initialize(rank: int, world_size: int, device: torch.device, timeout_s: float) -> str:
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
