"""Names Triton's cache by its version alone, so that a cache made elsewhere is found (gpu.sh pack).

Python runs this file at its start, as sitecustomize. Triton's own key holds a hash of its binary,
which differs between builds of one version.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Finder:
    """Finds triton.runtime.cache, and changes triton_key() once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "triton.runtime.cache":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            vars(module)["triton_key"] = lambda: module.__version__

        vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, Finder)
