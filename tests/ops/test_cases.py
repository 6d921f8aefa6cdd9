"""Every op on every case of kernels/cases.py and support/more_cases.py, forward and backward
against fp64, by each of its implementations: torch's functions, C++, Triton (interpreted without a
GPU), CUDA (emulated without one).

An error is within what arithmetic explains (roundings.py), for the op's own kernels also within the
2x rule, which is a promise; and a second call has the same bits. The oracles are compared with
torch's functions.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from cells import slow, torch_attends
from more_cases import cases_of
from roundings import allowed

from fastpar import kernels
from fastpar.kernels import adamw, backend, cases
from fastpar.kernels import reference as ref
from fastpar.kernels.cases import FP32, FP64, MAKERS, OpCase, evaluate
from fastpar.kernels.philox import make_key

# rows, last dimension; interpreted kernels cost by their programs
SIZES = {"attention": (64, 40), "attention_masked": (64, 40), "adamw_step_": (7, 501)}
SIZES["rope"] = (24, 40)
SIZES |= dict.fromkeys(("cross_entropy", "linear_cross_entropy"), (40, 250))
INTERPRETED = {"attention": (40, 16), "attention_masked": (20, 16), "dropout": (3, 40)}
INTERPRETED |= dict.fromkeys(("cross_entropy", "linear_cross_entropy"), (11, 250))
IN_TRITON = [op for op, (_, where) in backend.OPS.items() if "triton" in where and op in MAKERS]
IN_CUDA = [op for op, (_, where) in backend.OPS.items() if "cuda" in where and op in MAKERS]


@functools.cache
def known(op: str, rows: int, size: int, device: str) -> list[OpCase]:
    return cases_of(op, rows, size, device)


@functools.cache
def explained(op: str, rows: int, size: int, device: str, number: int, dtype: torch.dtype):
    return allowed(known(op, rows, size, device)[number], dtype, device)


def dtypes_of(case: OpCase) -> list[torch.dtype]:
    return [*case.dtypes, *([FP64] if case.in_fp64 else [])]


def check(case: OpCase, dtype: torch.dtype, device: str) -> None:
    """For tests of single ops: the 2x rule."""
    for result, errors in case.measure(dtype, device).items():
        assert errors.max <= errors.bound, (case.op, case.shape, dtype, result, errors)


def judge(op, sizes, device, dtypes=(), *, every=False, own=True, able=lambda case, inputs: True):
    """Not every: of each case one dtype in turn, of the plain one all. dtypes: those asked for."""
    triton = backend.choice == "triton"
    for number, case in enumerate(known(op, *sizes, device)):
        if not able(case, case.inputs(case.dtypes[0], device)):
            continue
        found = [d for d in dtypes_of(case) if d in dtypes or not dtypes]
        for dtype in found if every or not (number or dtypes) else [found[number % len(found)]]:
            where = f"{op} {case.shape} {dtype}"
            most = explained(op, *sizes, device, number, dtype)
            for result, errors in case.measure(dtype, device).items():
                assert errors.max <= most[result], (where, result, most[result], errors)
                # In fp64 the yardstick is the oracle. Eager in 16 bits is exact where P is 0 or 1:
                # it subtracts dP from itself; Triton two sums of fp32, which have two orders.
                lucky = triton and "scores 2500" in case.shape and dtype != FP32
                if own and dtype != FP64 and not lucky:
                    assert errors.max <= errors.bound, (where, result, errors.bound, errors)
            # An interpreter that runs one program after another has no other order in another run.
            if (number or dtype != found[0]) and (not every or (triton and device == "cpu")):
                continue
            first, second = (case.results(dtype, device) for _ in range(2))
            for result, value in first.items():
                assert torch.equal(value.nan_to_num(), second[result].nan_to_num()), (where, result)


def in_plain_torch(case, inputs):
    """Whether PyTorch has functions for this: it rounds nothing at random."""
    if case.op == "adamw_step_":
        at_random = case.dtypes == (torch.bfloat16,) and "master" not in inputs
        state = [inputs[name].dtype for name in ("exp_avg", "master") if name in inputs]
        return not at_random and set(state) == {FP32}
    return "random" not in case.shape


EVERY = pytest.mark.parametrize("every", [False, slow(True)], ids=["some dtypes", "all dtypes"])


@pytest.mark.usefixtures("poisoned")
@EVERY
@pytest.mark.parametrize("op", MAKERS)
def test_on_a_cpu(op, every, monkeypatch):
    own = {True: "cpp", False: "torch"}
    gemms = {"gemm": own[backend.has_gemm], "gemm_bf16": own[backend.has_bf16_gemm]}
    runs = backend.OPS.get(op, ("cpp",))[0].format(**gemms)
    for choice in ("torch", "auto") if "cpp" in runs else ("auto",):
        monkeypatch.setattr(backend, "choice", choice)
        dtypes = () if "attention" not in op or torch_attends(torch.bfloat16) else (FP32, FP64)
        how = {"every": every, "own": choice == "auto"}
        how |= {"able": in_plain_torch} if choice == "torch" else {}
        judge(op, SIZES.get(op, (24, 96)), "cpu", dtypes, **how)


def tiles_fit(case, inputs):
    """Whether Triton's attention has kernels for this head dimension."""
    q = next(iter(inputs.values()))
    return q.shape[-1] % 8 == 0 and q.shape[-1] >= 16


