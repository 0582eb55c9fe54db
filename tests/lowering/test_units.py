"""Which layers are sharding units of their own, and how often they are gathered."""

from __future__ import annotations

from attrs import evolve

from pdsl.lowering.plan import Plan, Sharding
from pdsl.lowering.units import Collectives, collectives, gathers, root_layers, unit_groups, unit_layers
from tests.plans import facts, rectangular


def resharding(**options):
    return evolve(rectangular(positions=1, microbatches=1, **options), sharding=Sharding(reshard=True))


def test_small_ends_ride_with_the_root():
    plan = resharding(model=facts(3))
    assert root_layers(plan, 0) == {0, 4}
    assert unit_layers(plan, 0) == (1, 2, 3)


def test_a_vocabulary_larger_than_a_block_is_a_unit_of_its_own():
    model = facts(3)
    large = tuple(evolve(p, shape=(1000, 8)) if p.name == "embed.weight" else p for p in model.parameters)
    plan = resharding(model=evolve(model, parameters=large))
    assert root_layers(plan, 0) == frozenset()
    assert unit_layers(plan, 0) == (0, 1, 2, 3, 4)


def test_layers_that_share_a_parameter_ride_with_the_root_in_pipelines_too():
    assert root_layers(rectangular(positions=1, model=facts(2, tied=True)), 0) == {0, 3}
    assert root_layers(rectangular(positions=2, model=facts(2, tied=True)), 0) == frozenset()


def test_only_what_reshards_before_its_backward_is_gathered_twice():
    plan = resharding(model=facts(3))
    counts = gathers(plan, 0)
    assert set(counts) == {p.name for p in plan.facts.parameters}
    assert {n for n, k in counts.items() if k == 2} == {n for n in counts if n.startswith(("blocks.0", "blocks.1"))}
    assert {n for n, k in counts.items() if k == 1} == {n for n in counts if n.startswith(("blocks.2", "embed", "head"))}
    kept = rectangular(positions=1, microbatches=4, model=facts(3))
    assert set(gathers(kept, 0).values()) == {1}


def test_blocks_are_grouped_and_ends_are_not():
    plan = evolve(rectangular(positions=1, microbatches=1, model=facts(5)), sharding=Sharding(group=2))
    assert unit_groups(plan, 0) == {0: ((0,), (1, 2), (3, 4), (5,), (6,))}
    last_is_shorter = evolve(plan, sharding=Sharding(reshard=True, group=3))
    assert unit_groups(last_is_shorter, 0) == {0: ((1, 2, 3), (4, 5))}


def test_no_group_reaches_over_stages():
    plan = evolve(
        rectangular(positions=1, microbatches=4, schedule="interleaved_1f1b", virtual=2, model=facts(4)), sharding=Sharding(group=9)
    )
    assert unit_groups(plan, 0) == {0: ((0,), (1, 2)), 1: ((3, 4), (5,))}


def test_under_one_f_one_b_the_last_unit_of_a_stage_serves_what_comes_before_the_next_backward():
    plan = evolve(rectangular(positions=2, microbatches=4, model=facts(4)), sharding=Sharding(reshard=True))
    first, second = gathers(plan, 0), gathers(plan, 2)
    # stage 0 runs F0 F1 B0 F2 B1 F3 B2 B3: its last unit is gathered for F0, F2, F3 and B3
    assert (first["blocks.0.up.weight"], first["blocks.1.up.weight"]) == (8, 4)
    # stage 1 runs each backward right after its forward
    assert (second["blocks.2.up.weight"], second["blocks.3.up.weight"]) == (8, 4)


def test_gradients_are_reduced_once_or_after_each_microbatch():
    plan = rectangular(positions=1, microbatches=4, model=facts(3))
    assert collectives(plan, 0) == Collectives(gathers=5, reductions=5)
    assert collectives(evolve(plan, sharding=Sharding(every=True)), 0) == Collectives(gathers=5, reductions=20)
    assert collectives(rectangular(shard=1), 0) == Collectives(0, 0)


def test_a_pipeline_without_microbatches_gathers_nothing():
    plan = rectangular(positions=1, microbatches=4, model=facts(3))
    idle = evolve(plan, pipelines=(evolve(plan.pipelines[0], microbatches=()),))
    assert collectives(idle, 0) == Collectives(0, 0)


def test_sharding_is_in_the_hash_of_a_plan():
    plan = rectangular()
    choices = [Sharding(), Sharding(reshard=True), Sharding(group=2), Sharding(prefetch=0), Sharding(every=True)]
    assert len({evolve(plan, sharding=choice).hash for choice in choices}) == len(choices)
    assert Plan.from_json(evolve(plan, sharding=choices[-1]).to_json()).sharding == choices[-1]
