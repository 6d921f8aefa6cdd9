"""A patched GPT-2 of transformers whose sequences the ranks of cp share out.

    model(input_ids, labels)     each rank's tokens of every row, their position_ids and targets
        its own forward          swapped attention sees the tokens of all ranks
    outputs                      the loss of all tokens, their logits

Hooks before and after the model's forward cut and join: the caller sees one process. Labels are
shifted before they are cut, and the sum of losses is divided by the targets of the whole batch.
Logits beside a loss are joined in evaluation only: in training nobody reads them, and they are the
largest tensor there is.

A model is told its positions by position_ids, or, where it is one of ours, by context_parallel().
Any other one would give every rank the positions from 0 on, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.axes.context.sequences import (
    ContextParallel,
    gather_tokens,
    share_sequences,
    sum_of_parts,
)
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.foreign.fused_gpt2 import GPT2Attention, Model
from fastpar.nn.tp_layers import TokenDropout, check_generators, convert, share_rows

_LIBRARY = "transformers.models.gpt2.modeling_gpt2"
_HEADS = ("GPT2Model", "GPT2LMHeadModel")
_TOKENS = ("input_ids", "token_type_ids")  # [B, T] each, cut like the labels
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_TAKEN = (*_TOKENS, *_OF_LOSS, "return_dict")


def share_context(
    model: nn.Module, mesh: Mesh, make: Callable[[Any, str], Collectives], method: str
) -> tuple[ContextParallel | None, Callable[[ContextParallel], None]]:
    """The place of this rank along cp, None with cp=1, and what tells the model of it. Ranks: all.

    Args:
        make: collectives of a process group for a role.
    Raises:
        ValueError: with cp > 1, a model that cannot be told its positions, is not patched, or has
            too few heads.
    """
    way = _way_of(model, mesh)
    by_row = isinstance(way, SharedRows)
    return share_sequences(model, mesh, make, method, by_row=by_row), way


def _way_of(model: nn.Module, mesh: Mesh) -> Callable[[ContextParallel], None]:
    size, own = mesh.size("cp"), getattr(model, "context_parallel", None)
    if size == 1 or callable(own):
        return own or (lambda cp: None)
    name = type(model).__name__
    if type(model).__module__ != _LIBRARY or name not in _HEADS:
        raise ValueError(
            f"parallelize: expected a model with context_parallel() for cp={size}, or a patched "
            f"GPT-2 of transformers, which are told the positions of their tokens, got {name}; "
            "load its weights into a fastpar.GPT (fastpar train --init-from), or use tp, which "
            "shares out tokens between layers"
        )
    stock = next(_not_swapped(model), None)
    if stock is not None:
        raise ValueError(
            f"parallelize: expected fastpar.patch(model) before cp={size}, whose attention sees "
            f"the tokens of other ranks, got {name} with its own {stock}; call it, and read its "
            "report for what it has left"
        )
    return SharedRows(model, mesh)


def _not_swapped(model: nn.Module) -> Iterator[str]:
    """The names of a GPT-2's parts that have to be swapped and are not."""
    for name, module in model.named_modules():
        kind = type(module)
        whole = kind.__name__ == "GPT2Model" and not isinstance(module, Model)
        if whole or (kind.__name__.endswith("Attention") and not isinstance(module, GPT2Attention)):
            yield name or kind.__name__


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Dropout]]:
    """Those that work on whole features of tokens; not attention's, which is a number to it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith("attn_dropout"):
            yield name, module


class SharedRows:
    """The two hooks, and how they are put in place: called with the ContextParallel.

    Raises:
        ValueError: dropout with tp > 1, or from generators that differ between ranks.
    """

    cp: ContextParallel
    length = 0  # of the rows of the call under way

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.tp_size = model, mesh.tp_size
        config: Any = model.config
        self.longest = config.n_positions
        rates = [module.p for _, module in _dropouts(model)]
        self.drops = any(rates) or config.attn_pdrop > 0.0
        if self.drops and mesh.tp_size > 1:
            raise ValueError(
                f"parallelize: expected no dropout in a foreign model with cp={mesh.size('cp')} "
                f"and tp={mesh.tp_size}, got rates of {max(*rates, config.attn_pdrop)}; set them "
                "to 0, or use one of both"
            )

    def __call__(self, cp: ContextParallel) -> None:
        if self.drops:
            check_generators(cp.group, "cp")
        self.cp = cp
        for name, module in _dropouts(self.model):
            convert(module, TokenDropout, name=name)
            share_rows(module, cp)
        for part in self.model.modules():
            if isinstance(part, Model | GPT2Attention):
                share_rows(part, cp)
        self.names = list(inspect.signature(self.model.forward).parameters)
        self.model.register_forward_pre_hook(self.enter, with_kwargs=True)
        self.model.register_forward_hook(self.leave, with_kwargs=True)

    def enter(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of this rank's part."""
        given = {**dict(zip(self.names, args)), **kwargs}
        given = {name: x for name, x in given.items() if isinstance(x, Tensor) or x}
        self._check(model, given)
        ids, cp = given["input_ids"], self.cp
        batch, self.length = ids.shape
        behind = cp.padding(batch, self.length, cp.size * self.tp_size)
        places = torch.arange(self.length + behind, device=ids.device).clamp(max=self.longest - 1)
        given["position_ids"] = cp.slice_rows(places.expand(batch, -1))
        for name in (name for name in _TOKENS if name in given):
            given[name] = cp.slice_rows(F.pad(given[name], (0, behind)))
        if "labels" in given:
            ignored = given.get("ignore_index", -100)
            shifted = given.get("shift_labels")
            if shifted is None:
                shifted = F.pad(given["labels"], (0, 1), value=ignored)[:, 1:]
            given.setdefault("num_items_in_batch", (shifted != ignored).sum())
            mine = cp.slice_rows(F.pad(shifted, (0, behind), value=ignored))
            given["labels"] = given["shift_labels"] = mine
        return (), {**given, "use_cache": False, "return_dict": True}

    def _check(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        name, ids = type(model).__name__, given.get("input_ids")
        where = f"with cp={self.cp.size}"
        beside = [key for key in given if key not in _TAKEN]
        if beside:
            raise ValueError(
                f"{name}: expected no argument but {', '.join(_TAKEN)} {where}, got {beside[0]}; "
                "leave it out, generate and run padded rows in one process, from a checkpoint"
            )
        if ids is None or ids.dim() != 2 or not 1 <= ids.shape[1] <= self.longest:
            shape = None if ids is None else list(ids.shape)
            raise ValueError(
                f"{name}: expected input_ids [B, T] with 1 <= T <= n_positions={self.longest} "
                f"{where}, got input_ids.shape={shape}; crop the rows"
            )
        if "labels" in given:
            asked = inspect.signature(model.loss_function).parameters  # type: ignore[arg-type]
            if not {"shift_labels", "num_items_in_batch"} <= set(asked):
                raise ValueError(
                    f"{name}: expected a loss_function of shift_labels and num_items_in_batch "
                    f"{where}, got one of {', '.join(asked)}; leave labels out, and compute the "
                    "loss of the logits"
                )

    def leave(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        """The outputs of the whole batch."""
        found, batch = dict(output), len(kwargs["input_ids"])
        if found.get("loss") is not None:
            found["loss"] = sum_of_parts(found["loss"], self.cp)
            if model.training:
                found["logits"] = None
        for name in ("logits", "last_hidden_state"):
            x = found.get(name)
            if x is not None:
                x = gather_tokens(x.flatten(0, 1), batch, self.cp)
                found[name] = x.unflatten(0, (batch, -1))[:, : self.length]
        return type(output)(**found)
