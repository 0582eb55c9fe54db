"""Rules on what is trained, against the model: PDL8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.grammar.errors import ModelError
from pdsl.lowering.rules.base import Context, Rule
from pdsl.lowering.values import near

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts

__all__ = ["NothingToTrain", "ObjectiveDoesNotFit"]

_OBJECTIVE = "train.objective"


class ObjectiveDoesNotFit(Rule):
    """What it does
        Checks that what the model returns is a loss, or that an objective makes one of it, not both; that a named objective finds output and target of
        shapes that go together; and that a function of one's own is there.

    Why it is bad
        A run would fail at its first step, or a loss would be computed of a loss.

    Example (bad)
        model "pdsl.models:gpt" { layers = 4 }                 # returns its loss
        train { objective = cross_entropy }

    Better
        model "pdsl.models:gpt" { layers = 4 }
        train { }

    Fix
        Delete `objective` if the model returns its loss; write `objective = cross_entropy`, `mse` or "module:function" if it returns outputs.
        `cross_entropy` takes scores of classes in the last dim of the output and one target for every other place, `mse` two of the same shape.
    """

    code = "PDL803"
    name = "objective-does-not-fit"
    needs = frozenset({"train"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        train, facts = context.spec.train, context.facts
        if train is None:
            return
        place = context.place(_OBJECTIVE, "train")
        reason = _missing(train.objective, context.spec.directory) if ":" in train.objective else ""
        if reason:
            yield self.report(f'"{train.objective}": {reason}', place)
        if facts is None or not facts.inputs:
            return
        if facts.loss and train.objective != "model":
            yield self.report(
                f"{facts.factory} returns a loss, and the objective {train.objective} takes outputs",
                place,
                help=("delete `objective`, or let the model return its outputs",),
            )
        if not facts.loss and train.objective == "model":
            yield self.report(
                f"{facts.factory} returns no loss: neither a scalar nor an output with one under the name loss",
                place,
                help=(
                    'write `objective = cross_entropy`, `mse` or "module:function" in train; it is called with the output and the target',
                ),
            )
        misfit, wanted = _misfit(train.objective, facts)
        if misfit:
            yield self.report(misfit, place, labels=context.label("train.data", "gives the target"), help=(f"a target of {wanted}",))


def _misfit(objective: str, facts: ModelFacts) -> tuple[str, str]:
    """What a named objective takes, and the shape of the target that the output asks for; empty if they fit or are not known."""
    output, target = facts.output, facts.target
    if facts.loss or output is None or target is None or objective not in _TAKES:
        return "", ""
    given = ((0, 1), *((size, 0) for size in target))
    wanted = output[:-1] if objective == "cross_entropy" else output
    if wanted == given or not output:
        return "", ""
    return f"{_TAKES[objective]}: the output is {_shape(output)}, the target {_shape(given)}", _shape(wanted)


_TAKES = {
    "cross_entropy": "cross_entropy takes classes in the last dim of the output and one target for every other place",
    "mse": "mse compares place by place",
}


def _shape(dims: tuple[tuple[int, int], ...]) -> str:
    sizes = [str(size) if not rows else "rows" if (size, rows) == (0, 1) else f"{rows} * rows + {size}" for size, rows in dims]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


class NothingToTrain(Rule):
    """What it does
        Checks that the model has a parameter that is trained.

    Why it is bad
        The run would read the data, step by step, and leave the model as it is.

    Example (bad)
        model "models:frozen" { }      # calls requires_grad_(False) on everything

    Better
        model "models:tuned" { }       # leaves the head trainable

    Fix
        Let the factory leave `requires_grad` true where training is wanted.
    """

    code = "PDL804"
    name = "nothing-to-train"
    needs = frozenset({"model"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts, model = context.facts, context.spec.model
        if facts is None or any(p.trainable for p in facts.parameters):
            return
        has = f"none of its {len(facts.parameters)} parameters wants a gradient" if facts.parameters else "it has no parameters"
        yield self.report(f"{facts.factory} has nothing to train: {has}", model.span if model is not None else context.place("model"))


def _missing(reference: str, directory: str) -> str:
    """Why a function cannot be found, read off the source without importing it; empty if it is there, or if the source does not tell."""
    from importlib.util import find_spec  # slow to import, and rarely needed

    from pdsl.lowering.factory import module_file, parse_reference

    try:
        named = parse_reference(reference)
    except ModelError:
        return 'this names no function: the form is "package.module:function"'
    file = module_file(named.module, directory)
    if file is None:
        return "" if "." in named.module or find_spec(named.module) is not None else f"there is no module {named.module}"
    try:
        names = _names_in(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # the run will tell better
    first = named.attribute.partition(".")[0]
    if first in names or names & {"*", "__getattr__"}:
        return ""
    close = near(first, sorted(names))
    return f"{named.module} has no {first}" + (f"; did you mean {close}" if close else "")


def _names_in(source: bytes) -> set[str]:
    """Names that a module may have: all that it defines, imports or binds, under conditions too, but not those inside of its functions and classes.

    Raises SyntaxError or ValueError if it is no Python.
    """
    import ast

    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return names
