"""Several machines as their operators run them: torchrun, srun and mpirun, disks, names, links.

The machines are namespaces of this one, where that is permitted.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from fault_runs import FASTPAR, TRAIN, enter, ranks_of, torchrun, wait_for
from sockets import listening, of_processes

from bench.systems.links import ADDRESSES, DEVICE, Link, NoLinkError
from fastpar.cli import main
from fastpar.comm import nodes as comm
from fastpar.comm.nodes import adopt_scheduler, host_of_store, interface_of_peers, listen
from fastpar.settings.options import TrainFlags
from fastpar.train.journal import read_metrics

ROOT = Path(__file__).parents[2]
ENDLESS = ("--max-steps=100000", "--save-every=20", "--out=r", "--timeout=30s", "--auto-resume")
SHORT = ("--max-steps=20", "--save-every=10", "--out=r", "--timeout=30s")

SLURM = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),3", "SLURM_STEP_NODELIST": "gpu-[007-008,011],login1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-17@1",
}  # fmt: skip
LOCAL = "OMPI_COMM_WORLD_LOCAL_SIZE"
HYDRA = {
    "PMI_ID": "1", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
}  # fmt: skip
MASTER = {"MASTER_ADDR": "a", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environment", "rank", "size", "local", "here", "address"),
    [
        (SLURM, 4, 5, 1, 3, "gpu-007"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n1,n2"}, 4, 5, 1, 3, "n1"),
        ({**SLURM, **MASTER}, 4, 5, 1, 3, "a"),
        ({**OPEN_MPI, **MASTER}, 3, 4, 1, 2, "a"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 3, 4, 1, 4, "127.0.0.1"),
        (HYDRA, 1, 2, 1, 2, "127.0.0.1"),
    ],
)
def test_ranks_of_a_scheduler(environment, rank, size, local, here, address):
    found = dict(environment)
    adopt_scheduler(found)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [int(found[name]) for name in names] == [rank, size, local, here]
    assert found["MASTER_ADDR"] == address
    first = dict.fromkeys(("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID"), "0")
    others = {**environment, **first}
    adopt_scheduler(others)
    assert others["MASTER_PORT"] == found["MASTER_PORT"]  # the same on all ranks


def test_other_environments_stay_and_several_machines_need_the_firsts_address(monkeypatch, capsys):
    for environment in (
        {},
        {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")},  # salloc
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun in a step
    ):
        found = dict(environment)
        adopt_scheduler(found)
        assert found == environment
    with pytest.raises(ValueError, match=r"set MASTER_ADDR to its host .* mpirun -x MASTER_ADDR"):
        adopt_scheduler(dict(OPEN_MPI))
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert main(["train"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "mpirun started 4 ranks on several machines, but the address of rank 0" in line


@pytest.mark.parametrize(
    ("own", "routed", "there", "expected"),
    [
        (["10.0.0.1"], "10.0.0.1", {"10.0.0.1": "eth0"}, None),
        (["127.0.1.1"], "10.0.0.1", {"10.0.0.1": "eth0", "10.9.0.1": "ib0"}, "eth0"),
        ([], "10.9.0.1", {"10.0.0.1": "eth0", "10.9.0.1": "ib0"}, "ib0"),
        (["127.0.1.1"], "127.0.0.1", {"10.0.0.1": "eth0", "fe80::1": "eth0"}, "eth0"),
        (["127.0.1.1"], "127.0.0.1", {"10.0.0.1": "eth0", "10.9.0.1": "ib0"}, "eth0, ib0"),
    ],
)
def test_a_host_whose_name_is_a_loopback_address(monkeypatch, own, routed, there, expected):
    """Debian's 127.0.1.1: the interface of the route to rank 0 is taken, or the one there is."""
    socket = mock.MagicMock()
    socket.return_value.__enter__.return_value.getsockname.return_value = routed, 1

    def addresses(host, port):
        found = own if host == "me" else [routed]
        if not found:
            raise OSError
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(comm.socket, "gethostname", lambda: "me")
    monkeypatch.setattr(comm.socket, "getaddrinfo", addresses)
    monkeypatch.setattr(comm.socket, "socket", socket)
    monkeypatch.setattr(comm, "_addresses", lambda: there)
    if expected is None or "," not in expected:
        assert interface_of_peers("master") == expected
    else:
        with pytest.raises(ValueError, match=rf"GLOO_SOCKET_IFNAME .* \({expected}\)"):
            interface_of_peers("master")


@pytest.mark.parametrize(
    ("master", "interface", "at"),
    [
        ("10.0.0.1", "eth0", "10.0.0.1"),
        ("127.0.1.1", "ib0", "10.9.0.1"),  # Debian: the host's own name
        ("127.0.1.1", "eth0,ib0", "10.0.0.1"),
        ("127.0.1.1", None, "10.0.0.7"),  # what peers know of it by its name
    ],
)
def test_where_the_store_is_if_ranks_are_on_several_machines(monkeypatch, master, interface, at):
    there = {"10.0.0.1": "eth0", "10.9.0.1": "ib0"}
    monkeypatch.setattr(comm, "_addresses", lambda: there)
    monkeypatch.setattr(comm, "_resolve", lambda host: [master if host == "m" else "10.0.0.7"])
    assert host_of_store("m", interface) == ("m" if master == at else at)


