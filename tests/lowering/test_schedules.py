from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.schedule import (
    Op,
    Operation,
    Schedule,
    ScheduleError,
    loop_placement,
    peak_activations,
    peak_in_flight,
    repeat,
    v_placement,
)
from pdsl.lowering.schedule_check import check_schedule
from pdsl.lowering.schedules import SCHEDULES, gpipe, interleaved_1f1b, one_f_one_b, single


def parsed(name: str, placement: tuple[int, ...], *rows: str) -> Schedule:
    """A schedule from rows of text such as `0F0 0B0`."""
    operations = tuple(tuple(map(Operation.parse, row.split())) for row in rows)
    microbatches = 1 + max(o.microbatch for row in operations for o in row)
    return Schedule(name, len(placement), microbatches, placement, operations)


def short(schedule: Schedule) -> list[str]:
    """Rows without stages, as F0 B0."""
    return [" ".join(f"{o.op.value}{o.microbatch}" for o in row) for row in schedule.rows]


# --- the orders -------------------------------------------------------------------------------------------------------------------------


def test_an_operation_is_written_as_stage_letter_microbatch_and_read_back():
    assert str(Operation(Op.FORWARD, 2, 0)) == "2F0"
    assert Operation.parse("12W34") == Operation(Op.BACKWARD_WEIGHT, 12, 34)
    with pytest.raises(ScheduleError, match="'2X0' is no operation"):
        Operation.parse("2X0")


def test_1f1b_has_the_published_order_on_three_positions_and_four_microbatches():
    assert short(one_f_one_b(3, 4)) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_gpipe_runs_all_forwards_first_and_both_directions_in_order_of_microbatches():
    assert short(gpipe(2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_interleaving_goes_chunk_by_chunk_and_back_with_the_chunks_reversed():
    schedule = interleaved_1f1b(2, 2, 2)
    assert schedule.placement == (0, 1, 0, 1)
    assert str(schedule) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_one_position_runs_forward_and_backward_of_each_microbatch_in_turn():
    assert str(single(2)) == "0F0 0B0 0F1 0B1"
    assert peak_in_flight(single(5)) == (1,)


def test_rounds_follow_each_other_with_microbatches_counted_on():
    schedule = repeat(one_f_one_b(2, 2), 3)
    assert schedule.microbatches == 6
    assert short(schedule)[1] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    assert check_schedule(schedule) == ()
    assert peak_in_flight(schedule) == peak_in_flight(one_f_one_b(2, 2))
    assert repeat(schedule, 1) is schedule
    with pytest.raises(ScheduleError, match="at least one round, not 0"):
        repeat(schedule, 0)


def test_accumulation_pays_the_bubble_once_where_memory_allows():
    assert SCHEDULES["one_f_one_b"].accumulate(2, 3, rounds=2) == one_f_one_b(2, 6)
    assert SCHEDULES["interleaved_1f1b"].accumulate(2, 3, 2, rounds=2) == interleaved_1f1b(2, 6, 2)
    assert SCHEDULES["gpipe"].accumulate(2, 3, rounds=2) == repeat(gpipe(2, 3), 2)
    with pytest.raises(ScheduleError, match="at least one round, not 0"):
        SCHEDULES["gpipe"].accumulate(2, 3, rounds=0)


@pytest.mark.parametrize(("positions", "microbatches", "virtual"), [(2, 4, 2), (3, 6, 2), (4, 8, 2), (4, 8, 4), (4, 10, 2), (4, 3, 2)])
def test_interleaving_equals_torch_where_torch_takes_the_count(positions, microbatches, virtual):
    from torch.distributed.pipelining import _schedule_visualizer as torch_schedules  # noqa: TID251

    theirs = torch_schedules.get_schedule_ops("Interleaved1F1B", positions, microbatches, virtual)
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    rows = [
        " ".join(f"{a.stage_index}{letters[a.computation_type.name]}{a.microbatch_index}" for a in row if a is not None) for row in theirs
    ]
    assert str(interleaved_1f1b(positions, microbatches, virtual)).split("\n") == rows


counts = st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))


