"""Where this user's files of every run are kept."""

import os
import pwd
import tempfile
from pathlib import Path

from fastpar.data.sources import cache_folder
from fastpar.doctor.table import proofs_folder
from fastpar.files.plain_files import user_cache
from fastpar.predict.machine import rates_folder


def test_a_user_without_a_home(tmp_path, monkeypatch):
    """As in a container that runs under a number: neither HOME nor an entry in passwd."""

    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "FASTPAR_PROOFS", "FASTPAR_RATES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = tmp_path / f"fastpar-{os.getuid()}"
    assert cache_folder(None) == user_cache() == cache
    assert (proofs_folder(), rates_folder()) == (cache / "proofs", cache / "rates")
    monkeypatch.setenv("HOME", "/h")
    assert user_cache() == Path("/h/.cache/fastpar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/fastpar")
