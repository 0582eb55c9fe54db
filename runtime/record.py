"""What a run with a fault budget tells, as its launcher hears it: steps, losses, recoveries; each once, however many nodes say it.

The file of metrics has one object a line. A step has `step` and `loss`; what happens in between has `event`: `lost`, `agreed` (who goes on, and the
seconds that agreeing took), `rerouted` and `moved` (what was done, with its phases), `recovered` (seconds from the loss to the next committed step).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdsl.runtime.report import Reporter
from pdsl.runtime.session import StepResult
from pdsl.runtime.validation import Validated

__all__ = ["Recorder"]

_STEP = ("step", "loss", "grad_norm", "samples", "seconds", "digest")


class Recorder:
    """Takes the events of a `Cluster`. `losses` are those of the committed steps, by step, `validations` those on held-out data after so many steps; `recoveries` the seconds from each loss to the next of
    them, `began` the steps that a checkpoint had before the first of them.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._heard: set[tuple[object, ...]] = set()
        self._fault: float | None = None
        self.losses: dict[int, float] = {}
        self.digests: dict[int, str] = {}
        self.samples: dict[int, int] = {}
        self.validations: dict[int, float] = {}
        self.began = 0
        self.recoveries: list[float] = []
        self.seconds = 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self._step(event)
            return
        if kind == "validated":
            self._validated(event)
            return
        if kind not in _TOLD:
            return
        key = (kind, event.get("generation"), event.get("step"), event.get("node") if kind in ("lost", "leaving") else None)
        if key in self._heard:
            return
        self._heard.add(key)
        if kind == "restored" and not self.losses:
            self.began = event["step"]
        if kind == "lost" and self._fault is None:
            self._fault = event["time"]
        self._reporter.write({k: v for k, v in event.items() if k not in ("rank", "time")})
        text = _TOLD[kind](event)
        if text:
            self._reporter.say(text)

    def _validated(self, event: Mapping[str, Any]) -> None:
        """After a loss it is taken again, for nobody knows who has heard of it: the same number is told once."""
        if self.validations.get(event["step"]) == event["loss"]:
            return
        self.validations[event["step"]] = event["loss"]
        found = Validated(event["step"], event["loss"], event["samples"], event["seconds"])
        self._reporter.validated(found, event["generation"])

    def _step(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        again = step in self.losses
        if again and ("step", event["generation"], step) in self._heard:
            return
        if again and step == max(self.losses) and self.losses[step] == event["loss"]:
            return  # another node tells the same step, in a later generation if it learned of it late
        for later in [s for s in self.losses if s >= step]:  # a checkpoint was loaded: what follows is done again
            del self.losses[later]
        self._heard.add(("step", event["generation"], step))
        self.losses[step] = event["loss"]
        self.digests[step] = event["digest"]
        self.samples[step] = event["samples"]
        self.seconds += event["seconds"]
        if self._fault is not None:
            self.recoveries.append(event["time"] - self._fault)
            self._reporter.write({"event": "recovered", "step": step, "seconds": self.recoveries[-1]})
            self._fault = None
        self._reporter.step(StepResult(**{name: event[name] for name in _STEP}), event["generation"])


def _nodes(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _agreed(event: Mapping[str, Any]) -> str:
    if not event["lost"] and not event["joined"]:
        return ""
    what = [f"{_nodes(event['lost'])} gone"] if event["lost"] else []
    what += [f"{_nodes(event['joined'])} new"] if event["joined"] else []
    return f"  {', '.join(what)}; {len(event['nodes'])} nodes go on after {event['step']} steps (agreed in {event['seconds'] * 1e3:.0f} ms)"


def _rerouted(event: Mapping[str, Any]) -> str:
    again = (
        f"{event['again']} of {event['of']} microbatches of the step run again" if event["again"] < event["of"] else "the step runs again"
    )
    return f"  re-routed in {event['seconds'] * 1e3:.0f} ms: {again}, nothing moved{_alarm(event)}"


def _moved(event: Mapping[str, Any]) -> str:
    lengths = " + ".join(map(str, event["pipelines"]))
    size = event["bytes"] / 1e6
    return f"  new pipelines of {lengths} stages in {event['seconds'] * 1e3:.0f} ms: {size:.2f} MB moved and verified{_alarm(event)}"


def _alarm(event: Mapping[str, Any]) -> str:
    return (
        "; the last copy of a layer: one more loss may end the run" if event["copies"] == 1 else f"; every layer on {event['copies']} nodes"
    )


def _started(event: Mapping[str, Any]) -> str:
    agents = ", ".join(str(pids["agent"]) for _, pids in sorted(event["nodes"].items(), key=lambda pair: int(pair[0])))
    return f"{len(event['nodes'])} nodes, each an agent with its ranks, as processes {agents}"


_TOLD: dict[str, Any] = {
    "started": _started,
    "lost": lambda e: f"node {e['node']} is lost: {e.get('reason', 'no reason is known')}",
    "agreed": _agreed,
    "rerouted": _rerouted,
    "moved": _moved,
    "restored": lambda e: f"  read from a checkpoint: training goes on after {e['step']} steps",
    "fresh": lambda e: f"there is no checkpoint in {e['path']} yet: training begins with the first step",
    "saved": lambda e: "",
    "unsaved": lambda e: f"no checkpoint of step {e['step']}: {e['reason']}",
    "fault": lambda e: "",
}
