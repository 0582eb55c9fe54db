"""The rules: one class each, by family.

base       what a rule is and what it may look at
language   PDL0, PDL1: findings of the parser and the resolver, unused names
mesh       PDL2: sizes and roles of axes
shard      PDL3: patterns and layouts against the parameters of the model
units      PDL3: when sharded parameters are gathered and reduced
tensor     PDL3: layouts over tensor axes against their shapes
tensor_rank  PDL3: what a tensor rank would compute otherwise
pipeline   PDL4: schedule and batch
rows       PDL4: a schedule that is read from a file
halves     PDL4: schedules whose backwards come in halves
stages     PDL4: stages against the layers of the model
searched   PDL4: a schedule that is searched for
budget     PDL5: what a loss within the fault budget leaves
compiled   PDL7: compiled layers
precision  PDL7: number formats
memory     PDL7: what is computed again, what waits on the host
forwards   PDL3, PDL8: random numbers, statistics of rows, buffers and shared memory of a forward
training   PDL8: the objective against the model
data       PDL8: what a batch takes of the data, and what is held out
general    PDL9: the check itself, and what is not executed yet
"""

from __future__ import annotations

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.lowering.rules import (
    budget,
    compiled,
    data,
    forwards,
    general,
    halves,
    language,
    memory,
    mesh,
    pipeline,
    precision,
    rows,
    searched,
    shard,
    stages,
    tensor,
    tensor_rank,
    training,
    units,
)
from pdsl.lowering.rules.base import Context, Rule

__all__ = ["RULES", "explain", "rule", "run_rules"]

_MODULES = (
    language,
    compiled,
    mesh,
    shard,
    units,
    tensor,
    tensor_rank,
    pipeline,
    rows,
    halves,
    stages,
    searched,
    budget,
    precision,
    memory,
    forwards,
    training,
    data,
    general,
)

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            found()
            for module in _MODULES
            for found in vars(module).values()
            if isinstance(found, type) and issubclass(found, Rule) and hasattr(found, "code") and found.__module__ == module.__name__
        ),
        key=lambda r: r.code,
    )
)
"""All rules, in the order of their codes."""


def rule(code: str) -> Rule:
    """The rule of a code. Raises KeyError."""
    found = next((r for r in RULES if r.code == code.upper()), None)
    if found is None:
        raise KeyError(code)
    return found


def explain(code: str) -> str:
    """Why a rule exists: its docstring under fixed headings, with a title. Raises KeyError for an unknown code."""
    from inspect import cleandoc  # slow to import

    found = rule(code)
    return f"{found.code} {found.name} ({found.severity.value})\n\n{cleandoc(found.__doc__ or '')}\n"


def run_rules(context: Context, *, on_tensor: bool = False) -> tuple[tuple[Diagnostic, ...], frozenset[str]]:
    """The findings of all rules that apply, and the codes of those that were passed over because something they need is not known. With `on_tensor`
    only the rules on what a tensor rank would do.
    """
    found: list[Diagnostic] = []
    skipped: set[str] = set()
    for one in (r for r in RULES if r.needs_tensor or not on_tensor):
        if one.applies(context):
            found += one.check(context)
        else:
            skipped.add(one.code)
    return tuple(found), frozenset(skipped)
