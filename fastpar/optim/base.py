"""What AdamW and Adafactor share: gradients of engines, the norm, the clip factor, skipped steps.

[Note: who decides]
A rank of a sharded engine sees only its pieces of the gradients. Norm, clip factor and overflow are
made from bins that the engine's control exchange has added up over the shards; bins are integers,
so all ranks get the same bits, and those of one process. has_grad() is agreed on as well: all ranks
step the same parameters, and count the steps of those of which they own no element.

[Note: torch.compile]
A compiled training step runs step() and zero_grad() as they are, between its graphs: they are a few
kernel calls already, and to trace their bookkeeping would only add guards. torch's own decorator
for this imports torch._dynamo at the first call, which takes 1.4 s and over 100 MB in processes
that never compile (test_a_step_does_not_import_the_compiler); uncompiled looks whether it is there.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.global_norm import (
    NORM_WORDS,
    GlobalNorm,
    global_norm,
    norm_bins,
    norm_from_bins,
)
from fastpar.optim.checks import check_plain, number, where
from fastpar.parallel.engine import Engine, engine_of_parameter


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, never traced: see [Note: torch.compile]."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is None or not hasattr(compiler, "disable"):  # absent, or being imported
            return method(*args, **kwargs)
        return compiler.disable(method)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch without its decorator: see [Note: torch.compile]."""
    return getattr(method, "__wrapped__", method)


