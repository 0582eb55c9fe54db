"""What counts as equal when a plan is compared with one process."""

from __future__ import annotations

import torch

from pdsl.runtime.verify import Trace, assemble, compare, oracle, verify_rank
from tests.runtime.test_batch_cases import compiled


def trace(**gradients: float) -> Trace:
    return Trace((1.0,), (1.0,), ({name: torch.tensor([value]) for name, value in gradients.items()},), ({},))


def far(ours: Trace, theirs: Trace) -> set[str]:
    return {d.what for d in compare(ours, theirs, 1e-5).deviations if not d.relative <= 1e-5}


def test_a_gradient_in_which_large_terms_cancel_may_differ_by_their_roundings() -> None:
    """One process of plain torch gives 7.87e-06 or 7.80e-06 for the gain before a norm, by the order of its sums."""
    assert far(trace(gain=7.80e-6, weight=1.0), trace(gain=7.87e-6, weight=1.0)) == set()


def test_a_gradient_that_is_wrong_is_far_however_small() -> None:
    assert far(trace(gain=1.0e-5), trace(gain=2.0e-5)) == {"gradient of gain"}
    assert far(trace(gain=0.0), trace(gain=1.0e-6)) == {"gradient of gain"}
    assert far(trace(weight=0.50001), trace(weight=0.5)) == {"gradient of weight"}


def test_a_gradient_on_one_side_only_is_far() -> None:
    assert far(trace(weight=1.0, extra=0.0), trace(weight=1.0)) == {"gradient of extra"}
    assert far(trace(weight=float("nan")), trace(weight=1.0)) == {"gradient of weight"}


def test_rows_without_a_token_that_counts_leave_no_trace_where_one_process_takes_the_batch_in_parts() -> None:
    """In low precision it takes row by row here, and the mean of a row without such tokens is 0 / 0."""
    precision = "precision { params = bf16 }"
    plan = compiled("axis dp = 1", "own tokens", 'words_rows", size = 16, empty = 8', blocks=precision, train="accumulate = 8")
    ours = assemble(plan, [verify_rank(plan, 0, None, steps=2)])
    found = compare(ours, oracle(plan, ours), 2e-2)
    assert found.ok
    assert {d.what for d in found.deviations} >= {"gradient of blocks.0.linear.weight"}
