"""Whether new pipelines pay after a loss: what they gain in each step that is left, against what moving state costs once."""

from __future__ import annotations

from attrs import frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.holdings import demand, plan_holdings, state_tensors
from pdsl.lowering.plan import Plan
from pdsl.lowering.replan import copies, layers_held, retemplate, step_time

__all__ = ["BYTES_PER_SECOND", "REGROUPING", "Gain", "gain"]

BYTES_PER_SECOND = 1e9
"""What a node is assumed to send where nothing is known of the network: ten gigabit Ethernet, and about what gloo does on one machine."""

REGROUPING = 0.5
"""Seconds that a transition is assumed to take beside the bytes: new groups, modules made anew."""


@frozen
class Gain:
    """`share`: by how much of the step time now the new pipelines are faster (negative: slower); `cost`: seconds of the transition; `renews`:
    whether some layer gets more copies, so that losses can be survived again.
    """

    share: float
    cost: float
    renews: bool

    def pays(self, step_seconds: float, steps_left: int) -> bool:
        """Whether to make new pipelines now, with this many steps to go."""
        if steps_left < 1:
            return False
        return self.renews or self.share * step_seconds * steps_left > self.cost


def gain(plan: Plan) -> Gain | None:
    """What new pipelines over the nodes of a re-routed plan would bring; None if they are not wanted, or there are none, or nothing is amiss: every
    pipeline is whole, and there are enough of them to survive the next loss.
    """
    budget = plan.budget
    if budget is None or "retemplate" not in budget.recover:
        return None
    before = min(copies(plan))
    if before > budget.lose and all(p.whole for p in plan.pipelines):
        return None
    try:
        after = retemplate(plan, plan.nodes, layers_held(plan), generation=plan.generation + 1)
    except PlanError:
        return None
    now = step_time(plan)
    share = float((now - step_time(after)) / now) if now else 0.0
    return Gain(share, REGROUPING + _bytes(plan, after) / BYTES_PER_SECOND, min(copies(after)) > before)


def _bytes(plan: Plan, after: Plan) -> int:
    """Bytes that the node which receives most receives: weights and twice as much of optimizer state."""
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    had = {(h.owner, h.tensor) for h in plan_holdings(plan, 0, kinds)}
    sizes = {t.name: t.item_bytes for t in state_tensors(plan, kinds)}
    incoming: dict[int, int] = {}
    for n in demand(after, kinds):
        if (n.owner, n.tensor) not in had:
            size = sizes[n.tensor]
            for a, b in n.box:
                size *= b - a
            node = after.node(n.owner)
            incoming[node] = incoming.get(node, 0) + size
    return max(incoming.values(), default=0)
