"""The commands verify and export for runs, checkpoints and transformers folders."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.checkpoint.manifest import (
    ANY_MODULE,
    CONFIG,
    GPT_MODEL,
    MANIFEST,
    STATE,
    Manifest,
    TensorEntry,
    VersionError,
    by_key,
    read_manifest,
)
from fastpar.checkpoint.reader import (
    TensorReader,
    find_damage,
    is_checkpoint,
    list_plain_tensors,
    verify_weights,
)
from fastpar.files.plain_files import printable, read_object, reason, shown
from fastpar.files.runs import is_step_name, linked, list_checkpoints
from fastpar.files.tensor_file import HF_NAMES, STORED, Spec, TensorFile
from fastpar.kernels.adamw import master_join
from fastpar.models.hf import (
    EXPERTS,
    INDEX_FILE,
    MASKS,
    OWN,
    PREFIX,
    WEIGHTS_FILE,
    check_dense,
    index_json,
    is_conv1d,
    load_hf,
    save_hf,
)
from fastpar.models.nanogpt import load_nanogpt
from fastpar.sharding.placements import whole_run


class Report(NamedTuple):
    """Facts about a folder, and its damage."""

    folder: Path
    facts: list[str]
    damage: list[str]


def find_folders(caller: str, folder: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first; or the folder itself, if it is one or has weights.

    Raises:
        ValueError: neither of these, or unreadable.
    """
    folder = linked(folder)
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        why = reason(error).replace("no such file", "no such folder")
        raise ValueError(
            f"{caller}: expected a run, a checkpoint or a transformers folder, got folder={folder} "
            f"({why}); name one that exists and is readable"
        ) from error
    if names & {MANIFEST, WEIGHTS_FILE, INDEX_FILE}:
        return [folder]
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints
    real = folder.resolve()
    if is_step_name(real.name) and real.parent.name == "checkpoints":
        return [folder]
    raise ValueError(
        f"{caller}: expected a run with checkpoints, a checkpoint or a transformers folder, got "
        f"folder={folder} with {', '.join(sorted(names)[:4]) or 'nothing'}; name one of these"
    )


def verify(folder: str | Path, say: Callable[[str], None], pattern: str | None = None) -> bool:
    """Read and check every byte of every checkpoint, print a report; whether all are undamaged.

    Args:
        pattern: then a table of the tensors whose name matches it (*, ?) or contains it, in the
            newest checkpoint.
    Raises:
        ValueError: see find_folders; no such tensor.
    """
    folders = find_folders("fastpar verify", folder)
    reports = []
    for one in folders:
        report = examine(one)
        if report.damage and not one.exists():
            say(f"{one}: removed by its run meanwhile")
            continue
        reports.append(report)
        say(f"{one}: {'DAMAGED' if report.damage else 'ok'}")
        for line in report.damage + report.facts:
            say(f"  {line}")
    if pattern is not None and reports and not reports[-1].damage:
        for line in _table(reports[-1].folder, pattern):
            say(line)
    return not any(report.damage for report in reports)


