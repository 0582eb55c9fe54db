"""Rules on the `shard` block that need the names and shapes of the model's parameters, and those that don't: PDL3."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from pdsl.grammar.diagnostics import Diagnostic, Label, Severity
from pdsl.grammar.patterns import Pattern
from pdsl.lowering.facts import ModelFacts, ParameterFacts
from pdsl.lowering.rules.base import Context, Rule, listed, plural, quoted
from pdsl.lowering.rules.mesh import divisors, factors
from pdsl.lowering.spec import LayoutCall, LayoutSlots, LayoutTerm, ShardRule
from pdsl.lowering.values import near

__all__ = [
    "AxisTwice", "DimNotDivisible", "LayoutDoesNotFit", "OneLargeUnit", "ParameterUncovered", "PatternMatchesNothing", "RuleShadowed",
]  # fmt: skip

_TENSOR_STYLES = ("colwise", "rowwise")
_STYLED_MODULES = ("Linear", "Embedding")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def _shape_of(name: str) -> str:
    """A parameter name with its indices replaced: `layers.*.attn.wq.weight`."""
    return _NUMBER.sub("*", name)


def _term_text(term: LayoutTerm) -> str:
    if isinstance(term, LayoutCall):
        return f"{term.name}({', '.join(term.axes)})"
    slots = ("_" if not s else s[0] if len(s) == 1 else f"({', '.join(s)})" for s in term.slots)
    return f"[{', '.join(slots)}]"


class PatternMatchesNothing(Rule):
    """What it does
        Checks that every pattern of a shard rule matches a parameter, and that what `colwise` and `rowwise` match belongs to a Linear or
        Embedding.

    Why it is bad
        A pattern with a typo changes nothing and says nothing: the parameters it was meant for are laid out by a later rule, or not at all. The
        run works, only slower or with more memory than it should.

    Example (bad)
        shard {
          "layers.*.attention.wq.weight" => colwise(tp)      # the module is called attn
          "**" => replicate()
        }

    Better
        shard {
          "layers.*.attn.wq.weight" => colwise(tp)
          "**" => replicate()
        }

    Fix
        Take the pattern that the message suggests, or delete the rule.
    """

    code = "PDL301"
    name = "pattern-matches-nothing"
    needs = frozenset({"model"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.facts is not None
        for index, rule in enumerate(context.spec.shard):
            names = [p.name for p in context.matches[index]]
            for pattern in rule.patterns:
                if not any(pattern.matches(name) for name in names):
                    yield self._nothing(pattern, context.facts)
            yield from self._wrong_module(context, index, rule)

    def _nothing(self, pattern: Pattern, facts: ModelFacts) -> Diagnostic:
        shapes: dict[str, int] = {}
        for p in facts.parameters:
            shapes[_shape_of(p.name)] = shapes.get(_shape_of(p.name), 0) + 1
        meant = near(pattern.text, shapes)
        help_ = (f'did you mean "{meant}" ({plural(shapes[meant], "parameter")})?',) if meant is not None else ()
        read = f"{plural(len(facts.parameters), 'parameter')} were read from {facts.factory}"
        return self.report(f'pattern "{pattern.text}" matches no parameter', pattern.span, "matches nothing", help=help_, notes=(read,))

    def _wrong_module(self, context: Context, index: int, rule: ShardRule) -> Iterator[Diagnostic]:
        for term in rule.terms:
            if not isinstance(term, LayoutCall) or term.name not in _TENSOR_STYLES:
                continue
            wrong = [p for p in context.taken(index) if p.module not in _STYLED_MODULES]
            if wrong:
                more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
                yield self.report(
                    f'{term.name} takes parameters of Linear and Embedding; "{wrong[0].name}"{more} belongs to {wrong[0].module}',
                    term.span,
                    f"not for {wrong[0].module}",
                    labels=tuple(
                        Label(p.span, f"matches {wrong[0].name}") for p in rule.patterns if p.span is not None and p.matches(wrong[0].name)
                    ),
                    help=("name the matrices alone, and leave the others to a rule with replicate() or fsdp(...)",),
                )


class ParameterUncovered(Rule):
    """What it does
        Checks that every parameter of the model is matched by a shard rule.

    Why it is bad
        Without a rule nobody decided where the parameter lives. Most often a new layer was added and the rules were not.

    Example (bad)
        shard { "layers.**" => fsdp(fsdp) }      # embedding, norm and head are left over

    Better
        shard {
          "layers.**" => fsdp(fsdp)
          "**" => replicate()
        }

    Fix
        Add a rule for the parameters, or end the block with a rule for all that is left.
    """

    code = "PDL302"
    name = "parameter-uncovered"
    needs = frozenset({"model", "shard"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.facts is not None
        rules = context.spec.shard
        missing = [p.name for p in context.facts.parameters if p.name not in context.decided]
        if not rules or not missing:
            return
        word = "matches" if len(missing) == 1 else "match"
        yield self.report(
            f"{plural(len(missing), 'parameter')} {word} no rule: {quoted(missing)}",
            rules[-1].span,
            "the last rule",
            help=('end the block with  "**" => replicate()  or name them',),
        )


class RuleShadowed(Rule):
    """What it does
        Finds shard rules that never apply, because earlier rules take all of their parameters.

    Why it is bad
        The first match wins. A rule that is never reached looks as if it decided something, and does not.

    Example (bad)
        shard {
          "**" => fsdp(fsdp)
          "head.weight" => replicate()
        }

    Better
        shard {
          "head.weight" => replicate()
          "**" => fsdp(fsdp)
        }

    Fix
        Move the special rule above the general one, or delete it.
    """

    code = "PDL303"
    name = "rule-shadowed"
    needs = frozenset({"model", "shard"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        rules = context.spec.shard
        for index, rule in enumerate(rules):
            mine = context.matches[index]
            if not mine or context.taken(index):
                continue
            before = [rules[i] for i in sorted({context.decided[p.name] for p in mine})]
            lines = listed(r.span.begin.line for r in before)
            taken = "its parameter" if len(mine) == 1 else f"all {len(mine)} of its parameters"
            single = len(before) == 1
            yield self.report(
                f"this rule never applies: line{'' if single else 's'} {lines} already take{'s' if single else ''} {taken}",
                rule.span,
                "never reached",
                labels=tuple(Label(s, "takes them first") for r in before[:3] if (s := r.patterns[0].span) is not None),
                help=(f"move it above line {before[0].span.begin.line}, or delete it",),
            )


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


def _splits(term: LayoutTerm, p: ParameterFacts) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The dims of a parameter that a term splits over tensor axes, with the axes."""
    if isinstance(term, LayoutSlots):
        yield from ((dim, axes) for dim, axes in enumerate(term.slots) if axes and dim < len(p.shape))
        return
    from pdsl.lowering.layouts import tensor_dim  # loads the plan, which a check without model does not need

    dim = tensor_dim(term, p) if term.name in _TENSOR_STYLES and p.module in _STYLED_MODULES else None
    if dim is not None and dim < len(p.shape):
        yield dim, term.axes


