"""A training step as one CUDA graph: fastpar.graphed() for a loop of your own, and the trainer's.

One launch replaces hundreds. It pays for small batches, whose launches take the host longer than
the computation takes the GPU: on an H200 a step of GPT-2 124M (context 1024, bf16) takes 9.6 ms
with a graph and 47.0 ms without at batch 4, 16.6 and 53.2 ms at batch 8, with the same bits in 12
steps.

[Note: a graph] holds the micro-batches of a step, the norm and AdamW's update:

    tokens, dropout keys, learning rates, loss scale    filled before a replay
        forward and backward of each micro-batch        gradients into the buckets
        norm, clip factor, overflow flag
        AdamW's update, its step counters
    loss and norm                                       read after it

Inputs are tensors at fixed addresses. The first micro-batch of a step writes its gradients, later
ones add to them. The graph keeps the memory of activations between steps. After a replay the engine
only records that a step took time: a step begins and ends without gradients, so its phases and
buckets are the same before and after.

[Note: several ranks] With data-parallel ranks a graph holds the engine's whole step, at every ZeRO
stage: gathers of parameters, forward and backward with the reductions beside it, the control
exchange with norm and loss, the update. Parameters are out of date before and after; what a rank
sends about itself is the same in each step. Memory that a step allocates and frees, such as whole
gradients and the units of stage 3, comes from the graph's own pool, at the same addresses in each
replay; all other memory stays where it is, which the capture check verifies. Every rank makes its
graph in the same step and replays it equally often. The host still does what needs it: requests to
stop are inputs and outputs, and a watchdog sees each replay as one operation. Single collectives
have no times. NCCL inside graphs never ran here: the tests have CPU ranks and a stand-in for NCCL,
so several ranks have graphs only where they are asked for. At stages 1 to 3 a graph has two groups
of NCCL, whose documents tell of CUDA hanging when graphs of several are launched by one thread.
What has no graph: a deterministic engine sums micro-batches in a tree on the host, Muon and
Adafactor read numbers on the host, and gloo and shared memory work on the host.

[Note: first steps] Steps 1 and 2 run as usual, in the memory of the graph: they create the
optimizer's state, compile and prove kernels. Step 3 runs under the capture check. Before step 4
forward and backward run once more, on a separate stream, and the step is captured; from then on it
is replayed. Calls of other threads (watchdog, save) during a capture are allowed.

[Note: capture check] The check finds operations that a CUDA graph cannot hold by running the region
once, on a CPU too. Some of them make a capture fail without naming the place; some would make every
replay repeat a value of the host; some corrupt memory later, because a tensor that outlives its
graph is overwritten by the next replay. So every operation is checked, and errors name it and the
line that called it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from fastpar.comm.collectives import enqueue
from fastpar.comm.watchdog import count_call
from fastpar.engine.absent import Hook
from fastpar.engine.bucket import ON_DEVICE, BucketState
from fastpar.engine.engine import Engine, engine_of
from fastpar.engine.gradients import refuse_missing
from fastpar.kernels import op
from fastpar.optim.adamw import AdamW
from fastpar.optim.base import EngineOptimizer, Row

_CHECKED = 3  # the step that runs under the capture check
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HookCheck:
    """Refuses hooks of the user, because a replay calls no hooks."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._known = -1  # number of hooks at the last check
        self._params = list(model.parameters())
        self._of_modules = [getattr(m, name) for m in model.modules() for name in _OF_MODULES]

    def refuse(self) -> None:
        """Raise ValueError if there is a hook that is not the engine's."""
        n_hooks = sum(map(len, self._of_modules))  # modules keep their dicts; tensors replace them
        n_hooks += sum(
            len(getattr(p, name, None) or ()) for p in self._params for name in _OF_TENSORS
        )
        if n_hooks == self._known:
            return
        mine = (self._engine, self._engine.gathers)
        for name, owner in (*self._model.named_modules(), *self._model.named_parameters()):
            for hooks in (getattr(owner, a, None) or {} for a in (*_OF_MODULES, *_OF_TENSORS)):
                if not all(isinstance(h, Hook) and any(map(h.is_of, mine)) for h in hooks.values()):
                    raise ValueError(
                        f"StepGraph: expected no hooks, got one of '{name or type(owner).__name__}'"
                        ", which a replay would not call; remove it, or train without CUDA graphs"
                    )
        self._known = n_hooks


