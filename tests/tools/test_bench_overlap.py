"""The overlap bench: its arithmetic, its gate, and a run on a link."""

import math

import pytest
import torch
from test_bench import make_bench

from bench.records import load
from bench.report import tables
from bench.systems import bench_overlap as overlap
from bench.systems.bench_overlap import ALONE, DDP, FSDP2, STAGES, Log, Plan
from bench.systems.links import Link, NoLinkError, RankError
from bench.targets import Target
from fastpar.comm.recorder import COMPUTE, GATHER, REDUCE

ABOUT = {
    "forward_ms": 400.0,
    "backward_ms": 800.0,
    "optimizer_ms": 50.0,
    "link_mbit": 800.0,
    "link_bytes_per_ms": 95e3,
    "all_reduce_25MiB_ms": 275.0,
    "busy_cores": 0.1,
    "priority": "nice 0, group nice 0",
}
PLAN = Plan("tiny", overlap.QUICK, 2, 1, 2)


def logs():
    report = {"exposed_ms": 90.0, "comm_ms": 980.0}
    return {
        ALONE: Log([1200.0, 1250.0, 1300.0], [9.0], [{}], [1500.0], [0.0]),
        DDP: Log([1500.0] * 3, [5.0, 4.0], [{}], [1600.0, 1700.0], [96e6, 95e6]),
        "FSDP2": Log([1800.0] * 3, [5.0, 4.0], [{}], [1900.0], [142.5e6]),
        STAGES[2]: Log([1350.0] * 3, [5.0, 4.00002], [report, report], [1550.0], [95e6]),
        STAGES[3]: Log(refused="rank 1: it broke"),
    }


def test_exposed_is_what_a_step_takes_beyond_compute(tmp_path):
    rows = {
        r.variant: r for r in overlap.to_rows(make_bench(tmp_path, "overlap"), PLAN, logs(), ABOUT)
    }
    assert rows[ALONE].notes["link_mbit"] == 800.0
    assert "exposed_ms" not in rows[ALONE].notes
    ddp = rows[DDP].notes
    assert (ddp["sent_bytes"], ddp["comm_ms"], ddp["exposed_ms"]) == (95e6, 1000.0, 250.0)
    assert ddp["exposed_percent"] == 25.0
    assert ddp["cpu_ms"] == 1650.0
    two = rows[STAGES[2]]
    assert two.notes["exposed_percent"] == 10.0
    assert (two.notes["engine_exposed_ms"], two.notes["engine_comm_ms"]) == (90.0, 980.0)
    assert two.baseline == DDP
    assert two.speedup == pytest.approx(1500 / 1350)
    assert rows[STAGES[3]].refused == "rank 1: it broke"
    assert rows[STAGES[3]].median_ms is None


def test_targets_are_judged_from_the_rows(tmp_path):
    bench = make_bench(tmp_path, "overlap")
    bench.quick = False
    rows = overlap.to_rows(bench, PLAN, logs(), ABOUT)
    text = tables.targets_table(rows)
    assert "| exposed <= 15 % of communication | 10 % | yes |" in text
    assert "| >= 1.2x the best of FSDP2, FSDP2, no reshard | 1.33x | yes |" in text
    assert text.count("refused: rank 1: it broke") == 3
    assert not overlap.targets_of(DDP)
    assert len(overlap.targets_of(STAGES[1])) == 2
    exposed = Target("exposed", 15.0)
    assert not exposed.met(15.1)
    assert exposed.reached(rows[0], rows) is None


def test_the_report_has_a_line_for_each_variant(tmp_path):
    rows = overlap.to_rows(make_bench(tmp_path, "overlap"), PLAN, logs(), ABOUT)
    lines = tables.TABLES["overlap"](rows).splitlines()[2:]
    assert (
        lines[1] == "| tiny, DDP, same buckets | 1500 | 95 | 1000 | 250 | 25 % |  | 1.00x | 1.20x |"
    )
    assert (
        lines[3] == "| tiny, fastpar ZeRO-2 | 1350 | 95 | 1000 | 100 | 10 % | 9 % | 1.11x | 1.33x |"
    )
    assert lines[4].startswith("| tiny, fastpar ZeRO-3 | refused: rank 1: it broke |")


@pytest.mark.parametrize("loss", [4.001, math.nan])
def test_other_losses_than_those_of_ddp_are_refused(loss):
    found = logs()
    found["FSDP2"].losses[1] = loss
    overlap.judge(found)
    assert "losses: expected those of DDP within 0.0001, got" in found["FSDP2"].refused
    assert "in step 1" in found["FSDP2"].refused
    assert [v for v, log in found.items() if log.refused is None] == [ALONE, DDP, STAGES[2]]


def test_the_rate_makes_an_all_reduce_a_part_of_backward():
    with torch.device("meta"):
        model = overlap.stock.GPT(overlap.CONFIG)
    numel = sum(p.numel() for p in model.parameters())
    assert 25e6 < numel < 26e6
    mbit = overlap.choose_rate(Plan("", overlap.CONFIG, 4, 1, 1), 1000.0)
    assert 8 * 4 * numel / (mbit * 1e6) == pytest.approx(0.75)
    tail = numel - 8 * 12 * 512**2
    assert tail < 0.03 * numel  # what becomes final only when backward ends


