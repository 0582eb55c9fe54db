"""The process that imports torch once and forks the agents of simulated nodes, now and later, for nodes that join.

It speaks JSON lines: orders on stdin, events on stdout. It opens no store and starts no thread, so that it can fork at any time. When stdin
closes, because the launcher says so or has died, it ends every agent and every rank.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from functools import cache
from typing import NoReturn

from pdsl.lowering.plan import Plan
from pdsl.runtime.agents import host_node
from pdsl.runtime.peers import Identity
from pdsl.runtime.ranks import Work, die_with_parent, preload, ranks_of, task_of
from pdsl.runtime.wire import Channel, Lines, Message, listen

__all__ = ["main"]


def main() -> int:
    """Work until stdin closes. The first line of stdin says what to import: `{"import": [task, ...]}`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agents: dict[int, int] = {}  # pid of an agent by the pidfd that tells its end
    lines = Lines()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    _bury(selector, agents, key.fd)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    _end(agents)
                    return 0
                for order in lines.feed(data):
                    _obey(order, selector, agents)


def _obey(order: Message, selector: selectors.BaseSelector, agents: dict[int, int]) -> None:
    if "import" in order:
        _prepare(order["import"])
        return
    try:
        _plan(order["plan"])  # read once, for all nodes
    except ValueError as error:
        _tell({"event": "refused", "node": order["node"], "secret": order["secret"], "reason": f"the plan cannot be read: {error}"})
        return
    pid = os.fork()
    if pid == 0:
        selector.close()
        _become_agent(order)
    pidfd = os.pidfd_open(pid)
    agents[pidfd] = pid
    selector.register(pidfd, selectors.EVENT_READ)
    _tell({"event": "forked", "node": order["node"], "secret": order["secret"], "pid": pid})


def _prepare(tasks: list[str]) -> None:
    reason = None
    try:
        for task in tasks:
            task_of(task)
        preload()
    except Exception as error:  # noqa: BLE001  a user's module may raise anything; the launcher must hear of it
        reason = str(error)
    gc.collect()
    gc.freeze()  # what is there now belongs to all ranks; collecting it again in each costs memory and half a second
    _tell({"event": "ready", "reason": reason})


def _tell(event: Message) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _bury(selector: selectors.BaseSelector, agents: dict[int, int], pidfd: int) -> None:
    pid = agents.pop(pidfd)
    selector.unregister(pidfd)
    os.close(pidfd)
    _kill_group(pid)
    _, code = os.waitpid(pid, 0)
    _tell({"event": "ended", "pid": pid, "status": os.waitstatus_to_exitcode(code)})


def _end(agents: dict[int, int]) -> None:
    for pid in agents.values():
        _kill_group(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have come to lead a group yet
    for pid in agents.values():
        os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# --- the agent of a simulated node ----------------------------------------------------------------------------------------------------------


@cache
def _plan(text: str) -> Plan:
    return Plan.from_json(text)


def _become_agent(order: Message) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent()
        os.dup2(2, 1)
        with open(os.devnull) as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
        code = _simulated(order)
    except BaseException:  # noqa: BLE001  the launcher sees the status, the reason goes to stderr
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _simulated(order: Message) -> int:
    node, silence = order["node"], order["silence"]
    plan = _plan(order["plan"])
    work = Work(plan, order["task"], order["arguments"], order["threads"], silence, order["log_directory"])
    upstream = Channel(socket.create_connection(("127.0.0.1", order["port"])))
    identity = Identity(node, ranks_of(plan, node), "127.0.0.1", order["secret"], silence)
    return host_node(work, identity, listen(identity.host, 0), upstream=upstream).run()


if __name__ == "__main__":
    sys.exit(main())
