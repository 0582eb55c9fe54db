"""What works together: pairs of features, how they do in torch by itself, and how in PDSL.

A row of the table names what shows its verdict: tests of PDSL or rules, and, where torch itself is wrong or refuses, the test that notices when
that changes. A pair that is not here is not known to be a pair at all: its features do not touch each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from attrs import Factory, field, frozen

__all__ = ["TABLE", "Pair", "Verdict", "pairs_of"]


class Verdict(Enum):
    """What PDSL makes of a pair."""

    EXACT = "exact"
    REFUSED = "refused"
    DIFFERENT = "another way"


@frozen
class Pair:
    """One row. `features` are the words of the language where it has some.

    `alone` is what torch does by itself, and `measured` with which of its versions that was seen (none: it is said to be so); `proof` are the codes of rules and the tests (file without `.py`,
    then the function) that show the verdict, `upstream` the test that shows what torch does. `reason` is one sentence.
    """

    features: tuple[str, str]
    verdict: Verdict
    reason: str
    proof: tuple[str, ...]
    alone: str = "right"
    upstream: str = ""
    measured: tuple[str, ...] = field(default=Factory(lambda self: ("2.13",) if self.upstream else (), takes_self=True))

    def __str__(self) -> str:
        return " x ".join(self.features)


_EXACT, _REFUSED, _DIFFERENT = Verdict.EXACT, Verdict.REFUSED, Verdict.DIFFERENT
_UPSTREAM = "runtime/test_upstream::"

TABLE: tuple[Pair, ...] = (
    Pair(
        ("whole backwards", "fsdp x tp"), _EXACT,
        "units stay whole for the step, or are gathered again for each microbatch where the spec says so",
        ("runtime/test_equality::test_plan_with_pipeline_equals_one_process", "runtime/test_sharding::test_every_choice_is_equal_to_one_process_and_makes_the_planned_collectives"),
    ),
    Pair(
        ("backwards in halves", "fsdp"), _EXACT,
        "units stay whole for the step and are reduced in the last weight half, without the hooks that FSDP2 has on a backward",
        ("runtime/test_split_cases::test_case_26_halves_with_sharded_layers_have_the_gradients_of_one_process", "runtime/test_split_equality::test_plans_with_halves_equal_one_process"),
        alone="right only if nothing is given back before the last half", measured=("2.13", "2.14"),
        upstream="runtime/test_split_cases::test_case_26_torch_itself_is_wrong_unless_nothing_is_given_back",
    ),
    Pair(
        ("backwards in halves", "memory.reshard = true"), _REFUSED,
        "what was gathered must be there for both halves",
        ("PDL415",), alone="gradients are silently wrong, or None", measured=("2.13", "2.14"),
        upstream="runtime/test_split_cases::test_case_26_torch_itself_is_wrong_unless_nothing_is_given_back",
    ),
    Pair(
        ("backwards in halves", "memory.sync = every"), _REFUSED,
        "gradients are complete after the second half", ("PDL415",), alone="reduces what the first half has",
    ),
    Pair(
        ("backwards in halves", "replicas"), _EXACT,
        "gradients are summed over replicas by PDSL once they are final, not by hooks of DDP",
        ("runtime/test_split_equality::test_plans_with_halves_equal_one_process",),
        alone="silently not reduced, but for the first stage", upstream=_UPSTREAM + "test_replicas_under_backwards_in_halves_are_not_reduced",
    ),
    Pair(
        ("whole backwards", "replicas"), _EXACT, "gradients are summed over replicas once they are final",
        ("runtime/test_equality::test_plan_with_pipeline_equals_one_process",), upstream=_UPSTREAM + "test_replicas_under_whole_backwards_are_reduced",
    ),
    Pair(("backwards in halves", "tp"), _EXACT, "exchanges between tensor ranks are part of either half", ("runtime/test_split_equality::test_plans_with_halves_equal_one_process",)),
    Pair(
        ("cross entropy", "scores split over tp"), _EXACT,
        "greatest score, sum and the one score that is asked for are exchanged in place of the scores of all classes; what takes all of them is refused",
        ("PDL311", "runtime/test_split_loss::test_it_is_the_cross_entropy_of_torch", "runtime/test_split_loss::test_split_scores_train_what_one_process_trains"),
        alone="a mean is refused on a mesh of several dims",
    ),
    Pair(
        ("backwards in halves", "train.compile"), _REFUSED, "a compiled layer has its backward in one piece", ("PDL710",),
        alone="refused",
    ),
    Pair(
        ("backwards in halves", "memory.recompute"), _EXACT,
        "the input half is the whole backward there, so it is right and gains nothing",
        ("PDL416", "runtime/test_split_backward::test_what_is_computed_again_cannot_be_had_in_halves", "runtime/test_split_cases::test_models_that_are_hard_to_take_apart_equal_one_process"),
        alone="runs out of memory",
    ),
    Pair(
        ("pipeline", "a tied parameter"), _EXACT, "each stage holds a copy, and the gradients of all copies are summed",
        ("runtime/test_equality::test_tied_embedding_over_stages_equals_one_process", "runtime/test_split_equality::test_a_tied_embedding_equals_one_process"),
        alone="each copy has a part of the gradient", upstream=_UPSTREAM + "test_tied_copies_in_two_stages_each_get_a_part_of_the_gradient",
    ),
    Pair(
        ("pipeline", "train.accumulate"), _EXACT, "every microbatch weighs by its share of the whole batch from the start",
        ("runtime/test_cases::test_case_47_two_rounds_are_0_1897_and_not_0_1356",),
        alone="wrong scale, with scale_grads and without", upstream=_UPSTREAM + "test_two_rounds_of_a_schedule_have_no_right_scale",
    ),
    Pair(
        ("pipeline", "train.clip"), _EXACT, "one norm over all stages, shards and replicas",
        ("runtime/test_cases::test_case_57_the_norm_is_over_all_stages_and_one_factor_clips_all", "runtime/test_equality::test_clipping_uses_one_norm_over_all_stages_and_pipelines"),
        alone="a norm for each stage", upstream=_UPSTREAM + "test_each_stage_is_clipped_by_a_norm_of_its_own",
    ),
    Pair(
        ("pipeline", "batch statistics"), _EXACT, "shapes come from a probe on the meta device, which updates no buffer",
        ("runtime/test_statistics::test_case_40_every_microbatch_counts_once_and_the_probe_never", "PDL821"),
        alone="the probe counts as a batch", upstream=_UPSTREAM + "test_the_probe_of_a_pipeline_counts_as_a_batch",
    ),
    Pair(
        ("fsdp x tp on some layers", "train.clip"), _EXACT, "norms of local parts are added up over all ranks, each part once",
        ("runtime/test_equality::test_clipping_uses_one_norm_over_all_stages_and_pipelines",),
        alone="refused: norms lie on different meshes", upstream=_UPSTREAM + "test_norms_on_two_meshes_are_refused",
    ),
    Pair(
        ("fsdp", "replicas"), _EXACT, "axes shard or replicate by their role, wherever they stand in the mesh",
        ("runtime/test_cases::test_case_6_an_axis_shards_by_its_role_not_by_its_place", "runtime/test_sharding::test_every_choice_is_equal_to_one_process_and_makes_the_planned_collectives"),
        alone="the first dim of a mesh replicates, whatever it is called", upstream=_UPSTREAM + "test_names_of_a_mesh_are_not_read",
    ),
    Pair(
        ("fsdp", "an optimizer of one's own"), _EXACT, "PDSL calls the factory with the sharded parameters, and refuses an optimizer of others",
        ("runtime/test_cases::test_case_66_an_optimizer_made_before_sharding_is_refused", "runtime/test_cases::test_case_66_an_optimizer_of_ones_own_moves_the_weights"),
        alone="one that was built before sharding changes nothing", upstream=_UPSTREAM + "test_an_optimizer_that_was_built_before_sharding_changes_nothing",
    ),
    Pair(
        ("tp", "a pattern with a typo"), _REFUSED, "every pattern must match a parameter", ("PDL301",),
        alone="a warning, and the module stays whole", upstream=_UPSTREAM + "test_a_pattern_that_matches_nothing_is_a_warning",
    ),
    Pair(
        ("fsdp", "data that ends unevenly"), _DIFFERENT, "ranks agree on whether there is a next batch, and stop at the same step",
        ("runtime/test_batch_cases::test_case_20_all_ranks_stop_where_the_data_ends", "runtime/test_batch_cases::test_case_18_a_padded_batch_has_the_gradients_of_its_samples_alone"),
        alone="the longer rank hangs; Join is refused", upstream=_UPSTREAM + "test_sharded_modules_are_refused_where_uneven_batches_end_together",
    ),
    Pair(("fsdp", "memory.recompute"), _EXACT, "a layer is computed again inside its unit: two gathers, as without", ("runtime/test_sharding::test_every_choice_is_equal_to_one_process_and_makes_the_planned_collectives",), alone="a third gather if the unit is computed again as a whole"),
    Pair(("fsdp", "train.compile"), _EXACT, "a layer's forward is compiled inside of its unit's hooks", ("runtime/test_compiled::test_compiled_layers_are_equal_to_one_process",)),
    Pair(("tp", "train.compile"), _EXACT, "exchanges stay between the compiled parts of a layer", ("runtime/test_compiled::test_compiled_layers_are_equal_to_one_process",)),
    Pair(("whole backwards", "train.compile"), _EXACT, "the same as with sharded layers", ("runtime/test_compiled::test_compiled_layers_are_equal_to_one_process",), alone="right"),
    Pair(("dropout", "train.compile"), _REFUSED, "compiled code draws by itself, and its masks would depend on the mesh", ("PDL711",), alone="draws per rank"),
    Pair(
        ("dropout", "any mesh"), _EXACT, "numbers are drawn by rows of the global batch",
        ("runtime/test_draws::test_dropout_is_that_of_one_process",), alone="masks differ by rank, or agree where they should not",
    ),
    Pair(
        ("fsdp", "batch statistics"), _EXACT, "statistics are taken over the rows that one process would have, or the rule says what differs",
        ("runtime/test_statistics::test_rows_are_normalised_as_in_one_process", "PDL821"), alone="buffers differ by rank and are never synchronised",
    ),
    Pair(("fsdp", "two formats in a layer"), _REFUSED, "trained parameters of one unit have one format", ("PDL703",), alone="refused in a rank"),
)  # fmt: skip
"""All rows, by the order in which a reader meets them."""


def pairs_of(word: str, table: Iterable[Pair] = TABLE) -> tuple[Pair, ...]:
    """The rows in which a feature has this word."""
    return tuple(pair for pair in table if any(word.lower() in feature.lower() for feature in pair.features))