@given(counts)
def test_every_generated_schedule_is_valid_for_every_count(count):
    positions, microbatches, _virtual = count
    for schedule in (gpipe(positions, microbatches), one_f_one_b(positions, microbatches), interleaved_1f1b(*count), single(microbatches)):
        assert check_schedule(schedule) == ()


# --- memory -----------------------------------------------------------------------------------------------------------------------------


def test_activations_in_flight_are_those_of_the_literature():
    assert peak_in_flight(gpipe(4, 8)) == (8, 8, 8, 8)
    assert peak_in_flight(one_f_one_b(4, 8)) == (4, 3, 2, 1)
    assert peak_in_flight(one_f_one_b(4, 2)) == (2, 2, 2, 1)
    assert peak_in_flight(interleaved_1f1b(2, 4, 2)) == (5, 3)
    assert peak_in_flight(interleaved_1f1b(3, 6, 2)) == (8, 6, 4)
    assert peak_in_flight(interleaved_1f1b(4, 8, 2)) == (11, 9, 7, 5)
    assert peak_in_flight(interleaved_1f1b(4, 8, 4)) == (19, 17, 15, 13)
    assert peak_in_flight(interleaved_1f1b(8, 16, 2))[0] == 23


def test_an_activation_of_a_split_backward_is_held_until_its_weight_pass():
    assert peak_in_flight(parsed("mine", (0,), "0F0 0I0 0F1 0I1 0W0 0W1")) == (2,)
    assert peak_in_flight(parsed("mine", (0,), "0F0 0I0 0W0 0F1 0I1 0W1")) == (1,)


def test_the_peak_in_bytes_names_the_forward_that_reaches_it():
    assert peak_activations(interleaved_1f1b(2, 2, 2), (10, 1, 100, 1)) == ((220, 3), (3, 2))


@given(counts)
def test_the_families_know_their_peak(count):
    for family in SCHEDULES.values():
        if family.accepts(*count) is None:
            assert family.peak(*count) == max(peak_in_flight(family.generate(*count)))


# --- what a checker asks ----------------------------------------------------------------------------------------------------------------


def test_1f1b_refuses_fewer_microbatches_than_stages_and_says_what_would_do():
    family = SCHEDULES["one_f_one_b"]
    assert family.accepts(4, 2) == "one_f_one_b needs at least as many microbatches as stages: 2 < 4"
    assert family.valid_microbatches(4, 2) == (4, 8, 16)
    assert [round(100 * family.bubble(4, m)) for m in family.valid_microbatches(4, 2)] == [43, 27, 16]
    assert family.accepts(4, 4) is None
    with pytest.raises(ScheduleError, match="2 < 4"):
        family.generate(4, 2)


def test_gpipe_takes_one_microbatch_at_half_idle():
    family = SCHEDULES["gpipe"]
    assert family.accepts(2, 1) is None
    assert family.bubble(2, 1) == Fraction(1, 2)
    assert family.accepts(2, 0) == "gpipe needs at least 1 microbatch, not 0"


def test_virtual_stages_belong_to_interleaving_alone():
    assert "virtual = 2 has no meaning" in (SCHEDULES["gpipe"].accepts(2, 4, 2) or "")
    assert "with 1 it is one_f_one_b" in (SCHEDULES["interleaved_1f1b"].accepts(2, 4, 1) or "")
    assert {name: f.per_position(3) for name, f in SCHEDULES.items()} == {
        **dict.fromkeys(("gpipe", "one_f_one_b", "eager_1f1b", "zero_bubble", "zero_bubble_2"), 1),
        **dict.fromkeys(("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"), 3),
        **dict.fromkeys(("zbv", "dualpipe_v", "v_half", "v_min"), 2),
    }


def test_interleaving_tells_what_an_awkward_count_costs():
    family = SCHEDULES["interleaved_1f1b"]
    assert family.advice(4, 8, 2) is None
    assert family.advice(4, 2, 2) == (
        "interleaved_1f1b cannot fill 4 positions with 2 microbatches: the bubble is 56 %; microbatches = 4 of 27 %, 8 of 16 %"
    )
    assert family.advice(4, 7, 2) == (
        "7 microbatches are no multiple of 4 positions: interleaved_1f1b runs them in 1 round of up to 7 and holds 14 activations at once, "
        "with a bubble of 18 %; microbatches = 4 holds 8 (27 %), microbatches = 8 holds 11 (16 %)"
    )
    assert family.valid_microbatches(4, 7, 2) == (4, 8)
    assert family.valid_microbatches(4, 2, 2) == (4, 8, 16)
    assert family.valid_microbatches(4, 8, 2) == (16, 32)
    assert SCHEDULES["gpipe"].advice(4, 7) is None


