"""Misconfigurations of public bug reports that a spec, the model's facts and the number of ranks decide before any process starts.

Each case has the bad spec, with «» around the place that the finding must point at, and the nearest good spec, on which there is no finding.
The numbers are those of the reports.
"""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.grammar.source import Source
from pdsl.lowering.check import CheckResult, check
from pdsl.lowering.planner import plan
from tests.facts import FACTS

FSDP = 'shard { "**" => fsdp(sh) }'
WHOLE = 'shard { "**" => replicate() }'
GPIPE = "schedule = gpipe(microbatches = 4)"


def spec(mesh: str, *, shard: str = WHOLE, pipeline: str = "", batch: str = "16") -> str:
    """A spec of four blocks; a newline and two spaces before every statement that a test writes."""
    over = "pipeline over pp {\n  " + "\n  ".join(pipeline.split("; ")) + "\n}\n" if pipeline else ""
    axes = "\n  ".join(f"axis {pair}" for pair in mesh.split(", "))
    return f"""pdsl 1
mesh {{
  {axes}
}}
model "pdsl.models:gpt" {{ layers = 4 }}
{shard}
{over}train {{
  data = "pdsl.data:digits"
  batch = {batch}
  steps = 10
  optimizer = adamw(lr = 1e-3)
}}
"""


@frozen
class Place:
    """A range of a text: 1-based line and column, and what is written there."""

    line: int
    column: int
    text: str

    @classmethod
    def of(cls, span: Any) -> Place:
        return cls(span.begin.line, span.begin.column, span.text)


def marked(text: str) -> tuple[str, Place]:
    """A text without its marks, and the place between them."""
    before, _, rest = text.partition("«")
    inside, _, after = rest.partition("»")
    return before + inside + after, Place(before.count("\n") + 1, len(before) - before.rfind("\n"), inside)


def checked(text: str, *, facts: str = "gpt", **how: Any) -> CheckResult:
    return check(Source("x.pdsl", text), facts=FACTS[facts], **how)


def beyond_notes(result: CheckResult) -> list[Diagnostic]:
    return [d for d in result.diagnostics if d.severity is not Severity.NOTE]


def only(text: str, **how: Any) -> Diagnostic:
    """The one finding, which must be at the marked place."""
    clean, place = marked(text)
    (one,) = beyond_notes(checked(clean, **how))
    assert one.span is not None
    assert Place.of(one.span) == place
    return one


def labels(finding: Diagnostic) -> list[tuple[int, int, str]]:
    """Line, column and words of the other places that a finding shows."""
    return [(label.span.begin.line, label.span.begin.column, label.text) for label in finding.labels]


def passes(text: str, **how: Any) -> CheckResult:
    """No finding but notes."""
    result = checked(text, **how)
    assert not beyond_notes(result)
    assert result.spec is not None
    return result


# --- mesh and ranks -------------------------------------------------------------------------------------------------------------------------


def test_case_1_product_of_axes_against_ranks() -> None:
    one = only(spec("dp_rep = 4, dp_shard = «2»", shard='shard { "**" => fsdp(dp_shard) }'), world=2)
    assert (one.code, one.severity) == ("PDL201", Severity.ERROR)
    assert one.message == "the mesh needs 4 x 2 = 8 ranks, the job has 2"
    assert one.caption == "x 2 = 8"
    assert labels(one) == [(3, 17, "4")]
    assert one.help == ("dp_rep = 1 gives 2; or write `axis dp_rep = rest`",)


@pytest.mark.parametrize("dp_rep", ["1", "rest"])
def test_case_1_the_offered_sizes_are_accepted(dp_rep: str) -> None:
    result = passes(spec(f"dp_rep = {dp_rep}, dp_shard = 2", shard='shard { "**" => fsdp(dp_shard) }'), world=2)
    assert result.mesh is not None
    assert [a.size for a in result.mesh.axes] == [1, 2]


def test_case_2_sharding_without_an_axis_to_shard_over() -> None:
    one = only(spec("sh = 1, tp = 2", shard='shard { "**" => fsdp(«sh») }'), world=2)
    assert (one.code, one.severity) == ("PDL202", Severity.ERROR)
    assert one.message == "fsdp(sh) has no axis of size > 1 to shard over: sh = 1"
    assert labels(one) == [(3, 13, "1 rank")]
    assert one.help == ("tp = 1 leaves 2 ranks for sh; or write replicate() in place of fsdp(sh)",)


@pytest.mark.parametrize(("mesh", "shard"), [("sh = 2, tp = 1", FSDP), ("sh = 1, tp = 2", WHOLE)], ids=["tp 1", "replicate"])
def test_case_2_what_is_offered_is_accepted(mesh: str, shard: str) -> None:
    assert passes(spec(mesh, shard=shard), world=2).mesh is not None


