"""The shape of a GPT-2 (with or without experts), its presets, and its parts as one table.

The modules of gpt.py, names and shapes of weights, FLOPs, and the predictions of predict/ (time,
memory, buckets) are derived from this table: parts of a block, of experts that replace an MLP, and
of the embeddings and output layer. Arithmetic only.

Dimensions are letters; widths() gives their sizes on a rank:

    C   n_embd, not split by tp                  A   features of its attention heads; 3A: q, k, v
    F   features of the MLP                      H   features of an expert
    V   rows of the vocabulary                   T   positions
    X   C, in fp32                               R   C, for each row of an expert
    E   all experts                              S   experts on this rank
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

VOCAB_MULTIPLE = 128  # rows of wte are padded to a multiple of this, to align the head's GEMMs


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are the smallest published size.

    Raises:
        ValueError: a size below 1; n_embd not divisible by n_head; dropout outside [0, 1); settings
            of experts that contradict each other.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # tokens of context
    vocab_size: int = 50257  # tokens of the tokenizer; see padded_vocab_size
    dropout: float = 0.1
    layer_norm_eps: float = 1e-5
    n_expert: int = 0  # experts that replace an MLP; 0: none
    top_k: int = 2  # experts per token
    expert_every: int = 1  # every N-th layer has experts
    expert_hidden: int | None = None  # hidden width of an expert; None: that of the MLP
    expert_capacity: float | None = None  # capacity factor; None: no token is dropped
    balance_loss: float = 0.01  # weights of the router's losses, see fastpar/axes/experts
    router_z_loss: float = 0.0
    balance_rate: float = 0.0  # step size of a router bias, instead of the balance loss

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
        """Hidden width of an expert, or of the MLP."""
        return self.expert_hidden if self.n_expert and self.expert_hidden else 4 * self.n_embd

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.n_expert > 0 and layer % self.expert_every == self.expert_every - 1

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.n_layer))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def heads_of_rank(self, tp: int) -> int:
        """Heads per tp rank, including padding heads if tp does not divide n_head."""
        return -(-self.n_head // tp)

    def splits_by(self, tp: int) -> bool:
        """Whether tp can split the layers; heads are padded, the MLP's features are not."""
        dense = self.expert_layers < self.n_layer and 4 * self.n_embd % tp
        return tp <= self.n_head and not dense and self.hidden % tp == 0

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """An entry of PRESETS, with some fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(
                f"GPTConfig.preset: expected one of {', '.join(PRESETS)}, got name={name}; "
                "choose one of these, and override sizes if needed"
            )
        return cls(**{**asdict(PRESETS[name]), **overrides})


def _check_experts(config: GPTConfig) -> None:
    """Raise ValueError for invalid settings of experts, also without experts."""
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
            f"GPTConfig: expected top_k <= n_expert={config.n_expert}, got "
            f"top_k={config.top_k}; lower top_k"
        )
    if config.n_expert and config.expert_every > config.n_layer:
        raise ValueError(
            f"GPTConfig: expected expert_every <= n_layer={config.n_layer}, got "
            f"expert_every={config.expert_every}; lower it, otherwise no layer has experts"
        )
    if config.expert_capacity is not None and not config.expert_capacity > 0.0:
        raise ValueError(
            "GPTConfig: expected expert_capacity > 0, got "
            f"expert_capacity={config.expert_capacity}; 1.25 is usual, None: no limit"
        )
    for name in ("balance_loss", "router_z_loss", "balance_rate"):
        if not 0.0 <= getattr(config, name) < math.inf:
            raise ValueError(
                f"GPTConfig: expected {name} >= 0, got {name}={getattr(config, name)}; 0: off"
            )


PRESETS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    # For CPUs: minutes of training to a model with recognizable text.
    "micro": GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0),
    "mini": GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, dropout=0.0),
    "small-cpu": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.0),
}


# The table

Dims = tuple[str, ...]
SPLIT = frozenset({"A", "3A", "F", "H", "V"})  # the letters that tp splits


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
    """

    name: str
    op: str
    into: str
    out: str
    keeps: Dims = ()
    on: str = "tokens"

    @property
    def cheap(self) -> bool:
        """Whether selective recomputation runs it again."""
        return self.op in _ELEMENTWISE

    @property
    def parameters(self) -> dict[str, Dims]:
        """The dimensions of its module's parameters, by name."""
        if self.op == "layer_norm":
            return {"weight": (self.out,), "bias": (self.out,)}
        if self.op == "embedding":
            return {"weight": (self.into, self.out)}
        if self.op != "matmul":
            return {}
        stack: Dims = ("S",) if self.on == "experts" else ()
        weight = {"weight": (*stack, self.out, self.into)}
        return weight if self.out == "E" else {**weight, "bias": (*stack, self.out)}


