"""Run folders: checkpoints, the lock of the writing process, progress output.

Only one process at a time writes a run. run.lock names that process and carries a kernel lock
(flock), which ends with the process for any reason; a run.lock without a kernel lock belongs to a
finished run. Readers (sample, verify, export) need no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNS = "runs"  # folder of runs without --out
LATEST = "latest"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: linux/fcntl.h, linux/fs.h
_LINKS = 8  # links in a row that are followed
_STEP = re.compile(r"step_\d{6,}")
LOCK = "run.lock"
WAIT_S = 5.0  # wait for a process that is ending, before a restart is refused
_POLL_S = 0.1
_held: dict[Path, int] = {}  # folder -> descriptor


def newest_run(runs: str | Path = RUNS) -> Path | None:
    """The run in a folder with the newest metrics; None if there is none."""
    by_time = [(p.stat().st_mtime, p.parent) for p in Path(runs).glob("*/metrics.jsonl")]
    return max(by_time)[1] if by_time else None


def is_taken(folder: Path) -> bool:
    """Whether results cannot be written there: it is a file, or a folder that is not empty."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def make_next_free(path: Path) -> Path:
    """Create the first folder of path, path-2, path-3, ... that does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    candidate, n = path, 1
    while True:
        try:
            candidate.mkdir()  # exclusive, so two runs that start at once get different folders
            return candidate
        except FileExistsError:
            n += 1
            candidate = path.with_name(f"{path.name}-{n}")


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return Path(run) / "checkpoints" / f"step_{step:06d}"


def is_step_name(name: str) -> bool:
    """Whether this is the name of a checkpoint's folder."""
    return _STEP.fullmatch(name) is not None


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """Committed checkpoints of a run by step, oldest first; not verified."""
    folders = (Path(run) / "checkpoints").glob("step_*")
    return sorted((p for p in folders if is_step_name(p.name) and p.is_dir()), key=step_of)


def check_checkpoint(caller: str, path: Path) -> None:
    """Refuse a run where one of its checkpoints is expected."""
    if checkpoints := list_checkpoints(path):
        link = path / LATEST
        raise ValueError(
            f"{caller}: expected the folder of a checkpoint, got path={path}, which is a run; name "
            f"{link if link.exists() else checkpoints[-1]}"
        )


