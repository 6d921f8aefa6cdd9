"""What verify and inspect say of runs, checkpoints and folders of transformers."""

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from manifest_cells import reseal
from safetensors.torch import load_file, save_file

from fastpar.checkpoint import reader as reader_module
from fastpar.checkpoint.commands import (
    examine,
    export_weights,
    find_folders,
    inspect,
    stats_of,
    verify,
)
from fastpar.checkpoint.manifest import MANIFEST
from fastpar.checkpoint.reader import TensorReader, list_plain_tensors
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.kernels.adamw_storage import master_join
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.optim.adamw import AdamW
from fastpar.settings.model import GPTConfig

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=131, dropout=0.0)


def make(run, steps=(2,), dtype=torch.float32, **options):
    """A run with a checkpoint after each of these steps; model and optimizer."""
    model = GPT(CONFIG, seed=1).to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(1, max(steps) + 1):
        x = (torch.arange(8) * step % 131)[None]
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            state = {"tokens": 1000 * step}
            save_checkpoint(run, step=step, model=model, optimizer=optimizer, state=state)
    return model, optimizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = tmp_path_factory.mktemp("report") / "run"
    return run, *make(run, (1, 2, 3))


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def said(act, *arguments):
    lines = []
    return act(*arguments, lines.append), lines


def flip(path, i=-1):
    raw = bytearray(path.read_bytes())
    raw[i] ^= 1
    path.write_bytes(raw)


def test_a_sound_run(run):
    sound, lines = said(verify, run)
    assert sound
    text = "\n".join(lines)
    for step in (1, 2, 3):
        assert f"{run}/checkpoints/step_00000{step}: sound\n  step {step}, {step},000 tok" in text
    assert "GPT-2 with 2 layers, 2 heads, width 16, context 8, vocabulary 131" in text
    numel = 131 * 16 + 8 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    assert f"weights: 28 tensors, {numel:,} elements of float32, 0.0 MB in 1 file, whole" in text
    assert "optimizer: 84 tensors (step, exp_avg, exp_avg_sq), 0.1 MB in 84 pieces in 1 f" in text
    assert re.search(r"0\.1 MB in \d files read in \d+\.\d\d s", text)
    assert "DAMAGED" not in text
    (run / "latest" / "notes").write_text("")
    assert "  not part of it: 'notes'" in said(verify, run / "latest")[1]


def test_damage_is_named_and_another_checkpoint_offered(run):
    folders = find_folders("f", run)
    flip(folders[2] / "model.safetensors")
    flip(folders[1] / MANIFEST, 100)
    sound, lines = said(verify, run)
    assert not sound
    assert lines[-1] == f"use {folders[0]}, the newest that is sound"
    start = lines.index(f"{folders[2]}: DAMAGED")
    assert lines[start + 1].startswith("  model.safetensors (other content in transformer.")
    start = lines.index(f"{folders[1]}: DAMAGED")
    assert re.match(r"  read_manifest: .*manifest.json \(", lines[start + 1])
    sound, lines = said(verify, run / "latest")
    assert not sound
    assert lines[-1] == f"use {folders[0].resolve()}, the newest that is sound"
    shutil.rmtree(folders[0])
    assert said(verify, run)[1][-1] == "there is no sound checkpoint beside it"


def test_a_config_of_another_model_is_said(run):
    folder = find_folders("f", run)[0]
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 130, "n_layer": 3}
    raw = json.dumps(config).encode()
    (folder / "config.json").write_bytes(raw)
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "head": len(raw)}
    reseal(folder, lambda content: content["files"].__setitem__("config.json", entry))
    damage = examine(folder).damage
    assert "transformer.wte.weight of shape [131, 16] where config.json has [130, 16]" in damage
    assert "transformer.h.2.ln_1.weight of shape None where config.json has [16]" in damage


def test_folders_of_transformers(tmp_path):
    model = GPT(CONFIG, seed=1)
    save_hf(model, tmp_path / "hf", max_shard_bytes=9000)
    sound, lines = said(verify, tmp_path / "hf")
    assert sound
    assert lines[0] == f"{tmp_path / 'hf'}: sound"
    assert lines[-1].endswith("there are no checksums")
    path = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    sound, lines = said(verify, tmp_path / "hf")
    assert not sound
    assert re.search(rf"{path.name} \(\d+ bytes instead of \d+\)", lines[1])
    (tmp_path / "llama").mkdir()
    save_file({"model.a": torch.zeros(3)}, tmp_path / "llama" / "model.safetensors")
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    sound, lines = said(verify, tmp_path / "llama")
    assert sound
    assert "  config.json with model_type='llama', which was not compared" in lines
    head = {"lm_head.weight": load_hf_head(model), "transformer.h.0.attn.bias": torch.ones(1)}
    save_hf(model, tmp_path / "tied")
    path = tmp_path / "tied" / "model.safetensors"
    save_file({**load_file(path), **head}, path)
    assert said(verify, tmp_path / "tied")[0]


def load_hf_head(model):
    return model.wte.weight.detach()[:131].clone()


