"""The start of a run: checkpoint, model, tokens.

[Note: bf16 on a CPU] With AMX a CPU multiplies bf16 about three times as fast as fp32: GPT-2 124M
at 1024 tokens took 1,742 ms a step in bf16 with fp32 masters, 4,626 ms in fp32 (two Intel cores,
bench/results). Therefore dtype auto chooses bf16 there, if all ranks have AMX and the model is at
least BF16_WIDTH wide: narrower ones have not been measured. Instructions decide, not a timing: a
repeated run must make the same choice. The width of --init-from weights is not known here: auto
chooses fp32 for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastpar.axes.replicas import common_steps, folder_of
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
from fastpar.kernels.backend import has_bf16_gemm
from fastpar.kernels.linear.fp8 import LEAST_CAPABILITY
from fastpar.models.gpt import GPT, upcycled
from fastpar.optim.schedule import describe_storage
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.rules import of_shape


def found_by_main(run: Path, step: int, mesh: Mesh) -> Path | None:
    """The checkpoint of the step that rank 0 found; step=-1: none. Ranks: all."""
    main_step = torch.full((), step, dtype=torch.int64, device=mesh.device)
    mesh.broadcast_([main_step], *AXES)
    return checkpoint_folder(run, int(main_step)) if main_step >= 0 else None


def find_checkpoint(
    config: TrainConfig, mesh: Mesh, steps: Collection[int] | None = None
) -> Path | None:
    """The checkpoint to resume, found by rank 0; None: start a new run. Ranks: all.

    With --auto-resume, a run without a checkpoint is started again.

    Raises:
        ValueError: no checkpoint exists, all are damaged, or another process uses the run.
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
    meet: Callable[[], None] = lambda: None,
    check: Callable[[GPTConfig], None] = lambda shape: None,
) -> tuple[GPT, int, TextData]:
    """The model with initial weights, the context length, and the tokens.

    Args:
        state: state of the checkpoint to resume, whose weights are loaded later.
        progress: print the progress of tokenizing.
        meet: see `load_data`.
        check: raises for a shape that must not be built; called after --init-from is read.
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
        meet=meet,
    )
    if model is None:
        shape = config.model_config(data.vocab_size)
        check(shape)
        model = GPT(shape, seed=config.run.seed)
    if data.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"train: expected a tokenizer of at most {model.config.vocab_size} tokens, the model's "
            f"vocabulary, got tokenizer={data.tokenizer.name} of {data.vocab_size}; use the "
            "--tokenizer that the weights were trained with"
        )
    return model, block_size, data


BF16_WIDTH = 768


def pick_dtype(config: TrainConfig, mesh: Mesh, state: dict[str, Any] | None) -> str:
    """The format of the weights (fp32, bf16 or fp16); auto: by the checkpoint or the device.

    Ranks: all.
    """
    name, on_gpu = str(config.system.dtype), mesh.device.type == "cuda"
    if name == "auto" and state is not None:
        name = state["dtype"]
    if name == "auto" and on_gpu:
        name = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    elif name == "auto" and config.shape.init_from is None:
        alone = mesh.world_size * mesh.replicas == 1
        is_wide = config.model_config(1).n_embd >= BF16_WIDTH
        have = [has_bf16_gemm] if alone or not is_wide else gather_objects(has_bf16_gemm)
        name = "bf16" if is_wide and all(have) else "fp32"
    if name == "fp16" and not on_gpu:
        raise ValueError(
            "train: expected dtype fp32 or bf16 on the CPU, got dtype=fp16; use --dtype bf16"
        )
    name = "fp32" if name == "auto" else name
    _check_fp8(config, mesh, name)
    config.learn(dtype=name)
    return name


def _check_fp8(config: TrainConfig, mesh: Mesh, dtype: str) -> None:
    """Refuse fp8 on devices and with weight formats that do not support it."""
    system, device = config.system, f"device={mesh.device.type}"
    if system.fp8 == "none" or system.fp8_emulate:
        return
    if mesh.device.type == "cuda":
        capability = torch.cuda.get_device_capability(mesh.device)
        if capability >= LEAST_CAPABILITY and dtype == "bf16":
            return
        device = f"compute capability {capability[0]}.{capability[1]}"
    raise ValueError(
        "train: expected bf16 weights on a GPU of compute capability 8.9 or newer with fp8="
        f"{system.fp8}, got {device} dtype={dtype}; drop --fp8, or add --fp8-emulate for the same "
        "numbers at lower speed"
    )


SEEN_S = 3.0
_DIGEST_TOKENS = 1 << 16


def check_folder(folder: Path, engine: Engine) -> None:
    """Refuse a run folder that other machines do not share. Ranks: all of the engine.

    Every rank looks for a file that rank 0 writes there, for up to SEEN_S seconds, because a
    network file system may cache for a while that it does not exist.
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
            f"train: expected --out to be a folder that all machines share, got out={folder}, "
            f"which {hosts} (rank {ranks}) and rank 0's machine do not share; set --out to an "
            "absolute path on a shared file system"
        )


