"""`pdsl simulate`: the command, its text, JSON and picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from attrs import evolve

from pdsl.cli import main
from pdsl.lowering.goodput import CAUSES
from pdsl.lowering.plan import Budget
from pdsl.lowering.templates import cuts_for_sizes
from pdsl.lowering.workload import node_state, plan_shape, plan_workload, step_flops
from pdsl.render.goodput import goodput_svg, render_simulation, render_simulation_json
from pdsl.render.terminal import Terminal
from pdsl.simulation import STRATEGIES, Options, SimulationError, failures, simulate
from tests.face.jobs import SPEC
from tests.plans import facts, rectangular

TRACES = Path(__file__).parents[1] / "data" / "traces"


def elastic(model=None, *, replicas=4, microbatches=8, batch=256, lose=1, sizes=range(2, 4)):
    """A plan on nodes of one rank whose pipelines may have 2 or 3 nodes."""
    model = model or facts(10)
    made = rectangular(
        replicas=replicas, positions=sizes.start, shard=1, microbatches=microbatches, batch=batch, model=model, ranks_per_node=1
    )
    return evolve(made, budget=Budget(lose, sizes.start, cuts_for_sizes(model, sizes), "one_f_one_b"))


def spot(**more):
    return simulate(elastic(), None, Options(str(TRACES / "spot-p3.csv"), step_seconds=20, **more))


# --- workloads ------------------------------------------------------------------------------------------------------------------------------


def test_the_step_of_a_workload_is_that_of_the_plan_where_the_nodes_are_its_own():
    plan = elastic()
    job = plan_workload(plan, 2.0)
    assert job.step_seconds(8) == pytest.approx(2 * float(step_flops(plan)), rel=0.1)  # tests/plans.py cuts evenly by count, not by cost
    assert job.pipelines(8) == (2, 2, 2, 2)
    assert (job.batch, job.least, job.lose) == (256, 2, 1)


def test_an_odd_node_makes_one_pipeline_longer_and_too_few_train_nothing():
    job = plan_workload(elastic(), 1.0)
    assert sum(job.pipelines(7)) == 7
    assert set(job.pipelines(7)) <= {2, 3}
    assert (job.pipelines(1), job.step_seconds(1)) == ((), None)
    assert job.step_seconds(4) > job.step_seconds(8)


def test_without_a_budget_pipelines_keep_their_length_and_nothing_may_be_lost():
    plan = rectangular(replicas=4, positions=2, shard=1, microbatches=4, batch=64, ranks_per_node=1)
    shape = plan_shape(plan)
    assert (shape.least, shape.lose) == (2, 0)
    assert [shape.pipelines(n) for n in (1, 2, 5, 8)] == [(), (2,), (2, 2), (2, 2, 2, 2)]
    assert shape.flops(4) == 2 * step_flops(plan)
    assert shape.flops(1) is None


def test_ranks_of_one_node_count_as_one():
    plan = rectangular(replicas=2, positions=2, shard=2, microbatches=4, batch=64, ranks_per_node=4)
    assert plan_shape(plan).least == 1
    assert node_state(plan) > 0


def test_thousands_of_nodes_are_shared_out_evenly():
    plan = elastic(microbatches=1000, replicas=4, batch=4000)
    shape = plan_shape(plan)
    assert shape.pipelines(2001) == (3, *(2,) * 999)
    assert shape.flops(2000) < shape.flops(1000)


# --- what is asked for ------------------------------------------------------------------------------------------------------------------------


def test_failures_are_a_file_a_rate_or_an_interval():
    assert failures(Options(str(TRACES / "steady-10m.csv")), 4).losses == 15
    drawn = failures(Options("rate:0.5", seed=3, days=10, nodes=20, repair_hours=1), 4)
    assert (drawn.peak, drawn.end) == (20, 864_000_000)
    assert drawn == failures(Options("rate:0.5", seed=3, days=10, nodes=20, repair_hours=1), 4)
    assert [i.ms for i in failures(Options("every:600"), 4).instants] == [0, 600_000, 1_200_000, 1_800_000, 2_400_000]
    assert failures(Options("every:3600", days=1 / 8), 4).losses == 2


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (Options("nowhere.csv"), "nowhere.csv cannot be read: No such file or directory; --failures takes a trace"),
        (Options("rate:often"), "rate:often: 'often' is no number above zero; rate:0.0065 is losses a node and day"),
        (Options("every:0"), "every:0: '0' is no number above zero"),
        (Options("rate:0.1", rack_size=1), "expected at least 2"),
    ],
)
def test_what_is_no_trace_is_told_with_what_would_do(asked, told):
    with pytest.raises(SimulationError) as raised:
        failures(asked, 4)
    assert told in str(raised.value)


def test_a_trace_of_too_few_nodes_is_refused():
    with pytest.raises(SimulationError, match=r"has at most 1 nodes at once; the smallest pipeline of .* takes 2"):
        simulate(elastic(), None, Options("every:60", nodes=1))


def test_all_that_is_not_said_is_told_as_assumed():
    bare = simulate(elastic(), None, Options("every:600"))
    assert [re.search(r"--[a-z-]+", line).group() for line in bare.assumed] == [
        "--step-seconds",
        "--restart-seconds",
        "--checkpoint-seconds",
        "--recovery-seconds",
        "--checkpoint-every",
    ]
    said = Options("every:600", step_seconds=3, restart_seconds=60, checkpoint_seconds=5, recovery_seconds=0.1, checkpoint_every=10)
    assert simulate(elastic(), None, said).assumed == ()


def test_the_step_is_as_long_as_measured_or_as_the_flops_take():
    plan = elastic()
    assert simulate(plan, None, Options("every:600", step_seconds=7)).step_seconds == pytest.approx(7)
    assert simulate(plan, None, Options("every:600", flops_per_rank=1e6)).step_seconds == pytest.approx(float(step_flops(plan)) / 1e6)


def test_a_measured_recovery_changes_what_pdsl_reaches():
    quick, slow = (spot(recovery_seconds=s, strategies=("pdsl",)).results[0] for s in (0.1, 30))
    assert quick.rate > slow.rate
    assert slow.seconds_of("recovery") > 100 * quick.seconds_of("recovery")


def test_pdsl_is_ahead_of_each_of_its_parts_and_of_the_others_on_a_spot_trace():
    rates = {r.strategy: r.rate for r in spot(recovery_seconds=0.5).results}
    assert list(rates) == list(STRATEGIES)
    assert max(rates, key=rates.get) == "pdsl"


# --- how it is shown ---------------------------------------------------------------------------------------------------------------------------


def test_the_screen_has_a_row_a_strategy_and_fits():
    text = render_simulation(spot())
    lines = text.splitlines()
    assert lines[0].endswith("spot-p3.csv")
    assert "11.4 h, 32 nodes at most, 167 losses at 79 instants; 40 of them lose more than 1, 6 at most" in " ".join(text.split())
    rows = [line.split() for line in lines if line.startswith("  ") and line.split()[0] in STRATEGIES and len(line.split()) == 12]
    assert [row[0] for row in rows] == list(STRATEGIES)
    assert all(sum(map(float, row[3:11])) == pytest.approx(100, abs=0.5) for row in rows)
    assert max(map(len, lines[1:])) <= 100
    assert len(lines) <= 45
    assert text.isascii()


def test_colour_only_marks_the_best():
    found = spot()
    coloured = render_simulation(found, Terminal(unicode=True, colour=True))
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_simulation(found)
    assert coloured.count("\x1b[32m") == 1


def test_the_json_has_every_cause_and_adds_up():
    found = json.loads(render_simulation_json(spot()))
    assert found["format"] == "1.0"
    assert found["budget"] == {"lose": 1, "least": 2, "outside": 0.0, "below": 0.0, "instants": 79, "beyond": 40, "most": 6}
    for strategy in found["strategies"]:
        assert list(strategy["seconds_by_cause"]) == [cause.replace(" ", "_") for cause in CAUSES]
        assert sum(strategy["seconds_by_cause"].values()) == pytest.approx(strategy["seconds"])
        assert len(strategy["curve"]) == 120


def test_the_picture_is_told_in_words_too():
    found = spot()
    root = ET.fromstring(goodput_svg(found))
    names = {child.tag.split("}")[1]: child for child in root}
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [names["title"].get("id"), names["desc"].get("id")]
    assert all(f"{r.strategy} {r.rate:.4g} samples/s" in names["desc"].text for r in found.results)
    marks = [e for e in root.iter() if e.get("class") == "loss"]
    assert len(marks) == 79
    assert all(e[0].tag.endswith("title") for e in marks)
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len({e.get("stroke-dasharray") for e in lines}) == len(lines) == len(STRATEGIES)
    assert all(0 <= float(v) <= 960 for e in lines for pair in e.get("points").split() for v in pair.split(","))


def test_the_same_question_has_the_same_answer_to_the_byte():
    assert render_simulation_json(spot()) == render_simulation_json(spot())
    assert goodput_svg(spot()) == goodput_svg(spot())


def test_marks_stay_few_in_long_traces():
    found = simulate(elastic(), None, Options("rate:1", nodes=200, days=30, repair_hours=1, step_seconds=20, strategies=("pdsl",)))
    assert found.exposure.instants > 5000
    assert goodput_svg(found).count('class="loss"') <= 400


# --- the command ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    (tmp_path / "job.pdsl").write_text(SPEC)
    return tmp_path


def test_the_command_prints_text_json_and_a_picture_without_torch_once_facts_are_known(folder, capsys):
    trace = str(TRACES / "steady-1h.csv")
    assert main(["simulate", "job.pdsl", "--failures", trace, "--step-seconds", "2"]) == 0
    assert "goodput, and where the time goes" in capsys.readouterr().out
    asked = [
        "simulate",
        "job.pdsl",
        "--failures",
        trace,
        "--format",
        "json",
        "--strategy",
        "pdsl",
        "--strategy",
        "restore",
        "--svg",
        "o.svg",
    ]
    code = f"import sys; from pdsl.cli import main; status = main({asked!r}); assert 'torch' not in sys.modules; sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [s["name"] for s in json.loads(done.stdout)["strategies"]] == ["pdsl", "restore"]
    assert ET.parse(folder / "o.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--failures", "bad.csv"], "pdsl: bad.csv:2: 'crash' is no event; expected add or remove\n"),
        (["--failures", "every:60", "--strategy", "pdls"], "there is no strategy 'pdls'; there are pdsl, retemplate"),
        (["--failures", "every:60", "--step-seconds", "0"], "'0' is not a number above zero"),
        ([], "the following arguments are required: --failures"),
    ],
)
def test_what_cannot_be_meant_ends_with_2(folder, capsys, more, told):
    (folder / "bad.csv").write_text("0,add,a\n5,crash,a\n")
    assert main(["simulate", "job.pdsl", *more]) == 2
    assert told in capsys.readouterr().err


def test_a_plan_that_was_written_can_be_simulated(folder, capsys):
    assert main(["plan", "job.pdsl", "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["simulate", "plan.json", "--failures", "rate:0.1", "--days", "3", "--nodes", "6", "--seed", "2"]) == 0
    assert "6 nodes at most" in capsys.readouterr().out
