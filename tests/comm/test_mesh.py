"""mesh.py: where ranks come from, and what is refused before anything can hang."""

import dataclasses
import inspect
import itertools
import os
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fastpar.comm.mesh import AXES, Mesh, _pick_device, ranks_along
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
    mesh = Mesh()
    assert (mesh.dp_size, mesh.dp_rank, mesh.dp_group) == (1, 0, None)
    assert (mesh.world_size, mesh.rank, mesh.is_main) == (1, 0, True)
    assert not dist.is_initialized()
    mesh.close()


def test_the_models_of_tests_are_on_the_cpu(environment, monkeypatch):
    """conftest.py; otherwise a mesh takes the GPU that is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Mesh().device == torch.device("cpu")
    assert _pick_device(None, None, 0) == torch.device("cuda", 0)
    assert _pick_device(None, "gloo", 0) == torch.device("cpu")


def test_one_rank_under_torchrun_needs_no_group(environment):
    environment(**{**TORCHRUN, "WORLD_SIZE": "1"})
    assert Mesh(dp=1, device="cpu").dp_group is None
    assert not dist.is_initialized()


def test_every_public_attribute_is_documented():
    attributes = inspect.getdoc(Mesh).split("Attributes:")[1].split("Ranks:")[0]
    entries = re.findall(r"^    (\w[\w, ]*):", attributes, re.MULTILINE)
    documented = {name for entry in entries for name in entry.split(", ")}
    properties = {n for n, value in vars(Mesh).items() if isinstance(value, property)}
    public = {f.name for f in dataclasses.fields(Mesh)} | properties
    assert documented == {name for name in public if not name.startswith("_")}


def test_a_mesh_is_frozen(environment):
    with pytest.raises(dataclasses.FrozenInstanceError):
        Mesh().dp_size = 2


def test_an_existing_group_is_used():
    def ranks():
        mesh = Mesh(dp=4)
        mesh.close()  # not ours: stays
        assert dist.is_initialized()
        return mesh.dp_rank, mesh.dp_size, mesh.is_main, mesh.dp_group is dist.group.WORLD

    assert run_ranks(ranks, 4) == [(r, 4, r == 0, True) for r in range(4)]


def mesh_of_three():
    Mesh(dp=3)


@pytest.mark.parametrize("init", [pytest.param(True, marks=pytest.mark.slow), False])
def test_dp_must_be_the_number_of_ranks(init):
    errors = run_ranks(
        mesh_of_three, 2, backend="gloo", init=init, return_exceptions=True, timeout_s=30
    )
    message = r"expected dp equal to the number of ranks, got dp=3 with world_size=2; start 3 ranks"
    for error in errors:
        with pytest.raises(ValueError, match=message):
            raise error


@pytest.mark.parametrize("dp", [0, -1, True, 2.0])
def test_dp_must_be_a_positive_integer(dp):
    with pytest.raises(ValueError, match=rf"expected dp to be a positive integer.*got dp={dp}"):
        Mesh(dp=dp)


def test_timeout_must_be_positive():
    with pytest.raises(ValueError, match=r"expected timeout_s > 0, got timeout_s=0"):
        Mesh(timeout_s=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None}, r"expected torchrun's environment, got no MASTER_ADDR"),
        ({"RANK": None}, r"expected torchrun's environment, got no RANK"),
        ({"WORLD_SIZE": "two"}, r"expected an integer in the environment, got WORLD_SIZE=two"),
        ({"RANK": "-1"}, r"expected an integer in the environment, got RANK=-1"),
        ({"RANK": "2"}, r"expected RANK below WORLD_SIZE=2, got RANK=2"),
    ],
)
def test_bad_environment(environment, change, message):
    values = {**TORCHRUN, **change}
    environment(**{k: v for k, v in values.items() if v is not None})
    with pytest.raises(ValueError, match=message):
        Mesh(device="cpu")
    assert not dist.is_initialized()


def test_unreachable_ranks_are_reported(environment):
    environment(**{**TORCHRUN, "RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    message = r"expected 2 ranks to meet at 127\.0\.0\.1:1, got an error on rank 1"
    with pytest.raises(RuntimeError, match=message):
        Mesh(device="cpu", timeout_s=1)
    assert not dist.is_initialized()


def test_two_local_ranks_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"expected a GPU for every local rank, got LOCAL_RANK=1"):
        _pick_device(None, None, local_rank=1)


def test_a_scheduler_that_shows_each_task_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert _pick_device(None, None, local_rank=5) == torch.device("cuda", 0)


def test_check_same_names_the_first_difference_on_every_rank():
    def ranks():
        mesh = Mesh()
        lines = ["a", "b", "c"]
        mesh.check_same("load", lines)
        if mesh.dp_rank == 2:
            lines = ["a", "x"]
        mesh.check_same("load", lines)

    message = r"load: expected the same on every rank, got 'x' on rank 2 where rank 0 has 'b'"
    for error in run_ranks(ranks, 3, return_exceptions=True):
        if not isinstance(error, SystemExit):  # a thread that was stopped by the others' failure
            with pytest.raises(ValueError, match=message):
                raise error


def test_check_same_sees_a_missing_line():
    def ranks():
        mesh = Mesh()
        mesh.check_same("load", ["a"] if mesh.dp_rank else ["a", "b"])

    with pytest.raises(ValueError, match=r"got 'nothing' on rank 1 where rank 0 has 'b'"):
        run_ranks(ranks, 2)


def test_broadcast_copies_any_dtype_shape_and_stride():
    def ranks():
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
        one = torch.full((4, 4), float(r))
        mesh.broadcast_([one.t()])
        return [*tensors, one]

    first, second = run_ranks(ranks, 2)
    assert [t.float().flatten().tolist() for t in second] == [
        [1.0], [7.0] * 3, [1.5] * 6, [], [0.0] * 5, [0.0] * 16,
    ]  # fmt: skip
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def die_in_the_middle():
    mesh = Mesh(timeout_s=20, device="cpu")
    if mesh.rank == 1:
        os._exit(3)
    dist.barrier(group=mesh.dp_group)


def test_a_dead_rank_does_not_hang_the_others():
    results = run_ranks(
        die_in_the_middle, 2, backend="gloo", init=False, timeout_s=20, return_exceptions=True
    )
    assert all(isinstance(r, RuntimeError) for r in results)
    assert not any(isinstance(r, TimeoutError) for r in results)


# The axis tp


def places():
    mesh = Mesh(tp=2)
    sums = []
    for group in (mesh.dp_group, mesh.tp_group):
        total = torch.tensor([2.0**mesh.rank])
        dist.all_reduce(total, group=group)
        sums.append(int(total.item()))
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.device_mesh["tp"].get_group() is mesh.tp_group
    return mesh.rank, mesh.dp_rank, mesh.dp_size, mesh.tp_rank, mesh.tp_size, *sums


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_ranks_of_a_tp_group_are_neighbours(backend):
    assert run_ranks(places, 4, backend=backend) == [
        (0, 0, 2, 0, 2, 0b0101, 0b0011),
        (1, 0, 2, 1, 2, 0b1010, 0b0011),
        (2, 1, 2, 0, 2, 0b0101, 0b1100),
        (3, 1, 2, 1, 2, 0b1010, 0b1100),
    ]


def test_an_axis_of_one_rank_has_no_group():
    def rank():
        all_dp, all_tp = Mesh(), Mesh(tp=4)
        assert (all_dp.tp_size, all_dp.tp_rank, all_dp.tp_group) == (1, 0, None)
        assert (all_tp.dp_size, all_tp.dp_rank, all_tp.dp_group) == (1, 0, None)
        return dist.get_process_group_ranks(all_tp.tp_group)

    assert run_ranks(rank, 4) == [[0, 1, 2, 3]] * 4


def test_a_large_world_of_fake_ranks():
    """64 ranks of which one exists: dp=8, tp=8."""
    dist.init_process_group("fake", rank=43, world_size=64)
    try:
        mesh = Mesh(dp=8, tp=8)
        assert (mesh.dp_rank, mesh.tp_rank) == (5, 3)
        assert dist.get_process_group_ranks(mesh.tp_group) == list(range(40, 48))
        assert dist.get_process_group_ranks(mesh.dp_group) == list(range(3, 64, 8))
    finally:
        dist.destroy_process_group()


def test_broadcast_goes_along_one_axis():
    def rank():
        mesh, found = Mesh(tp=2), []
        for axis in ("dp", "tp"):
            x = torch.tensor([float(mesh.rank)])
            mesh.broadcast_([x], axis)
            found.append(int(x.item()))
        return found

    assert run_ranks(rank, 4) == [[0, 0], [1, 0], [0, 2], [1, 2]]


@pytest.mark.parametrize("tp", [0, -2, True, 2.0, None])
def test_tp_must_be_a_positive_integer(tp):
    message = rf"Mesh: expected tp to be a positive integer, got tp={tp}; leave tp out to split no"
    with pytest.raises(ValueError, match=message):
        Mesh(tp=tp)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tp": 3},
            r"Mesh: expected tp to divide the number of ranks, got tp=3 with world_size=4; start a "
            r"multiple of 3 ranks",
        ),
        ({"tp": 8}, r"expected tp to divide the number of ranks, got tp=8 with world_size=4"),
        (
            {"dp": 4, "tp": 2},
            r"Mesh: expected dp \* tp equal to the number of ranks, got dp=4, tp=2 with "
            r"world_size=4; start 8 ranks \(torchrun --nproc-per-node 8\) or leave dp out",
        ),
        ({"dp": 1, "tp": 2}, r"got dp=1, tp=2 with world_size=4; start 2 ranks"),
        ({"dp": 2, "tp": 1}, r"expected dp equal to the number of ranks, got dp=2"),
    ],
)
def test_axes_that_do_not_make_the_world(sizes, message):
    def rank():
        with pytest.raises(ValueError, match=message):
            Mesh(**sizes)

    run_ranks(rank, 4)


def test_wrong_sizes_are_refused_before_a_connection(environment):
    environment(**TORCHRUN)
    with pytest.raises(ValueError, match=r"got tp=3 with world_size=2"):
        Mesh(tp=3, device="cpu")
    assert not dist.is_initialized()


def time_outs():
    mesh = Mesh(device="cpu", timeout_s=77.0, tp=1)
    groups = [mesh.dp_group, mesh.new_group("dp")]
    return [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups]


def test_every_group_has_the_time_out_of_the_mesh():
    assert run_ranks(time_outs, 2, backend="gloo") == [[77, 77]] * 2


# Any axes


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


def coordinates():
    mesh = Mesh(pp=2, tp=2).with_replicas(2)
    for axes in itertools.combinations(AXES, 2):
        assert mesh.size(*axes) == dist.get_world_size(mesh.group(*axes))
        assert mesh.rank_in(*axes) == dist.get_rank(mesh.group(*axes))
    assert mesh.rank_in(*AXES) == mesh.rank
    assert mesh.group(*AXES) is dist.group.WORLD
    assert mesh.group("pp", "tp") is mesh.group("tp", "pp", "cp")
    assert mesh.new_group("tp") is not mesh.group("tp")
    assert mesh.device_mesh.mesh_dim_names == ("pp", "replicas", "tp")
    return [mesh.rank_in(axis) for axis in ("pp", "replicas", "tp")]


def test_every_rank_has_its_place_on_every_axis():
    assert run_ranks(coordinates, 8) == [list(x) for x in itertools.product(range(2), repeat=3)]


def test_copies_of_a_sharded_model():
    """Those of one copy are neighbours; both meshes have the groups of the same ranks in common."""

    def rank():
        mesh = Mesh(tp=2)
        other = mesh.with_replicas(2)
        assert (other.dp_size, other.dp_rank) == (mesh.dp_size, mesh.dp_rank) == (4, mesh.rank // 2)
        assert other.dp_group is mesh.dp_group
        assert other.tp_group is mesh.tp_group
        with pytest.raises(
            ValueError, match=r"expected replicas to divide the 4 ranks .*replicas=3"
        ):
            mesh.with_replicas(3)
        return [dist.get_process_group_ranks(other.group(axis)) for axis in ("replicas", "dp")]

    found = run_ranks(rank, 8)
    assert found[0] == [[0, 4], [0, 2]]
    assert found[7] == [[3, 7], [5, 7]]


def test_a_network_that_does_not_work_shows_at_the_start(monkeypatch):
    def all_reduce(x, group):
        if dist.get_world_size(group) == 2:
            raise RuntimeError("no route to host")

    def rank():
        Mesh(tp=2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)  # here: the ranks are threads
    message = (
        r"Mesh: expected the 2 ranks along replicas, dp, ep to reach each other, got an error on "
    )
    with pytest.raises(RuntimeError, match=message + r"rank \d \(no route to host\); check that"):
        run_ranks(rank, 4)


def test_an_unknown_axis_is_named():
    with pytest.raises(ValueError, match=r"expected axes of pp, replicas, .*got axis='data'"):
        Mesh().size("data")


def test_ranks_of_ep_are_among_those_of_dp():
    def rank():
        mesh = Mesh(dp=4, ep=2, tp=2)
        return mesh.sizes["dp"], mesh.dp_size, mesh.dp_rank, mesh.rank_in("ep"), mesh.tp_rank

    assert run_ranks(rank, 8) == [(2, 4, r // 2, r // 2 % 2, r % 2) for r in range(8)]
    with pytest.raises(ValueError, match=r"expected ep to divide dp=4, got ep=3; choose another"):
        run_ranks(lambda: Mesh(ep=3), 4)


def test_a_grid_is_rows_of_tp():
    def rank():
        mesh = Mesh(tp_grid=(2, 2, 2), dp=2)
        place = tuple(mesh.place[axis] for axis in ("dp", "depth", "rows", "tp"))
        return place, mesh.tp_size, mesh.tp_rank, mesh.dp_size, mesh.dp_rank

    expected = [
        ((r // 8, r // 4 % 2, r // 2 % 2, r % 2), 4, r % 4, 2, r // 8)  # depth reads one batch
        for r in range(16)
    ]
    assert run_ranks(rank, 16) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"tp_grid": grid}, r"tp_grid of two or three positive integers, .* pass \(2, 2\), or")
            for grid in ((2,), (1, 1), (0, 2), (2, 2, 2, 2), "2x2", (2, True), 4)
        ),
        *(
            ({"tp_grid": (2, 1), axis: 2}, rf"^tp_grid does not run with {axis}")
            for axis in ("tp", "cp", "ep", "pp")
        ),
        ({"tp_grid": (2, 2)}, r"expected rows \* tp to divide the number of ranks, got .*size=2;"),
    ],
)
def test_what_is_no_grid(options, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(lambda: Mesh(**options), 2)


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


def test_ep_needs_a_model_with_experts():
    def rank():
        parallelize(torch.nn.Linear(2, 2), Mesh(ep=2))

    message = r"expected a fastpar.GPT with experts for ep=2, got Linear without; .* leave ep out"
    with pytest.raises(ValueError, match=message):
        run_ranks(rank, 2)
