"""Kernel launches of one training step on a GPU, counted without one.

    python -m bench launches                    a table, for 124M in bf16 with fp32 master weights
    python -m bench launches --write LABEL      and its rows: bench/results/launches/LABEL.json
    python -m bench launches --fp8 tensor       with products in 8 bits (row, block, tensor), and
                             --fp8 tensor-fp8   with weight gradients in 8 bits, too

[Note: what is counted] A step of the trainer's engine and optimizer runs on a CPU under a dispatch
mode that sees each of its ops. An op of torch is one launch, unless it only makes a view or takes
memory, or has nothing to write. Our own ops run a second time, on tensors of the meta device, for
which they take the paths of a GPU: the Triton kernels that they would launch are recorded, their
ops of torch counted. The kernels of csrc/ are one launch each (csrc/ops_cuda.h). Values are zeros
after such an op; nothing here depends on them.

What a library adds inside of one op is not seen: a second kernel of cuBLAS that sums parts of a
product (split-k), or the two passes of a long sum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bench.records import RESULTS
from fastpar import AdamW, Mesh, parallelize
from fastpar.config.config import GPTConfig
from fastpar.kernels import Fp8, backend
from fastpar.kernels.op import Op
from fastpar.models.fp8 import use_fp8
from fastpar.models.gpt import GPT
from fastpar.parallel.copies import WAIT_BYTES

PARTS = ("forward", "backward", "step")
IN_CSRC = {  # of kernels/adamw.py and the like: one launch a call
    "adamw_step_", "pack_", "unpack_", "accumulate_", "sum_shards", "global_norm", "norm_bins",
    "norm_from_bins",
}  # fmt: skip
# Take memory or read it on the host; the rest of what launches nothing are views.
NO_KERNEL = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_",
    "_local_scalar_dense", "_sparse_coo_tensor_with_dims", "lift_fresh", "is_pinned",
    "_sparse_coo_tensor_with_dims_and_tensors", "scalar_tensor", "_coalesced_", "_unsafe_view",
}  # fmt: skip
LISTED = 64  # tensors that one launch of a _foreach op serves


class Launches(TorchDispatchMode):
    """Counts what the ops inside would launch on a GPU; see [Note: what is counted].

    Attributes:
        part: of the step that runs now.
        found: (part, kernel) -> launches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = PARTS[0]
        self.found: Counter[tuple[str, str]] = Counter()
        self._ours = {
            op.overload: op.run
            for name, module in list(sys.modules.items())
            if name.startswith("fastpar.")
            for op in vars(module).values()
            if isinstance(op, Op)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func in self._ours and name not in IN_CSRC:
            return self._ours_on_meta(self._ours[func], args)
        result = func(*args, **(kwargs or {}))
        self.found[self.part, name] += _launches(func, name, args, result)
        return result

    def _ours_on_meta(self, run: Any, args: Any) -> Any:
        from fastpar.kernels.triton_launch import record

        def to_meta(a: Any) -> Any:
            if isinstance(a, torch.device):  # of what the op makes
                return torch.device("meta")
            return torch.empty_like(a, device="meta") if isinstance(a, Tensor) else a

        def back(a: Any) -> Any:
            return torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a

        moved = tree_map(to_meta, args)
        with record(90) as kernels, self:
            results = run(*moved)
        self.found.update((self.part, kernel.name) for kernel in kernels)
        if any(a.device.type == "meta" for a in tree_leaves(args) if isinstance(a, Tensor)):
            return results  # called by another one
        return tree_map(back, results)


def _launches(func: Any, name: str, args: Any, result: Any) -> int:
    """How many kernels an op of torch, or of csrc/, launches."""
    if name.startswith("_foreach"):
        return -(-len(args[0]) // LISTED)
    returns = [r.alias_info for r in func._schema.returns]
    is_view = bool(returns) and all(a is not None and not a.is_write for a in returns)
    tensors = [t for t in tree_leaves((result, args)) if isinstance(t, Tensor)]
    written = [t for t in tree_leaves(result) if isinstance(t, Tensor)] or tensors
    empty = all(t.layout is not torch.strided or t.numel() == 0 for t in written)
    return int(not (name in NO_KERNEL or is_view or empty))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Triton's kernels are recorded, and gradients brought into buckets, as on a GPU."""
    with (
        patch.multiple(backend, choice="triton", recording=True),
        patch.dict(WAIT_BYTES, cpu=WAIT_BYTES["cuda"]),
    ):
        yield


@contextmanager
def fp8_counted(mode: Launches) -> Iterator[None]:
    """Also what layers in 8 bits launch, which are no ops: their Triton kernels, torch's products.

    Codes are what empty memory holds.
    """
    kernels = backend.triton_module("linear_fp8")
    product = Fp8._product

    def counted(how: Fp8, a: Any, b: Any, *args: Any) -> Tensor:
        mode.found[mode.part, "_scaled_mm"] += how.scaling != "block" and a.scales is not None
        return product(how, a, b, *args)

    def recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
        mode.found[mode.part, kernel.__name__] += 1

    with (
        patch.object(Fp8, "_product", counted),
        patch.object(kernels, "launch", recorded),
    ):
        yield


def count(config: GPTConfig, tokens: int = 64, *, fp8: str = "") -> Counter[tuple[str, str]]:
    """The launches of one step in its steady state, by part and kernel."""
    model = GPT(config).to(torch.bfloat16)
    if fp8:
        scaling, _, of_weight = fp8.partition("-")
        use_fp8(model, "all", scaling=scaling, weight_gradient=of_weight or "bf16")
    with as_on_a_gpu():
        parallelize(model, Mesh(device="cpu"), grad_dtype=torch.float32)
    opt = AdamW(model.parameters(), lr=1e-4, master_weights=True, max_grad_norm=1.0)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    for counted in (False, True):
        with as_on_a_gpu(), Launches() as mode, fp8_counted(mode):
            loss = model(ids, ids)
            mode.part = "backward"
            loss.backward()
            mode.part = "step"
            opt.step()
            opt.zero_grad()
        if counted:
            return +mode.found
    raise AssertionError


def row(config: GPTConfig, **options: Any) -> dict[str, Any]:
    """Launches of a step: all, by part, a layer's by part, and by part and kernel; as count()."""
    whole = count(config, **options)
    fewer = GPTConfig(**{**vars(config), "n_layer": config.n_layer // 2})
    half = count(fewer, **options)
    layers = config.n_layer - config.n_layer // 2
    of = {part: sum(n for (p, _), n in whole.items() if p == part) for part in PARTS}
    less = {part: sum(n for (p, _), n in half.items() if p == part) for part in PARTS}
    return {
        "launches": whole.total(),
        "parts": of,
        "layer": {part: round((of[part] - less[part]) / layers, 2) for part in PARTS},
        "kernels": {f"{part} {name}": n for (part, name), n in sorted(whole.items())},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench launches", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="gpt2", help="a preset of GPTConfig")
    parser.add_argument("--write", metavar="LABEL", help="the name of a result file")
    parser.add_argument(
        "--fp8", default="", help="products in 8 bits: row, block, tensor or tensor-fp8"
    )
    args = parser.parse_args(argv)
    found = row(GPTConfig.preset(args.model), fp8=args.fp8)
    print(f"{found['launches']} launches a step of {args.model}, bf16 with fp32 master weights")
    for part in PARTS:
        print(f"{part:<9} {found['parts'][part]:>4}, a layer {found['layer'][part]:g}")
    for name, n in sorted(found["kernels"].items(), key=lambda item: -item[1]):
        print(f"  {n:>4}  {name}")
    if args.write:
        path = RESULTS / "launches" / f"{args.write}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"model": args.model, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
