"""The result of comparing a plan with one process: the largest deviations, and whether they pass."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from pdsl.render.terminal import PLAIN, Terminal, plural, table, wrapped

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts
    from pdsl.runtime.verify import Deviation, VerifyReport

__all__ = ["render_verify"]

_MOST_ROWS = 12


def render_verify(report: VerifyReport, terminal: Terminal = PLAIN, *, facts: ModelFacts | None = None) -> str:
    """Losses of both sides, the largest deviation of everything that was compared, the verdict. Ends with a newline.

    If not all is equal, `facts` tell what in the model may be why.
    """
    lines = [terminal.heading(f"{plural(report.steps, 'step')} against one process, tolerance {report.tolerance:g}")]
    rows = [("step", "loss", "one process")]
    rows += [(str(i), f"{a:.7g}", f"{b:.7g}") for i, (a, b) in enumerate(zip(report.losses, report.expected_losses, strict=True))]
    lines += table(rows, align=">>>", width=terminal.width)
    worst = _worst_of_each(report)
    lines += [
        "",
        terminal.heading("largest deviations"),
        *table([_HEAD, *(_row(d, report, terminal) for d in worst[:_MOST_ROWS])], align="<>>>", width=terminal.width),
    ]
    if len(worst) > _MOST_ROWS:
        lines.append(f"  .. {len(worst) - _MOST_ROWS} more, all smaller")
    lines += ["", _verdict(report, terminal)]
    if facts is not None and not report.ok:
        lines += [line for reason in facts.warnings for line in wrapped(reason, terminal.width)]
    return "\n".join([*lines, ""])


_HEAD = ("what", "step", "relative", "norm", "")


def _worst_of_each(report: VerifyReport) -> list[Deviation]:
    """The largest deviation of each tensor, over all steps; the largest first, as the report has them."""
    found: dict[str, Deviation] = {}
    for d in report.deviations:
        found.setdefault(d.what, d)
    return list(found.values())


def _row(d: Deviation, report: VerifyReport, terminal: Terminal) -> tuple[str, ...]:
    passes = d.relative <= report.tolerance
    relative = f"{d.relative:.2e}" if isfinite(d.relative) else str(d.relative)
    return (d.what, str(d.step), relative, f"{d.norm:.3g}", "" if passes else terminal.paint("too far", "red"))


def _verdict(report: VerifyReport, terminal: Terminal) -> str:
    failed = len({d.what for d in report.deviations if not d.relative <= report.tolerance})
    if not failed:
        return (
            terminal.paint("equal", "green")
            + f": {len(report.deviations)} comparisons, the largest deviation is {report.worst.relative:.2e}"
        )
    return (
        terminal.paint("not equal", "red")
        + f": {plural(failed, 'tensor')} beyond {report.tolerance:g}; the largest deviation is {report.worst.what}"
    )
