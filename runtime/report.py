"""What a run tells while it goes: one JSON object a step in a file, one line or a bar in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pdsl.grammar.errors import RunError
from pdsl.runtime.session import StepResult
from pdsl.runtime.validation import Validated

__all__ = ["Reporter"]


class Reporter:
    """Rank 0's view of the run. Others are made with `active = False` and say nothing.

    In a terminal it draws a bar; elsewhere it prints a line now and then, at most one per second.
    """

    def __init__(self, steps: int, *, metrics: str | None, progress: bool, generation: int, active: bool) -> None:
        self._steps = steps
        self._generation = generation
        self._file: IO[str] | None = self._open(metrics) if active and metrics else None
        self._progress = progress and active
        self._bar: Any = None
        self._task: Any = None
        self._said = 0.0

    @staticmethod
    def _open(path: str) -> IO[str]:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return Path(path).open("w", encoding="utf-8")
        except OSError as error:
            raise RunError(f"metrics cannot be written to {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        if self._progress and sys.stderr.isatty():
            self._bar, self._task = _bar(self._steps)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    def write(self, record: Mapping[str, object]) -> None:
        """One line of the file. It is flushed each time, so that a run that dies leaves all it did."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """A line for the reader, above the bar if there is one."""
        if not self._progress:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
            return
        print(text, file=sys.stderr, flush=True)

    def validated(self, found: Validated, generation: int | None = None) -> None:
        """Tell the loss on held-out data."""
        known = self._generation if generation is None else generation
        self.write(
            {
                "step": found.steps - 1,
                "validation_loss": found.loss,
                "validation_samples": found.samples,
                "seconds": found.seconds,
                "generation": known,
            }
        )
        self.say(f"step {found.steps}/{self._steps}  loss {found.loss:.4f} on {found.samples} held-out samples")

    def ends(self, steps: int) -> None:
        """The data ended before the steps that were asked for were taken."""
        self.say(f"the data ended after {steps} of {self._steps} steps")

    def step(self, result: StepResult, generation: int | None = None) -> None:
        """Tell one step."""
        self.write(_metrics(result, self._generation if generation is None else generation))
        if not self._progress:
            return
        rate = result.samples / result.seconds
        if self._bar is not None:
            self._bar.update(self._task, completed=result.step + 1, loss=f"{result.loss:.4f}", rate=f"{rate:.0f}")
            return
        now, last = time.monotonic(), result.step + 1 == self._steps
        if last or now - self._said >= 1.0:
            self._said = now
            print(f"step {result.step + 1}/{self._steps}  loss {result.loss:.4f}  {rate:.0f} samples/s", file=sys.stderr, flush=True)


def _metrics(result: StepResult, generation: int) -> dict[str, object]:
    return {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "samples": result.samples,
        "seconds": result.seconds,
        "generation": generation,
        "digest": result.digest,
    }


def _bar(steps: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} samples/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    return bar, bar.add_task("training", total=steps, loss="-", rate="-")
