"""Which layers are sharding units of their own, and how often they are gathered."""

from __future__ import annotations

from attrs import evolve

from pdsl.lowering.plan import Sharding
from pdsl.lowering.units import gathers, root_layers, unit_layers
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
    counts = {p.name: gathers(plan, 0, p) for p in plan.facts.parameters}
    assert {n for n, k in counts.items() if k == 2} == {n for n in counts if n.startswith(("blocks.0", "blocks.1"))}
    assert {n for n, k in counts.items() if k == 1} == {n for n in counts if n.startswith(("blocks.2", "embed", "head"))}
    kept = rectangular(positions=1, microbatches=4, model=facts(3))
    assert {gathers(kept, 0, p) for p in kept.facts.parameters} == {1}
