"""Registers and calls ops: with torch.library, or directly for ordinary tensors.

Kinds of tensors and derivatives that no implementation supports are converted or refused here, once
for all ops; tests/ops/test_op.py is the table.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.nn import Parameter

from fastpar.kernels import _C
from fastpar.kernels.backend import FLOATS

_library = torch.library.Library("fastpar", "FRAGMENT")


class Op:
    """An op of torch.library whose implementation is Python: torch.compile, the profiler and modes
    see every call.

    [Note: unusual tensors] Implementations read memory by address. A lazily negated tensor (the
    negative bit of z.conj().imag) and torch's zero tensors are made plain here, as input and as
    gradient; a batch of gradients (is_grads_batched) calls the op for each; a sparse tensor and a
    tangent of forward-mode AD are refused.

    [Note: transforms] Under torch.func's grad and vmap the op is an autograd.Function of the form
    that these require: vmap is a loop, and backward may itself be recorded, but not differentiated.
    """

    def __init__(
        self, overload: torch._ops.OpOverload, run: Callable[..., Any], fake: Callable[..., Any]
    ):
        self.overload = overload
        self.run, self.fake = run, fake
        self.name = overload.name().split("::")[1]
        self._dtypes: dict[tuple, list[torch.dtype]] = {}  # of outputs, by kinds of arguments
        self.mutates = overload._schema.is_mutable
        self.takes_lists = any(str(a.type) == "List[Tensor]" for a in overload._schema.arguments)
        self.setup_context: Callable[..., None] = lambda ctx, inputs, output: None
        self.backward: Callable[..., Any] = self._no_backward

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if forward_ad._current_level >= 0:
            self._refuse_tangents(args)
        if _transform() not in (None, TransformType.Functionalize) and not self.takes_lists:
            if self.mutates:
                raise RuntimeError(
                    f"{self.name}: expected tensors outside of torch.func's transforms, got a call "
                    "under grad or vmap; it writes in place: drop inplace=True"
                )
            return self._transformed.apply(*args)
        unusual = False
        for a in args:
            if isinstance(a, Tensor):
                check_dense(self.name, "a tensor", a)
                unusual = unusual or a.is_neg() or a._is_zerotensor()
        if unusual and not self.mutates:
            return self(*(_resolved(a) if isinstance(a, Tensor) else a for a in args))
        return self.overload(*args)

    def complete(self, result: Any, args: tuple) -> Any:
        """The result of run(*args), with the empty tensors that it left out."""
        if not isinstance(result, tuple) or all(x is not None for x in result):
            return result
        key = tuple(_kind(a) for a in args)
        dtypes = self._dtypes.get(key)
        if dtypes is None:  # found with tensors without memory: outputs may be large
            given = (a.to("meta") if isinstance(a, Tensor) else a for a in args)
            dtypes = self._dtypes[key] = [x.dtype for x in self.fake(*given)]
        like = next(a for a in args if isinstance(a, Tensor))
        return tuple(like.new_empty(0, dtype=d) if x is None else x for x, d in zip(result, dtypes))

    def _refuse_tangents(self, args: tuple) -> None:
        for a in itertools.chain.from_iterable(a if isinstance(a, list) else (a,) for a in args):
            if isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None:
                raise RuntimeError(
                    f"{self.name}: expected tensors without tangents, got forward-mode AD (jvp, "
                    "dual tensors), which it does not support; use backward or torch.func.grad, or "
                    f"fastpar.kernels.reference.{_stem(self.name)}_ref"
                )

    @functools.cached_property
    def _transformed(self) -> Any:
        """The autograd.Function of [Note: transforms]."""

        def forward(*inputs):
            return self.complete(self(*inputs), inputs)

        return _function(
            self.name, forward=forward, vmap=_loop(lambda *args: self._transformed.apply(*args)),
            backward=lambda *args: self.backward(*args),
            setup_context=lambda *args: self.setup_context(*args),
        )  # fmt: skip

    def _no_backward(self, ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_one_backward(_stem(self.name), "a derivative of its gradient"))


def _resolved(x: Tensor) -> Tensor:
    """x with its values in memory; torch itself expands one zero, with strides that no op takes."""
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def _function(name: str, **methods: Callable[..., Any]) -> Any:
    static = {key: staticmethod(method) for key, method in methods.items()}
    return type(name, (torch.autograd.Function,), static)


def _loop(call: Callable[..., Any]) -> Callable[..., Any]:
    """vmap of a call: once for each sample."""

    def vmap(info, in_dims, *args):
        results = []
        for i in range(info.batch_size):
            slices = (
                a.select(d, i) if isinstance(a, Tensor) and d is not None else a
                for a, d in zip(args, in_dims)
            )
            results.append(call(*slices))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])

    return vmap


def _kind(a: Any) -> Any:
    """The properties of an argument that determine the dtypes of outputs."""
    if isinstance(a, Tensor):
        return a.dtype
    return a if a is None or isinstance(a, torch.dtype | bool) else type(a)


_PLAIN = (Tensor, Parameter)
_has_storage = torch._C._has_storage  # false for sparse tensors and torch's wrappers
_watchers = (  # each counts what is active: modes for dispatch and functions, the tracer
    torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._is_tracing,
)  # fmt: skip


def _has_values(x: Tensor) -> bool:
    """Whether the values of x are those at its address."""
    return _has_storage(x) and x.data_ptr() != 0 and not x.is_neg()


def is_eager() -> bool:
    """Whether no mode, transform, tracer or tangent has a say in a call outside of autograd."""
    return not (torch.compiler.is_compiling() or forward_ad._current_level >= 0 or _is_watched())


def _stem(name: str) -> str:
    """The op's base name: layer_norm for layer_norm_bwd, and so on."""
    return name.removesuffix("_").removesuffix("_bwd").removesuffix("_composed")


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap) is active."""
    return _transform() is not None


def _transform() -> Any:
    """The kind of the innermost active transform of torch.func, None without one."""
    if torch.compiler.is_compiling():  # torch's tracer assumes a non-empty stack
        return None
    top = torch._C._functorch.peek_interpreter_stack()
    return None if top is None else top.key()


def may_need_grad(x: Tensor) -> bool:
    """Whether a backward may ask for x's gradient. torch.jit.trace records a call that later runs
    with other tensors."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        return True
    return torch.is_grad_enabled() and (x.requires_grad or in_transform())


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor whose memory holds its values."""
    return type(x) in _PLAIN and _has_values(x) and not _is_watched()


def _is_watched() -> bool:
    """Whether a mode (FakeTensor, make_fx, checkpointing), a transform (vmap) or the tracer
    (torch.jit.trace) is active."""
    active = any(count() for count in _watchers)
    return active or torch._C._functorch.peek_interpreter_stack() is not None


def check_dense(op: str, name: str, x: Tensor) -> None:
    """Refuses sparse tensors, before their shapes and strides are read."""
    if x.layout is not torch.strided:
        raise ValueError(
            f"{op}: expected dense tensors, got {name}.layout={x.layout}; pass its to_dense()"
        )


def check_float(op: str, name: str, x: Tensor) -> None:
    """Refuses dtypes that neither our kernels nor torch's ops treat as numbers."""
    check_dense(op, name, x)
    if x.dtype not in FLOATS:
        raise ValueError(
            f"{op}: expected a floating dtype, got {name}={x.dtype}; cast it first, to fp32, bf16, "
            "fp16 or fp64"
        )


