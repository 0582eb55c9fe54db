from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import evolve

from pdsl.lowering.cost import boundary_bytes, cost, ring_all_reduce
from pdsl.lowering.plan import Sharding
from pdsl.lowering.program import ActionKind
from pdsl.lowering.programs import program
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.spec import CallValue
from tests.plans import facts, heterogeneous, rectangular

# The chain of tests.plans: an embedding of 20 x 8 = 160 numbers, blocks of 8 + 32 * 8 + 8 * 32 + 8 = 528, a head of 160; all of 4 bytes.
# A boundary tensor has 4 x 8 numbers for each sample: 128 bytes. A block saves 1000 bytes for each sample, the embedding 100, the head 200.

PLAIN = CallValue("sgd", (), (("lr", Fraction(1, 10)),))
MOMENTUM = CallValue("sgd", (), (("lr", Fraction(1, 10)), ("momentum", Fraction(9, 10))))


def test_shards_of_a_stage_are_counted_once_each():
    memory = cost(rectangular()).memory  # stage 0: embedding and two blocks over two shards
    assert [m.parameters for m in memory] == [
        (160 + 2 * 528) * 4 // 2,
        (160 + 2 * 528) * 4 // 2,
        (2 * 528 + 160) * 4 // 2,
        (2 * 528 + 160) * 4 // 2,
    ]
    assert [m.gradients for m in memory] == [m.parameters for m in memory]


@pytest.mark.parametrize(("optimizer", "states"), [(None, 2), (PLAIN, 0), (MOMENTUM, 1)])
def test_optimizer_state_follows_from_the_optimizer(optimizer, states):
    first = cost(rectangular(optimizer=optimizer)).memory[0]
    assert first.optimizer == states * first.parameters


def test_an_uneven_dim_is_cut_as_torch_chunks_it():
    plan = rectangular(positions=1, shard=2, model=facts(1, width=5))
    a, b = cost(plan).memory
    # rows of dim 0: embedding 20 -> 10, 10; norm 5 -> 3, 2; up 20 -> 10, 10; down 5 -> 3, 2; its bias 5 -> 3, 2; head 20 -> 10, 10
    assert a.parameters == 4 * (10 * 5 + 3 + 10 * 5 + 3 * 20 + 3 + 10 * 5)
    assert b.parameters == 4 * (10 * 5 + 2 + 10 * 5 + 2 * 20 + 2 + 10 * 5)


def test_one_f_one_b_keeps_as_many_activations_as_stages_are_left():
    memory = cost(rectangular(positions=2, microbatches=4)).memory  # 2 samples of a microbatch on each shard rank
    assert memory[0].activations == 2 * (100 + 2 * 1000) * 2
    assert memory[2].activations == 1 * (2 * 1000 + 200) * 2


def test_gpipe_keeps_the_activations_of_all_microbatches():
    memory = cost(rectangular(positions=2, microbatches=4, schedule="gpipe")).memory
    assert memory[0].activations == 4 * (100 + 2 * 1000) * 2
    assert memory[2].activations == 4 * (2 * 1000 + 200) * 2


def test_interleaved_activations_follow_the_rows_of_the_schedule():
    plan = rectangular(positions=2, shard=1, microbatches=4, batch=4, schedule="interleaved_1f1b", virtual=2, model=facts(8))
    # stages (embed, b0, b1) (b2, b3, b4) (b5, b6) (b7, head); position 0 holds stages 0 and 2: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 holds the most
    assert cost(plan).memory[0].activations == 4 * 2100 + 1 * 2000


def test_parameters_stay_whole_for_the_step_where_units_do_not_reshard():
    first = cost(rectangular()).memory[0]
    assert first.transient == 2 * (160 + 2 * 528) * 4  # gathered parameters and their whole gradients


def test_resharding_leaves_two_layers_and_small_ends_whole_and_the_gradients_of_all_microbatches():
    several = cost(evolve(rectangular(), sharding=Sharding(reshard=True))).memory[0]
    assert several.transient == (160 + 2 * 528 + 160 + 2 * 528) * 4
    one = cost(evolve(rectangular(positions=1, microbatches=1), sharding=Sharding(reshard=True))).memory[0]
    assert one.transient == (2 * 160 + 2 * 528 + 2 * 160 + 528) * 4


