"""The watchdog with ranks that are threads of this process; for real ones: tests/faults."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fastpar.comm import watchdog
from fastpar.comm.ranks import make_store

TIMEOUT_S = 1.2


class Ranks:
    """Threads with a watchdog each; what each of them said."""

    def __init__(self, world_size):
        self.store = make_store()
        self.world_size, self.said, self.dogs = world_size, {}, {}
        self.released, self.threads = threading.Event(), []

    def start(self, rank, body, *args):
        def run():
            def end(message):
                self.said[rank] = message

            dog = watchdog.Watchdog(
                rank, self.world_size, timeout_s=TIMEOUT_S, store=self.store, end=end
            )
            self.dogs[rank] = dog
            with dog:
                body(self, *args)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def wait_for(self, ranks, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not self.said.keys() >= set(ranks):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def end(self):
        self.released.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        self.said.clear()
        self.threads.clear()
        self.released.clear()


@pytest.fixture
def ranks():
    made = []
    yield lambda world_size: made.append(Ranks(world_size)) or made[-1]
    for each in made:
        each.end()


def a_long_computation(ranks, step, op=None, place=None):
    """Or, with an op, a wait in it."""
    watchdog.in_step(step)
    watchdog.activity().place = place
    with watchdog.waiting(op) if op else contextlib.nullcontext():
        ranks.released.wait()


class Hangs:
    """A store that does not answer."""

    def __init__(self, released):
        self.released = released

    def __getattr__(self, name):
        return lambda *args: self.released.wait()


SCENES = {  # (rank -> (step, op, place), what becomes of rank 1's store, who says what of the rest)
    "not waiting": (
        {0: (7, "all_reduce", ("waiting for bucket", 2)), 1: (6,), 2: (7, "all_gather")},
        None,
        {
            0: r": rank 1 is not waiting: step 6, outside of collectives; .*rank 0 has "
            r"waited 1\..*step 7, waiting for bucket 2 \(all_reduce\)",
            2: r": rank 1 is not waiting: .*rank 2 has waited 1\..*step 7 \(all_gath",
        },
    ),
    "no heartbeat": (
        {1: (4, "reduce_scatter", ("waiting for bucket", 3)), 0: (5, "all_reduce")},
        "gone",
        {
            0: ": rank 1 gave no sign of life for .*last seen in step 4, waiting for bucket 3 "
            r"\(reduce_scatter\); .*last stack of rank 1"
        },
    ),
    "never came": (
        {0: (1, "all_reduce")},
        None,
        {0: ": rank 1 never gave a sign of life; rank 0 has waited"},
    ),
    "behind": (
        {0: (7, "all_reduce"), 1: (7, "all_reduce"), 2: (5, "all_gather")},
        None,
        dict.fromkeys((0, 1), r": rank 2 is behind: step 5 \(all_gather\); "),
    ),
    "nobody is behind": (
        {0: (7, "all_gather"), 1: (7, "all_reduce")},
        None,
        dict.fromkeys((0, 1), r"none is behind: rank 0 in step 7 \(all_gather\), rank 1 in"),
    ),
    "no answer": (
        {1: (3, "all_reduce")},
        "hangs",
        {1: ": rank 0 or the host of the ranks' store has not answered for"},
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_who_is_waited_for_is_named(ranks, scene, monkeypatch):
    monkeypatch.setattr(watchdog, "_STORE_S", 0.5)
    bodies, store, words = SCENES[scene]
    some = ranks(max(2, len(bodies)))
    for rank, body in bodies.items():
        some.start(rank, a_long_computation, *body)
        if rank == 1 and store:
            time.sleep(0.3)
            some.dogs[1]._store = Hangs(some.released) if store == "hangs" else None
    began = time.monotonic()
    some.wait_for(words)
    assert time.monotonic() - began < TIMEOUT_S + 5
    for rank, pattern in words.items():
        message = some.said[rank]
        first, *stack = message.splitlines()
        assert first.startswith("watchdog: a collective did not end within timeout=1.2s: rank ")
        assert re.search(pattern, message, re.DOTALL), message
        if scene == "not waiting":
            assert stack[0] == "  last stack of rank 1, innermost last:"
            assert any(row.endswith(" a_long_computation") for row in stack)
            assert 1 not in some.said


class Slow:
    """A store whose answers take two heartbeats."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def multi_get(self, keys):
        time.sleep(TIMEOUT_S / 4)
        return self.store.multi_get(keys)