def test_case_2_an_axis_that_was_shrunk_on_purpose_is_no_mistake() -> None:
    assert passes(spec("pp = 2, sh = 2", shard=FSDP, pipeline=GPIPE), overrides=["mesh.sh=1"]).mesh is not None


def test_case_2_a_mesh_of_one_rank_may_shard_over_it() -> None:
    result = passes(spec("sh = 1", shard=FSDP), world=1)
    assert result.mesh is not None
    assert result.mesh.world_size == 1


@pytest.mark.parametrize(
    ("mesh", "shards"),
    [("dp_shard = 4, dp_replicate = 1", [0, 1, 2, 3]), ("dp_replicate = 1, dp_shard = 4", [0, 1, 2, 3]),
     ("dp_shard = 4, dp_replicate = 2", [0, 0, 1, 1, 2, 2, 3, 3]), ("dp_replicate = 2, dp_shard = 4", [0, 1, 2, 3, 0, 1, 2, 3])],
)  # fmt: skip
def test_case_6_roles_are_by_name_in_any_order(mesh: str, shards: list[int]) -> None:
    result = passes(spec(mesh, shard='shard { "**" => fsdp(dp_shard) }'), world=len(shards))
    assert result.mesh is not None
    assert (result.mesh.shard_size, result.mesh.pipelines) == (4, len(shards) // 4)
    assert [result.mesh.coordinate(rank).shard for rank in range(len(shards))] == shards


def test_case_8_a_replicate_axis_of_one_is_accepted_with_a_note() -> None:
    text, place = marked(spec("rep = «1», sh = 2", shard=FSDP))
    result = passes(text, world=2)
    (note,) = result.diagnostics
    assert (note.code, note.severity, note.message) == ("PDL203", Severity.NOTE, "axis rep has size 1: it is lowered away")
    assert Place.of(note.span) == place
    assert not passes(spec("sh = 2", shard=FSDP), world=2).diagnostics


# --- batch and microbatches -----------------------------------------------------------------------------------------------------------------


def test_case_11_microbatches_that_do_not_divide_the_batch() -> None:
    one = only(spec("pp = 2", pipeline="schedule = gpipe(microbatches = 3)", batch="«8»"))
    assert (one.code, one.severity) == ("PDL404", Severity.ERROR)
    assert one.message == "a batch of 8 samples does not divide into 3 microbatches: 8 % 3 = 2"
    assert labels(one) == [(8, 35, "3 microbatches")]
    assert one.help == ("microbatches = 1, 2, 4 or 8; or batch = 6 or 9",)


def test_case_11_each_pipeline_has_its_part_of_the_batch() -> None:
    one = only(spec("dp = 2, pp = 2", pipeline=GPIPE, batch="«12»"))
    assert one.message == "a batch of 12 samples over 2 pipelines leaves 6 for each, which 4 microbatches do not divide: 6 % 4 = 2"
    assert labels(one) == [(9, 35, "4 microbatches"), (3, 13, "2 pipelines")]
    assert one.help == ("microbatches = 1, 2, 3 or 6; or batch = 8 or 16",)


@pytest.mark.parametrize(
    ("mesh", "counts", "batch"),
    [("pp = 2", (2, 4, 8), "8"), ("pp = 2", (3,), "6"), ("pp = 2", (3,), "9"), ("dp = 2, pp = 2", (2, 3, 6), "12")],
)
def test_case_11_what_is_offered_divides(mesh: str, counts: tuple[int, ...], batch: str) -> None:
    for count in counts:
        result = passes(spec(mesh, pipeline=f"schedule = gpipe(microbatches = {count})", batch=batch))
        assert result.mesh is not None
        assert int(batch) % (result.mesh.pipelines * count) == 0


def test_case_11_counts_that_the_schedule_refuses_are_not_offered() -> None:
    one = only(spec("dp = 2, pp = 2", pipeline="schedule = one_f_one_b(microbatches = 4)", batch="«12»"))
    assert one.help == ("microbatches = 2, 3 or 6; or batch = 8 or 16",)


def test_case_13_one_microbatch_is_too_few_for_1f1b() -> None:
    one = only(spec("pp = 2", pipeline="schedule = one_f_one_b(microbatches = «1»)"))
    assert (one.code, one.severity) == ("PDL402", Severity.ERROR)
    assert one.message == "one_f_one_b needs at least as many microbatches as stages: 1 < 2"
    assert labels(one) == [(3, 13, "2 stages")]
    assert one.help == ("microbatches = 2 leaves a bubble of 33 %, 4 of 20 %, 8 of 11 %; gpipe accepts 1",)
    passes(spec("pp = 2", pipeline="schedule = one_f_one_b(microbatches = 2)"))


def test_case_13_gpipe_accepts_one_microbatch_and_warns_of_the_bubble() -> None:
    one = only(spec("pp = 2", pipeline="schedule = gpipe(microbatches = «1»)"))
    assert (one.code, one.severity) == ("PDL408", Severity.WARNING)
    assert one.message == "gpipe over 2 stages with 1 microbatch leaves a bubble of 50 %"
    passes(spec("pp = 2", pipeline="schedule = gpipe(microbatches = 2)"))


# --- stages and schedules -------------------------------------------------------------------------------------------------------------------

HALVES = 'stage a { "tok", "layers[..2]" }'
FOUR = 'stage a { "tok", "layers.0" }; stage b { "layers.1" }; stage c { "layers.2" }; stage d { "layers.3", "norm", "head" }'


@pytest.mark.parametrize("schedule", ["zbv(microbatches = 4)", "dualpipe_v(microbatches = 4)"])
def test_case_24_stages_that_a_v_schedule_cannot_place(schedule: str) -> None:
    text, place = marked(spec("pp = 2", pipeline=f'{HALVES}; «stage b {{ "layers[2..]", "norm", "head" }}»; schedule = {schedule}'))
    found = {d.code: d for d in beyond_notes(checked(text))}
    one = found["PDL406"]
    assert set(found) == {"PDL406"}
    assert one.severity is Severity.ERROR
    assert Place.of(one.span) == place
    assert one.message == f"{schedule.partition('(')[0]} runs pp 2 x 2 = 4 stages, 2 are written"
    assert labels(one) == [(3, 13, "2 positions"), (10, 14, "2 on each position")]
    assert one.help == ("list 4 stages in the order of the layers, or write stages = balanced",)
    assert one.notes == ("the schedule places them: (0, 3) / (1, 2)",)


@pytest.mark.parametrize("stages", [f"{FOUR}; ", "stages = balanced; ", ""], ids=["four stages", "balanced", "none"])
@pytest.mark.parametrize(
    ("schedule", "positions"), [("interleaved_1f1b(microbatches = 4, virtual = 2)", [0, 1, 0, 1]), ("zbv(microbatches = 4)", [0, 1, 1, 0])]
)
def test_case_24_the_schedule_places_the_stages_by_itself(stages: str, schedule: str, positions: list[int]) -> None:
    result = passes(spec("pp = 2", pipeline=f"{stages}schedule = {schedule}"))
    assert result.spec is not None
    assert result.mesh is not None
    (template,) = plan(result.spec, FACTS["gpt"], result.mesh).templates
    assert [s.position for s in template.stages] == positions


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        (
            "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1I0,1W0,1F1,1F2,1I1,1W2,1W1,1I2\n",
            ["x.csv row 2, column 7: W of stage 1, microbatch 2 before its I"],
        ),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", [f"x.csv row 2: no {what} of stage 1, microbatch 1" for what in ("F", "backward")]),
        ("0F0,0B0\n1F0,1B0,0F0\n", ["x.csv row 2, column 3: F of stage 0, microbatch 0: stage 0 lives on row 1", "a second time"]),
    ],
    ids=["W before I", "missing microbatch", "two owners of a stage"],
)
def test_case_46_a_file_of_rows_that_cannot_be_run(rows: str, messages: list[str]) -> None:
    one = only(spec("pp = 2", pipeline='schedule = «rows»("x.csv")'), loader=lambda path: rows if path == "x.csv" else None)
    assert (one.code, one.severity) == ("PDL409", Severity.ERROR)
    told = [one.message, *one.notes]
    assert len(told) == len(messages)
    assert all(message in text for message, text in zip(messages, told, strict=True))


