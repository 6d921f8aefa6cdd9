"""Parts of models: fused layers with torch's constructors and keys, and layers that tp splits."""

from fastpar.nn.modules import (
    GELU,
    MLP,
    CausalSelfAttention,
    Embedding,
    LayerNorm,
    LinearCrossEntropyLoss,
    RMSNorm,
)
from fastpar.nn.tp_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)

__all__ = [
    "GELU",
    "MLP",
    "CausalSelfAttention",
    "ColumnParallelLinear",
    "Embedding",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
]