def test_folders_that_are_none(tmp_path, monkeypatch):
    for act in (lambda f: verify(f, print), lambda f: inspect(f, None, print)):
        with pytest.raises(ValueError, match=r"fastpar \w+: expected a run, .*\(no such folder\)"):
            act(tmp_path / "none")
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"got folder=.*/file \(Not a directory\); give one"):
            act(tmp_path / "file")
        with pytest.raises(ValueError, match=r"a run with checkpoints, .* with file; give one of"):
            act(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"with checkpoints, config.json, file; give one of these"):
        verify(tmp_path, print)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fastpar.checkpoint.commands.os.listdir", refuse)
    with pytest.raises(ValueError, match=r"got folder=.* \(Permission denied\); give one that can"):
        verify(tmp_path, print)


def test_a_checkpoint_without_manifest_is_one(run):
    folder = find_folders("f", run)[1]
    (folder / MANIFEST).unlink()
    assert find_folders("f", folder) == [folder]
    assert not said(verify, folder)[0]
    with pytest.raises(ValueError, match=r"manifest.json \(no such file\)"):
        inspect(folder, None, print)


def test_the_table(made, run):
    _, model, optimizer = made
    _, lines = said(inspect, run, None)
    assert lines[0] == f"{run}/checkpoints/step_000003"
    rows = {line.split()[0]: line for line in lines[2:]}
    assert len(rows) == 28 * 4
    weight = model.h[1].mlp.c_fc.weight.detach().double()
    moment = optimizer.state[model.h[1].mlp.c_fc.weight]["exp_avg"].double()
    for name, shape, x in (
        ("transformer.h.1.mlp.c_fc.weight", r"\[16, 64\]", weight),
        ("h.1.mlp.c_fc.weight/exp_avg", r"\[64, 16\]", moment),
    ):
        numbers = [f"{v:.4g}" for v in (x.norm(), x.min(), x.mean(), x.max())]
        pattern = rf"{name} +{shape} +float32 +{' +'.join(map(re.escape, numbers))} +0"
        assert re.fullmatch(pattern, rows[name])
    assert [line.split()[0] for line in said(inspect, run, "*.wpe.*")[1][2:]] == [
        "transformer.wpe.weight"
    ]
    assert len(said(inspect, run, "h.0.ln_1.bias")[1]) == 2 + 4
    with pytest.raises(ValueError, match=r"pattern of tensors in .*, got filter=x\*; its fir"):
        inspect(run, "x*", print)


def test_nonfinite_values_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "BLOCK_BYTES", 8)
    values = torch.tensor([1.0, -2.0, math.nan, math.inf, 4.0])
    tensors = {"a": values, "b": torch.full((3,), math.nan), "c": torch.zeros(0)}
    tensors["d"] = torch.tensor([3, -4], dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    manifest = list_plain_tensors(tmp_path)
    with TensorReader(tmp_path, manifest) as reader:
        stats = {t.key: stats_of(reader.chunks([t])) for t in manifest.weights}
    assert stats["a"] == pytest.approx((math.sqrt(21), -2.0, 1.0, 4.0, 2))
    assert stats["b"].nonfinite == 3
    assert math.isnan(stats["b"].mean)
    assert (stats["c"].norm, stats["c"].nonfinite) == (0.0, 0)
    assert stats["d"] == (5.0, -4.0, -0.5, 3.0, 0)


def test_damage_stops_the_table(run):
    folder = find_folders("f", run)[-1]
    name = next(n for n in os.listdir(folder) if n.startswith("optimizer-"))
    flip(folder / name)
    with pytest.raises(ValueError, match=rf"got other content in .*{name}; the checkpoint is dam"):
        inspect(folder, None, lambda line: None)


@pytest.mark.parametrize("options", [{"master_weights": True}, {"master_weights": "remainder"}])
def test_export_takes_the_masters(tmp_path, options):
    model, optimizer = make(tmp_path / "run", (3,), torch.bfloat16, **options)
    folder = tmp_path / "run" / "checkpoints" / "step_000003"
    assert said(verify, folder)[0]
    export_weights(folder, tmp_path / "same")
    export_weights(folder, tmp_path / "fp32", torch.float32)
    export_weights(folder, tmp_path / "fp16", torch.float16)
    export_weights(folder, tmp_path / "bf16", torch.bfloat16)
    same, whole, half, again = (
        load_hf(tmp_path / name) for name in ("same", "fp32", "fp16", "bf16")
    )
    names = {n for n in os.listdir(folder) if not n.startswith("optimizer-")}
    assert set(os.listdir(tmp_path / "same")) == names - {MANIFEST, "trainer_state.json"}
    different = 0
    for parameter, q, r, s, t in zip(
        *(m.parameters() for m in (model, same, whole, half, again)), strict=True
    ):
        p = parameter.detach()
        state = optimizer.state[parameter]
        if "master_weight" in state:
            master = state["master_weight"].view_as(p)
        else:
            master = master_join(p, state["master_remainder"].view_as(p))
        assert torch.equal(q, p)
        assert torch.equal(t, p)
        assert torch.equal(r.bfloat16(), p)
        assert torch.equal(s, r.half())
        assert torch.equal(r, master)
        different += int((r != p.float()).sum())
    assert different > 1000  # the masters are not the rounded weights


def test_layers_stand_in_their_order(tmp_path):
    model = GPT(replace(CONFIG, n_layer=11))
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=None)
    names = [line.split()[0] for line in said(inspect, path, "ln_1.bias")[1][2:]]
    assert names == [f"transformer.h.{i}.ln_1.bias" for i in range(11)]
