"""The whole check: several findings in one run, models that cannot be read, silence where it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from attrs import evolve

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
        "cluster", "mesh", "model", "shard", "pipeline", "precision", "memory", "fault_budget", "freeze", "checkpoint", "train", "validate",
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


@pytest.mark.parametrize(("word", "help_"), [("mseh", "did you mean mesh?"), ("grid", "one of: cluster, mesh, model, ")])
def test_a_block_under_another_name_is_one_finding(word, help_):
    one = only(text("pp = 2, sh = 2", shard=FSDP, pipeline="schedule = gpipe(microbatches = 2)").replace("mesh {", f"{word} {{"))
    assert one.message == f"unknown block {word}"
    assert one.help[0].startswith(help_)


@pytest.mark.parametrize("stages", ["", 'stage a { "tok", "layers[..2]" }; stage b { "layers[2..]", "norm" }; '])
def test_a_model_without_a_chain_is_not_cut_and_the_reason_is_told(stages):
    reason = "no chain of blocks, so the model can be sharded but not cut into stages: layers.0 is called more than once"
    facts = evolve(FACTS["gpt"], layers=FACTS["gpt"].layers[:1], warnings=(reason,))
    facts = evolve(facts, parameters=tuple(evolve(p, layers=(0,)) for p in facts.parameters))
    one = only(text("pp = 2", pipeline=f"{stages}schedule = gpipe(microbatches = 4)"), facts=facts)
    assert one.message == "2 stages are wanted, and the model can be cut into 1"
    assert one.notes == ("1 layer was read from pdsl.models:gpt", reason)


def test_more_ranks_than_any_machine_has_are_a_slip():
    one = only(text("dp = 2000000, sh = 2", shard=FSDP, batch=4000000))
    assert (one.code, one.message) == ("PDL201", "the mesh has 4000000 ranks: at most 131072 can be planned")
    assert one.span.text == "2000000"
