"""Recovery time: from the SIGKILL of a node to the next committed step, for PDSL, torchft and torchrun with checkpoints, in one run.

    python tests/benchmarks/recovery.py [--kills N] [--only SIDE] [--torchft PYTHON] [--json FILE]

All train the same model of about 0.5 million parameters on four nodes of one CPU rank each, on this machine; the kill comes at any moment of a
step, and hits each node in turn. What is told is the time beyond one step (the median before the kill), as the lost step must be done anyhow.
PDSL and torchft get a fresh run for each kill; torchrun starts all its ranks again by itself.

torchft 0.2.0 is used if the interpreter given with `--torchft` (or this one) has it. It wants other versions of torch's companions than PDSL, so
give it an environment of its own:

    python -m venv DIR; DIR/bin/pip install torch==2.13.0 attrs; DIR/bin/pip install --no-deps torchft==0.2.0
    DIR/bin/pip install opentelemetry-sdk opentelemetry-api opentelemetry-exporter-otlp-proto-http

Exit status 1 if a median of PDSL is above its bound.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _killing import PHASES, pdsl_kills, planned, torchrun_kills
from attrs import frozen

from pdsl.runtime.resilient import Nursery

JOIN_TIMEOUT, HEARTBEAT_TIMEOUT = 2000, 5000  # of torchft's lighthouse, in ms: well below its defaults of 60000 and 5000


@frozen
class Kind:
    """One row. `bound` are the seconds that the median may take beyond a step, where PDSL promises some."""

    name: str
    words: str
    recover: str = ""
    stages: str = "2 to 3"
    bound: float | None = None


KINDS = (
    Kind("reroute", "PDSL, 2 pipelines of 2 stages: the other pipeline takes over", "reroute", bound=0.2),
    Kind("copies", "PDSL, 4 copies of the model: the other copies take over", "reroute", stages="", bound=0.2),
    Kind("retemplate", "PDSL, 2 pipelines of 2 stages: layers move to 1 pipeline of 3", "retemplate", bound=0.5),
    Kind("default", "PDSL, both: re-route at once, move layers when it pays", "reroute, retemplate, restore", bound=0.2),
    Kind("torchft", f"torchft, 3 copies, Manager.allreduce, join_timeout {JOIN_TIMEOUT} ms, heartbeat_timeout {HEARTBEAT_TIMEOUT} ms"),
    Kind("torchrun", "torchrun, DDP over 4 ranks, restarts from a checkpoint of every step"),
)


def torchft_kills(python: str, kills: int) -> Iterator[dict[str, Any]]:
    """torchft's samples. Raises RuntimeError if it cannot be run."""
    script = Path(__file__).with_name("_torchft.py")
    command = [python, str(script), str(kills), str(JOIN_TIMEOUT), str(HEARTBEAT_TIMEOUT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if run.returncode:
        raise RuntimeError(f"torchft's side ended with status {run.returncode}")


def has_torchft(python: str) -> bool:
    """Whether an interpreter can import torchft."""
    return subprocess.run([python, "-c", "import torchft"], capture_output=True, check=False).returncode == 0


HEAD = f"{'':<12}{'kills':>6}{'step ms':>9}{'median ms':>11}{'worst ms':>10}   " + "".join(f"{name:>9}" for name in PHASES)


def row(kind: Kind, samples: Sequence[dict[str, Any]]) -> str:
    """Medians over the kills of one row, in ms."""
    beyond = [s["beyond"] for s in samples]
    steps = statistics.median(s["step"] for s in samples)
    phases = "".join(f"{statistics.median(s['phases'][p] for s in samples) * 1e3:>9.1f}" for p in PHASES if p in samples[0]["phases"])
    text = (
        f"{kind.name:<12}{len(samples):>6}{steps * 1e3:>9.1f}{statistics.median(beyond) * 1e3:>11.1f}{max(beyond) * 1e3:>10.1f}   {phases}"
    )
    later = [s["later"] for s in samples if s.get("later") is not None]
    if "later" in samples[0]:
        pauses = f", for {statistics.median(later) * 1e3:.0f} ms (median)" if later else ""
        text += f"\n{'':<12}layers were moved later in {len(later)} of {len(samples)} runs{pauses}"
    return text


def measure(kind: Kind, kills: int, python: str, nursery: Callable[[], Nursery]) -> Iterator[dict[str, Any]]:
    """The samples of one row."""
    if kind.name == "torchft":
        return torchft_kills(python, kills)
    if kind.name == "torchrun":
        return torchrun_kills(range(kills))
    return pdsl_kills(planned(kind.recover, stages=kind.stages), range(kills), nursery(), moves_later=kind.name == "default")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time from a kill to the next committed step, beyond the time of one step.")
    parser.add_argument("--kills", type=int, default=8, help="kills for each row (default: 8)")
    parser.add_argument("--only", choices=[k.name for k in KINDS], action="append", help="only this row; may be given several times")
    parser.add_argument("--torchft", metavar="PYTHON", default=sys.executable, help="the interpreter that has torchft (default: this one)")
    parser.add_argument("--json", metavar="FILE", help="write every kill")
    options = parser.parse_args()
    kinds = [k for k in KINDS if options.only is None or k.name in options.only]
    print("\n".join(f"{k.name:<12}{k.words}" for k in kinds))
    print(f"\n{HEAD}\n{'-' * len(HEAD)}")
    found: dict[str, list[dict[str, Any]]] = {}
    failed, begin = False, time.monotonic()
    nurseries: list[Nursery] = []

    def nursery() -> Nursery:
        if not nurseries:
            nurseries.append(Nursery("train", threads=1))
            nurseries[0].await_ready(120.0)
        return nurseries[0]

    try:
        for kind in kinds:
            if kind.name == "torchft" and not has_torchft(options.torchft):
                print(f"{kind.name:<12}skipped: {options.torchft} has no torchft; --torchft names an interpreter that has it")
                continue
            try:
                samples = list(measure(kind, options.kills, options.torchft, nursery))
            except (RuntimeError, TimeoutError) as error:
                if kind.recover:
                    raise
                print(f"{kind.name:<12}not measured: {error}")
                continue
            found[kind.name] = samples
            print(row(kind, samples), flush=True)
            median = statistics.median(s["beyond"] for s in samples)
            if kind.bound is not None and median > kind.bound:
                print(f"{kind.name}: the median is above {kind.bound:g} s", file=sys.stderr)
                failed = True
    finally:
        for each in nurseries:
            each.close()
    print(f"\nall beyond the time of one step but the phases, which are medians of their own; {time.monotonic() - begin:.0f} s in all")
    if options.json:
        Path(options.json).write_text(json.dumps({"kinds": {k.name: k.words for k in kinds}, "samples": found}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
