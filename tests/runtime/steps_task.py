"""Tasks for ranks that do nothing but keep step with each other: for tests of everything around the ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from pdsl.runtime.link import Decision, Link
from pdsl.runtime.sockets import Interrupter
from pdsl.runtime.stores import join_store


class Interrupted(Exception):
    """A node is lost."""


def keep_step(plan: Any, rank: int, link: Link, *, steps: int = 50, pace: float = 0.01, fault: dict[str, Any] | None = None) -> None:
    """Take steps in lockstep with all ranks, through every loss and change. Tells what it sees; the result is the last step as text."""
    interrupter = Interrupter()

    def on_lost(nodes: frozenset[int]) -> None:
        link.tell({"event": "on_lost", "nodes": sorted(nodes), "at": time.monotonic()})
        interrupter.interrupt(str(generation))

    link.on_lost = on_lost
    link.is_fatal = lambda error: not isinstance(error, ConnectionError)
    committed, generation = 0, -1
    while True:
        link.report(generation, committed=committed)
        decision = link.decision(60.0)
        generation = decision.generation
        link.tell({"event": "took", "generation": generation, "nodes": decision.nodes, "at": time.monotonic()})
        if link.lost:
            continue
        committed = max(report["committed"] for report in decision.reports.values())
        try:
            committed = _steps(plan, rank, link, decision, interrupter, committed, steps=steps, pace=pace, fault=fault or {})
        except Interrupted as found:
            committed = found.args[0]
            continue
        if committed >= steps and link.done(str(committed).encode(), 60.0):
            return


def _steps(
    plan: Any,
    rank: int,
    link: Link,
    decision: Decision,
    interrupter: Interrupter,
    committed: int,
    *,
    steps: int,
    pace: float,
    fault: dict[str, Any],
) -> int:
    import torch.distributed as dist

    key = str(decision.generation)
    try:
        with interrupter.making(key):
            store = dist.PrefixStore(key, join_store(decision.host, decision.port, plan.silence))
    except (ConnectionError, dist.DistError):
        await_loss(link)
        raise Interrupted(committed) from None
    world = len(decision.nodes) * plan.ranks_per_node
    while committed < steps:
        time.sleep(pace)
        step = committed + 1
        misbehave(fault, rank, step)
        if link.change_asked:
            store.add(f"change-{step}", 1)
        try:
            count = store.add(f"at-{step}", 1)
            while count < world:
                if link.lost:
                    raise Interrupted(committed)
                time.sleep(0.001)
                count = store.add(f"at-{step}", 0)
            change = store.add(f"change-{step}", 0)
        except RuntimeError:  # the host of the store is gone
            await_loss(link)
            raise Interrupted(committed) from None
        committed = step
        if rank % plan.ranks_per_node == 0:
            nothing = {"loss": 0.0, "grad_norm": 0.0, "samples": 1, "seconds": pace, "digest": ""}
            link.tell({"event": "step", "step": step, "generation": decision.generation, **nothing})
        if change:
            return committed
    return committed


def await_loss(link: Link) -> None:
    """What went wrong must be the loss of a node."""
    limit = time.monotonic() + 10.0
    while not link.lost:
        if time.monotonic() > limit:
            raise TimeoutError("the store is gone and no node is lost")
        time.sleep(0.001)


def misbehave(fault: dict[str, Any], rank: int, step: int) -> None:
    """What goes wrong in one rank at one step, if that is asked for."""
    if fault.get("rank") != rank or fault.get("step") != step:
        return
    match fault["how"]:
        case "raise":
            raise ValueError("the step is unlucky")
        case "raise mildly":
            raise ConnectionError("the cable is loose")
        case "exit":
            os._exit(0)
        case "return":
            raise SystemExit
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait(600.0)