class Row(NamedTuple):
    """A parameter that takes part in a step, and what this rank updates of it."""

    param: Tensor
    piece: Tensor  # the parameter itself, or this rank's elements of it
    grad: Tensor  # of the piece
    group: int
    position: int  # among all parameters of the optimizer
    start: int  # the piece's first element
    engine: Engine | None


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer that knows engines, clips by the global norm and skips overflows.

    Attributes:
        max_grad_norm: of the constructor; infinity only measures.
        grad_norm: fp32 tensor [], of the last step, before clipping, after division by grad_scale
            and by the engine's count of tokens; None where nothing asked for it: no max_grad_norm,
            and no loss scale or one whose overflows found_inf tells.
        grad_scale: the loss scale, by which gradients are divided; 1 by default.
        found_inf: tensor of one element, nonzero if the gradients are known to be not finite.
            torch.amp.GradScaler sets both around step(); so may any other training loop.
        skipped: whether the last step changed nothing because its gradients were not finite. That
            happens only once grad_scale or found_inf has been set. Reading it on a GPU waits for
            the step.
    """

    steps_engines = True  # see fastpar/parallel/optim_guard.py
    grad_scale: float | Tensor = 1.0
    found_inf: Tensor | None = None
    grad_norm: Tensor | None = None
    _found: Tensor | None = None  # flag of the last step, on the device

    def set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        """Checked; before super().__init__()."""
        name = type(self).__name__
        if max_grad_norm is not None and not number(name, "max_grad_norm", max_grad_norm) > 0:
            raise ValueError(
                f"{name}: expected max_grad_norm > 0 or None, got "
                f"max_grad_norm={max_grad_norm}; None switches clipping off"
            )
        self.max_grad_norm = max_grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing because its gradients were not finite."""
        return self._found is not None and bool(self._found.item())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; remembers which parameters had no engine."""
        plain(torch.optim.Optimizer.add_param_group)(self, param_group)
        try:
            check_plain(type(self).__name__, self.param_groups[-1], len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise
        alone = self.__dict__.setdefault("_alone", set())
        for p in self.param_groups[-1]["params"]:
            (alone.add if engine_of_parameter(p) is None else alone.discard)(p)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, for main gradients and shards of engines too: of this one's parameters."""
        plain(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        for engine in self.engines():
            engine.zero_grad(set_to_none, of=self)

    def engines(self) -> list[Engine]:
        """The engines of the parameters, each once."""
        found = (engine_of_parameter(p) for g in self.param_groups for p in g["params"])
        return list({id(e): e for e in found if e is not None}.values())

    # The step

    def begin_step(self) -> tuple[list[Engine], list[Row], Tensor | None, Tensor | None]:
        """Finish the engines' reductions and agree with the other ranks on this step.

        Sets grad_norm and skipped. No host synchronization.

        Returns:
            The engines, whose after_step() is to be called; the rows; what their gradients are to
            be multiplied by; the flag under which nothing may change.
        Ranks: all, for every engine.
        Raises:
            RuntimeError: a sparse gradient; an optimizer older than the engine; GradScaler with
                gradients that it does not see.
        """
        engines = self.engines()
        if engines:
            self._check_age()
        self._check_found_inf(engines)
        for engine in engines:
            engine.before_step(self)
        asked = self._scaled or self.max_grad_norm is not None
        rows: list[Row] = []
        owned: dict[int, list[tuple[Tensor, bool]]] = {id(e): [] for e in engines}
        position = -1
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                position += 1
                of = engine_of_parameter(p) if engines else None
                piece, grad, start = (p, p.grad, 0) if of is None else of.piece(p)
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__}.step: expected dense gradients, got layout="
                        f"{grad.layout}; build the embedding with sparse=False"
                    )
                rows.append(Row(p, piece, grad, i, position, start, of))
                if of is not None and of.shares and grad.numel():
                    owned[id(of)].append((grad, of.counts(p)))
        bins = [self._exchange(engine, owned[id(engine)] if asked else None) for engine in engines]
        if engines:
            rows = [row for row in rows if row.engine is None or row.engine.has_grad(row.param)]
        factor, found = self._factor(rows, [b for b in bins if b is not None], engines)
        return engines, rows, factor, found

    def _check_age(self) -> None:
        alone: set[Tensor] = self.__dict__.get("_alone", set())
        for i, group in enumerate(self.param_groups if alone else ()):
            for position, p in enumerate(group["params"]):
                if p in alone and engine_of_parameter(p) is not None:
                    raise RuntimeError(
                        f"{type(self).__name__}.step: expected parameters as they were when the "
                        f"optimizer was built, got {where(group, i, position)} with an engine "
                        "since; build the optimizer after fastpar.parallelize"
                    )

    @property
    def _scaled(self) -> bool:
        """Whether there is a loss scale: only then a step may be skipped."""
        return "grad_scale" in self.__dict__ or self.found_inf is not None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks for it in step(), before it looks at p.grad."""
        self._refuse_scaler(self.engines())
        return True

    def _refuse_scaler(self, engines: list[Engine]) -> None:
        for engine in engines:
            if engine.shares:
                raise RuntimeError(
                    f"{type(self).__name__}.step: expected neither GradScaler nor found_inf with "
                    f"zero_stage >= 1 or tp > 1, got one with zero_stage={engine.zero_stage}, tp="
                    f"{engine.mesh.tp_size}; no rank has all gradients in p.grad: set grad_scale "
                    "from a fastpar.optim.loss_scale.DynamicLossScale"
                )
            if engine.has_main_grads:
                raise RuntimeError(
                    f"{type(self).__name__}.step: expected gradients in p.grad under GradScaler, "
                    "got main gradients; parallelize without grad_dtype, or set grad_scale from a "
                    "DynamicLossScale"
                )

    def _check_found_inf(self, engines: list[Engine]) -> None:
        if self.found_inf is None:
            return
        self._refuse_scaler(engines)
        if not isinstance(self.found_inf, Tensor):  # GradScaler saw no p.grad
            raise RuntimeError(
                f"{type(self).__name__}.step: expected gradients in p.grad under GradScaler, got "
                "main gradients; parallelize without grad_dtype, or set grad_scale from a "
                "DynamicLossScale"
            )

    def _exchange(self, engine: Engine, grads: list[tuple[Tensor, bool]] | None) -> Tensor | None:
        """The control exchange of one engine: bins of all its shards, if a norm is asked for.

        Of what several ranks have alike one rank's elements count, but an overflow on any.
        """
        if grads is None or not engine.shares:
            engine.exchange(None)
            return None
        none = torch.zeros(NORM_WORDS, dtype=torch.int64, device=engine.mesh.device)
        tensors, counted = [g for g, _ in grads], [c for _, c in grads]
        return engine.exchange(norm_bins(tensors, counted=counted, out=none))

    def _factor(
        self, rows: list[Row], bins: list[Tensor], engines: list[Engine]
    ) -> tuple[Tensor | None, Tensor | None]:
        """What gradients are to be multiplied by, and the flag under which nothing may change.

        Args:
            bins: of the sharded engines' gradients, over all ranks.
        """
        self.grad_norm = self._found = None
        limit, scaled, tokens = self.max_grad_norm, self._scaled, self._tokens(engines)
        if not rows:
            return None, None
        device = rows[0].grad.device
        loss_scale = scalar(self.grad_scale, device) if scaled else None
        if tokens is not None:
            tokens = tokens.to(device, torch.float32).reshape(())
            loss_scale = tokens if loss_scale is None else tokens * loss_scale
        known = self.found_inf
        if known is not None:
            known = known.reshape(()).to(device, torch.float32)
        if limit is None and not bins and (known is not None or not scaled):
            self._found = known
            if loss_scale is None:
                return None, None
            return torch.ones((), device=device) / loss_scale, known
        whole = [row.grad for row in rows if row.engine is None or not row.engine.shares]
        max_norm = None if limit == math.inf else limit
        norm = _norm(whole, bins, device, max_norm=max_norm, loss_scale=loss_scale)
        self.grad_norm = norm.norm
        factor = None if limit == math.inf and loss_scale is None else norm.grad_scale
        if scaled:
            self._found = norm.found_inf if known is None else norm.found_inf.maximum(known)
        return factor, self._found

    def _tokens(self, engines: list[Engine]) -> Tensor | None:
        """What the losses of this step are sums over."""
        found = [engine.token_scale for engine in engines]
        if len(found) > 1 and any(t is not None for t in found):
            raise RuntimeError(
                f"{type(self).__name__}.step: expected one engine where tokens are counted, got "
                f"{len(found)} engines; build one optimizer for each model"
            )
        return found[0] if found else None

    # For checkpoints

    def _replace_state(self, p: Tensor, new: dict[str, Any]) -> None:
        """Have this state, in the memory of the old one where it fits: captured graphs know it."""
        old = self.state[p]
        for name, value in new.items():
            mine = old.get(name)
            same = isinstance(mine, Tensor) and isinstance(value, Tensor)
            if same and (mine.shape, mine.dtype) == (value.shape, value.dtype):
                if mine.data_ptr() != value.data_ptr():
                    mine.copy_(value)
            else:
                old[name] = value
        for name in old.keys() - new.keys():
            del old[name]

    def check_saved(self, p: Tensor, saved: dict[str, Tensor], *, where: str) -> None:
        """Refuse entries that are not of a parameter, by their whole shapes; for checkpoints.

        Raises:
            ValueError: an entry is missing or has another shape.
        """
        raise NotImplementedError

    def load_piece(
        self, p: Tensor, target: Tensor, saved: dict[str, Tensor], *, where: str
    ) -> None:
        """Take over this rank's part of a saved state, in whatever form it was saved.

        Args:
            target: what this rank steps of p, with its new values.
            saved: tensors that are the optimizer's from now on, or its own.
        """
        raise NotImplementedError

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The entries that a parameter's state may have with these options, for checkpoints."""
        raise NotImplementedError


def _norm(
    whole: list[Tensor],
    bins: list[Tensor],
    device: torch.device,
    *,
    max_norm: float | None,
    loss_scale: float | Tensor | None,
) -> GlobalNorm:
    """Of gradients on one or several devices and of bins, on the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in whole:
        by_device.setdefault(grad.device, []).append(grad)
    lists = list(by_device.values())
    if len(lists) == 1 and not bins:
        return global_norm(lists[0], max_norm=max_norm, loss_scale=loss_scale)
    parts = [b.to(device) for b in (*bins, *map(norm_bins, lists))]
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return norm_from_bins(total, max_norm=max_norm, loss_scale=loss_scale)


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A number, or an fp32 tensor [] on the device for a kernel to read."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.device.type == "cpu" and (device.type != "cpu" or value.dtype != torch.float32):
        return value.item()
    return value.to(device, torch.float32).reshape(())
