"""Checkpoints: a folder per step that transformers loads, committed whole or not at all.

    checkpoints/step_000500/  config.json, model.safetensors (or shards), the tokenizer's files
                              optimizer.safetensors   PARAMETER/exp_avg, /exp_avg_sq, ... by name
                              trainer_state.json      step, sample index, RNG, loss scale, ...
                              manifest.json           size and sha256 of every file above

[Note: commit] Everything is written into a hidden folder, each file is flushed to disk, the
manifest comes last, and one rename makes the folder visible under its name. A crash at any moment
leaves the older checkpoints as they are and at most a hidden folder, which the next save removes.
Reading starts with the manifest: what it does not list is not read, what does not match it is
refused by name (test_damage_is_named).

[Note: shards]
A checkpoint holds whole tensors whatever the ranks shared out, so it goes on at another stage or
number of ranks. Rank 0 writes while all ranks gather one tensor after another, in the order of
_whole_tensors; if its disk fails, it still takes part in what is left of them, or its peers would
wait for it for ever (test_a_full_disk_is_learned_by_all_ranks). On the way back each rank reads the
files and keeps its part.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.adafactor import Adafactor
from fastpar.engine import Engine, engine_of_parameter
from fastpar.hf import load_hf_tensors, save_hf
from fastpar.model import GPT
from fastpar.optim import AdamW
from fastpar.tensor_file import Spec, TensorFile

FORMAT = "fastpar-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
LATEST = "latest"
_STEP = re.compile(r"step_\d{6,}")
_READ_BYTES = 1 << 22


def save_checkpoint(
    run: str | Path | None,
    *,
    step: int,
    model: GPT,
    optimizer: AdamW | Adafactor,
    tokenizer: Any,
    state: dict[str, Any],
    keep_last: int = 0,
) -> Path | None:
    """Writes run/checkpoints/step_NNNNNN, then points the link run/latest at it.

    Args:
        run: folder of the run; only rank 0 needs it, as all that is written.
        step: optimizer steps done.
        tokenizer: has save(folder) and eot; None saves none.
        state: JSON values, back from load_checkpoint as they are.
        keep_last: afterwards only so many newest checkpoints are kept; 0 keeps all.
    Returns:
        The checkpoint's folder, on rank 0. One of the same step that was there before is replaced.
    Raises:
        OSError: on rank 0, the disk is full or not writable; older checkpoints are as before.
    Ranks: all of the model's; nobody may read the folder before rank 0 returns.
    Wire: at stages 1 to 3 the weights and the optimizer's state, one tensor after another.
    """
    tensors = _whole_tensors(model, optimizer)
    engine = _engine(model)
    if engine is not None and not engine.mesh.is_main:
        deque(tensors, maxlen=0)
        return None
    assert run is not None
    try:
        return _write(Path(run), step, model, optimizer, tokenizer, state, keep_last, tensors)
    except Exception:
        deque(tensors, maxlen=0)  # the other ranks gather them with this one
        raise


def _write(
    run: Path,
    step: int,
    model: GPT,
    optimizer: AdamW | Adafactor,
    tokenizer: Any,
    state: dict[str, Any],
    keep_last: int,
    tensors: Iterator[tuple[str, Any]],
) -> Path:
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)
    final = checkpoint_folder(run, step)
    temporary = folder / f".{final.name}.tmp"
    try:
        eot = getattr(tokenizer, "eot", None)
        save_hf(
            model,
            temporary,
            bos_token_id=eot,
            eos_token_id=eot,
            whole=lambda p: next(tensors)[1],
        )
        if tokenizer is not None:
            tokenizer.save(temporary)
        with TensorFile(temporary / OPTIMIZER, optimizer_specs(model, optimizer)) as file:
            for name, tensor in tensors:
                file.write(name, tensor)
        state = {"step": step, "model": asdict(model.config), **state}
        (temporary / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        _write_manifest(temporary, step)
        _flush(temporary)
        if final.exists():
            os.replace(final, folder / f".{final.name}.replaced.tmp")
        os.replace(temporary, final)
        _flush(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _point_latest(run, final)
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep_last:
        for old in list_checkpoints(run)[:-keep_last]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _whole_tensors(model: GPT, optimizer: AdamW | Adafactor) -> Iterator[tuple[str, Any]]:
    """Weights by parameter, then the optimizer's entries; nothing but names off rank 0. Ranks: all.

    The order is that in which save_hf and _write ask for them.
    """
    engine = _engine(model)
    for name, p in model.named_parameters():
        yield name, _whole(p, engine)
    for name, p in model.named_parameters():
        for entry, value in optimizer.whole_entries(p):
            yield f"{name}/{entry}", value


def _whole(p: nn.Parameter, engine: Engine | None) -> Any:
    if engine is None or not engine.shares:
        return p
    if p.requires_grad:
        return engine.full_on_main(engine.piece(p).param, p)
    return p if engine.declared is None else engine.declared.whole(p.detach(), p)


def _engine(model: nn.Module) -> Engine | None:
    found = (engine_of_parameter(p) for p in model.parameters())
    return next((engine for engine in found if engine is not None), None)


def load_checkpoint(
    path: str | Path,
    *,
    model: GPT,
    optimizer: AdamW | Adafactor | None = None,
) -> dict[str, Any]:
    """Puts a verified checkpoint's weights and moments into the model and the optimizer.

    Args:
        path: a folder that verify_checkpoint accepted.
        model: of the same shape; its tensors are written in place, dtype converted.
        optimizer: of the model's parameters; None loads weights only. Each rank keeps its part.
    Returns:
        The `state` of save_checkpoint, with "step" and "model".
    Raises:
        ValueError: another model or other optimizer state; names the first difference. Nothing is
            changed then.
    Ranks: all of the model's.
    """
    from safetensors.torch import load_file

    path = Path(path)
    engine = _engine(model)
    state = read_state(path)
    ours = asdict(model.config)
    for name, theirs in state["model"].items():
        if name != "dropout" and ours.get(name) != theirs:
            raise ValueError(
                f"load_checkpoint: expected the model of {path} with {name}={theirs}, got "
                f"{name}={ours.get(name)}; resume with the run's own settings, or start a new run "
                f"with --init-from {path}"
            )
    weights: dict[str, Tensor] = {}
    for name in _read_manifest(path)["files"]:
        if re.fullmatch(r"model.*\.safetensors", name):
            weights.update(load_file(path / name))
    moments = load_file(path / OPTIMIZER) if optimizer is not None else {}
    if optimizer is not None:
        _check_moments(path, model, optimizer, moments)
    with contextlib.nullcontext() if engine is None else engine.gathered():
        load_hf_tensors(model, weights)
    if optimizer is not None:
        parameters = dict(model.named_parameters())
        for key, tensor in moments.items():
            name, _, entry = key.rpartition("/")
            optimizer.load_entry(parameters[name], entry, tensor)
    return state


def read_state(path: str | Path) -> dict[str, Any]:
    """trainer_state.json of a checkpoint."""
    return json.loads((Path(path) / STATE).read_text(encoding="utf-8"))


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run) / "checkpoints" / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done at a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """Committed checkpoints of a run by step, oldest first; not verified."""
    found = (Path(run) / "checkpoints").glob("step_*")
    return sorted((p for p in found if _STEP.fullmatch(p.name) and p.is_dir()), key=step_of)


def newest_checkpoint(run: str | Path, say: Callable[[str], None] = print) -> Path:
    """The newest checkpoint of a run that verifies; each damaged one on the way is named by `say`.

    Raises:
        ValueError: there is none.
    """
    problems = []
    for path in reversed(list_checkpoints(run)):
        try:
            verify_checkpoint(path)
        except ValueError as error:
            problems.append(str(error))
            say(f"damaged, trying the one before: {error}")
            continue
        return path
    raise ValueError(
        f"newest_checkpoint: expected a run with a complete checkpoint, got run={run} with "
        + (f"damaged ones only; the newest: {problems[0]}" if problems else "none; start a new run")
    )


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads every byte of a checkpoint and compares it with the manifest, which is returned.

    Raises:
        ValueError: not a checkpoint, one of a later version, or a file that is missing, truncated
            or changed; names the file.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size"]:
            got = "no such file" if size is None else f"{size} bytes"
            raise ValueError(
                f"verify_checkpoint: expected {entry['size']} bytes in {file}, got {got}; "
                "the checkpoint is damaged, use another one"
            )
        if _sha256(file) != entry["sha256"]:
            raise ValueError(
                f"verify_checkpoint: expected {file} as its manifest has it, got "
                "other content; the checkpoint is damaged, use another one"
            )
    return manifest


def optimizer_specs(model: GPT, optimizer: AdamW | Adafactor) -> dict[str, Spec]:
    """PARAMETER/ENTRY -> dtype and whole shape, of every entry of the optimizer's state."""
    specs = {}
    for name, p in model.named_parameters():
        shapes = optimizer.entry_shapes(p)
        for entry, value in optimizer.state.get(p, {}).items():
            dtype = value.dtype if isinstance(value, Tensor) else torch.float64
            specs[f"{name}/{entry}"] = Spec(dtype, shapes.get(entry, getattr(value, "shape", ())))
    return specs