def test_case_46_the_same_rows_in_order_are_accepted() -> None:
    rows = "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1I1,1W1\n"
    result = passes(spec("pp = 2", pipeline='schedule = rows("x.csv")'), loader=lambda path: rows)
    assert result.spec is not None
    assert result.spec.pipeline is not None
    assert result.spec.pipeline.microbatches == 2


def test_case_43_a_layer_in_no_stage() -> None:
    one = only(spec("pp = 2", pipeline=f'«stage a {{ "tok", "layers.0", "layers.1" }}»; stage b {{ "layers.3", "norm", "head" }}; {GPIPE}'))
    assert (one.code, one.severity, one.message) == ("PDL401", Severity.ERROR, "layers.2 is in no stage")
    assert labels(one) == [(9, 3, "the next one")]
    assert one.help == ('add "layers.2" to stage a or b',)


def test_case_43_a_module_that_does_not_exist() -> None:
    one = only(
        spec("pp = 2", pipeline=f'stage a {{ "tok", "layers[..2]", «"layer.2"» }}; stage b {{ "layers.3", "norm", "head" }}; {GPIPE}')
    )
    assert (one.code, one.severity, one.message) == ("PDL401", Severity.ERROR, "no module layer.2; did you mean layers.2")


def test_case_43_a_layer_in_two_stages() -> None:
    one = only(spec("pp = 2", pipeline=f'{HALVES}; «stage b {{ "layers[1..]", "norm", "head" }}»; {GPIPE}'))
    assert (one.code, one.severity, one.message) == ("PDL401", Severity.ERROR, "layers.1 is in two stages, a and b")
    assert labels(one) == [(8, 3, "a")]


