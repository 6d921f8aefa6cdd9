"""Public kernels that a GPU row is compared with where they are installed.

A package that is missing leaves a visible row: refused, not installed.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor


def installed(module: str, name: str) -> Callable[..., Any]:
    """module.name, or a function that raises ImportError when it is called."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        package = module.partition(".")[0]

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise ImportError(f"{package} is not installed")

        return missing


def _first(result: Any) -> Any:
    """Some versions return statistics beside the result."""
    return result[0] if isinstance(result, tuple) else result


def liger(name: str) -> dict[str, Callable[..., Any]]:
    """Liger's function liger_<name>; cross_entropy overwrites the logits with their gradient."""
    op = installed("liger_kernel.transformers.functional", f"liger_{name}")
    found: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, weight, bias: op(x, weight, bias, 1e-5),
        # In place it would overwrite the gradient that the other variants read too.
        "rms_norm": lambda x, weight: op(x, weight, 1e-6, in_place=False),
        "cross_entropy": lambda logits, targets: _first(op(logits, targets)),
        "fused_linear_cross_entropy": lambda x, weight, targets: _first(op(x, weight, targets)),
    }
    return {"liger": found[name]}


def attentions(dropout_p: float) -> dict[str, Callable[..., Any]]:
    """Causal, of one packed projection [B, T, 3, H, D]. FlashAttention 3 has no dropout."""
    two = installed("flash_attn", "flash_attn_qkvpacked_func")
    three = installed("flash_attn_interface", "flash_attn_func")

    def flash_attn_3(qkv: Tensor) -> Tensor:
        return _first(three(*qkv.unbind(2), causal=True))

    found: dict[str, Callable[..., Any]] = {
        "flash-attn 2": lambda qkv: two(qkv, dropout_p=dropout_p, causal=True)
    }
    return found if dropout_p else {**found, "flash-attn 3": flash_attn_3}


def adamws(device: str, hyper: dict[str, Any]) -> dict[str, Callable[[list[Tensor]], Any]]:
    """AdamW optimizers of (fp32 parameters), with decoupled decay."""
    if device == "cpu":
        deepspeed = installed("deepspeed.ops.adam", "DeepSpeedCPUAdam")
        return {"deepspeed": lambda params: deepspeed(params, **hyper, adamw_mode=True)}
    bits = installed("bitsandbytes.optim", "AdamW8bit")
    return {"bitsandbytes 8-bit": lambda params: bits(params, **hyper)}
