"""The state of optimizers of other packages, for checkpoints: torch.optim's, and others.

fastpar/engine/optimizers.py steps them on sharded parameters and knows the entries of their state.
A checkpoint holds entries of parameters: numbers, and tensors like the parameter or equal on all
ranks. Counters in groups, state of no parameter and wrapped optimizers it cannot hold.
"""

from __future__ import annotations

import copy as copy_module
from typing import Any

import torch
from torch import Tensor

from fastpar.engine.optimizers import OURS, NotElementwise, stepped
from fastpar.optim.base import EngineOptimizer, SavedState
from fastpar.optim.state import OF_WEIGHTS, settle, whole_shape


def saved_state(optimizer: torch.optim.Optimizer) -> SavedState:
    """The optimizer as checkpoints see it."""
    return optimizer if isinstance(optimizer, EngineOptimizer) else ForeignState(optimizer)


class ForeignState(SavedState):
    """The state of an optimizer that is not fastpar's.

    Raises:
        ValueError: a checkpoint would lack a part of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._known = optimizer, stepped(optimizer)
        kept = vars(optimizer).values()
        wraps = any(isinstance(value, torch.optim.Optimizer) for value in kept)
        if wraps or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            what = "wraps another optimizer" if wraps else "has a state_dict of its own"
            raise ValueError(
                f"Saver: {self.name} {what}, whose state a checkpoint does not have; save its "
                "state_dict() yourself"
            )
        try:
            self._known.learn(optimizer, in_pieces=False)
        except NotElementwise as why:
            raise ValueError(f"Saver: {self.name} cannot be tried, as {why}") from why
        self._known.cut(optimizer)

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def settle(self) -> None:
        """Wait for parts of the state that still change."""
        settle(self.optimizer)

    def check_saves(self) -> None:
        """Raise ValueError if a checkpoint, which has entries of parameters, would lack a part."""
        known = self._known
        known.learn(self.optimizer, in_pieces=False)  # groups that were added
        known.cut(self.optimizer)
        counts = [name for trial in known.trials.values() for name in trial.counts]
        rest = [key for key in self.state if not isinstance(key, Tensor)]
        others = [n for n, e in known.entries.items() if e.kind not in (Tensor, bool, int, float)]
        for what, names in (
            ("changes options of its groups", counts),
            ("keeps state of no parameter", rest),
            ("keeps entries that are no numbers", others),
            ("keeps entries that differ between parameters", known.strange(self.optimizer)),
        ):
            if names:
                raise ValueError(
                    f"Saver: {self.name} {what} ({names[0]}), which a checkpoint does not have; "
                    "save its state_dict() yourself"
                )

    def entry_block(self, name: str) -> int:
        """1: an entry has the parameter's elements; 0: every rank has all of it."""
        return self._known.block(name)

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        whole = whole_shape(p)
        entries = {n: whole if e.like else e.shape for n, e in self._known.entries.items()}
        return dict.fromkeys(OF_WEIGHTS, whole) | entries

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        i = next(i for i, g in enumerate(self.param_groups) if g is group)
        return [[(name,)] for name in sorted(self._known.trials[i].first)]

    def _check_entries(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], where: str
    ) -> None:
        super()._check_entries(saved, p, group, where)
        for name in sorted(saved.keys() - OURS):
            entry, value = self._known.entries.get(name), saved[name]
            advice = f"load the state that was saved with {self.name} and these options"
            if entry is None:
                raise ValueError(
                    f"{self.name}.load_state_dict: expected entries of {self.name} for {where}, "
                    f"got {name}, which it did not make in a trial; {advice}"
                )
            if isinstance(value, Tensor) and entry.kind is Tensor:
                dtype = entry.dtype or p.dtype
                if value.dtype != dtype and not (
                    value.is_floating_point() and dtype.is_floating_point
                ):
                    raise ValueError(
                        f"{self.name}.load_state_dict: expected {name} of dtype {dtype} for "
                        f"{where}, got dtype={value.dtype}, which has other values; {advice}"
                    )

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name in self._known.entries.keys() & saved.keys():
            value, entry = saved[name], self._known.entries[name]
            if entry.kind is not Tensor:
                plain = value.item() if isinstance(value, Tensor) else copy_module.deepcopy(value)
                entries[name] = entry.kind(plain)
                continue
            device = p.device if entry.on_device else torch.device("cpu")
            dtype = entry.dtype or p.dtype
            if entry.like:
                like = torch.empty_like(p, dtype=dtype, device=device, requires_grad=False)
                entries[name] = like.copy_(value)
            else:
                entries[name] = value.to(device, dtype, copy=copy).reshape(entry.shape)
        return entries
