"""What a rank knows of the rest of the cluster: one socket to the agent of its node, and a thread that listens on it.

The rank stands still, says so with `report`, and waits for the `decision` that all ranks of all living nodes get alike. Everything else is a
flag or a callback: nodes that are lost, a change that somebody wants. The thread also says at regular times that this process runs, so
that a process that is stopped is found by its silence.
"""

from __future__ import annotations

import base64
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from pdsl.grammar.errors import RunError
from pdsl.runtime.launch import outcome_of
from pdsl.runtime.wire import LIMIT, Lines, Message, WireError, encode

__all__ = ["Decision", "Link"]

_NOTHING: frozenset[int] = frozenset()


@frozen
class Decision:
    """Who goes on, agreed by all of them. The same on every rank, field by field.

    `nodes` go on, ascending; `lost` were there in the last decision (or in the plan) and are no more, `joined` are new. A store listens at
    `host` and `port`, made for this decision. `reports` has what each rank reported, with its `generation`, by rank; ranks of nodes that leave
    on purpose are there too.
    """

    generation: int
    nodes: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    host: str
    port: int
    reports: Mapping[int, dict[str, Any]]


class Link:
    """A rank's link to the agent of its node. `beat` are the seconds between two signs of life.

    `on_lost` is called in the listening thread with the nodes that are lost, as soon as that is known, once for each further loss. It must be
    quick and may not call `decision` or `done`. `is_fatal` judges an exception that leaves the task: True ends the whole run with it, False
    makes this node a lost one.
    """

    def __init__(self, connection: socket.socket, rank: int, beat: float) -> None:
        connection.setblocking(True)
        self.rank = rank
        self.on_lost: Callable[[frozenset[int]], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        self.is_fatal: Callable[[BaseException], bool] = _always
        self._socket = connection
        self._beat = beat
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._decisions: deque[Decision] = deque()
        self._gone: frozenset[int] = _NOTHING
        self._nodes: frozenset[int] | None = None
        self._change = False
        self._closed = False
        self._verdict = ""  # "over" or "reopen", once the agent has said so
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="pdsl-link", daemon=True).start()
        threading.Thread(target=self._live, name="pdsl-beat", daemon=True).start()

    @property
    def lost(self) -> frozenset[int]:
        """Nodes of the newest decision that was taken (before the first: of the plan) that are lost since. If there are any, report."""
        with self._news:
            return self._gone if self._nodes is None else self._gone & self._nodes

    @property
    def change_asked(self) -> bool:
        """Whether a node wants to join or leave: report at the next boundary of steps. False again after the next decision."""
        return self._change

    @property
    def over(self) -> bool:
        """Whether all ranks are done."""
        return self._verdict == "over"

    def report(self, generation: int, /, **facts: Any) -> None:
        """This rank stands still in `generation` (-1 before the first decision). `facts` are JSON and reach every rank with the decision.

        Raises RunError if the agent is gone, WireError if the facts are too long.
        """
        self._send({"kind": "report", "generation": generation, "facts": facts})

    def decision(self, timeout: float | None = None) -> Decision:
        """The next decision, after a report. Raises RunError if the agent is gone or after `timeout` seconds."""
        with self._news:
            if not self._news.wait_for(lambda: self._decisions or self._closed, timeout):
                raise RunError(f"rank {self.rank}: no decision within {timeout:g} s")
            if not self._decisions:
                raise RunError(f"rank {self.rank}: the agent of this node is gone")
            found = self._decisions.popleft()
            self._nodes = frozenset(found.nodes)
            return found

    def tell(self, event: Mapping[str, Any]) -> None:
        """An event for the launcher, JSON; it gets `node` and `rank`. What a node that is no member says is not heard."""
        self._send({"kind": "tell", "event": dict(event)})

    def done(self, result: bytes | None = None, timeout: float | None = None) -> bool:
        """This rank has finished well. Waits for the others.

        True: all ranks of all living nodes are done, the run is over. False: a node was lost before that and some rank needs the others once
        more: report, and take the decision as after any loss. Raises RunError as `decision` does.
        """
        with self._news:
            self._verdict = ""
        self._send({"kind": "done", "result": None if result is None else base64.b64encode(result).decode()})
        with self._news:
            if not self._news.wait_for(lambda: self._verdict or self._closed, timeout):
                raise RunError(f"rank {self.rank}: the others were not done within {timeout:g} s")
            verdict = self._verdict
        if not verdict:
            raise RunError(f"rank {self.rank}: the agent of this node is gone")
        return verdict == "over"

    def fail(self, error: BaseException, *, fatal: bool) -> None:
        """This rank ends with an error. `fatal` ends the whole run with it; otherwise this node is lost and the others go on."""
        self._send({"kind": "failed", "fatal": fatal, "outcome": outcome_of(error)})

    def close(self) -> None:
        """End the threads; for processes that outlive the link."""
        self._ended.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except OSError as error:
            raise RunError(f"rank {self.rank}: the agent of this node is gone ({error.strerror})") from None

    def _live(self) -> None:
        while not self._ended.wait(self._beat):
            try:
                self._send({"kind": "beat"})
            except RunError:
                return

    def _listen(self) -> None:
        lines = Lines(LIMIT)
        while True:
            try:
                data = self._socket.recv(1 << 18)
                messages = lines.feed(data) if data else []
            except (OSError, WireError):
                data, messages = b"", []
            for message in messages:
                self._take(message)
            if not data:
                break
        self._ended.set()
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self.on_closed is not None:
            self.on_closed()

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "lost":
            with self._news:
                nodes = frozenset(message["nodes"]) - self._gone
                self._gone |= nodes
            if nodes and self.on_lost is not None:
                self.on_lost(nodes)
            return
        with self._news:
            if kind == "decision":
                self._decisions.append(_decision(message))
                self._change = False
            elif kind == "change":
                self._change = True
            elif kind in {"over", "reopen"}:
                self._verdict = kind
            self._news.notify_all()


def _decision(message: Message) -> Decision:
    return Decision(
        generation=message["generation"],
        nodes=tuple(message["nodes"]),
        lost=tuple(message["lost"]),
        joined=tuple(message["joined"]),
        host=message["host"],
        port=message["port"],
        reports=MappingProxyType({int(rank): report for rank, report in sorted(message["reports"].items(), key=lambda pair: int(pair[0]))}),
    )


def _always(error: BaseException) -> bool:
    return True
