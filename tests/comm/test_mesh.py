"""mesh.py: where ranks come from, their places, and what is refused before anything can hang."""

import dataclasses
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from cells import sweep
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fastpar.comm.mesh import AXES, Mesh, _pick_device, gather_objects, gather_tensors, ranks_along
from fastpar.comm.ranks import Ranks, make_store
from fastpar.engine.parallelize import parallelize
from fastpar.testing import run_ranks

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    def set_environment(**values):
        for name in (*TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    set_environment()
    return set_environment


def test_one_process_needs_no_group(environment):
    for values in ({}, {**TORCHRUN, "WORLD_SIZE": "1"}):
        environment(**values)
        mesh = Mesh()
        assert (mesh.dp_size, mesh.dp_rank, mesh.dp_group) == (1, 0, None)
        assert (mesh.world_size, mesh.rank, mesh.is_main) == (1, 0, True)
        assert not dist.is_initialized()
        mesh.close()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.dp_size = 2


def test_the_device_of_a_rank(environment, monkeypatch):
    """conftest.py keeps the models of tests on the CPU, beside a GPU too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Mesh().device == torch.device("cpu")
    assert _pick_device(None, None, 0) == torch.device("cuda", 0)
    assert _pick_device(None, "gloo", 0) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"expected a GPU for every local rank, got LOCAL_RANK=1"):
        _pick_device(None, None, local_rank=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")  # a scheduler that shows each task one GPU
    assert _pick_device(None, None, local_rank=5) == torch.device("cuda", 0)


GRID_WORDS = r"tp_grid of two or three positive integers .* pass \(2, 2\), for"
REFUSED = [  # settings, ranks, words
    *(({"dp": x}, 1, f"expected dp to be a positive integer.*got dp={x}") for x in (0, True, 2.0)),
    *(
        ({"tp": x}, 1, f"Mesh: expected tp to be a positive integer, got tp={x}; drop tp to")
        for x in (-2, True, None)
    ),
    ({"timeout_s": 0}, 1, r"expected timeout_s > 0, got timeout_s=0"),
    ({"tp": 3}, 4, r"Mesh: expected tp to divide .* got tp=3 with world_size=4; start a mult"),
    ({"dp": 4, "tp": 2}, 4, r"dp \* tp equal .* got dp=4, tp=2 with world_size=4; start 8 "),
    ({"dp": 1, "tp": 2}, 4, r"got dp=1, tp=2 with world_size=4; start 2 ranks"),
    ({"dp": 2, "tp": 1}, 4, r"expected dp equal to the number of ranks, got dp=2"),
    ({"dp": 3}, 2, r"equal to the number of ranks, got dp=3 with world_size=2; start 3 ranks"),
    ({"ep": 3}, 4, r"expected ep to divide dp=4, got ep=3; choose another"),
    *(({"tp_grid": x}, 2, GRID_WORDS) for x in ((2,), (1, 1), (0, 2), (2, 2, 2, 2), "2x2", 4)),
    ({"tp_grid": (2, 1), "cp": 2}, 2, "^tp_grid does not support cp"),
    ({"tp_grid": (2, 2)}, 2, r"expected rows \* tp to divide the number of ranks, got .*size=2;"),
]


@sweep(["settings", "ranks", "words"], REFUSED)
def test_what_is_no_mesh(settings, ranks, words):
    for error in run_ranks(lambda: Mesh(**settings), ranks, return_exceptions=True):
        assert isinstance(error, ValueError | SystemExit)  # one that was stopped by the others
    with pytest.raises(ValueError, match=words):
        run_ranks(lambda: Mesh(**settings), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"MASTER_ADDR": None},
            {},
            r"torchrun's environment, got none with MASTER_ADDR; start with",
        ),
        ({"RANK": None}, {}, r"torchrun's environment, got none with RANK; start with"),
        ({"WORLD_SIZE": "two"}, {}, r"expected an integer in the environment, got WORLD_SIZE=two"),
        ({"RANK": "-1"}, {}, r"expected an integer in the environment, got RANK=-1"),
        ({"LOCAL_WORLD_SIZE": "x"}, {}, r"integer in the environment, got LOCAL_WORLD_SIZE=x"),
        ({"RANK": "2"}, {}, r"expected RANK below WORLD_SIZE=2, got RANK=2"),
        ({}, {"tp": 3}, r"got tp=3 with world_size=2"),  # before anything connects
        ({"RANK": "1"}, {"timeout_s": 1}, r"rank 1 could not connect 2 ranks at 127\.0\.0\.1:1 \("),
    ],
)
def test_ranks_that_do_not_meet(environment, change, options, message):
    values = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", **change}
    environment(**{k: v for k, v in values.items() if v is not None})
    with pytest.raises((ValueError, RuntimeError), match=message):
        Mesh(device="cpu", **options)
    assert not dist.is_initialized()


def test_other_refusals(monkeypatch):
    with pytest.raises(ValueError, match=r"expected an axis of pp, replicas, .*got axis='data'"):
        Mesh().size("data")
    message = r"ep=2 needs a fastpar.GPT with experts, got Linear without; .* drop ep"
    with pytest.raises(ValueError, match=message):
        run_ranks(lambda: parallelize(torch.nn.Linear(2, 2), Mesh(ep=2)), 2)

    def all_reduce(x, group):  # a network that does not work shows at the start
        if dist.get_world_size(group) == 2:
            raise RuntimeError("no route to host")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)  # here: the ranks are threads
    message = r"Mesh: the 2 ranks along replicas, dp, ep could not reach each other \(rank \d: "
    with pytest.raises(RuntimeError, match=message + r"no route to host\); check"):
        run_ranks(lambda: Mesh(tp=2), 4)


def test_check_same_names_the_first_difference_on_every_rank():
    def ranks(differs):
        mesh = Mesh()
        mesh.check_same("load", ["a", "b", "c"])
        mesh.check_same("load", differs if mesh.dp_rank == 2 else ["a", "b"])

    for differs, text in ((["a", "x"], "'x'"), (["a"], "'nothing'")):
        words = f"load: ranks differ: {text} on rank 2, 'b' on rank 0; give"
        errors = run_ranks(ranks, 3, differs, return_exceptions=True)
        # A thread may have been stopped by the others' failure.
        said = [str(error) for error in errors if not isinstance(error, SystemExit)]
        assert said
        assert all(text.startswith(words) for text in said)


def test_broadcast_copies_any_dtype_shape_and_stride():
    def rank():
        mesh = Mesh()
        r = mesh.dp_rank
        tensors = [
            torch.tensor(r == 0),
            torch.full((3,), 7 - r, dtype=torch.int64),
            torch.full((2, 3), 1.5 + r, dtype=torch.bfloat16).t(),
            torch.zeros(0),
            torch.full((5,), float(r), dtype=torch.float64),
        ]
        mesh.broadcast_(tensors)
        mesh.broadcast_([])
        return [t.float().flatten().tolist() for t in tensors]

    assert run_ranks(rank, 2) == [[[1.0], [7.0] * 3, [1.5] * 6, [], [0.0] * 5]] * 2


def from_torchruns_environment():
    """(Its groups are real ones with the mesh's time-out, and end with the mesh.)"""
    assert not dist.is_initialized()
    mesh = Mesh(dp=2, tp=2, timeout_s=77.0, device="cpu")
    sums, again = [], Mesh(tp=2, device="cpu")
    for axis in ("dp", "tp"):
        total, x = torch.tensor([2.0**mesh.rank]), torch.tensor([float(mesh.rank)])
        dist.all_reduce(total, group=mesh.group(axis))
        mesh.broadcast_([x], axis)
        sums += [int(total.item()), int(x.item())]
        for group in (mesh.group(axis), mesh.new_group(axis)):
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout.seconds == 77
    assert mesh.device_mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.device_mesh["tp"].get_group() is mesh.tp_group
    assert (mesh.owns_process_group, again.owns_process_group) == (True, False)
    again.close()  # the group is not its own: it stays
    assert (str(mesh.device), dist.get_backend()) == ("cpu", "gloo")
    mesh.close()
    assert not dist.is_initialized()
    return mesh.rank, mesh.dp_rank, mesh.dp_size, mesh.tp_rank, mesh.tp_size, *sums


@pytest.mark.slow
def test_ranks_of_torchruns_environment():
    """Those of a tp group are neighbours; a broadcast goes along one axis."""
    found = run_ranks(from_torchruns_environment, 4, backend="gloo", init=False)
    assert found == [
        (0, 0, 2, 0, 2, 0b0101, 0, 0b0011, 0),
        (1, 0, 2, 1, 2, 0b1010, 1, 0b0011, 0),
        (2, 1, 2, 0, 2, 0b0101, 0, 0b1100, 2),
        (3, 1, 2, 1, 2, 0b1010, 1, 0b1100, 2),
    ]


def exchanged():
    """What two ranks receive of each other."""
    rank = dist.get_rank()
    values = gather_objects({"rank": rank, "a": [None, 0.1, "\u00e9" * 40 * rank]})
    tensors = {
        "wide": torch.full((2, 3), 1 / 3 + rank, dtype=torch.float64),
        "narrow": torch.tensor(1.5 + rank, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "some": torch.arange(3 + rank, dtype=torch.int16)[::2],
    }
    return values, tensors, gather_tensors(tensors)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_values_and_tensors_of_every_rank_arrive(backend):
    found = run_ranks(exchanged, 2, backend=backend)
    assert found[0][0] == found[1][0]
    assert [value["rank"] for value in found[0][0]] == [0, 1]
    assert found[0][0][1]["a"] == [None, 0.1, "\u00e9" * 40]
    for _, _, received in found:
        for (_, sent, _), theirs in zip(found, received, strict=True):
            assert list(theirs) == list(sent)
            for name, value in sent.items():
                assert_close(theirs[name], value, rtol=0, atol=0)
    with pytest.raises(TypeError, match="not JSON serializable"):  # nothing is pickled
        run_ranks(gather_objects, 1, {1j}, backend="threads")


def start_over(rank, first):
    """A rank of one start; those of the first one leave without a word."""
    if rank.rank == 0:
        time.sleep(0.5)  # the others find what is old
    mesh = Mesh(timeout_s=60.0, device="cpu")
    x = torch.tensor([float(rank.rank)])
    dist.all_reduce(x)
    return mesh.start, x.item() if first else gather_objects(rank.rank, dist.group.WORLD)


def arrives_late():
    mesh = Mesh(dp=2, device="cpu", timeout_s=1.0)
    mesh.trust_watchdog()
    found = []
    for group in (mesh.group(*AXES), mesh.new_group("dp")):
        if mesh.rank == 1:
            time.sleep(2.5)
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        found.append(x.item())
    return found


@pytest.mark.slow
def test_a_watchdog_decides_how_long_collectives_wait():
    """The groups' timeouts count time in which a process was stopped."""
    assert run_ranks(arrives_late, 2, backend="gloo", init=False) == [[2.0, 2.0]] * 2


@pytest.mark.slow
def test_a_store_that_was_used_before(capfd):
    """torchrun's store is so after a restart: no rank finds one of the start before."""
    store, names = make_store(), []
    for start, world_size in enumerate((2, 3)):
        with Ranks(
            world_size, place=lambda rank, command: (command, {"MASTER_PORT": str(store.port)})
        ) as ranks:
            found = ranks.call(start_over, start == 0)
        assert all(one == found[0] for one in found)
        names.append(found[0][0])
    assert names[0] != names[1]
    assert "failed to connect" not in capfd.readouterr().err


@given(st.lists(st.integers(1, 3), min_size=8, max_size=8), st.sets(st.sampled_from(AXES)))
def test_groups_along_any_axes(counts, axes):
    """Against the definition: ranks are in one group if their other coordinates agree."""
    sizes = dict(zip(AXES, counts))
    everyone = list(itertools.product(*map(range, counts)))  # rank -> its coordinates
    expected = {}
    for rank, place in enumerate(everyone):
        others = tuple(x for axis, x in zip(AXES, place) if axis not in axes)
        expected.setdefault(others, []).append(rank)
    assert sorted(ranks_along(sizes, axes)) == sorted(expected.values())


def test_every_rank_has_its_place_on_every_axis():
    def rank():
        whole = Mesh(pp=2, tp=2)
        mesh = whole.with_replicas(2)  # copies of a sharded model
        assert (mesh.dp_size, mesh.dp_rank) == (whole.dp_size, whole.dp_rank)
        assert (mesh.dp_group, mesh.tp_group) == (whole.dp_group, whole.tp_group)
        with pytest.raises(ValueError, match=r"replicas to divide the 2 ranks .*replicas=3"):
            whole.with_replicas(3)
        for axes in itertools.combinations(AXES, 2):
            assert mesh.size(*axes) == dist.get_world_size(mesh.group(*axes))
            assert mesh.rank_in(*axes) == dist.get_rank(mesh.group(*axes))
        assert mesh.rank_in(*AXES) == mesh.rank
        assert mesh.group(*AXES) is dist.group.WORLD
        assert mesh.group("pp", "tp") is mesh.group("tp", "pp", "cp")
        assert mesh.new_group("tp") is not mesh.group("tp")
        assert mesh.device_mesh.mesh_dim_names == ("pp", "replicas", "tp")
        return [mesh.rank_in(axis) for axis in ("pp", "replicas", "tp")]

    assert run_ranks(rank, 8) == [list(x) for x in itertools.product(range(2), repeat=3)]


@sweep(
    ["settings", "ranks", "sizes"],  # sizes of the places, the outermost first
    [
        ({"tp": 4}, 4, {"dp": 1, "tp": 4}),
        ({"dp": 4, "ep": 2, "tp": 2}, 8, {"dp": 2, "ep": 2, "tp": 2}),  # ep's are among dp's
        # A grid is rows of tp; depth reads one batch.
        ({"tp_grid": (2, 2, 2), "dp": 2}, 16, {"dp": 2, "depth": 2, "rows": 2, "tp": 2}),
    ],
)
def test_places_of_ranks(settings, ranks, sizes):
    def rank():
        mesh = Mesh(**settings)
        assert (mesh.dp_group is None) == (mesh.dp_size == 1)
        assert (mesh.dp_size, mesh.tp_size) == (mesh.size("dp", "ep"), mesh.size("rows", "tp"))
        assert mesh.dp_rank == mesh.rank_in("dp", "ep")
        assert mesh.tp_rank == mesh.rank_in("rows", "tp")
        return dict(mesh.place)

    places = itertools.product(*map(range, sizes.values()))
    for place, expected in zip(run_ranks(rank, ranks), places, strict=True):
        assert place == {**place, **dict(zip(sizes, expected))}


def test_replicas_that_train_apart_are_the_outermost_dimension():
    def rank():
        mesh = Mesh(tp=2, replicas=2, device="cpu")
        groups = mesh.group("dp", "tp"), mesh.tp_group, mesh.outer_group
        found = [dist.get_process_group_ranks(group) for group in groups]
        return (mesh.replica, mesh.rank, mesh.world_size), *found

    for number, (place, whole, tp, outer) in enumerate(run_ranks(rank, 8)):
        replica, mine = divmod(number, 4)
        assert place == (replica, mine, 4)
        assert whole == list(range(4 * replica, 4 * replica + 4))
        assert tp == [number - number % 2, number - number % 2 + 1]
        assert outer == [mine, mine + 4]
