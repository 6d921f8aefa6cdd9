"""The groups of settings: every setting has help, and the defaults pass their own checks."""

import inspect
import re
from dataclasses import is_dataclass
from typing import get_type_hints

from fastpar.settings.config import TrainConfig
from fastpar.settings.options import FaultSettings, TrainFlags


def test_every_setting_has_a_default_and_help():
    groups = list(get_type_hints(TrainFlags).values())
    for group in groups:
        source = "".join(inspect.getsource(part) for part in group.__mro__[:-1])
        for name, hint in get_type_hints(group).items():
            if is_dataclass(hint):
                groups.append(hint)
            else:
                assert re.search(rf'    {name}: [^\n]+ = [^\n]+\n    """[^"]+', source), name


def test_the_defaults_are_a_run():
    config = TrainConfig()
    assert vars(config) == vars(TrainFlags())
    assert TrainConfig().replace(config.settings()) == config


def test_by_default_a_run_saves_aside_and_stops_at_bad_numbers():
    faults = FaultSettings()
    assert (faults.async_save, faults.save_overlap) == (True, "wait")
    assert faults.on_nonfinite == "stop"
    assert (faults.check_replicas_every, faults.max_restarts, faults.timeout) == (0, 0, "30m")
