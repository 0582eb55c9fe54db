"""Traces of failures: when which nodes come and go. Read from a file, or drawn from rates with a seed.

A file has one event a line, `milliseconds,add|remove,node`, in order of time; lines that are empty or start with `#` do not count. The nodes
that are there at time zero are added at time zero.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve, field, frozen

from pdsl.grammar.errors import PdslError

__all__ = ["DAY", "Exposure", "Instant", "Trace", "TraceError", "delayed", "exposure", "random_trace", "read_trace", "steady_trace"]

DAY = 86_400_000
"""Milliseconds of a day."""


class TraceError(PdslError):
    """A trace cannot be read. The message has the file, the line and what was expected there."""


@frozen
class Instant:
    """What happens at one moment: nodes that are lost and nodes that are there from then on, in the order of the trace."""

    ms: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ms / 1000


@frozen
class Trace:
    """Instants in order of time, no two at one millisecond, and the end of what is known. `name` is what it is called in reports."""

    name: str
    instants: tuple[Instant, ...]
    end: int
    losses: int = field(init=False, eq=False)

    @losses.default
    def _count(self) -> int:
        return sum(len(i.removed) for i in self.instants)

    @property
    def loss_instants(self) -> int:
        """Moments at which at least one node is lost."""
        return sum(bool(i.removed) for i in self.instants)

    @property
    def mean_gap(self) -> float:
        """Seconds between two moments of loss, on average; of a trace without a loss, its whole length."""
        return self.end / 1000 / max(1, self.loss_instants)

    def alive(self) -> Iterator[tuple[int, int]]:
        """Milliseconds and nodes alive from then on, one pair an instant."""
        count = 0
        for instant in self.instants:
            count += len(instant.added) - len(instant.removed)
            yield instant.ms, count

    @property
    def peak(self) -> int:
        """The most nodes that are there at once."""
        return max((count for _, count in self.alive()), default=0)


# --- files ------------------------------------------------------------------------------------------------------------------------------------


def read_trace(text: str, name: str) -> Trace:
    """The trace that a text holds; `name` is the file that errors speak of.

    Raises TraceError with the line for anything but three fields, a time that is no whole number or goes back, a word other than `add` and
    `remove`, a node added while it is there or removed while it is not; and for a text without any event.
    """
    events: list[tuple[int, bool, str]] = []
    there: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        event = _event(line, f"{name}:{number}")
        _check_event(event, events[-1][0] if events else 0, there, f"{name}:{number}")
        events.append(event)
        (there.add if event[1] else there.discard)(event[2])
    if not events:
        raise TraceError(f"{name}: holds no event; a line such as `0,add,node1` was expected")
    return Trace(name, _instants(events), events[-1][0])


def _event(line: str, where: str) -> tuple[int, bool, str]:
    fields = [part.strip() for part in line.split(",")]
    if len(fields) != 3:
        raise TraceError(f"{where}: {len(fields)} field{'s' * (len(fields) != 1)}; expected three, as in `600000,remove,node7`")
    time, word, node = fields
    if not (time.isascii() and time.isdigit()):
        raise TraceError(f"{where}: {time!r} is no time; expected whole milliseconds from the start of the trace")
    if word not in {"add", "remove"}:
        raise TraceError(f"{where}: {word!r} is no event; expected add or remove")
    if not node:
        raise TraceError(f"{where}: the node has no name")
    return int(time), word == "add", node


def _check_event(event: tuple[int, bool, str], before: int, there: set[str], where: str) -> None:
    time, added, node = event
    if time < before:
        raise TraceError(f"{where}: {time} ms comes after {before} ms; events must be in order of time")
    if added and node in there:
        raise TraceError(f"{where}: {node} is added, but it is there already")
    if not added and node not in there:
        raise TraceError(f"{where}: {node} is removed, but it is not there")


def _instants(events: Iterable[tuple[int, bool, str]]) -> tuple[Instant, ...]:
    """Events of one millisecond together. A node that goes and comes back at once is lost and new; one that comes and goes at once never was."""
    found: list[Instant] = []
    for time, is_added, node in events:
        if not found or found[-1].ms != time:
            found.append(Instant(time))
        last = found[-1]
        if is_added:
            found[-1] = evolve(last, added=(*last.added, node))
        elif node in last.added:
            found[-1] = evolve(last, added=tuple(n for n in last.added if n != node))
        else:
            found[-1] = evolve(last, removed=(*last.removed, node))
    return tuple(found)


def delayed(trace: Trace, seconds: float) -> Trace:
    """The same trace with nodes of use only `seconds` after they were added; those that are lost earlier never are."""
    shift = round(seconds * 1000)
    if not shift:
        return trace
    starts: dict[str, int] = {}
    events: list[tuple[int, int, bool, str]] = []
    for instant in trace.instants:
        for node in instant.removed:
            if instant.ms >= starts.pop(node) + shift:
                events.append((instant.ms, len(events), False, node))
            else:
                events = [e for e in events if not (e[2] and e[3] == node and e[0] > instant.ms)]
        for node in instant.added:
            starts[node] = instant.ms
            events.append((instant.ms + shift, len(events), True, node))
    events.sort(key=lambda e: (e[0], e[2], e[1]))
    return Trace(trace.name, _instants((ms, added, node) for ms, _, added, node in events if ms <= trace.end), trace.end)


# --- synthetic traces ---------------------------------------------------------------------------------------------------------------------------


def steady_trace(nodes: int, every: float, losses: int) -> Trace:
    """`nodes` nodes, the last of those left lost every `every` seconds, `losses` times; it ends one interval after the last loss."""
    step = round(every * 1000)
    gone = tuple(Instant(step * (i + 1), (), (f"node{nodes - i}",)) for i in range(min(losses, nodes)))
    return Trace(f"one loss every {every:g} s", (Instant(0, _names(nodes)), *gone), step * (len(gone) + 1))


def random_trace(
    nodes: int, days: float, rate: float, *, seed: int, rack_rate: float = 0.0, rack_size: float = 4.0, repair: float | None = None
) -> Trace:
    """A trace drawn from rates.

    Each node is lost with `rate` per day (an exponential law), and starts an event that takes its neighbours too with `rack_rate` per day: k
    nodes next to each other in number, k - 2 geometric so that k is `rack_size` on average (at least 2). Lost nodes come back after `repair`
    seconds, or never if it is None. Same arguments, same trace, on every machine. Raises ValueError on rates below zero or racks below 2.
    """
    if rate < 0 or rack_rate < 0 or days <= 0 or nodes < 1:
        raise ValueError(
            f"{nodes} nodes, {days:g} days, rates {rate:g} and {rack_rate:g}: expected nodes and days above zero and no rate below"
        )
    if rack_size < 2:
        raise ValueError(f"racks of {rack_size:g} nodes: an event that takes one node is counted by the rate; expected at least 2")
    draw = random.Random(seed)
    names, alive = _names(nodes), _Alive(nodes)
    back: list[tuple[int, int]] = []
    found = [Instant(0, names)]
    now, end = 0.0, round(days * DAY)
    while True:
        total = len(alive) * (rate + rack_rate) / DAY
        loss = now + draw.expovariate(total) if total > 0 else math.inf
        if back and back[0][0] <= min(loss, end):
            now = back[0][0]
            returned = []
            while back and back[0][0] <= now:
                returned.append(heapq.heappop(back)[1])
            alive.restore(returned)
            found.append(Instant(int(now), tuple(names[i] for i in returned)))
            continue
        if loss > end:
            return Trace(f"{rate:g} losses per node-day, seed {seed}", _merged(found), end)
        now = loss
        first = alive.any(draw)
        together = _rack(draw, rack_size) if draw.random() * (rate + rack_rate) < rack_rate else 1
        gone = alive.take(first, together)
        found.append(Instant(int(now), (), tuple(names[i] for i in gone)))
        if repair is not None:
            for i in gone:
                heapq.heappush(back, (int(now) + max(1, round(repair * 1000)), i))


class _Alive:
    """Which nodes are there: a random one in O(1), neighbours by walking."""

    def __init__(self, nodes: int) -> None:
        self._order = list(range(nodes))
        self._at = list(range(nodes))

    def __len__(self) -> int:
        return len(self._order)

    def any(self, draw: random.Random) -> int:
        return self._order[int(draw.random() * len(self._order))]

    def take(self, first: int, count: int) -> list[int]:
        """Remove up to `count` nodes from `first` on, in order of their numbers and round the end."""
        gone: list[int] = []
        total = len(self._at)
        for i in range(total):
            node = (first + i) % total
            if self._at[node] >= 0:
                self._drop(node)
                gone.append(node)
            if len(gone) == count:
                break
        return gone

    def _drop(self, node: int) -> None:
        at, last = self._at[node], self._order.pop()
        if last != node:
            self._order[at] = last
            self._at[last] = at
        self._at[node] = -1

    def restore(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._at[node] = len(self._order)
            self._order.append(node)


def _rack(draw: random.Random, size: float) -> int:
    """2 + a geometric number of mean `size` - 2."""
    more = size - 2
    if more <= 0:
        return 2
    return 2 + int(math.log(1 - draw.random()) / math.log(more / (1 + more)))


def _names(nodes: int) -> tuple[str, ...]:
    return tuple(f"node{i}" for i in range(1, nodes + 1))


def _merged(instants: Sequence[Instant]) -> tuple[Instant, ...]:
    """Instants of one millisecond as one."""
    events = ((i.ms, added, node) for i in instants for added, nodes in ((False, i.removed), (True, i.added)) for node in nodes)
    return _instants(events)


# --- exposure -----------------------------------------------------------------------------------------------------------------------------------


@frozen
class Exposure:
    """How a trace strains a budget of `lose` nodes with pipelines of at least `least` nodes.

    `outside` is the share of time in which fewer than (lose + 1) * least nodes are alive, so that the promise does not hold. `beyond` counts the
    moments at which more than `lose` are lost at once, `most` is the largest such number. `below` is the share of time with fewer than `least`.
    """

    lose: int
    least: int
    outside: float
    below: float
    instants: int
    beyond: int
    most: int


def exposure(trace: Trace, *, lose: int, least: int) -> Exposure:
    """The exposure of a budget to a trace. Time is counted from the first instant to the end."""
    outside = below = total = 0
    moments = [*trace.alive()]
    ends = [*(ms for ms, _ in moments[1:]), trace.end]
    for (ms, count), end in zip(moments, ends, strict=True):
        total += end - ms
        outside += (end - ms) * (count < (lose + 1) * least)
        below += (end - ms) * (count < least)
    sizes = [len(i.removed) for i in trace.instants if i.removed]
    return Exposure(
        lose,
        least,
        outside / total if total else 0.0,
        below / total if total else 0.0,
        len(sizes),
        sum(size > lose for size in sizes),
        max(sizes, default=0),
    )
