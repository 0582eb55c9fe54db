"""A wait for gloo ends soon after its group was cut, also in the middle of a message, where gloo itself says nothing until its time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pdsl.runtime.groups import CrossGroup

SIZE = 1 << 24  # numbers; gloo takes long enough for 64 MiB that its peer can be stopped meanwhile
TIMEOUT = timedelta(seconds=60)  # what gloo would wait
AT_ONCE = 10.0  # seconds, of a wait that gives up

PEER = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
group = dist.ProcessGroupGloo(dist.PrefixStore("test", store), 1, 2, timedelta(seconds=60))
tensor = torch.ones(int(sys.argv[2]))
print("ready", flush=True)
work = {"sum": lambda: group.allreduce([tensor]), "receive": lambda: group.send([tensor], 0, 7), "send": lambda: group.recv([tensor], 0, 7)}
work[sys.argv[3]]().wait()
sys.stdin.read()
"""


@contextmanager
def _peer(port: int, size: int, what: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", PEER, str(port), str(size), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _cut_in_the_middle(rank: int, world: int, shared: dist.Store, what: str) -> float | None:
    """Seconds that a wait takes from the death of its peer in the middle of a message, until it raises; None if no peer was stopped in the middle.

    Runs in a worker, which ends without ado: a thread stays behind in gloo, and a process that finalizes Python under such a thread is aborted.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    calls: dict[str, Callable[[CrossGroup, torch.Tensor], object]] = {
        "sum": lambda group, tensor: group.sum(tensor),
        "receive": lambda group, tensor: group.receive(tensor, 1, 7),
        "send": lambda group, tensor: group.send(tensor, 1, 7),
    }
    for _ in range(5):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        cut = threading.Event()
        with _peer(store.port, SIZE, what) as process:
            group = CrossGroup("test", (0, 1), 0, store, torch.device("cpu"), TIMEOUT, cut.is_set)
            tensor = torch.ones(SIZE)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            pending = calls[what](group, tensor)
            process.send_signal(signal.SIGSTOP)
            process.kill()
            cut.set()
            begin = time.monotonic()
            try:
                pending.wait()  # type: ignore[attr-defined]
            except RuntimeError as error:
                if "in the middle of a message" not in str(error):
                    continue  # nothing had arrived: gloo told by itself
                del group, pending  # neither may wait for what is left of the group
                return time.monotonic() - begin
    return None


@pytest.mark.parametrize("what", ["sum", "receive", "send"])
def test_a_message_that_is_cut_in_the_middle_is_given_up(what: str, pool):
    (seconds,) = pool.run(_cut_in_the_middle, 1, what)
    if seconds is None:
        pytest.skip("the message was never under way when its peer was stopped")
    assert seconds < AT_ONCE


def test_results_arrive_as_without(pool):
    for numbers in (8, 1 << 18):
        sums = pool.run(_exchange, 2, numbers)
        assert all(
            torch.equal(total, torch.full((numbers,), 3.0)) and torch.equal(got, torch.full((numbers,), 2.0 - rank))
            for rank, (total, got) in enumerate(sums)
        )


def _exchange(rank: int, world: int, store: dist.Store, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = CrossGroup("test", range(world), rank, store, torch.device("cpu"), TIMEOUT, lambda: False)
    mine = torch.full((numbers,), rank + 1.0)
    got = torch.empty(numbers)
    works = [group.receive(got, 1 - rank, 3), group.send(mine.clone(), 1 - rank, 3)]
    for work in works:
        work.wait()
    group.sum(mine).wait()
    return mine, got
