"""The shape of a GPT, its presets, and its parts as one table.

The defaults are GPT-2's; other fields make the blocks of Llama, Qwen3 and NanoChat: RMSNorm, rotary
positions (RoPE), norms of queries and keys, grouped heads, relu2 or SwiGLU, no biases, an untied
head. All run through the same modules and axes.

The modules of gpt.py, names and shapes of weights, FLOPs, and the predictions of predict/ (time,
memory, buckets) are derived from this table: parts of a block, of experts that replace an MLP, and
of the embeddings and output layer. Arithmetic only.

Dimensions are letters; widths() gives their sizes on a rank:

    C   n_embd, not split by tp                  A   features of its attention heads
    QKV features of q, k and v                   D   features of a head
    F   features of the MLP; 2F: gate and up     H   features of an expert; 2H: gate and up
    V   rows of the vocabulary                   T   positions
    X   C, in fp32                               R   C, for each row of an expert
    E   all experts                              S   experts on this rank
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

VOCAB_MULTIPLE = 128  # rows of wte are padded to a multiple of this, to align the head's GEMMs


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. The defaults are those of the smallest published GPT-2.

    Raises:
        ValueError: a size below 1; n_embd not divisible by n_head; dropout outside [0, 1); fields
            of the block, or settings of experts, that contradict each other.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # tokens of context
    vocab_size: int = 50257  # tokens of the tokenizer; see padded_vocab_size
    dropout: float = 0.1
    layer_norm_eps: float = 1e-5  # of all norms
    norm: str = "layer"  # "layer" or "rms"
    norm_weight: bool = True  # whether norms have weights
    norm_embedding: bool = False  # a norm behind the embedding
    bias: bool = True  # of linear layers and LayerNorms
    rope_theta: float | None = None  # base of rotary positions; None: learned positions
    qk_norm: bool = False  # RMSNorm of each head's queries and keys, before they are rotated
    n_kv_head: int | None = None  # heads of keys and values, each for n_head / n_kv_head queries
    head_dim: int | None = None  # features of a head; None: n_embd / n_head
    attention_scale: float | None = None  # None: head_dim ** -0.5
    activation: str = "gelu"  # "gelu" (tanh form), "relu2" or "swiglu"
    n_inner: int | None = None  # features of the MLP; None: 4 * n_embd
    tied: bool = True  # the head's weight is the embedding's
    logit_softcap: float = 0.0  # logits are softcap * tanh(logits / softcap); 0: as they are
    n_expert: int = 0  # experts that replace an MLP; 0: none
    top_k: int = 2  # experts per token
    expert_every: int = 1  # every N-th layer has experts
    expert_hidden: int | None = None  # hidden width of an expert; None: that of the MLP
    expert_capacity: float | None = None  # capacity factor; None: no token is dropped
    balance_loss: float = 0.01  # weights of the router's losses, see fastpar/axes/experts
    router_z_loss: float = 0.0
    balance_rate: float = 0.0  # step size of a router bias, instead of the balance loss

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.n_embd % self.n_head and self.head_dim is None:
            raise ValueError(
                f"GPTConfig: expected n_embd divisible by n_head={self.n_head}, got "
                f"n_embd={self.n_embd}; choose n_embd as a multiple of n_head, or set head_dim"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"GPTConfig: expected 0 <= dropout < 1, got dropout={self.dropout}; "
                "use 0 to switch dropout off"
            )
        _check_block(self)

    @property
    def inner(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def hidden(self) -> int:
        """Hidden width of an expert, or of the MLP."""
        return self.expert_hidden if self.n_expert and self.expert_hidden else self.inner

    @property
    def queries_per_key(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return 1 if self.n_kv_head is None else self.n_head // self.n_kv_head

    @property
    def is_gpt2(self) -> bool:
        """Whether the block is GPT-2's."""
        return all(getattr(self, name) == default for name, default in BLOCK_FIELDS.items())

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.n_expert > 0 and layer % self.expert_every == self.expert_every - 1

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.n_layer))

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def heads_of_rank(self, tp: int) -> int:
        """Heads per tp rank, including padding heads if tp does not divide n_head."""
        return -(-self.n_head // tp)

    def copies_of_keys(self, tp: int) -> int:
        """Ranks of tp that compute the same head of keys and values, each for its own queries."""
        return max(1, tp * self.queries_per_key // self.n_head)

    def splits_keys(self, tp: int) -> bool:
        """Whether tp divides the heads of keys and values, or is a multiple of them. GPT-2's are
        padded."""
        copies, keys = self.copies_of_keys(tp), self.n_head // self.queries_per_key
        shared = self.n_head % tp == 0 and tp % keys == 0 and self.head_size % copies == 0
        return self.queries_per_key == 1 or keys % tp == 0 or shared

    def splits_by(self, tp: int) -> bool:
        """Whether tp can split the layers."""
        dense = self.expert_layers < self.n_layer and self.inner % tp
        return tp <= self.n_head and not dense and self.splits_keys(tp) and self.hidden % tp == 0

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """An entry of PRESETS, with some fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(
                f"GPTConfig.preset: expected one of {', '.join(PRESETS)}, got name={name}; "
                "choose one of these, and override sizes if needed"
            )
        return cls(**{**asdict(PRESETS[name]), **overrides})


# The fields of a block, with GPT-2's values.
BLOCK_FIELDS = {
    field.name: field.default
    for field in fields(GPTConfig)
    if field.name in {
        "norm", "norm_weight", "norm_embedding", "bias", "rope_theta", "qk_norm", "n_kv_head",
        "head_dim", "attention_scale", "activation", "n_inner", "tied", "logit_softcap",
    }
}  # fmt: skip
ACTIVATIONS = ("gelu", "relu2", "swiglu")
NORMS = ("layer", "rms")


# The least value of whole numbers.
_COUNTS = {
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size", "vocab_size"), 1),
    **dict.fromkeys(("n_kv_head", "head_dim", "n_inner"), 1),
    **{"n_expert": 0, "top_k": 1, "expert_every": 1, "expert_hidden": 1},
}
# Numbers that are positive, or not negative, and what is usual.
_NUMBERS = {
    "layer_norm_eps": (">", "GPT-2 uses 1e-5"),
    "rope_theta": (">", "leave it out for learned positions"),
    "attention_scale": (">", "leave it out for the default"),
    "expert_capacity": (">", "1.25 is usual, None: no limit"),
    **dict.fromkeys(("logit_softcap", "balance_loss", "router_z_loss"), (">=", "0: off")),
    "balance_rate": (">=", "0: off"),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    **{"norm": NORMS, "activation": ACTIVATIONS},
    **dict.fromkeys(("norm_weight", "norm_embedding", "bias", "qk_norm", "tied"), (True, False)),
}


def _check_fields(config: GPTConfig) -> None:
    """Raise ValueError for a field with another type or out of its range."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None and field.default is None:
            continue
        whole, low = isinstance(value, int) and not isinstance(value, bool), _COUNTS.get(name, 0)
        if name in _COUNTS and not (whole and value >= low):
            raise ValueError(
                f"GPTConfig: expected an integer {name} >= {low}, got {name}={value}; set {name} "
                f">= {low}"
            )
        words = _CHOICES.get(name, ())
        if words and (type(value), value) not in [(type(word), word) for word in words]:
            raise ValueError(
                f"GPTConfig: expected {name} as one of {', '.join(map(str, words))}, got "
                f"{name}={value!r}; choose one of these"
            )
        sign, usual = _NUMBERS.get(name, ("", ""))
        number = whole or isinstance(value, float)
        if sign and not (number and (value > 0 or sign == ">=") and 0 <= value < math.inf):
            raise ValueError(f"GPTConfig: expected {name} {sign} 0, got {name}={value}; {usual}")


def _check_block(config: GPTConfig) -> None:
    """Raise ValueError for fields that contradict each other."""
    if config.n_kv_head is not None and config.n_head % config.n_kv_head:
        raise ValueError(
            f"GPTConfig: expected n_head divisible by n_kv_head={config.n_kv_head}, got "
            f"n_head={config.n_head}; each head of keys serves equally many heads of queries"
        )
    if config.rope_theta is not None and config.head_size % 2:
        raise ValueError(
            f"GPTConfig: expected an even head_dim with rope_theta, got head_dim="
            f"{config.head_size}; rotary positions turn pairs of features"
        )
    if config.norm == "layer" and not config.norm_weight:
        raise ValueError(
            "GPTConfig: expected norm=rms with norm_weight=False, got norm=layer; only RMSNorms "
            "come without weights"
        )
    if config.n_expert and config.top_k > config.n_expert:
        raise ValueError(
            f"GPTConfig: expected top_k <= n_expert={config.n_expert}, got "
            f"top_k={config.top_k}; lower top_k"
        )
    if config.n_expert and config.expert_every > config.n_layer:
        raise ValueError(
            f"GPTConfig: expected expert_every <= n_layer={config.n_layer}, got "
            f"expert_every={config.expert_every}; lower it, otherwise no layer has experts"
        )


def _nanochat(**sizes: Any) -> GPTConfig:
    options: dict[str, Any] = {"layer_norm_eps": 1e-6, "norm": "rms", "norm_weight": False}
    options |= {"norm_embedding": True, "rope_theta": 1e4, "qk_norm": True, "activation": "relu2"}
    options |= {"tied": False, "logit_softcap": 15.0}
    return GPTConfig(**sizes, **options, dropout=0.0, bias=False)


def _llama(**sizes: Any) -> GPTConfig:
    options: dict[str, Any] = {"norm": "rms", "rope_theta": 1e4, "activation": "swiglu"}
    return GPTConfig(**{**options, **sizes}, dropout=0.0, bias=False)


def _qwen3(**sizes: Any) -> GPTConfig:
    return _llama(**sizes, layer_norm_eps=1e-6, rope_theta=1e6, qk_norm=True)


PRESETS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    # For CPUs: minutes of training to a model with recognizable text.
    "micro": GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0),
    "mini": GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, dropout=0.0),
    "small-cpu": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.0),
    # The shapes of today's models. Llama 3.2 1B has other rotary positions beyond 8,192 tokens.
    "nanochat-d12": _nanochat(n_layer=12, n_head=6, n_embd=768, block_size=2048, vocab_size=65536),
    "llama-1b": _llama(
        n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_inner=8192, block_size=2048,
        vocab_size=128256, rope_theta=5e5,
    ),
    "qwen3-0.6b": _qwen3(
        n_layer=28, n_head=16, n_kv_head=8, head_dim=128, n_embd=1024, n_inner=3072,
        block_size=2048, vocab_size=151936,
    ),
    "nanochat-tiny": _nanochat(n_layer=4, n_head=4, n_embd=128, block_size=64),
    "llama-tiny": _llama(n_layer=4, n_head=4, n_kv_head=2, n_embd=128, n_inner=352, block_size=64),
    "qwen3-tiny": _qwen3(
        n_layer=4, n_head=4, n_kv_head=2, head_dim=48, n_embd=128, n_inner=352, block_size=64
    ),
}  # fmt: skip


