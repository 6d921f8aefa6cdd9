"""Files against their manifest: every byte, every header, shared out over ranks."""

import hashlib
import json
import os
import re
from dataclasses import replace

import pytest
from cells import slow
from manifest_cells import make_folder

from fastpar.checkpoint import reader as module
from fastpar.checkpoint.manifest import FileEntry
from fastpar.checkpoint.reader import TensorReader, find_damage, verify_files

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer-00001-of-00002.safetensors"


@pytest.fixture
def made(tmp_path):
    return tmp_path / "a", make_folder(tmp_path / "a")


def with_header(folder, manifest, change, name=OPTIMIZER):
    """The manifest after a change of a file's header, which the manifest has the digest of."""
    raw = (folder / name).read_bytes()
    old = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:old])
    change(header)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    (folder / name).write_bytes(head + raw[old:])
    entry = FileEntry(len(head) + len(raw) - old, hashlib.sha256(head).hexdigest(), head=len(head))
    return replace(manifest, files={**manifest.files, name: entry})


def places_in(folder, manifest, file):
    with TensorReader(folder, manifest) as reader:
        return reader.places(file)


def test_what_was_written_is_right(made):
    folder, manifest = made
    verify_files(folder, manifest)
    for tensor in manifest.weights + manifest.optimizer:
        start, stop = places_in(folder, manifest, tensor.file)[tensor.key]
        raw = (folder / tensor.file).read_bytes()[start:stop]
        assert hashlib.sha256(raw).hexdigest() == tensor.sha256


@pytest.mark.parametrize("n_parts", [1, 2, 3, 5, 40])
def test_the_parts_read_every_byte_once(made, n_parts, monkeypatch):
    folder, manifest = made
    read, compare = [], TensorReader.compare
    monkeypatch.setattr(TensorReader, "compare", lambda self, t: read.append(t) or compare(self, t))
    for part in range(n_parts):
        verify_files(folder, manifest, part=part, n_parts=n_parts)
    every = manifest.weights + manifest.optimizer
    assert sorted(read, key=every.index) == list(every)


def test_the_parts_are_of_nearly_the_same_size(made):
    _, manifest = made
    sizes = [sum(t.nbytes for t in module._share(manifest, part, 2)) for part in range(2)]
    assert abs(sizes[0] - sizes[1]) <= 64 < sum(sizes)


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
    text = f"expected what its manifest has in {folder}, got {OPTIMIZER} {what}, and 1 more; the"
    with pytest.raises(ValueError, match=f"verify_files: {re.escape(text)} checkpoint is damaged"):
        verify_files(folder, manifest)
    assert [str(d) for d in find_damage(folder, manifest)] == [
        f"{OPTIMIZER} {what}",
        "config.json (no such file)",
    ]


def test_sizes_and_kinds_of_files(made):
    folder, manifest = made
    os.truncate(folder / WEIGHTS, 100)
    with open(folder / OPTIMIZER, "ab") as file:
        file.write(b"\0")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    (folder / "trainer_state.json").rename(folder / "other")
    (folder / "trainer_state.json").symlink_to(folder / "other")
    size = manifest.files[OPTIMIZER].size
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
HEADERS = {
    "missing": (lambda h: h.__setitem__("wte.weight/exp_avg_", h.pop(KEY)), f"no tensor '{KEY}'"),
    "dtype": (change(KEY, "dtype", "I32"), f"tensor '{KEY}' of I32 instead of F32"),
    "shape": (exchange, f"'{KEY}' of shape .14. instead of 16 elements"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_with_a_right_digest_and_other_tensors(case, made):
    folder, manifest = made
    edit, problem = HEADERS[case]
    manifest = with_header(folder, manifest, edit)
    with pytest.raises(ValueError, match=rf"got {OPTIMIZER} \(.*{problem}"):
        verify_files(folder, manifest)
    with (
        TensorReader(folder, manifest) as reader,
        pytest.raises(
            ValueError, match=rf"TensorReader: .*got .*{problem}.* in .*{OPTIMIZER}; the"
        ),
    ):
        reader.read(manifest.optimizer[:1])


def test_a_weight_has_its_own_shape(made):
    folder, manifest = made
    edit = change("transformer.wte.weight", "shape", [4, 7])
    manifest = with_header(folder, manifest, edit, WEIGHTS)
    with pytest.raises(ValueError, match=r"of shape \[4, 7\] instead of \[7, 4\]"):
        verify_files(folder, manifest)


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
    with pytest.raises(ValueError, match=f"{OPTIMIZER} .{place.start + 4} bytes instead of"):
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


def test_files_are_hashed_in_blocks(made, monkeypatch):
    folder, manifest = made
    monkeypatch.setattr(module, "BLOCK_BYTES", 4)
    verify_files(folder, manifest)
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[::-1])
    with pytest.raises(ValueError, match=r"config.json \(other content\)"):
        verify_files(folder, manifest)


def test_a_look_before_anything_is_read(made):
    """Sizes, kinds and what has no tensors: what a loader needs to open the rest."""
    folder, manifest = made
    verify_files(folder, manifest, tensors=False)
    with open(folder / OPTIMIZER, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    verify_files(folder, manifest, tensors=False)  # the bytes of tensors are not its task
    state = (folder / "trainer_state.json").read_bytes()
    (folder / "trainer_state.json").write_bytes(state.replace(b"5", b"6"))
    with pytest.raises(ValueError, match=r"got trainer_state.json \(other content\); the"):
        verify_files(folder, manifest, tensors=False)
    (folder / OPTIMIZER).unlink()
    os.mkfifo(folder / OPTIMIZER)
    with pytest.raises(ValueError, match=rf"got {OPTIMIZER} \(not a regular file\), and 1 more"):
        verify_files(folder, manifest, tensors=False)
    os.truncate(folder / WEIGHTS, 50)
    with pytest.raises(ValueError, match=f"got {WEIGHTS} .50 bytes instead of .* and 2 more"):
        verify_files(folder, manifest, tensors=False)
