"""What a checkpoint holds, put together index by index: the oracle of its readers."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from fastpar.checkpoint.manifest import read_manifest
from fastpar.sharding.placements import HOLE


def named_state(model, optimizer):
    """Copies of whole tensors: name -> weight, PARAMETER/ENTRY -> of the optimizer's state."""
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = {name: x.clone() for name, x in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        for entry, value in state.items():
            found[f"{names[params[i]]}/{entry}"] = torch.as_tensor(value).clone()
    return found


def same_weights(a, b):
    """Of two models."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def indices(runs):
    """The index of every element in the whole tensor, HOLE where there is none."""
    return [
        HOLE if run.start == HOLE else run.start + i * run.stride + j
        for run in runs
        for i in range(run.count)
        for j in range(run.length)
    ]


def whole_tensors(path):
    """(key -> weights, PARAMETER/ENTRY -> the optimizer's state), of any layout."""
    path = Path(path)
    manifest = read_manifest(path)
    names = {t.file for t in (*manifest.weights, *manifest.optimizer)}
    files = {name: load_file(path / name) for name in names}
    weights = {t.key: files[t.file][t.key] for t in manifest.weights}
    whole = {}
    for piece in manifest.optimizer:
        values = files[piece.file][piece.key].reshape(-1)
        out = whole.setdefault(piece.key, values.new_zeros(piece.shape)).view(-1)
        out[indices(piece.runs)] = values
    return weights, whole


def bits(path):
    """Digests of the weights and of the optimizer's state."""
    return [hashlib.sha256(save(tensors)).hexdigest() for tensors in whole_tensors(path)]
