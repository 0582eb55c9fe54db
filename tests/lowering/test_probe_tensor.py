"""What the tensor probe finds, without a single rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdsl
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.layouts import parameter_layouts
from pdsl.lowering.parts import role_axes
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.probe import probe
from pdsl.lowering.probe_placed import find_placements, sliced, split_placement, whole
from pdsl.lowering.probe_tensor import tensor_probe
from pdsl.lowering.tensor_facts import TensorFacts

TP = MeshAxis("tp", 2, "tensor")
BATCH = {"x": torch.zeros(3, 4, 8)}


def probed(make: Any, rules: str, *axes: MeshAxis, batch: Any = None, validates: bool = False) -> TensorFacts:
    axes = axes or (TP,)
    mesh = "; ".join(f"axis {a.name} = {a.size}" for a in axes)
    train = 'train { data = "m:d"; batch = 4; steps = 1; optimizer = sgd(lr = 1) }'
    text = f"pdsl 1\nmesh {{ {mesh} }}\nshard {{\n{rules}\n}}\n{train}\n"
    batch = BATCH if batch is None else batch
    facts: ModelFacts = probe(make, {}, batch=batch)
    size = 1
    for a in axes:
        size *= a.size
    layouts = parameter_layouts(facts, pdsl.load(text).shard, shard_size=1, tensor_size=size, axes=axes)
    return tensor_probe(make, {}, batch=batch, facts=facts, layouts=layouts, axes=role_axes(axes, "tensor"), validates=validates)


PAIR = '"**.up.weight" => colwise(tp)\n"**.down.weight" => rowwise(tp)\n"**" => replicate()'


class Pair(nn.Module):
    """Two linears with something between them, and a norm before."""

    def __init__(self, between: Any, wide: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, wide, bias=False), nn.Linear(wide, 8, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.gate = nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self, self.up(self.norm(x)), x))


class Normed(torch.autograd.Function):
    """The identity; its backward divides by a norm over the features."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm(dim=-1, keepdim=True)


def hooked(h: Tensor) -> Tensor:
    made = h * 1.0
    made.register_hook(lambda grad: grad / grad.norm(dim=-1, keepdim=True))
    return made


class Pairs(nn.Module):
    def __init__(self, between: Any) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Pair(between) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def pairs(between: Any) -> Any:
    def make() -> nn.Module:
        return Pairs(between)

    return make


def test_elementwise_work_on_parts_is_fine() -> None:
    found = probed(pairs(lambda _, h, x: torch.nn.functional.gelu(h)), PAIR)
    assert evolve(found, saved=()) == TensorFacts()


def test_a_rank_keeps_its_part_of_what_lies_between_a_pair() -> None:
    (start, first, second) = probed(pairs(lambda _, h, x: torch.nn.functional.gelu(h)), PAIR).saved
    assert start[0] == start[1]
    assert [whole - part for part, whole in (first, second)] == [
        2 * 2 * 4 * 8 * 4
    ] * 2  # before and after the gelu: 8 of 16 features of 2 x 4 rows


def test_a_whole_parameter_that_meets_parts_gets_the_sum() -> None:
    found = probed(pairs(lambda m, h, x: h * m.gain), PAIR)
    assert not found.problems
    assert found.partial == (("layers.0.gain", ("tp",)), ("layers.1.gain", ("tp",)))


def test_a_whole_module_of_which_all_is_used_with_parts_gets_the_sum() -> None:
    found = probed(pairs(lambda m, h, x: h * m.gate(x.detach())), PAIR)
    assert not found.problems
    assert {name for name, _ in found.partial} == {f"layers.{i}.gate.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")}


def test_a_whole_tensor_with_both_kinds_of_use_is_a_problem() -> None:
    (problem,) = probed(pairs(lambda m, h, x: h * m.gate(x)), PAIR).problems
    assert problem.kind == "gradient"
    assert problem.module.startswith("layers.")


