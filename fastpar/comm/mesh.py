"""Mesh: the ranks of a run along named axes, and the process groups of any set of axes.

A mesh is a value that is passed to everything that communicates; no group is global. Ranks come
from torchrun's environment, or from a process group that exists already. Without either the mesh
has one rank and no group.

[Note: order of the axes]
Ranks are numbered like the elements of an array with one dimension per axis of AXES, outermost
first, so tp is innermost. The ranks of a tensor-parallel group are neighbours, because they
exchange activations several times per layer and should share the fastest links. The replicas of a
sharded model are far apart, because they exchange each gradient once. Mesh(dp=4, tp=2):

    dp=0: ranks 0 1      dp=1: ranks 2 3      dp=2: ranks 4 5      dp=3: ranks 6 7
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import itertools
import json
import math
import os
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpar.comm.nodes import (
    LOOPBACK,
    adopt_scheduler,
    host_of_store,
    interface_of_peers,
    loopback,
    plain_words,
    serve_store,
)
from fastpar.comm.watchdog import waiting
from fastpar.settings.mesh import (
    AXES,
    DATA_AXES,
    TP_AXES,
    check_sizes,
    complete_sizes,
    ranks_along,
    sizes_of_grid,
)
from fastpar.settings.rules import check

_NEVER_S = 30 * 86400.0
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# torch 2.13 warns about the old name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False, init=False)
class Mesh:
    """The ranks of this run along named axes; see [Note: order of the axes].

    Under torchrun it initializes torch.distributed unless that was done before: gloo for CPU
    tensors, NCCL for CUDA tensors, with the device of LOCAL_RANK bound to the process. An existing
    process group is used as it is.

    Args:
        dp: ranks along the data-parallel axis. Default: all that the other axes leave.
        tp: tensor-parallel ranks, neighbours, which split each layer.
        tp_grid: (rows, columns) or (rows, columns, depth): split each layer on a grid of ranks
            instead of tp (settings/mesh.py, [Note: grid]); sizes["tp"] is then the columns.
        replicas: number of replicas that train independently and average with fastpar.Outer. Each
            has world_size / replicas ranks, and the mesh is that of this rank's replica.
        pp: pipeline stages; see fastpar.pipeline_step.
        cp: ranks that split every sequence; they read the same batches.
        ep: neighbouring dp ranks over which experts are distributed; sizes["dp"] is then dp / ep.
        device: where this rank computes. Default: cuda:LOCAL_RANK if there is a GPU, else the CPU.
        timeout_s: seconds after which a collective without its peers fails instead of hanging.
    Attributes:
        device: where this rank computes.
        world_size, rank: over all axes, in this replica.
        is_main: whether this is rank 0, which prints and writes.
        replica, replicas: number of this rank's replica, and the count of replicas: the outermost
            dimension of the default process group.
        outer_group: the ranks with this rank's number in every replica; None with one replica.
        sizes: ranks along each axis, in the order of AXES.
        place: this rank's number along each axis.
        dp_size, dp_rank, dp_group: the ranks that compute different sequences, along replicas, dp
            and ep together; the group is None if dp_size is 1.
        tp_size, tp_rank, tp_group: the ranks that split each layer, along rows and tp, likewise.
        tp_grid: as passed.
        device_mesh: torch's DeviceMesh of the axes with more than one rank; None if there is none.
        owns_process_group: whether this mesh made the process group; close() then destroys it.
        timeout_s: as passed, until trust_watchdog().
        start: an id of this start of the ranks, equal on all of them and new after a restart; empty
            unless torchrun's agent keeps the store.
    Ranks: every rank constructs it, before any other collective.
    Raises:
        ValueError: an axis below 1; axes whose product is not the world size; replicas that do not
            divide it; an incomplete or malformed environment; a LOCAL_RANK without a GPU.
        RuntimeError: the other ranks could not be reached.
    """

    device: torch.device
    world_size: int
    rank: int
    sizes: Mapping[str, int]
    owns_process_group: bool
    timeout_s: float
    tp_grid: tuple[int, ...] | None
    start: str
    replica: int
    replicas: int
    outer_group: dist.ProcessGroup | None
    _groups: dict[tuple[int, ...], dist.ProcessGroup]  # key: the ranks of this rank's group

    def __init__(
        self,
        dp: int | None = None,
        tp: int = 1,
        *,
        replicas: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        tp_grid: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        requested = {"pp": pp, "replicas": 1, "dp": dp, "cp": cp, "ep": ep, "tp": tp}
        check_sizes({**requested, "replicas": replicas})
        sizes = sizes_of_grid(tp_grid)
        grid = "x".join(map(str, tp_grid)) if tp_grid is not None else None
        check("Mesh", {**requested, "tp_grid": grid}, ("tp_grid",))
        requested |= sizes
        requested = {axis: requested[axis] for axis in AXES}
        if not timeout_s > 0:
            raise ValueError(
                f"Mesh: expected timeout_s > 0, got timeout_s={timeout_s}; "
                "pass the seconds after which a silent peer counts as dead"
            )
        if dist.is_available() and dist.is_initialized():
            rank, world_size, owns = dist.get_rank(), dist.get_world_size(), False
            picked = _pick_device(device, dist.get_backend(), rank)
        else:
            adopt_scheduler(os.environ)
            rank, world_size, local_rank = read_environment(os.environ)
            picked, owns = _pick_device(device, None, local_rank), world_size > 1
        # Before any connection: wrong sizes fail at once and on every rank.
        if world_size % replicas:
            raise ValueError(
                "Mesh: expected replicas to divide the number of ranks, got replicas="
                f"{replicas} with world_size={world_size}; start a multiple of {replicas} ranks"
            )
        size = world_size // replicas
        sizes = complete_sizes(requested, size)
        if picked.type == "cuda":
            torch.cuda.init()  # so that torch.cuda.is_initialized() is true in other threads
            torch.cuda.set_device(picked)
        vars(self).update(
            device=picked,
            world_size=size,
            rank=rank % size,
            sizes=sizes,
            owns_process_group=owns,
            timeout_s=timeout_s,
            tp_grid=None if tp_grid is None else tuple(tp_grid),
            start=initialize(rank, world_size, picked, timeout_s) if owns else "",
            replica=rank // size,
            replicas=replicas,
            outer_group=None,
            _groups={},
        )
        for axes in (AXES, DATA_AXES, TP_AXES):
            if self.size(*axes) > 1:
                self.group(*axes)
        if world_size > 1:
            _watch_steps(world_size)
        if replicas > 1:
            apart = [list(range(number, world_size, size)) for number in range(size)]
            vars(self)["outer_group"] = self._make_group(apart, ["outer replicas"])

    def trust_watchdog(self) -> None:
        """Let collectives wait as long as the run's watchdog lets them.

        The timeouts of gloo and NCCL count the time in which this process was stopped (Ctrl-Z, a
        batch system), and a wait over such a time would fail; the watchdog does not count it.
        """
        vars(self)["timeout_s"] = _NEVER_S
        for group in (dist.group.WORLD, self.outer_group, *self._groups.values()):
            if group is not None:
                _set_timeout(group, _NEVER_S)

    def size(self, *axes: str) -> int:
        """Number of ranks along some axes together."""
        for axis in axes:
            if axis not in AXES:
                raise ValueError(
                    f"Mesh: expected an axis of {', '.join(AXES)}, got axis={axis!r}; "
                    "name one of these"
                )
        return math.prod(self.sizes[axis] for axis in set(axes))

    @property
    def place(self) -> dict[str, int]:
        """This rank's number along each axis."""
        places, rest = {}, self.rank
        for axis, size in reversed(list(self.sizes.items())):
            rest, places[axis] = divmod(rest, size)
        return places

    def rank_in(self, *axes: str) -> int:
        """This rank's number among the ranks that differ from it only along the given axes."""
        number, place = 0, self.place
        for axis, size in self.sizes.items():
            if axis in axes:
                number = number * size + place[axis]
        return number

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of the ranks along some axes; None if the mesh has one rank.

        The first call creates it. All axes together give the default process group (with one
        replica). Ranks: all of all replicas, with the same axes.
        """
        if self.world_size == 1:
            return None
        ranks = ranks_along(self.sizes, axes)
        group_ranks = next(tuple(members) for members in ranks if self.rank in members)
        if group_ranks not in self._groups:
            if len(group_ranks) == self.world_size and self.replicas == 1:
                _set_timeout(dist.group.WORLD, self.timeout_s)
                self._groups[group_ranks] = self._connect(
                    dist.distributed_c10d._get_default_group(), axes
                )
            else:
                self._groups[group_ranks] = self.new_group(*axes)
        return self._groups[group_ranks]

    def new_group(self, *axes: str, neighbours: int | None = None) -> dist.ProcessGroup:
        """A new process group like group()'s, so that its operations queue behind no others.

        Args:
            neighbours: of so many consecutive ranks along the axes; a divisor of their number.
        Ranks: all of all replicas, with the same arguments.
        """
        every, n = self.ranks_along(*axes), neighbours or self.size(*axes)
        parts = [ranks[i : i + n] for ranks in every for i in range(0, len(ranks), n)]
        return self._make_group(parts, axes)

    def _make_group(self, ranks: list[list[int]], axes: Sequence[str]) -> dist.ProcessGroup:
        # Small objects use the default group: no other group needs gloo beside NCCL.
        nccl = self.device.type == "cuda" and "nccl" in dist.get_backend_config()
        backend, timeout = "nccl" if nccl else None, timedelta(seconds=self.timeout_s)
        with waiting("making a group"):
            group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend)
        return self._connect(group, axes)

    def ranks_along(self, *axes: str) -> list[list[int]]:
        """All ranks of the default process group, in groups that differ along the axes only."""
        groups = ranks_along(self.sizes, axes)
        firsts = range(0, self.replicas * self.world_size, self.world_size)
        return [[first + rank for rank in group] for first in firsts for group in groups]

    def _connect(self, group: dist.ProcessGroup, axes: Sequence[str]) -> dist.ProcessGroup:
        """Run a first collective, so that a broken network shows now and not in the first step.

        NCCL also builds its communicator here.
        """
        total = torch.ones(1, device=self.device, dtype=torch.float32)
        try:
            with waiting("a first all_reduce"):
                dist.all_reduce(total, group=group)
                total.item()  # on a GPU all_reduce has not waited
        except RuntimeError as error:
            raise RuntimeError(
                f"Mesh: the {dist.get_world_size(group)} ranks along {', '.join(axes)} could not "
                f"reach each other (rank {self.rank}: {plain_words(error)}); check that every rank "
                "runs, and the network between their hosts"
            ) from error
        return group

    def with_replicas(self, replicas: int) -> Mesh:
        """The same ranks, with the data-parallel ranks arranged as sharded replicas.

        The result uses the groups of this mesh. Ranks: all.
        """
        data = self.size("replicas", "dp")
        if replicas < 1 or data % replicas:
            raise ValueError(
                f"Mesh: expected replicas to divide the {data} ranks along replicas and dp, got "
                f"replicas={replicas}; choose a divisor"
            )
        return self._with_sizes(replicas=replicas, dp=data // replicas)

    def of_gradients(self) -> Mesh:
        """The same ranks as gradients see them: dp holds all ranks that compute different tokens.

        Ranks along cp, ep and depth have the same weights, except experts. The result uses the
        groups of this mesh.
        """
        return self._with_sizes(dp=self.size("dp", "cp", "ep", "depth"), cp=1, ep=1, depth=1)

    def _with_sizes(self, **sizes: int) -> Mesh:
        other = copy.copy(self)
        vars(other)["sizes"] = {**self.sizes, **sizes}
        return other

    @property
    def dp_size(self) -> int:
        return self.size(*DATA_AXES)

    @property
    def dp_rank(self) -> int:
        return self.rank_in(*DATA_AXES)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return self.group(*DATA_AXES) if self.dp_size > 1 else None

    @property
    def tp_size(self) -> int:
        return self.size(*TP_AXES)

    @property
    def tp_rank(self) -> int:
        return self.rank_in(*TP_AXES)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.group(*TP_AXES) if self.tp_size > 1 else None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """torch's DeviceMesh, for code that needs one. Ranks: all, on first use."""
        axes = [axis for axis in AXES if self.sizes[axis] > 1]
        if not axes:
            return None
        first = self.replica * self.world_size
        ranks = torch.arange(first, first + self.world_size, device="cpu")
        grid = ranks.view([self.sizes[axis] for axis in axes])
        groups: Any = [self.group(axis) for axis in axes]
        return DeviceMesh.from_group(
            groups if len(axes) > 1 else groups[0],
            self.device.type,
            mesh=grid,
            mesh_dim_names=tuple(axes),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def close(self) -> None:
        """Destroy the process group if this mesh made it. Ranks: all, at the end."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def check_same(self, caller: str, lines: Sequence[str]) -> None:
        """Raise, on every rank alike, unless all ranks pass the same lines. Ranks: all.

        Wire: 8 bytes per rank; the lines themselves only if they differ.
        """
        if self.world_size == 1:
            return
        digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
        local = torch.tensor(
            [int.from_bytes(digest, "little", signed=True)], device=self.device, dtype=torch.int64
        )
        hashes = local.new_empty(self.world_size)
        with waiting("comparing settings"):
            all_gather(hashes, local, group=self.group(*AXES))
            if bool((hashes == hashes[0]).all()):
                return
            everyone = gather_objects(list(lines), self.group(*AXES))
        rank, line, expected = first_difference(everyone)
        raise ValueError(
            f"{caller}: ranks differ: '{line}' on rank {rank}, '{expected}' on rank 0; give every "
            "rank the same model and arguments"
        )

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor], *axes: str) -> None:
        """Copy the tensors of the first rank along some axes to the other ranks along them.

        Args:
            axes: default: those of different sequences, DATA_AXES.
        Ranks: all. Wire: the bytes of the tensors, in one collective.
        """
        axes = axes or DATA_AXES
        group = self.group(*axes) if self.size(*axes) > 1 else None  # even with nothing to send
        if group is None or not (tensors := [t for t in tensors if t.numel()]):
            return
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
        packed = torch.cat(raw) if len(raw) > 1 else raw[0].clone()
        with waiting("broadcast"):
            dist.broadcast(packed, group=group, group_src=0)
            if packed.is_cuda:  # wait here, where the watchdog knows what is waited for
                torch.cuda.current_stream(packed.device).synchronize()
        for t, part in zip(tensors, packed.split([r.numel() for r in raw])):
            # clone: the part may not be aligned for a wider dtype
            t.detach().copy_(part.clone().view(t.dtype).view(t.shape))


def _set_timeout(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    set_timeout: Any = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None and dist.get_backend() not in ("threaded", "fake"):
        set_timeout(timedelta(seconds=timeout_s), group)


# Models that were not parallelized


class _Here(threading.local):
    """What this thread has done: ranks may be threads."""

    ranks = 1  # of the newest Mesh

    def __init__(self) -> None:
        self.checked: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have stepped


_here = _Here()
_lock = threading.Lock()
_watched = False


def _watch_steps(ranks: int) -> None:
    """Warn at the first step of optimizers whose parameters are not kept equal on these ranks."""
    global _watched
    _here.ranks = ranks
    with _lock:
        if not _watched:
            register_optimizer_step_pre_hook(_before_step)
            _watched = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _here.ranks == 1 or optimizer in _here.checked:
        return
    _here.checked.add(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    warn_if_apart(f"{type(optimizer).__name__}.step", params, "trains a model of its own")


def warn_if_apart(caller: str, params: Iterable[Tensor], does: str) -> None:
    """Warn if this thread has a Mesh of several ranks and nothing keeps these parameters equal.

    Args:
        does: what each rank does then.
    """
    ranks, tensors = _here.ranks, list(params)
    if ranks == 1 or not tensors or not dist.is_initialized() or any(map(_is_shared, tensors)):
        return
    if "deepspeed" in sys.modules or any(map(_is_of_ddp, tensors[:1])):
        return
    warnings.warn(
        f"{caller}: the Mesh has {ranks} ranks, but these parameters belong to no engine, DDP or "
        f"FSDP, so each rank {does}; call fastpar.parallelize(model, mesh) first",
        stacklevel=4,
    )


def _is_of_ddp(p: Tensor) -> bool:
    """Whether a DDP wrapper has this parameter: it leaves no mark on it, but keeps a list."""
    lists = [held for held in gc.get_referrers(p) if type(held) is list]
    known = set(map(id, lists))
    for owner in (owner for held in lists for owner in gc.get_referrers(held)):
        names = vars(owner) if isinstance(owner, DistributedDataParallel) else owner
        if isinstance(names, dict) and id(names.get("_module_parameters")) in known:
            return True
    return False


def _is_shared(p: Tensor) -> bool:
    """Whether a parameter has an engine, stands for one that has, or belongs to FSDP."""
    marks = ("_fastpar_engine", "_fastpar_piece", "_is_flat_param", "_fsdp_flattened")
    return is_traceable_wrapper_subclass(p) or any(hasattr(p, mark) for mark in marks)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of a group, in rank order. Ranks: all of the group.

    They are sent as JSON (a tuple arrives as a list): who unpickles runs what the sender wrote.
    """
    texts = _gather_bytes(
        torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8), group
    )
    return [json.loads(text.numpy().tobytes()) for text in texts]


