"""Facts are kept on disk: the second look needs neither torch nor the user's code, and any change of what they depend on is seen."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

import pdsl
from pdsl.grammar.errors import ModelError
from pdsl.lowering import facts_cache
from pdsl.lowering.facts_cache import cached_facts, facts_key, read_facts, source_files, store_facts
from pdsl.lowering.spec import CallValue
from tests.plans import facts

ROOT = Path(pdsl.__file__).parent.parent
DATA = CallValue("source", ("pdsl.data:python_source",), (("context", 8), ("limit", 5000)))
ARGUMENTS = (("layers", 2), ("width", 8), ("heads", 2))

MODEL = """
from torch import nn
from sizes import WIDTH
print("imported")
def make(depth=2):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def user(tmp_path):
    home = tmp_path / "user"
    home.mkdir()
    (home / "mymodel.py").write_text(MODEL)
    (home / "sizes.py").write_text("WIDTH = 3\n")
    return home


def test_facts_are_read_once():
    first = read_facts("pdsl.models:gpt", ARGUMENTS, data=DATA)
    assert first.layers[1].inputs[0].shape(3) == (3, 8, 8)
    assert cached_facts("pdsl.models:gpt", ARGUMENTS, data=DATA) == first
    assert cached_facts("pdsl.models:gpt", dict(reversed(ARGUMENTS)), data=DATA) == first
    assert cached_facts("pdsl.models:gpt", (*ARGUMENTS, ("tie", True)), data=DATA) is None
    assert cached_facts("pdsl.models:gpt", ARGUMENTS, data=None) is None
    assert cached_facts("pdsl.models:vit", ARGUMENTS, data=DATA) is None


def test_the_second_look_imports_neither_torch_nor_the_model(user):
    code = f"""
import sys
from pdsl.lowering.facts_cache import read_facts
facts = read_facts("mymodel:make", (("depth", 3),), directory={str(user)!r})
print(len(facts.layers), "torch" in sys.modules, "mymodel" in sys.modules)
"""
    outputs = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
        for _ in range(2)
    ]
    assert outputs == ["imported\n3 True True\n", "3 False False\n"]


def test_a_change_of_the_source_or_of_what_it_imports_is_seen(user):
    key = facts_key("mymodel:make", (), directory=str(user))
    assert facts_key("mymodel:make", (), directory=str(user)) == key
    (user / "sizes.py").write_text("WIDTH = 4\n")
    changed = facts_key("mymodel:make", (), directory=str(user))
    (user / "mymodel.py").write_text(MODEL + "\n# more\n")
    (user / "unrelated.py").write_text("")
    assert len({key, changed, facts_key("mymodel:make", (), directory=str(user))}) == 3


@pytest.mark.parametrize("reads", ["settings.json", "late.py"])
def test_a_change_of_a_file_that_the_factory_reads_is_seen(user, reads):
    """A file of settings, and a module that is imported by a name that no source spells out."""
    (user / "settings.json").write_text("3")
    (user / "late.py").write_text("WIDTH = 3")
    (user / "mymodel.py").write_text(
        """
import importlib, json
from pathlib import Path
from torch import nn
def make():
    importlib.invalidate_caches()
    width = json.loads((Path(__file__).parent / "settings.json").read_text()) * importlib.import_module("la" + "te").WIDTH
    return nn.Sequential(nn.Linear(width, 2), nn.Linear(2, 2))
"""
    )
    code = f"import sys; from pdsl.lowering.facts_cache import read_facts; print(read_facts('mymodel:make', (), directory={str(user)!r}).numel, 'torch' in sys.modules)"

    def read() -> list[str]:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()

    small = str(9 * 2 + 2 + 6)
    assert read() == [small, "True"]
    assert read() == [small, "False"]
    (user / reads).write_text("4" if reads.endswith("json") else "WIDTH = 4")
    assert read() == [str(12 * 2 + 2 + 6), "True"]


def test_sources_are_followed_through_packages_and_relative_imports(tmp_path):
    package = tmp_path / "zoo" / "big"
    package.mkdir(parents=True)
    (tmp_path / "zoo" / "__init__.py").write_text("from zoo import loose\n")
    (tmp_path / "zoo" / "loose.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(
        "import json\nfrom . import parts\nfrom ..common import norm\ndef make():\n    from zoo.late import x\n"
    )
    (package / "parts.py").write_text("from zoo.big import model\n")
    (tmp_path / "zoo" / "common.py").write_text("")
    (tmp_path / "zoo" / "late.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    found = source_files("zoo.big.model", str(tmp_path))
    assert {str(p.relative_to(tmp_path)) for p in found} == {
        "zoo/__init__.py", "zoo/loose.py", "zoo/big/__init__.py", "zoo/big/model.py", "zoo/big/parts.py", "zoo/common.py", "zoo/late.py", "helper.py",
    }  # fmt: skip
    assert source_files("zoo.nothing", str(tmp_path)) is None


def test_of_the_models_that_ship_only_they_count():
    names = {p.name for p in source_files("pdsl.models", ".")}
    assert names == {"__init__.py", "gpt.py", "vit.py"}


def test_arguments_that_differ_only_in_kind_are_different(user):
    keys = {facts_key("mymodel:make", (("depth", value),), directory=str(user)) for value in (1, True, "1", Fraction(1), Fraction(1, 3))}
    assert len(keys) == 5


def test_another_version_of_torch_is_another_key(user, tmp_path, monkeypatch):
    key = facts_key("mymodel:make", (), directory=str(user))
    other = tmp_path / "site" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "version.py").write_text("__version__ = '99'\n")

    class Spec:
        origin = str(other / "__init__.py")

    monkeypatch.setattr(facts_cache.importlib.util, "find_spec", lambda name: Spec())
    assert facts_key("mymodel:make", (), directory=str(user)) not in {key, None}


def test_damaged_entries_are_no_facts(folder, user):
    made = facts()
    assert store_facts(made, "mymodel:make", (), directory=str(user))
    assert cached_facts("mymodel:make", (), directory=str(user)) == made
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:-10], whole.replace(b"prologue", b"prologuE"), b"{}"):
        entry.write_bytes(damaged)
        assert cached_facts("mymodel:make", (), directory=str(user)) is None


def test_what_cannot_be_found_or_written_is_not_cached(user, tmp_path, monkeypatch):
    assert facts_key("nowhere:make", (), directory=str(user)) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "file" / "cache"))
    assert not store_facts(facts(), "mymodel:make", (), directory=str(user))


def test_a_missing_data_set_is_told():
    with pytest.raises(ModelError, match=r'"pdsl.data:python_sauce": pdsl.data has no python_sauce; did you mean python_source'):
        read_facts("pdsl.models:gpt", (), data=CallValue("source", ("pdsl.data:python_sauce",)))
    with pytest.raises(ModelError, match=r"pdsl.data:python_source raised ValueError: context is 0"):
        read_facts("pdsl.models:gpt", (), data=CallValue("source", ("pdsl.data:python_source",), (("context", 0),)))
