"""The thread that ends operations in order."""

import threading
import weakref
from concurrent.futures import Future

import pytest
import torch

from fastpar.comm.collectives import Begun, TaskThread


def test_an_operation_that_fails_at_its_end_does_not_stop_the_next():
    thread = TaskThread()
    futures = [Future(), Future(), Future()]

    def fail():
        raise ValueError("at the end")

    for future, rest in zip(futures, (fail, None, lambda: None)):
        thread.put((future, lambda rest: rest, (rest,), ()))
    with pytest.raises(ValueError, match="at the end"):
        futures[0].result(10)
    assert futures[1].result(10) >= 0
    assert futures[2].result(10) >= 0
    thread.stop()


def test_an_operation_without_a_second_half_is_over_at_once():
    """Its result does not wait for the operation behind it."""
    thread = TaskThread()
    queued, seen = threading.Event(), threading.Event()
    first, second = Future(), Future()
    thread.put((first, lambda: queued.wait(10) and None, (), ()))
    thread.put((second, lambda: seen.wait(30) and None, (), ()))
    queued.set()
    assert first.result(10) >= 0
    seen.set()
    assert second.result(10) >= 0
    thread.stop()


def test_an_operation_lets_go_of_its_tensors_before_anybody_goes_on():
    """Who made them frees them then: frees in another thread are not seen by StepMemory."""
    tensor, future, found = torch.zeros(3), Future(), []
    alive = weakref.ref(tensor)
    future.add_done_callback(lambda _: found.append(alive() is None))
    begun = Begun((future, lambda: None, (), (tensor,)))
    del tensor
    begun.end(0.0)
    assert found == [True]


def test_an_operation_lets_go_of_what_it_waited_for():
    future = Future()
    kept = torch.zeros(3)
    alive, found = weakref.ref(kept), []
    future.add_done_callback(lambda _: found.append(alive() is None))

    def begin(x):
        return lambda: x.numel() and None

    begun = Begun((future, begin, (kept,), ()))
    del kept
    begun.end(0.0)
    assert found == [True]


def test_the_thread_runs_on_the_callers_gpu(monkeypatch):
    """Otherwise a look at an event opens a context on GPU 0 in every rank."""
    chosen, future = [], Future()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda i: chosen.append((i, threading.get_ident()))
    )
    thread = TaskThread()
    thread.put((future, lambda: None, (), ()))
    future.result(10)
    assert chosen == [(5, thread.thread.ident)]
    thread.stop()
