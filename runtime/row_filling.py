"""Doing one random operation row by row, each row with a generator of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["Window", "draw_rows"]

Seeded = Callable[[int, torch.device], torch.Generator]
"""(row, device) -> its generator, seeded, to be used before the next is asked for."""

_FILLS = frozenset({"bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_"})
_MAKES = {
    "rand": "uniform_",
    "rand_like": "uniform_",
    "randn": "normal_",
    "randn_like": "normal_",
    "randint": "random_",
    "randint_like": "random_",
}


@frozen
class Window:
    """What a rank draws of what one process would: `rows` rows along `row_dim` (-1: no rows, one draw for all), in tensors that are `whole` as
    the probe saw them, of which a dim may be split into `parts`, this rank's being that at `coordinate`.
    """

    row_dim: int
    rows: int
    whole: tuple[int, ...]
    coordinate: int = 0
    parts: int = 1

    def spans(self, shape: Sequence[int]) -> tuple[tuple[int, int, int], ...] | None:
        """For each dim of a row of a local tensor (its start, its stop, the size of the whole); None if the shape is no part of the whole."""
        if len(shape) != len(self.whole) or (self.row_dim >= 0 and (self.rows == 0 or shape[self.row_dim] % self.rows)):
            return None
        found = []
        for dim in range(len(shape)):
            each = self.rows if dim == self.row_dim else 1
            size, whole = shape[dim] // each, self.whole[dim] // each
            if self.parts > 1 and size != whole and size * self.parts == whole:
                found.append((size * self.coordinate, size * (self.coordinate + 1), whole))
            else:  # a sequence may be longer than in the probe
                found.append((0, size, size))
        return tuple(found)


def draw_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], window: Window, seeded: Seeded) -> Any:
    """The result of a random operation of the dispatcher, or NotImplemented if its shapes do not fit the window or it is not known how to part it."""
    name = func._overloadpacket.__name__
    kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
    if name in _FILLS and not any(isinstance(a, Tensor) for a in args[1:]):
        return args[0] if _filled(args[0], window, seeded, name, args[1:], kwargs) else NotImplemented
    if name in _MAKES:
        made = func(*args, **kwargs)
        low_high = tuple(a for a in args if isinstance(a, int) and not isinstance(a, bool)) if name.startswith("randint") else ()
        bounds = (0, *low_high) if len(low_high) == 1 else low_high
        return made if _filled(made, window, seeded, _MAKES[name], bounds, {}) else NotImplemented
    if name == "bernoulli" and len(args) == 1:
        numbers = torch.empty_like(args[0], dtype=torch.float32)
        return (numbers < args[0]).to(args[0].dtype) if _filled(numbers, window, seeded, "uniform_", (), {}) else NotImplemented
    if name == "native_dropout":
        return _dropout(args[0], float(args[1]), window, seeded)
    return _sliced(func, args, kwargs, window, seeded)


def _dropout(x: Tensor, p: float, window: Window, seeded: Seeded) -> Any:
    """The fused dropout of a GPU: what is kept, scaled, and the mask."""
    mask = torch.empty_like(x)
    if not _filled(mask, window, seeded, "bernoulli_", (1.0 - p,), {}):
        return NotImplemented
    return x * mask * (1.0 / (1.0 - p) if p < 1.0 else 0.0), mask.to(torch.bool)


def _filled(tensor: Tensor, window: Window, seeded: Seeded, fill: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fill a tensor with random numbers, row by row; whether its shape allows that."""
    spans = _spans(tensor, window)
    if spans is None:
        return False
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    whole = tuple(size for _, _, size in spans)
    inner = tuple(slice(start, stop) for start, stop, _ in spans)
    plain = local.is_contiguous() and window.row_dim <= 0 and all(stop - start == size for start, stop, size in spans)
    for row in range(window.rows if window.row_dim >= 0 else 1):
        place = local
        if window.row_dim >= 0:
            each = local.shape[window.row_dim] // window.rows
            place = local.narrow(window.row_dim, row * each, each)
        drawn = place if plain else torch.empty(whole, dtype=local.dtype, device=local.device)
        getattr(drawn, fill)(*args, **kwargs, generator=seeded(row, local.device))
        if not plain:
            place.copy_(drawn[inner])
    return True


def _spans(tensor: Tensor, window: Window) -> tuple[tuple[int, int, int], ...] | None:
    if not isinstance(tensor, DTensor):
        return window.spans(tensor.shape)
    if any(p.is_partial() for p in tensor.placements):
        return None
    whole = window.spans(tensor.shape)
    if whole is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    found = []
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if dim == window.row_dim and size != tensor.shape[dim]:
            return None
        found.append((0, size // window.rows, size // window.rows) if dim == window.row_dim else (offset, offset + size, tensor.shape[dim]))
    return tuple(found)


def _sliced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], window: Window, seeded: Seeded) -> Any:
    """Any other operation that takes a generator: called for each row's part of its tensors, the results put together."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    dim = window.row_dim
    takes = any(a.name == "generator" for a in func._schema.arguments)
    parted = window.parts > 1 and any((0, s) != (a, b) for t in tensors for a, b, s in window.spans(t.shape) or ())
    if not takes or parted or not tensors or any(isinstance(t, DTensor) for t in tensors):
        return NotImplemented
    if dim < 0:
        return func(*args, **kwargs, generator=seeded(0, tensors[0].device))
    if any(t.dim() <= dim or t.shape[dim] % window.rows for t in tensors):
        return NotImplemented
    results = []
    for row in range(window.rows):
        parts = [_part(a, dim, row, window.rows) for a in args]
        results.append(func(*parts, **kwargs, generator=seeded(row, tensors[0].device)))
    return args[0] if func._overloadpacket.__name__.endswith("_") else torch.cat(results, dim)


def _part(value: Any, dim: int, row: int, rows: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    each = value.shape[dim] // rows
    return value.narrow(dim, row * each, each)
