"""Streams and events without a GPU: copies to and from the host run only when waited for.

What the device computes runs at once, as on any CPU. A copy that was begun on another stream comes
at the last moment: when the computing stream waits for it, when the host asks whether it is over,
or when one that runs follows it. Code that reads too early therefore reads old data, or
nan where the bus is poisoned().
`busy` is work that the device was given and has not done: what follows it is not over.
"""

import contextlib
import threading

import torch

from fastpar.comm import host

_lock = threading.RLock()
_local = threading.local()


class Work:
    def __init__(self, call, after):
        self.call, self.after, self.done = call, [w for w in after if w is not None], False

    def run(self):
        """Whether it is over now."""
        with _lock:
            if not self.done and all(w.run() for w in self.after):
                self.call()
                self.done, self.call, self.after = True, None, []
            return self.done


class Gate(Work):
    """The device is busy until it is opened."""

    def __init__(self):
        super().__init__(None, [])

    def run(self):
        return self.done


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.device, self.last, self.waits = device, None, []

    def put(self, call):
        with _lock:
            self.last = Work(call, [self.last, *self.waits])
            self.waits = []
            if self is COMPUTING:
                self.last.run()

    def wait_stream(self, other):
        if other is not self:
            for work in (other.last, *other.waits):
                self._wait(work)

    def wait_event(self, event):
        self._wait(event.work)

    def _wait(self, work):
        if self is COMPUTING and work is not None:
            assert work.run(), "the device waits for work that never ends"
        elif work is not None:
            self.waits.append(work)


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.work = None

    def record(self, stream=None):
        stream = stream or current_stream()
        stream.put(lambda: None)
        self.work = stream.last

    def query(self):
        return self.work is None or self.work.run()

    def elapsed_time(self, end):
        return 0.0


COMPUTING = FakeStream()


def current_stream(device=None):
    return getattr(_local, "current", COMPUTING)


@contextlib.contextmanager
def on(stream):
    before, _local.current = current_stream(), stream
    try:
        yield
    finally:
        _local.current = before


class FakeBus(host.Bus):
    """Bus as it is on a GPU, with pageable memory."""

    has_gpu = False

    def __init__(self, gb_s=None):
        super().__init__(torch.device("cpu"), pinned=False)

    def behind(self, ups=()):
        for up in ups:  # collectives of a CPU begin at once
            assert up.is_completed()
        return super().behind(ups)


def poisoned(kind):
    """A class of bus whose copies, begun and not waited for, leave nan behind on both sides."""

    class Poisoned(kind):
        def memory(self, numel, dtype):
            return super().memory(numel, dtype).fill_(float("nan"))

        @torch.no_grad()
        def down(self, host, x):
            host.fill_(float("nan"))
            return super().down(host, x)

        @torch.no_grad()
        def up(self, x, host):
            x.fill_(float("nan"))
            return super().up(x, host)

    return Poisoned


@contextlib.contextmanager
def device_is_busy():
    """What the computing stream was given before is not done inside."""
    gate = Gate()
    COMPUTING.last = gate
    try:
        yield
    finally:
        gate.done = True


def install(monkeypatch):
    """torch.cuda's streams and events are these from now on, and the stand-in's bus is FakeBus."""
    from fastpar.axes import offload
    from fastpar.comm import collectives

    def copy(out, x):
        current_stream().put(lambda: _copied(out, x))

    for name, fake in (
        ("Stream", FakeStream),
        ("Event", FakeEvent),
        ("current_stream", current_stream),
        ("stream", on),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(host, "_copy", copy)
    monkeypatch.setattr(collectives, "on_stream", lambda *args: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    monkeypatch.setattr(offload, "SlowBus", FakeBus)
    COMPUTING.last, COMPUTING.waits = None, []


def _copied(out, x):
    with torch.inference_mode(False), torch.no_grad():
        out.copy_(x)
