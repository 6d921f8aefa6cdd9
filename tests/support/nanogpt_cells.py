"""nanoGPT's model and its ckpt.pt, made without nanoGPT: names and shapes as in its model.py."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8}
ARGS |= {"bias": True, "vocab_size": 40, "dropout": 0.1}


class Exploit:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def weights(args=ARGS):
    """What nanoGPT's model.state_dict() holds."""
    generator, model = torch.Generator().manual_seed(0), NanoGPT(**args)
    values = {
        name: ("ln_" in name and "weight" in name) + 0.2 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }
    return {**values, "lm_head.weight": values["transformer.wte.weight"]}


def write(path, model=None, args=ARGS, **more):
    """A checkpoint as nanoGPT's train.py writes it."""
    content = {
        "model": weights(args) if model is None else model,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
        "model_args": args,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.2),
        "config": {"dataset": "openwebtext", "compile": True},
    }
    torch.save({**content, **more}, path)
    return path


class LayerNorm(nn.Module):
    """LayerNorm whose bias can be left out."""

    def __init__(self, width=24, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """The fused projection, heads, both dropouts; with or without torch's fused attention."""

    def __init__(self, width=24, heads=3, p=0.0, bias=True, flash=True):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.attn_dropout = nn.Dropout(p)
        self.resid_dropout = nn.Dropout(p)
        self.n_head, self.n_embd, self.dropout, self.flash = heads, width, p, flash
        if not flash:
            self.register_buffer("bias", torch.ones(64, 64).tril()[None, None])

    def heads(self, x):
        """q, k and v, each [B, H, T, D]."""
        return self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)

    def attend(self, q, k, v):
        if self.flash:
            p = self.dropout if self.training else 0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        T = q.shape[-2]
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        return self.attn_dropout(scores.softmax(-1)) @ v

    def forward(self, x):
        y = self.attend(*self.heads(x))
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(x.shape)))


class MLP(nn.Module):
    def __init__(self, width=24, p=0.0, bias=True, approximate="none"):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU(approximate)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, width=24, heads=3, p=0.0, bias=True, flash=True, approximate="none"):
        super().__init__()
        self.ln_1 = LayerNorm(width, bias)
        self.attn = CausalSelfAttention(width, heads, p, bias, flash)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = MLP(width, p, bias, approximate)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Its GPT, with logits of all tokens: transformer.{wte, wpe, drop, h, ln_f}, a tied lm_head."""

    checkpointing = None  # or use_reentrant

    def __init__(
        self, vocab_size=67, n_embd=24, n_layer=2, n_head=3, block_size=64, bias=True,
        dropout=0.0, flash=True, approximate="none",
    ):  # fmt: skip
        super().__init__()
        of_layer = n_embd, n_head, dropout, bias, flash, approximate
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(*of_layer) for _ in range(n_layer)),
                "ln_f": LayerNorm(n_embd, bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def hidden(self, idx):
        t = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for layer in t.h:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing)
        return t.ln_f(x)

    def forward(self, idx):
        return self.lm_head(self.hidden(idx))
