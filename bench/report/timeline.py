"""The timeline of bench_overlap.py: a panel for each ZeRO stage, and the file it is drawn from.

What a bar is: fastpar/comm/recorder.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.records import machine_line
from fastpar.comm.recorder import Span
from fastpar.profile.timeline_picture import draw


def save(
    panels: Mapping[str, Sequence[Span]], about: dict[str, Any], line: str, folder: Path
) -> None:
    """timeline.json in folder, and the picture of it.

    Args:
        line: what was run, on which link.
    """
    steps = {
        variant: [[v if isinstance(v, str) else round(v, 2) for v in asdict(s).values()] for s in p]
        for variant, p in panels.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for variant, spans in steps.items():
        lines = ",\n".join(map(json.dumps, spans))
        parts.append(f"{json.dumps(variant)}: [\n{lines}]")
    body = ",\n".join(parts)
    head = json.dumps({"machine": about, "line": line})[:-1]
    (folder / "timeline.json").write_text(f'{head}, "steps": {{\n{body}\n}}}}\n')
    redraw(folder)


def redraw(folder: Path) -> Path:
    """The picture of what save() wrote."""
    stored = json.loads((folder / "timeline.json").read_text())
    panels = {variant: [Span(*s) for s in spans] for variant, spans in stored["steps"].items()}
    path = folder / "timeline.png"
    draw(panels, [stored["line"], machine_line(stored["machine"])], path)
    return path
