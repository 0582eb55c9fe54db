"""Facts of models on disk, so that a second check of a file needs neither torch nor the user's code.

An entry is found by factory, arguments, data, the sources of the modules that make both, the version of torch and the sources of what reads facts.
Those modules are found and read as text, never imported: the factory's module, its packages, and what they import from the same package
or from the directory of the spec. An entry also keeps which other files were read when it was made, a file of settings or a module imported late, and is
stale once one of them has changed. What a factory reads from the environment is not seen: run with PDSL_CACHE set to a fresh folder, or with
`cache=False`, when that changes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from attrs import evolve

from pdsl.grammar.cache import read_entry, write_entry
from pdsl.grammar.errors import ModelError
from pdsl.lowering.depends import Stamp, still_so, watching
from pdsl.lowering.factory import call_factory, describe_error, module_file, on_path, parse_reference, plain_arguments, resolve
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.precision import AS_MADE, RunAs
from pdsl.lowering.serial import dump, load
from pdsl.lowering.spec import CallValue, Value

__all__ = ["cached_facts", "check_held_out", "data_reference", "facts_key", "first_rows", "read_facts", "source_files", "store_facts"]

Arguments = Mapping[str, Value] | Sequence[tuple[str, Value]]

_MOST_FILES = 500
_READERS = (
    "probe.py",
    "probe_pass.py",
    "probe_memory.py",
    "probe_writes.py",
    "probe_rows.py",
    "probe_numerics.py",
    "probe_repeats.py",
    "precision.py",
    "chain.py",
    "draws.py",
    "facts.py",
    "serial.py",
)  # a change in one of them makes all entries stale


def read_facts(
    factory: str, arguments: Arguments, *, data: CallValue | None = None, directory: str = ".", cache: bool = True, run_as: RunAs = AS_MADE
) -> ModelFacts:
    """The facts of a model: from the cache, else by building and running it without weights on a few rows of `data`.

    `data` is a call with the reference of a data set as its first argument, as in `train.data`. Without data the model does not run, and boundaries
    stay unknown. `run_as` says in which formats the model is going to run. Raises ModelError if model or data set cannot be built or run.
    """
    found = cached_facts(factory, arguments, data=data, directory=directory, run_as=run_as) if cache else None
    if found is not None:
        return found
    from pdsl.lowering.probe import probe

    with watching() as watch, on_path(directory):
        batch, samples = first_rows(data, run_as.shared, directory) if data is not None else (None, None)
        if batch is not None and run_as.held_out is not None:
            check_held_out(batch, run_as.held_out, run_as.shared, directory)
        facts = probe(factory, plain_arguments(arguments), batch=batch, directory=directory, run_as=run_as)
        facts = evolve(facts, samples=samples, entries=tuple(batch or ()))
    if cache:
        store_facts(facts, factory, arguments, data=data, directory=directory, read=watch.stamps(), run_as=run_as)
    return facts


def check_held_out(batch: Mapping[str, Any], data: CallValue, shared: Sequence[str], directory: str) -> None:
    """Raises ModelError if held-out data cannot be read, or has other rows than `batch`, the first of those that are trained on."""
    from pdsl.lowering.probe_rows import difference

    problem = difference(batch, first_rows(data, shared, directory)[0])
    if problem:
        raise ModelError(f"the held-out data of {data_reference(data)} is of another kind: {problem}")


def first_rows(data: CallValue, shared: Sequence[str], directory: str) -> tuple[dict[str, Any], int | None]:
    """The first rows of a data set as a batch, and how many samples it has if it has a length; `shared` are entries without rows.

    Raises ModelError if the data set cannot be made, cannot be read, or gives no dicts of tensors.
    """
    from pdsl.lowering.probe_rows import probe_batch, sample_count

    reference = data_reference(data)
    with on_path(directory):
        dataset = call_factory(resolve(reference, directory), plain_arguments(data.keywords), reference)
        try:
            return probe_batch(dataset, shared=shared), sample_count(dataset)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"reading rows of {reference} raised {describe_error(error)}") from error


def cached_facts(
    factory: str, arguments: Arguments, *, data: CallValue | None = None, directory: str = ".", run_as: RunAs = AS_MADE
) -> ModelFacts | None:
    """Facts that were stored for exactly this, or None. Imports neither torch nor anything of the user."""
    key = facts_key(factory, arguments, data=data, directory=directory, run_as=run_as)
    text = read_entry(_entry(key), key) if key is not None else None
    files, _, body = (text or "").partition("\n")
    if not still_so(files):
        return None
    try:
        return load(body, ModelFacts)
    except ValueError:
        return None


def store_facts(
    facts: ModelFacts,
    factory: str,
    arguments: Arguments,
    *,
    data: CallValue | None = None,
    directory: str = ".",
    read: Sequence[Stamp] | None = (),
    run_as: RunAs = AS_MADE,
) -> bool:
    """Keep facts for the next time; whether that worked. `read` are files that they depend on, None if there are too many to tell."""
    key = facts_key(factory, arguments, data=data, directory=directory, run_as=run_as) if read is not None else None
    return key is not None and write_entry(_entry(key), key, f"{json.dumps(read)}\n{dump(facts)}")


def data_reference(data: CallValue) -> str:
    """The `"module:factory"` of a data set: the first argument of `source(...)`. Raises ModelError if there is none."""
    if data.positional and isinstance(data.positional[0], str):
        return data.positional[0]
    if ":" in data.name:
        return data.name
    raise ModelError('data names no data set: expected "package.module:factory"')


def facts_key(
    factory: str, arguments: Arguments, *, data: CallValue | None = None, directory: str = ".", run_as: RunAs = AS_MADE
) -> str | None:
    """What decides about the facts, as a hash in hex; None where a source cannot be found, so that nothing is cached."""
    pairs = arguments.items() if isinstance(arguments, Mapping) else arguments
    modules = [parse_reference(factory).module]
    whole = hashlib.sha256()
    whole.update(dump(CallValue(factory, (), tuple(sorted(pairs, key=lambda pair: pair[0])))).encode())
    whole.update(run_as.key.encode())
    if data is not None:
        modules.append(parse_reference(data_reference(data)).module)
        whole.update(dump(data).encode())
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        files = [Path(torch.origin).parent / "version.py", *(Path(__file__).with_name(name) for name in _READERS)]
        for module in modules:
            found = source_files(module, directory)
            if found is None:
                return None
            files += found
        for path in files:
            content = path.read_bytes()
            whole.update(f"\n{path.name} {len(content)}\n".encode() + content)
    except OSError:
        return None
    return whole.hexdigest()


def _entry(key: str) -> str:
    return f"facts-{key[:32]}.json"


# --- sources ----------------------------------------------------------------------------------------------------------------------------


def source_files(module: str, directory: str) -> tuple[Path, ...] | None:
    """The file of a module, those of its packages, and those of all modules that it imports from its own package or from `directory`,
    directly or not. None if the module has no source file, if one of its sources is no Python, or if there are too many.

    Of a package that is installed only the module itself and its packages count.
    """
    home = Path(directory).resolve()
    top = module.partition(".")[0]
    waiting, seen, files = [module], {module}, dict[Path, None]()
    while waiting:
        name = waiting.pop()
        path = module_file(name, directory)
        if path is None and name == module:
            return None
        if path is None or len(files) > _MOST_FILES:
            continue
        files.setdefault(path)
        packages = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        if top != "pdsl":  # the package that PDSL's own models lie in is no part of them
            waiting += [p for p in packages if p not in seen]
            seen.update(packages)
        resolved = path.resolve()
        if "site-packages" in resolved.parts and not resolved.is_relative_to(home):
            continue
        try:
            names = _imported(path.read_bytes(), name, path.name == "__init__.py")
        except (SyntaxError, ValueError):
            return None
        for other in names:
            if other not in seen and (other.partition(".")[0] == top or _lies_in(other, home)):
                seen.add(other)
                waiting.append(other)
    return tuple(sorted(files)) if len(files) <= _MOST_FILES else None


def _lies_in(module: str, home: Path) -> bool:
    top = home / module.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()


@lru_cache(maxsize=_MOST_FILES)  # one check asks for the key of several entries
def _imported(source: bytes, module: str, is_package: bool) -> tuple[str, ...]:
    """Names of modules, or of things in modules, that a module imports anywhere. Raises SyntaxError or ValueError if its source is no Python."""
    return tuple(_names(ast.parse(source), module, is_package))


def _names(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *(node.module.split(".") if node.module else [])])
            if start:
                yield start
                yield from (f"{start}.{alias.name}" for alias in node.names if alias.name != "*")
