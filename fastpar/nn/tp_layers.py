"""torch's layers with weights split over tp ranks, for any model.

    y = RowParallelLinear(f(ColumnParallelLinear(x)))      f works on single features, or on heads
    x = VocabParallelEmbedding(idx)                        each rank has some rows
    logits = VocabParallelLinear(x)                        of all classes, on every rank

Before parallelize(), and with tp=1, each is torch's layer: its constructor, its full weights, its
state_dict keys. parallelize() splits the weights. Under sequence parallelism the input of a column
layer and the output of a row layer are this rank's tokens, see axes/tensor/functional.py.

[Note: another class] convert() splits a layer of a foreign model by giving the instance another
class. Its Parameters, hooks and names stay, and so do ties and other references to it.

[Note: all tokens] A foreign model embeds and compares tokens as [B, T], which a rank does not have
under sequence parallelism. There, an embedding and a head with all_tokens work on full tensors, and
other modules of the plan split and gather the tokens (foreign/tp_plan.py).

[Note: masks of a part] A rank's slice of a tensor gets the matching slice of the mask that one
process would draw. For heads that is Rng's first_head. T/tp tokens of each of B samples are not
contiguous rows: there residual_norm() draws sample by sample. T/cp tokens are two runs of every
sample, which Rng supports. Where torch draws, or a key is drawn, all ranks draw the same: their
generators must agree.

Source: Shoeybi et al. 2019, arXiv 1909.08053
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.axes.context.sequences import ContextParallel
from fastpar.axes.tensor.functional import TensorParallel, column_linear, row_linear
from fastpar.axes.tensor.vocabulary import vocab_embedding, vocab_linear, vocab_linear_cross_entropy
from fastpar.comm.collectives import Collectives
from fastpar.kernels import Rng, draw_key, residual_layer_norm
from fastpar.nn.modules import (
    Embedding,
    LinearCrossEntropyLoss,
    autocast_dtype,
    embedding_options,
    has_hooks,
    is_conv1d,
    is_plain,
    product,
)
from fastpar.sharding.placements import Replicate, Shard, State

PAD_TO = 64  # rows of a vocabulary: a GEMM's tile, and 128 bytes of logits in 16 bits


class Split(nn.Module):
    """Base of the layers: a linear layer, with weight [out, in] or, as Conv1D's, [in, out]."""

    tp: TensorParallel | None = None
    all_tokens = False  # see [Note: all tokens]
    groups = 1  # equal sections of the features that are each split
    heads = 0  # attention heads in a group's split features; 0: no heads

    if TYPE_CHECKING:  # attributes of the layer
        weight: Any
        bias: Any

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        """Splits the layer over these ranks; returns how its parameters are split."""
        whole = self.all_tokens and tp.sequence_parallel
        self.tp = TensorParallel(tp.group, sequence_parallel=False) if whole else tp
        return {name: s for name, s in self.states(tp).items() if getattr(self, name) is not None}

    def states(self, tp: TensorParallel) -> dict[str, State]:
        """How the layer's parameters are split, including those that it may lack."""
        return {}

    def pad_to(self, dim: int, tp: TensorParallel) -> int | None:
        """A head's features if tp does not divide the heads, else None; models/gpt.py, [Note:
        padded heads]."""
        if not self.heads or self.heads % tp.size == 0:
            return None
        return self.weight.shape[dim] // self.groups // self.heads

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight [out, in] and bias in the dtypes of the product, also under torch.autocast."""
        weight = self.weight.t() if _transposed(self) else self.weight
        dtype = autocast_dtype(x)
        if dtype is None:
            return x, weight, self.bias
        bias = None if self.bias is None else self.bias.to(dtype)
        return x.to(dtype), weight.to(dtype), bias

    def extra_repr(self) -> str:
        shared = "" if self.tp is None else f", rank {self.tp.rank} of tp={self.tp.size}"
        return super().extra_repr() + shared


def _transposed(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Linear)


class Column(Split):
    """Mixin: split by output features."""

    def states(self, tp: TensorParallel) -> dict[str, State]:
        dim = int(_transposed(self))
        options: dict[str, Any] = {"groups": self.groups, "pad_to": self.pad_to(dim, tp)}
        return {"weight": Shard(dim, **options), "bias": Shard(0, **options)}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return super().forward(x)
        return column_linear(*self.operands(x), self.tp)


class ColumnParallelLinear(Column, nn.Linear):
    """nn.Linear whose output features are split over ranks.

    Args:
        in_features, out_features, bias, device, dtype: of the full layer, as in nn.Linear.
        groups: equal sections of the output that are each split: 3 for a fused q, k and v.
    """

    def __init__(self, *args: Any, groups: int = 1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.groups = groups


class Row(Split):
    """Mixin: split by input features; the output is the sum over ranks."""

    def states(self, tp: TensorParallel) -> dict[str, State]:
        dim = int(not _transposed(self))
        return {"weight": Shard(dim, pad_to=self.pad_to(dim, tp)), "bias": tp.per_token}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return super().forward(x)
        return row_linear(*self.operands(x), self.tp)

    def product(self, x: Tensor) -> Tensor:
        """The output of forward() without the bias. Only once the layer is split."""
        x, weight, _ = self.operands(x)
        return row_linear(x, weight, tp=self.tp)


class RowParallelLinear(Row, nn.Linear):
    """nn.Linear whose input features are split over ranks; the bias is added once.

    Args:
        in_features, out_features, bias, device, dtype: of the full layer, as in nn.Linear.
    """


class VocabParallelEmbedding(Split, Embedding):
    """fastpar.nn.Embedding whose rows are split over ranks, in multiples of 64.

    Args:
        num_embeddings, embedding_dim, device, dtype: of the full table, as in nn.Embedding.
    Raises:
        ValueError: an option of nn.Embedding that fastpar.nn.Embedding does not support.
    """

    def states(self, tp: TensorParallel) -> dict[str, State]:
        return {"weight": Shard(0, pad_to=PAD_TO)}

    def forward(self, input: Tensor) -> Tensor:
        """[...] token ids -> [..., C]; under sequence parallelism this rank's tokens, [N/tp, C]."""
        if self.tp is None:
            return super().forward(input)
        idx = input if input.dim() == 2 else input.reshape(1, -1)
        x = vocab_embedding(idx, self.weight, self.tp)
        return x if self.tp.sequence_parallel else x.view(*input.shape, self.embedding_dim)


