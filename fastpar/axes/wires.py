"""Compressed formats of gradients and weights between ranks; comm/wires.py implements them.

What it does  Gradients are sent as bf16 or int8 (rounded stochastically, without bias), and
              summed in fp32 (wire_gradients); weights are gathered as bf16 or int8
              (wire_weights). secondary_shards gathers weights for backward inside a node of
              node_size ranks.
Bytes         int8 has 1 byte per element and a scale per block: half of bf16, a quarter of fp32.
              Encoding and decoding move code_bytes() per element through memory. Secondary
              shards have 1 / node_size of the weights.
Use it        over slow links between nodes.
Not with      offload, deterministic, reduce_dtype, shared-memory transport; node_size not with ep.
Source: Alistarh et al. 2017 (QSGD), arXiv 1610.02132; Wang et al. 2023 (ZeRO++), arXiv 2306.10209
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastpar.axes import Axis, Making
from fastpar.axes.data import GPTBuckets, elements_of, gathered_bytes
from fastpar.axes.step import Op, Setup, Workload
from fastpar.comm.wires import FORMATS
from fastpar.files.tensor_file import FLOATS


def code_bytes(setup: Setup) -> tuple[float, float]:
    """Bytes that encoding and decoding moves per element of (gradients, weights)."""
    gradients = setup.grad_bytes + 2 * setup.wire_bytes + 8  # decoded, then summed
    sent = gathered_bytes(setup)
    weights = (2 * setup.weight_bytes + 2 * sent) * (sent < setup.weight_bytes)
    return (gradients if setup.parallel.wires.gradients in FORMATS else 0.0), weights


def message_bytes(setup: Setup) -> float:
    """Bytes per element of a bucket in flight, besides the gradient: messages, decoded ones."""
    if setup.data == 1 and setup.parallel.offload.what is None:
        return 0.0
    if code_bytes(setup)[0]:
        return 2 * setup.wire_bytes + 4
    return setup.wire_bytes if setup.wire_bytes != setup.grad_bytes else 0


class Wires(Axis):
    """Compressed messages."""

    name = "wires"
    order = 70

    def states(self, setup: Setup, buckets: GPTBuckets, sizes: dict[str, float]) -> None:
        """A rank's own weights, kept besides the gathered ones."""
        if setup.stage in (1, 2) and code_bytes(setup)[1]:
            sizes["parameters"] += setup.weight_bytes * buckets.shard(setup.n_shards)

    def plan(self, making: Making) -> None:
        """Refuse dtypes that formats do not support; choose a transport that does."""
        parallel, wires = making.parallel, making.parallel.wires
        if wires.gradients == "fp32" and wires.weights is None:
            return
        dtypes = {p.dtype for p in making.model.parameters() if p.requires_grad}
        kept = {FLOATS.get(parallel.precision.grad_dtype or "", dtype) for dtype in dtypes}
        if torch.float64 in kept | dtypes:
            raise ValueError(
                "parallelize: wire formats do not support gradients in torch.float64; use fp32, "
                "bf16 or fp16"
            )
        if making.transport == "auto" and making.mesh.of_gradients().dp_size > 1:
            making.transport = "torch"

    def ops(self, workload: Workload, setup: Setup) -> Iterator[Op]:
        """Encoding and decoding of gradients and weights; see comm/wires.py."""
        of_gradient, of_weight = code_bytes(setup)
        if not of_gradient and not of_weight:
            return
        (local, _), micro = elements_of(workload, setup), setup.grad_accum_steps
        if of_gradient and setup.data > 1:
            gradients = float(local * of_gradient)
            times = (2 if setup.stage == 0 else 1) * (micro if setup.accumulate == "shard" else 1)
            yield Op("copy", (int(gradients),), "backward", 0.0, gradients, times)
        if of_weight and setup.n_shards > 1:
            weights = float(local * of_weight)
            times = 2 * micro if setup.stage == 3 else 1
            yield Op("copy", (int(weights),), "forward", 0.0, weights, times)

    def memory(self, shards: Any) -> dict[str, int]:
        second = sum(b.secondary.nbytes for b in shards.buckets if b.secondary is not None)
        return {"secondary shards": second} if second else {}


AXIS = Wires()
