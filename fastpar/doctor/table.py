"""The proofs of a machine, in one file per device and set of versions.

The file is in fastpar/proofs of the user's cache (or in FASTPAR_PROOFS). It is validated like any
untrusted file and replaced as a whole; a lock lets one process prove at a time. If it cannot be
written, a warning says so once and the proofs last as long as the process. A proof is left out if
the sources of its op changed (sources.py).

[Note: shipped] A table that ships with the package (shipped/, measured by bench/gpu.sh) saves the
trials on that GPU with the same releases of fastpar, torch and Triton, whose compiler makes the
kernels. The driver and who compiled csrc/ may differ; in a checkout csrc/ itself may not.

[Note: a trial that ends the process] The case under trial is recorded first. If a process ended
during it, the next one makes the trial in a process of its own (trial.prove_apart): a crash there
is the kernel's, while time limits and lack of memory end processes of right kernels too. This needs
the lock: without it another host that shares the folder may be running the same trial.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastpar._version import __version__
from fastpar.doctor.sources import digest_of
from fastpar.files.plain_files import (
    parse_object,
    read_plain,
    reason,
    shown,
    user_cache,
    write_text,
)
from fastpar.kernels import _C, nodes
from fastpar.kernels.attention.peers import PEERS
from fastpar.kernels.choice import OWN, STOCK, Case, PeerProof, Proof

FOLDER = "FASTPAR_PROOFS"  # environment: another folder
VERSION = 4
SHIPPED = Path(__file__).with_name("shipped")
MOST_BYTES, MOST_LETTERS = 1 << 20, 1000  # of a file; of the reason why a kernel is wrong


def proofs_folder() -> Path:
    """Where tables are kept: FASTPAR_PROOFS, or fastpar/proofs in the user's cache."""
    named = os.environ.get(FOLDER)
    return Path(named).expanduser() if named else user_cache() / "proofs"


@functools.cache
def environment(device: str) -> dict[str, str]:
    """What a proof is valid for: the device's name, and the versions of all that computes."""
    about = {"fastpar": __version__, "torch": torch.__version__}
    # Which build of csrc/ is installed, by what it holds: a copy is the same.
    about["module"] = "none" if _C is None else _digest(Path(_C.__file__))
    about["ops"] = _digest(*([nodes] if nodes is not None else []))
    about["csrc"] = _digest(*Path(__file__).resolve().parents[2].glob("csrc/**/*.*"))  # a checkout
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
        about["driver"] = _driver()
        with contextlib.suppress(metadata.PackageNotFoundError):
            about["triton"] = metadata.version("triton")
    else:
        about["device"] = f"CPU {cpu_name()}, {torch.get_num_threads()} threads"
        about["kernels"] = _C.isa() if _C is not None else "no compiled module"
    return about


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8] if files else "none"


def cpu_name() -> str:
    """This machine's processor, as the system names it."""
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+[.\d]*)\s", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    return "unknown"  # a container without that file


def _versions(about: dict[str, str]) -> dict[str, str]:
    """All but which build of csrc/ it is."""
    return {name: value for name, value in about.items() if name not in ("module", "csrc")}


def _releases(about: dict[str, str]) -> dict[str, str]:
    """What a shipped table is valid for; see [Note: shipped]."""
    kept = {name: about.get(name, "") for name in ("device", "fastpar", "torch", "triton")}
    return {**kept, "torch": kept["torch"].partition("+")[0]}


def _name(about: dict[str, str]) -> str:
    device = re.sub(r"[^A-Za-z0-9]+", "-", about["device"]).strip("-").lower()
    text = json.dumps(about, sort_keys=True)
    return f"{device}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def file_name(about: dict[str, str]) -> str:
    """The name of a table's file: the device, and a digest of all versions but csrc's build."""
    return _name(_versions(about))


def shipped_name(about: dict[str, str]) -> str:
    """The same of a table that ships."""
    return _name(_releases(about))


def row_of(case: Case, proof: Proof) -> dict[str, Any]:
    """A proof as a JSON object."""
    where = {"op": case.op, "dtype": str(case.dtype).removeprefix("torch."), "size": case.size}
    where["sources"] = digest_of(case.op)
    return where | proof._asdict() | {"peers": [peer._asdict() for peer in proof.peers]}


