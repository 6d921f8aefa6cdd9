"""The command line: what wins over what, one line for a mistake, the small commands."""

import io
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import fault_runs
import nanogpt_cells
import pytest
import torch
from cells import sweep
from safetensors.torch import load_file

from fastpar import __main__ as start
from fastpar import cli
from fastpar._version import __version__
from fastpar.cli import main, parse_train
from fastpar.comm.ranks import RankFailed
from fastpar.comm.watchdog import activity, in_step
from fastpar.files import packages
from fastpar.models.gpt import GPT
from fastpar.models.hf import save_hf
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig

TRAIN = " ".join([*fault_runs.TRAIN, "--max-steps=2", "--eval-batches=1", "--threads=1"])


def fastpar(command):
    return main(command.split())


@pytest.fixture
def here(tmp_path, monkeypatch):
    fault_runs.enter(tmp_path, monkeypatch)


# Ticks of 10 ms: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
STAT = "cpu  {}\ncpu0 {}\ncpu1 {}\ncpu10 {}\nintr 5 0\n"
QUIET, BUSY, WAITING = "1 0 1 8 0 0 0 0 0 0", "3 2 1 1 0 1 1 1 3 2", "0 0 0 2 8 0 0 0 0 0"


@pytest.mark.parametrize(
    ("row0", "row1", "busy"),
    [(QUIET, QUIET, 0.4), (BUSY, QUIET, 1.1), (BUSY, BUSY, 1.8), (WAITING, WAITING, 0.0)],
)
def test_threads_sleep_where_cores_have_other_work(row0, row1, busy, tmp_path, monkeypatch, capsys):
    stat, zeros = tmp_path / "stat", " ".join("0" * 10)
    before = STAT.format(zeros, zeros, zeros, zeros)
    after = STAT.format(BUSY, row0, row1, BUSY)  # core 10 is none of this process's
    assert start.busy_cores(before, after, {0, 1}) == pytest.approx(busy)
    assert start.busy_cores(after, after, {0, 1}) == 0  # no tick between the readings
    monkeypatch.setattr(start, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(start.time, "sleep", lambda seconds: stat.write_text(after))
    settings = {}, {"OMP_WAIT_POLICY": "active"}, {"RANK": "0"}
    for given, command in itertools.product(settings, ("train", "sample", None)):
        stat.write_text(before)
        monkeypatch.setattr(os, "environ", dict(given))
        start.sleep_where_shared(command)
        sleeps = busy >= 0.5 and command == "train" and not given
        assert os.environ == given | ({"OMP_WAIT_POLICY": "passive"} if sleeps else {})
        assert ("other work" in capsys.readouterr().err) == sleeps
    stat.unlink()  # no such file on this system
    start.sleep_where_shared("train")


@pytest.mark.parametrize(("given", "said"), [("passive", "passive"), (None, "unset: threads spin")])
def test_info_says_whether_waiting_threads_sleep(given, said, monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY")  # conftest.py
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert fastpar("info") == 0
    assert f"OMP_WAIT_POLICY={said}\n" in capsys.readouterr().out


def test_help_fits_a_reader(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert [main(words) for words in ([], ["--help"], ["--version"])] == [0, 0, 0]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help-all"])
    out = capsys.readouterr().out
    assert out.count("usage: fastpar COMMAND") == 2
    assert f"\n{__version__}\n" in out
    assert "--config FILE.toml" in out
    text = out[out.index("usage: fastpar train") :]
    assert max(map(len, text.splitlines())) <= 100
    for name in TrainConfig().settings():  # every setting has a flag and a word of help
        flag = "--" + name.replace("_", "-")
        assert re.search(rf" {flag}[ ,\n].*(\n.*)?[a-z]", text), flag


def test_flags_win_over_the_file_over_the_run_over_defaults(here):
    Path("a.toml").write_text("lr = 0.5\nseed = 5\n")
    Path("r").mkdir()
    settings = {**TrainConfig().settings(), "lr": 0.25, "seed": 25, "max_steps": 25, "min_lr": 0.0}
    Path("r/config.json").write_text(json.dumps({"settings": settings}))
    config = parse_train(["--resume", "--out", "r", "--config", "a.toml", "--seed", "7"])
    assert (config.run.seed, config.optim.lr, config.run.max_steps) == (7, 0.5, 25)
    assert config.text.batch_size == TrainConfig().text.batch_size
    assert parse_train(["--out=r"]).run.max_steps == TrainConfig().run.max_steps
    assert parse_train(["--config=a.toml", "--betas", "0.8", "0.9"]).optim.betas == (0.8, 0.9)
    assert parse_train(["--compile", "--no-resume"]).system.compile is True
    assert parse_train(["--nproc", "2", "--bucket-mb", "2"]).parallel.bucket_mb == 2.0
    for flag in ("--zero", "--zero-stage"):
        assert parse_train([flag, "2"]).parallel.zero_stage == 2


MISTAKES = [
    ("frobnicate", "fastpar: expected one of train, profile, plan, compare, sample, verify, expor"),
    ("train --tp-grid 2x2 --nproc 2", "train: expected nproc to be a multiple of tp_grid=4, got n"),
    ("train --nproc 6 --tp 4", "train: expected nproc to be a multiple of tp=4, got nproc=6; use "),
    ("train --resume --out none", "train: expected a folder with a run to resume"),
    ("train --resume", "train: expected --out with --resume, got out=None; name the run's"),
    ("train --out .", "train: expected --out without a run, got out=. with config.json;"),
    ("train --config bad.toml", "train: expected a setting of `fastpar train --help-all` in bad"),
    ("sample", "fastpar sample: expected a run in runs/, got none; train one with `fastpar tra"),
    ("sample .", "fastpar sample: expected a run with checkpoints, a checkpoint or a transf"),
    ("sample none --num-samples 0", "fastpar sample: expected --num-samples >= 1, got num_sampl"),
    ("sample . --temperature -1", "fastpar sample: expected temperature >= 0, got temperature=-1"),
    ("sample . --top-k -1", "fastpar sample: expected top_k >= 0, got top_k=-1"),
    ("sample ckpt.pt", "fastpar sample: expected --tokenizer for the 40 tokens of ckpt.pt, whic"),
    ("sample ckpt.pt --tokenizer bytes", "fastpar sample: expected a tokenizer of at most the 4"),
    ("sample ckpt.pt --tokenizer chars", "fastpar sample: expected a saved tokenizer, got"),
    ("export --to .", "fastpar export: expected a run in runs/, got none; train one"),
    *(
        (f"{name} none", f"fastpar {name}: expected a run, a checkpoint or a transformers folder")
        for name in ("sample", "verify")
    ),
    (
        "sample --prompt \udcffab",
        "fastpar sample: expected arguments in UTF-8, got '\\udcffab'; use",
    ),
    ("train --out=r8\udcfc", "fastpar train: expected arguments in UTF-8, got '--out=r8\\udcfc'"),
    ("train --config none.json", "read_settings: expected a settings file, got path=none.json"),
]


@pytest.mark.parametrize(("arguments", "line"), MISTAKES)
def test_a_users_mistake_is_one_line_and_status_2(here, capsys, arguments, line):
    Path("bad.toml").write_text("learning_rate = 1.0")
    nanogpt_cells.write("ckpt.pt")
    if arguments == "train --out .":
        Path("config.json").write_text("{}")
    assert fastpar(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(line)


@sweep("arguments", ["--max-stepps 3", "--dtype fp8", "--lr x", "--zero 4"])
def test_unknown_flags_are_refused_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        fastpar(f"train {arguments}")
    assert arguments.split()[0] in capsys.readouterr().err


NO_CPU_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 250000000 bytes. Error code 12"
)


class Refused:
    """A raise statement in a module of fastpar."""

    def __init__(self, error):
        self.error = error

    def raises(self, _):
        exec("raise error", {"__name__": "fastpar.train.any", "error": self.error})


TRACEBACK, MEMORY = "Traceback (most recent call last):", "fastpar: out of memory, "


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Refused(ValueError("words of every form")), 2, "words of every form"),
        (Refused(RuntimeError("the run diverged; lower lr")), 1, "the run diverged; lower lr"),
        (Refused(KeyError("x")), 1, TRACEBACK),
        (ValueError("train: expected x"), 1, TRACEBACK),  # of another package
        (RankFailed(1, "exit status 7"), 1, "fastpar: rank 1: exit status 7"),
        (ValueError("shapes differ"), 1, TRACEBACK),  # a defect
        (KeyError("x"), 1, TRACEBACK),
        (RuntimeError("?"), 1, TRACEBACK),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError(NO_CPU_MEMORY), 1, f"{MEMORY}250.0 MB could"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
            1,
            f"{MEMORY}2.50 GiB could",
        ),
        (MemoryError("Unable to allocate 1.25 GiB for an array"), 1, f"{MEMORY}1.25 GiB could"),
        (OSError(12, "Cannot allocate memory"), 1, f"{MEMORY}a tensor"),
    ],
)
def test_what_ends_a_command(error, status, said, capsys, monkeypatch):
    """One line for what a user or a machine can change; a traceback of a defect alone."""
    command = error.raises if isinstance(error, Refused) else mock.Mock(side_effect=error)
    monkeypatch.setattr(cli, "_info", command)
    assert main(["info"]) == status
    lines = capsys.readouterr().err
    assert lines.startswith(said)
    assert said == TRACEBACK or lines.count("\n") == bool(said)
    if said.startswith(MEMORY):
        assert "; for training, lower --micro-batch-size, add --activation-ch" in lines


