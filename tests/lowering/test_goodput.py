"""Values worked out by hand: four nodes of one job at 10 s a step, 100 samples each."""

from __future__ import annotations

import math
import time

import pytest

from pdsl.lowering.goodput import CAUSES, Change, Checkpoints, Strategy, Workload, simulate_run, young
from pdsl.lowering.published import even_pipelines
from pdsl.lowering.strategies import Placement, Times, pays, pdsl, reroute, restore, retemplate
from pdsl.lowering.traces import random_trace, read_trace

JOB = Workload(100, lambda n: 40.0 / n if n >= 1 else None, lambda n: even_pipelines(n, 1), 1, 0)
PAIRS = Workload(100, lambda n: 40.0 / n if n >= 2 else None, lambda n: even_pipelines(n, 2), 2, 1)
TIMES = Times(reroute=1, retemplate=5, restart=20, gap=1000)
FOUR = "".join(f"0,add,{n}\n" for n in "abcd")


def trace(*events):
    return read_trace(FOUR + "\n".join(events), "t")


def told(result):
    return {cause: seconds for cause, seconds in result.causes if seconds}


def test_a_run_without_a_loss_is_all_useful():
    found = simulate_run(trace("100000,add,e"), pdsl(JOB, TIMES), JOB)
    assert told(found) == {"useful": pytest.approx(100)}
    assert (found.committed, found.samples, found.rate, found.share) == (10, 1000, 10, 1)


def test_retemplating_begins_the_step_anew():
    found = simulate_run(trace("14000,remove,d", "74000,add,e"), retemplate(JOB, TIMES), JOB)
    # 1 step in 10 s, 4 s lost, 5 s pause, then 55 s at 40/3 s
    assert told(found) == {"useful": pytest.approx(65), "lost step": pytest.approx(4), "recovery": pytest.approx(5)}
    assert found.samples == pytest.approx(100 + 55 / (40 / 3) * 100)
    assert found.ideal == pytest.approx(140 + 60 / (40 / 3) * 100)


def test_rerouting_keeps_what_whole_pipelines_have_finished():
    found = simulate_run(trace("14000,remove,d", "75000,add,e"), reroute(PAIRS, TIMES), PAIRS)
    # half of 4 s stays; 1 s pause; then only pipeline (a, b) runs: 20 s a step, where 3 nodes could have 40/3 s
    assert found.seconds_of("lost step") == pytest.approx(2)
    assert found.seconds_of("recovery") == pytest.approx(1)
    assert found.seconds_of("slow") == pytest.approx(60 * (1 - (40 / 3) / 20))
    assert found.samples == pytest.approx(100 + 20 + 60 / 20 * 100)


def test_pdsl_reroutes_at_once_and_retemplates_when_the_step_ends():
    found = simulate_run(trace("14000,remove,d", "75000,add,e"), pdsl(PAIRS, TIMES), PAIRS)
    # the interrupted step: 0.2 done, 1 s pause, 16 s re-routed; then 5 s pause and 39 s at 40/3 s
    assert found.seconds_of("recovery") == pytest.approx(6)
    assert found.samples == pytest.approx(200 + 39 / (40 / 3) * 100)


def test_pdsl_stays_rerouted_where_moving_state_does_not_pay():
    rare, often = (Times(reroute=1, retemplate=5, restart=20, gap=gap) for gap in (1000, 10))
    events = ("14000,remove,d", "75000,add,e")
    assert (
        simulate_run(trace(*events), pdsl(PAIRS, often), PAIRS).samples
        == simulate_run(trace(*events), reroute(PAIRS, often), PAIRS).samples
    )
    assert (
        simulate_run(trace(*events), pdsl(PAIRS, rare), PAIRS).samples > simulate_run(trace(*events), reroute(PAIRS, rare), PAIRS).samples
    )


@pytest.mark.parametrize(
    ("before", "after", "gap", "expected"), [(20, 10, 9, False), (20, 10, 11, True), (10, 10, 1e9, False), (10, 20, 1e9, False)]
)
def test_a_change_pays_if_it_gains_more_than_its_pause_until_the_next_loss(before, after, gap, expected):
    assert pays(before, after, 5, gap) is expected


