"""Whether fastpar's kernel of an op may run, based on proofs made on this machine.

A proof says for one op and class of shapes (dtype, last dimension) whether fastpar's kernel is
right (within twice stock PyTorch's error, the same bits twice) and how long it and stock PyTorch
take. A wrong kernel never runs, a slower one is not chosen; FASTPAR_BACKEND, if set, decides
instead. In deterministic mode (ignore_times_for, or torch.use_deterministic_algorithms) every right
kernel runs, on any device: bits must not depend on times, and fastpar's kernels give the same bits
in every call. fastpar/doctor makes proofs; this file imports it by the name PROVER, so that the ops
work without it. On CUDA a class without a proof is proven at its first call, on a CPU only by
`fastpar doctor`: tests cover the CPU's kernels.

[Note: no trial here] While a graph is captured an unproven class runs as stock PyTorch. While
torch.compile or a fake tensor traces, the op is kept; its call decides when it runs.
"""

import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import _C

OWN, STOCK = "own", "torch"
PROVER = "fastpar.doctor.doctor"  # its prove_first_use(case, tensor) and known_proof(case)
# Ops over lists of tensors or flat memory, for which the last dimension is irrelevant.
_FLAT = frozenset({
    "adamw_step_", "sum_shards", "global_norm",
    "quantize_blockwise", "dequantize_blockwise", "dropout",
})  # fmt: skip
PARTS = {  # ops that are proven with another op
    "norm_bins": "global_norm", "norm_from_bins": "global_norm", "keep_mask": "dropout",
    "cross_entropy_shard_grad": "cross_entropy_shard",
}  # fmt: skip


class Case(NamedTuple):
    """An op and a class of shapes: the scope of one proof."""

    device: str  # "cpu" | "cuda"
    op: str
    dtype: torch.dtype
    size: int  # the last dimension: C, D, F or V; 0 for ops over flat memory

    def __str__(self) -> str:
        size = f" {self.size}" if self.size else ""
        return f"{self.op} {str(self.dtype).removeprefix('torch.')}{size}"


class PeerProof(NamedTuple):
    """The result for another implementation of an op; see attention/peers.py."""

    name: str
    wrong: str  # why it must not run; "" if it is right
    ms: tuple[float, float]  # forward, backward; 0: not timed


class Proof(NamedTuple):
    """The result for one Case on one machine."""

    chosen: str  # OWN | STOCK
    wrong: str = ""  # why fastpar's kernel must not run; "" if it is right
    own_ms: tuple[float, float] = (0.0, 0.0)  # forward, backward; 0: there is none
    instead_ms: tuple[float, float] = (0.0, 0.0)  # of what runs instead of fastpar's kernel
    stock_ms: tuple[float, float] = (0.0, 0.0)  # of PyTorch's own functions
    compiled_ms: tuple[float, float] = (0.0, 0.0)  # of these under torch.compile; 0: not timed
    serves: tuple[str, str] = (OWN, OWN)  # who runs forward and backward if OWN is chosen
    peers: tuple[PeerProof, ...] = ()
    stock_right: bool = False  # whether PyTorch's own functions are as right, and faster than both


def forget_recipes() -> None:
    """Calls on CUDA tensors run their Python functions again, which may choose otherwise; csrc/
    torch/recipes.cpp."""
    if _C is not None:
        torch.ops.fastpar._forget_recipes()


class _Proofs(dict[Case, Proof]):
    """With a change, who serves a call may change."""

    def __setitem__(self, case: Case, proof: Proof) -> None:
        super().__setitem__(case, proof)
        forget_recipes()

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        forget_recipes()

    def clear(self) -> None:
        super().clear()
        forget_recipes()


proofs: dict[Case, Proof] = _Proofs()  # the proofs that this process uses
_trying: dict[str, str] = {}  # op -> OWN | STOCK during its trial; also in autograd's threads
_strict: list[None] = []  # an element for each reason to ignore times: threads add and take


def ignores_times() -> bool:
    """Whether which kernels run must not depend on a timing."""
    return bool(_strict) or torch.are_deterministic_algorithms_enabled()


def ignore_times_for(owner: object) -> None:
    """While owner lives, no timing decides in this process: a deterministic engine's."""
    _be_strict()
    weakref.finalize(owner, _end_strict, _strict).atexit = False


def _be_strict() -> None:
    _strict.append(None)
    if _C is not None:
        torch.ops.fastpar._ignore_times(1)


def _end_strict(reasons: list[None]) -> None:
    reasons.pop()
    if _C is not None:
        with torch._C._DisableTorchDispatch():  # the garbage collector calls this in any mode
            torch.ops.fastpar._ignore_times(-1)


