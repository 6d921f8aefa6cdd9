"""Pipelines: schedules that are complete and able to run, with the bubbles and peaks of their
papers; cuts by cost, the best of all ways to cut."""

import itertools

import pytest
from cells import slow, sweep
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpar.axes.pipeline import schedules
from fastpar.settings.mesh import CHUNKS


def most_held(ops):
    """Micro-batches of chunks that a rank holds at once."""
    return max(itertools.accumulate(1 if op.kind is schedules.Kind.FORWARD else -1 for op in ops))


def check(schedule):
    """A rank has each operation once, and each chunk's in the order of the micro-batches; the other
    side receives in the order of sending, as stages post no other (pipeline/stages.py); none waits
    for ever."""
    kinds = set(schedules.Kind)
    for ops in schedule.ops:
        assert {op.kind for op in ops} == kinds
        for chunk, kind in itertools.product(range(schedule.chunks), kinds):
            micros = [op.micro for op in ops if op.kind is kind and op.chunk == chunk]
            assert micros == list(range(schedule.micro_batches)), "in order"
    for pair in itertools.permutations(range(schedule.ranks), 2):
        sent, received = messages(schedule, *pair)
        assert sent == received, "received"
    schedules.in_order(schedule)


def messages(schedule, sender, receiver):
    """Those of each kind as one rank sends and the other receives them: (stage, micro-batch)."""
    sides = [], []
    for rank, other, side in ((sender, receiver, sides[0]), (receiver, sender, sides[1])):
        for op in schedule.ops[rank]:
            forward, stage = op.kind is schedules.Kind.FORWARD, schedule.stage_of(rank, op.chunk)
            there = stage + (1 if forward == (rank == sender) else -1)
            if not 0 <= there < schedule.stages:
                continue
            if schedule.owner(there)[0] == other:
                side.append((not forward, there if rank == sender else stage, op.micro))
        side.sort(key=lambda message: message[0])
    return sides


@pytest.mark.slow
@pytest.mark.parametrize(
    "micro_batches",
    [
        lambda p: {1, 3, p + 1, 2 * p - 1} if p < 8 else {p // 2},
        slow(lambda p: range(1, 33) if p < 7 else (*range(1, 10), 16, 31, 32)),
    ],
    ids=["some", "most"],
)
def test_every_schedule_is_complete_and_can_run(micro_batches):
    for name, p, chunks in itertools.product(schedules.RULES, range(1, 17), range(1, 5)):
        if chunks in CHUNKS.get(name, [1]):
            for m in micro_batches(p):
                check(schedules.make_schedule(name, p, m, chunks))


# p, m: makespan over the ideal - 1, and micro-batches of a whole rank's layers held at most.
PUBLISHED = {
    (2, 8): [(0.125, 8), (0.125, 2), (0.062, 2.5), (0.042, 2.33)],
    (4, 8): [(0.375, 8), (0.375, 4), (0.188, 5.5), (0.125, 5)],
    (4, 16): [(0.188, 16), (0.188, 4), (0.094, 5.5), (0.062, 5)],
    (8, 32): [(0.219, 32), (0.219, 8), (0.109, 11.5), (0.073, 10.33)],
}
COLUMNS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize(("p", "m"), PUBLISHED)
def test_bubbles_and_peaks(p, m):
    for (name, v), (bubble, peak) in zip(COLUMNS, PUBLISHED[p, m]):
        costs = schedules.Costs([1 / v] * (p * v), [2 / v] * (p * v))
        makespan, busy = schedules.time_of(name, p, m, v, costs, 0.0)
        assert busy == pytest.approx(3 * m)
        assert makespan / (3 * m) - 1 == pytest.approx(bubble, abs=6e-4), name
        held = max(map(most_held, schedules.make_schedule(name, p, m, v).ops)) / v
        assert held == pytest.approx(peak, abs=0.01), name


def test_stages_owners_and_messages_between_ranks():
    schedule = schedules.make_schedule("interleaved", 4, 8, 2)
    for stage in range(8):
        assert schedule.stage_of(*schedule.owner(stage)) == stage
    assert schedule.owner(7) == (3, 1)
    costs = schedules.Costs([1.0] * 4, [2.0] * 4)
    # Three boundaries are between ranks; twice each.
    times = (schedules.time_of("interleaved", 2, 1, 2, costs, message)[0] for message in (0.5, 0.0))
    with_them, without = times
    assert with_them - without == pytest.approx(6 * 0.5)


def test_a_schedule_that_waits_for_itself_is_found():
    schedule = schedules.make_schedule("1f1b", 2, 3)
    backward_first = tuple(tuple(sorted(ops, key=lambda op: op.kind.value)) for ops in schedule.ops)
    with pytest.raises(ValueError, match=r"1f1b with pp=2 cannot run.* wait for each other"):
        check(schedule._replace(ops=backward_first))


BAD = [
    (("zb-v", 2, 4), r"one of gpipe, 1f1b, interleaved, got schedule='zb-v'; choose one"),
    (
        ("1f1b", 2, 4, 2),
        r"chunks to fit schedule=1f1b \(interleaved: 1 to 64, .*, got chunks=2; drop --chunks",
    ),
    (("1f1b", 0, 4), "at least one rank and one micro-batch, got pp=0 micro_batches=4"),
]


@sweep(("arguments", "message"), BAD)
def test_bad_schedules(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedules.make_schedule(*arguments)


def stage_costs(costs, counts):
    ends = [0, *itertools.accumulate(counts)]
    ends = [0, *(end + 1 for end in ends[1:-1]), len(costs)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9), st.sampled_from([1, 7])
)
def test_no_other_cut_is_better(costs, n_stages, head):
    costs = [0, *costs, head]
    n = len(costs) - 2
    n_stages = min(n_stages, n + 2)
    inner = n_stages - 2
    ways = [
        [n] if n_stages == 1 else [b - a for a, b in itertools.pairwise([0, *ends, n])]
        for ends in itertools.combinations_with_replacement(range(n + 1), n_stages - 1)
    ]
    ways = [way for way in ways if all(way[1 : 1 + max(0, inner)])]

    def order(way):
        each = stage_costs(costs, way)
        return max(each), sum(x * x for x in each)

    found = schedules.cut(costs, n_stages)
    assert len(found) == n_stages
    assert sum(found) == n
    assert all(found[1:-1])
    assert order(found) == min(map(order, ways))


@sweep(
    ("n_layer", "head", "n_stages", "expected"),
    [
        (12, 4.91, 2, [8, 4]),
        (12, 4.91, 4, [4, 4, 4, 0]),  # the head alone
        (48, 2.49, 4, [12, 13, 13, 10]),
        (48, 2.49, 1, [48]),
    ],
)
def test_the_shapes_of_gpt2(n_layer, head, n_stages, expected):
    assert schedules.cut([0.1, *[1.0] * n_layer, head], n_stages) == expected
    with pytest.raises(ValueError, match=r"cut: expected 1 to 4 stages .* n_stages=5; choose"):
        schedules.cut([0, 1, 1, 5], 5)
