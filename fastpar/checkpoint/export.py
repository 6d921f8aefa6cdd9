"""Weights and tokenizer in a folder of their own, in another dtype if asked for."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.checkpoint.manifest import CONFIG, GPT_MODEL, STATE, Manifest, TensorEntry, by_key
from fastpar.checkpoint.tensor_reader import TensorReader, list_plain_tensors
from fastpar.checkpoint.verify import verify_weights
from fastpar.files.dtypes import HF_NAMES, STORED
from fastpar.files.plain_files import read_object
from fastpar.files.tensor_file import Spec, TensorFile
from fastpar.kernels.adamw_storage import master_join
from fastpar.models.hf import (
    EXPERTS,
    INDEX_FILE,
    MASKS,
    PREFIX,
    check_dense,
    index_json,
    is_conv1d,
    save_hf,
)
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
    *,
    average: bool = False,
) -> list[str]:
    """Write what transformers loads of a checkpoint, another folder of transformers, or ckpt.pt.

    Args:
        source: the folder or file; of a checkpoint every byte is compared with its manifest.
        to: folder to make; it appears complete or not at all.
        dtype: of the weights; None leaves their bytes as they are. Where it is another one than
            that of the parameters, their fp32 masters are converted if the optimizer has them.
        say: takes a line on what a ckpt.pt lacks; a warning by default.
        average: write the weights' average, which fastpar train --ema has saved.
    Returns:
        The names of the files.
    Raises:
        ValueError: the folder exists; the source is damaged; a value that dtype cannot hold; no
            average was saved.
    """
    if os.path.lexists(to):
        raise ValueError(
            f"fastpar export: expected a folder that does not exist, got to={to}; choose another"
        )
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        if source.is_file():
            if average:
                raise _no_average(source)
            save_hf(load_nanogpt(source, dtype=dtype, say=say), temporary)
        else:
            _export_folder(source, temporary, dtype, average)
        os.replace(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(os.listdir(to))


def _no_average(source: Path) -> ValueError:
    return ValueError(
        f"fastpar export: expected averages of weights with --ema, got none in {source}; leave "
        "--ema out, or train with --ema 0.999"
    )


def _export_folder(source: Path, to: Path, dtype: torch.dtype | None, average: bool) -> None:
    manifest = verify_weights(source) or list_plain_tensors(source)
    states = by_key(manifest.optimizer)
    if average and not any(key.endswith("/average") for key in states):
        raise _no_average(source)
    config = read_object(source / CONFIG, links=True) if (source / CONFIG).exists() else {}
    if config.get("model_type") == EXPERTS:
        check_dense("fastpar export", config.get("n_expert", 1))
    to.mkdir(parents=True)
    for name in _texts(source, manifest):
        shutil.copyfile(source / name, to / name)
    files: dict[str, list[TensorEntry]] = {}
    for tensor in manifest.weights:
        files.setdefault(tensor.file, []).append(tensor)
    if dtype is None and not average:
        for name in files:
            shutil.copyfile(source / name, to / name)
        return
    with TensorReader(source, manifest) as reader:
        for name, tensors in files.items():
            specs = {t.key: Spec(_target(t, dtype), t.shape) for t in tensors}
            with TensorFile(to / name, specs, {"format": "pt"}) as file:
                for tensor in tensors:
                    file.write(tensor.key, _converted(reader, tensor, states, dtype, average))
    if config and dtype is not None:
        config.pop("dtype", None)  # how newer versions of transformers call it
        _write(to / CONFIG, {**config, "torch_dtype": HF_NAMES[dtype]})
    if len(files) > 1:
        nbytes = [math.prod(t.shape) * _target(t, dtype).itemsize for t in manifest.weights]
        weight_map = {t.key: t.file for t in manifest.weights}
        _write(to / INDEX_FILE, index_json(weight_map, sum(nbytes)))


def _texts(source: Path, manifest: Manifest) -> list[str]:
    if not manifest.files:
        return [name for name in _TEXTS if (source / name).is_file()]
    tensors = {t.file for t in manifest.weights + manifest.optimizer}
    return sorted(manifest.files.keys() - tensors - {STATE})


def _target(tensor: TensorEntry, dtype: torch.dtype | None) -> torch.dtype:
    stored = STORED[tensor.dtype]
    return (
        stored
        if dtype is None or not stored.is_floating_point or tensor.key.endswith(MASKS)
        else dtype
    )


def _converted(
    reader: TensorReader,
    tensor: TensorEntry,
    states: dict[str, list[TensorEntry]],
    dtype: torch.dtype | None,
    average: bool,
) -> Tensor:
    """A weight's values in another dtype, from the fp32 master where there is one."""
    target, value = _target(tensor, dtype), reader.read([tensor])
    if target == value.dtype and not average:
        return value
    gpt = reader.manifest.model == GPT_MODEL  # states have its names and layouts
    name = tensor.key.removeprefix(PREFIX) if gpt else tensor.key
    masters = (("master_weight", _take), ("master_remainder", master_join))
    for entry, join in (("average", _take),) if average else masters:
        if f"{name}/{entry}" in states:
            state = reader.read(states[f"{name}/{entry}"])
            if gpt:  # as transformers stores the parameter: without padding, transposed
                state = state.t() if is_conv1d(name) else state[: tensor.shape[0]]
            value = join(value, state.contiguous())
    converted = value.to(target)
    if not bool((converted.isfinite() | ~value.isfinite()).all()):
        raise ValueError(
            f"fastpar export: expected values that {HF_NAMES[target]} holds, got "
            f"{tensor.key} with {float(value.abs().max()):.4g}; use --dtype bf16 or fp32"
        )
    return converted


def _take(param: Tensor, master: Tensor) -> Tensor:
    return master


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
