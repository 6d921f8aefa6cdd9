"""Tables of a GPU's tuning choices: tile sizes, warps, how much to keep in cache.

A table is architecture -> place -> config, in a JSON file that ships with the package. Nothing is
timed at a user's first step: `python -m bench tune` tries a table's candidates on a GPU and writes
the winners. section_of() says which section serves a GPU.
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
# Shared memory that a program may use, for each section: A100; RTX 30 to 50; H100, H200, B200.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


def section_of(arch: int) -> int:
    """The architecture whose section serves a compute capability (80 for 8.0). 86 is for 100 KB of
    shared memory: 8.6, 8.9 and 12.x, and anything older than 8.0."""
    if 90 <= arch < 120:
        return 90
    return 80 if arch in (80, 87) else 86


class ConfigTable(Generic[C]):
    """One table.

    Args:
        name: of its file <name>.json next to the module that defines kind.
        kind: of a config, a NamedTuple.
        candidates: (arch, *place) -> configs worth timing.
        places: keys of configs below the architecture; () if there is only one.
        adapt: (arch, config) -> the config as such a GPU can run it.
    Attributes:
        get: (arch, *place) -> the config of a GPU of this compute capability.
    """

    def __init__(
        self, name: str, kind: type[C], candidates: Callable[..., list[C]],
        places: Sequence[Place] = ((),),
        adapt: Callable[[int, C], C] = lambda arch, config: config,
    ) -> None:  # fmt: skip
        self.name, self.kind, self.places = name, kind, list(places)
        self.candidates = candidates
        self.path = Path(inspect.getfile(kind)).with_name(f"{name}.json")
        self._adapt = adapt
        self._tried: dict[Place, C] = {}
        self.load = functools.cache(self._load)
        self.get = functools.cache(self._get)
        TABLES[name] = self

    def _get(self, arch: int, *place: Any) -> C:
        config = self._tried.get(place)
        if config is None:
            key = (section_of(arch), *place)
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
        keys = [(arch, *place) for arch in SHARED_BYTES for place in self.places]
        entries = (functools.reduce(operator.getitem, map(str, key), table) for key in keys)
        return {key: self.kind(**entry) for key, entry in zip(keys, entries)}

    def write(self, arch: int, place: Place, config: C) -> None:
        """Writes one entry of the table to its file; later calls use it."""
        *nodes, last = map(str, (section_of(arch), *place))
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
