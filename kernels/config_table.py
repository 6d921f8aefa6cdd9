"""Tables of a GPU's tuning choices: tile sizes, warps, how much to keep in cache.

A table is architecture -> place -> config, in a JSON file that ships with the package. Nothing is
timed at a user's first step: `python -m bench tune` tries a table's candidates on a GPU and writes
the winners. A GPU without its own section uses another architecture's, which the table names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

C = TypeVar("C", bound=Any)  # a NamedTuple
Place = tuple[Any, ...]
Values = Sequence[Any]  # a range, or a list
TABLES: dict[str, ConfigTable] = {}  # by name: all imported tables


class ConfigTable(Generic[C]):
    """One table.

    Args:
        name: of its file <name>.json next to the module that defines kind.
        kind: of a config, a NamedTuple.
        allowed: field of a config -> its possible values, or (arch) -> these.
        candidates: (arch, *place) -> configs worth timing.
        archs: compute capabilities with their own section (80 for 8.0).
        places: keys of configs below the architecture; () if there is only one.
        part_for: compute capability -> the architecture whose section serves it.
        adapt: (arch, config) -> the config as such a GPU can run it.
    Attributes:
        get: (arch, *place) -> the config of a GPU of this compute capability.
    """

    def __init__(
        self, name: str, kind: type[C], allowed: Mapping[str, Values | Callable[[int], Values]],
        candidates: Callable[..., list[C]], archs: Sequence[int] = (80, 90),
        places: Sequence[Place] = ((),),
        part_for: Callable[[int], int] = lambda arch: 90 if arch >= 90 else 80,
        adapt: Callable[[int, C], C] = lambda arch, config: config,
    ) -> None:  # fmt: skip
        self.name, self.kind, self.places = name, kind, list(places)
        self.archs, self.part_for, self.candidates = archs, part_for, candidates
        self.path = Path(inspect.getfile(kind)).with_name(f"{name}.json")
        self._allowed, self._adapt = allowed, adapt
        self._tried: dict[Place, C] = {}
        self.load = functools.cache(self._load)
        self.get = functools.cache(self._get)
        TABLES[name] = self

    def _get(self, arch: int, *place: Any) -> C:
        config = self._tried.get(place)
        if config is None:
            key = (self.part_for(arch), *place)
            config = self.load(self.path)[key]
        return self._adapt(arch, config)

    @contextlib.contextmanager
    def trying(self, place: Place, config: C) -> Iterator[None]:
        """Calls inside, also in autograd's threads, find this config at this place."""
        before = dict(self._tried)
        self._tried[place] = config
        self.get.cache_clear()
        try:
            yield
        finally:
            self._tried = before
            self.get.cache_clear()

    def check(self, key: Place, entry: Any) -> C:
        """entry as a config, or a ValueError that names its place; key: (arch, *place)."""

        def refuse(rule: str, name: str, value: Any) -> ValueError:
            return ValueError(
                f"{self.name}: expected {rule}, got {name}={value} at {_shown(key)}; correct "
                f"{self.path.name} or restore the installed file"
            )

        if not isinstance(entry, dict) or set(entry) != set(self.kind._fields):
            raise refuse(f"the fields {', '.join(self.kind._fields)}", "entry", entry)
        for name, values in self._allowed.items():
            values = values(key[0]) if callable(values) else values
            if entry[name] not in values:
                rule = " or ".join(", ".join(map(str, values)).rsplit(", ", 1))
                rule = f"{values[0]} to {values[-1]}" if isinstance(values, range) else rule
                raise refuse(rule, name, entry[name])
        return self.kind(**entry)

    def _load(self, path: Path) -> dict[Place, C]:
        """(arch, *place) -> config, all entries of a file; ValueError names a wrong or missing
        one."""
        table = json.loads(path.read_text())
        configs = {}
        for key in ((arch, *place) for arch in self.archs for place in self.places):
            entry: Any = table
            for name in map(str, key):
                entry = entry.get(name) if isinstance(entry, dict) else None
            configs[key] = self.check(key, entry)
        return configs

    def write(self, arch: int, place: Place, config: C, path: Path | None = None) -> None:
        """Writes one entry of the table (to its own file by default); later calls use it.
        ValueError: no such place in the table, or an impossible config."""
        key = (self.part_for(arch), *place)
        if place not in self.places:
            raise ValueError(
                f"{self.name}: expected a place of {self.path.name}, got place={_shown(key)}; "
                f"choose one of its {len(self.places)}"
            )
        self.check(key, config._asdict())
        path = path or self.path
        table = json.loads(path.read_text())
        node = table
        for name in map(str, key[:-1]):
            node = node[name]
        node[str(key[-1])] = config._asdict()
        path.write_text(render(table))
        self.load.cache_clear()
        self.get.cache_clear()


def _shown(key: Place) -> str:
    return " / ".join(map(str, key))


def render(table: dict[str, Any]) -> str:
    """JSON with one config per line, so that tuning a table again gives a readable diff."""

    def render_node(node: dict[str, Any], level: int) -> str:
        if not any(isinstance(value, dict) for value in node.values()):
            return json.dumps(node)
        pad = "  " * (level + 1)
        items = (f"{pad}{json.dumps(k)}: {render_node(v, level + 1)}" for k, v in node.items())
        return "{\n" + ",\n".join(items) + "\n" + "  " * level + "}"

    return render_node(table, 0) + "\n"
