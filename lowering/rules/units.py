"""Rules on when sharded parameters are gathered and reduced: PDL336 and on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.rules.base import Context, Rule, plural
from pdsl.lowering.spec import OriginKind

__all__ = ["GroupTooLarge", "ShardingKeyWithoutEffect"]

_KEYS = ("reshard", "group", "prefetch", "sync")


class ShardingKeyWithoutEffect(Rule):
    """What it does
        Warns if a key of the `memory` block says how sharded parameters are gathered or reduced where it changes nothing: no parameter is sharded,
        none is gathered ahead because units stay whole for the step, or the step has a single microbatch.

    Why it is bad
        Whoever wrote the key counts on the memory or the traffic that it saves, and saves none.

    Example (bad)
        mesh { axis dp = 4 }
        memory { reshard = true }      # dp replicates

    Better
        mesh { axis fsdp = 4 }
        shard { "**" => fsdp(fsdp) }
        memory { reshard = true }

    Fix
        Delete the key, or shard parameters with `fsdp(...)`.
    """

    code = "PDL336"
    name = "sharding-key-without-effect"
    severity = Severity.WARNING
    needs = frozenset({"memory", "mesh", "shard"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for key in _KEYS:
            path = f"memory.{key}"
            if context.origin(path).kind is OriginKind.DEFAULT:
                continue
            why = self._why(context, key)
            if why:
                value = getattr(context.spec.memory, key)
                yield self.report(f"memory.{key} = {value} changes nothing: {why}", context.place(path, "memory"), "no effect")

    def _why(self, context: Context, key: str) -> str:
        assert context.mesh is not None
        if not any(context.sharded(rule) for rule in context.spec.shard):
            return "no rule of the shard block uses fsdp(...)"
        if context.mesh.shard_size == 1:
            return "the axes in fsdp(...) have 1 rank"
        if key == "prefetch" and not context.spec.reshards:
            return "units stay whole for the step, and are gathered at its beginning"
        if key == "sync" and context.spec.memory.sync == "every" and context.microbatches == 1:
            return "a step has 1 microbatch"
        return ""


class GroupTooLarge(Rule):
    """What it does
        Warns if `memory { group = ... }` puts more than half of all sharded parameters into one unit that is gathered again for its backward.

    Why it is bad
        A rank needs its share of all parameters and, while it computes a unit, all of that one. With one large unit little memory is saved, and its
        gathering overlaps with nothing.

    Example (bad)
        model "pdsl.models:gpt" { layers = 4 }
        shard { "**" => fsdp(fsdp) }
        memory { group = 4 }

    Better
        model "pdsl.models:gpt" { layers = 4 }
        shard { "**" => fsdp(fsdp) }
        memory { group = 2 }

    Fix
        Group fewer layers, or say `reshard = false` if memory is no concern.
    """

    code = "PDL337"
    name = "group-too-large"
    severity = Severity.WARNING
    needs = frozenset({"memory", "model", "mesh", "shard"})
    needs_facts = True
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.mesh is not None
        group = context.spec.memory.group
        if group == 1 or context.mesh.shard_size == 1 or context.spec.pipeline is not None or not context.spec.reshards:
            return
        sizes = dict(self._blocks(context))
        total = sum(p.bytes for p in context.facts.parameters if context.is_sharded(p.name)) if context.facts is not None else 0
        blocks = list(sizes)
        for first in range(0, len(blocks), group):
            unit = blocks[first : first + group]
            held = sum(sizes[b] for b in unit)
            if len(unit) > 1 and 2 * held > total:
                yield self.report(
                    f"group = {group} makes one unit of {unit[0]} to {unit[-1]}, which holds {100 * held // total} % of the sharded parameters",
                    context.place("memory.group", "memory"),
                    f"{plural(len(unit), 'block')} gathered as one",
                    help=(f"group = {self._better(list(sizes.values()), total)} leaves at most half in one unit",),
                )
                return

    def _blocks(self, context: Context) -> Iterator[tuple[str, int]]:
        from pdsl.lowering.facts import LayerKind  # a check without model starts without it

        assert context.facts is not None
        size = {p.name: p.bytes for p in context.facts.parameters if context.is_sharded(p.name)}
        for layer in context.facts.layers:
            if layer.kind is LayerKind.BLOCK:
                yield layer.name, sum(size.get(name, 0) for name in layer.parameters)

    def _better(self, sizes: list[int], total: int) -> int:
        """The largest group whose units hold at most half, or 1."""
        fits = (g for g in range(len(sizes), 0, -1) if all(2 * sum(sizes[i : i + g]) <= total for i in range(0, len(sizes), g)))
        return next(fits, 1)
