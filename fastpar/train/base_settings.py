"""What the flags of fastpar train are laid upon: defaults < the run to go on with < --config."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastpar.config.config import TrainConfig, setting_name
from fastpar.config.settings import option, read_settings
from fastpar.train.run_lock import RUNS, find_run, is_restart, run_id


class Base(NamedTuple):
    """What flags are laid upon."""

    config: TrainConfig
    arguments: list[str]  # the flags
    changes: dict[str, Any]  # to what the flags set: which run to go on with
    saved: dict[str, Any]  # settings of that run that are no defaults and that no flag sets
    file: Path  # where these stand


def read_base(arguments: list[str]) -> Base:
    """The settings of files and of a run, and the flags that are left."""
    first = argparse.ArgumentParser("fastpar train", add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE")
    first.add_argument("--unset", metavar="NAME", nargs="+", action="extend", default=[])
    files, arguments = first.parse_known_args(arguments)
    first.add_argument("--out")
    for flag in ("--resume", "--auto-resume"):
        first.add_argument(flag, action=argparse.BooleanOptionalAction, default=False)
    known, _ = first.parse_known_args(arguments)
    given = read_settings(files.config) if files.config is not None else {}
    named, automatic = known.out or given.get("out"), is_restart()
    out = named if isinstance(named, str) else None
    if known.auto_resume or given.get("auto_resume") or given.get("auto-resume"):
        automatic = True
    if automatic and out is None:
        found = find_run(RUNS, run_id())
        out = str(found) if found is not None else None
        if out is None and not run_id():
            raise ValueError(
                "train: expected --out with --auto-resume, got out=None; name the folder of the "
                f"run, as {RUNS}/NAME"
            )
    file = Path(out or "") / "config.json"
    goes_on = out is not None and file.exists() and (known.resume or automatic)
    defaults = TrainConfig().settings()
    base, saved = TrainConfig(), {}
    if goes_on:
        saved = read_settings(file)
        base = base.replace(saved, str(file))
    base = base.replace(given, str(files.config))
    unset = {setting_name(name.lstrip("-")) for name in files.unset}
    base = base.replace({name: defaults.get(name) for name in unset}, "--unset")
    flags = re.findall(r"^--(?:no-)?([\w-]+)", "\n".join(arguments), re.MULTILINE)
    set_anew = unset | {setting_name(name) for name in (*given, *flags)}
    saved = {
        name: value
        for name, value in base.settings().items()
        if name in saved and name not in set_anew and value != defaults[name]
    }
    changes = {"out": out, "resume": goes_on, "auto_resume": True} if automatic else {}
    return Base(base, arguments, changes, saved, file)


@contextlib.contextmanager
def naming_saved_settings(arguments: list[str]) -> Iterator[None]:
    """Advice to leave a flag out is no use where the run to go on with has set it: say so."""
    try:
        yield
    except ValueError as error:
        text, _, advice = str(error).rpartition("; ")
        if "leave" not in advice:
            raise
        base = read_base(arguments)
        flags = {setting_name(flag) for flag in re.findall(r"--(?:no-)?([\w-]+)", advice)}
        named = {name: value for name, value in base.saved.items() if name in flags}
        if not named:
            raise
        values = ", ".join(f"{name}={value}" for name, value in named.items())
        names = " ".join(option(name)[2:] for name in named)
        raise ValueError(
            f"{text}; {values} of {base.file}: set it anew, or add --unset {names}"
        ) from None