def parse_proofs(device: str, content: Any) -> dict[Case, Proof]:
    """The proofs in a file's content, without those of ops whose sources changed; raises
    ValueError, KeyError, ... if it is malformed."""
    found = {}
    for row in content["proofs"]:
        case = Case(device, row["op"], getattr(torch, row["dtype"]), row["size"])
        times = {name: _two_times(row[name]) for name in Proof._fields if name.endswith("_ms")}
        peers = tuple(PeerProof(**p)._replace(ms=_two_times(p["ms"])) for p in row["peers"])
        forward, backward = row["serves"]
        texts = [row["wrong"], *(text for peer in peers for text in (peer.name, peer.wrong))]
        if not (
            all(isinstance(t, str) and len(t) <= MOST_LETTERS and t.isprintable() for t in texts)
            and (isinstance(case.op, str) and isinstance(case.size, int))
            and (isinstance(case.dtype, torch.dtype) and row["chosen"] in (OWN, STOCK))
            and isinstance(row["stock_right"], bool)
            and {forward, backward} <= {OWN, *PEERS}
        ):
            raise ValueError(shown(row))
        if row["sources"] == digest_of(case.op):
            found[case] = Proof(
                row["chosen"], row["wrong"], **times, serves=(forward, backward), peers=peers,
                stock_right=row["stock_right"],
            )  # fmt: skip
    return found


def _two_times(ms: Any) -> tuple[float, float]:
    forward, backward = map(float, ms)
    if not (0 <= forward < math.inf and 0 <= backward < math.inf):
        raise ValueError(f"times {shown(ms)}")
    return forward, backward


class ProofTable:
    """The proofs of one device, in memory and in its file.

    Attributes:
        device: "cpu" | "cuda".
        path: the file.
        proofs: all known proofs.
        source: the file that they were read from; None: no file.
        about: what they are valid for, see environment().
    """

    def __init__(self, device: str) -> None:
        self.device, self.about = device, environment(device)
        self.path = proofs_folder() / file_name(self.about)
        self.proofs: dict[Case, Proof] = {}
        self.source: Path | None = None
        self._tried: set[str] = set()  # cases whose trials began and did not end
        self._warned = self._is_locked = False
        self._load(SHIPPED / shipped_name(self.about))
        self._load(self.path)

    def _warn(self, text: str) -> None:
        """A warning; only the first."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"proofs of this machine{text}", stacklevel=2)

    def _load(self, path: Path) -> bool:
        """Reads a file's proofs, if it exists and is for this environment."""
        try:
            content = parse_object(read_plain(path, MOST_BYTES))
            about, here = dict(content["about"]), self.about
            ships = path.parent == SHIPPED
            same = _releases if ships else _versions
            if content["version"] != VERSION or same(about) != same(here):
                raise ValueError("it is for another version or machine")
            build = "csrc" if ships else "module"
            if about[build] != here[build] and not (ships and here[build] == "none"):
                return False  # of another checkout, or before a new build: replaced
            proofs = parse_proofs(self.device, content)
            tried = set(content["tried"])
            if not all(isinstance(case, str) for case in tried):
                raise ValueError(f"tried: {shown(tried)}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._warn(f": ignored {path.name} in {self.path.parent} ({reason(error)})")
            return False
        self.source, self.proofs = path, self.proofs | proofs
        self._tried = tried
        return True

    def save(self) -> None:
        """Replaces the file; warns once if that fails."""
        rows = [row_of(case, proof) for case, proof in self.proofs.items()]
        content = {"version": VERSION, "about": self.about, "proofs": rows}
        content["tried"] = sorted(self._tried)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._warn(
                f" could not be saved ({error}); the next process makes them again; make "
                f"{self.path.parent} writable, or set {FOLDER} to another folder"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process prove at a time; first reads what others have proven meanwhile."""
        descriptor, flags = None, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.suppress(OSError):  # a folder or file system without locks
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path.with_suffix(".lock"), flags, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._is_locked = True
        try:
            self._load(self.path)
            yield
        finally:
            self._is_locked = False
            if descriptor is not None:
                os.close(descriptor)

    @contextlib.contextmanager
    def trial(self, case: Case) -> Iterator[bool]:
        """Around a trial: whether a process ended during it; see [Note: a trial that ends ...]."""
        name = str(case)
        ended = name in self._tried
        if self._is_locked:
            self._tried.add(name)
            self.save()
        try:
            yield ended
        finally:
            self._tried.discard(name)
            self.save()
