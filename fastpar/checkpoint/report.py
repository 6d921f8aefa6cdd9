"""What fastpar verify and fastpar inspect print of a run, a checkpoint or a transformers folder."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch

from fastpar.checkpoint.folder_tensors import StoredTensor, stored_tensors
from fastpar.checkpoint.manifest import ANY_MODULE, CONFIG, MANIFEST, STATE, Manifest, read_manifest
from fastpar.checkpoint.verify import extra_files, find_damage
from fastpar.files.plain_files import read_object, shown
from fastpar.files.step_folders import list_checkpoints
from fastpar.models.gpt import GPT
from fastpar.models.hf import CONV1D, INDEX_FILE, MASKS, PREFIX, REQUIRED, WEIGHTS_FILE, read_config

_STEP = re.compile(r"step_(\d{6,})")


class Report(NamedTuple):
    """What is in a folder."""

    folder: Path
    facts: list[str]
    damage: list[str]


def find_folders(caller: str, folder: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first; or the folder, if it is one or has weights.

    Raises:
        ValueError: it is neither, or cannot be read.
    """
    folder = Path(folder)
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        why = "no such folder" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(
            f"{caller}: expected a run, a checkpoint or a folder of transformers, got "
            f"folder={folder} ({why}); give one that can be read"
        ) from error
    if names & {MANIFEST, WEIGHTS_FILE, INDEX_FILE}:
        return [folder]
    found = list_checkpoints(folder)
    if found:
        return found
    if _STEP.fullmatch(folder.resolve().name) and folder.resolve().parent.name == "checkpoints":
        return [folder]
    raise ValueError(
        f"{caller}: expected a run with checkpoints, a checkpoint or a folder of transformers, got "
        f"folder={folder} with {', '.join(sorted(names)[:4]) or 'nothing'}; give one of these"
    )


def verify(folder: str | Path, say: Callable[[str], None]) -> bool:
    """Read every byte of every checkpoint, say what is there; whether all of it is sound.

    Raises:
        ValueError: see find_folders.
    """
    folders = find_folders("fastpar verify", folder)
    reports = []
    for one in folders:
        report = examine(one)
        reports.append(report)
        say(f"{one}: {'DAMAGED' if report.damage else 'sound'}")
        for line in report.damage + report.facts:
            say(f"  {line}")
    damaged = [report for report in reports if report.damage]
    if damaged:
        say(_instead(damaged[-1].folder, reports))
    return not damaged


def _instead(damaged: Path, reports: list[Report]) -> str:
    """Which checkpoint to go on from."""
    sound = [report.folder for report in reports if not report.damage]
    if len(reports) == 1:  # look at the others of its run
        folders = list_checkpoints(damaged.resolve().parent.parent)
        others = (p for p in reversed(folders) if p.name != damaged.resolve().name)
        sound = [p for p in others if not examine(p).damage][:1]
    if not sound:
        return "there is no sound checkpoint beside it"
    return f"use {sound[-1]}, the newest that is sound"


def _manifest(folder: Path) -> Manifest | None:
    """A checkpoint's; None of a folder of transformers."""
    if os.path.lexists(folder / MANIFEST) or _STEP.fullmatch(folder.resolve().name):
        return read_manifest(folder)
    return None


def examine(folder: Path) -> Report:
    """Facts and damage of one checkpoint or folder of transformers."""
    start = time.perf_counter()
    try:
        manifest = _manifest(folder)
        damage = [] if manifest is None else list(map(str, find_damage(folder, manifest)[0]))
        if damage:
            return Report(folder, [], damage)
        tensors = stored_tensors(folder, manifest)
        facts, damage = _facts(folder, manifest, tensors)
    except ValueError as error:
        return Report(folder, [], [str(error)])
    if manifest is None:
        facts.append("no manifest: names, shapes and sizes were compared, there are no checksums")
    else:
        size = sum(entry.size for entry in manifest.files.values())
        seconds = time.perf_counter() - start
        facts.append(f"{_mb(size)} in {len(manifest.files)} files read in {seconds:.2f} s")
        extra = extra_files(folder, manifest, MANIFEST)
        if extra:
            facts.append(f"not part of it: {', '.join(map(shown, extra[:8]))}")
    return Report(folder, facts, damage)


