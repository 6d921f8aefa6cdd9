"""The watchdog with ranks that are threads of this process; for real ones: test_faults_hang.py."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import watchdog
from fastpar.comm.watchdog import (
    HUNG,
    Watchdog,
    _kill,
    _process,
    _unfinished,
    activity,
    count_call,
    in_step,
    on_stream,
    waiting,
)

TIMEOUT_S = 1.2


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Ranks:
    """Threads with a watchdog each; what each of them said."""

    def __init__(self, store, world_size):
        self.store, self.world_size = store, world_size
        self.said, self.dogs = {}, {}
        self.released = threading.Event()
        self.threads = []

    def start(self, rank, body):
        def run():
            def end(message, status, slow):
                self.said[rank] = (message, status, slow)

            dog = Watchdog(rank, self.world_size, timeout_s=TIMEOUT_S, store=self.store, end=end)
            self.dogs[rank] = dog
            with dog:
                body(self)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def wait_for(self, *ranks, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not self.said.keys() >= set(ranks):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def close(self):
        self.released.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def ranks(store):
    made = []

    def make(world_size):
        made.append(Ranks(store, world_size))
        return made[-1]

    yield make
    for each in made:
        each.close()


def waits(step, op="all_reduce", place=None):
    def body(ranks):
        in_step(step)
        activity().place = place
        with waiting(op):
            ranks.released.wait()

    return body


def computes(step):
    def a_long_computation(ranks):
        in_step(step)
        ranks.released.wait()

    return a_long_computation


def test_who_waits_for_nobody_is_named_with_its_stack(ranks):
    three = ranks(3)
    three.start(0, waits(7, place=("waiting for bucket", 2)))
    three.start(1, computes(6))
    three.start(2, waits(7, "all_gather"))
    began = time.monotonic()
    three.wait_for(0, 2)
    assert time.monotonic() - began < TIMEOUT_S + 5
    for rank, where in ((0, "step 7, waiting for bucket 2 (all_reduce)"), (2, "step 7 (all_gath")):
        message, status, slow = three.said[rank]
        assert status == HUNG
        first, *stack = message.splitlines()
        assert first.startswith("watchdog: expected every rank to take part within timeout=1.2s, ")
        assert "got rank=1 that waits for nobody: step 6, outside of collectives; " in first
        assert f"rank {rank} has waited 1." in first
        assert where in first
        assert stack[0] == "  last stack of rank 1, innermost last:"
        assert any(row.endswith(" a_long_computation") for row in stack)
        assert slow == _process(os.getpid())
    assert 1 not in three.said


def test_nobody_is_named_as_long_as_nobody_waits_too_long(ranks):
    two = ranks(2)

    def works(ranks):
        for step in range(6):
            in_step(step)
            with waiting("all_reduce"):
                time.sleep(0.6 * TIMEOUT_S)
            if ranks.released.is_set():
                return

    two.start(0, works)
    two.start(1, computes(0))
    time.sleep(2 * TIMEOUT_S)
    assert two.said == {}


def test_a_heartbeat_that_stands_still(ranks):
    two = ranks(2)
    two.start(1, waits(4, "reduce_scatter", ("waiting for bucket", 3)))
    time.sleep(0.3)
    dog = two.dogs[1]
    dog._store = None  # it beats no more
    two.start(0, waits(5))
    two.wait_for(0)
    assert "got rank=1 without a sign of life for " in two.said[0][0]
    assert "last seen in step 4, waiting for bucket 3 (reduce_scatter); " in two.said[0][0]
    assert "last stack of rank 1" in two.said[0][0]


def test_a_rank_that_never_came_and_one_that_has_left(ranks):
    two = ranks(2)
    two.start(0, waits(1))
    two.wait_for(0)
    assert "got rank=1 without any sign of life; rank 0 has waited" in two.said[0][0]
    two.close()
    # The ranks after a restart share the store, and are told nothing by what is left there.
    two.said.clear()
    two.released.clear()
    two.threads.clear()
    two.start(1, waits(1))
    two.wait_for(1)
    assert "got rank=0 that has left the run; rank 1 has waited 1." in two.said[1][0]


def test_of_ranks_that_all_wait_the_last_one_is_named(ranks):
    three = ranks(3)
    three.start(0, waits(7))
    three.start(1, waits(7))
    three.start(2, waits(5, "all_gather"))
    three.wait_for(0, 1)
    for rank in (0, 1):
        assert "got rank=2 that is behind: step 5 (all_gather); " in three.said[rank][0]


def test_when_nobody_is_behind_all_places_are_told(ranks):
    two = ranks(2)
    two.start(0, waits(7, "all_gather"))
    two.start(1, waits(7, "all_reduce"))
    two.wait_for(0, 1)
    for rank in (0, 1):
        said = two.said[rank][0]
        assert "none of them behind: rank 0 in step 7 (all_gather), rank 1 in step 7 (all" in said


def test_a_store_that_does_not_answer_blames_its_host(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "_STORE_S", 0.5)
    two = ranks(2)
    two.start(1, waits(3))
    time.sleep(0.3)

    class Hangs:
        def __getattr__(self, name):
            return lambda *args: two.released.wait()

    two.dogs[1]._store = Hangs()
    two.wait_for(1)
    assert (
        "got rank=0, or the host that keeps the ranks' store, without an answer for"
        in (two.said[1][0])
    )


@pytest.mark.slow
def test_time_in_which_this_rank_stood_still_is_not_counted():
    """SIGSTOP and SIGCONT of a whole run, as a laptop that sleeps: nobody is accused."""
    code = f"""