def test_counts_below_one_are_refused_with_the_count():
    for make in (lambda: gpipe(0, 1), lambda: one_f_one_b(1, 0), lambda: interleaved_1f1b(2, 2, 0), lambda: single(0)):
        with pytest.raises(ScheduleError, match="must be at least 1, not 0"):
            make()


# --- the check of given rows ------------------------------------------------------------------------------------------------------------


def test_a_weight_pass_before_its_input_pass_is_told_with_position_and_action():
    schedule = parsed("rows", (0, 1), "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1I0 1W0 1F1 1I1 1F2 1W2 1I2 1W1")
    assert check_schedule(schedule) == ("position 1, action 6: W of stage 1, microbatch 2 before its I",)


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        (("0F0 0B0", "1F0"), "position 1: no backward of stage 1, microbatch 0, neither B nor I and W"),
        (("0F0 0B0", "1B0"), "position 1: no F of stage 1, microbatch 0"),
        (("0F0 0B0", "1F0 1I0"), "position 1, action 1: I of stage 1, microbatch 0 without a W"),
        (("0F0 0B0", "1F0 1W0"), "position 1, action 1: W of stage 1, microbatch 0 without an I"),
        (
            ("0F0 0B0", "1F0 1B0 1W0"),
            "position 1, action 2: W of stage 1, microbatch 0 beside B at position 1, action 1: whole or split, not both",
        ),
        (("0F0 0B0", "1F0 1B0 1F0"), "position 1, action 2: F of stage 1, microbatch 0 a second time, first at position 1, action 0"),
        (("0F0 0B0", "1B0 1F0"), "position 1, action 0: B of stage 1, microbatch 0 before its F"),
        (("0F0 1F0 0B0", "1B0"), "position 0, action 1: F of stage 1, microbatch 0: stage 1 lives on position 1"),
        (("0F0 0B0 2F0", "1F0 1B0"), "position 0, action 2: F of stage 2, microbatch 0: stages are 0 to 1"),
    ],
)
def test_each_fault_of_a_row_is_told(rows, finding):
    assert finding in check_schedule(parsed("rows", (0, 1), *rows))


def test_a_microbatch_out_of_range_is_told():
    schedule = evolve(parsed("rows", (0,), "0F0 0B0 0F1 0B1"), microbatches=1)
    assert "position 0, action 2: F of stage 0, microbatch 1: microbatches are 0 to 0" in check_schedule(schedule)


def test_rows_that_wait_for_each_other_are_told_with_both_actions():
    schedule = parsed("rows", (0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    first, second = check_schedule(schedule)
    assert first.startswith("position 0, action 1: 0B0 waits for 1B0 (position 1, action 2)")
    assert second.startswith("position 1, action 1: 1F1 waits for 0F1 (position 0, action 2)")


def test_a_v_schedule_on_loop_placement_is_refused_with_the_right_one():
    rows = ("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    assert check_schedule(parsed("zbv", (0, 1, 0, 1), *rows)) == ("zbv needs V placement: stages on positions 0, 1, 1, 0, not 0, 1, 0, 1",)
    assert check_schedule(parsed("rows", (0, 1, 0, 1), *rows)) == ()
    assert check_schedule(parsed("zbv", (0, 1, 1, 0), "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")) == ()


def test_placements_that_name_no_position_or_leave_one_empty_are_told():
    schedule = one_f_one_b(2, 2)
    assert check_schedule(evolve(schedule, placement=(0, 2))) == ("stage 1 is placed on position 2, but there are 2 positions",)
    assert "position 1 has no stage" in check_schedule(evolve(schedule, placement=(0, 0)))
    assert check_schedule(evolve(schedule, placement=(0,))) == ("1 placements for 2 stages",)


def test_placements_go_round_or_there_and_back():
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert interleaved_1f1b(2, 2, 2).stages_at(1) == (1, 3)
