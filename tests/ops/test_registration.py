"""Every op as torch has it: what is registered, traced whole, and refused in compiled programs;
torch's defaults and modes change no result.
The programs are those of kernels/cases.py, and by_hand() for what they leave out. A whole graph
returns what the same calls return without torch.compile; test_cases.py shows that it is right.
"""

import importlib
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import slow
from more_cases import cases_of
from test_cases import tiles_fit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import kernels
from fastpar.kernels import Rng, adamw, backend, make_key, op, triton_launch
from fastpar.kernels.adamw import Hyper
from fastpar.kernels.cases import MAKERS
from fastpar.kernels.global_norm import norm_bins, norm_from_bins
from fastpar.kernels.linear import _linear
from fastpar.kernels.loss.cross_entropy import _cross_entropy_bwd

F32, BF16 = torch.float32, torch.bfloat16
Program = tuple[Callable, list]
IN_TRITON = {name for name, (_, where) in backend.OPS.items() if "triton" in where}


def of_cases(device: str, dtype: torch.dtype = F32) -> dict[str, list[Program]]:
    """op -> its cases, a plain one first."""
    found = {}
    for name in MAKERS:
        few = {"V": 7} if name == "embedding" else {}
        triton = backend.choice == "triton" and name.startswith("attention")
        found[name] = [
            (case.fn, list(inputs.values()))
            for case in cases_of(name, 6, 32, device, **few)
            for given in [dtype if dtype in case.dtypes or dtype == torch.float64 else BF16]
            if not re.search("[NBT]=0", case.shape) and (case.in_fp64 or dtype == F32)
            for inputs in [case.inputs(given, device)]
            if not triton or tiles_fit(case, inputs)
        ]
    return found


def by_hand(device: str) -> dict[str, list[Program]]:
    """What is written in place, parts of masks, lists; with Triton the first two."""
    rng = Rng(make_key(3, 5, device), 4)
    ids, targets = (torch.randint(0, n, s).to(device) for n, s in ((5, (2, 2)), (90, (30,))))
    targets[::5] = -100

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).to(device).requires_grad_()

    def embedded(wte, wpe):
        y = kernels.embedding(ids, wte, wpe, rng=rng, dropout_p=0.3)
        return y + kernels.embedding(ids, wte * 2, wpe, first_position=1)

    def losses(logits):
        options = {"vocab_size": 100, "label_smoothing": 0.1}
        each = kernels.cross_entropy(logits, targets, reduction="none", **options)
        top, total, _ = kernels.cross_entropy_shard(logits, targets, first=20)
        lse, scale, work = total.log() + top, torch.ones_like(top), logits.detach() * 1.0
        kernels.cross_entropy_shard_grad(work, targets, lse, scale, first=20, out=work)
        work = _cross_entropy_bwd(work, scale)  # what a kept graph calls
        return each + kernels.cross_entropy(logits * 1.0, targets, inplace=True, **options), work

    def parts(x, qkv):
        part = rng._replace(first_row=2, rows=4)
        y = kernels.dropout(x, 0.3, part) * kernels.keep_mask(part, 0.3, x.shape, device=x.device)
        z = kernels.residual_layer_norm(y, x, x[0], x[1], dropout_p=0.3, rng=part)[0]
        last = rng._replace(first_head=7, first_row=4)
        return z, kernels.attention(*qkv.unbind(2), dropout_p=0.3, rng=last)

    def head(x, w):
        each = kernels.linear_cross_entropy(x, w, targets, reduction="none")
        return each + kernels.linear_cross_entropy(x, w, targets)

    def flat(out, *tensors):
        kernels.sum_shards([out * 2, out], out, scale=0.5)
        bins = norm_bins(tensors)
        norms = *kernels.global_norm(tensors, max_norm=1.0), *norm_from_bins(bins, max_norm=1.0)
        return out, *norms

    def coded(x):
        seed = None if backend.choice == "torch" else 1
        codes, scales = kernels.quantize_blockwise(x, seed=seed)
        kernels.quantize_blockwise(x, block=32)
        return kernels.dequantize_blockwise(codes, scales, out_dtype=BF16) * 2

    def stepped(scale, p, g, m, v):
        hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
        kernels.adamw_step_([p], [g], [m], [v], hyper, grad_scale=scale)
        if backend.choice == "torch":  # whose step has neither codes nor masters of other dtypes
            return
        low, grad = p.to(BF16), g.to(BF16)
        codes = [p.new_zeros(40, dtype=torch.uint8) for _ in "mv"]
        kernels.adamw_step_(
            [low], [grad], codes[:1], codes[1:], hyper,
            master_weights=[p], exp_avg_scales=[p.new_ones(1)], exp_avg_sq_scales=[p.new_ones(1)],
            grad_scale=p.new_ones(()), found_inf=p.new_zeros(()), maximize=True, zero_grad=True,
            stochastic_rounding_seed=5,
        )  # fmt: skip

    def routed(logits, x):
        weights, experts = kernels.route(logits, 2, logits.new_zeros(3))
        rows, order, _ = kernels.permute(x, experts, 3, 4)  # zeros where nothing goes
        return kernels.combine(rows, weights, order)

    half = torch.tensor(0.5)
    found = {
        "losses": [(losses, [leaf(30, 104)])],
        "parts": [(parts, [leaf(6, 16), leaf(1, 6, 3, 2, 16)])],
        "embedded": [(embedded, [leaf(5, 4), leaf(3, 4)])],
        "head": [(head, [leaf(30, 16), leaf(100, 16)])],
        "flat": [(flat, [torch.ones(7), torch.randn(3), torch.randn(2, 2)])],
        "codes": [(coded, [torch.randn(700)])],
        "product": [(lambda *t: _linear(*t) * 2, [leaf(5, 12), leaf(7, 12), leaf(7)])],
        "routed": [(routed, [leaf(8, 3), leaf(8, 6)])],
        "adamw": [(stepped, [half, *(torch.rand(40) for _ in "pgmv")])],
    }
    return dict(list(found.items())[: 3 if backend.choice == "triton" else None])


