"""`pdsl chaos`: real runs with faults, what counts as kept or broken, its text and JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

import pytest
from attrs import evolve

import pdsl
from pdsl import storm as module
from pdsl.cli import main
from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Budget
from pdsl.lowering.templates import cuts_for_sizes
from pdsl.render.chaos import render_begin, render_storm_json, render_summary, render_trial
from pdsl.render.terminal import Terminal
from pdsl.runtime.chaos import HOW, POINTS, Fault, random_faults
from pdsl.runtime.resilient import Nursery
from pdsl.storm import WINDOW, Storm, Trial, compared, storm, within_budget
from tests.plans import facts, rectangular
from tests.tree import ROOT

SPEC = """\
pdsl 1
cluster {{ nodes = 4; ranks_per_node = 1; device = cpu }}
mesh {{ axis dp = rest; axis pp = 2 to 3 }}
model "pdsl.models:gpt" {{ layers = 4; width = 16; heads = 2; context = 8 }}
shard {{ "**" => replicate() }}
pipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}
fault_budget {{ lose = {lose}; silence = {silence} }}
{more}
train {{
  data = source("pdsl.data:python_source", context = 8)
  batch = 8; steps = 30; optimizer = adamw(lr = 1e-2); seed = 3
}}
"""
WIDE = Terminal(width=1000)


def written(folder, *, lose=1, silence="10s", more=""):
    path = folder / "x.pdsl"
    path.write_text(SPEC.format(lose=lose, silence=silence, more=more))
    return str(path)


def four(lose=1, nodes=4):
    """A plan of four nodes of one rank in pipelines of two, which may have three."""
    model = facts(10)
    made = rectangular(replicas=nodes // 2, positions=2, shard=1, microbatches=4, batch=16, model=model, ranks_per_node=1)
    return evolve(made, budget=Budget(lose, 2, cuts_for_sizes(model, range(2, 4)), "one_f_one_b"))


# --- real runs ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_loss_within_the_budget_is_equal_and_one_beyond_it_is_no_failure(tmp_path, monkeypatch, capfd):
    chosen = {
        7: (Fault(1, "backward", 2, "rank"),),
        8: (Fault(0, "sums", 3, "node"), Fault(2, "sums", 3, "node")),  # both copies of the first stage
    }
    monkeypatch.setattr(module, "random_faults", lambda plan, kills, steps, seed: chosen[seed])
    saved = tmp_path / "saved"
    file = written(tmp_path, more=f'checkpoint {{ path = "{saved}"; every = 50 }}')
    assert main(["chaos", file, "--seed", "7", "--runs", "2", "--steps", "6"]) == 0
    lines = [line for line in capfd.readouterr().out.replace("\n" + " " * 15, " ").splitlines() if line]
    assert lines[0] == "x: 4 nodes, budget of 1 loss at once"
    assert lines[1].startswith("  undisturbed  6 steps in ")
    assert lines[2].startswith("  seed 7       rank 1 of node 1 is killed before a backward of step 2: re-routed")
    assert "; equal, losses within " in lines[2]
    assert " over 4 steps, recovered in " in lines[2]
    assert lines[3].startswith(
        "  seed 8       node 0 is killed before the sums of step 3 and node 2 is killed before the sums of step 3: beyond the budget, ended with: "
    )
    assert "there is no checkpoint to go back to" in lines[3]
    assert lines[4] == "2 runs: 1 equal, 1 beyond the budget"
    assert not saved.exists()


@pytest.mark.timeout(300)
def test_a_run_that_hangs_is_ended_and_told(monkeypatch):
    processes = []

    class Watched(module.Cluster):
        def close(self):
            processes.extend(pid for node in self.pids().values() for pid in (node["agent"], *node["ranks"].values()))
            super().close()

    monkeypatch.setattr(module, "Cluster", Watched)
    plan = pdsl.compile(pdsl.load(SPEC.format(lose=1, silence="120s", more="")))
    nursery = Nursery("train", threads=1)
    try:
        trial = module._Run(plan, 3, nursery, (Fault(1, "compute", 1, "stop"),), patience=5.0).trial(0)
    finally:
        nursery.close()
    assert (trial.verdict(1e-6), trial.hung, trial.ok(1e-6)) == ("hung", True, False)
    assert "no step within" in trial.end
    assert len(set(processes)) >= 8
    assert [pid for pid in processes if not _ends(pid)] == []


def _ends(pid, deadline=10.0):
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([process], [], [], deadline)
    os.close(process)
    return bool(ready)


# --- what counts ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trial", "verdict", "ok"),
    [
        (Trial(0, deviation=1e-6), "equal", True),
        (Trial(0, deviation=1.1e-6), "unequal", False),
        (Trial(0, deviation=float("nan")), "unequal", False),
        (Trial(0, samples=False), "unequal", False),
        (Trial(0, recoveries=(1.0, 4.1), allowed=4.0), "late", False),
        (Trial(0, recoveries=(1.0, 4.0), allowed=4.0), "equal", True),
        (Trial(0, end="no node is left"), "ended", False),
        (Trial(0, end="no node is left", promised=False), "beyond", True),
        (Trial(0, end="no step", hung=True, promised=False), "hung", False),
    ],
)
def test_a_run_keeps_the_promise_or_breaks_it(trial, verdict, ok):
    assert (trial.verdict(1e-6), trial.ok(1e-6)) == (verdict, ok)


def lost(node):
    return {"event": "lost", "node": node}


def moved(copies, generation=1):
    return {"event": "moved", "copies": copies, "generation": generation}


@pytest.mark.parametrize(
    ("events", "promised"),
    [
        ([], True),
        ([lost(1)], True),
        ([lost(1), lost(2)], False),
        ([lost(1), moved(1), lost(2)], False),  # the last copy of a layer
        ([lost(1), moved(2), lost(2)], True),  # every layer on two nodes again, of five that are left
        ([lost(1), moved(2), lost(2), moved(2, 2), lost(3)], True),
        ([lost(1), moved(2), lost(2), moved(2), lost(3)], False),  # told again by another node, not done again
        ([lost(1), moved(2), lost(2), moved(2, 2), lost(3), moved(2, 3), lost(4)], False),  # three nodes cannot have two copies
    ],
)
def test_the_budget_counts_losses_until_it_is_renewed(events, promised):
    assert within_budget(four(nodes=6), (), events) is promised


def test_more_silent_nodes_than_leave_a_majority_are_beyond_the_budget():
    stopped = [Fault(rank, "sums", 1, "stop") for rank in (1, 2)]
    assert within_budget(four(), stopped[:1], [])
    assert not within_budget(four(), stopped, [])
    assert not within_budget(evolve(four(), budget=None), (), [])


def test_losses_are_compared_from_the_first_disturbed_step_on():
    agreed = [{"event": "agreed", "step": step, "lost": lost} for step, lost in ((0, []), (7, [3]), (5, [2]))]
    assert compared(agreed, 100) == range(5, 5 + WINDOW)
    assert compared(agreed, 8) == range(5, 8)
    assert compared(agreed[:1], 8) == range(8)


# --- the dice -------------------------------------------------------------------------------------------------------------------------------


def test_faults_are_the_same_for_a_seed_and_of_every_kind_for_many():
    plan = four(nodes=6)
    drawn = [random_faults(plan, 2, 12, seed) for seed in range(400)]
    assert drawn == [random_faults(plan, 2, 12, seed) for seed in range(400)]
    assert {f.how for faults in drawn for f in faults} == set(HOW)
    assert {f.point for faults in drawn for f in faults} == set(POINTS)
    assert all(plan.node(a.rank) != plan.node(b.rank) for a, b in drawn)
    assert {f.step for faults in drawn for f in faults} == set(range(12))


def test_exceptions_are_drawn_only_where_they_do_not_rightly_end_the_run():
    for seed in range(400):
        one, other = random_faults(four(nodes=6), 2, 5, seed)
        for fault, beside in ((one, other), (other, one)):
            if fault.how == "raise":
                assert fault.step > 0
                assert fault.point in POINTS[:5]
                assert beside.point not in POINTS[:5] or beside.step != fault.step
    assert {f.how for f in random_faults(four(nodes=6), 2, 1, 0)} <= set(HOW) - {"raise"}


def test_too_many_faults_are_refused():
    with pytest.raises(RunError, match="4 nodes are to be lost, and the plan has 4"):
        random_faults(four(), 4, 8, 0)
    with pytest.raises(RunError, match="2 exceptions in steps after the first need at least 3 steps"):
        random_faults(four(), 2, 2, 0, how=("raise",))


# --- text and JSON --------------------------------------------------------------------------------------------------------------------------

CALM = Trial(None, seconds=3.25, losses=(2.0, 1.0))
STORM = Storm("x", 4, 2, 1, 12, 1e-6, CALM)
FAULT = Fault(5, "move", 3, "stop")


def told(trial):
    return render_trial(trial, STORM, WIDE)


def test_every_fault_is_told_in_words():
    texts = {told(Trial(0, (Fault(5, point, 3, how),), (2,))).split(": equal")[0] for point in POINTS for how in HOW}
    assert len(texts) == len(POINTS) * len(HOW)
    assert "  seed 0       node 2 stands still before state moves, from step 3 on" in texts
    assert "  seed 0       rank 5 of node 2 raises before the forward of step 3" in texts


def test_a_fault_that_never_struck_is_told_as_such():
    assert "(it never came there)" in told(Trial(0, (FAULT,)))
    assert "(it never came there)" not in told(Trial(0, (FAULT,), (2,)))
    assert "(it never came there)" not in told(Trial(0, (FAULT,), end="RankError: gone"))


@pytest.mark.parametrize(
    ("trial", "text"),
    [
        (
            Trial(0, answers=("re-routed", "moved"), deviation=2e-8, compared=9, recoveries=(0.21, 1.5), seconds=4.26),
            ": re-routed and moved; equal, losses within 2.0e-08 over 9 steps, recovered in 0.21 s and 1.50 s, 4.3 s\n",
        ),
        (Trial(0, deviation=2e-3, compared=9), ": NOT EQUAL, losses differ by 2.0e-03 within 9 steps (1e-06 passes), 0.0 s\n"),
        (Trial(0, deviation=float("inf"), compared=9), ": NOT EQUAL, losses differ by no number within 9 steps (1e-06 passes), 0.0 s\n"),
        (Trial(0, samples=False), ": NOT EQUAL, other samples or steps than undisturbed, 0.0 s\n"),
        (
            Trial(0, recoveries=(9.0,), allowed=4.0, compared=1),
            ": LATE, a recovery may take 4.0 s; losses within 0.0e+00 over 1 step, recovered in 9.00 s, 0.0 s\n",
        ),
        (Trial(0, end="no step within 9 s", hung=True), ": HUNG and was ended: no step within 9 s, 0.0 s\n"),
        (Trial(0, end="state lost"), ": FAILED within the budget, ended with: state lost, 0.0 s\n"),
        (Trial(0, end="state lost", promised=False), ": beyond the budget, ended with: state lost, 0.0 s\n"),
    ],
)
def test_what_happened_is_told_in_words(trial, text):
    assert told(trial).endswith(text)


def test_the_summary_counts_and_says_what_was_compared():
    trials = (Trial(0, compared=9, recoveries=(0.2, 0.4)), Trial(1, recoveries=(0.9,)), Trial(2, end="x", promised=False))
    assert render_summary(evolve(STORM, trials=trials), WIDE) == (
        "\n3 runs: 2 equal, 1 beyond the budget\n"
        "  - from a known loss to the next step: median 0.40 s, longest 0.90 s\n"
        "  - losses are compared over at most 9 steps from the first that a fault could change, since rounding grows with every step; "
        "samples over all 12\n"
    )
    failed = render_summary(evolve(STORM, trials=(*trials, Trial(3, end="x"))), WIDE)
    assert "4 runs: 2 equal, 1 FAILED, 1 beyond the budget" in failed
    assert render_begin(STORM, WIDE) == "x: 4 nodes, budget of 1 loss at once\n  undisturbed  12 steps in 3.2 s\n"


def test_json_has_every_run_and_no_number_that_json_lacks():
    trials = (Trial(4, (FAULT,), (2,), ("moved",), deviation=float("inf"), compared=3, seconds=2.0), Trial(5, end="x", promised=False))
    data = json.loads(render_storm_json(evolve(STORM, trials=trials)), parse_constant=pytest.fail)
    assert (data["format"], data["ok"], data["steps"]) == ("1.0", False, 12)
    assert [(r["seed"], r["verdict"], r["deviation"], r["end"]) for r in data["runs"]] == [
        (4, "unequal", None, None),
        (5, "beyond", None, "x"),
    ]
    assert data["runs"][0]["faults"] == [{"rank": 5, "point": "move", "step": 3, "how": "stop"}]


# --- the command ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lose", "argv", "text"),
    [
        (0, [], "promises nothing that could be tried: chaos needs fault_budget {{ lose = 1 }} or more"),
        (1, ["--kills", "4"], "--kills 4: {file} has 4 nodes, so 3 can be lost at most"),
        (1, ["--seed", "-1"], "'-1' is not a whole number of at least 0"),
    ],
)
def test_what_cannot_be_tried_is_a_bad_invocation(lose, argv, text, tmp_path, capsys):
    file = written(tmp_path, lose=lose)
    assert main(["chaos", file, *argv]) == 2
    assert text.format(file=file) in capsys.readouterr().err


def test_a_plan_that_promises_nothing_starts_no_process(monkeypatch):
    monkeypatch.setattr(module, "Nursery", pytest.fail)
    for plan in (evolve(four(), budget=None), four(lose=0)):
        with pytest.raises(RunError, match="promises nothing that could be tried"):
            next(storm(plan, kills=1, runs=1))
    with pytest.raises(RunError, match="4 nodes are to be lost, and the plan has 4"):
        next(storm(four(), kills=4, runs=1))


def test_the_exit_status_and_the_json_tell_of_a_failure(tmp_path, monkeypatch, capsys):
    broken = evolve(STORM, trials=(Trial(0, end="state lost"),))
    asked = {}
    monkeypatch.setattr(module, "storm", lambda plan, **given: asked.update(given) or iter([STORM, broken]))
    argv = ["--kills", "2", "--runs", "9", "--seed", "3", "--steps", "4", "--tolerance", "1e-5", "--format", "json"]
    assert main(["chaos", written(tmp_path), *argv]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["end"] == "state lost"
    assert asked == {"kills": 2, "runs": 9, "seed": 3, "steps": 4, "tolerance": 1e-5}


def test_the_words_of_the_command_need_no_torch():
    code = "import sys, pdsl.render.chaos, pdsl.chaos_command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
