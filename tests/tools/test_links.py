"""Links between namespaces: rate, counters, and that nothing is left behind."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from bench.systems import links
from fastpar.comm.ranks import RankFailed

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


class Echo:
    """What a rank of these tests holds."""

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("on purpose")


@pytest.fixture(scope="module")
def link():
    try:
        made = links.Link(1000)
    except links.NoLinkError as error:
        pytest.skip(str(error))
    with made:
        yield made


def gone(pid: int) -> bool:
    """Whether a process that is no child of this one has ended, within ten seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 10)[0])
    finally:
        os.close(fd)


def test_bytes_take_the_time_that_the_rate_says_and_failures_are_named(link):
    """4 MiB at 200 Mbit/s: 168 ms; at the rate before, or in shared memory, less than 34 ms."""
    size = 4 * MIB
    with links.Ranks(link, "bench.systems.links:Probe") as ranks:
        ranks.ask("all_reduce_ms", 1, size)
        link.set_rate(200)
        before = link.sent_bytes()
        took = max(max(both) for both in zip(*ranks.ask("all_reduce_ms", 1, size)))
        sent = [now - then for now, then in zip(link.sent_bytes(), before)]
    assert took >= 0.9 * 8e3 * size / 200e6  # the bucket lets a burst through at once
    assert all(2 * size <= count <= 2.4 * size for count in sent)  # with headers
    with (
        links.Ranks(link, "test_links:Echo") as ranks,
        pytest.raises(RankFailed, match=r"^rank \d: ValueError: on purpose$"),
    ):
        ranks.ask("fail")


def test_nothing_is_left_when_the_parent_is_killed(link):
    code = (
        "import os, signal; from bench.systems import links\n"
        "link = links.Link(100); ranks = links.Ranks(link, 'test_links:Echo')\n"
        "print(*[p.pid for p in link._holders], *ranks.ask('pid'), flush=True)\n"
        "signal.pause()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests/tools")}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 4
    assert all(map(gone, pids))
