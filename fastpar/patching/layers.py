"""What the modules of a foreign GPT-2 do once patching.py has swapped them.

[Note: how a module is swapped] The instance gets another class: a subclass of its own class, made
from a mixin of this file, with the same name. Parameters, hooks, state_dict keys, isinstance and
code that goes by class names (transformers' save_pretrained, FSDP's wrapping) see no difference.
Such a class cannot be imported by name, so an instance is pickled and copied as its mixin and its
own class.

[Note: falling back] A call that asks for something the kernels do not have goes to the module's own
forward as a whole. It warns once for each reason and model, and is counted in the report. What
torch.compile traces is not counted, and warns when it is traced.

[Note: settings] A module that proved what it computes (patch_probe.py) did so with the numbers,
flags and buffers that it had. They are looked at in every call: once one is another, the calls fall
back. A buffer's values are compared when it is another tensor or was written to; not in what
torch.compile traces.

[Note: split parts] parallelize() may split the parts, see tp_layers.py: a rank then has some of the
heads, and draws their part of the masks. A call with dropout in attention that would fall back is
refused: torch would draw the same mask on every rank, for other heads.

[Note: parts that are not called] A swapped module uses the weights of its plain parts directly. A
part with hooks, a wrapped forward or another class than it had is called instead, and what would
have been fused with it is not (test_hooks_run_in_a_patched_model).
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastpar.kernels import attention_qkvpacked, layer_norm
from fastpar.kernels.attention import MAX_HEAD_DIM, TRITON_HEAD_DIM
from fastpar.kernels.backend import use_triton
from fastpar.nn.modules import (
    GELU,
    LayerNorm,
    autocast_dtype,
    autocast_norm,
    has_hooks,
    is_plain,
    linear_gelu,
    project,
    with_weights,
)
from fastpar.nn.tp_layers import (
    TokenDropout,
    gives_product,
    head_dropout,
    residual_norm,
    tp_of,
)

MODULE_FIELDS = frozenset({*vars(nn.Module()), "training"})
_VALUES = (bool, int, float, str, tuple, list, type(None), torch.dtype)
_GONE = object()
# Set by Model for the attention of its blocks: "causal" (whatever mask comes with it is the causal
# one) or "attentions" (the caller wants the probabilities).
MASK_HINT = "fastpar_mask"


class Swap:
    """What a swapped module remembers: its own class, its mixin, what was found out about it."""

    def __init__(self, mixin: Any, original: Any, fallbacks: Counter[str], options: dict[str, Any]):
        self.mixin, self.original = mixin, original
        self.fallbacks, self.options = fallbacks, options
        # Name of a buffer -> that which was found to be as it was, and its version.
        self.seen: dict[str, tuple[Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "seen": {}}


def plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What of these can be compared later on: no tensors, modules or methods."""
    for name, value in values.items():
        if name.startswith("__") or name in MODULE_FIELDS or name == "_fastpar_swap":
            continue
        if isinstance(value, _VALUES):
            yield name, value


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own settings, those of its class among them."""
    found: dict[str, Any] = {}
    for base in reversed(type(module).__mro__):
        if base is not object and not base.__module__.startswith(("torch.", "fastpar.")):
            found |= plain(vars(base))
    return iter({**found, **dict(plain(vars(module)))}.items())


def swap_of(module: nn.Module) -> Swap | None:
    """The Swap of a swapped module."""
    return vars(module).get("_fastpar_swap")


def _announce(name: str, reason: str) -> None:
    warnings.warn(
        f"fastpar.patch: {name} falls back to its own forward for this call: {reason}",
        stacklevel=4,
    )


# torch.compile calls it while tracing; torch.compiler.assume_constant_result would set the same
# mark, but imports the compiler.
_announce._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fall_back(module: nn.Module, reason: str) -> None:
    """Warns and counts; see [Note: falling back]."""
    name = type(module).__name__
    if torch.compiler.is_compiling():
        _announce(name, reason)
        return
    swap = swap_of(module)
    if swap is None:  # another instance of a swapped class
        return
    key = f"{name}: {reason}"
    if key not in swap.fallbacks:
        _announce(name, reason)
    swap.fallbacks[key] += 1


class Swapped(nn.Module):
    """Base of the mixins; see [Note: how a module is swapped]."""

    names: tuple[str, ...] = ()  # of the original forward's positional arguments
    own_forward: tuple[Any, ...] = ()  # the original's
    registered: tuple[Any, Any] = (None, None)  # see swapped_class
    does = ""  # for the report: what is faster
    falls_back: tuple[str, ...] = ()  # for the report: when

    if TYPE_CHECKING:  # the original's attributes

        def __getattr__(self, name: str) -> Any: ...

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name."""
        return {**dict(zip(self.names, args)), **kwargs}

    def option(self, name: str) -> Any:
        return vars(self)["_fastpar_swap"].options[name]

    def changed(self, x: Any = None) -> str | None:
        """What is not as it was when the module was patched; see [Note: settings]."""
        swap = swap_of(self)
        if swap is None:
            return "not patched itself"
        if type(self).own_forward[0] is not swap.original.forward:
            return "its class got another forward"
        for path, value in swap.options.get("settings", ()):
            now: Any = self
            for name in path:
                now = getattr(now, name, _GONE)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"{'.'.join(path)} is not what it was"
        most = swap.options.get("tokens")
        if most is not None and isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] > most:
            return f"more than {most} tokens, the most that were looked at"
        for name, kind in swap.options.get("parts", ()):
            now = type(getattr(self, name, None))
            if now is not kind and (now, kind) != (TokenDropout, nn.Dropout):
                return f"{name} is not what it was"
        if torch.compiler.is_compiling():
            return None
        for name, value in swap.options.get("buffers", {}).items():
            now = getattr(self, name, None)
            version = 0 if now is None or now.is_inference() else now._version
            seen = swap.seen.get(name)
            if seen is None or seen[0]() is not now or seen[1] != version:
                if now is None or now.shape != value.shape:
                    return f"{name} is not what it was"
                if not torch.equal(now.detach().to("cpu", value.dtype), value):
                    return f"{name} is not what it was"
                swap.seen[name] = weakref.ref(now), version
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        swap = swap_of(self)
        if swap is None or type(self) is not swapped_class(swap.mixin, swap.original):
            return super().__reduce_ex__(protocol)
        # Python 3.10 has no object.__getstate__.
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _new, (swap.mixin, swap.original), state


