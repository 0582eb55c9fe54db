"""Where torch by itself is wrong, or says nothing: each with the wrong value, so that a torch that was mended shows.

Where one of these fails with a newer torch, look at its row in `pdsl.lowering.composability`: a rule, or a detour of the runtime, may no longer be needed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.pool import Pool
from tests.runtime import upstream_alone as alone
from tests.user_models import four_linears, four_linears_rows

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the wrong values were measured with torch 2.13")


@pytest.fixture(scope="module")
def gradients() -> dict[str, float]:
    """Norms of the gradients of one process, by parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = four_linears()
    rows = four_linears_rows().columns
    nn.functional.mse_loss(model(rows["x"]), rows["target"]).backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters()}


def test_names_of_a_mesh_are_not_read(pool: Pool):
    """Case 6: a dim called dp_shard of 4 ranks replicates, since it comes first."""
    assert pool.run(alone.mesh_named_backwards, 4) == [(8, 8)] * 4


def test_an_optimizer_that_was_built_before_sharding_changes_nothing(pool: Pool):
    assert pool.run(alone.optimizer_first, 2) == [0.0, 0.0]


def test_a_pattern_that_matches_nothing_is_a_warning(pool: Pool):
    assert pool.run(alone.pattern_without_match, 2) == [((8, 8), 1)] * 2


def test_sharded_modules_are_refused_where_uneven_batches_end_together(pool: Pool):
    assert pool.run(alone.uneven_with_join, 2) == ["refused"] * 2


def test_norms_on_two_meshes_are_refused(pool: Pool):
    assert pool.run(alone.norms_on_two_meshes, 4) == ["refused"] * 4


def test_each_stage_is_clipped_by_a_norm_of_its_own(pool: Pool, gradients: dict[str, float]):
    found = pool.run(alone.clipped_per_stage, 2)
    assert found == pytest.approx([0.217129, 0.299016], abs=1e-6)
    whole = math.hypot(*gradients.values())
    assert whole == pytest.approx(0.369535, abs=1e-6)
    assert whole == pytest.approx(math.hypot(*found), rel=1e-5)


@pytest.mark.parametrize(("scale", "wrong"), [(True, 0.106822), (False, 0.683663)])
def test_two_rounds_of_a_schedule_have_no_right_scale(pool: Pool, gradients: dict[str, float], scale: bool, wrong: float):
    """Case 47: with `scale_grads` the second round divides the first once more, without it nothing is divided."""
    first, _ = pool.run(alone.accumulated_with_scale, 2, scale)
    right = 2 * gradients["0.weight"]
    assert right == pytest.approx(0.170916, abs=1e-6)
    assert first == pytest.approx(wrong, abs=1e-6)
    assert first == pytest.approx(right * (1.25 / 2 if scale else 4), rel=1e-5)


def test_tied_copies_in_two_stages_each_get_a_part_of_the_gradient(pool: Pool):
    (first, true), (second, _) = pool.run(alone.tied_in_two_stages, 2)
    assert (first, second, true) == pytest.approx((1.221403, 1.162889, 2.211805), abs=1e-5)


def test_the_probe_of_a_pipeline_counts_as_a_batch(pool: Pool):
    """Case 40: four microbatches, and a fifth that nobody asked for."""
    assert pool.run(alone.statistics_of_probe, 2)[0] == 5


def test_replicas_under_whole_backwards_are_reduced(pool: Pool):
    assert pool.run(alone.replicated_halves, 4, "ScheduleInterleaved1F1B") == [[0.0, 0.0]] * 4


def test_replicas_under_backwards_in_halves_are_not_reduced(pool: Pool):
    """The gradients of two replicas differ, and nothing is said; only the first stage, which has no input half, is reduced."""
    first, _, last, _ = pool.run(alone.replicated_halves, 4, "ScheduleInterleavedZeroBubble")
    assert first == pytest.approx([0.0, 0.037357], abs=1e-5)
    assert last == pytest.approx([0.064771, 0.043012], abs=1e-5)