# The table

Dims = tuple[str, ...]
SPLIT = frozenset({"A", "QKV", "F", "2F", "H", "2H", "V"})  # the letters that tp splits


class Part(NamedTuple):
    """An op of the model and its weights.

    Attributes:
        name: name of its module in a block, or in the model; "" without weights.
        op: name of an Op of predict/time.py.
        into, out: features of a row before and after it.
        keeps: what a row keeps from forward to backward without recomputation: features, numbers of
            a norm ("stats") or of attention ("lse"), a router's weights, choices and their order.
        on: its rows: "tokens" of a rank, its "own" tokens between blocks (with sequence
            parallelism), "choices" of experts, or the rows of each of the "experts".
        weight, bias: whether its module has these.
    """

    name: str
    op: str
    into: str
    out: str
    keeps: Dims = ()
    on: str = "tokens"
    weight: bool = True
    bias: bool = True

    @property
    def cheap(self) -> bool:
        """Whether selective recomputation runs it again."""
        return self.op in _ELEMENTWISE

    @property
    def parameters(self) -> dict[str, Dims]:
        """The dimensions of its module's parameters, by name."""
        if self.op in _NORM_OPS:
            dims: dict[str, Dims] = {"weight": (self.out,), "bias": (self.out,)}
        elif self.op == "embedding":
            return {"weight": (self.into, self.out)}
        elif self.op == "loss" and self.name:
            return {"weight": (self.out, self.into)}
        elif self.op != "matmul":
            return {}
        else:
            stack: Dims = ("S",) if self.on == "experts" else ()
            dims = {"weight": (*stack, self.out, self.into), "bias": (*stack, self.out)}
        return {name: d for name, d in dims.items() if getattr(self, name)}


