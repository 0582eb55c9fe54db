"""Meshes and plans whose pipelines may differ in length."""

from __future__ import annotations

import pytest

from pdsl.grammar.errors import PlanError
from pdsl.grammar.source import Source
from pdsl.lowering.check import CheckResult, check
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.lowering.plan_check import check_plan
from pdsl.lowering.planner import plan
from pdsl.lowering.programs import programs
from pdsl.lowering.replan import layers_held, reroute, retemplate
from pdsl.lowering.schedules import SCHEDULES, placed
from tests.facts import FACTS, gpt_facts


def text(
    *,
    cluster: str = "nodes = 5; ranks_per_node = 2",
    axes: tuple[str, ...] = ("dp = rest", "pp = 2 to 3", "fsdp = 2"),
    budget: str = "fault_budget { lose = 1 }",
    schedule: str = "one_f_one_b(microbatches = 4)",
    batch: int = 48,
    more: str = "",
) -> str:
    mesh = "; ".join(f"axis {a}" for a in axes)
    shard = "fsdp(fsdp)" if "fsdp" in mesh else "replicate()"
    return f"""pdsl 1
cluster {{ {cluster} }}
mesh {{ {mesh} }}
model "pdsl.models:gpt" {{ layers = 4 }}
shard {{ "**" => {shard} }}
pipeline over pp {{ schedule = {schedule} }}
train {{ data = "pdsl.data:python_source"; batch = {batch}; steps = 10; optimizer = adamw(lr = 1e-3) {more} }}
{budget}
"""


def checked(facts=FACTS["gpt"], world: int | None = None, **options) -> CheckResult:
    return check(Source("job.pdsl", text(**options)), facts=facts, world=world)


def planned(facts=FACTS["gpt"], world: int | None = None, **options) -> Plan:
    found = checked(facts, world, **options)
    assert found.spec is not None, [d.message for d in found.diagnostics]
    assert found.mesh is not None
    made = plan(found.spec, facts, found.mesh)
    assert check_plan(made) == ()
    assert Plan.from_json(made.to_json()) == made
    return made


def lengths(made: Plan) -> list[int]:
    return [len(p.islands) for p in made.pipelines]


def test_five_nodes_are_two_unequal_pipelines_that_share_the_batch():
    made = planned()
    assert lengths(made) == [2, 3]
    assert sum(len(p.microbatches) for p in made.pipelines) == made.microbatches == 8
    assert len(made.pipelines[1].microbatches) > len(made.pipelines[0].microbatches)
    assert made.ranks == tuple(range(10))
    assert [made.node(island[0]) for p in made.pipelines for island in p.islands] == [0, 1, 2, 3, 4]
    assert (made.budget.lose, made.budget.least, list(made.budget.sizes)) == (1, 2, [2, 3])
    assert not [p for p in made.pending if "fault_budget" in p or "mesh" in p]


@pytest.mark.parametrize(
    ("nodes", "axis", "expected"),
    [(4, "2 to 3", [2, 2]), (6, "2 to 3", [2, 2, 2]), (7, "2 to 3", [2, 2, 3]), (7, "3 to 4", [3, 4]), (5, "1 to 3", [1] * 5)],
)
def test_as_many_pipelines_as_nodes_allow(nodes, axis, expected):
    batch = 4 * 2 * len(expected)
    assert (
        lengths(planned(cluster=f"nodes = {nodes}; ranks_per_node = 2", axes=("dp = rest", f"pp = {axis}", "fsdp = 2"), batch=batch))
        == expected
    )


def test_fewer_pipelines_where_only_their_microbatches_divide_the_batch():
    made = planned(cluster="nodes = 6; ranks_per_node = 2", batch=64)  # three would need a multiple of 24
    assert lengths(made) == [3, 3]
    assert made.microbatches == 8


def test_several_islands_of_a_node_are_consecutive_positions_of_one_pipeline():
    made = planned(cluster="nodes = 3; ranks_per_node = 4", axes=("dp = rest", "pp = 2 to 4", "fsdp = 2"), batch=96)
    assert made.islands_per_node == 2
    assert all({made.node(r) for i in p.islands for r in i} == {n} for n, p in enumerate(made.pipelines))
    assert list(made.budget.sizes) == [1, 2]
    assert [max(s.position for s in cut) + 1 for cut in made.budget.cuts] == [2, 4]


def test_a_fixed_mesh_stays_a_rectangle_with_a_budget_of_one_size():
    made = planned(cluster="nodes = 3; ranks_per_node = 4", axes=("dp = 3", "pp = 2", "fsdp = 2"), batch=24)
    assert lengths(made) == [2, 2, 2]
    assert (made.budget.least, len(made.budget.cuts), made.budget.cuts[0]) == (1, 1, made.templates[0].stages)


def test_without_a_budget_a_fixed_mesh_has_none():
    assert planned(axes=("dp = rest", "pp = 1", "fsdp = 2"), budget="", batch=40).budget is None


