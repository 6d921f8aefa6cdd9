"""Forward and backward of a micro-batch as a CUDA graph: one launch instead of hundreds.

For small micro-batches, whose launches cost the host more than their work costs the GPU.

[Note: what a graph holds] From the model's inputs to the gradients in the memory of their buckets.
Inputs, the dropout key, the loss scale and the loss are tensors that stay where they are and are
filled before a replay. The first gradients of a step are written, later ones added: two graphs,
which share their memory, as they never run together and nothing of one outlives it
(capture_check.py). What the engine's hooks would have told it is told after the replay
(run_replay): reductions do not hide under the backward. The memory of activations stays
with the graphs between steps.

[Note: before a capture] The region runs twice on a stream of its own, where its gradients are
dropped: kernels are compiled, proven and loaded. The second time the capture check looks on.
Other threads (the watchdog, a save) may go on while one captures: their calls do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.parallel.engine import Engine
from fastpar.parallel.units import Hook
from fastpar.train.capture_check import CaptureCheck

_MOST_SHAPES = 4
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HookCheck:
    """A replay calls no hooks: those of others than the engine would be lost."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._known = -1  # how many there were when they were looked at
        self._params = list(model.parameters())
        self._of_modules = [getattr(m, name) for m in model.modules() for name in _OF_MODULES]

    def refuse(self) -> None:
        """Raises ValueError where there is one of others."""
        found = sum(map(len, self._of_modules))  # dicts that modules keep; those of tensors change
        found += sum(
            len(getattr(p, name, None) or ()) for p in self._params for name in _OF_TENSORS
        )
        if found == self._known:
            return
        mine = (self._engine, self._engine.gathers)
        for name, owner in (*self._model.named_modules(), *self._model.named_parameters()):
            for hooks in (getattr(owner, a, None) or {} for a in (*_OF_MODULES, *_OF_TENSORS)):
                if not all(isinstance(h, Hook) and any(map(h.is_of, mine)) for h in hooks.values()):
                    raise ValueError(
                        "train: expected no hooks with cuda_graphs, got one of "
                        f"'{name or type(owner).__name__}', which a replay would not call; remove "
                        "it, or leave --cuda-graphs out"
                    )
        self._known = found


class MicroBatchGraphs:
    """Calls of compute(*inputs), which runs a forward and backward of model and returns the loss.

    Each shape of the inputs is captured at its first call, and replayed from then on.

    Args:
        compute: takes tensors, numbers (given to it as fp32 tensors) and None.
        engine: of the model.
    Raises:
        ValueError: no GPU, a stage that frees memory, hooks of others than the engine.
    """

    def __init__(self, compute: Callable[..., Tensor], model: nn.Module, engine: Engine) -> None:
        check_device(engine.mesh.device)
        if engine.stage.frees_gradients:
            raise ValueError(
                "MicroBatchGraphs: expected zero_stage 0 or 1, got zero_stage="
                f"{engine.zero_stage}, which frees memory; use zero_stage=1"
            )
        if engine.settings.offload is not None:
            raise ValueError(
                "MicroBatchGraphs: expected no offload, got offload="
                f"{engine.settings.offload!r}, whose forward waits for the host's step; leave one "
                "of them out"
            )
        self._compute, self._model, self._engine = compute, model, engine
        self._shapes: dict[tuple, _Graphs] = {}
        self._pool: Any = None
        self._hooks = HookCheck(model, engine)

    def __call__(self, *inputs: Tensor | float | None) -> Tensor:
        """The loss, valid until the next call."""
        self._hooks.refuse()
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in inputs)
        if key not in self._shapes and len(self._shapes) >= _MOST_SHAPES:
            raise ValueError(
                f"train: expected at most {_MOST_SHAPES} shapes of micro-batches with cuda_graphs, "
                f"got one more: {key}; pad them to one shape, or leave --cuda-graphs out"
            )
        if key not in self._shapes:
            self._shapes[key] = _Graphs(inputs, self._engine.mesh.device)
        graphs = self._shapes[key]
        for place, value in zip(graphs.inputs, inputs):
            if place is not None and value is not None:
                place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)

        def replay(adds: bool) -> list[nn.Parameter]:
            if adds not in graphs.captured:
                graphs.captured[adds] = self._capture(graphs, adds)
            run, fired = graphs.captured[adds]
            run()
            return fired

        run_replay(self._engine, replay)
        return graphs.loss

    def _capture(self, graphs: _Graphs, adds: bool) -> tuple[Callable[[], None], list]:
        fired: list[nn.Parameter] = []

        def region(adds: bool | None = adds) -> None:
            with recording(self._engine, adds=adds) as found:
                graphs.loss.copy_(self._compute(*graphs.inputs))
            fired[:] = found

        def warm_up() -> None:
            region(None)
            known = [*self._model.parameters(), *self._model.buffers(), graphs.loss]
            with CaptureCheck([*known, *(x for x in graphs.inputs if x is not None)]):
                region(None)

        graph = capture(region, warm_up, self._pool)
        self._pool = graph.pool()
        return graph.replay, fired


