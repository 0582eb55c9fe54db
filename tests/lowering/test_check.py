"""The whole check: known cases of misconfigured training, several findings in one run, models that cannot be read, silence where it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdsl.grammar.diagnostics import Severity
from pdsl.grammar.errors import ModelError
from pdsl.grammar.source import Source
from pdsl.lowering.blocks import BLOCKS, leaf_paths
from pdsl.lowering.check import check
from pdsl.lowering.rules import RULES, explain
from tests.facts import FACTS, gpt_facts

FSDP = 'shard { "**" => fsdp(sh) }'
WHOLE = 'shard { "**" => replicate() }'


def text(mesh: str, *, shard: str = WHOLE, pipeline: str = "", batch: int = 16, train: str = "", extra: str = "") -> str:
    over = f"pipeline over pp {{ {pipeline} }}" if pipeline else ""
    axes = "; ".join(f"axis {pair}" for pair in mesh.split(", "))
    return f"""pdsl 1
mesh {{ {axes} }}
model "pdsl.models:gpt" {{ layers = 4 }}
{shard}
{over}
train {{ data = "pdsl.data:digits"; batch = {batch}; steps = 10; optimizer = adamw(lr = 1e-3); {train} }}
{extra}
"""


def found(source: str, **how):
    return check(Source("x.pdsl", source), **({"facts": FACTS["gpt"]} | how)).diagnostics


def only(source: str, **how):
    (one,) = found(source, **how)
    return one


# --- the case bank --------------------------------------------------------------------------------------------------------------------------


def test_case_1_product_of_axes_against_ranks():
    one = only(text("dp_rep = 4, dp_shard = 2", shard='shard { "**" => fsdp(dp_shard) }'), world=2)
    assert (one.code, one.message) == ("PDL201", "the mesh needs 4 x 2 = 8 ranks, the job has 2")
    assert one.help == ("dp_rep = 1 gives 2; or write `axis dp_rep = rest`",)
    assert [(label.text, label.span.text) for label in one.labels] == [("4", "4")]


def test_case_2_a_feature_without_its_axis():
    one = next(d for d in found(text("sh = 1, tp = 2", shard=FSDP), world=2) if d.severity is Severity.ERROR)
    assert (one.code, one.message) == ("PDL202", "fsdp(sh) has no axis of size > 1 to shard over: sh = 1")
    assert one.help == ("tp = 1 leaves 2 ranks for sh; or write replicate() in place of fsdp(sh)",)
    assert one.span.begin.line == 4


def test_case_2_an_axis_that_was_shrunk_on_purpose_is_no_mistake():
    assert not found(text("pp = 2, sh = 2", shard=FSDP, pipeline="schedule = gpipe(microbatches = 2)"), overrides=["mesh.sh=1"])


def test_case_6_roles_by_name_and_not_by_place():
    result = check(
        Source("x.pdsl", text("dp_shard = 4, dp_replicate = 1", shard='shard { "**" => fsdp(dp_shard) }')), facts=FACTS["gpt"], world=4
    )
    assert result.sound
    assert (result.mesh.shard_size, result.mesh.pipelines) == (4, 1)


def test_case_8_a_replicate_axis_of_one_is_lowered_away_and_noted():
    result = check(Source("x.pdsl", text("rep = 1, sh = 2", shard=FSDP)), facts=FACTS["gpt"], world=2)
    assert result.sound
    assert [(d.code, d.severity, d.message) for d in result.diagnostics] == [
        ("PDL203", Severity.NOTE, "axis rep has size 1: it is lowered away")
    ]


def test_case_11_batch_not_divisible_by_microbatches():
    one = only(text("pp = 2", pipeline="schedule = gpipe(microbatches = 3)", batch=8))
    assert (one.code, one.message) == ("PDL404", "a batch of 8 samples does not divide into 3 microbatches: 8 % 3 = 2")
    assert one.help == ("microbatches = 1, 2, 4 or 8; or batch = 6 or 9",)


def test_case_11_each_pipeline_has_its_part_of_the_batch():
    one = only(text("dp = 2, pp = 2", pipeline="schedule = gpipe(microbatches = 4)", batch=12))
    assert one.message == "a batch of 12 samples over 2 pipelines leaves 6 for each, which 4 microbatches do not divide: 6 % 4 = 2"
    assert one.help == ("microbatches = 1, 2, 3 or 6; or batch = 8 or 16",)


def test_case_11_counts_that_the_schedule_refuses_are_not_offered():
    one = only(text("dp = 2, pp = 2", pipeline="schedule = one_f_one_b(microbatches = 4)", batch=12))
    assert one.help == ("microbatches = 2, 3 or 6; or batch = 8 or 16",)


def test_case_13_1f1b_refuses_one_microbatch_where_gpipe_warns():
    one = only(text("pp = 2", pipeline="schedule = one_f_one_b(microbatches = 1)"))
    assert (one.code, one.severity) == ("PDL402", Severity.ERROR)
    assert one.message == "one_f_one_b needs at least as many microbatches as stages: 1 < 2"
    assert one.help == ("microbatches = 2 leaves a bubble of 33 %, 4 of 20 %, 8 of 11 %; gpipe accepts 1",)
    other = only(text("pp = 2", pipeline="schedule = gpipe(microbatches = 1)"))
    assert (other.code, other.severity) == ("PDL408", Severity.WARNING)
    assert other.message == "gpipe over 2 stages with 1 microbatch leaves a bubble of 50 %"


def test_case_24_the_schedule_places_the_stages():
    stages = 'stage a { "tok", "layers[..2]" }; stage b { "layers[2..]", "norm", "head" }; '
    codes = {d.code: d for d in found(text("pp = 2", pipeline=f"{stages} schedule = zbv(microbatches = 4)"))}
    assert set(codes) == {"PDL406", "PDL407"}
    assert codes["PDL406"].notes == ("the schedule places them: (0, 3) / (1, 2)",)


def test_case_43_a_gap_and_a_typo_in_the_list_of_stages():
    schedule = "schedule = gpipe(microbatches = 4)"
    gap = only(
        text("pp = 2", pipeline=f'stage a {{ "tok", "layers.0", "layers.1" }}; stage b {{ "layers.3", "norm", "head" }}; {schedule}')
    )
    assert (gap.code, gap.message) == ("PDL401", "layers.2 is in no stage")
    typo = only(
        text("pp = 2", pipeline=f'stage a {{ "tok", "layers[..2]", "layer.2" }}; stage b {{ "layers.3", "norm", "head" }}; {schedule}')
    )
    assert (typo.code, typo.message) == ("PDL401", "no module layer.2; did you mean layers.2")


def test_case_62_one_unit_for_everything():
    one = only(text("sh = 4", shard=FSDP), facts=FACTS["gpt_large_head"])
    facts = FACTS["gpt_large_head"]
    total, largest = sum(p.bytes for p in facts.parameters), facts.parameter("tok.weight").bytes
    assert (one.code, one.severity) == ("PDL307", Severity.WARNING)
    mib = 2**20
    assert one.notes == (
        (
            f"peak for parameters on a rank: {total / mib:.1f} MiB / 4 + {largest / mib:.1f} MiB = {(total / 4 + largest) / mib:.1f} MiB; "
            f"not sharded it is {total / mib:.1f} MiB"
        ),
    )


def test_case_74_a_pattern_that_matches_nothing_or_no_matrix():
    nothing = only(text("tp = 2", shard='shard { "layers.*.attention.wq.weight" => colwise(tp); "**" => replicate() }'))
    assert (nothing.code, nothing.severity) == ("PDL301", Severity.ERROR)
    assert nothing.help == ('did you mean "layers.*.attn.wq.weight" (4 parameters)?',)
    wrong = only(text("tp = 2", shard='shard { "**.norm*.weight" => rowwise(tp); "**" => replicate() }'))
    assert wrong.message.startswith(
        'rowwise takes parameters of Linear and Embedding; "layers.0.norm1.weight" (and 8 more) belongs to RMSNorm'
    )


def test_case_86_a_value_set_twice_is_an_error_with_both_places():
    one = only(text("dp = 2", train="batch = 8"))
    assert (one.code, one.severity, one.message) == ("PDL107", Severity.ERROR, "train.batch is written twice, in lines 6 and 6")
    assert [label.span.text for label in one.labels] == ["batch"]


def test_uneven_first_dims_are_fine_under_plain_fsdp():
    assert not found(text("sh = 3", shard=FSDP, batch=15))


# --- the run of all rules -------------------------------------------------------------------------------------------------------------------


def test_all_findings_come_in_one_run_in_the_order_of_the_text():
    source = text(
        "dp = 2, tp = 3", shard='shard { "layers.*.mlp.w1.weight" => colwise(tp); "nothing" => replicate(); "**" => fsdp(do) }', batch=3
    )
    source = source.replace("steps = 10", "steps = 0").replace("pdsl 1\n", "pdsl 1\nparam spare: int = 1\n")
    codes = [d.code for d in found(source)]
    assert codes == ["PDL103", "PDL301", "PDL101", "PDL102"]


def test_a_block_with_an_error_silences_what_depends_on_it():
    assert [d.code for d in found(text("dp = 2, pp = tow", pipeline="schedule = one_f_one_b(microbatches = 1)", batch=3))] == ["PDL101"]


def test_without_a_model_one_note_says_so():
    codes = [d.code for d in found(text("dp = 2", shard='shard { "nothing" => replicate() }'), facts=None)]
    assert codes == ["PDL900"]


def test_a_model_that_cannot_be_read_is_a_finding_at_its_name():
    def broken(spec):
        raise ModelError(f"{spec.model.factory} raised ValueError: no")

    one = only(text("dp = 2"), facts=broken)
    assert (one.code, one.message, one.span.text) == ("PDL108", "pdsl.models:gpt raised ValueError: no", '"pdsl.models:gpt"')


def test_the_model_is_not_read_if_its_block_is_wrong():
    def never(spec):
        raise AssertionError

    assert [d.code for d in found(text("dp = 2").replace("layers = 4", "layers = fuor"), facts=never)] == ["PDL101"]


def test_facts_are_asked_for_with_the_final_values():
    seen = []

    def facts(spec):
        seen.append(dict(spec.model.arguments))
        return gpt_facts()

    assert not found(text("dp = 2"), facts=facts, overrides=["model.layers=8"])
    assert seen == [{"layers": 8}]


def test_more_stages_than_the_model_can_be_cut_into():
    one = only(text("pp = 6", pipeline="schedule = gpipe(microbatches = 16)"), facts=FACTS["gpt_uncut"])
    assert one.message == "6 stages are wanted, and the model can be cut into 5"
    assert one.notes[1] == "no stage may begin at layers.3: a mask made in layers.2 is used here"


# --- silence --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "comment", ["param n: int = 1  # pdsl: ignore[PDL103] later", "# pdsl: ignore[PDL301, PDL103] later\nparam n: int = 1"]
)
def test_a_warning_can_be_silenced_on_its_line_or_the_line_before(comment):
    left = [d.code for d in found(text("dp = 2", extra=comment))]
    assert left == (["PDL901"] if "PDL301" in comment else [])


def test_an_ignore_for_a_rule_that_was_not_run_is_not_called_unused():
    source = text("sh = 2", shard='# pdsl: ignore[PDL307] one layer is enough here\nshard { "**" => fsdp(sh) }')
    assert [d.code for d in found(source, facts=None)] == ["PDL900"]
    assert [d.code for d in found(source)] == ["PDL901"]
    assert not found(source, facts=FACTS["gpt_large_head"])


def test_errors_cannot_be_silenced():
    codes = [d.code for d in found(text("dp = 2", extra="# pdsl: ignore[PDL101] we like it\ntrian { }"))]
    assert codes == ["PDL901", "PDL101"]


# --- the table and the rules ----------------------------------------------------------------------------------------------------------------


def test_every_key_has_one_line_of_help_and_a_default_of_its_own_kind():
    for path, key in leaf_paths():
        assert key.help
        assert "\n" not in key.help
        assert not (key.required and key.default is not None), path
        if key.choices and isinstance(key.default, str):
            assert key.default in key.choices, path


def test_explain_knows_all_codes_and_no_others():
    assert all(explain(rule.code.lower()).startswith(rule.code) for rule in RULES)
    with pytest.raises(KeyError):
        explain("PDL999")


def test_the_table_has_the_blocks_of_the_language():
    assert list(BLOCKS) == [
        "cluster", "mesh", "model", "shard", "pipeline", "precision", "memory", "fault_budget", "freeze", "checkpoint", "train"
    ]  # fmt: skip


def test_checking_loads_neither_torch_nor_what_only_the_terminal_needs():
    code = (
        "import sys\n"
        "from pdsl.grammar.source import Source\n"
        "from pdsl.lowering.check import check\n"
        f"found = check(Source('x', {text('dp = 2')!r}))\n"
        "assert found.sound\n"
        "print([m for m in ('torch', 'rich', 'click', 'difflib', 'pdsl.lowering.planner', 'pdsl.lowering.plan') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
