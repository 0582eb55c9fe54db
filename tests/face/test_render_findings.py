from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from pdsl.grammar.diagnostics import Diagnostic, Edit, Fix, Label, Safety, Severity
from pdsl.grammar.source import Source, Span
from pdsl.render.diagnostics import render_concise, render_finding, render_full, summary
from pdsl.render.reports import JSON_FORMAT, render_github, render_json, render_junit, render_sarif
from pdsl.render.terminal import Terminal

TEXT = "\n" * 13 + "  axis pp = 4\n" + "\n" * 9 + "  schedule = one_f_one_b(microbatches = 2)\n\twidth = 日本 oops\n"
SOURCE = Source("train.pdsl", TEXT)


def span(text, source=SOURCE):
    start = source.text.index(text)
    return Span(source, start, start + len(text))


TWO = Span(SOURCE, TEXT.index("2)"), TEXT.index("2)") + 1)
FOUR = Span(SOURCE, TEXT.index("4\n"), TEXT.index("4\n") + 1)
FEW = Diagnostic(
    "PDL402",
    "one_f_one_b needs at least as many microbatches as stages: 2 < 4",
    TWO,
    caption="2",
    labels=(Label(FOUR, "4 stages"),),
    help=("microbatches = 4 leaves a bubble of 43 %",),
    notes=("gpipe accepts 2",),
    fix=Fix("write 4", (Edit(TWO, "4"),), Safety.UNSAFE),
)
ODD = Diagnostic("PDL103", "odd", span("oops"), Severity.WARNING, caption="here")
NOWHERE = Diagnostic("PDL104", "there is no train.bach to override", help=("did you mean train.batch",))


def test_a_finding_shows_both_places_with_carets_and_dashes():
    assert (
        render_finding(FEW)
        == """\
error[PDL402]: one_f_one_b needs at least as many microbatches as stages: 2 < 4
  --> train.pdsl:24:41
   |
14 |   axis pp = 4
   |             - 4 stages
24 |   schedule = one_f_one_b(microbatches = 2)
   |                                         ^ 2
   = help: microbatches = 4 leaves a bubble of 43 %
   = note: gpipe accepts 2
"""
    )


def test_carets_stand_below_what_the_terminal_shows():
    # the tab is four columns wide, the two characters before the blank two each
    lines = render_finding(ODD).splitlines()
    assert lines[3] == "25 |     width = 日本 oops"
    assert lines[4] == "   |                  ^^^^ here"


def test_a_finding_about_no_text_has_no_excerpt():
    assert render_finding(NOWHERE) == "error[PDL104]: there is no train.bach to override\n  = help: did you mean train.batch\n"


def test_places_in_another_file_have_their_own_excerpt():
    other = Source("hw.pdsl", "let nodes = 3\n")
    text = render_finding(Diagnostic("PDL201", "48 against 32", FOUR, labels=(Label(span("3", other), "set here"),)))
    assert "  --> train.pdsl:14:13\n" in text
    assert text.endswith("  ::: hw.pdsl:1:13\n   |\n 1 | let nodes = 3\n   |             - set here\n")


def test_several_marks_on_one_line_are_all_shown():
    source = Source("a.pdsl", "[tp, tp]")
    first, second = Span(source, 1, 3), Span(source, 5, 7)
    lines = render_finding(Diagnostic("PDL305", "tp twice", second, caption="second", labels=(Label(first, "first"),))).splitlines()
    assert lines[-3:] == ["1 | [tp, tp]", "  |  -- first", "  |      ^^ second"]


def test_an_empty_span_still_has_a_caret():
    source = Source("a.pdsl", "mesh {")
    assert render_finding(Diagnostic("PDL001", "unexpected end", Span(source, 6, 6))).splitlines()[-1] == "  |       ^"


def test_a_span_over_lines_is_marked_to_the_end_of_its_first():
    source = Source("a.pdsl", "mesh {\n  axis a = 1\n}\n")
    assert render_finding(Diagnostic("PDL201", "mesh", Span(source, 0, 20))).splitlines()[-2:] == ["1 | mesh {", "  | ^^^^^^"]


def test_long_lines_are_cut_around_the_mark():
    source = Source("a.pdsl", "x" * 5000 + "HERE" + "y" * 5000)
    lines = render_finding(Diagnostic("PDL001", "long", Span(source, 5000, 5004))).splitlines()
    assert max(map(len, lines)) < 130
    at = lines[-1].index("^")
    assert lines[-2][at : at + 4] == "HERE"


def test_no_character_of_a_spec_steers_the_terminal():
    source = Source("a\x1b[2J.pdsl", "x = \x1b[31m\x07")
    text = render_finding(Diagnostic("PDL001", "bad \x1b]0;title\x07", Span(source, 0, 1)))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_colour_changes_nothing_but_colour():
    coloured = render_finding(FEW, Terminal(colour=True))
    assert "\x1b[31;1merror[PDL402]\x1b[0m" in coloured
    assert render_full([FEW], 1, Terminal(colour=False)).startswith(render_finding(FEW))


