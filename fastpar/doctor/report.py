"""`fastpar doctor`: proves what a model's training step calls, and shows the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fastpar.doctor.doctor import adopt, cases_of_model, table_of
from fastpar.doctor.table import VERSION, row_of
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import backend
from fastpar.kernels.choice import OWN, Case, Proof
from fastpar.kernels.linear.fp8 import LEAST_CAPABILITY
from fastpar.settings.model import GPTConfig


@dataclass(frozen=True)
class DoctorCommand:
    """Check every kernel on this machine: is it correct, and faster than stock PyTorch?"""

    model: str = "gpt2"
    """Model whose tensor sizes to check: gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to check; auto: cuda if there is one."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Format of activations; auto: bf16 on cuda, fp32 on the CPU, as in fastpar train."""
    again: bool = False
    """Check known kernels again."""
    compile: bool = False
    """Also time PyTorch's functions under torch.compile, where it fuses them; implies --again."""
    json: str | None = None
    """Also write the table to this file, to attach to a bug report."""


def doctor(command: DoctorCommand, write: Callable[[str], None] = print) -> int:
    """Checks, prints the table; returns 1 if a kernel is wrong here, else 0.

    Raises:
        ValueError: an unknown model; no GPU for device=cuda; FASTPAR_BACKEND forces a choice.
        RuntimeError: no kernel is compiled for this GPU.
    """
    if backend.choice != "auto":
        raise ValueError(
            "fastpar doctor: expected FASTPAR_BACKEND=auto, so that both kernels can run, got "
            f"FASTPAR_BACKEND={backend.choice}; {backend.way_to_cpp()}"
        )
    gpu = torch.cuda.is_available()
    device = ("cuda" if gpu else "cpu") if command.device == "auto" else command.device
    if device == "cuda" and not gpu:
        raise ValueError(
            "fastpar doctor: expected a GPU with --device cuda, got none that torch finds; use "
            "--device cpu"
        )
    usual = {"cuda": "bf16", "cpu": "fp32"}[device]
    dtype = DTYPES[usual if command.dtype == "auto" else command.dtype]
    config = GPTConfig.preset(command.model)
    fp8 = device == "cuda" and torch.cuda.get_device_capability() >= LEAST_CAPABILITY
    cases = cases_of_model(device, dtype, config, fp8=fp8)
    proven: dict[Case, Proof] = {}
    about = table_of(device).about
    write(versions(about))
    how = {"again": command.again or command.compile, "compiled": command.compile}
    if device == "cuda":
        adopt(cases, **how)  # all at once: their kernels are compiled by all cores
        how = {}
    else:
        backend.keep_freed_memory()  # as training does; else page faults dominate the times
    write(HEADER)
    for case in cases:  # on a CPU a row as soon as it is known
        proven |= adopt([case], **how)
        write(row(case, proven[case]))
    for line in notes(proven):
        write(line)
    write(f"stored in {table_of(device).path}")
    if command.json is not None:
        rows = [row_of(case, proof) for case, proof in proven.items()]
        text = json.dumps({"version": VERSION, "about": about, "proofs": rows}, indent=1)
        Path(command.json).write_text(text + "\n", encoding="utf-8")
    return int(any(proof.wrong for proof in proven.values()))


def versions(about: Mapping[str, str]) -> str:
    """What a table is valid for, in a line."""
    named = (
        f"{name} {value}"
        for name, value in about.items()
        if name not in ("device", "module", "csrc")
    )
    return f"{about['device']}: {', '.join(named)}"


HEADER = (
    "Each kernel is compared with fp64 on ordinary and extreme inputs, then timed: fastpar's\n"
    "kernel, what fastpar runs instead of it, and PyTorch's functions alone. fastpar's kernel\n"
    "runs if it is correct and not slower than what would run instead.\n\n"
    f"{'':40}  {'forward, ms':>26}   {'backward, ms':>26}\n"
    f"{'op, dtype, last dimension':40}  {'fastpar':>8} {'instead':>8} {'PyTorch':>8}   "
    f"{'fastpar':>8} {'instead':>8} {'PyTorch':>8}   runs"
)


def row(case: Case, proof: Proof) -> str:
    """A line of the table; times of (fastpar's kernel, what runs instead, stock PyTorch)."""
    cells = []
    for direction in (0, 1):
        times = (proof.own_ms, proof.instead_ms, proof.stock_ms)
        cells.append(
            " ".join(f"{ms[direction]:8.3f}" if ms[direction] else f"{'-':>8}" for ms in times)
        )
    runs = " / ".join("fastpar" if who == OWN else who for who in dict.fromkeys(proof.serves))
    if proof.chosen != OWN:
        runs = "torch: fastpar's is WRONG" if proof.wrong else "torch"
    return f"{case!s:40}  {'   '.join(cells)}   {runs}"


def known_choices() -> list[str]:
    """The contents of this machine's tables, for `fastpar info`."""
    lines = []
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        table = table_of(device)
        if table.source is None:
            lines.append(f"proofs    {device}: none; `fastpar doctor --device {device}` makes them")
            continue
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(table.source.stat().st_mtime))
        others = {case: proof for case, proof in table.proofs.items() if proof.chosen != OWN}
        shared = {c: proof for c, proof in table.proofs.items() if set(proof.serves) != {OWN}}
        lines += [
            f"proofs    {device}: {len(table.proofs)} in {table.source}, of {made}",
            f"          for {versions(table.about)}",
            f"          {len(table.proofs) - len(others)} run fastpar's kernel, others torch's:",
        ]
        for case, proof in shared.items():
            lines.append(
                f"          {case}: forward by {proof.serves[0]}, backward by {proof.serves[1]}"
            )
        for case, proof in others.items():
            times = f"{sum(proof.own_ms):.3f} ms, torch {sum(proof.instead_ms):.3f}"
            why = f"is WRONG: {proof.wrong}" if proof.wrong else f"takes {times}"
            lines.append(f"          {case}: fastpar's {why}")
    return lines


def notes(proven: Mapping[Case, Proof]) -> list[str]:
    """Remarks below the table."""
    lines = [f"WRONG  {case}: {proof.wrong}" for case, proof in proven.items() if proof.wrong]
    for case, proof in proven.items():
        others = [(peer.name, peer.wrong, peer.ms) for peer in proof.peers]
        if sum(proof.compiled_ms) > 0:
            others.append(("PyTorch's functions under torch.compile", "", proof.compiled_ms))
        for name, wrong, (forward, backward) in others:
            times = f"{forward:.3f} ms forward, {backward:.3f} backward"
            lines.append(f"other  {case}: {name}: {f'is WRONG: {wrong}' if wrong else times}")
        if proof.stock_right:
            runs = proof.own_ms if proof.chosen == OWN else proof.instead_ms
            lines.append(
                f"note   {case}: {sum(runs):.3f} ms; PyTorch's functions alone take "
                f"{sum(proof.stock_ms):.3f}, and are as right, with the same bits twice"
            )
    return lines
