"""What tests/ops/test_recipes.py runs on a GPU that computes nothing (fake_cuda.py): calls as
Python makes them, and as csrc/torch/recipes.cpp repeats them.
"""

import contextlib
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fake_cuda import FakeCuda, Kernel, Launched
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpar import kernels
from fastpar.kernels import cases, choice, make_key, triton_launch
from fastpar.kernels.activation import TABLE, Config
from fastpar.kernels.norm.triton import _layer_norm_fwd_kernel
from fastpar.kernels.philox import Rng

fake = FakeCuda(sys.argv[1])
ops = torch.ops.fastpar
Call = Callable[..., Any]


class Names:
    """Addresses as (what, distance): an argument of the call by its number, other memory by the
    order in which it appears."""

    def __init__(self, given: list[Tensor]) -> None:
        self.known: dict[int, Any] = {}
        for i, x in enumerate(given):
            self.known.setdefault(fake.base_of(x.data_ptr()), ("given", i))

    def of(self, address: int) -> Any:
        base = fake.base_of(address)
        return self.known.setdefault(base, ("other", len(self.known))), address - base

    def launch(self, one: Launched) -> Any:
        """Function, shape, parameters without addresses, the addresses."""
        found, rest = [], bytearray(one.parameters)
        for at in Kernel.by_function[one.function].pointers:
            found.append(self.of(int.from_bytes(rest[at : at + 8], "little")))
            rest[at : at + 8] = bytes(8)
        return one.function, one.shape, bytes(rest), found

    def tensor(self, x: Tensor | None) -> Any:
        if x is None:
            return None
        return self.of(x.data_ptr()) if x.numel() else 0, x.shape, x.stride(), x.dtype, x.device


def moved(x: Any) -> Any:
    """A tensor with the same values at a new address, and the same place within its memory."""
    if not isinstance(x, Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.detach().cpu().untyped_storage())
    there = fake.to(whole).as_strided(x.shape, x.stride(), x.storage_offset())
    return there.requires_grad_(x.requires_grad)


