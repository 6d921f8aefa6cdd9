"""Context parallelism: every sequence is split over the ranks of cp; see README.md."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastpar.axes import Axis, Making
from fastpar.axes.context.sequences import ContextParallel
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.settings.mesh import divisors
from fastpar.settings.model import GPTConfig


def attended_heads(shape: GPTConfig, setup: Setup) -> int:
    """Heads of all tokens that a tp rank attends together with its cp peers, with padding."""
    heads = shape.heads_of_rank(setup.tp)
    return heads if setup.by_keys else -(-heads // setup.mesh.cp) * setup.mesh.cp


class Context(Axis):
    """Each sequence split over the ranks of cp."""

    name = "context"
    order = 40
    place = 3

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """Exchanges before and after attention, or in it; a loss's sum."""
        if setup.mesh.cp == 1:
            return
        shape, n_micro, c = workload.shape, setup.grad_accum_steps, setup.mesh.cp
        of_head = setup.tokens_of_rank(workload) * shape.head_size * setup.weight_bytes
        sent = float(of_head * attended_heads(shape, setup))
        layers = n_micro * -(-shape.n_layer // setup.mesh.pp)
        if setup.by_keys:  # keys and values of all tokens, some heads at a time; their gradients
            heads, at_once = shape.heads_of_rank(setup.tp), -(-shape.heads_of_rank(setup.tp) // c)
            again = setup.recompute.activation_checkpointing == "full"
            for some, times in Counter(
                min(at_once, heads - h) for h in range(0, heads, at_once)
            ).items():
                both = 2.0 * of_head * some * c
                gathers = times * layers * (3 if again else 2)
                yield CommOp("all_gather", "cp", both, c, setup.tp, gathers, "")
                yield CommOp("all_to_all", "cp", both, c, setup.tp, times * layers, "")
        else:
            passes = layers * (2 if setup.recompute.activation_checkpointing == "none" else 3)
            yield CommOp("all_to_all", "cp", 3 * sent, c, setup.tp, passes, "")
            yield CommOp("all_to_all", "cp", sent, c, setup.tp, passes, "")
        wide = 8.0 if setup.weight_bytes == 8 else 4.0
        yield CommOp("all_reduce", "cp", wide, c, setup.tp, n_micro, "")

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        cp, method = setup.mesh.cp, setup.parallel.cp_method
        return {"ranks": f"cp {cp} by {method}"} if cp > 1 else {}

    def connect(self, making: Making) -> None:
        mesh, tell = making.mesh, making.connect_rows
        if mesh.size("cp") == 1 or tell is None:
            return
        by_row = getattr(tell, "by_row", False)
        group = making.make(mesh.new_group("cp"), "cp")
        tell(ContextParallel(group, making.parallel.cp_method, by_row=by_row))
        making.same_inputs["cp"] = group

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        """Numbers of ranks that share a node, with at least two tokens each."""
        yield setup
        if setup.mesh.pp > 1 or setup.mesh.tp_grid is not None:
            return
        sizes = divisors(math.gcd(setup.world_size, min(setup.world_size, per_node)))[1:]
        for method, cp in itertools.product(("heads", "keys"), sizes):
            if 2 * cp <= workload.seq_len:
                yield setup.change(cp=cp, cp_method=method)

    def accepts(self, workload: Workload, setup: Setup) -> bool:
        """Whether the method suits: "heads" or "keys".

        If cp divides the heads, "heads" does the same work and sends 4 / (3 * cp) of what "keys"
        sends; otherwise heads are padded. With fewer heads than cp only "keys" works.
        """
        heads = workload.shape.heads_of_rank(setup.tp)
        cp = setup.mesh.cp
        return cp == 1 or bool(heads % cp if setup.by_keys else cp <= heads)

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return setup.mesh.cp, setup.by_keys

    def text(self, setup: Setup) -> str:
        return f"cp {setup.mesh.cp}{' by keys' * setup.by_keys}" * (setup.mesh.cp > 1)


AXIS = Context()
