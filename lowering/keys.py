"""Reading keys by the table: from leaves to typed values with defaults filled and origins kept."""

from __future__ import annotations

from attrs import evolve, field, frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, Label
from pdsl.grammar.patterns import Pattern
from pdsl.grammar.source import Span
from pdsl.lowering.blocks import BLOCKS, CallInfo, KeyInfo, Kind
from pdsl.lowering.coerce import coerce
from pdsl.lowering.evaluate import Evaluator, suggest
from pdsl.lowering.leaves import Leaf, Leaves
from pdsl.lowering.names import Scope
from pdsl.lowering.spec import CallValue, Origin, OriginKind, Value
from pdsl.lowering.text_patterns import pattern
from pdsl.lowering.values import UNKNOWN, Evaluated, Unknown, near

__all__ = ["KeyReader", "default_of"]

_DEFAULT = Origin(OriginKind.DEFAULT)


def default_of(key: KeyInfo) -> Value:
    """The default of a key; the defaults of a call's arguments are filled in."""
    value = key.default
    if not isinstance(value, CallValue):
        return value
    info = key.call(value.name)
    if info is None:
        return value
    given = dict(value.keywords)
    return evolve(value, keywords=tuple((k.name, v) for k in info.keywords if (v := given.get(k.name, default_of(k))) is not None))