def _manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; for a transformers folder one without files."""
    return read_manifest(folder) if is_checkpoint(folder) else list_plain_tensors(folder)


def examine(folder: Path) -> Report:
    """Facts and damage of one checkpoint or transformers folder."""
    start = time.perf_counter()
    try:
        manifest = _manifest(folder)
        damage = find_damage(folder, manifest) if manifest.files else []
        if damage:
            return Report(folder, [], list(map(str, damage)))
        facts = _facts(folder, manifest)
    except VersionError:
        raise
    except ValueError as error:
        return Report(folder, [], [str(error)])
    if not manifest.files:
        facts.append("no manifest: checked names, shapes and sizes, but there are no checksums")
    else:
        size = sum(entry.size for entry in manifest.files.values())
        seconds = time.perf_counter() - start
        facts.append(f"{size / 1e6:,.1f} MB in {len(manifest.files)} files read in {seconds:.2f} s")
        extra = sorted(set(os.listdir(folder)) - {*manifest.files, MANIFEST})
        if extra:
            facts.append(f"other files: {', '.join(map(shown, extra[:8]))}")
    return Report(folder, facts, [])


def _facts(folder: Path, manifest: Manifest) -> list[str]:
    """Facts about a folder."""
    facts: list[str] = []
    if manifest.files:
        tokens = read_object(folder / STATE).get("tokens")
        facts.append(
            f"step {manifest.step:,}" + (f", {tokens:,} tokens" if type(tokens) is int else "")
        )
    weights, states = manifest.weights, by_key(manifest.optimizer)
    own = bool(manifest.files) and manifest.model == ANY_MODULE
    numel = sum(math.prod(t.shape) for t in weights)
    dtypes = ", ".join(sorted({str(STORED[t.dtype]).removeprefix("torch.") for t in weights}))
    facts.append(
        f"weights: {len(weights)} tensors, {numel:,} elements of {dtypes}, {_mb(weights)} in "
        f"{_files(weights)}, named as in " + ("the module" if own else "transformers")
    )
    if states:
        entries = printable(", ".join(dict.fromkeys(key.rpartition("/")[2] for key in states)))
        pieces = manifest.optimizer
        facts.append(
            f"optimizer: {len(states)} tensors ({entries}), {_mb(pieces)} in {len(pieces)} pieces "
            f"in {_files(pieces)}"
        )
    return facts


def _mb(tensors: tuple[TensorEntry, ...]) -> str:
    return f"{sum(t.nbytes for t in tensors) / 1e6:,.1f} MB"


def _files(tensors: tuple[TensorEntry, ...]) -> str:
    n = len({t.file for t in tensors})
    return f"{n} file{'s' * (n > 1)}"


def _table(folder: Path, pattern: str) -> Iterator[str]:
    """Tensors with statistics of their finite elements, and the number of nonfinite ones."""
    manifest = _manifest(folder)
    everything = [*by_key(manifest.weights).items(), *by_key(manifest.optimizer).items()]
    tensors = [(k, t) for k, t in everything if fnmatchcase(k, pattern) or pattern in k]
    if not tensors:
        raise ValueError(
            f"fastpar verify: expected a name or pattern of tensors in {folder}, got "
            f"tensors={pattern}; the first tensor is "
            + (shown(everything[0][0]) if everything else "none")
        )

    def place(tensor: tuple[str, list[TensorEntry]]) -> tuple[bool, list[tuple[str, int]]]:
        """Sort key: weights before states, states in the file's order, layer 2 before layer 10."""
        parts = re.findall(r"(\D*)(\d*)", tensor[0].rpartition("/")[0] or tensor[0])
        return "/" in tensor[0], [(text, int(digits or -1)) for text, digits in parts]

    tensors.sort(key=place)
    rows = [
        (printable(key), str(list(t[0].shape)), str(STORED[t[0].dtype]).removeprefix("torch."))
        for key, t in tensors
    ]
    a, b, c = (max(map(len, column)) for column in zip(("", "shape", "dtype"), *rows))
    names = "".join(f"{name:>12}" for name in ("norm", "min", "mean", "max"))
    yield f"{'tensor':{a}}  {'shape':{b}}  {'dtype':{c}}{names}  nonfinite"
    with TensorReader(folder, manifest) as reader:
        for (key, shape, dtype), (_, pieces) in zip(rows, tensors):
            x = reader.gather(pieces, whole_run(math.prod(pieces[0].shape)))
            x = (torch.view_as_real(x).view(-1) if x.is_complex() else x).double()
            finite = x[x.isfinite()]
            stats = [finite.norm().item(), *[math.nan] * 3]
            if len(finite):
                stats[1:] = (f(finite).item() for f in (torch.min, torch.mean, torch.max))
            numbers = "".join(f"{value:12.4g}" for value in stats)
            yield f"{key:{a}}  {shape:{b}}  {dtype:{c}}{numbers}  {len(x) - len(finite):9}"


