"""A run on simulated nodes, as its launcher sees it, and the handle to disturb it.

The launcher starts, watches and tells; it decides nothing. If it dies, everything ends.
"""

from __future__ import annotations

import base64
import os
import queue
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from attrs import Factory, define

from pdsl.grammar.errors import RankError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.launch import make_folder, reason_of
from pdsl.runtime.nurse import Nursery
from pdsl.runtime.ranks import TASKS
from pdsl.runtime.wire import Channel, Message, listen

__all__ = ["Cluster", "Overtime"]

_STARTUP = 120.0
"""Seconds that importing torch and forking may take on a busy machine."""

_GRACE = 2.0
"""Seconds in which the rank that failed by itself must have told so, after one that only lost a peer."""


class Overtime(RunError):
    """A run was not over within the time that was given; it goes on."""


@define(eq=False)
class _Node:
    """A node as the launcher knows it."""

    node: int
    channel: Channel
    pid: int
    ranks: dict[int, int]
    host: str
    port: int
    started: bool = False
    reason: str | None = None
    status: int | None = None


@define(eq=False)
class _Outcome:
    """What has come of a run so far."""

    over: bool = False
    results: dict[int, bytes | None] = Factory(dict)
    failures: dict[int, Message] = Factory(dict)
    mild: dict[int, Message] = Factory(dict)  # what cost a node and was not to end the run
    first_failure_at: float | None = None
    error: RunError | None = None


