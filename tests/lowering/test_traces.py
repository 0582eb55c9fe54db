from __future__ import annotations

from pathlib import Path

import pytest

from pdsl.lowering.traces import DAY, Instant, Trace, TraceError, delayed, exposure, random_trace, read_trace, steady_trace

FOLDER = Path(__file__).parents[1] / "data" / "traces"


def published(name):
    return read_trace((FOLDER / f"{name}.csv").read_text(), name)


def test_events_of_one_millisecond_are_one_instant():
    trace = read_trace("0,add,a\n0,add,b\n# a comment\n\n5000,remove,a\n5000,add,c\n9000,remove,b\n", "t.csv")
    assert trace.instants == (Instant(0, ("a", "b")), Instant(5000, ("c",), ("a",)), Instant(9000, (), ("b",)))
    assert (trace.end, trace.losses, trace.loss_instants, trace.peak) == (9000, 2, 2, 2)
    assert list(trace.alive()) == [(0, 2), (5000, 2), (9000, 1)]
    assert trace.mean_gap == 4.5


def test_a_node_that_comes_and_goes_within_a_millisecond_never_was():
    assert read_trace("0,add,a\n7,add,b\n7,remove,b\n", "t").instants == (Instant(0, ("a",)), Instant(7))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0,add\n", "t.csv:1: 2 fields; expected three, as in `600000,remove,node7`"),
        ("0,add,a\nsoon,remove,a\n", "t.csv:2: 'soon' is no time; expected whole milliseconds from the start of the trace"),
        ("-1,add,a\n", "t.csv:1: '-1' is no time"),
        ("0,lose,a\n", "t.csv:1: 'lose' is no event; expected add or remove"),
        ("0,add,\n", "t.csv:1: the node has no name"),
        ("5,add,a\n4,remove,a\n", "t.csv:2: 4 ms comes after 5 ms"),
        ("0,add,a\n1,add,a\n", "t.csv:2: a is added, but it is there already"),
        ("0,add,a\n1,remove,b\n", "t.csv:2: b is removed, but it is not there"),
        ("# nothing\n", "t.csv: holds no event"),
    ],
)
def test_a_bad_trace_is_told_of_with_its_line_and_what_was_expected(text, told):
    with pytest.raises(TraceError) as raised:
        read_trace(text, "t.csv")
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("name", "peak", "losses", "instants", "most"),
    [("spot-p3", 32, 167, 79, 6), ("spot-gcp-scaled", 30, 72, 63, 4), ("steady-10m", 30, 15, 15, 1), ("steady-6h", 30, 15, 15, 1)],
)
def test_the_published_traces_have_their_published_counts(name, peak, losses, instants, most):
    trace = published(name)
    assert (trace.peak, trace.losses, trace.loss_instants) == (peak, losses, instants)
    assert exposure(trace, lose=1, least=2).most == most


def test_delayed_nodes_come_later_and_those_lost_before_never():
    trace = read_trace("0,add,a\n0,add,b\n1000,remove,b\n5000,add,c\n9000,remove,a\n", "t")
    assert delayed(trace, 2).instants == (Instant(2000, ("a",)), Instant(7000, ("c",)), Instant(9000, (), ("a",)))
    assert delayed(trace, 0) is trace


# --- synthetic ------------------------------------------------------------------------------------------------------------------------------


def test_a_steady_trace_loses_one_node_an_interval():
    trace = steady_trace(3, 10, 2)
    assert trace.instants == (Instant(0, ("node1", "node2", "node3")), Instant(10_000, (), ("node3",)), Instant(20_000, (), ("node2",)))
    assert trace.end == 30_000


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    made = [random_trace(50, 20, 0.01, seed=seed, rack_rate=0.001, repair=3600) for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert made[0].instants != made[2].instants


def test_losses_come_at_the_rate_that_was_asked_for():
    trace = random_trace(1000, 100, 0.01, seed=3, repair=60)
    assert trace.losses == pytest.approx(1000, abs=4 * 1000**0.5)
    assert trace.loss_instants == trace.losses
    assert trace.end == 100 * DAY


def test_a_rack_takes_neighbours_and_as_many_as_asked_for_on_average():
    trace = random_trace(1000, 100, 0.0, seed=4, rack_rate=0.01, rack_size=5, repair=60)
    sizes = [len(i.removed) for i in trace.instants if i.removed]
    assert min(sizes) == 2
    assert sum(sizes) / len(sizes) == pytest.approx(5, rel=0.1)
    numbers = [sorted(int(n[4:]) for n in i.removed) for i in trace.instants if len(i.removed) == 4]
    assert sum(run[-1] - run[0] == 3 for run in numbers) > 0.95 * len(numbers)


def test_nodes_come_back_after_their_repair_and_never_without():
    back = random_trace(20, 10, 0.2, seed=5, repair=3600)
    lost = {}
    for instant in back.instants[1:]:
        for node in instant.added:
            assert instant.ms - lost.pop(node) == 3_600_000
        lost.update(dict.fromkeys(instant.removed, instant.ms))
    gone = random_trace(20, 1000, 0.2, seed=5)
    assert gone.losses == 20
    assert list(gone.alive())[-1][1] == 0


@pytest.mark.parametrize(("rate", "rack_size"), [(-0.1, 4), (0.1, 1)])
def test_rates_below_zero_and_racks_of_one_are_refused(rate, rack_size):
    with pytest.raises(ValueError, match="expected"):
        random_trace(4, 1, rate, seed=0, rack_size=rack_size)


# --- exposure ---------------------------------------------------------------------------------------------------------------------------------


def test_exposure_counts_the_time_below_the_budget_and_the_instants_beyond_it():
    instants = (Instant(0, ("a", "b", "c", "d", "e")), Instant(40, (), ("a", "b")), Instant(60, (), ("c",)), Instant(70, ("c",)))
    found = exposure(Trace("t", instants, 100), lose=1, least=2)  # at least 4 nodes are needed
    assert (found.outside, found.below) == (0.6, 0.0)
    assert (found.instants, found.beyond, found.most) == (2, 1, 2)
    assert exposure(Trace("t", instants, 100), lose=2, least=3).below == pytest.approx(0.1)
