"""Who listens on which address, from Linux's tables of sockets."""

import contextlib
import ipaddress
import os
from pathlib import Path

LISTENS = "0A"


def listening(text, inodes=None):
    """The (address, port) of sockets in the text of /proc/net/tcp and tcp6 that listen."""
    found = set()
    for line in text.splitlines():
        _, local, _, state, *more = line.split()
        if state != LISTENS or (inodes is not None and more[5] not in inodes):
            continue
        host, port = local.split(":")
        words = bytes.fromhex(host)  # each four bytes in the machine's order
        raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
        address = ipaddress.ip_address(raw)
        mapped = getattr(address, "ipv4_mapped", None)
        found.add((str(mapped or address), int(port, 16)))
    return found


def of_processes(*pids):
    """The (address, port) on which these processes listen."""
    found = set()
    for pid in pids:
        links = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(path))
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
        for table in filter(Path.exists, tables):
            found |= listening(table.read_text(), inodes)
    return found
