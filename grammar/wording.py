"""The diagnostic for a syntax error, in the words of those who write specs."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from pdsl.grammar.delimiters import MAX_DEPTH
from pdsl.grammar.diagnostics import Diagnostic, Edit, Fix
from pdsl.grammar.lexer import ERRORS, Token
from pdsl.grammar.mistakes import helps, meant_word
from pdsl.grammar.situation import SIGNS, Situation, describe, expectation, shown
from pdsl.grammar.source import Span
from pdsl.grammar.tables import END

__all__ = ["explain"]


@frozen
class _Words:
    """What is said at a place: message, caption beside the carets, help, repair."""

    message: str
    caption: str
    help: tuple[str, ...] = ()
    fix: Fix | None = None


def explain(situation: Situation) -> Diagnostic:
    """The diagnostic for a situation.

    In this order: a string that is never closed, wherever on the line the trouble showed; a first word that starts no statement but is close to
    one; a place where something was left out; a token that is a mistake by itself; what was found against what was expected.
    """
    open_string = next((t for t in situation.statement if t.kind == "OPEN_STRING"), None)
    word = meant_word(situation)
    if open_string is not None:
        place, words = _extent(situation, open_string), _say_open_string(situation, open_string)
    elif word is not None:
        place, words = _misspelt(situation, word)
    elif situation.glued is not None:
        place, words = _left_out(situation, situation.glued)
    elif situation.found.kind in ERRORS and not (situation.mending and situation.found.kind == "ODD_OPERATOR"):
        place, words = _extent(situation, situation.found), _BY_NAME[situation.found.kind](situation, situation.found)
    else:
        place, words = _extent(situation, situation.found), _unexpected(situation)
    return Diagnostic("PDL001", words.message, place, caption=words.caption, help=words.help, fix=words.fix)


def _extent(situation: Situation, token: Token) -> Span:
    source = situation.source
    if token.kind == "OPEN_STRING":
        return Span(source, token.start, token.start + len(source.text[token.start : token.stop].rstrip()))
    if token.kind not in ("_END", END) or situation.at == 0:
        return Span(source, token.start, token.stop)
    # Ends have no extent worth showing: point behind what stands before them.
    before = situation.tokens[situation.at - 1].stop
    return Span(source, before, before)


def _unexpected(situation: Situation) -> _Words:
    mending, token = situation.mending, situation.found
    found = describe(situation.source, token)
    if mending is None:
        ends = token.kind in ("_END", END)
        message = f"expected {expectation(situation.expected)}, found {found}"
        return _Words(message, "something is missing here" if ends else "cannot stand here", helps(situation))
    if mending.insert is None:
        if token.kind == "_END":
            joined = Edit(Span(situation.source, token.start, situation.tokens[situation.at + 1].start), " ")
            return _Words(
                "expected `{`, found the end of the line", "expected `{` here", helps(situation), Fix("Join the lines", (joined,))
            )
        fix = Fix(f"Remove {found}", (Edit(_extent(situation, token), ""),))
        return _Words(f"{found} has no place here", "remove it", helps(situation), fix)
    wanted = "the end of the line" if mending.insert == "_END" else f"`{SIGNS[mending.insert]}`"
    caption = f"expected {wanted}{'' if mending.drop else ' before this'}"
    return _Words(f"expected {wanted}, found {found}", caption, helps(situation), _change(situation, mending.insert, drop=mending.drop))


def _change(situation: Situation, insert: str, *, drop: bool) -> Fix:
    sign = ";" if insert == "_END" else SIGNS[insert]
    if drop:
        return Fix(f"Write `{sign}`", (Edit(_extent(situation, situation.found), sign),))
    at = situation.tokens[situation.at - 1].stop if situation.at > situation.first else situation.found.start
    return Fix(f"Insert `{sign}`", (Edit(Span(situation.source, at, at), sign if sign in ",:;" else f" {sign}"),))


def _misspelt(situation: Situation, word: str) -> tuple[Span, _Words]:
    first = situation.tokens[situation.first]
    place = Span(situation.source, first.start, first.stop)
    caption = f"did you mean `{word}`?"
    return place, _Words(f"`{shown(place.text)}` starts no statement", caption, (), Fix(f"Write `{word}`", (Edit(place, word),)))


def _left_out(situation: Situation, at: int) -> tuple[Span, _Words]:
    token = situation.tokens[at]
    place = Span(situation.source, token.start, token.stop)
    sign, wanted = (",", "`,`") if situation.in_bracket else (";", "the end of the line")
    before = situation.tokens[at - 1].stop
    fix = Fix(f"Insert `{sign}`", (Edit(Span(situation.source, before, before), sign),))
    return place, _Words(f"expected {wanted} before `{shown(place.text)}`", f"expected {wanted} before this", (), fix)


# --- tokens that are mistakes by themselves -------------------------------------------------------------------------------------------


def _say_open_string(situation: Situation, token: Token) -> _Words:
    return _Words("the string is never closed", 'a `"` without a partner on its line')


def _say_single_quoted(situation: Situation, token: Token) -> _Words:
    if situation.mending is None:
        return _Words("strings stand in double quotes", 'write `"..."`')
    place = _extent(situation, token)
    inner = place.text[1:-1].replace('"', '\\"')
    return _Words("strings stand in double quotes", 'write `"..."`', (), Fix("Use double quotes", (Edit(place, f'"{inner}"'),)))


def _say_odd_operator(situation: Situation, token: Token) -> _Words:
    text = situation.source.text[token.start : token.stop]
    if text in ("//", "/*"):
        return _Words(f"`{text}` starts no comment", "comments start with `#`")
    meant = {"->": ('a rule is written `"pattern" => layout`',), "**": ("patterns stand in quotes; there are no powers of numbers",)}
    return _Words(f"`{text}` is no operator", "the operators are `+ - * /`", meant.get(text, ()))


def _say_odd_number(situation: Situation, token: Token) -> _Words:
    text = situation.source.text[token.start : token.stop]
    plain = text.replace("_", "")
    advice = f"write {shown(plain)}" if plain.isdigit() else "a name does not start with a digit"
    return _Words(f"`{shown(text)}` is neither a number nor a name", "not a number", (advice,))


def _say_odd_character(situation: Situation, token: Token) -> _Words:
    text = situation.source.text[token.start : token.stop]
    message = f"the character `{shown(text)}` has no meaning here"
    if text.isspace():
        return _Words(message, "not a plain blank", ("replace it by a blank",))
    if all(c in "\u201c\u201d\u201e\u2018\u2019" for c in text):
        return _Words(message, "a typographic quote", ('strings stand in plain double quotes: `"..."`',))
    advice = () if text.isascii() else ("other letters than a to z stand in strings and comments only",)
    return _Words(message, "not part of the language", advice)


def _say_semicolon(situation: Situation, token: Token) -> _Words:
    return _Words("`;` inside brackets", "separate with `,`")


def _say_too_deep(situation: Situation, token: Token) -> _Words:
    return _Words(f"more than {MAX_DEPTH} brackets or signs inside each other", "too deep")


_BY_NAME: dict[str, Callable[[Situation, Token], _Words]] = {
    "OPEN_STRING": _say_open_string,
    "SINGLE_QUOTED": _say_single_quoted,
    "ODD_OPERATOR": _say_odd_operator,
    "ODD_NUMBER": _say_odd_number,
    "ODD_CHARACTER": _say_odd_character,
    "SEMICOLON": _say_semicolon,
    "TOO_DEEP": _say_too_deep,
}
