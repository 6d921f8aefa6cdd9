"""`fastpar plan`: what it prints is what was computed, its command runs, its mistakes are told."""

import json
import re
import shlex
from dataclasses import replace

import pytest
from lone_rank import LoneMesh, heard

from bench.peers.published import predict, published
from fastpar import GPT, engine_of, parallelize
from fastpar.axes import wires
from fastpar.axes.step import Setup
from fastpar.cli import main, parse_train
from fastpar.comm.wires import FORMATS
from fastpar.engine.debug import Debug
from fastpar.predict import plan
from fastpar.predict.plan import PlanCommand
from fastpar.predict.search import MachinePrices
from fastpar.predict.time import predict_step
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel


def run(capsys, *words):
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main(["plan", *words]) == 2
    return capsys.readouterr().err


def test_the_readme_example(capsys, tmp_path):
    out = run(
        capsys, "--model", "gpt2-xl", "--gpus", "8", "--gpu", "h100", "--json", f"{tmp_path}/p.json"
    )
    assert "1,557,686,400 parameters" in out
    assert "8 x h100" in out
    stored = json.loads((tmp_path / "p.json").read_text())
    winner = stored["layouts"][0]
    assert winner["fits"]
    times = [row["time"]["step_s"] for row in stored["layouts"] if row["fits"]]
    assert times[1:] == sorted(times[1:])
    assert f"{winner['memory_bytes']['total'] / 1e9:,.1f} GB" in out
    assert all(
        row["memory_bytes"]["total"] <= stored["limit_bytes"]
        for row in stored["layouts"]
        if row["fits"]
    )
    assert "why not" in out


@pytest.mark.parametrize(
    "words",
    [
        "--model gpt2-xl --gpus 8 --gpu h100",
        "--model gpt2 --gpus 1 --gpu 4090",
        "--model gpt2-large --gpus 4 --gpu v100 --batch-size 32",
        "--model gpt2-medium --gpus 2 --gpu a100-40 --master-weights remainder --moment-dtype bf16",
        "--model mini --gpus 2 --gpu cpu",
        "--model gpt2 --n-layer 24 --n-embd 1536 --n-head 24 --block-size 2048 --gpus 6",
    ],
)
def test_the_command_is_the_layout_that_won(words, capsys, tmp_path):
    out = run(capsys, *words.split(), "--json", f"{tmp_path}/p.json")
    line = next(line for line in out.splitlines() if line.startswith("fastpar train "))
    config = parse_train(shlex.split(line)[2:])
    stored = json.loads((tmp_path / "p.json").read_text())
    winner, batch = stored["layouts"][0], stored["batch_size"]
    shape = config.model_config(stored["shape"]["vocab_size"])
    assert stored["shape"] == vars(shape)
    assert config.system.nproc == winner["world_size"]
    assert config.text.batch_size == batch
    dp = winner["world_size"] // (winner["tp"] * winner["pp"])
    assert config.batch(shape.block_size, dp) == (
        winner["micro_batch_size"],
        winner["grad_accum_steps"],
    )
    names = ("micro_batch_size", "grad_accum_steps")
    again = Setup(
        winner["world_size"],
        config,
        winner["device_type"],
        winner["transport"],
        **{name: winner[name] for name in names},
    ).in_effect()
    known = {k: v for k, v in winner.items() if k in again}
    if winner["tp"] == 1:  # of one rank nothing is shared out
        known["sequence_parallel"] = again["sequence_parallel"]
    assert again == known


def test_several_machines_are_started_by_torchrun(capsys):
    out = run(capsys, "--model", "gpt2-xl", "--gpus", "16", "--gpu", "a100", "--gpus-per-node", "4")
    assert re.search(r"torchrun --nnodes 4 --nproc-per-node 4 .* -m fastpar train ", out)


def test_64_gpus_on_8_nodes_by_their_links(capsys, tmp_path):
    """tp stays inside of nodes, slower adapters cost time, and what leaves through each is said."""
    words = ["--model", "gpt2", "--gpus", "64", "--gpus-per-node", "8", "--json"]
    took = {}
    for inter, adapters in {"ib-ndr": 8, "ethernet-400": 1, "ethernet-100": 1}.items():
        out = run(capsys, *words, f"{tmp_path}/p.json", "--inter-link", inter)
        layouts = json.loads((tmp_path / "p.json").read_text())["layouts"]
        winner, name = layouts[0], inter.replace("ethernet", "eth")
        took[inter] = min(row["time"]["step_s"] for row in layouts if row["fits"])
        assert f"64 x h100, 8 a node over nvlink4, 8 nodes over {name};" in out
        mb = winner["nic_bytes"] / 1e6
        text = f"{mb / 1e3:,.1f} GB" if mb >= 1e3 else f"{mb:,.0f} MB"
        assert f"\nnetwork  {text} a step leave through each adapter (NIC) of {name}\n" in out
        assert max(row["tp"] for row in layouts) <= 8
        plain = next(
            row for row in layouts
            if (row["tp"], row["pp"], row["zero_stage"], row["accumulate"]) == (1, 1, 0, "full")
        )  # fmt: skip
        sent = 124439808 * 4 * 2 / adapters  # an fp32 all-reduce: at most both ways all of it
        assert 0.85 * sent < plain["nic_bytes"] < 1.02 * sent
    assert took["ib-ndr"] < took["ethernet-400"] < took["ethernet-100"]
    assert "adapter (NIC)" not in run(capsys, "--gpus", "8")


