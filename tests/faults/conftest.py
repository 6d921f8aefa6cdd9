"""Where runs of real processes run, and what starts them."""

import pytest
from fault_runs import Commands, enter


@pytest.fixture
def here(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)


@pytest.fixture
def start():
    commands = Commands()
    yield commands
    commands.close()
