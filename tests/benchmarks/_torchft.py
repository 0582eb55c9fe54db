"""torchft's side of the recovery benchmark: replica groups of one process, gradients summed by `Manager.allreduce`, one killed.

    python _torchft.py KILLS JOIN_TIMEOUT_MS HEARTBEAT_TIMEOUT_MS

Prints one JSON line for each kill. Each kill has a lighthouse and replicas of its own; the replicas are forked from this process, which has
imported all. torchft 0.2.0 has a wrapper for DDP as well; on gloo with torch 2.13 it ends with its peer.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torchft
from _recovery import BATCH, CONTEXT, MODEL, NODES, RATE, SEED, WARM_UP, free_port, phase, sample, step_time
from torch.nn import functional as F

from pdsl.data import python_source
from pdsl.models import gpt

_DEADLINE = 120.0

REPLICAS = 3
"""Of four, the two that see a loss at once are no majority until the heartbeat of the lost one has run out: then it takes 5 s, not 2."""


def replica(number: int, lighthouse: str, pipe: int) -> None:
    """Train until killed. Each committed step is told as a line: replica, step, replicas that took part, time."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(SEED)
    model = gpt(**MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{number}_",
        hostname="127.0.0.1",
        init_sync=False,  # all begin with the same weights
    )
    data, share = python_source(context=CONTEXT), BATCH // NODES
    parameters = list(model.parameters())
    while True:
        manager.start_quorum()
        first = manager.current_step() * BATCH + number * share
        rows = data.rows([i % len(data) for i in range(first, first + share)])
        F.cross_entropy(model(rows["tokens"]).flatten(0, 1), rows["targets"].flatten()).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        manager.allreduce(flat).wait()
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape)
        if manager.should_commit():
            optimizer.step()
            os.write(pipe, f"{number} {manager.current_step()} {manager.num_participants()} {time.monotonic()}\n".encode())
        optimizer.zero_grad()


class Steps:
    """Committed steps of all replicas, as their lines come through a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.lines: list[tuple[int, int, int, float]] = []
        self._rest = b""

    def wait(self, what: Any) -> None:
        """Read until `what(lines)` is true. Raises TimeoutError."""
        limit = time.monotonic() + _DEADLINE
        while not what(self.lines):
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no step within {_DEADLINE:g} s")
            *lines, self._rest = (self._rest + os.read(self.pipe, 1 << 16)).split(b"\n")
            for line in lines:
                number, step, replicas, at = line.split()
                self.lines.append((int(number), int(step), int(replicas), float(at)))


def one_kill(turn: int, join: int, heartbeat: int) -> dict[str, Any]:
    command = Path(sys.executable).parent / "torchft_lighthouse"
    options = ["--min_replicas", "1", "--quorum_tick_ms", "50", "--join_timeout_ms", str(join), "--heartbeat_timeout_ms", str(heartbeat)]
    port = free_port()
    lighthouse = subprocess.Popen([command, "--bind", f"127.0.0.1:{port}", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        _await_listener(port)
        reader, writer = os.pipe()
        for number in range(REPLICAS):
            pid = os.fork()
            if pid == 0:
                try:
                    replica(number, f"http://127.0.0.1:{port}", writer)
                finally:
                    os._exit(1)
            pids.append(pid)
        os.close(writer)
        steps = Steps(reader)
        steps.wait(lambda lines: sum(n == 0 and replicas == REPLICAS for n, _, replicas, _ in lines) >= WARM_UP)
        step = step_time([at for n, _, _, at in steps.lines if n == 0])
        time.sleep(phase(turn, step))
        victim = turn % REPLICAS
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        steps.wait(lambda lines: any(replicas < REPLICAS and at > killed for _, _, replicas, at in lines))
        committed = min(at for _, _, replicas, at in steps.lines if replicas < REPLICAS and at > killed)
        os.close(reader)
        return sample(killed, committed, step)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        lighthouse.kill()
        lighthouse.wait()


def _await_listener(port: int) -> None:
    limit = time.monotonic() + 20.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)


def main() -> None:
    kills, join, heartbeat = (int(argument) for argument in sys.argv[1:4])
    gc.collect()
    gc.freeze()
    for turn in range(kills):
        print(json.dumps(one_kill(turn, join, heartbeat)), flush=True)


if __name__ == "__main__":
    main()
