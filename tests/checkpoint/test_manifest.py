"""manifest.json: what sealed() writes comes back, and everything else is refused with a message."""

import copy
import json
import os
import re

import pytest
from manifest_cells import content_of, make_folder, seal

from fastpar.checkpoint import manifest as module
from fastpar.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, parse_manifest
from fastpar.checkpoint.manifest import read_manifest as read
from fastpar.sharding.ranges import HOLE, Run


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "step_000005")
    return tmp_path / "step_000005"


def tensor(content, key, i=0):
    return [t for t in content["optimizer"] if t["key"] == key][i]


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
    with pytest.raises(ValueError, match="no weights in its list"):
        read(tmp_path, "part-1.json")
    without_files = Manifest(5, {}, (), whole.optimizer)
    assert parse_manifest(without_files.sealed(), complete=False) == without_files
    with pytest.raises(ValueError, match="in a file not listed"):
        parse_manifest(without_files.sealed())


def test_version_2_did_not_say_which_model_it_is(tmp_path):
    whole = make_folder(tmp_path / "a")

    def of_version_2(change=lambda content: None):
        content = content_of(whole) | {"version": 2}
        del content["model"]
        change(content)
        return parse_manifest(seal(content))

    assert of_version_2() == whole
    nanogpt = of_version_2(drop(["files", "config.json"]))  # was refused by its own reader
    assert (nanogpt.model, nanogpt.weights) == ("module", whole.weights)
    assert of_version_2(set_(["weights", 0, "key"], "transformer.h.0.attn.q.weight")).model != "gpt"

    def own_names(content):
        for piece in content["optimizer"]:
            piece["key"] = f"transformer.{piece['key']}"

    assert of_version_2(own_names).model == "module"


def test_holes_are_of_no_tensor():
    runs = (Run(0, 3), Run(HOLE, 2))
    entry = TensorEntry("a", "w/x", "F32", (3,), runs, "0" * 64)
    files = {"a": FileEntry(24, "0" * 64, 4)}
    part = Manifest(1, files, (), (entry,))
    assert parse_manifest(part.sealed(), complete=False) == part


def set_(path, value):
    """Changes the content at a path of names and indices."""

    def change(content):
        *names, last = path
        for name in names:
            content = content[name]
        content[last] = value

    return change


def drop(path):
    def change(content):
        *names, last = path
        for name in names:
            content = content[name]
        del content[last]

    return change


def rename(old, new):
    def change(content):
        content["files"][new] = content["files"].pop(old)

    return change


def twice(content):
    content["weights"].append(dict(content["weights"][0]))
    content["files"]["model.safetensors"]["size"] += 4 * 28


def piece_twice(content):
    content["optimizer"].append(dict(content["optimizer"][0]))
    content["files"][content["optimizer"][0]["file"]]["size"] += 4 * 16


def without_piece(content):
    piece = content["optimizer"].pop()
    content["files"][piece["file"]]["size"] -= 4 * 2


def exchanged(content):
    """A tensor of the optimizer's in the weights' file."""
    piece = content["optimizer"][0]
    content["files"][piece["file"]]["size"] -= 64
    content["files"]["model.safetensors"]["size"] += 64
    piece["file"] = "model.safetensors"


def part_of_a_weight(content):
    content["weights"][0]["runs"] = [[0, 14, 0, 1], [14, 14, 0, 1]]


def no_weights(content):
    content["weights"] = []
    entry = content["files"]["model.safetensors"]
    entry["size"] = entry["head"]


def many_rows(content):
    """Column 0 of a tensor with more rows than any model has; its size is right."""
    n = module._ROWS + 1
    for i in range(2):
        piece = tensor(content, "wte.weight/exp_avg", i)
        old = sum(run[1] * run[3] for run in piece["runs"])
        piece["shape"], piece["runs"] = [n, 2], [[i, 1, 2, n]]
        content["files"][piece["file"]]["size"] += 4 * (n - old)