def place_of(x: Tensor | float, device: torch.device) -> Tensor:
    """Memory on the device for an input; a number becomes an fp32 tensor."""
    if isinstance(x, Tensor):
        return torch.empty_like(x, device=device)
    return torch.empty((), device=device, dtype=torch.float32)


def has_graphs(device: torch.device) -> bool:
    """Whether a device can replay CUDA graphs."""
    return device.type == "cuda"


def capture(region: Callable[[], None], warm_up: Callable[[], None]) -> Any:
    """Capture region as a torch.cuda.CUDAGraph, with memory of its own."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        warm_up()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        region()
    return graph


@contextlib.contextmanager
def recording(engine: Engine, *, adds: bool | None) -> Iterator[list[nn.Parameter]]:
    """Context in which forward and backward change gradients only, not the engine's state.

    Args:
        adds: add gradients to those in the buckets; None: drop them.
    Yields:
        The parameters that received a gradient, in that order.
    """
    shards, fired = engine.shards, []
    arrived: dict[BucketState, dict[int, Tensor]] = {bucket: {} for bucket in engine.buckets}

    def store(p: Tensor) -> None:
        bucket, position = shards.places[p]  # type: ignore[index]
        grad, grads = p.grad, arrived[bucket]
        p.grad = None
        fired.append(bucket.params[position])
        if adds is None or grad is None:
            return
        grads[position] = grad
        if len(grads) == len(bucket.params):
            views = [bucket.grad_views[i] for i in grads]
            (torch._foreach_add_ if adds else torch._foreach_copy_)(views, [*grads.values()])
            grads.clear()

    grads = [(p, p.grad) for p in shards.params]
    handles = [p.register_post_accumulate_grad_hook(store) for p in shards.params]
    try:
        engine.paused = True
        for p, _ in grads:
            p.grad = None
        yield fired
    finally:
        engine.paused = False
        for handle in handles:
            handle.remove()
        for p, grad in grads:
            p.grad = grad


def why_none(model: nn.Module, engine: Engine, optimizer: Any, asked: bool | None = None) -> str:
    """Why no graph can hold a step; "" if one can. See [Note: several ranks].

    asked: whether graphs were asked for, which several ranks need.
    """
    if not has_graphs(engine.mesh.device):
        return f"{engine.mesh.device} has no CUDA graphs"
    if getattr(model, "experts", None) is not None:
        return "the counts of experts are exchanged in each step"
    if engine.mesh.dp_size < engine.mesh.world_size:
        return "ranks split the model or its sequences: graphs hold collectives of dp alone"
    groups = [engine.control_group, *(g for b in engine.buckets for g in vars(b.groups).values())]
    if other := next((g for g in groups if g is not None and not g.captures), None):
        return f"collectives are not NCCL's own: {other.transport} ({other.why})"
    if engine.buckets[0].groups.node is not None:
        return "secondary shards were not tested with graphs"
    if engine.settings.deterministic:
        return "the host sums micro-batches in a tree"
    if engine.shards.storage is not ON_DEVICE:
        return "forward waits for the host's step"
    if type(optimizer) is not AdamW:
        return f"{type(optimizer).__name__} reads its numbers on the host"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "a replay calls no hooks of the optimizer"
    if engine.mesh.world_size > 1 and not asked:
        return "several ranks need cuda_graphs=True: NCCL inside graphs never ran here"
    return ""


def graphed(
    loss_of: Callable[..., Tensor],
    model: nn.Module,
    optimizer: EngineOptimizer,
    *,
    cuda_graphs: bool | None = None,
) -> GraphedStep:
    """A function that runs whole training steps, as one CUDA graph where that is possible.

        step = fastpar.graphed(lambda x, y: model(x, y), model, optimizer)
        for x, y in loader:
            loss = step(x, y)

    Args:
        loss_of: computes the loss, a tensor [], from the tensors of a micro-batch. All that changes
            from step to step is one of them, a dropout key too.
        model: as fastpar.parallelize returned it.
        optimizer: of its parameters. Only fastpar.AdamW's steps are captured.
        cuda_graphs: True: on several data-parallel ranks, too, at every zero_stage; their GPUs
            exchange by NCCL, which never ran inside graphs here. False: without graphs.
    Returns:
        step(x, y, ...), or step((x, y, ...), (x, y, ...)) for several micro-batches: forward,
        backward, update and zero_grad. It returns the mean loss, fp64 [], valid until the next
        step. `step.why` says why steps run without a graph; "" if they are replayed from the fourth
        one on. A graph reads learning rates in fp32: where that is not exact its weights differ
        from those of plain steps by roundings.
    Ranks: all, with the same settings, shapes and number of steps. The loss is that of the rank.
        Delete step before the process group is destroyed: NCCL waits for the graph's end.
    """
    return GraphedStep(loss_of, model, optimizer, cuda_graphs)


class GraphedStep:
    """See graphed()."""

    def __init__(
        self,
        loss_of: Callable[..., Tensor],
        model: nn.Module,
        optimizer: EngineOptimizer,
        asked: bool | None,
    ) -> None:
        engine = engine_of(model)
        self._loss_of, self._optimizer, self._parts = loss_of, optimizer, 1
        self.why = why_none(model, engine, optimizer, asked)
        if asked is False:
            self.why = "cuda_graphs=False"
        self._graph = None if self.why else StepGraph(self._compute, model, engine, optimizer)

    def __call__(self, *inputs: Any) -> Tensor:
        """Run a step."""
        batches = [inputs] if isinstance(inputs[0], Tensor) else list(inputs)
        self._parts = len(batches)
        if self._graph is not None:
            if self._graph.several:  # a rank that left its graph would leave the others
                self._graph.fill(batches, None)
            else:
                self.why = self._graph.why_not(batches, None)
            if not self.why:
                self._graph.run()
                self._optimizer.zero_grad()
                return self._graph.loss
            self._graph = None
            warnings.warn(
                f"graphed: steps run without a CUDA graph from now on: {self.why}", stacklevel=2
            )
        loss = torch.stack([self._compute(*batch, None).double() for batch in batches]).sum()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _compute(self, *inputs: Any) -> Tensor:
        """Forward and backward of a micro-batch; returns its share of the loss."""
        loss = self._loss_of(*inputs[:-1]) / self._parts  # the last one: no loss scale
        loss.backward()
        return loss.detach()


class StepGraph:
    """Runs a step: compute(*inputs, scale) for each micro-batch, then the optimizer's update.

    It leaves no gradients.

    Args:
        compute: takes the tensors of a micro-batch and the loss scale (tensor or None), runs
            forward and backward of model, and returns the loss.
        engine: the model's engine; why_none() has to be "".
    Attributes:
        loss: fp64 [], sum over this rank's micro-batches of the last step.
        norm: fp32 [], norm of its gradients, if the optimizer measures it.
        several: whether there are several ranks.
    Raises:
        ValueError: micro-batches of other shapes than in the first step; hooks that are not the
            engine's.
        RuntimeError: a parameter without a gradient; a finding of the capture check.
    Ranks: all, the same steps.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        model: nn.Module,
        engine: Engine,
        optimizer: EngineOptimizer,
    ) -> None:
        self._device = device = engine.mesh.device
        self._compute, self._model, self._engine = compute, model, engine
        self._optimizer, self._hooks = optimizer, HookCheck(model, engine)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.norm = torch.zeros((), device=device, dtype=torch.float32)
        self._found = torch.zeros((), device=device, dtype=torch.float32)
        self._scale = torch.ones((), device=device, dtype=torch.float32)
        self._lrs = torch.zeros(len(optimizer.param_groups), device=device, dtype=torch.float32)
        self._batches: list[list[Tensor]] = []
        self._scaled = False  # whether there is a loss scale
        self._values = self._sums = torch.zeros(0, dtype=torch.float64, device=device)
        self.several = engine.mesh.world_size > 1
        if self.several and engine.gathers is not None:
            engine.gathers.early = False  # forward gathers, in the graph
        self._steps = 0
        self._replay: Callable[[], None] | None = None

    def why_not(self, batches: Sequence[tuple[Tensor, ...]], scale: float | None) -> str:
        """Why the graph cannot run this step, before anything has changed; "" if it can."""
        try:
            self.fill(batches, scale)
            if self._steps == _CHECKED - 1:
                with CaptureCheck(self._static()):
                    self._forwards()
        except (ValueError, RuntimeError) as error:
            return str(error).partition("; ")[0]
        return ""

    def __call__(self, batches: Sequence[tuple[Tensor, ...]], scale: float | None) -> Tensor:
        """Run a step; the loss (and the optimizer's grad_norm) are valid until the next call."""
        self.fill(batches, scale)
        self.run()
        return self.loss

    def run(self, values: Tensor | None = None) -> Tensor:
        """Run a step with the inputs of fill().

        Args:
            values: fp64 [k], equally many in each step on every rank.
        Returns:
            fp64 [1 + k]: the mean of the loss over the ranks, and the sums of values.
        """
        engine, log = self._engine, self._engine.log
        if values is not None:
            if not self._steps:
                self._values = torch.empty_like(values)
            self._values.copy_(values)
        if not self._steps:
            self._sums = self._values.new_empty(1 + len(self._values))
        if self._scaled:
            self._optimizer.grad_scale = self._scale
        if self.several and engine.shards.is_gathered:
            raise RuntimeError(
                "StepGraph: expected a step outside of gathered(), which keeps parameters whole; "
                "leave it before"
            )
        self._steps += 1
        if self.several:
            engine.make_stale()
            if self._steps < _CHECKED:
                self._work_of_ranks()
                return self._sums
        log.timer.begin()
        if self._steps < _CHECKED:
            self._region()
        elif self._steps == _CHECKED:
            with CaptureCheck(self._static()):
                self._region()
        else:
            if self._replay is None:
                self._replay = capture(self._region, self._forwards).replay
            count_call()
            enqueue(self._device, "replay of a step's graph", self._replay)
        log.n_reductions += 1
        if self.several:
            engine.end_step(in_graph=True)
            return self._sums
        engine.report = log.timer.end_step()
        loss = self.loss.reshape(1)
        return torch.cat((loss, self._values)) if len(self._values) else loss

    def fill(self, batches: Sequence[tuple[Tensor, ...]], scale: float | None) -> None:
        """Copy the inputs of a step; raise ValueError if they do not fit the graph."""
        self._hooks.refuse()
        if not self._batches:
            self._batches = [[place_of(x, self._device) for x in batch] for batch in batches]
            self._scaled = scale is not None
        shapes, got = ([[x.shape for x in batch] for batch in b] for b in (self._batches, batches))
        if shapes != got or self._scaled != (scale is not None):
            raise ValueError(
                f"StepGraph: expected every step like the first one, got {len(got)} micro-batches "
                f"of {[list(s) for s in got[0]]} after {len(shapes)} of "
                f"{[list(s) for s in shapes[0]]}; pad them to one shape, or train without CUDA "
                "graphs"
            )
        for places, batch in zip(self._batches, batches):
            for place, x in zip(places, batch):
                place.copy_(x)
        if scale is not None:
            self._scale.fill_(scale)
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        now = torch.tensor(lrs, dtype=torch.float32, device="cpu")
        on_gpu = self._device.type == "cuda"
        self._lrs.copy_(now.pin_memory() if on_gpu else now, non_blocking=True)

    def _region(self) -> None:
        """The work of a step that the graph holds."""
        if self.several:
            with self._engine.captured():
                return self._work_of_ranks()
        self.loss.zero_()
        for j in range(len(self._batches)):
            with recording(self._engine, adds=j > 0) as fired:
                self.loss.add_(self._backward(j))
            missing = set(self._engine.shards.params).difference(fired)
            if missing:
                bucket, position = self._engine.shards.places[missing.pop()]
                refuse_missing(bucket.name(position))
        with self._on_device():
            self._optimizer.step_rows(self._rows())
        self._copy_out()

    def _work_of_ranks(self) -> None:
        """_region() of several ranks, and their first steps; see [Note: several ranks]."""
        control, optimizer = self._engine.control, self._optimizer
        self.loss.zero_()
        for j in range(len(self._batches)):
            self.loss.add_(self._backward(j))
        share = self.loss.reshape(1) / self._engine.mesh.world_size
        self._engine.contribute(torch.cat((share, self._values)))
        with self._on_device():
            optimizer.step()
        assert control.contributed is not None
        control.contributed = self._sums.copy_(control.contributed)
        self._copy_out()
        optimizer.zero_grad()

    def _copy_out(self) -> None:
        """Copy results out: tensors made here are overwritten by the next replay."""
        optimizer = self._optimizer
        if optimizer.grad_norm is not None:
            optimizer.grad_norm = self.norm.copy_(optimizer.grad_norm)
        if optimizer._found is not None:
            optimizer._found = self._found.copy_(optimizer._found)

    def _forwards(self) -> None:
        """Forward and backward before a capture, which change nothing."""
        if self.several:
            with self._engine.captured():
                self._backward(0)
            self._optimizer.zero_grad()
            self._engine.make_stale()
            return
        with recording(self._engine, adds=None):
            self._backward(0)

    def _backward(self, j: int) -> Tensor:
        return self._compute(*self._batches[j], self._scale if self._scaled else None)

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        for i, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                bucket, position = self._engine.shards.places[p]
                grad = bucket.grad_views[position]
                rows.append(Row(p, p, grad, i, len(rows), 0, self._engine))
        return rows

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Keep learning rates and step counters on the device, where the kernel reads them."""
        kept: list[dict[str, Any]] = []
        for group, lr in zip(self._optimizer.param_groups, self._lrs):
            kept.append({n: group[n] for n in ("lr", "capturable")})
            group.update(lr=lr, capturable=True)
        try:
            yield
        finally:
            for group, options in zip(self._optimizer.param_groups, kept):
                group.update(options)

    def _static(self) -> list[Tensor]:
        state = [x for s in self._optimizer.state.values() for x in s.values()]
        mine = [self.loss, self.norm, self._found, self._scale, self._lrs]
        mine += [self._values, self._sums]
        inputs = [x for batch in self._batches for x in batch]
        known = [*self._engine.shards.frozen, *self._model.buffers(), *mine, *inputs]
        flat = [x for b in self._engine.buckets for x in (b.grad, b.flat, b.shard, b.grad_shard)]
        sent = self._engine.control.sent
        return [*known, *(x for x in (*state, *flat, sent) if isinstance(x, Tensor))]


_WAITS = "the host waits for the device"
_READS = "the host reads a value"
_OPS = {  # of aten
    "_local_scalar_dense": _READS,
    "item": _READS,
    "equal": _READS,
    **dict.fromkeys(
        ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
        "the host reads how large the result is",
    ),
    "lift_fresh": "every replay repeats a number of the host",
    "_pin_memory": "host memory is pinned",
}
_CALLS = (  # calls that do not reach the dispatcher, or not on a CPU
    (torch.Tensor, ("tolist", "numpy", "cpu"), _READS),
    (torch.Tensor, ("pin_memory",), _OPS["_pin_memory"]),
    (torch.cuda, ("synchronize",), _WAITS),
    (torch.cuda, ("empty_cache",), "memory goes back to the device"),
    (torch.cuda.Event, ("synchronize", "query", "elapsed_time"), _WAITS),
    (torch.cuda.Event, ("record",), "every replay would record the event again"),
    (torch.cuda.Stream, ("synchronize", "query"), _WAITS),
)
_PASSED = (str(Path(torch.__file__).parent), __file__)  # files that errors do not name


class CaptureCheck(TorchDispatchMode):
    """Context that raises if the region inside cannot be captured in a CUDA graph.

    Args:
        static: outside tensors that the region uses, at fixed addresses.
    Raises:
        RuntimeError: the host waits, reads a value, pins memory or passes a number; an operation
            uses a tensor that is neither static nor created inside, or on another device; a tensor
            created inside is alive at the end. Names the operation and the line.
    """

    def __init__(self, static: Iterable[Tensor]) -> None:
        super().__init__()
        tensors = list(static)
        self._device = _device(tensors[0])
        self._storages = [x.untyped_storage() for x in tensors]
        # Address of each storage; 0: it gets memory in the region alone, which is the graph's.
        self._static = {s._cdata: s.data_ptr() for s in self._storages}
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> CaptureCheck:
        # Lists of plain tensors skip the dispatcher, as without this mode.
        self._patches.enter_context(mock.patch.object(op, "_is_watched", return_value=False))
        for owner, names, why in _CALLS:
            for name in names:
                refuse = _refusal(f"{owner.__name__}.{name}", why, getattr(owner, name))
                self._patches.enter_context(mock.patch.object(owner, name, refuse))
        storage, resize = torch.UntypedStorage, torch.UntypedStorage.resize_

        def resize_empty(x: torch.UntypedStorage, size: int) -> Any:
            if self._static.get(x._cdata):
                raise _error(f"static memory is freed: resize_ at {_line()}")
            return resize(x, size)

        self._patches.enter_context(mock.patch.object(storage, "resize_", resize_empty))
        # Operations of streams run as they do in a capture.
        now = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        self._patches.enter_context(now)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        if error[0] is None:
            gc.collect()
            for storage, where in self._made.values():
                if not storage.expired():
                    raise _error(f"a tensor outlives the graph: {where}")
            if any(s.data_ptr() != self._static[s._cdata] for s in self._storages):
                raise _error("memory that was empty before is kept")

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        why = _OPS.get(name)
        if name in ("index", "index_put", "index_put_") and any(
            x.dtype == torch.bool for x in tree_iter(args[1]) if isinstance(x, Tensor)
        ):
            why = _OPS["nonzero"]
        if why and (not given or _device(given[0]) == self._device):
            raise _error(f"{why}: {name} at {_line()}")
        keys = {x.untyped_storage()._cdata for x in given}
        if not keys <= self._static.keys() | self._made.keys():
            raise _error(f"memory that is not static is used: {name} at {_line()}")
        if func.namespace == "fastpar" and given:  # in place, arrives whole: check its inside too
            with self._inside():
                key = getattr(torch._C.DispatchKey, self._device.upper())
                out = func._op_dk(key, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        if len({_device(x) for x in (*given, *made)}) > 1:
            raise _error(f"host and device exchange values: {name} at {_line()}")
        for x in made:
            key = x.untyped_storage()._cdata
            if key not in keys | self._static.keys() and _device(x) == self._device:
                self._made[key] = StorageWeakRef(x.untyped_storage()), f"{name} at {_line()}"
        return out


def _device(x: Tensor) -> str:
    with torch._C.DisableTorchFunction():  # outer modes must not change the result
        return x.device.type


def _error(what: str) -> RuntimeError:
    return RuntimeError(
        f"CaptureCheck: expected operations that a CUDA graph can hold, got {what}; move it out of "
        "the micro-batch, or train without CUDA graphs"
    )


def _refusal(name: str, why: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap call to raise in the region and its backward, but not in other threads."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == torch.cuda.streams.__file__:
            return call(*args, **kwargs)  # by wait_stream() and record_event(): fork and join
        if any(isinstance(mode, CaptureCheck) for mode in _get_current_dispatch_mode_stack()):
            raise _error(f"{why}: {name} at {_line()}")
        return call(*args, **kwargs)

    return refuse


def _line() -> str:
    """The innermost line outside the files of _PASSED."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