class Cluster:
    """A run on simulated nodes, and the handle to disturb it.

    Events are plain dicts with the key `event`: "started" (nodes with their pids), "lost" (node, reason), "decided" (generation, nodes, lost,
    joined, leader), "ended" (a node: reason and status), "over"; and whatever ranks tell, with `node` and `rank`. Each has `time`, of the
    monotonic clock. `events` has all of them; `on_event` gets them in the thread that calls `wait`.
    """

    def __init__(
        self,
        plan: Plan,
        task: str,
        arguments: Mapping[str, object],
        *,
        threads: int | None = None,
        log_directory: str | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        port: int = 0,
        nursery: Nursery | None = None,
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self._threads = threads or max(1, cores // plan.world_size)
        if log_directory is not None:
            make_folder(log_directory)
        self._plan = plan
        self._secret = secrets.token_hex(16)
        self._order = {
            "plan": plan.to_json(),
            "task": task,
            "arguments": dict(arguments),
            "threads": self._threads,
            "log_directory": log_directory,
            "silence": plan.silence,
            "secret": self._secret,
        }
        self._tasks = (task,) if task in TASKS or ":" in task else ()
        self._on_event = on_event
        self._port = port
        self._own = nursery is None
        self._nursery = nursery
        self._listener: socket.socket | None = None
        self._nodes: dict[int, _Node] = {}
        self._strangers: set[Channel] = set()
        self._expected: set[int] = set()
        self._members: tuple[int, ...] = plan.nodes
        self._generation = -1
        self._lost: set[int] = set()
        self._next_node = max(plan.nodes) + 1
        self._outcome = _Outcome()
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stop = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread: threading.Thread | None = None
        self.events: list[dict[str, Any]] = []

    # --- what a caller does

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all nodes of the plan and wait until they know each other. Raises RunError if that fails."""
        try:
            self._listener = listen("127.0.0.1", self._port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunError(f"port {self._port} cannot be used: {reason}; leave the port out and a free one is taken") from None
        self._nursery = self._nursery or Nursery(*self._tasks, threads=self._threads)
        self._nursery.await_ready(_STARTUP)
        self._thread = threading.Thread(target=self._serve, name="pdsl-launcher", daemon=True)
        self._thread.start()
        for node in self._plan.nodes:
            self._fork(node)
        self.wait_for(lambda events: any(e["event"] in {"started", "ended"} for e in events), _STARTUP)

    def wait(self, timeout: float | None = None) -> dict[int, bytes | None]:
        """Wait for the end of the run; the results by rank. Raises as `launch_resilient` does, Overtime after `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                event = self._queue.get(timeout=None if limit is None else max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise Overtime(f"the run was not over within {timeout:g} s") from None
            if event is None:
                break
            if self._on_event is not None:
                self._on_event(event)
        self._queue.put(None)  # for the next caller
        if self._outcome.error is not None:
            raise self._outcome.error
        return dict(sorted(self._outcome.results.items()))

    def wait_for(self, what: Callable[[list[dict[str, Any]]], Any], timeout: float) -> Any:
        """Wait until `what(events)` is true, and give what it gave. Raises RunError after `timeout` seconds, or when the run ends without."""
        with self._changed:
            self._changed.wait_for(lambda: what(self.events) or self._stop, timeout)
            found = what(self.events)
        if found:
            return found
        if self._outcome.error is not None:
            raise self._outcome.error
        raise RunError(f"what was waited for did not happen within {timeout:g} s")

    def pids(self) -> dict[int, dict[str, Any]]:
        """The processes of each node that has come and not ended: `{node: {"agent": pid, "ranks": {rank: pid}}}`."""
        with self._changed:
            return {n.node: {"agent": n.pid, "ranks": dict(n.ranks)} for n in self._nodes.values() if n.channel.open}

    def kill(self, node: int, sign: int = signal.SIGKILL) -> None:
        """Send a signal to the agent and all ranks of a node, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._nodes[node].pid, sign)

    def stop(self, node: int) -> None:
        """Let a node stand still: it neither runs nor ends."""
        self.kill(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Let a node go on that stood still."""
        self.kill(node, signal.SIGCONT)

    def drain(self, node: int) -> None:
        """Ask a node to leave at the next boundary of steps."""
        with suppress(ProcessLookupError):
            os.kill(self._nodes[node].pid, signal.SIGTERM)

    def join(self) -> int:
        """Start one more node, which joins when it is ready; its number."""
        node, self._next_node = self._next_node, self._next_node + 1
        self._fork(node)
        return node

    def close(self) -> None:
        """End every process of the run."""
        self._stop_serving()
        if self._thread is not None:
            self._thread.join(10.0)
        if self._own and self._nursery is not None:
            self._nursery.close()
        elif not self._own:
            for node in self._nodes.values():
                self.kill(node.node)
        for node in self._nodes.values():
            node.channel.close()
        if self._listener is not None:
            self._listener.close()
        self._wake_read.close()
        self._wake_write.close()

    # --- the thread that serves

    def _fork(self, node: int) -> None:
        assert self._nursery is not None
        assert self._listener is not None
        self._expected.add(node)
        self._nursery.order({**self._order, "node": node, "port": self._listener.getsockname()[1]})

    def _stop_serving(self) -> None:
        self._stop = True
        with suppress(OSError):
            self._wake_write.send(b"!")

    def _serve(self) -> None:
        assert self._listener is not None
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._stop and not self._decided():
                for key, _ in selector.select(0.1):
                    self._turn(selector, key.fileobj)
                self._look_after_unborn()
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._queue.put(None)

    def _turn(self, selector: selectors.BaseSelector, source: Any) -> None:
        if source is self._listener:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                channel = Channel(connection)
                self._strangers.add(channel)
                selector.register(channel, selectors.EVENT_READ)
            return
        if not isinstance(source, Channel):
            return
        fd = source.fileno()
        messages = source.receive()
        if not source.open:
            selector.unregister(fd)
        if source in self._strangers and messages:
            self._welcome(source, messages.pop(0))
        node = next((n for n in self._nodes.values() if n.channel is source), None)
        if node is None:
            return
        for message in messages:
            self._hear(node, message)
        source.flush()
        if not source.open:
            self._gone(node)

    def _welcome(self, channel: Channel, hello: Message) -> None:
        self._strangers.discard(channel)
        number = hello.get("node")
        if hello.get("secret") != self._secret or number not in self._expected:
            channel.close()
            return
        ranks = {int(rank): pid for rank, pid in hello["ranks"].items()}
        node = _Node(hello["node"], channel, hello["pid"], ranks, hello["host"], hello["port"])
        with self._changed:
            self._nodes[node.node] = node
            self._changed.notify_all()
        self._expected.discard(node.node)
        if self._generation >= 0 or any(n.started for n in self._nodes.values()):
            self._introduce(node, joining=True)
        elif self._nodes.keys() >= set(self._plan.nodes):
            for member in self._plan.nodes:
                self._introduce(self._nodes[member], joining=False)
            pids = {n.node: {"agent": n.pid, "ranks": n.ranks} for n in self._nodes.values()}
            self._event({"event": "started", "nodes": pids})
            for early in self._nodes.values():
                if not early.started:
                    self._introduce(early, joining=True)

    def _introduce(self, node: _Node, *, joining: bool) -> None:
        node.started = True
        book = {n: (self._nodes[n].host, self._nodes[n].port) for n in self._members}
        node.channel.send(
            {
                "kind": "start",
                "members": self._members,
                "book": {str(n): address for n, address in book.items()},
                "joining": joining,
                "generation": self._generation,
            }
        )

    def _hear(self, node: _Node, message: Message) -> None:
        if node.node in self._lost and message["kind"] not in {"end", "failed"}:
            return
        match message["kind"]:
            case "tell":
                self._event({**message["event"], "node": node.node, "rank": message["rank"]})
            case "result":
                found = message["result"]
                self._outcome.results[message["rank"]] = None if found is None else base64.b64decode(found)
            case "failed":
                self._failed(message, lost=node.node in self._lost)
            case "event":
                self._hear_event(message["event"])
            case "end":
                node.reason, node.status = message["reason"], message["status"]

    def _failed(self, message: Message, *, lost: bool) -> None:
        if lost or not message["fatal"]:
            self._outcome.mild[message["rank"]] = message["outcome"]
            return
        self._outcome.failures[message["rank"]] = message["outcome"]
        self._outcome.first_failure_at = self._outcome.first_failure_at or time.monotonic()

    def _hear_event(self, event: Message) -> None:
        """Every agent tells what it saw; what was told before is no news."""
        match event["event"]:
            case "lost":
                for node, reason in sorted((int(n), r) for n, r in event["nodes"].items()):
                    if node not in self._lost:
                        self._lost.add(node)
                        self._event({"event": "lost", "node": node, "reason": reason, "proven": event["proven"]})
            case "decided":
                if event["generation"] <= self._generation:
                    return
                self._generation = event["generation"]
                self._members = tuple(event["nodes"])
                self._lost |= set(event["lost"])
                self._event(event)
            case "over":
                if not self._outcome.over:
                    self._outcome.over = True
                    self._event(event)

    def _gone(self, node: _Node) -> None:
        reason = node.reason or "its agent died"
        self._event({"event": "ended", "node": node.node, "reason": reason, "status": node.status})

    def _look_after_unborn(self) -> None:
        for channel in [c for c in self._strangers if not c.open]:
            self._strangers.discard(channel)
        assert self._nursery is not None
        for number in sorted(self._expected):
            reason = self._nursery.unborn(self._secret, number)
            if reason is None:
                continue
            self._expected.discard(number)
            self._event({"event": "ended", "node": number, "reason": reason, "status": 1})
            if number in self._plan.nodes:
                self._outcome.error = RunError(f"node {number} could not be started: {reason}")

    def _event(self, event: dict[str, Any]) -> None:
        event = {**event, "time": time.monotonic()}
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        self._queue.put(event)

    # --- how it ends

    def _decided(self) -> bool:
        """Whether the run has an outcome; the error, if it is one, is kept."""
        outcome = self._outcome
        if outcome.error is not None:
            return True
        own = {rank: o for rank, o in outcome.failures.items() if not o["follows"]}
        at = outcome.first_failure_at
        if own or (at is not None and time.monotonic() - at > _GRACE):
            rank = min(own or outcome.failures, key=list(outcome.failures).index)
            found = outcome.failures[rank]
            outcome.error = RankError(rank, reason_of(found), found["traceback"])
            return True
        running = [n for n in self._nodes.values() if n.channel.open and n.node not in self._lost]
        if running or not self._nodes:
            return False
        if outcome.over:
            return True
        if not any(n.started for n in self._nodes.values()) and self._expected:
            return False  # some have still to come
        if at is not None:
            return False
        outcome.error = self._nobody_left()
        return True

    def _nobody_left(self) -> RunError:
        """If the last nodes fell to an exception, perhaps the same one everywhere, that is what ended the run."""
        per_node = self._plan.ranks_per_node
        for rank, found in self._outcome.mild.items():
            if rank // per_node in self._members and not found["follows"]:
                return RankError(rank, f"{reason_of(found)}; no node is left that could go on", found["traceback"])
        why = "; ".join(f"node {n.node}: {n.reason or 'its agent died'}" for n in self._nodes.values())
        return RunError(f"no node is left that could go on ({why})")
