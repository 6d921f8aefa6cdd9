"""Settings are the leaves of a tree of frozen dataclasses: their names, types, values, changes.

A leaf's name is that of its field, or the one that called() gives it outside of its group. Names
are of one setting only, so that flags and files need no groups.
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
    ClassVar,
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
    """Something of tyro.conf, which is imported by the time that it looks at types.

    Others, which may not have tyro, see nothing.
    """
    tyro = sys.modules.get("tyro")
    return choose(tyro.conf) if tyro is not None else None


def called(name: str) -> Any:
    """The name of a setting where its group is not said: of its flag, and in files."""
    return for_tyro(lambda conf: conf.arg(name=name.replace("_", "-"))) or name


class More:
    """Settings of axes that were registered beside fastpar's own: a group for each, by its name."""

    groups: ClassVar[dict[str, type]] = {}

    def __init__(self, **groups: Any) -> None:
        vars(self).update(groups)

    def __getattr__(self, name: str) -> Any:
        if name not in self.groups:
            raise AttributeError(name)
        return self.groups[name]()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, More) and all(
            getattr(self, name) == getattr(other, name) for name in self.groups
        )

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.groups))

    def __repr__(self) -> str:
        return f"More({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    @classmethod
    def add(cls, name: str, group: type) -> None:
        """Settings of one more axis."""
        cls.groups[name] = group
        leaves.cache_clear()

    @classmethod
    def as_dataclass(cls) -> type:
        """The groups as fields, as a command line reads them."""
        made = dataclasses.field
        fields = [(name, of, made(default_factory=of)) for name, of in cls.groups.items()]
        return dataclasses.make_dataclass("More", fields, frozen=True)

    @classmethod
    def of_command(cls) -> Any:
        """What tells tyro so."""
        return for_tyro(lambda conf: conf.arg(constructor_factory=cls.as_dataclass))


class Leaf(NamedTuple):
    """A setting: where it stands in the tree, and its type."""

    path: tuple[str, ...]
    hint: Any


@functools.cache
def leaves(tree: type) -> dict[str, Leaf]:
    """Every setting of a tree by its name."""
    found: dict[str, Leaf] = {}
    for field, annotated in get_type_hints(tree, include_extras=True).items():
        hint, name = annotated, field
        if get_origin(annotated) is Annotated:
            hint, *extras = get_args(annotated)
            given = [e if isinstance(e, str) else getattr(e, "name", None) for e in extras]
            name = next((n.replace("-", "_") for n in given if n), field)
        if hint is More:
            for group, of_axis in More.groups.items():
                inner = leaves(of_axis).items()
                found |= {n: Leaf((field, group, *leaf.path), leaf.hint) for n, leaf in inner}
        elif dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            inner = leaves(hint).items()
            found |= {n: Leaf((field, *leaf.path), leaf.hint) for n, leaf in inner}
        else:
            found[name] = Leaf((field,), hint)
    return found


def flat(tree: Any) -> dict[str, Any]:
    """Every setting's value by its name."""
    kind: Any = type(tree)
    return {n: functools.reduce(getattr, leaf.path, tree) for n, leaf in leaves(kind).items()}


def changed(
    tree: Tree, values: Mapping[str, Any], who: str = "parallelize", source: str | None = None
) -> Tree:
    """A copy with some settings changed, by their names.

    Args:
        who: of errors: who reads them. source: where they stand; None: types are not looked at.
    Raises:
        ValueError: no such setting, or a value of another type.
    """
    groups: dict[str, Any] = {}
    kind: Any = type(tree)
    known = leaves(kind)
    for key, value in values.items():
        name = setting_name(key)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"{who}: expected a setting of `fastpar train --help-all`"
                f"{f' in {source}' if source else ''}, got key={key}; "
                f"{f'did you mean {near[0]}?' if near else 'remove it'}"
            )
        (first, *rest), hint = known[name]
        words = any(get_origin(arg) is Literal for arg in get_args(hint))
        if words and value in ("auto", "none") and not fits(value, hint):
            value = None  # files of earlier versions say it so
        if source is not None and not fits(value, hint):
            raise ValueError(
                f"{who}: expected {describe(hint)} for {name} in {source}, got {name}={value!r}; "
                "see `fastpar train --help-all`"
            )
        value = tuple(value) if isinstance(value, list) else value
        groups[first] = _with(groups.get(first, getattr(tree, first)), rest, value)
    return type(tree)(**{**vars(tree), **groups})


def setting_name(key: str) -> str:
    """A setting as it is spelled in a file or, without its dashes, as a flag."""
    name = key.replace("-", "_")
    return {"zero": "zero_stage", "log": "logger"}.get(name, name)


def _with(tree: Any, path: Sequence[str], value: Any) -> Any:
    """The tree with another value at the path."""
    if not path:
        return value
    inner = _with(getattr(tree, path[0]), path[1:], value)
    return type(tree)(**{**vars(tree), path[0]: inner})


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from a file is of a setting's type; integers do for floats."""
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
    """Refuse values of another type than their setting's."""
    kind: Any = type(tree)
    known = leaves(kind)
    for name, value in flat(tree).items():
        hint = known[name].hint
        if not fits(value, hint) and value != "fp64":  # a format that no flag offers
            raise ValueError(
                f"{who}: expected {describe(hint)} for {name}, got {name}={value!r}; leave it out "
                "for what is usual"
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
