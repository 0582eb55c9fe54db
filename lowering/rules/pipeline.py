"""Rules on the schedule and the batch: PDL4, the part that needs no model."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from pdsl.grammar.diagnostics import Diagnostic, Label, Severity
from pdsl.lowering.rules.base import Context, Rule, listed, plural
from pdsl.lowering.rules.mesh import divisors
from pdsl.lowering.schedules import SCHEDULES, ScheduleFamily

__all__ = ["BatchNotDivisible", "IdlePipeline", "InterleavingRounds", "MicrobatchesAgainstSchedule"]

_COUNT = "pipeline.schedule.microbatches"


def _family(context: Context) -> ScheduleFamily | None:
    pipeline = context.spec.pipeline
    return SCHEDULES.get(pipeline.schedule.name) if pipeline is not None else None


def _percent(share: Fraction) -> str:
    return f"{round(100 * share)} %"


def _bubbles(family: ScheduleFamily, positions: int, virtual: int, counts: tuple[int, ...]) -> str:
    """What each count of microbatches would leave idle: `4 leaves a bubble of 43 %, 8 of 27 %`."""
    shares = [_percent(family.bubble(positions, n, virtual)) for n in counts]
    return ", ".join(f"{n} {'of' if i else 'leaves a bubble of'} {share}" for i, (n, share) in enumerate(zip(counts, shares, strict=True)))


def _per_microbatch_limit(context: Context) -> int | None:
    """Samples of one round in one pipeline on one shard rank, which microbatches must divide; None if not known or not whole."""
    train, mesh = context.spec.train, context.mesh
    if train is None or mesh is None or context.broken & {"train", "shard", "mesh"}:
        return None
    samples, rest = divmod(train.batch, mesh.batch_parts * train.accumulate)
    return samples if rest == 0 else None


def _fitting(context: Context, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts that divide the batch; all of them if none does."""
    samples = _per_microbatch_limit(context)
    fits = tuple(n for n in counts if samples is not None and samples % n == 0)
    return fits or counts


