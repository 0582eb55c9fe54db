"""Rules on the mesh and the cluster: PDL2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pdsl.grammar.diagnostics import Diagnostic, Label, Severity
from pdsl.grammar.source import Span
from pdsl.lowering.mesh import PIPELINE, SHARD, AxisUse, axis_uses
from pdsl.lowering.rules.base import Context, Rule, listed
from pdsl.lowering.spec import AxisSpec, OriginKind, Rest, SizeRange

__all__ = ["AxisOfOne", "AxisRoles", "ProductOfAxes", "WorldUnknown", "divisors", "factors"]

_WORD = {"pipeline": "pipeline axis", "shard": "shard axis", "tensor": "tensor axis", "replica": "replica axis"}


def divisors(number: int, most: int = 4096) -> tuple[int, ...]:
    """The divisors of a number up to `most`, ascending."""
    return tuple(n for n in range(1, min(number, most) + 1) if number % n == 0)


def factors(number: int) -> str:
    """The prime factors in words: `2^8 x 3 x 167`; a rest without a small factor is left as it is."""
    parts, rest, prime = [], number, 2
    while prime * prime <= rest and prime < 100_000:
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        if power:
            parts.append(f"{prime}^{power}" if power > 1 else str(prime))
        prime += 1
    if rest > 1 or not parts:
        parts.append(str(rest))
    return " x ".join(parts)


_MOST_RANKS = 1 << 17  # more than any machine has; a plan lists every one


class ProductOfAxes(Rule):
    """What it does
        Compares the product of the axes with the number of ranks, which the cluster block or `--world` says.

    Why it is bad
        Every rank stands at one place of the mesh. With another product some places stay empty or some ranks have none.

    Example (bad)
        cluster { nodes = 1; ranks_per_node = 2 }
        mesh { axis rep = 4; axis sh = 2 }

    Better
        mesh { axis rep = rest; axis sh = 2 }

    Fix
        Choose sizes whose product is the number of ranks; the message names those that would do. One axis may be `rest`.
    """

    code = "PDL201"
    name = "product-of-axes"
    needs = frozenset({"mesh", "cluster"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        axes = context.spec.mesh.axes
        rests = [a for a in axes if isinstance(a.size, Rest)]
        if len(rests) > 1:
            labels = (Label(rests[0].span, "first rest"),) if rests[0].span is not None else ()
            message = f"only one axis can take the rest, not both {rests[0].name} and {rests[1].name}"
            yield self.report(message, rests[1].span, "second rest", labels=labels, help=(f"give {rests[1].name} a size",))
        elif context.world is not None and context.mesh is None:
            yield self._product(context, axes, context.world, bool(rests))
        elif context.mesh is not None and (ranks := context.mesh.world_size) > _MOST_RANKS:
            largest = max(axes, key=_low)
            yield self.report(f"the mesh has {ranks} ranks: at most {_MOST_RANKS} can be planned", largest.span, _size(largest))

    def _product(self, context: Context, axes: tuple[AxisSpec, ...], world: int, rest: bool) -> Diagnostic:
        sized = [a for a in axes if not isinstance(a.size, Rest)]
        lows = [_low(a) for a in sized]
        product = math.prod(lows)
        shown = " x ".join(_size(a) for a in sized)
        needed = f"{shown} = {product}" if len(sized) > 1 and all(isinstance(a.size, int) for a in sized) else shown or "1"
        word = "a multiple of " if rest else ""
        noun = "rank" if product == 1 and not rest else "ranks"
        labels: list[Label] = []
        so_far = 1
        for index, axis in enumerate(sized):
            so_far *= lows[index]
            text = _size(axis) if index == 0 else f"x {_size(axis)}"
            total = f" = {so_far}" if index == len(sized) - 1 and index > 0 and isinstance(axis.size, int) else ""
            labels += context.label(f"mesh.{axis.name}", text + total)
        caption = labels[-1].text if labels else ""
        span = labels[-1].span if labels else context.place("mesh")
        return self.report(
            f"the mesh needs {word}{needed} {noun}, the job has {world}",
            span,
            caption,
            labels=(*labels[:-1], *_cluster(context)),
            help=_instead(sized, lows, world, rest),
        )


def _low(axis: AxisSpec) -> int:
    return axis.size.low if isinstance(axis.size, SizeRange) else axis.size if isinstance(axis.size, int) else 1


def _size(axis: AxisSpec) -> str:
    return f"({axis.size.low} to {axis.size.high})" if isinstance(axis.size, SizeRange) else str(axis.size)


def _cluster(context: Context) -> tuple[Label, ...]:
    nodes, per_node = context.spec.cluster.nodes, context.spec.cluster.ranks_per_node
    if nodes is None or per_node is None or nodes * per_node != context.world:
        return ()
    first = context.label("cluster.nodes", f"{nodes} nodes" if nodes > 1 else "1 node")
    return (*first, *context.label("cluster.ranks_per_node", f"x {per_node} = {context.world} ranks"))


def _instead(sized: list[AxisSpec], lows: list[int], world: int, rest: bool) -> tuple[str, ...]:
    if not sized:
        return (f"give the mesh an axis: mesh {{ axis dp = {world} }}",)
    product = math.prod(lows)
    options: list[tuple[str, str]] = []
    for axis, size in zip(sized, lows, strict=True):
        others = product // size
        if world % others:
            continue
        fits = divisors(world // others) if rest else (world // others,)
        options.append((axis.name, f"{axis.name} = {listed(fits[:8], 'or')}"))
    if not options:
        return (f"no other size of a single axis fits; {world} = {factors(world)}",)
    if rest:
        return (f"{'; '.join(text for _, text in options)} would do",)
    return (f"{listed([text for _, text in options], 'or')} gives {world}; or write `axis {options[0][0]} = rest`",)


class AxisRoles(Rule):
    """What it does
        Checks that every axis has one role, and that what asks for a role has an axis of more than one rank to act on.

    Why it is bad
        An axis that shards parameters splits the batch, a tensor axis must not: one axis cannot do both. And `fsdp` over a single rank
        shards nothing, while the rest of the mesh takes all ranks: the memory it should save is not saved.

    Example (bad)
        mesh { axis sh = 1; axis tp = 2 }
        shard { "**" => fsdp(sh) }

    Better
        mesh { axis sh = 2; axis tp = 1 }
        shard { "**" => fsdp(sh) }

    Fix
        Use one axis for each role. Give the axis in `fsdp(...)` more than one rank, or write `replicate()`.
    """

    code = "PDL202"
    name = "axis-roles"
    needs = frozenset({"mesh", "shard", "pipeline"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        uses = axis_uses(context.spec)
        yield from self._clashes(uses)
        yield from self._idle(context, uses)

    def _clashes(self, uses: tuple[AxisUse, ...]) -> Iterator[Diagnostic]:
        first: dict[str, AxisUse] = {}
        told: set[str] = set()
        for use in uses:
            before = first.setdefault(use.axis, use)
            if before.role == use.role or use.axis in told:
                continue
            told.add(use.axis)
            labels = (Label(before.span, f"as {_WORD[before.role]}"),) if before.span is not None else ()
            yield self.report(
                f"axis {use.axis} has two roles: {_WORD[before.role]} and {_WORD[use.role]}",
                use.span,
                f"as {_WORD[use.role]}",
                labels=labels,
                help=(_apart(before.role, use.role),),
            )

    def _idle(self, context: Context, uses: tuple[AxisUse, ...]) -> Iterator[Diagnostic]:
        mesh = context.mesh
        shards = [u for u in uses if u.role == SHARD]
        if mesh is None or not shards or mesh.shard_size > 1 or mesh.world_size == 1:
            return
        names = tuple(dict.fromkeys(u.axis for u in shards))
        if any(context.origin(f"mesh.{n}").kind is not OriginKind.FILE for n in names):
            return  # somebody shrank the axis on purpose
        sizes = listed(f"{n} = 1" for n in names)
        labels = tuple(label for n in names for label in context.label(f"mesh.{n}", "1 rank"))
        others = [a for a in mesh.axes if a.size > 1]
        choices = [f"{a.name} = 1 leaves {a.size} ranks for {names[0]}" for a in others]
        yield self.report(
            f"fsdp({', '.join(names)}) has no axis of size > 1 to shard over: {sizes}",
            shards[0].span,
            "nothing to shard over",
            labels=labels,
            help=(f"{'; '.join(choices)}; or write replicate() in place of fsdp({', '.join(names)})",),
        )


def _apart(one: str, other: str) -> str:
    if PIPELINE in (one, other):
        return "the ranks of a pipeline axis hold different layers, so a layout cannot name it"
    return "fsdp axes split the batch, tensor axes see the same samples; use two axes"


class AxisOfOne(Rule):
    """What it does
        Notes an axis of size 1.

    Why it is bad
        It is not: such an axis is legal and costs nothing. No group of ranks is made for it, and it is as if it were not written.

    Example (bad)
        mesh { axis rep = 1; axis sh = 2 }

    Better
        mesh { axis sh = 2 }

    Fix
        None is needed. Delete the axis if no profile makes it larger.
    """

    code = "PDL203"
    name = "axis-of-one"
    severity = Severity.NOTE
    needs = frozenset({"mesh"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.mesh is not None
        for axis in context.mesh.axes:
            if axis.size == 1 and context.origin(f"mesh.{axis.name}").kind is OriginKind.FILE:
                span = context.place(f"mesh.{axis.name}")
                yield self.report(f"axis {axis.name} has size 1: it is lowered away", span, _resolved(context, axis.name))


def _resolved(context: Context, name: str) -> str:
    axis = context.axis(name)
    return "1" if axis is None or isinstance(axis.size, int) else f"1 of {context.world} ranks"


class WorldUnknown(Rule):
    """What it does
        Notes that an axis takes the rest of the ranks while nobody said how many ranks there are.

    Why it is bad
        Rules on the mesh and the batch cannot be checked until the number is known.

    Example (bad)
        mesh { axis dp = rest; axis pp = 2 }

    Better
        cluster { nodes = 1; ranks_per_node = 4 }
        mesh { axis dp = rest; axis pp = 2 }

    Fix
        Say the number of ranks in the cluster block, or check with `--world N`.
    """

    code = "PDL204"
    name = "world-unknown"
    severity = Severity.NOTE
    needs = frozenset({"mesh", "cluster"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        rests = [a for a in context.spec.mesh.axes if isinstance(a.size, Rest)]
        if len(rests) != 1 or context.world is not None:
            return
        span: Span | None = rests[0].span
        yield self.report(
            f"the size of axis {rests[0].name} stays open, since the number of ranks is not known; rules on mesh and batch were passed over",
            span,
            "takes the rest",
            help=("write cluster { nodes = N; ranks_per_node = M }, or check with --world N",),
        )
