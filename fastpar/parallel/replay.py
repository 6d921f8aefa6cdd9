"""A forward and backward without hooks, which are recorded once and replayed: by a CUDA graph.

While they are recorded the engine's hooks do nothing, and gradients are written into the memory of
their buckets, or added to what is there; it stays where it is at stages 0 and 1. What the hooks
would have told is told around each replay, so reductions begin behind it, not under the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn

from fastpar.parallel.engine import Engine


@contextlib.contextmanager
def recording(engine: Engine, *, adds: bool | None) -> Iterator[list[nn.Parameter]]:
    """A forward and backward inside change nothing but gradients.

    Args:
        adds: gradients are added to what is in the buckets; None: they are dropped.
    Yields:
        The parameters that have got a gradient, in that order.
    """
    shards, fired = engine.shards, []

    def store(p: Tensor) -> None:
        bucket, position = shards.places[p]  # type: ignore[index]
        if adds is not None:
            view, grad = bucket.grad_views[position], p.grad
            assert grad is not None
            view.add_(grad) if adds else view.copy_(grad)
        p.grad = None
        fired.append(bucket.params[position])

    owners = [owner for owner in (engine, engine.gathers) if owner is not None]
    grads = [(p, p.grad) for p in shards.params]
    handles = [p.register_post_accumulate_grad_hook(store) for p in shards.params]
    try:
        for owner in owners:
            owner.paused = True
        for p, _ in grads:
            p.grad = None
        yield fired
    finally:
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
