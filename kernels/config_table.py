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
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastpar.kernels.choice import forget_recipes

C = TypeVar("C", bound=Any)  # a NamedTuple
Place = tuple[Any, ...]
TABLES: dict[str, ConfigTable] = {}  # by name: all imported tables


class ConfigTable(Generic[C]):
    """One table.

    Args:
        name: of its file <name>.json next to the module that defines kind.
        kind: of a config, a NamedTuple.
        candidates: (arch, *place) -> configs worth timing.
        archs: compute capabilities with their own section (80 for 8.0).
        places: keys of configs below the architecture; () if there is only one.
        part_for: compute capability -> the architecture whose section serves it.
        adapt: (arch, config) -> the config as such a GPU can run it.
    Attributes:
        get: (arch, *place) -> the config of a GPU of this compute capability.
    """

    def __init__(
        self, name: str, kind: type[C], candidates: Callable[..., list[C]],
        archs: Sequence[int] = (80, 90), places: Sequence[Place] = ((),),
        part_for: Callable[[int], int] = lambda arch: 90 if arch >= 90 else 80,
        adapt: Callable[[int, C], C] = lambda arch, config: config,
    ) -> None:  # fmt: skip
        self.name, self.kind, self.places = name, kind, list(places)
        self.archs, self.part_for, self.candidates = archs, part_for, candidates
        self.path = Path(inspect.getfile(kind)).with_name(f"{name}.json")
        self._adapt = adapt
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
        self._forget()
        try:
            yield
        finally:
            self._tried = before
            self._forget()

    def _forget(self) -> None:
        self.get.cache_clear()
        forget_recipes()

    def _load(self, path: Path) -> dict[Place, C]:
        """(arch, *place) -> config, all entries of a file."""
        table = json.loads(path.read_text())
        keys = [(arch, *place) for arch in self.archs for place in self.places]
        entries = (functools.reduce(operator.getitem, map(str, key), table) for key in keys)
        return {key: self.kind(**entry) for key, entry in zip(keys, entries)}

    def write(self, arch: int, place: Place, config: C) -> None:
        """Writes one entry of the table to its file; later calls use it."""
        *nodes, last = map(str, (self.part_for(arch), *place))
        table = json.loads(self.path.read_text())
        functools.reduce(operator.getitem, nodes, table)[last] = config._asdict()
        self.path.write_text(render(table))
        self.load.cache_clear()
        self._forget()


def render(table: dict[str, Any]) -> str:
    """JSON with one config per line, so that tuning a table again gives a readable diff."""

    def render_node(node: dict[str, Any], level: int) -> str:
        if not any(isinstance(value, dict) for value in node.values()):
            return json.dumps(node)
        pad = "  " * (level + 1)
        items = (f"{pad}{json.dumps(k)}: {render_node(v, level + 1)}" for k, v in node.items())
        return "{\n" + ",\n".join(items) + "\n" + "  " * level + "}"

    return render_node(table, 0) + "\n"
