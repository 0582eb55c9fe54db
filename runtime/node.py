"""The process of one real node: it meets the others, forks its ranks and is their agent until the run is over.

A process of its own, begun afresh by `pdsl agent`, so that torch is imported once, by a process without threads, before it forks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

from attrs import asdict, frozen

from pdsl.grammar.errors import PdslError, RankError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.agents import host_node
from pdsl.runtime.launch import make_folder, reason_of
from pdsl.runtime.peers import Identity
from pdsl.runtime.ranks import Work, preload, ranks_of, task_of
from pdsl.runtime.rendezvous import Address, meet
from pdsl.runtime.wire import Message

__all__ = ["NodeJob", "become_node", "main"]


@frozen
class NodeJob:
    """What a node is told. `patience` are the seconds after which it no longer waits for others."""

    plan: str
    arguments: dict[str, Any]
    addresses: tuple[Address, ...]
    node: int | None
    host: str | None
    threads: int
    metrics: str | None
    log_directory: str | None
    patience: float
    task: str = "train"


def become_node(job: NodeJob) -> None:
    """Replace this process by that of a node; it keeps its id, so that signals reach it. Does not return."""
    data = json.dumps(asdict(job)).encode()
    job_file = os.memfd_create("pdsl-job", 0)
    with os.fdopen(os.dup(job_file), "wb") as file:
        file.write(data)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "pdsl.runtime.node", str(job_file)], environment)  # noqa: S606


def main() -> int:
    """Run the job whose file descriptor is the one argument. Exit status 0 if the run is over or this node has left, 1 otherwise."""
    try:
        with os.fdopen(int(sys.argv[1]), "rb") as file:
            file.seek(0)
            found = json.load(file)
        found["addresses"] = tuple((host, port) for host, port in found["addresses"])
        _run(NodeJob(**found))
    except PdslError as error:
        sys.stderr.write(f"pdsl: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("pdsl: interrupted\n")
        return 130
    return 0


def _run(job: NodeJob) -> None:
    plan = Plan.from_json(job.plan)
    if job.log_directory is not None:
        make_folder(job.log_directory)
    place = meet(plan, job.addresses, node=job.node, host=job.host, patience=job.patience, say=_say)
    _say(f"this is node {place.node}" + (", which joins" if place.roster.joining else ""))
    task_of(job.task)  # before any rank is forked
    preload()
    gc.collect()
    gc.freeze()
    work = Work(plan, job.task, job.arguments, job.threads, plan.silence, job.log_directory)
    identity = Identity(place.node, ranks_of(plan, place.node), place.host, place.secret, plan.silence, plan.hash)
    voice = _Voice(job, plan, place.node)
    agent = host_node(work, identity, place.listener, tell=voice)
    status = agent.run(place.roster)
    voice.close()
    if status:
        raise voice.error()
    _say(voice.end)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _Voice:
    """What this node tells: its own events, in the form in which a launcher would hear them."""

    def __init__(self, job: NodeJob, plan: Plan, node: int) -> None:
        from pdsl.runtime.record import Recorder
        from pdsl.runtime.report import Reporter

        steps = job.arguments.get("steps") or plan.job.steps
        self._node = node
        self._reporter = Reporter(steps, metrics=job.metrics, progress=True, generation=0, active=True)
        self._reporter.__enter__()
        self._record = Recorder(self._reporter)
        self._failure: Message | None = None
        self.end = ""

    def __call__(self, message: Message) -> None:
        now = time.monotonic()
        match message["kind"]:
            case "tell":
                self._record({**message["event"], "node": self._node, "rank": message["rank"], "time": now})
            case "event" if message["event"]["event"] == "lost":
                for node, reason in message["event"]["nodes"].items():
                    self._record({"event": "lost", "node": int(node), "reason": reason, "time": now})
            case "event" if message["event"]["event"] == "decided":
                self._record({**message["event"], "time": now})
            case "failed":
                self._failure = message
            case "end":
                self.end = message["reason"]

    def close(self) -> None:
        self._reporter.__exit__(None, None, None)

    def error(self) -> RunError:
        """What ended this node."""
        if self._failure is not None:
            outcome = self._failure["outcome"]
            return RankError(self._failure["rank"], reason_of(outcome), outcome["traceback"])
        return RunError(self.end)


if __name__ == "__main__":
    sys.exit(main())
