"""The named schedules against published figures, against torch's own rows and against what is said of them.

Times are in units of one operation of one stage unless said otherwise; "whole-rank units" divide by the stages of a position.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.lowering import v_patterns
from pdsl.lowering.schedule import Op, Schedule, ScheduleError, peak_in_flight
from pdsl.lowering.schedule_check import check_schedule
from pdsl.lowering.schedules import SCHEDULES, repeat
from pdsl.lowering.simulate import StageCosts, simulate


def made(name: str, positions: int, microbatches: int, virtual: int = 2) -> Schedule:
    return SCHEDULES[name].build(positions, microbatches, virtual if SCHEDULES[name].virtual else 1)


def step(schedule: Schedule, hop: int = 0) -> object:
    return simulate(schedule, StageCosts.equal(schedule.stages), hop=hop).makespan


def short(schedule: Schedule) -> list[str]:
    return [" ".join(f"{o.op.value}{o.microbatch}" for o in row) for row in schedule.rows]


def span(schedule: Schedule) -> object:
    """The longest time from the first to the last operation of a position."""
    timeline = simulate(schedule, StageCosts.equal(schedule.stages))
    return max(ends[-1] - starts[0] for starts, ends in zip(timeline.start, timeline.end, strict=True))


# --- published figures ------------------------------------------------------------------------------------------------------------------


def test_zero_bubble_has_the_published_order_on_three_positions_and_four_microbatches():
    assert short(made("zero_bubble", 3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


@pytest.mark.parametrize(
    ("size", "whole", "first", "second", "second_span"),
    [
        ((2, 4), 15, 13, 13, 12),
        ((3, 4), 18, 14, 14, 13),
        ((3, 6), 24, 20, 20, 18),
        ((4, 4), 21, 15, 16, 15),
        ((4, 6), 27, 21, 21, 19),
        ((4, 8), 33, 27, 27, 24),
    ],
)
def test_steps_with_one_stage_on_each_position(size, whole, first, second, second_span):
    assert step(made("one_f_one_b", *size)) == whole
    assert step(made("zero_bubble", *size)) == first
    assert step(made("zero_bubble_2", *size)) == second
    assert span(made("zero_bubble_2", *size)) == second_span


@pytest.mark.parametrize(
    ("name", "size", "halves"),
    [
        ("interleaved_1f1b", (2, 2), 15), ("interleaved_1f1b", (2, 4), 27), ("interleaved_1f1b", (2, 8), 51), ("interleaved_1f1b", (3, 3), 24),
        ("interleaved_1f1b", (3, 6), 42), ("interleaved_1f1b", (4, 4), 33), ("interleaved_1f1b", (4, 8), 57),
        ("looped_bfs", (2, 2), 15), ("looped_bfs", (2, 4), 27), ("looped_bfs", (2, 8), 51), ("looped_bfs", (3, 3), 24),
        ("looped_bfs", (3, 6), 42), ("looped_bfs", (4, 4), 33), ("looped_bfs", (4, 8), 57),
        ("interleaved_zero_bubble", (2, 4), 25), ("interleaved_zero_bubble", (4, 4), 27), ("interleaved_zero_bubble", (4, 8), 51),
        ("zbv", (2, 2), 14), ("zbv", (2, 4), 25), ("zbv", (3, 3), 22), ("zbv", (4, 4), 30), ("zbv", (4, 8), 51),
        ("dualpipe_v", (2, 4), 25), ("dualpipe_v", (3, 6), 38), ("dualpipe_v", (4, 8), 51),
        ("v_min", (2, 4), 27), ("v_min", (2, 8), 51), ("v_min", (3, 6), 41), ("v_min", (4, 4), 35), ("v_min", (4, 8), 59), ("v_min", (4, 16), 107),
        ("v_min", (8, 16), 123), ("v_min", (8, 32), 219),
        ("v_half", (2, 4), 25), ("v_half", (2, 8), 49), ("v_half", (3, 6), 41), ("v_half", (4, 8), 53), ("v_half", (4, 16), 101),
        ("v_half", (8, 16), 113), ("v_half", (8, 32), 209),
    ],
)  # fmt: skip
def test_steps_with_two_stages_on_each_position(name, size, halves):
    assert step(made(name, *size)) == halves
    half = StageCosts.equal(2 * size[0], *(Fraction(1, 2),) * 3)
    assert simulate(made(name, *size), half).makespan == Fraction(halves, 2)  # in times of a whole position


def test_v_half_closes_up_where_its_ends_overlap():
    """The authors' generator gives 34 here: with so few microbatches it leaves the second end as the pattern has it."""
    assert step(made("v_half", 4, 4)) == 30
    assert peak_in_flight(made("v_half", 4, 4)) == (5, 6, 6, 6)


