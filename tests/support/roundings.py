"""The largest error of an op that arithmetic explains, on every machine.

[Note: errors] Each step of the formula is rounded once to the dtype in which the op keeps its
steps, sums of n terms by sqrt(n) more fp32 roundings, at random, and the results are compared with
the exact ones. So an error is roundings times the condition of the inputs. n roundings add up to
sqrt(n) of them, times a factor that exceeds LAMBDA in one of thousands of cases (Higham and Mary
2019, doi 10.1137/18M1226312).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.kernels.cases import FP32, FP64, OpCase, evaluate, largest_error

LAMBDA = 2.0  # times the effect of DRAWS draws of roundings on a result, see [Note: errors]
DRAWS = 6
EXACT = {  # steps that round nothing
    "_to_copy", "abs", "amax", "amin", "arange", "argsort", "cat", "clamp", "clamp_min", "clone",
    "copy", "detach", "empty_like", "eq", "expand", "fill", "full", "full_like", "gather", "gt",
    "index", "index_select", "isfinite", "le", "lt", "masked_fill", "max", "maximum", "min", "ne",
    "neg", "new_empty", "new_full", "new_zeros", "nonzero", "ones_like", "repeat", "sign",
    "select_backward", "slice_backward", "stack", "tril", "where", "zero", "zeros", "zeros_like",
}  # fmt: skip
SPREAD = {"index_put", "_index_put_impl", "index_add", "scatter_add", "embedding_dense_backward"}
SUMS = {"sum", "mean", "mm", "bmm", "addmm", "baddbmm", "linalg_vector_norm", *SPREAD}
UNIT = {  # of one rounding, relative
    dtype: torch.finfo(dtype).eps / 2 for dtype in (FP32, FP64, torch.bfloat16, torch.float16)
}


class Roundings(TorchDispatchMode):
    """Moves the result of every step as far as a rounding to dtype can, up or down at random, and
    sums by sqrt(n) roundings of their terms' sizes in fp32 (fp64 for fp64)."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.unit = UNIT[dtype]
        self.unit_of_sums = UNIT[FP64 if dtype == FP64 else FP32]
        self.generator = torch.Generator().manual_seed(seed)

    def moved(self, size: Tensor) -> Tensor:
        signs = torch.randint(0, 2, size.shape, generator=self.generator, device="cpu")
        return size.nan_to_num(0.0, 0.0, 0.0) * (2.0 * signs - 1.0).to(size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__.removesuffix("_")
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if name in EXACT or views:
            return out
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and one.dtype == FP64 and one.numel():
                self.round(name, func, one, args, kwargs)
        return out

    def round(self, name: str, func: Any, out: Tensor, args: Any, kwargs: Any) -> None:
        off = self.unit * out.abs()
        if name in SUMS:
            tensors = [a for a in args if isinstance(a, Tensor)]
            if func._schema.is_mutable:
                total = out.abs()
            else:
                sizes = [a.abs() if isinstance(a, Tensor) else a for a in args]
                total = func(*sizes, **kwargs)
            n_terms = max(a.numel() for a in tensors) / out.numel()
            if name.endswith("mm"):
                n_terms = tensors[-1].shape[-2]
            elif name in SPREAD:
                n_terms = max((a.shape[0] for a in tensors if a.dim()), default=1)
            off = off + self.unit_of_sums * max(n_terms, 1.0) ** 0.5 * total
        elif name in ("logsumexp", "_softmax", "_log_softmax"):
            # exp(x - max) is off by |x - max| roundings of fp32, and their sum by sqrt(n).
            x = args[0]
            range_ = (x.amax(args[1], keepdim=True) - x).nan_to_num(0.0, 0.0, 0.0)
            n = x.shape[args[1] if isinstance(args[1], int) else args[1][0]] ** 0.5
            if name == "logsumexp":
                off = off + self.unit_of_sums * (n + 1)
            else:
                relative = out.abs() if name == "_softmax" else 1.0
                off = off + self.unit_of_sums * (range_ + n) * relative
        elif name == "silu_backward":
            # dy s (1 + x (1 - s)), s the sigmoid, in fp32: where s is near 1, x (1 - s) is off by
            # x roundings of s. Each of its steps moves the result by one of these.
            dy, x = args
            s = x.sigmoid()
            moves = (1 + x * (1 - 2 * s), x * (1 - s), x * (1 - s), *[1 + x * (1 - s)] * 3)
            size = sum(move.square() for move in moves).sqrt()
            off = off + self.unit_of_sums * (dy * s).abs() * size
        elif name in ("_softmax_backward_data", "_log_softmax_backward_data"):
            dy, y, dim = args[0], args[1], args[2]
            y = y if name == "_softmax_backward_data" else y.exp()
            size = y * (dy.abs() + (y * dy.abs()).sum(dim, keepdim=True))
            off = off + self.unit_of_sums * y.shape[dim] ** 0.5 * size
        out.add_(self.moved(off))


class RoundingsOfModel(Roundings):
    """Those of a whole fp32 model that runs in fp64: where it casts to fp32 it stays in fp64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == FP32:
            kwargs = {**kwargs, "dtype": FP64}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def round(self, name: str, func: Any, out: Tensor, args: Any, kwargs: Any) -> None:
        if name == "nll_loss_forward":  # a mean of terms of one sign
            out.add_(self.moved(self.unit * args[1].numel() ** 0.5 * out.abs()))
        super().round(name, func, out, args, kwargs)


class InDouble(RoundingsOfModel):
    """The model without roundings."""

    def round(self, *args: Any) -> None:
        pass


def differences(
    run: Callable[[nn.Module], dict[str, Tensor]], model: nn.Module
) -> dict[str, float]:
    """Result -> the largest difference of two fp32 models that compute the same in other orders.

    Each is off by what [Note: errors] allows, and the two errors add up as roundings do.

    Args:
        run: results of a model, whose steps are torch's own.
        model: is copied.
    """

    def results(mode: Roundings) -> dict[str, Tensor]:
        with mode:
            return run(copy.deepcopy(model).double())

    exact = results(InDouble(FP32, 0))
    most = dict.fromkeys(exact, 0.0)
    for draw in range(DRAWS):
        for name, x in results(RoundingsOfModel(FP32, draw)).items():
            most[name] = max(most[name], (x - exact[name]).abs().max().item())
    return {name: 2**0.5 * LAMBDA * error for name, error in most.items()}


def allowed(case: OpCase, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Result -> the largest error that arithmetic explains; see [Note: errors]."""
    inputs = case.inputs(dtype, device)
    values, formula = list(inputs.values()), case.formula or case.ref
    if case.op == "swiglu":  # torch's silu_backward is less exact than the steps of the formula
        formula = case.eager
    inner = (case.inner or dtype) if dtype != FP64 else FP64
    exact = evaluate(formula, values, double=True)
    stored = {name: x.dtype for name, x in evaluate(case.eager, values).items()}
    most = dict.fromkeys(stored, 0.0)
    for draw in range(DRAWS):
        with Roundings(inner, draw):
            moved = evaluate(formula, values, double=True)
        for name in stored:
            most[name] = max(most[name], largest_error(moved[name], exact[name]))
    for name, to in stored.items():
        finite = exact[name][exact[name].isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        least = torch.finfo(to).smallest_normal * torch.finfo(to).eps
        most[name] = LAMBDA * most[name] + case.stores * UNIT[to] * largest + least
    return case.by_name(inputs, most)
