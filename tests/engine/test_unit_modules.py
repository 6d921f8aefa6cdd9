"""gathers.py: which modules form a unit."""

import pytest
from test_units import C, Net
from torch import nn

from fastpar.engine.gathers import find_units, unit_of_parameters


def test_blocks_are_units_and_the_rest_is_the_roots():
    model = Net()
    units = find_units(model, None, merge_bytes=0)
    assert units == [[model], *([block] for block in model.h)]
    of = unit_of_parameters(units)
    assert {of[p] for p in (*model.first.parameters(), *model.last.parameters())} == {0}
    assert [of[block.weight] for block in model.h] == [1, 2, 3, 4]


def test_shared_parameters_belong_to_the_root():
    model = Net()
    model.h[2].weight = model.h[0].weight
    model.h[3].bias = model.first.bias
    of = unit_of_parameters(find_units(model, None, merge_bytes=0))
    assert of[model.h[0].weight] == of[model.first.bias] == 0
    assert of[model.h[0].bias] == 1


def test_containers_are_looked_through():
    inner = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
    model = nn.Sequential(
        nn.Linear(2, 2), nn.ModuleList([inner, nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2))
    )
    units = find_units(model, None, merge_bytes=0)
    assert units[1:] == [[model[0]], [inner[0]], [inner[2]], [model[1][1]], [model[2]]]


def test_small_neighbours_are_merged():
    model = Net()
    size = 4 * (C * C + C)
    assert [len(u) for u in find_units(model, None, merge_bytes=2 * size)] == [1, 2, 2]
    assert [len(u) for u in find_units(model, None, merge_bytes=3 * size)] == [1, 3, 1]
    assert [len(u) for u in find_units(model, None, merge_bytes=2 * size - 1)] == [1, 1, 1, 1, 1]


def test_units_by_hand():
    model = Net()
    by_type = find_units(model, nn.Linear, merge_bytes=0)
    assert by_type[1:] == [[model.first], *([b] for b in model.h)]
    assert find_units(model, [model.h[2], model.last], merge_bytes=0)[1:] == [
        [model.h[2]],
        [model.last],
    ]
    with pytest.raises(ValueError, match=r"units inside the model, got .* a Linear that"):
        find_units(model, [nn.Linear(2, 2)], merge_bytes=0)
    with pytest.raises(ValueError, match="beside each other, got units with a Linear inside"):
        find_units(model, [model.h, model.h[0]], merge_bytes=0)