def _accepted(context: Context, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts that the schedule can run; all of them if it can run none, or is not executed yet."""
    family, pipeline = _family(context), context.spec.pipeline
    if family is None or pipeline is None:
        return counts
    return tuple(n for n in counts if family.accepts(context.positions, n, pipeline.virtual) is None) or counts


class MicrobatchesAgainstSchedule(Rule):
    """What it does
        Checks that the schedule can run the count of microbatches on the stages of the pipeline.

    Why it is bad
        1F1B fills the pipeline with one microbatch for each stage before it begins to alternate. With fewer some stages wait for work that never
        comes, or idle most of the time.

    Example (bad)
        mesh { axis pp = 4 }
        pipeline over pp { schedule = one_f_one_b(microbatches = 2) }

    Better
        mesh { axis pp = 4 }
        pipeline over pp { schedule = one_f_one_b(microbatches = 8) }

    Fix
        Take more microbatches, or `gpipe`, which accepts any count.
    """

    code = "PDL402"
    name = "microbatches-against-schedule"
    needs = frozenset({"mesh", "pipeline"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        family, pipeline = _family(context), context.spec.pipeline
        if family is None or pipeline is None:
            return
        p, m, v = context.positions, pipeline.microbatches, pipeline.virtual
        reason = family.accepts(p, m, v)
        if reason is None or (family.virtual and v < 2):
            return
        counts = _fitting(context, family.valid_microbatches(p, m, v))
        told = _bubbles(family, p, v, counts)
        gpipe = f"; gpipe accepts {m}" if SCHEDULES["gpipe"].accepts(p, m) is None else ""
        yield self.report(
            reason,
            context.place(_COUNT, "pipeline.schedule"),
            f"{m}{context.by(_COUNT)}",
            labels=context.label(f"mesh.{pipeline.axis}", plural(p, "stage")),
            help=(f"microbatches = {told}{gpipe}",),
        )


class InterleavingRounds(Rule):
    """What it does
        Checks schedules with several stages on each position: at least two virtual stages where the spec says how many, and a count of microbatches
        that fills the pipeline, in rounds of whole pipelines where the schedule has rounds.

    Why it is bad
        With one stage on each position nothing is interleaved. With a count that the number of positions does not divide, the rounds are longer
        and hold more activations; with fewer microbatches than the schedule is made for, positions idle.

    Example (bad)
        mesh { axis pp = 4 }
        pipeline over pp { schedule = interleaved_1f1b(microbatches = 10, virtual = 2) }

    Better
        mesh { axis pp = 4 }
        pipeline over pp { schedule = interleaved_1f1b(microbatches = 12, virtual = 2) }

    Fix
        Take one of the counts that the message names.
    """

    code = "PDL403"
    name = "interleaving-rounds"
    severity = Severity.WARNING
    needs = frozenset({"mesh", "pipeline"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        family, pipeline = _family(context), context.spec.pipeline
        if family is None or pipeline is None:
            return
        p, m, v = context.positions, pipeline.microbatches, pipeline.virtual
        label = context.label(f"mesh.{pipeline.axis}", plural(p, "position"))
        reason = family.accepts(p, m, v)
        if family.virtual and v < 2 and reason is not None:
            path = "pipeline.schedule.virtual"
            yield self.report(reason, context.place(path, "pipeline.schedule"), f"{v}{context.by(path)}", severity=Severity.ERROR)
            return
        advice = family.advice(p, m, v) if reason is None else None
        if advice is None:
            return
        message, _, options = advice.rpartition("; ")
        yield self.report(
            message,
            context.place(_COUNT, "pipeline.schedule"),
            f"{m}{context.by(_COUNT)}",
            labels=label,
            help=(options,) if options else (),
        )


class BatchNotDivisible(Rule):
    """What it does
        Checks that the global batch divides into equal microbatches over pipelines, shard ranks and rounds of accumulation.

    Why it is bad
        A microbatch with fewer rows than the others has other shapes. Stages reuse buffers of one shape, so the run fails on one rank, and its
        neighbour reports a lost peer.

    Example (bad)
        mesh { axis dp = 2; axis pp = 2 }
        pipeline over pp { schedule = gpipe(microbatches = 4) }
        train { batch = 12 }      # 6 for each pipeline, 6 % 4 = 2

    Better
        mesh { axis dp = 2; axis pp = 2 }
        pipeline over pp { schedule = gpipe(microbatches = 3) }
        train { batch = 12 }

    Fix
        Change the batch or the count of microbatches; the message names counts that divide.
    """

    code = "PDL404"
    name = "batch-not-divisible"
    needs = frozenset({"mesh", "shard", "pipeline", "train"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        train, mesh = context.spec.train, context.mesh
        if train is None or mesh is None:
            return
        m = context.spec.pipeline.microbatches if context.spec.pipeline is not None else 1
        ways = [(mesh.pipelines, "pipeline"), (mesh.shard_size, "shard rank"), (train.accumulate, "round")]
        over = " x ".join(plural(n, word) for n, word in ways if n > 1)
        parts = mesh.batch_parts * train.accumulate
        samples, rest = divmod(train.batch, parts)
        if rest:
            yield self._uneven(context, train.batch, parts, over, m)
        elif samples % m:
            each = (
                f"a batch of {train.batch} samples over {over} leaves {samples} for each, which"
                if over
                else f"a batch of {samples} samples"
            )
            tail = f"{m} microbatches do not divide" if over else f"does not divide into {m} microbatches"
            counts = _accepted(context, divisors(samples))
            told = listed(counts if len(counts) <= 12 else (*counts[:11], "..."), "or")
            batches = f"batch = {_near(train.batch, parts * m)}"
            rows = context.spec.pipeline.rows if context.spec.pipeline is not None else None
            told_m = plural(m, "microbatch").replace("hs", "hes")
            where = context.label("pipeline.schedule", f"{told_m} in {rows.path}") if rows is not None else context.label(_COUNT, told_m)
            yield self.report(
                f"{each} {tail}: {samples} % {m} = {samples % m}",
                context.place("train.batch", "train"),
                f"{train.batch}{context.by('train.batch')}",
                labels=(*where, *self._axes(context)),
                help=(batches if rows is not None else f"microbatches = {told}; or {batches}",),
            )

    def _uneven(self, context: Context, batch: int, parts: int, over: str, m: int) -> Diagnostic:
        return self.report(
            f"a batch of {batch} samples cannot be split over {over}: {batch} % {parts} = {batch % parts}",
            context.place("train.batch", "train"),
            f"{batch}{context.by('train.batch')}",
            labels=self._axes(context),
            help=(f"batch = {_near(batch, parts * m)}",),
        )

    def _axes(self, context: Context) -> tuple[Label, ...]:
        assert context.mesh is not None
        found: list[Label] = []
        for axis in context.mesh.axes:
            if axis.size > 1 and axis.role in ("replica", "shard"):
                found += context.label(f"mesh.{axis.name}", plural(axis.size, "pipeline" if axis.role == "replica" else "shard rank"))
        if context.spec.train is not None and context.spec.train.accumulate > 1:
            found += context.label("train.accumulate", plural(context.spec.train.accumulate, "round"))
        return tuple(found)


def _near(batch: int, parts: int) -> str:
    below = batch // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


class IdlePipeline(Rule):
    """What it does
        Warns if the schedule leaves positions idle for half of a step or more.

    Why it is bad
        Half of the machines are paid for and not used.

    Example (bad)
        mesh { axis pp = 2 }
        pipeline over pp { schedule = gpipe(microbatches = 1) }      # one stage waits while the other computes

    Better
        mesh { axis pp = 2 }
        pipeline over pp { schedule = gpipe(microbatches = 4) }

    Fix
        Take more microbatches.
    """

    code = "PDL408"
    name = "idle-pipeline"
    severity = Severity.WARNING
    needs = frozenset({"mesh", "pipeline"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        family, pipeline = _family(context), context.spec.pipeline
        if family is None or pipeline is None:
            return
        p, m, v = context.positions, pipeline.microbatches, pipeline.virtual
        if family.accepts(p, m, v) is not None or family.advice(p, m, v) is not None or 2 * family.bubble(p, m, v) < 1:
            return
        counts = _fitting(context, tuple(m * n for n in (2, 4, 8)))
        told = _bubbles(family, p, v, counts)
        yield self.report(
            f"{family.name} over {plural(p, 'stage')} with {m} microbatch{'' if m == 1 else 'es'} leaves a bubble of {_percent(family.bubble(p, m, v))}",
            context.place(_COUNT, "pipeline.schedule"),
            f"{m}{context.by(_COUNT)}",
            labels=context.label(f"mesh.{pipeline.axis}", plural(p, "stage")),
            help=(f"microbatches = {told}",),
        )
