"""Saves: what each rank copies and writes, what is committed, when, and what a failure leaves."""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from alive import Alive
from cells import slow
from saved import bits

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint import restore as restore_module
from fastpar.checkpoint import saver as saver_module
from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.reader import newest_checkpoint, verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint, read_state
from fastpar.checkpoint.saver import Capture, Saver, piece_runs, save_checkpoint
from fastpar.engine.engine import engine_of, engine_of_parameter
from fastpar.files.runs import list_checkpoints
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import check_cover, cut_runs
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=131)
WIDE = GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=8, vocab_size=301)
DEEP = GPTConfig(n_layer=4, n_head=4, n_embd=64, block_size=16, vocab_size=256)


class Rank:
    def __init__(self, run, config=CONFIG, tp=1, stage=0, shard_size=None, mb=None, **options):
        self.mesh = Mesh(tp=tp, device="cpu")
        self.model = GPT(config)
        how = {"zero_stage": stage, "shard_size": shard_size, "bucket_mb": mb}
        how |= {"first_bucket_mb": mb} if mb is not None else {}
        parallelize(self.model, self.mesh, Parallel.of(**how))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.saver = Saver(run, model=self.model, optimizer=self.optimizer, **options)

    def step(self):
        x = torch.arange(self.model.config.block_size)[None]
        self.model(x, x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self


# What is copied: together everything once, and nobody all of it
MESHES = [(1, 1, 0, None), (3, 1, 0, None), (4, 1, 1, None), (3, 1, 2, None), (4, 1, 3, None),
          (4, 1, 3, 2), (4, 2, 0, None), (4, 2, 3, None), (4, 4, 0, None)]  # fmt: skip


@pytest.mark.parametrize(("ranks", "tp", "stage", "shard_size"), MESHES)
def test_each_rank_copies_its_share(ranks, tp, stage, shard_size):
    """All have the whole together, none all of the weights; holes of padding are not written."""

    def work():
        rank = Rank("unused", WIDE, tp, stage, shard_size, 0.05).step()
        found = {}
        for name, p in rank.model.named_parameters():
            engine = engine_of_parameter(p)
            shards = engine.shards
            found[name] = piece_runs(p, engine), shards.copy_of(p), shards.whole_shape(p)
        capture = Capture(rank.model, rank.optimizer, shard_mb=0.01)
        items = capture.take().items
        sizes = [
            sum(i.host.nbytes for i in items if (i.weight is None) == moments)
            for moments in (True, False)
        ]
        return found, *sizes, [(i.key, i.shape, i.runs) for i in items if not i.weight]

    pieces, moments, weights, written = zip(*run_ranks(work, ranks))
    for name, (_, (_, n_copies), shape) in pieces[0].items():
        for copy in range(n_copies):
            runs = [rank[name][0] for rank in pieces if rank[name][1][0] == copy]
            assert check_cover(runs, shape.numel()) is None, (name, copy)
    n = sum(p.numel() for p in GPT(WIDE).parameters())
    assert sum(moments) >= 8 * n
    assert max(moments) < 1.3 * 8 * n / ranks + 4096 * 8
    if ranks > 1:
        assert max(weights) < 0.7 * 4 * n
    of_tensors = {}
    for key, shape, runs in itertools.chain(*written):
        of_tensors.setdefault((key, shape), []).append(runs)
    for (_, shape), runs in of_tensors.items():
        assert check_cover(runs, torch.Size(shape).numel()) is None
    if tp == 4:
        last = pieces[3]["wte.weight"][0]
        assert [r.start for r in last] == [-1]  # 384 rows on 4 ranks in slices of 128
        assert not [key for key, *_ in written[3] if key == "wte.weight/exp_avg"]
        assert cut_runs(last, 0, 5)[0].length == 5


def test_the_host_copy_is_made_once(tmp_path):
    rank = Rank(tmp_path, WIDE, asynchronous=False).step()
    rank.saver.prepare()
    capture, numel = rank.saver._capture, [p.numel() for p in rank.model.parameters()]
    padding = 64 * (384 - 301)
    assert capture.nbytes == sum(numel) * 12 + 4 * len(numel) - 4 * padding
    rank.saver.save(1, {})
    first = [block.data_ptr() for block in capture._blocks]
    rank.model.wpe.weight.data.fill_(7.0)
    rank.saver.save(2, {})
    assert [block.data_ptr() for block in capture._blocks] == first
    one, two = map(bits, list_checkpoints(tmp_path))
    assert (one[0] != two[0], one[1] == two[1]) == (True, True)


# What a save and a load hold beyond the host copy and the state itself. `Alive` sees every tensor
# of its thread; a rank is a thread here, and so is what writes. At most, of a model whose largest
# parameter is w, in buckets of b bytes:
#
#    save, on the caller's thread   b at stage 3; with tp 2 * w more, to collect it from its ranks
#    save, by the writing threads   nothing: a transposed weight is turned in tiles
#    load                           nothing where a weight is read to its place; at stage 3 this
#                                   rank's part, turned; with tp w, as its file has it, and this
#                                   rank's part
SMALL = 4096  # bytes: steps, norms, what ranks agree on
LARGEST = 4 * 4 * 64 * 64  # bytes of a projection of an MLP, as large as the embedding


@contextlib.contextmanager
def counting(rank, *more):
    """[bytes at the peak beyond those before]; sees the state first."""
    found, params = [], list(rank.model.parameters())
    with Alive() as alive:
        pieces = [engine_of(rank.model).shards.piece(p).param for p in params]
        alive.see([*params, *pieces, *rank.optimizer.state.values(), *more])
        alive.peak = before = alive.now()
        yield found
        alive.now()
        found.append(alive.peak - before)


class Inline(ThreadPoolExecutor):
    """What threads would do, in the caller's own: Alive sees it."""

    def submit(self, job, *args):
        done = Future()
        done.set_result(job(*args))
        return done


@pytest.mark.parametrize(
    ("ranks", "tp", "stage"),
    [(2, 1, 3), (2, 1, 1), (2, 2, 0), *(slow(*m) for m in ((1, 1, 0), (3, 1, 3), (4, 2, 3)))],
)
def test_a_save_holds_one_bucket_and_a_load_one_weight(tmp_path, monkeypatch, ranks, tp, stage):
    writing = []

    def write(folder, step, items, f=saver_module._write_tensors):
        with Alive() as alive:
            alive.see([item.host for item in items])
            before = alive.now()
            found = f(folder, step, items)
            writing.append(alive.peak - before)
        return found

    monkeypatch.setattr(saver_module, "_write_tensors", write)
    for module in (saver_module, restore_module):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)

    def work():
        rank = Rank(tmp_path, DEEP, tp, stage, mb=0.1).step()
        capture = Capture(rank.model, rank.optimizer, shard_mb=0.1)
        capture.take()
        with counting(rank, *capture._blocks) as taking:
            capture.take()
        bucket = max(4 * bucket.flat.numel() for bucket in engine_of(rank.model).buckets)
        rank.saver.save(1, {})
        assert rank.saver.settle().ok
        del capture, rank.saver
        with counting(rank) as loading:
            load_checkpoint(tmp_path / "latest", model=rank.model, optimizer=rank.optimizer)
        return taking[0], bucket, loading[0]

    results = run_ranks(work, ranks)
    manifest = read_manifest(tmp_path / "latest")
    tensors = len(manifest.weights + manifest.optimizer)
    agreed = 8 * tensors * (ranks + 2)  # who has seen which: a rank's, those of all, their sum
    assert agreed < LARGEST
    for taking, bucket, loading in results:
        room = (bucket if stage == 3 else 0) + (2 * LARGEST if tp > 1 else 0)
        assert taking <= room + SMALL, (taking, bucket)
        assert stage < 3 or taking >= bucket / 2  # it is seen
        part = LARGEST if tp > 1 or stage == 3 else 0
        assert loading <= (LARGEST + part if part else 0) + SMALL + agreed
        assert tp == 1 or loading >= LARGEST  # it is seen
    assert max(writing) <= SMALL


