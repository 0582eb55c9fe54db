from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import metadata

import pytest

import pdsl
from pdsl.grammar import errors
from tests.tree import ROOT, project

FUNCTIONS = ["check", "compile", "load", "run", "session", "verify"]
TYPES = ["Diagnostic", "Plan", "Spec"]


def test_all_is_sorted_and_without_doubles():
    assert list(pdsl.__all__) == sorted(set(pdsl.__all__))


@pytest.mark.parametrize("name", sorted(pdsl.__all__))
def test_every_name_in_all_exists(name):
    assert getattr(pdsl, name) is not None


def test_nothing_else_is_exported():
    for name in pdsl.__all__:
        getattr(pdsl, name)
    found = {name for name, value in vars(pdsl).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert found - {"annotations"} <= set(pdsl.__all__)


def test_dir_shows_what_is_exported_before_it_is_loaded():
    code = "import pdsl; print(*sorted(set(pdsl.__all__) - set(dir(pdsl))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pdsl.no_such_name


def test_functions_types_and_every_error_are_exported():
    assert set(FUNCTIONS + TYPES + errors.__all__) <= set(pdsl.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_documented_and_take_options_by_name_only(name):
    function = getattr(pdsl, name)
    assert inspect.getdoc(function)
    positional = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 2


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_one_tree(name):
    error = getattr(pdsl, name)
    assert issubclass(error, pdsl.PdslError)
    assert inspect.getdoc(error)


def test_the_version_is_that_of_the_project():
    assert pdsl.__version__ == project()["project"]["version"]
    assert metadata.version("pdsl") == pdsl.__version__
