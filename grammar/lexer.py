"""Text to tokens. Terminals come from the grammar's tables; to them this module adds the ones that only mistakes make.

The lexer never fails: what fits no terminal becomes a token of one of `ERRORS`, which no rule of the grammar accepts, so the parser reports
it like any other unexpected token, once per statement.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from attrs import frozen

from pdsl.grammar.source import Source, Span
from pdsl.grammar.syntax import Comment
from pdsl.grammar.tables import END, Tables

__all__ = ["ERRORS", "MAX_TOKENS", "Lexed", "Token", "tokenize"]

MAX_TOKENS = 100_000
"""A text of more tokens (or comments) is not read further: a spec has a few hundred, and the time of the parser must be bounded."""

# Kinds of token that are always mistakes. The ones before `|` are tried before the grammar's terminals, the others after.
_EARLY = {
    "ODD_OPERATOR": r"->|:=|\*\*|&&|\|\||//|/\*",
    "ODD_NUMBER": r"[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+[A-Za-z0-9]*+_[A-Za-z0-9_]*+",
}
_LATE = {
    "OPEN_STRING": r'"[^\n]*',
    "SINGLE_QUOTED": r"'[^'\n]*'?",
    "ODD_CHARACTER": r"[^\x00-\x7f]+|[\x00-\x08\x0e-\x1f\x7f]+|[\s\S]",
}
ERRORS = frozenset({*_EARLY, *_LATE, "SEMICOLON", "TOO_DEEP"})
"""`SEMICOLON` (inside brackets) and `TOO_DEEP` (a bracket) are made by the matching of delimiters."""


class Token(NamedTuple):
    """A terminal's name and the half-open range of characters it covers; empty for a token that a repair put in."""

    kind: str
    start: int
    stop: int


@frozen
class Lexed:
    """Tokens up to and with the end of the text, and the comments. `cut` is where reading stopped, if the text is too long."""

    tokens: tuple[Token, ...]
    comments: tuple[Comment, ...]
    cut: int | None = None


def tokenize(source: Source, tables: Tables) -> Lexed:
    """Tokens and comments of a text. A byte order mark at the start is skipped; successive ends of a statement become one."""
    text = source.text
    skipped = tables.ignored
    tokens: list[Token] = []
    comments: list[Comment] = []
    last = ""
    for found in _pattern(tables).finditer(text, 1 if text.startswith("\ufeff") else 0):
        kind = found.lastgroup or ""
        if kind in skipped:
            if kind == "COMMENT":
                start, stop = found.span()
                stop = start + len(text[start:stop].rstrip("\r"))
                comments.append(Comment(text[start:stop], Span(source, start, stop)))
                if len(comments) >= MAX_TOKENS:
                    return Lexed((*tokens, Token(END, stop, stop)), tuple(comments), cut=stop)
            continue
        start, stop = found.span()
        if kind == "_END" == last:
            if ";" in found.group():
                tokens[-1] = tokens[-1]._replace(stop=stop)
            continue
        tokens.append(Token(kind, start, stop))
        last = kind
        if len(tokens) >= MAX_TOKENS:
            tokens.append(Token(END, stop, stop))
            return Lexed(tuple(tokens), tuple(comments), cut=stop)
    tokens.append(Token(END, len(text), len(text)))
    return Lexed(tuple(tokens), tuple(comments))


@cache
def _pattern(tables: Tables) -> re.Pattern[str]:
    pairs = [*_EARLY.items(), *((t.name, t.pattern) for t in tables.terminals if not t.keyword), *_LATE.items()]
    return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in pairs))
