"""The LALR(1) machine over the tables: states alone, without values. It answers what may come next and runs ahead to try things out."""

from __future__ import annotations

from functools import cached_property

from attrs import frozen

from pdsl.grammar.lexer import Token
from pdsl.grammar.source import Source
from pdsl.grammar.tables import END, Tables

__all__ = ["KEEP", "SKIP", "SPLICE", "Automaton"]


SKIP, KEEP, SPLICE = range(3)
"""What becomes of a child: nodes and terminals with meaning are kept; of what starts with an underscore, rules are spliced into the list of
children and terminals are left out."""


@frozen(eq=False, slots=False)
class Automaton:
    """What the tables say, asked with a stack of states that is never changed."""

    tables: Tables

    @cached_property
    def keywords(self) -> dict[str, str]:
        """Word -> terminal of the contextual keywords."""
        return self.tables.keywords

    @cached_property
    def terminals(self) -> frozenset[str]:
        return frozenset({"MISSING", END, *(t.name for t in self.tables.terminals)})

    @cached_property
    def heads(self) -> tuple[tuple[str, int], ...]:
        """Origin and length of each production."""
        return tuple((p.origin, len(p.symbols)) for p in self.tables.productions)

    @cached_property
    def modes(self) -> tuple[tuple[int, ...], ...]:
        """SKIP, KEEP or SPLICE for each symbol of each production."""
        return tuple(tuple(_mode(symbol) for symbol in p.symbols) for p in self.tables.productions)

    def kind(self, source: Source, token: Token, state: int) -> str:
        """The terminal that a token is in a state: a word is a keyword only where a keyword can stand."""
        if token.kind != "NAME":
            return token.kind
        keyword = self.keywords.get(source.text[token.start : token.stop])
        return keyword if keyword is not None and keyword in self.tables.actions[state] else "NAME"

    def after(self, states: list[int], kind: str) -> list[int] | None:
        """The stack after shifting a terminal (after accepting, for the end of the text), or None where it does not fit."""
        actions = self.tables.actions
        stack = states
        while True:
            action = actions[stack[-1]].get(kind)
            if action is None:
                return stack if kind == END and stack[-1] == self.tables.accept else None
            if action >= 0:
                return [*stack, action]
            origin, length = self.heads[-1 - action]
            stack = stack[: len(stack) - length]
            stack.append(actions[stack[-1]][origin])

    def accepts(self, states: list[int], *kinds: str) -> bool:
        """Whether terminals fit one after the other."""
        for kind in kinds:
            following = self.after(states, kind)
            if following is None:
                return False
            states = following
        return True

    def expected(self, states: list[int]) -> frozenset[str]:
        """The terminals that fit next."""
        candidates = self.terminals & self.tables.actions[states[-1]].keys()
        return frozenset(kind for kind in candidates if self.after(states, kind) is not None)


def _mode(symbol: str) -> int:
    if not symbol.startswith("_"):
        return KEEP
    return SKIP if symbol.isupper() else SPLICE