@pytest.mark.parametrize("first", ['"tok", "layers.0", "layers.1", "layers.2"', '"tok", "layers[..2]", "layers.2"'])
def test_case_43_each_layer_named_once_is_accepted(first: str) -> None:
    result = passes(spec("pp = 2", pipeline=f'stage a {{ {first} }}; stage b {{ "layers.3", "norm", "head" }}; {GPIPE}'))
    assert result.mesh is not None
    assert result.mesh.positions == 2


# --- sharding -------------------------------------------------------------------------------------------------------------------------------


def test_case_62_one_unit_for_everything_and_the_peak_it_means() -> None:
    one = only(spec("sh = 4", shard='shard { "**" => «fsdp(sh)» }'), facts="gpt_large_head")
    assert (one.code, one.severity) == ("PDL307", Severity.WARNING)
    assert one.message == "layer tok is one unit and holds 98 % of the parameters under fsdp(sh)"
    # 50000 x 64 in the embedding; in the block four of 64 x 64, two of 256 x 64 and two norms, and one more norm at the end; 4 bytes each
    largest = 4 * 50_000 * 64
    total = largest + 4 * (4 * 64 * 64 + 2 * 256 * 64 + 3 * 64)
    peak = total / 4 + largest
    assert [f"{size / 2**20:.1f}" for size in (total, largest, peak)] == ["12.4", "12.2", "15.3"]
    assert one.notes == ("peak for parameters on a rank: 12.4 MiB / 4 + 12.2 MiB = 15.3 MiB; not sharded it is 12.4 MiB",)
    assert one.help == ("cut the model into more layers, or split this one over a tensor axis",)
    passes(spec("sh = 4", shard=FSDP))


def test_case_74_a_pattern_that_matches_nothing() -> None:
    one = only(spec("tp = 2", shard='shard {\n  «"layers.*.attention.wq.weight"» => colwise(tp)\n  "**" => replicate()\n}'))
    assert (one.code, one.severity) == ("PDL301", Severity.ERROR)
    assert one.message == 'pattern "layers.*.attention.wq.weight" matches no parameter'
    assert one.help == ('did you mean "layers.*.attn.wq.weight" (4 parameters)?',)
    assert one.notes == ("35 parameters were read from pdsl.models:gpt",)


def test_case_74_a_pattern_that_matches_what_has_no_columns() -> None:
    one = only(spec("tp = 2", shard='shard {\n  "**.norm*.weight" => «rowwise(tp)»\n  "**" => replicate()\n}'))
    assert (one.code, one.severity) == ("PDL301", Severity.ERROR)
    assert one.message == 'rowwise takes parameters of Linear and Embedding; "layers.0.norm1.weight" (and 8 more) belongs to RMSNorm'
    assert labels(one) == [(7, 3, "matches layers.0.norm1.weight")]
    assert one.help == ("name the matrices alone, and leave the others to a rule with replicate() or fsdp(...)",)


def test_case_74_the_pattern_that_is_offered_is_accepted() -> None:
    rules = '"layers.*.attn.wq.weight" => colwise(tp)\n  "layers.*.attn.wo.weight" => rowwise(tp)\n  "**" => replicate()'
    result = passes(spec("tp = 2", shard=f"shard {{\n  {rules}\n}}"))
    assert result.mesh is not None
    assert result.mesh.tensor_size == 2


# --- the text itself ------------------------------------------------------------------------------------------------------------------------


def test_case_86_a_value_set_twice_is_an_error_with_both_places() -> None:
    one = only(spec("dp = 2", batch="16\n  «batch» = 8"))
    assert (one.code, one.severity, one.message) == ("PDL107", Severity.ERROR, "train.batch is written twice, in lines 9 and 10")
    assert labels(one) == [(9, 3, "first")]
