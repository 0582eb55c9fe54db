"""How a schedule was found, in a few lines: beside which named ones, how, and how far it is from what is possible at all."""

from __future__ import annotations

from fractions import Fraction

from pdsl.lowering.search_report import SearchReport, Tried
from pdsl.render.terminal import Terminal, binary, count, percent, wrapped

__all__ = ["render_search"]

_MOST_NAMED = 6


def render_search(report: SearchReport, terminal: Terminal) -> list[str]:
    """The best named schedule, the chosen one and the lower bound; the other named ones, by how much slower they are; and those that do not fit."""
    parts = []
    best = report.best_named
    if best is not None and best.makespan is not None:
        parts.append(f"{_where(best)} {count(int(best.makespan))}")
    parts.append(f"chosen {count(int(report.makespan))} FLOPs for a sample ({report.way}; stages in a {report.placement})")
    gap = report.makespan / report.bound - 1 if report.bound else Fraction(0)
    parts.append(f"lower bound {count(int(report.bound))}" + (": optimal" if report.optimal else f", {percent(gap)} below"))
    lines = wrapped(" | ".join(parts), terminal.width, "  searched: ")
    others = [t for t in report.tried if t.makespan is not None and t != best]
    if others:
        told = ", ".join(
            f"{_where(t)} +{percent(t.makespan / report.makespan - 1)}" for t in others[:_MOST_NAMED] if t.makespan is not None
        )
        lines += wrapped(
            told + (f", {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""), terminal.width, "  slower:   "
        )
    left_out = [t for t in report.tried if t.makespan is None]
    if left_out:
        told = "; ".join(f"{_where(t)}: {t.reason}" for t in left_out[:_MOST_NAMED])
        more = f"; {len(left_out) - _MOST_NAMED} more" if len(left_out) > _MOST_NAMED else ""
        lines += wrapped(told + more, terminal.width, "  left out: ")
    room = f"; a transfer takes {count(int(report.hop))} FLOPs" if report.hop else "; transfers are free, as the file gives no hop"
    return [*lines, *wrapped(f"activations take up to {binary(report.peak)} on a position{room}", terminal.width, "            ")]


def _where(tried: Tried) -> str:
    """The name, with the placement where that does not follow from it."""
    return f"{tried.name} ({tried.placement})" if tried.placement.startswith("stages on") else tried.name