def test_folders_that_cannot_be_written_are_one_line(here, capsys, monkeypatch):
    Path("home").write_text("")
    assert fastpar(f"{TRAIN} --out home/r") == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == "fastpar: [Errno 20] Not a directory: 'home/r'"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "home")
    assert fastpar(f"{TRAIN} --out r") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("load_data: expected a writable folder, got cache_dir=home/")
    assert not Path("r").exists()


INTERRUPTED = """
import os, runpy, signal, sys
name, sys.argv = sys.argv[1], ["fastpar", *sys.argv[2:]]
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, wanted, *rest):
        if wanted == name:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_module("fastpar", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "arguments"), [("fastpar.cli", ["--version"]), ("torch", ["train", "--nproc=2"])]
)
def test_ctrl_c_during_an_import_ends_it_silently(here, module, arguments):
    command = [sys.executable, "-c", INTERRUPTED, module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_nproc_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_train([]).system.nproc == 1
    assert parse_train(["--nproc", "4"]).system.nproc == 4
    with pytest.raises(ValueError, match=r"no --nproc under a launcher that has started 4 ranks"):
        parse_train(["--nproc", "2"])


@sweep(
    ("values", "words"),
    [
        ({"RANK": "0"}, "Mesh: expected torchrun's environment, got none with WORLD_SIZE; start"),
        ({"WORLD_SIZE": "2"}, "Mesh: expected torchrun's environment, got none with RANK; start"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
         "Mesh: expected an integer in the environment, got RANK=x; start with torchrun"),
    ],
)  # fmt: skip
def test_half_of_a_ranks_environment_is_one_line(values, words, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        for command in ("train", "profile"):
            assert fastpar(command) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith(words)


def test_without_the_extra_it_is_named_at_once(monkeypatch, capsys):
    """Not one package after the other."""
    project = (Path(cli.__file__).parents[1] / "pyproject.toml").read_text()
    extra = re.search(r"^train = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r'"([\w-]+)', extra)) == packages.EXTRA
    for name in packages.EXTRA:
        monkeypatch.setitem(sys.modules, name, None)
    for command in ("train", "plan", "sample", "export --to a"):
        assert fastpar(command) == 1
        [line] = capsys.readouterr().err.splitlines()
        name = command.split()[0]
        assert line.startswith(f"fastpar {name}: expected the package tyro, got")
        assert line.endswith("; run pip install 'fastpar[train]'")


def test_train_then_sample_export_and_info(here, capsys, monkeypatch):
    """The default folder, its next number, streaming, and a folder to give away."""
    assert fastpar(TRAIN) == 0
    assert fastpar(f"{TRAIN} --name micro-text") == 0
    out = capsys.readouterr().out
    assert "run      runs/micro-text, steps 0 to 2" in out
    assert "run      runs/micro-text-2 (runs/micro-text is taken), steps 0 to 2" in out

    pieces = []
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", pieces.append)
        sample = "--max-new-tokens 5 --num-samples 2 --temperature 0 --device cpu"
        assert fastpar(f"sample --prompt god {sample}") == 0
    assert "runs/micro-text-2/checkpoints/step_000002" in capsys.readouterr().err
    assert pieces[0] == "god"
    assert len(pieces) > 10  # a token at a time
    one, two = "".join(pieces).split("\n" + 40 * "-" + "\n")
    assert one.strip() == two.strip()  # without temperature

    options = "--seed 1 --top-k 0 --max-new-tokens 4"
    assert fastpar(f"sample runs/micro-text {options}") == 0
    first = capsys.readouterr().out
    assert fastpar(f"sample runs/micro-text/latest {options}") == 0
    assert capsys.readouterr().out == first

    monkeypatch.setattr(sys, "stdin", io.StringIO("god\n\u4e16\n\udcff\nthe\n"))
    assert fastpar("sample runs/micro-text --interactive --max-new-tokens 3 --num-samples 1") == 0
    typed, notes = capsys.readouterr()
    assert "can't encode character '\\udcff'" in notes
    assert typed.startswith("god")
    assert "\nthe" in typed
    assert fastpar("sample runs/micro-text --interactive --prompt god") == 2
    assert "expected --interactive or --prompt, got both" in capsys.readouterr().err

    assert fastpar("export runs/micro-text --to given/away --dtype bf16") == 0
    names = ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert sorted(os.listdir("given/away")) == names
    weights = load_file("given/away/model.safetensors")
    assert weights["transformer.wpe.weight"].dtype == torch.bfloat16
    assert fastpar("sample given/away --max-new-tokens 2") == 0

    capsys.readouterr()
    assert fastpar("verify runs/micro-text --tensors wpe") == 0
    table = capsys.readouterr().out.partition("tensor ")[2]
    assert len(table.splitlines()) == 1 + 4
    weights = Path("runs/micro-text/checkpoints/step_000002/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert fastpar("verify runs/micro-text") == 1
    capsys.readouterr()
    assert fastpar("sample runs/micro-text/latest") == 2
    assert capsys.readouterr().err.startswith("verify_files: expected files as in the manifest of")

    assert fastpar("info") == 0
    info = capsys.readouterr().out
    assert __version__ in info
    assert torch.__version__ in info
    with pytest.raises(SystemExit, match="0"):
        fastpar("info --help")
    assert capsys.readouterr().out.startswith("usage: fastpar info [-h]")


def test_sample_from_nanogpts_file(here, capsys):
    """Its characters beside it, or named; without biases, as nanoGPT trains by default."""
    chars = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL"
    given = {n: t for n, t in nanogpt_cells.weights().items() if not n.endswith(".bias")}
    nanogpt_cells.write("ckpt.pt", given, {**nanogpt_cells.ARGS, "bias": False})
    Path("data").mkdir()
    Path("data/meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(chars))}))
    options = "--prompt abc --max-new-tokens 5 --num-samples 1"
    assert fastpar(f"sample ckpt.pt --tokenizer data {options}") == 0
    out, err = capsys.readouterr()
    assert out.startswith("abc")
    assert set(out) <= set(chars)
    assert "ckpt.pt has no biases; added 13 biases of 0, which change no output" in err
    shutil.copy("data/meta.pkl", "meta.pkl")
    assert fastpar(f"sample ckpt.pt {options}") == 0
    again, err = capsys.readouterr()
    assert again == out
    assert "/meta.pkl, as in nanoGPT" in err


OF_GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:18321: Connection reset by peer. This is typically caused by a remote worker "
    "hanging or bugs in the application. Check the logs of the remote worker before reporting an "
    "error. GLHF! \U0001f3d6\ufe0f"
)


def test_a_rank_says_which_other_one_is_gone_and_when(monkeypatch, capsys):
    error = RuntimeError("all_reduce: the process of rank 3 ended; rank 4 closed its group\nmore")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(os, "_exit", lambda status: None)
    in_step(7)
    assert cli._leave(error) == 3
    words = "rank 1 stopped in step 7: another rank has ended (all_reduce: the process of rank 3 en"
    assert capsys.readouterr().err.startswith(words)
    error = RuntimeError(f"Engine: rank 1 failed ({OF_GLOO}); and so on")
    error.__cause__ = RuntimeError(OF_GLOO)
    assert cli._leave(error) == 3
    (line,) = capsys.readouterr().err.splitlines()
    words = "Read error [127.0.0.1]:18321: Connection reset by peer"
    assert line == f"rank 1 stopped in step 7: another rank has ended ({words})"
    activity().step = None


def test_a_terminal_of_another_alphabet_shows_escapes():
    code = "from fastpar import cli; cli.main(['--version']); print('\\u4e16')"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    out = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert out == f"{__version__}\n\\u4e16\n"


@pytest.mark.slow
def test_what_is_said_decides_over_no_run(here):
    """Streams that are closed, full, left by their reader, or of another alphabet."""
    Path("text.txt").write_text("\u4e16\u754c and more words\n" * 300, encoding="utf-8")
    train = f"{sys.executable} -m fastpar {TRAIN} --max-new-tokens 2 --prompt \u4e16"
    cases = {
        "ranks": "{} --nproc 2 <&- >/dev/full 2>&-",
        "latin": "set -o pipefail; PYTHONIOENCODING=latin-1 {} | true",
    }
    started = {
        out: subprocess.Popen(["bash", "-c", line.format(f"{train} --out {out}")])
        for out, line in cases.items()
    }
    assert {out: process.wait() for out, process in started.items()} == dict.fromkeys(cases, 0)
    for out in cases:
        assert Path(out, "samples.txt").read_text(encoding="utf-8").count("\u4e16") == 1


def test_nobody_reads_to_the_end(here, monkeypatch, capfd):
    """fastpar ... | head: no traceback, also of what is written when the interpreter ends."""
    save_hf(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=9)), "hf")
    for arguments in ("verify hf", "verify hf --tensors", "--help", "--version"):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as gone, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", gone)
            assert fastpar(arguments) == 141, arguments
            print("more")
            gone.flush()
    assert capfd.readouterr().err == ""
