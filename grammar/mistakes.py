"""Mistakes that people make, recognised from where the parser stopped, with the help for each."""

from __future__ import annotations

from collections.abc import Callable

from pdsl.grammar.situation import Situation, shown
from pdsl.grammar.tables import END

__all__ = ["helps", "meant_word"]

_ITEM_WORDS = ("pdsl", "import", "param", "let", "assert", "profile")
_FOREIGN_WORDS = {
    "const": "let",
    "var": "let",
    "set": "let",
    "def": "let",
    "use": "import",
    "include": "import",
    "variable": "param",
    "input": "param",
}
_CONNECTIVES = ("and", "or", "not")
_CONTROL = ("if", "else", "for", "while", "in")


def helps(situation: Situation) -> tuple[str, ...]:
    """At most two sentences of help for the mistake that this probably is."""
    return tuple(text for recognise in _MISTAKES if (text := recognise(situation)) is not None)[:2]


def meant_word(s: Situation) -> str | None:
    """The word that a statement of the file should probably start with, where it starts with a name that is close to one."""
    if s.in_block or s.kind(s.first) != "NAME" or s.at == s.first:
        return None
    word = s.text(s.first)
    if word in _FOREIGN_WORDS:
        return _FOREIGN_WORDS[word]
    if word in _ITEM_WORDS or len(word) > 30 or s.has("_LBRACE"):
        return None
    from difflib import get_close_matches  # only errors need it, and it costs a millisecond

    close = get_close_matches(word, _ITEM_WORDS, n=1, cutoff=0.7)
    return close[0] if close else None


def _key_outside_block(s: Situation) -> str | None:
    if s.in_block or s.at != s.first + 1 or s.found.kind not in ("_EQUAL", "_DOT", "_COLON") or s.text(s.first) in _ITEM_WORDS:
        return None
    return (
        f"a key stands in a block, as in `train {{ {shown(s.text(s.first))} = ... }}`; a value with a name of its own is `let NAME = ...`"
    )


def _brace_on_next_line(s: Situation) -> str | None:
    if s.mending is None or s.mending.insert is not None or s.found.kind != "_END":
        return None
    return "`{` stands on the line of the block's name"


def _block_without_braces(s: Situation) -> str | None:
    if (
        s.in_block
        or s.kind(s.first) != "NAME"
        or s.kind(s.first + 1) != "STRING"
        or s.at != s.first + 2
        or s.found.kind not in ("_END", END)
    ):
        return None
    return f"a block has braces, also an empty one: `{shown(s.text(s.first))} {shown(s.text(s.first + 1))} {{ }}`"


def _nested_block(s: Situation) -> str | None:
    if not s.in_block or s.kind(s.first) != "NAME":
        return None
    at = s.first
    while s.kind(at) in ("NAME", "STRING"):
        at += 1
    if s.kind(at) != "_LBRACE":
        return None
    if s.text(s.first) == "stage":
        return "a stage has one name: `stage first { ... }`" if s.at <= at else None
    return "blocks do not stand in blocks; only `stage NAME { ... }` stands in a pipeline"