class VocabParallelLinear(Split, nn.Linear):
    """nn.Linear over classes that are split over ranks: the head, tied to an embedding or not.

    Args:
        in_features, out_features, bias, device, dtype: of the full layer, as in nn.Linear.
    """

    def states(self, tp: TensorParallel) -> dict[str, State]:
        return {"weight": Shard(0, pad_to=PAD_TO), "bias": Replicate()}

    def forward(self, x: Tensor) -> Tensor:
        """Logits of all classes, the same on every rank."""
        if self.tp is None:
            return super().forward(x)
        x, weight, bias = self.operands(x)
        logits = vocab_linear(x, weight, self.tp)[..., : self.out_features]
        return logits if bias is None else logits + bias

    def loss(self, x: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Cross-entropy whose logits are never gathered: see vocab_linear_cross_entropy.

        Raises:
            ValueError: the layer is not split yet, or has a bias.
        """
        if self.tp is None or self.bias is not None:
            raise ValueError(
                "VocabParallelLinear: expected a layer without bias, after parallelize() with "
                f"tp > 1, got tp={self.tp} bias={self.bias is not None}; use "
                "fastpar.nn.LinearCrossEntropyLoss instead"
            )
        x, weight, _ = self.operands(x)
        size = self.out_features
        return vocab_linear_cross_entropy(x, weight, targets, self.tp, vocab_size=size, **options)


class VocabParallelLoss(Split, LinearCrossEntropyLoss):
    """fastpar.nn.LinearCrossEntropyLoss with a head's weight whose rows are split over ranks.

    Requires vocab_size; does not support label_smoothing and z_loss.
    """

    def compute(self, x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        if self.tp is None:
            return super().compute(x, weight, targets, **options)
        for name in ("label_smoothing", "z_loss"):  # 0: convert() refuses other values
            del options[name]
        return vocab_linear_cross_entropy(x, weight, targets, self.tp, **options)


class TokenDropout(Split, nn.Dropout):
    """nn.Dropout of this rank's tokens, [..., T/tp, C]: its slice of the mask of all tokens.

    Every rank draws the full mask: as torch's own it depends on the generator's state, which must
    be the same on all tp ranks. Likewise for cp, with [B, T/cp, C].
    """

    def forward(self, input: Tensor) -> Tensor:
        tp, cp = self.tp, cp_of(self)
        if cp is not None and self.training and self.p > 0.0:
            batch, time, *features = input.shape
            mask = F.dropout(input.new_ones(batch, time * cp.size, *features), self.p)
            return input * cp.slice_rows(mask)
        if tp is None or not tp.sequence_parallel or not self.training or self.p == 0.0:
            return super().forward(input)
        shape = list(input.shape)
        shape[-2] *= tp.size
        mask = F.dropout(input.new_ones(shape), self.p)
        return input * tp.slice(mask, -2)


_FROM: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    ColumnParallelLinear: (nn.Linear,),
    RowParallelLinear: (nn.Linear,),
    VocabParallelLinear: (nn.Linear,),
    VocabParallelEmbedding: (nn.Embedding, Embedding),
    VocabParallelLoss: (LinearCrossEntropyLoss,),
    TokenDropout: (nn.Dropout,),
}


def _options(layer: Any) -> dict[str, Any]:
    """Options of a layer that its split kind does not support."""
    if isinstance(layer, nn.Embedding):
        return embedding_options(layer)
    if not isinstance(layer, LinearCrossEntropyLoss):
        return {}
    found = {"label_smoothing": layer.label_smoothing, "z_loss": layer.z_loss}
    missing = {"vocab_size": None} if layer.vocab_size is None else {}
    return {**missing, **{name: value for name, value in found.items() if value}}


def convert(
    layer: nn.Module, kind: type[nn.Module], *, name: str = "layer", **attributes: Any
) -> Callable[[], None]:
    """Converts a layer to one of this file's kinds, in place; see [Note: another class].

    Args:
        kind: ColumnParallelLinear, RowParallelLinear (of nn.Linear or transformers' Conv1D),
            VocabParallelLinear (of nn.Linear), VocabParallelEmbedding, VocabParallelLoss or
            TokenDropout.
        name: of the layer, for errors.
        attributes: of the kind: groups, heads, all_tokens.
    Returns:
        A function that undoes it.
    Raises:
        ValueError: a layer of another class, with its own forward or with options that the kind
            does not support.
    """
    original: Any = type(layer)
    options = _options(layer)
    target = kind
    if issubclass(kind, Column | Row) and is_conv1d(layer):
        target = _of_conv1d(Column if issubclass(kind, Column) else Row, original)
    elif original not in (*_FROM[kind], kind) or "forward" in vars(layer) or options:
        takes = " or ".join(dict.fromkeys(f"nn.{k.__name__}" for k in _FROM[kind]))
        found = ", ".join([original.__name__, *(f"{k}={v}" for k, v in options.items())])
        raise ValueError(
            f"parallelize: expected {takes} to convert to {kind.__name__}, got {name}={found}; "
            "remove it from tp_plan, or use the plain layer"
        )
    keys = {*attributes, "tp"}
    before = {key: value for key, value in vars(layer).items() if key in keys}
    layer.__class__ = target
    vars(layer).update(attributes)

    def undo() -> None:
        layer.__class__ = original
        for key in keys:
            vars(layer).pop(key, None)
        vars(layer).update(before)

    return undo


@functools.cache
def _of_conv1d(mixin: type, conv1d: type) -> Any:
    return type(f"{mixin.__name__}ParallelConv1D", (mixin, conv1d), {})


# Functions for patched modules whose parts may be split.


def tp_of(part: nn.Module) -> TensorParallel | None:
    """The TensorParallel that splits a part; None: it is not split."""
    return getattr(part, "tp", None)


def cp_of(part: nn.Module) -> ContextParallel | None:
    """The ContextParallel that splits the sequences of a foreign model's part."""
    return vars(part).get("_fastpar_cp")


def share_rows(part: nn.Module, cp: ContextParallel) -> None:
    """Gives a part of a foreign model the ContextParallel by which it gets its tokens."""
    vars(part)["_fastpar_cp"] = cp


def check_generators(group: Collectives, axis: str) -> None:
    """Refuses ranks with different dropout generators: [Note: masks of a part]. Ranks: all."""
    states = [torch.get_rng_state()]
    device = group.device
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    digest = hashlib.sha256(b"".join(bytes(x.tolist()) for x in states)).digest()[:8]
    mine = torch.tensor(
        [int.from_bytes(digest, "little", signed=True)], device=device, dtype=torch.int64
    )
    theirs = group.gathered(mine)
    if not bool((theirs == theirs[0]).all()):
        raise ValueError(
            f"parallelize: expected the {group.world_size} ranks of {axis} to have the same torch "
            "generator for dropout, got different states; call torch.manual_seed(seed + "
            "mesh.dp_rank) before"
        )


def gives_product(layer: nn.Module) -> bool:
    """Whether a split layer can leave its bias to the next op."""
    return isinstance(layer, Row) and layer.tp is not None and not has_hooks(layer)


def head_dropout(
    c_attn: nn.Module, qkv: Tensor, p: float, cp: ContextParallel | None = None
) -> dict[str, Any]:
    """Dropout arguments of attention over the heads of c_attn's output; [Note: masks of a part].

    Args:
        qkv: [B, T, 3, H/tp, D].
    """
    tp, heads = tp_of(c_attn), qkv.shape[-2]
    if p == 0.0 or (tp is None and cp is None):
        return {"dropout_p": p}
    first = 0 if tp is None else tp.rank * heads
    first += 0 if cp is None else cp.first_head(heads)
    return {"dropout_p": p, "rng": Rng(draw_key(qkv.device), 0, first_head=first)}


def residual_norm(
    layer: Any,
    y: Tensor,
    x: Tensor,
    norm: tuple[Any, Any, float],
    p: float,
    cp: ContextParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of x + dropout(layer(y)), and that sum; see [Note: masks of a part].

    A layer that is more than its weights, such as an adapter, is called.

    Args:
        y: [B, T, C/tp]; x: [B, T, C], under sequence parallelism [B, T/tp, C].
        norm: weight, bias and eps.
        p: dropout probability.
        cp: x is this rank's slice along cp; dropout with cp requires tp=1.
    """
    weight, bias, eps = norm
    tp = tp_of(layer)
    if tp is not None:
        y, x_bias = layer.product(y), layer.bias
    else:
        y, x_bias = (product(layer, y), layer.bias) if is_plain(layer) else (layer(y), None)
    options: dict[str, Any] = {"x_bias": x_bias, "dropout_p": p, "eps": eps}
    if cp is not None and p > 0.0:
        first, rows, moved = cp.runs(len(x), x.shape[1] * cp.size)
        rng = Rng(draw_key(x.device), 0, first_row=first, rows=rows, moved=moved)
        return residual_layer_norm(y, x, weight, bias, rng=rng, **options)
    if tp is None or not tp.sequence_parallel or p == 0.0:
        return residual_layer_norm(y, x, weight, bias, **options)
    key, (batch, mine) = draw_key(x.device), x.shape[:2]
    parts = []
    for b in range(batch):
        rng = Rng(key, 0, first_row=(b * tp.size + tp.rank) * mine, rows=mine * tp.size)
        parts.append(residual_layer_norm(y[b], x[b], weight, bias, rng=rng, **options))
    normed, sums = zip(*parts)
    return torch.stack(normed), torch.stack(sums)
