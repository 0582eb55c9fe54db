"""Random operations of a model's forward pass: which dim of what they draw holds the rows, told by two passes with different rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from attrs import frozen

from pdsl.lowering.facts import DrawFacts, Rowed

__all__ = ["Draw", "assemble_draws", "draw_warnings"]

_MIXES_ROWS = frozenset({"randperm", "multinomial_rows"})  # what these draw for one row depends on the others


@frozen
class Draw:
    """One random operation that was seen. `function` is the torch function of the model's code that came to it, empty if none was seen;
    `place` the innermost module that ran; `shape` that of what is drawn; `unseen` tells that it came from code that cannot be looked into.
    """

    segment: int
    operation: str
    function: str
    place: str
    shape: tuple[int, ...]
    unseen: bool = False


def assemble_draws(small: Sequence[Draw], large: Sequence[Draw], few: int, many: int) -> tuple[DrawFacts, ...]:
    """The draws of a forward in their order. Where the two passes differ from some draw of a segment on, all that follows it there is opaque."""
    found: list[DrawFacts] = []
    for segment in sorted({d.segment for d in (*small, *large)}):
        same = True
        for a, b in zip_longest(_of(small, segment), _of(large, segment)):
            one = a or b
            assert one is not None
            same = same and a is not None and b is not None and _name(a) == _name(b)
            dims, rowed, row = _dims(a.shape, b.shape, few, many) if same and a is not None and b is not None else ((), Rowed.OPAQUE, -1)
            if one.unseen or one.operation in _MIXES_ROWS or not one.function:
                rowed, row = Rowed.OPAQUE, -1
            found.append(DrawFacts(segment, one.operation, one.function, one.place, dims, rowed, row))
    return tuple(found)


def _of(draws: Iterable[Draw], segment: int) -> list[Draw]:
    return [d for d in draws if d.segment == segment]


def _name(draw: Draw) -> tuple[str, str, str]:
    return draw.operation, draw.function, draw.place


def _dims(small: tuple[int, ...], large: tuple[int, ...], few: int, many: int) -> tuple[tuple[tuple[int, int], ...], Rowed, int]:
    """The size of each dim as (constant, per row), and the one dim of which every row has its own equal share."""
    if len(small) != len(large):
        return (), Rowed.OPAQUE, -1
    dims, growing = [], []
    for i, (a, b) in enumerate(zip(small, large, strict=True)):
        slope, rest = divmod(b - a, many - few)
        if rest or slope < 0 or a - slope * few < 0:
            return (), Rowed.OPAQUE, -1
        dims.append((a - slope * few, slope))
        if slope:
            growing.append(i)
    if not growing:
        return tuple(dims), Rowed.SHARED, -1
    if len(growing) > 1 or dims[growing[0]][0]:
        return tuple(dims), Rowed.OPAQUE, -1
    return tuple(dims), Rowed.ROWS, growing[0]


def draw_warnings(draws: Sequence[DrawFacts]) -> tuple[str, ...]:
    """One line for each place whose random numbers cannot be told apart by rows."""
    seen = dict.fromkeys((d.place, d.operation) for d in draws if d.rowed is Rowed.OPAQUE)
    return tuple(
        f"{place or 'the model'} draws random numbers ({operation}) that cannot be told apart by rows: they depend on microbatches and shards"
        for place, operation in seen
    )