P = ["optimizer", 0]
W = ["weights", 0]
REFUSED = {
    "format": (set_(["format"], "other"), "another format: 'other'"),
    "no format": (drop(["format"]), "another format: None"),
    "later": (set_(["version"], 4), "version 4; this fastpar reads 2 and 3.*; update fastpar"),
    "much later": (set_(["version"], 10**30), "this fastpar reads 2 and 3.*; update fastpar"),
    "earlier": (set_(["version"], 1), "version 1; this fastpar reads 2 and 3.*with --init-from"),
    "earlier, with a model": (set_(["version"], 2), "an unknown field 'model' of 'manifest'"),
    "version 0": (set_(["version"], 0), "no version: 0"),
    "version 2.0": (set_(["version"], 2.0), "no version: 2.0"),
    "version true": (set_(["version"], True), "no version: True"),
    "no step": (drop(["step"]), "no field 'step' of 'manifest'"),
    "no model": (drop(["model"]), "no field 'model' of 'manifest'"),
    "other model": (set_(["model"], "gpt5"), "an unknown model: 'gpt5'"),
    "no name of a model": (set_(["model"], ["gpt"]), r"an unknown model: \['gpt'\]"),
    "more": (set_(["more"], 1), "an unknown field 'more' of 'manifest'"),
    "step -1": (set_(["step"], -1), "'step' is no number that can be: -1"),
    "step true": (set_(["step"], True), "'step' is no number that can be: True"),
    "step 1.0": (set_(["step"], 1.0), "'step' is no number that can be: 1.0"),
    "step nan": (set_(["step"], float("nan")), "'step' is no number that can be: nan"),
    "step huge": (set_(["step"], 1 << 48), "'step' is no number that can be: 281474976710656"),
    "step long": (set_(["step"], 10**50), "a number of 51 digits"),
    "files a list": (set_(["files"], []), r"'files' is no dict but \[\]"),
    "weights an object": (set_(["weights"], {}), r"'weights' is no list but \{\}"),
    "path": (rename("config.json", "../config.json"), r"none of ours: '\.\./config.json'"),
    "absolute": (rename("config.json", "/etc/passwd"), "none of ours: '/etc/passwd'"),
    "NUL": (rename("config.json", "a\0b"), r"none of ours: 'a\\x00b'"),
    "hidden": (rename("config.json", ".config"), "none of ours: '.config'"),
    "itself": (rename("config.json", MANIFEST), "none of ours: 'manifest.json'"),
    "file": (set_(["files", "config.json"], 3), "'config.json' is no dict but 3"),
    "no size": (drop(["files", "config.json", "size"]), "no field 'size' of 'config.json'"),
    "head": (set_(["files", "config.json", "head"], 99), "config.json with a head of 99 bytes in"),
    "size huge": (
        set_(["files", "model.safetensors", "size"], 1 << 47),
        "model.safetensors with 1.* bytes of data and tensors of 128",
    ),
    "uncovered byte": (
        set_(["files", "config.json", "head"], 3),
        "config.json with .* bytes of data and tensors of 0",
    ),
    "short digest": (set_(["files", "config.json", "sha256"], "ab"), "no SHA-256 of 'config.json'"),
    "upper digest": (set_([*W, "sha256"], "A" * 64), "no SHA-256 of 'transformer.wte.weight'"),
    "digest null": (set_([*P, "sha256"], None), "no SHA-256 of 'wte.weight/exp_avg': None"),
    "tensor": (set_(P, 3), "'tensor' is no dict but 3"),
    "field of tensor": (set_([*P, "rank"], 3), "an unknown field 'rank' of 'tensor'"),
    "key": (set_([*P, "key"], ""), "no name of a tensor: ''"),
    "key's lines": (set_([*P, "key"], "a\nb"), r"no name of a tensor: 'a\\nb'"),
    "key a number": (set_([*P, "key"], 3), "no name of a tensor: 3"),
    "long key": (set_([*P, "key"], "x" * 513), "no name of a tensor: 'xxx"),
    "no entry": (set_([*P, "key"], "weight"), "no PARAMETER/ENTRY: 'weight'"),
    "dtype": (set_([*P, "dtype"], "C64"), "of an unknown dtype, 'C64'"),
    "dtype a list": (set_([*P, "dtype"], []), r"of an unknown dtype, \[\]"),
    "shape": (set_([*P, "shape"], 7), "'shape of wte.weight/exp_avg' is no list but 7"),
    "shape -1": (set_([*P, "shape"], [-7, 4]), "'shape of wte.weight/exp_avg' is no number"),
    "shape 7.0": (set_([*P, "shape"], [7.0, 4]), "'shape of wte.weight/exp_avg' is no number"),
    "shape huge": (set_([*P, "shape"], [1 << 30, 1 << 30]), "of an absurd shape"),
    "many dimensions": (set_([*P, "shape"], [1] * 17), "of an absurd shape"),
    "other shape": (set_([*P, "shape"], [4, 7]), r"pieces of .* of F32\[4, 7\] in .* F32\[7, 4\]"),
    "other dtype": (set_([*P, "dtype"], "I32"), "pieces of 'wte.weight/exp_avg' of I32"),
    "other size": (set_([*P, "dtype"], "F64"), "bytes of data and tensors of"),
    "runs": (set_([*P, "runs"], "ab"), "'runs of wte.weight/exp_avg' is no list but 'ab'"),
    "run": (set_([*P, "runs"], [3]), "'runs of wte.weight/exp_avg' is no list but 3"),
    "run of 3": (set_([*P, "runs"], [[0, 16, 0]]), r"runs of .* with \[0, 16, 0\]"),
    "run -2": (set_([*P, "runs"], [[-2, 16, 0, 1]]), "no number that can be: -2"),
    "run of bools": (set_([*P, "runs"], [[False, 16, 0, 1]]), "no number that can be: False"),
    "empty run": (set_([*P, "runs"], [[0, 0, 0, 1]]), r"runs of .* with \[0, 0, 0, 1\]"),
    "run 0 times": (set_([*P, "runs"], [[0, 16, 0, 0]]), r"runs of .* with \[0, 16, 0, 0\]"),
    "run over itself": (set_([*P, "runs"], [[0, 4, 3, 4]]), r"runs of .* with \[0, 4, 3, 4\]"),
    "stride of one": (set_([*P, "runs"], [[0, 16, 4, 1]]), r"runs of .* with \[0, 16, 4, 1\]"),
    "strided hole": (set_([*P, "runs"], [[-1, 4, 4, 4]]), r"runs of .* with \[-1, 4, 4, 4\]"),
    "run beyond": (set_([*P, "runs"], [[13, 16, 0, 1]]), "of 28 elements with indices beyond"),
    "run far": (set_([*P, "runs"], [[0, 1, 1 << 40, 1 << 40]]), "with indices beyond"),
    "overlap": (set_([*P, "runs"], [[1, 16, 0, 1]]), "of 'wte.weight/exp_avg' with no element 0"),
    "twice": (set_([*P, "runs"], [[0, 8, 0, 1], [4, 8, 0, 1]]), "with element 4 twice"),
    "gap": (set_([*P, "runs"], [[0, 8, 0, 1], [-1, 8, 0, 1]]), "with no element 8"),
    "missing piece": (without_piece, "pieces of 'ln_f.bias/exp_avg' with no element 1"),
    "rows": (many_rows, "in 8388610 of .* rows, more than a model has"),
    "file not listed": (set_([*P, "file"], "other"), "in a file not listed, 'other'"),
    "file a list": (set_([*P, "file"], ["a"]), r"'wte.weight/exp_avg' that is none of ours"),
    "file's path": (set_([*P, "file"], "../a"), r"that is none of ours: '\.\./a'"),
    "weight twice": (twice, "'transformer.wte.weight' twice"),
    "piece twice": (piece_twice, r"'wte.weight/exp_avg'\) twice"),
    "mixed file": (exchanged, "weights and optimizer both in model.safetensors"),
    "part of a weight": (part_of_a_weight, "a part only of 'transformer.wte.weight'"),
    "no weights": (no_weights, "no weights in its list"),
    "no config": (drop(["files", "config.json"]), "no config.json in its list"),
    "no state": (drop(["files", "trainer_state.json"]), "no trainer_state.json in its list"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_sealed_nonsense_is_refused(case, folder):
    change, problem = REFUSED[case]
    content = content_of(read(folder))
    change(content)
    (folder / MANIFEST).write_bytes(seal(content))
    with pytest.raises(ValueError, match=problem) as error:
        read(folder)
    start = f"read_manifest: expected a checkpoint's manifest, got {folder / MANIFEST} ("
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)


def test_too_many_rows_of_all_tensors(folder, monkeypatch):
    monkeypatch.setattr(module, "_ALL_ROWS", 10)
    with pytest.raises(ValueError, match="in 2 of 20 rows, more than a model has"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b"[]", "no JSON object but list"),
        (b"\x80", "not UTF-8"),
        (b"{}", "another format: None"),
        (b'{"format": "fastpar-checkpoint"}', "no version: None"),
        (b'{"format": "fastpar-checkpoint", "format": "x"}', "'format' twice"),
        (b'{"format": "fastpar-checkpoint", "version": 2}', "its digest does not match"),
        (b"[" * 10**6, "nested too deeply"),
    ],
)
def test_other_files_are_refused(content, problem, folder):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read(folder)


