"""What the parser says about single mistakes: the place, the words, the help, the repair, and what is left of the tree."""

from __future__ import annotations

import pytest

from pdsl.grammar.diagnostics import Diagnostic, Safety
from pdsl.grammar.syntax import Assign, Axis, Block, Juxtaposition, Let, Missing, Number, Param, Rule
from tests.grammar.reading import clean, place, read


def only(text: str) -> Diagnostic:
    _, found = read("pdsl 1\n" + text)
    (one,) = found
    return one


def repaired(text: str, diagnostic: Diagnostic) -> str:
    assert diagnostic.fix is not None
    for edit in sorted(diagnostic.fix.edits, key=lambda e: -e.span.start):
        text = text[: edit.span.start] + edit.text + text[edit.span.stop :]
    return text


def statements(text: str) -> list[object]:
    file, _ = read("pdsl 1\n" + text)
    block = file.items[1]
    assert isinstance(block, Block)
    return list(block.statements)


# text after `pdsl 1`, place, message, part of the help or caption
MISTAKES = [
    ('model "net:build"', "2:18-18", "expected `{`, a name or a string in quotes, found the end of the file", '`model "net:build" { }`'),
    ("train { batch: 16 }", "2:14-15", "expected `=`, found `:`", "a key takes its value with `=`"),
    ("train { batch 16 }", "2:15-17", "expected `=`, found the number `16`", "expected `=` before this"),
    ("train { batch => 16 }", "2:15-17", "expected `=`, found `=>`", "`=>` is for rules"),
    ("train { batch == 16 }", "2:15-17", "expected `=`, found `==`", "expected `=`"),
    ("train { batch := 16 }", "2:15-17", "expected `=`, found `:=`", "expected `=`"),
    ('shard { "a" = f(x) }', "2:13-14", "expected `=>`, found `=`", 'a rule is written `"pattern" => layout`'),
    ('shard { "a" -> f(x) }', "2:13-15", "expected `=>`, found `->`", 'a rule is written `"pattern" => layout`'),
    ("shard { layers.*.w => f(x) }", "2:15-16", "expected `=`, found `.`", 'a pattern stands in quotes: `"layers.*.weight" => ...`'),
    ('shard { "a" => replicate }', "2:26-27", "expected `(` or `.`, found `}`", "`replicate()`"),
    ('shard { "a" => [tp _] }', "2:20-21", "expected `,`, found `_`", "expected `,` before this"),
    ('shard { "a" => [tp, 3] }', "2:21-22", "expected an axis, `_`, `(` or `]`, found the number `3`", "cannot stand here"),
    ('shard {\n "a",\n}', "3:6-6", "expected a string in quotes, found the end of the line", "a rule stands on one line"),
    ("train { a = _ }", "2:13-14", "expected a value, found `_`", "`_` is a slot of a layout"),
    ("train { a = {1} }", "2:13-14", "expected a value, found `{`", "a list is written `[a, b]`"),
    ("train { a = [x y] }", "2:16-17", "expected `,`, found the name `y`", "expected `,` before this"),
    ("train { a = f(x 1) }", "2:17-18", "expected `=`, found the number `1`", "expected `=` before this"),
    ("train { a = f(x = 1 y = 2) }", "2:21-22", "expected `,` before `y`", "expected `,` before this"),
    ("train { a = 1 b = 2 }", "2:15-16", "expected the end of the line before `b`", "expected the end of the line before this"),
    ('train { a = "x" b = 2 }', "2:17-18", "expected the end of the line, found the name `b`", "expected the end of the line before this"),
    ("train { a = 1, b = 2 }", "2:14-15", "expected the end of the line, found `,`", "statements end with the line or with `;`"),
    ("train {\n  a = 1,\n}", "3:8-9", "`,` has no place here", "remove it"),
    ("train { a = }", "2:13-14", "expected a value, found `}`", "cannot stand here"),
    ("train {\n  a =  # nothing\n}", "3:6-6", "expected a value, found the end of the line", "something is missing here"),
    ("train { a = .5 }", "2:13-14", "expected a value, found `.`", "write 0.5"),
    ("train { a = 5. }", "2:14-15", "expected the end of the line, found `.`", "a number has digits after its point"),
    ("train { a = 100_000 }", "2:13-20", "`100_000` is neither a number nor a name", "write 100000"),
    ("train { a = 1 // 2 }", "2:15-17", "`//` starts no comment", "comments start with `#`"),
    ("train { a = 2 ** 3 }", "2:15-17", "`**` is no operator", "no powers"),
    ("train { a = f(1; 2) }", "2:16-18", "`;` inside brackets", "separate with `,`"),
    ("train { a = $x }", "2:13-14", "the character `$` has no meaning here", "not part of the language"),
    ("train { a = \u201cx\u201d }", "2:13-14", "the character `U+201C` has no meaning here", "plain double quotes"),
    ("train { a =\u00a01 }", "2:12-13", "the character `U+00A0` has no meaning here", "replace it by a blank"),
    ("train { a = 'x' }", "2:13-16", "strings stand in double quotes", 'write `"..."`'),
    ('train {\n  a = "x\n}', "3:7-9", "the string is never closed", "without a partner"),
    ('train {\n  a = rows("x.csv)\n}', "3:12-19", "the string is never closed", "without a partner"),
    ('shard {\n  a" => f()\n}', "3:4-12", "the string is never closed", "without a partner"),
    (r'train { a = "c:\data" }', "2:16-18", r"`\d` is no escape", "a backslash is written"),
    ('train { a = "x\x00" }', "2:15-16", "a string cannot hold the character U+0000", "remove it"),
    ("train { a = 1e309 }", "2:13-18", "the exponent of a number lies between -308 and 308", "309"),
    ("train { a = 1e999999999 }", "2:13-24", "the exponent of a number lies between -308 and 308", "999999999"),
    (f"train {{ a = {'1' * 61} }}", "2:13-74", "a number has at most 60 digits", "61 digits"),
    ("train { weight-decay = 1 }", "2:15-16", "expected `=`, found `-`", "`weight_decay`"),
    ("train { mesh.dp = 1 }", "2:13-14", "expected `=`, found `.`", "dotted keys stand in a `profile`"),
    ("train { adamw { lr = 3 } }", "2:15-16", "expected `=`, found `{`", "blocks do not stand in blocks"),
    ('pipeline over pp { stage { "a" } }', "2:26-27", "expected `=` or a name, found `{`", "a stage has one name"),
    ("mesh { axis pp 2 }", "2:16-17", "expected `=`, found the number `2`", "expected `=` before this"),
    ("mesh { axis pp = 2 to }", "2:23-24", "expected a value, found `}`", "cannot stand here"),
    ("mesh { axiss pp = 2 }", "2:14-16", "expected `=`, found the name `pp`", "did you mean `axis`?"),
    ('pipeline over pp { stge a { "x" } }', "2:25-26", "expected `=`, found the name `a`", "did you mean `stage`?"),
    ("batch = 16", "2:7-8", "expected `{`, a name or a string in quotes, found `=`", "a key stands in a block"),
    ('improt "x" as hw', "2:1-7", "`improt` starts no statement", "did you mean `import`?"),
    ("parm n: int", "2:1-5", "`parm` starts no statement", "did you mean `param`?"),
    ("const n = 3", "2:1-6", "`const` starts no statement", "did you mean `let`?"),
    ("param layers = 32", "2:14-15", "expected `:`, found `=`", "`param layers: int = 32`"),
    ('import "x.pdsl"', "2:16-16", "expected `as`, found the end of the file", "an import has a name"),
    ("let n =", "2:8-8", "expected a value, found the end of the file", "something is missing here"),
    ("assert a == 1 and b == 2", "2:21-23", "expected the end of the line or `,`, found `==`", "one `assert` for each"),
    ("train\n{\n  a = 1\n}", "2:6-6", "expected `{`, found the end of the line", "`{` stands on the line of the block's name"),
    (
        "train { a = 1 } mesh { }",
        "2:17-21",
        "expected the end of the line, found the name `mesh`",
        "expected the end of the line before this",
    ),
    ('"x" { a = 1 }', "2:1-4", 'expected a statement or a block, found the string "x"', "cannot stand here"),
    ("profile p { mesh dp = 1 }", "2:18-20", "expected `.` or `=`, found the name `dp`", "`mesh.dp`"),
    ("profile { mesh.dp = 1 }", "2:9-10", "expected a name, found `{`", "cannot stand here"),
]


