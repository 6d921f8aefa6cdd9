"""Where the trainer's tests run."""

import pytest
from train_runs import make_text

from fastpar.train import journal


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with a text, to run in. No pictures: one takes longer than a short run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(journal, "plot_loss", lambda rows, path, title: path.touch())
    make_text(tmp_path)
    return tmp_path


@pytest.fixture
def texts(here):
    """A folder of documents, some longer than others."""
    (here / "texts").mkdir()
    for i, text in enumerate((here / "text.txt").read_text().split("\n")[:90]):
        (here / "texts" / f"{i}.txt").write_text(text * (1 + i % 4 // 3))