def test_nothing_is_gathered_without_a_shard_axis():
    plan = rectangular(shard=1)
    report = cost(plan)
    assert [(m.transient, t.all_gather, t.reduce_scatter) for m, t in zip(report.memory, report.traffic, strict=True)] == [(0, 0, 0)] * 2


def test_received_tensors_are_kept_from_forward_to_backward():
    memory = cost(rectangular(positions=3, shard=1, microbatches=4, batch=4)).memory
    assert [m.boundary for m in memory] == [128, 2 * 128 + 128, 128]  # a gradient; two inputs and a gradient; one input


def test_gathering_and_scattering_send_all_shards_but_one():
    traffic = cost(rectangular(positions=1, shard=4, batch=16)).traffic
    whole = (160 + 4 * 528 + 160) * 4
    assert {(t.all_gather, t.reduce_scatter) for t in traffic} == {(3 * whole // 4, 3 * whole // 4)}


def test_uneven_shards_are_padded_on_the_wire():
    a, b = cost(rectangular(positions=1, shard=2, model=facts(1, width=5))).traffic
    assert a.all_gather == b.all_gather == 4 * (10 * 5 + 3 + 10 * 5 + 3 * 20 + 3 + 10 * 5)


def test_resharding_gathers_for_every_forward_and_backward():
    traffic = cost(evolve(rectangular(positions=1, microbatches=4), sharding=Sharding(reshard=True))).traffic[0]
    # three blocks twice; the last one and the ends, which stay whole from forward to backward, once
    assert traffic.all_gather == 4 * (3 * 528 * 2 + 528 + 2 * 160) * 4 // 2


def test_replicas_sum_their_boxes_in_a_ring():
    traffic = cost(rectangular(replicas=4, positions=1, shard=2, batch=64)).traffic
    box = (160 + 4 * 528 + 160) * 4 // 2
    assert {t.gradient_sum for t in traffic} == {2 * box * 3 // 4}
    assert {t.point_to_point for t in traffic} == {0}


def test_unequal_pipelines_sum_every_layer_over_its_own_holders():
    plan = heterogeneous(((2, 3), (3, 5)))
    traffic = cost(plan).traffic
    # two holders for each layer, whatever stage it is in: each sends its own bytes once
    assert [t.gradient_sum for t in traffic] == [m.parameters for m in cost(plan).memory]


def test_a_tied_parameter_is_summed_over_its_stages_too():
    plan = rectangular(replicas=2, positions=2, shard=1, batch=32, model=facts(4, tied=True))
    blocks = 2 * 528 * 4
    assert cost(plan).traffic[0].gradient_sum == blocks + ring_all_reduce(160 * 4, 4)


def test_tensor_parallel_sums_outputs_forward_and_inputs_backward():
    plan = rectangular(positions=1, shard=1, tensor=2, microbatches=2, batch=4, model=facts(3))
    # a block: `down` is row-wise and sums 8 outputs, `up` is column-wise and sums the gradient of 8 inputs; 2 samples of 4 tokens; 2 microbatches
    once = ring_all_reduce(2 * 4 * 8 * 4, 2)
    assert [t.tensor for t in cost(plan).traffic] == [2 * 3 * 2 * once] * 2


def test_a_layout_in_slots_gathers_too():
    plan = rectangular(positions=1, shard=1, tensor=2, microbatches=1, batch=2, model=facts(1))
    slots = tuple(
        evolve(la, style="[tp, _]" if la.tensor_dim == 0 else "[_, tp]") if la.tensor_dim is not None else la for la in plan.layouts
    )
    tokens = 2 * 4 * 4  # two samples of four tokens of 4 bytes a feature
    sums = 2 * ring_all_reduce(tokens * 8, 2)
    assert cost(evolve(plan, layouts=slots)).traffic[0].tensor == sums + tokens * 32 // 2 + tokens * 32 // 2


def test_split_parameters_take_less_memory():
    plan = rectangular(positions=1, shard=1, tensor=2, microbatches=1, model=facts(3))
    assert cost(plan).memory[0].parameters == (160 + 3 * (8 + 256 // 2 + 256 // 2 + 8) + 160) * 4


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved_1f1b"])
def test_transfers_are_those_of_the_programs(schedule):
    virtual = 2 if schedule == "interleaved_1f1b" else 1
    plan = rectangular(positions=3, shard=1, microbatches=6, batch=12, schedule=schedule, virtual=virtual)
    sends = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
    counted = [sum(a.kind in sends for a in program(plan, rank).actions) * 128 * plan.rows_per_rank for rank in range(plan.world_size)]
    assert [t.point_to_point for t in cost(plan).traffic] == counted


def test_a_frozen_prefix_has_no_gradients_and_saves_nothing():
    plan = evolve(rectangular(shard=1), frozen_layers=2)  # embedding and the first block
    first = cost(plan).memory[0]
    assert first.parameters == (160 + 2 * 528) * 4
    assert first.gradients == 528 * 4
    assert first.optimizer == 2 * 528 * 4
    assert first.activations == 2 * 1000 * 4


@pytest.mark.parametrize(("positions", "microbatches"), [(2, 4), (3, 6), (6, 6)])
def test_equal_stages_have_the_bubble_of_the_formula(positions, microbatches):
    model = facts(4)
    even = evolve(model, layers=tuple(evolve(layer, flops=7) for layer in model.layers))
    report = cost(rectangular(positions=positions, shard=1, microbatches=microbatches, batch=36, model=even))
    assert report.bubble == SCHEDULES["one_f_one_b"].bubble(positions, microbatches)
    assert report.ideal == report.step_time * (1 - report.bubble)


def test_step_time_counts_the_samples_of_a_rank():
    model = facts(0)  # embedding 10, head 500
    report = cost(rectangular(positions=1, shard=2, microbatches=4, batch=16, model=model))
    assert report.step_time == 4 * 3 * 510 * 2
    assert report.bubble == 0


def test_waiting_for_the_slowest_pipeline_counts_as_idle():
    model = evolve(facts(4), layers=tuple(evolve(layer, flops=1) for layer in facts(4).layers))
    report = cost(heterogeneous(((1, 1), (1, 3)), model=model))
    assert report.templates[0].bubble == report.templates[1].bubble == 0
    assert report.bubble == Fraction(1, 3)


def test_only_differentiable_tensors_come_back_as_gradients():
    layer = facts(1).layers[1]
    mask = evolve(layer.inputs[0], dtype="int64", differentiable=False)
    both = evolve(layer, inputs=(*layer.inputs, mask))
    assert boundary_bytes(both, 3) == 3 * 32 * 4 + 3 * 32 * 8
    assert boundary_bytes(both, 3, gradients=True) == 3 * 32 * 4


@pytest.mark.parametrize(("size", "ranks", "sent"), [(100, 1, 0), (100, 2, 100), (100, 4, 150), (10, 3, 14)])
def test_a_ring_sends_twice_all_parts_but_one(size, ranks, sent):
    assert ring_all_reduce(size, ranks) == sent


def test_a_thousand_ranks_cost_no_more_than_a_moment():
    report = cost(rectangular(replicas=128, positions=4, shard=2, batch=128 * 8, model=facts(10)))
    assert len(report.memory) == 1024
    assert len({(m.parameters, m.activations) for m in report.memory}) == 4


def test_units_that_are_reduced_after_each_microbatch_need_one_whole_gradient_and_more_traffic():
    plan = rectangular(positions=1, microbatches=4)
    every = evolve(plan, sharding=Sharding(every=True))
    whole = (160 + 4 * 528 + 160) * 4
    assert cost(plan).memory[0].transient == 2 * whole
    assert cost(every).memory[0].transient == whole + 528 * 4
    assert cost(every).traffic[0].reduce_scatter == 4 * cost(plan).traffic[0].reduce_scatter == 4 * whole // 2


def test_groups_and_units_gathered_ahead_need_memory():
    plan = rectangular(positions=1, microbatches=1)

    def transient(**choice):
        return cost(evolve(plan, sharding=Sharding(reshard=True, **choice))).memory[0].transient

    block, ends = 528 * 4, 2 * 160 * 4
    assert transient() == 2 * block + block + 2 * ends  # a gathered unit, the next one, a whole gradient; the ends in the root
    assert transient(prefetch=0) == 2 * block + 2 * ends
    assert transient(prefetch=2) == 4 * block + 2 * ends
    assert transient(group=2) == 4 * block + 2 * block + 2 * ends