def test_concise_has_one_line_for_each_finding():
    assert render_concise([FEW, ODD, NOWHERE], 2).splitlines() == [
        "train.pdsl:24:41: error[PDL402] one_f_one_b needs at least as many microbatches as stages: 2 < 4",
        "train.pdsl:25:13: warning[PDL103] odd",
        "error[PDL104] there is no train.bach to override",
        "2 errors and 1 warning in 2 files",
    ]


@pytest.mark.parametrize(
    ("findings", "files", "text"),
    [
        ([], 1, "1 file checked, nothing found"),
        ([ODD], 1, "1 warning in 1 file"),
        ([FEW, FEW, ODD], 3, "2 errors and 1 warning in 3 files"),
    ],
)
def test_the_last_line_counts(findings, files, text):
    assert summary(findings, files) == text


# --- for machines ---------------------------------------------------------------------------------------------------------------------------


def test_the_keys_of_the_json_form_are_held():
    found = json.loads(render_json([FEW, ODD, NOWHERE], ["train.pdsl"]))
    assert JSON_FORMAT == "1.0"
    assert list(found) == ["format", "valid", "errors", "warnings", "files", "diagnostics"]
    keys = ["code", "severity", "message", "file", "start", "end", "caption", "labels", "help", "notes", "fix"]
    assert [list(d) for d in found["diagnostics"]] == [keys] * 3
    first = found["diagnostics"][0]
    assert list(first["start"]) == ["line", "column", "offset"]
    assert list(first["labels"][0]) == ["file", "start", "end", "text"]
    assert list(first["fix"]) == ["title", "safety", "edits"]
    assert list(first["fix"]["edits"][0]) == ["file", "start", "end", "text"]


def test_json_tells_places_from_one_and_counts():
    found = json.loads(render_json([FEW, ODD, NOWHERE], ["train.pdsl"]))
    assert (found["valid"], found["errors"], found["warnings"]) == (False, 2, 1)
    first, _, nowhere = found["diagnostics"]
    assert (first["start"]["line"], first["start"]["column"], first["end"]["column"]) == (24, 41, 42)
    assert TEXT[first["start"]["offset"]] == "2"
    assert nowhere["file"] is nowhere["start"] is nowhere["fix"] is None


def test_warnings_alone_are_valid():
    assert json.loads(render_json([ODD], ["train.pdsl"]))["valid"] is True


def test_github_annotations_are_escaped():
    odd = Diagnostic("PDL101", "100 %\nof: it", Span(Source("a,b:c.pdsl", "x"), 0, 1), Severity.NOTE)
    assert render_github([odd]) == "::notice title=PDL101,file=a%2Cb%3Ac.pdsl,line=1,endLine=1,col=1,endColumn=2::100 %25%0Aof: it\n"


def test_sarif_names_rules_levels_and_places():
    run = json.loads(render_sarif([FEW, ODD, FEW, NOWHERE], "1.2.3", {"PDL402": "microbatches"}))["runs"][0]
    assert [r["id"] for r in run["tool"]["driver"]["rules"]] == ["PDL103", "PDL104", "PDL402"]
    assert run["tool"]["driver"]["rules"][2]["name"] == "microbatches"
    first, warning, again, nowhere = run["results"]
    assert first["level"] == "error"
    assert warning["level"] == "warning"
    assert first["locations"][0]["physicalLocation"]["region"] == {"startLine": 24, "startColumn": 41, "endLine": 24, "endColumn": 42}
    assert first["relatedLocations"][0]["message"]["text"] == "4 stages"
    assert nowhere["locations"] == []
    assert first["partialFingerprints"] != again["partialFingerprints"]


def test_fingerprints_stay_when_lines_move():
    moved = Source("train.pdsl", "\n" + TEXT)
    lower = Diagnostic(FEW.code, FEW.message, Span(moved, TWO.start + 1, TWO.stop + 1))
    prints = [json.loads(render_sarif([d], "1", {}))["runs"][0]["results"][0]["partialFingerprints"] for d in (FEW, lower)]
    assert prints[0] == prints[1]


def test_junit_has_a_suite_a_file_and_a_failure_an_error():
    root = ET.fromstring(render_junit([FEW, ODD, NOWHERE], ["train.pdsl", "clean.pdsl"]))
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["train.pdsl", "clean.pdsl", "command line"]
    assert suites["train.pdsl"].get("failures") == "1"
    assert [case.get("name") for case in suites["train.pdsl"]] == ["PDL402", "PDL103"]
    assert suites["clean.pdsl"][0].find("failure") is None
    assert suites["command line"].get("failures") == "1"


def test_junit_is_xml_whatever_the_spec_says():
    hostile = Diagnostic("PDL001", '<a & "b" \x00 \x1b>', Span(Source('"<&>.pdsl', "x"), 0, 1))
    assert ET.fromstring(render_junit([hostile], ['"<&>.pdsl'])) is not None
