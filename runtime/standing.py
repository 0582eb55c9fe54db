"""Where a rank stands that says nothing: stopped, waiting for another rank, or inside the user's own code, and at which line.

Each rank dumps its stack on a signal that nobody else uses. That works while it is inside a library, and costs nothing until it is asked.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from pdsl.lowering.factory import place_of

__all__ = ["Standing", "answer_when_asked", "where_they_stand"]

_QUESTION = signal.SIGRTMAX - 1
_PATIENCE = 0.5  # seconds for an answer
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@frozen
class Standing:
    """What a silent rank is doing. `waits`: for another rank, as far as its stack shows. `place`: the user's file and line, or empty."""

    stopped: bool = False
    waits: bool = False
    place: str = ""

    def __str__(self) -> str:
        if self.stopped:
            return "was stopped by a signal"
        return f"stood at {self.place}" if self.place else "did not answer"


def answer_when_asked(directory: Path, rank: int) -> None:
    """Let this process write its stack into a file of `directory` whenever it is asked."""
    file = _file(directory, rank).open("w")
    faulthandler.register(_QUESTION, file, all_threads=False)
    _kept.append(file)


_kept: list[object] = []  # the file must stay open


def where_they_stand(pids: Mapping[int, int], directory: Path) -> dict[int, Standing]:
    """Ask processes of this machine, given by rank, where they stand. Takes half a second at most; those that have ended are left out."""
    found: dict[int, Standing] = {}
    asked = {}
    for rank, pid in pids.items():
        state = _state(pid)
        if state in ("T", "t"):
            found[rank] = Standing(stopped=True)
        elif state not in ("", "Z"):
            with suppress(ProcessLookupError):
                os.kill(pid, _QUESTION)
                asked[rank] = pid
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit and not all(_stack(directory, rank) for rank in asked):
        time.sleep(0.01)
    found.update({rank: _read(_stack(directory, rank)) for rank in asked})
    return dict(sorted(found.items()))


def _read(stack: str) -> Standing:
    """A dump of faulthandler, innermost frame first. A wait inside PDSL's runtime or torch is one for another rank, code of the user's is not."""
    frames = [(file, int(line)) for file, line, _ in _FRAME.findall(stack)]
    places = [(place_of(file, line), file) for file, line in frames]
    for place, file in places:
        if place:
            return Standing(place=place)
        if Path(file).resolve().parent == Path(__file__).resolve().parent:
            return Standing(waits=True)
    return Standing()


def _file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}.txt"


def _stack(directory: Path, rank: int) -> str:
    try:
        text = _file(directory, rank).read_text()
    except OSError:
        return ""
    return text if text.endswith("\n") else ""


def _state(pid: int) -> str:
    """The letter of the kernel for the state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