def gather_tensors(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> list[dict[str, Tensor]]:
    """The named tensors of every rank of a group, in rank order, on their device.

    Ranks: all of the group.
    """
    device = next(iter(tensors.values())).device
    kinds = [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()
    ]
    raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
    gathered = []
    for theirs, packed in zip(gather_objects(kinds, group), _gather_bytes(torch.cat(raw), group)):
        named, start = {}, 0
        for name, dtype, shape in theirs:
            of = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            part = packed[start : start + of.nbytes].clone()  # aligned for a wider dtype
            named[name] = of.copy_(part.view(of.dtype).view(shape))
            start += of.nbytes
        gathered.append(named)
    return gathered


def _gather_bytes(local: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The bytes of every rank. A group of GPUs that Mesh did not make may have NCCL alone."""
    device = "cpu" if "cpu" in dist.get_backend_config(group) else "cuda"
    n = dist.get_world_size(group)
    with waiting("gathering objects"):
        sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(n)]
        dist.all_gather(sizes, torch.full_like(sizes[0], local.numel()), group=group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: local.numel()].copy_(local)
        everyone = [torch.empty_like(padded) for _ in range(n)]
        dist.all_gather(everyone, padded, group=group)
        return [each[:length].cpu() for each, length in zip(everyone, lengths)]


def first_difference(everyone: Sequence[Sequence[str]]) -> tuple[int, str, str]:
    """(rank, its line, that of rank 0) where a rank's lines differ from rank 0's; -1 if none do."""
    for rank, theirs in enumerate(everyone):
        for line, expected in itertools.zip_longest(theirs, everyone[0], fillvalue="nothing"):
            if line != expected:
                return rank, line, expected
    return -1, "", ""


def _pick_device(
    device: torch.device | str | None, backend: str | None, local_rank: int
) -> torch.device:
    """The requested device; by default this rank's GPU if the backend supports it."""
    if device is not None:
        picked = torch.device(device)
        if picked.type != "cuda" or picked.index is not None:
            return picked
    elif not torch.cuda.is_available() or (backend is not None and "nccl" not in backend):
        return torch.device("cpu")
    if backend is not None:  # the code that made the group has bound the device
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:
        return torch.device("cuda", 0)  # a scheduler made one GPU visible to each task
    if local_rank >= count:
        raise ValueError(
            f"Mesh: expected a GPU for every local rank, got LOCAL_RANK={local_rank} with "
            f"{count} GPUs; start at most {count} ranks here, or use device='cpu'"
        )
    return torch.device("cuda", local_rank)


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world_size, local_rank) as torchrun sets them; without torchrun rank 0 of 1."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return 0, 1, 0
    missing = [name for name in _ENVIRONMENT if name not in environment]
    if missing:
        raise ValueError(
            f"Mesh: expected torchrun's environment, got none with {missing[0]}; start with "
            "`torchrun --nproc-per-node N ...`, or unset RANK and WORLD_SIZE to use one process"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
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
    """Make the default process group from the environment; returns an id of this start."""
    on_gpu = device.type == "cuda"
    name = ""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # 0: unknown
    if "GLOO_SOCKET_IFNAME" not in os.environ and ranks_here:
        master = os.environ["MASTER_ADDR"]
        alone = ranks_here >= world_size
        if (interface := loopback() if alone else interface_of_peers(master)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            store, name = _store_of_start(rank, world_size, timeout_s)
        else:
            store = _store_of_rank_0(rank, world_size, timeout_s, ranks_here)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # small objects are sent as CPU tensors
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
            store=store,
            rank=rank,
            world_size=world_size,
        )
        return name
    except (OSError, RuntimeError, ValueError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RuntimeError(
            f"Mesh: rank {rank} could not connect {world_size} ranks at {address} "
            f"({plain_words(error)}); check that every rank runs and can reach this address, "
            "and that the ports of net.ipv4.ip_local_port_range are open between nodes"
        ) from error


def _store_of_rank_0(
    rank: int, world_size: int, timeout_s: float, ranks_here: int
) -> dist.TCPStore:
    """The store of ranks whose starter keeps none; rank 0 has it, on one interface only."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    if ranks_here >= world_size:
        master = LOOPBACK
    elif ranks_here:
        master = host_of_store(master, os.environ.get("GLOO_SOCKET_IFNAME"))
    if rank:
        return dist.TCPStore(master, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return serve_store(master, port, timeout)


def _store_of_start(rank: int, world_size: int, timeout_s: float) -> tuple[dist.Store, str]:
    """A store of this start of the ranks alone, and the id of the start.

    torchrun restarts failed ranks with the same store, in which they would find the addresses of
    the previous start, so gloo would sometimes connect to ports where nobody listens. The restart
    count identifies a start on one host only. So rank 0 draws an id and gives it to each rank under
    a key that only this process can have drawn (test_a_store_that_was_used_before).
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    start_id, deadline = uuid.uuid4().hex, monotonic() + timeout_s
    if rank:
        store.set(f"fastpar/here/{rank}", start_id)
        name = store.get(f"fastpar/name/{start_id}").decode()
        store.add(f"fastpar/ready/{name}", 1)
        return dist.PrefixStore(f"fastpar/start/{name}", store), name
    sent: dict[int, str] = {}
    while store.add(f"fastpar/ready/{start_id}", 0) < world_size - 1:
        for other in range(1, world_size):
            key = f"fastpar/here/{other}"
            number = store.get(key).decode() if store.check([key]) else None
            if number is not None and sent.get(other) != number:
                store.set(f"fastpar/name/{number}", start_id)
                sent[other] = number
        if monotonic() > deadline:
            raise RuntimeError(f"{world_size - 1} other ranks did not connect in {timeout_s:g} s")
        sleep(0.01)
    return dist.PrefixStore(f"fastpar/start/{start_id}", store), start_id
