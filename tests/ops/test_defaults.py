"""torch's defaults and modes change no result of an op: with another default dtype or device, and
after a first call under inference_mode, bits, dtypes and devices are those of a fresh process."""

import threading

import pytest
import torch
from cells import slow

from bench.ops.errors import cases
from fastpar import kernels
from fastpar.kernels import Rng, backend, make_key
from fastpar.kernels import adamw as adamw_storage
from fastpar.kernels.cases import evaluate, flat_ops, linears_fp8

LOGITS, TARGETS = torch.linspace(-3, 4, 5 * 70).view(5, 70), torch.tensor([0, 69, -100, 7, 31])
KEY = make_key(3, 1)


def shards(x):
    top, total, hit = kernels.cross_entropy_shard(x, TARGETS, first=10)
    lse = top + total.log()
    dx = kernels.cross_entropy_shard_grad(x, TARGETS, lse, lse[0] * 0 + 1, first=10)
    return top, total, hit, dx


def codes(x):
    found = []
    for bits in (8, 4):
        q, scales = kernels.quantize_blockwise(x, bits=bits, block=16)
        found += [q, scales, kernels.dequantize_blockwise(q, scales, block=16)]
    found.append(kernels.dequantize_blockwise(x.to(torch.float8_e4m3fn), scales, block=16))
    return tuple(found)


def moments(x):
    found = []
    for signed in (True, False):
        q, scale = adamw_storage.encode_moment(x.abs(), signed=signed)
        found += [q, scale, adamw_storage.decode_moment(q, scale, signed=signed)]
    return tuple(found)


MORE = {
    "cross_entropy_shard": (shards, (torch.float32, torch.bfloat16)),
    "quantize_blockwise": (codes, (torch.float32,)),
    "encode_moment": (moments, (torch.float32,)),
    "keep_mask": (lambda x: kernels.keep_mask(Rng(KEY, 4), 0.3, (2, 3, 40)), (torch.float32,)),
}


DEFAULTS = [
    *((torch.float64, "meta"), (torch.float64, "cpu")),
    *((torch.bfloat16, "cpu"), (torch.float16, "cpu"), (torch.float32, "meta")),
]


def every_case(implementation):
    """(name, op, inputs)"""
    interpreted = implementation == "triton"
    more = [] if interpreted else [*flat_ops(1, 500, "cpu"), *linears_fp8(24, 32, "cpu")]
    for case in [*cases("cpu", interpreted=interpreted, quick=True), *more]:
        for dtype in case.dtypes[: 1 if interpreted else None]:
            inputs = list(case.inputs(dtype, "cpu").values())
            yield f"{case.op} {case.shape} {dtype}", case.fn, inputs
    for name, (fn, dtypes) in {} if interpreted else MORE.items():
        for dtype in dtypes:
            yield f"{name} {dtype}", fn, [LOGITS.to(dtype)]


def same(got, want):
    return all(
        (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        and torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))
        for a, b in zip(got.values(), want.values(), strict=True)
    )


@pytest.mark.parametrize("implementation", ["cpp", "torch", slow("triton")])
def test_results_do_not_follow_the_defaults(implementation, monkeypatch, request, default_dtype):
    if implementation == "triton":
        request.getfixturevalue("triton_device")
    else:
        monkeypatch.setattr(backend, "choice", implementation)
    unlike = set()
    for name, fn, inputs in every_case(implementation):
        default_dtype(torch.float32)
        want = evaluate(fn, inputs)
        for default in DEFAULTS[: 1 if implementation == "triton" else None]:
            try:
                default_dtype(default[0])
                with torch.device(default[1]):
                    alike = same(evaluate(fn, inputs), want)
            except Exception as error:
                alike, default = False, (*default, repr(error)[:200])
            if not alike:
                unlike.add((name, *map(str, default)))
    assert unlike == set()


@pytest.mark.parametrize("implementation", ["cpp", "torch"])
def test_a_first_call_under_inference_mode_changes_nothing(implementation, monkeypatch):
    monkeypatch.setattr(backend, "choice", implementation)
    unlike = set()

    def judge(name, fn, inputs):
        try:
            with torch.inference_mode():
                fn(*inputs)
            if not same(evaluate(fn, inputs), want):
                unlike.add(name)
        except Exception as error:
            unlike.add((name, repr(error)[:200]))

    for name, fn, inputs in every_case(implementation):
        want = evaluate(fn, inputs)
        thread = threading.Thread(
            target=judge, args=(name, fn, inputs)
        )  # has workspaces of its own
        thread.start()
        thread.join()
    assert unlike == set()