def _misspelt_item(s: Situation) -> str | None:
    if not s.in_block or s.at != s.first + 1 or s.kind(s.first) != "NAME" or s.found.kind != "NAME":
        return None
    from difflib import get_close_matches  # only errors need it, and it costs a millisecond

    close = get_close_matches(s.text(s.first)[:30], ("axis", "stage"), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def _pattern_without_quotes(s: Situation) -> str | None:
    if not s.has("_ARROW") or s.kind(s.first) == "STRING":
        return None
    if s.found.kind == "_ARROW" and s.at == s.first + 1:
        return '`=>` is for rules, whose pattern stands in quotes: `"pattern" => layout`; a key takes its value with `=`'
    return 'a pattern stands in quotes: `"layers.*.weight" => ...`'


def _rule_with_equal(s: Situation) -> str | None:
    if not s.in_block or s.kind(s.first) != "STRING" or "_ARROW" not in s.expected:
        return None
    return 'a rule is written `"pattern" => layout`'


def _rule_over_lines(s: Situation) -> str | None:
    if s.kind(s.first) != "STRING" or s.found.kind != "_END" or s.kind(s.at - 1) not in ("_COMMA", "_ARROW"):
        return None
    return "a rule stands on one line"


def _colon_for_equal(s: Situation) -> str | None:
    return "a key takes its value with `=`" if s.found.kind == "_COLON" and "_EQUAL" in s.expected else None


def _param_without_type(s: Situation) -> str | None:
    if s.text(s.first) != "param" or s.expected != {"_COLON"}:
        return None
    return "a parameter has a type: `param layers: int = 32`"


def _import_without_name(s: Situation) -> str | None:
    if s.text(s.first) != "import" or "_AS" not in s.expected:
        return None
    return 'an import has a name: `import "cluster.pdsl" as hw`'


def _hyphen_in_name(s: Situation) -> str | None:
    if s.found.kind != "MINUS" or s.kind(s.at - 1) != "NAME" or s.kind(s.at + 1) != "NAME" or "PLUS" in s.expected:
        return None
    return f"names are joined with `_`: `{shown(s.text(s.at - 1))}_{shown(s.text(s.at + 1))}`"


def _bare_point(s: Situation) -> str | None:
    if s.found.kind != "_DOT":
        return None
    if "MISSING" in s.expected and s.kind(s.at + 1) == "NUMBER":
        return f"write 0.{shown(s.text(s.at + 1))}"
    return "a number has digits after its point" if s.kind(s.at - 1) == "NUMBER" else None


def _brace_for_list(s: Situation) -> str | None:
    return "a list is written `[a, b]`" if s.found.kind == "_LBRACE" and "MISSING" in s.expected else None


def _dotted_key(s: Situation) -> str | None:
    if not s.in_block or s.found.kind != "_DOT" or s.at != s.first + 1 or s.has("_ARROW"):
        return None
    return "dotted keys stand in a `profile`; in a block the key stands alone"


def _undotted_path(s: Situation) -> str | None:
    if s.expected != {"_DOT", "_EQUAL"} or s.found.kind != "NAME":
        return None
    return f"the parts of a path are joined with points: `{shown(s.text(s.at - 1))}.{shown(s.text(s.at))}`"


def _whole_as_value(s: Situation) -> str | None:
    return "`_` is a slot of a layout: `[tp, _]`" if s.found.kind == "WHOLE" and "MISSING" in s.expected else None


def _bare_layout(s: Situation) -> str | None:
    if s.kind(s.at - 1) != "NAME" or s.kind(s.at - 2) not in ("_ARROW", "PLUS") or "_LPAR" not in s.expected:
        return None
    return f"a layout is a list of slots or a call: `{shown(s.text(s.at - 1))}()`"


def _comma_between_statements(s: Situation) -> str | None:
    if s.found.kind != "_COMMA" or "_END" not in s.expected or not s.in_block:
        return None
    return "statements end with the line or with `;`"


def _connected_conditions(s: Situation) -> str | None:
    # The words read as names, so the trouble shows a token or two behind them.
    words = [s.text(at) for at in range(max(s.first, s.at - 2), s.at + 1) if s.kind(at) == "NAME"]
    if any(word in _CONNECTIVES for word in words):
        return "conditions are not connected; write one `assert` for each"
    return "the language has no branches and no loops" if any(word in _CONTROL for word in words) else None


_MISTAKES: tuple[Callable[[Situation], str | None], ...] = (
    _key_outside_block, _brace_on_next_line, _block_without_braces, _nested_block, _misspelt_item, _pattern_without_quotes, _rule_with_equal, _rule_over_lines, _colon_for_equal,
    _param_without_type, _import_without_name, _hyphen_in_name, _bare_point, _brace_for_list, _dotted_key, _undotted_path, _whole_as_value,
    _bare_layout, _comma_between_statements, _connected_conditions,
)  # fmt: skip