import time
import torch.distributed as dist
from fastpar.comm.watchdog import Watchdog, waiting
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with Watchdog(0, 2, timeout_s={TIMEOUT_S}, store=store), waiting("all_reduce"):
    print("up", flush=True)
    time.sleep({0.3 + 2.5 * TIMEOUT_S + 0.7})
print("ended", flush=True)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    rank = subprocess.Popen([sys.executable, "-c", code], **pipes, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "up\n"
    time.sleep(0.3)  # it has begun to count
    rank.send_signal(19)
    time.sleep(2.5 * TIMEOUT_S)
    rank.send_signal(18)
    assert rank.communicate(timeout=60) == ("ended\n", "")
    assert rank.returncode == 0


def test_a_device_that_is_in_a_collective():
    class Event:
        def __init__(self, over):
            self.over = over

        def query(self):
            return self.over

    def entry(name, start, end):
        return (None, name, Event(start), Event(end))

    past, now, later = entry("a", True, True), entry("b", True, False), entry("c", False, False)
    assert _unfinished([past, now, later]) is now
    assert _unfinished([past, past]) is None
    assert _unfinished([past, later]) is None  # the device computes what comes before it
    on_stream("stream", "all_reduce", *now[2:])  # nobody watches: nothing is kept
    assert watchdog._streams is None
    dog = Watchdog(0, 2, timeout_s=100.0, store=dist.HashStore())
    with dog:
        activity().place = ("waiting for bucket", 4)
        on_stream("stream", "all_reduce", *past[2:])
        assert dog._now() is None
        on_stream("stream", "all_gather", *now[2:])
        activity().place = None
        on_stream("stream", "all_reduce", *later[2:])
        key, place, op = dog._now()
        assert (place, op) == (("waiting for bucket", 4), "all_gather")
        assert dog._now()[0] == key


def test_what_a_rank_does_is_recorded():
    here = activity()
    before = here.waits, watchdog._calls[0]
    with waiting("outer"), waiting("inner"):
        assert here.op == "outer"
    assert here.op is None
    count_call()
    assert (here.waits, watchdog._calls[0]) == (before[0] + 1, before[1] + 1)
    other = []
    thread = threading.Thread(target=lambda: other.append(activity()))
    thread.start()
    thread.join()
    assert other[0] is not here


def test_the_end_of_a_rank_leaves_its_message_and_kills_the_slow_one(tmp_path):
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    code = f"""
from fastpar.comm import watchdog
watchdog._LINGER_S = 0.1
watchdog._exit("watchdog: words", watchdog.HUNG, watchdog._process({stopped.pid}))
"""
    note = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(note)},
    )
    assert done.returncode == HUNG
    assert done.stderr.startswith("\nwatchdog: words\n")
    assert json.loads(note.read_text())["message"]["message"] == "RuntimeError: watchdog: words"
    assert stopped.wait(10) == -9


def test_another_process_of_the_same_number_is_not_killed():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    known = _process(other.pid)
    _kill([*known[:3], "1"])
    _kill([])
    time.sleep(0.1)
    assert other.poll() is None
    _kill(known)
    assert other.wait(10) == -9


def test_one_rank_has_nobody_to_wait_for():
    before = threading.active_count()
    with Watchdog(0, 1, timeout_s=0.2):
        assert threading.active_count() == before


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_none(timeout_s):
    with pytest.raises(ValueError, match=r"Watchdog: expected timeout_s > 0, got timeout_s="):
        Watchdog(0, 2, timeout_s=timeout_s)


def test_threads_look_at_their_ranks_gpu(monkeypatch):
    """Otherwise an event's query opens a context on GPU 0 in every rank."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    watchdog.on_this_gpu(chosen.append)("ran")
    assert chosen == [5, "ran"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    watchdog.on_this_gpu(chosen.append)("alone")
    assert chosen == [5, "ran", "alone"]
