"""FLOPs of the ops, for torch.utils.flop_counter.FlopCounterMode and what uses it.

Each op counts what torch counts for its stock form, forward and backward together: 2 for each
multiply-add of a product, nothing for the rest, so that only ops with products are in the table.
Attention counts every score, causal or not, and five products in backward, as torch's kernels do.
linear_cross_entropy counts the products of its gradients where it computes them, in forward; logits
that a backward (reduction "none") computes once more and rows of padding are not counted.
tests/ops/test_flops.py compares all cases of cases.py.

[Note: on import] torch.utils.flop_counter imports Triton, which takes longer than all of this
package. So formulas are registered when somebody else imports it.
"""

import importlib.abc
import importlib.machinery
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[str, Callable[..., int]] = {}


def _counts(formula: Callable[..., int]) -> Callable[..., int]:
    """Adds the formula of the op of this name; it takes the op's arguments."""
    _FORMULAS[formula.__name__[1:]] = formula
    return formula


@_counts
def _gemm_(out: Any, a: Any, b: Any, *_: Any, **result: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


@_counts
def _linear(x: Any, weight: Any, *_: Any, **result: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


@_counts
def _linear_bwd(
    dy: Any, x: Any, weight: Any, need_dx: bool, need_dweight: bool, *_: Any, **result: Any
) -> int:
    inner = [t.shape[-1] for t in (x, weight) if t is not None]
    return 2 * (need_dx + need_dweight) * dy.numel() * inner[0] if inner else 0


@_counts
def _grouped_linear(x: Any, weight: Any, *_: Any, **result: Any) -> int:
    return 2 * x.numel() * weight.shape[1]


@_counts
def _grouped_linear_bwd(
    dy: Any, x: Any, weight: Any, counts: Any, need: Any, *_: Any, **result: Any
) -> int:
    return (need[0] + need[1]) * _grouped_linear(x, weight)


@_counts
def _linear_cross_entropy(
    x: Any, weight: Any, targets: Any, vocab_size: Any, ignore_index: int, reduction: str,
    label_smoothing: float, z_loss: float, softcap: float, chunk_rows: int, need_dx: bool,
    need_dweight: bool, *_: Any, **result: Any,
) -> int:  # fmt: skip
    gradients = 0 if reduction == "none" else need_dx + need_dweight
    return 2 * x.numel() * (vocab_size or weight.shape[0]) * (1 + gradients)


@_counts
def _linear_cross_entropy_bwd(
    dlosses: Any, x: Any, weight: Any, targets: Any, vocab_size: Any, *options: Any, **result: Any
) -> int:
    need_dx, need_dweight = options[-2:]
    return 2 * x.numel() * (vocab_size or weight.shape[0]) * (need_dx + need_dweight)


def _scores(q: Any, k: Any, cu_seqlens: Any) -> int:
    """Scores of all heads, times the head dim. Of documents without memory: as one document, which
    is the most that they can be."""
    packed, D = k is None, q.shape[-1]
    if cu_seqlens is None:
        B, T, H = q.shape[0], q.shape[1], q.shape[-2]
        return B * H * T * (T if packed else k.shape[1]) * D
    lengths = [q.shape[0]]
    if type(cu_seqlens) is torch.Tensor and cu_seqlens.device.type != "meta":
        lengths = [end - start for start, end in itertools.pairwise(cu_seqlens.tolist())]
    return q.shape[-2] * D * sum(n * n for n in lengths)


@_counts
def _attention(
    q: Any, k: Any, v: Any, causal: bool, scale: Any, key: Any = None, site_head: int = 0,
    threshold: int = 0, cu_seqlens: Any = None, *_: Any, **result: Any,
) -> int:  # fmt: skip
    return 4 * _scores(q, k, cu_seqlens)


@_counts
def _attention_bwd(
    do: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, causal: bool, scale: Any, key: Any = None,
    site_head: int = 0, threshold: int = 0, cu_seqlens: Any = None, *_: Any, **result: Any,
) -> int:  # fmt: skip
    return 10 * _scores(q, k, cu_seqlens)


def _register(counter: ModuleType) -> None:
    for name, formula in _FORMULAS.items():
        stem, bwd, _ = name.partition("_bwd")
        for op in (name, f"{stem}_composed{bwd}"):
            if hasattr(torch.ops.fastpar, op):  # some are in the compiled library
                counter.register_flop_formula(getattr(torch.ops.fastpar, op), get_raw=True)(formula)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the formulas at the end of the counter's import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _COUNTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Makes torch's counter know the ops, now or when it is imported; called once."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())
