"""The command fastpar. A user's mistake prints one line on stderr and exits with status 2."""

from __future__ import annotations

import argparse
import contextlib
import dis
import io
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastpar._version import __version__
from fastpar.comm.nodes import adopt_scheduler, plain_words
from fastpar.comm.ranks import (
    LOST_PEER,
    USER_MISTAKE,
    RankFailed,
    available_cores,
    is_rank,
    launched_here,
    lost_peer,
    threads_per_rank,
)
from fastpar.files.packages import import_package
from fastpar.files.plain_files import printable, shown
from fastpar.files.runs import RUNS, find_run, is_restart, list_checkpoints, newest_run, run_id
from fastpar.settings.config import TrainConfig
from fastpar.settings.fields import for_tyro, setting_name
from fastpar.settings.files import WRONG_PATH, option, read_settings
from fastpar.settings.mesh import ranks_of_batch, ranks_of_depth
from fastpar.settings.options import USUAL, SampleSettings, TrainFlags
from fastpar.settings.rules import check, rules_text
from fastpar.train import launch

_BROKEN_PIPE = 128 + 13  # the exit status of SIGPIPE
# Command NAME is the function _NAME of this file.
COMMANDS = {
    "train": "train a GPT-2 on text (--nproc N: with N ranks on this machine)",
    "profile": "show where the time of a training step goes, and what to change",
    "plan": "find a parallel layout for a model and some GPUs: memory, time, cost, command",
    "compare": "train one GPT-2 with several parallel strategies and measure which is best",
    "sample": "generate text with a trained model",
    "verify": "check every byte of a run's checkpoints for damage",
    "export": "write a run's weights and tokenizer to a folder that transformers loads",
    "doctor": "check each kernel on this machine: is it correct and faster than PyTorch?",
    "info": "show which implementations this machine uses, and why",
}
USAGE = (
    "usage: fastpar COMMAND [OPTIONS]\n\n"
    + "".join(f"  {name:8} {about}\n" for name, about in COMMANDS.items())
    + "\n`fastpar COMMAND --help` lists a command's options; "
    "`fastpar --version` prints the version.\n"
)


@dataclass(frozen=True, kw_only=True)
class _OfWeights:
    folder: Annotated[
        str | None, for_tyro(lambda c: c.Positional), for_tyro(lambda c: c.arg(metavar="[FOLDER]"))
    ] = None
    """A run, a checkpoint, a transformers folder, or nanoGPT's ckpt.pt.
    Unset: the newest run in runs/."""


@dataclass(frozen=True, kw_only=True)
class SampleCommand(_OfWeights):
    """Generate text with a trained model."""

    tokenizer: str | None = None
    """gpt2, bytes, or a folder with a saved tokenizer or nanoGPT's meta.pkl.
    Unset: the tokenizer saved with the model."""
    sample: SampleSettings = field(default_factory=SampleSettings)
    interactive: bool = False
    """Read prompts from the terminal, one per line, and continue each one."""
    seed: int = 0
    """Random seed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if there is one, otherwise cpu."""


@dataclass(frozen=True, kw_only=True)
class ExportCommand(_OfWeights):
    """Write weights and tokenizer of a run's newest checkpoint to a new folder."""

    to: str
    """Folder to create."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Convert the weights, from fp32 master weights if the run has them; unset: no conversion."""
    ema: bool = False
    """Export the moving average of the weights instead, of a run with --ema."""


class _Unfailing(io.FileIO):
    """A descriptor whose failed writes raise no error: a full disk, a closed pipe."""

    def write(self, text: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)


def _open_streams(unfailing: bool) -> None:
    """Open closed descriptors 0 to 2 on /dev/null, so that no file gets their numbers.

    Characters that the output's encoding lacks are escaped.

    Args:
        unfailing: failed writes to stdout and stderr raise no error.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            stream = open(descriptor, "w" if descriptor else "r")  # noqa: SIM115
        elif stream is not getattr(sys, f"__{name}__"):  # the caller's
            continue
        stream.reconfigure(errors="backslashreplace" if descriptor else "surrogateescape")
        if unfailing and descriptor:
            lines = descriptor == 2 or stream.isatty()
            raw = io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
            stream = io.TextIOWrapper(raw, stream.encoding, stream.errors, None, lines)
        setattr(sys, name, stream)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    A closed pipe, as in `| head`, ends other commands silently; `train` continues without output.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams(unfailing=arguments[:1] == ["train"])
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(__version__)
        return 0
    try:
        if name not in COMMANDS:
            raise ValueError(
                f"fastpar: expected one of {', '.join(COMMANDS)}, got command={name}; "
                "see fastpar --help"
            )
        _check_text(name, arguments)
        return globals()[f"_{name}"](arguments[1:])
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not is_rank():
            if name in ("profile", "compare") and "--help" not in arguments:
                print(f"fastpar {name}: stopped, its output pipe was closed", file=sys.stderr)
            raise
        return _leave(error)


def _check_text(name: str, arguments: list[str]) -> None:
    """Refuse arguments that cannot be written as UTF-8, as in config.json and to other ranks."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"fastpar {name}: expected arguments in UTF-8, got {shown(argument)}; use a locale "
                "with UTF-8, such as LC_ALL=C.UTF-8, and names of files in UTF-8"
            ) from None


