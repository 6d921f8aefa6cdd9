"""Reading settings: flags' names, settings files, durations. Independent of which settings
exist."""

from __future__ import annotations

import errno
import importlib
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Errors of a path that the user can correct; others are the machine's.
WRONG_PATH = {
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def option(name: str, value: Any = None) -> str:
    """The flag of a setting: max_steps -> --max-steps; with value False: --no-NAME."""
    name = "zero" if name == "zero_stage" else name
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def check_at_least(who: str, values: Mapping[str, Any], lowest: Mapping[str, float]) -> None:
    """Raise ValueError for numbers below `lowest` and infinite ones; None is allowed."""
    for name, low in lowest.items():
        value = values[name]
        if value is not None and not low <= value < math.inf:
            raise ValueError(
                f"{who}: expected {name} >= {low}, got {name}={value}; set {option(name)}"
            )


_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file or a run's config.json, unchecked.

    Headings such as [model] are allowed and ignored.

    Raises:
        ValueError: no such file, a wrong format, or a setting under two headings.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = json.loads(text)
            if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
                raise ValueError('it has no object "settings"')
            return dict(content["settings"])
        return _without_headings(importlib.import_module(_TOML).loads(text))
    except OSError as error:
        raise ValueError(
            f"read_settings: expected a settings file, got path={path}; {error.strerror}"
        ) from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ValueError(
            f"read_settings: expected TOML or the config.json of a run, got path={path}; "
            f"correct it: {error}"
        ) from None


def _without_headings(content: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in content.items():
        for key, setting in value.items() if isinstance(value, dict) else [(name, value)]:
            if key in settings:
                raise ValueError(f"{key} is set twice, the second time under [{name}]")
            settings[key] = setting
    return settings


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as 300, 300s, 5m, 1h30m or 1.5h; 0 if it is invalid."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if "".join(number + unit for number, unit in parts) != text:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0
    return sum(float(number) * units[unit] for number, unit in parts)
