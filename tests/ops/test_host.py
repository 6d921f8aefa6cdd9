"""Threads, their CPUs and the instruction set can be asked for and set."""

import os
import sys

import pytest
import torch
from cells import sweep

from fastpar.kernels import _C, host

linux = pytest.mark.skipif(sys.platform != "linux", reason="CPUs can be bound on Linux only")


@pytest.fixture
def free_again():
    before = host.cpus()
    yield
    if sys.platform == "linux":
        _C.bind_workers(list(before), 3)


def test_nodes_are_read_from_the_system(tmp_path):
    for node, text in ((0, "0-1,4"), (10, "8-9"), (2, "2"), (3, "\n")):  # node 3 has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    (tmp_path / "online").write_text("0-10")
    nodes = host.numa_nodes(tmp_path)
    assert nodes == {0: (0, 1, 4), 2: (2,), 10: (8, 9)}
    assert list(nodes) == [0, 2, 10]
    assert host.numa_nodes(tmp_path / "nothing") == {0: host.cpus()}


@linux
def test_bound_threads_are_where_they_were_put(free_again, monkeypatch):
    allowed = host.cpus()
    for wanted in ((allowed[-1],), allowed[:1], allowed):
        assert host.bind_threads(cpus=wanted, count=3) == wanted
        assert host.worker_cpus(3) == [wanted] * 3
        assert host.cpus() == wanted == tuple(sorted(os.sched_getaffinity(0)))
    monkeypatch.setattr(host, "numa_nodes", lambda: {0: allowed, 7: allowed[-1:]})
    assert host.bind_threads(node=7, count=2) == allowed[-1:]
    assert host.worker_cpus(2) == [allowed[-1:]] * 2
    assert len(host.worker_cpus()) == host.threads()


@linux
def test_a_limit_of_the_process_is_an_error_and_changes_nothing(free_again, monkeypatch):
    """The system cuts a request down to a container's CPUs without a word."""
    before = host.cpus()
    beyond = max(before) + 1
    monkeypatch.setattr(host, "numa_nodes", lambda: {0: (*before, beyond)})
    with pytest.raises(RuntimeError, match=r"got .*the limit of this process"):
        host.bind_threads(cpus=[before[0], beyond], count=2)
    assert host.worker_cpus(2) == [before] * 2
    with pytest.raises(RuntimeError, match="expected CPUs that this process may use, got Invalid"):
        host.bind_threads(cpus=[beyond], count=2)
    known = {cpu for found in host.numa_nodes().values() for cpu in found}
    assert known.issuperset(host.cpus())


def test_threads_and_isas(monkeypatch):
    host.set_threads(2)
    assert host.threads() == torch.get_num_threads() == 2
    before = host.isa()
    try:
        for name in host.supported_isas():
            host.set_isa(name)
            assert host.isa() == name
        host.set_isa("auto")
        assert host.isa() == host.supported_isas()[-1]
    finally:
        host.set_isa(before)
    monkeypatch.setattr(_C, "isa_supported", lambda name: name in ("baseline", "avx2"))
    assert host.supported_isas() == ("baseline", "avx2")
    lists = {"0-3\n": (0, 1, 2, 3), "0,2-3,9": (0, 2, 3, 9), "7": (7,), "\n": ()}
    assert {text: host.read_cpu_list(text) for text in lists} == lists


@sweep(("call", "words"), [
    (lambda: host.set_threads(0), "set_threads: expected count >= 1, got count=0"),
    (lambda: host.set_isa("sse"), "expected auto, baseline, avx2, avx512 or amx, got isa=sse"),
    (lambda: host.bind_threads(), "expected node or cpus, got node=None cpus=None"),
    (lambda: host.bind_threads(0, [0]), "expected node or cpus, got node=0 cpus="),
    (lambda: host.bind_threads(99), r"expected a node of .* got node=99"),
    (lambda: host.bind_threads(cpus=[]), r"expected CPUs of .* got cpus=\[\]"),
    (lambda: host.bind_threads(cpus=[-1]), r"expected CPUs of .* got cpus=\[-1\]"),
])  # fmt: skip
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
