"""The budget sentence in numbers alone: nodes, sizes of pipelines, losses, microbatches. No plan and no model, so that a checker can say what would do.

Each of at least lose + 1 pipelines has a copy of every layer on nodes of its own, so a loss of `lose` nodes leaves one copy whole; and whatever total is
left must be the sum of sizes that there are, for else nodes idle.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, frozen

from pdsl.lowering.coverage import covered, losses_until_uncovered, usable

__all__ = ["Outline", "Remedy", "in_words"]


@frozen
class Remedy:
    """The smallest change of one thing after which the promise holds: `what` is lose, nodes, low or high (of the sizes, in nodes)."""

    what: str
    value: int


@frozen
class Outline:
    """Pipelines of `least` to `least + count - 1` nodes over `nodes` nodes, at most `microbatches` of them.

    `lose` units of `spread` nodes may be lost at once. That copies also lie in different units is for the plan to see to.
    """

    nodes: int
    least: int
    count: int
    lose: int
    microbatches: int
    spread: int = 1

    @property
    def lost(self) -> int:
        """The most nodes that may be lost at once."""
        return self.lose * self.spread

    @property
    def largest(self) -> int:
        return self.least + self.count - 1

    @property
    def needed(self) -> int:
        """The fewest nodes on which lose + 1 pipelines stand."""
        return (self.lose + 1) * self.least

    @property
    def survives(self) -> bool:
        """Whether lose + 1 pipelines can stand, so that one copy of everything is left."""
        return covered(self.nodes, self.least, self.count, self.lose + 1, self.microbatches)

    @property
    def idle(self) -> tuple[int, int] | None:
        """The first loss after which nodes idle: how many nodes are left, and how many of them can be used. None if there is no such loss."""
        for left in range(self.nodes, max(0, self.nodes - self.lost) - 1, -1):
            if not covered(left, self.least, self.count, 1, self.microbatches):
                return left, usable(left, self.least, self.count, self.microbatches)
        return None

    @property
    def holds(self) -> bool:
        return self.survives and self.idle is None

    @property
    def losses_until_broken(self) -> int:
        """How many nodes must be lost one after another, with a new plan after each, until the promise holds no more; 0 if it does not hold now."""
        return next((lost for lost in range(self.nodes) if not evolve(self, nodes=self.nodes - lost).holds), self.nodes)

    @property
    def losses_until_stopped(self) -> int:
        """How many must be lost one after another until no pipeline can stand at all: below the smallest size."""
        return losses_until_uncovered(self.nodes, self.least, self.nodes + 1)

    @property
    def most_lost(self) -> int | None:
        """The largest loss at once, below the one asked for, for which the promise holds; None if there is none."""
        return next((lose for lose in range(self.lose - 1, 0, -1) if evolve(self, lose=lose).holds), None)

    def remedies(self, most_nodes: int | None = None) -> Iterator[Remedy]:
        """What would do, each by itself: a smaller loss, more nodes, smaller sizes, larger sizes."""
        if (lose := self.most_lost) is not None:
            yield Remedy("lose", lose)
        limit = 4 * max(self.nodes, self.needed) if most_nodes is None else most_nodes
        nodes = next((n for n in range(self.nodes + 1, limit + 1) if evolve(self, nodes=n).holds), None)
        if nodes is not None:
            yield Remedy("nodes", nodes)
        low = next((n for n in range(self.least - 1, 0, -1) if evolve(self, least=n, count=self.largest - n + 1).holds), None)
        if low is not None:
            yield Remedy("low", low)
        high = next((n for n in range(self.largest + 1, self.nodes + 1) if evolve(self, count=n - self.least + 1).holds), None)
        if high is not None:
            yield Remedy("high", high)


def in_words(size: int) -> str:
    """Bytes with a unit: `5.9 MiB`."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{size} B"