@pytest.mark.parametrize(("positions", "half", "third"), [(2, 2, 2), (3, 2, 2), (4, 3, 2), (5, 3, 3), (6, 4, 3), (8, 5, 4), (9, 5, 4)])
def test_controlled_memory_in_whole_rank_units(positions, half, third):
    assert SCHEDULES["v_half"].peak(positions, 3 * positions) == 2 * half == 2 * ((positions + 2) // 2)
    assert SCHEDULES["v_min"].peak(positions, 3 * positions) == 2 * third == 2 * ((positions + 4) // 3)


BUBBLES = {
    # positions, microbatches: per mille of idle time, by schedule; None where torch refuses
    (2, 4): {"gpipe": 200, "one_f_one_b": 200, "looped_bfs": 111, "interleaved_1f1b": 111, "interleaved_zero_bubble": 40, "zbv": 40, "dualpipe_v": 40},
    (4, 4): {"gpipe": 429, "one_f_one_b": 429, "looped_bfs": 273, "interleaved_1f1b": 273, "interleaved_zero_bubble": 111, "zbv": 200},
    (4, 8): {"gpipe": 273, "one_f_one_b": 273, "looped_bfs": 158, "interleaved_1f1b": 158, "interleaved_zero_bubble": 59, "zbv": 59, "dualpipe_v": 59},
    (4, 16): {"gpipe": 158, "one_f_one_b": 158, "looped_bfs": 86, "interleaved_1f1b": 86, "interleaved_zero_bubble": 30, "zbv": 30, "dualpipe_v": 30},
    (8, 16): {"gpipe": 304, "one_f_one_b": 304, "looped_bfs": 179, "interleaved_1f1b": 179, "interleaved_zero_bubble": 68, "zbv": 68, "dualpipe_v": 68},
    (8, 32): {"gpipe": 179, "one_f_one_b": 179, "looped_bfs": 99, "interleaved_1f1b": 99, "interleaved_zero_bubble": 35, "zbv": 35, "dualpipe_v": 35},
}  # fmt: skip
FOUR_STAGES = {(2, 4): 59, (4, 4): 158, (4, 8): 86, (4, 16): 45, (8, 16): 99, (8, 32): 52}


@pytest.mark.parametrize("size", BUBBLES)
def test_bubbles_are_those_that_torchs_rows_have(size):
    found = {name: round(1000 * SCHEDULES[name].bubble(*size, 2 if SCHEDULES[name].virtual else 1)) for name in BUBBLES[size]}
    assert found == BUBBLES[size]
    assert round(1000 * SCHEDULES["interleaved_1f1b"].bubble(*size, 4)) == FOUR_STAGES[size]


@pytest.mark.parametrize(
    ("size", "peaks"),
    [
        ((4, 8), {"gpipe": 8, "one_f_one_b": 4, "looped_bfs": 8, "interleaved_1f1b": 5.5, "interleaved_zero_bubble": 4, "zbv": 4, "dualpipe_v": 4.5}),
        ((8, 16), {"gpipe": 16, "one_f_one_b": 8, "looped_bfs": 16, "interleaved_1f1b": 11.5, "interleaved_zero_bubble": 8, "zbv": 8, "dualpipe_v": 8.5}),
    ],
)  # fmt: skip
def test_peaks_in_whole_rank_units_are_those_that_torchs_rows_have(size, peaks):
    for name, peak in peaks.items():
        schedule = made(name, *size)
        assert max(peak_in_flight(schedule)) == peak * (schedule.stages // size[0])
    assert max(peak_in_flight(made("interleaved_1f1b", *size, 4))) == {8: 4.75, 16: 9.75}[size[1]] * 4


@pytest.mark.parametrize(("size", "peaks"), [((2, 4), (5, 3)), ((3, 6), (8, 6, 4)), ((4, 8), (11, 9, 7, 5))])
def test_interleaving_holds_most_on_its_first_position(size, peaks):
    assert peak_in_flight(made("interleaved_1f1b", *size)) == peaks


def test_positions_of_a_v_are_equally_full():
    assert peak_in_flight(made("zbv", 4, 8)) == (8, 8, 8, 8)
    assert peak_in_flight(made("dualpipe_v", 4, 8)) == (9, 9, 9, 9)
    assert peak_in_flight(made("zero_bubble", 4, 8)) == (4, 4, 4, 4)
    assert peak_in_flight(made("zero_bubble_2", 4, 8)) == (7, 7, 7, 7)
    assert peak_in_flight(made("eager_1f1b", 4, 8)) == (7, 5, 3, 1)


@pytest.mark.parametrize("hop", [1, 2, 5])
@pytest.mark.parametrize("size", [(2, 2), (2, 8), (3, 3), (3, 6), (4, 8), (5, 10), (6, 12)])
def test_1f1b_pays_the_latency_with_every_microbatch_and_gpipe_once(size, hop):
    p, m = size
    assert step(made("gpipe", p, m), hop) == 3 * (m + p - 1) + 2 * hop * (p - 1)
    assert step(made("one_f_one_b", p, m), hop) == 3 * (m + p - 1) + 2 * hop * (m + p - 2 - m // p)


# --- torch's own rows -------------------------------------------------------------------------------------------------------------------


@cache
def torch_rows(name: str, positions: int, microbatches: int) -> tuple[str, ...]:
    """The computations of torch's schedule class, two that overlap one after the other."""
    from torch.distributed.pipelining import _schedule_visualizer as torch_schedules  # noqa: TID251

    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def texts(action: SimpleNamespace | None) -> list[str]:
        if action is None:
            return []
        if action.sub_actions is not None:
            return [text for part in action.sub_actions for text in texts(part)]
        letter = letters.get(action.computation_type.name)
        return [f"{action.stage_index}{letter}{action.microbatch_index}"] if letter else []

    single = name in ("GPipe", "1F1B")
    rows = torch_schedules.get_schedule_ops(name, positions, microbatches, None if single else 2)
    return tuple(" ".join(text for action in row for text in texts(action)) for row in rows)


SAME = [
    ("GPipe", "gpipe", ((2, 4), (4, 8), (3, 1))),
    ("InterleavedZeroBubble", "interleaved_zero_bubble", ((2, 4), (3, 6), (4, 4), (4, 8), (8, 16), (4, 10))),
    ("ZBVZeroBubble", "zbv", ((2, 2), (2, 4), (3, 3), (4, 1), (4, 4), (4, 8), (8, 16))),
    ("DualPipeV", "dualpipe_v", ((2, 4), (3, 6), (4, 8), (4, 11), (8, 16))),
]


@pytest.mark.parametrize(("theirs", "ours", "sizes"), SAME, ids=[s[0] for s in SAME])
def test_rows_equal_torchs(theirs, ours, sizes):
    for size in sizes:
        assert tuple(str(made(ours, *size)).split("\n")) == torch_rows(theirs, *size), size


def test_1f1b_equals_torchs_but_for_the_last_rank_where_torch_counts_microbatches_from_1():
    ours = str(made("one_f_one_b", 3, 6)).split("\n")
    theirs = torch_rows("1F1B", 3, 6)
    assert tuple(ours[:2]) == theirs[:2]
    assert ours[2] == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5"
    assert theirs[2] != ours[2]  # if this fails torch has mended it


def test_breadth_first_differs_from_torchs_only_in_the_order_of_backwards():
    ours, theirs = made("looped_bfs", 3, 4), torch_rows("LoopedBFS", 3, 4)
    for row, text in zip(ours.rows, theirs, strict=True):
        words = text.split()
        half = len(words) // 2
        assert [str(o) for o in row[:half]] == words[:half]
        assert [str(o) for o in row[half : half + 4]] == words[half : half + 4][::-1]
        assert [str(o) for o in row[half + 4 :]] == words[half + 4 :][::-1]


# --- what is said of every family -------------------------------------------------------------------------------------------------------

sizes = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 20), st.integers(2, 3))


@settings(max_examples=150, deadline=None)
@given(sizes)
def test_rows_are_valid_and_time_and_memory_are_known_for_every_count(size):
    name, p, m, v = size
    family = SCHEDULES[name]
    virtual = v if family.virtual else 1
    schedule = family.build(p, m, virtual)
    assert check_schedule(schedule) == ()
    assert schedule.stages == p * family.per_position(virtual)
    assert (family.peak(p, m, virtual), family.step(p, m, virtual)) == (max(peak_in_flight(schedule)), step(schedule))
    assert family.bubble(p, m, virtual) == simulate(schedule, StageCosts.equal(schedule.stages)).bubble
    halves = any(o.op is Op.BACKWARD_INPUT for row in schedule.rows for o in row)
    assert family.split or not halves
    assert halves or not family.split or p == 1 or m < family.full(p)


@settings(max_examples=100, deadline=None)
@given(sizes, st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=18, max_size=18), st.integers(0, 4))
def test_no_schedule_is_shorter_than_its_work_and_more_latency_is_never_faster(size, times, hop):
    name, p, m, v = size
    schedule = made(name, p, m, v)
    costs = StageCosts(*(tuple(t[k] for t in times[: schedule.stages]) for k in range(3)))
    found = simulate(schedule, costs, hop=hop).makespan
    for position, row in enumerate(schedule.rows):
        head = sum(costs.forward[: min(schedule.stages_at(position))])
        assert found >= head + sum(costs.of(o) for o in row)
    assert found <= simulate(schedule, costs, hop=hop + 1).makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_position_has_no_bubble(name):
    assert step(made(name, 1, 5)) == 15 * (made(name, 1, 5).stages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_takes_microbatches_in_order(name):
    """Both directions, so that gradients are summed in one order whatever the schedule."""
    for p, m in ((1, 3), (2, 5), (4, 3), (4, 9)):
        seen: dict[tuple[Op, int], list[int]] = {}
        for row in made(name, p, m).rows:
            for o in row:
                op = {Op.BACKWARD_INPUT: Op.BACKWARD}.get(o.op, o.op)
                seen.setdefault((op, o.stage), []).append(o.microbatch)
        assert all(order == sorted(order) for order in seen.values())


def test_fewer_microbatches_than_a_v_is_made_for_cost_time_and_are_told():
    family = SCHEDULES["dualpipe_v"]
    assert family.accepts(4, 4) is None
    assert (
        family.advice(4, 4)
        == "dualpipe_v cannot fill 4 positions with 4 microbatches: the bubble is 27 %; microbatches = 8 of 6 %, 16 of 3 %"
    )
    assert family.valid_microbatches(4, 4) == (8, 16, 32)
    assert family.advice(4, 6) is None
    assert family.advice(4, 8) is None
    assert SCHEDULES["zbv"].advice(4, 7) is None
    assert SCHEDULES["v_min"].advice(4, 3) is not None
    assert SCHEDULES["zbv"].advice(1, 1) is None


def test_virtual_stages_in_a_v_have_no_meaning():
    told = SCHEDULES["zbv"].accepts(2, 4, 2)
    assert told == "zbv has 2 stages per position, so virtual = 2 has no meaning; interleaved_1f1b has virtual stages"
    with pytest.raises(ScheduleError, match="with 1 it is zero_bubble"):
        SCHEDULES["interleaved_zero_bubble"].generate(2, 4, 1)
    with pytest.raises(ScheduleError, match="with 1 it is gpipe"):
        SCHEDULES["looped_bfs"].generate(2, 4, 1)


def test_accumulation_runs_through_where_memory_stays_the_same():
    assert SCHEDULES["zero_bubble"].accumulate(3, 3, rounds=2) == made("zero_bubble", 3, 6)
    assert SCHEDULES["zbv"].accumulate(2, 3, rounds=3) == made("zbv", 2, 9)
    assert SCHEDULES["zbv"].accumulate(4, 2, rounds=2) == repeat(made("zbv", 4, 2), 2)
    assert SCHEDULES["looped_bfs"].accumulate(2, 3, 2, rounds=2) == repeat(made("looped_bfs", 2, 3), 2)


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_patterns_repeat_between_their_ends(name, monkeypatch):
    """The rows for many microbatches are put together from those for few, and equal what the whole pattern gives."""
    sizes = [(p, m) for p in (1, 2, 3, 4, 6, 7, 9) for m in (p + 4, p + 5, p + 6, 3 * p + 5)]
    quick = [made(name, *size) for size in sizes]
    monkeypatch.setattr(v_patterns, "_rows", v_patterns._from_pattern)
    assert [made(name, *size) for size in sizes] == quick
