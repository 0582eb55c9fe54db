"""Rules on what the tensor probe found: what a tensor rank would compute otherwise than one process does. PDL3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.grammar.source import Span
from pdsl.lowering.rules.base import TENSOR_STYLES, Context, Rule, plural
from pdsl.lowering.spec import LayoutCall, LayoutSlots, LayoutTerm

if TYPE_CHECKING:
    from pdsl.lowering.tensor_facts import TensorProblem

__all__ = ["GradientInPieces", "HeadsNotDivisible", "PartComputesOtherwise", "SequenceNotSplit"]


class _ProbeRule(Rule):
    """Reports the problems of some kinds at the term that splits the parameter to blame, or at the first that splits anything."""

    needs = frozenset({"shard", "model", "mesh"})
    needs_facts = True
    needs_mesh = True
    needs_tensor = True
    kinds: ClassVar[tuple[str, ...]] = ()

    def check(self, context: Context) -> Iterable[Diagnostic]:
        """One finding for each problem of the rule's kinds."""
        assert context.facts is not None
        assert context.facts.tensor is not None
        for problem in context.facts.tensor.problems:
            if problem.kind in self.kinds:
                yield self._finding(context, problem)

    def _finding(self, context: Context, problem: TensorProblem) -> Diagnostic:
        where = f"{problem.module}: " if problem.module else ""
        sizes = tuple(label for a in _axes(context, problem) for label in context.label(f"mesh.{a}", plural(context.size((a,)), "rank")))
        return self.report(
            f"{where}{problem.text}", _span(context, problem), _caption(problem), labels=sizes, help=self.advice(context, problem)
        )

    def advice(self, context: Context, problem: TensorProblem) -> tuple[str, ...]:
        """What would do."""
        return ()


class HeadsNotDivisible(_ProbeRule):
    """What it does
        Checks that the heads of an attention can be divided among the ranks of a tensor axis, also where keys and values have fewer of them.

    Why it is bad
        A rank computes whole heads. How many there are shows where the model's code sees the features of a projection as (heads, head size): with a
        part of the features that is no whole number of heads, the forward fails on the ranks.

    Example (bad)
        mesh { axis tp = 4 }
        model "models.llama:build" { heads = 8; kv_heads = 2 }
        shard { "layers.*.attn.w{q,k,v}.weight" => colwise(tp) }      # 2 heads of keys for 4 ranks

    Better
        mesh { axis tp = 2 }
        model "models.llama:build" { heads = 8; kv_heads = 2 }
        shard { "layers.*.attn.w{q,k,v}.weight" => colwise(tp) }

    Fix
        Choose a size of the axis that divides the number of heads, of queries and of keys, or write `[tp, _]`: the projection is split and gives
        whole tensors. Then the projection behind must not be `rowwise`.
    """

    code = "PDL310"
    name = "heads-not-divisible"
    kinds = ("heads",)

    def advice(self, context: Context, problem: TensorProblem) -> tuple[str, ...]:
        """Sizes of the axis that divide the heads."""
        heads = int(problem.text.split(" are seen as ")[-1].split(" x ")[0])
        axes = ", ".join(_axes(context, problem)) or "the axis"
        return (f"sizes of {axes} that divide {heads}: {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}",)


class PartComputesOtherwise(_ProbeRule):
    """What it does
        Checks that a rank with parts of some parameters computes its part of what one process computes, operation by operation.

    Why it is bad
        The code of a model may count on whole tensors: it cuts one projection into queries, keys and values, takes a norm over all features, or
        names sizes. On a part it fails, or computes something else without a word.

    Example (bad)
        shard { "layers.*.attn.qkv.weight" => colwise(tp) }      # chunk(3) then cuts inside of the queries

    Better
        shard { "layers.*.attn.qkv.weight" => [tp, _] }

    Fix
        Write the layout in slots, `[tp, _]`: the weight is split, its module takes and gives whole tensors. Or change the model to infer sizes from
        the tensors that it is given, as `view(batch, length, -1, head_size)` does.
    """

    code = "PDL311"
    name = "part-computes-otherwise"
    kinds = ("fails", "differs", "layout", "module")

    def advice(self, context: Context, problem: TensorProblem) -> tuple[str, ...]:
        """Slots in place of a style."""
        if problem.kind == "module":
            return ("leave it to a rule with replicate() or fsdp(...)",)
        axes = ", ".join(_axes(context, problem)) or "tp"
        return (f"write the layout in slots, such as [{axes}, _]: the weight is split, its module takes and gives whole tensors",)


