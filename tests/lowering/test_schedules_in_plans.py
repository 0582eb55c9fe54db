"""What the rest of the compiler makes of each schedule: cuts, explicit stages, programs, costs, pictures, rules."""

from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import evolve

import pdsl
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.lowering.plan_check import check_plan
from pdsl.lowering.program import ActionKind
from pdsl.lowering.programs import programs, template_timeline
from pdsl.lowering.schedule import Op, peak_in_flight
from pdsl.lowering.schedules import SCHEDULES, placed
from pdsl.render.plan import render_plan
from pdsl.render.schedule import draw_schedule
from pdsl.render.svg import schedule_svg
from pdsl.render.terminal import PLAIN
from tests.facts import FACTS, gpt_facts
from tests.plans import facts, rectangular

STAGES = 'stage a { "tok", "layers.0" }; stage b { "layers.1" }; stage c { "layers.2" }; stage d { "layers.3", "norm", "head" }; '


def spec(schedule: str, *, stages: str = "", mesh: str = "axis pp = 2", accumulate: int = 1) -> str:
    return f"""pdsl 1
mesh {{ {mesh} }}
model "pdsl.models:gpt" {{ layers = 4 }}
shard {{ "**" => {"fsdp(fsdp)" if "fsdp" in mesh else "replicate()"} }}
pipeline over pp {{ {stages}schedule = {schedule} }}
train {{ data = "pdsl.data:digits"; batch = 48; steps = 10; optimizer = adamw(lr = 1e-3); accumulate = {accumulate} }}
"""


def planned(schedule: str, model=FACTS["gpt"], **options) -> Plan:
    made = pdsl.compile(pdsl.load(spec(schedule, **options)), facts=model)
    assert check_plan(made) == ()
    assert Plan.from_json(made.to_json()) == made
    return made


def equal(name: str, positions: int, microbatches: int) -> Plan:
    """One pipeline of stages that cost the same."""
    virtual = 2 if SCHEDULES[name].virtual else 1
    model = facts(positions * SCHEDULES[name].per_position(virtual) - 2)
    even = evolve(model, layers=tuple(evolve(layer, flops=6) for layer in model.layers))
    return rectangular(
        positions=positions, shard=1, microbatches=microbatches, batch=microbatches, schedule=name, virtual=virtual, model=even
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_a_plan(name, accumulate):
    made = planned(f"{name}(microbatches = 4)", mesh="axis pp = 2; axis fsdp = 2", accumulate=accumulate)
    (template,) = made.templates
    family = SCHEDULES[name]
    assert template.schedule.microbatches == 4 * accumulate
    assert tuple(s.position for s in template.stages) == placed(family.placement, 2, family.per_position(2))
    kinds = {a.kind for p in programs(made) for a in p.actions}
    assert (ActionKind.BACKWARD_WEIGHT in kinds) is family.split
    assert made.reshard is False


@pytest.mark.parametrize(("name", "positions"), [("zbv", (0, 1, 1, 0)), ("v_min", (0, 1, 1, 0)), ("looped_bfs", (0, 1, 0, 1))])
def test_stages_that_are_written_go_where_the_schedule_has_them(name, positions):
    made = planned(f"{name}(microbatches = 4)", stages=STAGES)
    assert [(s.start, s.stop) for s in made.templates[0].stages] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert tuple(s.position for s in made.templates[0].stages) == positions
    assert made.stages_of(0) == tuple(i for i, p in enumerate(positions) if p == 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_position_runs_what_the_schedule_has_there(name):
    made = planned(f"{name}(microbatches = 4)", model=gpt_facts(layers=4), mesh="axis pp = 1; axis fsdp = 2")
    family = SCHEDULES[name]
    each = family.per_position(2 if family.virtual else 1)
    assert made.templates[0].schedule.stages == each
    assert made.templates[0].schedule.name == ("single" if each == 1 else name)


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_of_equal_stages_are_those_of_the_family(name):
    made = equal(name, 3, 6)
    report = cost(made)
    family = SCHEDULES[name]
    virtual = 2 if family.virtual else 1
    assert report.bubble == family.bubble(3, 6, virtual)
    assert report.step_time == 6 * family.step(3, 6, virtual)
    saved = made.facts.layers[1].activation_bytes
    ours = [m.activations for m in report.memory]
    stages = made.templates[0].stages
    if all(made.facts.layers[s.start].activation_bytes == saved for s in stages):
        assert ours == [peak * saved for peak in peak_in_flight(made.templates[0].schedule)]
    sends = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
    assert [t.point_to_point for t in report.traffic] == [128 * sum(a.kind in sends for a in p.actions) for p in programs(made)]


def test_positions_of_a_v_send_the_turn_to_no_one():
    made = equal("zbv", 3, 5)
    sends = [sum(a.kind in (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT) for a in p.actions) for p in programs(made)]
    assert sends == [10, 20, 10]  # a loop of two stages each would send twice as many at its ends


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_with_its_bubble(name):
    made = equal(name, 2, 4)
    (template,) = made.templates
    timeline = template_timeline(made, template)
    lines = draw_schedule(template.schedule, timeline, PLAIN)
    rows = [line.split("|")[1] for line in lines if "|" in line]
    share = Fraction(sum(row.count(".") for row in rows), sum(map(len, rows)))
    assert abs(share - timeline.bubble) <= Fraction(1, 20)
    letters = {o.op.value for row in template.schedule.rows for o in row}
    assert all(any(letter in row for row in rows) for letter in letters)
    names = {Op.BACKWARD_INPUT: "input gradient", Op.BACKWARD_WEIGHT: "weight gradient"}
    picture = schedule_svg(made)
    assert all((text in picture) is (op.value in letters) for op, text in names.items())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_plan_on_one_screen_names_the_schedule_and_its_bubble(name):
    made = planned(f"{name}(microbatches = 4)")
    assert f"{name}, 2 positions, 4 microbatches, bubble" in render_plan(made)


def test_few_microbatches_for_a_v_are_a_warning_and_none_for_1f1b_an_error():
    def told(schedule: str) -> list[tuple[str, str]]:
        found = pdsl.check(spec(schedule, mesh="axis pp = 4"), model=False)
        return [(d.code, d.severity.value) for d in found if d.code.startswith("PDL4")]

    assert told("dualpipe_v(microbatches = 4)") == [("PDL403", "warning")]
    assert told("zbv(microbatches = 2)") == [("PDL403", "warning")]
    assert told("zbv(microbatches = 8)") == []
    assert told("zero_bubble(microbatches = 2)") == []
    assert told("zero_bubble(microbatches = 1)") == [("PDL408", "warning")]
    assert told("one_f_one_b(microbatches = 2)") == [("PDL402", "error")]
    assert told("interleaved_zero_bubble(microbatches = 6)") == [("PDL403", "warning")]
    assert told("looped_bfs(microbatches = 6)") == []
    assert told("looped_bfs(microbatches = 6, virtual = 1)") == [("PDL403", "error")]
