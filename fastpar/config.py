"""What a model is: frozen dataclasses that check themselves and name the value they refuse."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

VOCAB_MULTIPLE = 128  # rows of wte are padded to this, so that every GEMM of the head is aligned


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2. The defaults are the smallest published one.

    Raises:
        ValueError: a size below 1; n_embd not divisible by n_head; dropout outside [0, 1).
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # tokens of context
    vocab_size: int = 50257  # tokens of the tokenizer; see padded_vocab_size
    dropout: float = 0.1
    layer_norm_eps: float = 1e-5

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

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """The named entry of PRESETS, with single fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(
                f"GPTConfig.preset: expected one of {', '.join(PRESETS)}, got name={name}; "
                "choose one of these and override single sizes"
            )
        return cls(**{**asdict(PRESETS[name]), **overrides})


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
