"""GPT-2 in plain PyTorch, the way nanoGPT writes it: what the training step is compared with.

Parameter names are those of fastpar.models.gpt.GPT, so that the same weights load into both. Other
blocks (NanoChat, Qwen3) are those of transformers.
Shape legend: B batch, T time, C n_embd, H heads, D head dim, F 4*C, V vocabulary.
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar
from fastpar.files.packages import import_package
from fastpar.models.hf import save_hf
from fastpar.settings.model import GPTConfig


def gpt2_shapes(quick: bool) -> list[torch.Size]:
    """Shapes of the 148 tensors of GPT-2 small; quick: of a model of one narrow layer."""
    config = GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50257)
    if quick:
        config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=256)
    return shapes_of(config)


def shapes_of(config: GPTConfig) -> list[torch.Size]:
    """Of all weights, the tied head's once."""
    with torch.device("meta"):
        return [p.shape for p in GPT(config).parameters()]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.p = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (B, T, self.n_head, C // self.n_head)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        p = self.p if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # [B, H, T, D]
        return self.dropout(self.c_proj(o.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """forward(idx, targets) -> the mean cross-entropy over full [B*T, V] logits."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.wte(idx) + self.wpe(positions))  # [B, T, C]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def load_fastpar(self, state: dict[str, Tensor]) -> "GPT":
        """Takes the weights of a fastpar.GPT of the same config, without its padding rows."""
        state = dict(state)
        state["wte.weight"] = state["wte.weight"][: self.config.vocab_size]
        self.load_state_dict(state)
        return self


class Pretrained(nn.Module):
    """A model of transformers; forward(idx, targets) as above."""

    def __init__(self, model: fastpar.GPT):
        super().__init__()
        auto = import_package("transformers", "bench train").AutoModelForCausalLM
        with tempfile.TemporaryDirectory() as folder:
            save_hf(model, folder)
            self.model = auto.from_pretrained(folder, dtype=torch.float32)
        self.model.train()

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=idx, use_cache=False).logits  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain_model(config: GPTConfig) -> nn.Module:
    """With the weights that fastpar.GPT has with seed 0: stock_model, or transformers' of a block
    that is not GPT-2's."""
    return stock_model(config) if config.is_gpt2 else Pretrained(fastpar.GPT(config, seed=0))


def stock_model(config: GPTConfig) -> GPT:
    """The weights that fastpar.GPT has with seed 0, without filling the module twice."""
    state = fastpar.GPT(config, seed=0).state_dict()
    state["wte.weight"] = state["wte.weight"][: config.vocab_size]
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(state, assign=True)
    return model
