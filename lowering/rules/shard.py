"""Rules on the `shard` block that need the names and shapes of the model's parameters, and those that don't: PDL3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Diagnostic, Label, Severity
from pdsl.grammar.patterns import Pattern
from pdsl.lowering.rules.base import STYLED_MODULES, TENSOR_STYLES, Context, Rule, listed, plural, quoted
from pdsl.lowering.spec import LayoutCall, LayoutSlots, ShardRule, term_text
from pdsl.lowering.values import near

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts

__all__ = ["AxisTwice", "OneLargeUnit", "ParameterUncovered", "PatternMatchesNothing", "RuleShadowed"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def _shape_of(name: str) -> str:
    """A parameter name with its indices replaced: `layers.*.attn.wq.weight`."""
    return _NUMBER.sub("*", name)


class PatternMatchesNothing(Rule):
    """What it does
        Checks that every pattern of a shard rule matches a parameter, and that what is split over a tensor axis belongs to a Linear or
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
            if term.name not in TENSOR_STYLES if isinstance(term, LayoutCall) else not any(term.slots):
                continue
            wrong = [p for p in context.taken(index) if p.module not in STYLED_MODULES]
            if wrong:
                more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
                yield self.report(
                    f'{term.name if isinstance(term, LayoutCall) else term_text(term)} takes parameters of Linear and Embedding; "{wrong[0].name}"{more} belongs to {wrong[0].module}',
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
                whole = " + ".join(term_text(t) for t in rule.terms)
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
        kept.append(term_text(LayoutSlots(slots)))
    return listed(dict.fromkeys(kept), "or")


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
            if p.layers and context.is_sharded(p.name):
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
            f"layer {layer.name} is one unit and holds {100 * largest // total} % of the parameters under {term_text(term)}",
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
