"""The checkout as data, for the tests that hold its shape."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = ["FOLDERS", "ROOT", "ImportedName", "imports_of", "modules", "project", "tracked_files"]

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"grammar": "pdsl.grammar", "lowering": "pdsl.lowering", "runtime": "pdsl.runtime", "pdsl": "pdsl"}


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules(folder: str) -> dict[str, Path]:
    """Every module of a mapped folder by its import name. Folders that are symlinks belong to another name and are left out."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT / folder)
        if any((ROOT / folder / parent).is_symlink() for parent in relative.parents):
            continue
        parts = relative.with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join([FOLDERS[folder], *parts])] = path
    return found


@frozen
class ImportedName:
    """One imported module: its name, its line, whether the import runs when the module is imported."""

    name: str
    line: int
    at_import: bool


def imports_of(path: Path) -> tuple[ImportedName, ...]:
    """All imports of a module, those inside functions too. `from a import b` counts as `a.b`; what only type checkers see is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(_imports(tree, at_import=True))


def _imports(node: ast.AST, *, at_import: bool) -> Iterator[ImportedName]:
    match node:
        case ast.Import(names=names):
            yield from (ImportedName(alias.name, node.lineno, at_import) for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield from (ImportedName(f"{module}.{alias.name}", node.lineno, at_import) for alias in names)
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(name)), *_]
        ):
            yield ImportedName(name, node.lineno, at_import)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=orelse):
            for child in orelse:
                yield from _imports(child, at_import=at_import)
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            at_import = False
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, at_import=at_import)


def tracked_files(*, untracked: bool = False) -> tuple[Path, ...]:
    """Files that git knows, relative to the root; with `untracked`, also those it would take."""
    command = ["git", "ls-files", "-z", "--cached"]
    if untracked:
        command += ["--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True, timeout=60)
    names = (Path(name) for name in done.stdout.split("\0") if name)
    return tuple(sorted({name for name in names if (ROOT / name).is_symlink() or (ROOT / name).exists()}))
