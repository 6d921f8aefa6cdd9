"""groups.py: which ranks meet in which process group, and what runs on it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fastpar.axes.tensor import tp_group
from fastpar.comm.collectives import OneRank
from fastpar.comm.mesh import Mesh
from fastpar.engine.bucket import STAGES
from fastpar.engine.debug import Debug, Delays
from fastpar.engine.parallelize import GroupMaker
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def members(collectives):
    return None if collectives is None else dist.get_process_group_ranks(collectives.group)


def maker_of(mesh, transport="torch", factory=None, debug=None, deterministic=False):
    debug = replace(debug or Debug(), collectives=factory)
    return GroupMaker(mesh, transport, Parallel(deterministic=deterministic), debug)


def roles(maker, stage, n_shards):
    groups, control = maker.of_engine(STAGES[stage], n_shards)
    assert (groups.again is not None) == (maker.again and stage == 0)
    assert groups.again is None or members(groups.again) == members(groups.reduce)
    found = {**vars(groups), "control": control}
    for name in ("again", "node", "nodes"):
        del found[name]
    return found


def groups_of(tp, stage, n_shards):
    maker = maker_of(Mesh(tp=tp))
    of_tp = members(tp_group(maker.mesh, maker.make)) if tp > 1 else None
    maker.again = tp == 1
    found = roles(maker, stage, n_shards)
    return of_tp, *(members(found[name]) for name in ("reduce", "gather", "copies", "control"))


ALL = list(range(8))


@pytest.mark.parametrize(
    ("tp", "stage", "n_shards", "expected"),
    [
        (1, 0, 1, (None, ALL, None, None, ALL)),
        (1, 2, 8, (None, ALL, ALL, None, ALL)),
        (1, 3, 2, (None, [4, 5], [4, 5], [1, 3, 5, 7], ALL)),
        (2, 0, 1, ([4, 5], [1, 3, 5, 7], None, None, ALL)),
        (2, 1, 4, ([4, 5], [1, 3, 5, 7], [1, 3, 5, 7], None, ALL)),
        (2, 3, 2, ([4, 5], [5, 7], [5, 7], [1, 5], ALL)),
        (8, 0, 1, (ALL, None, None, None, ALL)),
    ],
)
def test_what_rank_5_of_8_is_told(tp, stage, n_shards, expected):
    assert run_ranks(groups_of, 8, tp, stage, n_shards)[5] == expected


def test_one_rank_talks_to_nobody():
    assert set(roles(maker_of(Mesh()), 0, 1).values()) == {None}


def sums_at_once():
    """Every role has something under way, in another order on each rank."""
    mesh = Mesh(tp=2, timeout_s=30)
    maker = maker_of(mesh)
    groups = {"tp": tp_group(maker.mesh, maker.make), **roles(maker, 3, 1)}
    names = sorted(groups, reverse=mesh.rank % 2 == 1)
    sums = {
        name: torch.full((1000,), mesh.rank + 1.0) for name in names if groups[name] is not None
    }
    handles = [groups[name].all_reduce(x, async_op=True) for name, x in sums.items()]
    for handle in handles:
        handle.wait()
    for c in groups.values():
        if c is not None:
            c.close()
    return {name: x.unique().tolist() for name, x in sums.items()}


def test_roles_do_not_queue_behind_each_other():
    """Over gloo, where two orders of one group's operations would add up other tensors."""
    for rank, sums in enumerate(run_ranks(sums_at_once, 4, backend="gloo")):
        pair = 3.0 if rank < 2 else 7.0
        copies = 4.0 if rank % 2 == 0 else 6.0
        alone = [rank + 1.0]
        assert sums == {
            "tp": [pair],
            "reduce": alone,
            "gather": alone,
            "copies": [copies],
            "control": [10.0],
        }


def test_shared_memory_serves_every_axis():
    """Ranks of one host: the transport is chosen for each group."""

    def ranks():
        maker = maker_of(Mesh(tp=2), "auto")
        groups = {"tp": tp_group(maker.mesh, maker.make), **roles(maker, 2, 2)}
        return {name: c.transport for name, c in groups.items() if c is not None}

    for kinds in run_ranks(ranks, 4):
        assert kinds == dict.fromkeys(("tp", "reduce", "gather", "control"), "shm")


def test_a_factory_and_delays_are_used_for_every_role():
    made = []

    def ranks():
        mesh = Mesh(tp=2)

        def factory(group, role):
            made.append((mesh.rank, role, dist.get_process_group_ranks(group)))
            return maker_of(mesh).make(group, role)

        maker = maker_of(mesh, factory=factory, debug=Debug(delay_ms=1.0))
        return [tp_group(maker.mesh, maker.make), *roles(maker, 3, 1).values()]

    for groups in run_ranks(ranks, 4):  # nothing travels where a shard is whole
        several = [c for c in groups if not isinstance(c, OneRank)]
        assert [[type(o) for o in c.observers] for c in several] == [[Delays]] * 3
    assert sorted(x for x in made if x[0] == 3) == [
        (3, "control", [0, 1, 2, 3]),
        (3, "reduce", [1, 3]),  # of the copies
        (3, "tp", [2, 3]),
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_in_rank_order_are_asked_of_every_group(deterministic):
    def ranks():
        maker = maker_of(Mesh(tp=2), deterministic=deterministic)
        groups = [tp_group(maker.mesh, maker.make), *roles(maker, 2, 2).values()]
        return {c.in_rank_order for c in groups if c is not None}

    assert run_ranks(ranks, 4) == [{deterministic}] * 4
