"""Schedules from files: what is read, what is told of bad ones, and plans that run them."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import pdsl
from pdsl.grammar.errors import PlanError
from pdsl.lowering.plan import Plan
from pdsl.lowering.schedule import Schedule
from pdsl.lowering.schedule_rows import read_rows
from pdsl.lowering.schedules import SCHEDULES
from tests.facts import FACTS

SPEC = """pdsl 1
mesh {{ {mesh} }}
model "pdsl.models:gpt" {{ layers = 4 }}
shard {{ "**" => replicate() }}
pipeline over pp {{ {pipeline} }}
train {{ data = "pdsl.data:digits"; batch = 24; steps = 10; optimizer = adamw(lr = 1e-3); accumulate = {accumulate} }}
"""


def table(schedule: Schedule) -> str:
    """The text of a file with these rows."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def spread(schedule: Schedule, seed: int) -> str:
    """The same with empty cells in between, as torch writes where a position waits."""
    draw = random.Random(seed)
    return "\n".join(",".join(cell for o in row for cell in ([""] * draw.randint(0, 2) + [str(o)])) + "," for row in schedule.rows) + "\n\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rows_of_every_schedule_are_read_back_from_their_text(name):
    made = SCHEDULES[name].build(3, 6, 2)
    for text in (table(made), spread(made, 1)):
        found = read_rows(text, "x.csv")
        assert found.findings == ()
        assert found.schedule == evolve(made, name="rows")
    assert found.split is SCHEDULES[name].split


def test_two_operations_that_overlap_are_read_one_after_the_other():
    from torch.distributed.pipelining import _schedule_visualizer as torch_schedules  # noqa: TID251

    theirs = torch_schedules.get_schedule_ops("DualPipeV", 2, 4, 2)
    text = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in theirs)
    assert "OVERLAP_F_B" in text
    found = read_rows(text, "x.csv")
    assert found.schedule == evolve(SCHEDULES["dualpipe_v"].build(2, 4, 1), name="rows")
    assert found.passed_over == 0


def test_a_file_of_torch_with_its_communication_gives_the_same_rows():
    from torch.distributed.pipelining import _schedule_visualizer as torch_schedules  # noqa: TID251

    for name, ours in (("InterleavedZeroBubble", "interleaved_zero_bubble"), ("ZBVZeroBubble", "zbv")):
        theirs = torch_schedules.get_schedule_ops(name, 3, 6, 2, with_comms=True)
        found = read_rows("\n".join(",".join(map(str, row)) for row in theirs), "x.csv")
        assert found.schedule == evolve(SCHEDULES[ours].build(3, 6, 2), name="rows")
        assert found.passed_over > 2 * 2 * 6
        assert found.first_passed == "row 1, column 1: 0UNSHARD"


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        (None, ["cannot read x.csv: there is no such file, or it is no text"]),
        ("", ["x.csv is empty: it has one line of operations for each position"]),
        ("\n,,\n", ["x.csv is empty: it has one line of operations for each position"]),
        ("step,loss\n1,2.5\n", ["x.csv is no table of operations such as 0F0 or 1B2: row 1, column 1 is 'step'"]),
        ('"0F0\n', ["x.csv is no table of comma-separated cells: unexpected end of data"]),
        (
            "0F0,0X0,0B0,0F\n1F0,1B0\n",
            [
                "x.csv row 1, column 2: '0X0' is no operation; expected stage, one of F B I W, microbatch, as in 2F0",
                "x.csv row 1, column 4: '0F' is no operation; expected stage, one of F B I W, microbatch, as in 2F0",
            ],
        ),
        ("0F0,0B0\n\n1F0,1B0\n", ["x.csv row 2 has no operation"]),
        ("0F0,0B0\n2F0,2B0\n", ["x.csv has no operation of stage 1, and its stages are 0 to 2"]),
        ("0F99999999,0B0\n", ["x.csv row 1, column 1: 0F99999999 is of microbatch 99999999, in a file of 2 operations"]),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,,1F1\n", ["x.csv row 2: no backward of stage 1, microbatch 1, neither B nor I and W"]),
        (
            "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1I0,1W0,1F1,1F2,1I1,1W2,1W1,1I2\n",
            ["x.csv row 2, column 7: W of stage 1, microbatch 2 before its I"],
        ),
        (
            "0F0,0B0,,0F1,0B1\n1F0,1F1,,1B0,1B1\n",
            [
                "x.csv row 1, column 2: 0B0 waits for 1B0 (row 2, column 4): these wait for each other in a circle",
                "x.csv row 2, column 2: 1F1 waits for 0F1 (row 1, column 4): these wait for each other in a circle",
            ],
        ),
    ],
)
def test_what_is_wrong_is_told_with_row_and_column_in_the_order_of_the_file(text, findings):
    found = read_rows(text, "x.csv")
    assert list(found.findings) == findings
    assert found.schedule is None


