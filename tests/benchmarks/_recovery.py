"""What the sides of the recovery benchmark share: the job, what a sample is, and the start of the clock. No PDSL and no attrs: the torchft side may
run under another interpreter.
"""

from __future__ import annotations

import itertools
import random
import socket
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a plain checkout will do

__all__ = ["BATCH", "CONTEXT", "MODEL", "NODES", "RATE", "ROOT", "SEED", "WARM_UP", "free_port", "phase", "sample", "step_time"]

NODES = 4
"""Nodes of one rank, on every side."""

MODEL = {"layers": 2, "width": 128, "heads": 4, "context": 32}
"""About 0.5 million parameters."""

CONTEXT, BATCH, RATE, SEED = MODEL["context"], 16, 1e-3, 3

WARM_UP = 12
"""Committed steps before the kill. The step time is the median of the last eight."""


def phase(turn: int, step: float) -> float:
    """Seconds after the end of a step at which a kill comes: any moment of a step alike, the same moments in every run of the benchmark."""
    return random.Random(f"phase {turn}").random() * step


def sample(killed: float, committed: float, step: float, **phases: float) -> dict[str, Any]:
    """One kill: seconds from it to the next committed step, the median step time before it, and the gap beyond one step."""
    gap = committed - killed
    return {"gap": gap, "step": step, "beyond": gap - step, "phases": phases}


def step_time(times: Sequence[float]) -> float:
    """Seconds of a step: the median of the last eight, by when each step was done."""
    return statistics.median(b - a for a, b in itertools.pairwise(times[-9:]))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
