"""What is missing, cut, changed or does not go together is found, named and refused.

By hand-made folders every byte and field of the format; by checkpoints that four ranks have
written every file: `fastpar verify` and a load name it, a resume takes the older one.
"""

import contextlib
import hashlib
import json
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


# The manifest


def test_a_checkpoint_of_version_3_is_read(made, monkeypatch):
    """Its digests are SHA-256; so are those of a machine without xxhash."""
    folder, whole = made

    def older(content):
        content["version"] = 3
        for entry in (*content["files"].values(), *content["weights"], *content["optimizer"]):
            raw = (folder / entry.get("file", "")).read_bytes() if "file" in entry else None
            entry.pop("digest")
            entry["sha256"] = ""
            if raw is None:
                continue
            at = TensorReader(folder, whole).places(entry["file"])[entry["key"]]
            entry["sha256"] = hashlib.sha256(raw[at.start : at.stop]).hexdigest()
        for name, entry in content["files"].items():
            raw = (folder / name).read_bytes()[: entry["head"]]
            entry["sha256"] = hashlib.sha256(raw).hexdigest()

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
    folder, _ = made
    monkeypatch.setattr(manifest_module, "xxhash", None)
    with pytest.raises(manifest_module.VersionError, match="needs the package xxhash; run pip ins"):
        read_manifest(folder)
    reseal(folder, lambda content: content["weights"][0].update(digest="crc:0"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="a digest of an unknown kind: 'crc'"):
        read_manifest(folder)


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
    assert read_manifest(tmp_path, "part-1.json", complete=False) == parts[1]
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


def in_piece(name, value):
    """Changes a field of the first piece."""
    return lambda content: content["optimizer"][0].__setitem__(name, value)


def without_piece(content):
    piece = content["optimizer"].pop()
    content["files"][piece["file"]]["size"] -= 4 * 2


def renamed(old, new):
    return lambda content: content["files"].__setitem__(new, content["files"].pop(old))


def versioned(version):
    return lambda content: content.__setitem__("version", version)


WHERE = r"^read_manifest: expected a checkpoint's manifest, got \S+manifest.json \(.*"
PIECES_OF = WHERE + "pieces of 'wte.weight/exp_avg' "
OTHER = "^read_manifest: expected a checkpoint of version 4, got .* of version "
MANIFESTS = {  # a change of what it says under a right digest, or the bytes of the file
    "other shape": (in_piece("shape", [4, 7]), PIECES_OF + r"of F32\[4, 7\] in .* F32\[7, 4\]"),
    "other dtype": (in_piece("dtype", "I32"), PIECES_OF + "of I32"),
    "other size": (in_piece("dtype", "F64"), WHERE + r"has \d+ bytes, its tensors \d+"),
    "overlap": (in_piece("runs", [[0, 8, 0, 1], [4, 8, 0, 1]]), PIECES_OF + "with element 4 twice"),
    "gap": (in_piece("runs", [[0, 8, 0, 1], [-1, 8, 0, 1]]), PIECES_OF + "with no element 8"),
    "missing piece": (without_piece, WHERE + "pieces of 'ln_f.bias/exp_avg' with no element 1"),
    "missing file": (in_piece("file", "other"), WHERE + "in an unlisted file, 'other'"),
    "missing field": (lambda content: content.pop("files"), WHERE + "'files'"),
    "path": (renamed("config.json", "../config.json"), r"an invalid file name: '\.\./config.json'"),
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
    file, words = made[0] / MANIFEST, r"^read_manifest: expected a checkpoint's manifest, got"
    content = file.read_bytes()
    at = content.index(b"version") + len('version": ')
    for i in (at, *range(0, len(content), 7)):
        file.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(ValueError, match=words):
            read_manifest(made[0])
    for n in range(0, len(content), 13):
        file.write_bytes(content[:n])
        with pytest.raises(ValueError, match=words):
            read_manifest(made[0])
    file.unlink()
    with pytest.raises(ValueError, match=r"got .*manifest.json \(no such file\); the folder is no"):
        read_manifest(made[0])
    file.write_bytes(content)
    monkeypatch.setattr(manifest_module, "JSON_BYTES", 100)  # a larger one is not written either
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read_manifest(made[0])
    with pytest.raises(ValueError, match=r"sealed: expected at most 100 bytes, got .*=\d+; use"):
        make_folder(made[0].parent / "other")


# Files against their manifest


def with_header(folder, manifest, change, name=OPTIMIZER):
    """The manifest after a change of a file's header, which the manifest has the digest of."""
    raw = (folder / name).read_bytes()
    old = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:old])
    change(header)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    (folder / name).write_bytes(head + raw[old:])
    entry = FileEntry(len(head) + len(raw) - old, digest_of(head), head=len(head))
    return replace(manifest, files={**manifest.files, name: entry})


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
            parts = [
                find_damage(folder, manifest, part=part, n_parts=n_parts) for part in range(n_parts)
            ]
            found = {d.file for part in parts for d in part}
            assert found == {name}
        (folder / name).write_bytes(raw)


def test_damage_is_named(made):
    folder, manifest = made
    entry = manifest.optimizer[1]
    start, _ = places_in(folder, manifest, OPTIMIZER)[entry.key]
    with open(folder / OPTIMIZER, "r+b") as file:
        file.seek(start + 3)
        file.write(b"\x55")
    (folder / "config.json").unlink()
    what = "(other content in wte.weight/exp_avg_sq, elements 0 to 25)"
    text = f"expected files as in the manifest of {folder}, got {OPTIMIZER} {what}, and 1 more; the"
    with pytest.raises(ValueError, match=f"verify_files: {re.escape(text)} checkpoint is damaged"):
        verify_files(folder, manifest)
    assert [str(d) for d in find_damage(folder, manifest)] == [
        f"{OPTIMIZER} {what}",
        "config.json (no such file)",
    ]


