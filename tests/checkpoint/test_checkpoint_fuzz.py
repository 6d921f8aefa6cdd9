"""Readers of a checkpoint's metadata against bytes of hypothesis: a ValueError of ours, or right.

An audit hook watches every example: nothing outside of the folder is opened or listed, nothing is
opened to write, no process starts, no pickle finds a class.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from manifest_cells import content_of, make_folder, seal

from fastpar.checkpoint.checkpoint import rng_state, set_rng_state
from fastpar.checkpoint.manifest import CONFIG, MANIFEST, STATE, FileEntry, read_manifest
from fastpar.checkpoint.restore import naming_damaged_file, read_run_state
from fastpar.checkpoint.verify import find_damage
from fastpar.checkpoint.weight_sources import load_weights
from fastpar.files.tensor_header import read_header
from fastpar.models.hf import load_hf, read_config

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
OURS = re.compile(r"[\w.]+(?: \w+)?: expected .*, got .*; ", re.DOTALL)
FEW = hypothesis.settings(
    max_examples=150,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)

watched: dict = {"folder": None, "seen": []}


def _audit(event, args):
    folder = watched["folder"]
    if folder is None:
        return
    if event in ("open", "os.listdir", "os.scandir"):
        path, mode, flags = (*args, None, None, 0)[:3] if event == "open" else (args[0], None, 0)
        if isinstance(path, int):
            return
        real = os.path.realpath(os.fsdecode(path))
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        )
        inside = real == folder or real.startswith(folder + os.sep)
        if writes or not (inside or real.startswith(CODE)):
            watched["seen"].append((event, path))
    elif event in FORBIDDEN:
        watched["seen"].append((event, args))


FORBIDDEN = (
    "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.rename", "os.remove",
    "os.mkdir", "os.symlink", "os.truncate",
)  # fmt: skip
CODE = tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix, Path(__file__).parents[2])))
sys.addaudithook(_audit)  # cannot be removed; does nothing while no folder is set


@contextlib.contextmanager
def watch(folder):
    """Within, only files in the folder are opened, and only to read."""
    watched["folder"], watched["seen"] = os.path.realpath(folder), []
    try:
        yield
    finally:
        watched["folder"] = None
    assert watched["seen"] == []


def test_the_watch_sees(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")
    for act in (
        lambda: open(tmp_path / "secret").close(),
        lambda: open(tmp_path / "in" / "made", "w").close(),
        lambda: os.listdir(tmp_path),
        lambda: (tmp_path / "in" / "link").symlink_to("x"),
        lambda: os.system("true"),
        lambda: __import__("pickle").loads(b"cos\nsystem\n."),
    ):
        with pytest.raises(AssertionError), watch(tmp_path / "in"):
            act()


def refused_or_right(act, folder):
    """Runs a reader; whether it refused. Another exception than ours is the test's failure."""
    message = None
    with watch(folder):
        try:
            act()
        except ValueError as error:
            message = str(error)
    assert message is None or (OURS.match(message) and "\n" not in message), message
    return message is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "step_000005"
    make_folder(path)
    (path.parent / "outside").write_text("{}")
    return path


