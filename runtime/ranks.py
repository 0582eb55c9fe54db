"""The ranks of a node as processes: forked by its agent, each with a link to it, none of which outlives it."""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from attrs import frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.link import Link
from pdsl.runtime.view import BEATS
from pdsl.runtime.wire import Channel

__all__ = ["TASKS", "RankProcess", "Work", "die_with_parent", "fork_rank", "in_words_of_status", "preload", "ranks_of", "task_of"]

TASKS = {"train": "pdsl.runtime.resilient_train:train_resilient"}
"""What ranks can do, by name: `function(plan, rank, link, **arguments)`."""

_PR_SET_PDEATHSIG = 1


@frozen
class Work:
    """What every rank of a run does. `threads` are those of one rank; `log_directory` gets what ranks other than 0 print."""

    plan: Plan
    task: str
    arguments: Mapping[str, Any]
    threads: int
    silence: float
    log_directory: str | None = None


class RankProcess:
    """A rank of this node, as its agent sees it."""

    def __init__(self, rank: int, pid: int, connection: socket.socket) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel = Channel(connection)
        self.status: int | None = None

    def kill(self) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the process, which has ended, and give its exit status; negative for a signal."""
        if self.status is None:
            _, code = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(code)
        return self.status

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within some seconds; it is reaped then."""
        if self.status is not None:
            return True
        ready, _, _ = select.select([self.pidfd], [], [], seconds)
        if ready:
            self.reap()
        return bool(ready)


def in_words_of_status(status: int) -> str:
    """How a process ended, to follow its name in a sentence."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else "ended before the run was over"


def task_of(name: str) -> Callable[..., Any]:
    """The function of a task: one of `TASKS`, or `module:function`. Raises RunError if there is none."""
    where = TASKS.get(name, name)
    module, _, function = where.partition(":")
    if not function:
        raise RunError(f"there is no task {name!r}; there are {', '.join(TASKS)}, and module:function")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RunError(f"the task {name!r} cannot be imported: {error}") from None
    return found


def ranks_of(plan: Plan, node: int) -> tuple[int, ...]:
    """The ranks of a node, also of one that is in no plan yet."""
    return tuple(range(node * plan.ranks_per_node, (node + 1) * plan.ranks_per_node))


def preload() -> None:
    """Import what every rank will need of torch, for a process that forks them.

    The last is imported by torch itself when a tensor is first filled with normal numbers, and would cost every rank a second of a core.
    """
    for name in ("torch", "torch.distributed", "torch._dynamo"):
        importlib.import_module(name)


def die_with_parent() -> None:
    """End this process when the one that forked it ends, whatever the reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_rank(work: Work, rank: int, foreign: Iterable[socket.socket]) -> RankProcess:
    """Fork one rank. `foreign` are the sockets of the agent, which the rank closes: an end that is held twice never closes."""
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _live(work, rank, theirs, (ours, *foreign), agent)
    theirs.close()
    return RankProcess(rank, pid, ours)


def _live(work: Work, rank: int, connection: socket.socket, foreign: tuple[socket.socket, ...], agent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        if os.getppid() != agent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for held in foreign:
            held.close()
        with open(os.devnull) as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
        if work.log_directory and rank:
            with (Path(work.log_directory) / f"rank-{rank}.log").open("a") as log:
                os.dup2(log.fileno(), 2)
        os.dup2(2, 1)
        code = _work(work, rank, Link(connection, rank, work.silence / BEATS))
    except BaseException:  # noqa: BLE001  nobody is left to whom it could be told otherwise
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _work(work: Work, rank: int, link: Link) -> int:
    link.on_closed = _follow_the_agent
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(work.threads)
        task_of(work.task)(work.plan, rank, link, **work.arguments)
        if not link.over:
            raise RunError(f"the task {work.task!r} returned before the run was over")
    except BaseException as error:  # noqa: BLE001  whatever ended this rank must be told in one place
        if work.log_directory:
            with (Path(work.log_directory) / f"rank-{rank}.log").open("a") as log:
                log.writelines(traceback.format_exception(error))
        with suppress(RunError):
            link.fail(error, fatal=link.is_fatal(error))
        return 1
    return 0


def _follow_the_agent() -> None:
    os._exit(1)
