"""The table of attention tiles: complete, checked, rewritable."""

import json

import pytest
from cells import sweep

from fastpar.kernels.attention import plans as configs
from fastpar.kernels.attention.plans import TABLE, Config, candidates, get_config
from fastpar.kernels.config_table import render

PLACES = [(k, d, v) for k in configs.KERNELS for d in configs.HEAD_DIMS for v in configs.VARIANTS]


@pytest.fixture
def path(tmp_path):
    copy = tmp_path / "configs.json"
    copy.write_text(TABLE.path.read_text())
    return copy


def test_every_place_has_a_config():
    assert set(TABLE.load(TABLE.path)) == {(a, *place) for a in (80, 86, 90) for place in PLACES}


def test_the_file_is_as_write_makes_it():
    assert render(json.loads(TABLE.path.read_text())) == TABLE.path.read_text()


@sweep(
    ("arch", "table"),
    [(75, 86), (80, 80), (86, 86), (87, 80), (89, 86), (90, 90), (100, 90), (103, 90), (120, 86)],
)
def test_every_gpu_has_a_table(arch, table):
    assert configs.table_for(arch) == table
    for place in PLACES:
        config, shipped = get_config(arch, *place), TABLE.load(TABLE.path)[(table, *place)]
        assert config == (shipped if arch == 90 else shipped._replace(load="ptr"))


def test_tensor_memory_accelerator_is_used_on_hopper_only():
    assert any(c.load == "tma" for c in TABLE.load(TABLE.path).values())
    assert all(c.load == "ptr" for (arch, *_), c in TABLE.load(TABLE.path).items() if arch != 90)


def test_dropout_reads_keys_by_pointers():
    """In an order that a descriptor's box does not have."""
    for (_, kernel, _, variant), config in TABLE.load(TABLE.path).items():
        if variant == "dropout" and kernel != "bwd_dkdv":
            assert config.load == "ptr"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("block_q", 48, "expected a power of 2 in .16, 256., got block_q=48"),
        ("block_k", 512, "expected a power of 2 in .16, 256., got block_k=512"),
        ("num_warps", 3, "expected 1, 2, 4 or 8, got num_warps=3"),
        ("num_stages", 0, "expected 1 to 5, got num_stages=0"),
        ("load", "dma", "expected ptr, or tma in the table 90, got load=dma"),
        ("load", "tma", "expected ptr, or tma in the table 90, got load=tma"),
    ],
)
def test_an_impossible_entry_is_named(path, field, value, rule):
    table = json.loads(path.read_text())
    table["80"]["bwd_dq"]["64"]["dropout"][field] = value
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=f"{rule} at 80 / bwd_dq / 64 / dropout; correct"):
        TABLE.load(path)


def test_a_missing_entry_is_named(path):
    table = json.loads(path.read_text())
    del table["90"]["fwd"]["128"]
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"the fields block_q.* got entry=None at 90 / fwd / 128"):
        TABLE.load(path)


def test_write_changes_one_line(path):
    config = Config(32, 64, 2, 3, "tma")
    TABLE.write(90, ("bwd_dkdv", 32, "plain"), config, path)
    before, after = TABLE.path.read_text().splitlines(), path.read_text().splitlines()
    assert sum(a != b for a, b in zip(before, after)) == 1
    assert len(before) == len(after)
    assert TABLE.load(path)[90, "bwd_dkdv", 32, "plain"] == config


def test_calls_after_write_use_it(path, monkeypatch):
    monkeypatch.setattr(TABLE, "path", path)
    config = Config(16, 16, 1, 1, "ptr")
    try:
        assert get_config(80, "fwd", 64, "plain") != config
        TABLE.write(80, ("fwd", 64, "plain"), config)
        assert get_config(80, "fwd", 64, "plain") == config
    finally:
        get_config.cache_clear()


def test_write_refuses_a_place_that_does_not_exist(path):
    config = get_config(80, "fwd", 64, "plain")
    with pytest.raises(ValueError, match=r"expected a place of .* got place=80 / fwd / 48 / plain"):
        TABLE.write(80, ("fwd", 48, "plain"), config, path)


@sweep("place", PLACES)
@sweep("arch", [80, 86, 90])
def test_candidates_are_possible_and_several(arch, place):
    found = candidates(arch, *place)
    assert len(set(found)) == len(found) >= 3
    for config in found:
        TABLE.check((arch, *place), config._asdict())


def test_trying_reaches_every_gpu_and_is_undone():
    place, tried = ("fwd", 64, "plain"), Config(32, 32, 4, 1, "tma")
    before = get_config(90, *place), get_config(80, *place)
    with TABLE.trying(place, tried):
        assert get_config(90, *place) == tried
        assert get_config(80, *place) == tried._replace(load="ptr")
        assert get_config(90, "fwd", 64, "dropout") != tried
    assert (get_config(90, *place), get_config(80, *place)) == before


def test_the_tile_that_the_compiler_counts_as_better_is_tried():
    assert Config(64, 128, 4, 2, "tma") in candidates(90, "bwd_dq", 64, "plain")
