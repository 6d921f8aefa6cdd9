"""Weights and tokenizer in a folder of their own, in another dtype if asked for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.checkpoint.folder_tensors import StoredTensor, stored_tensors
from fastpar.checkpoint.manifest import CONFIG, GPT_MODEL, STATE, Manifest
from fastpar.checkpoint.weight_sources import verify_weights
from fastpar.files.plain_files import is_plain_name, read_object
from fastpar.files.tensor_file import Spec, TensorFile
from fastpar.kernels.adamw_storage import master_join
from fastpar.models.hf import CONV1D, DTYPES, INDEX_FILE, MASKS, PREFIX, save_hf
from fastpar.models.nanogpt import load_nanogpt

# What transformers' from_pretrained reads besides weights; all of it is text.
_TEXTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", INDEX_FILE,
)  # fmt: skip


def export_weights(
    source: Path,
    to: Path,
    dtype: torch.dtype | None = None,
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Write what transformers loads of a checkpoint, another folder of transformers, or ckpt.pt.

    Args:
        source: the folder or file; of a checkpoint every byte is compared with its manifest.
        to: folder to make; it appears complete or not at all.
        dtype: of the weights; None leaves their bytes as they are. Where it is another one than
            that of the parameters, their fp32 masters are converted if the optimizer has them.
        say: takes a line on what a ckpt.pt lacks; a warning by default.
    Returns:
        The names of the files.
    Raises:
        ValueError: the folder exists; the source is damaged; a value that dtype cannot hold.
    """
    if os.path.lexists(to):
        raise ValueError(
            f"fastpar export: expected a folder that does not exist, got to={to}; choose another"
        )
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        if source.is_file():
            save_hf(load_nanogpt(source, dtype=dtype, say=say), temporary)
        else:
            _export_folder(source, temporary, dtype)
        os.replace(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(os.listdir(to))


def _export_folder(source: Path, to: Path, dtype: torch.dtype | None) -> None:
    manifest = verify_weights(source)
    tensors = stored_tensors(source, manifest)
    states = set() if manifest is None else {t.key for t in manifest.optimizer}
    weights = {t.name: t for t in tensors if t.name not in states}
    config = read_object(source / CONFIG, links=True) if (source / CONFIG).exists() else {}
    to.mkdir(parents=True)
    for name in _texts(source, manifest):
        shutil.copyfile(source / name, to / name)
    by_file: dict[str, list[StoredTensor]] = {}
    for tensor in weights.values():
        by_file.setdefault(tensor.pieces[0].path.name, []).append(tensor)
    if dtype is None:
        for name in by_file:
            shutil.copyfile(source / name, to / name)
        return
    gpt = manifest is not None and manifest.model == GPT_MODEL
    convert = _converter({t.name: t for t in tensors if t.name in states}, dtype, gpt)
    total = 0
    for name, found in by_file.items():
        specs = {t.name: Spec(_target(t, dtype), t.shape) for t in found}
        total += sum(spec.nbytes for spec in specs.values())
        with TensorFile(to / name, specs, {"format": "pt"}) as file:
            for tensor in found:
                file.write(tensor.name, convert(tensor))
    if config:
        config.pop("dtype", None)  # how newer versions of transformers call it
        _write(to / CONFIG, {**config, "torch_dtype": DTYPES[dtype]})
    if len(by_file) > 1:
        weight_map = {t.name: name for name, found in by_file.items() for t in found}
        _write(to / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _texts(source: Path, manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [name for name in _TEXTS if (source / name).is_file()]
    tensors = {t.file for t in manifest.weights + manifest.optimizer}
    names = manifest.files.keys() - tensors - {STATE}
    return sorted(name for name in names if is_plain_name(name))


def _target(tensor: StoredTensor, dtype: torch.dtype) -> torch.dtype:
    keep = not tensor.dtype.is_floating_point or tensor.name.endswith(MASKS)
    return tensor.dtype if keep else dtype


def _converter(
    states: dict[str, StoredTensor], dtype: torch.dtype, gpt: bool
) -> Callable[[StoredTensor], Tensor]:
    """Of a weight: its values in another dtype, from the master where there is one.

    Args:
        gpt: whether the states have a GPT's names and layouts, and not those of the weights.
    """

    def convert(tensor: StoredTensor) -> Tensor:
        target = _target(tensor, dtype)
        name = tensor.name.removeprefix(PREFIX) if gpt else tensor.name
        value = tensor.whole()
        if target == tensor.dtype:
            return value
        for entry, join in (("master_weight", _take), ("master_remainder", master_join)):
            if f"{name}/{entry}" in states:
                state = states[f"{name}/{entry}"].whole()
                state = _stored_layout(name, state, tensor.shape) if gpt else state
                value = join(value, state)
        converted = value.to(target)
        if not bool((converted.isfinite() | ~value.isfinite()).all()):
            raise ValueError(
                f"fastpar export: expected values that {DTYPES[dtype]} holds, got "
                f"{tensor.name} with {float(value.abs().max()):.4g}; use --dtype bf16 or fp32"
            )
        return converted

    return convert


def _take(param: Tensor, master: Tensor) -> Tensor:
    return master


def _stored_layout(name: str, state: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A parameter's state as transformers stores the parameter: without padding, turned."""
    state = state.t() if name.endswith(CONV1D) else state[: shape[0]]
    return state.contiguous()


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