def check_vector(op: str, name: str, vector: Tensor, x: Tensor) -> None:
    """Refuses a vector without one number per element of x's last dimension."""
    check_dense(op, name, vector)
    row = x.shape[-1:]
    if vector.dim() != 1 or vector.shape != row:
        raise ValueError(
            f"{op}: expected {name} of shape [C]={list(row)}, got {name}={list(vector.shape)}; "
            "it goes with x's last dimension"
        )
    if vector.dtype != x.dtype and vector.dtype != torch.float32:
        raise ValueError(
            f"{op}: expected {name} of x's dtype {x.dtype} or float32, got "
            f"{name}={vector.dtype}; cast one of them"
        )
    if vector.device != x.device:
        raise ValueError(
            f"{op}: expected {name} on x's device {x.device}, got {name} on {vector.device}; "
            "move one of them"
        )


def check_scalar(op: str, name: str, value: Tensor, device: torch.device) -> None:
    """Refuses a tensor that kernels cannot read as a number on their device."""
    if value.numel() != 1 or value.dtype != torch.float32 or value.device != device:
        raise ValueError(
            f"{op}: expected {name} of one fp32 element on {device}, got {name}="
            f"{list(value.shape)} {value.dtype} on {value.device}; pass torch.tensor(number, "
            f"device='{device}')"
        )


