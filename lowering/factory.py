"""From `"package.module:factory"` to the thing it makes: finding, importing and calling what belongs to the user, with errors in his terms.

This is the only place where PDSL runs a user's module. It imports nothing heavy itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from attrs import frozen

from pdsl.grammar.errors import ModelError
from pdsl.lowering.spec import CallValue, Quantity, Value
from pdsl.lowering.values import near, show

__all__ = [
    "Reference",
    "brief_signature",
    "call_factory",
    "describe_error",
    "module_file",
    "on_path",
    "parse_reference",
    "plain",
    "plain_arguments",
    "resolve",
    "top_spec",
]


@frozen
class Reference:
    """The two parts of `"package.module:attribute"`."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


def parse_reference(text: str) -> Reference:
    """Split a reference. Raises ModelError if it has another form."""
    module, colon, attribute = text.partition(":")
    names = [*module.split("."), *attribute.split(".")]
    if not colon or not all(name.isidentifier() for name in names):
        raise ModelError(f'"{text}" names no factory: expected "package.module:factory"')
    return Reference(module, attribute)


# --- arguments ------------------------------------------------------------------------------------------------------------------------


def plain(value: Value) -> object:
    """A value of the language as Python has it: fractions and quantities become int or float in base units, lists stay tuples.

    Raises ModelError for a call, which only PDSL understands.
    """
    if isinstance(value, Quantity):
        return plain(value.value)
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    if isinstance(value, CallValue):
        raise ModelError(f"{show(value)} cannot be an argument of a factory: numbers, strings, true, false and lists can")
    return value


def plain_arguments(arguments: Mapping[str, Value] | Sequence[tuple[str, Value]]) -> dict[str, object]:
    """Keyword arguments for a factory, see `plain`."""
    pairs = arguments.items() if isinstance(arguments, Mapping) else arguments
    return {name: plain(value) for name, value in pairs}


# --- finding without importing ----------------------------------------------------------------------------------------------------------


@contextmanager
def on_path(directory: str | Path) -> Iterator[None]:
    """Let modules in `directory` be imported, before all others."""
    entry = str(Path(directory).resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def top_spec(name: str, directory: str | Path) -> ModuleSpec | None:
    """Where the top-level module `name` would be imported from; runs no code of it. A module in `directory` wins."""
    found = importlib.machinery.PathFinder.find_spec(name, [str(Path(directory).resolve())])
    if found is not None and found.origin is not None:
        return found
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def module_file(module: str, directory: str | Path) -> Path | None:
    """The source file of a module, found without importing anything; None if there is none."""
    top, *rest = module.split(".")
    spec = top_spec(top, directory)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
    return None


# --- importing --------------------------------------------------------------------------------------------------------------------------


def resolve(reference: str | Reference, directory: str | Path = ".") -> Callable[..., Any]:
    """The callable that `"module:attribute"` names; its module is imported with `directory` on the path.

    Raises ModelError if there is no such module (a near one is named), if importing it fails, if it has no such attribute, or if that cannot be called.
    """
    reference = parse_reference(reference) if isinstance(reference, str) else reference
    found: Any = _import(reference, directory)
    for name in reference.attribute.split("."):
        if not hasattr(found, name):
            raise ModelError(_no_attribute(reference, found, name))
        found = getattr(found, name)
    if not callable(found):
        raise ModelError(f"{reference} is no factory: it is a {type(found).__name__}, which cannot be called")
    factory: Callable[..., Any] = found
    return factory


def _import(reference: Reference, directory: str | Path) -> object:
    importlib.invalidate_caches()  # files may be younger than what the import system remembers of their folder
    _forget_namesake(reference.module, directory)
    with on_path(directory):
        try:
            return importlib.import_module(reference.module)
        except ModuleNotFoundError as error:
            parts = reference.module.split(".")
            prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
            if error.name in prefixes:
                raise ModelError(_no_module(reference, error.name, directory)) from None
            raise ModelError(f'"{reference}": importing {reference.module} failed: {describe_error(error)}') from error
        except Exception as error:
            raise ModelError(f'"{reference}": importing {reference.module} failed: {describe_error(error)}') from error


def _forget_namesake(module: str, directory: str | Path) -> None:
    """Drop an imported module of the same name that came from another folder, so that two specs may each have their `model.py`."""
    top = module.split(".", maxsplit=1)[0]
    loaded = sys.modules.get(top)
    own = importlib.machinery.PathFinder.find_spec(top, [str(Path(directory).resolve())])
    if loaded is None or own is None or own.origin is None:
        return
    file = getattr(loaded, "__file__", None)
    if file is None or Path(file).resolve() == Path(own.origin).resolve():
        return
    for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
        del sys.modules[name]


def _no_module(reference: Reference, missing: str | None, directory: str | Path) -> str:
    missing = missing or reference.module
    parent, _, leaf = missing.rpartition(".")
    if parent:
        file = module_file(parent, directory)
        folders = [file.parent] if file is not None and file.name == "__init__.py" else []
    else:
        folders = [Path(directory).resolve()]
    present = {n for folder in folders if folder.is_dir() for n in _modules_in(folder)}
    close = near(leaf, sorted(present))
    hint = f"; did you mean {f'{parent}.{close}' if parent else close}" if close else ""
    where = f"{parent} has no module {leaf}" if parent else f"there is no module {missing} in {Path(directory)} or on Python's path"
    return f'"{reference}": {where}{hint}'


def _modules_in(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.suffix == ".py" and path.stem.isidentifier() and path.stem != "__init__":
            yield path.stem
        elif path.is_dir() and path.name.isidentifier() and any(path.glob("*.py")):
            yield path.name


def _no_attribute(reference: Reference, found: object, name: str) -> str:
    public = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n, None))]
    close = near(name, sorted(public, key=str.swapcase))  # functions before classes
    owner = getattr(found, "__name__", type(found).__name__)
    return f'"{reference}": {owner} has no {name}' + (f"; did you mean {close}" if close else "")