def test_a_rank_that_gives_no_sign_is_no_slow_one():
    """Also where the look at it has to begin anew and takes its time, as on a busy machine."""
    store, said = make_store(), []
    dog, other = (
        watchdog.Watchdog(rank, 2, timeout_s=TIMEOUT_S, store=store, end=said.append)
        for rank in range(2)
    )
    dog._store.set("beat/1", json.dumps(other._beat()))
    dog._store = Slow(dog._store)
    with dog, watchdog.waiting("all_reduce"):
        while dog._waited < 0.9 * TIMEOUT_S:
            time.sleep(0.01)
        dog._since = None  # as after a time in which this rank stood still
        deadline = time.monotonic() + 20
        while not said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "rank 1 gave no sign of life for" in said[0]


@pytest.mark.slow
def test_one_that_has_left_is_named(ranks):
    two = ranks(2)
    two.start(0, lambda ranks: time.sleep(0.3))
    two.start(1, a_long_computation, 1, "all_reduce")
    two.wait_for([1])
    assert ": rank 0 has left the run; rank 1 has waited 1." in two.said[1]


@pytest.mark.slow
def test_nobody_is_named_as_long_as_nobody_waits_too_long(ranks):
    two = ranks(2)

    def works(ranks):
        for step in range(6):
            watchdog.in_step(step)
            with watchdog.waiting("all_reduce"):
                time.sleep(0.6 * TIMEOUT_S)
            if ranks.released.is_set():
                return

    two.start(0, works)
    two.start(1, a_long_computation, 0)
    time.sleep(2 * TIMEOUT_S)
    assert two.said == {}


@pytest.mark.slow
def test_time_in_which_this_rank_stood_still_is_not_counted():
    """SIGSTOP and SIGCONT of a whole run, as a laptop that sleeps: nobody is accused."""
    code = f"""
import time
from fastpar.comm.ranks import make_store
from fastpar.comm.watchdog import Watchdog, waiting
store = make_store()
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
    def entry(name, start, end):
        return (None, name, *(SimpleNamespace(query=lambda x=x: x) for x in (start, end)))

    past, now, later = entry("a", True, True), entry("b", True, False), entry("c", False, False)
    assert watchdog._unfinished([past, now, later]) is now
    assert watchdog._unfinished([past, later]) is None  # the device computes what comes before it
    watchdog.on_stream("stream", "all_reduce", *now[2:])  # nobody watches: nothing is kept
    assert watchdog._streams is None
    dog = watchdog.Watchdog(0, 2, timeout_s=100.0, store=dist.HashStore())
    with dog:
        watchdog.activity().place = ("waiting for bucket", 4)
        watchdog.on_stream("stream", "all_reduce", *past[2:])
        assert dog._now() is None
        watchdog.on_stream("stream", "all_gather", *now[2:])
        watchdog.activity().place = None
        watchdog.on_stream("stream", "all_reduce", *later[2:])
        key, place, op = dog._now()
        assert (place, op) == (("waiting for bucket", 4), "all_gather")
        assert dog._now()[0] == key


@pytest.mark.slow
def test_the_end_of_a_rank_leaves_its_message(tmp_path):
    code = """
from fastpar.comm import watchdog
watchdog._LINGER_S = 0.1
watchdog._exit("watchdog: words")
"""
    note = tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(note)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == watchdog.HUNG
    assert done.stderr.startswith("\nwatchdog: words\n")
    assert json.loads(note.read_text())["message"]["message"] == "RuntimeError: watchdog: words"


def test_one_rank_has_nobody_to_wait_for():
    before = threading.active_count()
    with watchdog.Watchdog(0, 1, timeout_s=0.2):
        assert threading.active_count() == before
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"Watchdog: expected timeout_s > 0, got timeout_s="):
            watchdog.Watchdog(0, 2, timeout_s=timeout_s)
