"""A simulation under failures on one screen, as JSON, and as an SVG timeline. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import asdict

from pdsl.lowering.goodput import CAUSES, Goodput
from pdsl.render.terminal import PLAIN, Terminal, plural, table, wrapped
from pdsl.simulation import Simulation

__all__ = ["SIMULATION_FORMAT", "goodput_svg", "render_simulation", "render_simulation_json"]

SIMULATION_FORMAT = "1.0"
"""Version of the JSON form: the minor one goes up when keys are added, the major one when any changes or goes."""

_SHORT = {"redundant": "twice", "recovery": "pause", "lost step": "lost", "fallback": "undone", "checkpoint": "ckpt"}


def render_simulation(found: Simulation, terminal: Terminal = PLAIN) -> str:
    """The screen of a simulation; shares are of the time of the run. Ends with a newline."""
    best = max(r.rate for r in found.results)
    rows = [("strategy", "samples/s", "of ideal", *(_SHORT.get(c, c) for c in CAUSES), "restores")]
    for r in found.results:
        rate = f"{r.rate:.4g}"
        shares = [_share(r.seconds_of(c) / r.seconds if r.seconds else 0.0) for c in CAUSES]
        rows.append((r.strategy, terminal.paint(rate, "green") if r.rate == best else rate, _share(r.share), *shares, str(r.restores)))
    sections = (
        _head(found, terminal),
        [
            terminal.heading("goodput, and where the time goes (%)"),
            *table(rows, align="<" + ">" * 11, width=terminal.width),
            *_legend(found),
        ],
        [terminal.heading("strategies"), *(line for name, told in found.told for line in wrapped(told, terminal.width, f"  {name:11}"))],
        [terminal.heading("assumed"), *(line for text in found.assumed for line in wrapped(text, terminal.width))] if found.assumed else [],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(found: Simulation, terminal: Terminal) -> list[str]:
    trace, strain = found.trace, found.exposure
    beyond = f"; {strain.beyond} of them lose more than {strain.lose}, {strain.most} at most" if strain.beyond else ""
    used = f"; of {trace.peak} nodes the microbatches keep {found.used} busy" if found.used < trace.peak else ""
    outside = f"{_share(strain.outside)} % of the time" if strain.outside else "never"
    rows = (
        (
            "  trace   ",
            (
                f"{_duration(trace.end / 1000)}, {plural(trace.peak, 'node')} at most, {plural(trace.losses, 'loss', 'losses')} "
                f"at {plural(strain.instants, 'instant')}{beyond}"
            ),
        ),
        ("  step    ", f"{found.step_seconds:.3g} s on {plural(found.nodes, 'node')}{used}"),
        (
            "  budget  ",
            (
                f"lose {strain.lose}, pipelines of {strain.least} or more; "
                f"fewer than {(strain.lose + 1) * strain.least} nodes, so outside the budget: {outside}"
            ),
        ),
    )
    lines = [line for lead, text in rows for line in wrapped(text, terminal.width, lead)]
    return [terminal.heading(f"{found.name} under {trace.name}"), *lines]


def _legend(found: Simulation) -> list[str]:
    """What the columns mean that are not zero throughout."""
    used = [c for c in CAUSES if any(r.seconds_of(c) for r in found.results)]
    return wrapped("; ".join(f"{_SHORT.get(c, c)}: {CAUSES[c]}" for c in used if c != "useful"), 98, "  ") if len(used) > 1 else []


def _share(share: float) -> str:
    return f"{share * 100:.1f}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# --- JSON ---------------------------------------------------------------------------------------------------------------------------------


def render_simulation_json(found: Simulation) -> str:
    """Times in seconds, rates in samples a second, shares as fractions of one, with nine significant digits. Ends with a newline."""
    trace = found.trace
    made = {
        "format": SIMULATION_FORMAT,
        "name": found.name,
        "trace": {
            "name": trace.name,
            "seconds": trace.end / 1000,
            "peak_nodes": trace.peak,
            "losses": trace.losses,
            "loss_instants": found.exposure.instants,
        },
        "budget": asdict(found.exposure),
        "nodes": found.nodes,
        "nodes_used_at_peak": found.used,
        "step_seconds": _number(found.step_seconds),
        "strategies": [_result(r, dict(found.told)[r.strategy]) for r in found.results],
        "assumed": list(found.assumed),
    }
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def _result(r: Goodput, told: str) -> dict[str, object]:
    return {
        "name": r.strategy,
        "told": told,
        "samples_per_second": _number(r.rate),
        "share_of_ideal": _number(r.share),
        "samples": _number(r.samples),
        "steps": r.committed,
        "seconds": _number(r.seconds),
        "seconds_by_cause": {cause.replace(" ", "_"): _number(seconds) for cause, seconds in r.causes},
        "restores": r.restores,
        "checkpoints": r.checkpoints,
        "curve": [[_number(a), _number(rate)] for a, _, rate in r.rates],
    }


def _number(value: float) -> float:
    return float(f"{value:.9g}")


# --- SVG ------------------------------------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT = 960, 72, 16
_NODES_TOP, _NODES_HEIGHT, _RATE_HEIGHT = 56, 110, 260
_MOST_MARKS = 400
# The colours of Okabe and Ito, which are told apart by people who see none of them well; dashes tell them apart in print.
_LINES = (
    ("#0072b2", ""),
    ("#56b4e9", "6 3"),
    ("#009e73", "2 2"),
    ("#e69f00", "8 3 2 3"),
    ("#cc79a7", "10 4"),
    ("#d55e00", "4 2"),
    ("#808080", "1 3"),
)
_STYLE = """\
  <style>
    svg { background: #ffffff; font: 11px ui-monospace, monospace; }
    text { fill: #1a1a1a; }
    .head { font-size: 13px; }
    .axis { stroke: #808080; stroke-width: 1; }
    .nodes { fill: none; stroke: #1a1a1a; stroke-width: 1.5; }
    .loss { stroke: #d55e00; stroke-width: 1; }
    .rate { fill: none; stroke-width: 1.8; }
    @media (prefers-color-scheme: dark) {
      svg { background: #16181d; }
      text { fill: #e6e6e6; }
      .nodes { stroke: #e6e6e6; }
    }
  </style>"""


def goodput_svg(found: Simulation) -> str:
    """Nodes alive with the losses marked, and below the samples a second of each strategy, over the time of the trace. Same input, same text."""
    top = _NODES_TOP + _NODES_HEIGHT + 64
    height = top + _RATE_HEIGHT + 40 + 18 * len(found.results)
    head = f"{found.name} under {found.trace.name}"
    told = "; ".join(f"{r.strategy} {r.rate:.4g} samples/s, {_share(r.share)} % of ideal" for r in found.results)
    about = f"Nodes alive and goodput over {_duration(found.trace.end / 1000)} with {plural(found.trace.losses, 'loss', 'losses')}. {told}."
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img"'
            ' aria-labelledby="title desc">'
        ),
        f'  <title id="title">{_escape(head)}</title>',
        f'  <desc id="desc">{_escape(about)}</desc>',
        _STYLE,
        f'  <text class="head" x="8" y="22">{_escape(head)}</text>',
        *_nodes(found),
        *_rates(found, top),
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _nodes(found: Simulation) -> list[str]:
    trace = found.trace
    most = max(1, trace.peak)
    bottom = _NODES_TOP + _NODES_HEIGHT

    def y(count: int) -> float:
        return bottom - _NODES_HEIGHT * count / most

    moments = list(trace.alive())
    first = moments[0]
    path = [f"M{_px(_LEFT)} {_px(y(0))}", f"H{_px(_x(first[0], trace.end))}", f"V{_px(y(first[1]))}"]
    for ms, count in moments[1:]:
        path += [f"H{_px(_x(ms, trace.end))}", f"V{_px(y(count))}"]
    path.append(f"H{_px(_x(trace.end, trace.end))}")
    lines = [
        f'  <text x="8" y="{_NODES_TOP - 12}">nodes alive</text>',
        f'  <text x="{_LEFT - 6}" y="{_NODES_TOP + 8}" text-anchor="end">{most}</text>',
        f'  <text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        *_axis(bottom),
        f'  <path class="nodes" d="{" ".join(path)}"><title>nodes alive, at most {most}</title></path>',
    ]
    losses = [i for i in trace.instants if i.removed]
    each = -(-len(losses) // _MOST_MARKS)  # of very many losses every so-manieth is marked
    for at in range(0, len(losses), max(1, each)):
        instant, x = losses[at], _px(_x(losses[at].ms, trace.end))
        about = f"{plural(len(instant.removed), 'node')} lost after {_duration(instant.seconds)}"
        lines.append(f'  <line class="loss" x1="{x}" y1="{bottom + 2}" x2="{x}" y2="{bottom + 12}"><title>{about}</title></line>')
    return lines


def _rates(found: Simulation, top: int) -> list[str]:
    bottom = top + _RATE_HEIGHT
    most = max((rate for r in found.results for _, _, rate in r.rates), default=0.0) or 1.0
    lines = [
        f'  <text x="8" y="{top - 12}">samples a second</text>',
        f'  <text x="{_LEFT - 6}" y="{top + 8}" text-anchor="end">{most:.3g}</text>',
        f'  <text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'  <text x="{_LEFT}" y="{bottom + 16}">0</text>',
        f'  <text x="{_WIDTH - _RIGHT}" y="{bottom + 16}" text-anchor="end">{_duration(found.trace.end / 1000)}</text>',
        *_axis(bottom),
    ]
    for index, r in enumerate(found.results):
        colour, dashes = _LINES[index % len(_LINES)]
        stroke = f'stroke="{colour}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
        points = _points(r.rates, found.trace.end, bottom, most)
        about = f"{r.strategy}: {r.rate:.4g} samples/s, {_share(r.share)} % of ideal"
        y = bottom + 40 + 18 * index
        lines += [
            f'  <polyline class="rate" {stroke} points="{points}"><title>{_escape(about)}</title></polyline>',
            f'  <line class="rate" {stroke} x1="{_LEFT}" y1="{y - 4}" x2="{_LEFT + 36}" y2="{y - 4}"/>',
            f'  <text x="{_LEFT + 44}" y="{y}">{_escape(about)}</text>',
        ]
    return lines


def _points(rates: Sequence[tuple[float, float, float]], end: int, bottom: int, most: float) -> str:
    """The middle of each interval; rates over a few steps each, so a line through the middles shows what steps would."""
    return " ".join(f"{_px(_x(500 * (a + b), end))},{_px(bottom - _RATE_HEIGHT * rate / most)}" for a, b, rate in rates)


def _axis(bottom: int) -> list[str]:
    return [f'  <line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}"/>']


def _x(ms: float, end: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ms / max(1, end)


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
