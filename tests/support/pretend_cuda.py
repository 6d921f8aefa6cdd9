"""CPU tensors that claim to be on a GPU, so that the host code for GPUs runs."""

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from fastpar.kernels import backend
from fastpar.optim import graphs

_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")


def _here(x):
    return _CPU if isinstance(x, torch.device) and x == _CUDA else x


class _Pretend(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.device.__get__:
            return _CUDA
        if func in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):
            return func == Tensor.is_cuda.__get__
        if func is Tensor.backward:  # otherwise the functions that it calls would see the CPU
            with self:
                return _engine_run_backward(
                    args, (torch.ones_like(args[0]),), False, False, (), True, accumulate_grad=True
                )
        swap = [_here(a) for a in args]
        named = {k: _here(v) for k, v in (kwargs or {}).items()}
        return func(*swap, **named)


class _Compiled:
    """In place of the module of csrc/."""

    def __init__(self, names):
        self.names = names

    def __getattr__(self, name):
        return lambda *args: self.names.append(name) or 1  # where a number is asked for


def _yes(*args):  # a Mock would keep the tensors that it is called with
    return True


def _no(*args):
    return 0


@contextlib.contextmanager
def pretend_cuda():
    """Yields the names of Triton's kernels and those of csrc/ that are launched. They are not run:
    what they would write keeps the bytes that were there."""
    from fastpar.kernels import triton_launch

    with (
        mock.patch.object(triton_launch, "_record", lambda kernel, *args: kernel.fn.__name__),
        mock.patch.object(graphs, "_PASSED", (*graphs._PASSED, __file__)),
        mock.patch.object(backend, "check_gpu", _yes),
        mock.patch.object(backend, "_allowed", _yes),
        mock.patch.object(backend, "choice", "triton"),
        triton_launch.record(90) as names,
        mock.patch.object(backend, "cuda_kernels", _Compiled(names)),
        mock.patch.object(backend, "cuda_stream", _no),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", _no),
        _Pretend(),
    ):
        yield names