_NORM_OPS = ("layer_norm", "rms_norm", "head_norm")


def _norm(shape: GPTConfig, name: str) -> Part:
    bias = shape.bias and shape.norm == "layer"
    options = {"weight": shape.norm_weight, "bias": bias}
    return Part(name, f"{shape.norm}_norm", "C", "C", ("C", "stats"), "own", **options)


def attention_parts(shape: GPTConfig) -> tuple[Part, ...]:
    """A layer's parts up to the second norm."""
    heads: tuple[Part, ...] = ()
    if shape.qk_norm:
        options: dict[str, Any] = {"weight": shape.norm_weight, "bias": False}
        heads = tuple(Part(f"attn.{x}_norm", "head_norm", "D", "D", **options) for x in "qk")
    turned = shape.qk_norm or shape.rope_theta is not None
    kept = ("QKV",) if shape.qk_norm else ()
    return (
        _norm(shape, "ln_1"),
        Part("attn.c_attn", "matmul", "C", "QKV", ("C",), bias=shape.bias),
        *heads,
        *((Part("", "rope", "QKV", "QKV", kept),) if turned else ()),
        Part("", "attention", "QKV", "A", ("QKV", "A", "lse")),
        Part("attn.c_proj", "matmul", "A", "C", bias=shape.bias),  # attention keeps its input
        _norm(shape, "ln_2"),
    )


