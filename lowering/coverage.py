"""Which counts of nodes can be used whole by pipelines of given sizes: a closed form, no search.

Pipelines may have `least`, `least + 1`, ..., `least + count - 1` nodes. Then m pipelines use exactly the totals from m * least to
m * (least + count - 1), each of them. So a total is covered by m pipelines if and only if m lies between total / largest and total / least: the rule that
the budget proof rests on, and the tests compare with an enumeration.
"""

from __future__ import annotations

__all__ = ["covered", "least_count", "losses_until_uncovered", "pipeline_counts", "usable"]


def pipeline_counts(nodes: int, least: int, count: int, at_least: int = 1, at_most: int | None = None) -> range:
    """The counts of pipelines that use all of `nodes` nodes, of sizes `least` to `least + count - 1`; empty if none does.

    Raises ValueError for a size below one node or no size at all.
    """
    if least < 1 or count < 1:
        raise ValueError(f"sizes of pipelines begin at {least} and there are {count}: both are at least 1")
    if nodes < 1:
        return range(0)
    fewest = max(1, at_least, -(-nodes // (least + count - 1)))
    most = nodes // least if at_most is None else min(at_most, nodes // least)
    return range(fewest, most + 1)


def covered(nodes: int, least: int, count: int, at_least: int = 1, at_most: int | None = None) -> bool:
    """Whether at least `at_least` (and at most `at_most`) pipelines can use all of the nodes, leaving none idle."""
    return len(pipeline_counts(nodes, least, count, at_least, at_most)) > 0


def least_count(least: int, lose: int) -> int:
    """The fewest sizes with which every total from (lose + 1) * least on is covered by at least lose + 1 pipelines.

    Totals leave a remainder of up to least - 1 nodes, which at least lose + 1 pipelines share: 1 + ceil((least - 1) / (lose + 1)).
    """
    if least < 1 or lose < 0:
        raise ValueError(f"least = {least} and lose = {lose}: at least 1 and 0")
    return 1 - (1 - least) // (lose + 1)


def losses_until_uncovered(nodes: int, least: int, count: int, at_least: int = 1, at_most: int | None = None) -> int:
    """How many nodes must be lost one by one until, for the first time, what is left is not covered by at least `at_least` pipelines.

    0 if the nodes are not covered to begin with; never more than `nodes`.
    """
    return next(lost for lost in range(nodes + 1) if not covered(nodes - lost, least, count, at_least, at_most))


def usable(nodes: int, least: int, count: int, at_most: int | None = None) -> int:
    """The most of `nodes` nodes that pipelines can use whole; 0 if there are fewer than `least`."""
    return next((total for total in range(nodes, 0, -1) if covered(total, least, count, 1, at_most)), 0)
