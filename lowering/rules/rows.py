"""Rules on schedules that are read from a file: PDL409 to PDL411."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.rules.base import Context, Rule, plural
from pdsl.lowering.rules.stages import miscounted
from pdsl.lowering.spec import PipelineSpec, SizeRange

__all__ = ["RowsAgainstMesh", "RowsOfCommunication", "RowsUnsound"]

_MOST_TOLD = 12


class RowsUnsound(Rule):
    """What it does
        Checks the rows of a schedule that is read from a file: every cell an operation, each forward once, each backward once and either whole or in
        halves, in an order that can be run.

    Why it is bad
        A row with a weight half before its input half, a microbatch left out or a stage on two positions fails in the middle of the first step,
        or trains on a part of the batch without a word.

    Example (bad)
        schedule = rows("x.csv")      # 0F0,0B0 / 1F0,1W0,1I0

    Better
        schedule = rows("x.csv")      # 0F0,0B0 / 1F0,1I0,1W0

    Fix
        Change the file at the rows and columns that the message names, counted from 1, or take a schedule by its name.
    """

    code = "PDL409"
    name = "rows-unsound"
    needs = frozenset({"pipeline"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline = context.spec.pipeline
        if pipeline is None or pipeline.rows is None or not pipeline.rows.findings:
            return
        first, *others = pipeline.rows.findings
        more = len(others) - _MOST_TOLD + 1
        told = others if len(others) <= _MOST_TOLD else [*others[: _MOST_TOLD - 1], f"and {more} more"]
        missing = first.startswith("cannot read")
        help_ = ("the path is relative to the folder of this file",) if missing else ()
        yield self.report(first, pipeline.schedule.span or context.place("pipeline.schedule"), notes=tuple(told), help=help_)


class RowsAgainstMesh(Rule):
    """What it does
        Checks that a file of rows has as many of them as the pipeline has positions, as many stages as are written, and that nothing
        asks for pipelines of another length or another count of microbatches.

    Why it is bad
        Rows are for exactly their positions and microbatches. Pipelines that may differ in length, or that take over the microbatches of others after a
        loss, need a schedule that can be made for any count.

    Example (bad)
        mesh { axis pp = 4 }
        pipeline over pp { schedule = rows("x.csv") }      # 2 rows

    Better
        mesh { axis pp = 2 }
        pipeline over pp { schedule = rows("x.csv") }      # 2 rows

    Fix
        Change the axis, or take a schedule by its name.
    """

    code = "PDL410"
    name = "rows-against-mesh"
    needs = frozenset({"mesh", "pipeline", "fault_budget"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline = context.spec.pipeline
        if pipeline is None or pipeline.rows is None or pipeline.rows.schedule is None:
            return
        yield from self._changing(context, pipeline)
        schedule, path = pipeline.rows.schedule, pipeline.rows.path
        span = pipeline.schedule.span or context.place("pipeline.schedule")
        axis = context.axis(pipeline.axis)
        if axis is not None and isinstance(axis.size, int) and axis.size != schedule.positions:
            yield self.report(
                f"{path} has {plural(schedule.positions, 'row')}, and a pipeline {plural(axis.size, 'position')}",
                span,
                plural(schedule.positions, "row"),
                labels=context.label(f"mesh.{pipeline.axis}", plural(axis.size, "position")),
                help=(f"axis {pipeline.axis} = {schedule.positions}, or a file with {plural(axis.size, 'row')}",),
            )
        elif pipeline.stages and len(pipeline.stages) != schedule.stages:
            yield miscounted(self, pipeline, f"{path} runs {plural(schedule.stages, 'stage')}", schedule.stages)

    def _changing(self, context: Context, pipeline: PipelineSpec) -> Iterator[Diagnostic]:
        assert pipeline.rows is not None
        assert pipeline.rows.schedule is not None
        path, count = pipeline.rows.path, pipeline.rows.schedule.microbatches
        axis, budget = context.axis(pipeline.axis), context.spec.fault_budget
        if budget is not None and budget.lose:
            yield self.report(
                f"{path} is for {plural(count, 'microbatch').replace('hs', 'hes')}, and after a loss pipelines take other counts",
                context.place("fault_budget.lose", "fault_budget"),
                f"{budget.lose}{context.by('fault_budget.lose')}",
                help=("name a schedule, or set lose = 0",),
            )
        elif axis is not None and isinstance(axis.size, SizeRange) and axis.size.low < axis.size.high:
            yield self.report(
                f"{path} is for pipelines of one length, and {axis.name} may be {axis.size.low} to {axis.size.high}",
                context.place(f"mesh.{axis.name}", "mesh"),
                help=(f"axis {axis.name} = {pipeline.rows.schedule.positions}",),
            )


class RowsOfCommunication(Rule):
    """What it does
        Notes cells of communication in a file of rows, which are passed over.

    Why it is bad
        It is not, unless their places were chosen with care: PDSL places sends and receives by itself, from one order of all transfers that cannot hang,
        and gathers sharded parameters as the plan says.

    Example (bad)
        schedule = rows("x.csv")      # 0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0

    Better
        schedule = rows("x.csv")      # 0F0,,,0B0

    Fix
        None is needed. Write the file with operations alone if the note is a nuisance.
    """

    code = "PDL411"
    name = "rows-of-communication"
    severity = Severity.NOTE
    needs = frozenset({"pipeline"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pipeline = context.spec.pipeline
        if pipeline is None or pipeline.rows is None or not pipeline.rows.passed_over:
            return
        rows = pipeline.rows
        yield self.report(
            f"{plural(rows.passed_over, 'cell')} of communication in {rows.path} {'is' if rows.passed_over == 1 else 'are'} passed over, "
            f"the first in {rows.first_passed}",
            pipeline.schedule.span or context.place("pipeline.schedule"),
        )
