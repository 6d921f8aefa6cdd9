"""Runs mypy on the package as it is installed: kernels/ under fastpar/, outside the checkout.

In the checkout mypy would skip the mapped kernels/ silently; the count of checked files is
asserted here.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as tmp:
        package = Path(tmp) / "fastpar"
        ignore = shutil.ignore_patterns("*.so", "__pycache__", "results", "examples")
        shutil.copytree(ROOT / "fastpar", package, ignore=ignore)
        shutil.copytree(ROOT / "kernels", package / "kernels", ignore=ignore)
        shutil.copytree(ROOT / "bench", Path(tmp) / "bench", ignore=ignore)
        files = [*package.rglob("*.py"), *(Path(tmp) / "bench").rglob("*.py")]
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "mypy",
                "--config-file",
                str(ROOT / "pyproject.toml"),
                "-p",
                "fastpar",
                "-p",
                "bench",
            ],
            cwd=tmp,
            capture_output=True,
            text=True,
        )
        print(run.stdout + run.stderr, end="")
        found = re.search(r"(?:in|checked) (\d+) source files", run.stdout)
        if run.returncode == 0 and (not found or int(found[1]) != len(files)):
            print(f"types: expected {len(files)} files checked, got {found and found[1]}")
            return 1
        return run.returncode


if __name__ == "__main__":
    sys.exit(main())
