"""Every kind of loss in every state of a rank, one run for each: the losses, the samples and the processes that are left, against an undisturbed run.

    python tests/benchmarks/kills.py [--ranks 1] [--point vote --point move] [--how stop]

In a state of recovery the struck node is the second that is lost, while the run recovers from the first. An exception there ends the run with it, and
so does one in the step that is tried again: what would happen everywhere must not eat all nodes. Exit status 1 if any run ends otherwise than it must.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a plain checkout will do

from pdsl.grammar.errors import RankError, RunError  # noqa: E402
from pdsl.lowering.plan import Plan  # noqa: E402
from pdsl.runtime.chaos import HOW, POINTS, Fault  # noqa: E402
from pdsl.runtime.resilient import Cluster, Nursery  # noqa: E402
from tests.runtime.storms import Storm, deviation, plan_of, run  # noqa: E402

TOLERANCE = 1e-6
OF_A_STEP = POINTS[:5]
NODES, STEPS, STEP = 6, 8, 3


def planned(ranks: int, how: str) -> Plan:
    """Six nodes that may lose two. Only a node that stands still is found by silence, so it is short there alone."""
    return plan_of(
        NODES, ranks=ranks, lose=2, steps=STEPS, silence="3s" if how == "stop" else "20s", recover="retemplate, reroute, restore"
    )


def faults_of(ranks: int, point: str, how: str) -> tuple[Fault, ...]:
    """The fault on node 4, after one on node 1 where the point is passed in a recovery."""
    struck = Fault(4 * ranks, point, STEP, how)
    return (struck,) if point in OF_A_STEP else (Fault(ranks, "backward", STEP, "node"), struck)


def outcome(plan: Plan, nursery: Nursery, calm: Storm, point: str, how: str, deadline: float) -> tuple[bool, str]:
    """Whether a run ended as it must, and how, in words."""
    faults = faults_of(plan.ranks_per_node, point, how)
    lost = sorted({f.rank // plan.ranks_per_node for f in faults})
    ends_it = how == "raise" and point not in OF_A_STEP

    def wake(cluster: Cluster, event: dict[str, Any]) -> None:
        if event["event"] == "lost" and how == "stop":
            cluster.resume(event["node"])

    try:
        storm = run(plan, nursery, faults, timeout=deadline, disturb=wake)
    except RankError as error:
        return ends_it and "a fault on purpose" in str(error), str(error)
    except (RunError, AssertionError) as error:
        return False, str(error)
    found = deviation(calm, storm)
    worst = max(storm.recoveries, default=0.0)
    text = f"deviation {found:.1e}, lost {storm.lost}, longest recovery {worst * 1e3:.0f} ms"
    return not ends_it and found <= TOLERANCE and storm.lost == lost and (how == "stop" or worst < plan.silence), text


def main() -> int:
    parser = argparse.ArgumentParser(description="Every kind of loss in every state, compared with an undisturbed run.")
    parser.add_argument("--ranks", type=int, choices=(1, 2), action="append", help="ranks of a node (default: 1, then 2)")
    parser.add_argument("--point", choices=POINTS, action="append", help="only this state; may be given several times")
    parser.add_argument("--how", choices=HOW, action="append", help="only this kind; may be given several times")
    parser.add_argument("--deadline", type=float, default=100.0, help="seconds of one run (default: 100)")
    options = parser.parse_args()
    nursery = Nursery("train", threads=1)
    begin, failed, count = time.monotonic(), 0, 0
    try:
        nursery.await_ready(120.0)
        for ranks in options.ranks or (1, 2):
            calm = run(planned(ranks, ""), nursery, timeout=options.deadline)
            for point in options.point or POINTS:
                for how in options.how or HOW:
                    good, text = outcome(planned(ranks, how), nursery, calm, point, how, options.deadline)
                    count, failed = count + 1, failed + (not good)
                    print(
                        f"{'ok' if good else 'BAD':<4}{ranks} rank{'s' if ranks > 1 else ' '} {point:<9}{how:<6}{text.splitlines()[0]}",
                        flush=True,
                    )
    finally:
        nursery.close()
    print(f"{count - failed} of {count} runs ended as they must; {time.monotonic() - begin:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
