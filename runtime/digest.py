"""Digests of state. One that does not depend on how a tensor is split, to compare what was with what is after a move; one over bytes in their
order, for each message.

The digest of a tensor is the sum over its elements of mix(global index) * (bits of the element + 1), modulo 2^64. Sums over disjoint boxes add
up: every rank sums its own part, and the total is the same under every plan. Elements that are swapped, dropped, doubled or changed in a bit
change it; zeros count too. It guards against mistakes, not against malice.
"""

from __future__ import annotations

from math import prod

import torch

from pdsl.lowering.boxes import Box, box_shape

__all__ = ["WORD", "checksum", "digest"]

WORD = (1 << 64) - 1
"""Digests are added and compared modulo 2^64: `a & WORD`."""

_STEP = 0x9E3779B97F4A7C15  # odd, so that neighbouring indices lie far apart and none coincide
_FACTOR = 0xD1342543DE82EF95
_HALF = (1 << 32) - 1
_PIECE = 1 << 16  # elements at a time: what is computed stays in the cache
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INNER: dict[torch.device, torch.Tensor] = {}


def digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The part of a tensor's digest that its box contributes, 0 <= part < 2^64.

    `tensor` is the local part with the sizes of `box`, of any strides and dtype; `shape` are the sizes of the whole. Runs on the tensor's
    device. Raises ValueError if tensor, box and shape do not fit together.
    """
    if tuple(tensor.shape) != box_shape(box) or len(box) != len(shape) or any(b > n for (_, b), n in zip(box, shape, strict=True)):
        raise ValueError(f"a tensor of {tuple(tensor.shape)} is not the box {box} of a tensor of {shape}")
    values = tensor.detach()
    if values.is_complex():
        values, box, shape = torch.view_as_real(values.resolve_conj()), (*box, (0, 2)), (*shape, 2)
    if values.numel() == 0:
        return 0
    bits = values.contiguous().view(_BITS[values.element_size()])
    runs = len(box)  # dims from here on lie one behind the other in the whole
    inner = 1
    while runs:
        runs -= 1
        inner *= box[runs][1] - box[runs][0]
        if box[runs] != (0, shape[runs]):
            break
    start = _STEP
    outer = torch.zeros(1, dtype=torch.int64, device=bits.device)
    for dim, (a, b) in enumerate(box):
        stride = prod(shape[dim + 1 :]) * _STEP
        start += a * stride
        if dim < runs:
            outer = (outer[:, None] + torch.arange(b - a, device=bits.device) * _signed(stride)).reshape(-1)
    outer += _signed(start)
    return _sum(bits.reshape(-1, inner), outer)


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit sum over the bytes of a tensor in the order in which they are read: it tells a changed bit, an exchange, a missing tail.

    The same bytes give the same sum on every device.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = raw.numel()
    tail = size % 8
    if tail or raw.storage_offset() % 8:
        padded = torch.zeros(size + -size % 8, dtype=torch.uint8, device=raw.device)
        padded[:size] = raw
        raw = padded
    words = raw.view(torch.int64)
    return (digest(words, ((0, words.numel()),), (words.numel(),)) + size * _FACTOR) & WORD


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= WORD
    return value - (1 << 64) if value >> 63 else value


def _inner(device: torch.device) -> torch.Tensor:
    if device not in _INNER:
        _INNER[device] = torch.arange(_PIECE, dtype=torch.int64, device=device) * _signed(_STEP)
    return _INNER[device]


def _sum(bits: torch.Tensor, outer: torch.Tensor) -> int:
    """Over rows of bits; row r begins at the index whose multiple of the step is outer[r]."""
    inner = _inner(bits.device)
    rows, width = bits.shape
    parts = []
    if width <= _PIECE:
        each = max(1, _PIECE // width)
        parts = [_mixed(outer[r : r + each, None] + inner[:width], bits[r : r + each]) for r in range(0, rows, each)]
    else:
        for row in range(rows):
            for at in range(0, width, _PIECE):
                piece = bits[row, at : at + _PIECE]
                parts.append(_mixed(inner[: piece.numel()] + (outer[row] + _signed(at * _STEP)), piece))
    return int(torch.stack(parts).sum()) & WORD


def _mixed(places: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    high = places >> 32
    high &= _HALF  # the shift carries the sign along
    places ^= high
    places *= _signed(_FACTOR)
    # bits + 1, so that zeros count
    return (places * bits + places).sum()