@pytest.mark.parametrize(
    ("between", "kind", "words"),
    [
        (lambda m, h, x: h.softmax(-1), "differs", "softmax of (2, 4, 16) has (2, 4, 8)"),
        (lambda m, h, x: h / h.norm(dim=-1, keepdim=True), "differs", "norm of (2, 4, 16)"),
        (lambda m, h, x: h.chunk(2, -1)[0].repeat(1, 1, 2), "differs", "chunk of (2, 4, 16)"),
        (lambda m, h, x: h.reshape(x.shape[0], 4, 16), "fails", "reshape of (2, 4, 16) has (2, 4, 8) on a tensor rank, and fails"),
        (lambda m, h, x: h * torch.arange(h.shape[-1]), "differs", "arange"),
        (lambda m, h, x: h * torch.ones(16), "fails", "mul"),
        (lambda m, h, x: h * h.square().mean(), "differs", "mean of (2, 4, 16)"),
        (lambda m, h, x: h.bfloat16().softmax(-1).float(), "differs", "softmax of (2, 4, 16)"),
        (lambda m, h, x: h * (h > 1.5).any(-1, keepdim=True), "differs", "any of (2, 4, 16)"),
        (lambda m, h, x: h * (h > 0.0).all(-1, keepdim=True), "differs", "all of (2, 4, 16)"),
        (lambda m, h, x: h * (4 * h).int().amax(-1, keepdim=True), "differs", "amax of (2, 4, 16)"),
        (lambda m, h, x: h * torch.from_numpy(h.detach().numpy().max(-1, keepdims=True)), "differs", "numpy reads the values"),
        (lambda m, h, x: torch.nn.functional.gumbel_softmax(h), "differs", "gumbel_softmax draws random numbers"),
        (lambda m, h, x: Normed.apply(h), "gradient", "Normed of the model computes a gradient of its own"),
        (lambda m, h, x: hooked(h), "gradient", "a hook of the model computes a gradient of its own"),
        (
            lambda m, h, x: x.repeat(1, 1, 2),
            "layout",
            "layers.0.down takes those whose last dim is split over tp, and is given a tensor that lies whole",
        ),
    ],
    ids=[
        *("softmax", "norm", "chunk", "reshape", "arange", "ones", "mean", "softmax in bf16", "any", "all", "integers", "numpy", "gumbel"),
        *("own backward", "own hook", "whole"),
    ],
)
def test_what_a_part_does_not_give_is_a_problem(between: Any, kind: str, words: str) -> None:
    (problem,) = probed(pairs(between), PAIR).problems
    assert problem.kind == kind
    assert words in problem.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_by_the_model_itself_is_seen_through(reentrant: bool) -> None:
    def between(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return checkpoint(lambda t: torch.tanh(t * m.gain), h, use_reentrant=reentrant)

    found = probed(pairs(between), PAIR)
    assert dict(found.partial) == {"layers.0.gain": ("tp",), "layers.1.gain": ("tp",)}


class Switching(Pairs):
    """Between a pair, something else in eval mode."""

    def __init__(self) -> None:
        super().__init__(lambda m, h, x: h.relu() if m.training else h.softmax(-1))


def test_a_model_that_is_validated_is_tried_in_eval_mode_too() -> None:
    assert probed(Switching, PAIR).problems == ()
    (problem,) = probed(Switching, PAIR, validates=True).problems
    assert (problem.kind, problem.module) == ("differs", "layers.0")
    assert problem.text.startswith("in validation, softmax of (2, 4, 16) has (2, 4, 8)")


def test_ones_of_the_size_of_a_part_are_no_problem() -> None:
    assert not probed(pairs(lambda m, h, x: h * h.new_ones(h.shape[-1]) + torch.zeros_like(h)), PAIR).problems


def test_dropout_of_parts_is_no_problem() -> None:
    assert not probed(pairs(lambda m, h, x: torch.nn.functional.dropout(h, 0.5)), PAIR).problems


def test_a_module_that_is_no_linear_of_torch_is_a_problem() -> None:
    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) + 1

    def make() -> nn.Module:
        model = Pairs(lambda m, h, x: h)
        model.layers[1].up = Linear(8, 16, bias=False)
        return model

    (problem,) = probed(make, PAIR).problems
    assert problem.kind == "module"
    assert problem.parameter == "layers.1.up.weight"


def test_what_the_model_returns_must_be_whole() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))

    (problem,) = probed(make, '"1.weight" => colwise(tp)\n"**" => replicate()').problems
    assert problem.kind == "layout"
    assert not probed(make, '"1.weight" => [tp, _]\n"**" => replicate()').problems


