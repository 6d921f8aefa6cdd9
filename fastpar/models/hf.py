"""Reads and writes folders of transformers' GPT2LMHeadModel: config.json and *.safetensors.

Keys are this model's names with the prefix "transformer." (older files lack it: both are read).
transformers' Conv1D stores matrices as [in, out], this model as [out, in]. The head is tied to
transformer.wte.weight: lm_head.weight is not written, and must be equal to it if it is present.
Vocabulary padding is never written. A round trip changes no byte of a weight.

[Note: stored weights] For models other than GPT, names and layouts are those of their parameters
and persistent buffers. How weights are divided into files depends on the model alone: the same
bytes are written from every mesh, and several ranks can write one model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpar.axes.pipeline.stages import Absent
from fastpar.axes.tensor.declared import Declared
from fastpar.engine.engine import engine_of_parameter
from fastpar.files.packages import import_package
from fastpar.files.plain_files import (
    is_plain_name,
    open_plain,
    printable,
    read_object,
    replacing,
    shown,
    write_text,
)
from fastpar.files.tensor_file import HF_NAMES, Spec, TensorFile
from fastpar.models import families
from fastpar.models.gpt import GPT, TABLES
from fastpar.settings.model import BLOCK_FIELDS, GPTConfig, products

PREFIX = "transformer."
WEIGHTS_FILE = "model.safetensors"


class Weight(NamedTuple):
    """A parameter or buffer, and how it is stored."""

    name: str  # in the model
    key: str  # in the file
    tensor: Tensor
    whole: torch.Size  # full shape, over all ranks
    shape: tuple[int, ...]  # in the file
    transposed: bool
    declared: Declared | None  # how tp ranks split parameters, if they do

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize

    @property
    def split(self) -> bool:
        """Whether it is split over tp or ep ranks."""
        return self.declared is not None and self.declared.is_split(self.tensor)

    def stored(self, whole: Tensor) -> Tensor:
        """The file's tensor, a view of a full one in the model's layout."""
        tensor = whole[: self.shape[0]] if self.shape and not self.transposed else whole
        return tensor.t() if self.transposed else tensor

    def local(self, stored: Tensor) -> Tensor:
        """This rank's slice of the file's tensor, in the model's layout; 0 pads the vocabulary."""
        values = stored.t() if self.transposed else stored
        if self.split:
            assert self.declared is not None
            return self.declared.cut(values, self.tensor)
        if values.shape == self.whole:
            return values
        padded = values.new_zeros(self.whole)
        padded[: len(values)] = values
        return padded


def is_conv1d(name: str) -> bool:
    """Whether transformers stores a GPT's parameter as [in, out]."""
    return name.endswith(tuple(f"{product}.weight" for product in products()))


def list_weights(model: nn.Module) -> list[Weight]:
    """All weights in a model's files, tied parameters once, in the model's order."""
    engines = map(engine_of_parameter, model.parameters())
    declared = next((engine.declared for engine in engines if engine is not None), None)
    weights, gpt = [], isinstance(model, GPT)
    for name, p in model.named_parameters():
        engine = engine_of_parameter(p)
        whole = p.shape if engine is None else engine.shards.whole_shape(p)
        if declared is not None:  # frozen parameters are split too
            whole = declared.whole_shape(p)
        transposed = gpt and is_conv1d(name) and p.dim() == 2
        shape = tuple(reversed(whole)) if transposed else tuple(whole)
        if isinstance(model, GPT) and name in TABLES:
            shape = (model.config.vocab_size, *shape[1:])
        key = PREFIX + name if gpt else name
        weights.append(Weight(name, key, p, whole, shape, transposed, declared))
    for name, b in _buffers(model):  # for a GPT the counts of its experts
        key = PREFIX + name if gpt else name
        weights.append(Weight(name, key, b, b.shape, tuple(b.shape), False, None))
    return weights


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers; one that several modules share appears once, as tied parameters do."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def cut_into_files(weights: list[Weight], most_bytes: float) -> list[tuple[str, list[Weight]]]:
    """File name -> its weights, in order: at most most_bytes, or a single weight."""
    shards: list[list[Weight]] = [[]]
    nbytes = 0  # of the last shard
    for weight in weights:
        if shards[-1] and nbytes + weight.nbytes > most_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(weight)
        nbytes += weight.nbytes
    return [(weights_file(i, len(shards)), shard) for i, shard in enumerate(shards)]


