"""The error of an op: against fp64, beside that of plain PyTorch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Errors(NamedTuple):
    """Errors of one result against fp64, over all elements that are finite there."""

    max: float
    rms: float
    eager_max: float  # of plain PyTorch in the same dtype
    eager_rms: float
    rounding: float  # of the largest value to the result's dtype: eps / 2 * max|oracle|
    numel: int
    condition: float = 0.0  # see bound; measured where the rest of it is not enough

    @property
    def bound(self) -> float:
        """Twice what plain PyTorch's error and the condition are, and one rounding of the result.

        The largest value of a result that was exact until it was stored can be off by that
        rounding. PyTorch's error alone is no yardstick: it depends on the CPU's libraries, and is
        small by luck where few elements are compared. The condition depends on the inputs only: it
        is how far the exact result moves when each input is rounded once, in fp32 (fp64 for fp64).
        Results of a stable algorithm are those of inputs that are off by a few such roundings.
        """
        return 2.0 * (self.eager_max + self.condition) + self.rounding


def measure_errors(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    eager: Callable[..., Any] | None = None,
    grad: bool = True,
    seed: int = 0,
) -> dict[str, Errors]:
    """The errors of fn and of eager (default: ref) against ref on fp64 copies of the inputs.

    For every output and for the gradient of every input with requires_grad; one random cotangent
    for all three.

    Args:
        fn, ref, eager: take *inputs, return a tensor or a tuple of tensors.
        inputs: tensors and other arguments; floating-point tensors are upcast for the oracle, the
            rest is passed on.
        grad: also compare gradients of the inputs that require them.
        seed: of the cotangents.
    Returns:
        "output 0", "gradient of input 0", ... -> Errors; results without elements are left out.
    Raises:
        AssertionError: on a missing result, a wrong shape or dtype, and where not both are finite.
    """
    truth = evaluate(ref, inputs, grad, seed, double=True)
    base = evaluate(eager or ref, inputs, grad, seed)
    ours = evaluate(fn, inputs, grad, seed)
    assert ours.keys() == truth.keys(), f"results: expected {list(truth)}, got {list(ours)}"
    measured = {}
    for name, exact in truth.items():
        got, plain = ours[name], base[name]
        assert got.shape == exact.shape, f"{name}: expected shape {exact.shape}, got {got.shape}"
        assert got.dtype == plain.dtype, f"{name}: expected dtype {plain.dtype}, got {got.dtype}"
        if not exact.numel():
            continue
        finite = exact.isfinite()
        same = torch.equal(got.double()[~finite].nan_to_num(), exact[~finite].nan_to_num())
        assert same, f"{name}: expected the oracle's infinities and NaNs"
        magnitude = exact[finite].abs().max().item() if finite.any() else 0.0
        measured[name] = Errors(
            *_max_and_rms(got, exact, finite),
            *_max_and_rms(plain, exact, finite),
            0.5 * torch.finfo(got.dtype).eps * magnitude,
            exact.numel(),
        )
    if any(errors.max > errors.bound for errors in measured.values()):
        for draw in range(3):  # of few elements one draw may leave little
            moved = [_rounded(x, draw) for x in inputs]
            for name, value in evaluate(ref, moved, grad, seed, double=True).items():
                if name in measured:
                    change, _ = _max_and_rms(value, truth[name], truth[name].isfinite())
                    largest = max(change, measured[name].condition)
                    measured[name] = measured[name]._replace(condition=largest)
    return measured


def _rounded(x: Any, seed: int) -> Any:
    """The tensor in fp64, with every element moved up or down by one rounding."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    unit = 2.0 ** (-53 if x.dtype == torch.float64 else -24)
    signs = torch.randint(
        0, 2, x.shape, generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    moved = x.detach().double() * (1.0 + unit * (2.0 * signs - 1.0).double().to(x.device))
    return moved.requires_grad_(x.requires_grad)


def _max_and_rms(value: Tensor, exact: Tensor, finite: Tensor) -> tuple[float, float]:
    difference = (value.double() - exact)[finite].abs().nan_to_num(nan=float("inf"))
    if not difference.numel():
        return 0.0, 0.0
    return difference.max().item(), difference.square().mean().sqrt().item()


def evaluate(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    grad: bool = True,
    seed: int = 0,
    *,
    double: bool = False,
) -> dict[str, Tensor]:
    """Outputs and gradients of fn on detached copies of the inputs, strides kept; arguments and
    names of results as measure_errors has them."""
    local: list[Any] = list(inputs)
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor):
            copy = x.detach().double() if double and x.is_floating_point() else x.detach()
            local[i] = copy.requires_grad_(grad and x.requires_grad)
    outputs = fn(*local)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    leaves = {i: x for i, x in enumerate(local) if isinstance(x, Tensor) and x.requires_grad}
    if leaves:
        device = next(iter(leaves.values())).device
        generator = torch.Generator(device).manual_seed(seed)
        smooth = [o for o in outputs if o.requires_grad]
        # Rounded to bf16 first: exact in every dtype, so that all three see the same cotangent.
        drawn = [
            torch.randn(o.shape, generator=generator, dtype=torch.float32, device=device)
            for o in smooth
        ]
        dy = [d.bfloat16().to(o.device, o.dtype) for d, o in zip(drawn, smooth)]
        grads = torch.autograd.grad(smooth, list(leaves.values()), dy, allow_unused=True)
        results |= {f"gradient of input {i}": g for i, g in zip(leaves, grads) if g is not None}
    return results
