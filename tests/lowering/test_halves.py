"""Programs whose backwards come in halves."""

from __future__ import annotations

import pytest
from attrs import evolve

from pdsl.grammar.errors import PlanError
from pdsl.lowering.plan import Plan, Sharding
from pdsl.lowering.program import ActionKind
from pdsl.lowering.programs import program, programs, stage_costs
from tests.plans import rectangular
from tests.split_plans import in_halves

ENDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def plans() -> list[Plan]:
    return [
        in_halves(rectangular(replicas=2, schedule=s, virtual=v), lag)
        for s, v in (("one_f_one_b", 1), ("interleaved_1f1b", 2))
        for lag in (0, 2)
    ]


@pytest.mark.parametrize("plan", plans())
def test_a_stage_is_given_back_ahead_of_its_last_weight_half_and_summed_after_it(plan: Plan) -> None:
    for made in programs(plan):
        for stage in plan.stages_of(made.rank):
            last = max(i for i, a in enumerate(made.actions) if a.stage == stage and a.kind in ENDS)
            assert made.actions[last].kind is ActionKind.BACKWARD_WEIGHT
            assert made.actions[last - 1].kind is ActionKind.RESHARD
            assert made.actions[last - 1].stage == stage
        issued = {a.bucket: i for i, a in enumerate(made.actions) if a.kind is ActionKind.REDUCE}
        assert set(issued) == set(range(len(made.buckets)))
        for bucket, at in issued.items():
            ready = max(i for i, a in enumerate(made.actions) if a.stage in made.buckets[bucket].stages and a.kind in ENDS)
            between = made.actions[ready + 1 : at]
            assert all(a.kind is ActionKind.REDUCE for a in between), "a sum waits for nothing but its own gradients"


@pytest.mark.parametrize("plan", plans())
def test_gradients_leave_after_the_input_half(plan: Plan) -> None:
    for made in programs(plan):
        for i, a in enumerate(made.actions):
            if a.kind is ActionKind.SEND_GRADIENT:
                before = [b for b in made.actions[:i] if b.kind is ActionKind.BACKWARD_INPUT]
                assert (before[-1].stage, before[-1].microbatch) == (a.stage, a.microbatch), "it goes before anything else is computed"


def test_the_weight_half_of_the_first_stage_is_its_whole_backward() -> None:
    plan = rectangular()
    costs = stage_costs(plan, plan.templates[0])
    assert costs.backward_input[0] == 0
    assert costs.backward_weight[0] == 2 * costs.forward[0]
    assert costs.backward_input[1:] == costs.backward_weight[1:] == costs.forward[1:]


@pytest.mark.parametrize(("sharding", "key"), [(Sharding(reshard=True), "reshard = true"), (Sharding(every=True), "sync = every")])
def test_what_is_given_back_or_reduced_between_the_halves_is_no_plan(sharding: Sharding, key: str) -> None:
    whole = evolve(rectangular(), sharding=sharding)
    program(whole, 0)
    with pytest.raises(PlanError, match=f"halves runs backwards in halves.*{key}"):
        program(in_halves(whole), 0)
    program(in_halves(evolve(rectangular(shard=1), sharding=sharding)), 0)
