"""Proofs of a machine's kernels: asked for by ops, made before a run, shown by `fastpar doctor`.

[Note: several ranks] The ranks of a layout must run the same kernels. One of them proves a case and
puts the result where all can read it: into torch.distributed's store once share() gave it, else
into the file, whose lock lets one process prove. Ranks on GPUs of different kinds prove one each;
what fails or is slower on any of them is chosen on none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.doctor.table import ProofTable, parse_proofs, row_of
from fastpar.doctor.trial import prove
from fastpar.kernels import choice
from fastpar.kernels.choice import OWN, STOCK, Case, Proof

_tables: dict[str, ProofTable] = {}
_lock = threading.RLock()
_store: Any = None  # of torch.distributed, between the ranks
_kinds: Sequence[str] = ()  # names of the ranks' devices, where there are several


def table_of(device: str) -> ProofTable:
    """The table of "cpu" or "cuda", read at the first call."""
    with _lock:
        if device not in _tables:
            _tables[device] = ProofTable(device)
        return _tables[device]


def share(store: Any, kinds: Iterable[str]) -> None:
    """From now on the ranks behind this store prove together; see [Note: several ranks].

    Args:
        store: with add, set and get, as torch.distributed's.
        kinds: names of all ranks' devices.
    """
    global _store, _kinds
    _store, _kinds = store, sorted(set(kinds))
    choice.proofs.clear()


def prove_first_use(case: Case, x: Tensor) -> Proof:
    """The proof of a case that an op is about to be called with; made if there is none."""
    rows = x.numel() // case.size if case.size else 0
    return proof_of(case, rows=min(rows, 1 << 15))


def proof_of(case: Case, *, rows: int = 0, again: bool = False) -> Proof:
    """The proof of a case, from the ranks' store, the file, or by a trial."""
    with _lock:
        if _store is None:
            return _proof_here(case, rows, again)
        here = table_of(case.device).about["device"]
        found = {}
        for kind in sorted(_kinds, key=lambda kind: kind != here):  # first what this rank can do
            key = f"fastpar/proof/{kind}/{case.device}/{case}"
            if kind == here and _store.add(f"{key}/claims", 1) == 1:
                _store.set(key, json.dumps(row_of(case, _proof_here(case, rows, again))))
            row = json.loads(_store.get(key))  # waits for the rank that proves
            found[kind] = next(iter(parse_proofs(case.device, {"proofs": [row]}).values()))
    return _common(case, found)


def _common(case: Case, found: dict[str, Proof]) -> Proof:
    """What all kinds of devices can run."""
    worst = min(found.values(), key=lambda proof: (proof.chosen == OWN, not proof.wrong))
    if len({proof.chosen for proof in found.values()}) > 1:
        each = ", ".join(f"{kind}: {proof.chosen}" for kind, proof in found.items())
        _say(f"{case}: the ranks' GPUs differ ({each}); all run {worst.chosen}")
    return worst


def _proof_here(case: Case, rows: int, again: bool) -> Proof:
    """From this device's table, or by a trial, which is told and kept."""
    table = table_of(case.device)
    if case in table.proofs and not again:
        return table.proofs[case]
    with table.locked():
        if case in table.proofs and not again:
            return table.proofs[case]
        start = time.perf_counter()
        with table.trial(case) as barred:
            proof = Proof(STOCK, barred) if barred else prove(case, rows)
            table.proofs[case] = proof
    if proof.wrong:
        device = table.about["device"]
        _say(f"{case}: the own kernel is WRONG on {device} and does not run: {proof.wrong}")
    elif case.device == "cuda":
        _say(f"{case}: proven in {time.perf_counter() - start:.1f} s, runs {proof.chosen}")
    return proof


def _say(text: str) -> None:
    print(f"fastpar: {text}", file=sys.stderr, flush=True)


def adopt(cases: Iterable[Case], *, rows: int = 0, again: bool = False) -> dict[Case, Proof]:
    """Proves cases before they are needed, and makes this process go by the results."""
    found = {case: proof_of(case, rows=rows, again=again) for case in cases}
    choice.proofs.update(found)
    return found


def cases_of_model(
    device: str,
    dtype: torch.dtype,
    *,
    n_embd: int,
    head_dim: int,
    vocab_size: int,
    residual: bool = True,
) -> list[Case]:
    """What a training step of a GPT-2-class model calls.

    Args:
        n_embd, head_dim, vocab_size: of the tensors that a rank holds; vocab_size padded.
    """
    C = n_embd
    model = {
        "embedding": C, "layer_norm": C, "residual_layer_norm": C, "attention": head_dim,
        "bias_gelu": 4 * C, "cross_entropy": vocab_size, "linear_cross_entropy": vocab_size,
    }  # fmt: skip
    flat = ("adamw_step_", "global_norm", "pack_", "unpack_", "accumulate_", "sum_shards")
    return [
        *(Case(device, op, dtype, size) for op, size in model.items()),
        *(Case(device, op, torch.float32, 0) for op in flat),
    ]
