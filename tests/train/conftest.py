"""Where the trainer's tests run."""

import pytest
from train_runs import Made, in_folder, make_text


@pytest.fixture
def here(tmp_path):
    """A folder with text.txt and texts/, to run in."""
    make_text(tmp_path)
    with in_folder(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(ranks, ...): the folder of a run, made once for all tests of the module."""
    return Made(tmp_path_factory.mktemp("made"))
