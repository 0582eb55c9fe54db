from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from attrs import evolve

from pdsl.lowering.plan import Sharding, Validation
from pdsl.lowering.programs import template_timeline
from pdsl.lowering.spec import CallValue
from pdsl.render.plan import plan_notes, render_plan
from pdsl.render.schedule import draw_schedule
from pdsl.render.svg import schedule_svg
from pdsl.render.terminal import PLAIN, Terminal, bar, binary, count, percent, ranges, table, visible
from tests.face.snapshot import matches_snapshot
from tests.plans import facts, heterogeneous, rectangular

UNICODE = Terminal(unicode=True)
COLOUR = Terminal(unicode=True, colour=True)
HASH = re.compile(r"plan [0-9a-f]{12,16}\b")

PLANS = {
    "pp2_fsdp2": rectangular(),
    "tensor_replicas": rectangular(replicas=2, positions=2, shard=1, tensor=2, batch=32),
    "interleaved_tied": rectangular(schedule="interleaved_1f1b", virtual=2, model=facts(6, tied=True)),
    "unequal": heterogeneous(((1, 2), (2, 3), (3, 3))),
    "many_ranks": rectangular(
        replicas=64, positions=4, shard=2, tensor=4, microbatches=8, batch=64 * 16, model=facts(10), ranks_per_node=8
    ),
}


def screen(plan, terminal=PLAIN):
    return HASH.sub("plan HASH", render_plan(plan, terminal=terminal))


@pytest.mark.parametrize("name", PLANS)
def test_the_screen_of_a_plan(name):
    assert matches_snapshot(f"plan_{name}.txt", screen(PLANS[name]))


