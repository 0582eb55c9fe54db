"""Rules on a schedule that is searched for: PDL413 and PDL414."""

from __future__ import annotations

from collections.abc import Iterable

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.lowering.rules.base import Context, Rule, plural
from pdsl.lowering.rules.stages import miscounted
from pdsl.lowering.schedules import SEARCHED

__all__ = ["NoScheduleFits", "StagesOfAuto"]


class NoScheduleFits(Rule):
    """What it does
        Checks that the memory of a device leaves room for one microbatch, in at least one of the placements that `auto` looks at.

    Why it is bad
        Parameters, gradients and the state of the optimizer stay for good, and a forward leaves activations until its backward. Where not even one
        microbatch has room beside the first no order of operations helps: the run would end with an error of the allocator.

    Example (bad)
        cluster { memory = 64MiB }
        mesh { axis pp = 2 }
        pipeline over pp { schedule = auto(microbatches = 4) }      # a stage takes more

    Better
        cluster { memory = 16GiB }
        mesh { axis pp = 2 }
        pipeline over pp { schedule = auto(microbatches = 4) }

    Fix
        Take more microbatches, which are smaller, or more stages, or shard the parameters; or say how much memory there is.
    """

    code = "PDL413"
    name = "no-schedule-fits"
    needs = frozenset({"cluster", "mesh", "shard", "pipeline", "train"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        spec, mesh, facts, pipeline = context.spec, context.mesh, context.facts, context.spec.pipeline
        limit = spec.cluster.memory
        if (
            pipeline is None
            or pipeline.schedule.name not in SEARCHED
            or mesh is None
            or facts is None
            or spec.train is None
            or limit is None
        ):
            return
        if (
            mesh.sizing is not None
            or pipeline.stages
            or spec.train.batch % (mesh.batch_parts * spec.train.accumulate * pipeline.microbatches)
        ):
            return
        from pdsl.lowering.auto import auto_stages, least_memory, no_room  # slow to import, and only for specs that search
        from pdsl.lowering.layouts import parameter_layouts

        layouts = parameter_layouts(facts, spec.shard, shard_size=mesh.shard_size, tensor_size=mesh.tensor_size, axes=mesh.axes)
        of_step = pipeline.microbatches * spec.train.accumulate * mesh.pipelines
        asked = auto_stages(spec, facts, layouts, mesh, positions=context.positions, microbatches=pipeline.microbatches, of_step=of_step)
        least = least_memory(asked)
        if least is None or least <= limit:
            return
        yield self.report(
            no_room(limit, least),
            context.place("cluster.memory", "cluster"),
            f"{limit} bytes{context.by('cluster.memory')}",
            labels=(
                *context.label(f"mesh.{pipeline.axis}", plural(context.positions, "position")),
                *context.label("pipeline.schedule", f"{plural(pipeline.microbatches, 'microbatch').replace('hs', 'hes')} in a round"),
            ),
            help=(f"memory = {-(-least // 2**20)}MiB would do; smaller microbatches, more positions or sharded parameters take less",),
        )


class StagesOfAuto(Rule):
    """What it does
        Checks that as many stages are written as `auto` can place: one on each position, or two.

    Why it is bad
        The search chooses between placements of one stage, and of two, on each position. Another number has no placement.

    Example (bad)
        mesh { axis pp = 2 }
        pipeline over pp {
          stage first  { "tok", "layers[0..1]" }
          stage second { "layers[1..2]" }
          stage last   { "layers[2..4]", "norm", "head" }
          schedule = auto(microbatches = 4)      # 2 or 4 stages
        }

    Better
        mesh { axis pp = 2 }
        pipeline over pp {
          stage first { "tok", "layers[0..2]" }
          stage last  { "layers[2..4]", "norm", "head" }
          schedule = auto(microbatches = 4)
        }

    Fix
        Write as many stages as the message says, or `stages = balanced`.
    """

    code = "PDL414"
    name = "stages-of-auto"
    needs = frozenset({"mesh", "pipeline"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline, positions = context.spec.pipeline, context.positions
        if pipeline is None or pipeline.schedule.name not in SEARCHED or len(pipeline.stages) in (0, positions, 2 * positions):
            return
        on = plural(positions, "position")
        runs = f"auto runs {positions} or {2 * positions} stages on {on}"
        yield miscounted(self, pipeline, runs, positions, 2 * positions, labels=context.label(f"mesh.{pipeline.axis}", on))
