"""The proof of a fault budget in a few lines: what is promised, why it holds, what each loss takes along, when which deadline fires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, evolve

from pdsl.lowering.facts import LayerFacts
from pdsl.lowering.plan import Plan
from pdsl.lowering.proof import Blast, Proof
from pdsl.render.terminal import Terminal, plural, ranges, table, wrapped

__all__ = ["proof_json", "render_proof"]

_MOST_ROWS = 16


def render_proof(plan: Plan, proof: Proof, terminal: Terminal) -> list[str]:
    """The lines of a section. A plan that may change its size and loses nothing has only the first lines."""
    if not proof.lose:
        sizes = f"{proof.outline.least}" if proof.outline.count == 1 else f"{proof.outline.least} to {proof.outline.largest}"
        lost = "a loss stops the run at the last checkpoint"
        return [
            terminal.heading("fault budget") + f": none; {lost}",
            f"  pipelines may have {sizes} nodes, so that nodes may join or leave",
        ]
    which = f"{_any(proof)} may be lost at once" if proof.holds else f"lose = {proof.lose} does not hold"
    lines = [terminal.heading("fault budget") + f": {which}"]
    rows = [(claim.what, claim.why) for claim in proof.claims]
    rows += [(f"NOT {gap.kind}", f"{gap.why}; lose {ranges(gap.nodes)} to see it") for gap in proof.gaps]
    if proof.holds:
        rows += [("afterwards", _afterwards(proof)), ("silence", _silent(proof))]
    width = max(len(what) for what, _ in rows)
    for what, why in rows:
        lines += wrapped(why, terminal.width, f"  {what:<{width}}  ")
    return [*lines, *_blasts(plan.facts.layers, proof.blasts, terminal), *_deadlines(proof, terminal)]


def _any(proof: Proof) -> str:
    if proof.domain == 1:
        return "any node" if proof.lose == 1 else f"any {proof.lose} nodes"
    return f"any domain of {proof.domain} nodes" if proof.lose == 1 else f"any {proof.lose} domains of {proof.domain} nodes"


def _afterwards(proof: Proof) -> str:
    outline, ends = proof.outline, proof.losses_until_broken
    if proof.domain > 1:
        return "proved again for each new plan, whose copies may lie elsewhere"
    left = evolve(outline, nodes=outline.nodes - ends)
    if left.nodes < outline.least:
        then = "then no pipeline can stand"
    elif left.survives:
        then = f"with {plural(left.nodes, 'node')} left some may idle after the next loss"
    else:
        more = "one more loss" if outline.lost == 1 else f"{outline.lost} more at once"
        then = f"with {plural(left.nodes, 'node')} left {more} may take the last copy"
    if ends > outline.lost:
        return f"holds again with a new plan, until the {_nth(ends)} node is lost: {then}"
    return f"spent when the {_nth(ends)} node is lost: {then}"


def _nth(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{suffix}"


def _silent(proof: Proof) -> str:
    proven = "nodes whose processes end or whose connections close are proven dead"
    if 2 * proof.outline.lost < proof.nodes:
        return f"{proven}; {proof.silent} of {proof.nodes} may also fall silent, as the others are a majority"
    return f"{proven}; of silent ones only {proof.silent} of {proof.nodes}, for the others must be a majority"


def _blasts(layers: Sequence[LayerFacts], blasts: Sequence[Blast], terminal: Terminal) -> list[str]:
    """One row for nodes whose loss costs the same."""
    alike: dict[tuple[Any, ...], list[Blast]] = {}
    for blast in blasts:
        alike.setdefault((blast.layers, blast.microbatches, blast.copies_left), []).append(blast)
    rows = [("lose", "copies left", "run again", "breaks", "layers")]
    for (runs, microbatches, copies), same in list(alike.items())[:_MOST_ROWS]:
        names = "; ".join(_run(layers, start, stop) for start, stop in runs)
        pipelines = sorted({b.pipeline for b in same})
        word = "pipeline" if len(pipelines) == 1 else "one of pipelines"
        rows.append(
            (
                f"{'node' if len(same) == 1 else 'one of nodes'} {ranges((b.node for b in same), 3)}",
                str(copies),
                plural(microbatches, "microbatch", "microbatches"),
                f"{word} {ranges(pipelines, 3)}",
                names,
            )
        )
    more = [f"  .. {plural(len(alike) - _MOST_ROWS, 'row')} more"] if len(alike) > _MOST_ROWS else []
    return [*table(rows, align="<><<<", width=terminal.width, elastic=4), *more]


def _run(layers: Sequence[LayerFacts], start: int, stop: int) -> str:
    names = [layer.name for layer in layers[start:stop]]
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _deadlines(proof: Proof, terminal: Terminal) -> list[str]:
    told = ", ".join(f"{d.name} {_seconds(d.seconds)}" for d in proof.deadlines)
    return wrapped(f"deadlines: {told}", terminal.width, "  ")


def _seconds(value: float) -> str:
    return "at once" if value == 0 else f"{value:g} s"


def proof_json(proof: Proof) -> dict[str, object]:
    """The proof for programs. Losses count nodes, deadlines seconds, layers are half-open ranges."""
    return {
        "holds": proof.holds,
        "lose": proof.lose,
        "domain": proof.domain,
        "renewed": proof.renewed,
        "losses_until_broken": proof.losses_until_broken,
        "losses_until_stopped": proof.outline.losses_until_stopped,
        "silent": proof.silent,
        "sizes": [proof.outline.least, proof.outline.largest],
        "claims": [asdict(c) for c in proof.claims],
        "gaps": [asdict(g) for g in proof.gaps],
        "blasts": [asdict(b) for b in proof.blasts],
        "deadlines": [asdict(d) for d in proof.deadlines],
    }