def test_every_changed_byte_is_refused(folder):
    file = folder / MANIFEST
    content = file.read_bytes()
    for i in range(0, len(content), 7):
        file.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(ValueError, match=r"^read_manifest: expected"):
            read(folder)
    for n in range(0, len(content), 13):
        file.write_bytes(content[:n])
        with pytest.raises(ValueError, match=r"^read_manifest: expected"):
            read(folder)


def test_there_is_no_manifest(folder):
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"got .*manifest.json \(no such file\); the folder is no"):
        read(folder)
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(ValueError, match="not a regular file"):
        read(folder)


def test_the_manifest_of_another_step(folder):
    folder.rename(folder.with_name("step_000006"))
    text = r"\(of step 5, in a folder of another one\)"
    with pytest.raises(ValueError, match=text):
        read(folder.with_name("step_000006"))
    folder.with_name("latest").symlink_to("step_000006")
    with pytest.raises(ValueError, match=text):
        read(folder.with_name("latest"))
    folder.with_name("step_000006").rename(folder.with_name("best"))
    assert read(folder.with_name("best")).step == 5


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    (folder / MANIFEST).rename(tmp_path / "elsewhere")
    (folder / MANIFEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="a symbolic link"):
        read(folder)


def test_a_manifest_that_may_not_be_read(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fastpar.files.plain_files.os.open", refuse)
    with pytest.raises(ValueError, match=r"manifest.json \(Permission denied\)"):
        read(folder)


def test_an_absurd_manifest_is_not_parsed(folder, monkeypatch):
    monkeypatch.setattr(module, "JSON_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read(folder)
    with pytest.raises(ValueError, match=r"sealed: expected at most 100 bytes, got .*=\d+; use"):
        make_folder(folder.parent / "other")


def test_the_cases_differ_from_what_is_accepted(folder):
    """A case that changes nothing would test nothing."""
    content = content_of(read(folder))
    for change, problem in REFUSED.values():
        changed = copy.deepcopy(content)
        change(changed)
        assert json.dumps(changed) != json.dumps(content)
        re.compile(problem)
