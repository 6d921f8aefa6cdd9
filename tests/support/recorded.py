"""A CUDA graph's stand-in on CPUs: it repeats what a region did, without the region's code."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from fastpar.comm.transports import TorchCollectives


class Recorded(TorchDispatchMode):
    """Notes a region's operations; a replay calls them with the same tensors and arguments.

    The first replay does nothing: the recording has done it, other than a capture. Results get the
    memory of the first ones, as in a graph's pool. So numbers and decisions of the host are those
    of the recording, in every replay.

    Args:
        region, warm_up: as for optim.graphs.capture().
    Attributes:
        calls: (operation, its arguments, its results) in order; a collective's is (name, tensors).
    """

    def __init__(self, region, warm_up):
        super().__init__()
        self.calls, self._again, self._is_first = [], [], True
        warm_up()
        with self:
            region()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, (args, kwargs), out))

        def again():
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out)):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)

        self._again.append(again)
        return out

    def replay(self):
        first, self._is_first = self._is_first, False
        with torch.no_grad():
            for again in () if first else self._again:
                again()

    def collective(self, op, call):
        with _disable_current_modes():
            call().wait()
        # The tensors that the call holds, in the order in which the operation takes them.
        cells = [c.cell_contents for c in call.__closure__]
        self.calls.append((op, [x for x in cells if isinstance(x, Tensor)], None))
        self._again.append(lambda: call().wait())


class Synchronous(TorchCollectives):
    """Collectives in the caller, that a Recorded can hold."""

    def __init__(self, group, role=""):
        super().__init__(group, in_caller=True)
        self.captures = True

    def _run(self, op, largest, async_op, call):
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Recorded):
                from fastpar.comm.collectives import DONE

                mode.collective(op, call)
                return DONE if async_op else None
        return super()._run(op, largest, async_op, call)