def _check_environment() -> None:
    """Refuse the environment of a rank that lacks a part."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        with launch.interrupt_kills():
            from fastpar.comm.mesh import read_environment
        read_environment(os.environ)


def _leave(error: Exception) -> int:
    """Print the error (one line, or a traceback for a bug); return the exit status."""
    status = USER_MISTAKE if isinstance(error, ValueError) else 1
    file = error.filename if isinstance(error, OSError) else None
    missing = _missing_memory(error)
    if is_rank() and lost_peer(error):
        from fastpar.comm.watchdog import activity

        first: BaseException = error
        while (cause := first.__cause__) is not None and lost_peer(cause):
            first = cause
        status, step, why = LOST_PEER, activity().step, plain_words(first).splitlines()[0]
        at = "" if step is None else f" in step {step}"
        line = f"rank {os.environ['RANK']} stopped{at}: another rank has ended ({why})"
    elif _is_refusal(error):
        line = str(error)
    elif isinstance(error, RankFailed):
        line = f"fastpar: {error}"
    elif missing:
        line = f"fastpar: out of memory, {missing} could not be allocated; {_SAVES_MEMORY}"
        error = MemoryError(line)  # a launcher prints it
    elif file is not None:
        assert isinstance(error, OSError)
        line = f"fastpar: {error}"
        status = USER_MISTAKE if error.errno in WRONG_PATH else 1
    else:
        import traceback

        line, status = "".join(traceback.format_exception(error)).rstrip(), 1
    sys.stdout.flush()
    print(printable(line), file=sys.stderr, flush=True)
    if is_rank():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        # Skip destructors: that of a process group can wait forever for lost peers.
        os._exit(status)
    return status


def _is_refusal(error: Exception) -> bool:
    """Whether a raise statement of fastpar made the error: then its text is written for users.

    Errors that Python, torch or another package raises are defects of fastpar, or of the machine.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError | RuntimeError | ImportError | OSError):
        return False
    module = str(trace.tb_frame.f_globals.get("__name__"))
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and module.partition(".")[0] == "fastpar"


_SAVES_MEMORY = (
    "for training, lower --micro-batch-size, add --activation-checkpointing full or more ranks "
    "with --zero 3 (fastpar plan predicts the memory); otherwise use a smaller model"
)
_NO_MEMORY = re.compile("can't allocate memory|out of memory|bad_alloc|Cannot allocate memory")


def _missing_memory(error: Exception) -> str:
    """The amount of memory that could not be allocated; empty for other errors."""
    text = str(error)
    if not isinstance(error, MemoryError) and not _NO_MEMORY.search(text):
        return ""
    match = re.search(r"allocate (\d[\d.]*) ?(\w+)", text)
    if match is None:
        return "a tensor"
    number, unit = match.groups()
    return f"{int(number) / 1e6:,.1f} MB" if unit == "bytes" else f"{number} {unit}"


def _parse(command: Any, arguments: list[str], name: str, default: Any = None) -> Any:
    """Parse flags into a dataclass by tyro, which exits with status 2 on a mistake."""
    tyro = import_package("tyro", f"fastpar {name}")
    return tyro.cli(
        command,
        prog=f"fastpar {name}",
        args=arguments,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
    )


