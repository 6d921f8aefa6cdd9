"""The choice of a transport is visible, and never a quiet fallback."""

import warnings

import pytest
import torch

from fastpar.comm import transports
from fastpar.comm.transports import make_collectives
from fastpar.testing import run_ranks


def chosen(transport, in_rank_order=False):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        c = make_collectives(transport=transport, timeout_s=30.0, in_rank_order=in_rank_order)
    x = torch.ones(4)
    c.all_reduce(x)
    assert in_rank_order == getattr(c, "in_rank_order", in_rank_order)
    return c.transport, c.why, x.tolist(), [str(w.message) for w in seen]


def test_ranks_of_one_host_share_memory():
    for transport, why, x, warned in run_ranks(chosen, 2, "auto", backend="gloo"):
        assert (transport, why) == ("shm", "all ranks are on this host")
        assert x == [2.0] * 4
        assert not warned


def test_asked_for_torch():
    for in_rank_order in (False, True):
        outcome = run_ranks(chosen, 2, "torch", in_rank_order)[0]
        assert outcome == ("gloo", "asked for", [2.0] * 4, [])


def elsewhere(transport, in_rank_order=False):
    """Makes each rank believe that it is on a host of its own."""
    import torch.distributed as dist

    here = transports._place
    transports._place = lambda: (f"host {dist.get_rank()}", *here()[1:])
    try:
        return chosen(transport, in_rank_order)
    finally:
        transports._place = here


def test_ranks_of_several_hosts_fall_back_with_a_warning():
    for transport, why, x, warned in run_ranks(elsewhere, 2, "auto", True, backend="gloo"):
        assert transport == "gloo"
        assert "rank 1 is on another host" in why
        assert x == [2.0] * 4
        assert "gloo instead of shared memory: rank 1 is on another host" in warned[0]


def test_forced_shm_that_cannot_be():
    with pytest.raises(RuntimeError, match="expected ranks that can share memory, got: rank 1 is"):
        run_ranks(elsewhere, 2, "shm", backend="gloo")


def test_bad_arguments():
    with pytest.raises(ValueError, match="expected auto, shm or torch, got transport=tcp"):
        make_collectives(transport="tcp")
    with pytest.raises(ValueError, match="expected CPU tensors for transport=shm, got device=cuda"):
        make_collectives(transport="shm", device="cuda")