def test_a_tenth_of_the_memory_stays_free(capsys, tmp_path):
    """Of layouts alike in speed the simplest that leaves room wins, not one that fills all."""
    where = ["--json", f"{tmp_path}/p.json"]
    limits = {}
    for headroom in (None, "0", "0.5"):
        out = run(capsys, *where, *(["--headroom", headroom] if headroom else []))
        stored = json.loads((tmp_path / "p.json").read_text())
        limits[headroom] = stored["limit_bytes"]
        percent = {None: "10%", "0": "0%", "0.5": "50%"}[headroom]
        assert (
            f"{limits[headroom] / 1e9:,.1f} GB a rank for tensors, {percent} less than there are "
            "(--headroom)" in out
        )
        winner = stored["layouts"][0]
        assert winner["memory_bytes"]["total"] <= limits[headroom]
    assert limits[None] == pytest.approx(0.9 * limits["0"])
    assert limits["0.5"] == pytest.approx(0.5 * limits["0"])


def test_a_model_that_only_the_headroom_refuses_is_told_so(capsys):
    words = "--model gpt2-large --gpus 1 --gpu a10 --batch-size 1 --headroom"
    run(capsys, *words.split(), "0")
    said = refused(capsys, *words.split(), "0.97")
    assert "GB less a headroom of 97%), got 774,090,240 parameters" in said
    assert "; use --headroom 0 (nothing stays free), or " in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model gpt3", r"plan: expected model to be one of gpt2, .* got model=gpt3"),
        ("--model gpt2-xk", r"did you mean gpt2-xl\?"),
        ("--gpus 0", r"plan: expected gpus >= 1, got gpus=0; set --gpus"),
        ("--batch-size -4", r"plan: expected batch_size >= 1, got batch_size=-4"),
        ("--block-size 0", r"plan: expected block_size >= 1, got block_size=0"),
        ("--gpu h1000", r"got name=.?h1000.*h100"),
        ("--link nvlink9", r"got name=.?nvlink9"),
        (
            "--gpus 60 --gpus-per-node 8",
            r"Cluster: expected full nodes of per_node=8, got n_devices=60; use a multiple",
        ),
        ("--gpus-per-node 0", r"plan: expected gpus_per_node >= 1, got gpus_per_node=0"),
        (
            "--headroom 1",
            r"plan: expected headroom from 0 to below 1, .* got headroom=1.0; set --h",
        ),
        ("--price -1", r"plan: expected price >= 0, got price=-1"),
        (
            "--gpus 13 --batch-size 7",  # more than the layers, so no pipeline either
            r"got batch_size=7 with gpus=13; use --batch-size 13 or 26",
        ),
        ("--gpu v100 --dtype bf16", r"expected fp16 or fp32 on v100.*got dtype=bf16"),
        ("--gpu cpu --dtype fp16 --gpus 1", r"expected dtype fp32 or bf16 on the CPU"),
        (
            "--gpus 6 --pp 4",
            r"pp to divide the 6 ranks and .* 12, of 12 layers, got pp=4; use --pp 2",
        ),
        ("--gpus 24 --pp 24", r"to be at most 12, of 12 layers, got pp=24; use --pp 6 or 8 or 12"),
        (
            "--n-layer 96 --n-embd 12288 --n-head 96 --gpus 8 --pp 4",
            r"fits into .* on .*pp 4, .* take [34]\d\d\.\d GB .*; use no --pp, which",
        ),
        (
            "--model gpt2-xl --gpus 1 --gpu 4090 --n-layer 400",
            r"plan: expected a model that fits into 2\d\.\d GB a rank .*, got .*; use .*--gpus \d",
        ),
    ],
)
def test_bad_input(words, said, capsys):
    assert re.search(said, refused(capsys, *words.split()))


def test_the_list_of_devices(capsys):
    out = run(capsys, "--gpu", "list")
    for name in ("v100", "a100", "h100", "h200", "b200", "l40s", "4090", "cpu", "ib-ndr"):
        assert name in out


def test_its_own_error_is_that_of_the_published_runs(capsys):
    worst = max(abs(predict(row)[1] / row.reported - 1) for row in published())
    assert worst <= plan.PUBLISHED_ERROR < worst + 0.02
    assert f"errors up to {plan.PUBLISHED_ERROR:.0%}" in run(capsys, "--gpus", "1")


