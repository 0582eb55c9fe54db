"""The published simulation of Oobleck, Varuna and Bamboo: its constants, and a replay by its own rules.

The constants and the rules are facts of the artifact of Oobleck's article (SymbioticLab/Oobleck, SOSP'23, MIT licence): seconds, and samples a second
by number of nodes, that its authors measured or estimated on up to 30 nodes. `replay` follows the rules to the letter, so that the figures
of the article come out; `pdsl.lowering.rivals` models the same systems without what the rules get wrong:

- A loss is noticed when the restart is over. Until then the old job runs on, and the steps that it ends in that time count.
- Nodes that are lost during a restart end it, and once its time is over nothing runs until the next loss.
- Whether a loss hits a checkpoint is looked up in the list of pending events as the heap has it, which is not in order of time: now and then a
  checkpoint counts as failed, and ten steps as undone, that no loss came near. `in_order = True` looks it up by time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from attrs import frozen

from pdsl.lowering.goodput import Workload
from pdsl.lowering.traces import Trace

__all__ = ["PUBLISHED", "Published", "even_pipelines", "replay"]

MOST, FEWEST = 30, 15
"""Nodes at the two ends of the published tables."""


@frozen
class Published:
    """The published constants of one model. `batch` in samples, `parameters` in number, times in seconds.

    `oobleck`, `varuna` and `bamboo` are samples a second with 30, 29, .. 15 nodes (0: cannot train; empty: out of memory). `recovery` is Oobleck's
    pause; `restart` is Varuna's, of which the write of a checkpoint is a part, `restart_by_nodes` where it depends on their number; `write` is the
    time of a checkpoint, every ten steps; `local` is Bamboo's pause. `pipeline` is the number of nodes from which on a pipeline is
    assumed to fit: not published for all models, but read off how many nodes Varuna leaves idle.
    """

    name: str
    parameters: float
    batch: int
    recovery: float
    restart: float
    write: float
    local: float
    pipeline: int
    oobleck: tuple[float, ...]
    varuna: tuple[float, ...]
    bamboo: tuple[float, ...] = ()
    restart_by_nodes: tuple[float, ...] = ()

    def oobleck_step(self, nodes: int) -> float | None:
        return _step(self.batch, self.oobleck, nodes)

    def varuna_step(self, nodes: int) -> float | None:
        return _step(self.batch, self.varuna, nodes)

    def bamboo_step(self, nodes: int) -> float | None:
        return _step(self.batch, self.bamboo, nodes) if self.bamboo else None

    def varuna_restart(self, nodes: int) -> float:
        return _row(self.restart_by_nodes, nodes) if self.restart_by_nodes else self.restart

    def workload(self) -> Workload:
        """Oobleck's throughput, in pipelines of `pipeline` nodes or more."""
        return Workload(self.batch, self.oobleck_step, lambda n: even_pipelines(n, self.pipeline), self.pipeline, 1)


def _row(table: Sequence[float], nodes: int) -> float:
    return table[MOST - min(MOST, max(FEWEST, nodes))]


def _step(batch: float, table: Sequence[float], nodes: int) -> float | None:
    rate = _row(table, nodes) if nodes >= 1 else 0.0
    return batch / rate if rate else None


