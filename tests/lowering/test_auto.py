"""Plans whose schedule is searched for: placements, cuts, memory, latency, budgets, and what the plan keeps of the search."""

from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import evolve

from pdsl.grammar.errors import PlanError
from pdsl.grammar.source import Source
from pdsl.lowering.check import CheckResult, check
from pdsl.lowering.cost import cost
from pdsl.lowering.mesh import build_mesh
from pdsl.lowering.plan import Plan, StageCut
from pdsl.lowering.plan_check import check_plan
from pdsl.lowering.planner import plan
from pdsl.lowering.programs import programs, stage_costs, template_timeline
from pdsl.lowering.replan import redo, reroute, retemplate
from pdsl.lowering.schedule import Op, peak_in_flight
from pdsl.lowering.schedule_check import check_schedule
from pdsl.lowering.search_report import ScheduleBasis
from pdsl.lowering.searched import searched_template, stand_in
from pdsl.lowering.simulate import simulate
from pdsl.lowering.transfers import Semantics, find_deadlock, transfer_order
from pdsl.render.plan import render_plan
from pdsl.render.search import render_search
from pdsl.render.terminal import PLAIN, count
from tests.facts import FACTS, gpt_facts

FACTS_8 = gpt_facts(layers=8)
LONG = evolve(FACTS_8, layers=tuple(evolve(layer, activation_bytes=64 * layer.activation_bytes) for layer in FACTS_8.layers))
"""The same with activations that weigh more than the parameters."""


def text(
    auto: str = "microbatches = 8",
    *,
    axes: str = "axis pp = 4",
    cluster: str = "",
    batch: int = 16,
    more: str = "",
    budget: str = "",
    stages: str = "",
    memory: str = "",
) -> str:
    shard = "fsdp(fsdp)" if "fsdp" in axes else "replicate()"
    return f"""pdsl 1
cluster {{ {cluster} }}
mesh {{ {axes} }}
model "pdsl.models:gpt" {{ layers = 4 }}
shard {{ "**" => {shard} }}
pipeline over pp {{ {stages}
schedule = auto({auto}) }}
train {{ data = "pdsl.data:python_source"; batch = {batch}; steps = 10; optimizer = adamw(lr = 1e-3) {more} }}
{memory}
{budget}
"""


def checked(auto: str = "microbatches = 8", *, facts=FACTS_8, world: int | None = None, **options) -> CheckResult:
    return check(Source("job.pdsl", text(auto, **options)), facts=facts, world=world)


def planned(auto: str = "microbatches = 8", *, facts=FACTS_8, world: int | None = None, **options) -> Plan:
    found = checked(auto, facts=facts, world=world, **options)
    assert found.spec is not None, [d.message for d in found.diagnostics]
    assert found.mesh is not None
    made = plan(found.spec, facts, found.mesh)
    assert check_plan(made) == ()
    assert Plan.from_json(made.to_json()) == made
    return made


def splits(made: Plan) -> bool:
    return any(o.op is Op.BACKWARD_INPUT for t in made.templates for row in t.schedule.rows for o in row)


# --- the plan --------------------------------------------------------------------------------------------------------------------------------


def test_a_plan_keeps_the_rows_and_what_was_found():
    made = planned()
    (template,) = made.templates
    report = template.search
    assert report is not None
    assert template.schedule.name == "auto"
    assert report.bound <= report.makespan
    assert (
        report.makespan == template_timeline(made, template).makespan == simulate(template.schedule, stage_costs(made, template)).makespan
    )
    best = report.best_named
    assert best is not None
    assert best.makespan is not None
    assert report.makespan <= best.makespan
    assert {t.name for t in report.tried} >= {"gpipe", "one_f_one_b", "interleaved_1f1b"}
    assert planned().hash == made.hash
    for made_program in programs(made):
        assert made_program.actions


def test_the_time_is_never_above_that_of_any_named_schedule_under_the_same_plan():
    auto = cost(planned()).step_time
    for name in ("gpipe", "one_f_one_b", "eager_1f1b", "zero_bubble", "zbv", "v_half", "interleaved_1f1b", "looped_bfs"):
        source = text().replace("auto(", f"{name}(")
        found = check(Source("job.pdsl", source), facts=FACTS_8)
        assert found.spec is not None
        assert found.mesh is not None
        named = plan(found.spec, FACTS_8, found.mesh)
        assert auto <= cost(named).step_time, name


def test_latency_is_a_share_of_a_forward_and_changes_what_is_chosen():
    fast, slow = planned(), planned("microbatches = 8, hop = 1")
    share = Fraction(sum(layer.flops for layer in FACTS_8.layers), 4)
    assert fast.templates[0].search is not None
    assert slow.templates[0].search is not None
    assert fast.templates[0].search.hop == 0
    assert slow.templates[0].search.hop == share
    assert slow.templates[0].schedule != fast.templates[0].schedule
    timeline = template_timeline(slow, slow.templates[0])
    assert timeline.makespan == slow.templates[0].search.makespan > fast.templates[0].search.makespan


