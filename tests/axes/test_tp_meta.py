"""Tensor parallelism of models on the meta device and with frozen parameters: the same bits."""

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=301, dropout=0.0)
FROZEN = ("h.0.attn.c_attn.weight", "h.1.mlp.c_proj.weight", "ln_f.bias")  # split, split, whole


def train(tp, stage, meta, frozen):
    values = GPT(CONFIG, seed=5).state_dict()
    mesh = Mesh(tp=tp)
    with torch.device("meta" if meta else "cpu"):
        model = GPT(CONFIG)
    for name in FROZEN if frozen else ():
        model.get_parameter(name).requires_grad_(False)
    if not meta:
        model.load_state_dict(values)
    asked = {}

    def fill(name, tensor):
        asked[name] = tensor.shape
        tensor.copy_(values[name])

    parallelize(model, mesh, zero_stage=stage, materialize=fill if meta else None)
    assert not meta or asked == {name: value.shape for name, value in values.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trained, lr=1e-2, max_grad_norm=1.0)
    idx = torch.randint(0, 301, (4, 16), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        model(idx, idx).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), values


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("world_size", "tp", "stage"), [(2, 2, 0), (4, 2, 3), (3, 1, 3), (4, 4, 0)]
)
def test_a_model_on_the_meta_device_has_the_bits_of_one_with_values(world_size, tp, stage, frozen):
    expected = run_ranks(train, world_size, tp, stage, False, frozen)
    got = run_ranks(train, world_size, tp, stage, True, frozen)
    for (ours, first), (theirs, _) in zip(got, expected):
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
            fixed = frozen and name in FROZEN
            assert torch.equal(value, first[name]) == fixed, name
