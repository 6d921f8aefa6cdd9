"""Settings as leaves of a tree of frozen dataclasses: names, types, values, changes.

A setting's name is its field's name, or the one given by called(). Names are unique over all
groups, so that flags and files need no group names.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Tree = TypeVar("Tree")


def for_tyro(choose: Callable[[Any], Any]) -> Any:
    """An annotation from tyro.conf if tyro is imported, which the command line does first; else
    None.

    Programs without tyro can therefore use the settings too.
    """
    tyro = sys.modules.get("tyro")
    return choose(tyro.conf) if tyro is not None else None


def called(name: str) -> Any:
    """Give a setting another name than its field's, for flags and files."""
    return for_tyro(lambda conf: conf.arg(name=name.replace("_", "-"))) or name


class More:
    """The type of Parallel.more: the settings of registered axes, a field per axis by its name."""

    def __reduce__(self) -> Any:  # ranks get settings; the class is made anew there
        return _more_of, (dict(vars(self)),)


_groups: dict[str, type] = {}  # name of a registered axis -> the dataclass of its settings


def add_group(axis: str, group: type) -> None:
    """Add the settings of a registered axis. Settings made before lack them."""
    _groups[axis] = group
    leaves.cache_clear()
    added.cache_clear()


@functools.cache
def added() -> type:
    """The dataclass of the groups of registered axes."""
    made = [(axis, of, dataclasses.field(default_factory=of)) for axis, of in _groups.items()]
    return dataclasses.make_dataclass("More", made, bases=(More,), frozen=True)


def _more_of(values: dict[str, Any]) -> Any:
    return added()(**values)


def more() -> Any:
    """The settings of registered axes, with their defaults."""
    return added()()


def of_axes() -> Any:
    """The annotation by which tyro makes the flags of registered axes."""
    return for_tyro(lambda conf: conf.arg(constructor_factory=added))


class Leaf(NamedTuple):
    """A setting: its path in the tree and its type."""

    path: tuple[str, ...]
    hint: Any


@functools.cache
def leaves(tree: type) -> dict[str, Leaf]:
    """All settings of a tree by name."""
    settings: dict[str, Leaf] = {}
    for field, annotated in get_type_hints(tree, include_extras=True).items():
        hint, name = annotated, field
        if get_origin(annotated) is Annotated:
            hint, *extras = get_args(annotated)
            names = [e if isinstance(e, str) else getattr(e, "name", None) for e in extras]
            name = next((n.replace("-", "_") for n in names if n), field)
        hint = added() if hint is More else hint
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            inner = leaves(hint).items()
            settings |= {n: Leaf((field, *leaf.path), leaf.hint) for n, leaf in inner}
        else:
            settings[name] = Leaf((field,), hint)
    return settings


def flat(tree: Any) -> dict[str, Any]:
    """The values of all settings by name."""
    kind: Any = type(tree)
    return {n: functools.reduce(getattr, leaf.path, tree) for n, leaf in leaves(kind).items()}


def changed(
    tree: Tree, values: Mapping[str, Any], who: str = "parallelize", source: str | None = None
) -> Tree:
    """A copy with some settings changed, by name.

    Args:
        who: the command or function that errors name.
        source: the origin of the values, for errors; None: types are not checked.
    Raises:
        ValueError: unknown setting, or a value of another type.
    """
    groups: dict[str, Any] = {}
    kind: Any = type(tree)
    settings = leaves(kind)
    for key, value in values.items():
        name = setting_name(key)
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            raise ValueError(
                f"{who}: expected a setting of `fastpar train --help-all`"
                f"{f' in {source}' if source else ''}, got key={key}; "
                f"{f'did you mean {near[0]}?' if near else 'remove it'}"
            )
        (first, *rest), hint = settings[name]
        words = any(get_origin(arg) is Literal for arg in get_args(hint))
        if words and value in ("auto", "none") and not fits(value, hint):
            value = None  # spelled so in files of earlier versions
        if source is not None and not fits(value, hint):
            raise ValueError(
                f"{who}: expected {describe(hint)} for {name} in {source}, got {name}={value!r}; "
                "see `fastpar train --help-all`"
            )
        value = tuple(value) if isinstance(value, list) else value
        groups[first] = _with(groups.get(first, getattr(tree, first)), rest, value)
    return type(tree)(**{**vars(tree), **groups})


def setting_name(key: str) -> str:
    """The name of a setting from its spelling in a file or as a flag without dashes."""
    name = key.replace("-", "_")
    return {"zero": "zero_stage", "log": "logger"}.get(name, name)


def _with(tree: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of the tree with another value at the path."""
    if not path:
        return value
    inner = _with(getattr(tree, path[0]), path[1:], value)
    return type(tree)(**{**vars(tree), path[0]: inner})


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from a file has a setting's type; integers are valid floats."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        several = value if isinstance(value, (list, tuple)) else [value]
        return all(fits(v, args[0]) for v in several)
    if origin is tuple:
        items = isinstance(value, (list, tuple)) and len(value) == len(args)
        return items and all(fits(v, arg) for v, arg in zip(value, args))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def check_types(who: str, tree: Any) -> None:
    """Raise ValueError for a value that does not have its setting's type."""
    kind: Any = type(tree)
    settings = leaves(kind)
    for name, value in flat(tree).items():
        hint = settings[name].hint
        if not fits(value, hint) and value != "fp64":  # a format that no flag offers
            raise ValueError(
                f"{who}: expected {describe(hint)} for {name}, got {name}={value!r}; drop it to "
                "use the default"
            )


def describe(hint: Any) -> str:
    """A type in words."""
    args = [arg for arg in get_args(hint) if arg is not types.NoneType]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, args))
    if get_origin(hint) is tuple and Ellipsis in args:
        return f"{describe(args[0])} or a list of them"
    if get_origin(hint) is tuple:
        return f"{len(args)} numbers"
    return " or ".join(describe(arg) for arg in args) if args else hint.__name__