class GradientInPieces(_ProbeRule):
    """What it does
        Checks that the gradient of each tensor that is whole on all tensor ranks is either whole on each of them or a part on each of them.

    Why it is bad
        A whole tensor that is used together with what lies split gets from each rank a part of its gradient. If all its uses are of that kind, PDSL sums the
        parts; if others give the whole gradient, the one cannot be told from the other, and neither sum nor copy is right.

    Example (bad)
        # the scale of the queries is also used in the stream between the layers
        shard { "layers.*.attn.wq.weight" => colwise(tp) }

    Better
        shard { "layers.*.attn.wq.weight" => [tp, _] }

    Fix
        Write the layouts of the modules around it in slots, so that what it meets is whole.
    """

    code = "PDL312"
    name = "gradient-in-pieces"
    kinds = ("gradient",)

    def advice(self, context: Context, problem: TensorProblem) -> tuple[str, ...]:
        """Slots in place of a style."""
        axes = ", ".join(_axes(context, problem)) or "tp"
        return (f"write the layouts around it in slots, such as [{axes}, _], so that what it meets is whole",)


class SequenceNotSplit(_ProbeRule):
    """What it does
        Checks that the sequence of the stream between the layers can be split over the axes that `sequence(...)` names.

    Why it is bad
        With `sequence(tp)` on the norms every tensor rank holds an equal part of the sequence between the split modules. A length that the axis does not
        divide leaves parts of different length; a module that is given whole sequences all the same would have its gradient summed too often.

    Example (bad)
        mesh { axis tp = 2 }
        model "pdsl.models:gpt" { context = 5 }
        shard { "layers.*.*_norm.weight" => sequence(tp) }

    Better
        mesh { axis tp = 2 }
        model "pdsl.models:gpt" { context = 6 }
        shard { "layers.*.*_norm.weight" => sequence(tp) }

    Fix
        Choose a length of the rows that the axis divides; name only modules inside of the blocks, or behind them.
    """

    code = "PDL313"
    name = "sequence-not-split"
    kinds = ("sequence",)

    def advice(self, context: Context, problem: TensorProblem) -> tuple[str, ...]:
        """The nearest lengths that would do."""
        if " % " not in problem.text:
            return ()
        length, parts = (int(n.split(" = ")[0]) for n in problem.text.split(": ")[-1].split(" % "))
        lengths = [n for n in (length - length % parts, length - length % parts + parts) if n]
        return (f"lengths that would do: {', '.join(map(str, lengths))}",)


def _term(context: Context, problem: TensorProblem) -> LayoutTerm | None:
    """The term of a layout that is to blame."""
    rules = context.spec.shard
    index = context.decided.get(problem.parameter)
    chosen = [rules[index]] if index is not None else rules
    words = ("sequence",) if problem.kind == "sequence" else TENSOR_STYLES
    terms = [t for rule in chosen for t in rule.terms]
    return next((t for t in terms if isinstance(t, LayoutSlots) or t.name in words), next(iter(terms), None))


def _span(context: Context, problem: TensorProblem) -> Span | None:
    term = _term(context, problem)
    return term.span if term is not None else None


def _axes(context: Context, problem: TensorProblem) -> tuple[str, ...]:
    term = _term(context, problem)
    if term is None:
        return ()
    return term.axes if isinstance(term, LayoutCall) else tuple(a for slot in term.slots for a in slot)


def _caption(problem: TensorProblem) -> str:
    return f"splits {problem.parameter}" if problem.parameter and problem.kind != "sequence" else ""