@pytest.mark.parametrize(("text", "where", "message", "advice"), MISTAKES, ids=[m[0][:30] for m in MISTAKES])
def test_a_mistake_is_named_at_its_place(text: str, where: str, message: str, advice: str) -> None:
    found = only(text)
    assert (found.code, place(found.span), found.message) == ("PDL001", where, message)
    assert advice in " | ".join((found.caption, *found.help))


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("train { batch : 16 }", "train { batch = 16 }"),
        ("train { batch 16 }", "train { batch = 16 }"),
        ('shard { "a" = f(x) }', 'shard { "a" => f(x) }'),
        ("train { a = f(x = 1 y = 2) }", "train { a = f(x = 1, y = 2) }"),
        ("train { a = 1 b = 2 }", "train { a = 1; b = 2 }"),
        ("train { a = 1, b = 2 }", "train { a = 1; b = 2 }"),
        ("train {\n  a = 1,\n}", "train {\n  a = 1\n}"),
        ("train { a = 'x' }", 'train { a = "x" }'),
        ("train\n{\n  a = 1\n}", "train {\n  a = 1\n}"),
        ('improt "x" as hw', 'import "x" as hw'),
        ("train { a = [x y] }", "train { a = [x, y] }"),
    ],
)
def test_a_repair_makes_the_text_sound(text: str, mended: str) -> None:
    text, mended = "pdsl 1\n" + text, "pdsl 1\n" + mended
    _, (found,) = read(text)
    assert repaired(text, found) == mended
    clean(mended)


