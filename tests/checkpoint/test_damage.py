"""What is missing, cut, changed or does not go together is found, named and refused.

By hand-made folders every byte and field of the format; by checkpoints that four ranks have
written every file: `fastpar verify` and a load name it, a resume takes the older one.
"""

import contextlib
import hashlib
import os
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from cells import slow
from manifest_cells import make_folder, reseal

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint import manifest as manifest_module
from fastpar.checkpoint import reader as reader_module
from fastpar.checkpoint.commands import examine
from fastpar.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    check_complete,
    digest_of,
    read_manifest,
)
from fastpar.checkpoint.reader import (
    TensorReader,
    describe,
    find_damage,
    newest_checkpoint,
    verify_files,
)
from fastpar.checkpoint.restore import load_checkpoint, load_weights
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.cli import main
from fastpar.data.tokenizer import make_tokenizer
from fastpar.sharding.placements import HOLE, Run
from fastpar.testing import run_ranks

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer-00001-of-00002.safetensors"


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "step_000005"
    return folder, make_folder(folder)


def test_a_checkpoint_of_version_3_is_read(made, monkeypatch):
    """Its digests are SHA-256; so are those of a machine without xxhash."""
    folder, whole = made

    def older(content):
        content["version"] = 3
        for entry in (*content["weights"], *content["optimizer"]):
            at = places_in(folder, whole, entry["file"])[entry["key"]]
            raw = (folder / entry["file"]).read_bytes()[at.start : at.stop]
            entry["sha256"] = hashlib.sha256(raw).hexdigest()
        for name, entry in content["files"].items():
            raw = (folder / name).read_bytes()[: entry["head"]]
            entry["sha256"] = hashlib.sha256(raw).hexdigest()
        for entry in (*content["files"].values(), *content["weights"], *content["optimizer"]):
            del entry["digest"]

    reseal(folder, older)
    found = read_manifest(folder)
    assert {entry.digest.partition(":")[0] for entry in found.weights} == {"sha256"}
    assert not find_damage(folder, found)
    file = folder / found.optimizer[0].file
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert find_damage(folder, found)
    monkeypatch.setattr(manifest_module, "xxhash", None)
    assert digest_of(b"a") == f"sha256:{hashlib.sha256(b'a').hexdigest()}"


def test_a_checkpoint_whose_digests_need_a_missing_package_is_not_called_damaged(made, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "xxhash", None)
        words = "the package xxhash for the XXH3 digests in .* got none; run pip ins"
        with pytest.raises(manifest_module.VersionError, match=words):
            read_manifest(made[0])
    reseal(made[0], lambda content: content["weights"][0].update(digest="crc:0"))
    with pytest.raises(ValueError, match="a digest of an unknown kind: 'crc'"):
        read_manifest(made[0])


def test_a_saver_commits_only_what_is_complete(made):
    """Every element in one piece, and files that their tensors fill."""
    _, whole = made
    check_complete(whole)
    first, *others = whole.optimizer
    for runs, problem in (
        ((Run(0, 8), Run(4, 8)), "'wte.weight/exp_avg' with element 4 twice"),
        ((Run(0, 8), Run(HOLE, 8)), "'wte.weight/exp_avg' with no element 8"),
    ):
        with pytest.raises(ValueError, match=problem):
            check_complete(replace(whole, optimizer=(replace(first, runs=runs), *others)))
    with pytest.raises(ValueError, match=r"has \d+ bytes, its tensors \d+"):
        check_complete(replace(whole, optimizer=tuple(others)))


def test_what_was_sealed_is_read(tmp_path, made):
    folder, whole = made
    assert read_manifest(folder) == whole
    assert whole.optimizer[1].nbytes == 4 * 14
    names = list(whole.files)
    parts = [
        Manifest(5, {n: whole.files[n] for n in names[:1]}, whole.weights, (), "gpt"),
        Manifest(5, {n: whole.files[n] for n in names[1:]}, (), whole.optimizer, "gpt"),
    ]
    assert Manifest.join(parts) == whole
    (tmp_path / "part-1.json").write_bytes(parts[1].sealed())
    assert read_manifest(tmp_path, "part-1.json") == parts[1]
    runs = (Run(0, 3), Run(HOLE, 2))  # holes are of no tensor
    entry = TensorEntry("a", "w/x", "F32", (3,), runs, "xxh3:" + "0" * 32)
    whole = Manifest(1, {"a": FileEntry(24, "xxh3:" + "0" * 32, 4)}, (), (entry,))
    (tmp_path / MANIFEST).write_bytes(whole.sealed())
    assert read_manifest(tmp_path) == whole
    folder.rename(tmp_path / "step_000006")
    (tmp_path / "latest").symlink_to("step_000006")
    for name in ("step_000006", "latest"):
        with pytest.raises(ValueError, match=r"\(step 5 in a folder of another step\)"):
            read_manifest(tmp_path / name)
    (tmp_path / "step_000006").rename(tmp_path / "best")
    assert read_manifest(tmp_path / "best").step == 5


