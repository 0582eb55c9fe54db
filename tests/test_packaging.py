from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tree import FOLDERS, ROOT, imports_of, modules, project, tracked_files

MODULES = {name: path for folder in FOLDERS for name, path in modules(folder).items()}
LONGEST_MODULE = 450
TOP_LEVEL = {
    "pyproject.toml",
    "pdsl",
    "grammar",
    "lowering",
    "runtime",
    "tests",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "constraints.txt",
}
LINKS = ("grammar", "lowering", "runtime")

# what each folder may import of PDSL; the face may import all of it
MAY_IMPORT = {
    "grammar": ("pdsl.grammar",),
    "lowering": ("pdsl.lowering", "pdsl.grammar"),
    "runtime": ("pdsl.runtime", "pdsl.lowering", "pdsl.grammar"),
}
PROBES_MODELS = re.compile(r"pdsl\.lowering\.probe(_\w+)?")  # the one place in lowering that builds and runs a model
USER_LEVEL = ("pdsl.models", "pdsl.data")


def is_below(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def copy_of_the_tree(target):
    for name in tracked_files(untracked=True):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built by way of the sdist, as for a release. Built in a copy: a build/ left in the checkout would put old modules in it."""
    source = copy_of_the_tree(tmp_path_factory.mktemp("source"))
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """A folder with nothing but the installed wheel."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def run_outside(installed, *arguments, timeout=60):
    """Run Python away from the checkout, where the installed wheel comes before everything else."""
    bootstrap = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    code, *rest = arguments
    command = [sys.executable, "-I", "-c", bootstrap + code, *rest]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- what ships -----------------------------------------------------------------------------------------------------------------------


def test_every_package_of_the_tree_is_listed():
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert packages == set(project()["tool"]["setuptools"]["packages"])


def test_every_folder_with_modules_is_a_package():
    homes = {path.parent for path in MODULES.values()}
    assert [str(home.relative_to(ROOT)) for home in sorted(homes) if not (home / "__init__.py").exists()] == []


@pytest.mark.parametrize("link", LINKS)
def test_the_links_in_the_checkout_are_relative(link):
    path = ROOT / "pdsl" / link
    assert path.is_symlink()
    assert path.readlink() == Path("..") / link


def test_the_wheel_holds_nothing_but_pdsl_at_top_level(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"pdsl", f"pdsl-{project()['project']['version']}.dist-info"}


def test_the_wheel_declares_the_command_and_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
        described = archive.read(f"{folder}/METADATA").decode()
        assert archive.read(f"{folder}/licenses/LICENSE").decode() == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert scripts.split() == ["[console_scripts]", "pdsl", "=", "pdsl.__main__:main"]
    assert "Requires-Python: >=3.11\n" in described
    assert "Requires-Dist: torch>=2.13\n" in described


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py") for name, path in MODULES.items()}
    wanted |= {"pdsl/py.typed"}
    wanted |= {f"pdsl/grammar/{path.name}" for path in (ROOT / "grammar").glob("*.lark")}
    wanted |= {f"pdsl/examples/{path.name}" for path in (ROOT / "pdsl" / "examples").glob("*.pdsl")}
    assert wanted <= names
    assert {name for name in names if name.startswith("pdsl/")} == wanted
    assert "pdsl/grammar/pdsl.lark" in names
    assert "pdsl/examples/quickstart.pdsl" in names


def test_the_wheel_imports_outside_the_checkout(installed):
    code = "import pdsl, pdsl.grammar, pdsl.lowering, pdsl.runtime; print(pdsl.__file__, pdsl.grammar.__file__, sep='\\n')"
    face, grammar = run_outside(installed, code).splitlines()
    assert Path(face) == installed / "pdsl" / "__init__.py"
    assert Path(grammar) == installed / "pdsl" / "grammar" / "__init__.py"


def test_the_wheel_checks_its_own_example_outside_the_checkout_without_torch(installed):
    example = installed / "pdsl" / "examples" / "quickstart.pdsl"
    code = """
import sys
from pdsl.__main__ import main
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
assert "torch" not in sys.modules
"""
    run_outside(installed, code, "check", "--no-model", str(example))


# --- what is imported by whom ---------------------------------------------------------------------------------------------------------


def test_importing_pdsl_imports_no_torch_and_no_bare_folder():
    code = "import sys; import pdsl; print(*sorted({'torch', 'numpy', 'grammar', 'lowering', 'runtime'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_no_folder_imports_upward(folder):
    upward = [
        f"{path.relative_to(ROOT)}:{found.line}: {found.name}"
        for path in modules(folder).values()
        for found in imports_of(path)
        if is_below(found.name, ("pdsl",)) and not is_below(found.name, MAY_IMPORT[folder])
    ]
    assert upward == []


def test_models_and_data_are_user_level_and_know_nothing_of_pdsl():
    inward = [
        f"{path.relative_to(ROOT)}:{found.line}: {found.name}"
        for name, path in modules("pdsl").items()
        if is_below(name, USER_LEVEL)
        for found in imports_of(path)
        if is_below(found.name, ("pdsl",)) and not is_below(found.name, USER_LEVEL)
    ]
    assert inward == []


def test_torch_is_imported_only_where_it_may_be():
    stray = []
    for folder in FOLDERS:
        for name, path in modules(folder).items():
            if folder == "runtime" or PROBES_MODELS.fullmatch(name) or is_below(name, USER_LEVEL):
                continue
            torch = [found for found in imports_of(path) if is_below(found.name, ("torch",))]
            if folder == "pdsl":
                torch = [found for found in torch if found.at_import]
            stray += [f"{path.relative_to(ROOT)}:{found.line}: {found.name}" for found in torch]
    assert stray == []


def test_every_imported_distribution_is_a_declared_dependency():
    described = project()["project"]
    declared = {
        re.split(r"[<>=!~ \[]", wanted)[0] for wanted in [*described["dependencies"], *described["optional-dependencies"]["vision"]]
    }
    known = {"scikit-learn": "sklearn"}
    allowed = {known.get(name, name) for name in declared} | set(sys.stdlib_module_names) | {"pdsl"}
    strange = {
        f"{path.relative_to(ROOT)}:{found.line}: {found.name}"
        for path in MODULES.values()
        for found in imports_of(path)
        if found.name.split(".")[0] not in allowed
    }
    assert strange == set()


# --- the shape of the tree ------------------------------------------------------------------------------------------------------------


def test_only_agreed_names_lie_at_the_top():
    top = {name.parts[0] for name in tracked_files()}
    assert {name for name in top if not name.startswith(".")} - TOP_LEVEL == set()


def test_no_tracked_file_knows_a_machine():
    folders = "work|tmp|root|home|Users|opt|mnt|scratch"
    machine = re.compile(r"(?<![\w.~})-])/(?:" + folders + r")/|file:/{2}|--(?:extra-)?index-url|--find-links")
    marks = []
    for name in tracked_files(untracked=True):
        if (ROOT / name).is_symlink() or name == Path("tests/test_packaging.py"):
            continue
        lines = (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines()
        marks += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if machine.search(line)]
    assert marks == []


def test_constraints_pin_every_dependency_exactly():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", pin)] == []
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    described = project()["project"]
    wanted = [*described["dependencies"], *(one for extra in described["optional-dependencies"].values() for one in extra)]
    assert {re.split(r"[<>=!~ \[]", one)[0].lower() for one in wanted} <= pinned
    assert "torch==2.13.0" in pins


def says_something(tree):
    """Whether a module has more in it than its docstring and future imports."""
    body = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return any(not (isinstance(node, ast.ImportFrom) and node.module == "__future__") for node in body)


def names_exported(tree):
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return True
    return False


def test_every_module_says_what_it_exports():
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert [name for name, tree in trees.items() if says_something(tree) and not names_exported(tree)] == []


def test_every_module_has_a_docstring():
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_no_module_is_too_long_to_read_at_once():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}