def test_a_restart_undoes_what_was_done_since_the_last_checkpoint():
    found = simulate_run(trace("57000,remove,d", "97000,add,e"), restore(JOB, TIMES, Checkpoints(steps=2, write=3)), JOB)
    # 20 s, write to 23, 43, write to 46; 11 s of work undone (one step and 1 s of the next); restart to 77; 20 s at 40/3
    assert told(found) == {
        "useful": pytest.approx(60),
        "lost step": pytest.approx(1),
        "fallback": pytest.approx(10),
        "checkpoint": pytest.approx(6),
        "recovery": pytest.approx(20),
    }
    assert found.samples == pytest.approx(400 + 20 / (40 / 3) * 100)
    assert (found.restores, found.checkpoints) == (1, 2)


def test_a_checkpoint_that_a_loss_interrupts_is_not_there():
    events = ("21000,remove,d", "81000,add,e")
    found = simulate_run(trace(*events), restore(JOB, TIMES, Checkpoints(steps=2, write=3)), JOB)
    assert found.seconds_of("fallback") == pytest.approx(20)
    assert found.samples == pytest.approx(200 + (40 - 3 - 80 / 3) / (40 / 3) * 100)  # from 41 s on: two steps, a write, part of a step


def test_checkpoints_by_time_are_written_at_the_end_of_a_step():
    found = simulate_run(trace("100000,add,e"), restore(JOB, TIMES, Checkpoints(interval=25, write=2)), JOB)
    assert found.checkpoints == 3  # after 30 s of work each: at 30, 62 and 94
    assert found.seconds_of("checkpoint") == pytest.approx(6)


def test_the_last_copy_alarm_writes_a_checkpoint_at_once():
    found = simulate_run(trace("14000,remove,d", "14000,remove,c", "100000,add,e"), retemplate(PAIRS, TIMES, Checkpoints(write=3)), PAIRS)
    assert found.checkpoints == 1  # two nodes are one pipeline, the budget of one asks for two
    assert found.seconds_of("checkpoint") == pytest.approx(3)


def test_lost_state_falls_back_to_a_checkpoint_and_too_few_nodes_wait():
    found = simulate_run(
        trace("10000,remove,b", "10000,remove,d", "10000,remove,c", "50000,add,e", "100000,add,f"), pdsl(PAIRS, TIMES), PAIRS
    )
    assert found.seconds_of("recovery") + found.seconds_of("down") == pytest.approx(60)  # 40 s with one node, then a restart of 20 s
    assert found.seconds_of("fallback") == pytest.approx(10)
    assert found.committed == 1  # of 20 s, from 70 s on


def test_a_second_loss_during_recovery_begins_recovery_anew():
    found = simulate_run(trace("10000,remove,d", "13000,remove,c", "58000,add,e"), retemplate(JOB, TIMES), JOB)
    assert told(found) == {"recovery": pytest.approx(8), "useful": pytest.approx(50)}


def test_an_idle_node_is_lost_without_a_stop():
    job = Workload(100, lambda n: 10.0 if n >= 3 else None, lambda n: (3,) if n >= 3 else (), 3, 0)
    found = simulate_run(trace("14000,remove,d", "30000,add,e"), retemplate(job, TIMES), job)
    assert told(found) == {"useful": pytest.approx(30)}


def test_nodes_that_join_are_used_from_the_end_of_the_step():
    found = simulate_run(trace("12000,add,e", "65000,add,f"), pdsl(JOB, TIMES), JOB)
    assert found.samples == pytest.approx(200 + 40 / 8 * 100)  # two steps, a pause of 5 s, 8 s a step
    assert found.seconds_of("slow") == pytest.approx(8 * (1 - 8 / 10))


def test_time_before_the_first_step_does_not_count():
    found = simulate_run(read_trace("0,add,a\n30000,add,b\n130000,add,c\n", "t"), pdsl(PAIRS, TIMES), PAIRS)
    assert found.seconds == pytest.approx(80)  # a pause to start of 20 s from 30 s on
    assert found.samples == pytest.approx(400)


