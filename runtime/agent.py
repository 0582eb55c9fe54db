"""The agent of one node: it forks the node's ranks, hosts the store, and tells its launcher how each rank ended.

It is a process of its own, so that no training rank hosts the control state, and so that torch is imported once and not once per rank. It
speaks JSON lines: one job on stdin, events on stdout. When stdin closes, because the launcher says so or has died, it ends every rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdsl.lowering.plan import Plan
from pdsl.runtime import train, verify
from pdsl.runtime.launch import outcome_of

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1

_TASKS: dict[str, Callable[..., Any]] = {"train": train.train_rank, "verify": verify.verify_rank}


def main() -> int:
    """Read one job from stdin and run it. Exit status 0 if every rank ended well, 1 otherwise."""
    job = json.loads(sys.stdin.readline())
    plan = Plan.from_json(job["plan"])
    gc.collect()
    gc.freeze()  # what is there now belongs to all ranks; collecting it again in each costs memory and half a second
    try:
        listener = _listen(job["port"])
    except OSError as error:
        _tell(
            event="refused",
            reason=f"port {job['port']} cannot be used: {error.strerror or error}; leave the port out and a free one is taken",
        )
        return 1
    port = listener.getsockname()[1]
    ranks: dict[int, int] = {}
    ready_read, ready_write = os.pipe()
    for rank in range(plan.world_size):
        pid = os.fork()
        if pid == 0:
            os.close(ready_write)
            _rank(plan, rank, port, ready_read, job, listener)
        ranks[pid] = rank
    os.close(ready_read)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=timedelta(seconds=60)
    )
    os.close(ready_write)  # the ranks read the end of this pipe as "the store is there"
    _tell(event="started", pids={rank: pid for pid, rank in ranks.items()})
    status = _watch(ranks)
    del store
    return status


def _listen(port: int) -> Any:
    import socket

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    return listener


def _tell(**event: object) -> None:
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the launcher is gone; the closed stdin says so too


def _watch(ranks: dict[int, int]) -> int:
    """Report each rank as it ends; end all of them once stdin closes."""
    status = 0
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, None)
        for pid in ranks:
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        left = dict(ranks)
        while left:
            for key, _ in selector.select():
                pid = key.data
                if pid is None:
                    if not os.read(0, 4096):
                        selector.unregister(0)
                        _end(left)
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                _, code = os.waitpid(pid, 0)
                exit_code = os.waitstatus_to_exitcode(code)
                status = status or int(exit_code != 0)
                _tell(event="ended", rank=left.pop(pid), status=exit_code)
    return status


def _end(ranks: dict[int, int]) -> None:
    for pid in ranks:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _rank(plan: Plan, rank: int, port: int, ready: int, job: dict[str, Any], listener: Any) -> None:
    """The life of one rank in its own process; never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        listener.close()
        with open(os.devnull) as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
        if job["log_directory"] and rank:
            with (Path(job["log_directory"]) / f"rank-{rank}.log").open("a") as log:
                os.dup2(log.fileno(), 2)
        os.dup2(2, 1)  # stdout belongs to the agent's events; what a model prints goes to stderr
        os.read(ready, 1)
        torch.set_num_threads(job["threads"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        result = _TASKS[job["task"]](plan, rank, store, **job["arguments"])
        torch.save(result, Path(job["directory"]) / f"result-{rank}.pt")
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever ended this rank must be told in one place
        _write_outcome(Path(job["directory"]) / f"outcome-{rank}.json", error)
        if job["log_directory"]:
            with (Path(job["log_directory"]) / f"rank-{rank}.log").open("a") as log:
                log.writelines(traceback.format_exception(error))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _write_outcome(path: Path, error: BaseException) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(outcome_of(error)))
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