def check_eps(op: str, eps: float) -> None:
    """Refuses an eps that would lead to roots of negative numbers."""
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{op}: expected a finite eps >= 0, got eps={eps}; 1e-5 is usual")


def define_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *args: None,
    devices: Sequence[str] = ("CPU", "CUDA"),
) -> Op:  # fmt: skip
    """Defines the op fastpar::<schema> that calls `run` on tensors of these devices; an op that
    returns nothing needs no fake. `run` returns new tensors, never its inputs. Of several outputs
    it may return None for empty ones: complete() makes them for the dispatcher's callers."""
    name = schema.split("(")[0]
    _library.define(schema)
    op = Op(getattr(torch.ops.fastpar, name).default, run, fake)
    for device in devices:
        _library.impl(name, lambda *args: op.complete(run(*args), args), device)
    torch.library.register_fake(f"fastpar::{name}", fake, lib=_library)
    return op


def define_autograd(
    op: Op, setup_context: Callable[..., None], backward: Callable[..., Any], *,
    by_products: int = 0, once: str = "",
) -> None:  # fmt: skip
    """Defines gradients of op: setup_context(ctx, inputs, output) and backward(ctx, *grads), which
    is not called if no output has a gradient; of several, some may be None.

    Args:
        by_products: number of last outputs that only backward needs. They have no gradient. Under
            torch.func a second derivative may request one: it is refused.
        once: the name in the error for a derivative of the gradients; "": backward checks it.
    """

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def backward_of_some(ctx, *grads):
        for grad in grads:
            if grad is not None:
                if once:
                    refuse_double_backward(once)
                return backward(ctx, *grads)
        return (None,) * len(ctx.needs_input_grad)

    def backward_of_transform(ctx, *grads):
        if any(grad is not None for grad in grads[len(grads) - by_products :]):
            return op._no_backward(ctx, *grads)
        return backward_of_some(ctx, *grads)

    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = op.overload(*inputs)
        if by_products:
            ctx.mark_non_differentiable(*output[-by_products:])
        setup(ctx, inputs, output)
        return output

    through = _function(op.name, forward=forward, backward=backward_of_some)
    _library.impl(op.name, through.apply, "Autograd")
    op.setup_context, op.backward = setup, backward_of_transform


COMPILED: set[str] = set()  # names of csrc/torch's ops


def define_kernels(
    name: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """What csrc/torch's op of that name leaves to Python: `run`, its kernel for CUDA tensors, which
    makes the checks with their words for calls of any kind, and its fake. Of several outputs both
    may return None for empty ones. Returns the op; without the compiled module what refuses."""
    if _C is None:
        return functools.partial(_missing, name)
    COMPILED.add(name)
    op = getattr(torch.ops.fastpar, name).default
    for key in ("SparseCPU", "SparseCsrCPU", "MkldnnCPU"):  # the first: python() of node.h
        _library.impl(name, run, key)
    torch.library.register_fake(op, fake, lib=_library)
    torch.library.register_vmap(op, _loop(op), lib=_library)
    return op


def _missing(name: str, *args: Any) -> Any:
    raise RuntimeError(f"{name}: expected the compiled module, got none; install fastpar with it")


def refuse_double_backward(op: str) -> None:
    """Refuses gradients of an op's gradients. torch.func.grad always requests them; there the
    refusal comes when they are taken."""
    if torch.is_grad_enabled() and not in_transform():
        raise RuntimeError(_one_backward(op, "create_graph=True"))


def _one_backward(op: str, got: str) -> str:
    return (
        f"{op}: expected one backward, got {got}; "
        f"use fastpar.kernels.reference.{op}_ref where second derivatives are needed"
    )