@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's
@EVERY
@pytest.mark.parametrize("op", IN_TRITON)
def test_in_triton(op, every, triton_device):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    able = tiles_fit if op.startswith("attention") else lambda case, inputs: True
    judge(op, INTERPRETED.get(op, (7, 96)), triton_device, dtypes, every=every, able=able)


@pytest.mark.usefixtures("poisoned")
@EVERY
@pytest.mark.parametrize("op", IN_CUDA)
def test_in_cuda(op, every, cuda_device):
    judge(op, SIZES.get(op, (4, 501)), cuda_device, every=every)


@pytest.mark.parametrize("break_it", [lambda y: y * (1 + 2**-17), lambda y: y + 2**-17])
def test_an_error_of_a_few_roundings_is_seen(break_it, monkeypatch):
    case = cases.norm(24, 96)
    right = case.fn
    for fn, seen in ((right, False), (lambda *x: break_it(right(*x)), True)):
        monkeypatch.setattr(case, "fn", fn)
        most = allowed(case, torch.float32, "cpu")["y"]
        assert (case.measure(torch.float32, "cpu")["y"].max > most) == seen


ONLY = {  # ops whose kernels run in some dtypes only
    "linear_fp8": (torch.bfloat16,),
    "grouped_linear": (torch.bfloat16,), "dequantize_blockwise": (FP32,),  # its scales
}  # fmt: skip


@pytest.mark.parametrize("op", backend.OPS)
def test_every_kernel_that_can_run_has_a_case(op):
    """In every dtype: without one a kernel would count as proven."""
    if op in cases.UNPROVEN:
        assert "triton" not in backend.OPS[op][1]
        assert "cuda" not in backend.OPS[op][1]
        return
    ran = {dtype for case in cases.proof_cases(op, 96, "cpu", 64) for dtype in case.dtypes}
    assert ran >= set(ONLY.get(op, backend.DTYPE_CODES))


def test_every_way_of_adamw_to_store_its_state_has_a_case(monkeypatch):
    """Of those that its check lets through."""
    half, moments = (torch.bfloat16, torch.float16), (FP32, torch.bfloat16, torch.uint8)
    ways = itertools.product((FP32, *half), (FP32, *half), moments, (FP32, torch.int16, None))
    able, ran = set(), set()
    for p, g, moment, master in ways:
        x, kept = torch.empty(256, dtype=p), torch.empty(256, dtype=moment)
        scale = torch.empty(1) if moment == torch.uint8 else None
        of = None if master is None else torch.empty(256, dtype=master)
        with contextlib.suppress(ValueError):
            stochastic = master is None and p == torch.bfloat16
            state = (kept, kept, None, of, (scale, scale), stochastic)
            adamw.check_one(0, x, x.to(g), *state)
            able.add((p, g, moment, master))
    step = kernels.adamw_step_

    def note(p, g, m, v, *args, **how):
        master = how.get("master_weights", [None])[0]
        kinds = p[0].dtype, g[0].dtype, m[0].dtype, None if master is None else master.dtype
        ran.add(kinds)
        step(p, g, m, v, *args, **how)

    monkeypatch.setattr(kernels, "adamw_step_", note)
    for case in cases.proof_cases("adamw_step_", 8, "cpu", 4):
        for dtype in case.dtypes:
            case.results(dtype, "cpu")
    assert len(able) == 33
    assert ran == able