def renamed(old, new):
    return lambda content: content["files"].__setitem__(new, content["files"].pop(old))


def versioned(version):
    return lambda content: content.__setitem__("version", version)


WHERE = r"^read_manifest: expected a checkpoint's manifest, got \S+manifest.json \(.*"
OTHER = "^read_manifest: expected a checkpoint of version 4, got .* of version "
MANIFESTS = {  # a change of what it says under a right digest, or the bytes of the file
    "missing field": (lambda content: content.pop("files"), WHERE + "'files'"),
    "path": (renamed("config.json", "../x"), r"an invalid file name: '\.\./x'"),
    "format": (lambda content: content.__setitem__("format", "other"), "another format: 'other'"),
    "version 1": (versioned(1), OTHER + r"1; fastpar 0\.1 reads it$"),
    "version 2": (versioned(2), OTHER + r"2; fastpar 0\.3 reads it$"),
    "version 5": (versioned(5), OTHER + "5; update fastpar$"),
    "no bytes": (b"", WHERE + "not JSON"),
    "a list": (b"[]", WHERE + "not a JSON object but list"),
    "an object": (b"{}", WHERE + "another format: None"),
    "no digest": (b'{"format": "fastpar-checkpoint", "version": 3}', WHERE + "no digest"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_that_are_refused(case, made):
    folder, (change, problem) = made[0], MANIFESTS[case]
    if isinstance(change, bytes):
        (folder / MANIFEST).write_bytes(change)
    else:
        reseal(folder, change)
    kind = manifest_module.VersionError if case.startswith("version") else ValueError
    with pytest.raises(kind, match=problem) as error:
        read_manifest(folder)
    assert "\n" not in str(error.value)


def test_every_changed_byte_of_a_manifest_is_damage(made, monkeypatch):
    """Also that of the version: a run goes on from the checkpoint before."""
    folder, file = made[0], made[0] / MANIFEST
    content = file.read_bytes()
    at = content.index(b"version") + len('version": ')
    flips = ((i, bytes([content[i] ^ 1])) for i in (at, *range(0, len(content), 7)))
    for damaged in (
        *(content[:i] + byte + content[i + 1 :] for i, byte in flips),
        *(content[:n] for n in range(0, len(content), 13)),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=WHERE):
            read_manifest(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"got .*manifest.json \(no such file\); the folder is no"):
        read_manifest(folder)
    file.write_bytes(content)
    monkeypatch.setattr(manifest_module, "JSON_BYTES", 100)  # a larger one is not written either
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read_manifest(folder)
    with pytest.raises(ValueError, match=r"sealed: expected at most 100 bytes, got .*=\d+; use"):
        make_folder(folder.parent / "other")


def places_in(folder, manifest, file):
    with TensorReader(folder, manifest) as reader:
        return reader.places(file)


@pytest.mark.parametrize(("n_parts", "step"), [(3, 13), slow(1, 5), slow(3, 5)])
def test_every_changed_byte_is_found_by_one_part(made, n_parts, step):
    folder, manifest = made
    for name in manifest.files:
        raw = (folder / name).read_bytes()
        for i in range(0, len(raw), step):
            (folder / name).write_bytes(raw[:i] + bytes([raw[i] ^ 0x10]) + raw[i + 1 :])
            parts = [find_damage(folder, manifest, part=n, n_parts=n_parts) for n in range(n_parts)]
            found = {d.file for part in parts for d in part}
            assert found == {name}
        (folder / name).write_bytes(raw)


def test_sizes_and_kinds_of_files(made, monkeypatch):
    """Also in the look before anything is read, which a loader needs to open the rest: what has
    no tensors is hashed in blocks, the bytes of tensors are not its task."""
    folder, manifest = made
    names = ("config.json", "trainer_state.json", OPTIMIZER)
    config, state, moments = (folder / name for name in names)
    monkeypatch.setattr(reader_module, "BLOCK_BYTES", 4)
    moments.write_bytes(moments.read_bytes()[:-1] + b"\x01")
    verify_files(folder, manifest, tensors=False)
    state.write_bytes(state.read_bytes().replace(b"5", b"6"))
    with pytest.raises(ValueError, match=r"got trainer_state.json \(other content\); the"):
        verify_files(folder, manifest, tensors=False)
    os.truncate(folder / WEIGHTS, 100)
    moments.write_bytes(moments.read_bytes() + b"\0")
    config.unlink()
    os.mkfifo(config)
    state.rename(folder / "other")
    state.symlink_to(folder / "other")
    for tensors in (True, False):
        with pytest.raises(ValueError, match=rf"got {WEIGHTS} \(100 bytes instead of .* 3 more"):
            verify_files(folder, manifest, tensors=tensors)
    sizes = {name: manifest.files[name].size for name in (WEIGHTS, OPTIMIZER)}
    assert [str(d) for d in find_damage(folder, manifest)] == [
        f"{WEIGHTS} (100 bytes instead of {sizes[WEIGHTS]})",
        f"{OPTIMIZER} ({sizes[OPTIMIZER] + 1} bytes instead of {sizes[OPTIMIZER]})",
        "config.json (not a regular file)",
        "trainer_state.json (a symbolic link)",
    ]


def test_a_file_that_shrinks_and_a_disk_that_cannot_be_read(made, monkeypatch):
    folder, manifest = made
    first = min(place.start for place in places_in(folder, manifest, WEIGHTS).values())

    def fails():
        raise OSError(5, "Input/output error")

    for end, words in ((lambda: 0, "ends at"), (fails, "Input/output error at")):

        def read(descriptor, buffers, at, real=os.preadv, end=end):
            return real(descriptor, buffers, at) if at < first else end()  # headers are there

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read)
            with pytest.raises(ValueError, match=rf"{words} byte \d+ in transformer.wte"):
                verify_files(folder, manifest)


# Of two checkpoints of a run the newer is damaged
CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=256, dropout=0.0)
OURS = re.compile(r"[\w.]+: expected .*; .*", re.DOTALL)


