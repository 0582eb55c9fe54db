"""The launcher's side of the nursery: orders to it, and what it tells of the agents that it forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from pdsl.grammar.errors import RunError
from pdsl.runtime.ranks import in_words_of_status
from pdsl.runtime.wire import Message

__all__ = ["Nursery"]


class Nursery:
    """The process that has imported torch and forks agents. Can serve several clusters, one after another or at once."""

    def __init__(self, *tasks: str, threads: int = 1) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdsl.runtime.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others
        )
        self.pid = self._process.pid
        self._forked = threading.Condition()
        self._ready = False
        self._refusal: str | None = None
        self._closed = False
        self._pids: dict[tuple[str, int], int] = {}
        self._status: dict[int, int] = {}
        self._refused: dict[tuple[str, int], str] = {}
        threading.Thread(target=self._read, daemon=True).start()
        self.order({"import": list(tasks)})

    def order(self, message: Message) -> None:
        """Raises RunError if the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise RunError("the process that starts the nodes is gone; its own words stand above") from None

    def await_ready(self, timeout: float) -> None:
        """Wait for the imports. Raises RunError if they fail, or do not end within `timeout` seconds."""
        with self._forked:
            if not self._forked.wait_for(lambda: self._ready or self._closed, timeout):
                raise RunError(f"the process that starts the nodes was not ready within {timeout:g} s")
            if self._refusal is not None:
                raise RunError(self._refusal)
            if not self._ready:
                raise RunError("the process that starts the nodes ended early; its own words stand above")

    def unborn(self, secret: str, node: int) -> str | None:
        """Why the agent of a node of the run with that secret will not come; None if it may still do so."""
        with self._forked:
            pid = self._pids.get((secret, node))
            if pid in self._status:
                return f"its agent {in_words_of_status(self._status[pid])} before it could say anything; its own words stand above"
            return self._refused.get((secret, node)) or ("the process that starts the nodes is gone" if self._closed else None)

    def close(self) -> None:
        """End the process and with it all agents and ranks."""
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                event = json.loads(line)
                with self._forked:
                    if event["event"] == "ready":
                        self._ready, self._refusal = True, event["reason"]
                    elif event["event"] == "ended":
                        self._status[event["pid"]] = event["status"]
                    elif event["event"] == "forked":
                        self._pids[event["secret"], event["node"]] = event["pid"]
                    elif event["event"] == "refused":
                        self._refused[event["secret"], event["node"]] = event["reason"]
                    self._forked.notify_all()
        with self._forked:
            self._closed = True
            self._forked.notify_all()
