"""A backward in halves gives, to the bit, what the whole one gives; neither half does the work of the other."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pdsl.runtime.split_backward import backward_input, is_divisible


class Scale(torch.autograd.Function):
    """x * w, with a backward that counts its runs and always computes both gradients."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor]:
        Scale.runs += 1
        x, w = ctx.saved_tensors
        return g * w * ctx.factor, None, (g * x * ctx.factor).sum(0)


class Stage(nn.Module):
    """Layers by name, and a function of (self, received tensors) that gives a tuple of tensors."""

    def __init__(self, run: Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]], received: int = 1) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.table = nn.Embedding(5, 8)
        self.gain, self.other = nn.Parameter(torch.full((8,), 1.5)), nn.Parameter(torch.full((8,), 0.5))
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.wide = nn.Linear(8, 24)
        self.count = received
        self.run = run

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        return self.run(self, received)


def in_place(s: Any, r: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x = s.one(r[0])
    x += s.gain
    x[:, 0].mul_(s.other[0])
    x[1:3] = s.two(r[0][1:3])
    return (x.relu_(),)


def with_attention(s: Any, r: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, k, v = s.wide(s.norm(r[0])).unflatten(-1, (3, 1, 8)).unbind(1)
    return (r[0] + nn.functional.scaled_dot_product_attention(q, k, v).flatten(1),)


def only_one_part(s: Any, r: Sequence[Tensor]) -> tuple[Tensor, ...]:
    first, _, third = s.wide(r[0]).chunk(3, dim=-1)
    return (s.one(first) * third,)


def tied(s: Any, r: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x = s.norm(s.one(r[0]).tanh())
    return (s.norm(s.one(x).tanh() + s.two(x)) @ s.one.weight,)


STAGES: dict[str, tuple[int, Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]]] = {
    "layers": (1, lambda s, r: (r[0] + s.two(s.norm(s.one(r[0])).relu()),)),
    "several tensors": (2, lambda s, r: (s.one(r[0]) + r[1], s.two(r[1] * s.gain))),
    "passed on unchanged": (2, lambda s, r: (s.one(r[0]), r[1])),
    "one passed on and used": (2, lambda s, r: (s.one(r[0]) * r[1], r[1])),
    "one not used": (2, lambda s, r: (s.one(r[0]),)),
    "an output of weights alone": (1, lambda s, r: (s.one(r[0]), s.table.weight * s.gain)),
    "an output of weights that another uses": (1, lambda s, r: ((h := s.table.weight * s.gain)[:3] + s.one(r[0])[:3], h)),
    "an output without gradient": (1, lambda s, r: (s.one(r[0]), torch.ones(3))),
    "no weights": (1, lambda s, r: (r[0].sin() * 2,)),
    "weights that are not trained": (1, lambda s, r: (s.frozen(r[0]).relu(),)),
    "some that are not trained": (1, lambda s, r: (s.one(s.frozen(s.two(r[0])).relu()),)),
    "in place": (1, in_place),
    "weights used twice": (1, tied),
    "weights that are computed": (1, lambda s, r: (s.normed(r[0]),)),
    "computed weights used twice": (1, lambda s, r: (s.normed(s.normed(r[0]).tanh()),)),
    "a table": (1, lambda s, r: (s.one(r[0] + s.table(torch.tensor([0, 1, 1, 4]))),)),
    "attention": (1, with_attention),
    "some of the outputs of a node": (1, only_one_part),
    "a function in Python": (1, lambda s, r: (Scale.apply(s.one(r[0]), 2.0, s.gain),)),
    "a function in Python whose weight is used again": (1, lambda s, r: (Scale.apply(s.one(Scale.apply(r[0], 2.0, s.gain)), 3.0, s.gain),)),
    "scalar": (1, lambda s, r: (nn.functional.mse_loss(s.two(s.one(r[0]).relu()), torch.ones(4, 8)),)),
    "a double view": (1, lambda s, r: (s.one(r[0]).t().reshape(-1)[::2].view(4, 4) @ s.two.weight[:4],)),
}


def parts(name: str) -> tuple[Stage, list[Tensor], tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Stage, received tensors, all outputs; those that need a gradient, and their gradients."""
    torch.manual_seed(0)
    count, run = STAGES[name]
    stage = Stage(run, count)
    received = [torch.randn(4, 8).requires_grad_() for _ in range(count)]
    outputs = stage(*received)
    grown = [t for t in outputs if t.requires_grad]
    return stage, received, outputs, grown, [torch.randn_like(t) for t in grown]


def gradients(stage: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in stage.named_parameters()}


def whole(name: str) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    stage, received, _, outputs, given = parts(name)
    torch.autograd.backward(outputs, given)
    return [t.grad for t in received], gradients(stage)


@pytest.mark.parametrize("name", STAGES)
def test_both_halves_give_what_the_whole_gives(name: str) -> None:
    expected, weights = whole(name)
    stage, received, _, outputs, given = parts(name)
    found, half = backward_input(outputs, given, received)
    if "weights alone" not in name:
        assert all(g is None for g in gradients(stage).values())
    assert all(t.grad is None for t in received)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    half.run()
    assert all(t.grad is None for t in received)
    ours = gradients(stage)
    assert {n for n, g in ours.items() if g is not None} == {n for n, g in weights.items() if g is not None}
    for n, g in weights.items():
        if g is not None:
            torch.testing.assert_close(ours[n], g, rtol=2e-6, atol=1e-7)


def test_two_microbatches_add_up_whatever_the_order_of_their_halves() -> None:
    stage, received, _, outputs, given = parts("weights used twice")
    again = [t.detach().clone().requires_grad_() for t in received]
    more = stage(*again)
    _, first = backward_input(outputs, given, received)
    _, second = backward_input(more, given, again)
    second.run()
    first.run()
    _, once = whole("weights used twice")
    for n, g in gradients(stage).items():
        if g is not None:
            torch.testing.assert_close(g, 2 * once[n], rtol=2e-6, atol=1e-7)  # type: ignore[operator]


def test_without_received_tensors_the_weight_half_is_the_whole() -> None:
    _, weights = whole("layers")
    stage, _, _, outputs, given = parts("layers")
    found, half = backward_input(outputs, given, [])
    assert found == ()
    assert half.whole
    assert all(g is None for g in gradients(stage).values())
    half.run()
    assert all(g is None or torch.equal(g, gradients(stage)[n]) for n, g in weights.items())  # type: ignore[arg-type]


def test_nothing_is_left_where_there_are_no_weights() -> None:
    _, received, _, outputs, given = parts("no weights")
    _, half = backward_input(outputs, given, received)
    assert not list(half.weights())
    half.run()


def test_nothing_at_all_is_possible() -> None:
    found, half = backward_input([], [], [])
    half.run()
    assert found == ()


# --- neither half does the work of the other


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def products(work: Callable[[], object]) -> int:
    with Counting() as counting:
        work()
    return counting.calls["mm"] + counting.calls["addmm"]


def test_each_half_multiplies_matrices_for_itself_alone() -> None:
    _, received, _, outputs, given = parts("layers")
    assert products(lambda: torch.autograd.backward(outputs, given)) == 4  # two layers, each for its input and its weight
    _, received, _, outputs, given = parts("layers")
    halves: list[Any] = []
    assert products(lambda: halves.extend(backward_input(outputs, given, received))) == 2
    assert products(halves[1].run) == 2


def test_a_function_in_python_runs_once() -> None:
    stage, received, _, outputs, given = parts("a function in Python")
    Scale.runs = 0
    _, half = backward_input(outputs, given, received)
    half.run()
    assert Scale.runs == 1
    assert stage.gain.grad is not None


class Kept:
    """What a forward saved of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output of its own node would be a circle


@pytest.mark.parametrize("name", ["layers", "weights used twice", "a function in Python"])
def test_what_was_saved_goes_with_the_weight_half(name: str) -> None:
    stage, received, _, _, given = parts(name)
    saved: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        saved.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        outputs = stage(*received)
    gc.disable()  # nothing of it may be in a circle
    try:
        _, half = backward_input(outputs, given, received)
        del outputs
        assert any(kept() is not None for kept in saved)
        half.run()
        assert all(kept() is None for kept in saved)
    finally:
        gc.enable()


# --- hooks


def test_hooks_on_weights_run_once_and_in_the_weight_half() -> None:
    stage, received, _, outputs, given = parts("layers")
    told: list[str] = []
    stage.one.weight.register_hook(lambda g: told.append("hook") or g * 2)
    stage.one.bias.register_post_accumulate_grad_hook(lambda p: told.append("after"))
    _, half = backward_input(outputs, given, received)
    assert not told
    half.run()
    assert sorted(told) == ["after", "hook"]
    _, expected = whole("layers")
    torch.testing.assert_close(stage.one.weight.grad, 2 * expected["one.weight"])  # type: ignore[operator]


def test_a_hook_that_changes_a_gradient_on_its_way_does_so_once() -> None:
    def run(s: Any, r: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x = s.one(r[0])
        x.register_hook(lambda g: g * 3)
        return (s.two(x),)

    def made() -> tuple[Stage, Tensor, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        stage, x = Stage(run), torch.randn(4, 8).requires_grad_()
        return stage, x, stage(x)

    stage, x, outputs = made()
    torch.autograd.backward(outputs, [torch.ones(4, 8)])
    expected, weights = x.grad, gradients(stage)
    stage, x, outputs = made()
    (found,), half = backward_input(outputs, [torch.ones(4, 8)], [x])
    half.run()
    assert torch.equal(found, expected)  # type: ignore[arg-type]
    assert torch.equal(stage.one.weight.grad, weights["one.weight"])  # type: ignore[arg-type]


def test_hooks_of_modules_run_in_the_input_half() -> None:
    stage, received, _, _, given = parts("layers")
    told: list[int] = []
    stage.one.register_full_backward_hook(lambda *_: told.append(1))
    _, half = backward_input(stage(*received), given, received)
    assert told == [1]
    half.run()
    assert told == [1]


def test_weights_are_told_of_as_they_are_complete() -> None:
    stage, received, _, outputs, given = parts("layers")
    names = {id(p): n for n, p in stage.named_parameters()}
    _, half = backward_input(outputs, given, received)
    assert {names[id(w)] for w in half.weights()} == {f"{m}.{leaf}" for m in ("one", "two", "norm") for leaf in ("weight", "bias")}
    told: list[str] = []

    def done(weights: Any) -> None:
        found = [(names[id(w)], w) for w in weights]
        assert all(w.grad is not None for _, w in found)
        told.extend(n.split(".")[0] for n, _ in found)

    half.run(done)
    assert told == ["two", "two", "norm", "norm", "one", "one"]


def test_weights_are_only_told_of_when_nothing_passes_them_any_more() -> None:
    stage, received, _, outputs, given = parts("weights used twice")
    names = {id(p): n for n, p in stage.named_parameters()}
    _, half = backward_input(outputs, given, received)
    told: list[set[str]] = []
    half.run(lambda weights: told.append({names[id(w)].split(".")[0] for w in weights}))
    assert told == [{"one", "norm"}, {"two"}]


# --- what cannot be taken apart


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_cannot_be_had_in_halves(reentrant: bool) -> None:
    stage, received, _, outputs, _ = parts("layers")
    assert is_divisible(outputs)
    assert not is_divisible([checkpoint(stage.one, received[0], use_reentrant=reentrant) * 2])


def test_tensors_that_are_kept_elsewhere_can() -> None:
    stage, received, _, _, given = parts("layers")
    with torch.autograd.graph.save_on_cpu():
        outputs = stage(*received)
    assert is_divisible(outputs)
    _, half = backward_input(outputs, given, received)
    half.run()
    _, expected = whole("layers")
    assert torch.equal(stage.one.weight.grad, expected["one.weight"])  # type: ignore[arg-type]
