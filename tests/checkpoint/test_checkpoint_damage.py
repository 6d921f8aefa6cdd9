"""Every file of a checkpoint missing, cut, changed: always found and named, as are its pieces.

Of two checkpoints of a run, written by one rank and by four, the newer is damaged in one way after
the other. `fastpar verify` and a load name the file, a resume takes the older one.
"""

import os
import random
import re
import shutil

import pytest
import torch
from manifest_cells import reseal

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.commands import examine
from fastpar.checkpoint.manifest import MANIFEST, read_manifest
from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.checkpoint.restore import load_checkpoint, load_weights
from fastpar.checkpoint.saver import save_checkpoint
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


def damages(raw, head, draw):
    """Ways to damage a file of these bytes: (what, content or None for no file)."""
    n = len(raw)
    yield "missing", None
    yield "cut", raw[: n // 2]
    yield "longer", raw + b"\0"
    for place in (draw.randrange(head), draw.randrange(n)):
        bit = 1 << draw.randrange(8)
        yield f"bit {bit} at {place}", raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :]


def check_found(run, name, target, case):
    """Verify and a load name the file; a resume takes the older checkpoint."""
    older, newer = (run / "checkpoints" / f"step_{step:06d}" for step in (1, 2))
    assert any(name in line for line in examine(newer).damage), case
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        load_checkpoint(newer, model=target[0], optimizer=target[1])
    assert OURS.fullmatch(str(caught.value)), case
    lines: list[str] = []
    assert newest_checkpoint(run, lines.append) == older, case
    assert len(lines) == 1, case
    assert lines[0].startswith("damaged, trying the one before: "), case
    assert name in lines[0], case


def test_all_damage_is_found_and_named(run, target):
    newer, draw = run / "checkpoints" / "step_000002", random.Random(5)
    manifest = read_manifest(newer)
    assert len({t.file for t in manifest.optimizer}) in (1, 4)
    for name in [*manifest.files, MANIFEST]:
        file = newer / name
        raw = file.read_bytes()
        head = manifest.files[name].head if name in manifest.files else len(raw)
        for what, content in damages(raw, head, draw):
            file.unlink() if content is None else file.write_bytes(content)
            check_found(run, name, target, f"{name} {what}")
            if not name.startswith("optimizer-"):
                with pytest.raises(ValueError, match=re.escape(name)):
                    load_weights(newer)
        file.write_bytes(raw)
    assert examine(newer).damage == []
    assert newest_checkpoint(run) == newer
    load_checkpoint(newer, model=target[0], optimizer=target[1])


def first_piece(content):
    return next(p for p in content["optimizer"] if p["key"].endswith("/exp_avg") and p["runs"])


PIECES = {
    "shape": lambda content: first_piece(content).update(shape=[7]),
    "dtype": lambda content: first_piece(content).update(dtype="F64"),
    "overlap": lambda content: content["optimizer"].append(first_piece(content)),
    "missing": lambda content: content["optimizer"].remove(first_piece(content)),
}


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_that_do_not_go_together_are_found(run, target, kind):
    """Under a right digest: nothing is read of such a checkpoint."""
    newer = run / "checkpoints" / "step_000002"
    raw = (newer / MANIFEST).read_bytes()
    before = [p.detach().clone() for p in target[0].parameters()]
    reseal(newer, PIECES[kind])
    try:
        check_found(run, MANIFEST, target, kind)
        assert all(map(torch.equal, before, target[0].parameters()))
    finally:
        (newer / MANIFEST).write_bytes(raw)


def test_a_checkpoint_of_another_version_is_no_damage(run, target):
    """A run of such a one does not go on from an older checkpoint: it says who reads this one."""
    newer = run / "checkpoints" / "step_000002"
    raw = (newer / MANIFEST).read_bytes()
    reseal(newer, lambda content: content.update(version=2))
    try:
        for act in (
            lambda: load_checkpoint(newer, model=target[0]),
            lambda: newest_checkpoint(run),
            lambda: examine(newer),
            lambda: load_weights(newer),
        ):
            with pytest.raises(ValueError, match=r"of version 2; fastpar 0\.3 reads it$"):
                act()
    finally:
        (newer / MANIFEST).write_bytes(raw)


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
