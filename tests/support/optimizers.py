"""Small models, made-up gradients and runs of them, for every optimizer in each of its forms."""

import torch
from torch import Tensor, nn

from fastpar import Adafactor, AdamW, Muon

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
UINT8 = torch.uint8
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def adamw(params, **options):
    return AdamW(params, **{**HYPER, **options})


def adafactor(params, **options):
    return Adafactor(params, **options)


def muon(params, **options):
    """Matrices by Muon, the rest by the AdamW in it."""
    params = list(params)
    rest = {"params": [p for p in params if p.dim() != 2], "adamw": True}
    return Muon([{"params": [p for p in params if p.dim() == 2]}, rest], **options)


PAPER = {"eps": (1e-30, 1e-3), "add_eps": True}  # Adafactor as its paper has it
# (dtype of the parameters, make, options)
MODES = {
    "fp32": (FP32, adamw, {}),
    "fp64": (FP64, adamw, {"amsgrad": True}),
    "amsgrad": (FP32, adamw, {"amsgrad": True}),
    "capturable": (FP32, adamw, {"capturable": True}),
    "bf16-master": (BF16, adamw, {"master_weights": True}),
    "fp16-master": (FP16, adamw, {"master_weights": True}),
    "remainder": (BF16, adamw, {"master_weights": "remainder"}),
    "stochastic": (BF16, adamw, {"stochastic_rounding": True}),
    "bf16-moments": (FP32, adamw, {"moment_dtype": BF16}),
    "bf16-amsgrad": (FP32, adamw, {"moment_dtype": BF16, "amsgrad": True}),
    "8-bit": (FP32, adamw, {"moment_dtype": UINT8}),
    "8-bit-remainder": (BF16, adamw, {"master_weights": "remainder", "moment_dtype": UINT8}),
    "8-bit-stochastic": (BF16, adamw, {"stochastic_rounding": True, "moment_dtype": UINT8}),
}
FORMS = {
    **MODES,
    "adafactor": (FP32, adafactor, {}),
    "adafactor-paper": (FP32, adafactor, {**PAPER, "weight_decay": 0.1}),
    "adafactor-master": (BF16, adafactor, {**PAPER, "master_weights": True}),
    "adafactor-remainder": (BF16, adafactor, {"master_weights": "remainder"}),
    "muon": (FP32, muon, {}),
    "muon-master": (BF16, muon, {"master_weights": True}),
}


def build(dtype=FP32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=generator)
    return model.to(dtype)


def parameters(model) -> list[nn.Parameter]:
    return list(model.parameters() if isinstance(model, nn.Module) else model)


def put_gradients(model, step, scale=1.0):
    """Of a model, or of a list of parameters."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters(model):
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def vector(model) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in parameters(model)])


def run(model, optimizer, steps, scale=1.0, start=0) -> Tensor:
    for step in range(start, start + steps):
        put_gradients(model, step, scale)
        optimizer.step()
    return vector(model)


def step_counts(optimizer) -> list[int]:
    return sorted(int(state["step"]) for state in optimizer.state.values() if "step" in state)


def assert_same(found, expected, where=""):
    """Tensors, numbers and dicts of them, bit for bit, names and dtypes included."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where} {name}")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def assert_same_state(a, b):
    """The same of state dicts, but for their groups."""
    assert_same(a["state"], b["state"])
