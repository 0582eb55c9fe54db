"""Which blocks write into what they are given, and who would see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field
from torch import Tensor

__all__ = ["ALONE", "SEEN", "Handed", "Writes"]

ALONE, SEEN = "alone", "seen"

Handed = tuple[int, Tensor, Tensor, int]
"""Leaf, the tensor that was handed on, what the block got in its place, its version then."""


@define(eq=False)
class Writes:
    """Watches the arguments of blocks. Those that cross a boundary were replaced by copies; of the others the version tells."""

    _given: list[tuple[Tensor, int]] = field(factory=list)
    _written: dict[int, tuple[int, str]] = field(factory=dict)  # by id: the segment and the block that wrote first
    _reasons: dict[int, str] = field(factory=dict)

    def enters(self, segment: int, leaves: Sequence[object], crossing: Sequence[Handed]) -> None:
        """A block is called in this segment."""
        copies = {id(copy) for _, _, copy, _ in crossing}
        plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in copies]
        for leaf in plain:
            if id(leaf) in self._written:
                first, block = self._written[id(leaf)]
                for later in range(first + 1, segment + 1):
                    self._reasons.setdefault(
                        later, f"{block} writes into a tensor that the model makes for all blocks, and later ones read it"
                    )
        self._given = [(leaf, leaf._version) for leaf in plain]

    def leaves(self, segment: int, block: str) -> None:
        """The block is done."""
        for leaf, version in self._given:
            if leaf._version != version:
                self._written.setdefault(id(leaf), (segment, block))
        self._given = []

    def reasons(self, crossings: Sequence[Sequence[Handed]]) -> dict[int, str]:
        """For each segment why it must not begin a stage."""
        found = dict(self._reasons)
        for segment, crossing in enumerate(crossings):
            storages = [source.untyped_storage()._cdata for _, source, _, _ in crossing]
            written = {s for (_, source, _, _), s in zip(crossing, storages, strict=True) if written_from(crossings, segment, source)}
            if any(storages.count(s) > 1 for s in written):
                found.setdefault(segment, "two tensors that cross it lie in the same memory, and one of them is written into afterwards")
        return found

    def kinds(self, crossings: Sequence[Sequence[Handed]], leaks: Mapping[int, str]) -> dict[int, str]:
        """For each segment whose block writes into a tensor that needs a gradient: whether anything but the block reads it afterwards."""
        found = {}
        for segment, crossing in enumerate(crossings):
            sources = [source for _, source, copy, version in crossing if copy._version != version and source.requires_grad]
            if not sources:
                continue
            later = {id(source) for follows in crossings[segment + 1 :] for _, source, _, _ in follows}
            seen = segment in leaks or any(id(source) in later for source in sources)
            found[segment] = SEEN if seen else ALONE
        return found


def written_from(crossings: Sequence[Sequence[Handed]], segment: int, source: Tensor) -> bool:
    """Whether a tensor that crosses into a segment is written into there or later."""
    return any(other is source and copy._version != version for crossing in crossings[segment:] for _, other, copy, version in crossing)
