"""The README is true: its specs pass, its scripts run, its console shows what is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SPEC = next(text for kind, text in BLOCKS if kind == "pdsl")
SCRIPTS = [text for kind, text in BLOCKS if kind == "python"]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.pdsl").write_text(SPEC, encoding="utf-8")
    broken = SPEC.replace("microbatches = 4", "microbatches = 2").replace("pp = 2", "pp = 4")
    (tmp_path / "broken.pdsl").write_text(broken, encoding="utf-8")
    return tmp_path


def test_the_readme_opens_with_a_spec_of_ten_lines_that_passes(folder: Path) -> None:
    assert len(SPEC.splitlines()) == 10
    done = run(["-m", "pdsl", "check", "train.pdsl"], folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_console_shows_what_check_prints(folder: Path) -> None:
    text = next(text for kind, text in BLOCKS if kind == "console")
    command, shown = text.split("\n", 1)
    done = run(["-m", *command.removeprefix("$ ").split()], folder)
    assert done.returncode == 1
    assert shown.strip() in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=[f"script {i}" for i in range(len(SCRIPTS))])
def test_every_script_runs(folder: Path, script: str) -> None:
    (folder / "script.py").write_text(script, encoding="utf-8")
    done = run(["script.py"], folder)
    assert done.returncode == 0, done.stderr
    if "session" in script:
        assert done.stdout.count("loss") == 3


def test_the_loop_runs_under_torchrun_too(folder: Path) -> None:
    script = next(s for s in SCRIPTS if "session" in s).replace('"mesh.fsdp=1"', '"mesh.fsdp=2"')
    script = script.replace("rows = {", "torch.manual_seed(0)\nrows = {")  # the global batch is the same on every rank
    (folder / "script.py").write_text(script, encoding="utf-8")
    done = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"], folder)
    assert done.returncode == 0, done.stderr
    # two ranks may share a line
    losses = re.findall(r"step \d: loss \d+\.\d{4}, gradient norm \d+\.\d{4}", done.stdout)
    assert len(losses) == 6
    assert len(set(losses)) == 3


def test_the_pip_commands_are_those_of_the_makefile() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(BIN)/", ".venv/bin/").replace("$(VENV)", ".venv")
    install = next(line for line in README.splitlines() if "pip install" in line)
    assert install.split("-c ")[1] in recipe
    demo = next(line for line in README.splitlines() if line.startswith(".venv/bin/pdsl run"))
    assert demo in recipe


def test_the_examples_pass() -> None:
    found = sorted((ROOT / "pdsl" / "examples").glob("*.pdsl"))
    assert [f.stem for f in found] == ["digits", "quickstart", "resilient", "starter", "tensor", "two_losses"]
    done = run(["-m", "pdsl", "check", *map(str, found)], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
