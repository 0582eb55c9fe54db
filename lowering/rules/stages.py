"""Rules on stages against the layers of the model: PDL4, the part that needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Diagnostic, Label, Severity
from pdsl.lowering.rules.base import Context, Rule, listed, plural
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.spec import PipelineSpec
from pdsl.lowering.values import near

if TYPE_CHECKING:
    from pdsl.lowering.facts import LayerFacts, ModelFacts, ParameterFacts

__all__ = ["StageLayoutAgainstSchedule", "StagesCoverLayers", "TiedOverStages", "miscounted", "stage_of_layers"]


def stage_of_layers(pipeline: PipelineSpec, facts: ModelFacts) -> tuple[tuple[int, ...], ...]:
    """For each layer the indices of the explicit stages that name one of its modules."""
    return tuple(_stages_naming(pipeline, layer) for layer in facts.layers)


def _stages_naming(pipeline: PipelineSpec, layer: LayerFacts) -> tuple[int, ...]:
    modules = layer.modules
    return tuple(i for i, stage in enumerate(pipeline.stages) if any(p.covers_module(m) for p in stage.modules for m in modules))


class StagesCoverLayers(Rule):
    """What it does
        Checks that every layer is in exactly one stage, that stages follow the order of the layers, that their patterns name modules, and that
        there are enough layers for the stages.

    Why it is bad
        A layer that no stage names would be dropped, and a smaller model would train without a word.

    Example (bad)
        pipeline over pp {
          stage first { "tok", "layers[0..2]" }
          stage last  { "layers.3", "norm", "head" }      # layers.2 is missing
          schedule = gpipe(microbatches = 4)
        }

    Better
        pipeline over pp {
          stage first { "tok", "layers[0..2]" }
          stage last  { "layers[2..4]", "norm", "head" }
          schedule = gpipe(microbatches = 4)
        }

    Fix
        Name each layer once, in order, or write `stages = balanced`.
    """

    code = "PDL401"
    name = "stages-cover-layers"
    needs = frozenset({"model", "pipeline"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline, facts = context.spec.pipeline, context.facts
        if pipeline is None or facts is None:
            return
        if not pipeline.stages or len(facts.layers) == 1:
            if context.mesh is not None and context.stages is not None:
                yield from self._enough(context, pipeline, facts, context.stages)
            return
        misspelt: set[str] = set()
        unknown = list(self._unknown(pipeline, facts, misspelt))
        yield from unknown
        owners = stage_of_layers(pipeline, facts)
        twice = list(self._twice(pipeline, facts, owners))
        yield from self._missing(pipeline, facts, owners, misspelt)
        yield from twice
        if not twice and not unknown:
            yield from self._order(pipeline, facts, owners)

    def _enough(self, context: Context, pipeline: PipelineSpec, facts: ModelFacts, stages: int) -> Iterator[Diagnostic]:
        starts = 1 + sum(not layer.cut_before for layer in facts.layers[1:])
        if stages <= starts:
            return
        count = f"{pipeline.axis} {context.positions} x virtual {pipeline.virtual} = {stages}" if pipeline.virtual > 1 else str(stages)
        reasons = tuple(f"no stage may begin at {layer.name}: {layer.cut_before}" for layer in facts.layers[1:] if layer.cut_before)
        reasons += facts.warnings[:1] if len(facts.layers) == 1 else ()  # what stands in the way of a chain
        read = f"{plural(len(facts.layers), 'layer')} {'was' if len(facts.layers) == 1 else 'were'} read from {facts.factory}"
        yield self.report(
            f"{count} stages are wanted, and the model can be cut into {starts}",
            pipeline.axis_span,
            labels=context.label(f"mesh.{pipeline.axis}", plural(context.positions, "position")),
            notes=(read, *reasons[:3]),
        )

    def _unknown(self, pipeline: PipelineSpec, facts: ModelFacts, misspelt: set[str]) -> Iterator[Diagnostic]:
        """Patterns that name no module; what they probably meant goes into `misspelt`, so that it is not called missing as well."""
        modules = [m for layer in facts.layers for m in layer.modules]
        for stage in pipeline.stages:
            for pattern in stage.modules:
                if any(pattern.covers_module(m) for m in modules):
                    continue
                inside = next((m for m in modules if pattern.text.startswith(f"{m}.")), None)
                if inside is not None:
                    yield self.report(
                        f"{pattern.text} is a part of layer {inside}; stages are made of whole layers",
                        pattern.span,
                        help=(f'write "{inside}"',),
                    )
                    continue
                meant = near(pattern.text, modules)
                misspelt.update([meant] if meant is not None else [])
                suggestion = f"; did you mean {meant}" if meant is not None else ""
                help_ = () if meant is not None else (f"modules: {', '.join(modules)}",) if len(modules) <= 12 else ()
                yield self.report(f"no module {pattern.text}{suggestion}", pattern.span, help=help_)

    def _missing(
        self, pipeline: PipelineSpec, facts: ModelFacts, owners: tuple[tuple[int, ...], ...], misspelt: set[str]
    ) -> Iterator[Diagnostic]:
        missing = [
            i for i, layer in enumerate(facts.layers) if layer.modules and not owners[i] and not misspelt.intersection(layer.modules)
        ]
        if not missing:
            return
        names = [facts.layers[i].name for i in missing]
        before = next((owners[i][-1] for i in range(missing[0] - 1, -1, -1) if owners[i]), None)
        after = next((owners[i][0] for i in range(missing[-1] + 1, len(owners)) if owners[i]), None)
        at = pipeline.stages[before if before is not None else after if after is not None else 0]
        between = [pipeline.stages[i].name for i in dict.fromkeys((before, after)) if i is not None]
        word = "is" if len(names) == 1 else "are"
        shown = listed(names if len(names) <= 4 else [*names[:4], f"{len(names) - 4} more"])
        yield self.report(
            f"{shown} {word} in no stage",
            at.span,
            labels=(Label(pipeline.stages[after].span, "the next one"),)
            if after is not None and before is not None and after != before
            else (),
            help=(f"add {', '.join(f'{chr(34)}{n}{chr(34)}' for n in names[:4])} to stage {listed(between, 'or')}",) if between else (),
        )

    def _twice(self, pipeline: PipelineSpec, facts: ModelFacts, owners: tuple[tuple[int, ...], ...]) -> Iterator[Diagnostic]:
        for layer, stages in zip(facts.layers, owners, strict=True):
            if len(stages) < 2:
                continue
            first, second = pipeline.stages[stages[0]], pipeline.stages[stages[1]]
            yield self.report(
                f"{layer.name} is in two stages, {first.name} and {second.name}",
                second.span,
                second.name,
                labels=(Label(first.span, first.name),),
            )

    def _order(self, pipeline: PipelineSpec, facts: ModelFacts, owners: tuple[tuple[int, ...], ...]) -> Iterator[Diagnostic]:
        last, last_layer = 0, ""
        for layer, stages in zip(facts.layers, owners, strict=True):
            if not stages:
                continue
            stage = stages[0]
            if stage < last:
                here, there = pipeline.stages[stage], pipeline.stages[last]
                yield self.report(
                    f"stages are not in the order of the layers: {layer.name} of stage {here.name} comes after {last_layer} of stage {there.name}",
                    here.span,
                    here.name,
                    labels=(Label(there.span, there.name),),
                    help=("a stage is a run of layers, and stages follow each other as the layers do",),
                )
                return
            if stage > last + 1 or (stage > 0 and not last_layer):
                skipped = pipeline.stages[0 if not last_layer else last + 1]
                yield self.report(f"stage {skipped.name} is out of order: its layers come later", skipped.span)
                return
            last, last_layer = stage, layer.name
            if layer.cut_before and stage != _before(owners, facts, layer):
                yield self.report(f"no stage may begin at {layer.name}: {layer.cut_before}", pipeline.stages[stage].span)


def _before(owners: tuple[tuple[int, ...], ...], facts: ModelFacts, layer: LayerFacts) -> int:
    index = facts.layers.index(layer)
    return next((o[0] for o in reversed(owners[:index]) if o), owners[index][0])


def miscounted(
    rule: Rule, pipeline: PipelineSpec, runs: str, *counts: int, labels: tuple[Label, ...] = (), notes: tuple[str, ...] = ()
) -> Diagnostic:
    """The finding that another number of stages is written than a schedule `runs`, in words, which is one of `counts`, ascending; at the first stage too many."""
    written, would_do = len(pipeline.stages), listed(counts, "or")
    return rule.report(
        f"{runs}, {written} {'is' if written == 1 else 'are'} written",
        pipeline.stages[min(counts[0], written - 1)].span,
        labels=labels,
        help=(f"list {would_do} {'stage' if counts == (1,) else 'stages'} in the order of the layers, or write stages = balanced",),
        notes=notes,
    )


class StageLayoutAgainstSchedule(Rule):
    """What it does
        Checks that as many stages are written as the schedule runs on the pipeline axis.

    Why it is bad
        The schedule decides on which position a stage lives: one after another, around in a loop, or there and back in a V. The file lists stages
        in the order of the layers, and their number must be what the schedule places.

    Example (bad)
        mesh { axis pp = 2 }
        pipeline over pp {
          stage first { "tok", "layers[0..2]" }
          stage last  { "layers[2..4]", "norm", "head" }
          schedule = interleaved_1f1b(microbatches = 4, virtual = 2)      # wants 4 stages
        }

    Better
        mesh { axis pp = 2 }
        pipeline over pp {
          stage first { "tok", "layers[0..2]" }
          stage last  { "layers[2..4]", "norm", "head" }
          schedule = one_f_one_b(microbatches = 4)
        }

    Fix
        Write as many stages as the message says, or `stages = balanced`.
    """

    code = "PDL406"
    name = "stage-layout-against-schedule"
    needs = frozenset({"mesh", "pipeline"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline = context.spec.pipeline
        family = SCHEDULES.get(pipeline.schedule.name) if pipeline is not None else None
        if pipeline is None or family is None or not pipeline.stages:
            return
        positions, each = context.positions, family.per_position(pipeline.virtual)
        wanted = positions * each
        if wanted == len(pipeline.stages):
            return
        places = _placement(family.placement, positions, each)
        product = f"{pipeline.axis} {positions} x {each} = {wanted}" if each > 1 else f"{pipeline.axis} = {wanted}"
        yield miscounted(
            self,
            pipeline,
            f"{family.name} runs {product} {'stage' if wanted == 1 else 'stages'}",
            wanted,
            labels=(
                *context.label(f"mesh.{pipeline.axis}", plural(positions, "position")),
                *((Label(pipeline.schedule.span, f"{each} on each position"),) if pipeline.schedule.span is not None and each > 1 else ()),
            ),
            notes=(f"the schedule places them: {places}",) if each > 1 else (),
        )


def _placement(kind: str, positions: int, each: int) -> str:
    """Stages by position, in words."""
    if positions * each > 64:
        return "in a V" if kind == "v" else "in a loop"
    rows = []
    for r in range(positions):
        stages = (r, 2 * positions - 1 - r) if kind == "v" else range(r, positions * each, positions)
        rows.append(f"({', '.join(map(str, stages))})")
    return " / ".join(rows)


class TiedOverStages(Rule):
    """What it does
        Notes parameters that are one and the same in several layers, where those layers are in different stages.

    Why it is bad
        It is not: PDSL keeps one copy in each of the stages, gives both the same initial values and sums their gradients before the update. The
        note says so, since other tools train the copies apart without a word.

    Example (bad)
        model "pdsl.models:gpt" { tied = true }
        pipeline over pp { schedule = one_f_one_b(microbatches = 4) }      # embedding in the first stage, head in the last

    Better
        model "pdsl.models:gpt" { tied = false }
        pipeline over pp { schedule = one_f_one_b(microbatches = 4) }

    Fix
        None is needed. Untie the parameters if the sum over the stages costs too much.
    """

    code = "PDL405"
    name = "tied-over-stages"
    severity = Severity.NOTE
    needs = frozenset({"model", "pipeline", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline, facts, stages = context.spec.pipeline, context.facts, context.stages
        if pipeline is None or facts is None or stages is None or stages < 2:
            return
        for p in facts.parameters:
            if len(p.layers) < 2:
                continue
            where = self._where(pipeline, facts, p, stages)
            if where is None:
                continue
            names = " and ".join((p.name, *p.aliases))
            one = "are one parameter" if p.aliases else "is used in several layers"
            yield self.report(
                f"{names} {one}, placed in {where}; the gradient will be summed over these stages",
                pipeline.axis_span or context.place("pipeline"),
            )

    def _where(self, pipeline: PipelineSpec, facts: ModelFacts, p: ParameterFacts, stages: int) -> str | None:
        """The stages in words; None if the parameter stays in one, or if the cut is not known and need not part its layers."""
        if pipeline.stages:
            owners = stage_of_layers(pipeline, facts)
            found = dict.fromkeys(pipeline.stages[owners[i][0]].name for i in p.layers if owners[i])
            return f"stages {listed(found)}" if len(found) > 1 else None
        ends = min(p.layers) == 0 and max(p.layers) == len(facts.layers) - 1
        family = SCHEDULES.get(pipeline.schedule.name)
        together = ", which one position runs" if family is not None and family.placement == "v" else ""
        return f"the first and the last of {stages} stages{together}" if ends else None
