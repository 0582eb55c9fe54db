"""What the parser makes of sound texts: every item, statement, layout and expression, with exact spans."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pdsl.grammar import syntax
from pdsl.grammar.syntax import Assert, Assign, Axis, Block, Edition, Import, Let, Number, Param, Profile, Rule, StageItem
from tests.grammar.reading import clean, place, read, value
from tests.grammar.specs import LARGE, SMALL


def short(node: object) -> object:
    """A node without its spans, as nested plain values."""
    match node:
        case syntax.Name(text) | syntax.String(text):
            return text if isinstance(node, syntax.Name) else f'"{text}"'
        case syntax.Number(number, unit):
            return f"{number}{unit}"
        case syntax.Path():
            return node.text
        case syntax.Negation(operand):
            return ("-", short(operand))
        case syntax.BinaryOperation(operator, left, right) | syntax.Comparison(operator, left, right):
            return (operator, short(left), short(right))
        case syntax.RangeOf(low, high):
            return ("to", short(low), short(high))
        case syntax.Argument(name, argument):
            return short(argument) if name is None else f"{name.text}={short(argument)}"
        case syntax.Call(callee, arguments):
            return (callee.text + "()", *map(short, arguments))
        case syntax.ListOf(items):
            return [short(item) for item in items]
        case syntax.Juxtaposition(parts):
            return ("words", *map(short, parts))
        case syntax.Slots(slots):
            return ["+".join(n.text for n in slot.axes) or "_" for slot in slots]
        case syntax.Sum(terms):
            return ("sum", *map(short, terms))
        case syntax.Missing():
            return "missing"
        case _:
            raise AssertionError(node)


def block(text: str, keyword: str) -> Block:
    return next(b for b in clean(text).items if isinstance(b, Block) and b.keyword.text == keyword)


def assigned(found: Block) -> dict[str, object]:
    return {s.key.text: short(s.value) for s in found.statements if isinstance(s, Assign)}


# --- whole specs ----------------------------------------------------------------------------------------------------------------------


def test_the_small_spec_has_the_items_that_are_written() -> None:
    file = clean(SMALL)
    assert [type(i).__name__ for i in file.items] == ["Edition", "Block", "Block", "Block", "Block", "Block"]
    assert [b.keyword.text for b in file.items if isinstance(b, Block)] == ["mesh", "model", "shard", "pipeline", "train"]
    assert assigned(block(SMALL, "train")) == {
        "data": '"pdsl.data:python_source"',
        "batch": "16",
        "steps": "100",
        "optimizer": ("adamw()", "lr=1/1000"),
    }
    model = block(SMALL, "model")
    assert [short(label) for label in model.labels] == ['"pdsl.models:gpt"']
    assert assigned(model) == {"layers": "4", "width": "128", "heads": "4", "context": "64"}
    pipeline = block(SMALL, "pipeline")
    assert [short(label) for label in pipeline.labels] == ["over", "pp"]
    assert assigned(pipeline) == {"schedule": ("one_f_one_b()", "microbatches=4")}


def test_the_large_spec_has_the_leading_items() -> None:
    edition, imported, param, let = clean(LARGE).items[:4]
    assert isinstance(edition, Edition)
    assert edition.number.value == 1
    assert isinstance(imported, Import)
    assert (imported.path.text, imported.alias.text) == ("clusters/h200.pdsl", "hw")
    assert isinstance(param, Param)
    assert (param.name.text, param.type.text, short(param.default)) == ("layers", "int", "32")
    assert isinstance(let, Let)
    assert (let.name.text, short(let.value)) == ("half", ("/", "layers", "2"))


def test_the_large_spec_has_the_mesh_and_the_cluster() -> None:
    mesh = [s for s in block(LARGE, "mesh").statements if isinstance(s, Axis)]
    assert [(a.name.text, short(a.size)) for a in mesh] == [("dp", "rest"), ("pp", ("to", "2", "4")), ("fsdp", "2"), ("tp", "4")]
    assert assigned(block(LARGE, "cluster")) == {"nodes": "hw.nodes", "ranks_per_node": "8", "device": "cuda", "memory": "hw.memory"}


def test_the_large_spec_has_the_shard_rules_in_order() -> None:
    rules = [s for s in block(LARGE, "shard").statements if isinstance(s, Rule)]
    both = ("sum", ("colwise()", "tp"), ("fsdp()", "fsdp"))
    across = ("sum", ("rowwise()", "tp"), ("fsdp()", "fsdp"))
    assert [(r.patterns[0].text, short(r.layout)) for r in rules] == [
        ("tok_embeddings.weight", ["tp", "_"]),
        ("layers.*.attn.w{q,k,v}.weight", both),
        ("layers.*.attn.wo.weight", across),
        ("layers.*.mlp.w{1,3}.weight", both),
        ("layers.*.mlp.w2.weight", across),
        ("**.norm*.weight", ("replicate()",)),
        ("**", ("fsdp()", "fsdp")),
    ]


def test_the_large_spec_has_the_other_blocks() -> None:
    assert assigned(block(LARGE, "pipeline")) == {"stages": "balanced", "schedule": ("auto()", "microbatches=16")}
    assert assigned(block(LARGE, "precision")) == {"params": "bf16", "reduce": "fp32", "output": "fp32"}
    assert assigned(block(LARGE, "memory")) == {"recompute": '"layers.*"', "offload": "none"}
    assert assigned(block(LARGE, "fault_budget")) == {
        "unit": "node",
        "lose": "1",
        "recover": ["reroute", "retemplate", "restore"],
        "silence": "30s",
        "spares": "0",
    }
    assert assigned(block(LARGE, "freeze")) == {
        "prefix": ("bound()", "alpha=('/', '1', '3')", "every=('words', '1', 'epoch')"),
        "keep": "2",
        "repack": ("when()", (">", "gain", "5%")),
        "cache": ("host()", "limit=8GiB"),
        "guard": ("unfreeze()", "worse=1/2%", "patience=2"),
    }
    assert assigned(block(LARGE, "checkpoint")) == {"path": '"runs/llama"', "every": "500", "keep": "3", "mode": "async"}
    train = assigned(block(LARGE, "train"))
    assert train["optimizer"] == ("adamw()", "lr=3/10000", "weight_decay=1/10")
    assert train["loss"] == ("mean()", "over=tokens")
    assert train["clip"] == "1"


def test_the_large_spec_ends_with_assertion_and_profile() -> None:
    condition, profile = clean(LARGE).items[-2:]
    assert isinstance(condition, Assert)
    assert condition.message is not None
    assert short(condition.condition) == ("==", ("*", "half", "2"), "layers")
    assert condition.message.text == "an even number of layers, please"
    assert isinstance(profile, Profile)
    assert profile.name.text == "laptop"
    assert [(o.path.text, short(o.value)) for o in profile.overrides] == [
        ("mesh.dp", "1"),
        ("mesh.pp", "2"),
        ("mesh.tp", "1"),
        ("cluster.device", "cpu"),
        ("train.batch", "16"),
    ]


def test_every_comment_is_kept_in_order_with_its_span() -> None:
    comments = clean(LARGE).comments
    assert len(comments) == LARGE.count("#")
    assert comments[0].text == "# language edition"
    assert place(comments[0].span) == "1:47-65"
    assert all(c.span.text == c.text for c in comments)
    assert [c.span.start for c in comments] == sorted(c.span.start for c in comments)


# --- expressions ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number", "unit", "decimal"),
    [
        ("0", Fraction(0), "", False),
        ("007", Fraction(7), "", False),
        ("1.0", Fraction(1), "", True),
        ("0.1", Fraction(1, 10), "", True),
        ("3e-4", Fraction(3, 10000), "", True),
        ("1.5E+3", Fraction(1500), "", True),
        ("30s", Fraction(30), "s", False),
        ("16GiB", Fraction(16), "GiB", False),
        ("450GB/s", Fraction(450), "GB/s", False),
        ("0.5%", Fraction(1, 2), "%", True),
        ("24h", Fraction(24), "h", False),
        ("2min", Fraction(2), "min", False),
        ("7parsec", Fraction(7), "parsec", False),
        ("1e3ms", Fraction(1000), "ms", True),
        ("1epoch", Fraction(1), "epoch", False),
        ("30\u00b5s", Fraction(30), "\u00b5s", False),
        ("1e308", Fraction(10**308), "", True),
        ("1e-308", Fraction(1, 10**308), "", True),
    ],
)
def test_numbers_are_exact_and_keep_their_unit(text: str, number: Fraction, unit: str, decimal: bool) -> None:
    node = value(text)
    assert isinstance(node, Number)
    assert (node.value, node.unit, node.decimal, node.span.text) == (number, unit, decimal, text)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("1 + 2 * 3", ("+", "1", ("*", "2", "3"))),
        ("(1 + 2) * 3", ("*", ("+", "1", "2"), "3")),
        ("1 - 2 - 3", ("-", ("-", "1", "2"), "3")),
        ("8 / 2 / 2", ("/", ("/", "8", "2"), "2")),
        ("-1/3", ("/", ("-", "1"), "3")),
        ("--x", ("-", ("-", "x"))),
        ("2 * -x", ("*", "2", ("-", "x"))),
        ("8GiB/layers", ("/", "8GiB", "layers")),
        ("2 to n / 2", ("to", "2", ("/", "n", "2"))),
        ("1 epoch to 3 epoch", ("to", ("words", "1", "epoch"), ("words", "3", "epoch"))),
        ("5 per 24h", ("words", "5", "per", "24h")),
        ("true", "true"),
        ("a.b.c", "a.b.c"),
        ("f()", ("f()",)),
        ("m.f(a, b = 1, )", ("m.f()", "a", "b=1")),
        ("when(gain >= 5%)", ("when()", (">=", "gain", "5%"))),
        ("f(1 != 2)", ("f()", ("!=", "1", "2"))),
        ("[]", []),
        ("[a, [b, 1], ]", ["a", ["b", "1"]]),
        ('rows("x.csv")', ("rows()", '"x.csv"')),
        ("[\n  a, # first\n\n  b\n]", ["a", "b"]),
        ("(\n1\n+ 2\n)", ("+", "1", "2")),
    ],
)
def test_expressions(text: str, tree: object) -> None:
    assert short(value(text)) == tree


@pytest.mark.parametrize(
    ("text", "content"),
    [(r'"a\"b"', 'a"b'), (r'"a\\b"', "a\\b"), (r'"\n\t"', "\n\t"), ('""', ""), ('"a # b"', "a # b"), ('"\u00e9\u4e2d"', "\u00e9\u4e2d")],
)
def test_strings_have_their_escapes_resolved_and_their_quotes_in_the_span(text: str, content: str) -> None:
    node = value(text)
    assert isinstance(node, syntax.String)
    assert (node.text, node.span.text) == (content, text)


# --- statements -----------------------------------------------------------------------------------------------------------------------


def test_axis_tags_and_sizes() -> None:
    (axis,) = block("pdsl 1\nmesh { axis tp = 4 * 2 @intra @fast }", "mesh").statements
    assert isinstance(axis, Axis)
    assert (axis.name.text, short(axis.size), [t.text for t in axis.tags]) == ("tp", ("*", "4", "2"), ["intra", "fast"])


def test_rules_with_several_patterns_and_all_layouts() -> None:
    text = 'pdsl 1\nshard {\n  "a", "b" => [tp, _]\n  "c" => [(dp, tp), _, (x)]\n  "d" => [\n    _,\n  ]\n  "e" => []\n  "f" => [tp] + fsdp(dp) + partial(x)\n}'
    rules = [s for s in block(text, "shard").statements if isinstance(s, Rule)]
    assert [([p.text for p in r.patterns], short(r.layout)) for r in rules] == [
        (["a", "b"], ["tp", "_"]),
        (["c"], ["dp+tp", "_", "x"]),
        (["d"], ["_"]),
        (["e"], []),
        (["f"], ("sum", ["tp"], ("fsdp()", "dp"), ("partial()", "x"))),
    ]


@pytest.mark.parametrize(
    "body",
    [
        'stage first { "a", "l[0..half]" }\nstage last { "b" }',
        'stage first {"a","l[0..half]",}; stage last {"b",}',
        'stage first {\n  "a", # why\n\n  "l[0..half]",\n}\nstage last\t{ "b" }',
    ],
)
def test_stages_on_one_line_and_on_many(body: str) -> None:
    stages = [s for s in block(f"pdsl 1\npipeline over pp {{ {body}\n}}", "pipeline").statements if isinstance(s, StageItem)]
    assert [(s.name.text, [m.text for m in s.modules]) for s in stages] == [("first", ["a", "l[0..half]"]), ("last", ["b"])]


def test_an_empty_block_and_an_empty_profile() -> None:
    file = clean("pdsl 1\nmesh { }\ntrain {\n\n}\nprofile p {}\n")
    assert [getattr(i, "statements", getattr(i, "overrides", None)) for i in file.items[1:]] == [(), (), ()]


def test_separators_may_repeat_lead_and_trail() -> None:
    found = block("\n;\npdsl 1;;train { ; a = 1 ;; b = 2\n; ; c = 3; } ;\n", "train")
    assert assigned(found) == {"a": "1", "b": "2", "c": "3"}


def test_a_comment_may_follow_every_bracket_and_stand_alone() -> None:
    text = "# top\npdsl 1 # edition\ntrain { # open\n  # alone\n  a = f( # call\n    x = 1, # one\n  ) # closed\n} # end\n# last"
    file = clean(text)
    assert assigned(block(text, "train")) == {"a": ("f()", "x=1")}
    assert [c.text for c in file.comments] == ["# top", "# edition", "# open", "# alone", "# call", "# one", "# closed", "# end", "# last"]


@pytest.mark.parametrize(
    "word", ["axis", "stage", "to", "as", "pdsl", "import", "param", "let", "assert", "profile", "stages", "nodes", "_x", "rest"]
)
def test_words_of_the_grammar_are_free_as_keys_values_names_and_arguments(word: str) -> None:
    text = f'pdsl 1\nimport "x.pdsl" as {word}\nlet {word} = 1\nb {{ {word} = {word}; x = f({word} = {word}.{word}) }}\nprofile {word} {{ a.{word} = {word} }}'
    assert assigned(block(text, "b")) == {word: word, "x": ("f()", f"{word}={word}.{word}")}


def test_axes_and_stages_may_have_names_of_the_grammar() -> None:
    text = 'pdsl 1\nmesh { axis axis = 1; axis to = 2 }\npipeline over to { stage stage { "a" } }'
    assert [a.name.text for a in block(text, "mesh").statements if isinstance(a, Axis)] == ["axis", "to"]
    assert [s.name.text for s in block(text, "pipeline").statements if isinstance(s, StageItem)] == ["stage"]


# --- spans and texts ------------------------------------------------------------------------------------------------------------------


def test_spans_cover_exactly_what_was_written() -> None:
    text = 'pdsl 1\n\nmesh main {\n  axis pp = 2 to 4 @a  # c\n}\nshard { "a", "b" => [(x, y), _] + f(z) }\nassert (1 + 2) * 3 == n, "m"  # e\n'
    file = clean(text)
    edition, mesh, shard, condition = file.items
    assert place(file.span) == "1:1-1"
    assert (file.span.start, file.span.stop) == (0, len(text))
    assert edition.span.text == "pdsl 1"
    assert isinstance(mesh, Block)
    assert isinstance(shard, Block)
    assert isinstance(condition, Assert)
    assert mesh.span.text == "mesh main {\n  axis pp = 2 to 4 @a  # c\n}"
    assert [label.span.text for label in mesh.labels] == ["main"]
    (axis,) = mesh.statements
    assert isinstance(axis, Axis)
    assert (axis.span.text, axis.size.span.text, axis.tags[0].span.text, place(axis.name.span)) == (
        "axis pp = 2 to 4 @a",
        "2 to 4",
        "a",
        "4:8-10",
    )
    (rule,) = shard.statements
    assert isinstance(rule, Rule)
    assert isinstance(rule.layout, syntax.Sum)
    slots = rule.layout.terms[0]
    assert isinstance(slots, syntax.Slots)
    assert [s.span.text for s in slots.slots] == ["(x, y)", "_"]
    assert rule.layout.span.text == "[(x, y), _] + f(z)"
    assert condition.span.text == 'assert (1 + 2) * 3 == n, "m"'
    assert isinstance(condition.condition, syntax.Comparison)
    assert condition.condition.span.text == "(1 + 2) * 3 == n"
    product = condition.condition.left
    assert isinstance(product, syntax.BinaryOperation)
    assert (product.span.text, product.left.span.text) == ("(1 + 2) * 3", "1 + 2")


def test_line_ends_of_windows_give_the_same_tree() -> None:
    unix, windows = clean(LARGE), clean(LARGE.replace("\n", "\r\n"))
    assert [c.text for c in windows.comments] == [c.text for c in unix.comments]
    for one, other in zip(unix.items, windows.items, strict=True):
        assert other.span.text.replace("\r\n", "\n") == one.span.text
        assert other.span.begin == one.span.begin


@pytest.mark.parametrize(
    "text", ["\ufeff" + SMALL, SMALL.rstrip("\n"), SMALL.replace("  ", "\t"), SMALL.replace("\n", " \t\n"), SMALL + "   "]
)
def test_byte_order_mark_tabs_and_a_missing_last_newline_change_nothing(text: str) -> None:
    assert [b.keyword.text for b in clean(text).items if isinstance(b, Block)] == ["mesh", "model", "shard", "pipeline", "train"]


def test_the_same_text_gives_equal_trees() -> None:
    assert clean(LARGE) == clean(LARGE)


def test_a_text_of_nothing_lacks_its_edition_only() -> None:
    for text in ("", "\n\n", "# nothing\n", "\ufeff"):
        file, found = read(text)
        assert file.items == ()
        assert [d.code for d in found] == ["PDL002"]
