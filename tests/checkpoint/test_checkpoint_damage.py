"""Every file of a checkpoint truncated, changed, deleted, exchanged: always found and named.

Of two checkpoints of a run, written by one rank and by four, the newer is damaged in one way after
the other. `fastpar verify` and a load name the file, a resume takes the older one.
"""

import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.checkpoint import newest_checkpoint, save_checkpoint
from fastpar.checkpoint.manifest import MANIFEST, read_manifest
from fastpar.checkpoint.report import examine
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.weight_sources import load_weights
from fastpar.cli import main
from fastpar.data.tokenizer import make_tokenizer
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=256, dropout=0.0)
OURS = re.compile(r"[\w.]+: expected .*; .*", re.DOTALL)


def write(run, tp, stage):
    """Checkpoints after steps 1 and 2, from this rank's part."""
    model = GPT(CONFIG, seed=3)
    parallelize(model, Mesh(tp=tp, device="cpu"), zero_stage=stage)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2):
        x = (torch.arange(4) * step)[None]
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokenizer = make_tokenizer("bytes", "")
        given = {"model": model, "optimizer": optimizer, "tokenizer": tokenizer}
        save_checkpoint(run, step=step, state={"next_sample": step}, **given)


@pytest.fixture(
    scope="module", params=[pytest.param("one rank", marks=pytest.mark.slow), "four ranks"]
)
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "run"
    if request.param == "one rank":
        run_ranks(lambda: write(path, 1, 0), 1, timeout_s=60)
    else:
        run_ranks(lambda: write(path, 2, 2), 4, timeout_s=60)
    return path


@pytest.fixture(scope="module")
def target():
    model = GPT(CONFIG, seed=4)
    return model, AdamW(model.parameters())


def manglings(raw, head, other, draw, n_bits):
    """Ways to damage a file of these bytes: (what, content or None for no file)."""
    n = len(raw)
    for length in sorted({0, 1, 7, head - 1, head, n // 2, n - 1} - {n, -1}):
        yield f"cut at {length}", raw[:length]
    yield "longer", raw + b"\0"
    yield "deleted", None
    yield "zeros", bytes(n)
    if other not in (None, raw):
        yield "exchanged", other
    for place in {draw.randrange(head), *(draw.randrange(n) for _ in range(n_bits))}:
        bit = 1 << draw.randrange(8)
        yield f"bit {bit} at {place}", raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :]


def named(message, name):
    return OURS.fullmatch(message) is not None and name in message


@pytest.mark.parametrize("n_bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_all_damage_is_found_and_named(run, target, n_bits):
    older, newer = (run / "checkpoints" / f"step_{step:06d}" for step in (1, 2))
    manifest, draw, cases = read_manifest(newer), random.Random(5), 0
    assert len({t.file for t in manifest.optimizer}) in (1, 4)
    for name in [*manifest.files, MANIFEST]:
        file = newer / name
        raw = file.read_bytes()
        other = (older / name).read_bytes() if (older / name).exists() else None
        head = manifest.files[name].head if name in manifest.files else len(raw)
        for what, content in manglings(raw, head, other, draw, n_bits):
            cases += 1
            case = f"{name} {what}"
            file.unlink() if content is None else file.write_bytes(content)
            report = examine(newer)
            assert any(name in line for line in report.damage), case
            with pytest.raises(ValueError, match=re.escape(name)) as caught:
                load_checkpoint(newer, model=target[0], optimizer=target[1])
            assert named(str(caught.value), name), case
            lines: list[str] = []
            assert newest_checkpoint(run, lines.append) == older, case
            assert len(lines) == 1, case
            assert lines[0].startswith("damaged, trying the one before: "), case
            assert name in lines[0], case
            if not name.startswith("optimizer-"):
                with pytest.raises(ValueError, match=re.escape(name)):
                    load_weights(newer)
        file.write_bytes(raw)
    assert cases >= (55 if n_bits == 1 else 105)
    assert examine(newer).damage == []
    assert newest_checkpoint(run) == newer
    load_checkpoint(newer, model=target[0], optimizer=target[1])


def test_all_checkpoints_damaged(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for folder in folders:
        os.truncate(folder / "trainer_state.json", 5)
    said: list[str] = []
    with pytest.raises(ValueError, match=r"newest_checkpoint: .* with damaged ones only; the new"):
        newest_checkpoint(tmp_path / "run", said.append)
    assert len(said) == 2
    for command in ("sample", "export --to there"):
        assert main([*command.split(), str(tmp_path / "run")]) == 2
        err = capsys.readouterr().err.splitlines()
        assert err[-1].startswith("newest_checkpoint: expected a run with a complete checkpoint")
        assert len(err) == 3
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "trainer_state.json (5 bytes instead of" in capsys.readouterr().out


def test_a_folder_of_another_step_in_its_place(run, tmp_path):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    first, second = sorted((tmp_path / "run" / "checkpoints").iterdir())
    shutil.rmtree(second)
    first.rename(second)
    assert "(of step 1, in a folder of another one)" in examine(second).damage[0]


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "may not be read"])
def test_what_is_no_file_is_not_waited_for(run, target, kind, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    names = [*read_manifest(folder).files, MANIFEST]
    for name in names:
        file, aside = folder / name, tmp_path / "aside"
        file.rename(aside)
        with monkeypatch.context() as patch:
            if kind == "pipe":
                os.mkfifo(file)
            elif kind == "link":
                file.symlink_to(aside)
            elif kind == "folder":
                file.mkdir()
            else:  # also for root
                shutil.copyfile(aside, file)
                open_, path = os.open, str(file)

                def refuse(given, *arguments, _open=open_, _path=path, **options):
                    if os.fspath(given) == _path:
                        raise PermissionError(13, "Permission denied", _path)
                    return _open(given, *arguments, **options)

                patch.setattr(os, "open", refuse)
            words = {"pipe": "regular file", "link": "symbolic link", "folder": "regular file"}
            text = f"{name}.*{words.get(kind, 'Permission denied')}"
            with pytest.raises(ValueError, match=text):
                load_checkpoint(folder, model=target[0], optimizer=target[1])
            assert re.search(text, examine(folder).damage[0])
            assert newest_checkpoint(tmp_path / "run", lambda line: None).name == "step_000001"
        file.rmdir() if kind == "folder" else file.unlink()
        aside.rename(file)
    assert newest_checkpoint(Path(tmp_path / "run")) == folder


def test_ranks_refuse_together(run):
    """Damage in one rank's share is an error on all; nobody goes on alone."""
    folder = run / "checkpoints" / "step_000002"
    name = sorted({t.file for t in read_manifest(folder).optimizer})[-1]
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))

    def load():
        model = GPT(CONFIG, seed=4)
        parallelize(model, Mesh(device="cpu"), zero_stage=1)
        with pytest.raises(ValueError, match=rf"got {name} \(other content in .*, elements "):
            load_checkpoint(folder, model=model, optimizer=AdamW(model.parameters()))
        return True

    try:
        assert run_ranks(load, 3, timeout_s=60) == [True] * 3
    finally:
        (folder / name).write_bytes(raw)
