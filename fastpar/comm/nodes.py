"""Ranks on several machines: the environment of srun and mpirun, and the network interface.

[Note: who may connect] Whoever reaches the ranks' store can read and change all that it holds, and
torch opens it on all interfaces. So the store is given a socket that listens on one address only:
the loopback address if all ranks are on this machine, else that on which the other machines reach
rank 0. torchrun makes its own store, on all interfaces of the first machine. Ranks exchange values
as JSON, never pickles (mesh.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import re
import socket
import struct
import zlib
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"


def adopt_scheduler(environment: MutableMapping[str, str]) -> None:
    """Set the variables of torchrun for ranks that srun or mpirun started.

    Does nothing under torchrun, for one task, and inside salloc or sbatch without srun.

    Raises:
        ValueError: several machines, and the environment does not name that of rank 0.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return
    scheduler = next(
        (names for names in _SCHEDULERS if all(n in environment for n in names[1:3])), None
    )
    if scheduler is None or not int(environment[scheduler[2]]) > 1:
        return
    who, rank, size, local, here = scheduler
    own = {"RANK": environment[rank], "WORLD_SIZE": environment[size]}
    own["LOCAL_RANK"] = environment.get(local, "0")
    ranks_here = environment.get(here, "1")
    if who == "srun":  # "4(x2),2": tasks of each node
        runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", ranks_here)
        nodes = [n for n, times in runs for _ in range(int(times or 1))]
        ranks_here = nodes[min(int(environment.get("SLURM_NODEID", "0")), len(nodes) - 1)]
    own["LOCAL_WORLD_SIZE"] = ranks_here
    if "MASTER_ADDR" not in environment:
        first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", environment.get(_NODES, ""))
        if first and who == "srun":
            own["MASTER_ADDR"] = "".join(part or "" for part in first.groups())
        elif ranks_here == environment[size]:
            own["MASTER_ADDR"] = LOOPBACK
        else:
            raise ValueError(
                f"fastpar: {who} started {environment[size]} ranks on several machines, but the "
                "address of rank 0 is unknown; set MASTER_ADDR to its host and MASTER_PORT to a "
                "free port for all ranks (Open MPI: mpirun -x MASTER_ADDR=HOST -x "
                "MASTER_PORT=29500 ...), or start torchrun once on each machine"
            )
    if "MASTER_PORT" not in environment:  # equal on all ranks, different for another job
        job = " ".join(environment.get(name, "") for name in _JOBS)
        own["MASTER_PORT"] = str(20000 + zlib.crc32(job.encode()) % 10000)
    environment.update(own)


_NODES = "SLURM_STEP_NODELIST"
_JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
# (starter, variables: rank, number of ranks, local rank, local number of ranks). salloc sets
# SLURM_NTASKS and SLURM_PROCID in every shell; only srun sets SLURM_STEP_NUM_TASKS.
_SCHEDULERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    (
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def serve_store(host: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> Any:
    """The TCPStore of all ranks, which listens only where `host` is; see [Note: who may connect].

    Args:
        port: 0: any free one, which the store's attribute `port` names.
    """
    import torch.distributed as dist

    listening = listen(host, port)
    address, port = listening.getsockname()[:2]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address of a host name of this machine, on no other one.

    Behind an address that is translated, such as a service's in a cluster, it listens on the
    address from which this machine would connect to it.
    """
    last: OSError | None = None
    for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        for address in (str(place[0]), _own_end(str(place[0]))):
            listening = socket.socket(family, kind)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((address, *place[1:]))
                listening.listen()
                return listening
            except OSError as error:
                listening.close()
                last = error
                if error.errno != errno.EADDRNOTAVAIL:
                    break
    raise last or OSError(f"{host} has no address")


def host_of_store(master: str, interface: str | None) -> str:
    """Where ranks of this machine reach the store of rank 0, if others are on other machines.

    A name that is a loopback address here (Debian's 127.0.1.1) names this machine; the other
    machines reach it on the interface of its ranks.
    """
    if not any(ipaddress.ip_address(address).is_loopback for address in _resolve(master)):
        return master
    names = (interface or "").split(",")
    addresses = [address for address, name in _addresses().items() if name in names]
    return next(iter(addresses or _resolve(socket.gethostname())), master)


def loopback() -> str | None:
    """The name of the loopback interface; None if it has another one than Linux gives it."""
    return next((name for _, name in socket.if_nameindex() if name == "lo"), None)


def _resolve(host: str) -> list[str]:
    """The addresses of a host name; none if it is unknown."""
    with contextlib.suppress(OSError):
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)]
    return []


def _own_end(address: str) -> str | None:
    """The address of this machine from which it would connect to another one."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing, only looks up the route
        return str(probe.getsockname()[0])
    return None


def interface_of_peers(master: str) -> str | None:
    """The network interface on which ranks of other machines reach this one.

    None: the host name has a non-loopback address, which gloo then uses.

    Raises:
        ValueError: the host name has a loopback address, and there are several interfaces.
    """

    name = socket.gethostname()
    own = _resolve(name)
    if own and not ipaddress.ip_address(own[0]).is_loopback:
        return None
    interfaces = _addresses()
    for address in _resolve(master):
        if (interface := interfaces.get(_own_end(address) or "")) is not None:
            return interface
    others = sorted(set(interfaces.values()))
    if len(others) == 1:
        return others[0]
    raise ValueError(
        f"Mesh: the host name {name} is {own[0] if own else 'no address'} in /etc/hosts or DNS, "
        "where other machines cannot reach it; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to "
        f"the interface of the ranks' network ({', '.join(others)}), or correct /etc/hosts"
    )


def _addresses() -> dict[str, str]:
    """Address -> interface, without loopback addresses (Linux)."""
    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                interfaces[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            interfaces[str(ipaddress.IPv6Address(int(address, 16)))] = name
    return {a: name for a, name in interfaces.items() if not ipaddress.ip_address(a).is_loopback}


def plain_words(error: BaseException) -> str:
    """An error's text without what gloo adds to it: a place in its source, advice, a smiley."""
    return _OF_GLOO.sub("", str(error))


_OF_GLOO = re.compile(
    r"\[\S*/gloo/\S+\] |\. This is typically caused by [^\n]*?GLHF!(?: [^\x00-\x7f]+)?"
)
