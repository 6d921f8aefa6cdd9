"""Tensor parallelism: split layers and vocabulary, and declared states of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fastpar.axes import Axis, Making
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.axes.tensor.declared import split_model
from fastpar.axes.tensor.functional import TensorParallel
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.kernels.loss.linear_cross_entropy import default_chunk_rows
from fastpar.settings.mesh import divisors
from fastpar.settings.model import (
    GPTConfig,
    block_parts,
    count_elements,
    first_parts,
    last_parts,
    parameters_of,
    split_products,
    vocabulary_rows,
    widths,
)


def tp_group(mesh: Mesh, make: Callable[[Any, str], Collectives]) -> Collectives:
    """Collectives for activations along tp. Ranks: all."""
    all_ranks = mesh.size("tp") == mesh.world_size  # the control exchange uses the mesh's group
    return make(mesh.new_group("tp") if all_ranks else mesh.group("tp"), "tp")


def tp_sizes(workload: Workload, setup: Setup, per_node: int) -> list[int]:
    """Sizes whose ranks share a node: across nodes every layer would wait for the network."""
    in_node = math.gcd(setup.world_size, min(setup.world_size, per_node)) // setup.mesh.cp
    return [tp for tp in divisors(in_node) if workload.shape.splits_by(tp)]


class TensorAxis(Axis):
    """Each layer split over the ranks of tp."""

    name = "tensor"
    order = 50
    place = 2

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """The exchanges of functional.py and vocabulary.py."""
        if setup.tp == 1 or setup.mesh.tp_grid is not None:
            return
        shape, t, n_micro = workload.shape, setup.tp, setup.grad_accum_steps
        n, width = setup.tokens_of_rank(workload), shape.n_embd
        whole = float(n * width * setup.weight_bytes)
        layers = -(-shape.n_layer // setup.mesh.pp)
        passes = n_micro * layers
        forwards = 2 if setup.recompute.activation_checkpointing == "full" else 1
        embeds, split = n_micro if setup.mesh.pp == 1 else 0, split_products(workload.shape)
        columns = sum(by_columns for _, by_columns in split)
        row_layers = len(split) - columns

        copies, sizes = shape.copies_of_keys(t), widths(shape, t)

        def comm(kind: str, count: int, under: str = "", n_bytes: float = whole) -> CommOp:
            return CommOp(kind, "tp", n_bytes, t, 1, count, under)

        if setup.sequence_parallel:
            # In backward only the input of column layers has a product to overlap with.
            yield comm("all_gather", passes * (columns * forwards + row_layers) + embeds + n_micro)
            yield comm("reduce_scatter", row_layers * passes * forwards + embeds + n_micro)
            yield comm("all_gather", columns * passes, "backward")
            yield comm("reduce_scatter", columns * passes, "backward")
            # Partial sums of parameters that tokens share: positions, norms, biases of row layers.
            ends = last_parts(shape) + (first_parts(shape) if setup.mesh.pp == 1 else ())
            partial = layers * count_elements(block_parts(shape), sizes, whole=True)
            partial += count_elements(ends, sizes, whole=True)
            grad_bytes = float(partial * setup.grad_bytes) / setup.n_shards
            yield comm(
                "all_reduce", n_micro if setup.parallel.zero_stage == 0 else 1, "", grad_bytes
            )
        else:
            yield comm("all_reduce", row_layers * passes * forwards + embeds + n_micro)
            yield comm("all_reduce", columns * passes, "backward")
        for _, dims in parameters_of(block_parts(shape)) if copies > 1 else ():
            if "QKV" in dims:  # the model's [Note: shared keys]
                shared = float(copies * math.prod(sizes[d] for d in dims) * setup.weight_bytes)
                count = passes * (2 if setup.recompute.activation_checkpointing != "none" else 1)
                yield comm("all_gather", count, "", shared)._replace(ranks=copies)
                yield comm("reduce_scatter", passes, "", shared)._replace(ranks=copies)
        rows = default_chunk_rows(n, width, vocabulary_rows(shape, t), setup.device_type)
        chunks = -(-n // rows)
        yield comm("all_gather", n_micro * chunks, "", 12.0 * n * t / chunks)

    def split(self, making: Making) -> None:
        mesh, planned = making.mesh, making.planned()
        tokens = making.parallel.sequence_parallel
        possible = planned is None or planned.cuts_tokens
        if tokens and not possible:
            raise ValueError(
                "parallelize: sequence_parallel=True needs a tp_plan with Enter, Tokens and Leave; "
                "add them, or drop sequence_parallel"
            )
        if mesh.tp_grid is not None:
            return
        if mesh.tp_size == 1:
            making.report = "tensor parallelism: tp=1, nothing is split"
            return
        group = tp_group(mesh, making.make)
        tp = TensorParallel(group, sequence_parallel=possible if tokens is None else tokens)
        shape = getattr(making.model, "config", None)
        if isinstance(shape, GPTConfig) and (copies := shape.copies_of_keys(tp.size)) > 1:
            near = making.make(mesh.new_group("tp", neighbours=copies), "tp")
            tp.same_keys = TensorParallel(near, sequence_parallel=False)
        split_model(making, tp, planned)

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        """Also the padding of heads, which cp shares if its ranks have different ones."""
        tp, parts = setup.tp, 1 if setup.by_keys else setup.mesh.cp
        padded = tp * parts * -(-shape.heads_of_rank(tp) // parts)
        lines = {"model": f"heads padded to {padded}"} if padded > shape.n_head else {}
        if tp > 1 and setup.mesh.tp_grid is None:
            kind = "sequence parallel" if setup.sequence_parallel else "no sequence parallelism"
            lines["ranks"] = f"tp {tp} ({kind})"
        return lines

    def describe(self, shards: Any) -> Iterator[str]:
        declared = shards.declared
        if declared is None or declared.tp is None:
            return
        tp, params = declared.tp, shards.params
        yield f"{tp.label}: {tp.group.transport} ({tp.group.why}), {tp.tokens}"
        rest = [p for p in params if not declared.is_split(p)]
        partial = sum(map(declared.is_partial, rest))
        whole = sum(math.prod(shards.whole_shape(p)) for p in params)
        tokens = "on every rank" if tp.shared_dim is None else "split"
        yield (
            f"tensor parallel: {tp.label}, tokens between layers {tokens}; of {whole:,} "
            f"trained parameters {len(params) - len(rest)} tensors are split, "
            f"{len(rest) - partial} replicated, {partial} partial"
        )

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        sizes = tp_sizes(workload, setup, per_node) if setup.mesh.tp_grid is None else [1]
        for tp in sizes:
            if setup.world_size // setup.mesh.pp % tp == 0:
                shared = None if workload.seq_len % tp == 0 else False
                yield setup.change(tp=tp, sequence_parallel=shared)

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return (setup.tp,)

    def text(self, setup: Setup) -> str:
        return f"tp {setup.tp}" * (setup.tp > 1 and setup.mesh.tp_grid is None)


AXIS = TensorAxis()