def weights_file(i: int, n: int) -> str:
    """The name of file i (from 0) of n."""
    return WEIGHTS_FILE if n == 1 else f"model-{i + 1:05d}-of-{n:05d}.safetensors"


INDEX_FILE = "model.safetensors.index.json"
EXPERTS = "fastpar-gpt2-experts"  # the model_type of GPTs that transformers does not support
OWN = "fastpar-gpt"  # of GPTs with other blocks than GPT-2's, in our names and layouts
_EXPERT_FIELDS = (
    *("n_expert", "top_k", "expert_every", "expert_hidden", "expert_capacity"),
    *("balance_loss", "router_z_loss", "balance_rate"),
)
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, stored as buffers by older versions
# Values of config.json fields that this model supports; None: the field may be missing.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": (EXPERTS, OWN, "gpt2"),
    "activation_function": (None, "gelu_new"),
    **dict.fromkeys(("scale_attn_weights", "is_causal"), (None, True)),
    "tie_word_embeddings": (None, True),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), (None, False)),
    "reorder_and_upcast_attn": (None, False),
}


def check_whole(caller: str, model: GPT) -> None:
    """Refuses a model that is split by tp or a pipeline, or that needs its peers along cp."""
    if any(isinstance(part, Absent) for part in model.modules()):
        got = "split into pipeline stages"
    elif model.tp is not None:
        got = f"with tp={model.tp.size}"
    elif model.cp is not None and caller == "generate":
        got = f"with cp={model.cp.size}"
    else:
        return
    raise ValueError(
        f"{caller}: expected a model with full weights on each rank, got one {got}; load it with "
        "load_hf() from a checkpoint of save_checkpoint"
    )


def check_dense(caller: str, n_expert: int) -> None:
    """Refuses to write a model with experts for transformers."""
    if n_expert:
        raise ValueError(
            f"{caller}: expected a GPT-2 that transformers supports, got one with "
            f"n_expert={n_expert}; transformers' GPT2LMHeadModel has no experts, and its models "
            "with experts have other norms, positions and activations: use the checkpoint itself "
            "(fastpar sample, fastpar train --init-from)"
        )


@torch.no_grad()
def load_hf_tensors(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copies transformers' weights into the model, converting to its dtype; all or nothing.

    If tp ranks split the model, each copies its slices; all pass full tensors.

    Raises:
        ValueError: the first tensor that is missing, has another shape, or does not belong to a
            GPT-2 of this shape; an lm_head.weight that differs from wte.weight.
    """
    given = _checked(model, tensors)
    for weight in list_weights(model):
        weight.tensor.copy_(weight.local(given[weight.name]))


def _checked(model: GPT, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by this model's names, if they match the model exactly."""
    given = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    head = given.pop("lm_head.weight", None) if model.config.tied else None
    if head is not None:  # a writer that drops tied copies may have kept this one
        wte = given.setdefault("wte.weight", head)
        if not torch.equal(head.to(wte.dtype), wte):
            raise ValueError(
                "load_hf_tensors: expected lm_head.weight equal to transformer.wte.weight (a tied "
                "head), got other values; untied models are not supported"
            )
    for name, wanted, got in differences(model, {n: t.shape for n, t in given.items()}):
        if got is None:
            near = next((n for n in tensors if n.endswith(f".{name}")), "")
            but = (
                f" but {printable(near)}; rename the tensors to {PREFIX}{name} and so on"
                if near
                else ("; pass the weights of a GPT2LMHeadModel of the model's shape")
            )
            raise ValueError(
                f"load_hf_tensors: expected a tensor {PREFIX}{name}, got none of this name{but}"
            )
        if wanted is not None:
            raise ValueError(
                f"load_hf_tensors: expected {PREFIX}{name} of shape {list(wanted)}, got "
                f"shape={list(got)}; build the model with the sizes of the weights"
            )
        raise ValueError(
            f"load_hf_tensors: expected only weights of a GPT-2 with n_layer="
            f"{model.config.n_layer}, got {printable(name)}; build the model with the sizes of "
            "the weights"
        )
    return given


def differences(
    model: GPT, shapes: Mapping[str, Sequence[int]]
) -> list[tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]]:
    """Stored tensors that do not match a model: (name, wanted, got), None for a missing one.

    Args:
        shapes: by transformers' names; an lm_head.weight may replace wte.weight.
    """
    ours = {w.name: w.shape for w in list_weights(model)}
    found = {n.removeprefix(PREFIX): tuple(s) for n, s in shapes.items() if not n.endswith(MASKS)}
    head = found.pop("lm_head.weight", None) if model.config.tied else None
    if head is not None:
        found.setdefault("wte.weight", head)
    names = [*ours, *sorted(found.keys() - ours.keys())]
    return [(n, ours.get(n), found.get(n)) for n in names if ours.get(n) != found.get(n)]


