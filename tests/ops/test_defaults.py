"""torch's defaults and modes change no result of an op: with another default dtype or device, and
after a first call under inference_mode, bits, dtypes and devices are those of a fresh process."""

import threading

import pytest
import torch
from cells import slow
from test_registration import every_program, results

from fastpar.kernels import adamw

DEFAULTS = [  # the first two in the default tests
    *((torch.float64, "meta"), (torch.bfloat16, "cpu")),
    *((torch.float64, "cpu"), (torch.float16, "cpu"), (torch.float32, "meta")),
]


def moments(x):
    found = []
    for signed in (True, False):
        q, scale = adamw.encode_moment(x.abs(), signed=signed)
        found += [q, scale, adamw.decode_moment(q, scale, signed=signed)]
    return tuple(found)


def programs(every):
    dtypes = (torch.float32, torch.bfloat16) if every else (torch.float32,)
    for dtype in dtypes:
        for name, program in every_program("cpu", dtype).items():
            yield f"{name} {dtype}", *program
    yield "moments", moments, [torch.linspace(-3, 4, 350)]


def unlikeness(fn, inputs, want):
    """What is unlike: nothing, an error, or "other results"."""
    try:
        same = all(
            (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
            and torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))
            for a, b in zip(results(fn, inputs), want, strict=True)
        )
        return [] if same else ["other results"]
    except Exception as error:
        return [repr(error)[:200]]


@pytest.mark.parametrize(
    ("form", "every"),
    [("cpp", 0), ("torch", 0), slow("cpp", 1), slow("torch", 1), slow("triton", 0)],
    indirect=["form"],
)
def test_results_do_not_follow_the_defaults(form, every, default_dtype):
    unlike = set()
    for name, fn, inputs in programs(every):
        default_dtype(torch.float32)
        want = results(fn, inputs)
        for dtype, device in DEFAULTS if every else DEFAULTS[:2]:
            default_dtype(dtype)
            with torch.device(device):
                unlike |= {(name, dtype, device, why) for why in unlikeness(fn, inputs, want)}
    assert unlike == set()


@pytest.mark.parametrize(
    ("form", "every"), [("cpp", False), slow("cpp", True), slow("torch", True)], indirect=["form"]
)
def test_a_first_call_under_inference_mode_changes_nothing(form, every):
    unlike = set()

    def judge(name, fn, inputs, want):
        def twice(*given):
            copies = [t.detach().clone() for t in given]
            with torch.inference_mode():
                fn(*copies)
            return fn(*given)

        unlike.update((name, why) for why in unlikeness(twice, inputs, want))

    for name, fn, inputs in programs(every):
        want = results(fn, inputs)
        # A thread has workspaces of its own.
        thread = threading.Thread(target=judge, args=(name, fn, inputs, want))
        thread.start()
        thread.join()
    assert unlike == set()
