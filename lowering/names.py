"""The names of a file: its params, lets and imports, and the files behind the imports."""

from __future__ import annotations

import posixpath
from collections.abc import Callable

from attrs import field, frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, Label
from pdsl.grammar.parser import parse
from pdsl.grammar.source import Source
from pdsl.lowering.values import Evaluated

__all__ = ["Binding", "Loader", "Scope", "build_scope"]

Loader = Callable[[str], str | None]
"""Gives the text of a file by its path, or None if there is none."""

_MOST_FILES = 64

Binding = syntax.Param | syntax.Let | syntax.Import


@frozen(eq=False)
class Scope:
    """The names of one file. `values` remembers what was evaluated, `active` what is being evaluated, `used` what was asked for.

    `given` holds the params that were set from outside: name -> (value, the text that set it).
    """

    source: Source
    bindings: dict[str, Binding] = field(factory=dict)
    imports: dict[str, Scope | None] = field(factory=dict)
    values: dict[str, Evaluated] = field(factory=dict)
    active: list[str] = field(factory=list)
    used: set[str] = field(factory=set)
    given: dict[str, tuple[syntax.Expression, str]] = field(factory=dict)

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name for name, b in self.bindings.items() if isinstance(b, syntax.Param))

    def unused(self) -> tuple[Binding, ...]:
        """Bindings that nothing asked for, in the order of the text."""
        return tuple(b for name, b in self.bindings.items() if name not in self.used)


def name_of(binding: Binding) -> syntax.Name:
    """Where a binding says its name."""
    return binding.alias if isinstance(binding, syntax.Import) else binding.name


def build_scope(file: syntax.File, loader: Loader | None, sink: DiagnosticSink) -> Scope:
    """The scope of a file with all files that it imports. Imports are relative to the importing file; what goes wrong lands in the sink."""
    return _Imports(loader, sink).scope(file, (posixpath.normpath(file.source.name),))


@frozen(eq=False)
class _Imports:
    loader: Loader | None
    sink: DiagnosticSink
    loaded: dict[str, Scope | None] = field(factory=dict)

    def scope(self, file: syntax.File, chain: tuple[str, ...]) -> Scope:
        scope = Scope(file.source)
        for item in file.items:
            if isinstance(item, syntax.Param | syntax.Let | syntax.Import):
                self._bind(scope, item, chain)
        return scope

    def _bind(self, scope: Scope, item: Binding, chain: tuple[str, ...]) -> None:
        name = name_of(item)
        first = scope.bindings.setdefault(name.text, item)
        if first is not item:
            self.sink.add(
                Diagnostic(
                    "PDL107",
                    f"{name.text} is given a meaning twice",
                    name.span,
                    caption="second",
                    labels=(Label(name_of(first).span, "first"),),
                    help=("rename one of them, or delete it",),
                )
            )
            return
        if isinstance(item, syntax.Import):
            scope.imports[name.text] = self._load(item, chain)

    def _load(self, item: syntax.Import, chain: tuple[str, ...]) -> Scope | None:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(chain[-1]), item.path.text))
        if path in chain:
            ring = " -> ".join((*chain[chain.index(path) :], path))
            self._report(
                "PDL105",
                f"files import each other in a circle: {ring}",
                item,
                "a file cannot need itself; move the shared names into a third file",
            )
            return None
        if path in self.loaded:
            return self.loaded[path]
        if len(self.loaded) >= _MOST_FILES:
            self._report("PDL109", f"more than {_MOST_FILES} files are imported", item)
            return None
        text = self.loader(path) if self.loader is not None else None
        if text is None:
            self._report("PDL109", f'cannot read "{item.path.text}"', item, f"looked for {path}; paths are relative to the importing file")
            self.loaded[path] = None
            return None
        self.loaded[path] = scope = self.scope(parse(Source(path, text), self.sink), (*chain, path))
        return scope

    def _report(self, code: str, message: str, item: syntax.Import, *help_: str) -> None:
        self.sink.add(Diagnostic(code, message, item.path.span, help=help_))
