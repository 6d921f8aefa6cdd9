"""Weights from wherever they lie: a checkpoint, a folder of transformers, nanoGPT's ckpt.pt."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fastpar.checkpoint.manifest import CONFIG, FORMAT, MANIFEST, Manifest, read_manifest
from fastpar.checkpoint.verify import verify_files
from fastpar.files.plain_files import read_object
from fastpar.files.runs import is_step_name
from fastpar.models.gpt import GPT
from fastpar.models.hf import INDEX_FILE, WEIGHTS_FILE, load_hf
from fastpar.models.nanogpt import load_nanogpt


def load_weights(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    dropout: float | None = None,
    say: Callable[[str], None] | None = None,
) -> GPT:
    """A GPT with the weights of a file of nanoGPT's or of a folder; see load_nanogpt and load_hf.

    Args:
        say: takes a line on what the file lacks; a warning by default.
    Raises:
        ValueError: it is neither, or damaged; of a checkpoint every byte of the weights is
            compared with its manifest first.
    """
    path = Path(source)
    if path.is_file():
        return load_nanogpt(path, dtype=dtype, dropout=dropout, say=say)
    manifest = verify_weights(path)
    if manifest is not None and CONFIG not in manifest.files:
        raise ValueError(
            f"load_weights: expected a checkpoint of a GPT-2 with {CONFIG}, got path={path} of "
            "another module; load it into that module with fastpar.load_checkpoint"
        )
    return load_hf(path, dtype=dtype, dropout=dropout)


def verify_weights(folder: Path) -> Manifest | None:
    """What load_hf reads of a checkpoint against its manifest; None for other folders.

    Raises:
        ValueError: the checkpoint is damaged, or a file that is not its own would be read.
    """
    if not is_checkpoint(folder) or _is_another(folder / MANIFEST):
        return None
    manifest = read_manifest(folder)
    states = {tensor.file for tensor in manifest.optimizer}
    files = {name: entry for name, entry in manifest.files.items() if name not in states}
    verify_files(folder, replace(manifest, files=files, optimizer=()))
    for name in (WEIGHTS_FILE, INDEX_FILE):
        if name not in files and os.path.lexists(folder / name):
            raise ValueError(
                f"verify_weights: expected the weights of the checkpoint {folder}, got {name} "
                "beside them, which its manifest does not have; delete it"
            )
    return manifest


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, or the name of a folder that should have one."""
    return os.path.lexists(folder / MANIFEST) or is_step_name(folder.resolve().name)


def _is_another(file: Path) -> bool:
    """Whether this is another program's file."""
    try:
        return read_object(file).get("format") != FORMAT
    except ValueError:
        return False
