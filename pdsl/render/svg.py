"""The picture of a schedule as SVG, written by hand: one file, no script, no font of its own, light and dark.

Time runs to the right, one row per position. The colours are told apart by people who see none of them well: blue against orange, with a darker
edge for the second stage of a position. Every cell has a `<title>`, so that a browser shows what it is under the pointer.
"""

from __future__ import annotations

from fractions import Fraction

from pdsl.lowering.plan import Plan
from pdsl.lowering.programs import template_timeline
from pdsl.lowering.schedule import Number, Op, Operation, Schedule
from pdsl.lowering.simulate import Timeline
from pdsl.render.terminal import percent, ranges

__all__ = ["schedule_svg"]

_WIDTH, _ROW, _GAP, _LEFT, _HEAD = 960, 26, 4, 64, 40
_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "input gradient", Op.BACKWARD_WEIGHT: "weight gradient"}
_STYLE = """\
  <style>
    svg { background: #ffffff; font: 11px ui-monospace, monospace; }
    text { fill: #1a1a1a; }
    .head { font-size: 13px; }
    .idle { fill: #eeeeee; }
    .F { fill: #56b4e9; } .B { fill: #e69f00; } .I { fill: #f0c750; } .W { fill: #cc79a7; }
    .odd { stroke: #1a1a1a; stroke-width: 1; }
    .name { fill: #1a1a1a; pointer-events: none; text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      svg { background: #16181d; }
      text { fill: #e6e6e6; }
      .name { fill: #101010; }
      .idle { fill: #2a2d34; }
      .odd { stroke: #e6e6e6; }
    }
  </style>"""


def schedule_svg(plan: Plan) -> str:
    """The schedules of all templates of a plan, one below the other, as the text of an SVG file. Same plan, same text."""
    body: list[str] = []
    top = 0
    for index, template in enumerate(plan.templates):
        pipelines = [i for i, p in enumerate(plan.pipelines) if p.template == index]
        timeline = template_timeline(plan, template)
        share = percent(Fraction(timeline.bubble))
        schedule = template.schedule
        title = f"{schedule.name}, {schedule.positions} positions, {schedule.microbatches} microbatches, bubble {share}"
        if len(plan.pipelines) > 1:
            title = f"pipeline {ranges(pipelines)}: {title}"
        body.append(f'  <g transform="translate(0,{top})">')
        body.append(f'    <text class="head" x="8" y="22">{_escape(title)}</text>')
        for position in range(schedule.positions):
            body += _row(schedule, timeline, position, _HEAD + position * (_ROW + _GAP))
        body.append("  </g>")
        top += _HEAD + schedule.positions * (_ROW + _GAP) + 8
    heads = f"Schedule of {plan.name}, plan {plan.hash[:12]}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" role="img">',
            f"  <title>{_escape(heads)}</title>",
            _STYLE,
            *body,
            "</svg>",
            "",
        ]
    )


def _row(schedule: Schedule, timeline: Timeline, position: int, y: int) -> list[str]:
    full = _WIDTH - _LEFT - 12
    scale = Fraction(full) / Fraction(timeline.makespan)
    lines = [
        f'    <text x="8" y="{y + 17}">pos {position}</text>',
        f'    <rect class="idle" x="{_LEFT}" y="{y}" width="{full}" height="{_ROW}"/>',
    ]
    mine = schedule.stages_at(position)
    for o, start, end in zip(schedule.rows[position], timeline.start[position], timeline.end[position], strict=True):
        x, width = _pixels(start, scale), _pixels(end, scale) - _pixels(start, scale)
        odd = " odd" if mine.index(o.stage) % 2 else ""
        told = _told(o, start, end, timeline.makespan)
        lines.append(
            f'    <rect class="{o.op.value}{odd}" x="{_number(_LEFT + x)}" y="{y}" width="{_number(max(Fraction(1, 2), width - 1))}" '
            f'height="{_ROW}" rx="2"><title>{told}</title></rect>'
        )
        name = str(o) if len(mine) > 1 else f"{o.op.value}{o.microbatch}"
        if width >= 7 * len(name) + 2:
            lines.append(f'    <text class="name" x="{_number(_LEFT + x + width / 2)}" y="{y + 17}">{name}</text>')
    return lines


def _told(o: Operation, start: Number, end: Number, makespan: Number) -> str:
    begin, stop = (f"{float(Fraction(t) / Fraction(makespan)) * 100:.1f}" for t in (start, end))
    return f"{_NAMES[o.op]}, stage {o.stage}, microbatch {o.microbatch}: {begin} % to {stop} % of the step"


def _pixels(time: Number, scale: Fraction) -> Fraction:
    return Fraction(time) * scale


def _number(value: Fraction | int) -> str:
    text = f"{float(value):.2f}".rstrip("0").rstrip(".")
    return text or "0"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
