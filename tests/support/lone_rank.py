"""One rank of a mesh whose other ranks do not exist; its communication is recorded.

LoneMesh makes a mesh of any number of ranks. Debug(collectives=heard(ops)) does the
arithmetic of an operation here, as if every rank had this rank's data, and appends it to ops.
"""

import contextlib
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from fastpar import AdamW, engine_of, parallelize
from fastpar.comm.collectives import DONE, Collectives
from fastpar.comm.mesh import Mesh
from fastpar.engine.debug import Debug
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel


class Op(NamedTuple):
    """One operation as it was called."""

    role: str
    kind: str
    tensor_bytes: int  # of the whole tensor
    world_size: int
    tag: int
    stride: int  # between neighbours of the group, in ranks of the mesh

    @property
    def wire_bytes(self):
        """What this rank of a ring sends."""
        part = self.tensor_bytes * (self.world_size - 1) / self.world_size
        return {"all_reduce": 2 * part, "send": self.tensor_bytes, "recv": 0}.get(self.kind, part)


class LoneCollectives(Collectives):
    """Sums are W * x, means are x, and what is gathered are W copies of x; in an all-to-all every
    rank sends what this rank sends to itself. What is received is what this rank sent before, in
    the order of its sends; without any, out stays as it is.
    """

    in_caller, transport, why = True, "lone", "no other rank is there"

    def __init__(self, ops, role, group):
        ranks = dist.get_process_group_ranks(group)
        self.ops, self.role = ops, role
        self.rank, self.world_size = dist.get_rank(group), len(ranks)
        self.stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self.device = torch.device("cpu")
        self._sent = deque()

    def barrier(self, *, tag=0):
        pass

    def _said(self, kind, whole, tag):
        self.ops.append(Op(self.role, kind, whole.nbytes, self.world_size, tag, self.stride))
        return DONE

    @torch.no_grad()
    def _all_reduce(self, x, mean, tag=0):
        if not mean:
            x.mul_(self.world_size)
        return self._said("all_reduce", x, tag)

    @torch.no_grad()
    def _reduce_scatter(self, out, x, mean, tag=0):
        own = x.view(-1).view(self.world_size, -1)[self.rank]
        if own.data_ptr() != out.data_ptr():
            out.view(-1).copy_(own)
        if not mean:
            out.mul_(self.world_size)
        return self._said("reduce_scatter", x, tag)

    @torch.no_grad()
    def _all_gather(self, out, x, tag=0):
        rows, mine = out.view(-1).view(self.world_size, -1), x.view(-1)
        if rows[self.rank].data_ptr() != mine.data_ptr():
            rows[self.rank].copy_(mine)
        for others in (rows[: self.rank], rows[self.rank + 1 :]):
            others.copy_(rows[self.rank])
        return self._said("all_gather", out, tag)

    def _broadcast(self, x, src, tag=0):
        return self._said("broadcast", x, tag)

    @torch.no_grad()
    def _all_to_all(self, out, x, out_sizes, x_sizes, tag=0):
        mine = x.view(-1).split(x_sizes)[self.rank]
        for part in out.view(-1).split(out_sizes):
            part.copy_(mine[: part.numel()])
        return self._said("all_to_all", x, tag)

    def _send(self, x, dst, tag=0):
        self._sent.append(x.clone())
        return self._said("send", x, tag)

    @torch.no_grad()
    def _recv(self, out, src, tag=0):
        if self._sent:
            out.copy_(self._sent.popleft())
        return self._said("recv", out, tag)


def heard(ops):
    """For Debug(collectives=...): what every group of a LoneMesh does is appended to ops."""
    return lambda group, role: LoneCollectives(ops, role, group or dist.group.WORLD)


class LoneMesh(Mesh):
    """world_size ranks of which only this one exists, over torch's fake process group.

    It replaces the process group of this process until close().
    """

    def __init__(self, world_size, rank=0, **axes):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        assert not dist.is_initialized(), "close the other mesh first"
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        super().__init__(device="cpu", **axes)

    def check_same(self, caller, lines):
        """Does nothing: there is no other rank."""

    def broadcast_(self, tensors, *axes):
        """Does nothing: all ranks have these values."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if dist.is_initialized():  # a test may have closed it
            dist.destroy_process_group()


class LoneRun:
    """A rank that trains, with its collectives in forward, backward and step.

    Args:
        build: model(*batch) is a loss; build() is called where the mesh is.
        axes: of the mesh; mode: of recomputation; options: of parallelize().
        ops: where collectives are recorded; a model may add its own entries.
    """

    def __init__(self, build, batch, world_size, rank, axes=None, mode="none", ops=None, **options):
        self.batch, self.ops = batch, [] if ops is None else ops
        self.mesh = LoneMesh(world_size, rank, **axes or {})
        try:
            debug = Debug(collectives=heard(self.ops))
            self.model = parallelize(build(), self.mesh, Parallel.of(**options), debug=debug)
            engine_of(self.model).input_checks.clear()  # of the first forwards only
            recompute(self.model, mode)
            self.optimizer = AdamW(self.model.parameters())
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.mesh.__exit__()

    def train(self, n_micro=1, no_sync=False):
        """The collectives of each phase, and of zero_grad() at the end. no_sync: but for the last
        micro-batch."""
        phases, engine = [], engine_of(self.model)
        for i in range(n_micro):
            with engine.no_sync() if no_sync and i < n_micro - 1 else contextlib.nullcontext():
                loss = self.model(*self.batch)
                phases.append(self.said())
                loss.backward()
                phases.append(self.said())
        self.optimizer.step()
        phases.append(self.said())
        self.optimizer.zero_grad()
        return [*phases, self.said()]

    @torch.no_grad()
    def evaluate(self):
        self.model(self.batch[0])
        return self.said()

    def said(self):
        ops = list(self.ops)
        self.ops.clear()
        return ops
