"""Where the parser stands when it cannot go on, and the words of the language's users for it: what was found, what was expected."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from pdsl.grammar.lexer import Token
from pdsl.grammar.source import Source
from pdsl.grammar.tables import END

__all__ = ["SIGNS", "Mending", "Situation", "describe", "expectation", "glued_name", "shown"]

SIGNS = {
    "_ARROW": "=>", "_EQUAL": "=", "PLUS": "+", "MINUS": "-", "STAR": "*", "SLASH": "/", "_LPAR": "(", "_RPAR": ")", "_LSQB": "[", "_RSQB": "]",
    "_LBRACE": "{", "_RBRACE": "}", "_COMMA": ",", "_COLON": ":", "_DOT": ".", "_AT": "@", "WHOLE": "_",
    "_EDITION": "pdsl", "_IMPORT": "import", "_AS": "as", "_PARAM": "param", "_LET": "let", "_ASSERT": "assert", "_PROFILE": "profile", "_TO": "to",
    "AXIS": "axis", "STAGE": "stage",
}  # fmt: skip
_NOUNS = {"NAME": "a name", "NUMBER": "a number", "STRING": "a string in quotes", "COMPARE": "a comparison"}
_VALUE_STARTS = {"NUMBER", "STRING", "NAME", "MINUS", "_LPAR", "_LSQB", "MISSING"}
_LAYOUT_STARTS = {"NAME", "_LSQB", "MISSING"}
_GOES_ON = {"PLUS", "MINUS", "STAR", "SLASH", "_TO", "_DOT", "_LPAR", "COMPARE", "NAME", "NUMBER"}
_ITEM_STARTS = {"_EDITION", "_IMPORT", "_PARAM", "_LET", "_ASSERT", "_PROFILE", "NAME"}
_STATEMENT_STARTS = {"AXIS", "STAGE", "NAME", "STRING"}
_ODD = r"[^\x20-\x7e\xa1-\xac\xae-\u024f\u0370-\u1fff\u4e00-\u9fff]"  # compiled when first used: few texts have errors


@frozen
class Mending:
    """A change of one token that makes the rest of the statement readable. `insert` is a terminal to put in, `drop` takes the found one out."""

    insert: str | None
    drop: bool


@frozen
class Situation:
    """Where a parser stands that cannot go on."""

    source: Source
    tokens: Sequence[Token]
    at: int
    """Index of the token that does not fit."""
    first: int
    """Index of the first token of the statement."""
    expected: frozenset[str]
    in_block: bool
    in_bracket: bool
    mending: Mending | None

    @property
    def found(self) -> Token:
        return self.tokens[self.at]

    @property
    def statement(self) -> Sequence[Token]:
        """The tokens of the statement, up to the end of its line."""
        stop = self.first
        while self.kind(stop) not in ("_END", END):
            stop += 1
        return self.tokens[self.first : max(stop, self.at)]

    @property
    def glued(self) -> int | None:
        """Index of a name that the parser took for the unit of a number, as in `lr = 1 beta = 2`: something is missing before it."""
        return glued_name(self.tokens, self.at, self.first)

    def kind(self, at: int) -> str:
        return self.tokens[at].kind if 0 <= at < len(self.tokens) else END

    def text(self, at: int) -> str:
        token = self.tokens[at]
        return self.source.text[token.start : token.stop]

    def has(self, kind: str) -> bool:
        """Whether the statement has a token of this kind on its line."""
        return any(token.kind == kind for token in self.statement)


def glued_name(tokens: Sequence[Token], at: int, first: int) -> int | None:
    """Where the token at `at` follows `number name ...` and shows that the first of the names starts something new: that name's index."""
    if tokens[at].kind not in ("_EQUAL", "_COLON", "_DOT", "_LPAR", "_LBRACE", "STRING"):
        return None
    name = at
    while name > first and tokens[name - 1].kind == "NAME":
        name -= 1
    return name if first < name < at and tokens[name - 1].kind == "NUMBER" else None


def shown(text: str, limit: int = 30) -> str:
    """Text of the user for a message: short, on one line, odd characters as `U+XXXX`."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return re.sub(_ODD, lambda c: f"U+{ord(c[0]):04X}", text)


def describe(source: Source, token: Token) -> str:
    """A token in user words: `the number `16``, `the end of the line`."""
    text = source.text[token.start : token.stop]
    if token.kind == END:
        return "the end of the file"
    if token.kind == "_END":
        return "`;`" if text.startswith(";") else "the end of the line"
    if token.kind in ("NAME", "NUMBER", "STRING"):
        return f"the {token.kind.lower()} {'' if token.kind == 'STRING' else '`'}{shown(text)}{'' if token.kind == 'STRING' else '`'}"
    return f"`{shown(text or SIGNS.get(token.kind, ''))}`"


def expectation(expected: frozenset[str]) -> str:
    """What may stand here, in user words, at most four things."""
    rest = set(expected)
    words: list[str] = []
    for starts, word in ((_ITEM_STARTS, "a statement or a block"), (_STATEMENT_STARTS, "a statement")):
        if rest >= starts:
            rest -= starts
            words.append(word)
    if "MISSING" in rest and "NUMBER" in rest:
        rest -= _VALUE_STARTS
        words.append("a value")
    elif "MISSING" in rest:
        rest -= _LAYOUT_STARTS
        words.append("a layout")
    elif "WHOLE" in rest:
        rest -= {"WHOLE", "NAME", "_LPAR"}
        words += ["an axis", "`_`", "`(`"]
    if {"STAR", "SLASH"} <= rest or {"PLUS", "_LPAR"} <= rest:
        rest -= _GOES_ON if rest - _GOES_ON else set()
    if "_END" in rest:
        rest -= {"_END", END} if words else {"_END", END, "_RBRACE"}
        words.append("the end of the line")
    words += sorted((_NOUNS.get(kind) or f"`{SIGNS[kind]}`") for kind in rest if kind != END)
    if not words:
        return "the end of the file"
    words = words[:4]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
