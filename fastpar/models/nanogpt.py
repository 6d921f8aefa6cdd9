"""Reads nanoGPT's ckpt.pt as a GPT. Nothing in it is executed: torch.load with weights_only=True.

nanoGPT has transformers' names with the matrices of nn.Linear, [out, in] as here. The head is tied,
old files hold causal masks as buffers, those of compiled models a prefix. Rows that pad its
vocabulary (50304 for GPT-2's 50257 tokens) are ordinary weights that take part in its softmax, so
they are kept unless vocab_size gives the number of tokens. A model without biases, nanoGPT's
default, gets biases of 0, which change no output and are trained like others. Newer nanoGPT
computes GELU by erf, this model by tanh as GPT-2 does; the loss differs in the fourth digit
(test_the_loss_is_nanogpts).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.files.plain_files import open_plain, reason, shown
from fastpar.models.gpt import GPT
from fastpar.models.hf import PREFIX, build_model, is_conv1d
from fastpar.settings.model import GPTConfig

COMPILED = "_orig_mod."
_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


def load_nanogpt(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    dropout: float | None = None,
    vocab_size: int | None = None,
    say: Callable[[str], None] | None = None,
) -> GPT:
    """Reads the ckpt.pt that nanoGPT's train.py writes.

    Args:
        path: the file.
        dtype: of the parameters; default: the file's.
        dropout: replaces the file's rate.
        vocab_size: rows of the embedding to keep; default: all.
        say: called with a line if biases of 0 were added; default: a warning.
    Returns:
        The model, on the CPU, in training mode.
    Raises:
        ValueError: a damaged file, anything but plain data, or another model; a vocab_size above
            the file's; see also load_hf_tensors.
    """
    path = Path(path)
    content = _load(path)
    sizes, tensors = _parts(content, path)
    n = sizes["vocab_size"] if vocab_size is None else vocab_size
    if not 1 <= n <= sizes["vocab_size"]:
        raise ValueError(
            f"load_nanogpt: expected 1 <= vocab_size <= {sizes['vocab_size']}, got vocab_size={n}; "
            "leave it out to keep all rows"
        )
    config = GPTConfig(
        **{name: sizes[name] for name in _SIZES[:-1]},
        vocab_size=n,
        dropout=sizes.get("dropout", 0.0) if dropout is None else dropout,
    )
    cut = (f"{PREFIX}wte.weight", "lm_head.weight")
    given = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(COMPILED)
        if tensor.dim() == 2:
            if name in cut and len(tensor) == sizes["vocab_size"]:
                tensor = tensor[:n]
            tensor = tensor.t() if is_conv1d(name) else tensor
        given[name] = tensor
    if sizes.get("bias") is False:
        added = _zero_biases(given)
        text = f"{path} has no biases; added {len(added)} biases of 0, which change no output"
        say(text) if say is not None else warnings.warn(f"load_nanogpt: {text}", stacklevel=2)
        given |= added
    return build_model("load_nanogpt", path, config, given, dtype)


def _zero_biases(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """A zero bias for every norm and matrix without one, except embeddings and the head."""
    added = {}
    for name, weight in given.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or not weight.dim() or stem.endswith(("wte", "wpe", "lm_head")):
            continue
        if f"{stem}.bias" not in given:
            added[f"{stem}.bias"] = weight.new_zeros(weight.shape[-1])
    return added


def _load(path: Path) -> Any:
    try:
        os.close(open_plain(path, links=True))
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        why: Exception = error
        problem = reason(error)
    except Exception as error:  # the unpickler may raise anything for a damaged file
        requested = re.search(r"GLOBAL ([\w.]+)", str(error))  # in torch's long message
        why, problem = error, shown(f"{type(error).__name__}: {error}".splitlines()[0])
        if requested:
            problem = f"it contains a {requested[1]} object; save plain numbers instead"
    raise ValueError(
        f"load_nanogpt: expected a ckpt.pt of tensors and plain values, got {path} ({problem}); "
        "pass the ckpt.pt that nanoGPT's train.py writes (nothing in it is executed)"
    ) from why


def _parts(content: Any, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """model_args and the state dict, with checked types."""
    given = content if isinstance(content, dict) else {}
    sizes, tensors = given.get("model_args"), given.get("model")
    if isinstance(sizes, dict) and isinstance(tensors, dict):
        problem = _problem(sizes, tensors)
        if problem is None:
            return sizes, tensors
    else:
        problem = "no model and model_args"
    raise ValueError(
        f"load_nanogpt: expected the model_args and weights of nanoGPT, got {path} ({problem}); "
        "pass the ckpt.pt that its train.py writes"
    )


def _problem(sizes: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
    for name in _SIZES:
        if type(sizes.get(name)) is not int:
            return f"{name}={shown(sizes.get(name))}"
    if type(sizes.get("bias", True)) is not bool:
        return f"bias={shown(sizes['bias'])}"
    if type(sizes.get("dropout", 0.0)) not in (int, float):
        return f"dropout={shown(sizes['dropout'])}"
    for key, tensor in tensors.items():
        if not isinstance(key, str) or type(tensor) is not Tensor:
            return f"{shown(key)} of type {type(tensor).__name__}"
        if tensor.layout != torch.strided or tensor.is_meta:
            return f"{key} that is not a plain tensor"
    return None