def test_backwards_stay_whole_where_the_spec_says_so_or_sharding_would_undo_them():
    assert splits(planned())
    assert not splits(planned("microbatches = 8, split = false"))
    sharded = "axis pp = 2; axis fsdp = 2"
    assert splits(planned(axes=sharded))
    assert not splits(planned(axes=sharded, memory="memory { reshard = true }"))
    again = evolve(FACTS_8, recomputed=tuple(f"layers.{i}" for i in range(8)))
    assert not splits(planned(facts=again, memory='memory { recompute = "layers.*" }'))


def test_what_is_computed_again_is_part_of_the_costs():
    again = evolve(FACTS_8, layers=tuple(evolve(layer, again_flops=layer.flops) for layer in FACTS_8.layers))
    made = planned(facts=again)
    (template,) = made.templates
    assert template.search is not None
    assert template.search.makespan == simulate(template.schedule, stage_costs(made, template)).makespan
    plain = planned().templates[0].search
    assert plain is not None
    assert template.search.makespan > plain.makespan


def test_transfers_of_a_found_schedule_cannot_deadlock():
    for made in (planned(), planned("microbatches = 8, hop = 1/2"), planned(axes="axis pp = 2", batch=8)):
        (template,) = made.templates
        rows = transfer_order(template.schedule, template_timeline(made, template))
        for semantics in Semantics:
            assert find_deadlock(rows, semantics) == ()


def test_one_position_accumulates():
    made = planned(axes="axis dp = 2; axis pp = 1")
    assert made.templates[0].schedule.name == "single"
    assert made.templates[0].search is None


def test_few_layers_leave_one_stage_for_each_position():
    made = planned(axes="axis pp = 4", facts=gpt_facts(layers=3))
    assert made.templates[0].schedule.stages == 4


def test_written_stages_are_kept():
    two = 'stage first { "tok", "layers[..2]" }\nstage last { "layers[2..]", "norm", "head" }'
    made = planned(axes="axis pp = 2", stages=two, facts=FACTS["gpt"])
    assert made.templates[0].stages == (StageCut(0, 3, 0), StageCut(3, 6, 1))
    four = 'stage a { "tok", "layers[..1]" }\nstage b { "layers[1..2]" }\nstage c { "layers[2..3]" }\nstage d { "layers[3..]", "norm", "head" }'
    made = planned(axes="axis pp = 2", stages=four, facts=FACTS["gpt"])
    assert [(s.start, s.stop) for s in made.templates[0].stages] == [(0, 2), (2, 3), (3, 4), (4, 6)]


def test_three_written_stages_have_no_placement_on_two_positions():
    three = 'stage a { "tok", "layers[..1]" }\nstage b { "layers[1..2]" }\nstage c { "layers[2..]", "norm", "head" }'
    found = checked(axes="axis pp = 2", stages=three, facts=FACTS["gpt"])
    assert [d.code for d in found.diagnostics] == ["PDL414"]
    two = checked(
        axes="axis pp = 2", stages='stage a { "tok", "layers[..2]" }\nstage b { "layers[2..]", "norm", "head" }', facts=FACTS["gpt"]
    )
    assert two.spec is not None
    assert two.spec.pipeline is not None
    first, _ = two.spec.pipeline.stages
    odd = evolve(two.spec, pipeline=evolve(two.spec.pipeline, stages=(first,)))
    mesh = build_mesh(odd, 2)
    assert mesh is not None
    with pytest.raises(PlanError, match="1 stages are written"):
        plan(odd, FACTS["gpt"], mesh)


# --- memory ----------------------------------------------------------------------------------------------------------------------------------


def test_memory_is_kept_to_and_costs_time():
    free = planned(facts=LONG)
    assert free.templates[0].search is not None
    need = max(m.total for m in cost(free).memory)
    tight = planned(facts=LONG, cluster=f"memory = {need * 7 // 10 // 1024}KiB")
    assert tight.templates[0].search is not None
    assert max(m.total for m in cost(tight).memory) <= need * 7 // 10
    assert tight.templates[0].search.peak < free.templates[0].search.peak
    assert tight.templates[0].search.makespan > free.templates[0].search.makespan
    assert any(t.reason.startswith("it holds") for t in tight.templates[0].search.tried)


@pytest.mark.parametrize("axes", ["axis pp = 3", "axis pp = 2; axis fsdp = 2"])
@pytest.mark.parametrize("share", [8, 9])
def test_no_rank_takes_more_than_it_has(axes, share):
    need = max(m.total for m in cost(planned(facts=LONG, axes=axes)).memory)
    limit = need * share // 10 // 1024
    assert max(m.total for m in cost(planned(facts=LONG, axes=axes, cluster=f"memory = {limit}KiB")).memory) <= limit * 1024


def test_what_does_not_fit_is_refused_with_the_memory_that_would_do():
    found = checked(cluster="memory = 64KiB")
    (diagnostic,) = [d for d in found.diagnostics if d.code == "PDL413"]
    good = checked()
    assert good.spec is not None
    assert good.mesh is not None
    poor = evolve(good.spec, cluster=evolve(good.spec.cluster, memory=65536))
    with pytest.raises(PlanError, match="no schedule fits in 65536 bytes of memory: with a single microbatch the fullest position takes"):
        plan(poor, FACTS_8, good.mesh)
    mebibytes = int(diagnostic.help[0].split("=")[1].split("MiB")[0])
    assert not [d for d in checked(cluster=f"memory = {mebibytes}MiB").diagnostics if d.code == "PDL413"]
    assert planned(cluster=f"memory = {mebibytes}MiB").templates[0].search is not None