def _facts(
    folder: Path, manifest: Manifest | None, tensors: list[StoredTensor]
) -> tuple[list[str], list[str]]:
    """What is there; and what of it does not go together."""
    facts, damage = [], []
    if manifest is not None:
        state = _state(folder / STATE)
        if state.get("step", manifest.step) != manifest.step:
            damage.append(f"{STATE} (step {shown(state['step'])}, {manifest.step} in {MANIFEST})")
        tokens = state.get("tokens")
        facts.append(
            f"step {manifest.step:,}" + (f", {tokens:,} tokens" if type(tokens) is int else "")
        )
    states = {t.key for t in manifest.optimizer} if manifest else set()
    weights = [t for t in tensors if t.name not in states]
    own = manifest is not None and manifest.model == ANY_MODULE
    if os.path.lexists(folder / CONFIG):
        foreign = _foreign(read_object(folder / CONFIG, links=True)) if manifest is None else None
        if own or foreign:
            facts.append(f"{CONFIG} {foreign or 'of another module'}, which was not compared")
        else:
            model, problems = _compare(folder, weights, states)
            facts.append(model)
            damage += problems
    if own:
        names = {t.name for t in weights}
        strange = sorted(key for key in states if key.rpartition("/")[0] not in names)
        damage += [f"state of {key} for a model without this parameter" for key in strange]
    numel = sum(math.prod(t.shape) for t in weights)
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in weights}))
    files = len({piece.path for t in weights for piece in t.pieces})
    facts.append(
        f"weights: {len(weights)} tensors, {numel:,} elements of {dtypes}, {_mb(_nbytes(weights))} "
        f"in {files} file{'s' * (files > 1)}, whole, by "
        + ("the module's own names" if own else "transformers' names")
    )
    moments = [t for t in tensors if t.name in states]
    if moments:
        entries = ", ".join(dict.fromkeys(t.name.rpartition("/")[2] for t in moments))
        pieces = [piece for t in moments for piece in t.pieces]
        files = len({piece.path for piece in pieces})
        facts.append(
            f"optimizer: {len(moments)} tensors ({entries}), {_mb(_nbytes(moments))} in "
            f"{len(pieces)} pieces in {files} file{'s' * (files > 1)}, by name and index: any "
            "mesh reads them"
        )
    return facts, damage


def _state(path: Path) -> dict[str, object]:
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"{path.name} ({error})") from error


def _foreign(raw: dict[str, object]) -> str | None:
    """What makes a config.json of transformers that of another model than ours."""
    if raw.get("model_type") != "gpt2":
        return f"of model_type {shown(raw.get('model_type'))}"
    if raw.get("architectures") not in (None, [], ["GPT2LMHeadModel"], ["GPT2Model"]):
        return f"of architectures {shown(raw['architectures'])}"
    for name, allowed in REQUIRED.items():
        if raw.get(name) not in allowed:
            return f"with {name}={shown(raw[name])}"
    return None


