"""Models cut into stages compute what they compute whole: same loss, same gradient of every parameter."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pdsl.grammar.errors import RunError
from pdsl.lowering.probe import probe
from pdsl.models import gpt, vit
from pdsl.runtime.build import build_model
from pdsl.runtime.stage import StageModule, StageRunner
from tests import chains

SMALL = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocabulary": chains.VOCABULARY}


def images():
    generator = torch.Generator().manual_seed(1)
    return {"pixels": torch.randn(3, 1, 4, 4, generator=generator), "labels": torch.tensor([1, 0, 4])}


def vectors():
    return {"input": torch.randn(3, 5, generator=torch.Generator().manual_seed(2))}


MODELS = {
    "gpt": (gpt, SMALL, chains.batch_of),
    "gpt_learned": (gpt, {**SMALL, "positions": "learned"}, chains.batch_of),
    "gpt_tied": (gpt, {**SMALL, "tie": True}, chains.batch_of),
    "vit": (vit, {"layers": 3, "width": 8, "heads": 2, "image": 4}, images),
    "layers": (chains.layers, {}, vectors),
    "one module twice": (chains.twice, {}, vectors),
    "pairs": (chains.pairs, {}, vectors),
    "plain": (chains.plain, {}, chains.batch_of),
    "shared mask and bias": (chains.Shared, {}, chains.batch_of),
    "handed parameter": (chains.HandedParameter, {}, chains.batch_of),
    "tuples": (chains.Tuples, {}, chains.batch_of),
    "encoder and decoder": (chains.EncoderDecoder, {}, chains.batch_of),
    "glue": (chains.Glue, {}, chains.batch_of),
    "in place": (chains.InPlace, {}, chains.batch_of),
    "listed": (chains.Listed, {}, chains.batch_of),
    "parameters of blocks outside of blocks": (chains.Gained, {}, chains.batch_of),
    "recomputing blocks": (chains.Recomputing, {}, chains.batch_of),
    "recomputing functions": (chains.Recomputing, {"through": "function"}, chains.batch_of),
    "recomputing pairs": (chains.Recomputing, {"through": "pairs"}, chains.batch_of),
}


def cuts_of(facts):
    """Every allowed single cut, two and three cuts at the ends of their ranges, and all cuts at once."""
    allowed = [i for i, layer in enumerate(facts.layers) if i and not layer.cut_before]
    yield ()
    yield from ((i,) for i in allowed)
    for count in (2, 3):
        several = list(combinations(allowed, count))
        yield from dict.fromkeys([*several[:1], *several[-1:]])
    yield tuple(allowed)


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_computes_what_the_whole_model_computes(name):
    factory, arguments, make_batch = MODELS[name]
    batch = make_batch()
    facts = probe(factory, arguments, batch=batch)
    assert len(facts.layers) > 2
    assert [layer.cut_before for layer in facts.layers[1:]] == [""] * (len(facts.layers) - 1)
    loss, gradients = chains.run_whole(factory, arguments, batch)
    for cuts in cuts_of(facts):
        split_loss, split = chains.run_split(factory, arguments, facts, batch, cuts)
        assert split_loss == loss, cuts
        assert set(split) == set(gradients), cuts
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(
                split[parameter], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, p=parameter, c=cuts: f"{p} at {c}: {m}"
            )


def test_a_second_microbatch_of_another_size_and_padding_is_computed_afresh():
    batch = chains.batch_of()
    facts = probe(chains.Glue, {}, batch=batch)
    stages = [
        StageModule(build_model(chains.Glue, {}, seed=5, owned=owned_by(facts, a, b), name="glue"), facts, a, b)
        for a, b in ((0, 2), (2, 5))
    ]
    whole = build_model(chains.Glue, {}, seed=5, owned=owned_by(facts, 0, 5), name="glue")
    other = {**batch, "tokens": batch["tokens"].flip(1)}
    for microbatch in (batch, other, chains.batch_of(rows=5), batch):
        received = tuple(t.detach() for t in stages[0]((), microbatch))
        assert stages[1](received, microbatch) == whole(**microbatch)


def owned_by(facts, start, stop):
    return {p.name for p in facts.parameters if set(p.layers) & set(range(start, stop))}


def test_one_model_hosts_several_stages_and_is_itself_between_calls():
    batch = chains.batch_of()
    facts = probe(gpt, SMALL, batch=batch)
    torch.manual_seed(1)
    model = gpt(**SMALL)
    expected = model(**batch)
    runner = StageRunner(model, facts, {0: (0, 2), 1: (2, 3), 2: (3, len(facts.layers))})
    received = ()
    for stage in range(2):
        received = tuple(t.detach() for t in runner(stage, received, batch))
    assert runner(2, received, batch) == expected
    assert model(**batch) == expected
    assert copy.deepcopy(model)(**batch) == expected


def test_what_crosses_is_contiguous():
    batch = chains.batch_of()
    facts = probe(chains.Tuples, {}, batch=batch)
    stage = StageModule(chains.Tuples(), facts, 0, 3)
    hidden, bias = stage((), batch)
    assert bias.shape == (chains.WIDTH, 3, chains.LENGTH)
    assert hidden.is_contiguous()
    assert bias.is_contiguous()


def test_random_numbers_may_be_seeded_layer_by_layer_so_that_cuts_do_not_matter():
    arguments = {**SMALL, "dropout": 0.3, "positions": "learned"}
    batch = chains.batch_of()
    facts = probe(gpt, arguments, batch=batch)
    assert facts.random
    losses = []
    for cuts in ((), (1,), (2, 4), (1, 2, 3, 4)):
        bounds = [0, *cuts, len(facts.layers)]
        received = ()
        for start, stop in pairwise(bounds):
            stage = StageModule(build_model(gpt, arguments, seed=5, owned=owned_by(facts, start, stop), name="gpt"), facts, start, stop)
            stage.before_segment = lambda segment, owned: torch.manual_seed(100 + segment)
            received = stage(received, batch)
            received = tuple(t.detach() for t in received) if isinstance(received, tuple) else received
        losses.append(received.item())
    assert len(set(losses)) == 1


def test_what_is_computed_again_draws_the_random_numbers_that_it_drew():
    """A gradient goes through the masks of the forward; with other masks in the backward it would be another."""
    weights = chains.Recomputing().state_dict()
    hidden = torch.ones(3, chains.LENGTH, chains.WIDTH, requires_grad=True)
    found = []
    for through in ("never", "block", "pairs"):
        arguments = {"through": through, "dropout": 0.5}
        stage = StageModule(chains.Recomputing(**arguments), probe(chains.Recomputing, arguments, batch=chains.batch_of()), 3, 6)
        stage.model.load_state_dict(weights)
        stage.before_segment = lambda segment, owned: torch.manual_seed(100 + segment)
        loss = stage((hidden,), chains.batch_of())
        torch.manual_seed(7)
        found.append((loss.detach(), *torch.autograd.grad(loss, hidden)))
    for loss, gradient in found[1:]:
        assert loss == found[0][0]
        torch.testing.assert_close(gradient, found[0][1])


def test_a_model_without_a_chain_seeds_its_random_numbers_too():
    batch = chains.batch_of()
    model = chains.NoList()
    model.middle = torch.nn.Dropout(0.5)
    facts = probe(lambda: model, {}, batch=batch)
    stage = StageModule(model, facts, 0, 1)
    stage.before_segment = lambda segment, owned: torch.manual_seed(100 + segment)
    assert stage((), batch) == stage((), batch)


def test_a_value_that_wrongly_depends_on_another_stage_turns_the_loss_to_nan():
    """The cut is refused by the facts; forced all the same, it must not pass in silence."""
    batch = chains.batch_of()
    facts = probe(chains.Supervised, {}, batch=batch)
    start = 2
    assert facts.layers[start].cut_before
    forced = pardon(facts, start)
    model = build_model(chains.Supervised, {}, seed=5, owned=owned_by(facts, start, len(facts.layers)), name="model")
    hidden = torch.randn(3, chains.LENGTH, chains.WIDTH)
    assert StageModule(model, forced, start, len(facts.layers))((hidden,), batch).isnan()


def pardon(facts, index):
    from attrs import evolve

    return evolve(facts, layers=tuple(evolve(layer, cut_before="") if i == index else layer for i, layer in enumerate(facts.layers)))


def test_misuse_is_told():
    batch = chains.batch_of()
    facts = probe(gpt, SMALL, batch=batch)
    supervised = probe(chains.Supervised, {}, batch=batch)
    model = gpt(**SMALL)
    with pytest.raises(RunError, match=r"stage 0 begins at layers\.1 and takes 1 tensors, it was given 0"):
        StageModule(model, facts, 2, 4)((), batch)
    with pytest.raises(RunError, match="the batch has no targets"):
        StageModule(model, facts, 0, 2)((), {"tokens": batch["tokens"]})
    with pytest.raises(RunError, match="no stage may begin at"):
        StageModule(chains.Supervised(), supervised, 2, 4)
    with pytest.raises(RunError, match="read without running"):
        StageModule(model, probe(gpt, SMALL, batch=None), 0, 2)


def test_blocks_that_are_skipped_are_noticed():
    batch = chains.batch_of()
    facts = probe(chains.plain, {}, batch=batch)
    model = chains.plain()
    stage = StageModule(model, facts, 0, len(facts.layers))
    model.run = lambda x, tokens: model.blocks[3](model.blocks[0](x))
    with pytest.raises(RunError, match=r"blocks\.3 was called where blocks\.1 came"):
        stage((), batch)


# --- under FSDP2 ------------------------------------------------------------------------------------------------------------------------------


def sharded_stages(rank, world, store, root_is_model, wrap_first):
    """Two microbatches through three stages on one rank, every layer a unit, gradients kept back until the last backward."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    batch = chains.batch_of(rows=8)
    facts = probe(gpt, SMALL, batch=batch)
    torch.manual_seed(1)
    model = gpt(**SMALL)
    stages = {0: (0, 2), 1: (2, 3), 2: (3, len(facts.layers))}
    runner = None if wrap_first else StageRunner(model, facts, stages)
    for layer in facts.layers:
        modules = [model.get_submodule(m) for m in layer.modules]
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, reshard_after_forward=False)
    runner = runner or StageRunner(model, facts, stages)
    root = model if root_is_model else runner
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    mine = {k: t[rank * 4 : rank * 4 + 4] for k, t in batch.items()}
    losses, passed = [], []
    for m in range(2):
        microbatch = {k: t[2 * m : 2 * m + 2] for k, t in mine.items()}
        received, steps = (), []
        for stage in stages:
            received = tuple(t.detach().requires_grad_() for t in received)
            output = runner(stage, received, microbatch)
            steps.append((received, output))
            received = output
        losses.append(output.detach())
        passed.append(steps)
    for m, steps in enumerate(passed):
        root.set_requires_gradient_sync(m == 1)
        root.set_is_last_backward(m == 1)
        gradients = None
        for received, output in reversed(steps):
            if gradients is None:
                (output / 2).backward()
            else:
                torch.autograd.backward(output, gradients)
            gradients = [t.grad for t in received]
    return torch.stack(losses), {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("root_is_model", "wrap_first"), [(False, False), (False, True), (True, True), (True, False)])
def test_stages_run_under_fsdp(pool, root_is_model, wrap_first):
    torch.manual_seed(1)
    model = gpt(**SMALL)
    batch = chains.batch_of(rows=8)
    parts = [{k: t[i : i + 2] for k, t in batch.items()} for i in range(0, 8, 2)]
    losses = torch.stack([model(**part) for part in parts])
    losses.mean().backward()
    results = pool.run(sharded_stages, 2, root_is_model, wrap_first)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), losses.detach(), rtol=1e-5, atol=1e-6)
    for _, gradients in results:
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-7)
