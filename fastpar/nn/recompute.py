"""Activation checkpointing: the blocks of a model keep little for backward and are recomputed.

[Note: what recomputing must not change]
A recomputed block runs torch's non-reentrant checkpoint around its own forward, inside its module
hooks: what an engine does before and after a block happens once, and the parameters that it gathers
for a block's backward serve the recomputation too. The same ops run on the same inputs (with the
same dropout masks: counter-based ones by their key, torch's by the saved state of its generator),
so that gradients have the same bits with and without recomputation.

[Note: selective] With "selective" a dispatch mode sees each op of a block and keeps the outputs of
KEPT; the rest runs again. fastpar's ops bypass the dispatcher only if no mode is active
(kernels/backend.py), so the mode sees each as one op. torch frees the kept outputs at the first
backward: a second one through the same graph (retain_graph=True) needs mode "full".

[Note: inputs on the host]
A block of mode "full" keeps its input alone. With a bus the input is copied to the host when the
next block begins, and back while the block after it is in backward: one input at a time is in
transit in each direction, and the last one stays on the device. The bits are the same.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fastpar.axes.context.keys
import fastpar.axes.experts.mixture
import fastpar.axes.grid
import fastpar.kernels  # noqa: F401 (these define ops that KEPT names)
from fastpar.comm.collectives import Handle
from fastpar.comm.host import Bus

MODES = ("none", "full", "selective")
_LEAST_BYTES = 1 << 16  # of an input that moves to the host: keys and scales stay
_AHEAD = 2  # inputs that are copied back while a block is in backward: fastpar's block has two

# Matrix products, convolutions and attention: most of a block's time, with outputs no larger than
# what the cheap ops between them would keep. In split layers, recomputing would also communicate
# again. (For heads exchanged over cp, keeping would store q, k, v and o twice.)
_OURS = (
    *("linear", "column_linear", "row_linear", "grid_column", "grid_row", "grouped_linear"),
    *("attention", "attention_composed", "cp_attend_keys", "ep_counts", "ep_exchange"),
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_ATTENTION = (
    *("flash_attention", "flash_attention_for_cpu", "efficient_attention"),
    *("cudnn_attention", "fused_attention_overrideable"),
)
KEPT = [
    *(op.default for name in _OURS if (op := getattr(torch.ops.fastpar, name, None))),
    *(getattr(torch.ops.aten, name).default for name in _PRODUCTS),
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in _ATTENTION),
]


def recompute(
    model: nn.Module,
    mode: str = "full",
    *,
    blocks: type[nn.Module] | Iterable[nn.Module] | None = None,
    every: int = 1,
    offload: Bus | None = None,
) -> nn.Module:
    """Makes the blocks of a model keep less between forward and backward.

    Args:
        mode: "full": a block keeps its inputs only, and backward runs its forward again (a third
            more arithmetic); "selective": it also keeps the outputs of matrix products and of
            attention, and only the cheap ops between them run again; "none": undoes recompute.
        blocks: the modules, or their class; None: the elements of the outermost nn.ModuleLists.
        every: 2: every second block, and so on, in their order.
        offload: for mode "full": blocks' inputs wait for backward in host memory, at the other end
            of this bus; see HostActivations.
    Returns:
        The same module; names of parameters stay. May be called again, and before or after
        fastpar.parallelize, torch's compile() of a block, and fastpar.patch (before recompute).
        Copies and pickles keep it.
        Caches of transformers are withheld from a block while it records gradients: running it
        again would append to them twice. (A cache changes how transformers lays out keys: compare
        gradients with use_cache=False.)
    Raises:
        ValueError: an unknown mode; every below 1; no blocks, or modules that are not the model's.
    """
    if mode not in MODES:
        raise ValueError(
            f"recompute: expected a mode of {', '.join(MODES)}, got mode={mode!r}; "
            "choose one of these"
        )
    if offload is not None and mode != "full":
        raise ValueError(
            f"recompute: expected mode='full' with offload, got mode={mode!r}, which keeps more "
            "than inputs; pass mode='full'"
        )
    if every < 1:
        raise ValueError(
            f"recompute: expected every >= 1, got every={every}; use 1 for every block"
        )
    chosen = list(dict.fromkeys(_find_blocks(model, blocks)))
    if not chosen:
        raise ValueError(
            f"recompute: expected a model with blocks, got model={type(model).__name__} without "
            f"{'an nn.ModuleList' if blocks is None else 'any module of that class'}; pass blocks="
        )
    for module in model.modules():
        old = vars(module).get("forward")
        if isinstance(old, Recomputed):
            del module.forward
            if old.inner is not None:
                module.forward = old.inner
    keeper = None if offload is None else HostActivations(offload)
    if mode != "none":
        for block in chosen[::every]:
            block.forward = Recomputed(block, mode, keeper)
    return model


def _find_blocks(
    model: nn.Module, blocks: type[nn.Module] | Iterable[nn.Module] | None
) -> Iterator[nn.Module]:
    if blocks is None:
        yield from _outermost(model, in_list=isinstance(model, nn.ModuleList))
        return
    if isinstance(blocks, type):
        yield from (m for m in model.modules() if isinstance(m, blocks))
        return
    known = set(model.modules())
    for position, block in enumerate(blocks):
        if block not in known:
            raise ValueError(
                f"recompute: expected modules of the model, got blocks[{position}]="
                f"{type(block).__name__}, which is not one; take them from model.modules()"
            )
        yield block


def _outermost(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    """Elements of ModuleLists; for nested lists the elements of the inner ones."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _outermost(child, in_list=True)
        elif in_list:
            yield child
        else:
            yield from _outermost(child, in_list=False)


