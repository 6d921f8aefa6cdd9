"""Proofs of a machine's kernels: requested by ops, made before a run, shown by `fastpar doctor`.

[Note: when] `fastpar train` proves the kernels of its model before the first step. fastpar.patch,
fastpar.GPT and fastpar.parallelize announce what a model will call (expect); the first of these
calls proves all of them at once, with their kernels compiled on all cores, behind one line and a
bar. Any other call of an op proves its own case only. On a CPU
no trial starts by itself: the results of `fastpar doctor` apply in `fastpar train` and from the
first fastpar.patch on. With FASTPAR_BACKEND set there are no trials either, but a kernel that
failed an earlier proof is refused.

[Note: rows] A proof is for calls with any number of rows, but the first call's may be those of one
generated token. So calls of at least LEAST_ROWS are timed, whose times on a GPU are those of memory
and products, and only on the device: what the host takes, a graph hides.

[Note: several ranks] The ranks of a layout must run the same kernels. One of them proves a case and
publishes the result: in torch.distributed's store once share() was called, else in the file, whose
lock lets one process prove at a time. If the ranks have GPUs of different kinds, one rank of each
kind proves; a kernel that fails or is slower on any kind is chosen on none.
"""

from __future__ import annotations

import json
import platform
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastpar.doctor.table import ProofTable, parse_proofs, row_of
from fastpar.doctor.trial import (
    FUSED_BY_COMPILE,
    DeviceLost,
    is_faster_compiled,
    prove,
    prove_apart,
    warm,
)
from fastpar.files.runs import Progress
from fastpar.kernels import backend, choice
from fastpar.kernels.choice import OWN, STOCK, Case, Proof
from fastpar.settings.model import GPTConfig, block_parts, widths

LEAST_ROWS, MOST_ROWS = 1 << 13, 1 << 15  # of a timed call; see [Note: rows]


class Prover:
    """Makes the proofs of this process; see [Note: several ranks].

    Args:
        store: shared by the ranks, with add, set and get as torch.distributed's; None: one process,
            or several on one machine that share the file.
        kinds: names of the ranks' devices.
    """

    def __init__(self, store: Any = None, kinds: Iterable[str] = ()) -> None:
        self._store, self._kinds = store, sorted(set(kinds))
        self._tables: dict[str, ProofTable] = {}
        self._lock = threading.RLock()

    def table(self, device: str) -> ProofTable:
        """The table of "cpu" or "cuda", read at the first call."""
        with self._lock:
            if device not in self._tables:
                self._tables[device] = ProofTable(device)
            return self._tables[device]

    def proof_of(self, case: Case, **how: Any) -> Proof:
        """The proof of a case, from the ranks' store, the file, or a trial; how: further arguments
        of proof_here."""
        with self._lock:
            if self._store is None:
                return self.proof_here(case, **how)
            here, by_kind = self.table(case.device).about["device"], {}
            for kind in sorted(self._kinds, key=lambda kind: kind != here):
                key = f"fastpar/proof/{kind}/{case.device}/{case}"
                if kind == here and self._store.add(f"{key}/claims", 1) == 1:
                    row = row_of(case, self.proof_here(case, **how))
                    self._store.set(key, json.dumps(row))
                row = json.loads(self._store.get(key))  # waits for the rank that proves
                by_kind[kind] = parse_proofs(case.device, {"proofs": [row]})[case]
            return _common(case, by_kind)

    def warm(self, cases: Sequence[Case], gpu: tuple[int, int]) -> bool:
        """Compiles what proofs need, once on each host, by the rank that gets True; other ranks of
        the host wait for it."""
        store, key = self._store, f"fastpar/warm/{platform.node()}/{' '.join(map(str, cases))}"
        leads = store is None or store.add(f"{key}/claims", 1) == 1
        if leads:
            if len(cases) > 1:
                _say(f"proving {len(cases)} kernels on this GPU, once: this takes a minute or two")
            try:
                for line in warm(cases, gpu):
                    _say(f"could not compile before the trial: {line}")
            finally:
                if store is not None:
                    store.set(key, "done")
        if store is not None:
            store.get(key)
        return leads

    def proof_here(
        self, case: Case, *, rows: int = 0, again: bool = False, compiled: bool = False
    ) -> Proof:
        """From this device's table, or by a trial (prove), which is reported and stored."""
        table = self.table(case.device)
        if not again and _is_known(table, case, compiled):
            return table.proofs[case]
        with table.locked():
            if not again and _is_known(table, case, compiled):
                return table.proofs[case]
            try:
                with table.trial(case) as ended:
                    try:
                        found = (prove_apart if ended else prove)(case, rows, compiled)
                    except DeviceLost as lost:
                        if lost.proof is not None:
                            table.proofs[case] = lost.proof
                        raise
                    if isinstance(found, str):
                        _say(f"{case}: {found}; this process runs stock PyTorch")
                        return Proof(STOCK)
                    proof = table.proofs[case] = found
            except torch.OutOfMemoryError:
                _say(f"{case}: out of memory during the trial; this process runs stock PyTorch")
                return Proof(STOCK)
        if proof.wrong:
            where = f"on {table.about['device']} and does not run"
            _say(f"{case}: fastpar's kernel is WRONG {where}: {proof.wrong}")
        return proof


