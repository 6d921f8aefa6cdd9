"""Tables of tuning choices: what ships is possible; writing changes an entry, trying does not."""

import json

from cells import sweep

from fastpar import kernels  # noqa: F401  fills TABLES
from fastpar.kernels.attention.plans import TABLE, Config, candidates, get_config
from fastpar.kernels.config_table import TABLES, render, section_of

POSSIBLE = {"num_warps": (1, 2, 4, 8), "num_stages": range(1, 6), "registers": (64, 128)}
POSSIBLE |= dict.fromkeys(("block_q", "block_k"), (16, 32, 64, 128, 256))
POSSIBLE |= {"fwd_values": range(8, 65), "bwd_values": range(8, 25), "megabytes": range(1, 1025)}
PLACE, TRIED = ("fwd", 64, "plain"), Config(32, 32, 4, 1, "tma")


@sweep("name", TABLES)
def test_files_are_as_write_makes_them_and_candidates_possible(name):
    table = TABLES[name]
    assert render(json.loads(table.path.read_text())) == table.path.read_text()
    for key, config in table.load(table.path).items():
        found = table.candidates(*key)
        assert len(set(found)) == len(found) > 1
        for field, values in POSSIBLE.items():
            assert all(getattr(each, field, values[0]) in values for each in (config, *found))


@sweep(
    ("arch", "section"),
    [(75, 86), (80, 80), (86, 86), (87, 80), (89, 86), (90, 90), (100, 90), (103, 90), (120, 86)],
)
def test_every_gpu_has_tiles_of_attention(arch, section):
    """Only Hopper has descriptors; dropout reads keys in an order that their box has not."""
    assert section_of(arch) == section
    for place in TABLE.places:
        kernel, _, variant = place
        shipped = TABLE.load(TABLE.path)[(section, *place)]
        hopper = section == 90 and (variant != "dropout" or kernel == "bwd_dkdv")
        assert shipped.load == "ptr" or hopper
        config = get_config(arch, *place)
        assert config == (shipped if arch == 90 else shipped._replace(load="ptr"))
    # What the compiler counts as better is tried.
    assert Config(64, 128, 4, 2, "tma") in candidates(90, "bwd_dq", 64, "plain")


def test_write_changes_one_line_and_calls_after_it_use_it(tmp_path, monkeypatch):
    before, config = TABLE.path.read_text(), TRIED._replace(load="ptr")
    monkeypatch.setattr(TABLE, "path", tmp_path / "configs.json")
    TABLE.path.write_text(before)
    try:
        assert get_config(80, *PLACE) != config
        TABLE.write(80, PLACE, config)
        assert get_config(80, *PLACE) == config
    finally:
        get_config.cache_clear()
    lines = zip(before.splitlines(), TABLE.path.read_text().splitlines(), strict=True)
    assert sum(a != b for a, b in lines) == 1
    assert TABLE.load(TABLE.path)[(80, *PLACE)] == config


def test_trying_reaches_every_gpu_and_is_undone():
    before = get_config(90, *PLACE), get_config(80, *PLACE)
    with TABLE.trying(PLACE, TRIED):
        assert get_config(90, *PLACE) == TRIED
        assert get_config(80, *PLACE) == TRIED._replace(load="ptr")
        assert get_config(90, "fwd", 64, "dropout") != TRIED
    assert (get_config(90, *PLACE), get_config(80, *PLACE)) == before
