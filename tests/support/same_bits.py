"""Every instruction set of this machine and numbers of threads: the bits are the same."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastpar.kernels import host


def same_bits_everywhere(run: Callable[[], Sequence[Tensor]]) -> None:
    before, first = host.isa(), run()
    try:
        for isa in host.supported_isas():
            host.set_isa(isa)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for found, expected in zip(run(), first, strict=True):
                    assert torch.equal(found, expected), (isa, threads)
    finally:
        host.set_isa(before)
