"""The emulated interconnect: arithmetic as if all ranks had the same data, time from bytes."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_bench import make_bench
from test_records import ABOUT, make_row

from bench.records import ResultFile, load
from bench.report import pictures, report
from bench.systems import bench_emulated
from bench.systems.bench_emulated import BASELINE, QUICK, Rank, Setting, settings
from bench.systems.emulated import (
    ETHERNET_1,
    ETHERNET_25,
    NVLINK,
    PROFILES,
    EmulatedCollectives,
    EmulatedMesh,
    Link,
    Op,
    Profile,
    emulated,
)

W, RANK = 4, 1
SLOW = Profile("slow", 0.001, 1000.0, "a test")  # 1 MB/s, 1 ms


@pytest.fixture
def link():
    made = Link(None)
    yield made
    made.close()


def collectives(link, role="reduce", world_size=W, rank=RANK):
    return EmulatedCollectives(link, role, rank, world_size, "cpu")


# Arithmetic


@pytest.mark.parametrize("mean", [False, True])
def test_sums_are_those_of_equal_ranks(link, mean):
    c = collectives(link)
    factor = 1 if mean else W
    x = torch.arange(8.0)
    c.all_reduce(x, mean=mean)
    assert torch.equal(x, torch.arange(8.0) * factor)
    x, out = torch.arange(8.0), torch.empty(2)
    c.reduce_scatter(out, x, mean=mean)
    assert torch.equal(out, torch.tensor([2.0, 3.0]) * factor)
    own = x[2:4]
    c.reduce_scatter(own, x, mean=mean)
    assert torch.equal(own, torch.tensor([2.0, 3.0]) * factor)


def test_gathered_are_copies_of_the_own_slice(link):
    c = collectives(link)
    out, x = torch.full((8,), float("nan")), torch.tensor([5.0, 6.0])
    c.all_gather(out, x)
    assert torch.equal(out, x.repeat(W))
    out[2:4] = torch.tensor([7.0, 8.0])
    c.all_gather(out, out[2:4])
    assert torch.equal(out, torch.tensor([7.0, 8.0]).repeat(W))
    c.broadcast(x, 3)
    assert torch.equal(x, torch.tensor([5.0, 6.0]))
    c.barrier()


def test_wire_bytes_and_times_are_the_textbook_s(link):
    """Ring algorithms: each rank sends (W - 1) / W of the bytes, twice that for an all-reduce."""
    c = collectives(link)
    c.all_reduce(torch.zeros(1024))
    c.reduce_scatter(torch.zeros(256), torch.zeros(1024))
    c.all_gather(torch.zeros(1024), torch.zeros(256), tag=7)
    c.broadcast(torch.zeros(1024), 0)
    assert link.ops == [
        Op("reduce", "all_reduce", 4096, 6144.0, 4, 0),
        Op("reduce", "reduce_scatter", 4096, 3072.0, 4, 0),
        Op("reduce", "all_gather", 4096, 3072.0, 4, 7),
        Op("reduce", "broadcast", 4096, 4096.0, 4, 0),
    ]
    assert link.wire_bytes() == 6144 + 3072 + 3072 + 4096
    link.clear()
    assert link.ops == []
    assert link.comm_ms() == 0
    assert ETHERNET_1.ms(125e6) == pytest.approx(1000.1)
    assert NVLINK.ms(450e6, passes=2) == pytest.approx(1.02)
    assert [p.gb_per_s for p in PROFILES] == [450.0, 31.5, 12.5, 3.125]
    assert all(p.source and p.latency_us > 0 for p in PROFILES)


# Time on a CPU


def test_operations_take_their_time_one_after_another(link):
    link.profile = SLOW
    c = collectives(link)
    start = time.perf_counter()
    handles = [c.all_reduce(torch.zeros(1000), async_op=True) for _ in range(2)]
    for handle in handles:
        handle.wait()
    took = (time.perf_counter() - start) * 1e3
    nominal = SLOW.ms(6000, passes=2)  # 6 + 2
    assert nominal == pytest.approx(8.0)
    least = nominal - 1e-6  # differences of times are rounded
    assert took >= 2 * least
    assert handles[0].ms >= least
    assert link.comm_ms() >= 2 * least
    assert handles[1].is_completed()


def test_a_single_rank_and_a_missing_profile_have_nothing_to_send(link):
    link.profile = SLOW
    alone = collectives(link, world_size=1, rank=0)
    alone.all_reduce(torch.zeros(10**6))
    assert [operation.takes_ms for operation in link._done] == [0.0]
    assert link.wire_bytes() == 0


@pytest.mark.parametrize("shared", [True, False])
def test_roles_share_the_link_if_the_profile_says_so(shared):
    link = Link(Profile("x", 1e6, 0.001, "a test", shared=shared))
    entered, go = threading.Event(), threading.Event()

    def stuck():
        entered.set()
        assert go.wait(10)

    first = link.submit(Op("reduce", "all_reduce", 0, 0.0, W, 0), 1, stuck)
    second = link.submit(Op("gather", "all_gather", 0, 0.0, W, 0), 1, lambda: None)
    assert entered.wait(10)
    if shared:
        with pytest.raises(TimeoutError, match="EmulatedCollectives: expected to end within"):
            second.wait(0.001)
        assert not second.is_completed()
    else:
        second.wait(10)
    assert not first.is_completed()
    go.set()
    first.wait(10)
    second.wait(10)
    link.close()


def test_an_error_comes_out_of_wait(link):
    def broken():
        raise ArithmeticError("here")

    handle = link.submit(Op("reduce", "all_reduce", 0, 0.0, W, 0), 1, broken)
    with pytest.raises(ArithmeticError, match="here"):
        handle.wait(10)
    collectives(link).all_reduce(torch.zeros(4))  # the thread lives on


# Time on a GPU: a double of torch.cuda that writes down what it is told


class FakeCuda:
    def __init__(self, cycles_per_ms):
        self.log, self.now, self.rate = [], 0.0, cycles_per_ms
        self.streams = ["current"]
        log, cuda = self.log, self

        class Event:
            def __init__(self, enable_timing=False):
                self.at = None

            def record(self):
                self.at = cuda.now
                log.append(("record", cuda.streams[-1], self))

            def synchronize(self):
                log.append(("synchronize",))

            def query(self):
                return True

            def elapsed_time(self, other):
                return other.at - self.at

        class Stream:
            made = 0

            def __init__(self, priority=0):
                Stream.made += 1
                self.name = f"s{Stream.made}"
                assert priority == -1

            def wait_event(self, event):
                log.append(("wait", self.name, event))

            def synchronize(self):
                log.append(("synchronize",))

        self.Event, self.Stream = Event, Stream

    def current_stream(self):
        def wait_event(event):
            self.log.append(("wait", "current", event))

        return SimpleNamespace(wait_event=wait_event)

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def _sleep(self, cycles):
        self.now += cycles / self.rate
        self.log.append(("sleep", self.streams[-1], cycles))


def test_on_a_gpu_a_stream_sleeps_and_the_host_never_waits():
    cuda = FakeCuda(cycles_per_ms=1.7e6)
    link = Link(SLOW, cuda=cuda)
    assert link.cycles_per_ms == pytest.approx(1.7e6)
    cuda.log.clear()
    c = collectives(link)
    x = torch.ones(1000)
    handle = c.all_reduce(x, async_op=True)
    handle.wait()
    names = [entry[:2] for entry in cuda.log]
    assert names == [
        ("record", "current"),  # ready: what the caller has enqueued
        ("wait", "s1"),
        ("record", "s1"),
        ("sleep", "s1"),
        ("record", "s1"),
        ("wait", "s2"),  # the arithmetic, beside the sleep
        ("wait", "s2"),
        ("record", "s2"),
        ("wait", "current"),
    ]
    ready, end, over = cuda.log[0][2], cuda.log[4][2], cuda.log[7][2]
    assert [cuda.log[i][2] for i in (1, 5, 6, 8)] == [ready, ready, end, over]
    assert cuda.log[3][2] == int(8.0 * link.cycles_per_ms)
    assert link.comm_ms() == pytest.approx(8.0)
    assert torch.equal(x, torch.full((1000,), float(W)))


@pytest.mark.gpu
def test_the_link_of_a_real_gpu_takes_its_time():
    link = Link(ETHERNET_25, "cuda")
    c = EmulatedCollectives(link, "reduce", 0, 8, "cuda")
    x = torch.ones(8 << 20, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    handle = c.all_reduce(x, async_op=True)
    handle.wait()
    called = time.perf_counter() - start
    torch.cuda.synchronize()
    nominal = ETHERNET_25.ms(2 * 7 / 8 * 4 * x.numel(), passes=2)  # 18.9
    assert called * 1e3 < nominal
    assert link.comm_ms() == pytest.approx(nominal, rel=0.2)
    assert bool((x == 8).all())


def test_host_tensors_beside_a_gpu_do_not_go_over_its_stream():
    with EmulatedMesh(4, 1) as mesh:
        cuda = FakeCuda(cycles_per_ms=1.7e6)
        factory = emulated(Link(SLOW, cuda=cuda))
        assert factory(mesh.dp_group, "reduce").device.type == "cuda"
        cuda.log.clear()
        sizes, group = torch.empty(4, dtype=torch.int64), factory(mesh.dp_group, "sizes")
        group.all_gather(sizes, torch.tensor([3]))
        assert sizes.tolist() == [3] * 4
        assert not cuda.log
        group.link.close()


# Mesh


def test_a_mesh_of_ranks_that_do_not_exist():
    with EmulatedMesh(64, 5) as mesh:
        assert (mesh.dp_size, mesh.dp_rank, mesh.is_main) == (64, 5, False)
        mesh.check_same("test", ["nobody else"])
        link = Link(None)
        whole = emulated(link)(mesh.dp_group, "reduce")
        assert (whole.rank, whole.world_size, whole.role) == (5, 64, "reduce")
        part = emulated(link)(dist.new_group([4, 5, 6, 7]), "gather")
        assert (part.rank, part.world_size, part.transport) == (1, 4, "emulated")
        assert part.link is link
        with pytest.raises(RuntimeError, match="EmulatedMesh: expected a process without"):
            EmulatedMesh(2)
        link.close()
    assert not dist.is_initialized()


# The bench


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_behind_a_slow_link_lasts_as_long_as_its_operations(stage):
    """They pass one after another, and each is waited for in the step or the next forward."""
    rank = Rank(Setting("tiny", QUICK, 2, 8, stage), "cpu")
    rank.step()
    rank.link.comm_ms()  # all of them are over
    rank.link.profile = SLOW
    rank.link.clear()
    start = time.perf_counter()
    rank.step()
    operations, wire = list(rank.link._done), rank.link.wire_bytes()
    rank.model(rank.tokens[:, :-1], rank.tokens[:, 1:])
    took_ms = (time.perf_counter() - start) * 1e3
    assert all(operation.is_completed() for operation in operations)
    numel = sum(p.numel() for p in rank.model.parameters())
    rank.close()
    assert wire >= 2 * 7 / 8 * 4 * numel
    nominal_ms = 0.999 * SLOW.ms(wire, passes=len(operations))
    assert sum(operation.ms for operation in operations) >= nominal_ms
    assert took_ms >= nominal_ms


def test_quick_bench_writes_a_row_for_every_link(tmp_path):
    bench_emulated.run(make_bench(tmp_path, "emulated"))
    _, rows = load(tmp_path / "rows.json")
    assert all(row.refused is None for row in rows), [row.refused for row in rows]
    assert [row.variant for row in rows] == [
        BASELINE, "emulated 25 GbE", "emulated 1 GbE",
    ] * 4  # fmt: skip
    assert [row.notes["zero_stage"] for row in rows[::3]] == [0, 1, 2, 3]
    for row in rows:
        assert row.baseline == BASELINE
        assert row.notes["wire_mb"] > 0
        if row.variant != BASELINE:
            assert row.notes["comm_ms"] > 0
            base = next(r for r in rows if (r.case, r.variant) == (row.case, BASELINE))
            assert row.notes["exposed_ms"] == pytest.approx(
                row.median_ms - base.median_ms, rel=1e-4, abs=0.01
            )


def test_the_bench_ends_in_time_and_a_failure_stops_one_case(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTPAR_EMULATED_S", "-1")
    bench_emulated.run(make_bench(tmp_path, "emulated"))
    assert "emulated: time is up, 4 cases left out" in capsys.readouterr().out
    monkeypatch.delenv("FASTPAR_EMULATED_S")

    def broken(setting, device):
        raise RuntimeError("no such rank")

    monkeypatch.setattr(bench_emulated, "Rank", broken)
    bench_emulated.run(make_bench(tmp_path, "emulated"))
    _, rows = load(tmp_path / "rows.json")
    assert [row.refused for row in rows] == ["RuntimeError: no such rank"] * 4


def test_settings_cover_sizes_stages_ranks_and_buckets():
    for device, sizes, ranks in (
        ("cuda", {"124M", "350M", "774M", "1.5B"}, {8, 64}),
        ("cpu", {"30M"}, {8}),
    ):
        every = list(settings(device, quick=False))
        assert len({str(s) for s in every}) == len(every)
        found = {(s.size, s.ranks, s.zero_stage) for s in every}
        assert found == {(s, w, z) for s in sizes for w in ranks for z in range(4)}
        assert {s.bucket_mb for s in every} == {None, 1.0, 5.0, 25.0, 100.0}
        assert {s.prefetch for s in every} == {0, 1, 2}


def emulated_row(stage, link, **notes):
    notes = {"size": "124M", "ranks": 64, "zero_stage": stage, "prefetch": 1, **notes}
    case = f"124M, stage {stage}, {notes.get('bucket_mb')} MB"
    return make_row(
        bench="emulated", case=case, direction="step", variant=link, baseline=BASELINE,
        median_ms=10.0 + notes.get("exposed_ms", 0), notes=notes,
    )  # fmt: skip


def test_table_and_picture(tmp_path):
    rows = []
    for stage in range(4):
        for mb in (None, 1.0, 25.0) if stage in (0, 2) else (None,):
            rows.append(emulated_row(stage, BASELINE, bucket_mb=mb))
            for link in ("emulated NVLink", "emulated 25 GbE"):
                notes = {"comm_ms": 4.0, "exposed_ms": 1.0, "exposed": 0.25, "wire_mb": 500.0}
                rows.append(emulated_row(stage, link, bucket_mb=mb, **notes))
    rows.append(make_row(bench="emulated", case="124M, stage 9", variant=BASELINE, refused="no"))
    ResultFile(tmp_path / "a.json", ABOUT).add(*rows)
    text = report.render("emulated-cpu", tmp_path)
    assert "| 124M, stage 3, None MB | emulated 25 GbE | 11 | 10 | 4 | 1 | 25 % | 500 |" in text
    assert "refused: no" in text
    assert pictures.draw_all(tmp_path)[-1] == tmp_path / "emulated_cpu.png"
    assert (tmp_path / "emulated_cpu.png").stat().st_size > 20_000
