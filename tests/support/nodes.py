"""Emulates the machines of a cluster: namespaces with their own network, name and mounts."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from fault_runs import SETTINGS

from bench.systems.links import ADDRESSES, DEVICE, Link

HEAD = ADDRESSES[0]


class Nodes:
    """n machines that reach each other; processes that still run at the end are killed.

    hosts: of each node, lines of its /etc/hosts.
    """

    def __init__(self, n, folder, hosts=()):
        self.link, self.folder, self.started = Link(1000, n), Path(folder), []
        for i in range(n):
            theirs = hosts[i] if hosts else [f"{a} node{j}" for j, a in enumerate(ADDRESSES[:n])]
            lines = ["127.0.0.1 localhost", *theirs]
            Path(folder, f"hosts{i}").write_text("\n".join(lines) + "\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            process.kill()
            process.communicate()
        self.link.close()

    def run(self, i, *command, before="true", **environment):
        """Start a command on node i; before: shell words to run there first, as mounts."""
        inside = (
            f"hostname node{i} && mount --bind {shlex.quote(str(self.folder / f'hosts{i}'))} "
            f"/etc/hosts && {before} && exec {shlex.join(map(str, command))}"
        )
        how = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            self.link.enter(i, *how, "sh", "-c", inside),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **environment},
        )  # fmt: skip
        self.started.append(process)
        return process

    def torchrun(self, i, *options, nodes="2", rdzv=(), **how):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
        command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
        command += ["--rdzv-endpoint", "node0:29400", *rdzv, "-m", "fastpar", *train(*options)]
        return self.run(i, *command, **how)

    def set_link(self, i, state):
        """Pull the cable of node i, or put it back: state is down or up."""
        self.link._run(i, "ip", "link", "set", DEVICE, state)


def train(*options):
    return ["train", *(f"--{name}={value}" for name, value in SETTINGS.items()), *options]


def ended(process, timeout_s=120):
    out, _ = process.communicate(timeout=timeout_s)
    return process.returncode, out


def stop(process, number=signal.SIGKILL):
    process.send_signal(number)
