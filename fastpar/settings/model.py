"""The shape of a GPT-2, with or without experts, and the published sizes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

VOCAB_MULTIPLE = 128  # rows of wte are padded to this, so that every GEMM of the head is aligned


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2. The defaults are the smallest published one.

    Raises:
        ValueError: a size below 1; n_embd not divisible by n_head; dropout outside [0, 1); numbers
            of experts that do not fit together.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # tokens of context
    vocab_size: int = 50257  # tokens of the tokenizer; see padded_vocab_size
    dropout: float = 0.1
    layer_norm_eps: float = 1e-5
    n_expert: int = 0  # in the place of a layer's MLP; 0: none
    top_k: int = 2  # experts of a token
    expert_every: int = 1  # every so many layers have experts, the last of each
    expert_hidden: int | None = None  # features of an expert; None: those of the MLP
    expert_capacity: float | None = None  # times the mean load; None: nothing is dropped
    balance_loss: float = 0.01  # factors of the router's losses, see fastpar/experts
    router_z_loss: float = 0.0
    balance_rate: float = 0.0  # of a bias instead of the balance loss

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"GPTConfig: expected a positive integer, got {name}={value}; set {name} >= 1"
                )
        if self.n_embd % self.n_head:
            raise ValueError(
                f"GPTConfig: expected n_embd divisible by n_head={self.n_head}, got "
                f"n_embd={self.n_embd}; choose n_embd as a multiple of n_head"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"GPTConfig: expected 0 <= dropout < 1, got dropout={self.dropout}; "
                "use 0 to switch dropout off"
            )
        if not self.layer_norm_eps > 0.0:
            raise ValueError(
                "GPTConfig: expected layer_norm_eps > 0, got "
                f"layer_norm_eps={self.layer_norm_eps}; GPT-2 uses 1e-5"
            )
        _check_experts(self)

    @property
    def hidden(self) -> int:
        """Features of one expert, or of the MLP."""
        return self.expert_hidden if self.n_expert and self.expert_hidden else 4 * self.n_embd

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.n_expert > 0 and layer % self.expert_every == self.expert_every - 1

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return sum(self.has_experts(layer) for layer in range(self.n_layer))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def heads_of_rank(self, tp: int) -> int:
        """Heads on each rank of tp, those among them that only pad where tp does not divide."""
        return -(-self.n_head // tp)

    def splits_by(self, tp: int) -> bool:
        """Whether tp can split the layers: heads are padded, the MLP's features are not."""
        dense = self.expert_layers < self.n_layer and 4 * self.n_embd % tp
        return tp <= self.n_head and not dense and self.hidden % tp == 0

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """The named entry of PRESETS, with single fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(
                f"GPTConfig.preset: expected one of {', '.join(PRESETS)}, got name={name}; "
                "choose one of these and override single sizes"
            )
        return cls(**{**asdict(PRESETS[name]), **overrides})


def _check_experts(config: GPTConfig) -> None:
    """Refuse numbers of experts that do not fit together, also where there are none."""
    least = {"n_expert": 0, "top_k": 1, "expert_every": 1, "expert_hidden": 1}
    for name, low in least.items():
        value = getattr(config, name)
        if name == "expert_hidden" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(
                f"GPTConfig: expected an integer {name} >= {low}, got {name}={value}; "
                f"{'0 is a model without experts' if low == 0 else f'set {name} >= {low}'}"
            )
    if config.n_expert and config.top_k > config.n_expert:
        raise ValueError(
            f"GPTConfig: expected top_k of at most n_expert={config.n_expert}, got "
            f"top_k={config.top_k}; a token goes to different experts: lower top_k"
        )
    if config.n_expert and config.expert_every > config.n_layer:
        raise ValueError(
            f"GPTConfig: expected expert_every of at most n_layer={config.n_layer}, got "
            f"expert_every={config.expert_every}; no layer would have experts"
        )
    if config.expert_capacity is not None and not config.expert_capacity > 0.0:
        raise ValueError(
            "GPTConfig: expected expert_capacity > 0, got "
            f"expert_capacity={config.expert_capacity}; 1.25 is usual, None drops nothing"
        )
    for name in ("balance_loss", "router_z_loss", "balance_rate"):
        if not 0.0 <= getattr(config, name) < math.inf:
            raise ValueError(
                f"GPTConfig: expected {name} >= 0, got {name}={getattr(config, name)}; 0 is without"
            )


PRESETS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    # For CPUs: minutes to a model whose text is recognizable.
    "micro": GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0),
    "mini": GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, dropout=0.0),
    "small-cpu": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.0),
}