# --- the edition ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_a_missing_edition_is_reported_with_a_safe_fix(start: str) -> None:
    text = start + "# about\ntrain { a = 1 }\n"
    _, (found,) = read(text)
    assert (found.code, found.message, place(found.span)) == ("PDL002", "the file does not say its edition", "2:1-6")
    assert found.fix is not None
    assert found.fix.safety is Safety.SAFE
    assert repaired(text, found) == start + "pdsl 1\n# about\ntrain { a = 1 }\n"
    clean(repaired(text, found))


@pytest.mark.parametrize(("edition", "shown"), [("2", "2"), ("1.0", "1.0"), ("1s", "1s"), ("0", "0")])
def test_an_unknown_edition_is_reported(edition: str, shown: str) -> None:
    _, (found,) = read(f"pdsl {edition}\ntrain {{ }}\n")
    assert (found.code, found.message) == ("PDL002", f"edition {shown} is not known; this PDSL reads edition 1")
    assert place(found.span) == f"1:6-{6 + len(edition)}"


def test_an_edition_in_the_wrong_place_or_twice_is_reported() -> None:
    _, (late,) = read("train { }\npdsl 1\n")
    assert (late.code, late.message, place(late.span)) == ("PDL002", "the edition is not the first statement of the file", "2:1-7")
    _, (twice,) = read("pdsl 1\npdsl 1\n")
    assert (twice.code, twice.message, place(twice.span)) == ("PDL002", "the edition is written twice", "2:1-7")


def test_a_damaged_first_line_is_not_also_called_a_missing_edition() -> None:
    for text in ("pdls 1\ntrain { }\n", "pdsl\ntrain { }\n", "pdsl one\n", "pdsl: 1\n"):
        _, found = read(text)
        assert [d.code for d in found] == ["PDL001"], text


def test_an_edition_is_still_missed_when_a_later_line_is_damaged() -> None:
    _, found = read("train { a = 1 }\nmesh { axis }\n")
    assert [d.code for d in found] == ["PDL002", "PDL001"]


# --- the tree after an error ----------------------------------------------------------------------------------------------------------