def test_where_no_link_can_be_made_the_row_says_so(tmp_path, monkeypatch):
    def refuse(mbit):
        raise NoLinkError("Link: expected network namespaces to be permitted, got no")

    monkeypatch.setattr(overlap, "Link", refuse)
    overlap.run(make_bench(tmp_path, "overlap"))
    _, (row,) = load(tmp_path / "rows.json")
    assert row.variant == "link"
    assert row.refused.startswith("NoLinkError: Link: expected network namespaces to be permitted")


@pytest.fixture(scope="module")
def link():
    try:
        made = Link(1000)
    except NoLinkError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.mark.slow
def test_variants_take_turns_on_the_link(tmp_path, link, monkeypatch):
    """One without communication, DDP, and one that is traced."""
    variants = (ALONE, DDP, STAGES[3])
    plan = Plan("tiny", overlap.QUICK, 2, 2, 2, variants)
    bench = make_bench(tmp_path, "overlap")
    overlap.run_on(bench, plan, link)
    _, found = load(tmp_path / "rows.json")
    rows = {row.variant: row for row in found}
    assert [rows[v].refused for v in variants] == [None] * 3
    assert [rows[v].runs for v in variants] == [4] * 3
    numel = sum(p.numel() for p in overlap.stock.GPT(overlap.QUICK).parameters())
    assert rows[ALONE].notes["sent_bytes"] < 1e3
    for variant in (DDP, STAGES[3]):  # of a model this small the last unit, kept, is all of it
        assert 4 * numel <= rows[variant].notes["sent_bytes"] <= 6 * numel
    assert rows[STAGES[3]].notes["engine_wire_bytes"] >= 4 * numel
    stored = (tmp_path / "overlap" / "timeline.json").read_text()
    assert all(f'["{row}", ' in stored for row in (COMPUTE, REDUCE, GATHER))
    assert (tmp_path / "overlap" / "timeline.png").exists()


def test_training_apart_gives_losses_that_the_gate_refuses(monkeypatch):
    """The gate can tell: two ranks that do not communicate drift from DDP in two steps."""
    two = {ALONE: Log(losses=[]), DDP: Log(losses=[])}

    def step(model, batches, optimizers):
        losses = []
        for rank, (x, y) in enumerate(batches):
            loss = model[rank](x, y)
            loss.backward()
            losses.append(loss.item())
        if len(optimizers) == 1:
            for a, b in zip(model[0].parameters(), model[1].parameters()):
                a.grad.add_(b.grad).div_(2)
        for optimizer in optimizers:
            optimizer.step()
        for module in model:
            module.zero_grad()
        if len(optimizers) == 1:
            model[1].load_state_dict(model[0].state_dict())
        return sum(losses) / 2

    from bench.peers import stock
    from fastpar.compare.strategies import Settings, adamw_of

    for log, apart in ((two[ALONE], True), (two[DDP], False)):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(stock.GPT(overlap.QUICK))
        count = 2 if apart else 1
        optimizers = [adamw_of(m, Settings()) for m in models[:count]]
        for index in range(3):
            batches = []
            for rank in range(2):
                generator = torch.Generator().manual_seed(2 * index + rank)
                tokens = torch.randint(256, (2, 33), generator=generator)
                batches.append((tokens[:, :-1], tokens[:, 1:]))
            log.losses.append(step(models, batches, optimizers))
    two = {"apart": two[ALONE], DDP: two[DDP]}
    overlap.judge(two)
    assert two["apart"].refused is not None


@pytest.mark.slow
def test_a_variant_that_dies_is_refused_and_closed(link, monkeypatch):
    closed = []

    class Dying:
        def __init__(self, link, target, variant, *args, timeout_s):
            self.variant = variant

        def call(self, method, *args, timeout_s=0):
            if method == "phases":
                return [{"forward": 1.0, "backward": 2.0, "optimizer": 0.1}] * 2
            if self.variant == DDP:
                raise RankError("rank 1: the process is gone")
            return [
                {"ms": [1.0] * 2, "losses": [1.0] * 3, "reports": [{}] * 2, "cpu_ms": [1.0]}
            ] * 2

        def close(self):
            closed.append(self.variant)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(overlap, "Ranks", Dying)
    monkeypatch.setattr(overlap, "all_reduce_ms", lambda link: [100.0])
    found, about = overlap.measure(Plan("", overlap.QUICK, 2, 3, 2, (ALONE, DDP, *FSDP2)), link)
    assert found[DDP].refused == "rank 1: the process is gone"
    assert closed == [DDP]
    assert [len(found[v].ms) for v in (ALONE, *FSDP2)] == [6] * 3
    assert about["backward_ms"] == 2.0
    assert 0 <= about["busy_cores"] <= 1024


def test_no_ranks_are_started_without_memory(link, monkeypatch):
    monkeypatch.setattr(overlap, "free_bytes", lambda: 2.0**29)
    with pytest.raises(RankError, match="not started: less than 1024 MiB of memory free"):
        overlap.measure(Plan("", overlap.QUICK, 2, 1, 1, (ALONE,)), link)
