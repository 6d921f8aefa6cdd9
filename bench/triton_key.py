"""Names Triton's cache by its version alone, so that a cache made elsewhere is found (gpu.sh pack).

Python runs this file at its start, as sitecustomize. Triton's own key holds a hash of its binary,
which differs between builds of one version.
"""

import sys
from importlib.machinery import PathFinder


class Finder:
    """Finds triton.runtime.cache, and changes triton_key() once it is loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "triton.runtime.cache":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.triton_key = lambda: module.__version__

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