def mlp_parts(shape: GPTConfig) -> tuple[Part, ...]:
    """The parts of a layer's MLP."""
    wide = "2F" if shape.activation == "swiglu" else "F"
    return (
        Part("mlp.c_fc", "matmul", "C", wide, ("C",), bias=shape.bias),
        Part("", _OP_OF[shape.activation], wide, "F", (wide,)),
        Part("mlp.c_proj", "matmul", "F", "C", ("F",), bias=shape.bias),
    )


def expert_parts(shape: GPTConfig) -> tuple[Part, ...]:
    """The parts of the experts that replace an MLP; the router's product is in fp32."""
    options: dict[str, Any] = {"on": "experts", "bias": shape.bias}
    wide = "2H" if shape.activation == "swiglu" else "H"
    return (
        Part("mlp.router", "matmul", "X", "E", ("X", "E", "choices"), bias=False),
        Part("", "permute", "R", "R", (), "choices"),
        Part("mlp.c_fc", "matmul", "R", wide, ("R",), **options),
        Part("", _OP_OF[shape.activation], wide, "H", (wide,), "experts"),
        Part("mlp.c_proj", "matmul", "H", "R", ("H",), **options),
        Part("", "permute", "R", "R", ("R",), "choices"),
    )


_OP_OF = {"gelu": "bias_gelu", "relu2": "relu2", "swiglu": "swiglu"}


def first_parts(shape: GPTConfig) -> tuple[Part, ...]:
    """The parts before the layers."""
    learned = (Part("wpe", "embedding", "T", "C"),) if shape.rope_theta is None else ()
    norm = (_norm(shape, "ln_e"),) if shape.norm_embedding else ()
    return Part("wte", "embedding", "V", "C"), *learned, *norm


def last_parts(shape: GPTConfig) -> tuple[Part, ...]:
    """The parts behind the layers."""
    return _norm(shape, "ln_f"), Part("" if shape.tied else "lm_head", "loss", "C", "V")


