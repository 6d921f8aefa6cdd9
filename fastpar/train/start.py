"""What a run starts from: its checkpoint, its model and its tokens.

[Note: replicas] They train apart: which folder and checkpoint each has, and when they stop. Each
is a run of its own ranks, with samples of its own: see [Note: who takes which samples] in
trainer.py. The first writes the run's folder, each other one the same in replica_N inside of it.

[Note: the same steps] Between two meetings replicas are in different steps. One that ended alone
would leave the others waiting, and checkpoints of different steps do not fit together. So what
somebody asks of a run in the middle, to stop or to save, is done after the next meeting, by all;
saves that are due by their step are of the same steps anyhow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastpar.axes.step import Setup
from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.checkpoint.restore import load_weights
from fastpar.comm.mesh import AXES, Mesh, gather_objects
from fastpar.data.batches import PackedTokens, TextData, load_data, pack_documents
from fastpar.data.sources import Tokens, say
from fastpar.data.tokenizer import tokenizer_of_weights
from fastpar.engine.control import broadcast_text, gather_errors
from fastpar.engine.engine import Engine
from fastpar.files.runs import checkpoint_folder, hold, list_checkpoints, step_of
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels.linear.fp8 import LEAST_CAPABILITY
from fastpar.models.gpt import GPT, upcycled
from fastpar.optim.schedule import describe_storage
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.rules import of_shape


def found_by_main(run: Path, step: int, mesh: Mesh) -> Path | None:
    """The checkpoint of the step that rank 0 has found, -1 for none. Ranks: all."""
    found = torch.full((), step, dtype=torch.int64, device=mesh.device)
    mesh.broadcast_([found], *AXES)
    return checkpoint_folder(run, int(found)) if found >= 0 else None


def find_checkpoint(
    config: TrainConfig, mesh: Mesh, steps: Collection[int] | None = None
) -> Path | None:
    """The checkpoint to go on from; None to start. Ranks: all. Rank 0 reads it, the others follow.

    A run that began and has committed nothing yet is started again where that was asked for.

    Raises:
        ValueError: there is none, all are damaged, or another process has the run.
    """
    if not config.run.resume:
        return None
    run, step = Path(config.run.out or ""), -1
    if mesh.is_main:
        hold(run)
        if list_checkpoints(run) or not config.run.auto_resume:
            step = step_of(newest_checkpoint(run, steps=steps))
    return found_by_main(run, step, mesh)


def load_model_and_data(
    config: TrainConfig,
    state: dict[str, Any] | None,
    *,
    progress: bool,
    check: Callable[[GPTConfig], None] = lambda shape: None,
) -> tuple[GPT, int, TextData]:
    """The model with its first weights, the context to train with, and the tokens.

    Args:
        state: of the checkpoint to go on from, whose weights come later.
        progress: of tokenizing.
        check: raises for a model that is not to be made; weights to start from are read before.
    """
    source = config.shape.init_from
    tokenizer: str | None = config.text.tokenizer
    model: GPT | None = None
    if source is None:
        block_size = config.model_config(vocab_size=1).block_size
    else:
        if state is not None:  # its weights come from the checkpoint
            check(GPTConfig(**state["model"]))
            model = GPT(GPTConfig(**state["model"]))
        else:
            model = load_weights(
                source, dropout=config.shape.dropout, say=lambda line: say(line, progress)
            )
            if config.shape.n_expert:
                model = upcycled(model, config.expert_settings(), seed=config.run.seed)
            check(model.config)
        config.learn(**of_shape(model.config))
        block_size = config.shape.block_size or model.config.block_size
        if block_size > model.config.block_size:
            raise ValueError(
                f"train: expected block_size <= {model.config.block_size}, the context of "
                f"{source}, got block_size={block_size}; lower --block-size"
            )
        if tokenizer == "auto":
            tokenizer = tokenizer_of_weights(source, model.config.vocab_size)
    data = load_data(
        config.text.data,
        tokenizer,
        text_column=config.text.data_field,
        token_bits=config.text.token_bits,
        block_size=block_size,
        progress=progress,
    )
    if model is None:
        shape = config.model_config(data.vocab_size)
        check(shape)
        model = GPT(shape, seed=config.run.seed)
    if data.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"train: expected tokens of the model's vocabulary of {model.config.vocab_size}, "
            f"got tokenizer={data.tokenizer.name} with {data.vocab_size}; choose the "
            "--tokenizer that the weights were trained with"
        )
    return model, block_size, data


def pick_dtype(config: TrainConfig, mesh: Mesh, state: dict[str, Any] | None) -> str:
    """The format of the weights: fp32, bf16 or fp16; auto is the checkpoint's or the device's."""
    name, on_gpu = str(config.system.dtype), mesh.device.type == "cuda"
    if name == "auto" and state is not None:
        name = state["dtype"]
    if name == "auto" and on_gpu:
        name = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    if name == "fp16" and not on_gpu:
        raise ValueError(
            "train: expected dtype fp32 or bf16 on the CPU, got dtype=fp16; use --dtype bf16"
        )
    name = "fp32" if name == "auto" else name
    _check_fp8(config, mesh, name)
    config.learn(dtype=name)
    return name


def _check_fp8(config: TrainConfig, mesh: Mesh, dtype: str) -> None:
    """Refuse fp8 on a device, or for weights, that have no such products."""
    system, found = config.system, f"device={mesh.device.type}"
    if system.fp8 == "none" or system.fp8_emulate:
        return
    if mesh.device.type == "cuda":
        capability = torch.cuda.get_device_capability(mesh.device)
        if capability >= LEAST_CAPABILITY and dtype == "bf16":
            return
        found = f"compute capability {capability[0]}.{capability[1]}"
    raise ValueError(
        "train: expected bf16 weights on a GPU of compute capability 8.9 or newer with fp8="
        f"{system.fp8}, got {found} dtype={dtype}; drop --fp8, or add --fp8-emulate for its "
        "numbers at less speed"
    )


SEEN_S = 3.0
_DIGEST_TOKENS = 1 << 16


def check_folder(folder: Path, engine: Engine) -> None:
    """Refuse a run's folder that is another one on other machines. Ranks: all of the engine's.

    A file that rank 0 writes there is looked for by all, for up to SEEN_S: a network's file system
    may remember for a while that it was not there.
    """
    mark = f".seen-{uuid.uuid4().hex}"
    if engine.mesh.is_main:
        try:
            (folder / mark).touch()
        except OSError:  # try_folder() says why
            mark = ""
    mark = broadcast_text(engine, mark)
    if not mark:
        return
    until = time.monotonic() + SEEN_S
    while not (seen := (folder / mark).exists()) and time.monotonic() < until:
        time.sleep(0.05)
    blind = gather_errors(engine, None if seen else socket.gethostname())
    if engine.mesh.is_main:
        (folder / mark).unlink(missing_ok=True)
    if blind:
        hosts = ", ".join(sorted(set(blind.values())))
        ranks = ", ".join(map(str, blind))
        raise ValueError(
            f"train: out={folder} is another folder on {hosts} (rank {ranks}) than on rank 0's "
            "machine, and checkpoints need one that all machines see; set --out to an absolute "
            "path on a file system that they share"
        )


def samples_of(config: TrainConfig, data: TextData, block_size: int) -> Tokens | PackedTokens:
    """What batches are taken from: the tokens as they stand, or documents in rows."""
    if config.text.pack == "stream":
        return data.train
    return pack_documents(data.train, data.tokenizer.eot, block_size)


def digest(data: TextData) -> str:
    """Tells whether these are the tokens that a run was started with, from its ends and length."""
    known = hashlib.sha256()
    for tokens in (data.train, data.val):
        known.update(f"{len(tokens)} {tokens.dtype} ".encode())
        for start in (0, max(0, len(tokens) - _DIGEST_TOKENS)):
            known.update(np.asarray(tokens[start : start + _DIGEST_TOKENS]).tobytes())
    return known.hexdigest()


def check_samples(
    state: dict[str, Any], checkpoint: Path, config: TrainConfig, data: TextData
) -> None:
    """Refuse to go on from a checkpoint with other samples than those that were counted."""
    new = f"start a new run with --init-from {checkpoint}"
    if state["data"] != digest(data):
        raise ValueError(
            "train: expected the tokens that the run was started with, got others from data="
            f"{config.text.data}; undo the change of --data, --tokenizer or the text, or {new}"
        )
    pack = config.text.pack
    before = state.get("pack", pack)  # earlier versions kept none
    if pack != before:
        raise ValueError(
            f"train: expected pack={before}, by which the run's samples are numbered, got pack="
            f"{pack}; leave --pack out, or {new}"
        )


def facts_of(setup: Setup, engine: Engine) -> dict[str, Any]:
    """What was chosen for this start; see RunFolder."""
    return {
        **setup.in_effect(),
        "device": torch.cuda.get_device_name() if setup.device_type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "block_size": setup.block_size,
        "n_shards": engine.settings.n_shards,
        "storage": describe_storage(setup.flags.optim, DTYPES[setup.dtype]),
    }


def leads(mesh: Mesh) -> bool:
    """Whether this rank tells on the terminal how the run goes."""
    return mesh.is_main and mesh.replica == 0


def folder_of(run: str | Path, replica: int) -> Path:
    """Of a replica, in the run's folder, which is that of the first one."""
    return Path(run, f"replica_{replica}") if replica else Path(run)


