"""What crosses from one stage into the next, as a rank sends and receives it: of a stream that is split along its sequence, its own part."""

from __future__ import annotations

from attrs import evolve

from pdsl.lowering.facts import BoundaryTensor, LayerFacts
from pdsl.lowering.plan import Plan
from pdsl.lowering.tensor_facts import local_dims

__all__ = ["crossing", "local_layer"]


def crossing(plan: Plan, layer: int) -> tuple[BoundaryTensor, ...]:
    """The tensors that cross into a layer, with the sizes that one rank holds of them."""
    inputs = plan.facts.layers[layer].inputs
    facts = plan.facts.tensor
    if facts is None or not facts.inputs:
        return inputs
    split = {s.index: s for s in facts.inputs if s.layer == layer}
    return tuple(evolve(t, dims=local_dims(t.dims, split[i], plan.tensor_axes)) if i in split else t for i, t in enumerate(inputs))


def local_layer(plan: Plan, layer: int) -> LayerFacts:
    """A layer with the inputs that one rank is given."""
    return evolve(plan.facts.layers[layer], inputs=crossing(plan, layer))
