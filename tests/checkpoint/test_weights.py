"""Names, layouts and files of a model's weights."""

import pytest
import torch
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.weights import config_files, files_of, list_weights
from fastpar.models.hf import to_hf_tensors
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=131)


def described(model):
    return [(w.name, w.key, w.shape, w.transposed) for w in list_weights(model)]


def test_a_gpt_has_transformers_tensors():
    model = GPT(CONFIG)
    stored = {w.key: w.stored(w.tensor.detach()) for w in list_weights(model)}
    expected = to_hf_tensors(model)
    assert stored.keys() == expected.keys()
    for w in list_weights(model):
        assert tuple(expected[w.key].shape) == w.shape
        assert torch.equal(stored[w.key], expected[w.key])
        assert torch.equal(w.loaded(stored[w.key]), w.tensor[: len(w.loaded(stored[w.key]))])


@pytest.mark.parametrize(("ranks", "tp", "stage"), [(2, 1, 3), (2, 2, 0), (4, 2, 3)])
def test_the_layout_does_not_depend_on_the_mesh(ranks, tp, stage):
    def work():
        model = GPT(CONFIG)
        model.wpe.weight.requires_grad_(False)
        parallelize(model, Mesh(tp=tp, device="cpu"), zero_stage=stage)
        return described(model), [
            (file, [w.key for w in ws]) for file, ws in files_of(list_weights(model), 0.01)
        ]

    model = GPT(CONFIG)
    files = [(file, [w.key for w in ws]) for file, ws in files_of(list_weights(model), 0.01)]
    assert run_ranks(work, ranks) == [(described(model), files)] * ranks


def test_any_module_keeps_its_names_and_buffers():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    names = [w.key for w in list_weights(model)]
    assert names == [n for n in model.state_dict() if n != "2.weight"][:4] + ["2.bias"] + [
        f"1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert config_files(model, None) == {}


def test_files_are_cut_by_size():
    weights = list_weights(GPT(CONFIG))
    assert [name for name, _ in files_of(weights)] == ["model.safetensors"]
    files = files_of(weights, 0.005)
    assert 1 < len(files) <= 17
    assert files[0][0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert [w.key for _, ws in files for w in ws] == [w.key for w in weights]
    limit = max(0.005 * 2**20, sum(w.nbytes for w in weights) / 16)
    assert all(len(ws) == 1 or sum(w.nbytes for w in ws) <= limit for _, ws in files)


def test_a_dtype_that_transformers_lacks_is_refused():
    with pytest.raises(ValueError, match=r"Saver: expected parameters of .* dtype=torch.float64"):
        config_files(GPT(CONFIG).double(), None)