def _new(mixin: Any, original: Any) -> nn.Module:
    kind = swapped_class(mixin, original)
    return kind.__new__(kind)


@functools.cache
def swapped_class(mixin: Any, original: Any) -> Any:
    """The class of a swapped module: made from a mixin, or fastpar's own in place of torch's."""
    if not issubclass(mixin, Swapped):
        return mixin
    names = [
        p.name
        for p in inspect.signature(original.forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(original.forward)  # transformers reads its signature
    def forward(self, *args, **kwargs):
        return mixin.forward(self, *args, **kwargs)

    # For GPT2Attention: transformers' registry of attention functions, and its own one for sdpa.
    registry = vars(sys.modules[original.__module__]).get("ALL_ATTENTION_FUNCTIONS")
    sdpa = vars(sys.modules.get("transformers.integrations.sdpa_attention", sys))
    body = {
        "registered": (registry, sdpa.get("sdpa_attention_forward")),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "names": tuple(names[1:]),
        "own_forward": (original.forward,),
        "forward": forward,
    }
    return type(original)(original.__name__, (mixin, original), body)


def probs_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the probabilities' dropout, read from an nn.Dropout or a number; None is 0."""
    if name is None or not attn.training:
        return 0.0
    source: Any = getattr(attn, name)
    return source.p if isinstance(source, nn.Dropout) else source


def resid_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the output's dropout, an nn.Dropout that may be in another mode than attn."""
    dropout: Any = None if name is None else getattr(attn, name)
    return dropout.p if dropout is not None and dropout.training else 0.0


def rate_fits(p: float) -> bool:
    """Whether the kernels' masks have this rate; see kernels.quantize_p."""
    return p == 0.0 or 1.0 / 512 < p < 1.0


def head_dim_fits(x: Tensor, D: int) -> bool:
    """Whether there is a kernel of attention for heads of D elements and a tensor like x."""
    least, most, step = TRITON_HEAD_DIM
    if D % step == 0 and least <= D <= most:
        return True
    return 1 <= D <= MAX_HEAD_DIM and not use_triton("attention", x)


def _is_one_of(part: nn.Module, *kinds: type) -> bool:
    return type(part) in kinds and not has_hooks(part) and "forward" not in vars(part)


def is_observed(attn: nn.Module) -> bool:
    """Whether attn has hooks, apart from transformers' recorder of probabilities.

    That stays in place after the first call with output_hidden_states. When it does record, attn
    has a mask or MASK_HINT that makes it fall back.
    """
    if attn._forward_pre_hooks or attn._backward_hooks or attn._backward_pre_hooks:
        return True
    names = [getattr(hook, "__name__", "") for hook in attn._forward_hooks.values()]
    return any(name != "output_capturing_hook" for name in names)


class Norm(Swapped):
    """A LayerNorm of someone's own: weight, bias and a fixed eps."""

    does = "LayerNorm in one pass"

    def forward(self, *args, **kwargs):
        reason = "arguments besides x" if len(args) != 1 or kwargs else self.changed(args[0])
        if reason is not None:
            fall_back(self, reason)
            return super().forward(*args, **kwargs)
        x = autocast_norm(args[0])
        return layer_norm(x, self.weight, self.bias, self.option("eps"))


def _norm_weights(norm: nn.Module) -> tuple[Any, Any, float] | None:
    """weight, bias and eps of a norm that residual_layer_norm can stand in for."""
    if has_hooks(norm) or "forward" in vars(norm):
        return None
    if isinstance(norm, Norm):
        return norm.weight, norm.bias, norm.option("eps")
    if type(norm) is LayerNorm and len(norm.normalized_shape) == 1 and norm.weight is not None:
        return norm.weight, norm.bias, norm.eps
    return None


class MLP(Swapped):
    """c_fc, GELU and c_proj; the GELU adds c_fc's bias."""

    does = "bias + GELU in one pass"
    falls_back = ("hooks on the activation, or another one in its place",)

    def forward(self, *args, **kwargs):
        if len(args) != 1 or kwargs:
            reason: str | None = "arguments besides x"
        elif not self._activation_fits():
            reason = "hooks on the activation, or another one in its place"
        else:
            reason = self.changed(args[0])
        if reason is not None:
            fall_back(self, reason)
            return super().forward(*args, **kwargs)
        y = linear_gelu(self.c_fc, args[0], self.option("approximate"))
        y = project(self.c_proj, y)
        dropout = self.option("dropout")
        return y if dropout is None else getattr(self, dropout)(y)

    def _activation_fits(self) -> bool:
        kind = self.option("kind")
        # patch() has swapped an nn.GELU as well.
        kinds = (kind, GELU) if kind is nn.GELU else (kind,)
        return _is_one_of(getattr(self, self.option("activation")), *kinds)


class Attention(Swapped):
    """Self-attention of nanoGPT's shape, read in place from c_attn's output."""

    does = "attention on the packed projection"
    falls_back: tuple[str, ...] = (
        "arguments besides x; more tokens, other settings or buffers than when it was patched",
        "a dropout rate of 1, or of 1/512 and less; heads of a size that no kernel takes",
    )

    def refusal(self, given: dict[str, Any]) -> str | None:
        """Why the call falls back, if it does."""
        for name, value in given.items():
            if name != self.names[0] and value is not None and value is not False:
                return f"the argument {name}"
        return self.misfit(given)

    def misfit(self, given: dict[str, Any]) -> str | None:
        x = given.get(self.names[0])
        if not isinstance(x, Tensor) or x.dim() != 3:
            return "x is not [B, T, C]"
        name = self.option("probs")
        if not rate_fits(probs_rate(self, name)):
            return "a dropout rate of 1, or of 1/512 and less"
        part = None if name is None else getattr(self, name)
        if isinstance(part, nn.Module):
            if part.training != self.training:
                return f"{name} is in another mode"
            if not _is_one_of(part, nn.Dropout):
                return f"hooks on {name}, or another one in its place"
        if not head_dim_fits(x, self.dim_of_heads()):
            return f"heads of {self.dim_of_heads()} elements, which no kernel takes"
        return self.changed(x)

    def dim_of_heads(self) -> int:
        return self.option("head_dim")

    def heads(self, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """[B, T, C] -> the heads' outputs, [B, T, C], for c_proj; and what result() wants."""
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, D]
        p = probs_rate(self, self.option("probs"))
        return self.attend(qkv, p), None

    def attend(self, qkv: Tensor, p: float, softmax_scale: float | None = None) -> Tensor:
        """[B, T, 3, H, D] -> [B, T, C]"""
        dropout = head_dropout(self.c_attn, qkv, p)
        return attention_qkvpacked(qkv, softmax_scale=softmax_scale, **dropout).flatten(2)

    def forward(self, *args, **kwargs):
        given = self.given(args, kwargs)
        reason = self.refusal(given)
        if reason is not None:
            if tp_of(self.c_attn) is not None and probs_rate(self, self.option("probs")) > 0.0:
                raise ValueError(
                    f"{type(self).__name__}: expected a call that needs no fallback while dropout "
                    f"is on in split attention, got {reason}; see fastpar.patch's report, or set "
                    "attention's dropout to 0"
                )
            fall_back(self, reason)
            kwargs.pop(MASK_HINT, None)
            return super().forward(*args, **kwargs)
        y, present = self.heads(given[self.names[0]], given)
        y = project(self.c_proj, y)
        dropout = self.option("resid")
        return self.result(y if dropout is None else getattr(self, dropout)(y), present)

    def result(self, y: Tensor, present: Any) -> Any:
        return y


class Block(Swapped):
    """x + attn(ln_1(x)), then x + mlp(ln_2(x)); ln_2 in one pass with what comes before it."""

    does = "c_proj's bias + dropout + residual add + LayerNorm in one pass"
    falls_back = ("hooks on attn or its parts or on ln_2, or others in their places",)

    def forward(self, *args, **kwargs):
        given = self.given(args, kwargs)
        x: Any = given.get(self.names[0])
        attn = self.attn
        norm = _norm_weights(self.ln_2)
        fused = (
            isinstance(attn, Attention)
            and not is_observed(attn)
            and "forward" not in vars(attn)
            and (is_plain(attn.c_proj) or gives_product(attn.c_proj))
            and self._dropout_fits(attn)
        )
        reason = self.changed(x)
        if reason is not None or norm is None or not fused:
            fall_back(self, reason or self.falls_back[0])
            return super().forward(*args, **kwargs)
        if given.get("encoder_hidden_states") is not None:
            fall_back(self, "encoder_hidden_states")
            return super().forward(*args, **kwargs)
        rest = {name: value for name, value in given.items() if name != self.names[0]}
        rest[attn.names[0]] = x
        if attn.refusal(rest) is not None:  # attn will say so
            return super().forward(*args, **kwargs)
        # Under autocast torch's LayerNorm returns fp32 where the residual stream has 16 bits.
        if x.dtype != torch.float32 and (autocast_dtype(x) or attn.c_proj.weight.dtype != x.dtype):
            fall_back(self, "a 16-bit residual stream with autocast or weights of another dtype")
            return super().forward(*args, **kwargs)
        y, _ = attn.heads(self.ln_1(x), rest)
        p = resid_rate(attn, attn.option("resid"))
        y, x = with_weights(
            lambda: residual_norm(attn.c_proj, y, x, norm, p), attn.c_proj, self.ln_2
        )
        return x + self.mlp(y)

    def _dropout_fits(self, attn: Any) -> bool:
        name = attn.option("resid")
        if name is None:
            return True
        plain = _is_one_of(getattr(attn, name), nn.Dropout, TokenDropout)
        return plain and rate_fits(resid_rate(attn, name))
