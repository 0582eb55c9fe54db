"""Two ways to do one job in the same processes, step by step in turn: the worker processes of the step-time benchmark.

Each worker holds both sides, with process groups of their own. They take turns A B, B A, A B, ... after a barrier each, so that whatever the
machine does meets both alike; a ratio is taken within each pair.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from multiprocessing import connection, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch.distributed import distributed_c10d

from tests.quiet import quiet

__all__ = ["Cancelled", "Measurement", "Side", "Traffic", "measure"]

WARM_UP = 6  # steps of each side before the first that counts


class Cancelled(Exception):
    """A worker failed or did not answer in time; the message tells."""


class Side(Protocol):
    """One side of the comparison on one rank. Its step takes the number of the batch and gives the loss, the same on every rank."""

    def step(self, batch: int) -> float: ...


@frozen
class Traffic:
    """What left a rank in one step, over all ranks: calls of collectives (each rank's call counts), messages sent, bytes given to both."""

    collectives: int
    messages: int
    bytes: int


@frozen
class Measurement:
    """Seconds of each step of both sides, in pairs, and the losses. `ours` is divided by `theirs`.

    `work` is the processor time of both in all counted steps, over all threads of all ranks: it shows what waiting hides.
    """

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    work: tuple[float, float]
    losses: tuple[tuple[float, float], ...]
    traffic: tuple[Traffic, Traffic]
    calls: tuple[dict[str, int], dict[str, int]] = field(repr=False)

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def quartiles(self) -> tuple[float, float, float]:
        first, middle, third = statistics.quantiles(self.ratios, n=4)
        return first, middle, third

    @property
    def deviation(self) -> float:
        """The largest relative difference of two losses."""
        return max(abs(a - b) / abs(b) for a, b in self.losses)


# --- in the parent ------------------------------------------------------------------------------------------------------------------------


def measure(make: Callable[[int, int, dist.Store], Side], ranks: int, steps: int, deadline: float = 300.0) -> Measurement:
    """Fork `ranks` workers and run `steps` pairs. `make(which, rank, store)` builds side 0, ours, or side 1, theirs, in a worker.

    Raises Cancelled, after ending all workers, if one fails or `deadline` (seconds) passes.
    """
    context = get_context("fork")
    gc.collect()
    gc.freeze()  # what is there now belongs to all workers; collecting it in each costs half a second
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        workers = [context.Process(target=_worker, args=(make, r, ranks, steps, folder, pipes[r][1])) for r in range(ranks)]
        try:
            for worker in workers:
                worker.start()
            for _, end in pipes:
                end.close()  # so that a worker that dies closes its pipe
            found = _collect([receiver for receiver, _ in pipes], time.monotonic() + deadline)
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()
    return _merge(found, steps)


def _collect(pipes: list[Any], until: float) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        ready = connection.wait([p for i, p in enumerate(pipes) if i not in found], max(0.0, until - time.monotonic()))
        if not ready:
            raise Cancelled(f"ranks {sorted(set(range(len(pipes))) - set(found))} did not answer in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                raise Cancelled(f"rank {rank} died") from None
            if "error" in found[rank]:
                raise Cancelled(f"rank {rank}: {found[rank]['error']}")
    return [found[r] for r in range(len(pipes))]


def _merge(ranks: list[dict[str, Any]], steps: int) -> Measurement:
    def seconds(which: int) -> tuple[float, ...]:
        # the clock is the machine's: a step lasts from the first rank that begins to the last that ends
        spans = [[r["spans"][which][i] for r in ranks] for i in range(steps)]
        return tuple(max(end for _, end in span) - min(begin for begin, _ in span) for span in spans)

    def traffic(which: int) -> Traffic:
        counted = [r["traffic"][which] for r in ranks]
        return Traffic(sum(c[0] for c in counted), sum(c[1] for c in counted), sum(c[2] for c in counted))

    def calls(which: int) -> dict[str, int]:
        return dict(sum((Counter(r["calls"][which]) for r in ranks), Counter()))

    losses = tuple(zip(*ranks[0]["losses"], strict=True))
    work = (sum(r["work"][0] for r in ranks), sum(r["work"][1] for r in ranks))
    return Measurement(seconds(0), seconds(1), work, losses, (traffic(0), traffic(1)), (calls(0), calls(1)))


# --- in a worker ---------------------------------------------------------------------------------------------------------------------------


def _worker(make: Callable[[int, int, dist.Store], Side], rank: int, ranks: int, steps: int, folder: str, pipe: Any) -> None:
    try:
        pipe.send(_run(make, rank, ranks, steps, Path(folder)))
    except BaseException:  # noqa: BLE001  the parent tells, and ends the others
        pipe.send({"error": traceback.format_exc()})
    finally:
        pipe.close()
        os._exit(0)  # with both sides' groups open; nobody waits for anybody


def _run(make: Callable[[int, int, dist.Store], Side], rank: int, ranks: int, steps: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    barrier = _barrier(dist.PrefixStore("barrier", store), rank, ranks)
    sides, worlds = [], []
    for which in (0, 1):
        sides.append(make(which, rank, dist.PrefixStore(f"side{which}", store)))
        worlds.append(distributed_c10d.GroupMember.WORLD)
        distributed_c10d._update_default_pg(None)  # the other side makes a WORLD of its own
    spans: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    work = [0.0, 0.0]
    for pair in range(WARM_UP + steps):
        if pair == WARM_UP:
            gc.collect()
            gc.freeze()
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            distributed_c10d._update_default_pg(worlds[which])
            barrier()
            begin, busy = time.perf_counter(), time.process_time()
            loss = sides[which].step(pair)
            end, busy = time.perf_counter(), time.process_time() - busy
            losses[which].append(loss)
            if pair >= WARM_UP:
                spans[which].append((begin, end))
                work[which] += busy
    traffic, calls = [], []
    for which in (0, 1):
        distributed_c10d._update_default_pg(worlds[which])
        barrier()
        with _counting() as counted:
            losses[which].append(sides[which].step(WARM_UP + steps))
        traffic.append(_traffic(counted))
        calls.append(dict(Counter(name for name, _ in counted)))
    return {"spans": spans, "work": work, "losses": losses, "traffic": traffic, "calls": calls}


def _barrier(store: dist.Store, rank: int, ranks: int) -> Callable[[], None]:
    group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
    token = torch.zeros(1)
    return lambda: group.allreduce([token]).wait()


@contextmanager
def _counting() -> Iterator[list[tuple[str, int]]]:
    """Name and bytes of each call that reaches gloo; the profiler sees both torch's own groups and those made by hand."""
    found: list[tuple[str, int]] = []
    with quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield found
    gloo = "gloo:"
    found += [(e.name.removeprefix(gloo), _size(e.input_shapes)) for e in profiler.events() if e.name.startswith(gloo)]


def _size(shapes: Sequence[Sequence[int]]) -> int:
    """Bytes of the tensors of a call. Both sides move fp32; the few numbers that are not (loss and counts) do not show."""
    return 4 * sum(prod(shape) for shape in shapes if shape)


def _traffic(counted: list[tuple[str, int]]) -> tuple[int, int, int]:
    received = ("recv", "recvAnySource")
    sent = [c for c in counted if c[0] not in received]
    messages = [c for c in sent if c[0] == "send"]
    return len(sent) - len(messages), len(messages), sum(size for _, size in sent)