def test_stages_can_be_asked_for(capsys, tmp_path):
    """Each layout has that many, however slow; 1: none has stages."""
    for pp in (1, 4):
        path = tmp_path / f"{pp}.json"
        out = run(capsys, "--gpus", "8", "--pp", f"{pp}", "--json", f"{path}")
        layouts = json.loads(path.read_text())["layouts"]
        assert {layout["pp"] for layout in layouts} == {pp}
        assert f"stages   {pp}, by --pp" in out
        assert ("--pp 4" in out.splitlines()[-1]) == (pp == 4)


def test_stages_of_zero_2_and_3_where_nothing_else_fits(capsys):
    big = "--n-layer 48 --n-embd 10240 --n-head 64 --gpus 64 --gpu a100 --pp 2 --gpus-per-node 1"
    assert "dp 32 x pp 2, ZeRO-3, interleaved" in run(capsys, *big.split())
    small = run(capsys, "--gpus", "8", "--pp", "2")
    assert "ZeRO-1" in small
    assert "ZeRO-3" not in small


SMALL = "--n-layer 2 --n-embd 96 --n-head 12 --block-size 24 --vocab-size 300 --batch-size 48"


@pytest.mark.parametrize("gpus", [2, 6, 16])
def test_parallelize_takes_every_layout(gpus, tmp_path, capsys):
    """All that was compared, not just the winner: on one real rank of a lone mesh."""
    where = ["--gpus", f"{gpus}", "--gpus-per-node", f"{min(gpus, 8)}", "--dtype", "fp32"]
    run(capsys, *SMALL.split(), *where, "--json", f"{tmp_path}/p.json")
    stored = json.loads((tmp_path / "p.json").read_text())
    seen = {(r["tp"], r["zero_stage"], r["shard_size"]): r for r in stored["layouts"]}
    assert len({tp for tp, _, _ in seen}) > 1
    for row in seen.values():
        with LoneMesh(gpus, 0, tp=row["tp"]) as mesh:
            model = GPT(GPTConfig(**stored["shape"]))
            parallelize(
                model,
                mesh,
                Parallel.of(
                    zero_stage=row["zero_stage"],
                    shard_size=row["shard_size"],
                    sequence_parallel=row["sequence_parallel"],
                    accumulate=row["accumulate"],
                    grad_accum_steps=row["grad_accum_steps"],
                ),
                debug=Debug(collectives=heard([])),
            )
            assert (
                engine_of(model).settings.n_shards == (row["shard_size"] or mesh.dp_size)
                or not row["zero_stage"]
            )


def test_a_layout_that_the_trainer_would_refuse_is_never_printed(monkeypatch):
    monkeypatch.setattr(plan, "refused", lambda workload, setup: "no")
    with pytest.raises(AssertionError, match="no"):
        plan.run(PlanCommand(gpus=1))


def test_formats_on_the_wire_are_priced():
    found = plan.make_plan(
        PlanCommand(gpu="a100", gpus=2, gpus_per_node=1, inter_link="eth-25", pp=1)
    )
    workload, setup, rates = found.workload, found.estimates[0].setup, found.rates
    prices, candidates = MachinePrices(rates, 2), wires.formats_of
    told, sent_bytes = wires.AXIS.what_if, prices.sent_bytes
    heading, *texts = told(workload, setup, prices)
    assert heading == "wires"
    lines = {line.split(":")[0].strip(): line for line in texts}
    assert {f"--wire-gradients {name}" for name in FORMATS} <= lines.keys()
    for line in lines.values():
        assert re.search(
            r"sends [\d.]+ [MG]B a step instead of .*; pays below [\d.,e+]+ Gbit/s", line
        )
    plain = sent_bytes(workload, setup)
    for flag, other in candidates(setup).items():
        sent = sent_bytes(workload, other)
        if flag not in lines:
            assert (flag, sent) == ("--wire-weights bf16", plain)  # as these weights are anyway
            continue
        # At the bandwidth of the line, what is saved on the wire is what the codes take.
        gbit = float(lines[flag].split("below ")[1].split(" Gbit")[0].replace(",", ""))
        plain_s, coded_s = prices.ops_s(workload, setup), prices.ops_s(workload, other)
        assert 8e-9 * (plain - sent) / gbit == pytest.approx(coded_s - plain_s, rel=2e-3)
    slow = predict_step(workload, setup, rates).step_s
    fast = predict_step(workload, candidates(setup)["--wire-gradients int8"], rates).step_s
    assert fast < slow
    flag, fp8 = "--fp8-scaling tensor --wire-weights fp8", replace(setup, zero_stage=3, fp8="all")
    assert flag not in candidates(replace(fp8, fp8="none")) | candidates(replace(fp8, zero_stage=2))
    assert any(text.strip().startswith(flag) for text in told(workload, fp8, prices))
    gathers = (2 * workload.shape.n_layer - 1) * setup.grad_accum_steps  # the last block's once
    saved = sent_bytes(workload, fp8) - sent_bytes(workload, candidates(fp8)[flag])
    assert saved == 12 * workload.shape.n_embd**2 * gathers / 2  # between two ranks
