"""The syntax tree: what was written, node by node, each with its span.

Nothing is evaluated here. `Missing` stands where the parser recovered from an error; later steps skip it in silence, so that one
mistake gives one diagnostic.
"""

from __future__ import annotations

from fractions import Fraction

from attrs import frozen

from pdsl.grammar.source import Source, Span

__all__ = [
    "Argument",
    "Assert",
    "Assign",
    "Axis",
    "BinaryOperation",
    "Block",
    "Call",
    "Comment",
    "Comparison",
    "Edition",
    "Expression",
    "File",
    "Import",
    "Item",
    "Juxtaposition",
    "Layout",
    "Let",
    "ListOf",
    "Missing",
    "Name",
    "Negation",
    "Number",
    "Override",
    "Param",
    "Path",
    "Profile",
    "RangeOf",
    "Rule",
    "Slot",
    "Slots",
    "StageItem",
    "Statement",
    "String",
    "Sum",
]  # fmt: skip


@frozen
class Name:
    """A single identifier."""

    text: str
    span: Span


@frozen
class Comment:
    """A comment with its `#`; kept beside the tree for the formatter and for `# pdsl: ignore[...]`."""

    text: str
    span: Span


# --- expressions ----------------------------------------------------------------------------------------------------------------------


@frozen
class Missing:
    """An expression that could not be read; it was already reported."""

    span: Span


@frozen
class Number:
    """A number, exact, with the unit glued to it (`30s`, `16GiB`, `5%`) or an empty unit. `decimal` tells `1.0` from `1`."""

    value: Fraction
    unit: str
    decimal: bool
    span: Span


@frozen
class String:
    """A quoted string, escapes resolved. `span` includes the quotes."""

    text: str
    span: Span


@frozen
class Path:
    """A name or dotted names: `half`, `hw.nodes`, `mesh.dp`."""

    names: tuple[Name, ...]
    span: Span

    @property
    def text(self) -> str:
        return ".".join(n.text for n in self.names)


@frozen
class Negation:
    """Unary minus."""

    operand: Expression
    span: Span


@frozen
class BinaryOperation:
    """`left operator right` with one of `+ - * /`."""

    operator: str
    left: Expression
    right: Expression
    span: Span


@frozen
class Comparison:
    """`left operator right` with one of `== != < <= > >=`. Also written inside calls: `when(gain > 5%)`."""

    operator: str
    left: Expression
    right: Expression
    span: Span


@frozen
class RangeOf:
    """`low to high`: an elastic axis."""

    low: Expression
    high: Expression
    span: Span


@frozen
class Argument:
    """One argument of a call; `name` is None for a positional one."""

    name: Name | None
    value: Expression
    span: Span


@frozen
class Call:
    """`callee(arguments)`."""

    callee: Path
    arguments: tuple[Argument, ...]
    span: Span


@frozen
class ListOf:
    """`[a, b, c]`."""

    items: tuple[Expression, ...]
    span: Span


@frozen
class Juxtaposition:
    """A quantity word pair such as `1 epoch` or `5 per 24h`: a value followed by words and values. Kept as its parts."""

    parts: tuple[Expression, ...]
    span: Span


Expression = Missing | Number | String | Path | Negation | BinaryOperation | Comparison | RangeOf | Call | ListOf | Juxtaposition


# --- layouts --------------------------------------------------------------------------------------------------------------------------


@frozen
class Slot:
    """One slot of `[tp, _]`: the axes that split this dim, major first; none for `_`."""

    axes: tuple[Name, ...]
    span: Span


@frozen
class Slots:
    """`[slot, slot]`: one slot per dim of the tensor."""

    slots: tuple[Slot, ...]
    span: Span


@frozen
class Sum:
    """`term + term`: layouts that hold together, such as `colwise(tp) + fsdp(fsdp)`."""

    terms: tuple[Slots | Call, ...]
    span: Span


Layout = Slots | Call | Sum | Missing


# --- statements inside blocks ---------------------------------------------------------------------------------------------------------


@frozen
class Assign:
    """`key = value` in a block."""

    key: Name
    value: Expression
    span: Span


@frozen
class Axis:
    """`axis NAME = SIZE @tag`; tags say which link the axis runs over."""

    name: Name
    size: Expression
    tags: tuple[Name, ...]
    span: Span


@frozen
class Rule:
    """`"pattern", "pattern" => layout` in a block."""

    patterns: tuple[String, ...]
    layout: Layout
    span: Span


@frozen
class StageItem:
    """`stage NAME { "pattern", ... }` in a pipeline block."""

    name: Name
    modules: tuple[String, ...]
    span: Span


Statement = Assign | Axis | Rule | StageItem


# --- items of a file ------------------------------------------------------------------------------------------------------------------


@frozen
class Edition:
    """`pdsl 1`: the edition of the language."""

    number: Number
    span: Span


@frozen
class Import:
    """`import "x.pdsl" as name`."""

    path: String
    alias: Name
    span: Span


@frozen
class Param:
    """`param name: type = default`; without default it must be set from outside."""

    name: Name
    type: Name
    default: Expression | None
    span: Span


@frozen
class Let:
    """`let name = value`."""

    name: Name
    value: Expression
    span: Span


@frozen
class Assert:
    """`assert condition, "message"`."""

    condition: Expression
    message: String | None
    span: Span


@frozen
class Override:
    """`path = value` in a profile."""

    path: Path
    value: Expression
    span: Span


@frozen
class Profile:
    """`profile NAME { path = value ... }`. `damaged`: something in it could not be read, was reported, and is not here."""

    name: Name
    overrides: tuple[Override, ...]
    span: Span
    damaged: bool = False


@frozen
class Block:
    """`keyword labels { statements }`. Labels are names or strings (`over`, `pp`, `"module:factory"`). Which blocks exist is not known here.

    `damaged`: a label or a statement could not be read, was reported, and is not here; so what seems to be missing may have been written.
    """

    keyword: Name
    labels: tuple[Name | String, ...]
    statements: tuple[Statement, ...]
    span: Span
    damaged: bool = False


Item = Edition | Import | Param | Let | Assert | Profile | Block


@frozen
class File:
    """A whole file: its items in order, and its comments in order. `span` is the whole text.

    `damaged`: the text has syntax errors (all reported), so an item or a part of one may be missing here.
    """

    source: Source
    items: tuple[Item, ...]
    comments: tuple[Comment, ...]
    span: Span
    damaged: bool = False
