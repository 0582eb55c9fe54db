"""What a plan keeps of the search for its schedule: what was found and beside what, and what is needed to search again without the spec."""

from __future__ import annotations

from fractions import Fraction

from attrs import frozen

__all__ = ["ScheduleBasis", "SearchReport", "Tried"]


@frozen
class Tried:
    """A named schedule: where its stages are, its step time, the most that a position holds; or `reason`, why it does not count."""

    name: str
    placement: str
    makespan: Fraction | None = None
    peak: int | None = None
    reason: str = ""


@frozen
class SearchReport:
    """How `auto` came to a schedule. Times are in FLOPs of one sample (a backward is twice a forward), `hop` among them; sizes are bytes.

    `way` says how it was found, `placement` where its stages are. No schedule of the placements that were looked at ends before `bound`.
    `peak` is the most that activations take on a position. `tried` are the named schedules, best first.
    """

    way: str
    placement: str
    makespan: Fraction
    bound: Fraction
    peak: int
    hop: Fraction = Fraction(0)
    tried: tuple[Tried, ...] = ()

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no schedule of these placements is faster."""
        return self.makespan == self.bound

    @property
    def best_named(self) -> Tried | None:
        """The fastest named schedule that fits."""
        return next((t for t in self.tried if t.makespan is not None), None)


@frozen
class ScheduleBasis:
    """Stages as a search sees them: FLOPs of a forward for one sample, the latency between two positions in FLOPs, bytes that a microbatch leaves on each
    stage, and the bytes that each position has for that (None: any amount). `split` allows backwards in two halves. `again` are FLOPs that the
    backward of each stage computes once more before, `between` bytes that a microbatch takes between its halves; empty if there are none.
    """

    forward: tuple[int, ...]
    hop: Fraction
    sizes: tuple[int, ...]
    caps: tuple[int, ...] | None = None
    split: bool = True
    again: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