def results(f: Callable, inputs: list) -> list[Tensor]:
    """Outputs, gradients, and what stands in the tensors afterwards."""
    given = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        for t in inputs
    ]
    out = f(*given)
    outs = [] if out is None else list(out) if isinstance(out, tuple) else [out]
    leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    sums = [o.square().sum() for o in outs if o.requires_grad]
    if sums:
        torch.autograd.backward(sums)
    return [*outs, *(t.grad for t in leaves if t.grad is not None), *given]


def frozen(a):
    if isinstance(a, Tensor):
        return a.detach().clone().requires_grad_(a.requires_grad)
    return [frozen(x) for x in a] if isinstance(a, list | tuple) else a


def kind(a):
    if isinstance(a, Tensor):
        return a.dtype, a.dim(), a.requires_grad
    if isinstance(a, list | tuple):
        return tuple(map(kind, a))
    return a if a is None or isinstance(a, bool | str | torch.dtype) else type(a)


class Calls(TorchDispatchMode):
    """op -> arguments of its calls and of those of its backward, of each kind the first."""

    def __init__(self):
        super().__init__()
        self.found: dict[torch._ops.OpOverload, dict] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fastpar":
            given = (*args, *(kwargs or {}).values())  # in the order of the schema
            self.found.setdefault(function, {}).setdefault(kind(given), tuple(frozen(given)))
        return function(*args, **(kwargs or {}))


def calls(programs: dict[str, Program]) -> dict[torch._ops.OpOverload, dict]:
    """What ops are called with in the programs."""
    with Calls() as mode:
        for program in programs.values():
            results(*program)
    return mode.found


def every_program(device: str, dtype: torch.dtype = F32) -> dict[str, Program]:
    """By op and number."""
    found = of_cases(device, dtype)
    if backend.choice == "triton":
        found = {name: programs for name, programs in found.items() if name in IN_TRITON}
    found |= by_hand(device) if dtype == F32 else {}
    return {f"{name} {i}": p for name, programs in found.items() for i, p in enumerate(programs)}


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def name_of(each: torch._ops.OpOverload) -> str:
    return each.name().removeprefix("fastpar::")


