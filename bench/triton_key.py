"""Triton's cache, made elsewhere, is found (gpu.sh pack).

Python runs this file at its start, as sitecustomize. Triton's own key holds a hash of its binary,
which differs between builds of one version: here it is the version. And a kernel's list of files
has the paths of the machine that compiled it: here they are where the list is.
"""

import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Finder:
    """Finds triton.runtime.cache, and changes it once it is loaded."""

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
            module.FileCacheManager.get_group = files_beside

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def files_beside(self: Any, name: str) -> dict[str, str] | None:
    """In place of FileCacheManager.get_group()."""
    listed = self.get_file(f"__grp__{name}")
    if listed is None:
        return None
    with open(listed) as file:
        names = json.load(file)["child_paths"]
    return {each: path for each in names if (path := self.get_file(each)) is not None}


sys.meta_path.insert(0, Finder)
