"""Rules on what a forward does beside its arithmetic: random numbers, statistics of rows, buffers, memory that is shared. PDL33 and PDL82."""

from __future__ import annotations

from collections.abc import Iterable

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.grammar.source import Span
from pdsl.lowering.rules.base import Context, Rule, listed, plural, quoted

__all__ = [
    "BatchStatistics",
    "BufferOfAParameter",
    "DrawsAcrossRows",
    "OverlappingParameters",
    "SeenWrites",
    "UpdatedBuffers",
    "written_buffers",
]


def written_buffers(context: Context) -> list[str]:
    """Names of the buffers that the forward writes, other than running means and variances."""
    facts = context.facts
    return [] if facts is None else [b.name for b in facts.updated if b.name.rpartition(".")[0] not in facts.statistics]


def _model(context: Context) -> Span | None:
    model = context.spec.model
    return model.span if model is not None and model.span is not None else context.place("model")


def _microbatches(context: Context) -> int:
    """Microbatches of one step over all pipelines; 1 if nothing is known."""
    if context.spec.train is None or context.mesh is None:
        return 1
    return context.microbatches * context.mesh.pipelines


class DrawsAcrossRows(Rule):
    """What it does
        Names random numbers of the forward that cannot be told apart by rows: those of a permutation of the rows, of an operation that is not
        torch's own, of a tensor whose size is no fixed share a row.

    Why it is bad
        Every other random number belongs to a row, or to all rows alike, so every plan draws the same. These are drawn anew for each microbatch on each
        shard: the training is sound, and it is not that of one process. On a tensor axis the ranks of one row would draw alike for different
        parts, so there it is an error.

    Example (bad)
        model "models:mixed" { }      # x + x[torch.randperm(len(x))]
        train { accumulate = 2 }

    Better
        model "models:mixed" { }      # mixes in the data set, before rows are dealt out
        train { accumulate = 2 }

    Fix
        Draw by rows, or once for all rows, or in the data; or take a mesh of one rank without accumulation.
    """

    code = "PDL820"
    name = "draws-across-rows"
    severity = Severity.WARNING
    needs = frozenset({"model", "train", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        from pdsl.lowering.facts import Rowed  # a check without model starts without it

        assert context.facts is not None
        assert context.mesh is not None
        opaque = [d for d in context.facts.draws if d.rowed is Rowed.OPAQUE]
        parts = _microbatches(context) * context.mesh.shard_size
        tensor = context.mesh.tensor_size
        if not opaque or (parts == 1 and tensor == 1):
            return
        places = dict.fromkeys(f"{d.place or 'the model'} ({d.operation})" for d in opaque)
        verb = "draws" if len(places) == 1 else "draw"
        split = f"into {plural(parts, 'part')}" if parts > 1 else f"over {tensor} tensor ranks"
        yield self.report(
            f"{listed(places)} {verb} random numbers that cannot be told apart by rows, and the batch is split {split}",
            _model(context),
            help=("draw by rows, or once for all rows, or in the data set; other numbers than in one process come of it",),
            severity=Severity.ERROR if tensor > 1 else None,
        )


class BatchStatistics(Rule):
    """What it does
        Names modules that normalise over rows, where a step has several microbatches.

    Why it is bad
        A microbatch is normalised over its own rows, on whichever shards they are, not over the batch. The result is to the digit that of one process
        that runs the microbatches one after another, running statistics too, but not that of one process with the whole batch at once.

    Example (bad)
        model "models:resnet" { }
        train { batch = 64; accumulate = 16 }      # over 4 rows each

    Better
        model "models:resnet" { norm = "group" }
        train { batch = 64; accumulate = 16 }

    Fix
        Take fewer and larger microbatches, or a norm that takes each row by itself. Silence the warning if microbatches are large enough.
    """

    code = "PDL821"
    name = "batch-statistics"
    severity = Severity.WARNING
    needs = frozenset({"model", "train", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts, train, count = context.facts, context.spec.train, _microbatches(context)
        if facts is None or train is None or not facts.statistics or count == 1:
            return
        verb = "normalises" if len(facts.statistics) == 1 else "normalise"
        yield self.report(
            f"{quoted(facts.statistics)} {verb} over the {plural(train.batch // count, 'row')} of a microbatch, not over the batch of {train.batch}",
            _model(context),
            labels=context.label("train.batch", f"{train.batch} rows in {count} microbatches"),
            help=("fewer microbatches, or a norm that takes each row by itself, such as GroupNorm or LayerNorm",),
        )


class UpdatedBuffers(Rule):
    """What it does
        Checks that no buffer is written by the forward, other than running means and variances, where several pipelines or shards run it, or where it
        is computed again.

    Why it is bad
        Every pipeline would count, or average, its own microbatches only, and every shard its own rows: the buffer would be another on every rank,
        and none would be that of one process. What is computed again is written twice.

    Example (bad)
        mesh { axis dp = 2 }
        model "models:counting" { }      # self.calls += 1 in its forward

    Better
        mesh { axis pp = 2 }
        model "models:counting" { }

    Fix
        Leave the buffer out, update it outside of the forward, or take a mesh with one pipeline without shards.
    """

    code = "PDL822"
    name = "updated-buffers"
    needs = frozenset({"model", "mesh"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts, mesh = context.facts, context.mesh
        assert facts is not None
        assert mesh is not None
        own = written_buffers(context)
        again = [n for n in own if n.startswith(tuple(f"{m}." for m in facts.recomputed))]
        parts = mesh.pipelines * mesh.shard_size
        if own and (parts > 1 or mesh.sizing is not None):
            yield self.report(
                f"the forward writes into {quoted(own)}, and {parts} pipelines and shards would each do so for rows of their own",
                _model(context),
                help=("one pipeline without shards, or a model that leaves the buffer alone in its forward",),
            )
        elif again:
            yield self.report(
                f"the forward writes into {quoted(again)}, and would do so once more when activations are computed again",
                context.place("memory.recompute", "memory"),
                help=("leave the module out of `recompute`",),
            )


class SeenWrites(Rule):
    """What it does
        Checks that a layer with sharded parameters writes into no tensor that it is given and that others read afterwards.

    Why it is bad
        The layer is a unit that is gathered when it runs, and a unit gets views of its inputs that must not be written into. A copy does where
        nobody else reads the input; here others would read it as it was before.

    Example (bad)
        x += 1                         # in a block
        x = x + block(x)               # in the model: x is what the block has written

    Better
        x = x + 1                      # in the block: a tensor of its own

    Fix
        Make the operation one that gives a new tensor, or leave the parameters of the layer whole.
    """

    code = "PDL332"
    name = "seen-writes"
    needs = frozenset({"model", "mesh", "shard"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        from pdsl.lowering.facts import LayerKind  # a check without model starts without it

        facts, mesh = context.facts, context.mesh
        assert facts is not None
        assert mesh is not None
        if mesh.shard_size == 1:
            return
        for layer in facts.layers:
            rules = sorted({context.decided[p] for p in layer.parameters if context.is_sharded(p)})
            if layer.kind is not LayerKind.BLOCK or layer.writes != "seen" or not rules:
                continue
            yield self.report(
                f"{layer.name} writes into a tensor that it is given and that others read afterwards, and its parameters are sharded",
                context.spec.shard[rules[0]].span,
                f"shards {layer.name}",
                help=("an operation that gives a new tensor, or replicate() for the layer",),
            )


class BufferOfAParameter(Rule):
    """What it does
        Checks that no buffer shares its memory with a parameter.

    Why it is bad
        Parameters are sharded, moved and written by the optimizer in memory of their own, on the ranks that hold them. The buffer would keep the
        values of the first step, and where it is read the model would compute with those.

    Example (bad)
        self.register_buffer("snapshot", self.weight.data)      # a view, not a copy

    Better
        self.register_buffer("snapshot", self.weight.detach().clone())

    Fix
        Copy the values if they are to stay, or read the parameter itself where they are used.
    """

    code = "PDL330"
    name = "buffer-of-a-parameter"
    needs = frozenset({"model"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.facts is not None
        for name, parameter in context.facts.shares:
            if name in context.facts.buffers:
                yield self.report(
                    f"buffer {name} shares memory with parameter {parameter}, which is sharded and trained in memory of its own",
                    _model(context),
                    help=(f"a copy of {parameter}, or {parameter} itself where the buffer is read",),
                )


class OverlappingParameters(Rule):
    """What it does
        Checks that no two parameters overlap in memory, unless they are the same as a whole.

    Why it is bad
        One process would write some of the numbers twice in a step, once for each of the two. Apart from each other they would drift.

    Example (bad)
        self.first, self.second = Parameter(table[:6]), Parameter(table[4:])

    Better
        self.first, self.second = Parameter(table[:5]), Parameter(table[5:])

    Fix
        Cut the memory into parts that do not overlap, or make one parameter of it and slice that in the forward.
    """

    code = "PDL331"
    name = "overlapping-parameters"
    needs = frozenset({"model"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.facts is not None
        for name, parameter in context.facts.shares:
            if name not in context.facts.buffers:
                yield self.report(
                    f"parameters {parameter} and {name} overlap in memory and are not the same",
                    _model(context),
                    help=("parts that do not overlap, or one parameter that the forward slices",),
                )
