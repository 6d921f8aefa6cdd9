"""Network namespaces joined by a link of a chosen rate, and ranks that run one in each.

Ranks of one host share its memory or its loopback device, where bytes cost next to nothing. Here
rank 0 and rank 1 see only their own end of a veth pair, which a token bucket (`tc tbf`) holds to a
rate in both directions: what they send takes as long as between two hosts, and the two share
nothing but the cores.

[Note: what is left behind] Nothing. The namespaces have no names: one exists while a process is in
it, and takes its end of the veth pair along. A holder ends when its standard input does, which is
when the process that started it ends, however that came about; a rank ends with its parent too.
Nothing outside of the two namespaces is touched.
"""

import contextlib
import itertools
import os
import pkgutil
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastpar.comm import ranks as comm
from fastpar.comm.mesh import initialize

DEVICE, ADDRESSES = "fastpar0", ("10.211.7.1", "10.211.7.2")
TOOLS = ("unshare", "nsenter", "ip", "tc", "cat")
PROBE_BYTES = 25 << 20
_PORTS = itertools.count(29500)  # of the ranks' stores; a fresh namespace has all of them free


class NoLinkError(RuntimeError):
    """This machine does not let us make a link; the text says why, in one line."""


class Link(contextlib.AbstractContextManager["Link"]):
    """A veth pair between two namespaces, each end sending at most `mbit` Mbit/s. Made as root, or
    in a user namespace where that is allowed.

    Raises:
        ValueError: a rate that is not positive.
        NoLinkError: a tool is missing, or the system permits no network namespaces.
    """

    def __init__(self, mbit: float) -> None:
        if not mbit > 0:
            raise ValueError(f"Link: expected mbit > 0, got mbit={mbit}; give a rate in Mbit/s")
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoLinkError(
                f"Link: expected the tools {', '.join(TOOLS)}, got no {', '.join(missing)}; "
                "install iproute2 and util-linux"
            )
        self._holders: list[Any] = []
        refusals = []
        for in_user_namespace in (False, True):
            self._flags = ["-U", "--preserve-credentials"] if in_user_namespace else []
            try:
                self._make(in_user_namespace, mbit)
                return
            except NoLinkError as error:
                self.close()
                how = "in a user namespace" if in_user_namespace else "as this user"
                refusals.append(f"{how}: {error}")
        raise NoLinkError(
            "Link: expected network namespaces to be permitted, got "
            f"{'; '.join(refusals)}; run as root or allow user namespaces"
        )

    def _make(self, in_user_namespace: bool, mbit: float) -> None:
        """The namespaces (the second within the first one's user namespace), then the pair."""
        for rank in range(2):
            command = ["unshare", "--net"]
            if in_user_namespace:
                command = self.enter(0, *command) if rank else [*command, "--map-root-user"]
            self._holders.append(_hold(command))
        self._run(0, "ip", "link", "add", DEVICE, "type", "veth",
                  "peer", "name", DEVICE, "netns", str(self._holders[1].pid))  # fmt: skip
        for rank, address in enumerate(ADDRESSES):
            self._run(rank, "ip", "addr", "add", f"{address}/24", "dev", DEVICE)
            self._run(rank, "ip", "link", "set", "lo", "up")
            self._run(rank, "ip", "link", "set", DEVICE, "up")
        self.set_rate(mbit)

    def set_rate(self, mbit: float) -> None:
        """Change the rate of both directions."""
        bucket = f"tbf rate {mbit * 1e6:.0f}bit burst 256kb latency 50ms".split()
        for rank in range(2):
            self._run(rank, "tc", "qdisc", "replace", "dev", DEVICE, "root", *bucket)
        self.mbit = mbit

    def enter(self, rank: int, *command: str) -> list[str]:
        """The command line that runs a command in the namespace of a rank."""
        return ["nsenter", "-t", str(self._holders[rank].pid), "-n", *self._flags, *command]

    def sent_bytes(self) -> list[int]:
        """What each end has sent since the link was made, headers included."""
        counts = []
        for rank in range(2):
            table = self._run(rank, "cat", "/proc/net/dev")
            line = next(line for line in table.splitlines() if DEVICE in line)
            counts.append(int(line.partition(":")[2].split()[8]))
        return counts

    def environment(self, port: int) -> dict[str, str]:
        """What differs for ranks of several hosts: rank 0 has the store, gloo another interface."""
        return {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GLOO_SOCKET_IFNAME": DEVICE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # the addresses have no names: no warning for each
        }

    def close(self) -> None:
        """End the holders: a namespace vanishes with the last process in it."""
        for holder in self._holders:
            holder.stdin.close()
            holder.stdout.close()
            holder.wait()
        self._holders.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, rank: int, *command: str) -> str:
        done = subprocess.run(self.enter(rank, *command), capture_output=True, text=True)
        if done.returncode:
            words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise NoLinkError(f"{' '.join(command[:3])}: {words}")
        return done.stdout


def _hold(command: Sequence[str]) -> subprocess.Popen:
    """Start a process that stays in new namespaces until its standard input ends."""
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    stays = [*command, "sh", "-c", "echo ready && exec cat"]
    holder: Any = subprocess.Popen(stays, text=True, **pipes)
    if holder.stdout.readline() != "ready\n":
        words = " ".join(holder.stderr.read().split())
        holder.stdin.close()
        holder.wait()
        raise NoLinkError(words or f"{command[0]}: exit code {holder.returncode}")
    holder.stderr.close()
    return holder


class Ranks(comm.Ranks):
    """Ranks that hold an object each, whose methods are called from here.

    Args:
        link: one process in each of its namespaces; None: all on this host.
        target: "module:Class"; each rank builds Class(*args) with torchrun's environment set.
        ranks, threads: without a link, so many of so many threads each.
        timeout_s: for building it.
    """

    def __init__(
        self, link: Link | None, target: str, *args: Any, ranks: int = 1, threads: int = 1,
        timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        place, port = None, next(_PORTS)
        if link is not None:
            ranks = 2

            def place(rank: int, command: list[str]) -> tuple[list[str], dict[str, str]]:
                return link.enter(rank, *command), link.environment(port)

        super().__init__(ranks, threads=threads, place=place)
        self.call(_build, target, args, timeout_s=timeout_s)

    def ask(self, method: str, *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """The answers of all ranks, which run the method at the same time. One that fails ends all,
        and is RankFailed here."""
        return self.call(_ask, method, args, timeout_s=timeout_s)


_held: list[Any] = []  # in a rank's process


def _build(rank: comm.Rank, target: str, args: tuple) -> None:
    _held.append(pkgutil.resolve_name(target)(*args))


def _ask(rank: comm.Rank, method: str, args: tuple) -> Any:
    return getattr(_held[0], method)(*args)


class Probe:
    """Measures the link it is on by bare all-reduces."""

    def __init__(self) -> None:
        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        initialize(rank, world_size, torch.device("cpu"), 600.0)

    def all_reduce_ms(self, rounds: int, size_bytes: int = PROBE_BYTES) -> list[float]:
        x = torch.randn(size_bytes // 4)
        samples = []
        for index in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(x)
            if index:  # the first one makes the connections fast
                samples.append((time.perf_counter() - start) * 1e3)
        return samples


def all_reduce_ms(link: Link, rounds: int = 5, size_bytes: int = PROBE_BYTES) -> list[float]:
    """The slower rank's time of each bare all-reduce; 2 ranks send size_bytes each."""
    with Ranks(link, "bench.systems.links:Probe") as ranks:
        return [max(both) for both in zip(*ranks.ask("all_reduce_ms", rounds, size_bytes))]