def block_parts(shape: GPTConfig, *, experts: bool = False) -> tuple[Part, ...]:
    """The parts of a layer, in the order of forward."""
    return attention_parts(shape) + (expert_parts(shape) if experts else mlp_parts(shape))


def products(fp8: str = "all") -> tuple[str, ...]:
    """Names of a block's linear layers that --fp8 selects: all, mlp or none of them."""
    names = [part.name for part in block_parts(GPTConfig()) if part.op == "matmul"]
    return tuple(n for n in names if fp8 == "all" or n.startswith(f"{fp8}."))


def split_products(shape: GPTConfig) -> list[tuple[str, bool]]:
    """(letter, whether by columns) for each linear layer of a block that tp splits."""
    products = [part for part in block_parts(shape) if part.op == "matmul"]
    letters = [(part.out if part.out in SPLIT else part.into) for part in products]
    return [(x, part.out in SPLIT) for part, x in zip(products, letters) if x in SPLIT]


@functools.lru_cache(256)
def column_share(shape: GPTConfig) -> float:
    """The fraction of FLOPs of a block's linear layers that is in layers split by columns."""
    sizes, products = widths(shape), [p for p in block_parts(shape) if p.op == "matmul"]
    flops = [sizes[part.into] * sizes[part.out] for part in products]
    return sum(n for n, part in zip(flops, products) if part.out in SPLIT) / sum(flops)


# Shapes


