from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.lowering.schedule import Item, Op, Operation, Receive, Rows, Schedule, Send, Transfer
from pdsl.lowering.schedules import SCHEDULES, interleaved_1f1b, one_f_one_b, repeat
from pdsl.lowering.simulate import StageCosts, simulate
from pdsl.lowering.transfers import Semantics, find_deadlock, transfer_after, transfer_order


def ordered(schedule: Schedule, costs: StageCosts | None = None) -> Rows:
    return transfer_order(schedule, simulate(schedule, costs or StageCosts.equal(schedule.stages)))


def naive(schedule: Schedule) -> Rows:
    """What one would write first: receive just before use, send just after production."""
    inputs: dict[Operation, Transfer] = {}
    for row in schedule.rows:
        for o in row:
            transfer = transfer_after(schedule, o)
            if transfer is None:
                continue
            if transfer.kind == "activation":
                inputs[Operation(Op.FORWARD, transfer.to_stage, o.microbatch)] = transfer
            else:
                inputs[Operation(Op.BACKWARD, transfer.to_stage, o.microbatch)] = transfer
                inputs[Operation(Op.BACKWARD_INPUT, transfer.to_stage, o.microbatch)] = transfer
    rows: list[tuple[Item, ...]] = []
    for row in schedule.rows:
        items: list[Item] = []
        for o in row:
            if o in inputs:
                items.append(Receive(inputs[o]))
            items.append(o)
            after = transfer_after(schedule, o)
            if after is not None:
                items.append(Send(after))
        rows.append(tuple(items))
    return tuple(rows)


def verdict(rows: Rows, semantics: Semantics) -> str:
    findings = find_deadlock(rows, semantics)
    if not findings:
        return "ok"
    return "hang" if findings[-1].startswith("hang") else "swapped" if findings[0].startswith("swapped") else findings[0]


SIZES = [(2, 4), (3, 6), (4, 8)]
OK, HANG = ("ok", "ok", "ok"), ("hang", "hang", "ok")
SWAPPED = ("hang", "hang", "swapped")
NAIVE = {
    "gpipe": (OK, OK, OK),
    **dict.fromkeys(("one_f_one_b", "eager_1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_2"), (HANG, HANG, HANG)),
    "looped_bfs": (HANG, ("hang", "ok", "ok"), ("hang", "ok", "ok")),  # where only two meet they do so both ways
    "interleaved_zero_bubble": (SWAPPED, HANG, HANG),
    "dualpipe_v": (HANG, SWAPPED, SWAPPED),
    **dict.fromkeys(("zbv", "v_half", "v_min"), (SWAPPED, SWAPPED, SWAPPED)),
}
"""By size: with blocking sends, with one queue for each pair, with one for each direction."""


def made(name: str, size: tuple[int, int]) -> Schedule:
    return SCHEDULES[name].build(*size, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_naive_placement_hangs_or_swaps_messages_for_all_but_gpipe(name):
    found = tuple(tuple(verdict(naive(made(name, size)), s) for s in Semantics) for size in SIZES)
    assert found == NAIVE[name]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_global_order_of_transfers_never_hangs_or_swaps(name, size):
    for semantics in Semantics:
        assert find_deadlock(ordered(made(name, size)), semantics) == ()


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 7),
    st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=8, max_size=8),
)
def test_the_order_holds_for_every_schedule_count_and_cost(name, p, m, stages):
    schedule = SCHEDULES[name].build(p, m, 2)
    costs = StageCosts(*(tuple(s[k] for s in stages[: schedule.stages]) for k in range(3)))
    rows = ordered(schedule, costs)
    assert tuple(tuple(i for i in row if isinstance(i, Operation)) for row in rows) == schedule.rows
    for semantics in Semantics:
        assert find_deadlock(rows, semantics) == ()


@given(
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 3),
    st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=12, max_size=12),
    st.integers(1, 2),
)
def test_the_order_holds_for_every_count_and_cost_even_where_costs_are_zero(p, m, v, stages, rounds):
    schedule = repeat(interleaved_1f1b(p, m, v), rounds)
    costs = StageCosts(*(tuple(s[k] for s in stages[: p * v]) for k in range(3)))
    rows = ordered(schedule, costs)
    assert tuple(tuple(i for i in row if isinstance(i, Operation)) for row in rows) == schedule.rows
    for semantics in Semantics:
        assert find_deadlock(rows, semantics) == ()


def test_each_producer_is_followed_by_its_send_and_receives_stand_where_the_sender_was():
    rows = ordered(one_f_one_b(2, 2))
    assert [str(item) for item in rows[0]] == [
        "0F0",
        "send activation of microbatch 0, stage 0 to 1 (to position 1)",
        "0F1",
        "send activation of microbatch 1, stage 0 to 1 (to position 1)",
        "receive gradient of microbatch 0, stage 1 to 0 (from position 1)",
        "0B0",
        "receive gradient of microbatch 1, stage 1 to 0 (from position 1)",
        "0B1",
    ]
    # the second activation arrives while the first forward is under way: its receive is posted before it is needed
    assert [type(item).__name__ for item in rows[1]] == [
        "Receive", "Receive", "Operation", "Operation", "Send", "Operation", "Operation", "Send",
    ]  # fmt: skip


