"""Checkpoints of any model: what Saver commits verifies, loads and goes on, bit for bit."""

import json

import pytest
import torch
from nanogpt_cells import NanoGPT
from safetensors.torch import load_file, save_file
from saved import bits
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.commands import examine, export_weights
from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.checkpoint.restore import load_checkpoint, load_weights
from fastpar.checkpoint.saver import Saver
from fastpar.files.runs import list_checkpoints
from fastpar.models.hf import is_conv1d, save_hf
from fastpar.testing import run_ranks

SIZES = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}


def transformers():
    return pytest.importorskip("transformers", reason="pip install -e '.[dev]'")


class Odd(nn.Module):
    """Names that look like a GPT-2's, shapes of any kind, a buffer that two modules share."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(32, 8), "norm": nn.BatchNorm1d(8), "h": nn.Conv1d(8, 8, 1)}
        )
        self.scale = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.rand(0, 3))
        table = torch.rand(4)
        for module in (self, self.transformer.wte, self.transformer.h):
            module.register_buffer("table", table)
        self.register_buffer("mask", torch.rand(3) > 0.5)

    def forward(self, idx):
        x = self.transformer.wte(idx).transpose(1, 2)
        return self.transformer.h(self.transformer.norm(x)) * self.scale + self.empty.sum()


def nano(bias):
    return lambda: NanoGPT(**SIZES, block_size=8, bias=bias)


def hugging(name, config, **sizes):
    def build():
        library = transformers()
        return getattr(library, name)(getattr(library, config)(**sizes))

    return build


GPT2 = {**SIZES, "n_positions": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OTHERS = {"vocab_size": 32, "hidden_size": 16}
MODELS = {
    "GPT": lambda: GPT(
        GPTConfig(**SIZES, block_size=8, dropout=0.0), seed=int(torch.randint(9, ()))
    ),
    "nanoGPT": nano(bias=False),
    "nanoGPT with biases": nano(bias=True),
    "GPT2Model": hugging("GPT2Model", "GPT2Config", **GPT2),
    "GPT2LMHeadModel": hugging("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "untied": hugging("GPT2LMHeadModel", "GPT2Config", **GPT2, tie_word_embeddings=False),
    "scores": hugging(
        "GPT2ForSequenceClassification", "GPT2Config", **GPT2, num_labels=3, pad_token_id=0
    ),
    "GPT-J": hugging("GPTJForCausalLM", "GPTJConfig", **{**GPT2, "rotary_dim": 4}),
    "Falcon": hugging(
        "FalconForCausalLM", "FalconConfig", **OTHERS, num_hidden_layers=2, num_attention_heads=2
    ),
    "BLOOM": hugging("BloomForCausalLM", "BloomConfig", **OTHERS, n_layer=2, n_head=2),
    "any module": Odd,
}


CHEAP = ("nanoGPT", "any module")


def run(build, stage, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    model = parallelize(build().to(dtype), Mesh(device="cpu"), zero_stage=stage)
    options = {} if dtype == torch.float32 else {"master_weights": True}
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def step(model, optimizer, seed):
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))
    if isinstance(model, GPT):
        loss = model(ids, ids)
    else:
        out = model(ids)
        out = out if torch.is_tensor(out) else out[0]
        loss = (out.float() - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder, at, model, optimizer):
    saver = Saver(folder, model=model, optimizer=optimizer)
    saver.save(at, {})
    result = saver.settle()
    assert result.ok, result.errors
    return result.path


def goes_on(build, folder, stage):
    """Two steps, a checkpoint, a third; and the third from the checkpoint, in another model."""
    model, optimizer = run(build, stage, seed=1)
    for i in range(2):
        step(model, optimizer, i)
    saved = save(folder / "a", 2, model, optimizer)
    step(model, optimizer, 2)
    third = save(folder / "b", 3, model, optimizer)
    again, its_optimizer = run(build, stage, seed=2)
    state = load_checkpoint(saved, model=again, optimizer=its_optimizer)
    assert state["step"] == 2
    same = save(folder / "c", 2, again, its_optimizer)
    step(again, its_optimizer, 2)
    return saved, same, third, save(folder / "d", 3, again, its_optimizer)


def check(name, tmp_path):
    build = MODELS[name]
    build()  # skips without transformers
    for stage, ranks in ((0, 1), (3, 2)):
        folder = tmp_path / f"{name} {stage}"
        paths = run_ranks(lambda f=folder, s=stage: goes_on(build, f, s), ranks)[0]
        saved, same, third, resumed = paths
        assert bits(saved) == bits(same), name
        assert bits(third) == bits(resumed), name
        assert bits(saved) != bits(third), name
        assert newest_checkpoint(folder / "a") == saved
        assert examine(saved).damage == [], name
        assert read_manifest(saved).model == ("gpt" if name == "GPT" else "module")
    model, optimizer = run(build, 0, seed=3)  # what two ranks wrote, in one process
    load_checkpoint(saved, model=model, optimizer=optimizer)
    assert bits(save(tmp_path / f"{name} one", 2, model, optimizer)) == bits(saved), name


def test_every_model_comes_back_and_goes_on(tmp_path):
    for name in CHEAP:
        check(name, tmp_path)


@pytest.mark.slow
def test_the_other_models_come_back_and_go_on(tmp_path):
    for name in MODELS.keys() - set(CHEAP):
        check(name, tmp_path)


def test_folders_of_other_models_are_sound(tmp_path):
    """verify of what transformers has saved: said to be another model, not damage."""
    for name, change, tensors in (
        ("ours", {}, {}),
        ("untied", {"tie_word_embeddings": False}, {"lm_head.weight": torch.rand(32, 16)}),
        (
            "scores",
            {"architectures": ["GPT2ForSequenceClassification"]},
            {"score.weight": torch.rand(3, 16)},
        ),
    ):
        save_hf(MODELS["GPT"](), tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
        weights = tmp_path / name / "model.safetensors"
        save_file(load_file(weights) | tensors, weights)
        report = examine(tmp_path / name)
        assert report.damage == [], name
        assert ("which was not compared" in report.facts[0]) == bool(change), name


def test_masters_of_a_module_are_exported(tmp_path):
    """Its state has the names of its weights, and their layout."""
    for name in ("GPT", "nanoGPT with biases"):
        model, optimizer = run(MODELS[name], 0, seed=1, dtype=torch.bfloat16)
        step(model, optimizer, 0)
        export_weights(
            save(tmp_path / name, 1, model, optimizer), tmp_path / "to" / name, torch.float32
        )
        masters = {n: optimizer.state[p]["master_weight"] for n, p in model.named_parameters()}
        for key, value in load_file(tmp_path / "to" / name / "model.safetensors").items():
            if name == "GPT":
                key = key.removeprefix("transformer.")
                turned = is_conv1d(key)
                master = masters[key].t() if turned else masters[key][: len(value)]
            else:
                master = masters[key]
            assert torch.equal(value, master), (name, key)


def test_weights_of_another_module_are_named(tmp_path):
    path = save(tmp_path, 1, *run(MODELS["nanoGPT"], 0, seed=1))
    with pytest.raises(
        ValueError, match=r"of a GPT-2 with config.json, got path=.* another module"
    ):
        load_weights(path)


def test_what_could_not_be_read_back_is_no_checkpoint(tmp_path):
    for state, problem in (
        ({"step": 7}, "a state without 'step', which save.. adds, got one; rename"),
        ({"model": "x"}, "a state without 'model'"),
        ({"n": 10**50}, "can be read back, got a number of 51 digits; keep large"),
    ):
        saver = Saver(tmp_path, model=nn.Linear(2, 2))
        saver.save(1, state)
        result = saver.settle()
        assert not result.ok
        with pytest.raises(OSError, match=problem):
            raise OSError(result.errors[0])
        assert not list_checkpoints(tmp_path)


def test_one_ranks_state_is_refused_by_all(tmp_path):
    def work():
        mesh = Mesh(device="cpu")
        saver = Saver(tmp_path, model=parallelize(nn.Linear(2, 2), mesh))
        saver.save(1, {"model": 1} if mesh.rank == 0 else {})
        return saver.settle().errors

    errors = run_ranks(work, 2)
    assert errors[0] == errors[1]
    assert errors[0][0].startswith("rank 0: expected a state without 'model'")
