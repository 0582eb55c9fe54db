"""Deferred initialisation: nothing of a model but what is owned ever takes memory, and weights are those of one process whatever the factory does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdsl.lowering.probe_pass import parameter_groups
from pdsl.models import gpt
from pdsl.runtime.build import build_model


class _Peak(TorchDispatchMode):
    """The most bytes that storages made within the block took at one time, by torch's own operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        from torch.multiprocessing.reductions import StorageWeakRef

        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def plain(factory: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return factory(**arguments)


@pytest.mark.parametrize("share", [1, 4, 8])
def test_a_rank_never_has_more_in_memory_than_it_owns_and_the_largest_parameter(share: int) -> None:
    arguments = {"layers": 8, "width": 64, "heads": 2, "context": 8, "vocabulary": 64}
    whole = plain(gpt, **arguments)
    names = list(parameter_groups(whole))
    owned = {n for n in names if n.startswith(tuple(f"layers.{i}." for i in range(share)))}
    with _Peak() as watch:
        part = build_model(gpt, arguments, seed=7, owned=owned, name="gpt")
    sizes = {n: p.numel() * 4 for n, p in whole.named_parameters()}
    assert watch.peak <= sum(sizes[n] for n in owned) + 3 * max(sizes.values())
    assert all(torch.equal(part.get_parameter(n), whole.get_parameter(n)) for n in owned)


class _Odd(nn.Module):
    """A factory that does something unusual while it draws."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        if way == "seeds itself":
            torch.manual_seed(99)
        self.b = nn.Linear(8, 8)
        with torch.no_grad():
            if way == "slices":
                self.b.weight[:3].normal_()
                self.a.weight[:, 2:5].uniform_(-1, 1)
                self.b.bias.view(2, 4)[1].fill_(3.0)
            if way == "reads another":
                self.b.weight.copy_(self.a.weight.T * 2)
            if way == "depends on a value":
                if self.a.weight.sum() > 0:
                    self.b.weight.normal_()
                else:
                    self.b.weight.zero_()
            if way == "scales":
                self.b.weight.div_(self.b.weight.norm())
        if way == "draws for later":
            numbers = torch.randn(3, 8, 8)
            self.c = nn.Parameter(numbers[2])
        if way == "a generator of its own":
            generator = torch.Generator().manual_seed(5)
            self.c = nn.Parameter(torch.randn(8, 8, generator=generator))
            nn.init.normal_(self.b.weight, generator=generator)
        if way == "backwards":
            for layer in (self.b, self.a):
                layer.reset_parameters()
        if way == "python":
            dice = random.Random(3)
            self.b.weight.data[dice.randrange(8)] = dice.random()
        if way == "double":
            self.b.double()
        if way == "parametrized":
            nn.utils.parametrizations.orthogonal(self.b)
        self.last = nn.Linear(8, 4)


WAYS = (
    "seeds itself",
    "slices",
    "reads another",
    "depends on a value",
    "scales",
    "draws for later",
    "a generator of its own",
    "backwards",
    "python",
    "double",
    "parametrized",
)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_one_process_whatever_the_factory_does(way: str) -> None:
    whole = plain(_Odd, way=way)
    names = list(parameter_groups(whole))
    for owned in ({"a.weight"}, {"a.bias", "last.weight"}, set(names[-3:]), set(names[2:4]), set(names)):
        part = build_model(_Odd, {"way": way}, seed=7, owned=owned & set(names), name="odd")
        for name in owned & set(names):
            assert torch.equal(part.get_parameter(name), whole.get_parameter(name)), (name, owned)
        assert {n for n, p in part.named_parameters() if p.device.type != "meta"} == owned & set(names)
