"""Links between namespaces: rate, counters, failures."""

import pytest

from bench.systems import links
from fastpar.comm.ranks import RankFailed

pytestmark = pytest.mark.slow


class Echo:
    """What a rank of these tests holds."""

    def fail(self) -> None:
        raise ValueError("on purpose")


def test_bytes_take_the_time_that_the_rate_says_and_failures_are_named():
    """4 MiB at 200 Mbit/s: 168 ms; at the rate before, or in shared memory, less than 34 ms."""
    try:
        link = links.Link(1000)
    except links.NoLinkError as error:
        pytest.skip(str(error))
    size = 4 << 20
    with link:
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