def even_pipelines(nodes: int, least: int) -> tuple[int, ...]:
    """As many pipelines as can have `least` nodes, the nodes spread over them evenly, longer ones first."""
    count = nodes // least
    return tuple(nodes // count + (i < nodes % count) for i in range(count)) if count else ()


PUBLISHED = {
    p.name: p
    for p in (
        Published(
            "BERT-large", 0.34e9, 8192, 2, 76, 15.8, 76, 3,
            oobleck=(368.2457947, 362.2151579, 328.35419, 327.7784909, 329.1392983, 307.2134406, 304.4540075, 278.5264442,
                     285.8442276, 260.3144683, 261.6788898, 243.5568988, 228.0545262, 209.2082907, 214.8045205, 192.304776),
            varuna=(343.1328746, 331.6951121, 329.5800552, 326.5438348, 306.0386227, 298.3794267, 290.038974, 280.0744467,
                    267.8972968, 255.720147, 243.5429971, 232.9541711, 222.3653452, 211.7765192, 202.5688445, 193.3611697),
            bamboo=(119.2546584, *(99.37888199,) * 6, *(74.53416149,) * 6, *(49.68944099,) * 3),
            restart_by_nodes=(71.3, 67.6, 67.6, 49.1, 112, 108.3, 104.6, 100.9, 97.2, 93.5, 89.8, 86.1, 82.4, 78.7, 75, 71.3),
        ),
        Published(
            "GPT-2", 0.35e9, 1024, 2, 83, 11.5, 80, 3,
            oobleck=(110.006361, 109.6700319, 98.83702293, 100.0745098, 99.47997185, 91.01817697, 90.52226774, 83.40446265,
                     83.33064533, 76.94978926, 76.71496194, 71.58697434, 66.7500461, 63.01561583, 62.74772262, 55.9161269),
            varuna=(125.7855818, 117.6280102, 117.6280102, 106.8250673, 110.9162094, 102.0772415, 102.0772415, 96.65353837,
                    96.65353837, 85.83389481, 88.31094283, 78.31133417, 78.31133417, 70.46360441, 70.46360441, 64.29935764),
            bamboo=(27.02956359, *(22.52463632,) * 6, *(16.89347724,) * 6, *(11.26231816,) * 3),
        ),
        Published(
            "GPT-3 medium", 0.36e9, 819, 3, 78.7, 11.2, 100, 3,
            oobleck=(38.46834258, 37.18606449, 35.90378641, 34.62150832, 33.33923024, 31.66581788, 30.24118675, 28.96443398,
                     27.77451984, 26.68489205, 25.68850493, 23.82505659, 23.0340881, 21.57654709, 20.86545671, 19.10313139),
            varuna=(41.99773336, 38.88588843, 38.88588843, 35.85035677, 33.42576818, 33.42576818, 33.42576818, 28.26386056,
                    28.26386056, 28.26386056, 28.23158201, 25.26139038, 25.26139038, 22.8891583, 22.8891583, 20.91158092),
        ),
        Published(
            "GPT-3 2.7B", 2.7e9, 512, 6, 515, 50, 230, 4,
            oobleck=(9.214308445, 8.90716483, 8.600021215, 8.2928776, 7.985733985, 7.627088295, 7.512265791, 7.435358417,
                     7.052828884, 6.704817778, 6.797312924, 6.105000318, 6.115063714, 5.630658991, 5.630621249, 5.130663366),
            varuna=(9.767532721, *(9.424740405,) * 2, *(9.099911677,) * 4, *(7.469736582,) * 4, *(6.424614304,) * 4, 4.863785398),
        ),
        Published(
            "GPT-3 6.7B", 6.7e9, 1024, 10, 701, 120, 450, 4,
            oobleck=(5.507784136, 5.324191332, 5.140598527, 4.957005722, 4.773412918, 4.808826127, 4.329925297, 4.185194343,
                     3.947198754, 4.010855553, 4.15443025, 3.71233106, 3.593275995, 3.283996229, 3.530908551, 0.0),
            varuna=(*(5.240635953,) * 3, *(5.096885803,) * 4, *(4.503390788,) * 4, *(3.953767179,) * 4, 3.016421755),
        ),
    )
}  # fmt: skip


# --- the replay -----------------------------------------------------------------------------------------------------------------------------


def replay(trace: Trace, model: Published, system: str, *, in_order: bool = False) -> float:
    """Samples a second, on average from the start of training to the end of the last step, as the published rules count them.

    `system` is `oobleck` or `varuna`. Raises KeyError for others. The trace must have at least twelve nodes to begin with.
    """
    rules = {"oobleck": _Replay, "varuna": _VarunaReplay}
    return rules[system](trace, model, in_order=in_order).run()


_ADD, _REMOVE, _READY, _RESTARTED, _STEP, _SAVED = range(6)
_READY_AFTER, _LEAST_NODES, _EVERY = 45_000, 12, 10


class _Replay:
    """Oobleck: a pause at each loss, and the step begins anew. Times are whole milliseconds."""

    def __init__(self, trace: Trace, model: Published, *, in_order: bool) -> None:
        self.model, self.in_order = model, in_order
        self.events: list[tuple[int, int, str]] = []
        for instant in trace.instants:
            for kind, nodes in ((_ADD, instant.added), (_REMOVE, instant.removed)):
                for node in nodes:
                    heapq.heappush(self.events, (instant.ms, kind, node))
        self.end = trace.end
        self.ready: dict[str, bool] = {}
        self.gathered: set[str] | None = None  # the nodes of the restart that is going on
        self.job = 0  # the number of the job that runs, 0 while none does
        self.jobs = 0
        self.step = 0
        self.began: int | None = None
        self.before = 0  # end of the last step, or of the checkpoint after it
        self.ended: list[int] = []
        self.counts: list[tuple[int, bool]] = []  # when each step began, and whether it counts

    def run(self) -> float:
        while self.events:
            now, kind, node = heapq.heappop(self.events)
            if now >= self.end:
                break
            self._happen(now, kind, node)
        if self.began is None or not self.ended:
            return 0.0
        return sum(counts for _, counts in self.counts) * self.model.batch / (self.ended[-1] - self.began) * 1000

    def _happen(self, now: int, kind: int, node: str) -> None:
        if kind == _ADD:
            self.ready[node] = False
            heapq.heappush(self.events, (now + _READY_AFTER, _READY, node))
        elif kind == _READY and node in self.ready:
            self.ready[node] = True
            if self.gathered is not None:
                self.gathered.add(node)
            elif not self.job:
                self._restart(now)
        elif kind == _REMOVE:
            del self.ready[node]
            self._lost()
            self._restart(now)
        elif kind == _RESTARTED:
            self._restarted(now)
        elif kind == _STEP and node == str(self.jobs):
            self._stepped(now)

    def _lost(self) -> None:
        """What a loss undoes: nothing but the step in flight."""

    def _pause(self) -> int:
        return round(self.model.recovery * 1000)

    def _duration(self, nodes: int) -> int:
        seconds = self.model.oobleck_step(nodes)
        return int(seconds * 1000) if seconds is not None else 10**12

    def _restart(self, now: int) -> None:
        self.gathered = {n for n, ready in self.ready.items() if ready}
        heapq.heappush(self.events, (now + self._pause(), _RESTARTED, ""))

    def _restarted(self, now: int) -> None:
        gathered = self.gathered or set()
        if not gathered <= self.ready.keys():
            self._restart(now)
            return
        self.gathered = None
        self.jobs += 1
        if len(gathered) < _LEAST_NODES:
            self.job = 0
            return
        self.job = self.jobs
        self.step = self._duration(sum(self.ready.values()))
        heapq.heappush(self.events, (now + self.step, _STEP, str(self.jobs)))
        if self.began is None:
            self.began = self.before = now

    def _stepped(self, now: int) -> None:
        self.counts.append((self.before, True))
        self.ended.append(now)
        self.before = now
        heapq.heappush(self.events, (now + self.step, _STEP, str(self.jobs)))


class _VarunaReplay(_Replay):
    """Varuna: falls back to the last checkpoint; one is written after ten steps, and after the first step that ends after a loss."""

    def __init__(self, trace: Trace, model: Published, *, in_order: bool) -> None:
        super().__init__(trace, model, in_order=in_order)
        self.restart_seconds = model.restart
        self.steps = 0
        self.saved: int | None = None  # when the last good checkpoint was written
        self.after_loss = False

    def _lost(self) -> None:
        self.after_loss = True
        self.counts = [(began, counts and self.saved is not None and began < self.saved) for began, counts in self.counts]

    def _pause(self) -> int:
        return int(self.restart_seconds * 1000) - int(self.model.write * 1000)

    def _duration(self, nodes: int) -> int:
        self.restart_seconds = self.model.varuna_restart(nodes)
        seconds = self.model.varuna_step(nodes)
        return int(seconds * 1000) if seconds is not None else 10**12

    def _stepped(self, now: int) -> None:
        self.steps += 1
        self.counts.append((self.before, True))
        self.ended.append(now)
        if self.steps % _EVERY == 0 or self.after_loss:
            now += int(self.model.write * 1000)
            self.after_loss = False
            self._save(now)
        self.before = now
        heapq.heappush(self.events, (now + self.step, _STEP, str(self.jobs)))

    def _save(self, now: int) -> None:
        heapq.heappush(self.events, (now + int(self.model.write * 1000), _SAVED, ""))
        if not self._hit():
            self.saved = now
            return
        self.steps = max(0, self.steps - _EVERY)
        kept = max(0, len(self.counts) - _EVERY)
        self.counts = [*self.counts[:kept], *((began, False) for began, _ in self.counts[kept:])]

    def _hit(self) -> bool:
        """Whether a loss comes before the end of a checkpoint that is being written, by the list of events."""
        pending = sorted(self.events) if self.in_order else self.events
        kinds = [kind for _, kind, _ in pending if kind in {_REMOVE, _SAVED}]
        return _SAVED in kinds and kinds[0] == _REMOVE
