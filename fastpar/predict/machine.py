"""What numbers were measured on: machine, versions, commit; nothing that names a user or a path."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from fastpar._version import __version__
from fastpar.comm.host import available_cores
from fastpar.doctor.table import cpu_name


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with + if it was changed; or None."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "csrc").is_dir() or not (root / "fastpar").is_dir():  # installed elsewhere
        return os.environ.get("FASTPAR_COMMIT")
    git = ["git", "-C", str(root), "-c", "safe.directory=*"]
    try:
        head = _output([*git, "rev-parse", "--short=12", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "--", "fastpar", "kernels", "csrc"])
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("FASTPAR_COMMIT")
    return head + "+" * bool(changed)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def about_machine(device: str) -> dict[str, Any]:
    """device (its name), cores, system, date, commit, and versions of what computes."""
    import torch

    name = f"CPU: {cpu_name()}, {available_cores()} cores"
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return {
        "device": name,
        "cores": available_cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "deepspeed": version_of("deepspeed"),
        "fastpar": __version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
