"""state_dict() and load_state_dict() of a model whose ranks have parts of it see whole tensors.

So do those of its submodules. The module that is asked gathers for all that it asks in turn.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastpar.parallel.engine import Engine


def guard_state_dicts(model: nn.Module, engine: Engine) -> None:
    """From now on they gather, join and cut what the ranks share out. Ranks: all call them."""
    guard = _StateDicts(weakref.ref(engine))
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.register_state_dict_pre_hook(guard.enter)
            module._register_state_dict_hook(guard.copy)
            module.register_load_state_dict_pre_hook(guard.enter_load)
            module.register_load_state_dict_post_hook(guard.leave)


class _StateDicts:
    """Holds gathered() open between two hooks. Copies and pickles of it do nothing."""

    def __init__(self, engine: Callable[[], Engine | None] = lambda: None) -> None:
        self._engine = engine
        self._open: contextlib.ExitStack | None = None
        self._asked: Callable[[], nn.Module | None] = lambda: None  # the outermost module

    def __deepcopy__(self, memo: dict) -> _StateDicts:
        return _StateDicts()

    def __reduce__(self) -> tuple:
        return (_StateDicts, ())

    def enter(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        engine, asked = self._engine(), self._asked()
        if engine is None or (asked is not None and _is_inside(module, asked)):
            return
        self._close()  # of one that failed
        self._asked, self._open = weakref.ref(module), contextlib.ExitStack()
        self._open.enter_context(engine.gathered())

    def enter_load(
        self, module: nn.Module, state: dict, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.enter(module)
        engine = self._engine()
        if engine is None or engine.declared is None or self._asked() is not module:
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
        if engine is not None and self._asked() is module:
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
        self.leave(module)

    def leave(self, module: nn.Module, *args: Any) -> None:
        if self._asked() is module:
            self._close()

    def _close(self) -> None:
        opened, self._open, self._asked = self._open, None, lambda: None
        if opened is not None:
            opened.close()


def _is_inside(module: nn.Module, outer: nn.Module) -> bool:
    return module is not outer and any(part is module for part in outer.modules())
