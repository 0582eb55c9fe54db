"""The findings of the parser and the resolver, as rules to explain, and the rule on unused names: PDL0, PDL1, PDL8."""

from __future__ import annotations

from collections.abc import Iterable

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.names import name_of
from pdsl.lowering.rules.base import Context, Rule

__all__ = [
    "Assertion", "Circle", "DataUnreadable", "Edition", "ImportUnreadable", "MissingValue", "ModelUnreadable", "OverrideOfNothing", "Syntax", "TypeOrUnit", "UnknownName",
    "UnusedName", "WrittenTwice",
]  # fmt: skip


class Syntax(Rule):
    """What it does
        Finds places where the text does not follow the grammar. All of them are told in one run.

    Why it is bad
        What cannot be read cannot be checked.

    Example (bad)
        mesh { axis pp 2 }

    Better
        mesh { axis pp = 2 }

    Fix
        The message says what was expected.
    """

    code = "PDL001"
    name = "syntax"


class Edition(Rule):
    """What it does
        Checks the first line, which names the edition of the language.

    Why it is bad
        Without it nobody knows by which rules a file is read once the language has changed.

    Example (bad)
        mesh { axis dp = 2 }

    Better
        pdsl 1
        mesh { axis dp = 2 }

    Fix
        Begin the file with `pdsl 1`.
    """

    code = "PDL002"
    name = "edition"


class UnknownName(Rule):
    """What it does
        Finds names, blocks, keys, arguments, axes and profiles that do not exist.

    Why it is bad
        A key with a typo that is passed over leaves the default in force, and nobody notices.

    Example (bad)
        train { bacth = 16 }

    Better
        train { batch = 16 }

    Fix
        Take the name that the message suggests.
    """

    code = "PDL101"
    name = "unknown-name"


class TypeOrUnit(Rule):
    """What it does
        Checks that a value has the type, the unit and the bounds that its key takes.

    Why it is bad
        A time is no size, and 16.5 samples are no batch.

    Example (bad)
        fault_budget { lose = 1; silence = 30GiB }

    Better
        fault_budget { lose = 1; silence = 30s }

    Fix
        Write a value of the kind that the message names.
    """

    code = "PDL102"
    name = "type-or-unit"


class UnusedName(Rule):
    """What it does
        Warns of a param, let or import that nothing uses.

    Why it is bad
        Somebody sets the param and expects that something changes.

    Example (bad)
        param layers: int = 4
        model "pdsl.models:gpt" { layers = 8 }

    Better
        param layers: int = 4
        model "pdsl.models:gpt" { layers = layers }

    Fix
        Use the name, or delete it.
    """

    code = "PDL103"
    name = "unused-name"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for binding in context.unused:
            name = name_of(binding)
            word = {syntax.Param: "param", syntax.Let: "let", syntax.Import: "import"}[type(binding)]
            yield self.report(f"{word} {name.text} is never used", name.span, help=("use it, or delete it",))


class OverrideOfNothing(Rule):
    """What it does
        Finds overrides, by `--set` or in a profile, of something that the file does not have.

    Why it is bad
        An override with a typo changes nothing.

    Example (bad)
        profile laptop { mesh.pd = 1 }      # the axis is called dp

    Better
        profile laptop { mesh.dp = 1 }

    Fix
        Take the path that the message suggests.
    """

    code = "PDL104"
    name = "override-of-nothing"


class Circle(Rule):
    """What it does
        Finds names and files that need themselves.

    Why it is bad
        Such a name has no value.

    Example (bad)
        let a = b + 1
        let b = a - 1

    Better
        let a = 4
        let b = a - 1

    Fix
        Give one of them a value of its own.
    """

    code = "PDL105"
    name = "circle"


class MissingValue(Rule):
    """What it does
        Finds blocks without a key that they need, calls without an argument that they need, and params without a value.

    Why it is bad
        There is no default that would suit.

    Example (bad)
        pipeline over pp { schedule = one_f_one_b() }

    Better
        pipeline over pp { schedule = one_f_one_b(microbatches = 4) }

    Fix
        Write what the message names.
    """

    code = "PDL106"
    name = "missing-value"


class WrittenTwice(Rule):
    """What it does
        Finds keys, axes, blocks, profiles and names that are written twice.

    Why it is bad
        There are two sources of one truth, and a reader sees only one of them.

    Example (bad)
        train { batch = 16; batch = 32 }

    Better
        train { batch = 32 }

    Fix
        Delete one of the two.
    """

    code = "PDL107"
    name = "written-twice"


class ModelUnreadable(Rule):
    """What it does
        Reports that the factory of the model cannot be found, raises, or gives something that PDSL cannot read.

    Why it is bad
        Without the model its parameters and layers are not known.

    Example (bad)
        model "pdsl.models:gtp" { layers = 4 }

    Better
        model "pdsl.models:gpt" { layers = 4 }

    Fix
        Correct the name or the arguments, or check with `--no-model`.
    """

    code = "PDL108"
    name = "model-unreadable"


class ImportUnreadable(Rule):
    """What it does
        Reports an imported file that is not there.

    Why it is bad
        The names that it should give are unknown.

    Example (bad)
        import "clusters/h20.pdsl" as hw

    Better
        import "clusters/h200.pdsl" as hw

    Fix
        Correct the path; it is relative to the importing file.
    """

    code = "PDL109"
    name = "import-unreadable"


class DataUnreadable(Rule):
    """What it does
        Reports that the data of the `train` block cannot be found, raises, or gives rows that PDSL cannot read.

    Why it is bad
        The model is run once on the first rows to see what flows through it, and a run would fail at its first step.

    Example (bad)
        train { data = "pdsl.data:python_sauce" }

    Better
        train { data = "pdsl.data:python_source" }

    Fix
        Correct the name or the arguments; the data set gives rows that are dicts of tensors.
    """

    code = "PDL802"
    name = "data-unreadable"


class Assertion(Rule):
    """What it does
        Reports an `assert` of the file that does not hold, with the author's own message.

    Why it is bad
        The author of the file says so.

    Example (bad)
        let half = 7 / 2
        assert half * 2 == 8, "an even number of layers, please"

    Better
        let half = 8 / 2
        assert half * 2 == 8, "an even number of layers, please"

    Fix
        Change the values that the assertion compares.
    """

    code = "PDL190"
    name = "assertion"