def check(each: torch._ops.OpOverload, args: list[Any], *tests: str) -> None:
    """torch's checks of a call; its own of aliases compute, which 8-bit floats do not."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if name_of(each).endswith("_bwd"):  # nobody differentiates it
        args = [a.detach() if isinstance(a, Tensor) else a for a in args]
    if any(a.dtype.itemsize == 1 and a.is_floating_point() for a in tensors):
        tests = tuple(name for name in tests if name != "test_schema")
    torch.library.opcheck(each, args, test_utils=tests)


@pytest.mark.slow
def test_every_op_passes_torchs_checks():
    """Of every kind of call; with shapes as symbols, which is dear, the first."""
    found = calls(every_program("cpu"))
    modules = [m for name, m in sys.modules.items() if name.startswith("fastpar.kernels")]
    registered = {x.name for m in modules for x in vars(m).values() if isinstance(x, op.Op)}
    # Triton's: test_attention_triton.py; a product outside of an op: test_op.py, test_flops.py.
    left_out = {"attention_bits", "gemm_"}
    # test_other_forms_return_what_is_registered calls those that the compiled kernels replace.
    left_out |= {name for name in registered - {*map(name_of, found)} if "_composed" in name}
    assert set(map(name_of, found)) == (registered | op.COMPILED) - left_out
    for each, arguments in found.items():
        for i, args in enumerate(arguments.values()):
            capacity = name_of(each) == "permute" and i  # makes zeros, no gradient to compare
            # It differentiates every output, also gradients that the loss keeps for its backward.
            keeps = name_of(each) in ("cross_entropy", "linear_cross_entropy")
            dear = () if capacity or keeps or i else ("test_aot_dispatch_dynamic",)
            check(each, args, *QUICK, *dear)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("torch", F32), slow("torch", torch.float64), slow("triton", F32)],
    indirect=["form"],
)
def test_other_forms_return_what_is_registered(form, dtype):
    """Shapes, dtypes and aliases; how they are differentiated does not depend on the form."""
    for each, arguments in calls(every_program(form, dtype)).items():
        for args in arguments.values():
            check(each, args, *QUICK[::2])


@pytest.mark.parametrize("arch", [80, 90])
def test_every_call_that_is_compiled_ahead_launches_kernels(arch):
    """aot_calls() of every module of Triton kernels, which `make aot` compiles; nothing is
    computed."""
    pytest.importorskip("triton", reason="needs triton")
    for path in sorted(Path(backend.__file__).parent.rglob("*triton.py")):
        if path.name.startswith("hopper") and arch < 90:
            continue
        parts = path.relative_to(Path(backend.__file__).parent).with_suffix("").parts
        module = importlib.import_module(".".join(("fastpar.kernels", *parts)))
        for label, call in module.aot_calls():
            with triton_launch.record(arch) as launches:
                call()
            assert launches, (path.name, label)


GRAPHS = [name for name in (*MAKERS, *by_hand("cpu")) if name != "linear_fp8"]


def check_graph(names: list[str], device: str) -> None:
    """Of these programs one after another."""
    found = of_cases(device) | by_hand(device)
    programs = [found[name][0] for name in names]
    inputs = [t for _, given in programs for t in given]

    def f(*tensors):
        outs, left = [], list(tensors)
        for program, given in programs:
            out = program(*left[: len(given)])
            outs += [] if out is None else out if isinstance(out, tuple) else [out]
            left = left[len(given) :]
        return tuple(outs)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = results(torch.compile(f, fullgraph=True, backend="aot_eager"), inputs)
    for a, b in zip(got, results(f, inputs), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("names", [GRAPHS[i::6] for i in range(6)], ids=",".join)
def test_a_graph_is_whole(names):
    check_graph(names, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in GRAPHS if n in (*IN_TRITON, "losses", "parts")])
def test_a_graph_is_whole_with_triton(name, triton_device):
    check_graph([name], triton_device)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_graph_serves_any_length(form, p):
    """Of a packed attention; and any part of a mask."""
    rng = Rng(make_key(1, 2), 3)

    def f(qkv, first, rows):
        o = kernels.attention_qkvpacked(qkv, dropout_p=p, rng=rng._replace(first_head=first))
        x, part = o.flatten(0, 1), rng._replace(first_row=first, rows=rows)
        return o.sum() + kernels.residual_rms_norm(x, x, x[0, 0], dropout_p=p, rng=part)[0]

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for B, T, first in ((2, 6, 1), (3, 9, 2), (2, 11, 3)):
        qkv = torch.randn(B, T, 3, 2, 16).to(form).requires_grad_()
        got, want = compiled(qkv, first, T), f(qkv, first, T)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in (got, want)]
        torch.testing.assert_close(*grads)


def test_a_compiled_op_still_refuses_wrong_ids():
    wte = torch.ones(5, 4)
    compiled = torch.compile(kernels.embedding, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"expected token ids in \[0, 5\), got id=5"):
        compiled(torch.tensor([[5]]), wte)
    qkv = torch.ones(6, 3, 2, 4)
    compiled = torch.compile(
        lambda x, bounds: kernels.attention_qkvpacked(x, cu_seqlens=bounds), backend="aot_eager"
    )
    with pytest.raises(ValueError, match="expected cu_seqlens to end at q's total"):
        compiled(qkv, torch.tensor([0, 4, 5], dtype=torch.int32))


# With another default dtype or device, and after a first call under inference_mode, bits, dtypes
# and devices are those of a fresh process.
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
            if isinstance(b, Tensor)
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
            copies = [t.detach().clone() if isinstance(t, Tensor) else t for t in given]
            with torch.inference_mode():
                fn(*copies)
            return fn(*given)

        torch.set_num_threads(1)  # of this thread, as conftest.py sets it for the main one
        unlike.update((name, why) for why in unlikeness(twice, inputs, want))

    for name, fn, inputs in programs(every):
        want = results(fn, inputs)
        # A thread has workspaces of its own.
        thread = threading.Thread(target=judge, args=(name, fn, inputs, want))
        thread.start()
        thread.join()
    assert unlike == set()
