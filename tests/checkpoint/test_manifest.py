"""manifest.json: what sealed() writes comes back, and everything else is refused with a message."""

import pytest
from manifest_cells import make_folder, reseal

from fastpar.checkpoint import manifest as module
from fastpar.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry
from fastpar.checkpoint.manifest import read_manifest as read
from fastpar.sharding.placements import HOLE, Run


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "step_000005")
    return tmp_path / "step_000005"


def test_what_was_sealed_is_read(tmp_path):
    manifest = make_folder(tmp_path / "a")
    assert read(tmp_path / "a") == manifest
    assert manifest.optimizer[1].nbytes == 4 * 14


def test_parts_are_joined(tmp_path):
    whole = make_folder(tmp_path / "a")
    names = list(whole.files)
    parts = [
        Manifest(5, {n: whole.files[n] for n in names[:1]}, whole.weights, (), "gpt"),
        Manifest(5, {n: whole.files[n] for n in names[1:]}, (), whole.optimizer, "gpt"),
    ]
    assert Manifest.join(parts) == whole
    (tmp_path / "part-1.json").write_bytes(parts[1].sealed())
    assert read(tmp_path, "part-1.json", complete=False) == parts[1]


def test_holes_are_of_no_tensor(tmp_path):
    runs = (Run(0, 3), Run(HOLE, 2))
    entry = TensorEntry("a", "w/x", "F32", (3,), runs, "0" * 64)
    whole = Manifest(1, {"a": FileEntry(24, "0" * 64, 4)}, (), (entry,))
    (tmp_path / MANIFEST).write_bytes(whole.sealed())
    assert read(tmp_path) == whole


def in_piece(name, value):
    """Changes a field of the first piece."""
    return lambda content: content["optimizer"][0].__setitem__(name, value)


def without_piece(content):
    piece = content["optimizer"].pop()
    content["files"][piece["file"]]["size"] -= 4 * 2


def renamed(old, new):
    return lambda content: content["files"].__setitem__(new, content["files"].pop(old))


WHERE = "pieces of 'wte.weight/exp_avg' "
REFUSED = {  # what the ranks' parts say does not go together
    "other shape": (in_piece("shape", [4, 7]), WHERE + r"of F32\[4, 7\] in .* F32\[7, 4\]"),
    "other dtype": (in_piece("dtype", "I32"), WHERE + "of I32"),
    "other size": (in_piece("dtype", "F64"), r"of \d+ bytes, its tensors of \d+"),
    "overlap": (in_piece("runs", [[0, 8, 0, 1], [4, 8, 0, 1]]), WHERE + "with element 4 twice"),
    "gap": (in_piece("runs", [[0, 8, 0, 1], [-1, 8, 0, 1]]), WHERE + "with no element 8"),
    "missing piece": (without_piece, "pieces of 'ln_f.bias/exp_avg' with no element 1"),
    "missing file": (in_piece("file", "other"), "in a file not listed, 'other'"),
    "missing field": (lambda content: content.pop("files"), "'files'"),
    "path": (renamed("config.json", "../config.json"), r"none of ours: '\.\./config.json'"),
    "format": (lambda content: content.__setitem__("format", "other"), "another format: 'other'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused(case, folder):
    change, problem = REFUSED[case]
    reseal(folder, change)
    with pytest.raises(ValueError, match=problem) as error:
        read(folder)
    start = f"read_manifest: expected a checkpoint's manifest, got {folder / MANIFEST} ("
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "reads"),
    [(1, "fastpar 0.1 reads it"), (2, "fastpar 0.3 reads it"), (4, "update fastpar")],
)
def test_other_versions_are_refused_with_who_reads_them(version, reads, folder):
    def change(content):
        content["version"] = version

    reseal(folder, change)
    with pytest.raises(module.VersionError) as error:
        read(folder)
    assert str(error.value) == (
        f"read_manifest: expected a checkpoint of version 3, got {folder / MANIFEST} of version "
        f"{version}; {reads}"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b"[]", "no JSON object but list"),
        (b"{}", "another format: None"),
        (b'{"format": "fastpar-checkpoint", "version": 3}', "no digest"),
    ],
)
def test_other_files_are_refused(content, problem, folder):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read(folder)


def test_every_changed_byte_is_damage(folder):
    """Also that of the version: a run goes on from the checkpoint before."""
    file = folder / MANIFEST
    content = file.read_bytes()
    start = r"^read_manifest: expected a checkpoint's manifest, got"
    at = content.index(b"version") + len('version": ')
    for i in (at, *range(0, len(content), 7)):
        file.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(ValueError, match=start):
            read(folder)
    for n in range(0, len(content), 13):
        file.write_bytes(content[:n])
        with pytest.raises(ValueError, match=start):
            read(folder)


def test_there_is_no_manifest(folder):
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"got .*manifest.json \(no such file\); the folder is no"):
        read(folder)


def test_the_manifest_of_another_step(folder):
    folder.rename(folder.with_name("step_000006"))
    text = r"\(of step 5, in a folder of another one\)"
    folder.with_name("latest").symlink_to("step_000006")
    for name in ("step_000006", "latest"):
        with pytest.raises(ValueError, match=text):
            read(folder.with_name(name))
    folder.with_name("step_000006").rename(folder.with_name("best"))
    assert read(folder.with_name("best")).step == 5


def test_a_manifest_larger_than_what_is_read_is_not_written(folder, monkeypatch):
    monkeypatch.setattr(module, "JSON_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read(folder)
    with pytest.raises(ValueError, match=r"sealed: expected at most 100 bytes, got .*=\d+; use"):
        make_folder(folder.parent / "other")