def samples_of(config: TrainConfig, data: TextData, block_size: int) -> Tokens | PackedTokens:
    """The source of batches: the tokens as one stream, or documents packed into rows."""
    if config.text.pack == "stream":
        return data.train
    return pack_documents(data.train, data.tokenizer.eot, block_size)


def digest(data: TextData) -> str:
    """A hash of the tokens' length, beginning and end, to recognize the tokens of a run."""
    sha = hashlib.sha256()
    for tokens in (data.train, data.val):
        sha.update(f"{len(tokens)} {tokens.dtype} ".encode())
        for start in (0, max(0, len(tokens) - _DIGEST_TOKENS)):
            sha.update(np.asarray(tokens[start : start + _DIGEST_TOKENS]).tobytes())
    return sha.hexdigest()


def check_samples(
    state: dict[str, Any], checkpoint: Path, config: TrainConfig, data: TextData
) -> None:
    """Refuse to resume a checkpoint with other samples than before."""
    new = f"start a new run with --init-from {checkpoint}"
    if state["data"] != digest(data):
        raise ValueError(
            "train: expected the same tokens as at the run's start, got different ones from data="
            f"{config.text.data}; undo the change of --data, --tokenizer or the text, or {new}"
        )
    pack = config.text.pack
    before = state.get("pack", pack)  # not in checkpoints of earlier versions
    if pack != before:
        raise ValueError(
            f"train: expected pack={before} as in the run to resume, got pack={pack}; drop --pack, "
            f"or {new}"
        )


def facts_of(setup: Setup) -> dict[str, Any]:
    """The choices of this start besides its settings; see RunFolder."""
    return {
        "device": torch.cuda.get_device_name() if setup.device_type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "storage": describe_storage(setup.flags.optim, DTYPES[setup.dtype]),
    }


def meet(mesh: Mesh) -> None:
    """Return when every rank has called it. Ranks: all of all replicas."""
    if mesh.world_size * mesh.replicas > 1:
        gather_objects(None)


def reports_progress(mesh: Mesh) -> bool:
    """Whether this rank reports progress on the terminal."""
    return mesh.is_main and mesh.replica == 0


def checkpoint_of(config: TrainConfig, mesh: Mesh) -> Path | None:
    """The checkpoint to resume: this replica's, of the step that the first replica resumes.

    Additional replicas start from the checkpoint of the first. Ranks: all of all replicas.
    """
    if mesh.replicas == 1 or not config.run.resume:
        return find_checkpoint(config, mesh)
    run = Path(config.run.out or "")
    own_folder, steps = folder_of(run, mesh.replica), common_steps(run)
    if mesh.replica == 0:
        newest = find_checkpoint(config, mesh, steps)
    else:
        step = -1
        if mesh.is_main:
            own_folder.mkdir(parents=True, exist_ok=True)
            hold(own_folder)
            with contextlib.suppress(ValueError):  # none, or only damaged ones
                step = step_of(newest_checkpoint(own_folder, lambda line: None, steps))
        newest = found_by_main(own_folder, step, mesh)
    step = -1 if newest is None else step_of(newest)
    first = gather_objects(step, mesh.outer_group)[0]
    return newest if step == first else checkpoint_folder(run, first) if first >= 0 else None


def in_replica_folder(config: TrainConfig, mesh: Mesh, first: Path | None) -> TrainConfig:
    """The settings of this rank's replica, after the first replica has created its folder.

    Args:
        first: the folder of the first replica, on its rank 0.
    Ranks: all of all replicas.
    """
    run = gather_objects(str(first), mesh.outer_group)[0]
    return config.in_folder(str(folder_of(run, mesh.replica)))