class Many(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.ones(3) for _ in range(n)])

    def forward(self):
        return torch.cat([*self.parts]).sum()


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), slow(2, 3)])
def test_the_work_grows_with_the_number_of_tensors(tmp_path, monkeypatch, ranks, stage):
    """And not with its square: calls of functions on the caller's thread are counted."""
    for module in (saver_module, restore_module):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)

    def counted(act, *args, **options):
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            act(*args, **options)
        finally:
            sys.setprofile(None)
        return calls

    def work(n):
        model = parallelize(Many(n), Mesh(device="cpu"), zero_stage=stage)
        optimizer = AdamW(model.parameters())
        model().backward()
        optimizer.step()
        held = {"model": model, "optimizer": optimizer}
        return [
            counted(Capture, model, optimizer),
            counted(save_checkpoint, tmp_path / f"{n}", step=1, **held),
            counted(load_checkpoint, tmp_path / f"{n}" / "latest", **held),
        ]

    few, many = (run_ranks(work, ranks, n)[0] for n in (100, 300))
    for name, a, b in zip(("Capture", "save", "load"), few, many, strict=True):
        assert b < 3.3 * a, name


@pytest.fixture
def gate(monkeypatch):
    event, real = threading.Event(), saver_module._write_tensors

    def write(*args):
        assert event.wait(30)
        return real(*args)

    monkeypatch.setattr(saver_module, "_write_tensors", write)
    return event


