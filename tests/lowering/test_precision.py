"""What a `precision` block says of each parameter, and facts that are read for it."""

from __future__ import annotations

import pytest
from attrs import evolve

from pdsl.grammar.patterns import parse_pattern
from pdsl.lowering.facts import BufferFacts, ParameterFacts
from pdsl.lowering.facts_cache import facts_key
from pdsl.lowering.precision import AS_MADE, RunAs, applies, compute_format, keeps_format, sum_format
from pdsl.lowering.simulate import flop_costs
from pdsl.lowering.spec import PrecisionSpec
from tests.facts import gpt_facts

LOW, PLAIN = PrecisionSpec("bf16"), PrecisionSpec()
FACTS = gpt_facts()


def parameter(dtype: str, name: str = "layers.0.attn.wq.weight") -> ParameterFacts:
    return evolve(FACTS.parameter(name), dtype=dtype)


@pytest.mark.parametrize(
    ("precision", "own", "computes"),
    [
        (PLAIN, "float32", "float32"),
        (PLAIN, "bfloat16", "bfloat16"),
        (PLAIN, "float64", "float64"),
        (LOW, "float32", "bfloat16"),
        (LOW, "float64", "bfloat16"),
        (LOW, "bfloat16", "bfloat16"),
        (LOW, "int64", "int64"),
    ],
)
def test_params_narrows_and_never_widens(precision: PrecisionSpec, own: str, computes: str) -> None:
    assert compute_format(precision, FACTS, parameter(own)) == computes


@pytest.mark.parametrize(
    ("precision", "own", "sums"),
    [
        (PLAIN, "float32", "float32"),
        (PLAIN, "bfloat16", "float32"),
        (PLAIN, "float64", "float64"),
        (LOW, "float32", "float32"),
        (PrecisionSpec("bf16", "bf16"), "float32", "bfloat16"),
        (PrecisionSpec("fp32", "bf16"), "float32", "bfloat16"),
    ],
)
def test_sums_are_in_fp32_unless_the_spec_says_otherwise(precision: PrecisionSpec, own: str, sums: str) -> None:
    assert sum_format(precision, parameter(own)) == sums


def test_what_stands_beside_statistics_keeps_its_format() -> None:
    facts = evolve(FACTS, updated=(BufferFacts("layers.0.attn.wq.mean", (4,), "float32", (1,)),))
    beside, elsewhere = facts.parameter("layers.0.attn.wq.weight"), facts.parameter("layers.0.attn.wk.weight")
    assert keeps_format(facts, beside)
    assert not keeps_format(facts, elsewhere)
    assert (compute_format(LOW, facts, beside), compute_format(LOW, facts, elsewhere)) == ("float32", "bfloat16")


def test_nothing_is_cast_for_a_model_in_fp32_by_default() -> None:
    low = evolve(FACTS, parameters=(parameter("bfloat16"), *FACTS.parameters[1:]))
    assert (applies(PLAIN, FACTS), applies(LOW, FACTS), applies(PLAIN, low)) == (False, True, True)


def test_facts_are_kept_apart_by_formats_and_recomputation() -> None:
    """A pattern with a name in it is another one if the name has another value."""
    halves = [parse_pattern("layers[0..half]", {"half": n}) for n in (1, 2)]
    ways = [AS_MADE, RunAs(LOW), RunAs(recompute=halves[0]), RunAs(recompute=halves[1]), RunAs(LOW, halves[0])]
    assert len({facts_key("pdsl.models:gpt", (), run_as=way) for way in ways}) == len(ways)


def test_what_is_computed_again_comes_before_the_input_gradient() -> None:
    costs = flop_costs((1, 2, 3), (0, 2, 0))
    assert costs.forward == (1, 2, 3)
    assert [costs.backward_input[s] + costs.backward_weight[s] for s in range(3)] == [2, 6, 6]
    assert costs.backward_input[1] == 6, "a backward that runs something again cannot be had in halves"