@contextmanager
def ignoring_times() -> Iterator[None]:
    """No timing decides inside."""
    _be_strict()
    try:
        yield
    finally:
        _end_strict(_strict)


def case_of(op: str, x: Tensor) -> Case:
    """The class of a call with tensors like x."""
    return Case(*_key_of(op, x))


def _key_of(op: str, x: Tensor) -> tuple[str, str, torch.dtype, int]:
    """The fields of a Case, and equal to it: made in every call."""
    op = PARTS.get(op, op)
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
    shape = () if op in _FLAT else x.shape
    return device, op, x.dtype, int(shape[-1]) if shape else 0


@contextmanager
def trying(op: str, what: str) -> Iterator[None]:
    """Calls of op inside run fastpar's kernel (OWN) or stock PyTorch (STOCK); other ops are OWN.
    what: also "forward/backward", names of implementations of attention."""
    before = dict(_trying)
    _trying[op] = what
    forget_recipes()
    try:
        yield
    finally:
        _trying.clear()
        _trying.update(before)
        forget_recipes()


def is_trying() -> bool:
    """Whether a trial decides who runs."""
    return bool(_trying)


def is_real(x: Tensor) -> bool:
    """Whether x has memory, so that a call with it computes: not while torch.compile traces."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


def may_run(op: str, x: Tensor) -> bool:
    """Whether fastpar's kernel serves a call of op with tensors like x; proves it if needed."""
    if _trying:
        return _trying.get(PARTS.get(op, op), OWN) != STOCK
    if not proofs and not x.is_cuda:
        return True
    proof = proofs.get(_key_of(op, x))  # type: ignore[call-overload]
    if proof is None:
        if not x.is_cuda or not is_real(x):
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        case = case_of(op, x)
        proof = proofs[case] = importlib.import_module(PROVER).prove_first_use(case, x)
    if ignores_times() and not proof.wrong and (proof.own_ms[0] or not x.is_cuda):
        return True  # a GPU's is right if it has a time; a CPU's runs without a proof
    return proof.chosen == OWN


def is_right(op: str, x: Tensor) -> bool:
    """Whether fastpar's kernel passed its proof for tensors like x, whatever its time."""
    proof = proofs.get(_key_of(op, x))  # type: ignore[call-overload]
    return proof is not None and bool(proof.own_ms[0])


def is_proven(op: str, x: Tensor) -> bool:
    """may_run() for an op with a complete alternative, which runs during other ops' trials and
    where times are ignored."""
    if not _trying and ignores_times():
        return False
    return (not _trying or op in _trying) and may_run(op, x)


def server(op: str, x: Tensor, direction: int) -> str:
    """Who serves a call for which may_run() is true: direction 0 forward, 1 backward."""
    if _trying:
        forward, _, backward = _trying.get(op, OWN).partition("/")
        return (forward, backward or forward)[direction]
    proof = proofs.get(_key_of(op, x)) if proofs else None  # type: ignore[call-overload]
    if proof is None or ignores_times():
        return OWN
    return proof.serves[direction]


def refuse_wrong(op: str, x: Tensor, backend: str) -> None:
    """For a backend that the user forces: refuses a kernel that failed its proof, with the
    numbers."""
    if _trying or not (proofs or x.is_cuda):
        return
    proof = proofs.get(_key_of(op, x))  # type: ignore[call-overload]
    if proof is None and x.is_cuda and is_real(x):
        case = case_of(op, x)
        known = importlib.import_module(PROVER).known_proof(case)
        proof = proofs[case] = Proof(OWN) if known is None else known  # forced: not tried
    if proof is not None and proof.wrong:
        raise RuntimeError(
            f"{op}: expected a kernel that passed its proof under FASTPAR_BACKEND={backend}, got "
            f"one that failed for {case_of(op, x)}: {proof.wrong}; unset FASTPAR_BACKEND, or run "
            "`fastpar doctor --again` after an update of the driver, torch or Triton"
        )


def refuse_peer(op: str, x: Tensor, name: str, variable: str) -> None:
    """The same for another implementation that the user forces."""
    proof = proofs.get(case_of(op, x)) if proofs and not _trying else None
    for peer in () if proof is None else proof.peers:
        if peer.name == name and peer.wrong:
            raise RuntimeError(
                f"{op}: expected an implementation that passed its proof under {variable}, got "
                f"{name}, which failed for {case_of(op, x)}: {peer.wrong}; unset {variable}"
            )
