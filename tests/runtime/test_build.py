"""A rank that owns a part of a model gets that part's weights as one process would have made them, and no memory for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_

from pdsl.grammar.errors import ModelError
from pdsl.lowering.probe_pass import parameter_groups
from pdsl.models import gpt, vit
from pdsl.runtime.build import build, build_model
from tests import chains
from tests.plans import VOCABULARY, rectangular


class Initialised(nn.Module):
    """Every way of drawing numbers: functions of nn.init, copies, tensors made like others, buffers, a parameter made from values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24, padding_idx=0)
        self.token = nn.Parameter(torch.randn(1, 24))
        self.parts = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.norm = nn.LayerNorm(24)
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(24, 40)
        self.register_buffer("noise", torch.rand(7))
        nn.init.trunc_normal_(self.parts[0].weight, std=0.02)
        nn.init.orthogonal_(self.parts[1].weight)
        nn.init.xavier_uniform_(self.parts[2].weight)
        self.head.weight = nn.Parameter(torch.rand_like(self.head.weight))
        with torch.no_grad():
            self.norm.bias.copy_(torch.randn(24))
            self.conv.bias.bernoulli_(0.5)
            self.head.bias.exponential_()


class Copies(nn.Module):
    """One parameter's values come from another's: both runs must have them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight.data.copy_(self.a.weight.data)


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        orthogonal_(self.a.weight)
        nn.init.uniform_(self.b.weight)


def plain_build(factory, arguments, seed):
    torch.manual_seed(seed)
    return factory(**arguments)


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (Initialised, {}),
        (Copies, {}),
        (Captured, {}),
        (chains.EncoderDecoder, {}),
        (chains.ReadsItsWeights, {}),
        (gpt, {"layers": 2, "width": 16, "heads": 2}),
        (gpt, {"layers": 2, "width": 16, "heads": 2, "tie": True, "positions": "learned"}),
        (vit, {"layers": 2, "width": 8, "heads": 2}),
    ],
)
def test_owned_weights_are_those_of_a_plain_build_to_the_bit(factory, arguments):
    whole = plain_build(factory, arguments, seed=7)
    names = list(parameter_groups(whole))
    for owned in (set(names[::2]), set(names[1::2]), set(names[-1:]), set(names), set()):
        part = build_model(factory, arguments, seed=7, owned=owned, name="model")
        in_memory = {n for n, p in part.named_parameters() if p.device.type != "meta"}
        assert in_memory == owned
        assert all(torch.equal(part.get_parameter(n), whole.get_parameter(n)) for n in owned)
        assert [n for n, _ in part.named_parameters()] == [n for n, _ in whole.named_parameters()]
        assert all(torch.equal(b, whole.get_buffer(n)) for n, b in part.named_buffers())


def test_the_two_runs_suffice_for_common_models(monkeypatch):
    calls = []

    def counted(**arguments):
        calls.append(1)
        return gpt(**arguments)

    build_model(counted, {"layers": 2, "width": 16, "heads": 2}, seed=1, owned={"norm.weight"}, name="gpt")
    assert len(calls) == 2


def test_a_factory_that_asks_whether_there_is_memory_is_built_plainly():
    """As torch's own initialisers do, under a name that was imported before."""
    whole = plain_build(Captured, {}, seed=7)
    part = build_model(Captured, {}, seed=7, owned={"b.weight"}, name="model")
    assert torch.equal(part.b.weight, whole.b.weight)


def test_the_callers_generator_is_left_alone():
    before = torch.get_rng_state()
    build_model(gpt, {"layers": 1, "width": 8, "heads": 1}, seed=3, owned=set(), name="gpt")
    assert torch.equal(before, torch.get_rng_state())


def test_ties_stay_ties():
    model = build_model(gpt, {"layers": 1, "width": 8, "heads": 1, "tie": True}, seed=3, owned={"tok_embeddings.weight"}, name="gpt")
    assert model.output.weight is model.tok_embeddings.weight
    other = build_model(gpt, {"layers": 1, "width": 8, "heads": 1, "tie": True}, seed=3, owned=set(), name="gpt")
    assert other.output.weight is other.tok_embeddings.weight


def test_a_module_may_stand_for_the_factory_and_stays_as_it_is():
    plan = rectangular()
    model = hand_made()
    part = build(plan, {"embed.weight"}, torch.device("cpu"), model=model)
    assert torch.equal(part.embed.weight, model.embed.weight)
    assert part.head.weight.device.type == "meta"
    assert model.head.weight.device.type == "cpu"
    again = build(plan, {"head.weight"}, torch.device("cpu"), model=hand_made)
    assert again.head.weight.device.type == "cpu"


def hand_made(width=8, last="head"):
    """The model that the plans of `tests.plans` are made for."""

    def block():
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width)
        return nn.ModuleDict({"norm": nn.LayerNorm(width, bias=False), "up": up, "down": down})

    model = nn.Module()
    model.embed = nn.Embedding(VOCABULARY, width)
    model.blocks = nn.ModuleList([block() for _ in range(4)])
    setattr(model, last, nn.Linear(width, VOCABULARY, bias=False))
    return model


def test_another_model_than_the_plans_is_refused():
    plan = rectangular()
    with pytest.raises(
        ModelError, match=r"not the one that the plan was made for: the plan has head.weight, the model has not; the model has tail.weight"
    ):
        build(plan, set(), torch.device("cpu"), model=hand_made(last="tail"))
    with pytest.raises(ModelError, match=r"embed.weight is \(20, 16\), in the plan \(20, 8\)"):
        build(plan, set(), torch.device("cpu"), model=hand_made(width=16))


def test_a_factory_that_fails_is_told():
    with pytest.raises(ModelError, match=r"broken raised KeyError: 'no such preset: tiny' \(tests/chains.py:"):
        build_model(chains.broken, {}, seed=1, owned=set(), name="broken")
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module"):
        build_model(chains.forgetful, {}, seed=1, owned=set(), name="forgetful")