class AxisTwice(Rule):
    """What it does
        Finds layouts that use one axis twice.

    Why it is bad
        A tensor can be split along an axis once: each rank has one coordinate on it, and so one part.

    Example (bad)
        shard { "head.weight" => [tp, tp] }

    Better
        shard { "head.weight" => [tp, _] }

    Fix
        Keep one of the two.
    """

    code = "PDL305"
    name = "axis-twice"

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for rule in context.spec.shard:
            seen: set[str] = set()
            for term in rule.terms:
                axes = term.axes if isinstance(term, LayoutCall) else tuple(a for slot in term.slots for a in slot)
                twice = next((a for i, a in enumerate(axes) if a in seen or a in axes[:i]), None)
                seen.update(axes)
                if twice is None:
                    continue
                whole = " + ".join(_term_text(t) for t in rule.terms)
                help_ = f"write {_once(term, twice)}" if isinstance(term, LayoutSlots) else f"keep one of the uses of {twice}"
                yield self.report(
                    f"axis {twice} is used twice in one layout: {whole}",
                    term.span,
                    f"{twice} again",
                    help=(f"a tensor can be split along an axis once; {help_}",),
                )


def _once(term: LayoutSlots, axis: str) -> str:
    """The layouts that use the axis in a single slot."""
    at = [i for i, slot in enumerate(term.slots) if axis in slot]
    kept = []
    for keep in at:
        slots = tuple(tuple(dict.fromkeys(slot)) if i == keep else tuple(a for a in slot if a != axis) for i, slot in enumerate(term.slots))
        kept.append(_term_text(LayoutSlots(slots)))
    return listed(dict.fromkeys(kept), "or")


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
        for index, rule in enumerate(context.spec.shard):
            yield from self._terms(rule)
            if context.facts is not None and "model" not in context.broken:
                for term in rule.terms:
                    if isinstance(term, LayoutSlots):
                        yield from self._slots(term, context.taken(index))

    def _terms(self, rule: ShardRule) -> Iterator[Diagnostic]:
        alone = next((t for t in rule.terms if isinstance(t, LayoutCall) and t.name == "replicate"), None)
        if alone is not None and len(rule.terms) > 1:
            yield self.report(
                "replicate() stands alone: nothing can be split and whole", alone.span, help=("delete it, or all other terms",)
            )
        tensor = [t for t in rule.terms if isinstance(t, LayoutSlots) or t.name in _TENSOR_STYLES]
        if len(tensor) > 1:
            words = listed(map(_term_text, tensor))
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
            f'{_term_text(term)} has {plural(len(term.slots), "slot")}, "{first.name}"{more} has {plural(len(first.shape), "dim")}: {shape}',
            term.span,
            plural(len(term.slots), "slot"),
            help=(f"one slot for each dim: {_term_text(LayoutSlots(slots))}",) if slots else (),
        )