def vocabulary_rows(shape: GPTConfig, tp: int) -> int:
    """Rows of the embedding on a tp rank, including the padding of its slice."""
    return -(-shape.padded_vocab_size // (tp * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE


def computed_qkv(shape: GPTConfig, tp: int) -> int:
    """Features of q, k and v that a tp rank computes; it stores weights of fewer if it shares a
    head of keys."""
    keys = shape.copies_of_keys(tp) / shape.queries_per_key
    return round(shape.heads_of_rank(tp) * shape.head_size * (1 + 2 * keys))


def widths(shape: GPTConfig, tp: int = 1, ep: int = 1) -> dict[str, int]:
    """The size of each letter on a rank of tp and ep."""
    attention, experts = shape.heads_of_rank(tp) * shape.head_size, shape.n_expert
    keys = attention // shape.queries_per_key
    return {
        **dict.fromkeys(("C", "X", "R"), shape.n_embd),
        **{"F": shape.inner // tp, "2F": 2 * shape.inner // tp},
        **{"A": attention, "QKV": attention + 2 * keys, "D": shape.head_size},
        **{"V": vocabulary_rows(shape, tp), "T": shape.block_size},
        **{"H": shape.hidden // tp, "2H": 2 * shape.hidden // tp},
        **{"E": experts, "S": experts // ep},
    }


def parameters_of(parts: Iterable[Part]) -> Iterator[tuple[str, Dims]]:
    """(name, dims) of the parts' parameters, in the model's order."""
    for part in parts:
        for name, dims in part.parameters.items():
            yield f"{part.name}.{name}", dims


def shapes_of(
    parts: Iterable[Part], shape: GPTConfig, tp: int = 1, rows: int = 0, ep: int = 1
) -> list[tuple[int, ...]]:
    """Shapes of the parts' parameters on a rank.

    rows: rows of a grid, 0 without one. They split C of parameters whose other dimension is split
        by the grid's columns (tp); C of other parameters is split by the columns.
    """
    shapes = []
    for _, dims in parameters_of(parts):
        sizes = widths(shape, tp, ep)
        if rows:
            sizes["C"] //= rows if SPLIT & set(dims) else tp
        shapes.append(tuple(sizes[d] for d in dims))
    return shapes


def count_elements(parts: Iterable[Part], sizes: dict[str, int], *, whole: bool = False) -> int:
    """Number of elements of the parts' parameters; whole: only of those that tp does not split."""
    every = [dims for _, dims in parameters_of(parts) if not (whole and SPLIT & set(dims))]
    return sum(math.prod(sizes[d] for d in dims) for dims in every)


def count_parameters(shape: GPTConfig, *, padded: bool = False, active: bool = False) -> int:
    """Number of parameters of a GPT; the tied head counts once.

    Args:
        padded: count the vocabulary's padding.
        active: count only the experts that process a token.
    """
    sizes = widths(shape)
    if not padded:
        sizes["V"] = shape.vocab_size
    if active:
        sizes["S"] = shape.top_k
    sparse = shape.expert_layers * count_elements(block_parts(shape, experts=True), sizes)
    dense = (shape.n_layer - shape.expert_layers) * count_elements(block_parts(shape), sizes)
    return count_elements(first_parts(shape) + last_parts(shape), sizes) + dense + sparse


# FLOPs and traffic

# Per element: FLOPs of forward; tensors that forward and backward move.
_ELEMENTWISE: dict[str, tuple[float, float, float]] = {
    "layer_norm": (8.0, 4, 4),
    "rms_norm": (6.0, 4, 4),
    "head_norm": (0.0, 0, 0),  # in rope
    "rope": (10.0, 2, 2),
    "bias_gelu": (15.0, 2, 3),
    "relu2": (3.0, 2, 3),
    "swiglu": (4.0, 1.5, 2.5),  # per element of gate and up
    "permute": (1.0, 2, 2),
}


def work_of(op: str, shape: tuple[int, ...], item: int, more: int = 0) -> tuple[float, ...]:
    """(FLOPs, least bytes moved) of forward, then of backward.

    Args:
        shape: as of an Op.
        item: bytes of an element.
        more: chunks of a loss (see linear_cross_entropy.py), rows of an embedding's table.
    """
    if op in _ELEMENTWISE:
        n, (flops, forward, backward) = math.prod(shape), _ELEMENTWISE[op]
        return flops * n, float(n * item * forward), 2 * flops * n, float(n * item * backward)
    if op == "matmul":  # backward: dx and dw
        m, k, n = shape
        moved, flops = float(item * (m * k + n * k + m * n)), 2.0 * m * k * n
        return flops, moved, 2 * flops, 2 * moved
    if op == "attention":  # two products forward and five backward, half of the scores each: causal
        batch, heads, time, dim = shape
        flops = 2.0 * batch * heads * time * time * dim
        tensor = float(batch * heads * time * dim * item)  # q, k, v, o; and their gradients
        return flops, 4 * tensor, 2.5 * flops, 8 * tensor
    if op == "embedding":  # most rows of its gradient are zeros
        moved = 3.0 * math.prod(shape) * item
        return 0.0, moved, 0.0, moved + float(more * shape[1] * item)
    n, width, vocab = shape  # loss: three products in forward, five passes over the logits
    logits, weight = float(n * vocab), float(vocab * width)
    moved = item * (5 * logits + 3 * n * width) + more * weight * (2 * item + 2 * 4)
    scaled = 2.0 * n * width * item + weight * (4 + item)
    return 6.0 * n * width * vocab, moved, n * width + weight, scaled


def part_flops(shape: GPTConfig) -> list[float]:
    """FLOPs of a token's forward in the embedding, each layer and the head."""
    sizes = widths(shape)

    def of_token(part: Part) -> float:
        if part.op == "attention":  # as if without its mask
            return 4.0 * shape.block_size * sizes[part.out]
        work = work_of("matmul", (1, sizes[part.into], sizes[part.out]), 1)[0]
        return work * (part.op == "matmul") * (shape.top_k if part.on == "experts" else 1)

    experts = map(shape.has_experts, range(shape.n_layer))
    layers = [sum(map(of_token, block_parts(shape, experts=each))) for each in experts]
    return [0.0, *layers, 2.0 * shape.vocab_size * shape.n_embd]


def flops_per_token(shape: GPTConfig) -> int:
    """Model FLOPs per token of forward and backward at T = block_size: 6*P + 12*n_layer*T*C.

    P counts only the experts that process a token, and a table of embeddings only if it is the
    head's too. C is the width of all heads.
    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B (attention without its mask).
    """
    attention = 12 * shape.n_layer * shape.block_size * shape.n_head * shape.head_size
    table = 0 if shape.tied else shape.vocab_size * shape.n_embd
    return 6 * (count_parameters(shape, active=True) - table) + attention
