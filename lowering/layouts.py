"""Layouts: from the ordered rules of a `shard` block to how each parameter lies on an island."""

from __future__ import annotations

from collections.abc import Sequence

from pdsl.lowering.facts import ModelFacts, ParameterFacts
from pdsl.lowering.parts import named_axes, role_axes
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.plan import ParameterLayout
from pdsl.lowering.spec import LayoutCall, LayoutTerm, ShardRule, term_text

__all__ = ["parameter_layouts", "tensor_dim", "term_splits"]

_Splits = tuple[tuple[int, tuple[str, ...]], ...]


def parameter_layouts(
    facts: ModelFacts, rules: tuple[ShardRule, ...], *, shard_size: int, tensor_size: int, axes: Sequence[MeshAxis] = ()
) -> tuple[ParameterLayout, ...]:
    """The layout of every parameter: first rule that matches; without any rule a parameter is whole everywhere.

    A bias follows the tensor split of the weight beside it, since one module computes with both. What has no elements to split, or is read outside of
    its module, is not sharded. `axes` are those of the mesh; without them each role counts as one axis.
    """
    named = {p.name: p for p in facts.parameters}
    taken = {p.name: next((r for r in rules if r.matches(p.name)), None) for p in facts.parameters}
    tensor, shard = role_axes(axes, "tensor"), role_axes(axes, "shard")

    def splits(p: ParameterFacts) -> _Splits:
        rule = taken[p.name]
        if tensor_size == 1 or rule is None:
            return ()
        found = ((dim, names) for t in rule.terms for dim, names in term_splits(t, p) if not axes or any(a.name in names for a in tensor))
        return tuple((dim, named_axes(tensor, names)) for dim, names in found)

    def layout(p: ParameterFacts) -> ParameterLayout:
        rule = taken[p.name]
        if rule is None:
            return ParameterLayout(p.name, sharded=False, tensor_dim=None, style="replicate()", line=0)
        term = next((t for t in rule.terms if isinstance(t, LayoutCall) and t.name == "fsdp"), None)
        split = term is not None and (not axes or any(a.name in term.axes for a in shard))
        sharded = shard_size > 1 and bool(p.shape) and p.numel > 0 and not p.outside and split
        module, _, leaf = p.name.rpartition(".")
        weight = named.get(f"{module}.weight") if leaf == "bias" else None
        found = splits(p) if weight is None else tuple(s for s in splits(weight) if s[0] == 0)  # a bias has the outputs of its module
        (dim, names), *others = found or ((None, ()),)
        return ParameterLayout(
            p.name,
            sharded=sharded,
            tensor_dim=dim,
            style=" + ".join(term_text(t) for t in rule.terms),
            line=rule.span.begin.line,
            shard_axes=named_axes(shard, [a.name for a in shard if a.name in term.axes]) if sharded and term is not None else (),
            tensor_axes=names,
            second=others[0] if others else None,
            summed=facts.tensor.summed(p.name) if facts.tensor is not None else (),
        )

    return tuple(layout(p) for p in facts.parameters)


def term_splits(term: LayoutTerm, p: ParameterFacts) -> _Splits:
    """The dims of a parameter that a term splits over tensor axes, each with the axes that it names, major first."""
    if isinstance(term, LayoutCall):
        dim = tensor_dim(term, p)
        return () if dim is None else ((dim, term.axes),)
    if len(term.slots) != len(p.shape):
        return ()
    return tuple((dim, names) for dim, names in enumerate(term.slots) if names)


def tensor_dim(term: LayoutTerm, p: ParameterFacts) -> int | None:
    """The first dim that a term splits over tensor axes. Column-wise is by output features, row-wise by input features, whatever dim holds them:
    a Linear weight is (out, in), an Embedding weight (in, out); a bias has the output features only.
    """
    if not isinstance(term, LayoutCall):
        return next((dim for dim, _ in term_splits(term, p)), None)
    if term.name not in ("colwise", "rowwise"):
        return None
    columns = term.name == "colwise"
    if len(p.shape) == 1:
        return 0 if columns else None
    if p.module == "Embedding":
        return 1 if columns else 0
    return 0 if columns else 1