# Text files that transformers' from_pretrained reads.
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
    """Write the weights of a checkpoint, a transformers folder or ckpt.pt for transformers.

    Args:
        source: the folder or file; every byte of a checkpoint is compared with its manifest.
        to: folder to create; it appears complete or not at all.
        dtype: format of the weights; None: unchanged. If it differs from that of the parameters,
            their fp32 masters are converted if the optimizer has them.
        say: called with a line about what a ckpt.pt lacks; None: a warning.
        average: write the moving average of the weights, saved by fastpar train --ema.
    Returns:
        The names of the files.
    Raises:
        ValueError: the folder exists; the source is damaged; dtype cannot hold a value; no average
            was saved.
    """
    source = linked(source)
    if os.path.lexists(to):
        raise ValueError(
            f"fastpar export: expected a new folder, got to={to}, which exists; choose another"
        )
    if average and source.is_file():
        raise _no_average(source)
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        if source.is_file():
            save_hf(load_nanogpt(source, dtype=dtype, say=say), temporary)
        else:
            _export_folder(source, temporary, dtype, average)
        os.replace(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(os.listdir(to))


def _no_average(source: Path) -> ValueError:
    return ValueError(
        f"fastpar export: expected averaged weights with --ema, got none in {source}; drop --ema, "
        "or train with --ema 0.999"
    )


def _export_folder(source: Path, to: Path, dtype: torch.dtype | None, average: bool) -> None:
    manifest = verify_weights(source) or list_plain_tensors(source)
    states = by_key(manifest.optimizer)
    if average and not any(key.endswith("/average") for key in states):
        raise _no_average(source)
    config = read_object(source / CONFIG, links=True) if (source / CONFIG).exists() else {}
    if config.get("model_type") in (EXPERTS, OWN):
        check_dense("fastpar export", config.get("n_expert", 1))
    if config.get("model_type") == OWN:
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f"{to.name}.") as folder:
            _write_folder(source, Path(folder) / "own", manifest, states, config, dtype, average)
            ids: dict[str, Any] = {
                f"{end}_token_id": config.get(f"{end}_token_id") for end in ("bos", "eos")
            }
            save_hf(load_hf(Path(folder) / "own"), to, **ids)
        for name in _texts(source, manifest):
            if name != CONFIG:
                shutil.copyfile(source / name, to / name)
        return
    _write_folder(source, to, manifest, states, config, dtype, average)


def _write_folder(
    source: Path,
    to: Path,
    manifest: Manifest,
    states: dict[str, Any],
    config: dict[str, Any],
    dtype: torch.dtype | None,
    average: bool,
) -> None:
    """The folder's files in their own format."""
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
        config.pop("dtype", None)  # its name in newer versions of transformers
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
    kept = stored.itemsize == 1 or not stored.is_floating_point or tensor.key.endswith(MASKS)
    return stored if dtype is None or kept else dtype


def _converted(
    reader: TensorReader,
    tensor: TensorEntry,
    states: dict[str, list[TensorEntry]],
    dtype: torch.dtype | None,
    average: bool,
) -> Tensor:
    """A weight's values in another dtype, from the fp32 master if there is one."""
    target, value = _target(tensor, dtype), reader.read([tensor])
    if target == value.dtype and not average:
        return value
    gpt = reader.manifest.model == GPT_MODEL  # then states have the GPT's names and layouts
    name = tensor.key.removeprefix(PREFIX) if gpt else tensor.key
    for entry in ("average",) if average else ("master_weight", "master_remainder"):
        if f"{name}/{entry}" in states:
            state = reader.read(states[f"{name}/{entry}"])
            if gpt:  # to transformers' layout: without padding, transposed
                state = state.t() if is_conv1d(name) else state[: tensor.shape[0]]
            state = state.contiguous()
            value = master_join(value, state) if entry == "master_remainder" else state
    converted = value.to(target)
    if not bool((converted.isfinite() | ~value.isfinite()).all()):
        raise ValueError(
            f"fastpar export: expected values in the range of {HF_NAMES[target]}, got "
            f"{tensor.key} with {float(value.abs().max()):.4g}; use --dtype bf16 or fp32"
        )
    return converted


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
