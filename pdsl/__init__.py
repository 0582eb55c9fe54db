"""PDSL: one file says how a PyTorch model is parallelised, and it is checked before a process starts.

check, load      a text to findings, or to a Spec
compile          a Spec to a Plan
run, verify      a Plan on local processes, or as one rank under torchrun
session          a Plan inside a loop of your own

Importing this package imports neither torch nor the parser; every name is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from pdsl.api import check, compile, load, run, session, verify  # noqa: A004  `pdsl.compile` is called so, as `torch.compile` is
    from pdsl.grammar.diagnostics import Diagnostic, Severity
    from pdsl.grammar.errors import ModelError, NotExecuted, PdslError, PeerError, PlanError, RankError, RunError, SpecError
    from pdsl.lowering.plan import Plan
    from pdsl.lowering.spec import Spec

    __version__: str

__all__ = [
    "Diagnostic", "ModelError", "NotExecuted", "PdslError", "PeerError", "Plan", "PlanError", "RankError", "RunError", "Severity", "Spec", "SpecError", "check",
    "compile", "load", "run", "session", "verify",
]  # fmt: skip

_HOMES = {
    "pdsl.api": ("check", "compile", "load", "run", "session", "verify"),
    "pdsl.grammar.diagnostics": ("Diagnostic", "Severity"),
    "pdsl.grammar.errors": ("ModelError", "NotExecuted", "PdslError", "PeerError", "PlanError", "RankError", "RunError", "SpecError"),
    "pdsl.lowering.plan": ("Plan",),
    "pdsl.lowering.spec": ("Spec",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        metadata = _importlib.import_module("importlib.metadata")
        globals()[name] = metadata.version("pdsl")
    elif name in _HOME_OF:
        globals()[name] = getattr(_importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'pdsl' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
