"""verify and export of runs, checkpoints and folders of transformers."""

import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from nanogpt_cells import ARGS, NanoGPT, weights, write
from safetensors.torch import load_file, save_file
from saved import same_weights

from fastpar import GPT, AdamW, GPTConfig
from fastpar.checkpoint.commands import export_weights, find_folders, verify
from fastpar.checkpoint.manifest import MANIFEST
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.cli import main
from fastpar.files.plain_files import printable
from fastpar.kernels.adamw import master_join
from fastpar.models.hf import load_hf, save_hf

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
        assert f"{run}/checkpoints/step_00000{step}: ok\n  step {step}, {step},000 tok" in text
    numel = 131 * 16 + 8 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    of = f"{numel:,} elements of float32, 0.0 MB in 1 file, named as in trans"
    assert f"weights: 28 tensors, {of}" in text
    assert "DAMAGED" not in text
    (run / "latest" / "notes").write_text("")
    assert "  other files: 'notes'" in said(verify, run / "latest")[1]


def test_damage_is_named(run):
    _, second, third = find_folders("f", run)
    flip(third / "model.safetensors")
    flip(second / MANIFEST, 100)
    assert not said(verify, run / "latest")[0]
    sound, lines = said(verify, run)
    assert not sound
    for folder, words in (
        (third, r"  model.safetensors \(other content in transformer\."),
        (second, r"  read_manifest: .*manifest.json \("),
    ):
        assert re.match(words, lines[lines.index(f"{folder}: DAMAGED") + 1])


