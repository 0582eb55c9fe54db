"""What users and scripts may rely on. A difference here is a change of the product: change it on purpose, and tell of it in the changelog."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdsl.cli import arguments, main
from tests.tree import ROOT

SPEC = {"--set", "--profile", "--world"}
SURFACE = {
    "check": (["files"], {"--format", "--no-model", "--stdin-filename", "--fail-on", *SPEC}),
    "plan": (["file"], {"-o", "--output", "--format", "--svg", "--origins", "--print-after", *SPEC}),
    "run": (["file"], {"--steps", "--resume", "--metrics", "--log-dir", "--port", *SPEC}),
    "agent": (["file"], {"--rendezvous", "--node", "--host", "--patience", "--steps", "--resume", "--metrics", "--log-dir", *SPEC}),
    "verify": (["file"], {"--steps", "--tolerance", *SPEC}),
    "chaos": (["file"], {"--seed", "--kills", "--runs", "--steps", "--tolerance", "--format", *SPEC}),
    "simulate": (
        ["file"],
        {"--failures", "--format", "--svg", "--strategy", "--seed", "--days", "--nodes", "--rack-rate", "--rack-size", "--repair-hours"}
        | {"--step-seconds", "--flops-per-rank", "--recovery-seconds", "--restart-seconds", "--checkpoint-seconds", "--checkpoint-every"}
        | SPEC,
    ),
    "explain": (["code"], set()),
    "init": (["name"], set()),
}


def test_the_commands_and_their_options_are_held():
    _, commands = arguments()
    found = {
        name: (
            [a.dest for a in parser._actions if not a.option_strings],
            {o for a in parser._actions for o in a.option_strings} - {"-h", "--help"},
        )
        for name, parser in commands.items()
    }
    assert found == SURFACE


def test_the_options_of_pdsl_itself_are_held():
    parser, _ = arguments()
    assert {o for a in parser._actions for o in a.option_strings} == {"-h", "--help", "--version"}


def test_the_formats_of_check_are_held():
    _, commands = arguments()
    choices = {a.dest: a.choices for a in commands["check"]._actions}
    assert choices["format"] == ("full", "concise", "json", "github", "sarif", "junit")
    assert choices["fail_on"] == ("error", "warning")


@pytest.mark.parametrize("command", SURFACE)
def test_every_option_has_a_line_of_help(command):
    _, commands = arguments()
    assert [a.dest for a in commands[command]._actions if not a.help] == []


# --- bad invocations ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["chek", "x.pdsl"], "there is no command 'chek'; did you mean check?"),
        (["train", "x.pdsl"], "there is no command 'train'; there are check, plan, run, agent, verify, chaos, simulate, explain, init"),
        (["check", "--no-modle", "x.pdsl"], "unknown option --no-modle; did you mean --no-model?"),
        (["check", "--form", "json", "x.pdsl"], "unknown option --form; did you mean --format?"),
        (["check", "--format", "jsn", "x.pdsl"], "invalid choice: 'jsn'"),
        (["check"], "the following arguments are required: FILE"),
        (["run", "x.pdsl", "--steps", "0"], "'0' is not a whole number of at least 1"),
        (["verify", "x.pdsl", "--tolerance", "much"], "'much' is not a relative deviation such as 1e-5"),
        (["--nothing"], "unknown option --nothing"),
    ],
)
def test_a_bad_invocation_says_what_would_do_and_ends_with_2(argv, told, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("pdsl: ")


def test_help_ends_with_0(capsys):
    assert main(["--help"]) == 0
    assert "COMMAND" in capsys.readouterr().out
    assert main(["plan", "--help"]) == 0
    assert "--print-after" in capsys.readouterr().out


def test_without_a_command_help_is_shown(capsys):
    assert main([]) == 0
    assert "init" in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    import pdsl

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdsl {pdsl.__version__}\n"


def test_an_unexpected_error_is_one_message_and_never_a_traceback(monkeypatch, capsys):
    from pdsl import commands

    def broken(options):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(commands, "explain", broken)
    assert main(["explain"]) == 1
    assert capsys.readouterr().err == (
        "pdsl: ZeroDivisionError: division by zero\nthis is a fault of PDSL; run with PDSL_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("PDSL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["explain"])


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    from pdsl import commands

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "explain", interrupted)
    assert main(["explain"]) == 130
    assert capsys.readouterr().err == "pdsl: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m pdsl --help | true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- init -----------------------------------------------------------------------------------------------------------------------------------


def test_init_writes_a_starter_and_never_overwrites(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    text = (tmp_path / "mine.pdsl").read_text()
    assert "pdsl check mine.pdsl" in text
    assert "FILE" not in text
    assert capsys.readouterr().out == "wrote mine.pdsl; try: pdsl check mine.pdsl\n"
    (tmp_path / "mine.pdsl").write_text("precious")
    assert main(["init", "mine.pdsl"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "mine.pdsl").read_text() == "precious"


def test_init_where_nothing_can_be_written(tmp_path, capsys):
    assert main(["init", str(tmp_path / "no" / "folder" / "x.pdsl")]) == 2
    assert "cannot be written" in capsys.readouterr().err
