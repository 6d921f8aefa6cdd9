"""nanoGPT's model and its ckpt.pt, made without nanoGPT: names and shapes as in its model.py."""

import math

import torch
import torch.nn.functional as F
from torch import nn

ARGS = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 8,
    "bias": True,
    "vocab_size": 40,
    "dropout": 0.1,
}


def weights(args=ARGS):
    """What nanoGPT's model.state_dict() holds, from the names and shapes in its model.py."""
    C, V, T = args["n_embd"], args["vocab_size"], args["block_size"]
    shapes = {"transformer.wte.weight": (V, C), "transformer.wpe.weight": (T, C)}
    for i in range(args["n_layer"]):
        shapes |= {
            f"transformer.h.{i}.{name}": shape
            for name, shape in {
                "ln_1.weight": (C,),
                "ln_1.bias": (C,),
                "attn.c_attn.weight": (3 * C, C),
                "attn.c_attn.bias": (3 * C,),
                "attn.c_proj.weight": (C, C),
                "attn.c_proj.bias": (C,),
                "ln_2.weight": (C,),
                "ln_2.bias": (C,),
                "mlp.c_fc.weight": (4 * C, C),
                "mlp.c_fc.bias": (4 * C,),
                "mlp.c_proj.weight": (C, 4 * C),
                "mlp.c_proj.bias": (C,),
            }.items()
        }
    shapes |= {"transformer.ln_f.weight": (C,), "transformer.ln_f.bias": (C,)}
    generator = torch.Generator().manual_seed(0)
    values = {
        name: (1.0 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0.0)
        + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
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


class Norm(nn.Module):
    """LayerNorm whose bias can be left out."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, width, n_head, bias):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2)
        )
        scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        y = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, n_head, bias):
        super().__init__()
        self.ln_1, self.attn = Norm(width, bias), Attention(width, n_head, bias)
        self.ln_2, self.mlp = Norm(width, bias), MLP(width, bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Its GPT, without dropout; logits of all tokens."""

    def __init__(self, vocab_size, n_embd, n_layer, n_head, block_size, bias):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer)),
                "ln_f": Norm(n_embd, bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx):
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[: idx.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))
