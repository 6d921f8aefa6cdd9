"""Which communication of a split layer is under way beside which product."""

import torch
from test_tensor_parallel import layers, sequence, whole_inputs

from fastpar.axes.tensor.functional import (
    TensorParallel,
    column_linear,
    row_linear,
)
from fastpar.comm.transports import TorchCollectives
from fastpar.kernels.linear import matmul
from fastpar.testing import run_ranks


class Recorded(TorchCollectives):
    """Notes when an operation begins and when it is waited for."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def _noted(self, name, handle):
        log = self.log
        log.append(name)

        class Waited:
            def wait(self, timeout_s=None):
                log.append(f"wait {name}")
                handle.wait(timeout_s)

        return Waited()

    def _all_reduce(self, x, mean, tag):
        return self._noted("all_reduce", super()._all_reduce(x, mean, tag))

    def _reduce_scatter(self, out, x, mean, tag):
        return self._noted("reduce_scatter", super()._reduce_scatter(out, x, mean, tag))

    def _all_gather(self, out, x, tag):
        return self._noted("all_gather", super()._all_gather(out, x, tag))


def order(kind, sp, needed):
    """Collectives and products of forward and backward, as this rank calls them."""
    from fastpar.axes.tensor import functional as tensor_parallel

    log = []
    tp = TensorParallel(Recorded(log), sequence_parallel=sp)
    x, w, b = (t.requires_grad_(n) for t, n in zip(whole_inputs(kind, torch.float32, 2), needed))

    def noted(a, b, **kwargs):
        log.append(f"product {list(a.shape)} {list(b.shape)}")
        return matmul(a, b, **kwargs)

    tensor_parallel.matmul = noted
    try:
        y = {"column": column_linear, "row": row_linear}[kind](x, w, b, tp)
        log.append("backward")
        y.sum().backward()
    finally:
        tensor_parallel.matmul = matmul
    return log


ORDERS = {
    ("column", False): [
        "product [4, 6] [6, 8]",
        "backward",
        "product [4, 8] [8, 6]",
        "all_reduce",
        "product [8, 4] [4, 6]",
        "wait all_reduce",
    ],
    ("column", True): [
        "all_gather",
        "wait all_gather",
        "product [4, 6] [6, 8]",
        "backward",
        "all_gather",
        "product [4, 8] [8, 6]",
        "reduce_scatter",
        "wait all_gather",
        "product [8, 4] [4, 6]",
        "wait reduce_scatter",
    ],
    ("row", False): [
        "product [4, 8] [8, 6]",
        "all_reduce",
        "wait all_reduce",
        "backward",
        "product [4, 6] [6, 8]",
        "product [6, 4] [4, 8]",
    ],
    ("row", True): [
        "product [4, 8] [8, 6]",
        "reduce_scatter",
        "wait reduce_scatter",
        "backward",
        "all_gather",
        "wait all_gather",
        "product [4, 6] [6, 8]",
        "product [6, 4] [4, 8]",
    ],
}


@sequence
@layers
def test_sums_are_under_way_during_the_weights_gradient(kind, sp):
    """One rank, so that shapes are whole: the order is every rank's."""
    assert run_ranks(order, 1, kind, sp, (True, True, True))[0] == ORDERS[kind, sp]


def test_what_is_not_needed_is_not_sent():
    """A frozen weight needs no input once more, a first layer no gradient of its input."""
    for needed, expected in (
        ((True, False, True), ["product [4, 8] [8, 6]", "reduce_scatter", "wait reduce_scatter"]),
        ((False, True, False), ["all_gather", "wait all_gather", "product [8, 4] [4, 6]"]),
        ((False, False, True), []),
    ):
        log = run_ranks(order, 1, "column", True, needed)[0]
        assert log[log.index("backward") + 1 :] == expected
