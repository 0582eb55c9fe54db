"""Brackets, matched before the parser runs.

A bracket that is missing or too much would make everything after it look wrong. So brackets are matched first, and where the plain match fails, the
lines tell what was meant: a line that is no deeper than the one that opened a bracket, or that can only start a block of its own, ends what is
still open. Each such place is reported, mended in the token stream, and the lines concerned are named, so that the parser reports nothing
else about them. What comes out is always balanced.

Newlines are free inside ( ), [ ] and the braces of a `stage`: the ends of statements there are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from attrs import define, field, frozen

from pdsl.grammar.diagnostics import Diagnostic, Label
from pdsl.grammar.lexer import Token
from pdsl.grammar.source import Source, Span
from pdsl.grammar.tables import END

__all__ = ["CLOSERS", "MAX_DEPTH", "OPENERS", "Balanced", "balance"]

MAX_DEPTH = 64
"""Brackets may be nested so deep, minus signs may be so many in a row: what comes after the parser walks the tree recursively."""

OPENERS = {"_LPAR": "_RPAR", "_LSQB": "_RSQB", "_LBRACE": "_RBRACE"}
CLOSERS = {closer: opener for opener, closer in OPENERS.items()}
_SIGNS = {"_LPAR": "(", "_RPAR": ")", "_LSQB": "[", "_RSQB": "]", "_LBRACE": "{", "_RBRACE": "}"}
_ITEM_WORDS = {"pdsl": ("NUMBER",), "import": ("STRING",), "param": ("NAME",), "let": ("NAME",), "assert": ("NAME", "NUMBER", "_LPAR")}


@frozen
class Balanced:
    """Tokens with balanced brackets. `partners[i]` is the index of the other bracket of a pair, -1 for other tokens."""

    tokens: tuple[Token, ...]
    partners: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
    lines: frozenset[int] = frozenset()
    """1-based numbers of the lines that `diagnostics` are about."""


def balance(source: Source, tokens: Sequence[Token], *, by_lines: bool = False) -> Balanced:
    """Match the brackets of a text. `by_lines` looks at indentation even where brackets match by count (two mistakes may cancel out)."""
    return _Matching(source, tokens, by_lines or not _matches(tokens)).run()


def _matches(tokens: Sequence[Token]) -> bool:
    open_kinds: list[str] = []
    for token in tokens:
        if token.kind in OPENERS:
            open_kinds.append(token.kind)
        elif token.kind in CLOSERS and (not open_kinds or open_kinds.pop() != CLOSERS[token.kind]):
            return False
    return not open_kinds


@define
class _Opener:
    kind: str
    place: int
    """Index in the output."""
    token: Token
    line: int
    indent: int
    """Of the line that it stands on, in columns."""
    stage: bool
    indented: bool | None = None
    """Whether the lines inside are deeper than the one outside; None until the first one is seen."""


@define
class _Matching:
    source: Source
    tokens: Sequence[Token]
    by_lines: bool
    output: list[Token] = field(factory=list)
    partners: list[int] = field(factory=list)
    open: list[_Opener] = field(factory=list)
    found: list[Diagnostic] = field(factory=list)
    lines: set[int] = field(factory=set)
    excess: int = 0
    """Open brackets beyond MAX_DEPTH; they are not tracked one by one."""
    signs: int = 0
    """Minus signs in a row."""
    line: int = 0
    indent: int = 0
    first: bool = False
    """Whether the token at hand is the first on its line. `line`, `indent` and `first` are kept with `by_lines` only."""
    missing_brace_at: int = -1
    """Index of the token before which `{` was left out."""

    def run(self) -> Balanced:
        fresh = True
        for at, token in enumerate(self.tokens):
            if self.by_lines:
                self.first = fresh and token.kind not in ("_END", END)
                if self.first:
                    self._start_line(at)
                fresh = token.kind == "_END" and "\n" in self._text(token)
                if at == self.missing_brace_at:
                    self._supply_brace()
            self._take(at, token)
        return Balanced(tuple(self.output), tuple(self.partners), tuple(self.found), frozenset(self.lines))

    def _take(self, at: int, token: Token) -> None:
        kind = token.kind
        if kind in OPENERS:
            self._open(at, token)
        elif kind in CLOSERS:
            self._close(at, token)
        elif kind == "_END":
            self._end(token)
        elif kind == END:
            while self.open:
                self._unclosed(self.open[-1])
            self._emit(token)
        else:
            self.signs = self.signs + 1 if kind == "MINUS" else 0
            self._emit(token if self.signs <= MAX_DEPTH else token._replace(kind="TOO_DEEP"))
            if kind == "OPEN_STRING" and self.by_lines:
                self._close_inside_string(token)

    def _emit(self, token: Token, partner: int = -1) -> None:
        self.output.append(token)
        self.partners.append(partner)

    def _open(self, at: int, token: Token) -> None:
        if len(self.open) >= MAX_DEPTH:
            self.excess += 1
            self._emit(token._replace(kind="TOO_DEEP"))
            return
        stage = token.kind == "_LBRACE" and self._opens_stage(at)
        self.open.append(_Opener(token.kind, len(self.output), token, self.line, self.indent, stage))
        self._emit(token)

    def _close(self, at: int, token: Token) -> None:
        if self.excess and not (self.by_lines and token.kind == "_RBRACE"):
            self.excess -= 1
            self._emit(token._replace(kind="TOO_DEEP"))
        elif token.kind == "_RBRACE":
            self._close_brace(at, token)
        else:
            self._close_bracket(token)

    def _close_bracket(self, token: Token) -> None:
        wanted = CLOSERS[token.kind]
        inner = [o.kind for o in self._since_brace()]
        if not inner:
            self._stray(token)
        elif wanted not in inner:
            self._mismatched(token)
        else:
            while self.open[-1].kind != wanted:
                self._unclosed(self.open[-1])
            self._pop(token)

    def _close_brace(self, at: int, token: Token) -> None:
        inner = self._since_brace()
        if len(inner) == len(self.open) or self._goes_on(self.open[-1 - len(inner)], at):
            self._stray(token)
            return
        for opener in inner:
            self._unclosed(opener)
        if self.first and any(o.kind == "_LBRACE" and o.indent == self.indent for o in self.open):
            while self.indent < self.open[-1].indent:
                self._unclosed(self.open[-1])
        self._pop(token)

    def _goes_on(self, opener: _Opener, at: int) -> bool:
        """Whether a block of several lines goes on after a `}` that stands at the end of one of its lines, as the next line tells."""
        if not self.by_lines or self.first or opener.line == self.line or "\n" not in self._text(self.tokens[at + 1]):
            return False
        following = self.tokens[at + 2]
        indent = self._indent(following)
        return indent > opener.indent or (indent == opener.indent and following.kind == "_RBRACE")

    def _since_brace(self) -> list[_Opener]:
        """What was opened after the last open brace, innermost first."""
        return list(takewhile(lambda o: o.kind != "_LBRACE", reversed(self.open)))

    def _pop(self, closer: Token) -> None:
        opener = self.open.pop()
        self.excess = 0
        self.partners[opener.place] = len(self.output)
        self._emit(closer, opener.place)

    def _end(self, token: Token) -> None:
        if not self._newlines_free():
            self._emit(token)
            return
        if ";" not in self._text(token):
            return
        if not self.by_lines:
            self._emit(token._replace(kind="SEMICOLON"))
            return
        while self._newlines_free():
            self._unclosed(self.open[-1])
        self._emit(token)

    def _newlines_free(self) -> bool:
        return bool(self.open) and (self.open[-1].kind != "_LBRACE" or self.open[-1].stage)

    def _close_inside_string(self, token: Token) -> None:
        """A string without its closing quote swallows the brackets after it; the string is reported, not the brackets."""
        braced = "}" in self._text(token)
        while self.open and self.open[-1].line == self.line and (braced or self.open[-1].kind != "_LBRACE"):
            self._pop(Token(OPENERS[self.open[-1].kind], token.stop, token.stop))

    # --- what the lines tell ---

    def _start_line(self, at: int) -> None:
        token = self.tokens[at]
        self.line = self.source.position(token.start).line
        self.indent = self._indent(token)
        header = self._is_header(at)
        while token.kind not in CLOSERS and self.open and self._ended_by(self.open[-1], token, header=header):
            self._unclosed(self.open[-1], new_line=True)
        top = self.open[-1] if self.open else None
        if top is None:
            self._look_for_missing_brace(at)
        elif top.kind == "_LBRACE" and top.indented is None:
            top.indented = self.indent > top.indent

    def _ended_by(self, opener: _Opener, token: Token, *, header: bool) -> bool:
        """Whether a line that starts with `token` cannot be inside what `opener` opened on an earlier line."""
        if header:
            return True
        if opener.stage and token.kind == "NAME":
            return True
        if opener.kind == "_LBRACE" and not opener.stage and not opener.indented:
            return False
        return self.indent <= opener.indent

    def _is_header(self, at: int) -> bool:
        """Whether a line starts an item of the file: `name labels {`, or a statement such as `param name`. Blocks don't nest."""
        token = self.tokens[at]
        if token.kind != "NAME" or self._text(token) == "stage":
            return False
        if self.tokens[at + 1].kind in _ITEM_WORDS.get(self._text(token), ()):
            return True
        return self.tokens[self._end_of_labels(at)].kind == "_LBRACE"

    def _end_of_labels(self, at: int) -> int:
        while self.tokens[at].kind in ("NAME", "STRING"):
            at += 1
        return at

    def _look_for_missing_brace(self, at: int) -> None:
        after = self._end_of_labels(at)
        if after == at or self.tokens[at].kind != "NAME" or "\n" not in self._text(self.tokens[after]):
            return
        following = self.tokens[after + 1]
        if following.kind in ("NAME", "STRING") and self._indent(following) > self.indent:
            self.missing_brace_at = after

    def _supply_brace(self) -> None:
        place = self.output[-1].stop
        self._report("`{` is missing after the head of the block", Span(self.source, place, place), "expected `{` here")
        self.lines.add(self.line)
        brace = Token("_LBRACE", place, place)
        self.open.append(_Opener(brace.kind, len(self.output), brace, self.line, self.indent, stage=False))
        self._emit(brace)

    # --- reports, one a line ---

    def _unclosed(self, opener: _Opener, *, new_line: bool = False) -> None:
        """Report a bracket that is never closed and close it after the last token."""
        trailing = self.output[-1] if self.output[-1].kind == "_END" else None
        if trailing is not None:
            self.output.pop()
            self.partners.pop()
        last = self.output[-1]
        closer = OPENERS[opener.kind]
        if opener.line not in self.lines:
            opened = Label(Span(self.source, opener.token.start, opener.token.stop), "opened here")
            place = Span(self.source, last.stop, last.stop)
            self._report(f"`{_SIGNS[opener.kind]}` is never closed", place, f"expected `{_SIGNS[closer]}` here", (opened,))
        self.lines.add(opener.line)
        if opener.kind != "_LBRACE":
            self.lines.update(range(opener.line, self.source.position(last.start).line))
        self._pop(Token(closer, last.stop, last.stop))
        if trailing is not None:
            self._emit(trailing)
        elif new_line:
            self._emit(Token("_END", last.stop, last.stop))

    def _stray(self, token: Token) -> None:
        if self.line not in self.lines:
            span = Span(self.source, token.start, token.stop)
            self._report(f"`{_SIGNS[token.kind]}` closes nothing", span, f"no `{_SIGNS[CLOSERS[token.kind]]}` is open here")
        self.lines.add(self.line)

    def _mismatched(self, token: Token) -> None:
        opener = self.open[-1]
        closer = OPENERS[opener.kind]
        if self.line not in self.lines:
            opened = Label(Span(self.source, opener.token.start, opener.token.stop), "opened here")
            message = f"`{_SIGNS[opener.kind]}` is closed by `{_SIGNS[token.kind]}`"
            self._report(message, Span(self.source, token.start, token.stop), f"expected `{_SIGNS[closer]}`", (opened,))
        self.lines.add(self.line)
        self._pop(token._replace(kind=closer))

    def _report(self, message: str, span: Span, caption: str, labels: tuple[Label, ...] = ()) -> None:
        self.found.append(Diagnostic("PDL001", message, span, caption=caption, labels=labels))

    # --- places ---

    def _text(self, token: Token) -> str:
        return self.source.text[token.start : token.stop]

    def _indent(self, token: Token) -> int:
        """Columns of white space at the start of a token's line, tabs to multiples of 4."""
        start = self.source.text.rfind("\n", 0, token.start) + 1
        return len(self.source.text[start : token.start].lstrip("\ufeff").expandtabs(4))

    def _opens_stage(self, at: int) -> bool:
        if at < 2 or self.tokens[at - 1].kind != "NAME" or self._text(self.tokens[at - 2]) != "stage":
            return False
        return at == 2 or self.tokens[at - 3].kind in ("_END", "_LBRACE")
