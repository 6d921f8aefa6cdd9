"""nanoGPT's ckpt.pt, made without nanoGPT."""

import torch

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