def checkpoint_of(config: TrainConfig, mesh: Mesh) -> Path | None:
    """The checkpoint to go on from: this replica's of the step that the first one goes on from.

    Ranks: all of all replicas. Of a number of replicas that has grown, the new ones begin as copies
    of the first.
    """
    if mesh.replicas == 1 or not config.run.resume:
        return find_checkpoint(config, mesh)
    run = Path(config.run.out or "")
    own, steps = folder_of(run, mesh.replica), _common_steps(run)
    if mesh.replica == 0:
        mine = find_checkpoint(config, mesh, steps)
    else:
        step = -1
        if mesh.is_main:
            own.mkdir(parents=True, exist_ok=True)
            hold(own)
            with contextlib.suppress(ValueError):  # none, or damaged ones only
                step = step_of(newest_checkpoint(own, lambda line: None, steps))
        mine = found_by_main(own, step, mesh)
    step = -1 if mine is None else step_of(mine)
    first = gather_objects(step, mesh.outer_group)[0]
    return mine if step == first else checkpoint_folder(run, first) if first >= 0 else None


def _common_steps(run: Path) -> set[int] | None:
    """Steps of which all replicas of the last start have a checkpoint; None if there are none.

    One that was killed may not have committed its newest one.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        last = json.loads((run / "config.json").read_text(encoding="utf-8"))["starts"][-1]
        folders = [folder_of(run, i) for i in range(last["replicas"])]
        found = [set(map(step_of, list_checkpoints(folder))) for folder in folders]
        return set.intersection(*found) or None
    return None


def in_own_folder(config: TrainConfig, mesh: Mesh, first: Path | None) -> TrainConfig:
    """The settings of this rank's replica, once the first one has made its folder.

    Ranks: all of all replicas. first: that folder, on rank 0 of the first replica.
    """
    run = gather_objects(str(first), mesh.outer_group)[0]
    return config.in_folder(str(folder_of(run, mesh.replica)))


def granted(mesh: Mesh, every: int | None, step: int, stop: int, asked: bool) -> tuple[int, bool]:
    """A reason to stop after this step, or 0, and whether to save; see [Note: the same steps].

    Args:
        every: steps between two meetings.
        stop, asked: what this replica was asked for since the last one, the same on its ranks.
    Ranks: all of all replicas, after each step.
    """
    if mesh.replicas == 1:
        return stop, asked
    if every is None or step % every:
        return 0, False
    everyone = gather_objects((stop, asked), mesh.outer_group)
    return next((reason for reason, _ in everyone if reason), 0), any(save for _, save in everyone)
