"""meeting.py: replicas that go, come back as copies, are too late, or are alone."""

import gc
import threading
from datetime import timedelta
from threading import Thread
from time import sleep
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_engine import SMALL, Net
from test_outer import adamw, train, weights

from fastpar import Mesh, Outer, parallelize
from fastpar.outer.meeting import Meeting
from fastpar.testing import run_ranks

STEPS = 12


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def replica(mesh, tell=dict, **options):
    model = parallelize(Net(), mesh, zero_stage=2, **SMALL)
    opt = adamw(model)
    return model, opt, Outer(opt, every=2, silent_s=5.0, tell=tell, **options)


def own(mesh):
    return lambda i: 2 * i + mesh.replica


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_one_goes_and_comes_back_as_a_copy(options):
    """Two replicas of two ranks: the second has nothing left of itself, and meets the first again
    with its weights, moments and outer state."""

    def rank():
        mesh = Mesh(replicas=2)
        model, opt, outer = replica(mesh, tell=lambda: {"step": outer.steps}, **options)
        if mesh.replica == 0:
            alone = []
            for step in range(STEPS):
                train(model, opt, 1, step, own(mesh))
                alone.append(outer.members)
                if step == 4:  # until the other one asks
                    store = outer._meeting.store
                    store.set("went on alone", "yes")
                    store.wait([f"ask/1/{r}" for r in range(2)])
            assert [0, 1] in alone
            assert [0] in alone
            assert alone[-1] == [0, 1]
        else:
            train(model, opt, 3, 0, own(mesh))
            outer._meeting.leave()
            outer._meeting.store.wait(["went on alone"])
            mesh = Mesh(replicas=2)
            model, opt, outer = replica(mesh, **options)
            told = outer.meet()
            assert told["step"] == outer.steps >= 6
            train(model, opt, STEPS - outer.steps, outer.steps, own(mesh))
        state = opt.state_dict()["state"]
        return weights(model), [s["outer_weight"] for s in state.values()], outer.steps

    first, _, second, _ = run_ranks(rank, 4, timeout_s=60)
    assert first[2] == second[2] == STEPS
    for mine, theirs in zip(first[1], second[1], strict=True):
        assert torch.equal(mine, theirs)
    if not options:  # the last step was a meeting of all weights
        for mine, theirs in zip(first[0], second[0], strict=True):
            assert torch.equal(mine, theirs)


def test_one_that_was_silent_for_too_long():
    """The others have gone on without it, and it must not use what it has."""

    def rank():
        mesh = Mesh(replicas=2)
        model, opt, outer = replica(mesh)
        outer.meet()
        if mesh.replica == 0:
            train(model, opt, 4, 0, own(mesh))
            assert outer.members == [0]
            outer._meeting.store.set("went on", "yes")
            return
        outer._meeting.leave()
        outer._meeting.store.wait(["went on"])
        with pytest.raises(
            RuntimeError, match=r"expected every replica to beat within silent_s=5, got none of re"
        ):
            train(model, opt, 2, 0, own(mesh))

    run_ranks(rank, 2, timeout_s=30)


@pytest.mark.parametrize("ended", [True, False])
def test_nobody_to_be_a_copy_of(ended):
    def rank():
        mesh = Mesh(replicas=2)
        outer = replica(mesh)[2]
        outer.meet()
        if mesh.replica == 0:
            outer._meeting.leave(ended=ended)
            outer._meeting.store.set("left", "yes")
            return
        outer._meeting.leave()
        outer._meeting.store.wait(["left"])
        late = Outer(adamw(parallelize(Net(), Mesh(replicas=2))), every=2, silent_s=0.1)
        message = "got none: they have ended" if ended else "got none of them lives; start all"
        with pytest.raises(RuntimeError, match=rf"give replica 1 a copy, {message}"):
            late.meet()

    run_ranks(rank, 2, timeout_s=30)


def test_one_that_is_behind_becomes_a_copy():
    """Replicas start from checkpoints of different steps: the newest counts."""

    def rank():
        mesh = Mesh(replicas=2)
        model, opt, outer = replica(mesh)
        if mesh.replica == 0:
            opt.state.clear()
            outer._count.fill_(4.0)
        told = outer.meet()
        assert (told is None) == (mesh.replica == 0)
        train(model, opt, 12 - outer.steps, outer.steps, own(mesh))
        return outer.steps, weights(model)

    first, second = run_ranks(rank, 2, timeout_s=30)
    assert first[0] == second[0] == 12
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_a_replica_that_waits_for_a_group_lives():
    """In the store, for the address of a rank that does not come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meeting(number):
        mine = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        about = {"replica": number, "replicas": 2, "rank": 0, "world_size": 1, "timeout_s": 20.0}
        return Meeting(SimpleNamespace(store=mine, **about), silent_s=1.0), mine

    (waits, its), (sees, _) = meeting(0), meeting(1)
    waits._beat()
    waiting = Thread(target=wait_in_vain, args=(its, 3.0))
    waiting.start()
    seen = []
    while waiting.is_alive():
        seen.append(sees._lives(0))
        sleep(0.1)
    waits.leave()
    assert len(seen) > 5
    assert all(seen)


def test_a_beat_is_over_when_its_meeting_is_gone():
    """So too at the end of a process, which aborts if a thread is in the store then."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"replica": 0, "replicas": 2, "rank": 0, "world_size": 1, "timeout_s": 20.0}
    meeting, before = (
        Meeting(SimpleNamespace(store=store, **about), silent_s=1.0),
        threading.enumerate(),
    )
    meeting._beat()
    inside = meeting.store
    [beat] = set(threading.enumerate()) - set(before)
    assert inside.check(["beat/0/0"])
    del meeting
    gc.collect()
    assert not beat.is_alive()
    assert not inside.check(["beat/0/0"])


def wait_in_vain(store, seconds):
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=seconds))