def _runs(proof: Proof) -> str:
    return "fastpar's kernel" if proof.chosen == OWN else "stock PyTorch"


def _common(case: Case, by_kind: dict[str, Proof]) -> Proof:
    """The choice that is right on all kinds of devices."""
    worst = min(by_kind.values(), key=lambda proof: (proof.chosen == OWN, not proof.wrong))
    if len({proof.chosen for proof in by_kind.values()}) > 1:
        each = ", ".join(f"{kind}: {_runs(proof)}" for kind, proof in by_kind.items())
        _say(f"{case}: the ranks' GPUs differ ({each}); all run {_runs(worst)}")
    if worst.chosen == OWN and len({proof.serves for proof in by_kind.values()}) > 1:
        each = ", ".join(f"{kind}: {' / '.join(proof.serves)}" for kind, proof in by_kind.items())
        _say(f"{case}: the fastest differs by GPU ({each}); all run fastpar's kernel")
        worst = worst._replace(serves=(OWN, OWN))
    return worst


def _say(text: str) -> None:
    print(f"fastpar: {text}", file=sys.stderr, flush=True)


_prover = Prover()


def share(store: Any, kinds: Iterable[str]) -> None:
    """Makes the ranks behind this store prove together from now on; arguments as Prover's."""
    global _prover
    _prover = Prover(store, kinds)
    choice.proofs.clear()


Calls = set[tuple[str, int]]  # op, last dimension; 0: over flat memory
_expected: Calls = set()


def expect(calls: Calls, device: str, dtype: torch.dtype) -> None:
    """Announces what a model will call; see [Note: when]."""
    _expected.update(calls)
    if device == "cpu":
        adopt_known(Case(device, op, dtype, size) for op, size in calls)


def expect_gpt(config: GPTConfig, tp: int = 1) -> None:
    """Announces what a GPT will call on a GPU; tp > 1: instead of what was announced before it was
    split into as many."""
    of = {
        n: {(case.op, case.size) for case in cases_of_model("cuda", torch.bfloat16, config, tp=n)}
        for n in (1, tp)
    }
    _expected.difference_update(of[1])
    _expected.update(of[tp])


def prove_first_use(case: Case, x: Tensor) -> Proof:
    """The proof of a case that an op is about to run. If there is none it is made, together with
    those of the other expected calls."""
    rows = x.numel() // case.size if case.size else 0
    cases = {case}
    if (case.op, case.size) in _expected:
        cases |= {case._replace(op=op, size=size) for op, size in _expected}
        cases |= {one._replace(dtype=torch.float32) for one in cases if not one.size}
    missing = sorted(cases - choice.proofs.keys(), key=str)
    return (choice.proofs | adopt(missing, rows=_timed(rows)))[case]


def _timed(rows: int) -> int:
    return min(max(rows, LEAST_ROWS), MOST_ROWS)


def known_proof(case: Case) -> Proof | None:
    """The table's proof of a case; starts no trial."""
    return table_of(case.device).proofs.get(case)


def table_of(device: str) -> ProofTable:
    """The table that this process uses, for "cpu" or "cuda"."""
    return _prover.table(device)


def adopt_known(cases: Iterable[Case]) -> None:
    """Makes this process use the table's proofs of these cases; starts no trial."""
    stored = {case: proof for case in cases if (proof := known_proof(case)) is not None}
    choice.proofs.update(stored)


