"""Rules on layouts over tensor axes, against the shapes of the parameters: PDL3."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.mesh import REPLICA
from pdsl.lowering.rules.base import STYLED_MODULES, TENSOR_STYLES, Context, Rule, listed, plural
from pdsl.lowering.rules.mesh import divisors, factors
from pdsl.lowering.spec import LayoutCall, LayoutSlots, LayoutTerm, ShardRule, term_text

if TYPE_CHECKING:
    from pdsl.lowering.facts import ParameterFacts

__all__ = ["ContextAxis", "DimNotDivisible", "HalfAPair", "LayoutDoesNotFit", "TiedAndSplit"]


def _splits(term: LayoutTerm, p: ParameterFacts) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The dims of a parameter that a term splits over tensor axes, with the axes."""
    if isinstance(term, LayoutSlots):
        yield from ((dim, axes) for dim, axes in enumerate(term.slots) if axes and dim < len(p.shape))
        return
    from pdsl.lowering.layouts import tensor_dim  # loads the plan, which a check without model does not need

    dim = tensor_dim(term, p) if term.name in TENSOR_STYLES and p.module in STYLED_MODULES else None
    if dim is not None and dim < len(p.shape):
        yield dim, term.axes


class DimNotDivisible(Rule):
    """What it does
        Checks that a dim that tensor axes split is divisible by their size.

    Why it is bad
        Tensor-parallel ranks compute with equal parts. `fsdp(...)` is not concerned: it takes an uneven first dim.

    Example (bad)
        mesh { axis tp = 3 }
        shard { "layers.*.mlp.w1.weight" => colwise(tp) }      # 256 outputs

    Better
        mesh { axis tp = 4 }
        shard { "layers.*.mlp.w1.weight" => colwise(tp) }

    Fix
        Choose a size of the axis that divides the dim, or change the width of the model.
    """

    code = "PDL304"
    name = "dim-not-divisible"
    needs = frozenset({"model", "shard", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for index, rule in enumerate(context.spec.shard):
            for term in rule.terms:
                groups: dict[tuple[int, int, tuple[str, ...]], list[ParameterFacts]] = {}
                for p in context.taken(index):
                    for dim, axes in _splits(term, p):
                        if p.shape[dim] % context.size(axes):
                            groups.setdefault((dim, p.shape[dim], axes), []).append(p)
                for (dim, size, axes), found in groups.items():
                    yield self._uneven(context, term, dim, size, axes, found)

    def _uneven(
        self, context: Context, term: LayoutTerm, dim: int, size: int, axes: tuple[str, ...], found: list[ParameterFacts]
    ) -> Diagnostic:
        sizes = [context.size((a,)) for a in axes]
        parts = math.prod(sizes)
        by = f"{axes[0]} = {parts}" if len(axes) == 1 else f"({', '.join(axes)}) = {' x '.join(map(str, sizes))} = {parts}"
        more = f" (and of {len(found) - 1} more)" if len(found) > 1 else ""
        some = divisors(size)[1:11]
        told = ", ".join(map(str, some)) + (", ..." if len(divisors(size)) > 11 else "")
        return self.report(
            f'dim {dim} of "{found[0].name}"{more} has size {size}, which is not divisible by {by}: {size} % {parts} = {size % parts}',
            term.span,
            labels=tuple(label for a in axes for label in context.label(f"mesh.{a}", plural(context.size((a,)), "rank"))),
            notes=(f"{size} = {factors(size)}; sizes that divide it: {told}" if some else f"{size} has no divisor but 1",),
        )


class LayoutDoesNotFit(Rule):
    """What it does
        Checks that a layout has one slot for each dim of the parameters it decides, and that its terms go together.

    Why it is bad
        Slots are read from the first dim on. With one too few or too many nobody knows which dim was meant.

    Example (bad)
        shard { "head.weight" => [tp] }      # the parameter has two dims

    Better
        shard { "head.weight" => [tp, _] }

    Fix
        Write one slot for each dim, `_` where the dim stays whole.
    """

    code = "PDL306"
    name = "layout-does-not-fit"
    needs = frozenset({"shard"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        yield from self._streams(context)
        for index, rule in enumerate(context.spec.shard):
            yield from self._terms(rule)
            if context.facts is not None and "model" not in context.broken:
                for term in rule.terms:
                    if isinstance(term, LayoutSlots):
                        yield from self._slots(term, context.taken(index))

    def _streams(self, context: Context) -> Iterator[Diagnostic]:
        """There is one stream between the layers, so all rules split its sequence over the same axes."""
        terms = [t for rule in context.spec.shard for t in rule.terms if isinstance(t, LayoutCall) and t.name == "sequence"]
        for term in terms[1:]:
            if term.axes != terms[0].axes:
                words = f"{term_text(terms[0])} in line {terms[0].span.begin.line}" if terms[0].span is not None else term_text(terms[0])
                yield self.report(
                    f"the sequence of the stream between the layers is split over one set of axes, and {term_text(term)} is not {words}",
                    term.span,
                    help=(f"write {term_text(terms[0])}",),
                )

    def _terms(self, rule: ShardRule) -> Iterator[Diagnostic]:
        alone = next((t for t in rule.terms if isinstance(t, LayoutCall) and t.name == "replicate"), None)
        if alone is not None and len(rule.terms) > 1:
            yield self.report(
                "replicate() stands alone: nothing can be split and whole", alone.span, help=("delete it, or all other terms",)
            )
        tensor = [t for t in rule.terms if isinstance(t, LayoutSlots) or t.name in (*TENSOR_STYLES, "sequence")]
        if len(tensor) > 1:
            words = listed(map(term_text, tensor))
            yield self.report(f"a layout has one tensor term, not {words}", tensor[1].span, help=("keep one of them",))

    def _slots(self, term: LayoutSlots, taken: tuple[ParameterFacts, ...]) -> Iterator[Diagnostic]:
        wrong = [p for p in taken if len(p.shape) != len(term.slots)]
        if not wrong:
            return
        first = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        shape = " x ".join(map(str, first.shape)) or "a single number"
        slots = (*term.slots, *((),) * len(first.shape))[: len(first.shape)]
        yield self.report(
            f'{term_text(term)} has {plural(len(term.slots), "slot")}, "{first.name}"{more} has {plural(len(first.shape), "dim")}: {shape}',
            term.span,
            plural(len(term.slots), "slot"),
            help=(f"one slot for each dim: {term_text(LayoutSlots(slots))}",) if slots else (),
        )


class TiedAndSplit(Rule):
    """What it does
        Reports a tied parameter that `colwise` or `rowwise` splits over a tensor axis.

    Why it is bad
        The two styles say what a module takes and gives, and the modules that share the parameter differ in that: what is column-wise for a head
        is split by other features for an embedding.

    Example (bad)
        model "pdsl.models:gpt" { tie = true }
        shard {
          "tok_embeddings.weight" => rowwise(tp)      # the head has the same weight
          "**" => replicate()
        }

    Better
        model "pdsl.models:gpt" { tie = true }
        shard {
          "tok_embeddings.weight" => [tp, _]
          "**" => replicate()
        }

    Fix
        Write the layout in slots: it says where the weight lies, and all of its modules take and give whole tensors.
    """

    code = "PDL309"
    name = "tied-and-split"
    needs = frozenset({"shard", "model", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        """The findings, one for each term."""
        if context.mesh is None or context.mesh.tensor_size == 1:
            return
        for index, rule in enumerate(context.spec.shard):
            for term in rule.terms:
                if isinstance(term, LayoutSlots):
                    continue
                tied = [p for p in context.taken(index) if p.aliases and any(True for _ in _splits(term, p))]
                if not tied:
                    continue
                more = f" (and {len(tied) - 1} more)" if len(tied) > 1 else ""
                dim = next(d for d, _ in _splits(term, tied[0]))
                axes = term.axes[0] if len(term.axes) == 1 else f"({', '.join(term.axes)})"
                slots = ", ".join(axes if d == dim else "_" for d in range(len(tied[0].shape)))
                yield self.report(
                    f'"{tied[0].name}"{more} is tied to {tied[0].aliases[0]}, and {term.name} means something else for each of the two modules',
                    term.span,
                    help=(f"write [{slots}]: the weight is split, all of its modules take and give whole tensors",),
                )


class HalfAPair(Rule):
    """What it does
        Reports a layer in which a weight is split column-wise and none row-wise, or row-wise and none column-wise.

    Why it is bad
        `colwise` leaves the output of its module split over the tensor axis and `rowwise` expects such an input: they are the two halves of a
        pair. With one half alone the layer computes with a part of the features, and where shapes happen to fit it does so without an error.
        In the last layer `colwise` may stand alone: torch's cross entropy is computed from scores that lie split, and whether it is one is tried.

    Example (bad)
        shard {
          "layers.*.mlp.w1.weight" => colwise(tp)
          "**"                     => replicate()
        }

    Better
        shard {
          "layers.*.mlp.w1.weight" => colwise(tp)
          "layers.*.mlp.w2.weight" => rowwise(tp)
          "output.weight"          => colwise(tp)
          "**"                     => replicate()
        }

    Fix
        Split the other half too, or write the layout in slots: `[tp, _]` says only where the weight lies, and its module takes and gives
        whole tensors.
    """

    code = "PDL308"
    name = "half-a-pair"
    needs = frozenset({"shard", "model", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        """The findings, one for each rule that is half of a pair."""
        assert context.facts is not None
        if context.mesh is None or context.mesh.tensor_size == 1 or self._half_written(context):
            return
        reported: set[int] = set()
        last = context.facts.layers[-1]
        for layer in context.facts.layers:
            halves: dict[str, tuple[str, int]] = {}
            for name in layer.parameters:
                index = context.decided.get(name)
                module = context.facts.parameter(name).module
                if index is None or not name.endswith("weight") or module not in STYLED_MODULES:
                    continue
                styles = TENSOR_STYLES if module == "Linear" else ("colwise",)  # by rows an Embedding takes and gives whole tensors
                for term in context.spec.shard[index].terms:
                    if isinstance(term, LayoutCall) and term.name in styles:
                        halves.setdefault(term.name, (name, index))
            if len(halves) != 1:
                continue
            (style, (name, index)) = next(iter(halves.items()))
            if layer is last and style == "colwise" and context.facts.inputs:
                continue  # the loss may be one of split scores: the tensor probe tells
            if index not in reported:
                reported.add(index)
                yield self._half(context, layer.name, style, name, index)

    @staticmethod
    def _half_written(context: Context) -> bool:
        """Whether a rule that splits matches nothing: that is reported, and may be the missing half."""
        rules = zip(context.spec.shard, context.matches, strict=True)
        return any(not found and any(getattr(t, "name", "") in TENSOR_STYLES for t in rule.terms) for rule, found in rules)

    def _half(self, context: Context, layer: str, style: str, name: str, index: int) -> Diagnostic:
        assert context.facts is not None
        term = next(t for t in context.spec.shard[index].terms if isinstance(t, LayoutCall) and t.name == style)
        other = "rowwise" if style == "colwise" else "colwise"
        what = "leaves its output split" if style == "colwise" else "takes its input split"
        first = (style == "colwise") == (context.facts.parameter(name).module == "Linear")
        axes = term.axes[0] if len(term.axes) == 1 else f"({', '.join(term.axes)})"
        slots = f"[{axes}, _]" if first else f"[_, {axes}]"
        return self.report(
            f'{style} {what}, but no weight of layer "{layer}" is {other}: "{name}" is half of a pair',
            term.span,
            help=(
                f"split its partner with {other}({', '.join(term.axes)}), or write {slots}: the weight is split, its module takes and gives whole tensors",
            ),
        )


class ContextAxis(Rule):
    """What it does
        Warns of an axis that is called like one of context parallelism and is used by nothing, so that it replicates.

    Why it is bad
        Axes get their role from their use, and there is no use that splits the sequence of an attention over ranks: torch 2.13 does so only on
        GPUs (its sharding rules know no attention kernel of the CPU), so it cannot be held against one process. The axis
        makes copies of the model and splits the batch, which computes the right numbers and saves no memory for long sequences.

    Example (bad)
        mesh { axis cp = 2 }
        shard { "**" => replicate() }

    Better
        mesh { axis tp = 2 }
        shard {
          "layers.*.attn.w{q,k,v}.weight" => colwise(tp)
          "layers.*.attn.wo.weight"       => rowwise(tp)
          "layers.*.norm*.weight"         => sequence(tp)
          "**"                            => replicate()
        }

    Fix
        Split heads and sequence over a tensor axis with `colwise`, `rowwise` and `sequence`, or give the axis the name of what it does.
    """

    code = "PDL320"
    name = "context-axis"
    severity = Severity.WARNING
    needs = frozenset({"mesh", "shard", "pipeline"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        """The findings, one for each axis."""
        assert context.mesh is not None
        for axis in context.mesh.axes:
            if axis.role != REPLICA or axis.size == 1 or axis.name.lower() not in _CONTEXT_NAMES:
                continue
            declared = context.axis(axis.name)
            yield self.report(
                f"axis {axis.name} is used by nothing, so it makes {axis.size} copies of the model and splits the batch, not the sequence",
                declared.span if declared is not None else None,
                "replicates",
                help=(
                    "sequence(AXIS) on the norms splits the sequence between the layers, and colwise(AXIS) the heads, over a tensor axis",
                ),
            )


_CONTEXT_NAMES = ("cp", "context", "context_parallel", "ring", "ulysses")
