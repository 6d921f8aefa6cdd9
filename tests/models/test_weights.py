"""Names, layouts and files of a model's weights."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.saver import Saver
from fastpar.models.hf import cut_into_files, list_weights, save_hf
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=131)


def described(model):
    return [(w.name, w.key, w.shape, w.transposed) for w in list_weights(model)]


def test_a_gpt_has_transformers_tensors(tmp_path):
    model = GPT(CONFIG)
    stored = {w.key: w.stored(w.tensor.detach()) for w in list_weights(model)}
    save_hf(model, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == expected.keys()
    for w in list_weights(model):
        assert tuple(expected[w.key].shape) == w.shape
        assert torch.equal(stored[w.key], expected[w.key])
        assert torch.equal(w.stored(w.local(stored[w.key])), stored[w.key])


@pytest.mark.parametrize(("ranks", "tp", "stage"), [(2, 1, 3), (2, 2, 0), (4, 2, 3)])
def test_the_layout_does_not_depend_on_the_mesh(ranks, tp, stage):
    def work():
        model = GPT(CONFIG)
        model.wpe.weight.requires_grad_(False)
        parallelize(model, Mesh(tp=tp, device="cpu"), zero_stage=stage)
        return described(model), [
            (file, [w.key for w in ws]) for file, ws in cut_into_files(list_weights(model), 10_000)
        ]

    model = GPT(CONFIG)
    files = [
        (file, [w.key for w in ws]) for file, ws in cut_into_files(list_weights(model), 10_000)
    ]
    assert run_ranks(work, ranks) == [(described(model), files)] * ranks


def test_any_module_keeps_its_names_and_buffers():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    names = [w.key for w in list_weights(model)]
    assert names == [n for n in model.state_dict() if n != "2.weight"][:4] + ["2.bias"] + [
        f"1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")
    ]


def test_files_are_cut_by_size(tmp_path):
    weights = list_weights(GPT(CONFIG))
    assert [name for name, _ in cut_into_files(weights, 1e9)] == ["model.safetensors"]
    files = cut_into_files(weights, 5000)
    assert len(files) > 1
    assert files[0][0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert [w.key for _, ws in files for w in ws] == [w.key for w in weights]
    assert all(len(ws) == 1 or sum(w.nbytes for w in ws) <= 5000 for _, ws in files)
    saver = Saver(tmp_path, model=GPT(CONFIG), asynchronous=False, shard_mb=1e-6)
    saver.save(1, {})
    assert 1 < len(list(saver.last.path.glob("*.safetensors"))) <= 17


def test_a_dtype_that_transformers_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Saver: expected parameters of .* dtype=torch.float64"):
        Saver(tmp_path, model=GPT(CONFIG).double())