def test_a_socket_listens_on_one_address(monkeypatch):
    with listen("localhost", 0) as one:
        address, port = one.getsockname()[:2]
        assert address in ("127.0.0.1", "::1")
        with pytest.raises(OSError, match="in use"):
            listen(address, port)
    # An address that is not this machine's own, as that of a service in a cluster.
    monkeypatch.setattr(comm, "_own_end", lambda address: "127.0.0.5")
    with listen("203.0.113.9", 0) as behind:
        assert behind.getsockname()[0] == "127.0.0.5"


def test_no_flag_is_taken_for_one_of_torchruns():
    from torch.distributed.run import get_args_parser

    for name in TrainFlags().settings():
        flag = f"--{name.replace('_', '-')}"
        if flag != "--nproc":  # which torchrun has, and fastpar refuses there
            given = ["-m", "fastpar", "train", flag, "x"]
            assert get_args_parser().parse_args(given).training_script_args == given[2:], flag


class Nodes:
    """Two machines that reach each other: namespaces with their own network, name and mounts.
    Processes that still run at the end are killed.

    hosts: of each node, lines of its /etc/hosts.
    """

    def __init__(self, folder, hosts=()):
        self.link, self.folder, self.started = Link(1000), Path(folder), []
        for i in range(2):
            theirs = hosts[i] if hosts else [f"{a} node{j}" for j, a in enumerate(ADDRESSES)]
            lines = ["127.0.0.1 localhost", *theirs]
            Path(folder, f"hosts{i}").write_text("\n".join(lines) + "\n")

    def close(self):
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
        command += ["--rdzv-endpoint", "node0:29400", *rdzv, "-m", "fastpar", *TRAIN, *options]
        return self.run(i, *command, **how)

    def set_link(self, i, state):
        """Pull the cable of node i, or put it back: state is down or up."""
        self.link._run(i, "ip", "link", "set", DEVICE, state)


