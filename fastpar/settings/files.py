"""A setting by its flag, from files, and as text: what config.py needs to read one.

Nothing here knows which settings there are.
"""

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

# Errors of a path that a user can set right; others are the machine's.
WRONG_PATH = {
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def option(name: str, value: Any = None) -> str:
    """The flag of a setting, which may set it to False: max_steps -> --max-steps."""
    name = "zero" if name == "zero_stage" else name
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def check_at_least(
    who: str, values: Mapping[str, Any], lowest: Mapping[str, float], advice: str | None = None
) -> None:
    """Refuse numbers below the lowest that make sense, and infinite ones; None is not set."""
    for name, low in lowest.items():
        value = values[name]
        if value is not None and not low <= value < math.inf:
            raise ValueError(
                f"{who}: expected {name} >= {low}, got {name}={value}; "
                f"{advice or 'set ' + option(name)}"
            )


_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a TOML file or the config.json of a run sets; TrainConfig.replace checks it.

    Settings may stand under headings, as [model] or [train]: these are for the reader alone.

    Raises:
        ValueError: no such file, or not in its format; a setting under two headings.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return dict(json.loads(text)["settings"])
        return _without_headings(importlib.import_module(_TOML).loads(text))
    except OSError as error:
        raise ValueError(
            f"read_settings: expected a file of settings, got path={path}; {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:  # TOMLDecodeError is a ValueError
        raise ValueError(
            f"read_settings: expected TOML or the config.json of a run, got path={path}; "
            f"it does not read: {error}"
        ) from None


def _without_headings(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        for key, setting in value.items() if isinstance(value, dict) else [(name, value)]:
            if key in found:
                raise ValueError(f"{key} stands in it twice, also under [{name}]")
            found[key] = setting
    return found


def parse_seconds(text: str) -> float:
    """Seconds of a time such as 300, 300s, 5m, 1h30m or 1.5h; 0 for what is none."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if "".join(number + unit for number, unit in parts) != text:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0
    return sum(float(number) * units[unit] for number, unit in parts)
