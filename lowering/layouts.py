"""Layouts: from the ordered rules of a `shard` block to how each parameter lies on an island."""

from __future__ import annotations

from pdsl.lowering.facts import ModelFacts, ParameterFacts
from pdsl.lowering.plan import ParameterLayout
from pdsl.lowering.spec import LayoutCall, LayoutTerm, ShardRule, term_text

__all__ = ["parameter_layouts", "tensor_dim"]


def parameter_layouts(facts: ModelFacts, rules: tuple[ShardRule, ...], *, shard_size: int, tensor_size: int) -> tuple[ParameterLayout, ...]:
    """The layout of every parameter: first rule that matches; without any rule a parameter is whole everywhere.

    A bias follows the tensor split of the weight beside it, since one module computes with both. What has no elements to split, or is read outside of
    its module, is not sharded.
    """
    terms = {p.name: next((r.terms for r in rules if r.matches(p.name)), ()) for p in facts.parameters}
    named = {p.name: p for p in facts.parameters}

    def split(p: ParameterFacts) -> int | None:
        return next((d for t in terms[p.name] if (d := tensor_dim(t, p)) is not None), None) if tensor_size > 1 else None

    def layout(p: ParameterFacts) -> ParameterLayout:
        rule = next((r for r in rules if r.matches(p.name)), None)
        if rule is None:
            return ParameterLayout(p.name, sharded=False, tensor_dim=None, style="replicate()", line=0)
        sharded = (
            shard_size > 1
            and bool(p.shape)
            and p.numel > 0
            and not p.outside
            and any(isinstance(t, LayoutCall) and t.name == "fsdp" for t in rule.terms)
        )
        module, _, leaf = p.name.rpartition(".")
        weight = named.get(f"{module}.weight") if leaf == "bias" else None
        dim = split(p) if weight is None else 0 if split(weight) == 0 else None  # a bias has the outputs of its module, dim 0 of the weight
        style = " + ".join(term_text(t) for t in rule.terms)
        return ParameterLayout(p.name, sharded=sharded, tensor_dim=dim, style=style, line=rule.span.begin.line)

    return tuple(layout(p) for p in facts.parameters)


def tensor_dim(term: LayoutTerm, p: ParameterFacts) -> int | None:
    """The dim that a term splits over the tensor axis. Column-wise is by output features, row-wise by input features, whatever dim holds them:
    a Linear weight is (out, in), an Embedding weight (in, out); a bias has the output features only.
    """
    if not isinstance(term, LayoutCall):
        if len(term.slots) != len(p.shape):
            return None
        return next((d for d, axes in enumerate(term.slots) if axes), None)
    if term.name not in ("colwise", "rowwise"):
        return None
    columns = term.name == "colwise"
    if len(p.shape) == 1:
        return 0 if columns else None
    if p.module == "Embedding":
        return 1 if columns else 0
    return 0 if columns else 1