def load_hf(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    dropout: float | None = None,
) -> GPT:
    """Reads a folder of transformers' GPT2LMHeadModel, or of a model of families.py.

    Args:
        folder: holds config.json and model.safetensors, or the shards that
            model.safetensors.index.json names.
        dtype: of the parameters; default: the file's.
        dropout: replaces the config's three dropout rates, which must be equal otherwise.
    Returns:
        The model, on the CPU, in training mode.
    Raises:
        ValueError: a missing or damaged file, another architecture, an unsupported setting; see
            also load_hf_tensors.
    """
    folder = Path(folder)
    config = read_config(folder, dropout)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update(_read_safetensors(file))
    kind = _read_json(folder / "config.json").get("model_type")
    if kind in families.FAMILIES:
        found = families.weights_in(config, kind, tensors)
        tensors = {n: x.t() if is_conv1d(n) else x for n, x in found.items()}
    return build_model("load_hf", folder, config, tensors, dtype)


def build_model(
    caller: str,
    source: Path,
    config: GPTConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> GPT:
    """A model with these weights, whose sizes are compared before memory is allocated.

    Raises:
        ValueError: see load_hf and load_hf_tensors.
    """
    weights = (t for name, t in tensors.items() if not name.endswith(MASKS))
    found = {t.dtype for t in weights if not (config.n_expert and t.dtype == torch.int64)}
    unknown = [d for d in found if d not in HF_NAMES]
    if unknown or (dtype is None and len(found) != 1):
        raise ValueError(
            f"{caller}: expected weights of one dtype of {', '.join(HF_NAMES.values())}, got "
            f"dtypes={', '.join(sorted(map(str, found))) or 'none'} in {source}; "
            + ("convert them first" if unknown else "choose one with dtype=")
        )
    if config.n_layer > len(tensors):  # a damaged number, so do not build that model
        raise ValueError(
            f"{caller}: expected weights of n_layer={config.n_layer} layers, got {len(tensors)} "
            f"tensors in {source}; config and weights do not match"
        )
    try:
        with torch.device("meta"):
            model = GPT(config).to(dtype or found.pop())
    except (RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{caller}: expected sizes of a possible model, got {config} in {source} ({error}); "
            "the file is damaged"
        ) from error
    _checked(model, tensors)
    model.to_empty(device="cpu")
    load_hf_tensors(model, tensors)
    return model


def save_hf(
    model: GPT,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Writes the folder that transformers' from_pretrained reads: of GPT2LMHeadModel, or of the
    class of families.py that has the model's block.

    Every file is written atomically, and config.json last: a folder without it is not a model.
    Other files in the folder stay.

    Args:
        folder: created if needed; must not contain a config.json.
        max_shard_bytes: larger weights are divided into several files with an index.
        bos_token_id, eos_token_id: for transformers' generate(); GPT-2's own are 50256.
    Raises:
        ValueError: the folder contains a model already; max_shard_bytes < 1; a parameter dtype that
            from_pretrained would not keep; a model that tp ranks split, with experts, or with a
            block that no class of transformers has.
    """
    check_whole("save_hf", model)
    check_dense("save_hf", model.config.n_expert)
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ValueError(
            f"save_hf: expected a folder without a model, got folder={folder} with a config.json; "
            "choose another folder or delete it first"
        )
    if max_shard_bytes < 1:
        raise ValueError(
            f"save_hf: expected max_shard_bytes >= 1, got max_shard_bytes={max_shard_bytes}; "
            "drop it for 5 GB"
        )
    config = config_json("save_hf", model, bos_token_id, eos_token_id)
    weights = list_weights(model)
    if not model.config.is_gpt2:
        config, weights = _of_family(model, config, weights)
    files = cut_into_files(weights, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for file, shard in files:
        specs = {w.key: Spec(w.tensor.dtype, w.shape) for w in shard}
        with (
            replacing(folder / file) as temporary,
            TensorFile(temporary, specs, {"format": "pt"}) as out,
        ):
            for weight in shard:
                out.write(weight.key, weight.stored(weight.tensor.detach()))
    (folder / (INDEX_FILE if len(files) == 1 else WEIGHTS_FILE)).unlink(missing_ok=True)
    if len(files) > 1:
        weight_map = {w.key: file for file, shard in files for w in shard}
        index = index_json(weight_map, sum(w.nbytes for w in weights))
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _of_family(
    model: GPT, config: dict[str, Any], weights: list[Weight]
) -> tuple[dict[str, Any], list[Weight]]:
    """config.json and weights for the class of transformers that has the model's block."""
    kind = families.family_of(model.config)
    if kind is None:
        raise ValueError(
            "save_hf: expected the block of GPT-2, "
            f"{', '.join(f.architecture for f in families.FAMILIES.values())}, got {model.config}; "
            "no class of transformers has it: use the checkpoint itself"
        )
    values = {w.name: w.tensor.detach()[: w.whole[0]] for w in weights}
    for name in TABLES:
        if name in values:
            values[name] = values[name][: model.config.vocab_size]
    ids = config["bos_token_id"], config["eos_token_id"]
    out = families.weights_out(model.config, kind, values)
    made = [Weight(k, k, x, x.shape, tuple(x.shape), False, None) for k, x in out.items()]
    return families.config_json(model.config, kind, config["torch_dtype"], *ids), made


def index_json(weight_map: Mapping[str, str], nbytes: int) -> dict[str, Any]:
    """The index that transformers reads for several files: the file of each tensor."""
    return {"metadata": {"total_size": nbytes}, "weight_map": dict(weight_map)}


def config_json(
    caller: str, model: GPT, bos_token_id: int | None, eos_token_id: int | None
) -> dict[str, Any]:
    """The content of transformers' GPT2Config.

    Raises:
        ValueError: parameters of a dtype that transformers would not keep.
    """
    c, dtype = model.config, next(model.parameters()).dtype
    if dtype not in HF_NAMES:
        raise ValueError(
            f"{caller}: expected parameters of {', '.join(HF_NAMES.values())}, got "
            f"dtype={dtype}; convert the model with .float() first"
        )
    more = {n: getattr(c, n) for n in _EXPERT_FIELDS} if c.n_expert else {}
    kind = EXPERTS if more else "gpt2"
    if not c.is_gpt2:
        kind = OWN
        more = {n: getattr(c, n) for n in (*BLOCK_FIELDS, *_EXPERT_FIELDS) if n != "n_inner"}
    return {
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else "FastparGPT"],
        "model_type": kind,
        **more,
        "vocab_size": c.vocab_size,
        "n_positions": c.block_size,
        "n_embd": c.n_embd,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_inner": c.n_inner,
        "activation_function": "gelu_new",
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "layer_norm_epsilon": c.layer_norm_eps,
        "initializer_range": 0.02,
        "tie_word_embeddings": c.tied,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": HF_NAMES[dtype],
    }


def read_config(folder: Path, dropout: float | None) -> GPTConfig:
    """The shape that a folder's config.json describes; see load_hf."""
    raw = _read_json(folder / "config.json")
    if raw.get("model_type") in families.FAMILIES:
        return families.config_of(raw, str(folder / "config.json"), dropout)
    wrong = [name for name, allowed in _SUPPORTED.items() if raw.get(name) not in allowed]
    if wrong and raw.get("model_type") != OWN:
        name = wrong[0]
        raise ValueError(
            f"load_hf: expected {name}={_SUPPORTED[name][-1]}, got {name}="
            f"{printable(str(raw.get(name)))} in "
            f"{folder / 'config.json'}; this variant of GPT-2 is not supported"
        )
    numbers = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "layer_norm_epsilon")
    for name in (*numbers, "embd_pdrop", "attn_pdrop", "resid_pdrop"):
        if type(raw.get(name, 0)) not in (int, float):
            raise ValueError(
                f"load_hf: expected a number, got {name}={shown(raw[name])} in "
                f"{folder / 'config.json'}; write the file again"
            )
    n_embd, own = raw.get("n_embd", 768), raw["model_type"] == OWN
    if not own and raw.get("n_inner") not in (None, 4 * n_embd):
        raise ValueError(
            f"load_hf: expected n_inner={4 * n_embd} (4 * n_embd), got "
            f"n_inner={printable(str(raw['n_inner']))} in "
            f"{folder / 'config.json'}; this variant of GPT-2 is not supported"
        )
    rates = [raw.get(name, 0.1) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")]
    if dropout is None and len(set(rates)) != 1:
        raise ValueError(
            f"load_hf: expected one dropout rate, got embd_pdrop={rates[0]}, "
            f"attn_pdrop={rates[1]}, resid_pdrop={rates[2]}; choose one with dropout="
        )
    sizes: dict[str, Any] = {
        "n_layer": raw.get("n_layer", 12),
        "n_head": raw.get("n_head", 12),
        "n_embd": n_embd,
        "block_size": raw.get("n_positions", 1024),
        "vocab_size": raw.get("vocab_size", 50257),
        "dropout": rates[0] if dropout is None else dropout,
        "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
    }
    if raw["model_type"] in (EXPERTS, OWN):
        names = (*_EXPERT_FIELDS, *(BLOCK_FIELDS if own else ()))
        try:
            return GPTConfig(**sizes, **{n: raw[n] for n in names})
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"load_hf: expected numbers of experts in {folder / 'config.json'}, got "
                f"{type(error).__name__}: {error}; write the file again"
            ) from error
    return GPTConfig(**sizes)


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights; see load_hf."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).exists():
        raise ValueError(
            f"load_hf: expected {WEIGHTS_FILE} or {INDEX_FILE}, got neither in folder={folder}; "
            "save the model with save_pretrained(..., safe_serialization=True)"
        )
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"load_hf: expected a weight_map with file names, got weight_map={weight_map} in "
            f"{folder / INDEX_FILE}; save the model again"
        )
    for name in weight_map.values():
        if not is_plain_name(name):
            raise ValueError(
                f"load_hf: expected names of files in the folder, got {shown(name)} in "
                f"{folder / INDEX_FILE}; write the file again"
            )
    return [folder / name for name in sorted(set(weight_map.values()))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, links=True)  # model hubs keep links to their caches
    except ValueError as error:
        raise ValueError(
            f"load_hf: expected a readable {path.name}, got {path} ({error}); "
            "pass the folder that save_hf or save_pretrained wrote"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    safetensors = import_package("safetensors", "load_hf")
    load_file = import_package("safetensors.torch", "load_hf").load_file
    try:
        os.close(open_plain(path, links=True))  # refuses a pipe, which would block
        return load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"load_hf: expected a complete safetensors file, got {path} ({printable(str(error))}); "
            "copy or save it again"
        ) from error