def test_two_axes_are_followed_one_by_one() -> None:
    rules = '"layers.0.up.weight" => colwise(a)\n"layers.0.down.weight" => rowwise(a)\n"layers.1.up.weight" => colwise(b, a)\n"layers.1.down.weight" => rowwise(b, a)\n"**" => replicate()'
    found = probed(pairs(lambda m, h, x: h * m.gain), rules, MeshAxis("a", 2, "tensor"), MeshAxis("b", 4, "tensor"))
    assert not found.problems
    assert found.partial == (("layers.0.gain", ("a",)), ("layers.1.gain", ("a", "b")))


def test_dropout_of_what_is_split_over_some_of_the_axes_is_a_problem() -> None:
    axes = MeshAxis("a", 2, "tensor"), MeshAxis("b", 2, "tensor")
    between = pairs(lambda m, h, x: torch.nn.functional.dropout(h, 0.5))
    (problem,) = probed(between, PAIR.replace("(tp)", "(b)"), *axes).problems
    assert problem.text == "dropout draws random numbers for a tensor split over b: it can for those over (a, b), in this order"
    assert not probed(between, PAIR.replace("(tp)", "(a, b)"), *axes).problems


def test_halves_over_other_axes_do_not_fit() -> None:
    rules = '"**.up.weight" => colwise(a, b)\n"**.down.weight" => rowwise(b, a)\n"**" => replicate()'
    (problem,) = probed(pairs(lambda m, h, x: h), rules, MeshAxis("a", 2, "tensor"), MeshAxis("b", 2, "tensor")).problems
    assert problem.kind == "layout"


# --- the stream -----------------------------------------------------------------------------------------------------------------------


STREAM = '"layers.*.norm.*" => sequence(tp)\n' + PAIR


def test_a_split_stream_is_gathered_where_it_is_projected() -> None:
    found = probed(pairs(lambda m, h, x: h.relu()), STREAM)
    assert not found.problems
    assert dict(found.gathers) == {"layers.0.up": (0,), "layers.1.up": (0,)}
    assert found.scatters == ("layers.0.down", "layers.1.down")
    assert [(s.layer, s.dim) for s in found.enters] == [(1, 1)]
    assert found.exits == ((0, 1),)
    assert {name for name, _ in found.partial} == {f"layers.{i}.norm.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")}


def test_a_stream_of_odd_length_is_a_problem() -> None:
    (problem,) = probed(pairs(lambda m, h, x: h), STREAM, batch={"x": torch.zeros(3, 5, 8)}).problems
    assert problem.kind == "sequence"
    assert "5 % 2 = 1" in problem.text


def test_a_stream_without_a_sequence_is_a_problem() -> None:
    (problem,) = probed(pairs(lambda m, h, x: h), STREAM, batch={"x": torch.zeros(4, 8)}).problems
    assert problem.kind == "sequence"
    assert "a stream of 2 dims" in problem.text


def test_a_module_outside_of_the_stream_does_not_work_on_a_part_of_it() -> None:
    (problem,) = probed(pairs(lambda m, h, x: h), '"start.*" => sequence(tp)\n' + PAIR).problems
    assert problem.kind == "sequence"
    assert problem.parameter == "start.weight"


def test_a_mean_over_the_sequence_of_a_split_stream_is_a_problem() -> None:
    (problem,) = probed(pairs(lambda m, h, x: h * (1 + x.mean(1, keepdim=True).mean())), STREAM).problems
    assert problem.kind == "differs"


# --- placements -----------------------------------------------------------------------------------------------------------------------


def test_parts_of_a_product_over_split_features_are_no_parts_of_it() -> None:
    w = torch.zeros(8, 4)
    placements = [split_placement(2, -1, ("tp",)), split_placement(2, 0, ("tp",))]
    run = lambda t: [t[0] @ t[1]]  # noqa: E731
    assert find_placements(run, run, list(zip((torch.zeros(3, 8), w), placements, strict=True)), [(3, 4)], [TP]) is None
    rows = [(torch.zeros(6, 8), split_placement(2, 0, ("tp",))), (w, whole(2))]
    assert find_placements(run, run, rows, [(3, 4)], [TP]) == [(("tp",), ())]


def test_the_first_of_two_axes_is_major() -> None:
    sizes = {"a": 2, "b": 3}
    numbers = torch.arange(12)
    assert sliced(numbers, (("a", "b"),), {"a": 1, "b": 0}, sizes).tolist() == [6, 7]
    assert sliced(numbers, (("b", "a"),), {"a": 1, "b": 0}, sizes).tolist() == [2, 3]
