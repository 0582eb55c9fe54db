"""Leaves: every value that a file writes, by dotted path, and what profiles and `--set` put in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from attrs import evolve, field, frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, Label
from pdsl.grammar.parser import parse
from pdsl.grammar.source import Source, Span
from pdsl.lowering.blocks import BLOCKS, Statements
from pdsl.lowering.evaluate import suggest
from pdsl.lowering.names import Scope
from pdsl.lowering.spec import Origin, OriginKind
from pdsl.lowering.values import near

__all__ = ["Leaf", "Leaves", "Setting", "collect", "override", "parse_setting"]

_WRAPPER = "pdsl 1; profile set { "


@frozen
class Leaf:
    """One written value. `place` is where the file writes it (the key if an override replaced the value). `arguments` are overrides of single
    arguments, for values that are calls.
    """

    path: str
    expression: syntax.Expression
    origin: Origin
    place: Span
    arguments: tuple[tuple[str, syntax.Expression, Origin, Span], ...] = ()


@frozen(eq=False)
class Leaves:
    """The blocks of a file and their leaves. Only the first of two blocks of a kind counts. `misspelt` are paths that were probably meant by
    unknown keys, so that they are not called missing as well.
    """

    blocks: dict[str, syntax.Block] = field(factory=dict)
    leaves: dict[str, Leaf] = field(factory=dict)
    broken: set[str] = field(factory=set)
    misspelt: set[str] = field(factory=set)

    def paths(self) -> tuple[str, ...]:
        """Every path that an override may name."""
        keys = (f"{b.name}.{k.name}" for b in BLOCKS.values() if b.implicit or b.name in self.blocks for k in b.keys)
        return tuple(dict.fromkeys((*self.leaves, *keys)))


@frozen
class Setting:
    """One override: the path, the value and who asked for it."""

    names: tuple[str, ...]
    expression: syntax.Expression
    origin: Origin
    span: Span

    @property
    def path(self) -> str:
        return ".".join(self.names)


# --- what the file writes -------------------------------------------------------------------------------------------------------------------


def collect(file: syntax.File, sink: DiagnosticSink) -> Leaves:
    """The leaves of a file. Unknown blocks and keys, and what is written twice, land in the sink."""
    leaves = Leaves()
    written = [item for item in file.items if isinstance(item, syntax.Block)]
    for block in written:
        _block(block, leaves, sink)
    # a block that seems to be missing may have been written, under another name or where the text is damaged
    meant = [near(b.keyword.text, tuple(BLOCKS)) for b in written if b.keyword.text not in BLOCKS]
    leaves.broken.update(name for name in BLOCKS if name not in leaves.blocks and (file.damaged or name in meant or None in meant))
    return leaves


def _block(block: syntax.Block, leaves: Leaves, sink: DiagnosticSink) -> None:
    word = block.keyword
    info = BLOCKS.get(word.text)
    if info is None:
        sink.add(Diagnostic("PDL101", f"unknown block {word.text}", word.span, help=suggest(word.text, tuple(BLOCKS))))
        return
    first = leaves.blocks.setdefault(word.text, block)
    if first is not block:
        _twice(f"block {word.text}", word.span, first.keyword.span, sink, "a file has one of each block; move the keys into the first")
        return
    if block.damaged:
        leaves.broken.add(info.name)
    for statement in block.statements:
        path, allowed = _statement(info.name, info.statements, statement)
        if not allowed:
            sink.add(Diagnostic("PDL102", _misplaced(info.name, info.statements), statement.span))
            leaves.broken.add(info.name)
        elif isinstance(statement, syntax.Assign) and info.statements is Statements.KEYS and info.key(statement.key.text) is None:
            keys = tuple(k.name for k in info.keys)
            leaves.misspelt.add(f"{info.name}.{near(statement.key.text, keys)}")
            sink.add(
                Diagnostic(
                    "PDL101", f"{info.name} has no key {statement.key.text}", statement.key.span, help=suggest(statement.key.text, keys)
                )
            )
        elif isinstance(statement, syntax.Assign | syntax.Axis):
            _add(path, statement, leaves, sink)


def _statement(block: str, holds: Statements, statement: syntax.Statement) -> tuple[str, bool]:
    match statement:
        case syntax.Axis():
            return f"{block}.{statement.name.text}", holds is Statements.AXES
        case syntax.Assign():
            return f"{block}.{statement.key.text}", holds in (Statements.KEYS, Statements.ARGUMENTS)
        case syntax.Rule():
            return "", holds is Statements.RULES
        case syntax.StageItem():
            return "", block == "pipeline"


def _misplaced(block: str, holds: Statements) -> str:
    match holds:
        case Statements.AXES:
            return f"{block} holds axes: axis NAME = SIZE"
        case Statements.RULES:
            return f'{block} holds rules: "pattern" => layout'
        case _:
            return f"{block} holds keys: KEY = VALUE" + (' and stages: stage NAME { "pattern" }' if block == "pipeline" else "")


def _add(path: str, statement: syntax.Assign | syntax.Axis, leaves: Leaves, sink: DiagnosticSink) -> None:
    name = statement.name if isinstance(statement, syntax.Axis) else statement.key
    value = statement.size if isinstance(statement, syntax.Axis) else statement.value
    if path in leaves.leaves:
        _twice(path, name.span, leaves.leaves[path].place, sink, "delete one of the two")
        return
    leaves.leaves[path] = Leaf(path, value, Origin(OriginKind.FILE, value.span), name.span)


def _twice(what: str, span: Span, first: Span, sink: DiagnosticSink, help_: str) -> None:
    message = f"{what} is written twice, in lines {first.begin.line} and {span.begin.line}"
    sink.add(Diagnostic("PDL107", message, span, caption="second", labels=(Label(first, "first"),), help=(help_,)))


# --- overrides ------------------------------------------------------------------------------------------------------------------------------


def parse_setting(text: str, sink: DiagnosticSink) -> Setting | None:
    """The setting that `--set TEXT` means. What is no expression counts as a string, since shells take quotes off. None after a PDL104."""
    source = Source("--set", text)
    whole = Span(source, 0, len(text))
    name, equal, value = text.partition("=")
    names = tuple(part.strip() for part in name.split("."))
    if not equal or not all(part.isidentifier() for part in names):
        sink.add(Diagnostic("PDL104", f"--set {text} is no setting", whole, help=("write --set name=value or --set block.key=value",)))
        return None
    quiet = DiagnosticSink()
    file = parse(Source("--set", f"{_WRAPPER}{text}\n}}"), quiet)
    expression: syntax.Expression = syntax.String(value.strip(), Span(source, len(name) + 1, len(text)))
    found = [one.value for item in file.items if isinstance(item, syntax.Profile) for one in item.overrides]
    if not quiet.diagnostics and len(file.items) == 2 and len(found) == 1:
        expression = _moved(found[0], source, len(_WRAPPER))
    return Setting(names, expression, Origin(OriginKind.SET, None, text), Span(source, 0, len(name)))


def _moved(node: Any, source: Source, by: int) -> Any:
    """The same tree with its spans in another source, `by` characters earlier."""
    if isinstance(node, Span):
        return Span(source, max(0, node.start - by), min(len(source.text), node.stop - by))
    if isinstance(node, tuple):
        return tuple(_moved(part, source, by) for part in node)
    if not attrs.has(type(node)):
        return node
    return type(node)(**{a.name: _moved(getattr(node, a.name), source, by) for a in attrs.fields(type(node))})


def override(leaves: Leaves, scope: Scope, settings: Iterable[Setting], sink: DiagnosticSink) -> None:
    """Put settings in place, later ones over earlier ones. A setting of something that does not exist is a PDL104."""
    for setting in settings:
        if len(setting.names) == 1:
            _override_param(scope, setting, leaves, sink)
        elif not _override_leaf(leaves, setting) and setting.names[0] not in leaves.broken:
            message = f"there is no {setting.path} to override"
            sink.add(Diagnostic("PDL104", message, setting.span, help=_instead(setting, leaves, scope)))


def _override_param(scope: Scope, setting: Setting, leaves: Leaves, sink: DiagnosticSink) -> None:
    name = setting.path
    if name in scope.params:
        who = f"--set {setting.origin.detail}" if setting.origin.kind is OriginKind.SET else f"profile {setting.origin.detail}"
        scope.given[name] = (setting.expression, who)
        return
    if name in scope.bindings:
        word = type(scope.bindings[name]).__name__.lower()
        help_: tuple[str, ...] = (f"{name} is written with `{word}`; only a `param` is set from outside",)
        sink.add(Diagnostic("PDL104", f"{name} is no param", setting.span, help=help_))
        return
    sink.add(Diagnostic("PDL104", f"there is no param {name} to override", setting.span, help=_instead(setting, leaves, scope)))


def _override_leaf(leaves: Leaves, setting: Setting) -> bool:
    block, key, *rest = setting.names
    path = f"{block}.{key}"
    leaf = leaves.leaves.get(path)
    if len(rest) > 1:
        return False
    if rest:
        if leaf is None:
            return False
        argument = (rest[0], setting.expression, setting.origin, setting.span)
        leaves.leaves[path] = evolve(leaf, arguments=(*(a for a in leaf.arguments if a[0] != rest[0]), argument))
        return True
    if leaf is not None:
        origin = evolve(setting.origin, span=setting.expression.span if setting.origin.kind is OriginKind.PROFILE else leaf.place)
        leaves.leaves[path] = Leaf(path, setting.expression, origin, leaf.place)
        return True
    info = BLOCKS.get(block)
    if info is None or info.key(key) is None or not (info.implicit or block in leaves.blocks):
        return False
    origin = evolve(setting.origin, span=setting.expression.span if setting.origin.kind is OriginKind.PROFILE else None)
    leaves.leaves[path] = Leaf(path, setting.expression, origin, setting.span)
    return True


def _instead(setting: Setting, leaves: Leaves, scope: Scope) -> tuple[str, ...]:
    block = setting.names[0]
    options = (*scope.params, *leaves.paths())
    if len(setting.names) == 1:
        ends = [p for p in options if p.split(".")[-1] == block]
        if ends:
            return (f"did you mean {ends[0]}?",)
    if block in BLOCKS and block not in leaves.blocks and not BLOCKS[block].implicit:
        return (f"this file has no block {block}",)
    meant = near(setting.path, options)
    if meant is not None:
        return (f"did you mean {meant}?",)
    inside = [p for p in options if p.startswith(f"{block}.")] or list(scope.params)
    return (f"one of: {', '.join(inside)}",) if 0 < len(inside) <= 12 else ()
