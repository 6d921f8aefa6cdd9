"""`python -m bench errors`: the error ledger.

For every op, dtype and shape the largest and the RMS error of each output and gradient against
fp64, and those of stock PyTorch in the same dtype. Rows go to build/bench/errors, or with
--commit-results to bench/results/errors, from which the README's table is made. bench is the op,
case its shape, variant the implementation ("triton" on a CPU is its interpreter); notes have for
each result the largest and the RMS error, PyTorch's own two, one rounding, the number of elements.

[Note: ratios] A ratio is an error over stock PyTorch's of the same kind, in results of at least 16
elements (the error of a single number can be 0 by luck). A row fails when it breaks the 2x rule of
fastpar.testing: a largest error above 2 * stock PyTorch's + one rounding of the largest value to
the result's dtype.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

from bench.records import (
    RESULTS,
    SCRATCH,
    ResultFile,
    Row,
    check_out,
    default_path,
    device_of,
    machine,
    parser_of,
)
from fastpar.comm.ranks import reason
from fastpar.kernels import backend
from fastpar.kernels.cases import MAKERS, Errors, OpCase, cases_of
from fastpar.testing import gpu_arithmetic

FEW = 16
INTERPRETED_ROWS = 24  # Triton's interpreter takes milliseconds for each program
IMPLEMENTATIONS = ("cpp", "torch", "triton")


def ratios(row: Row) -> dict[str, tuple[float, float]]:
    """Result -> ratios of the largest and of the RMS error; see [Note: ratios]."""
    return {
        name: (worst / stock_worst, rms / stock_rms)
        for name, (worst, rms, stock_worst, stock_rms, _, numel, *_) in row.notes.items()
        if numel >= FEW and stock_worst and stock_rms
    }


def fails(row: Row) -> bool:
    """Whether a result is beyond its bound, or nothing could be measured."""
    measured = (Errors(*result) for result in row.notes.values())
    return bool(row.refused) or any(errors.max > errors.bound for errors in measured)


def format_row(row: Row) -> str:
    what = f"{row.bench:21} {row.case:38} {row.dtype:9} {row.variant:7}"
    if row.refused:
        return f"{what} refused: {row.refused}"
    found, cells = ratios(row), []
    for name, (worst, _, stock_worst, *_) in row.notes.items():
        if name in found:
            cells.append("{} {:.2f}/{:.2f}".format(name, *found[name]))
        else:
            cells.append(f"{name} {worst:.1e} ({stock_worst:.1e})")
    return f"{what} {'  '.join(cells)}{'  FAILS' if fails(row) else ''}"


# op -> (rows, last dimension) of what is judged; others have SIZE.
SIZE = (256, 768)
SIZES = {
    **dict.fromkeys(("layer_norm", "rms_norm"), (512, 768)),
    **dict.fromkeys(("residual_layer_norm", "residual_rms_norm"), (512, 768)),
    "bias_gelu": (256, 3072),
    "cross_entropy": (64, 50304),
    "linear_cross_entropy": (64, 50304),
    "attention": (1024, 64),
    "attention_masked": (256, 64),
    "route": (256, 768),
    "permute": (256, 384),
    "combine": (256, 384),
    "grouped_linear": (256, 384),
    "dropout": (64, 768),
    "orthogonalize": (3072, 768),
    "adamw_step_": (100_003, 1),
}
SMALL = {"adamw_step_": (1003, 1), "orthogonalize": (24, 32), "attention": (33, 16)}
SMALL |= {"attention_masked": (20, 16), "dropout": (3, 40)}
EXACT = {  # rounded once, or another form of what is there: their tests know every bit
    "accumulate_", "cross_entropy_shard", "cross_entropy_shard_grad", "dequantize_blockwise",
    "gelu_mlp", "global_norm", "linear_fp8", "pack_", "sum_shards", "unpack_",
}  # fmt: skip


def cases(device: str, *, interpreted: bool = False, quick: bool = False) -> list[OpCase]:
    """What the ledger judges; small shapes, and only ops with Triton kernels, where interpreted."""
    found = []
    for op in MAKERS.keys() - EXACT:
        in_triton = "triton" in backend.OPS.get(op.removesuffix("_masked"), ("", ""))[1]
        if interpreted and not in_triton:
            continue
        small = SMALL.get(op, (INTERPRETED_ROWS, 96))
        sizes = small if interpreted or quick else SIZES.get(op, SIZE)
        found += cases_of(op, *sizes, device, more=not interpreted)
    return sorted(found, key=lambda case: case.op)


def measure(
    implementation: str, device: str, *, quick: bool = False, only: str = ""
) -> Iterable[Row]:
    """A row for each case and dtype of the ops whose name holds `only`."""
    interpreted = implementation == "triton" and device == "cpu"
    rounding = contextlib.ExitStack()
    before, backend.choice = backend.choice, implementation
    try:
        if interpreted:
            rounding.enter_context(gpu_arithmetic())
        for case in cases(device, interpreted=interpreted, quick=quick):
            if only not in case.op:
                continue
            for dtype in case.dtypes:
                name = str(dtype).removeprefix("torch.")
                row = Row(case.op, case.shape, name, implementation, device, name)
                try:
                    row.notes = {
                        result: [float(value) for value in errors]
                        for result, errors in case.measure(dtype, device).items()
                    }
                except Exception as error:
                    row.refused = reason(error)
                if row.notes or row.refused:  # not of cases without elements
                    yield row
    finally:
        backend.choice = before
        rounding.close()


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("bench errors", __doc__, device=True, rows=True)
    parser.add_argument("op", nargs="?", default="", help="a part of the ops' names; all of them")
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, help="default: triton on a GPU, cpp on a CPU"
    )
    args = parser.parse_args(argv)
    try:
        device = device_of(args, "errors")
        implementation = args.implementation or {"cuda": "triton", "cpu": "cpp"}[device]
        if (implementation, device) == ("triton", "cpu"):
            os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: before machine()
        if device == "cuda" and implementation == "cpp":
            raise ValueError(
                "errors: expected --implementation triton or torch on a GPU, got cpp; "
                "C++ runs with --device cpu"
            )
        check_out(args, "errors")
        about = machine(device)
        folder = RESULTS if args.commit_results else SCRATCH
        out = args.out or default_path(about, folder / "errors")
        file = ResultFile(out, about)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    print("ratios of the largest and the RMS error to PyTorch's; single numbers: error (PyTorch's)")
    failing = []
    for row in measure(implementation, device, quick=args.quick, only=args.op):
        print(format_row(row), flush=True)
        file.add(row)
        if fails(row):
            failing.append(row.key)
    for key in failing:
        print(f"fails: {key}")
    print(f"{len(file.rows)} rows in {os.path.relpath(out)}")
    return 1 if failing else 0