def put_folder(folder: Path, final: Path) -> Path | None:
    """Rename a folder to its final name; return the new name of a folder that had it before.

    The two names are exchanged atomically if the system supports it (Linux, not on NFS).
    """
    import ctypes  # slow to import

    if not final.exists():
        os.replace(folder, final)
        return None
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(folder.absolute()), os.fsencode(final.absolute())
    if exchange is not None and exchange(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0:
        return folder
    old = folder.with_suffix(".old.tmp")
    os.replace(final, old)
    os.replace(folder, final)
    return old


def point_latest(run: Path, checkpoint: Path) -> str | None:
    """Link run/latest to the checkpoint, for people and transformers; fastpar does not need it.

    Returns:
        What the user should know; None: nothing.
    """
    link, temporary = run / LATEST, run / f".{LATEST}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.relative_to(run), target_is_directory=True)
        os.replace(temporary, link)
    except OSError as error:  # a file system without links, or a folder, as cp -L makes of a link
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if os.path.lexists(link):
            return f"{link} is of an older step, it cannot be replaced ({error}); delete it"
    return None


def set_aside(path: Path) -> Path:
    """Rename a folder to the first free one of NAME-left, NAME-left-2, ...; return the new name."""
    for n in itertools.count(1):
        to = path.with_name(f"{path.name}-left" + f"-{n}" * (n > 1))
        if not os.path.lexists(to):
            os.rename(path, to)
            break
    return to


def linked(path: str | os.PathLike[str]) -> Path:
    """The folder that a link names now: run/latest moves while a run saves, so follow it once."""
    path = Path(path)
    for _ in range(_LINKS):
        with contextlib.suppress(OSError):
            path = path.parent / os.readlink(path)
            continue
        break
    return path


def is_restart() -> bool:
    """Whether a launcher has restarted this rank after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def run_id() -> str:
    """An id of the launcher that all restarts of a run share; empty without a launcher."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name != "none":  # torchrun's value if the user gave no id
        return name
    launcher = os.getppid()
    with contextlib.suppress(OSError):
        born = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{socket.gethostname()}-{launcher}-{born}"
    return ""


def find_run(runs: str | Path, name: str) -> Path | None:
    """The newest folder locked by a start with this run_id(); None if there is none."""
    by_time = []
    for file in Path(runs).glob(f"*/{LOCK}") if name else ():
        with contextlib.suppress(OSError):
            if _read(file).get("run_id") == name:
                by_time.append((file.stat().st_mtime, file.parent))
    return max(by_time)[1] if by_time else None


def hold(folder: str | Path, *, wait_s: float | None = None) -> bool:
    """Lock a run folder for this process until release() or its end.

    Args:
        wait_s: how long to wait for another process that holds it; None: WAIT_S.
    Returns:
        False if the file system has no locks; then nothing is checked.
    Raises:
        ValueError: another process holds it; names the process.
    """
    folder = Path(folder).resolve()
    if folder in _held:
        return True
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + (WAIT_S if wait_s is None else wait_s)
    try:
        while not _try(descriptor):
            if time.monotonic() > deadline:
                raise _taken(folder)
            time.sleep(_POLL_S)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        if isinstance(error, ValueError):
            raise
        return False  # file systems without locks raise various errors, such as 524
    host, since = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "host": host, "since": since, "run_id": run_id()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
    _held[folder] = descriptor
    return True


def check_free(folder: str | Path) -> None:
    """Raise the ValueError of hold(), without waiting, if another process holds a run folder."""
    folder = Path(folder).resolve()
    if folder in _held:
        return
    with contextlib.suppress(OSError):  # there is no lock, or the file system has none
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            free = _try(descriptor)
        finally:
            os.close(descriptor)
        if not free:
            raise _taken(folder)


def _taken(folder: Path) -> ValueError:
    holder, who = _read(folder / LOCK), "another process"
    if {"pid", "host", "since"} <= holder.keys():
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    return ValueError(
        f"train: expected a run that no other process writes, got out={folder}, used by {who}; "
        "wait for it, stop it, or choose another --out"
    )


def release() -> None:
    """Release all locks of this process."""
    while _held:
        os.close(_held.popitem()[1])


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError:  # it is being written now
        return {}
    return content if isinstance(content, dict) else {}


# A fork shares its parent's lock, and would keep it after the parent ends.
os.register_at_fork(after_in_child=release)


_INTERVAL_S = 5.0  # between two lines of progress without a bar


def duration(seconds: float) -> str:
    """A duration as 4:05 or 1:02:03."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _can_show_bar() -> bool:
    """Whether stderr is a terminal of known size; tqdm draws nothing on one of 0 rows."""
    try:
        return sys.stderr.isatty() and all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False


class Progress:
    """Progress of steps by tqdm: a bar on a terminal, otherwise a line every few seconds.

    Args:
        total: total number of steps.
        initial: steps done before this start.
        bar: whether to draw a bar; None: if stderr is a terminal.
    """

    def __init__(self, total: int, initial: int = 0, *, bar: bool | None = None) -> None:
        from tqdm import tqdm

        how: dict[str, Any] = {
            "bar_format": "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}{postfix}]",
            "dynamic_ncols": True,
        }
        if not (_can_show_bar() if bar is None else bar):
            how = {
                "bar_format": "step {n_fmt}/{total_fmt}, eta {remaining}{postfix}",
                "mininterval": _INTERVAL_S,
                "delay": 1e-3,  # no line before the first step
                "file": _Lines(),
                "leave": False,
            }
        self._tqdm = tqdm(total=total, initial=initial, miniters=1, smoothing=0, **how)

    def update(self, step: int, text: str) -> None:
        """Report that `step` steps are done; text: loss, tokens/s."""
        self._tqdm.set_postfix_str(text, refresh=False)
        self._tqdm.update(step - self._tqdm.n)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """End the bar, or print the last step if no line did."""
        if self._tqdm.n > self._tqdm.last_print_n:
            self._tqdm.refresh()
        self._tqdm.close()


class _Lines:
    """What tqdm would draw, as lines on stdout."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), flush=True)

    def flush(self) -> None:
        pass


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Means of each value and up to `reach` neighbours on either side, as many on both: a mean of
    earlier values alone would lag behind where a curve falls."""
    out = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        out.append(sum(values[i - near : i + near + 1]) / (2 * near + 1))
    return out
