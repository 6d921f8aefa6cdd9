"""What AdamW and Adafactor share: gradients of engines, the norm, the clip factor, skipped steps.

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
from typing import Any

import torch
from torch import Tensor

from fastpar.engine import Engine, engine_of_parameter
from fastpar.kernels.global_norm import GlobalNorm, global_norm, norm_bins, norm_from_bins


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


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer that knows engines, clips by the global norm and skips overflows.

    Attributes:
        max_grad_norm: of the constructor; infinity only measures.
        grad_norm: fp32 tensor [], of the last step, before clipping, after division by grad_scale;
            None where nothing asked for it: no max_grad_norm, and no loss scale or one whose
            overflows found_inf tells.
        grad_scale: the loss scale, by which gradients are divided; 1 by default.
        found_inf: tensor of one element, nonzero if the gradients are known to be not finite.
            torch.amp.GradScaler sets both around step(); so may any other training loop.
        skipped: whether the last step changed nothing because its gradients were not finite. That
            happens only once grad_scale or found_inf has been set. Reading it on a GPU waits for
            the step.
    """

    _step_supports_amp_scaling = True
    grad_scale: float | Tensor = 1.0
    found_inf: Tensor | None = None
    grad_norm: Tensor | None = None
    _found: Tensor | None = None  # flag of the last step, on the device

    def set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        """Checked; before super().__init__()."""
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"{type(self).__name__}: expected max_grad_norm > 0 or None, got "
                f"max_grad_norm={max_grad_norm}; None switches clipping off"
            )
        self.max_grad_norm = max_grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing because its gradients were not finite."""
        return self._found is not None and bool(self._found.item())

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also clears the main gradients of an engine."""
        plain(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        for engine in self.engines():
            engine.zero_grad(set_to_none)

    def engines(self) -> list[Engine]:
        """The engines of the parameters, each once."""
        found = (engine_of_parameter(p) for g in self.param_groups for p in g["params"])
        return list({id(e): e for e in found if e is not None}.values())

    def gradient(self, p: Tensor) -> Tensor | None:
        """The gradient to step with: p.grad, or the main gradient of an engine.

        Raises:
            RuntimeError: it is sparse.
        """
        engine = engine_of_parameter(p)
        grad = p.grad if engine is None else engine.grad_of(p)
        if grad is not None and grad.layout is not torch.strided:
            raise RuntimeError(
                f"{type(self).__name__}.step: expected dense gradients, got layout={grad.layout}; "
                "build the embedding with sparse=False"
            )
        return grad

    def factor(self, grads: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What gradients are to be multiplied by, and the flag under which nothing may change.

        Sets grad_norm and skipped. No host synchronization.
        """
        self.grad_norm = self._found = None
        scaled = "grad_scale" in self.__dict__ or self.found_inf is not None
        limit = self.max_grad_norm
        if not grads or not (scaled or limit):
            return None, None
        known = self.found_inf
        if known is not None and not isinstance(known, Tensor):  # GradScaler saw no p.grad
            raise RuntimeError(
                f"{type(self).__name__}.step: expected gradients in p.grad under GradScaler, got "
                "main gradients; parallelize without grad_dtype, or set grad_scale from a "
                "DynamicLossScale"
            )
        if known is not None:
            known = known.reshape(()).to(grads[0].device, torch.float32)
        if known is not None and limit is None:
            self._found = known
            return torch.ones_like(known) / self.grad_scale, known
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in grads:
            by_device.setdefault(grad.device, []).append(grad)
        norm = _norm(
            list(by_device.values()),
            max_norm=None if limit == math.inf else limit,
            loss_scale=scalar(self.grad_scale, grads[0].device) if scaled else None,
        )
        self.grad_norm = norm.norm
        if not scaled:
            return None if limit == math.inf else norm.grad_scale, None
        self._found = norm.found_inf if known is None else norm.found_inf.maximum(known)
        return norm.grad_scale, self._found


def _norm(
    lists: list[list[Tensor]], *, max_norm: float | None, loss_scale: float | Tensor | None
) -> GlobalNorm:
    """Of gradients on one or several devices; the result is on the first."""
    if len(lists) == 1:
        return global_norm(lists[0], max_norm=max_norm, loss_scale=loss_scale)
    bins = torch.stack([norm_bins(grads).to(lists[0][0].device) for grads in lists]).sum(0)
    return norm_from_bins(bins, max_norm=max_norm, loss_scale=loss_scale)


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A number, or an fp32 tensor [] on the device for a kernel to read."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.device.type == "cpu" and (device.type != "cpu" or value.dtype != torch.float32):
        return value.item()
    return value.to(device, torch.float32).reshape(())
