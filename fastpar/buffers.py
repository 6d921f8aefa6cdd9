"""The flat memory of a model: parameters are views of one buffer per dtype, gradients of another.

[Note: where gradients live]
Autograd may put its own tensor into p.grad (it does after zero_grad()); store() copies that into
the view and puts the view back, at the cost that zeroing the buffer would have. Nothing is zeroed
beforehand: the slice of a parameter without a gradient keeps old bytes until collect() is asked.
Where the gradient's dtype is not the parameter's, autograd's tensor is added to p.main_grad and
p.grad stays None.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from fastpar.layout import Layout, ParamSpec, build_layout, parameter_names

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class FlatBuffers:
    """Parameters and gradients of a model in the places that a Layout gives them.

    Args:
        model: its trained parameters become contiguous views; values and objects are kept.
        device: where all of them must be.
        grad_dtype: of the gradients; None is each parameter's own.
    Attributes:
        layout: the places; slot i belongs to params[i].
        params, views: parameters and their gradient views, in launch order.
        frozen: parameters without requires_grad, left where they are, with their names.
        param_buckets, grad_buckets: the slices of the flat buffers that are sent.
        used: one element per parameter of a bucket, see layout.py.
    Raises:
        ValueError: nothing to train; a dtype, device or sharing of memory that does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        world_size: int = 1,
        bucket_bytes: float = 25 * 2**20,
        first_bucket_bytes: float = 2**20,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        if grad_dtype not in (None, *DTYPES):
            raise ValueError(
                f"parallelize: expected a floating-point grad_dtype, got grad_dtype={grad_dtype}; "
                "use torch.float32 or None"
            )
        named = parameter_names(model)
        _check_parameters(named, device)
        trained = [p for p in named if p.requires_grad]
        self.layout: Layout = build_layout(
            [ParamSpec(named[p], tuple(p.shape), p.dtype) for p in trained],
            world_size=world_size,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            grad_dtype=grad_dtype,
        )
        self.params = [trained[slot.registered] for slot in self.layout.slots]
        self.frozen = {p: names[0] for p, names in named.items() if not p.requires_grad}
        self._index = {p: i for i, p in enumerate(self.params)}
        self._homes = [
            (weakref.ref(module), attribute, p)
            for module in model.modules()
            for attribute, p in module._parameters.items()
            if p in self._index
        ]
        sizes = self.layout.buffer_numel
        values = {d: torch.zeros(n, dtype=d, device=device) for d, n in sizes.items()}
        grads = {d: torch.zeros(n, dtype=grad_dtype or d, device=device) for d, n in sizes.items()}
        self.views: list[Tensor] = []
        self._pointers: list[int] = []
        for slot, p in zip(self.layout.slots, self.params):
            place = values[p.dtype][slot.start : slot.stop].view(p.shape)
            p.data = place.copy_(p.data)
            self._pointers.append(p.data_ptr())
            self.views.append(grads[p.dtype][slot.start : slot.stop].view(p.shape))
            p.grad = None
        self._main = [v.dtype != p.dtype for v, p in zip(self.views, self.params)]
        for p, view, main in zip(self.params, self.views, self._main):
            if main:
                p.main_grad = view  # type: ignore[attr-defined]
        self._has_main_grad = [False] * len(self.params)
        buckets = self.layout.buckets
        self.param_buckets = [values[b.dtype][b.start : b.stop] for b in buckets]
        self.grad_buckets = [grads[b.dtype][b.start : b.stop] for b in buckets]
        self.used = [grads[b.dtype][b.used_start :][: len(b.slots)] for b in buckets]

    def name(self, i: int) -> str:
        """The first name of parameter i."""
        return self.layout.slots[i].spec.names[0]

    def store(self, i: int) -> None:
        """Bring what a backward left in the .grad of parameter i into its view."""
        p, view = self.params[i], self.views[i]
        grad = p.grad
        assert grad is not None
        if p.data_ptr() != self._pointers[i]:
            self.check()
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"Engine: expected a dense gradient for parameter '{self.name(i)}', got "
                f"layout={grad.layout}; build the embedding with sparse=False"
            )
        if grad.requires_grad:
            raise RuntimeError(
                "Engine: expected backward without create_graph, got a gradient with a graph for "
                f"parameter '{self.name(i)}'; use torch.autograd.grad for higher derivatives"
            )
        if self._main[i]:
            if self._has_main_grad[i]:
                view.add_(grad)
            else:
                view.copy_(grad)
            self._has_main_grad[i] = True
            p.grad = None
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            p.grad = view

    def collect(self, i: int) -> bool:
        """Whether parameter i has a gradient; its view then holds it, and zeros otherwise."""
        p, view = self.params[i], self.views[i]
        if self._main[i]:
            if self._has_main_grad[i]:
                return True
        elif p.grad is not None:
            if p.grad.data_ptr() != view.data_ptr():  # put there between two backward passes
                view.copy_(p.grad)
                p.grad = view
            return True
        view.zero_()
        return False

    def adopt(self, i: int) -> None:
        """Parameter i has a gradient from now on: other ranks gave its view one."""
        self._has_main_grad[i] = self._main[i]
        self.params[i].grad = None if self._main[i] else self.views[i]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, which writes no memory; or set those that there are to zero."""
        for i, p in enumerate(self.params):
            grad = self.grad_of(p)
            if grad is not None and not set_to_none:
                grad.zero_()
                continue
            p.grad = None
            self._has_main_grad[i] = False

    def grad_of(self, p: Tensor) -> Tensor | None:
        """The gradient of one of the parameters, None if it has none."""
        i = self._index.get(p)  # type: ignore[call-overload]
        if i is None or not self._main[i]:
            return p.grad
        return self.views[i] if self._has_main_grad[i] else None

    def check(self) -> None:
        """Parameters must still be those that the model uses, and views of the flat buffer."""
        for i, p in enumerate(self.params):
            if p.data_ptr() != self._pointers[i]:
                raise RuntimeError(
                    f"Engine: expected parameter '{self.name(i)}' to stay in its flat buffer, got "
                    f"other memory (dtype={p.dtype}, device={p.device}); call module.to() before "
                    "fastpar.parallelize"
                )
        for module_ref, attribute, p in self._homes:
            module = module_ref()
            if module is not None and module._parameters.get(attribute) is not p:
                raise RuntimeError(
                    "Engine: expected the model to keep its parameter "
                    f"'{self.name(self._index[p])}', got another object in its place; load with "
                    "load_state_dict(assign=False), and tie or replace parameters before "
                    "fastpar.parallelize"
                )
        for p, name in self.frozen.items():
            if p.requires_grad:
                raise RuntimeError(
                    f"Engine: expected parameter '{name}' to stay frozen, got requires_grad=True; "
                    "set requires_grad before fastpar.parallelize"
                )


def _check_parameters(named: dict[nn.Parameter, tuple[str, ...]], device: torch.device) -> None:
    """What flat buffers cannot hold is refused before anything is changed."""
    if not any(p.requires_grad for p in named):
        raise ValueError(
            f"parallelize: expected a model with parameters to train, got {len(named)} parameters "
            "and none with requires_grad; pass the whole model and unfreeze what is to be trained"
        )
    memory: dict[int, str] = {}
    for p, names in named.items():
        if p.device != device:
            raise ValueError(
                f"parallelize: expected every parameter on mesh.device={device}, got "
                f"device={p.device} for '{names[0]}'; call model.to(mesh.device) first"
            )
        if not p.requires_grad:
            continue
        if p.dtype not in DTYPES:
            raise ValueError(
                f"parallelize: expected fp32, bf16, fp16 or fp64 parameters, got dtype={p.dtype} "
                f"for '{names[0]}'; convert it, or set requires_grad=False"
            )
        other = memory.setdefault(p.data_ptr(), names[0]) if p.numel() else names[0]
        if other != names[0]:
            raise ValueError(
                f"parallelize: expected tied weights to be one Parameter, got '{other}' and "
                f"'{names[0]}' sharing memory; assign the Parameter itself, not its data"
            )
