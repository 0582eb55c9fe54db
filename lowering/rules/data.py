"""Rules on the data: PDL8, what a batch takes of it and what is held out."""

from __future__ import annotations

from collections.abc import Iterable

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.rules.base import Context, Rule, listed, plural, quoted
from pdsl.lowering.rules.forwards import written_buffers

__all__ = ["HeldOutUnreadable", "NoTarget", "StandInsWrite", "TooLittleData", "ValidatedOnTraining"]


class TooLittleData(Rule):
    """What it does
        Checks that the data has at least one batch, where a batch that is not full is dropped.

    Why it is bad
        Every batch would be dropped, and nothing trained.

    Example (bad)
        train { data = "data:twenty_rows"; batch = 32 }

    Better
        train { data = "data:twenty_rows"; batch = 32; last = pad }

    Fix
        Take a smaller batch, or `last = pad`: the rows that are missing weigh nothing, and the loss is over those that there are.
    """

    code = "PDL805"
    name = "too-little-data"
    needs = frozenset({"train"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        train, facts = context.spec.train, context.facts
        if train is None or facts is None or facts.samples is None or train.last == "pad" or facts.samples >= train.batch:
            return
        yield self.report(
            f"the data has {plural(facts.samples, 'sample')}, fewer than one batch of {train.batch}, and what is not full is dropped",
            context.place("train.batch", "train"),
            f"{train.batch}{context.by('train.batch')}",
            labels=context.label("train.data", plural(facts.samples, "sample")),
            help=(f"batch of at most {facts.samples}, or last = pad" if facts.samples else "data with samples",),
        )


class NoTarget(Rule):
    """What it does
        Checks that the data has a target where something needs one: an objective that compares outputs with it, a mean over tokens that counts it.

    Why it is bad
        The run would fail at its first step.

    Example (bad)
        train { data = "data:pairs"; objective = mse }         # rows have x and y

    Better
        train { data = "data:pairs"; objective = mse }         # rows have x and target

    Fix
        Name the entry `targets`, `target`, `labels` or `label`.
    """

    code = "PDL809"
    name = "no-target"
    needs = frozenset({"train"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        from pdsl.lowering.facts import TARGETS  # a check without model starts without it

        train, facts = context.spec.train, context.facts
        if train is None or facts is None or not facts.entries or set(TARGETS) & set(facts.entries):
            return
        if train.loss.get("over") == "tokens":
            path, who = "train.loss", "mean(over = tokens) counts targets"
        elif train.objective != "model":
            path, who = "train.objective", f"the objective {train.objective} compares the output with a target"
        else:
            return
        yield self.report(
            f"{who}, and the rows of the data have only {listed(facts.entries)}",
            context.place(path, "train"),
            labels=context.label("train.data", f"gives {listed(facts.entries)}"),
            help=(f"name the entry {listed(TARGETS, 'or')}",),
        )


class HeldOutUnreadable(Rule):
    """What it does
        Reports that the data of the `validate` block cannot be found, raises, or gives other rows than the data that is trained on.

    Why it is bad
        The run would train for a while and fail at its first validation.

    Example (bad)
        train    { data = "data:text"; ... }          # tokens, targets
        validate { data = "data:pictures" }           # pixels, labels

    Better
        validate { data = source("data:text", split = "test") }

    Fix
        Correct the name or the arguments; held-out rows have the entries of the training rows, with as many dims and the same dtype.
    """

    code = "PDL806"
    name = "held-out-unreadable"


class ValidatedOnTraining(Rule):
    """What it does
        Warns where the held-out data is the training data: the same factory with the same arguments.

    Why it is bad
        The loss on samples that the model was trained on says nothing about others.

    Example (bad)
        train    { data = source("data:text", split = "train"); ... }
        validate { data = source("data:text", split = "train") }

    Better
        validate { data = source("data:text", split = "test") }

    Fix
        Name data that is not trained on.
    """

    code = "PDL807"
    name = "validated-on-training"
    severity = Severity.WARNING
    needs = frozenset({"train", "validate"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        train, validate = context.spec.train, context.spec.validate
        if train is None or validate is None or validate.data != train.data:
            return
        yield self.report(
            "the held-out data is the data that is trained on",
            context.place("validate.data", "validate"),
            labels=context.label("train.data", "trained on"),
            help=("a split, or another file, that the factory tells apart by its arguments",),
        )


class StandInsWrite(Rule):
    """What it does
        Checks that the forward writes into no buffer, other than running means and variances, where a batch that is not full is padded and has
        several microbatches.

    Why it is bad
        A microbatch for which there are no rows runs with rows that stand in for them and weigh nothing. What a forward writes into a buffer is there
        all the same.

    Example (bad)
        model "models:counting" { }      # self.calls += 1 in its forward
        pipeline over pp { schedule = gpipe(microbatches = 4) }
        train { batch = 16; last = pad }

    Better
        train { batch = 16; last = drop }

    Fix
        Drop the last batch, take one microbatch, or leave the buffer out of the forward.
    """

    code = "PDL808"
    name = "stand-ins-write"
    needs = frozenset({"train", "model", "pipeline"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        train, own = context.spec.train, written_buffers(context)
        if train is None or train.last != "pad" or not own or context.microbatches == 1:
            return
        yield self.report(
            f"the forward writes into {quoted(own)}, also for rows that stand in for others in one of {context.microbatches} microbatches",
            context.place("train.last", "train"),
            help=("last = drop, or one microbatch",),
        )