def write(run, tp, stage):
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "run"
    run_ranks(write, 4, path, 2, 2, timeout_s=60)
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
    older, newer = (run / "checkpoints" / f"step_{step:06d}" for step in (1, 2))
    assert any(name in line for line in examine(newer).damage), case
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        load_checkpoint(newer, model=target[0], optimizer=target[1])
    assert OURS.fullmatch(str(caught.value)), case
    lines: list[str] = []
    assert newest_checkpoint(run, lines.append) == older, case
    assert len(lines) == 1, case
    assert lines[0].startswith("damaged, trying an older one: "), case
    assert name in lines[0], case


def test_a_load_reads_each_tensor_once_and_believes_what_it_saw(run, target, monkeypatch):
    """A byte that is wrong as it passes is damage, though it would be right the next time."""
    newer, read, wrong = run / "checkpoints" / "step_000002", TensorReader._read, {}
    model, optimizer = target
    monkeypatch.setattr(TensorReader, "compare", lambda *_: pytest.fail("read twice"))
    load_checkpoint(newer, model=model, optimizer=optimizer)

    def flips(self, entry, start, into, digest):
        if wrong.get(entry.key, entry) is None:
            wrong[entry.key] = entry
            digest.update(b"x")
        read(self, entry, start, into, digest)

    monkeypatch.setattr(TensorReader, "_read", flips)
    for key in ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "wte.weight/exp_avg"):
        wrong[key] = None
        with pytest.raises(ValueError, match=r"^verify_files: ") as caught:
            load_checkpoint(newer, model=model, optimizer=optimizer)
        words = f"{wrong[key].file} (other content in {describe(wrong[key])}); the checkpoint is"
        assert f"got {words}" in str(caught.value)


def test_all_damage_is_found_and_named(run, target):
    newer, draw = run / "checkpoints" / "step_000002", random.Random(5)
    manifest = read_manifest(newer)
    assert len({t.file for t in manifest.optimizer}) == 4
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


@contextlib.contextmanager
def kept(file):
    raw = file.read_bytes()
    try:
        yield raw
    finally:
        file.write_bytes(raw)


def test_a_checkpoint_of_another_version_is_no_damage(run, target):
    """A run of such a one does not go on from an older checkpoint: it says who reads this one."""
    newer = run / "checkpoints" / "step_000002"
    with kept(newer / MANIFEST):
        reseal(newer, lambda content: content.update(version=2))
        for act in (
            lambda: load_checkpoint(newer, model=target[0]),
            lambda: newest_checkpoint(run),
            lambda: examine(newer),
            lambda: load_weights(newer),
        ):
            with pytest.raises(ValueError, match=r"of version 2; fastpar 0\.3 reads it$"):
                act()


def test_no_checkpoint_at_all_and_all_damaged(run, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"a run with a complete checkpoint, .* with none"):
        newest_checkpoint(tmp_path)
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for folder in folders:
        os.truncate(folder / "trainer_state.json", 5)
    said: list[str] = []
    with pytest.raises(ValueError, match=r"newest_checkpoint: .* with only damaged ones; the new"):
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

    def load(stage):
        model = GPT(CONFIG, seed=4)
        parallelize(model, Mesh(device="cpu"), zero_stage=stage)
        with pytest.raises(ValueError, match=rf"got {name} \(other content in .*, elements "):
            load_checkpoint(folder, model=model, optimizer=AdamW(model.parameters()))
        return True

    with kept(folder / name) as raw:
        (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        for stage in (0, 1, 3):
            assert run_ranks(load, 3, stage, timeout_s=60) == [True] * 3
