"""state_dict() and load_state_dict() of a model whose ranks have parts of it see whole tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastpar.engine import Engine


def guard_state_dicts(model: nn.Module, engine: Engine) -> None:
    """From now on they gather, join and cut what the ranks share out. Ranks: all call them."""
    guard = _StateDicts(weakref.ref(engine))
    model.register_state_dict_pre_hook(guard.enter)
    model._register_state_dict_hook(guard.copy)
    model.register_load_state_dict_pre_hook(guard.enter_load)
    model.register_load_state_dict_post_hook(guard.leave)


class _StateDicts:
    """Holds gathered() open between two hooks. Copies and pickles of it do nothing."""

    def __init__(self, engine: Callable[[], Engine | None] = lambda: None) -> None:
        self._engine = engine
        self._open: contextlib.ExitStack | None = None

    def __deepcopy__(self, memo: dict) -> _StateDicts:
        return _StateDicts()

    def __reduce__(self) -> tuple:
        return (_StateDicts, ())

    def enter(self, *args: Any, **kwargs: Any) -> None:
        engine = self._engine()
        if engine is not None:
            self._open = contextlib.ExitStack()
            self._open.enter_context(engine.gathered())

    def enter_load(
        self, module: nn.Module, state: dict, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.enter()
        engine = self._engine()
        if engine is None or engine.declared is None:
            return
        errors: list[str] = args[-1]  # torch raises them together with its own
        for name, p in module.named_parameters(remove_duplicate=False):
            value, whole = state.get(prefix + name), engine.declared.whole_shape(p)
            if not isinstance(value, Tensor):
                continue
            if value.shape == whole:
                state[prefix + name] = engine.declared.cut(value, p)
            else:  # torch would take it if it happened to have the shape of a slice
                state[prefix + name] = p.detach().clone()
                errors.append(
                    f"size mismatch for {prefix}{name}: expected the whole tensor's shape "
                    f"{list(whole)}, got {list(value.shape)}; load a state_dict of the same model"
                )

    def copy(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        engine = self._engine()
        if self._open is not None and engine is not None:
            joined: dict[int, Tensor] = {}  # tied ones once, under all their names
            for name, p in module.named_parameters(remove_duplicate=False):
                value = state.get(prefix + name)
                if value is None or value.data_ptr() != p.data_ptr():
                    continue
                if engine.declared is not None:
                    if id(p) not in joined:
                        joined[id(p)] = engine.declared.whole(p.detach(), p)
                    state[prefix + name] = joined[id(p)]
                elif engine.zero_stage:
                    state[prefix + name] = value.clone()
        self.leave()

    def leave(self, *args: Any) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