def test_folders_of_transformers(tmp_path):
    """There are no checksums."""
    model, hf = GPT(CONFIG, seed=1), tmp_path / "hf"
    save_hf(model, hf, max_shard_bytes=9000)
    sound, lines = said(verify, hf)
    assert sound
    assert lines[0] == f"{hf}: ok"
    assert lines[-1].endswith("there are no checksums")
    path = sorted(hf.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    sound, lines = said(verify, hf)
    assert not sound
    assert re.search(rf"{path.name} \(\d+ bytes instead of \d+\)", lines[1])


def test_folders_that_are_none(tmp_path, monkeypatch):
    def refused(words, folder):
        with pytest.raises(ValueError, match=words):
            verify(folder, print)

    refused(r"fastpar \w+: expected a run, .*\(no such folder\)", tmp_path / "none")
    (tmp_path / "file").write_text("")
    refused(r"got folder=.*/file \(Not a directory\); name one", tmp_path / "file")
    refused(r"a run with checkpoints, .* with file; name one of", tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    refused(r"with checkpoints, config.json, file; name one of these", tmp_path)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fastpar.checkpoint.commands.os.listdir", refuse)
    refused(r"got folder=.* \(Permission denied\); name one that exists", tmp_path)


def tensors_of(folder, pattern=""):
    """The lines of the table of tensors."""
    lines = []
    verify(folder, lines.append, pattern)
    return lines[next(i for i, line in enumerate(lines) if line.startswith("tensor ")) + 1 :]


def test_a_checkpoint_without_manifest_and_damage_that_stops_the_table(run):
    folder, newest = find_folders("f", run)[1:]
    (folder / MANIFEST).unlink()
    assert find_folders("f", folder) == [folder]
    assert not said(verify, folder)[0]
    flip(newest / next(n for n in os.listdir(newest) if n.startswith("optimizer-")))
    lines = []
    assert not verify(newest, lines.append, "")
    assert not any(line.startswith("tensor ") for line in lines)


def test_the_table(made, run, tmp_path):
    """Of numbers by hand; layers stand in their order."""
    _, model, optimizer = made

    def names(folder, pattern):
        return [line.split()[0] for line in tensors_of(folder, pattern)]

    rows = {line.split()[0]: line for line in tensors_of(run)}
    assert len(rows) == 28 * 4
    weight = model.h[1].mlp.c_fc.weight
    for name, shape, x in (
        ("transformer.h.1.mlp.c_fc.weight", r"\[16, 64\]", weight.detach()),
        ("h.1.mlp.c_fc.weight/exp_avg", r"\[64, 16\]", optimizer.state[weight]["exp_avg"]),
    ):
        x = x.double()
        numbers = [f"{v:.4g}" for v in (x.norm(), x.min(), x.mean(), x.max())]
        pattern = rf"{name} +{shape} +float32 +{' +'.join(map(re.escape, numbers))} +0"
        assert re.fullmatch(pattern, rows[name])
    assert names(run, "*.wpe.*") == ["transformer.wpe.weight"]
    assert len(names(run, "h.0.ln_1.bias")) == 4
    with pytest.raises(ValueError, match=r"pattern of tensors in .*, got tensors=x\*; the fir"):
        verify(run, print, "x*")
    deep = GPT(replace(CONFIG, n_layer=11))
    path = save_checkpoint(tmp_path / "deep", step=1, model=deep, optimizer=None)
    assert names(path, "ln_1.bias") == [f"transformer.h.{i}.ln_1.bias" for i in range(11)]


def test_names_of_others_command_no_terminal(tmp_path, capsys):
    """A title, a bell and a turn of the writing direction, in names of tensors and in JSON."""
    name, words = "\x1b]0;x\x07\u202ered", r"\x1b]0;x\x07\u202ered"
    model = torch.nn.ParameterDict({name: torch.ones(3)})
    optimizer = AdamW(model.parameters())
    model[name].sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    printed = [tensors_of(path), said(verify, path)[1]]
    main(["verify", str(path), "--tensors"])
    printed.append(capsys.readouterr().out.splitlines())
    with pytest.raises(ValueError, match="the first tensor is") as error:
        verify(path, lambda line: None, "none")
    printed.append([str(error.value)])
    refused = [(lambda: load_checkpoint(path, model=torch.nn.Linear(2, 2)), "got no weight")]
    with (path / "model.safetensors").open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    printed.append(said(verify, path)[1])
    refused.append((lambda: load_checkpoint(path, model=model), "other content in "))
    for load, expected in refused:
        with pytest.raises(ValueError, match=expected) as error:
            load()
        printed.append([str(error.value)])
    for lines in printed:
        assert all(line.isprintable() for line in lines), lines
    assert sum(words in "".join(lines) for lines in printed) >= len(printed) - 3
    assert printable("a\n\tb\x9b\r\udc80") == r"a" + "\n\t" + r"b\x9b\r\udc80"


def test_nonfinite_values_are_counted(tmp_path):
    tensors = {"a": torch.tensor([1.0, -2.0, math.nan, math.inf, 4.0]), "c": torch.zeros(0)}
    tensors |= {"b": torch.full((3,), math.nan), "d": torch.tensor([3, -4], dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    stats = {row.split()[0]: row.split()[-5:] for row in tensors_of(tmp_path)}
    assert [float(x) for x in stats["a"]] == [4.583, -2.0, 1.0, 4.0, 2]
    assert (stats["b"][2:], stats["c"]) == (["nan", "nan", "3"], ["0", *["nan"] * 3, "0"])
    assert stats["d"] == ["5", "-4", "-0.5", "3", "0"]


# export: the same bytes, or another dtype from the masters; never half of a folder
@pytest.mark.parametrize("options", [{"master_weights": True}, {"master_weights": "remainder"}])
def test_export_takes_the_masters(tmp_path, options):
    model, optimizer = make(tmp_path / "run", (3,), torch.bfloat16, **options)
    folder = tmp_path / "run" / "checkpoints" / "step_000003"
    assert said(verify, folder)[0]
    found = {}
    for name in ("same", "float32", "float16", "bfloat16"):
        export_weights(folder, tmp_path / name, None if name == "same" else getattr(torch, name))
        found[name] = load_hf(tmp_path / name).parameters()
    names = {n for n in os.listdir(folder) if not n.startswith("optimizer-")}
    assert set(os.listdir(tmp_path / "same")) == names - {MANIFEST, "trainer_state.json"}
    different = 0
    for parameter, *exported in zip(model.parameters(), *found.values(), strict=True):
        p, state = parameter.detach(), optimizer.state[parameter]
        if "master_weight" in state:
            master = state["master_weight"].view_as(p)
        else:
            master = master_join(p, state["master_remainder"].view_as(p))
        assert all(map(torch.equal, exported, (p, master, master.half(), p)))
        assert torch.equal(master.bfloat16(), p)
        different += int((master != p.float()).sum())
    assert different > 1000  # the masters are not the rounded weights


def test_masters_of_a_module_are_exported(tmp_path):
    model = NanoGPT(vocab_size=32, n_embd=16, n_layer=1, n_head=2, block_size=8, bias=True)
    optimizer = AdamW(model.bfloat16().parameters(), lr=1e-2, master_weights=True)
    model(torch.arange(8)[None])[0].float().square().mean().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    export_weights(path, tmp_path / "to", torch.float32)
    masters = {n: optimizer.state[p]["master_weight"] for n, p in model.named_parameters()}
    for key, value in load_file(tmp_path / "to" / "model.safetensors").items():
        assert torch.equal(value, masters[key]), key


@pytest.fixture(params=[10**9, 9000], ids=["one file", "shards"])
def plain(request, tmp_path):
    """A folder of transformers with a tokenizer, and a file that nobody asked for."""
    folder = tmp_path / "plain"
    save_hf(GPT(CONFIG, seed=1), folder, max_shard_bytes=request.param)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_text("a pickle")
    return folder


def test_bytes_and_other_dtypes_of_a_folder_of_transformers(plain, tmp_path):
    """Masks keep theirs; values that a dtype does not hold are named."""
    names = export_weights(plain, tmp_path / "to")
    assert names == sorted(n for n in os.listdir(plain) if n != "training_args.bin")
    for name in names:
        assert (tmp_path / "to" / name).read_bytes() == (plain / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["plain", "to"]
    transformers = pytest.importorskip("transformers")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        to = tmp_path / str(dtype)
        export_weights(plain, to, dtype)
        assert same_weights(load_hf(to), load_hf(plain).to(dtype))
        theirs = transformers.AutoConfig.from_pretrained(to)
        assert str(getattr(theirs, "dtype", None) or theirs.torch_dtype) == str(dtype)
        index = to / "model.safetensors.index.json"
        if index.exists():
            total = json.loads(index.read_text())["metadata"]["total_size"]
            files = map(load_file, to.glob("*.safetensors"))
            assert total == sum(x.nbytes for tensors in files for x in tensors.values())
    for path in plain.glob("*.safetensors"):
        tensors = load_file(path)
        tensors[f"transformer.h.{path.stem[-1]}.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors[min(tensors)].view(-1)[0] = 1e6
        save_file(tensors, path)
    export_weights(plain, tmp_path / "masks", torch.bfloat16)
    for path in (tmp_path / "masks").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            mask = name.endswith(".attn.bias")
            assert tensor.dtype == (torch.float32 if mask else torch.bfloat16)
    words = r"in the range of float16, got \S+ with 1e\+06; use --dty"
    with pytest.raises(ValueError, match=words):
        export_weights(plain, tmp_path / "half", torch.float16)
    assert not (tmp_path / "half").exists()


def test_nanogpt_for_transformers(tmp_path):
    names = export_weights(write(tmp_path / "ckpt.pt"), tmp_path / "to")
    assert names == ["config.json", "model.safetensors"]
    wte = load_hf(tmp_path / "to").wte.weight[: ARGS["vocab_size"]]
    assert torch.equal(wte, weights()["transformer.wte.weight"])
    export_weights(tmp_path / "ckpt.pt", tmp_path / "half", torch.float16)
    assert load_hf(tmp_path / "half").wte.weight.dtype == torch.float16


def test_bad_folders(plain, tmp_path):
    with pytest.raises(ValueError, match=r"fastpar export: expected a new folder, got"):
        export_weights(plain, plain)
    with pytest.raises(ValueError, match=r"or model.safetensors.index.json, got neither"):
        export_weights(tmp_path, tmp_path / "to")
    path = sorted(plain.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    for dtype in (None, torch.float16):
        with pytest.raises(ValueError, match=f"complete safetensors file, got .*{path.name}"):
            export_weights(plain, tmp_path / "to", dtype)
    assert sorted(os.listdir(tmp_path)) == ["plain"]
