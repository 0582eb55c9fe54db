"""Bytes that tensor ranks exchange inside of layers: what their split modules sum and gather, forward and backward."""

from __future__ import annotations

from math import prod

from pdsl.lowering.facts import LayerFacts, ModelFacts, ParameterFacts, item_bytes
from pdsl.lowering.ownership import stages_using
from pdsl.lowering.parts import parts
from pdsl.lowering.plan import Plan
from pdsl.lowering.precision import compute_format
from pdsl.lowering.styles import ModuleStyle, module_style, split_modules
from pdsl.lowering.tensor_facts import TensorFacts

__all__ = ["tensor_traffic", "tokens_of"]


def tensor_traffic(plan: Plan, rank: int) -> int:
    """Bytes that a rank sends to the other tensor ranks of its island in a step, over all microbatches.

    A ring moves (n - 1) / n of a tensor to gather it among n ranks or to sum it into parts, and twice that to sum it for all.
    """
    if plan.tensor_size == 1:
        return 0
    at = plan.coordinate(rank)
    stages = plan.template(at.pipeline).stages
    total = 0.0
    for p in plan.facts.parameters:
        layout = plan.layout(p.name)
        if not layout.splits or len(p.shape) != 2:
            continue  # biases go with their weights
        uses = sum(stages[stage].position == at.position for stage in stages_using(plan, at.pipeline, p))
        style = module_style(layout, plan.tensor_axes, embedding=p.module == "Embedding")
        total += uses * _Module(plan, p, style).sent()
    mine = [i for s in stages if s.position == at.position for i in range(s.start, s.stop)]
    styled = split_modules(plan.facts.parameters, plan.layouts)
    total += sum(_stream(plan, i, styled) for i in mine)
    if len(plan.facts.layers) - 1 in mine:
        total += _losses(plan)
    return round(total * len(plan.pipelines[at.pipeline].microbatches))


def tokens_of(facts: ModelFacts, layer: int) -> int:
    """Rows that one sample gives to the matrices of a layer, read off the nearest boundary."""
    tensor = _nearest(facts, layer)
    return prod(tensor[:-1]) if tensor else 1


def _nearest(facts: ModelFacts, layer: int) -> tuple[int, ...]:
    """The shape for one sample of the stream at the boundary next to a layer; () if nothing with more than one dim crosses any."""
    layers = facts.layers
    for i in sorted(range(1, len(layers)), key=lambda i: (abs(i - layer), i)):
        found = next((t for t in layers[i].inputs if t.differentiable and len(t.dims) > 1), None)
        if found is not None:
            return found.shape(1)
    return ()


class _Module:
    """One split module in one microbatch."""

    def __init__(self, plan: Plan, p: ParameterFacts, style: ModuleStyle) -> None:
        self._plan, self._style = plan, style
        self._facts = plan.facts.tensor or TensorFacts()
        self._path = p.name.rpartition(".")[0]
        self._embedding = p.module == "Embedding"
        self._outputs, self._inputs = (p.shape[1], p.shape[0]) if self._embedding else p.shape
        self._row = (
            tokens_of(plan.facts, p.layers[0] if p.layers else 0)
            * plan.rows_per_rank
            * item_bytes(compute_format(plan.precision, plan.facts, p))
        )

    def sent(self) -> float:
        """Bytes that a rank sends for it, forward and backward."""
        style, stream = self._style, self._facts.sequence
        out, into = self._count(style.outputs), self._count(style.inputs)
        scatters = self._path in self._facts.scatters
        total = 2 * _share(into) * self._row * self._outputs / out if style.inputs else 0.0  # summed for all, or into parts and back
        if scatters and stream != style.inputs:
            total += _share(self._count(stream)) * self._row * self._outputs
        if style.outputs and style.gives_whole:
            total += _share(out) * self._row * self._outputs
        return total if self._embedding else total + self._given(out, into)  # indices have no gradient

    def _given(self, out: int, into: int) -> float:
        """What is exchanged for the input, unless it was for another module that is given the same."""
        style, stream = self._style, self._facts.sequence
        if self._path in self._facts.shares:
            return 0.0
        gathers = self._path in dict(self._facts.gathers)
        total = _share(self._count(stream)) * self._row * self._inputs if gathers else 0.0
        if style.inputs and style.takes_whole:
            total += _share(into) * self._row * self._inputs
        if style.outputs:
            both = gathers and stream == style.outputs  # the backward sums into parts
            total += (1 if both else 2) * _share(out) * self._row * self._inputs / (into if style.takes_whole else 1)
        return total

    def _count(self, axes: tuple[str, ...]) -> int:
        return parts(self._plan.tensor_axes, axes, self._plan.tensor_size) if axes else 1


def _stream(plan: Plan, layer: int, styled: tuple[str, ...]) -> float:
    """Bytes that a rank sends where the stream enters and leaves its split form in a layer, or is gathered for a module that splits nothing by itself."""
    facts = plan.facts.tensor
    if facts is None or not facts.sequence:
        return 0.0
    here = plan.facts.layers[layer]
    share = _share(parts(plan.tensor_axes, facts.sequence, plan.tensor_size))
    stream = _nearest(plan.facts, layer)
    size = prod(stream) * plan.rows_per_rank * _stream_item(here)
    inside = [where for path, where in facts.gathers if path not in styled and any(path.startswith(f"{m}.") for m in here.modules)]
    entering = sum(e.layer == layer for e in facts.enters)
    blocks = [e.layer for e in facts.enters] + [s.layer for s in facts.inputs]
    leaving = len(facts.exits) if blocks and layer == max(blocks) else 0
    return share * size * (2 * sum(len(where) for where in inside) + entering + leaving)


def _losses(plan: Plan) -> float:
    """Bytes that a rank sends for cross entropies of split scores: for each target the greatest score, the sum of all and the one that is asked for."""
    losses = plan.facts.tensor.losses if plan.facts.tensor is not None else ()
    per_row = sum(_share(parts(plan.tensor_axes, loss.axes, plan.tensor_size)) * loss.targets for loss in losses)
    return 2 * 3 * item_bytes("float32") * per_row * plan.rows_per_rank


def _stream_item(layer: LayerFacts) -> int:
    return next((item_bytes(t.dtype) for t in layer.inputs if t.differentiable), 4)


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