def test_accumulation_holds_no_more_than_a_round():
    made = planned("microbatches = 2", more="; accumulate = 4", axes="axis pp = 2")
    (template,) = made.templates
    assert template.schedule.microbatches == 8
    assert max(peak_in_flight(template.schedule)) <= 2 * (template.schedule.stages // 2)


# --- losses ----------------------------------------------------------------------------------------------------------------------------------

LOSING = {
    "cluster": "nodes = 5; ranks_per_node = 1",
    "axes": "axis dp = rest; axis pp = 2 to 3",
    "budget": "fault_budget { lose = 1 }",
    "batch": 48,
    "facts": FACTS["gpt"],
}


def test_every_length_has_its_own_schedule_and_stays_within_a_budget():
    made = planned("microbatches = 4", **LOSING)
    assert made.budget is not None
    assert made.budget.schedule == "auto"
    assert len(made.budget.bases) == len(made.budget.cuts)
    for template in made.templates:
        assert template.search is not None
        assert template.schedule.name == "auto"
        assert template.search.makespan == template_timeline(made, template).makespan


def test_after_a_loss_schedules_are_searched_for_again():
    made = planned("microbatches = 4", **LOSING)
    held = {node: range(6) for node in range(5)}
    after = retemplate(made, [0, 1, 2, 3], held, generation=1)
    assert check_plan(after) == ()
    assert Plan.from_json(after.to_json()) == after
    assert {t.schedule.name for t in after.templates} == {"auto"}
    routed = reroute(made, [made.nodes[-1]], generation=1)
    assert routed is not None
    assert check_plan(routed) == ()
    rest = redo(made, {0: made.pipelines[0].microbatches[:1]})
    assert check_schedule(rest.template(0).schedule) == ()
    assert rest.template(0).schedule.microbatches == 1


def test_a_fixed_mesh_with_a_budget_is_searched_whole_and_rescheduled_in_place():
    made = planned(
        "microbatches = 4", cluster="nodes = 2; ranks_per_node = 2", axes="axis dp = 2; axis pp = 2", budget="fault_budget { lose = 1 }"
    )
    assert made.budget is not None
    assert made.budget.cuts == (made.templates[0].stages,)
    routed = reroute(made, [1], generation=1)
    assert routed is not None
    (whole,) = [p for p in routed.pipelines if p.whole]
    assert len(whole.microbatches) == 8
    assert routed.templates[whole.template].stages == made.templates[0].stages
    assert check_plan(routed) == ()


def test_pipelines_asked_for_by_number_each_have_their_own_schedule():
    found = checked("microbatches = 4", axes="axis pp = 2", facts=FACTS["gpt"])
    assert found.spec is not None
    mesh = build_mesh(found.spec, 2)
    assert mesh is not None
    made = plan(found.spec, FACTS["gpt"], mesh, pipelines=[(2, 5), (3, 3)])
    assert [t.schedule.microbatches for t in made.templates] == [5, 3]
    assert all(t.search is not None for t in made.templates)
    assert check_plan(made) == ()


def test_a_quick_search_is_never_slower_than_the_stand_in():
    stages = tuple(StageCut(s, s + 1, s) for s in range(4))
    basis = ScheduleBasis((3, 1, 2, 2), Fraction(1, 2), (1, 1, 1, 1), (4, 3, 2, 2))
    assert stand_in(stages) == "one_f_one_b"
    for m in (1, 2, 5, 12):
        template = searched_template(stages, basis, m)
        assert template.search is not None
        (named,) = [t.makespan for t in template.search.tried if t.name == "one_f_one_b"]
        assert named is not None
        assert template.search.makespan <= named
        assert searched_template(stages, basis, m) == template
    with pytest.raises(PlanError, match="must hold 1 and has room for 0"):
        searched_template(stages, evolve(basis, caps=(0, 1, 1, 1)), 2)


# --- the screen ------------------------------------------------------------------------------------------------------------------------------


def test_the_screen_tells_the_best_named_the_chosen_and_the_bound():
    made = planned("microbatches = 8, hop = 1/4", cluster="memory = 2MiB")
    (template,) = made.templates
    report = template.search
    assert report is not None
    best = report.best_named
    assert best is not None
    assert best.makespan is not None
    lines = "\n".join(render_search(report, PLAIN))
    assert lines in render_plan(made)
    told = " ".join(lines.split())
    assert told.startswith(f"searched: {best.name} {count(int(best.makespan))} | chosen {count(int(report.makespan))} FLOPs for a sample")
    assert f"| lower bound {count(int(report.bound))}" in told
    assert f"a transfer takes {count(int(report.hop))} FLOPs" in told
    assert "as slow as the schedule says" in " ".join(render_plan(made).split())
