"""A pool of worker processes that live as long as the test session and run functions as ranks of a job.

Importing torch costs seconds, so workers are forked from a server that has imported it once, and are used again by later calls:

    def gather(rank, world, store, factor):          # a function of a module; every worker imports that module by name
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        ...
        return tensor                                # comes back as a plain CPU tensor

    def test_gather(pool):
        first, second = pool.run(gather, 2, 3.0)

Each call has a store prefix of its own, a seeded generator and a restored environment; a process group that the function leaves behind is
destroyed. A call ends by itself: a rank that raises, dies or is stuck at the deadline fails it, and what cannot answer is killed by its id.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection, context, get_context
from pathlib import Path
from typing import Any

from attrs import define, field

from tests.pool_worker import Died, Outcome, Raised, Request, Returned, dump, load, serve

__all__ = ["Pool", "RankDied", "RankFailed", "RankStuck"]

PRELOADED = [
    "torch",
    "torch._dynamo",  # FSDP2 imports it with the first unit
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
    "pdsl.runtime.verify",
]
PATIENCE = 5.0  # seconds that the other ranks have to notice a failure before they are killed
STACK_PATIENCE = 3.0  # seconds that a stuck rank has to write its stack


class RankDied(Exception):
    """A worker process ended in the middle of a call."""


class RankStuck(Exception):
    """Some ranks had not answered at the deadline; the message holds their stacks."""


class RankFailed(Exception):
    """A rank raised something that cannot be sent between processes; the message holds its traceback."""


# --- in the test process --------------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Worker:
    """A process, our end of its pipe, and the file that its stack goes to."""

    process: Any
    link: connection.Connection
    stacks: Path

    def end(self) -> None:
        """Kill the process by its id and let go of everything it had."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.link.close()
        self.stacks.unlink(missing_ok=True)

    def stack(self) -> str:
        """Where every thread of the process is, by its own signal handler, which also works inside C++ code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        limit = time.monotonic() + STACK_PATIENCE
        text = ""
        while time.monotonic() < limit:
            before, text = text, self.stacks.read_text(encoding="utf-8")
            if text and text == before:
                return text
            time.sleep(0.02)
        return text or "(no stack: the process does not react to signals)"


@define(eq=False)
class Pool:
    """Worker processes for the ranks of a test, started when first needed. Not for use from several threads."""

    limit: int = 8
    _workers: list[_Worker] = field(factory=list, init=False)
    _server: Any = field(default=None, init=False)
    _folder: Any = field(default=None, init=False)
    _calls: int = field(default=0, init=False)
    _born: int = field(default=0, init=False)

    def run(self, function: Callable[..., Any], world: int, *args: Any, deadline: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `function(rank, world, store, *args, **kwargs)` on `world` ranks and return the results in the order of the ranks.

        `function` belongs to a module that workers can import; arguments and results are picklable, tensors travel by value. `deadline` is
        in seconds for the whole call. The function makes process groups itself, from `store`, if it wants any.

        Raises what the first rank raised that failed for a reason of its own, with that rank's traceback as a note; `RankDied` if a worker
        process ended; `RankStuck` at the deadline, with the stack of each rank that had not answered.
        """
        if not 1 <= world <= self.limit:
            raise ValueError(f"world is {world}: this pool has 1 to {self.limit} ranks")
        call = dump((function, args, kwargs))
        until = time.monotonic() + deadline
        workers = self._take(world)
        self._calls += 1
        waiting = dict(enumerate(workers))
        try:
            outcomes = self._send(waiting, world, deadline, call)
            outcomes |= _collect(waiting, until, failed=bool(outcomes))
            stuck = {} if any(not isinstance(o, Returned) for o in outcomes.values()) else {r: w.stack() for r, w in waiting.items()}
        finally:
            self._drop([w for w in workers if w in waiting.values() or not w.process.is_alive()])
        if stuck:
            raise RankStuck(_stuck_report(function, world, deadline, stuck))
        _raise_failure(function, world, outcomes, sorted(waiting))
        return [load(outcomes[rank].result) for rank in range(world)]

    def close(self) -> None:
        """End every worker by its id."""
        self._drop(list(self._workers))
        self._server = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in the order of the ranks they serve."""
        return tuple(w.process.pid for w in self._workers)

    def _take(self, world: int) -> list[_Worker]:
        self._drop([w for w in self._workers if not w.process.is_alive()])
        if self._server is None:
            from torch.distributed import TCPStore

            self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < world:
            self._workers.append(self._start())
        return self._workers[:world]

    def _start(self) -> _Worker:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="pdsl-pool-")
        method = _fork_server()
        ours, theirs = method.Pipe()
        stacks = Path(self._folder.name) / f"stack-{self._born}"
        stacks.touch()
        process = method.Process(target=serve, args=(theirs, str(stacks)), name=f"pdsl-worker-{self._born}", daemon=True)
        self._born += 1
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def _send(self, waiting: dict[int, _Worker], world: int, deadline: float, call: bytes) -> dict[int, Outcome]:
        gone: dict[int, Outcome] = {}
        for rank, worker in list(waiting.items()):
            request = Request(rank, world, self._server.port, f"call-{self._calls}", deadline, call)
            try:
                worker.link.send_bytes(pickle.dumps(request))
            except OSError:
                gone[rank] = _last_words(worker)
                del waiting[rank]
        return gone

    def _drop(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.end()


def _fork_server() -> context.ForkServerContext:
    """The context whose server has imported torch; the server is started with one thread for each process to come."""
    method = get_context("forkserver")
    method.set_forkserver_preload(PRELOADED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return method


def _collect(waiting: dict[int, _Worker], until: float, *, failed: bool) -> dict[int, Outcome]:
    """Take answers until all ranks have one or the time is over; after a failure the others have `PATIENCE`. Answered ranks leave `waiting`."""
    outcomes: dict[int, Outcome] = {}
    if failed:
        until = min(until, time.monotonic() + PATIENCE)
    while waiting:
        handles = {w.link: rank for rank, w in waiting.items()} | {w.process.sentinel: rank for rank, w in waiting.items()}
        ready = connection.wait(list(handles), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            return outcomes
        for rank in sorted({handles[handle] for handle in ready}):
            outcomes[rank] = _last_words(waiting.pop(rank))
            if not failed and not isinstance(outcomes[rank], Returned):
                failed = True
                until = min(until, time.monotonic() + PATIENCE)
    return outcomes


def _last_words(worker: _Worker) -> Outcome:
    """The answer that lies in the pipe, or the death of the worker."""
    try:
        if worker.link.poll():
            outcome: Outcome = load(worker.link.recv_bytes())
            return outcome
    except (EOFError, OSError):
        pass
    worker.process.join(1.0)
    return Died(worker.process.exitcode)


def _raise_failure(function: Callable[..., Any], world: int, outcomes: dict[int, Outcome], unanswered: list[int]) -> None:
    """Raise the failure that came first and was nobody else's consequence; nothing if all ranks returned."""
    failures = {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, Returned)}
    if not failures:
        return
    rank = min(failures, key=lambda r: _order(failures[r]))
    first = failures.pop(rank)
    also = [f"rank {r} then failed: {_last_line(failures[r])}" for r in sorted(failures)]
    also += [f"rank {r} was still waiting and was ended" for r in unanswered]
    where = f"{function.__qualname__} on rank {rank} of {world}"
    if isinstance(first, Died):
        raise RankDied("\n".join([f"{where}: the process {_ending(first.exitcode)}", *also]))
    assert isinstance(first, Raised)
    error = RankFailed(f"{where} raised") if first.error is None else load(first.error)
    error.add_note("\n".join([f"{where}:", first.text.rstrip(), *also]))
    raise error


def _order(outcome: Outcome) -> tuple[int, float]:
    match outcome:
        case Raised(moment=moment, follows=follows):
            return (2 if follows else 0, moment)
        case _:
            return (1, 0.0)


def _last_line(outcome: Outcome) -> str:
    match outcome:
        case Raised(text=text):
            return text.rstrip().rsplit("\n", 1)[-1]
        case Died(exitcode=exitcode):
            return f"the process {_ending(exitcode)}"
        case _:
            return ""


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit status {exitcode}"


def _stuck_report(function: Callable[..., Any], world: int, deadline: float, stacks: dict[int, str]) -> str:
    ranks = ", ".join(str(rank) for rank in sorted(stacks))
    lines = [f"{function.__qualname__} on {world} ranks: no answer from rank {ranks} within {deadline:g} s"]
    for rank in sorted(stacks):
        lines += [f"--- rank {rank}", stacks[rank].rstrip()]
    return "\n".join(lines)