# --- calling ----------------------------------------------------------------------------------------------------------------------------


def call_factory(factory: Callable[..., Any], arguments: Mapping[str, object], name: str) -> object:
    """`factory(**arguments)`. Raises ModelError on arguments it does not take (its signature is named) and when it raises, with the user's own line."""
    check_arguments(factory, arguments, name)
    try:
        return factory(**arguments)
    except Exception as error:
        raise ModelError(f"{name} raised {describe_error(error)}") from error


def check_arguments(factory: Callable[..., Any], arguments: Mapping[str, object], name: str) -> None:
    """Raises ModelError if the factory does not take these keyword arguments."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables of C have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        wrong = [] if takes_any else [a for a in arguments if a not in parameters]
        known = [n for n in parameters if n not in arguments]
        close = [f"{w}: did you mean {n}" for w in wrong if (n := near(w, known))]
        hint = f" ({'; '.join(close)})" if close else ""
        raise ModelError(f"{name} cannot be called with these arguments: {error}{hint}; it takes {brief_signature(signature)}") from None


def brief_signature(signature: inspect.Signature) -> str:
    """Names and defaults, without types."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def describe_error(error: BaseException) -> str:
    """Type, message and the user's own file and line of an exception, in one line."""
    text = " ".join(str(error).split())
    where = _users_place(error)
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{shown} ({where})" if where else shown


def _users_place(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither PDSL's lowering or runtime nor installed below site-packages nor the library's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _foreign(f.filename)]
    return f"{_short(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _foreign(filename: str) -> bool:
    path = Path(filename)
    here = Path(__file__).resolve().parent
    if filename.startswith("<") or path.parent.resolve() in {here, here.parent / "runtime"}:
        return True
    if path.is_relative_to(here.parent / "pdsl") or path.is_relative_to(
        here.parent / "models"
    ):  # the models that ship are users of PDSL too
        return False
    return "site-packages" in path.parts or path.is_relative_to(Path(traceback.__file__).parent)


def _short(filename: str) -> str:
    path = Path(filename)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