def test_a_changed_sign_leaves_the_statement_whole() -> None:
    assign, axis = statements("train { batch: 16; axis pp 2 }")
    assert isinstance(assign, Assign)
    assert isinstance(assign.value, Number)
    assert assign.value.value == 16
    assert isinstance(axis, Axis)
    assert isinstance(axis.size, Number)


@pytest.mark.parametrize(
    "text", ["train { a = }", "train { a = f(x = ) }", "train { a = [1 $] }", "train { a = 1 2 }", "train { a = $ + 3 }"]
)
def test_missing_stands_for_what_could_not_be_read(text: str) -> None:
    (assign,) = statements(text)
    assert isinstance(assign, Assign)
    assert assign.key.text == "a"
    assert isinstance(assign.value, Missing)


def test_missing_stands_for_layouts_sizes_defaults_and_values_of_names() -> None:
    rule, axis = statements('b { "x" => tp; axis pp = ; }')
    assert isinstance(rule, Rule)
    assert isinstance(rule.layout, Missing)
    assert rule.patterns[0].text == "x"
    assert isinstance(axis, Axis)
    assert isinstance(axis.size, Missing)
    file, found = read("pdsl 1\nparam n: int =\nlet m =\n")
    assert len(found) == 2
    param, let = file.items[1:]
    assert isinstance(param, Param)
    assert isinstance(param.default, Missing)
    assert isinstance(let, Let)
    assert isinstance(let.value, Missing)


def test_what_is_dropped_marks_its_block_and_no_other() -> None:
    file, found = read("pdsl 1\ntrain {\n  a = 1\n  ! what\n  b = 2\n}\nmesh { axis pp = 2 }\n")
    assert len(found) == 1
    assert file.damaged
    train, mesh = file.items[1:]
    assert isinstance(train, Block)
    assert isinstance(mesh, Block)
    assert (train.damaged, mesh.damaged) == (True, False)
    assert [s.key.text for s in train.statements if isinstance(s, Assign)] == ["a", "b"]


def test_a_damaged_head_keeps_its_block_and_the_errors_inside_are_found() -> None:
    file, found = read("pdsl 1\npipeline over 3 {\n  a = 1\n  b 2\n  c = 3\n}\n")
    assert [place(d.span) for d in found] == ["2:15-16", "4:5-6"]
    block = file.items[1]
    assert isinstance(block, Block)
    assert block.damaged
    assert [s.key.text for s in block.statements if isinstance(s, Assign)] == ["a", "b", "c"]


@pytest.mark.parametrize("head", ["5 {", '"x" "y" {', "profile {", "let {", "= {", "pipeline = over {", "5 = {", "param x: {"])
def test_errors_inside_a_block_are_found_whatever_its_head(head: str) -> None:
    inside = "  mesh.x 1" if head == "profile {" else "  a: 1"
    _, found = read(f"pdsl 1\n{head}\n{inside}\n}}\nlet x = \n")
    assert [d.span.begin.line for d in found if d.span] == [2, 3, 5]


def test_a_number_beyond_measure_is_missing_and_the_rest_stands() -> None:
    first, second, third = statements("b { a = 1e400; c = 2; d = 5 per 1e400 }")
    assert isinstance(first, Assign)
    assert isinstance(first.value, Missing)
    assert isinstance(second, Assign)
    assert isinstance(second.value, Number)
    assert isinstance(third, Assign)
    assert isinstance(third.value, Missing)
    (sound,) = statements("b { d = 5 per 1e30s }")
    assert isinstance(sound, Assign)
    assert isinstance(sound.value, Juxtaposition)


def test_findings_stop_at_the_limit_of_the_sink() -> None:
    text = "pdsl 1\nb {\n" + "  a:: 1\n" * 80 + "}\n"
    assert len(read(text)[1]) == 50
    assert len(read(text, limit=7)[1]) == 7
    file, _ = read(text, limit=1)
    assert file.damaged


def test_one_statement_has_one_finding_however_much_is_wrong() -> None:
    _, found = read("pdsl 1\nb { a = = ( ) $ ! 'x' @ 1_0 , ,\n}\nc { d = 1 }\n")
    assert len(found) == 1
