"""Inputs of recomputed blocks in the host's memory, from their forward to their backward.

A block of mode "full" keeps its input alone (recompute.py). It goes down as the next block begins,
and comes up again while the block after it is in backward: one input at a time is on its way in
each direction, and the last one never leaves. The same bits as without.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch
from torch import Tensor

from fastpar.comm.bus import Bus
from fastpar.comm.handles import Handle

_LEAST_BYTES = 1 << 16  # smaller ones (keys, scales) stay
_AHEAD = 2  # inputs that come up while a block is in backward: ours has two


class _Kept:
    """One input: on the device, on the host, or on its way. Its slot outlives a second backward."""

    def __init__(self, x: Tensor, before: _Kept | None, free: list[Tensor]) -> None:
        self.x: Tensor | None = x
        # The one that backward needs next. Weak: its graph alone keeps it, and its slot.
        self.before = None if before is None else weakref.ref(before)
        self.device, self.free, self.used = x.device, free, False
        self.host: Tensor | None = None
        self.handle: Handle | None = None

    def __del__(self) -> None:
        if self.handle is not None:  # a backward that stopped: memory is in use until it is there
            self.handle.wait()
        if self.host is not None:
            self.free.append(self.host)


class HostActivations:
    """Keeps inputs of blocks on the host; one for a model.

    Host memory: pinned, as much as the inputs of one step, allocated in the first one.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._free: defaultdict[tuple, list[Tensor]] = defaultdict(list)
        self._last: _Kept | None = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside, what autograd saves goes to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def host_bytes(self) -> int:
        """That are free now: all of them, between steps."""
        return sum(x.nbytes for free in self._free.values() for x in free)

    def _pack(self, x: Tensor) -> Tensor | _Kept:
        if x.nbytes < _LEAST_BYTES or not x.is_contiguous() or isinstance(x, torch.nn.Parameter):
            return x
        before, free = self._last, self._free[x.shape, x.dtype]
        if before is not None and before.x is not None:
            old = before.x
            host = before.free.pop() if before.free else None
            if host is None:
                host = self._bus.memory(old.numel(), old.dtype).view(old.shape)
            before.host, before.handle = host, self._bus.down(host, old)
            before.x = None
        self._last = _Kept(x.detach(), before, free)
        return self._last

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept
        self._last = None
        x = self._begin(kept)
        if kept.handle is not None:
            kept.handle.wait()
            kept.handle = None
        if kept.host is not None:  # backward is its only owner
            kept.x = None
        kept.used = True
        before, n = kept.before, 0
        while before is not None and n < _AHEAD:
            ahead = before()
            if ahead is None:  # of a micro-batch whose backward is over
                break
            if not ahead.used:
                self._begin(ahead)
                n += 1
            before = ahead.before
        return x

    def _begin(self, kept: _Kept) -> Tensor:
        """On the device, or on its way there."""
        if kept.x is None:
            assert kept.host is not None
            if kept.handle is not None:
                kept.handle.wait()  # for its way down
            kept.x = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
            kept.handle = self._bus.up(kept.x, kept.host)
        return kept.x
