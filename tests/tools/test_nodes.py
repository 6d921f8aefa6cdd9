"""Ranks on nodes: what is really sent through each adapter is what the planner's model says."""

import pytest
import torch
from test_bench import make_bench
from test_records import ABOUT

from bench.records import RESULTS, ResultFile, load
from bench.report import pictures, report, tables
from bench.systems import bench_emulated, bench_nodes
from bench.systems.bench_emulated import QUICK, Rank, Setting
from bench.systems.emulated import NODES, Link, Op, nodes_of
from bench.systems.nodes import run_on_nodes
from fastpar.cost.devices import Cluster
from fastpar.cost.network import Network, hierarchy, place, ring, tree
from fastpar.cost.operations import comm_ops_of
from fastpar.cost.workload import Setup, Workload

WAYS = {"ring": ring, "tree": tree, "hierarchy": hierarchy}


def network(n_devices=16, per_node=4, inter="ib-ndr"):
    return Network(Cluster.of("h100", n_devices, per_node, inter=inter))


def asked(kind, numel):
    """What a rank asks of its collectives, whose result every rank knows."""

    def ask(c):
        x = torch.arange(numel, dtype=torch.float32) % 13 + c.rank
        mean = torch.arange(numel) % 13 + (c.world_size - 1) / 2
        mine = slice(c.rank * numel // c.world_size, (c.rank + 1) * numel // c.world_size)
        out = torch.empty(numel // c.world_size)
        if kind == "all_reduce":
            c.all_reduce(x, mean=True)
            return torch.equal(x, mean)
        if kind == "reduce_scatter":
            c.reduce_scatter(out, x, mean=True)
            return torch.equal(out, mean[mine])
        if kind == "all_gather":
            whole = torch.empty(numel)
            c.all_gather(whole, x[mine] - c.rank)
            return torch.equal(whole, torch.arange(numel) % 13)
        received = torch.empty(numel)
        c.all_to_all(received, x)
        wanted = [x[mine] - c.rank + r for r in range(c.world_size)]
        return torch.equal(received, torch.cat(wanted))

    return ask


@pytest.mark.parametrize("inter", ["ib-ndr", "eth-100"])
@pytest.mark.parametrize(
    ("ranks", "stride", "per_node"),
    [(16, 1, 4), (8, 2, 4), (4, 4, 4), (4, 1, 4), (16, 1, 2)],
)
def test_what_is_sent_is_what_the_planner_says(ranks, stride, per_node, inter):
    """In each of NCCL's ways, and in the one that the model chooses; results are right."""
    net, numel = network(per_node=per_node, inter=inter), 512
    at, n_bytes = place(ranks, stride, per_node), 4 * numel
    for kind, ways in {
        "reduce_scatter": ("ring", "hierarchy", None),
        "all_gather": ("ring", "hierarchy", None),
        "all_reduce": ("ring", "tree", "hierarchy", None),
        "all_to_all": (None,),
    }.items():
        for way in ways:
            nodes, right = run_on_nodes(
                net, asked(kind, numel), ranks=ranks, stride=stride, way=way
            )
            assert all(right)
            assert len(right) == 16
            times = (2,) if kind == "all_reduce" else ()
            sent = net.traffic(kind, n_bytes, ranks, stride)
            if way is not None:
                sent = WAYS[way](at, n_bytes, *times)
            counted, planned = nodes.nic_bytes(), net.nic_bytes(sent)
            if sent.way != "tree":
                assert set(counted) == {planned}, (kind, way)
            else:  # planned is the most: a root sends nothing up, and small trees are all leaves
                mean = (at.nodes - 1) / at.nodes * planned
                assert max(counted) == (planned if at.nodes == 8 else mean)
                assert sum(counted) / len(counted) == mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_rank_order", "way", "of_tensor"),
    [(True, None, 56 / 64), (False, "ring", 63 / 64 / 8), (False, "hierarchy", 7 / 8 / 8)],
)
def test_reduce_scatter_of_8_x_8_ranks(in_rank_order, way, of_tensor):
    """NCCL's own sends an eighth of the tensor through each adapter, the fixed tree seven."""
    net, ask = network(64, 8), asked("reduce_scatter", 1024)
    nodes, right = run_on_nodes(net, ask, ranks=64, in_rank_order=in_rank_order, way=way)
    assert all(right)
    assert set(nodes.nic_bytes()) == {4 * 1024 * of_tensor}


def test_the_committed_table_is_counted_and_planned_alike():
    """Of 8 x 8 ranks; before, each adapter of a GPU sent seven times what a ring sends."""
    _, rows = report.newest("cpu", RESULTS)
    rows = [row for row in rows if (row.bench, row.direction) == ("nodes", "bytes")]
    assert len(rows) == 2 * 3 * 3
    assert not any(row.refused for row in rows)
    sent = {(row.case, row.variant): row.notes["nic_mb"] for row in rows}
    assert all(row.notes["nic_mb"] == row.notes["planned_mb"] for row in rows)
    for link in bench_nodes.LINKS:
        before = sent[f"dp 64, {link}", bench_nodes.BEFORE]
        assert before / sent[f"dp 64, {link}", "ring"] == pytest.approx(64 / 9, rel=1e-5)
        assert before / sent[f"dp 64, {link}", "hierarchy"] == pytest.approx(8, rel=1e-5)
        alike = {sent[f"dp 8 x tp 8, {link}", way] for way in bench_nodes.WAYS}
        assert len(alike) == 1  # one rank a node: nothing can be added up before


def test_a_deterministic_all_reduce_is_pairs_and_a_gather():
    net, numel = network(), 512
    nodes, right = run_on_nodes(net, asked("all_reduce", numel), ranks=16, in_rank_order=True)
    sent = [net.traffic(kind, 4 * numel, 16) for kind in ("all_to_all", "all_gather")]
    assert all(right)
    assert set(nodes.nic_bytes()) == {sum(map(net.nic_bytes, sent))}


# Behind emulated links


def test_ranks_of_a_node_have_a_link_of_their_own():
    link = Link(nodes_of(4, "eth-100"))
    try:
        for world_size, stride in ((4, 1), (4, 4), (2, 2)):
            op = Op("tp", "all_reduce", 10**6, 1.5e6, world_size, 0, stride)
            link.submit(op, 1, lambda: None)
        inside, outside, also_inside = (handle.takes_ms for handle in link._done)
        net = network(4, 4, "eth-100")
        assert inside == pytest.approx(1e3 * net.seconds("all_reduce", 1e6, 4))
        assert outside == pytest.approx(1e3 * net.seconds("all_reduce", 1e6, 4, 4))
        assert also_inside < inside < outside
        assert sorted(link._channels) == ["", "inside"]
        assert link.nic_bytes() == net.nic_bytes(net.traffic("all_reduce", 1e6, 4, 4))
    finally:
        link.close()


@pytest.mark.parametrize(("tp", "stage"), [(1, 0), (1, 2), (2, 3), (2, 1)])
def test_an_engine_s_step_sends_what_the_planner_says(tp, stage):
    """The collectives of a real step, as one of 16 ranks on 4 nodes, and those of comm_ops_of."""
    profile = nodes_of(4, "ib-ndr")
    rank = Rank(Setting("tiny", QUICK, 2, 16, stage, tp=tp), "cpu")
    try:
        rank.step()
        rank.step()
        rank.link.comm_ms()
        rank.link.clear()
        rank.step()
        rank.link.comm_ms()
        rank.link.profile = profile
        found = rank.link.nic_bytes()
    finally:
        rank.link.profile = None
        rank.close()
    setup = Setup(
        world_size=16, tp=tp, zero_stage=stage, micro_batch_size=2, dtype="fp32",
        master_weights="none", device_type="cpu", transport="gloo",
        accumulate="shard" if stage > 1 else "full",
    )  # fmt: skip
    net = profile.network
    comms = comm_ops_of(Workload(QUICK, 2 * 16 // tp), setup)
    assert found == pytest.approx(net.step_nic_bytes(comms), rel=0.02)


def test_a_step_behind_nodes_takes_what_the_model_says(tmp_path):
    """One of 64 ranks; its row has the bytes through an adapter."""
    setting = Setting("tiny", QUICK, 2, 64, 2)
    rank = Rank(setting, "cpu")
    try:
        taken = bench_emulated.measure(rank, NODES, rounds=1, budget_s=0.0)
        network, ops = NODES[1].network, [op for op in rank.link.ops if op.world_size > 1]
        nominal = [network.seconds(op.kind, op.tensor_bytes, op.world_size) for op in ops]
        assert rank.link.comm_ms() >= 0.999e3 * sum(nominal)
        rows = bench_emulated.rows_of(make_bench(tmp_path, "emulated"), setting, rank, taken)
    finally:
        rank.close()
    plain, infiniband, ethernet = (row.notes.get("nic_mb") for row in rows)
    assert plain is None
    assert ethernet == pytest.approx(8 * infiniband)
    assert tables.emulated_table(rows).count("| emulated nodes of 8: NVLink, ") == 2


def test_profiles_of_nodes():
    assert bench_emulated.profiles_of("cuda", 64)[-2:] == NODES
    assert bench_emulated.profiles_of("cuda", 64, tp=8)[-2:] == NODES
    assert not {*bench_emulated.profiles_of("cuda", 8), *bench_emulated.profiles_of("cpu", 64)} & {
        *NODES
    }
    infiniband, ethernet = (profile.network for profile in NODES)
    assert NODES[0].name == "nodes of 8: NVLink, ib-ndr"
    for net, nics in ((infiniband, 8), (ethernet, 1)):
        sent = net.traffic("all_to_all", 1e9, 64)
        assert net.nic_bytes(sent) * nics == pytest.approx(8 * 56 / 64 * 1e9)


# The bench


def test_table_and_picture(tmp_path):
    bench = make_bench(tmp_path, "nodes")
    bench_nodes.run(bench)
    _, rows = load(tmp_path / "rows.json")
    assert all(row.refused is None for row in rows), [row.refused for row in rows]
    counted = [row for row in rows if row.direction != "step"]
    assert all(row.notes["nic_mb"] == row.notes["planned_mb"] for row in counted)
    before = {(r.case, r.notes["link"]): r for r in rows if r.variant == bench_nodes.BEFORE}
    assert before
    ResultFile(tmp_path / "a.json", ABOUT).add(*rows)
    text = report.render("nodes-cpu", tmp_path)
    assert text.count("all-to-all and a sum") >= 2
    assert pictures.draw_all(tmp_path)[-1] == tmp_path / "nodes.png"
    assert (tmp_path / "nodes.png").stat().st_size > 10_000
