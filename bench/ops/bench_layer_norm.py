"""layer_norm, rms_norm and what precedes them in a block (Linear's bias, dropout, residual sum), at
GPT-2's widths, against torch's norms.
"""

from __future__ import annotations

from typing import Any

from bench.harness import Bench, Case
from bench.ops.timed import of_device, timed
from bench.peers import packages
from bench.targets import Target, faster
from fastpar.kernels.cases import P, norm, residual_norm

TIME_LIMIT_S = {"cpu": 900, "cuda": 150}
COMPILED = (768, 1600)  # compilations take most of a GPU run
STOCK = ("eager", "torch.compile")


def how_of(bench: Bench, C: int) -> dict[str, Any]:
    if bench.device == "cpu":
        return {"directions": ("forward", "forward+backward")}
    return {"directions": ("forward", "backward"), "compiled": C in COMPILED}


def plain_case(bench: Bench, rows: int, C: int, *, rms: bool) -> Case:
    others, wanted = {}, {}
    if bench.device == "cuda":
        others = packages.rms_norms() if rms else packages.layer_norms()
        if C in COMPILED and not rms:
            stock = faster(1.0, *STOCK)
            wanted["forward"] = [Target("ceiling", 90.0), stock]
            wanted["backward"] = [Target("ceiling", 75.0), stock]
    whole, few = (norm(n, C, rms=rms) for n in (rows, min(rows, 512)))
    return timed(bench, whole, few, others, targets=wanted, **how_of(bench, C))


def residual_case(bench: Bench, rows: int, C: int, *, p: float, rms: bool = False) -> Case:
    """With p: Linear's bias, dropout, residual sum and norm; else residual sum and norm."""
    wanted: dict[str, list[Target]] = {}
    if bench.device == "cuda" and p and C in COMPILED:
        bound = [faster(1.5, "eager"), faster(1.1, STOCK[1])]
        wanted = {"forward": bound, "backward": bound}
    whole, few = (
        residual_norm(n, C, p, bench.device, rms=rms, x_bias=p > 0)
        for n in (rows, min(rows, 192 if p else 512))
    )
    name = f"{'bias + dropout + ' if p else ''}{whole.op} N={rows} C={C}"
    # torch.compile's mask is another, too
    how = how_of(bench, C) | {"unjudged": STOCK[1:] if p else (), "targets": wanted}
    return timed(bench, whole, few, name=name, **how)


def run(bench: Bench) -> None:
    rows = of_device(bench, 32768, 2048, 64)
    widths = of_device(bench, (768, 1600, 1024, 1280), (384, 768), (128,))
    for C in widths:
        bench.run([residual_case(bench, rows, C, p=P)])
        bench.run([plain_case(bench, rows, C, rms=False)])
        bench.run([residual_case(bench, rows, C, p=0.0)])
    bench.run([plain_case(bench, rows, widths[0], rms=True)])
    bench.run([residual_case(bench, rows, widths[0], p=0.0, rms=True)])