def ended(process, timeout_s=120):
    out, _ = process.communicate(timeout=timeout_s)
    return process.returncode, out


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Makes two nodes, in a folder with a text."""
    made = []
    (tmp_path / "work").mkdir()
    enter(tmp_path / "work", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(hosts=()):
        try:
            made.append(Nodes(tmp_path, hosts))
        except NoLinkError as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


def steps():
    file = Path("r/metrics.jsonl")
    return max((row["step"] for row in read_metrics(file)), default=0) if file.exists() else 0


def starts():
    """(ranks, first step) of each start of the run."""
    found = json.loads(Path("r/config.json").read_text())["starts"]
    return [(start["world_size"], start["step"]) for start in found]


def elastic(nodes, i, *options, at_least=1):
    """torchrun as examples/several_nodes.sh has it."""
    script = (ROOT / "fastpar/examples/several_nodes.sh").read_text()
    (conf,) = re.findall(r"read_timeout=\$\{CUT_OFF_S:-(\d+)\}", script)
    (name,) = re.findall(r"^export (\w+)=1", script, re.MULTILINE)
    rdzv = ("--max-restarts", "10", "--rdzv-conf", f"last_call_timeout=5,read_timeout={conf}")
    return nodes.torchrun(i, *ENDLESS, *options, nodes=f"{at_least}:2", rdzv=rdzv, **{name: "1"})


def wait_for_start(ranks, *processes):
    """Until a start has so many ranks, and has gone on for 30 steps."""
    began = lambda: Path("r/config.json").exists() and starts()[-1][0] == ranks  # noqa: E731
    wait_for(200, began, process=processes[0])
    wait_for_step(starts()[-1][1] + 30, *processes)


def wait_for_step(n, *processes):
    wait_for(200, lambda: steps() >= n, process=processes[0])
    assert all(process.poll() is None for process in processes)


@pytest.mark.slow
def test_hosts_whose_names_are_loopback_addresses(two):
    """Each knows the other by its address, and itself as Debian does."""
    nodes = two([["127.0.1.1 node0", "10.211.7.2 node1"], ["127.0.1.1 node1", "10.211.7.1 node0"]])
    started = [nodes.torchrun(i, *SHORT) for i in range(2)]
    for process in started:
        code, out = ended(process)
        assert code == 0, out
    assert steps() == 20


def srun(nodes, *options):
    """The ranks that srun starts on two nodes."""
    step = {
        "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "node[0-1]",
    }  # fmt: skip
    command = (*FASTPAR, *TRAIN, *options)
    return [nodes.run(int(n), *command, SLURM_PROCID=n, SLURM_NODEID=n, **step) for n in "01"]


@pytest.mark.slow
def test_srun_without_torchrun(two):
    (code, out), (other, _) = map(ended, srun(two(), *SHORT))
    assert (code, other) == (0, 0), out
    assert "ranks 2" in out


TABLES = ("cat", "/proc/net/tcp", "/proc/net/tcp6")
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


@pytest.mark.slow
def test_ranks_of_one_machine_cannot_be_reached_from_another(two):
    nodes = two()
    run = nodes.run(0, *FASTPAR, *TRAIN, *ENDLESS, "--nproc=2")
    wait_for_step(5, run)
    open_ = listening(ended(nodes.run(0, *TABLES))[1])
    assert len(open_) >= 3  # the store, and each rank's
    assert {address for address, _ in open_} == {"127.0.0.1"}
    for _, port in open_:
        code, out = ended(nodes.run(1, sys.executable, "-c", CONNECT, ADDRESSES[0], port))
        assert code == 1, out
        assert "ConnectionRefusedError" in out


@pytest.mark.slow
def test_ranks_of_two_machines_listen_on_the_network_between_them(two):
    nodes = two()
    started = srun(nodes, *ENDLESS)
    wait_for_step(5, *started)
    for i, address in enumerate(ADDRESSES[:2]):
        open_ = listening(ended(nodes.run(i, *TABLES))[1])
        assert {host for host, _ in open_} == {address}


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["mpirun", "torchrun"])
def test_other_starters_ranks_listen_on_the_loopback_interface_alone(here, start, starter):
    """torchrun itself listens on all."""
    if starter == "torchrun":
        run = start(*torchrun(2), *TRAIN, *ENDLESS)
        wait_for_step(5, run)
        ranks = list(ranks_of(run.pid).values())
    else:
        job = {**OPEN_MPI, **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", LOCAL), "2")}
        number = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
        runs = [
            start(*FASTPAR, *TRAIN, *ENDLESS, env={**job, **dict.fromkeys(number, rank)})
            for rank in "01"
        ]
        wait_for_step(5, *runs)
        ranks = [run.pid for run in runs]
    assert {host for host, _ in of_processes(*ranks)} == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("mkdir -p r && mount -t tmpfs none r", r"got out=r, which node1 \(rank 1\) and"),
        (
            "cp text.txt ../other && echo more >> ../other && mount --bind ../other text.txt && "
            "mkdir -p cache && mount -t tmpfs none cache",
            r"'tokens of text.txt: \w+' on rank 1, 'tokens of text.txt: \w+' on rank 0",
        ),
    ],
    ids=["folder", "text"],
)
def test_a_node_with_a_disk_of_its_own_is_refused_before_the_first_step(two, before, words):
    nodes = two()
    started = [nodes.torchrun(i, *SHORT, before=before if i else "true") for i in range(2)]
    for process in started:
        code, out = ended(process)
        assert code == 1  # torchrun's
        assert re.search(words, out), out
    assert not steps()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node", "link"])
def test_the_run_goes_on_with_one_node_and_with_both_again(two, lost):
    """A node is killed and started again; or its cable is out for a minute, and nobody acts."""
    nodes = two()
    first, second = (elastic(nodes, i) for i in range(2))
    wait_for_start(2, first, second)
    began = time.monotonic()
    if lost == "node":
        second.send_signal(signal.SIGKILL)
        wait_for_start(1, first)
        second = elastic(nodes, 1)
    else:
        nodes.set_link(1, "down")
        time.sleep(60)
        nodes.set_link(1, "up")
    wait_for_start(2, first, second)
    assert time.monotonic() - began < 180
    (a, _), (b, at), (c, again) = starts()[-3:]
    assert (a, b, c) == (2, 1, 2)
    assert at >= 20  # of a save, not from the start
    assert again > at


@pytest.mark.slow
def test_replicas_on_nodes(two):
    """A replica a node: a lost one ends both, which go on from their last save together; the rest
    goes on alone when the operator says so."""
    nodes = two()
    options = ("--replicas=2", "--outer-every=5")
    first, second = (elastic(nodes, i, *options, at_least=2) for i in range(2))
    wait_for_step(50, first, second)
    second.send_signal(signal.SIGKILL)
    second = elastic(nodes, 1, *options, at_least=2)
    wait_for(150, lambda: len(starts()) > 1)
    assert starts()[1][1] >= 20
    wait_for_step(starts()[1][1] + 30, first, second)
    assert Path("r/replica_1/metrics.jsonl").exists()
    for process in (first, second):
        process.kill()
        process.wait()
    more = f"--max-steps={steps() + 10}"
    alone = nodes.run(
        0, sys.executable, "-m", "fastpar", "train", "--resume", "--out=r", "--replicas=1",
        "--unset", "outer-every", more,
    )  # fmt: skip
    code, out = ended(alone)
    assert code == 0, out
    assert "ranks 1" in out
