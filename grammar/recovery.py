"""The parser proper: runs the tables over balanced tokens, builds nodes, and goes on after an error.

At an error, one diagnostic is made for the statement and then
1. one token is changed if that makes the rest of the statement readable (`:` for `=`, a comma left out), so that the tree is whole; or else
2. the rest of the statement is skipped and, where its beginning can be kept, `Missing` takes the place of the expression: `key = <Missing>`;
3. the head of a block is left at its `{`, so that the statements inside are still read;
4. failing that, the statement is dropped and the place remembered, which marks the block around it as damaged.
Each step either consumes a token or ends the statement, so the parser always ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from pdsl.grammar.automaton import KEEP, SPLICE, Automaton
from pdsl.grammar.builder import Builder
from pdsl.grammar.delimiters import Balanced
from pdsl.grammar.lexer import Token
from pdsl.grammar.situation import Mending, Situation, glued_name
from pdsl.grammar.source import Source, Span
from pdsl.grammar.tables import END
from pdsl.grammar.wording import explain

__all__ = ["Run"]

_REPLACEMENTS = ("_EQUAL", "_ARROW", "_COLON", "_COMMA")
_REPLACED = {*_REPLACEMENTS, "COMPARE", "ODD_OPERATOR"}
_INSERTED = ("_EQUAL", "_COMMA", "_ARROW", "_COLON", "_END")
_REMOVED = set(_REPLACEMENTS)
_ENDS = {"_COMMA": ("_END",)}
_LOOKAHEAD = 200
"""A change is tried on so many tokens of the rest of a statement at most."""


@define
class Run:
    """One pass over the tokens of a text. `run()` leaves the finished items with the builder."""

    source: Source
    balanced: Balanced
    automaton: Automaton
    builder: Builder
    tokens: tuple[Token, ...] = field(init=False)
    functions: dict[str, Callable[[list[Any], Span], Any]] = field(init=False)
    at: int = 0
    states: list[int] = field(init=False)
    values: list[Any] = field(factory=list)
    starts: list[int] = field(factory=list)
    stops: list[int] = field(factory=list)
    # One entry a block that is open, the first for the file: the height of the stack of states where its statement at hand started, and
    # the index of that statement's first token.
    bases: list[int] = field(init=False)
    firsts: list[int] = field(init=False)
    suspicious: bool = False
    """An error showed at the start of a line inside a bracket of an earlier line that is no less deep: a `)` may be missing."""

    def __attrs_post_init__(self) -> None:
        self.tokens = self.balanced.tokens
        self.functions = self.builder.functions()
        self.states = [self.automaton.tables.start]
        self.bases, self.firsts = [1], [0]

    def run(self) -> None:
        """Parse to the end of the text, or until the sink is full."""
        tokens, kind_of, source, actions = self.tokens, self.automaton.kind, self.source, self.automaton.tables.actions
        while True:
            token = tokens[self.at]
            kind = kind_of(source, token, self.states[-1])
            # Reductions change the stack before an error shows; what was expected is told by the stack before them.
            before = self.states.copy() if actions[self.states[-1]].get(kind, 0) < 0 else self.states
            if self._feed(token, kind):
                if kind == END:
                    return
                self.at += 1
                self._note_statement(token)
            elif self.builder.sink.full or not self._recover(before):
                self.builder.damaged = True
                return

    def _note_statement(self, token: Token) -> None:
        if token.kind == "_END":
            self.bases[-1], self.firsts[-1] = len(self.states), self.at
        elif token.kind == "_LBRACE" and not self._of_stage(self.at - 1):
            self.bases.append(len(self.states))
            self.firsts.append(self.at)
        elif token.kind == "_RBRACE" and not self._of_stage(self.at - 1):
            self.bases.pop()
            self.firsts.pop()

    def _of_stage(self, at: int) -> bool:
        """Whether a brace belongs to a `stage`, which is a statement itself: blocks hold braces only there."""
        if self.tokens[at].kind == "_RBRACE":
            return self.balanced.partners[at] >= self.firsts[-1]
        return len(self.bases) > 1

    # --- the machine with values ---

    def _feed(self, token: Token, kind: str) -> bool:
        actions, heads, modes = self.automaton.tables.actions, self.automaton.heads, self.automaton.modes
        states = self.states
        while True:
            action = actions[states[-1]].get(kind)
            if action is None:
                return kind == END and states[-1] == self.automaton.tables.accept
            if action >= 0:
                states.append(action)
                self.values.append(token)
                self.starts.append(token.start)
                self.stops.append(token.stop)
                return True
            number = -1 - action
            origin, length = heads[number]
            if length != 1 or origin[0] != "_":
                self._reduce(number, token)
                continue
            # More than half of all reductions are steps such as `_sum: _product`, where only the state changes.
            if modes[number][0] == KEEP:
                self.values[-1] = [self.values[-1]]
            states[-1] = actions[states[-2]][origin]

    def _reduce(self, number: int, ahead: Token) -> None:
        origin, length = self.automaton.heads[number]
        states, values, starts, stops = self.states, self.values, self.starts, self.stops
        children: list[Any] = []
        if length == 0:
            start = stop = ahead.start
        else:
            start, stop = starts[-length], stops[-1]
            modes = self.automaton.modes[number]
            parts = values[-length:]
            if modes[0] == SPLICE:
                children = parts[0]  # nobody else holds it, and copying would make long lists quadratic
            elif modes[0] == KEEP:
                children.append(parts[0])
            for mode, value in zip(modes[1:], parts[1:], strict=True):
                if mode == KEEP:
                    children.append(value)
                elif mode == SPLICE:
                    children += value
            del states[-length:], values[-length:], starts[-length:], stops[-length:]
        if origin[0] == "_":
            values.append(children)
        elif self.automaton.tables.productions[number].transparent:
            values.append(children[0])
        else:
            values.append(self.functions[origin](children, Span(self.source, start, stop)))
        starts.append(start)
        stops.append(stop)
        states.append(self.automaton.tables.actions[states[-1]][origin])

    def _cut(self, height: int) -> None:
        """Take states and values off the stack until `height` states are left."""
        del self.states[height:], self.values[height - 1 :], self.starts[height - 1 :], self.stops[height - 1 :]

    # --- errors ---

    def _recover(self, before: list[int]) -> bool:
        """Report, and find a place to go on from; False where there is none."""
        at = self.at
        mending = self._find_mending()
        sync = self._end_of_statement(at)
        situation = Situation(
            source=self.source,
            tokens=self.tokens,
            at=at,
            first=self.firsts[-1],
            expected=self.automaton.expected(before),
            in_block=len(self.bases) > 1,
            in_bracket=self._bracket_around(at) is not None,
            mending=mending,
        )
        self.suspicious = self.suspicious or self._looks_unclosed(situation.glued or at)
        self.builder.damaged = True
        if not self._already_reported(sync):
            self.builder.sink.add(explain(situation))
        if mending is not None:
            self._mend(mending)
            return True
        return self._resume(sync)

    def _already_reported(self, sync: int) -> bool:
        """Whether a line of the statement had its report when brackets were matched."""
        lines = self.balanced.lines
        if not lines:
            return False
        first, last = self.tokens[min(self.firsts[-1], self.at)], self.tokens[max(sync - 1, self.at)]
        start, stop = self.source.position(first.start).line, self.source.position(last.start).line
        return any(line in lines for line in range(start, stop + 1))

    def _bracket_around(self, at: int) -> int | None:
        """Index of the innermost ( or [ of the statement that is open at a token."""
        for index in range(at - 1, self.firsts[-1] - 1, -1):
            if self.balanced.partners[index] > at:
                return None if self.tokens[index].kind == "_LBRACE" else index
        return None

    def _looks_unclosed(self, at: int) -> bool:
        token = self.tokens[at]
        text = self.source.text
        opener = self._bracket_around(at)
        if opener is None:
            return False
        line, outer = (text.rfind("\n", 0, place) + 1 for place in (token.start, self.tokens[opener].start))
        fresh = line != outer and not text[line : token.start].strip()
        return fresh and _indent(text, line) <= _indent(text, outer)

    def _end_of_statement(self, at: int) -> int:
        """Index of the token where the statement around `at` ends: its end, the brace that closes its block, or the `{` of its own block."""
        tokens, partners, first = self.tokens, self.balanced.partners, self.firsts[-1]
        heads_block = len(self.bases) == 1 and not any(partners[i] > at for i in range(first, at))
        while tokens[at].kind not in ("_END", END):
            partner = partners[at]
            if partner > at:
                if heads_block and tokens[at].kind == "_LBRACE":
                    return at
                at = partner
            elif 0 <= partner < first:
                return at
            at += 1
        return at

    def _find_mending(self) -> Mending | None:
        token = self.tokens[self.at]
        kind = token.kind
        if glued_name(self.tokens, self.at, self.firsts[-1]) is not None:
            return None
        candidates: list[tuple[str | None, bool]] = []
        if kind == "SINGLE_QUOTED":
            closed = token.stop - token.start > 1 and self.source.text[token.stop - 1] == "'"
            candidates = [("STRING", True)] if closed else []
        elif kind in _REPLACED:
            candidates = [(sign, True) for sign in (*_REPLACEMENTS, *_ENDS.get(kind, ())) if sign != kind]
        candidates += [(sign, False) for sign in _INSERTED]
        joins = kind == "_END" and self.tokens[self.at + 1].kind == "_LBRACE"
        if kind in _REMOVED or joins:
            candidates.append((None, True))
        for insert, drop in candidates:
            if self._readable(insert, self.at + drop):
                return Mending(insert, drop)
        return None

    def _readable(self, insert: str | None, at: int) -> bool:
        """Whether the statement fits to its end with a terminal put in before the token at `at`."""
        automaton = self.automaton
        stack: list[int] | None = self.states
        if insert is not None:
            stack = automaton.after(self.states, insert)
        for index in range(at, min(at + _LOOKAHEAD, len(self.tokens))):
            if stack is None:
                return False
            token = self.tokens[index]
            stack = automaton.after(stack, automaton.kind(self.source, token, stack[-1]))
            ends_block = 0 <= self.balanced.partners[index] < self.firsts[-1]
            if token.kind in ("_END", END) or ends_block or (token.kind == "_LBRACE" and len(self.bases) == 1):
                break
        return stack is not None

    def _mend(self, mending: Mending) -> None:
        token = self.tokens[self.at]
        if mending.drop:
            self.at += 1
        if mending.insert == "STRING":
            self._feed(token._replace(kind="STRING"), "STRING")
        elif mending.insert is not None:
            self._feed(Token(mending.insert, token.start, token.start), mending.insert)
            if mending.insert == "_END":
                self._note_statement(Token("_END", token.start, token.start))

    def _resume(self, sync: int) -> bool:
        """Bring the stack to where the token at `sync` fits, keeping as much of the statement as can be kept."""
        token = self.tokens[sync]
        damaged_at = self.tokens[self.at].start
        if token.kind == "_LBRACE":
            self.builder.drops.append(damaged_at)
            self._open_block(token)
            self.at = sync
            return True
        base = self.bases[-1]
        if not self._put_missing(sync, base):
            self.builder.drops.append(damaged_at)
            complete = self.at > 0 and self.tokens[self.at - 1].kind == "_RBRACE"
            if not (complete and self.automaton.accepts(self.states, token.kind)):
                self._cut(base)
        self.at = sync
        if self.automaton.accepts(self.states, token.kind):
            return True
        if token.kind != "_END":
            return False
        # An end right after an end: the statement in between is gone.
        self.at = sync + 1
        self.firsts[-1] = self.at
        return True

    def _put_missing(self, sync: int, base: int) -> bool:
        """Let `Missing` take the place of the innermost expression after which the statement can end."""
        kind = self.tokens[sync].kind
        for height in range(len(self.states), base, -1):
            if self.automaton.accepts(self.states[:height], "MISSING", kind):
                start = self.stops[height - 2]
                stop = max(start, self.tokens[sync - 1].stop)
                self._cut(height)
                self._feed(Token("MISSING", start, stop), "MISSING")
                return True
        return False

    def _open_block(self, brace: Token) -> None:
        """Make the `{` of a damaged head fit; a name that is not there is left empty, and the builder drops such a block."""
        base = self.bases[-1]
        for height in range(len(self.states), base - 1, -1):
            if height > base and self.automaton.accepts(self.states[:height], "_LBRACE"):
                self._cut(height)
                return
            if self.automaton.accepts(self.states[:height], "NAME", "_LBRACE"):
                self._cut(height)
                self._feed(Token("NAME", brace.start, brace.start), "NAME")
                return
        self._cut(base)


def _indent(text: str, line: int) -> int:
    stop = line
    while stop < len(text) and text[stop] in " \t":
        stop += 1
    return len(text[line:stop].expandtabs(4))