def run(fn: Call, inputs: list[Any], stream: int = 7) -> tuple[list[Any], list[Any], int]:
    """(launches, results and gradients, number of launches by recipes), on memory of its own."""
    inputs = [moved(x) for x in inputs]
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    names = Names(tensors)
    fake.set_stream(stream)
    fake.launched()
    outputs = fn(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    smooth = [y for y in outputs if y.requires_grad]
    leaves = [x for x in tensors if x.requires_grad]
    if smooth and leaves:
        dys = [moved(torch.ones(y.shape, dtype=y.dtype)) for y in smooth]
        outputs += torch.autograd.grad(smooth, leaves, dys, allow_unused=True)
    found = fake.launched()
    assert all(one.stream == stream + fake.device() for one in found), (stream, found)
    by_recipes = sum(not one.by_triton for one in found)
    return [names.launch(one) for one in found], [names.tensor(x) for x in outputs], by_recipes


def compare(where: Any, fn: Call, inputs: list[Any], calls: int = 3) -> tuple[int, int]:
    """Launches of a call, of which so many by recipes in the last of these calls: all of them do
    what Python does."""
    ops._pause_recipes(1)
    *by_python, hits = run(fn, inputs)
    ops._pause_recipes(-1)
    assert hits == 0, where
    for stream in range(11, 11 + calls):
        *found, hits = run(fn, inputs, stream)
        for want, got in zip(by_python, found):
            assert want == got, (where, want, got)
    return len(by_python[0]), hits


@triton.jit(do_not_specialize=["site", "threshold"])
def _kinds_kernel(
    out_ptr, flags_ptr, bytes_ptr, index_ptr, other_ptr, tile, site, threshold, one, n, stride, big,
    scale, switch, CAUSAL: tl.constexpr,
):  # fmt: skip
    pass


def check_parameters() -> None:
    """Numbers, addresses and descriptors of all kinds, by a kernel in an op's place."""
    library = torch.library.Library("fastpar", "IMPL")
    args: list[Any] = []

    def instead(x: Tensor, bias: Any, kind: int) -> Tensor:
        y = torch.empty_like(x)
        at, number, options = args
        parts = {"none": None, "whole": x, "flags": x.view(torch.bool), "odd": x[:, 1:], "y": y}
        layout = TensorDescriptor(
            triton_launch.meta(0, dtype=x.dtype), [512, 512], [512, 1], [16, 32]
        )
        pointers = [parts[name] for name in at]
        triton_launch.launch(
            _kinds_kernel, (3, 2), y, *pointers, triton_launch.Boxed(x, layout), *number, **options
        )
        return y

    library.impl("activation", instead, "SparseCPU", allow_override=True)
    draw = random.Random(1)
    numbers = [0, 1, 2, 8, 16, 17, 1 << 31, 1 << 40, -1, -16, True, False, None, 1.0, 0.5, 16.0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = rows(512, 512, dtype=dtype)
        for _ in range(60):
            choice.forget_recipes()
            at = [draw.choice(["none", "whole", "flags", "odd", "y"]) for _ in range(4)]
            number = [draw.choice(numbers) for _ in range(8)]
            args[:] = at, number, {"CAUSAL": draw.choice([True, False]), "num_warps": 4}
            hits = compare(args, lambda x: ops.activation(x, None, 0), [x])[1]
            assert hits == 1, (args, ops._recipes())
    args[:] = ["odd", "odd", "none", "y"], [16] * 6 + [0.5, True], {"CAUSAL": True, "num_warps": 4}
    whole = rows(512 * 512 + 16)
    for offset in (0, 1, 2, 3, 4):  # a multiple of 16 bytes: x at 0 and 4, its odd part at 3
        x = whole.as_strided((512, 512), (512, 1), offset)
        assert compare(offset, lambda x: ops.activation(x, None, 0), [x])[1] == 1
    choice.forget_recipes()
    library._destroy()


# Ops of the cases -> which calls stay in Python, and why.
OPS: dict[str, set[str]] = {
    "layer_norm": set(),
    "rms_norm": set(),
    "residual_layer_norm": set(),
    "residual_rms_norm": set(),
    "rope": {"rope_bwd: Python, aten::sum"},
    "bias_gelu": set(),
    "relu2": set(),
    "swiglu": set(),
    "cross_entropy": {"cross_entropy: Python, aten::ne"},
    "linear_cross_entropy": {
        "linear_cross_entropy: Python, aten::ne", "linear_cross_entropy_bwd: Python, aten::mm",
    },
    "attention": set(),
    "attention_masked": {"attention_bwd: Python, a descriptor that Triton mends"},  # a small one
    "embedding": {"embedding_bwd: Python, aten::new_zeros"},
}  # fmt: skip


def check_every_case() -> None:
    sizes = {"attention": (1024, 64), "attention_masked": (1024, 64), "rope": (24, 64)}
    for op, in_python in OPS.items():
        choice.forget_recipes()
        total = repeated = 0
        for one in cases.cases_of(op, *sizes.get(op, (24, 96)), "cuda"):
            # torch has products of 16 bits into 32 on a GPU alone.
            for dtype in one.dtypes[: 1 if op == "linear_cross_entropy" else None]:
                inputs = list(one.inputs(dtype, "cpu").values())
                n, hits = compare((op, one.shape, dtype), one.fn, inputs)
                total, repeated = total + n, repeated + hits
        found = {line for line in ops._recipes() if "Python" in line}
        assert found == in_python, (op, found)
        assert (repeated == total) == (not found), op
        print(f"{op}: {repeated} of {total} launches by recipes")


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def check_shared_memory() -> None:
    """Two arguments in one memory, or each in its own: two kinds of calls."""
    x, w, stats = rows(8, 64), rows(64), rows(2, 8)
    norm = ops.layer_norm_bwd.default

    def twice(x: Tensor, w: Tensor, stats: Tensor) -> Any:
        return norm(x, None, x, w, stats, torch.float32, None, None, False)

    def two(dy: Tensor, x: Tensor, w: Tensor, stats: Tensor) -> Any:
        return norm(dy, None, x, w, stats, torch.float32, None, None, False)

    def packed(qkv: Tensor) -> Tensor:
        return kernels.attention(*qkv.unbind(2))

    def turned(qkv: Tensor) -> Tensor:
        return kernels.attention(*qkv.unbind(2)[::-1])

    qkv = rows(2, 256, 3, 4, 64, dtype=torch.bfloat16)
    calls = [
        ("twice", twice, [x, w, stats]), ("two", two, [x, x, w, stats]), ("packed", packed, [qkv]),
        ("turned", turned, [qkv]), ("apart", kernels.attention, list(qkv.unbind(2))),
    ]  # fmt: skip
    for n in (3, 1, 1):
        for name, fn, inputs in calls:
            launches, hits = compare(name, fn, inputs, n)
            assert hits == launches, name


def check_numbers() -> None:
    """Numbers are part of a kind; the key of a dropout is read by the kernel."""
    x, w = rows(2, 24, 64).requires_grad_(), rows(64).requires_grad_()
    for rng in (Rng(make_key(1, 0), 3), Rng(make_key(2, 9), 3), Rng(make_key(2, 9), 4),
                Rng(make_key(2, 9), 4, rows=96, first_row=24)):  # fmt: skip

        def call(x: Tensor, key: Tensor, w: Tensor, rng: Rng = rng) -> Any:
            return kernels.residual_layer_norm(x, x, w, dropout_p=0.1, rng=rng._replace(key=key))

        launches, hits = compare(rng, call, [x, rng.key, w])
        assert hits == launches
    for offset in (0, 1, 4):  # of an address: 16 bytes are a kind, others another
        whole = rows(8 * 64 + offset)
        x = whole.as_strided((8, 64), (64, 1), offset)
        launches, hits = compare(offset, kernels.layer_norm, [x, w])
        assert hits == launches
    before = len(ops._recipes())
    x, w = fake.to(x), fake.to(w)
    for i in range(9000):  # numbers that never repeat do not fill the memory
        kernels.layer_norm(x, w, eps=1e-5 * (1 + i))
    assert before < len(ops._recipes()) <= 8192


def again() -> tuple[int, int]:
    """Launches by Triton and by recipes of a call that launched before."""
    fake.launched()
    kernels.layer_norm(*NORM)
    found = [one.by_triton for one in fake.launched()]
    return sum(found), len(found) - sum(found)


NORM = [fake.to(rows(8, 64)), fake.to(rows(64)), fake.to(rows(64))]
IN_PYTHON, BY_RECIPE = (1, 0), (0, 1)


def check_what_goes_through_python() -> None:
    for _ in range(2):
        assert again() == IN_PYTHON
    assert again() == BY_RECIPE
    # The first is a profiler's. A backward, and a call of the op itself, do as the last call of a
    # public function.
    for name, value in (("launch_enter_hook", print), ("debug", True)):
        before = getattr(knobs.runtime, name)
        setattr(knobs.runtime, name, value)
        assert again() == IN_PYTHON, name
        setattr(knobs.runtime, name, before)
        assert again() == BY_RECIPE, name
    knobs.runtime.launch_exit_hook.add(print)
    assert again() == IN_PYTHON
    knobs.runtime.launch_exit_hook.remove(print)
    with triton_launch.record(90) as launches:
        assert again() == (0, 0)
        assert len(launches) == 1
    fake.set("context", 0)  # a thread without one
    assert again() == IN_PYTHON
    fake.set("context", 1)
    assert again() == BY_RECIPE
    torch.use_deterministic_algorithms(True)
    assert again() == IN_PYTHON
    torch.use_deterministic_algorithms(False)
    assert again() == BY_RECIPE
    with torch.profiler.profile() as profile:
        assert again() == BY_RECIPE
    assert any(event.key == "fastpar::layer_norm" for event in profile.key_averages())


def check_what_is_forgotten() -> None:
    """A trial of the doctor begins anew. Its oracle judges a call of Python's, its comparison of
    bits has one under the recorder and one of the recipe."""
    case = choice.case_of("layer_norm", NORM[0])
    with choice.trying("layer_norm", choice.OWN):
        assert [again() for _ in range(3)] == [IN_PYTHON, IN_PYTHON, BY_RECIPE]
    assert [again() for _ in range(3)] == [IN_PYTHON, IN_PYTHON, BY_RECIPE]
    choice.proofs[case] = choice.Proof(choice.OWN)
    assert [again() for _ in range(3)] == [IN_PYTHON, IN_PYTHON, BY_RECIPE]
    choice.proofs.clear()
    x = rows(64, 64)
    for config in (Config(1024, 4, 3), Config(2048, 8, 4)):
        with TABLE.trying((), config):
            launches, hits = compare(config, kernels.bias_gelu, [x, rows(64)])
            assert hits == launches


def check_what_is_refused() -> None:
    """Kernels that get other parameters than these, hooks before a run."""
    Kernel.more_parameters = 1
    x = rows(8, 128)
    assert compare("more", kernels.layer_norm, [x])[1] == 0
    Kernel.more_parameters = 0
    assert "layer_norm: Python, a kernel with other parameters" in ops._recipes()
    called: list[Any] = []
    _layer_norm_fwd_kernel.pre_run_hooks.append(lambda *args, **_: called.append(args))
    assert compare("hooks", kernels.layer_norm, [rows(8, 256)])[1] == 0
    assert len(called) == 4
    _layer_norm_fwd_kernel.pre_run_hooks.clear()


def check_errors() -> None:
    q = [fake.to(rows(1, 1024, 4, 64, dtype=torch.bfloat16)) for _ in range(3)]
    for _ in range(3):
        kernels.attention(*q)
        again()
    fake.set("result", 2)
    with pytest.raises(RuntimeError, match="attention: the driver refused a descriptor with"):
        kernels.attention(*q)
    fake.set("result", 700)
    words = "layer_norm: the driver refused kernel 1 of 1 with error 700 .CUDA_ERROR_OF_A_TEST"
    with pytest.raises(RuntimeError, match=words):
        again()
    fake.set("result", 0)
    assert again() == BY_RECIPE


def check_devices_and_threads() -> None:
    @contextlib.contextmanager
    def on(index: int) -> Any:
        before = fake.device()
        fake.set_device(index)
        yield
        fake.set_device(before)

    torch.cuda.device = lambda device: on(torch.device(device).index)
    with on(1):
        x = fake.to(rows(8, 64))
        for _ in range(2):
            assert compare("device 1", kernels.layer_norm, [rows(8, 64)])[1] == 1
    fake.launched()
    assert x.device.index == 1
    assert kernels.layer_norm(x).device == x.device  # while the current one is 0
    (one,) = fake.launched()
    assert not one.by_triton
    assert one.stream == 13 + 1

    def calls(size: int) -> None:
        x, dy = fake.to(rows(4, size)).requires_grad_(), fake.to(rows(4, size))
        for _ in range(40):
            kernels.layer_norm(x).backward(dy)

    before = fake.get("direct")
    threads = [threading.Thread(target=calls, args=(16 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of each thread two kinds of calls, of one launch, of which two go through Python.
    assert fake.get("direct") - before == 4 * 38 * 2


check_every_case()
check_parameters()
check_shared_memory()
check_numbers()
check_what_goes_through_python()
check_what_is_forgotten()
check_what_is_refused()
check_errors()
check_devices_and_threads()
