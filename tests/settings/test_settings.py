"""Settings from files and words: times, TOML, types."""

import pytest

from fastpar.settings.config import TrainConfig
from fastpar.settings.files import parse_seconds, read_settings


def test_times():
    assert [parse_seconds(t) for t in ("300", "300s", "5m", "1h30m", "1.5h")] == [
        300, 300, 300, 5400, 5400,
    ]  # fmt: skip
    for text in ("", "0", "0s", "m", "5x", "5m and", "1e3", "-3s"):
        assert parse_seconds(text) == 0, text


def test_headings_are_for_the_reader(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('lr = 0.1\n[model]\nmodel = "gpt2"\n[train]\nmax-steps = 7\n')
    config = TrainConfig().replace(read_settings(file))
    assert (config.optim.lr, config.shape.model, config.run.max_steps) == (0.1, "gpt2", 7)
    file.write_text("lr = 0.1\n[optim]\nlr = 0.2\n")
    with pytest.raises(ValueError, match=r"not read: lr stands in it twice, also under \[optim\]"):
        read_settings(file)
    file.write_text("[optim]\nlearning = 0.2\n")
    with pytest.raises(ValueError, match="got key=learning"):
        TrainConfig().replace(read_settings(file))


def test_settings_files(tmp_path):
    toml, json = tmp_path / "a.toml", tmp_path / "config.json"
    toml.write_text('lr = 3e-4\nmodel = "gpt2"\nbetas = [0.9, 0.99]\n')
    json.write_text('{"settings": {"lr": 0.1}, "versions": {}}')
    assert TrainConfig().replace(read_settings(toml)).optim.lr == 3e-4
    assert read_settings(json) == {"lr": 0.1}
    with pytest.raises(ValueError, match=r"read_settings: expected a file of settings, got path="):
        read_settings(tmp_path / "none.toml")
    for path in (toml, json):
        path.write_text("lr = = 3")
        with pytest.raises(
            ValueError, match=r"expected TOML or the config.json of a run, got path"
        ):
            read_settings(path)
