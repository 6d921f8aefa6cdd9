"""manifest.json: what a checkpoint consists of, with a checksum of every byte.

    step      optimizer steps done
    files     name -> size and SHA-256; of files with tensors only the header is under the latter
    weights   tensors of model*.safetensors, whole, as transformers has them
    optimizer tensors of optimizer-*.safetensors, pieces: PARAMETER/ENTRY, whole shape, runs

A piece is described by its parameter's name and by global indices (ranges.py), never by a rank, so
a reader puts together what it needs of whatever mesh has written. The manifest carries a digest of
itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastpar.ranges import Run

FORMAT = "fastpar-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
STATE = "trainer_state.json"


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    sha256: str  # of the first `head` bytes
    head: int  # size, or of a file with tensors: where their data begin


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: a whole one, or a piece."""

    file: str
    key: str  # its name in the file; of the optimizer's: PARAMETER/ENTRY
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]  # of the whole tensor
    runs: tuple[Run, ...]  # what the file has of it
    sha256: str  # of its bytes in the file


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint, or one rank's part of it, consists of."""

    step: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    weights: tuple[TensorEntry, ...] = ()
    optimizer: tuple[TensorEntry, ...] = ()

    @staticmethod
    def join(parts: Sequence[Manifest]) -> Manifest:
        """Of the ranks' parts of one checkpoint."""
        return Manifest(
            parts[0].step,
            {name: entry for part in parts for name, entry in part.files.items()},
            tuple(t for part in parts for t in part.weights),
            tuple(t for part in parts for t in part.optimizer),
        )

    def sealed(self) -> bytes:
        """The manifest's file: the content and its digest."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(content)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f'{text[:-1]}, "digest": "{digest}"}}\n'.encode()


def read_manifest(folder: str | Path, name: str = MANIFEST) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: there is none, it is damaged, or it does not make sense.
    """
    raw: dict[str, Any] = json.loads((Path(folder) / name).read_bytes())
    return Manifest(
        raw["step"],
        {key: FileEntry(**entry) for key, entry in raw["files"].items()},
        *(
            tuple(
                TensorEntry(
                    **{
                        **t,
                        "shape": tuple(t["shape"]),
                        "runs": tuple(Run(*run) for run in t["runs"]),
                    }
                )
                for t in raw[kind]
            )
            for kind in ("weights", "optimizer")
        ),
    )