def test_findings_of_several_rows_come_in_the_order_of_the_file():
    found = read_rows("0F0,0B0,0W0,0F1\n1B0,1F0,1F1,1B1\n", "x.csv").findings
    assert [text.split(":")[0] for text in found] == ["x.csv row 1, column 3", "x.csv row 1", "x.csv row 2, column 1"]


@given(st.text(alphabet="0123FBIW,\n;()\"' SEND_OVRLAP", max_size=60))
def test_any_text_at_all_gives_a_schedule_or_findings(text):
    found = read_rows(text, "x.csv")
    assert (found.schedule is None) == bool(found.findings)


# --- plans ------------------------------------------------------------------------------------------------------------------------------


def planned(folder, made: Schedule, mesh: str = "axis pp = 2", accumulate: int = 1, **how) -> Plan:
    (folder / "mine.csv").write_text(table(made), encoding="utf-8")
    path = folder / "job.pdsl"
    path.write_text(SPEC.format(mesh=mesh, pipeline='schedule = rows("mine.csv")', accumulate=accumulate), encoding="utf-8")
    return pdsl.compile(pdsl.load(path), facts=FACTS["gpt"], **how)


@pytest.mark.parametrize(("name", "placement"), [("zero_bubble", (0, 1)), ("looped_bfs", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0))])
def test_a_plan_holds_the_rows_of_the_file(tmp_path, name, placement):
    made = SCHEDULES[name].build(2, 4, 2)
    plan = planned(tmp_path, made)
    (template,) = plan.templates
    assert template.schedule == evolve(made, name="rows")
    assert tuple(s.position for s in template.stages) == placement
    assert plan.microbatches == 4
    (tmp_path / "mine.csv").unlink()
    assert Plan.from_json(plan.to_json()) == plan


def test_accumulation_repeats_the_rows(tmp_path):
    plan = planned(tmp_path, SCHEDULES["zero_bubble"].build(2, 3, 1), accumulate=2)
    assert plan.microbatches == 6
    assert [len(row) for row in plan.templates[0].schedule.rows] == [18, 18]


def test_pipelines_by_number_that_the_rows_are_not_for_are_refused(tmp_path):
    made = SCHEDULES["zero_bubble"].build(2, 4, 1)
    assert len(planned(tmp_path, made, "axis dp = 2; axis pp = 2", pipelines=[(2, 4), (2, 4)]).pipelines) == 2
    with pytest.raises(PlanError, match=r"mine\.csv is for 2 positions and 4 microbatches, not for 3 and 4"):
        planned(tmp_path, made, pipelines=[(3, 4)])


def test_the_file_is_looked_for_beside_the_spec_and_not_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    plan = planned(tmp_path / "jobs", SCHEDULES["one_f_one_b"].build(2, 4, 1))
    assert plan.templates[0].schedule.name == "rows"
    (tmp_path / "jobs" / "mine.csv").unlink()
    (tmp_path / "mine.csv").write_text("0F0,0B0\n", encoding="utf-8")
    told = pdsl.check(tmp_path / "jobs" / "job.pdsl", model=False)
    assert [d.message for d in told if d.code == "PDL409"] == ["cannot read mine.csv: there is no such file, or it is no text"]
