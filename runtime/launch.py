"""Launching a plan on this machine: one agent process, which holds a process for each rank.

A rank that fails ends the run: the launcher waits a moment for the rank that failed for a reason of its own, ends all others and reports that
one reason. This process needs no torch, so the agent is on its way at once.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pdsl.grammar.errors import RankError, RunError
from pdsl.lowering.pending import require_executable
from pdsl.lowering.plan import Plan
from pdsl.runtime.faults import reason_of
from pdsl.runtime.standing import Standing, where_they_stand

__all__ = ["launch"]

_GRACE = 2.0  # seconds in which the rank that failed by itself must have told so, after a follower did
_END = 10.0  # seconds in which the agent must have ended its ranks and itself

_SHOW_CURSOR = "\x1b[?25h"


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
    one file for each rank, with what it prints and the traceback if it fails. Raises RankError for the rank that failed first for a reason
    of its own, RunError if the ranks could not be started. On KeyboardInterrupt every process is ended before it goes on.
    """
    require_executable(plan.pending)
    if not 0 <= port < 65536:
        raise RunError(f"port {port} does not exist: ports go from 1 to 65535; leave the port out and a free one is taken")
    cores = len(os.sched_getaffinity(0))
    threads = threads or max(1, cores // plan.world_size)
    if log_directory is not None:
        _make_folder(log_directory)
    with tempfile.TemporaryDirectory(prefix="pdsl-", ignore_cleanup_errors=True) as directory:
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
        agent = _Agent(environment)
        try:
            return _follow(agent, job, plan, Path(directory))
        except BaseException:
            agent.close()
            _restore_terminal()
            raise
        finally:
            agent.close()


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"logs cannot be written to {path}: {error.strerror}") from None


def _restore_terminal() -> None:
    """Rank 0 may have been ended in the middle of drawing its bar: go to a new line and show the cursor again."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(f"\n{_SHOW_CURSOR}")
            sys.stderr.flush()


class _Agent:
    """The agent's process and its events as they come, read by a thread so that waiting for one can have a deadline."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdsl.runtime.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others
        )
        self.pids: dict[int, int] = {}
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        with suppress(ValueError):  # closed under it
            for line in lines:
                with suppress(json.JSONDecodeError):
                    self._queue.put(json.loads(line))
        self._queue.put(None)

    def send(self, job: Mapping[str, object]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def next(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next event; None at the end of the stream or when the time is up."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the agent, every rank, and what these have started; closing its stdin is the order to do so. Can be called twice."""
        agent = self.process
        if agent.returncode is not None:
            return
        with suppress(BrokenPipeError):
            if agent.stdin is not None:
                agent.stdin.close()
        if self.pids:  # before that there are no ranks to end in order, and it may still be importing
            _wait_unreaped(agent.pid, _END)
        with suppress(ProcessLookupError):  # the agent is not reaped yet, so its id is still that of its own group
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _wait_unreaped(pid: int, timeout: float) -> None:
    """Wait until a child has ended, and leave it to be reaped."""
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return
        time.sleep(0.005)


def _follow(agent: _Agent, job: Mapping[str, object], plan: Plan, directory: Path) -> list[Any]:
    agent.send(job)
    ended = 0
    while ended < plan.world_size:
        event = agent.next()
        if event is None:
            raise RunError(_agent_ended(agent.process.wait()))
        if event["event"] == "refused":
            raise RunError(event["reason"])
        if event["event"] == "started":
            agent.pids = {int(rank): pid for rank, pid in event["pids"].items()}
        if event["event"] != "ended":
            continue
        ended += 1
        if event["status"]:
            raise _root_cause(agent.next, {event["rank"]: event["status"]}, agent.pids, directory, plan)
    return [_result(directory, rank) for rank in range(plan.world_size)]


def _agent_ended(status: int) -> str:
    if status < 0:
        return f"the process that holds the ranks was ended by {_signal(status)}"
    return f"the process that holds the ranks ended early with status {status}; its own words stand above"


def _result(directory: Path, rank: int) -> Any:
    """What the task gave on a rank: JSON if it is plain, else tensors."""
    plain = directory / f"result-{rank}.json"
    if plain.exists():
        return json.loads(plain.read_text())
    import torch

    return torch.load(directory / f"result-{rank}.pt", weights_only=True)


# --- which failure is the reason --------------------------------------------------------------------------------------------------------


def _root_cause(
    next_event: Callable[[float], dict[str, Any] | None], failed: dict[int, int], pids: Mapping[int, int], directory: Path, plan: Plan
) -> RankError:
    """The error of the rank that failed by itself; ranks that only lost their peer, or waited for it in vain, tell so within moments."""
    deadline = time.monotonic() + _GRACE
    while True:
        for rank, status in failed.items():
            outcome = _outcome(directory, rank)
            if outcome is None and status != -signal.SIGABRT:  # torch aborts a process that lost a peer, in some backends
                return RankError(rank, _without_words(status))
            if outcome is not None and not outcome["follows"] and not outcome["silent"]:
                return RankError(rank, reason_of(outcome), outcome["traceback"])
        if len(failed) == plan.world_size:
            break
        event = next_event(max(0.0, deadline - time.monotonic()))
        if event is None:
            break
        if event["event"] == "ended" and event["status"]:
            failed[event["rank"]] = event["status"]
    outcomes = {rank: _outcome(directory, rank) for rank in failed}
    vain = next((rank for rank, o in outcomes.items() if o is not None and o["silent"]), None)
    if vain is not None:
        standing = where_they_stand({rank: pid for rank, pid in pids.items() if rank not in failed}, directory)
        return _silence(vain, outcomes[vain] or {}, standing, plan)
    rank, outcome = next(iter(outcomes.items()))
    return RankError(rank, reason_of(outcome), outcome["traceback"]) if outcome else RankError(rank, _without_words(failed[rank]))


def _silence(rank: int, outcome: dict[str, Any], standing: Mapping[int, Standing], plan: Plan) -> RankError:
    """A rank waited in vain. The culprit is one that still runs and does not itself wait for another."""
    busy = {r: s for r, s in standing.items() if not s.waits}
    if not busy:
        return RankError(rank, reason_of(outcome), outcome["traceback"])
    culprit, there = next(iter(busy.items()))
    hint = "" if there.stopped else "; if it is only slow, a longer fault_budget.silence would do"
    return RankError(culprit, f"it {there} while rank {rank} waited {reason_of(outcome)}{hint}", outcome["traceback"])


def _outcome(directory: Path, rank: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((directory / f"outcome-{rank}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return found


def _without_words(status: int) -> str:
    if status < 0:
        return f"its process was ended by {_signal(status)}"
    return f"its process ended with status {status} and said nothing"


def _signal(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
