"""What a run tells: one JSON object a step in a file, one line or a bar in the terminal, and at its end what it did."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from attrs import frozen

from pdsl.grammar.errors import RunError

if TYPE_CHECKING:
    from pdsl.runtime.session import StepResult

__all__ = ["Reporter", "RunReport", "open_metrics"]

_PER_SECOND = 10  # how often the bar is drawn; it is drawn between steps, by no thread of its own


@frozen
class RunReport:
    """What a run did. `seconds` are those of all its steps together, `losses` one per step."""

    steps: int
    losses: tuple[float, ...]
    samples: int
    seconds: float
    metrics: str | None

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def final_loss(self) -> float:
        return self.losses[-1]


def open_metrics(path: str, mode: str = "w") -> IO[str]:
    """The file for metrics, its folder made. Raises RunError if it cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open(mode, encoding="utf-8")
    except OSError as error:
        raise RunError(f"metrics cannot be written to {path}: {error.strerror}") from None


class Reporter:
    """Rank 0's view of the run. Others are made with `active = False` and say nothing.

    In a terminal it draws a bar; elsewhere it prints a line now and then, at most one per second, and one for the last step. `terminal` is
    stderr if None.
    """

    def __init__(
        self, steps: int, *, metrics: str | None, progress: bool, generation: int, active: bool, terminal: IO[str] | None = None
    ) -> None:
        self._steps = steps
        self._generation = generation
        self._file: IO[str] | None = open_metrics(metrics) if active and metrics else None
        self._progress = progress and active
        self._bar: Any = None
        self._task: Any = None
        self._said = float("-inf")
        self._terminal = terminal if terminal is not None else sys.stderr

    def __enter__(self) -> Self:
        if self._progress and self._terminal.isatty():
            self._bar, self._task = _bar(self._steps, None if self._terminal is sys.stderr else self._terminal)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    def step(self, result: StepResult) -> None:
        """Tell one step. The file is flushed each time, so that a run that dies leaves all it did."""
        if self._file is not None:
            self._file.write(json.dumps(_metrics(result, self._generation)) + "\n")
            self._file.flush()
        if not self._progress:
            return
        rate = result.samples / result.seconds
        now, last = time.monotonic(), result.step + 1 == self._steps
        if self._bar is not None:
            draw = last or now - self._said >= 1 / _PER_SECOND
            self._said = now if draw else self._said
            self._bar.update(self._task, advance=1, loss=f"{result.loss:.4f}", rate=f"{rate:.0f}", refresh=draw)
        elif last or now - self._said >= 1.0:
            self._said = now
            print(f"step {result.step + 1}/{self._steps}  loss {result.loss:.4f}  {rate:.0f} samples/s", file=self._terminal, flush=True)


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


def _bar(steps: int, terminal: IO[str] | None) -> tuple[Any, Any]:
    """A bar in a terminal of its own, or in stderr if None, where what the model prints goes above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} samples/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True) if terminal is None else Console(file=terminal),
        auto_refresh=False,
        redirect_stdout=terminal is None,
        redirect_stderr=terminal is None,
    )
    return bar, bar.add_task("training", total=steps, loss="-", rate="-")
