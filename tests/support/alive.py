"""Counts the bytes of a thread's live tensors by watching its operations."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Alive(TorchDispatchMode):
    """Bytes of live storages that this thread has seen: now, and the peak."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see((args, kwargs, out))
        self.now()
        return out

    def see(self, tree):
        for x in tree_iter(tree):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages[storage._cdata] = storage._weak_ref()

    def now(self):
        total = 0
        for key, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self.storages[key]
            else:
                total += storage.nbytes()
        self.peak = max(self.peak, total)
        return total

    def __exit__(self, *args):
        for weak in self.storages.values():
            torch.UntypedStorage._free_weak_ref(weak)
        self.storages.clear()
        return super().__exit__(*args)