class HalfAPair(Rule):
    """What it does
        Reports a layer in which a weight is split column-wise and none row-wise, or row-wise and none column-wise.

    Why it is bad
        `colwise` leaves the output of its module split over the tensor axis and `rowwise` expects such an input: they are the two halves of a
        pair. With one half alone the layer computes with a part of the features, and where shapes happen to fit (the scores of a vocabulary,
        say) it does so without an error.

    Example (bad)
        shard {
          "output.weight" => colwise(tp)
          "**"            => replicate()
        }

    Better
        shard {
          "output.weight" => [tp, _]
          "**"            => replicate()
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
        for layer in context.facts.layers:
            halves: dict[str, tuple[str, int]] = {}
            for name in layer.parameters:
                index = context.decided.get(name)
                if index is None or not name.endswith("weight") or context.facts.parameter(name).module == "Embedding":
                    continue
                for term in context.spec.shard[index].terms:
                    if isinstance(term, LayoutCall) and term.name in _TENSOR_STYLES:
                        halves.setdefault(term.name, (name, index))
            if len(halves) != 1:
                continue
            (style, (name, index)) = next(iter(halves.items()))
            if index not in reported:
                reported.add(index)
                yield self._half(context, layer.name, style, name, index)

    @staticmethod
    def _half_written(context: Context) -> bool:
        """Whether a rule that splits matches nothing: that is reported, and may be the missing half."""
        rules = zip(context.spec.shard, context.matches, strict=True)
        return any(not found and any(getattr(t, "name", "") in _TENSOR_STYLES for t in rule.terms) for rule, found in rules)

    def _half(self, context: Context, layer: str, style: str, name: str, index: int) -> Diagnostic:
        assert context.facts is not None
        term = next(t for t in context.spec.shard[index].terms if isinstance(t, LayoutCall) and t.name == style)
        other = "rowwise" if style == "colwise" else "colwise"
        what = "leaves its output split" if style == "colwise" else "takes its input split"
        slots = f"[{', '.join(term.axes)}, _]" if style == "colwise" else f"[_, {', '.join(term.axes)}]"
        return self.report(
            f'{style} {what}, but no weight of layer "{layer}" is {other}: "{name}" is half of a pair',
            term.span,
            help=(
                f"split its partner with {other}({', '.join(term.axes)}), or write {slots}: the weight is split, its module takes and gives whole tensors",
            ),
        )


class OneLargeUnit(Rule):
    """What it does
        Warns if one layer holds more than half of the parameters under `fsdp(...)`.

    Why it is bad
        Parameters are gathered layer by layer. A rank needs its share of all of them and, while it computes a layer, all of that one: with one
        large layer little memory is saved, and its gathering overlaps with nothing.

    Example (bad)
        model "pdsl.models:gpt" { layers = 1; width = 64; vocab = 50000; tied = true }
        shard { "**" => fsdp(fsdp) }      # nearly all is in the embedding

    Better
        model "pdsl.models:gpt" { layers = 12; width = 64; vocab = 512 }
        shard { "**" => fsdp(fsdp) }

    Fix
        Cut the model into more layers, or split the large one over a tensor axis.
    """

    code = "PDL307"
    name = "one-large-unit"
    severity = Severity.WARNING
    needs = frozenset({"model", "shard", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.facts is not None
        assert context.mesh is not None
        parts = context.mesh.shard_size
        units = [0] * len(context.facts.layers)
        for p in context.facts.parameters:
            index = context.decided.get(p.name)
            if index is not None and p.layers and context.sharded(context.spec.shard[index]):
                units[p.layers[0]] += p.bytes
        total = sum(units)
        largest = max(units, default=0)
        if parts < 2 or total == 0 or 2 * largest <= total:
            return
        layer = context.facts.layers[units.index(largest)]
        rule = next(r for r in context.spec.shard if context.sharded(r))
        term = next(t for t in rule.terms if isinstance(t, LayoutCall) and t.name == "fsdp")
        peak = -(-total // parts) + largest
        yield self.report(
            f"layer {layer.name} is one unit and holds {100 * largest // total} % of the parameters under {_term_text(term)}",
            term.span,
            "gathers it as a whole",
            notes=(
                f"peak for parameters on a rank: {_size(total)} / {parts} + {_size(largest)} = {_size(peak)}; not sharded it is {_size(total)}",
            ),
            help=("cut the model into more layers, or split this one over a tensor axis",),
        )


def _size(count: int) -> str:
    """Bytes in a unit that leaves three digits or so."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