def read_all(folder):
    manifest = read_manifest(folder)
    damage = find_damage(folder, manifest)
    assert all(isinstance(d.problem, str) and d.file in manifest.files for d in damage)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 40) | st.floats() | st.text()
    | st.sampled_from(["../outside", "/etc/passwd", "config.json", "F32", "BF16", "0" * 64, 2**63,
                       2**47, [0, 1, 0, 1], "a\0b", "..", "\ud800", 10**39]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def places(value, path=()):
    """Every path of names and indices in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places(inner, (*path, key))


def edit(content, path, value, how):
    """A JSON value with another one at a path, or without what is there, or with it twice."""
    if not path:
        return value
    content = json.loads(json.dumps(content))
    *names, last = path
    at = content
    for name in names:
        at = at[name]
    if how == "drop":
        del at[last]
    elif how == "copy" and isinstance(at, list):
        at.append(at[last])
    elif how == "copy":
        at[f"{last}2"] = at[last]
    else:
        at[last] = value
    return content


HOW = st.sampled_from(["set", "set", "drop", "copy"])


@pytest.mark.slow
@hypothesis.given(content=st.binary(max_size=200))
@FEW
def test_any_bytes_as_a_manifest(folder, content):
    good = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(content)
    try:
        assert refused_or_right(lambda: read_all(folder), folder)
    finally:
        (folder / MANIFEST).write_bytes(good)


@hypothesis.given(data=st.data())
@FEW
def test_changed_bytes_of_a_manifest(folder, data):
    good = (folder / MANIFEST).read_bytes()
    i = data.draw(st.integers(0, len(good) - 1))
    j = data.draw(st.integers(i, min(i + 20, len(good))))
    changed = good[:i] + data.draw(st.binary(max_size=20)) + good[j:]
    (folder / MANIFEST).write_bytes(changed)
    try:
        assert refused_or_right(lambda: read_all(folder), folder) == (changed != good)
    finally:
        (folder / MANIFEST).write_bytes(good)


@pytest.mark.slow
@hypothesis.given(data=st.data(), value=values, how=HOW)
@hypothesis.settings(FEW, max_examples=300)
def test_a_sealed_manifest_with_anything_in_it(folder, data, value, how):
    """Behind the digest: one place of the content changed, the digest made right again."""
    good = (folder / MANIFEST).read_bytes()
    content = content_of(read_manifest(folder))
    path = data.draw(st.sampled_from(list(places(content))))
    changed = edit(content, path, value, how)
    (folder / MANIFEST).write_bytes(seal(changed) if isinstance(changed, dict) else b"[]")
    try:
        refused_or_right(lambda: read_all(folder), folder)
    finally:
        (folder / MANIFEST).write_bytes(good)


@pytest.mark.slow
@hypothesis.given(data=st.data())
@FEW
def test_sealed_runs_cover_or_are_refused(folder, data):
    """Any runs: those that are accepted hold every element once."""
    good = (folder / MANIFEST).read_bytes()
    content = content_of(read_manifest(folder))
    small = st.integers(-1, 6)
    run = st.tuples(small, small, small, small).map(list)
    numel = data.draw(st.integers(0, 6))
    for i in (0, 1):
        piece = next(t for t in content["optimizer"] if t["file"][10:15] == f"0000{i + 1}")
        entry = content["files"][piece["file"]]
        old = sum(r[1] * r[3] for r in piece["runs"])
        piece["shape"], piece["runs"] = [numel], data.draw(st.lists(run, max_size=3))
        entry["size"] += 4 * (sum(r[1] * r[3] for r in piece["runs"]) - old)
    (folder / MANIFEST).write_bytes(seal(content))
    try:
        if not refused_or_right(lambda: read_manifest(folder), folder):
            key = content["optimizer"][0]["key"]
            pieces = [t for t in read_manifest(folder).optimizer if t.key == key]
            found = [
                r.start + i * r.stride + j
                for t in pieces for r in t.runs if r.start >= 0
                for i in range(r.count) for j in range(r.length)
            ]  # fmt: skip
            assert sorted(found) == list(range(numel))
    finally:
        (folder / MANIFEST).write_bytes(good)


@pytest.mark.slow
@hypothesis.given(data=st.data(), value=values, how=HOW)
@hypothesis.settings(FEW, max_examples=300)
def test_a_header_with_anything_in_it(folder, data, value, how):
    """A header under a right digest in a right manifest, and on its own."""
    name = data.draw(st.sampled_from(["model.safetensors", "optimizer-00001-of-00002.safetensors"]))
    good, raw = (folder / MANIFEST).read_bytes(), (folder / name).read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:head])
    path = data.draw(st.sampled_from(list(places(header))))
    text = json.dumps(edit(header, path, value, how)).encode()
    text = data.draw(st.sampled_from([text, text[:-1], text + b" " * 7]))
    new = len(text).to_bytes(8, "little") + text
    (folder / name).write_bytes(new + raw[head:])
    content = content_of(read_manifest(folder))
    digest = hashlib.sha256(new).hexdigest()
    entry = FileEntry(len(new) + len(raw) - head, digest, len(new))
    content["files"][name] = vars(entry)
    (folder / MANIFEST).write_bytes(seal(content))
    try:
        refused_or_right(lambda: read_all(folder), folder)
        with watch(folder), open(folder / name, "rb") as file, contextlib.suppress(ValueError):
            read_header(file.fileno())
    finally:
        (folder / MANIFEST).write_bytes(good)
        (folder / name).write_bytes(raw)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder of transformers in two files."""
    from fastpar.config.config import GPTConfig
    from fastpar.models.gpt import GPT
    from fastpar.models.hf import save_hf

    path = tmp_path_factory.mktemp("fuzz_hf") / "gpt2"
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=4, block_size=3, vocab_size=5, dropout=0.0))
    save_hf(model, path, max_shard_bytes=500)
    (path.parent / "outside").write_text("{}")
    return path


