"""File operations of a save, counted, to fail or to die at any of them."""

import os
import sys
import threading
from contextlib import contextmanager

from fastpar.files import tensor_file

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_lock = threading.Lock()
_watcher = None  # called with a name before each operation


def _tell(name):
    if _watcher is not None:
        _watcher(name)


def _is_of_a_save(path):
    text = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    return "checkpoints" in text or text.endswith(("/latest", ".latest.tmp"))


def _audit(event, args):
    """Python's audit hook: it cannot be removed, and may raise."""
    if _watcher is None:
        return
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & WRITES and _is_of_a_save(path):
            _tell(f"open {path}")
    elif event in CHANGES:
        inside_of_rmtree = event in ("os.remove", "os.rmdir") and args[-1] not in (-1, None)
        if inside_of_rmtree or any(_is_of_a_save(arg) for arg in args):
            _tell(f"{event} {args[0]}")


@contextmanager
def watching(watcher):
    """watcher(name) is called before each file operation of a save, in any thread."""
    global _watcher
    fsync, write = os.fsync, tensor_file.TensorFile.write

    def told_fsync(descriptor):
        _tell("fsync")
        fsync(descriptor)

    def told_write(self, *args, **kwargs):
        _tell("write")
        write(self, *args, **kwargs)

    os.fsync, tensor_file.TensorFile.write = told_fsync, told_write
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
        os.fsync, tensor_file.TensorFile.write = fsync, write


class Countdown:
    """Calls action() before the n-th operation, once; counts from 1."""

    def __init__(self, n, action):
        self.n, self.action, self.names = n, action, []

    def __call__(self, name):
        with _lock:
            self.names.append(name)
            due = len(self.names) == self.n
        if due:
            self.action()


sys.addaudithook(_audit)
