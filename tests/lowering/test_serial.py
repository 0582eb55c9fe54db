"""Plans, facts and schedules survive JSON, and what is no JSON of theirs is refused with the place."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from attrs import evolve

from pdsl.grammar.source import Source
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.plan import PLAN_VERSION, Plan
from pdsl.lowering.schedule import Schedule
from pdsl.lowering.schedules import interleaved_1f1b
from pdsl.lowering.serial import dump, dump_for_hash, load
from pdsl.lowering.spec import CallValue, Quantity
from tests.plans import facts, heterogeneous, rectangular

CALL = CallValue(
    "freeze",
    (None, True, 3, Fraction(1, 3), "text", (1, ("nested",), ())),
    (("limit", Quantity(Fraction(5, 2), "seconds")), ("inner", CallValue("at", (), (("step", 2000),)))),
)


@pytest.mark.parametrize("plan", [heterogeneous(), rectangular(), rectangular(tensor=2, replicas=2), rectangular(model=facts(tied=True))])
def test_a_plan_comes_back_equal(plan):
    again = load(dump(plan), Plan)
    assert again == plan
    assert again.hash == plan.hash
    assert dump(again) == dump(plan)


def test_facts_schedules_and_values_come_back_equal():
    for value, cls in ((facts(tied=True), ModelFacts), (interleaved_1f1b(2, 4, 2), Schedule), (CALL, CallValue)):
        assert load(dump(value), cls) == value


def test_whole_numbers_and_fractions_keep_their_kind():
    again = load(dump(CallValue("x", (1, Fraction(1), True))), CallValue)
    assert [type(v) for v in again.positional] == [int, Fraction, bool]


def test_keys_are_sorted_and_nothing_is_wasted():
    text = dump(CallValue("constant"))
    assert text == '{"format":1,"type":"CallValue","value":{"call":"constant","keywords":[],"positional":[]}}'


def test_where_a_plan_was_written_does_not_enter_its_hash():
    plan = rectangular()
    moved = evolve(plan, job=evolve(plan.job, directory="elsewhere"))
    assert load(dump(moved), Plan).job.directory == "elsewhere"
    assert dump_for_hash(moved) == dump_for_hash(plan)
    assert moved.hash == plan.hash
    assert evolve(plan, job=evolve(plan.job, seed=1)).hash != plan.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update(type="Spec"), "this is a Spec, not a Plan"),
        (lambda w: w.update(format=7), "this Plan is in format 7, this version of PDSL reads format 1"),
        (lambda w: w.pop("format"), "expected an object with type, format and value"),
        (lambda w: w["value"].update(version=99), f"this Plan has version 99, this version of PDSL reads version {PLAN_VERSION}"),
        (lambda w: w["value"].update(colour="red"), "Plan has an unknown field colour"),
        (lambda w: w["value"].pop("device"), "Plan lacks the field device"),
        (lambda w: w["value"]["job"].update(batch="16"), 'Plan.job.batch is "16": expected int'),
        (lambda w: w["value"]["job"].update(batch=True), "Plan.job.batch is true: expected int"),
        (lambda w: w["value"]["job"].update(rate=3), "Plan.job.rate is 3: expected a CallValue"),
        (lambda w: w["value"]["job"]["optimizer"]["keywords"][0].__setitem__(1, {"fraction": "1/0"}), "expected a fraction"),
        (lambda w: w["value"]["facts"]["layers"][0].update(kind="attic"), "Plan.facts.layers[0].kind: 'attic' is not a valid LayerKind"),
        (lambda w: w["value"]["pipelines"][0].update(islands=5), "Plan.pipelines[0].islands is 5: expected a list"),
    ],
)
def test_a_text_that_is_no_plan_is_refused_with_the_place(change, message):
    whole = json.loads(dump(rectangular()))
    change(whole)
    with pytest.raises(ValueError) as caught:
        load(json.dumps(whole), Plan)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "3", "null", "[]", '{"type": "Plan"}', "[" * 100_000, '{"a":' * 50_000])
def test_any_other_text_is_a_value_error(text):
    with pytest.raises(ValueError):
        load(text, Plan)


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="a set has no JSON form"):
        dump(evolve(CALL, positional=({1, 2},)))
    assert "span" not in dump(evolve(CALL, span=Source("x", "y")))
