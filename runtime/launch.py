"""Launching a plan on this machine, and meeting as one rank of many under torchrun.

A rank that fails ends the run: the launcher waits a moment for the rank that failed for a reason of its own, ends all others and reports that
one reason.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from attrs import frozen

from pdsl.grammar.errors import PeerError, RankError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.faults import follows_another

__all__ = ["Membership", "join", "launch", "make_folder", "membership", "one_voice", "outcome_of", "reason_of"]

_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "recvValue failed",
)

_GRACE = 2.0  # seconds in which the rank that failed by itself must have told so, after a follower did


@frozen
class Membership:
    """This process as one rank of many, as torchrun's environment says."""

    rank: int
    local_rank: int
    world_size: int


def membership() -> Membership | None:
    """What torchrun set, or None outside it. Raises RunError if the variables make no sense."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Membership(rank, int(os.environ.get("LOCAL_RANK", rank)), world)
    except ValueError as error:
        raise RunError(f"RANK, LOCAL_RANK and WORLD_SIZE must be integers: {error}") from None


def join(plan: Plan, member: Membership, timeout: float = 300.0) -> Any:
    """The store through which the ranks of a torchrun job meet. Raises RunError if the job has another size than the plan."""
    import torch.distributed as dist

    if member.world_size != plan.world_size:
        raise RunError(f"torchrun started {member.world_size} processes, the plan needs {plan.world_size}")
    store, _, _ = next(dist.rendezvous("env://", member.rank, member.world_size, timeout=timedelta(seconds=timeout)))
    return dist.PrefixStore("pdsl", store)


@contextmanager
def one_voice(store: Any, rank: int) -> Iterator[None]:
    """Around the work of one rank under torchrun: the first rank that fails for a reason of its own says so, those that follow it end in silence.

    Raises RankError, or PeerError in the ranks that have nothing to add.
    """
    try:
        yield
    except Exception as error:
        outcome = outcome_of(error)
        first = store.compare_set("failure", "", str(rank)).decode() if not outcome["follows"] else _first_failure(store)
        if first != str(rank):
            raise PeerError(f"rank {first or '?'} failed, and this rank with it") from None
        raise RankError(rank, reason_of(outcome), outcome["traceback"]) from error


def _first_failure(store: Any) -> str:
    """The rank that failed first by itself, waited for a moment; empty if none says so."""
    import torch.distributed as dist

    try:
        store.wait(["failure"], timedelta(seconds=_GRACE))
    except dist.DistStoreError:
        return ""
    found: str = store.get("failure").decode()
    return found


def outcome_of(error: BaseException) -> dict[str, Any]:
    """An error as plain data. `follows` tells that this rank only lost a peer."""
    text = str(error).strip() or type(error).__name__
    return {
        "type": type(error).__name__,
        "message": text,
        "follows": follows_another(text),
        "traceback": "".join(traceback.format_exception(error)),
    }


def launch(
    plan: Plan,
    task: str,
    arguments: Mapping[str, object],
    *,
    port: int = 0,
    threads: int | None = None,
    log_directory: str | None = None,
) -> list[Any]:
    """Run a task of the agent on every rank of a plan, as processes of this machine; results by rank.

    `port` is where the ranks meet, 0 for any free one. `threads` per rank default to an equal share of the cores. `log_directory` gets
    what ranks other than 0 print and the traceback of every rank that fails, one file each. Raises RankError for
    the rank that failed first for a reason of its own, RunError if the ranks could not be started. On KeyboardInterrupt every process is ended
    before it goes on.
    """
    cores = len(os.sched_getaffinity(0))
    threads = threads or max(1, cores // plan.world_size)
    if log_directory is not None:
        make_folder(log_directory)
    with tempfile.TemporaryDirectory(prefix="pdsl-") as directory:
        job = {
            "plan": plan.to_json(),
            "task": task,
            "arguments": dict(arguments),
            "port": port,
            "threads": threads,
            "directory": directory,
            "log_directory": log_directory,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        agent = subprocess.Popen(
            [sys.executable, "-m", "pdsl.runtime.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others
        )
        try:
            return _follow(agent, job, plan.world_size, Path(directory))
        finally:
            _close(agent)


def make_folder(path: str) -> None:
    """Make a folder for logs. Raises RunError if that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"logs cannot be written to {path}: {error.strerror}") from None


class _Events:
    """The agent's events as they come, read by a thread so that waiting for one can have a deadline."""

    def __init__(self, agent: subprocess.Popen[str]) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(agent.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            with suppress(json.JSONDecodeError):
                self._queue.put(json.loads(line))
        self._queue.put(None)

    def next(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next event; None at the end of the stream or when the time is up."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None


def _follow(agent: subprocess.Popen[str], job: Mapping[str, object], world: int, directory: Path) -> list[Any]:
    assert agent.stdin is not None
    events = _Events(agent)
    with suppress(BrokenPipeError):
        agent.stdin.write(json.dumps(job) + "\n")
        agent.stdin.flush()
    ended = 0
    while ended < world:
        event = events.next()
        if event is None:
            raise RunError(f"the process that holds the ranks ended early with status {agent.wait()}; its own words stand above")
        if event["event"] == "refused":
            raise RunError(event["reason"])
        if event["event"] != "ended":
            continue
        ended += 1
        if event["status"]:
            raise _root_cause(events, {event["rank"]: event["status"]}, directory)
    import torch

    return [torch.load(directory / f"result-{rank}.pt", weights_only=True) for rank in range(world)]


def _root_cause(events: _Events, failed: dict[int, int], directory: Path) -> RankError:
    """The error of the rank that failed by itself; ranks that only lost their peer follow within milliseconds."""
    deadline = time.monotonic() + _GRACE
    while True:
        for rank, status in failed.items():
            outcome = _outcome(directory, rank)
            if outcome is None and status < 0:
                return RankError(rank, f"its process was ended by {signal.Signals(-status).name}")
            if outcome is None:
                return RankError(rank, f"its process ended with status {status} and said nothing")
            if not outcome["follows"]:
                return RankError(rank, reason_of(outcome), outcome["traceback"])
        event = events.next(timeout=max(0.0, deadline - time.monotonic()))
        if event is None:
            break
        if event["event"] == "ended" and event["status"]:
            failed[event["rank"]] = event["status"]
    rank = next(iter(failed))
    outcome = _outcome(directory, rank)
    return RankError(rank, reason_of(outcome) if outcome else "it lost its peers", outcome["traceback"] if outcome else "")


def _outcome(directory: Path, rank: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((directory / f"outcome-{rank}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return found


def reason_of(outcome: Mapping[str, Any]) -> str:
    """An outcome in one line; the type of an error is told where it is not one of PDSL."""
    message = outcome["message"].splitlines()[0]
    ours = outcome["type"] in ("RunError", "PeerFault", "ModelError", "PlanError", "NotExecuted", "RankError")
    return message if ours else f"{outcome['type']}: {message}"


def _close(agent: subprocess.Popen[str]) -> None:
    """End the agent and with it every rank; closing its stdin is the order to do so."""
    with suppress(BrokenPipeError):
        if agent.stdin is not None:
            agent.stdin.close()
    try:
        agent.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    if agent.stdout is not None:
        agent.stdout.close()