def test_sizes_and_kinds_of_files(made, monkeypatch):
    """Also in the look before anything is read, which a loader needs to open the rest: what has
    no tensors is hashed in blocks, the bytes of tensors are not its task."""
    folder, manifest = made
    monkeypatch.setattr(reader_module, "BLOCK_BYTES", 4)
    with open(folder / OPTIMIZER, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    verify_files(folder, manifest, tensors=False)
    state = (folder / "trainer_state.json").read_bytes()
    (folder / "trainer_state.json").write_bytes(state.replace(b"5", b"6"))
    with pytest.raises(ValueError, match=r"got trainer_state.json \(other content\); the"):
        verify_files(folder, manifest, tensors=False)
    os.truncate(folder / WEIGHTS, 100)
    with open(folder / OPTIMIZER, "ab") as file:
        file.write(b"\0")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    (folder / "trainer_state.json").rename(folder / "other")
    (folder / "trainer_state.json").symlink_to(folder / "other")
    size = manifest.files[OPTIMIZER].size
    for tensors in (True, False):
        with pytest.raises(ValueError, match=rf"got {WEIGHTS} \(100 bytes instead of .* 3 more"):
            verify_files(folder, manifest, tensors=tensors)
    assert [str(d) for d in find_damage(folder, manifest)] == [
        f"{WEIGHTS} (100 bytes instead of {manifest.files[WEIGHTS].size})",
        f"{OPTIMIZER} ({size + 1} bytes instead of {size})",
        "config.json (not a regular file)",
        "trainer_state.json (a symbolic link)",
    ]


def exchange(header):
    a, b = (header.pop(f"wte.weight/{e}") for e in ("exp_avg", "exp_avg_sq"))
    header |= {"wte.weight/exp_avg": b, "wte.weight/exp_avg_sq": a}


def change(key, field, value):
    return lambda header: header[key].__setitem__(field, value)


KEY = "wte.weight/exp_avg"
HEADERS = {  # with a right digest
    "missing": (lambda h: h.__setitem__("wte.weight/exp_avg_", h.pop(KEY)), f"no tensor '{KEY}'"),
    "dtype": (change(KEY, "dtype", "I32"), f"tensor '{KEY}' of I32 instead of F32"),
    "shape": (exchange, f"'{KEY}' of shape .14. instead of 16 elements"),
    "shape of a weight": (
        change("transformer.wte.weight", "shape", [4, 7]),
        r"transformer.wte.weight.* of shape .4, 7. instead of .7, 4.",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_with_a_right_digest_and_other_tensors(case, made):
    folder, (edit, problem) = made[0], HEADERS[case]
    of_weights = "transformer" in problem
    manifest = with_header(*made, edit, WEIGHTS if of_weights else OPTIMIZER)
    with pytest.raises(ValueError, match=rf"verify_files: .*{problem}"):
        verify_files(folder, manifest)
    tensors = manifest.weights if of_weights else manifest.optimizer
    words = rf"TensorReader: .*got .*{problem}.* in .*safetensors; the"
    with TensorReader(folder, manifest) as reader, pytest.raises(ValueError, match=words):
        reader.read(tensors[:1])


def test_a_file_that_shrinks_while_it_is_read(made, monkeypatch):
    folder, manifest = made
    place = places_in(folder, manifest, OPTIMIZER)[KEY]
    check = TensorReader._compare_header

    def shrink(self, file, header):
        os.truncate(folder / file, place.start + 4) if file == OPTIMIZER else None
        return check(self, file, header)

    monkeypatch.setattr(TensorReader, "_compare_header", shrink)
    with pytest.raises(ValueError, match=f"ends at byte {place.start + 4} in {KEY}, elements 0"):
        verify_files(folder, manifest)


def test_a_disk_that_cannot_be_read(made, monkeypatch):
    folder, manifest = made

    first = min(p.start for p in places_in(folder, manifest, WEIGHTS).values())

    def fail(descriptor, buffers, at, read=os.preadv):
        if at < first:  # the header
            return read(descriptor, buffers, at)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match=r"Input/output error at byte \d+ in transformer.wte"):
        verify_files(folder, manifest)


# Of two checkpoints of a run the newer is damaged


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
    """Verify and a load name the file; a resume takes the older checkpoint."""
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
    newer = run / "checkpoints" / "step_000002"
    model, optimizer = target
    monkeypatch.setattr(TensorReader, "compare", lambda *_: pytest.fail("read twice"))
    load_checkpoint(newer, model=model, optimizer=optimizer)
    for key in ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "wte.weight/exp_avg"):
        read, wrong = TensorReader._read, []

        def flips(self, entry, start, into, digest, key=key, read=read, wrong=wrong):
            if entry.key == key and not wrong:
                wrong.append(entry)
                digest.update(b"x")
            read(self, entry, start, into, digest)

        with monkeypatch.context() as patch:
            patch.setattr(TensorReader, "_read", flips)
            with pytest.raises(ValueError, match=r"^verify_files: ") as caught:
                load_checkpoint(newer, model=model, optimizer=optimizer)
        words = f"got {wrong[0].file} (other content in {describe(wrong[0])}); the checkpoint is"
        assert words in str(caught.value)


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
    """The file is as it was when the block ends."""
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


def test_all_checkpoints_damaged(run, tmp_path, capsys):
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


def test_no_complete_checkpoint_at_all(tmp_path):
    words = r"expected a run with a complete checkpoint, .* with none"
    with pytest.raises(ValueError, match=words):
        newest_checkpoint(tmp_path)
