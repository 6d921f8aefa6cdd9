"""What moves gradients between tensors and buckets, on GPT-2's own list of tensors.

"eager" is a loop over the tensors, "foreach" is torch's own list operation where there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import Bench, Case, short
from bench.peers import stock
from fastpar.kernels import accumulate_, pack_, sum_shards, unpack_
from fastpar.kernels.reference import accumulate_ref, pack_ref, sum_shards_ref, unpack_ref

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}
SMALL = [torch.Size(shape) for shape in ((37,), (5, 9), (1,), (300,))]
NARROW = torch.bfloat16
WORLD = 4


def parts(flat: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Where in flat the tensors go."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors)]


def list_case(
    name: str,
    shapes: list[torch.Size],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: str,
) -> Case:
    """pack and unpack: a flat buffer of dtypes[0] and tensors of dtypes[1]."""

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        wanted = SMALL if small else shapes
        tensors = [
            torch.randn(shape, generator=generator, device=device, dtype=dtypes[1])
            for shape in wanted
        ]
        numel = sum(t.numel() for t in tensors)
        flat = torch.randn(numel, generator=generator, device=device, dtype=dtypes[0])
        return flat, *tensors

    def pack(how: str):
        def call(flat: Tensor, *tensors: Tensor) -> Tensor:
            if how == "eager":
                for place, t in zip(parts(flat, tensors), tensors):
                    place.copy_(t)
            elif how == "foreach":
                torch._foreach_copy_(parts(flat, tensors), list(tensors))
            else:
                (pack_ if how == "fastpar" else pack_ref)(flat, list(tensors))
            return flat

        return call

    def unpack(how: str):
        def call(flat: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            if how == "eager":
                for t, place in zip(tensors, parts(flat, tensors)):
                    t.copy_(place)
            elif how == "foreach":
                torch._foreach_copy_(list(tensors), parts(flat, tensors))
            else:
                (unpack_ if how == "fastpar" else unpack_ref)(list(tensors), flat)
            return tensors

        return call

    make = pack if name == "pack" else unpack
    numel = sum(shape.numel() for shape in shapes)
    return Case(
        f"{name} {len(shapes)} tensors",
        make_inputs,
        {how: make(how) for how in ("eager", "foreach", "fastpar")},
        make("oracle"),
        dtypes[0] if name == "pack" else dtypes[1],
        bytes_moved={"call": float(numel * sum(d.itemsize for d in dtypes))},
        directions=("call",),
        compiled=False,
    )


def accumulate_case(shapes: list[torch.Size], device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        wanted = SMALL if small else shapes
        return tuple(
            torch.randn(shape, generator=generator, device=device, dtype=dtype)
            for dtype in (torch.float32, NARROW)
            for shape in wanted
        )

    def halves(tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        return list(tensors[: len(tensors) // 2]), list(tensors[len(tensors) // 2 :])

    def eager(*tensors: Tensor) -> list[Tensor]:
        totals, values = halves(tensors)
        for total, value in zip(totals, values):
            total.add_(value)
        return totals

    def foreach(*tensors: Tensor) -> list[Tensor]:
        totals, values = halves(tensors)
        torch._foreach_add_(totals, values)
        return totals

    def fastpar(*tensors: Tensor) -> list[Tensor]:
        totals, values = halves(tensors)
        accumulate_(totals, values)
        return totals

    def oracle(*tensors: Tensor) -> list[Tensor]:
        totals, values = halves(tensors)
        accumulate_ref(totals, values)
        return totals

    numel = sum(shape.numel() for shape in shapes)
    return Case(
        f"accumulate bf16 into fp32, {len(shapes)} tensors",
        make_inputs,
        {"eager": eager, "foreach": foreach, "fastpar": fastpar},
        oracle,
        torch.float32,
        bytes_moved={"call": 10.0 * numel},
        directions=("call",),
        compiled=False,
        in_place=("eager", "foreach", "fastpar"),
    )


def shards_case(numel: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        n = 1001 if small else numel
        received = torch.randn(WORLD, n, generator=generator, device=device, dtype=dtype)
        return received, torch.empty(n, device=device)

    def eager(received: Tensor, out: Tensor) -> Tensor:
        return torch.sum(received, 0, dtype=torch.float32, out=out)

    def by(op):
        def call(received: Tensor, out: Tensor) -> Tensor:
            op(received, out)
            return out

        return call

    narrow = "fp32" if dtype == torch.float32 else "bf16"
    return Case(
        f"sum_shards of {WORLD}, {narrow} into fp32, {short(numel)}",
        make_inputs,
        {"eager": eager, "fastpar": by(sum_shards)},
        by(sum_shards_ref),
        torch.float32,
        bytes_moved={"call": float(numel * (WORLD * dtype.itemsize + 4))},
        directions=("call",),
        compiled=False,
    )


def run(bench: Bench) -> None:
    shapes = stock.gpt2_shapes(bench.quick)
    shard = 1000 if bench.quick else 25_000_000
    bench.run(
        [
            list_case("pack", shapes, (NARROW, torch.float32), bench.device),
            list_case("unpack", shapes, (NARROW, torch.float32), bench.device),
            accumulate_case(shapes, bench.device),
            shards_case(shard, torch.float32, bench.device),
            shards_case(shard, NARROW, bench.device),
        ]
    )