def _short_help() -> int:
    """Print the help of the usual settings."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        _parse(TrainFlags, ["--help"], "train", TrainFlags())
    shown = True
    for line in map(str.rstrip, text.getvalue().splitlines()):
        flag = re.match(r" +--([\w-]+)", line)
        if flag or not line.startswith(8 * " "):  # otherwise it continues the flag above
            shown = flag is None or flag[1] in USUAL
        if shown:
            print(line)
    print("These are the usual settings; `fastpar train --help-all` shows all of them, and")
    print("`fastpar train --rules` which of them can be combined.")
    return 0


def _train(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        return _short_help()
    if "--rules" in arguments:
        print(rules_text())
        return 0
    arguments = ["--help" if word == "--help-all" else word for word in arguments]
    adopt_scheduler(os.environ)
    _check_environment()
    config = parse_train(arguments)
    nproc = _ranks_to_start(config)
    if not is_rank():
        together = math.prod(ranks_of_batch(config.mesh).values())  # per replica
        config.batch(1, nproc // together)
    if not is_rank() and nproc > 1:
        with launch.interrupt_kills():
            from fastpar.train.journal import check_out

        check_out(config)  # now, because starting the ranks takes seconds
        return launch.launch(
            ["train", *arguments],
            nproc,
            threads=config.system.threads,
            max_restarts=config.faults.max_restarts,
            out=config.run.out,
        )
    with launch.interrupt_kills():
        from fastpar.train.trainer import train
    return train(config)


def _ranks_to_start(config: TrainConfig) -> int:
    nproc, mesh = config.system.nproc, config.mesh
    if is_rank():
        return nproc
    sizes = {"replicas": mesh.replicas, **ranks_of_batch(mesh)}
    together = math.prod(sizes.values())
    if nproc % together:
        used = {axis: size for axis, size in sizes.items() if size > 1}
        equal = "=" if len(used) == 1 else " = "
        axes = " * ".join(used) + equal + " * ".join(map(str, used.values()))
        flags = ", ".join(option(axis) for axis in reversed(used))
        raise ValueError(
            f"train: expected nproc to be a multiple of {axes}, got nproc={nproc}; use --nproc "
            f"{-(-nproc // together) * together}, or change {flags}"
        )
    if nproc // together % mesh.ep:
        raise ValueError(
            f"train: expected ep to divide the {nproc // together} data-parallel ranks of nproc="
            f"{nproc}, got ep={mesh.ep}; use --nproc {together * mesh.ep}, or change --ep"
        )
    config.learn(dp=nproc * mesh.cp * ranks_of_depth(mesh) // together)
    return nproc


def _profile(arguments: list[str]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch reads it on import
    from fastpar.observe.profile import parse_profile, prepare, profile

    options, flags = parse_profile(arguments)
    _check_environment()
    config = parse_train(flags)
    nproc = _ranks_to_start(config)
    config = prepare(options, config)
    if not is_rank() and nproc > 1:
        more = ["--steps", str(options.steps), "--out", str(options.out)]
        return launch.launch(["profile", *flags, *more], nproc, threads=config.system.threads)
    from fastpar.train.trainer import train

    return train(config, partial(profile, options=options))


def _compare(arguments: list[str]) -> int:
    from fastpar.observe.compare import CompareCommand, compare

    return compare(_parse(CompareCommand, arguments, "compare"))


def parse_train(arguments: list[str]) -> TrainConfig:
    """Settings of `fastpar train`: defaults < the run to resume < --config FILE < flags.

    Raises:
        ValueError: a file or a setting is invalid.
        SystemExit: unknown flags, from tyro.
    """
    first = argparse.ArgumentParser("fastpar train", add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE")
    first.add_argument("--unset", metavar="NAME", nargs="+", action="extend", default=[])
    files, arguments = first.parse_known_args(arguments)
    first.add_argument("--out")
    for flag in ("--resume", "--auto-resume"):
        first.add_argument(flag, action=argparse.BooleanOptionalAction, default=False)
    options, _ = first.parse_known_args(arguments)
    in_file = read_settings(files.config) if files.config is not None else {}
    named, automatic = options.out or in_file.get("out"), is_restart()
    out = named if isinstance(named, str) else None
    if options.auto_resume or in_file.get("auto_resume") or in_file.get("auto-resume"):
        automatic = True
    if automatic and out is None:
        newest = find_run(RUNS, run_id())
        out = str(newest) if newest is not None else None
        if out is None and not run_id():
            raise ValueError(
                "train: expected --out with --auto-resume, got out=None; name the run's folder, "
                f"such as {RUNS}/NAME"
            )
    file = Path(out or "") / "config.json"
    resumes = out is not None and file.exists() and (options.resume or automatic)
    base = TrainFlags()
    defaults = base.settings()
    if resumes:
        saved = {setting_name(name): value for name, value in read_settings(file).items()}
        old = sorted(f"{name}={saved.pop(name)}" for name in saved.keys() - defaults.keys())
        if old and os.environ.get("RANK", "0") == "0" and not launched_here():
            _note(
                "train: ignored settings of another version, or of an axis that is not registered "
                f"(fastpar.axes.register): {', '.join(old)}"
            )
        base = base.replace(saved, str(file))
    base = base.replace(in_file, str(files.config))
    unset = {setting_name(name.lstrip("-")) for name in files.unset}
    base = base.replace({name: defaults.get(name) for name in unset}, "--unset")
    flags = _parse(TrainFlags, arguments, "train", base)
    nproc = flags.system.nproc
    ranks = int(os.environ["WORLD_SIZE"]) if is_rank() else nproc
    if is_rank() and not launched_here() and nproc not in (base.system.nproc, ranks):
        raise ValueError(
            f"train: expected no --nproc under a launcher that has started {ranks} ranks, got "
            f"nproc={nproc}; use torchrun --nproc-per-node, srun --ntasks or mpirun -n"
        )
    changes = {"out": out, "resume": resumes, "auto_resume": True} if automatic else {}
    return TrainConfig(**vars(flags.replace(changes)))


def _say(line: str) -> None:
    print(printable(line))


def _note(line: str) -> None:
    print(printable(line), file=sys.stderr)


def _weights(name: str, given: str | None) -> Path:
    """The folder or file of the weights that the user named."""
    from fastpar.checkpoint.commands import find_folders
    from fastpar.checkpoint.reader import newest_checkpoint

    run = given or newest_run()
    if run is None:
        raise ValueError(
            f"fastpar {name}: expected a run in runs/, got none; train one with `fastpar train`, "
            f"or name a folder: fastpar {name} FOLDER"
        )
    if Path(run).is_file():
        return Path(run)
    if not list_checkpoints(run):
        return find_folders(f"fastpar {name}", run)[-1]
    folder = newest_checkpoint(run, say=_note)
    _note(f"weights of {folder}")
    return folder


def _sample(arguments: list[str]) -> int:
    command = _parse(SampleCommand, arguments, "sample")
    if command.sample.num_samples < 1:
        raise ValueError(
            "fastpar sample: expected --num-samples >= 1, got num_samples="
            f"{command.sample.num_samples}; drop it for {SampleSettings().num_samples} texts"
        )
    check("fastpar sample", vars(command.sample))
    if command.interactive and command.sample.prompt:
        raise ValueError(
            "fastpar sample: expected --interactive or --prompt, got both; drop one of them"
        )
    import torch

    from fastpar.checkpoint.restore import load_weights
    from fastpar.train.sample import find_tokenizer, sample, typed_prompts

    torch.set_num_threads(threads_per_rank(None, 1))
    device = command.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = _weights("sample", command.folder)
    model = load_weights(folder, say=_note)
    tokenizer = find_tokenizer(command.tokenizer, folder, model.config.vocab_size, say=_note)
    model = model.to(device)
    seed = command.seed
    prompts = typed_prompts(_note) if command.interactive else [command.sample.prompt]
    for prompt in prompts:
        settings = replace(command.sample, prompt=prompt)
        try:
            for piece in sample(model, tokenizer, settings, seed=seed, say=_note):
                shown = printable(piece) if sys.stdout.isatty() else piece
                print(shown, end="", flush=True)
        except ValueError as error:
            if not command.interactive:
                raise
            _note(str(error))  # and wait for the next prompt
        seed += settings.num_samples
    return 0


def _verify(arguments: list[str]) -> int:
    from fastpar.checkpoint.commands import verify

    about = "Compare every byte of one checkpoint, or all of a run, with its checksum."
    status = "Exit status: 0 no damage; 1 damage, which is listed; 2 no such folder."
    parser = argparse.ArgumentParser("fastpar verify", description=about, epilog=status)
    parser.add_argument("folder", help="folder of a run, a checkpoint or transformers weights")
    parser.add_argument(
        "--tensors", metavar="PATTERN", nargs="?", const="",
        help="also list the newest checkpoint's tensors: shape, norm, extremes, nonfinite values; "
        "PATTERN: only names that contain or match it",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    return 0 if verify(options.folder, _say, options.tensors) else 1


def _export(arguments: list[str]) -> int:
    command = _parse(ExportCommand, arguments, "export")
    from fastpar.checkpoint.commands import export_weights
    from fastpar.files.tensor_file import DTYPES

    source, to = _weights("export", command.folder), Path(command.to)
    names = export_weights(source, to, DTYPES.get(command.dtype), say=_note, average=command.ema)
    print(f"{command.to}: {', '.join(names)}")
    return 0


def _plan(arguments: list[str]) -> int:
    from fastpar.predict.plan import PlanCommand, run

    return run(_parse(PlanCommand, arguments, "plan"))


def _doctor(arguments: list[str]) -> int:
    from fastpar.doctor.report import DoctorCommand, doctor

    return doctor(_parse(DoctorCommand, arguments, "doctor"))


def _info(arguments: list[str]) -> int:
    about = "Show torch, the compiled module and the implementation of each op on this machine."
    argparse.ArgumentParser("fastpar info", description=about).parse_args(arguments)
    import platform

    from fastpar.doctor.report import known_choices
    from fastpar.kernels.attention import peers as attention_peers
    from fastpar.kernels.backend import describe

    print(f"fastpar   {__version__}, {available_cores()} cores, {platform.platform()}")
    print(describe())
    print("\n".join([*attention_peers.table(), *known_choices()]))
    return 0
