"""PDSL's side of the recovery benchmark, and torchrun's: runs that are disturbed, and what is heard of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from _recovery import BATCH, CONTEXT, MODEL, NODES, RATE, ROOT, SEED, WARM_UP, free_port, phase, sample, step_time

from pdsl.runtime.resilient import Cluster, Nursery

if TYPE_CHECKING:
    from pdsl.lowering.plan import Plan

__all__ = ["PHASES", "pdsl_kills", "planned", "torchrun_kills"]

PHASES = ("detect", "finish", "agree", "groups", "plan", "move", "redo")
"""Of a recovery, in order: until anybody knows, until the survivors stand still (a whole pipeline finishes its own work first), until all have
the decision, then what the slowest rank spent, and the step itself."""

_DEADLINE = 120.0
_MOVES_WITHIN = 20.0
"""Seconds in which new pipelines may come after re-routing."""

Event = dict[str, Any]


def planned(recover: str, *, stages: str = "2 to 3") -> Plan:
    """The plan with answers to a loss as the spec writes them, and pipelines of so many stages; `stages` "" is copies of the whole model."""
    import pdsl

    arguments = "; ".join(f"{k} = {v}" for k, v in MODEL.items())
    axis, pipeline = f"axis pp = {stages}", "pipeline over pp { schedule = one_f_one_b(microbatches = 4) }"
    return pdsl.compile(
        pdsl.load(f"""
pdsl 1
cluster {{ nodes = {NODES}; ranks_per_node = 1; device = cpu }}
mesh {{ axis dp = rest; {axis if stages else ""} }}
model "pdsl.models:gpt" {{ {arguments} }}
shard {{ "**" => replicate() }}
{pipeline if stages else ""}
fault_budget {{ lose = 1; silence = 20s; recover = [{recover}] }}
train {{
  data      = source("pdsl.data:python_source", context = {CONTEXT})
  batch     = {BATCH}
  steps     = 100000
  optimizer = adamw(lr = {RATE:f})
  seed      = {SEED}
}}
""")
    )


def pdsl_kills(plan: Plan, turns: Sequence[int], nursery: Nursery, *, moves_later: bool = False) -> Iterator[dict[str, Any]]:
    """A fresh run for each kill. With `moves_later` the sample also has `later`: the seconds of the new pipelines that follow re-routing, or None."""
    for turn in turns:
        with Cluster(plan, "train", {}, threads=1, nursery=nursery) as cluster:
            yield _one_kill(cluster, turn, moves_later)


def _one_kill(cluster: Cluster, turn: int, moves_later: bool) -> dict[str, Any]:
    cluster.wait_for(lambda events: len(_committed(events)) >= WARM_UP, _DEADLINE)
    step = step_time(sorted(_committed(list(cluster.events)).values()))
    time.sleep(phase(turn, step))
    killed = time.monotonic()
    cluster.kill(turn % NODES)

    def recovered(events: Sequence[Event]) -> float | None:
        return min((e["time"] for e in events if e["event"] == "step" and e["generation"] > 0), default=None)

    committed = cluster.wait_for(recovered, _DEADLINE)
    found = sample(killed, committed, step, **_phases([e for e in cluster.events if e["time"] >= killed], killed, committed))
    if moves_later:
        found["later"] = _later(cluster)
    return found


def _committed(events: Sequence[Event]) -> dict[int, float]:
    """When the first word of each step came."""
    found: dict[int, float] = {}
    for event in list(events):
        if event["event"] == "step":
            found.setdefault(event["step"], event["time"])
    return found


def _phases(events: Sequence[Event], killed: float, committed: float) -> dict[str, float]:
    """Seconds of each phase; they add up to the gap."""

    def last(*kinds: str) -> float:
        return max((e["time"] for e in events if e["event"] in kinds and e["time"] <= committed), default=killed)

    def worst(key: str) -> float:
        return max((e.get(key, 0.0) for e in events if e["event"] in ("rerouted", "moved") and e["time"] <= committed), default=0.0)

    known = min(e["time"] for e in events if e["event"] in ("fault", "lost"))
    still = max(known, last("fault"))
    agreed, ready = max(still, last("agreed")), last("rerouted", "moved")
    groups, planning = worst("grouping"), worst("planning")
    return {
        "detect": known - killed,
        "finish": still - known,
        "agree": agreed - still,
        "groups": groups,
        "plan": planning,
        "move": max(0.0, ready - agreed - groups - planning),
        "redo": committed - ready,
    }


def _later(cluster: Cluster) -> float | None:
    """Seconds that training stood still for new pipelines after re-routing; None if there were none in time."""

    def moved(events: Sequence[Event]) -> bool:
        at = next((e["time"] for e in events if e["event"] == "moved"), None)
        return at is not None and any(e["event"] == "step" and e["time"] > at for e in events)

    try:
        cluster.wait_for(moved, _MOVES_WITHIN)
    except Exception:  # noqa: BLE001  whatever ended it: no new pipelines were seen
        return None
    events = list(cluster.events)
    at = next(e["time"] for e in events if e["event"] == "moved")
    steps = sorted(_committed(events).values())
    before, after = max(t for t in steps if t < at), min(t for t in steps if t > at)
    return after - before - step_time([t for t in steps if t <= before])


# --- torchrun ------------------------------------------------------------------------------------------------------------------------------


def torchrun_kills(turns: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One run of a data-parallel script that saves every step; torchrun starts all ranks again after each kill."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        script = Path(__file__).with_name("_torchrun.py")
        where = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        options = [*where, "--nproc-per-node", str(NODES), "--max-restarts", str(len(turns) + 1)]
        run = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, str(script), name],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for count, turn in enumerate(turns):
                yield _one_restart(folder, count, turn, run)
        finally:
            run.terminate()
            with suppress(subprocess.TimeoutExpired):
                run.wait(20.0)
            run.kill()
            run.wait()


def _one_restart(folder: Path, restarts: int, turn: int, run: subprocess.Popen[bytes]) -> dict[str, Any]:
    times = _wait(lambda: _lines(folder, restarts), lambda found: len(found) >= WARM_UP, run)
    step = step_time(times)
    time.sleep(phase(turn, step))
    victim = int((folder / f"pid-{turn % NODES}").read_text())
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    committed = _wait(lambda: _lines(folder, restarts + 1), lambda found: len(found) >= 1, run)[0]
    return sample(killed, committed, step)


def _lines(folder: Path, restarts: int) -> list[float]:
    """When each step was done, of those after so many restarts."""
    try:
        lines = (folder / "steps").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in lines if line.count(" ") == 2]
    return [float(at) for _, count, at in rows if int(count) == restarts]


def _wait(read: Callable[[], list[float]], enough: Callable[[list[float]], bool], run: subprocess.Popen[bytes]) -> list[float]:
    limit = time.monotonic() + _DEADLINE
    while not enough(found := read()):
        if run.poll() is not None:
            raise RuntimeError(f"torchrun ended with status {run.returncode}")
        if time.monotonic() > limit:
            raise TimeoutError(f"torchrun did not get on within {_DEADLINE:g} s")
        time.sleep(0.02)
    return found