@pytest.mark.slow
@hypothesis.given(data=st.data(), value=values, how=HOW)
@hypothesis.settings(FEW, max_examples=300)
def test_config_and_index_with_anything_in_them(plain, data, value, how):
    file = plain / data.draw(st.sampled_from([CONFIG, "model.safetensors.index.json"]))
    good = file.read_bytes()
    path = data.draw(st.sampled_from(list(places(json.loads(good)))))
    file.write_text(json.dumps(edit(json.loads(good), path, value, how)))
    try:
        refused_or_right(lambda: load_hf(plain), plain)
    finally:
        file.write_bytes(good)


@pytest.mark.slow
@hypothesis.given(content=st.binary(max_size=100), name=st.sampled_from([CONFIG, MANIFEST]))
@FEW
def test_any_bytes_as_metadata_of_weights(plain, content, name):
    good = (plain / name).read_bytes() if (plain / name).exists() else None
    (plain / name).write_bytes(content)
    try:
        refused = refused_or_right(lambda: load_weights(plain), plain)
        assert refused or content.lstrip()[:1] == b"{"
    finally:
        (plain / name).write_bytes(good) if good is not None else (plain / name).unlink()


RUN = {
    "step": 5, "model": {"n_layer": 1, "n_head": 1, "n_embd": 4}, "dtype": "fp32", "data": "0",
    "next_sample": 3, "tokens": 4, "rng": rng_state(), "loss_scale": {"scale": 2.0},
    "guards": {"skipped": 0},
}  # fmt: skip


@pytest.mark.slow
@hypothesis.given(data=st.data(), value=values, how=HOW)
@hypothesis.settings(FEW, max_examples=300)
def test_a_run_s_state_with_anything_in_it(folder, data, value, how):
    """What the trainer takes from it, in its order."""
    file = folder / STATE
    path = data.draw(st.sampled_from(list(places(RUN))))
    good = file.read_bytes()
    file.write_text(json.dumps(edit(RUN, path, value, how)))

    def use():
        state = read_run_state(folder)
        with naming_damaged_file(file):
            set_rng_state(state["rng"])
            int(state["guards"]["skipped"])

    try:
        refused_or_right(use, folder)
    finally:
        file.write_bytes(good)


def test_the_folders_are_accepted_as_they_are(folder, plain):
    """Otherwise every example above would be refused for a reason that is none."""
    assert not refused_or_right(lambda: read_all(folder), folder)
    assert find_damage(folder, read_manifest(folder)) == []
    assert not refused_or_right(lambda: load_weights(plain), plain)
    assert read_config(plain, None).n_layer == 1
    assert (folder / STATE).exists()
