"""Rules on number formats: PDL701 to PDL704, PDL708."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.precision import LOW, compute_format, input_format
from pdsl.lowering.rules.base import Context, Rule
from pdsl.lowering.spec import OriginKind

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts, ParameterFacts

__all__ = ["DoesNotRunInFormat", "FormatWithoutEffect", "HalfNeedsScaling", "LowPrecisionSum", "MixedFormatsInUnit"]

_KEYS = ("params", "reduce", "output")


class HalfNeedsScaling(Rule):
    """What it does
        Refuses fp16 in `precision`.

    Why it is bad
        fp16 has 5 bits for the exponent: below 6e-8 a number is zero, above 65504 it is infinite. Gradients leave that range on both sides without a
        word, unless the loss is scaled up, steps that overflow are left out by all ranks, and the scale follows. PDSL does not do that. bf16 takes as
        many bytes, is as fast on all that has both, and has the range of fp32.

    Example (bad)
        precision { params = fp16 }

    Better
        precision { params = bf16 }

    Fix
        Write bf16.
    """

    code = "PDL701"
    name = "fp16-needs-loss-scaling"
    needs = frozenset({"precision"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for key in _KEYS:
            if getattr(context.spec.precision, key) == "fp16":
                path = f"precision.{key}"
                yield self.report(
                    "fp16 needs its loss scaled, which PDSL does not do: gradients below 6e-8 would be zero, sums above 65504 infinite",
                    context.place(path, "precision"),
                    f"fp16{context.by(path)}",
                    help=(f"{key} = bf16 takes as many bytes and has the range of fp32",),
                )


class LowPrecisionSum(Rule):
    """What it does
        Warns if gradients of several microbatches are added up in bf16.

    Why it is bad
        bf16 has 8 bits. Once a sum is 256 times as large as what comes, nothing is added, and each addition before that is rounded: the more microbatches, the
        less of the later ones is left. The products of matrices do not have that problem, they add up in fp32 inside.

    Example (bad)
        precision { params = bf16; reduce = bf16 }
        train { accumulate = 8 }

    Better
        precision { params = bf16 }
        train { accumulate = 8 }

    Fix
        Delete `reduce`: the default is fp32.
    """

    code = "PDL702"
    name = "low-precision-sum"
    severity = Severity.WARNING
    needs = frozenset({"precision", "pipeline", "train"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        spec = context.spec
        rounds = spec.train.accumulate if spec.train is not None else 1
        microbatches = spec.pipeline.microbatches if spec.pipeline is not None else 1
        if spec.precision.reduce != "bf16" or rounds * microbatches == 1:
            return
        path = "precision.reduce"
        yield self.report(
            f"gradients of {rounds * microbatches} microbatches are added up in bf16, which has 8 bits: each sum is rounded by up to 1/512 of itself",
            context.place(path, "precision"),
            f"bf16{context.by(path)}",
            labels=(
                *(context.label("train.accumulate", f"{rounds} rounds") if rounds > 1 else ()),
                *(context.label("pipeline.schedule", f"{microbatches} microbatches") if microbatches > 1 else ()),
            ),
            help=("reduce = fp32, the default, adds them up in fp32",),
        )


class MixedFormatsInUnit(Rule):
    """What it does
        Checks that the trained parameters that are gathered together, those of one layer or of a group of layers, have one format.

    Why it is bad
        FSDP2 gathers the shards of a unit in one message and refuses two formats in it, at the first step, in every rank. What stands beside running statistics
        (batch normalisation) computes in its own format whatever `params` is.

    Example (bad)
        shard { "**" => fsdp(fsdp) }                                   # the model has its router in fp32, all else in bf16

    Better
        shard { "**.router.*" => replicate(); "**" => fsdp(fsdp) }

    Fix
        Leave the few in the other format whole with a rule of their own, or let the model make all of them in one format.
    """

    code = "PDL703"
    name = "mixed-formats-in-unit"
    needs = frozenset({"mesh", "precision", "shard"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts, mesh = context.facts, context.mesh
        assert facts is not None
        assert mesh is not None
        if mesh.shard_size == 1:
            return
        told: set[tuple[str, str]] = set()
        for unit in _units(context, facts):
            first = unit[0]
            other = next((p for p in unit if _formats(context, facts, p) != _formats(context, facts, first)), None)
            if other is None:
                continue
            kinds = _format_text(context, facts, first), _format_text(context, facts, other)
            if kinds in told:
                continue
            told.add(kinds)
            rule = context.spec.shard[context.decided[other.name]]
            yield self.report(
                f"{first.name} is {kinds[0]} and {other.name} is {kinds[1]}, and both are gathered in one unit",
                rule.span,
                help=(f'a rule of its own before this one leaves it whole: "{other.name}" => replicate()',),
            )


class DoesNotRunInFormat(Rule):
    """What it does
        Checks that the model's forward runs in the formats that `precision` names.

    Why it is bad
        Layers whose code mixes formats fail at the first step: a table in fp32 that a module keeps as a buffer and multiplies with what it computes gives fp32,
        which the next product of matrices does not take together with bf16. PDSL casts parameters, and what goes into a layer; buffers it leaves alone, since
        statistics and tables need their digits.

    Example (bad)
        precision { params = bf16 }        # the model has `x = x * self.table` and no cast

    Better
        precision { params = bf16 }        # x = x * self.table.to(x.dtype)

    Fix
        Cast in the module, or compute in fp32.
    """

    code = "PDL704"
    name = "does-not-run-in-format"
    needs = frozenset({"precision"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts = context.facts
        if facts is None or not facts.refuses:
            return
        path = next((f"precision.{k}" for k in _KEYS if context.origin(f"precision.{k}").kind is not OriginKind.DEFAULT), "precision")
        yield self.report(
            f"the model does not run with {path.rpartition('.')[2]} = {getattr(context.spec.precision, path.rpartition('.')[2], 'fp32')}: {facts.refuses}",
            context.place(path, "precision", "model"),
            help=("cast such a tensor where the module uses it, as in `table.to(x.dtype)`, or leave out the format",),
        )


class FormatWithoutEffect(Rule):
    """What it does
        Warns of a format for `params` that changes no parameter of the model.

    Why it is bad
        `params` makes layers compute in a lower format than the weights have. fp32 widens nothing: a model that makes its weights in bf16 computes in bf16 and is
        updated in bf16, where small steps are lost in rounding.

    Example (bad)
        precision { params = bf16 }                     # the factory ends with `.bfloat16()`

    Better
        precision { params = bf16 }                     # the factory makes fp32 weights, the default

    Fix
        Let the model make its weights in fp32.
    """

    code = "PDL708"
    name = "format-without-effect"
    severity = Severity.WARNING
    needs = frozenset({"precision"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts, path = context.facts, "precision.params"
        if facts is None or context.origin(path).kind is OriginKind.DEFAULT:
            return
        own = {p.dtype for p in facts.parameters if p.trainable}
        word = context.spec.precision.params
        lower = own & LOW
        changes = any(compute_format(context.spec.precision, facts, p) != p.dtype for p in facts.parameters)
        if not lower or changes or (word == "fp32" and own - LOW):
            return
        yield self.report(
            f"the model makes its weights in {min(lower)}, so params = {word} changes nothing: they are updated in {min(lower)}, which rounds small steps away",
            context.place(path, "precision"),
            f"{word}{context.by(path)}",
            help=("let the model make its weights in fp32; layers compute in bf16 all the same with params = bf16",),
        )


def _formats(context: Context, facts: ModelFacts, p: ParameterFacts) -> tuple[str, str]:
    return p.dtype, compute_format(context.spec.precision, facts, p)


def _format_text(context: Context, facts: ModelFacts, p: ParameterFacts) -> str:
    own, computed = _formats(context, facts, p)
    casts = input_format(context.spec.precision) is not None
    return own if own == computed and not casts else f"{own} (computes in {computed})"


def _units(context: Context, facts: ModelFacts) -> Iterator[list[ParameterFacts]]:
    """The trained, sharded parameters that may be gathered together: those of each block, and all others, which may ride in one unit. With groups of blocks all."""
    from pdsl.lowering.facts import LayerKind  # a check without model starts without it

    sharded = [p for p in facts.parameters if p.trainable and context.is_sharded(p.name)]
    blocks = {i for i, layer in enumerate(facts.layers) if layer.kind is LayerKind.BLOCK}
    if context.spec.memory.group > 1:
        blocks = set()
    for i in sorted(blocks):
        unit = [p for p in sharded if p.layers == (i,)]
        if unit:
            yield unit
    rest = [p for p in sharded if len(p.layers) != 1 or p.layers[0] not in blocks]
    if rest:
        yield rest