@pytest.mark.parametrize(("ranks", "stage", "tp"), [(1, 0, 1), (2, 3, 1), (2, 0, 2)])
def test_training_goes_on_and_the_checkpoint_is_of_its_step(tmp_path, gate, ranks, stage, tp):
    """At stage 3 the memory of a bucket is used again for the next."""

    def work():
        rank = Rank(tmp_path, CONFIG, tp, stage).step()
        assert rank.saver.save(1, {"a": [1]})
        assert rank.saver.busy
        expected = {k: v.clone() for k, v in rank.model.state_dict().items()}
        for _ in range(3):
            rank.step()
        assert not list_checkpoints(tmp_path)
        rank.saver._capture.engine.all_reduce_scalars(torch.zeros(1, dtype=torch.float64))
        gate.set()
        result = rank.saver.settle()
        assert not rank.saver.busy
        return result, expected

    result, expected = run_ranks(work, ranks)[0]
    assert (result.ok, result.errors, result.step) == (True, (), 1)
    assert [result.path] == list_checkpoints(tmp_path)
    assert result.seconds > result.pause_ms / 1e3 > 0
    verify_checkpoint(result.path)
    assert read_state(result.path)["a"] == [1]
    model = GPT(CONFIG, seed=9)
    load_checkpoint(result.path, model=model)
    assert all(torch.equal(p, expected[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize(("overlap", "ranks"), [("skip", 2), ("wait", 1), ("wait", 2)])
def test_a_second_save_while_one_is_running(tmp_path, gate, overlap, ranks):
    def work():
        rank = Rank(tmp_path, overlap=overlap).step()
        assert rank.saver.save(1, {})
        rank.step()
        if overlap == "wait":
            gate.set()
        began = rank.saver.save(2, {})
        first = rank.saver.last
        rank.saver._capture.engine.all_reduce_scalars(torch.zeros(1, dtype=torch.float64))
        gate.set()
        return began, first and first.step, rank.saver.settle().step

    got = run_ranks(work, ranks)
    steps = [int(p.name.removeprefix("step_")) for p in list_checkpoints(tmp_path)]
    told, kept = {"skip": ((False, None, 1), [1]), "wait": ((True, 1, 2), [1, 2])}[overlap]
    assert (got, steps) == ([told] * ranks, kept)


def test_what_fails_on_one_rank_is_told_to_all(tmp_path, monkeypatch):
    """Of each save of three what another one did not write; a disk without room is seen before."""
    real = saver_module._write_tensors

    def write(folder, step, items):
        if step in (2, 3) and items[-1].file.startswith(f"optimizer-{step - 1:05d}"):
            raise OSError(28, "No space left on device")
        return real(folder, step, items)

    monkeypatch.setattr(saver_module, "_write_tensors", write)

    def work(*steps):
        rank, results = Rank(tmp_path, stage=1), []
        for step in steps:
            assert rank.step().saver.save(step, {})
            results.append(rank.saver.settle())
        assert rank.saver.settle() is None
        return [(r.ok, r.errors) for r in results]

    full = [(False, (f"rank {rank}: [Errno 28] No space left on device",)) for rank in (0, 1)]
    assert run_ranks(work, 2, 1, 2, 3, 4) == [[(True, ()), *full, (True, ())]] * 2
    assert run_ranks(work, 1, 2) == [[full[0]]]  # alone, rank 0 removes what is there
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1000))
    words = "rank 0: expected 4 MB free for a checkpoint, got 0 MB in .*; free disk space, or low"
    for ((ok, errors),) in run_ranks(work, 2, 5):
        assert not ok
        assert re.match(words, errors[0])
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000001", "step_000004"]


def test_what_is_kept(tmp_path):
    rank = Rank(tmp_path, keep_last=2, keep_every=4, asynchronous=False).step()
    stale = tmp_path / "checkpoints" / ".step_000001.5.tmp"  # of another attempt: never taken
    stale.mkdir(parents=True)
    (stale / "part-00000.json").write_text("{}")
    for step in (1, 2, 4, 5, 8, 9, 11, 101, 1_000_002):
        rank.saver.save(step, {})
        assert rank.saver.last.ok
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["step_000004", "step_000008", "step_000101", "step_1000002"]
    assert os.readlink(tmp_path / "latest") == "checkpoints/step_1000002"
    assert newest_checkpoint(tmp_path).name == "step_1000002"


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_run_that_goes_on_from_an_earlier_step(tmp_path, ranks, stage):
    """Its saves stay, and the newest is its own; the branch that it left still loads."""

    def work(keep_last, first, *steps):
        rank = Rank(tmp_path, stage=stage, keep_last=keep_last)
        if first:
            load_checkpoint(first, model=rank.model, optimizer=rank.optimizer)
        for step in steps:
            assert rank.step().saver.save(step, {})
            assert rank.saver.settle().ok

    run_ranks(work, ranks, 0, None, 10, 20, 30)
    ten = tmp_path / "checkpoints" / "step_000010"
    with pytest.warns(UserWarning, match="Saver: ") as said:
        run_ranks(work, ranks, 2, ten, 12, 14)
    words = r"Saver: .*step_0000{} is of a later step than the one saved now, 12: .*now .*30?-left$"
    said = [str(warning.message) for warning in said if "Saver" in str(warning.message)]
    assert re.match(words.format(20).replace("30?", "20"), said[0])
    assert re.match(words.format(30), said[1])
    assert len(said) == 2
    names = ["step_000012", "step_000014", "step_000020-left", "step_000030-left"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names
    assert newest_checkpoint(tmp_path).name == "step_000014"
    assert os.readlink(tmp_path / "latest") == "checkpoints/step_000014"
    left = GPT(CONFIG)
    assert load_checkpoint(tmp_path / "checkpoints" / names[-1], model=left)["step"] == 30
    with pytest.warns(UserWarning, match=r"now .*step_000014-left$"):
        run_ranks(work, ranks, 0, None, 13)
    with pytest.warns(UserWarning, match=r"now .*step_000020-left-2$"):
        run_ranks(work, ranks, 0, None, 20, 14)


def test_latest_that_is_a_folder(tmp_path):
    """Copied with cp -L, or from an object store: it never stays as it is without a word."""
    saver = Rank(tmp_path, asynchronous=False).step().saver
    saver.save(1, {})
    latest = tmp_path / "latest"
    latest.unlink()
    shutil.copytree(saver.last.path, latest)
    with pytest.warns(UserWarning, match="latest is of an older .* delete it"):
        saver.save(2, {})
    assert saver.last.ok
    assert set(os.listdir(tmp_path)) == {"checkpoints", "latest"}
    assert read_state(latest)["step"] == 1
    shutil.rmtree(latest)
    saver.save(3, {})  # nothing to say
    assert read_state(latest)["step"] == 3


@pytest.mark.parametrize("flag", [2, 1 << 20], ids=["exchanged", "in two steps"])
def test_a_step_that_is_there_already(tmp_path, monkeypatch, flag):
    monkeypatch.setattr("fastpar.files.runs._EXCHANGE", flag)
    saver = Rank(tmp_path, asynchronous=False).step().saver
    for number in (1, 2):
        saver.save(7, {"number": number})
        assert read_state(saver.last.path)["number"] == number
        verify_checkpoint(saver.last.path)
    assert os.listdir(tmp_path / "checkpoints") == ["step_000007"]


def test_a_save_that_raised_leaves_nothing_to_settle(tmp_path, monkeypatch):
    saver = Rank(tmp_path).step().saver
    with monkeypatch.context() as patched:
        patched.setattr(saver._capture, "take", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            saver.save(1, {})
    assert (saver.busy, saver.settle()) == (False, None)
    assert saver.save(2, {})
    assert saver.settle().ok
    with pytest.raises(ValueError, match=r"Saver: expected overlap to be .*, got overlap='later'"):
        Saver(tmp_path, model=torch.nn.Linear(1, 1), overlap="later")


def test_settle_ends_the_thread(tmp_path, monkeypatch):
    """One that still frees tensors while Python ends aborts the process."""

    def end(attempt, f=saver_module._Attempt.end):
        f(attempt)
        time.sleep(0.2)

    monkeypatch.setattr(saver_module._Attempt, "end", end)
    saver = Rank(tmp_path).saver
    saver.save(1, {})
    saver.settle()
    assert not [thread for thread in threading.enumerate() if thread.name == "saver"]


ENDS = """
import sys, threading
import fastpar, torch
from fastpar.checkpoint import saver as module

ending = threading.Event()
threading._register_atexit(ending.set)  # before what was registered earlier

def write(folder, step, items, f=module._write_tensors):
    assert ending.wait(60)
    if step == 3:
        raise OSError("the disk is gone")
    return f(folder, step, items)

module._write_tensors = write
run, step, fails = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
mesh = fastpar.Mesh(device="cpu")
model = fastpar.parallelize(torch.nn.Linear(64, 64), mesh, zero_stage=3)
saver = fastpar.Saver(run, model=model)
saver.save(step, {})
if str(mesh.rank) in fails:
    raise ArithmeticError("fails")
"""


def ends(tmp_path, start, step, *fails):
    """Runs ENDS; (exit status, stderr) of the process."""
    (tmp_path / "ends.py").write_text(ENDS)
    done = subprocess.run(
        [sys.executable, *start, "ends.py", "run", str(step), *fails],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_process_that_ends_finishes_its_save(tmp_path):
    """Without settle(), here after an exception."""
    code, err = ends(tmp_path, [], 2, "0")
    assert (code, "ArithmeticError: fails" in err) == (1, True)
    verify_checkpoint(tmp_path / "run" / "latest")
    assert read_state(tmp_path / "run" / "latest")["step"] == 2


@pytest.mark.slow
def test_ranks_that_end_finish_their_save(tmp_path):
    """A launcher stops the others once one has ended; the one that fails waits for the commit."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for step, fails in ((1, ""), (4, "1"), (5, "01")):
        code, err = ends(tmp_path, torchrun, step, *fails)
        assert code == int(bool(fails)), err
        assert ("ArithmeticError: fails" in err) == bool(fails)
        verify_checkpoint(tmp_path / "run" / "latest")
        assert read_state(tmp_path / "run" / "latest")["step"] == step
    code, err = ends(tmp_path, torchrun, 3)
    assert code == 0
    assert "Saver: the checkpoint of step 3 was not saved (the disk is gone)" in err
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints"))[-1] == "step_000005"


def test_a_part_is_seen_when_all_of_it_is_there(tmp_path, monkeypatch):
    """Rank 0 looks for the others' parts while they are being written."""

    def write(path, content, f=saver_module._write_flushed):
        if path.name.startswith("part-00001"):
            path.write_bytes(content[:10])
            time.sleep(0.2)
        f(path, content)

    monkeypatch.setattr(saver_module, "_write_flushed", write)

    def work():
        saver = Saver(tmp_path, model=parallelize(GPT(CONFIG), Mesh(device="cpu")))
        saver.save(1, {})
        return saver.settle().errors

    assert run_ranks(work, 2) == [(), ()]
