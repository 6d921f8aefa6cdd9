"""Ops for GPT-2-class models: functions from tensors to tensors, drop-in for torch's.

This folder is installed as the subpackage `fastpar.kernels`.

[Note: name guard] Imported as `kernels`, which happens with the checkout's root on sys.path, this
package is empty, and any access is an ImportError that says what to do. The import itself does not
raise: transformers probes for a package of that name, and would fail with it.
"""

if __name__ != "fastpar.kernels":
    globals()["__path__"] = []  # no submodule is found under the wrong name

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"kernels: expected to be imported as fastpar.kernels, got {__name__}; "
            "run `pip install -e .` in the checkout and import fastpar.kernels"
        )

else:
    import importlib
    import os
    import sys
    import warnings
    from pathlib import Path
    from typing import Any

    import torch  # first, so that _C binds to torch's OpenMP library

    try:
        _C: Any = importlib.import_module("fastpar.kernels._C")
    except ImportError as error:
        raise ImportError(
            f"fastpar.kernels: expected the compiled module _C, got {error}; "
            "run `pip install -e .` in the checkout (or `make train`)"
        ) from error
    nodes: Any = None  # the file of the ops and their autograd nodes, csrc/torch
    if str(getattr(_C, "__file__", "")).endswith(".py"):
        _C = None  # setup.py's stand-in: installed with FASTPAR_CPP=0, torch computes everything
    else:
        _minor = "_".join(torch.__version__.split(".")[:2])
        nodes = Path(_C.__file__.replace(f"{os.sep}_C.", f"{os.sep}_torch{_minor}."))
        if nodes.exists():
            torch.ops.load_library(nodes)
        else:
            _C = None
            _found = sorted(path.name[6:].split(".")[0] for path in nodes.parent.glob("_torch*.so"))
            warnings.warn(
                f"fastpar.kernels: expected a library for torch {torch.__version__}, got those for "
                f"{', '.join(_found).replace('_', '.') or 'none'}, so torch computes everything; "
                "install another torch or fastpar, or run `pip install -e .` in a checkout",
                stacklevel=2,
            )

    if "fastpar.kernels.backend" in sys.orig_argv:
        # `python -m` warns about a module that its own package imports, as this package must.
        warnings.filterwarnings("ignore", message="'fastpar.kernels.backend' found in sys.modules")

    from fastpar.kernels.activation import activation, bias_gelu
    from fastpar.kernels.adamw import Hyper, adamw_step_
    from fastpar.kernels.attention import attention, attention_qkvpacked
    from fastpar.kernels.backend import keep_freed_memory
    from fastpar.kernels.embedding import embedding
    from fastpar.kernels.flops import register as _register_flops
    from fastpar.kernels.global_norm import global_norm
    from fastpar.kernels.grouped_linear import grouped_linear
    from fastpar.kernels.linear import linear
    from fastpar.kernels.linear.fp8 import DelayedScales, Fp8
    from fastpar.kernels.loss.cross_entropy import (
        cross_entropy,
        cross_entropy_shard,
        cross_entropy_shard_grad,
    )
    from fastpar.kernels.loss.linear_cross_entropy import linear_cross_entropy
    from fastpar.kernels.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm
    from fastpar.kernels.orthogonalize import orthogonalize
    from fastpar.kernels.permute import combine, permute
    from fastpar.kernels.philox import Rng, draw_key, dropout, keep_mask, make_key, quantize_p
    from fastpar.kernels.quantize import dequantize_blockwise, quantize_blockwise
    from fastpar.kernels.rope import rope, rope_turns
    from fastpar.kernels.route import route
    from fastpar.kernels.sum_shards import sum_shards

    _register_flops()

    __all__ = [
        "DelayedScales", "Fp8", "Hyper", "Rng", "activation", "adamw_step_",
        "attention", "attention_qkvpacked", "bias_gelu", "combine",
        "cross_entropy", "cross_entropy_shard", "cross_entropy_shard_grad",
        "dequantize_blockwise", "draw_key",
        "dropout", "embedding", "global_norm", "grouped_linear", "keep_freed_memory",
        "keep_mask", "layer_norm", "linear", "linear_cross_entropy", "make_key", "orthogonalize",
        "permute", "quantize_blockwise", "quantize_p", "residual_layer_norm",
        "residual_rms_norm", "rms_norm", "rope", "rope_turns", "route", "sum_shards",
    ]  # fmt: skip