def test_short_batches_and_held_out_data_are_told_where_there_are_any():
    plain = PLANS["pp2_fsdp2"]
    held_out = Validation(CallValue("source", ("data:text",)), 50, 21)
    lines = screen(evolve(plain, job=evolve(plain.job, last="pad"), validation=held_out)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  data "))
    assert lines[at] == "  data   a last batch that is not full is taken as it is"
    assert lines[at + 1] == "         held out: the first 21 of data:text, every 50 steps and at the end"
    each = screen(evolve(plain, validation=evolve(held_out, every=1, samples=None)))
    assert "  data   held out: all of data:text, after each step\n" in each
    assert "  data " not in screen(plain)


@pytest.mark.parametrize("terminal", [PLAIN, UNICODE, COLOUR], ids=["ascii", "unicode", "colour"])
@pytest.mark.parametrize("name", PLANS)
def test_no_line_is_wider_than_the_terminal(name, terminal):
    assert max(visible(line) for line in render_plan(PLANS[name], terminal=terminal).splitlines()) <= 100


def test_without_unicode_and_colour_the_screen_is_plain_ascii():
    assert render_plan(PLANS["interleaved_tied"]).isascii()
    assert "\x1b" not in render_plan(PLANS["interleaved_tied"], terminal=UNICODE)


def test_colour_changes_nothing_but_colour():
    coloured = render_plan(PLANS["unequal"], terminal=COLOUR)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_plan(PLANS["unequal"], terminal=UNICODE)


def test_many_ranks_are_no_wall():
    assert PLANS["many_ranks"].world_size == 2048
    assert len(screen(PLANS["many_ranks"]).splitlines()) < 50


def test_every_rank_is_shown_with_where_it_stands_while_they_are_few():
    lines = screen(PLANS["tensor_replicas"]).splitlines()
    rows = lines[lines.index("ranks") + 2 :][:8]
    # rank, node, pipeline, stage, tensor, parameters
    assert [row.split()[:5] for row in rows] == [[str(r), str(r // 2), str(r // 4), str(r // 2 % 2), str(r % 2)] for r in range(8)]
    assert "embed .. blocks.1 (3)" in rows[0]
    assert rows[0].endswith("16: 0-15")
    assert rows[7].endswith("16: 16-31")


def test_layouts_tell_the_line_that_decided_and_a_local_shape():
    text = screen(PLANS["tensor_replicas"])
    assert re.search(r"12 +colwise\(tp\) \+ replicate\(\) +4 +\S+ % +\[32, 8\] -> \[16, 8\] blocks\.0\.up\.weight", text)


def test_notes_name_what_is_not_executed_and_what_is_tied():
    notes = plan_notes(evolve(PLANS["interleaved_tied"], pending=("freeze: no layer is frozen yet",)))
    assert notes[0] == "not executed: freeze: no layer is frozen yet"
    assert notes[1] == "embed.weight and head.weight are one parameter in stages 0 and 3: each holds a copy, and their gradients are summed"


def test_a_layer_with_most_of_the_parameters_is_told_of():
    model = facts(2)
    embed = evolve(model.parameters[0], shape=(1000, 8))
    heavy = rectangular(positions=1, model=evolve(model, parameters=(embed, *model.parameters[1:])))
    assert any(note.startswith("embed holds 86.") for note in plan_notes(heavy))
    assert not any("gathered" in note for note in plan_notes(rectangular(positions=1)))


def test_a_plan_of_one_rank_has_no_traffic():
    assert "traffic: none" in screen(rectangular(positions=1, shard=1, microbatches=1))


# --- the drawing ----------------------------------------------------------------------------------------------------------------------------


def equal(positions, microbatches, **kwargs):
    model = facts(positions * kwargs.get("virtual", 1) - 2 if positions > 1 else 0)
    even = evolve(model, layers=tuple(evolve(layer, flops=1) for layer in model.layers))
    return rectangular(positions=positions, shard=1, microbatches=microbatches, batch=microbatches, model=even, **kwargs)


def drawn(plan, terminal=PLAIN):
    template = plan.templates[0]
    return draw_schedule(template.schedule, template_timeline(plan, template), terminal)


def test_one_f_one_b_is_drawn_in_proportion():
    assert drawn(equal(2, 4)) == [
        "  0 |F0- F1- ........B0===== F2- B1===== F3- B2===== ....B3===== |",
        "  1 |....F0- B0===== F1- B1===== F2- B2===== F3- B3===== ........|",
    ]


def test_dots_are_the_bubble():
    for plan in (equal(2, 4), equal(4, 4), equal(3, 6, schedule="gpipe")):
        rows = [line.split("|")[1] for line in drawn(plan)]
        share = Fraction(sum(row.count(".") for row in rows), sum(map(len, rows)))
        assert share == template_timeline(plan, plan.templates[0]).bubble


def test_stages_of_one_position_are_named_apart():
    first = drawn(equal(2, 4, schedule="interleaved_1f1b", virtual=2))[0]
    assert "0F0" in first
    assert "2F0" in first


def test_long_rows_keep_their_letters_and_their_width():
    lines = drawn(equal(4, 64))
    assert {len(line) for line in lines} == {100}
    assert "F" in lines[0]


def test_of_many_positions_the_first_and_the_last_are_drawn():
    lines = drawn(equal(20, 20))
    assert [line.split()[0] for line in lines] == [*map(str, range(8)), ":", "17", "18", "19"]
    assert lines[8].split()[1:] == ["9", "more"]


# --- SVG ------------------------------------------------------------------------------------------------------------------------------------

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_the_picture_of_a_schedule():
    assert matches_snapshot("schedule.svg", HASH.sub("plan HASH", schedule_svg(equal(2, 2))))


def test_every_operation_has_a_cell_with_a_title():
    plan = PLANS["unequal"]
    root = ET.fromstring(schedule_svg(plan))
    titles = [t.text for rect in root.iter(f"{NAMESPACE}rect") for t in rect.iter(f"{NAMESPACE}title")]
    assert len(titles) == sum(len(row) for template in plan.templates for row in template.schedule.rows)
    assert titles[0] == "forward, stage 0, microbatch 0: 0.0 % to 16.7 % of the step"


def test_the_bubble_share_is_in_the_title_of_every_template():
    plan = equal(2, 4)
    heads = [t.text for t in ET.fromstring(schedule_svg(plan)).iter(f"{NAMESPACE}text") if t.get("class") == "head"]
    assert heads == ["one_f_one_b, 2 positions, 4 microbatches, bubble 20.0 %"]


def test_the_picture_follows_the_colours_of_the_reader():
    assert "prefers-color-scheme: dark" in schedule_svg(equal(2, 2))


def test_names_are_escaped():
    assert "<b>" not in schedule_svg(evolve(equal(2, 2), name="<b>&"))


# --- the little tools -----------------------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environ", "colour"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_on_a_screen(environ, colour):
    assert Terminal.of(Screen(), environ).colour is colour


def test_a_pipe_has_no_colour_unless_forced():
    assert not Terminal.of(io.StringIO(), {}).colour
    assert Terminal.of(io.StringIO(), {"FORCE_COLOR": "1"}).colour


@pytest.mark.parametrize(("encoding", "unicode"), [("utf-8", True), ("UTF8", True), ("ascii", False), ("latin-1", False), (None, False)])
def test_box_characters_need_an_encoding_that_has_them(encoding, unicode):
    stream = Screen()
    stream.encoding = encoding
    assert Terminal.of(stream, {}).unicode is unicode


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1024 * 1000, "0.98 MiB"), (25 * 2**30, "25.0 GiB"), (5 * 2**50, "5120 TiB")],
)
def test_bytes_are_written_with_three_digits(size, text):
    assert binary(size) == text


@pytest.mark.parametrize(("number", "text"), [(999, "999"), (1000, "1.00 k"), (1_050_000, "1.05 M"), (70_000_000_000, "70.0 G")])
def test_counts_are_written_with_three_digits(number, text):
    assert count(number) == text


def test_percentages_have_one_digit():
    assert percent(Fraction(1, 3)) == "33.3 %"


def test_runs_of_numbers_are_joined_and_the_rest_counted():
    assert ranges([3, 0, 1, 2, 8, 10, 11]) == "0-3, 8, 10-11"
    assert ranges([0, 2, 4, 6, 8], 3) == "0, 2, +3"


def test_columns_without_content_are_left_out():
    assert table([("a", "b", "c"), ("1", "", "3")]) == ["  a  c", "  1  3"]


def test_the_elastic_column_gives_way():
    lines = table([("name", "n"), ("x" * 90, "1")], width=40, elastic=0)
    assert max(map(len, lines)) == 40
    assert lines[1] == "  " + "x" * 33 + "..  1"


def test_a_bar_is_as_long_as_its_sum():
    assert bar([(1, "a"), (2, "b"), (0, "c"), (1, "d")], 8, 8) == "abbd"
    assert bar([(8, "a")], 8, 24) == "a" * 24


def test_notes_tell_how_units_are_gathered_where_the_spec_asked_for_it():
    asked = evolve(PLANS["pp2_fsdp2"], sharding=Sharding(reshard=True, group=2, prefetch=3, every=True))
    told = "units of 2 blocks are gathered for each forward and each backward, 3 ahead; gradients are reduced after each microbatch"
    assert told in plan_notes(asked)
    assert not any("gathered for" in note or "stay whole" in note for note in plan_notes(PLANS["pp2_fsdp2"]))