ATTENTION = (
    Part("ln_1", "layer_norm", "C", "C", ("C", "stats"), "own"),
    Part("attn.c_attn", "matmul", "C", "3A", ("C",)),
    Part("", "attention", "3A", "A", ("3A", "A", "lse")),
    Part("attn.c_proj", "matmul", "A", "C"),  # attention keeps its input
    Part("ln_2", "layer_norm", "C", "C", ("C", "stats"), "own"),
)
MLP = (
    Part("mlp.c_fc", "matmul", "C", "F", ("C",)),
    Part("", "bias_gelu", "F", "F", ("F",)),
    Part("mlp.c_proj", "matmul", "F", "C", ("F",)),
)
EXPERTS = (  # the router's product is in fp32
    Part("mlp.router", "matmul", "X", "E", ("X", "E", "choices")),
    Part("", "permute", "R", "R", (), "choices"),
    Part("mlp.c_fc", "matmul", "R", "H", ("R",), "experts"),
    Part("", "bias_gelu", "H", "H", ("H",), "experts"),
    Part("mlp.c_proj", "matmul", "H", "R", ("H",), "experts"),
    Part("", "permute", "R", "R", ("R",), "choices"),
)
FIRST = (Part("wte", "embedding", "V", "C"), Part("wpe", "embedding", "T", "C"))
LAST = (Part("ln_f", "layer_norm", "C", "C", ("C", "stats"), "own"), Part("", "loss", "C", "V"))


def block_parts(*, experts: bool = False) -> tuple[Part, ...]:
    """The parts of a layer, in the order of forward."""
    return ATTENTION + (EXPERTS if experts else MLP)


def products(fp8: str = "all") -> tuple[str, ...]:
    """Names of a block's linear layers that --fp8 selects: all, mlp or none of them."""
    names = [part.name for part in block_parts() if part.op == "matmul"]
    return tuple(n for n in names if fp8 == "all" or n.startswith(f"{fp8}."))


def split_products() -> list[tuple[str, bool]]:
    """(letter, whether by columns) for each linear layer of a block that tp splits."""
    found = [part for part in block_parts() if part.op == "matmul"]
    letters = [(part.out if part.out in SPLIT else part.into) for part in found]
    return [(x, part.out in SPLIT) for part, x in zip(found, letters) if x in SPLIT]


@functools.lru_cache(256)
def column_share(shape: GPTConfig) -> float:
    """The fraction of FLOPs of a block's linear layers that is in layers split by columns."""
    sizes, found = widths(shape), [part for part in block_parts() if part.op == "matmul"]
    flops = [sizes[part.into] * sizes[part.out] for part in found]
    return sum(n for n, part in zip(flops, found) if part.out in SPLIT) / sum(flops)


# Shapes


def vocabulary_rows(shape: GPTConfig, tp: int) -> int:
    """Rows of the embedding on a tp rank, including the padding of its slice."""
    return -(-shape.padded_vocab_size // (tp * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE


def widths(shape: GPTConfig, tp: int = 1, ep: int = 1) -> dict[str, int]:
    """The size of each letter on a rank of tp and ep."""
    attention, experts = shape.heads_of_rank(tp) * shape.head_dim, shape.n_expert
    return {
        **dict.fromkeys(("C", "X", "R"), shape.n_embd),
        "F": 4 * shape.n_embd // tp,
        **{"A": attention, "3A": 3 * attention},
        **{"V": vocabulary_rows(shape, tp), "T": shape.block_size},
        **{"H": shape.hidden // tp, "E": experts, "S": experts // ep},
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
    found = []
    for _, dims in parameters_of(parts):
        sizes = widths(shape, tp, ep)
        if rows:
            sizes["C"] //= rows if SPLIT & set(dims) else tp
        found.append(tuple(sizes[d] for d in dims))
    return found


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
    sparse = shape.expert_layers * count_elements(block_parts(experts=True), sizes)
    dense = (shape.n_layer - shape.expert_layers) * count_elements(block_parts(), sizes)
    return count_elements(FIRST + LAST, sizes) + dense + sparse


# FLOPs and traffic

_ELEMENTWISE = {  # per element: FLOPs of forward; tensors that forward and backward move
    "layer_norm": (8.0, 4, 4),
    "bias_gelu": (15.0, 2, 3),
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
    layers = [sum(map(of_token, block_parts(experts=each))) for each in experts]
    return [0.0, *layers, 2.0 * shape.vocab_size * shape.n_embd]


def flops_per_token(shape: GPTConfig) -> int:
    """Model FLOPs per token of forward and backward at T = block_size: 6*P + 12*n_layer*T*C.

    P counts only the experts that process a token.
    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B (attention without its mask).
    """
    attention = 12 * shape.n_layer * shape.block_size * shape.n_embd
    return 6 * count_parameters(shape, active=True) + attention
