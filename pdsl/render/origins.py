"""Every value of a spec and where it came from: a line, a profile, `--set`, or the default."""

from __future__ import annotations

from pdsl.grammar.patterns import Pattern
from pdsl.grammar.source import Span
from pdsl.lowering.spec import CallValue, OriginKind, Spec, StageSpec
from pdsl.lowering.values import show
from pdsl.render.terminal import PLAIN, Terminal, clip, table

__all__ = ["render_origins", "value_at"]


def render_origins(spec: Spec, terminal: Terminal = PLAIN) -> str:
    """A table of dotted paths, values and origins, in the order of the language. Ends with a newline."""
    rows = [("value", "is", "from")]
    for path, origin in spec.origins:
        told = str(origin)
        if origin.span is not None and not _is_main(spec, origin.span):
            told += f" of {origin.span.source.name}"
        if origin.kind is OriginKind.FILE and origin.detail:
            told += f" (--set {origin.detail})" if "=" in origin.detail else f" ({origin.detail})"
        rows.append((path, clip(value_at(spec, path), 44), terminal.paint(told, "dim") if origin.kind is OriginKind.DEFAULT else told))
    return "\n".join([terminal.heading(f"{spec.name}: every value and where it came from"), *table(rows, width=terminal.width)]) + "\n"


def _is_main(spec: Spec, span: Span) -> bool:
    name = span.source.name.replace("\\", "/").rsplit("/", 1)[-1]
    return name.removesuffix(".pdsl") == spec.name.removesuffix(".pdsl") or name == spec.name


def value_at(spec: Spec, path: str) -> str:
    """The value of a dotted path, as one would write it; empty if the spec has none there."""
    block, _, rest = path.partition(".")
    if block == "mesh":
        axis = spec.mesh.axis(rest)
        return show(axis.size) if axis is not None else ""
    if block == "model":
        return show(dict(spec.model.arguments).get(rest)) if spec.model is not None else ""
    found = getattr(spec, block, None)
    if found is None:
        return ""
    key, _, argument = rest.partition(".")
    value = getattr(found, key, None)
    if argument:
        return show(value.get(argument)) if isinstance(value, CallValue) else ""
    if isinstance(value, tuple) and (block, key) == ("pipeline", "stages"):
        return ", ".join(s.name for s in value if isinstance(s, StageSpec)) or "balanced"
    if isinstance(value, str) and _is_word(block, key):
        return value
    if isinstance(value, Pattern):
        return f'"{value}"'
    return show(value)


def _is_word(block: str, key: str) -> bool:
    """Whether a key takes words, which are written without quotes."""
    from pdsl.lowering.blocks import BLOCKS

    info = BLOCKS[block].key(key) if block in BLOCKS else None
    return info is not None and bool(info.choices)