def adopt(
    cases: Iterable[Case], *, again: bool = False, compiled: bool = False, rows: int = 0
) -> dict[Case, Proof]:
    """Proves cases before they are needed, and makes this process use the results.

    Args:
        again: also prove known cases.
        compiled: also time PyTorch's functions under torch.compile; see prove().
        rows: rows of a timed call; see prove().
    Raises:
        RuntimeError: no kernel is compiled for this GPU.
    """
    cases = list(cases)
    if cases and cases[0].device == "cuda":
        backend.check_gpu("fastpar", torch.device("cuda", torch.cuda.current_device()))
    unknown = [c for c in cases if again or not _is_known(table_of(c.device), c, compiled)]
    compiled_later = any(case.size for case in unknown)  # by Triton; ops over flat memory are CUDA
    leads = False
    if compiled_later and unknown[0].device == "cuda":
        about = torch.cuda.get_device_properties()
        gpu = 10 * about.major + about.minor, about.multi_processor_count
        leads = _prover.warm(unknown, gpu)
    how: dict[str, Any] = {"again": again, "compiled": compiled, "rows": rows}
    shows = leads and sys.stderr.isatty() and find_spec("tqdm") is not None
    bar = Progress(len(unknown), bar=True) if shows else None
    found: dict[Case, Proof] = {}
    for case in cases:
        start = time.perf_counter()
        found[case] = _prover.proof_of(case, **how)
        if case in unknown and case.device == "cuda":
            if bar is not None:
                bar.update(len(found.keys() & set(unknown)), str(case))
            elif leads or not compiled_later:
                seconds = time.perf_counter() - start
                _say(f"{case}: proven in {seconds:.1f} s, runs {_runs(found[case])}")
    if bar is not None:
        bar.close()
    choice.proofs.update(found)
    return found


def _is_known(table: ProofTable, case: Case, compiled: bool) -> bool:
    """Whether a table has a proof, including a time under torch.compile if `compiled`."""
    proof = table.proofs.get(case)
    if proof is None or not compiled or case.op not in FUSED_BY_COMPILE:
        return proof is not None
    return not proof.own_ms[0] or min(proof.compiled_ms) > 0


FLAT_OPS = ("adamw_step_", "global_norm", "sum_shards")


def cases_of_model(
    device: str, dtype: torch.dtype, config: GPTConfig, *, tp: int = 1, fp8: bool = False
) -> list[Case]:
    """The cases of a rank's training step of a GPT, with the sizes of its tp slice."""
    C, V = config.n_embd, config.padded_vocab_size // tp
    loss = ("cross_entropy", "linear_cross_entropy") if tp == 1 else ("cross_entropy_shard",)
    parts = {part.op: part for part in block_parts(config)}
    sizes, D = widths(config, tp), config.head_size
    activation = next(op for op in ("bias_gelu", "relu2", "swiglu") if op in parts)
    model = {
        f"{config.norm}_norm": C, f"residual_{config.norm}_norm": C,
        activation: sizes[parts[activation].into], **({"rope": D} if "rope" in parts else {}),
        "attention": D, "attention_masked": D, **dict.fromkeys(loss, V),
    }  # fmt: skip
    if device == "cuda":  # on a CPU it is torch's
        model["embedding"] = C
    eight_bits = (C, 4 * C // tp) if fp8 and device == "cuda" and dtype == torch.bfloat16 else ()
    return [
        *(Case(device, op, dtype, size) for op, size in model.items()),
        *(Case(device, "linear_fp8", dtype, size) for size in eight_bits),
        *(
            Case(device, op, kind, 0)
            for kind in dict.fromkeys((dtype, torch.float32))
            for op in FLAT_OPS
        ),
    ]


def prove_before_training(
    device: str,
    dtype: torch.dtype,
    config: GPTConfig,
    *,
    tp: int = 1,
    rows: int = 0,
    compiled: bool = False,
    fp8: bool = False,
) -> None:
    """Proves what a run will call, unless it is known; see [Note: when].

    compiled: the run compiles its model. Where PyTorch's functions under torch.compile are faster
    than fastpar's kernel, the compiler gets these functions.
    Ranks: all, with the same arguments.
    """
    cases = cases_of_model(device, dtype, config, tp=tp, fp8=fp8)
    if device == "cpu" or backend.choice != "auto":
        adopt_known(cases)
    else:
        adopt(cases, rows=_timed(rows), compiled=compiled)
    for case in choice.proofs.keys() & cases if compiled else ():
        proof = choice.proofs[case]
        if is_faster_compiled(proof):
            choice.proofs[case] = proof._replace(chosen=STOCK)