H100_SMS = 132


def test_a_proof_on_a_gpu_reaches_loops_and_sums_that_few_rows_do_not():
    sizes = {"layer_norm": 768, "attention": 64, "embedding": 96}
    sizes["linear_cross_entropy"] = 1024
    many = {op: cases.cases_of_many_rows(op, size, "cpu") for op, size in sizes.items()}
    q = [case.inputs(torch.bfloat16, "cpu")["q"].shape for case in many["attention"]]
    assert any(T == 320 for _, T, _, _ in q)  # tiles of 128: the last one is partial
    assert any(T == 1024 and B * H * (T // 256) > H100_SMS for B, T, H, _ in q)
    rows = [int(case.shape.split()[0][2:]) for case in many["layer_norm"]]
    assert max(rows) > 4 * 8 * H100_SMS  # four programs an SM, tiles of eight rows
    idx = many["embedding"][0].inputs(torch.float32, "cpu")["idx"]
    assert idx.unique(return_counts=True)[1].max() > 4 * 64  # stretches of 64 sorted ids
    assert all("in chunks of 48" in case.shape for case in many["linear_cross_entropy"])
    shapes = [case.shape for case in cases.cases_of_many_rows("bias_gelu", 96, "cuda")]
    on_gpu = [case.shape for case in cases.proof_cases("bias_gelu", 96, "cuda", 64)]
    assert shapes
    assert on_gpu[-len(shapes) :] == shapes
    assert cases.proof_cases("route", 8, "cpu", 64) == []


# The oracles against torch's own functions in fp64. What torch has not is shown by ops that agree
# with one: shards that make a whole loss (test_cross_entropy.py), documents that are samples
# (test_attention.py), published words of Philox and what its mask keeps (test_philox.py).
# fp64: some hundred roundings of 1.1e-16 each, times the cases' conditions of up to 1e4.
EXACT = {"rtol": 1e-10, "atol": 1e-10}


OPS = ("attention", "layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm",
       "bias_gelu", "relu2", "swiglu", "embedding", "linear", "cross_entropy",
       "linear_cross_entropy", "adamw_step_", "rope", "permute",
       "combine", "grouped_linear")  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_equals_what_torch_writes(op):
    """The oracle of every case of kernels/cases.py, and its gradients, beside torch's functions."""
    judged = 0
    for case in cases_of(op, 6, 32, **({"V": 7} if op == "embedding" else {})):
        torchs = case.stock if op == "attention" else case.eager
        lengths = " Tk=" in case.shape  # which torch aligns to the first key
        if lengths or torchs is case.ref or "T=0" in case.shape:
            continue
        inputs = list(case.inputs(torch.float32, "cpu").values())
        want, got = (evaluate(f, inputs, double=True) for f in (torchs, case.ref))
        assert want.keys() == got.keys()
        for name, value in want.items():
            # torch keeps the step of AdamW in fp32: 1 - beta^step is off by some roundings of it.
            how = {"rtol": 1e-6, "atol": 1e-6} if op == "adamw_step_" else EXACT
            message = functools.partial("{}: {}: {}".format, case.shape, name)
            torch.testing.assert_close(got[name], value, **how, msg=message, equal_nan=True)
        judged += 1
    assert judged


def test_attention_drops_probabilities():
    q, k, v = torch.randn(3, 1, 4, 2, 8, dtype=FP64)
    rng = (make_key(1, 0), 1)
    keep = ref.keep_mask_ref(rng, 0.5, (1, 2, 4, 4)).double()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1) * keep * 2, v)
    found = ref.attention_ref(q, k, v, dropout_p=0.5, rng=rng)
    torch.testing.assert_close(found, expected, **EXACT)