def test_a_range_without_a_budget_may_still_change_its_size():
    made = planned(budget="")
    assert (lengths(made), made.budget.lose) == ([2, 3], 0)


def test_a_range_alone_gives_one_pipeline_where_nothing_replicates():
    made = planned(cluster="nodes = 3; ranks_per_node = 2", axes=("pp = 2 to 3", "fsdp = 2"), budget="")
    assert lengths(made) == [3]


def test_without_a_number_of_ranks_the_shortest_pipeline_is_taken():
    made = planned(cluster="device = cpu", axes=("pp = 2 to 3", "fsdp = 2"), budget="")
    assert (lengths(made), list(made.budget.sizes)) == ([2], [2, 3])


def test_layers_bound_the_sizes():
    made = planned(gpt_facts(layers=1), cluster="nodes = 4; ranks_per_node = 2", axes=("dp = rest", "pp = 1 to 64", "fsdp = 2"), batch=32)
    assert list(made.budget.sizes) == [1, 2, 3]


def test_memory_bounds_the_sizes_from_below():
    free = planned(axes=("dp = rest", "pp = 1 to 3", "fsdp = 2"), batch=40)
    need = max(m.total for m in cost(free).memory)
    tight = f"nodes = 5; ranks_per_node = 2; memory = {need - 1}B"
    bound = planned(cluster=tight, axes=("dp = rest", "pp = 1 to 3", "fsdp = 2"), batch=48)
    assert (lengths(free)[0], bound.budget.least) == (1, 2)
    assert max(m.total for m in cost(bound).memory) < need


def test_accumulation_multiplies_the_microbatches():
    made = planned(more="; accumulate = 2", batch=96)
    assert made.microbatches == 16
    assert all(len(p.microbatches) == made.template(i).schedule.microbatches for i, p in enumerate(made.pipelines))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_run_unequal_pipelines_and_every_plan_after_a_loss(schedule):
    made = planned(gpt_facts(layers=6), schedule=f"{schedule}(microbatches = 4)")
    assert lengths(made) == [2, 3]
    assert made.budget.schedule == schedule
    family = SCHEDULES[schedule]
    for template in made.templates:
        assert template.schedule.placement == placed(family.placement, template.positions, family.per_position(made.budget.virtual))
    for lost in range(5):
        rerouted = reroute(made, [lost], generation=1)
        assert rerouted is not None
        left = [n for n in range(5) if n != lost]
        after = retemplate(made, left, {n: layers for n, layers in layers_held(made).items() if n != lost}, generation=1)
        for found in (rerouted, after):
            assert check_plan(found) == ()
            assert Plan.from_json(found.to_json()) == found
            assert {t.schedule.name for t in found.templates} <= {schedule, "single"}
            assert len(programs(found)) == 8


@pytest.mark.parametrize("schedule", ["looped_bfs", "zbv"])
def test_memory_counts_what_the_schedule_holds(schedule):
    free = planned(gpt_facts(layers=6), cluster="nodes = 6; ranks_per_node = 2", schedule=f"{schedule}(microbatches = 4)", budget="")
    need = max(m.total for m in cost(free).memory)
    tight = f"nodes = 6; ranks_per_node = 2; memory = {need - 1}B"
    bound = planned(gpt_facts(layers=6), cluster=tight, schedule=f"{schedule}(microbatches = 4)", budget="")
    assert (lengths(free), lengths(bound)) == ([2, 2, 2], [3, 3])
    assert max(m.total for m in cost(bound).memory) < need


def test_twenty_plans_have_the_same_bytes():
    assert len({planned(gpt_facts(layers=9), cluster="nodes = 7; ranks_per_node = 2", batch=48).to_json() for _ in range(20)}) == 1


def test_pipelines_asked_for_by_number_get_a_budget_of_their_sizes():
    found = checked(axes=("fsdp = 2", "pp = 1"), cluster="nodes = 1; ranks_per_node = 2", budget="")
    from attrs import evolve

    from pdsl.lowering.mesh import build_mesh
    from pdsl.lowering.spec import FaultBudgetSpec

    spec = evolve(found.spec, fault_budget=FaultBudgetSpec(lose=1))
    inside = evolve(spec, mesh=evolve(spec.mesh, axes=spec.mesh.axes[:1]))
    made = plan(spec, FACTS["gpt"], build_mesh(inside, 2), pipelines=[(1, 2), (2, 4)])
    assert (lengths(made), list(made.budget.sizes)) == ([1, 2], [1, 2])


def test_islands_over_nodes_are_no_plan_that_survives():
    found = checked(budget="", cluster="nodes = 4; ranks_per_node = 1", axes=("dp = 2", "fsdp = 2", "pp = 1"), batch=48)
    from attrs import evolve

    from pdsl.lowering.spec import FaultBudgetSpec

    spec = evolve(found.spec, fault_budget=FaultBudgetSpec(lose=1))
    with pytest.raises(PlanError, match=r"take whole nodes: an island of 2 ranks .* spans nodes of 1"):
        plan(spec, FACTS["gpt"], found.mesh)