def rng_state() -> dict[str, str]:
    """State of torch's generators on this process, as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(bytes(v.tolist())).decode() for k, v in states.items()}


def set_rng_state(state: dict[str, str]) -> None:
    """Back to what rng_state() returned."""
    for key, text in state.items():
        value = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if key == "cpu":
            torch.set_rng_state(value)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(value)


def _check_moments(
    path: Path, model: GPT, optimizer: AdamW | Adafactor, moments: dict[str, Tensor]
) -> None:
    expected = optimizer_specs(model, optimizer)
    shapes = {
        f"{name}/{entry}": shape
        for name, p in model.named_parameters()
        for entry, shape in optimizer.entry_shapes(p).items()
    }
    for key in sorted(expected.keys() ^ moments.keys()) if expected else ():
        raise ValueError(
            f"load_checkpoint: expected the optimizer's state in {path / OPTIMIZER}, got "
            f"{'no' if key in expected else 'also'} {key}; resume with the run's own settings"
        )
    for key, tensor in moments.items():
        shape = shapes.get(key)
        if tensor.shape != shape:
            raise ValueError(
                f"load_checkpoint: expected {key} of shape {shape and list(shape)}, got "
                f"shape={list(tensor.shape)} in {path / OPTIMIZER}; resume with the run's own "
                "settings"
            )


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
    (folder / MANIFEST).write_bytes(_sealed(manifest))


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    problem = None
    manifest: Any = None
    try:
        content = file.read_bytes()
        manifest = json.loads(content)
        del manifest["digest"]
        if manifest.get("format") != FORMAT:
            problem = "another format"
        elif manifest["version"] > VERSION:
            problem = f"version {manifest['version']}; this fastpar reads {VERSION}"
        elif content != _sealed(manifest):
            problem = "its digest does not match"
        elif any(not re.fullmatch(r"\w[\w.-]*", name) for name in manifest["files"]):
            problem = "a file name with a path"
        elif not {STATE, OPTIMIZER, "config.json"} <= manifest["files"].keys():
            problem = "files missing from its list"
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = str(error.strerror)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(
            f"verify_checkpoint: expected a checkpoint's manifest, got {file} ({problem}); "
            "the folder is no checkpoint of fastpar, or it is damaged: use another one"
        )
    return manifest


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest's file: its bytes, with a digest of the rest in the end."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "digest": digest}, indent=1) + "\n").encode()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _flush(folder: Path) -> None:
    """To disk: the files of a folder and the folder itself."""
    for path in (*folder.iterdir(), folder):
        if path.is_dir() and path != folder:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _point_latest(run: Path, checkpoint: Path) -> None:
    """run/latest -> the checkpoint. Only people and transformers need it: see newest_checkpoint."""
    temporary = run / f".{LATEST}.tmp"
    with contextlib.suppress(OSError):  # a file system without links
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.relative_to(run), target_is_directory=True)
        os.replace(temporary, run / LATEST)
