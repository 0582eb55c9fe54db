"""What the rules on the fault budget share: the counts of a spec, its proof, and changes in the words of the language.

Modules that plan are imported where they are needed: most specs have no budget, and a check of them starts without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Label
from pdsl.grammar.errors import PlanError
from pdsl.lowering.elastic import positions_range, sizing
from pdsl.lowering.mesh import PIPELINE, REPLICA, Mesh, axis_roles
from pdsl.lowering.promise import Outline, Remedy
from pdsl.lowering.rules.base import Context, listed, plural
from pdsl.lowering.spec import SizeRange

if TYPE_CHECKING:
    from pdsl.lowering.proof import Gap, Proof

__all__ = ["LOSE", "gap_of", "labels_of", "lose", "more_pipelines", "named", "outline_of_spec", "why_not_whole", "would_do"]

LOSE = "fault_budget.lose"


def lose(context: Context) -> int:
    """How many units may be lost at once; 0 without a budget."""
    return context.spec.fault_budget.lose if context.spec.fault_budget is not None else 0


def why_not_whole(context: Context, mesh: Mesh) -> str | None:
    """Why pipelines do not take whole nodes, or None if they do."""
    from pdsl.lowering.budgets import misfit  # slow to import, and only for specs with a budget

    return misfit(context.spec, mesh)


def outline_of_spec(context: Context) -> Outline | None:
    """The counts of a spec that wants to survive losses and whose pipelines take whole nodes; sizes that the layers or the memory forbid are left out
    if the model is known.
    """
    spec, mesh = context.spec, context.mesh
    if mesh is None or not lose(context):
        return None
    from pdsl.lowering.budgets import domain_nodes, elastic_budget, islands_of_node  # slow to import, and only for specs with a budget
    from pdsl.lowering.layouts import parameter_layouts

    if why_not_whole(context, mesh) is not None:
        return None
    islands = islands_of_node(spec, mesh) or 1
    total = context.microbatches * mesh.pipelines
    nodes = mesh.world_size // (islands * mesh.shard_size * mesh.tensor_size)
    sizes = mesh.sizing or sizing(spec, axis_roles(spec), mesh.world_size)
    if sizes is None:
        return Outline(nodes, mesh.positions // islands, 1, lose(context), total, domain_nodes(spec))
    least, count = sizes.least, sizes.most - sizes.least + 1
    if context.facts is not None:
        layouts = parameter_layouts(context.facts, spec.shard, shard_size=mesh.shard_size, tensor_size=mesh.tensor_size, axes=mesh.axes)
        try:
            budget = elastic_budget(spec, context.facts, layouts, mesh)
        except PlanError:
            return None  # the rules on memory and stages tell of it
        least, count = budget.least, len(budget.cuts)
    return Outline(nodes, least, count, lose(context), total, domain_nodes(spec))


def _proof(context: Context) -> Proof | None:
    """The proof of the plan that the spec has, if it has one."""
    from pdsl.lowering.planner import plan
    from pdsl.lowering.proof import prove

    if context.facts is None or context.mesh is None or context.spec.model is None or context.spec.train is None:
        return None
    try:
        return prove(plan(context.spec, context.facts, context.mesh), context.spec.cluster.memory)
    except PlanError:
        return None


def gap_of(context: Context, kind: str) -> Gap | None:
    """The gap of a kind in the proof of the plan that the spec has; None if the proof has none, or there is no plan."""
    proof = _proof(context)
    return next((g for g in proof.gaps if g.kind == kind), None) if proof is not None else None


def would_do(context: Context, outline: Outline) -> tuple[str, ...]:
    """The changes in the words of the language; of lengths only those that layers and memory allow, as far as they are known."""
    roles = axis_roles(context.spec)
    axis = next((a for a in context.spec.mesh.axes if roles.get(a.name) == PIPELINE), None)
    low, _ = positions_range(context.spec, roles)
    islands = _islands(context)
    told = []
    for remedy in outline.remedies():
        if remedy.what == "lose":
            told.append(f"lose = {remedy.value} holds")
        elif remedy.what == "nodes":
            told.append(f"{remedy.value} nodes would do")
        elif axis is not None and _allowed(context, remedy, islands):
            first = remedy.value * islands if remedy.what == "low" else low
            last = outline.largest * islands if remedy.what == "low" else remedy.value * islands
            told.append(f"{axis.name} = {first} to {last} would do")
    return (f"{'; '.join(told)}",) if told else ()


def _islands(context: Context) -> int:
    from pdsl.lowering.budgets import islands_of_node

    return (islands_of_node(context.spec, context.mesh) if context.mesh is not None else None) or 1


def _allowed(context: Context, remedy: Remedy, islands: int) -> bool:
    """Whether pipelines of another length are possible at all: longer ones need layers to cut, shorter ones memory."""
    if remedy.what == "low":
        return context.spec.cluster.memory is None
    if context.facts is None:
        return True
    parts = sum(1 for i, layer in enumerate(context.facts.layers) if i == 0 or not layer.cut_before)
    return remedy.value * islands * (context.spec.pipeline.virtual if context.spec.pipeline is not None else 1) <= parts


def more_pipelines(context: Context, wanted: int) -> tuple[str, ...]:
    """Help where only the replica axis keeps the pipelines few."""
    axis = next((a.name for a in context.mesh.axes if a.role == REPLICA), None) if context.mesh is not None else None
    return (f"{axis} = rest or at least {wanted} would do" if axis is not None else "an axis that replicates would do: axis dp = rest",)


def labels_of(context: Context, outline: Outline) -> tuple[Label, ...]:
    """Labels at the count of nodes and at the pipeline axis."""
    roles = axis_roles(context.spec)
    found = list(context.label("cluster.nodes", plural(outline.nodes, "node")))
    for axis in context.spec.mesh.axes:
        if roles.get(axis.name) == PIPELINE:
            size = f"{axis.size.low} to {axis.size.high}" if isinstance(axis.size, SizeRange) else str(context.positions)
            found += context.label(f"mesh.{axis.name}", f"pipelines of {size} positions")
    return tuple(found)


def named(nodes: tuple[int, ...]) -> str:
    """`node 3`, `nodes 0, 2 and 4`; of many only the first."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {listed(nodes if len(nodes) <= 8 else (*nodes[:7], '...'))}"