def test_stages_on_one_position_and_the_ends_of_the_pipeline_transfer_nothing():
    schedule = Schedule("zbv", 4, 1, (0, 1, 1, 0), ())
    sent = [transfer_after(schedule, Operation(op, s, 0)) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for s in range(4)]
    assert [t and (t.from_stage, t.to_stage, t.sender, t.receiver) for t in sent] == [
        (0, 1, 0, 1), None, (2, 3, 1, 0), None,
        None, (1, 0, 1, 0), None, (3, 2, 0, 1),
        None, None, None, None,
    ]  # fmt: skip
    assert all(isinstance(item, Operation) for row in ordered(interleaved_1f1b(1, 3, 2)) for item in row)


def test_no_gradient_is_sent_to_a_stage_without_a_backward_pass():
    frozen_first = Schedule(
        "rows", 2, 1, (0, 1), ((Operation(Op.FORWARD, 0, 0),), (Operation(Op.FORWARD, 1, 0), Operation(Op.BACKWARD, 1, 0)))
    )
    assert [[type(i).__name__ for i in row] for row in ordered(frozen_first)] == [
        ["Operation", "Send"],
        ["Receive", "Operation", "Operation"],
    ]


# --- what is told of bad rows -----------------------------------------------------------------------------------------------------------


def activation(microbatch: int, sender: int = 0) -> Transfer:
    return Transfer("activation", sender, 1 - sender, microbatch, sender, 1 - sender)


def gradient(microbatch: int) -> Transfer:
    return Transfer("gradient", 1, 0, microbatch, 1, 0)


def ops(text: str) -> list[Item]:
    return [Operation.parse(t) for t in text.split()]


def test_two_positions_that_both_send_first_are_told_as_a_circle_with_both_actions():
    rows = (
        (
            *ops("0F0"),
            Send(activation(0)),
            *ops("0F1"),
            Send(activation(1)),
            Receive(gradient(0)),
            *ops("0B0"),
            Receive(gradient(1)),
            *ops("0B1"),
        ),
        (Receive(activation(0)), *ops("1F0 1B0"), Send(gradient(0)), Receive(activation(1)), *ops("1F1 1B1"), Send(gradient(1))),
    )
    told = (
        (
            "position 0 does action 4 (receive gradient of microbatch 0, stage 1 to 0 (from position 1)) only after "
            "action 3 (send activation of microbatch 1, stage 0 to 1 (to position 1))"
        ),
        (
            "position 1 does action 4 (receive activation of microbatch 1, stage 0 to 1 (from position 0)) only after "
            "action 3 (send gradient of microbatch 0, stage 1 to 0 (to position 0))"
        ),
    )
    for semantics in (Semantics.RENDEZVOUS, Semantics.PAIR_QUEUE):
        (finding,) = find_deadlock(rows, semantics)
        assert finding.startswith(f"hang with {semantics.value}: ")
        assert all(clause in finding for clause in told)
    assert find_deadlock(rows, Semantics.DIRECTION_QUEUE) == ()


def test_messages_that_meet_the_wrong_receive_are_told_with_both_places():
    rows = (
        (*ops("0F0"), Send(activation(0)), *ops("0F1"), Send(activation(1))),
        (Receive(activation(1)), Receive(activation(0)), *ops("1F0 1F1")),
    )
    first, _ = find_deadlock(rows, Semantics.DIRECTION_QUEUE)
    assert first == (
        "swapped messages: position 0, action 1: send activation of microbatch 0, stage 0 to 1 (to position 1) meets "
        "position 1, action 0: receive activation of microbatch 1, stage 0 to 1 (from position 0)"
    )


@pytest.mark.parametrize(
    ("first", "second", "finding"),
    [
        ([*ops("0F0"), Send(activation(0))], ops("1F0"), "meets no receive"),
        (ops("0F0"), [Receive(activation(0)), *ops("1F0")], "meets no send"),
        ([Send(activation(0)), *ops("0F0")], [Receive(activation(0)), *ops("1F0")], "position 0, action 0: send activation"),
        ([*ops("0F0"), Send(activation(0))], [*ops("1F0"), Receive(activation(0))], "position 1, action 1: receive activation"),
        (ops("0F0"), ops("1F0"), "position 1, action 0: 1F0 without its activation from stage 0"),
        (
            [*ops("0F0"), Send(activation(0)), *ops("0B0")],
            [Receive(activation(0)), *ops("1F0 1B0")],
            "0B0 without its gradient from stage 1",
        ),
    ],
)
def test_lost_early_and_late_messages_are_told(first, second, finding):
    assert any(finding in told for told in find_deadlock((tuple(first), tuple(second)), Semantics.DIRECTION_QUEUE))


def test_a_circle_of_three_positions_is_found():
    def ring(i: int) -> tuple[Item, ...]:
        out = Transfer("activation", 2 * i, 2 * ((i + 1) % 3) + 1, 0, i, (i + 1) % 3)
        into = Transfer("activation", 2 * ((i - 1) % 3), 2 * i + 1, 0, (i - 1) % 3, i)
        return (Operation(Op.FORWARD, 2 * i, 0), Send(out), Receive(into), Operation(Op.FORWARD, 2 * i + 1, 0))

    # each position sends before it receives: fine with queues, a circle with blocking sends
    rows = tuple(ring(i) for i in range(3))
    finding = next(f for f in find_deadlock_only(rows, Semantics.RENDEZVOUS) if f.startswith("hang"))
    assert all(f"position {i} does action 2" in finding for i in range(3))


def find_deadlock_only(rows: Rows, semantics: Semantics) -> tuple[str, ...]:
    """The graph of waiting alone, for rows that are no pipeline."""
    from pdsl.lowering import deadlock

    matched, _ = deadlock._match(rows)
    circle = deadlock._circle(rows, semantics, {receive: send for send, receive in matched})
    return (deadlock._tell(rows, semantics, circle),) if circle else ()