@frozen(eq=False)
class KeyReader:
    """Reads the values of one file. `values` and `origins` collect what was read, by dotted path; `broken` the blocks with a reported value."""

    leaves: Leaves
    scope: Scope
    evaluator: Evaluator
    sink: DiagnosticSink
    values: dict[str, Evaluated] = field(factory=dict)
    origins: dict[str, Origin] = field(factory=dict)
    broken: set[str] = field(factory=set)

    def block(self, name: str) -> dict[str, Value | Pattern] | None:
        """All keys of a block, or None if it is not written (and has no meaning unwritten) or something in it was reported."""
        info = BLOCKS[name]
        if name not in self.leaves.blocks and not info.implicit:
            return None
        read = {key.name: self.key(name, key) for key in info.keys}
        if any(isinstance(v, Unknown) for v in read.values()):
            self.broken.add(name)
        return None if name in self.broken else {k: v for k, v in read.items() if not isinstance(v, Unknown)}

    def key(self, block: str, key: KeyInfo) -> Value | Pattern | Unknown:
        """The value of one key."""
        path = f"{block}.{key.name}"
        leaf = self.leaves.leaves.get(path)
        if leaf is None:
            if path in self.leaves.misspelt or (block in self.leaves.blocks and self.leaves.blocks[block].damaged):
                return UNKNOWN  # it was probably written, under another name or where the text could not be read
            if key.required:
                return self._absent(block, key)
            self._keep(path, key, default_of(key), _DEFAULT)
            return default_of(key)
        self.origins[path] = self.origin(leaf)
        value = self._value(leaf, key)
        if not isinstance(value, Pattern):
            self.values[path] = value
        return value

    def origin(self, leaf: Leaf) -> Origin:
        """The origin of a leaf; the override of a param that it names is told too."""
        names = leaf.expression.names if isinstance(leaf.expression, syntax.Path) else ()
        given = self.scope.given.get(names[0].text) if len(names) == 1 else None
        return evolve(leaf.origin, detail=given[1]) if given is not None and leaf.origin.kind is OriginKind.FILE else leaf.origin

    def _absent(self, block: str, key: KeyInfo) -> Unknown:
        where = self.leaves.blocks[block].keyword.span
        examples = (
            f", such as {key.examples}"
            if key.examples and not key.calls
            else f": {', '.join(c.name for c in key.calls)}"
            if key.calls
            else ""
        )
        self.sink.add(
            Diagnostic("PDL106", f"{block} needs the key {key.name}", where, help=(f"{key.name} takes {key.kind.value}{examples}",))
        )
        self.values[f"{block}.{key.name}"] = UNKNOWN
        return UNKNOWN

    def _keep(self, path: str, key: KeyInfo, value: Value, origin: Origin) -> None:
        self.values[path] = value
        self.origins[path] = origin
        if isinstance(value, CallValue):
            for name, inner in value.keywords:
                self.values[f"{path}.{name}"] = inner
                self.origins[f"{path}.{name}"] = origin

    def _value(self, leaf: Leaf, key: KeyInfo) -> Value | Pattern | Unknown:
        node = leaf.expression
        if key.kind is Kind.PATTERN and isinstance(node, syntax.String):
            found = pattern(node, self.evaluator, self.scope)
            return UNKNOWN if found is None else found
        if key.calls:
            call = self._call_written(node, key)
            if call is not None:
                return self._call(leaf, call, key)
        if leaf.arguments:
            name, _, _, span = leaf.arguments[-1]
            self._report("PDL104", f"there is no {leaf.path}.{name} to override: {leaf.path} is no call here", span)
            return UNKNOWN
        if key.kind is Kind.CALL:
            if not isinstance(node, syntax.Missing):
                self._not_a_call(leaf, key)
            return UNKNOWN
        return coerce(self.evaluator.evaluate(node, self.scope, key.choices), key, leaf.path, node.span, self.sink)

    # --- calls ------------------------------------------------------------------------------------------------------------------------------

    def _call_written(self, node: syntax.Expression, key: KeyInfo) -> syntax.Call | None:
        """The call that an expression means: itself, the bare name of a call, or a `let` that holds one."""
        if isinstance(node, syntax.Call):
            return node
        if not isinstance(node, syntax.Path) or len(node.names) != 1:
            return None
        if key.call(node.text) is not None:
            return syntax.Call(node, (), node.span)
        binding = self.scope.bindings.get(node.text)
        if isinstance(binding, syntax.Let) and isinstance(binding.value, syntax.Call):
            self.scope.used.add(node.text)
            self.scope.values[node.text] = UNKNOWN
            return binding.value
        return None

    def _not_a_call(self, leaf: Leaf, key: KeyInfo) -> None:
        node, names = leaf.expression, tuple(c.name for c in key.calls)
        if isinstance(node, syntax.Path) and node.names[0].text not in self.scope.bindings:
            self._unknown_call(leaf.path, node, names)
            return
        self._report("PDL102", f"{leaf.path} takes a call, not {node.span.text}", node.span, f"one of: {', '.join(names)}")

    def _unknown_call(self, path: str, name: syntax.Path, names: tuple[str, ...]) -> None:
        self._report("PDL101", f"{path} knows no {name.text}", name.span, *suggest(name.text, names))

    def _call(self, leaf: Leaf, call: syntax.Call, key: KeyInfo) -> Value | Unknown:
        info = key.call(call.callee.text)
        if info is None:
            self._unknown_call(leaf.path, call.callee, tuple(c.name for c in key.calls))
            return UNKNOWN
        given, positional, sound = self._arguments(leaf, call, info)
        keywords: list[tuple[str, Value]] = []
        for k in info.keywords:
            path = f"{leaf.path}.{k.name}"
            value = self._keyword(path, k, given, call, info)
            self.values[path] = value
            if isinstance(value, Unknown):
                sound = False
            elif value is not None:
                keywords.append((k.name, value))
        for name, (node, origin, _) in given.items():
            if info.open and info.keyword(name) is None:
                opened = self.evaluator.evaluate(node, self.scope)
                self.origins[f"{leaf.path}.{name}"] = origin
                opened = coerce(opened, KeyInfo(name, Kind.VALUE, ""), f"{leaf.path}.{name}", node.span, self.sink)
                sound = sound and not isinstance(opened, Unknown)
                keywords.append((name, None if isinstance(opened, Unknown) else opened))
        return CallValue(info.name, positional, tuple(keywords), call.callee.span) if sound else UNKNOWN

    def _keyword(
        self, path: str, key: KeyInfo, given: dict[str, tuple[syntax.Expression, Origin, Span]], call: syntax.Call, info: CallInfo
    ) -> Value | Unknown:
        if key.name not in given:
            if path in self.leaves.misspelt or any(a.name is None for a in call.arguments[len(info.positional) :]):
                return UNKNOWN  # it was probably written, under another name or without one
            if key.required:
                self._report(
                    "PDL106", f"{call.callee.text} needs {key.name}", call.callee.span, f"{call.callee.text}({key.name} = {_example(key)})"
                )
                return UNKNOWN
            self.origins[path] = _DEFAULT
            return default_of(key)
        node, origin, _ = given[key.name]
        self.origins[path] = origin
        value = self.evaluator.evaluate(node, self.scope, key.choices)
        return coerce(value, key, path, node.span, self.sink)

    def _arguments(
        self, leaf: Leaf, call: syntax.Call, info: CallInfo
    ) -> tuple[dict[str, tuple[syntax.Expression, Origin, Span]], tuple[Value, ...], bool]:
        """Keyword arguments by name, the values of the positional ones, and whether all was sound."""
        given: dict[str, tuple[syntax.Expression, Origin, Span]] = {}
        positional: list[Value] = []
        sound = True
        for argument in call.arguments:
            if argument.name is None:
                value = self._positional(leaf, argument, info, len(positional))
                sound = sound and not isinstance(value, Unknown)
                positional.append(None if isinstance(value, Unknown) else value)
            elif argument.name.text in given:
                first = given[argument.name.text][2]
                message = f"{argument.name.text} is written twice in {info.name}(...)"
                self.sink.add(Diagnostic("PDL107", message, argument.name.span, caption="second", labels=(Label(first, "first"),)))
                sound = False
            elif info.keyword(argument.name.text) is None and not info.open:
                self.leaves.misspelt.add(f"{leaf.path}.{near(argument.name.text, [k.name for k in info.keywords])}")
                self._report(
                    "PDL101", f"{info.name} has no argument {argument.name.text}", argument.name.span, *_legal(argument.name.text, info)
                )
                sound = False
            else:
                origin = self.origin(Leaf("", argument.value, evolve(leaf.origin, span=argument.value.span), argument.name.span))
                given[argument.name.text] = (argument.value, origin, argument.name.span)
        for k in info.positional[len(positional) :]:
            if k.required:
                self._report("PDL106", f"{info.name} needs {k.name}, {k.help}", call.callee.span)
                sound = False
        for name, node, origin, span in leaf.arguments:
            if info.keyword(name) is None and not info.open:
                self._report(
                    "PDL104", f"there is no {leaf.path}.{name} to override: {info.name} has no argument {name}", span, *_legal(name, info)
                )
                sound = False
                continue
            place = given[name][0].span if name in given else call.callee.span
            given[name] = (node, evolve(origin, span=node.span if origin.kind is OriginKind.PROFILE else place), span)
        return given, tuple(positional), sound

    def _positional(self, leaf: Leaf, argument: syntax.Argument, info: CallInfo, index: int) -> Value | Unknown:
        node = argument.value
        if index >= len(info.positional):
            names = ", ".join(f"{k.name} = ..." for k in info.keywords) or "no arguments"
            self._report("PDL102", f"{info.name} takes its arguments by name", node.span, f"{info.name} takes {names}")
            return UNKNOWN
        key = info.positional[index]
        path = f"{leaf.path}.{key.name}"
        self.origins[path] = evolve(leaf.origin, span=node.span)
        if key.kind is not Kind.CONDITION:
            return coerce(self.evaluator.evaluate(node, self.scope), key, path, node.span, self.sink)
        if not isinstance(node, syntax.Comparison) or not isinstance(node.left, syntax.Path) or node.left.text != key.name:
            self._report("PDL102", f"{path} takes a comparison of {key.name}", node.span, f"such as {key.examples}")
            return UNKNOWN
        right = self.evaluator.evaluate(node.right, self.scope)
        bound = coerce(right, KeyInfo(key.name, Kind.NUMBER, ""), path, node.right.span, self.sink)
        return UNKNOWN if isinstance(bound, Unknown) else CallValue(node.operator, (key.name, bound))

    def _report(self, code: str, message: str, span: Span, *help_: str) -> None:
        self.sink.add(Diagnostic(code, message, span, help=help_))


def _legal(name: str, info: CallInfo) -> tuple[str, ...]:
    names = tuple(k.name for k in info.keywords)
    return suggest(name, names) if names else (f"{info.name} takes no arguments",)


def _example(key: KeyInfo) -> str:
    return key.examples.split(",")[0] or "..."