class Recomputed:
    """The forward of one block, recomputed in backward; copied and pickled with its block."""

    def __init__(self, block: nn.Module, mode: str, keeper: HostActivations | None = None) -> None:
        self.block, self.mode, self.keeper = block, mode, keeper
        self.inner: Callable[..., Any] | None = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner
        if forward is None:
            forward = functools.partial(type(self.block).forward, self.block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(None if _is_cache(a) else a for a in args)
        kwargs = {k: None if _is_cache(a) else a for k, a in kwargs.items()}
        options: dict[str, Any] = {}
        if self.mode == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, KEPT)
        with contextlib.nullcontext() if self.keeper is None else self.keeper.hooks():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _is_cache(value: Any) -> bool:
    """Whether this is a cache of transformers, without importing it."""
    return any(
        c.__name__ == "Cache" and c.__module__ == "transformers.cache_utils"
        for c in type(value).__mro__
    )


class _Kept:
    """One input: on the device, on the host, or in transit. Its slot outlives a second backward."""

    def __init__(self, x: Tensor, before: _Kept | None, free: list[Tensor]) -> None:
        self.x: Tensor | None = x
        # The one that backward needs next. Weak: only its graph keeps it and its slot alive.
        self.before = None if before is None else weakref.ref(before)
        self.device, self.free, self.used = x.device, free, False
        self.host: Tensor | None = None
        self.handle: Handle | None = None

    def __del__(self) -> None:
        if self.handle is not None:  # an aborted backward: the memory is in use until the copy ends
            self.handle.wait()
        if self.host is not None:
            self.free.append(self.host)


class HostActivations:
    """Keeps inputs of blocks on the host; one instance per model.

    Host memory: pinned, as large as the inputs of one step, allocated in the first one.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._free: defaultdict[tuple, list[Tensor]] = defaultdict(list)
        self._last: _Kept | None = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd's saved tensors go to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def host_bytes(self) -> int:
        """Host bytes that are free now: all of them, between steps."""
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
        if kept.host is not None:  # only backward holds it
            kept.x = None
        kept.used = True
        before, n = kept.before, 0
        while before is not None and n < _AHEAD:
            ahead = before()
            if ahead is None:  # of a micro-batch whose backward has ended
                break
            if not ahead.used:
                self._begin(ahead)
                n += 1
            before = ahead.before
        return x

    def _begin(self, kept: _Kept) -> Tensor:
        """The input on the device, possibly still in transit."""
        if kept.x is None:
            assert kept.host is not None
            if kept.handle is not None:
                kept.handle.wait()  # for the copy to the host
            kept.x = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
            kept.handle = self._bus.up(kept.x, kept.host)
        return kept.x