def _compare(folder: Path, weights: list[StoredTensor], states: set[str]) -> tuple[str, list[str]]:
    """The GPT-2 that config.json describes; and where it is not that of the tensors."""
    config = read_config(folder, dropout=0.0)
    line = (
        f"GPT-2 with {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
        f"context {config.block_size}, vocabulary {config.vocab_size}"
    )
    if config.n_layer > len(weights):
        return line, [f"{CONFIG} with {config.n_layer} layers for {len(weights)} weights"]
    with torch.device("meta"):
        model = GPT(config)
    shapes = {}
    for name, p in model.named_parameters():
        shape = (config.vocab_size, *p.shape[1:]) if name == "wte.weight" else tuple(p.shape)
        shapes[name] = shape[::-1] if name.endswith(CONV1D) else shape
    found = {t.name.removeprefix(PREFIX): t.shape for t in weights if not t.name.endswith(MASKS)}
    if "lm_head.weight" in found:  # tied
        found.setdefault("wte.weight", found.pop("lm_head.weight"))
        found.pop("lm_head.weight", None)
    problems = []
    for name in [*shapes, *sorted(found.keys() - shapes.keys())]:
        if shapes.get(name) != found.get(name):
            wanted, got = shapes.get(name), found.get(name)
            problems.append(
                f"{PREFIX}{name} of shape {got and list(got)} where {CONFIG} has "
                f"{wanted and list(wanted)}"
            )
    for key in sorted(states):
        if key.rpartition("/")[0] not in shapes:
            problems.append(f"state of {key} for a model without this parameter")
    return line, problems


def _nbytes(tensors: list[StoredTensor]) -> int:
    return sum(piece.place.stop - piece.place.start for t in tensors for piece in t.pieces)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


class Stats(NamedTuple):
    """Of a tensor's elements; all but nonfinite of the finite ones."""

    norm: float
    low: float
    mean: float
    high: float
    nonfinite: int


def stats_of(tensor: StoredTensor) -> Stats:
    """Read a tensor once, in chunks.

    Raises:
        ValueError: it is damaged.
    """
    total = squares = 0.0
    low, high, n, nonfinite = math.inf, -math.inf, 0, 0
    for chunk in tensor.chunks():
        values = chunk.double()
        finite = values[values.isfinite()]
        nonfinite += len(values) - len(finite)
        n += len(finite)
        if len(finite):
            total += float(finite.sum())
            squares += float(finite.square().sum())
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if not n:
        return Stats(0.0, math.nan, math.nan, math.nan, nonfinite)
    return Stats(math.sqrt(squares), low, total / n, high, nonfinite)


def inspect(folder: str | Path, pattern: str | None, say: Callable[[str], None]) -> None:
    """A table of a checkpoint's tensors, of a run's newest.

    Args:
        folder: of a run, a checkpoint or transformers weights.
        pattern: tensors whose name matches it (*, ?) or contains it; None: all.
        say: takes the lines.
    Raises:
        ValueError: no such folder, no tensor of this name, damage in what was read.
    """
    folder = find_folders("fastpar inspect", folder)[-1]
    everything = stored_tensors(folder, _manifest(folder))
    tensors = [t for t in everything if pattern is None or _matches(t.name, pattern)]
    # Weights, then states; a state's entries in the file's order.
    tensors.sort(key=lambda t: ("/" in t.name, _natural(t.name.rpartition("/")[0] or t.name)))
    if not tensors:
        raise ValueError(
            f"fastpar inspect: expected a name or pattern of tensors in {folder}, got "
            f"filter={pattern}; its first is {everything[0].name if everything else 'none'}"
        )
    say(str(folder))
    for line in _table(tensors):
        say(line)


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts layer 2 before layer 10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or pattern in name


def _table(tensors: list[StoredTensor]) -> Iterator[str]:
    shapes = [str(list(t.shape)) for t in tensors]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
    a = max(len(t.name) for t in tensors)
    b, c = max(map(len, [*shapes, "shape"])), max(map(len, [*dtypes, "dtype"]))
    numbers = "".join(f"{name:>12}" for name in ("norm", "min", "mean", "max"))
    yield f"{'tensor':{a}}  {'shape':{b}}  {'dtype':{c}}{numbers}  nonfinite"
    for tensor, shape, dtype in zip(tensors, shapes, dtypes):
        stats = stats_of(tensor)
        numbers = "".join(f"{value:12.4g}" for value in stats[:4])
        yield f"{tensor.name:{a}}  {shape:{b}}  {dtype:{c}}{numbers}  {stats.nonfinite:9}"