class _Graphs:
    """The graphs of one shape, and what they read and write."""

    def __init__(self, inputs: tuple, device: torch.device) -> None:
        self.inputs = [None if x is None else place_of(x, device) for x in inputs]
        self.loss = torch.empty((), device=device, dtype=torch.float32)
        self.captured: dict[bool, tuple[Callable[[], None], list]] = {}


def place_of(x: Tensor | float, device: torch.device) -> Tensor:
    """Memory on the device for an input; a number is given to the region as an fp32 tensor."""
    if isinstance(x, Tensor):
        return torch.empty_like(x, device=device)
    return torch.empty((), device=device, dtype=torch.float32)


def has_graphs(device: torch.device) -> bool:
    """Whether a device can replay CUDA graphs."""
    return device.type == "cuda"


def check_device(device: torch.device) -> None:
    """Raises ValueError where there are no graphs."""
    if not has_graphs(device):
        raise ValueError(
            f"train: expected a GPU with cuda_graphs, got device={device}; leave --cuda-graphs out"
        )


def capture(region: Callable[[], None], warm_up: Callable[[], None], pool: Any) -> Any:
    """A torch.cuda.CUDAGraph of region, with its memory in pool (None: a new one)."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        warm_up()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        region()
    return graph


@contextlib.contextmanager
def recording(engine: Engine, *, adds: bool | None) -> Iterator[list[nn.Parameter]]:
    """A forward and backward inside change nothing but gradients.

    Args:
        adds: gradients are added to what is in the buckets; None: they are dropped.
    Yields:
        The parameters that have got a gradient, in that order.
    """
    shards, fired = engine.shards, []
    wide: dict[nn.Parameter, None] = {}  # whose gradients layers have put in the buckets

    def place(p: Tensor) -> tuple[Tensor, bool] | None:
        """As split_backward.Places does, for gradients in fp32 of 16-bit weights."""
        bucket, position = shards.places[p]  # type: ignore[index]
        if adds is None or bucket.grad_dtype == p.dtype:
            return None
        again = p in wide
        wide[bucket.params[position]] = None
        return bucket.grad_views[position], adds or again

    def store(p: Tensor) -> None:
        bucket, position = shards.places[p]  # type: ignore[index]
        grad = p.grad
        if adds is not None and grad is not None:
            view = bucket.grad_views[position]
            view.add_(grad) if adds or p in wide else view.copy_(grad)
        p.grad = None
        fired.append(bucket.params[position])

    owners = [owner for owner in (engine, engine.gathers) if owner is not None]
    grads = [(p, p.grad) for p in shards.params]
    handles = [p.register_post_accumulate_grad_hook(store) for p in shards.params]
    try:
        for owner in owners:
            owner.paused = True
        engine.recorder = place
        for p, _ in grads:
            p.grad = None
        yield fired
        fired.extend(set(wide).difference(fired))  # of a torch whose hooks are not called for them
    finally:
        engine.recorder = None
        for owner in owners:
            owner.paused = False
        for handle in handles:
            handle.remove()
        for p, grad in grads:
            p.grad = grad


def run_replay(engine: Engine, replay: Callable[[bool], Collection[nn.Parameter]]) -> None:
    """Tells the engine of a forward and backward that replay does. Ranks: all.

    Args:
        replay: called with whether gradients are added to those that are there; returns the
            parameters that it gave one.
    """
    if engine.gathers is not None:
        engine.gathers.replay_forward()
    engine.begin_backward()
    for bucket in engine.buckets:
        bucket.open_grad()
    adds = any(bucket.has for bucket in engine.buckets)
    fired = replay(adds)
    for p in fired:
        bucket, position = engine.shards.places[p]
        if adds and position not in bucket.has:
            raise RuntimeError(
                "run_replay: expected gradients of all parameters or of none, got none of "
                f"'{bucket.name(position)}' beside others; zero all of them between steps"
            )
        if not bucket.stage.shards:
            bucket.adopt(position)
        bucket.taken(position)
    engine.end_backward()
