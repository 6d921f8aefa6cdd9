"""An axis from outside: every so many blocks keep what backward needs in 16 bits.

All that there is of it is in this file; see test_toy_axis.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastpar import axes
from fastpar.settings.rules import Pair, Rule


@dataclass(frozen=True)
class Halved:
    """What blocks keep."""

    halve_every: int = 0
    """Every so many blocks keep activations in bf16; 0: none."""


class HalvedBlocks(axes.Axis):
    """Every so many blocks keep what backward needs in 16 bits."""

    name = "halved"
    settings = Halved
    rules = (
        Rule(("halve_every",), lambda n: n >= 0, "halve_every >= 0", "set <halve_every=2>"),
        Pair("halve_every", "compile", "hooks of saved tensors do not compile"),
    )

    def attach(self, making, engine):
        every = making.parallel.more.halved.halve_every
        blocks = [b for m in making.model.modules() if isinstance(m, nn.ModuleList) for b in m]
        for block in blocks[every - 1 :: every] if every else ():
            contexts = []

            def enter(module, args, contexts=contexts):
                half = torch.autograd.graph.saved_tensors_hooks(_pack, lambda x: x[0].to(x[1]))
                contexts.append(half)
                half.__enter__()

            def leave(module, args, output, contexts=contexts):
                contexts.pop().__exit__(None, None, None)

            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)

    def describe(self, shards):
        every = shards.settings.parallel.more.halved.halve_every
        return [f"halved: one of {every} blocks keeps 16 bits"] if every else ()

    def record(self, shards):
        every = shards.settings.parallel.more.halved.halve_every
        return {"every": every} if every else {}

    def candidates(self, workload, setup, per_node) -> Iterator:
        yield setup
        if setup.weight_bytes > 2 and not setup.parallel.more.halved.halve_every:
            yield setup.change(halve_every=2)

    def text(self, setup):
        every = setup.parallel.more.halved.halve_every
        return f"halved {every}" if every else ""


def _pack(x):
    return (x.to(torch.bfloat16) if x.dtype == torch.float32 else x), x.dtype


axes.register(HalvedBlocks())
