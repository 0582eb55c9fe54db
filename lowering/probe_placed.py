"""Where the parts of a tensor lie when tensor axes split it, and finding that out for the result of an operation by trying.

A placement has one entry for each dim: the axes that split it, major first. What an operation makes of split inputs is not looked up in a table: it is
run on random numbers of the right shapes, once whole and once for each tensor coordinate on its parts, and the placement is the one under which
the parts are parts of the whole. If there is none, the operation computes something else on parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations, product
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pdsl.lowering.parts import part_at
from pdsl.lowering.places import MeshAxis

__all__ = ["Placement", "axes_of", "find_placements", "sliced", "split_placement", "whole"]

Placement = tuple[tuple[str, ...], ...]

_MOST_COORDINATES = 8
_LOW = (torch.bfloat16, torch.float16)
_CHANCES = (0.5, 1 / 16, 15 / 16)  # of a truth value to be true: an `any` of a part is not that of the whole with few, an `all` with many
_TOLERANCE = 2e-4  # relative; sums in another order differ by 1e-6, other numbers by about 1


def whole(dims: int) -> Placement:
    """Nothing is split."""
    return ((),) * dims


def split_placement(dims: int, dim: int, axes: tuple[str, ...]) -> Placement:
    """One dim is split."""
    dim %= dims
    return tuple(axes if d == dim else () for d in range(dims))


def axes_of(placement: Placement) -> frozenset[str]:
    """All axes that split something."""
    return frozenset(a for axes in placement for a in axes)


def sliced(tensor: Tensor, placement: Placement, at: Mapping[str, int], sizes: Mapping[str, int]) -> Tensor:
    """The part of a whole tensor at a coordinate."""
    for dim, axes in enumerate(placement):
        if not axes:
            continue
        index, count = part_at(axes, at, sizes)
        width = tensor.shape[dim] // count
        tensor = tensor.narrow(dim, index * width, width)
    return tensor


def coordinates(axes: Sequence[MeshAxis]) -> list[dict[str, int]]:
    """Coordinates on the tensor axes to try: all if they are few, else some from both ends."""
    found = [dict(zip((a.name for a in axes), at, strict=True)) for at in product(*(range(a.size) for a in axes))]
    half = _MOST_COORDINATES // 2
    return found if len(found) <= _MOST_COORDINATES else found[:half] + found[-half:]


def find_placements(
    run_whole: Callable[[list[Tensor]], list[Tensor]],
    run_part: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[tuple[Tensor, Placement]],
    local_shapes: Sequence[tuple[int, ...]],
    axes: Sequence[MeshAxis],
) -> list[Placement] | None:
    """The placements of an operation's outputs, or None if its results on parts are no parts of its result.

    `run_whole` and `run_part` run it on given tensors with the other arguments of the whole and of the part; `inputs` are the whole tensors
    and how they are split: floating ones are replaced by random numbers, split ones of truth values and integers by others, the rest counts.
    `local_shapes` are those of the outputs on a part. Formats of 16 bits are tried in 32, where the operation takes them.
    """
    sizes = {a.name: a.size for a in axes}
    used = frozenset().union(*(axes_of(p) for _, p in inputs)) or frozenset(sizes)
    ordered = [a.name for a in axes if a.name in used]
    truths = any(t.dtype is torch.bool and axes_of(p) for t, p in inputs)
    trials = [_tried(run_whole, run_part, inputs, axes, chance) for chance in (_CHANCES if truths else _CHANCES[:1])]
    found: list[Placement] = []
    for i, (full, shape) in enumerate(zip(trials[0].full, local_shapes, strict=True)):
        candidates = _candidates(tuple(full.shape), shape, ordered, sizes)
        match = next((c for c in candidates if all(trial.holds(i, c) for trial in trials)), None)
        if match is None:
            return None
        found.append(match)
    return found


@frozen(eq=False)
class _Trial:
    """The outputs of an operation on the whole, and on the part of each coordinate."""

    full: list[Tensor]
    parts: list[tuple[dict[str, int], list[Tensor]]]
    sizes: Mapping[str, int]

    def holds(self, output: int, placement: Placement) -> bool:
        """Whether an output on each part is that part of the whole one."""
        return all(_same(sliced(self.full[output], placement, at, self.sizes), part[output]) for at, part in self.parts)


def _tried(
    run_whole: Callable[[list[Tensor]], list[Tensor]],
    run_part: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[tuple[Tensor, Placement]],
    axes: Sequence[MeshAxis],
    chance: float,
) -> _Trial:
    """One try; `chance` is that of a truth value to be true."""
    sizes = {a.name: a.size for a in axes}

    def trial(*, wide: bool) -> _Trial:
        generator = torch.Generator().manual_seed(7)
        given = [_stand_in(t, placement, generator, chance, wide=wide) for t, placement in inputs]
        full = run_whole([t.clone() for t in given])
        parts = [
            (at, run_part([sliced(t, placement, at, sizes).clone() for t, (_, placement) in zip(given, inputs, strict=True)]))
            for at in coordinates(axes)
        ]
        return _Trial(full, parts, sizes)

    if not any(t.dtype in _LOW for t, _ in inputs):
        return trial(wide=False)
    try:
        return trial(wide=True)
    except RuntimeError:  # it insists on its format
        return trial(wide=False)


def _stand_in(like: Tensor, placement: Placement, generator: torch.Generator, chance: float, *, wide: bool) -> Tensor:
    if like.is_floating_point() or like.is_complex():
        return _random(like, generator, wide=wide)
    if like.dtype is torch.bool and axes_of(placement):
        return torch.rand(tuple(like.shape), generator=generator) < chance
    if axes_of(placement):
        return like + torch.randint(0, 100, tuple(like.shape), generator=generator).to(like.dtype)
    return like.detach().clone()


def _random(like: Tensor, generator: torch.Generator, *, wide: bool) -> Tensor:
    """Positive numbers about 1, so that no logarithm, root or quotient of them is infinite; they rise along each dim, so that no mean of a part is that of the
    whole.
    """
    made = torch.rand(tuple(like.shape), generator=generator, dtype=torch.float32) + 0.25
    for dim, size in enumerate(like.shape):
        made *= torch.linspace(0.75, 1.25, size).view(size, *(1,) * (like.dim() - dim - 1)) if size > 1 else 1.0
    if like.is_complex():
        return torch.complex(made, made.flip(-1) if made.dim() else made).to(like.dtype)
    return made if wide and like.dtype in _LOW else made.to(like.dtype)


def _candidates(full: tuple[int, ...], part: tuple[int, ...], axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[Placement]:
    """The placements under which a part of one shape belongs to a whole of another."""
    if len(full) != len(part):
        return
    options: list[list[tuple[str, ...]]] = []
    for a, b in zip(full, part, strict=True):
        if a == b:
            options.append([()])
            continue
        if b == 0 or a % b:
            return
        orders = (order for n in range(1, len(axes) + 1) for order in permutations(axes, n))
        options.append([order for order in orders if prod(sizes[x] for x in order) == a // b])
    for choice in product(*options):
        names = [a for split in choice for a in split]
        if len(set(names)) == len(names):
            yield choice


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    rough = max(_TOLERANCE, 4 * torch.finfo(one.dtype).eps)
    a, b = one.double(), other.double()
    scale: Any = a[a.isfinite()].abs().max() if bool(a.isfinite().any()) else 1.0
    return bool(torch.allclose(a, b, rtol=rough, atol=rough * float(scale), equal_nan=True))