def test_the_interval_of_young():
    assert young(write=8, seconds=3600, falls=3) == pytest.approx(math.sqrt(2 * 8 * 900))


# --- placement --------------------------------------------------------------------------------------------------------------------------------


def test_copies_are_counted_by_layers_across_pipelines_of_different_size():
    at = Placement("abcdefg", lambda n: (4, 3))
    assert at.copies() == 2
    assert at.lose("a") == ((0,), True)  # layers 0 to 1/4
    assert at.copies() == 1
    assert at.lose("g") == ((1,), True)  # layers 2/3 to 1
    assert (at.copies(), at.whole()) == (1, 0)
    at.lose("e")  # layers 0 to 1/3: the first quarter is gone
    assert at.copies() == 0


def test_neighbouring_places_do_not_overlap_at_their_border():
    at = Placement("abcdef", lambda n: (3, 3))
    at.lose("ae")
    assert at.copies() == 1


def test_the_share_of_a_hit_pipeline_is_that_of_its_nodes_among_the_whole_ones():
    at = Placement("abcdefgh", lambda n: (4, 2, 2))
    hit, _ = at.lose("e")
    assert at.share(hit) == pytest.approx(2 / 8)
    hit, _ = at.lose("fa")
    assert (hit, at.share(hit)) == ((0,), pytest.approx(4 / 6))


# --- invariants -------------------------------------------------------------------------------------------------------------------------------


ALL = {"pdsl": pdsl, "retemplate": retemplate, "reroute": reroute, "restore": restore}


@pytest.mark.parametrize("name", ALL)
def test_the_causes_add_up_to_the_run_and_the_useful_time_to_the_samples(name):
    job = Workload(64, lambda n: 900.0 / n if n >= 3 else None, lambda n: even_pipelines(n, 3), 3, 1)
    losses = random_trace(40, 10, 0.3, seed=11, rack_rate=0.05, rack_size=6, repair=7200)
    strategy = ALL[name](job, Times(restart=300, gap=losses.mean_gap), Checkpoints(interval=1800, write=30))
    found = simulate_run(losses, strategy, job)
    assert [cause for cause, _ in found.causes] == list(CAUSES)
    assert sum(seconds for _, seconds in found.causes) == pytest.approx(found.seconds)
    assert all(seconds >= 0 for _, seconds in found.causes)
    assert 0 < found.share < 1
    assert found == simulate_run(losses, strategy, job)


def test_the_share_of_useful_time_is_the_share_of_the_ideal_where_all_nodes_are_alike():
    job = Workload(10, lambda n: 12.0, lambda n: (n,), 1, 0)
    losses = random_trace(8, 5, 0.5, seed=2, repair=600)
    found = simulate_run(losses, restore(job, Times(restart=120), Checkpoints(steps=50, write=5)), job)
    assert found.share == pytest.approx(found.seconds_of("useful") / found.seconds)


def test_what_a_course_asks_for_at_the_end_of_a_step_is_asked_once():
    asked = []

    class Course:
        def start(self, nodes):
            return Change(10.0)

        def lose(self, nodes):
            return Change(10.0, later=lambda: asked.append(1))

        def join(self, nodes):
            return Change(10.0)

    found = simulate_run(trace("15000,remove,a", "100000,remove,b"), Strategy("test", Course), JOB)
    assert (asked, found.committed) == ([1], 10)


def test_five_thousand_nodes_over_thirty_days_take_seconds():
    job = Workload(4096, lambda n: 50_000.0 / n if n >= 8 else None, lambda n: even_pipelines(n, 8), 8, 1)
    begun = time.perf_counter()
    losses = random_trace(5000, 30, 6.5e-3, seed=1, rack_rate=1e-4, repair=3600)
    found = simulate_run(losses, pdsl(job, Times(gap=losses.mean_gap), Checkpoints(interval=3600, write=60)), job)
    assert time.perf_counter() - begun < 10
    assert found.losses > 900
    assert found.share > 0.9
