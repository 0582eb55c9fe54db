"""The command line: what can be asked, and how every question ends.

Exit status: 0 clean, 1 findings or a failed run, 2 bad invocation, 130 on Ctrl-C. No user ever sees a traceback, unless PDSL_DEBUG=1.

`pdsl check` is started by editors and hooks, so this module imports nothing that a command does not need; argparse costs a third of what the
usual libraries cost to import.
"""

from __future__ import annotations

import argparse
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["CLEAN", "FINDINGS", "INTERRUPTED", "USAGE", "Findings", "Invocation", "arguments", "main"]

CLEAN, FINDINGS, USAGE, INTERRUPTED = 0, 1, 2, 130

_FORMATS = ("full", "concise", "json", "github", "sarif", "junit")


class Invocation(Exception):
    """The command was called with something that cannot be meant: a missing file, an unknown option. Exit status 2."""


class Findings(Exception):
    """The spec has errors, and they have been told. Exit status 1."""


class _Parser(argparse.ArgumentParser):
    """argparse that leaves the ending to `main` and takes no abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise Invocation(f"{message}\ntry: {self.prog} --help")


def _whole(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from `least` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return parse


_positive, _count = _whole(1), _whole(0)


def _above_zero(text: str) -> float:
    number = _not_below_zero(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return number


def _not_below_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least zero")
    return number


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a relative deviation such as 1e-5")
    return number


def arguments() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The whole command line, and the part of each command by name. A test holds its commands and options."""
    parser = _Parser(prog="pdsl", description="One file says how a PyTorch model is parallelised; check it, see the plan, train.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    check = commands.add_parser(
        "check", help="find everything that is wrong with a spec", description="Find everything that is wrong with a spec."
    )
    check.add_argument("files", nargs="+", metavar="FILE", help="a .pdsl file; - reads standard input")
    check.add_argument("--format", choices=_FORMATS, default="full", help="how findings are written (default: full)")
    check.add_argument("--no-model", action="store_true", help="do not read the model; never imports torch, runs no code of the spec")
    check.add_argument("--stdin-filename", metavar="NAME", default="-", help="what standard input is called in findings")
    check.add_argument("--fail-on", choices=("error", "warning"), default="error", help="the least finding that makes the exit status 1")
    _spec_options(check)

    plan = commands.add_parser("plan", help="show what would happen", description="Show what would happen, on one screen.")
    plan.add_argument("file", metavar="FILE", help="a .pdsl file, or a plan that was written with -o")
    plan.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan, for `pdsl run`")
    plan.add_argument("--format", choices=("text", "json"), default="text", help="what goes to standard output (default: text)")
    plan.add_argument("--svg", metavar="FILE", help="write the schedule as a picture")
    plan.add_argument("--origins", action="store_true", help="show every value of the spec and where it came from")
    plan.add_argument("--print-after", metavar="PASS", action="append", default=[], help="show what a pass of the planner found")
    _spec_options(plan)

    run = commands.add_parser("run", help="train", description="Train: on local processes, or as one rank of many under torchrun.")
    run.add_argument("file", metavar="FILE", help="a .pdsl file, or a plan that was written with -o")
    run.add_argument("--steps", type=_positive, metavar="N", help="steps to take instead of those of the spec")
    run.add_argument(
        "--resume", action="store_true", help="begin where the newest checkpoint ends; with the first step if there is none yet"
    )
    run.add_argument("--metrics", metavar="FILE", help="write one JSON object a step")
    run.add_argument("--port", type=_positive, default=0, metavar="N", help="the port where the ranks meet (default: any free one)")
    run.add_argument("--log-dir", metavar="FOLDER", help="write what each rank has to say into a file of its own")
    _spec_options(run)

    agent = commands.add_parser(
        "agent",
        help="run one node of many",
        description="Run one node of a plan with a fault budget; on each machine one. SIGTERM lets the node leave at the next boundary of steps.",
    )
    _agent_options(agent)
    _spec_options(agent)

    verify = commands.add_parser(
        "verify", help="compare the plan with one process", description="Run a few steps of the plan and compare with one process."
    )
    verify.add_argument("file", metavar="FILE", help="a .pdsl file, or a plan that was written with -o")
    verify.add_argument("--steps", type=_positive, default=3, metavar="N", help="steps to take (default: 3)")
    verify.add_argument(
        "--tolerance", type=_tolerance, metavar="X", help="largest relative deviation that passes (default: 1e-5, in low precision 2e-2)"
    )
    _spec_options(verify)

    chaos = commands.add_parser(
        "chaos",
        help="train with faults on purpose",
        description="Train with random faults in random states, on nodes simulated on this machine, and compare with an undisturbed run.",
    )
    _chaos_options(chaos)
    _spec_options(chaos)

    _simulate_options(
        commands.add_parser(
            "simulate",
            help="goodput under failures, by recovery strategy",
            description="How much of the time a plan trains while nodes are lost, by recovery strategy. Starts nothing.",
        )
    )

    explain = commands.add_parser("explain", help="why a rule exists", description="Why a rule exists, with a bad and a good example.")
    explain.add_argument(
        "code",
        nargs="?",
        metavar="CODE",
        help="such as PDL402, or composability for the table of what works together; without one all codes are listed",
    )

    init = commands.add_parser("init", help="write a starter spec", description="Write a commented starter spec.")
    init.add_argument("name", nargs="?", default="train.pdsl", metavar="NAME", help="the file to write (default: train.pdsl)")
    return parser, commands.choices


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .pdsl file, or a plan that was written with -o")
    parser.add_argument(
        "--failures",
        metavar="TRACE",
        required=True,
        help="a file with lines of ms,add|remove,node; or rate:R, losses a node and day; or every:S, one loss in S seconds",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what goes to standard output (default: text)")
    parser.add_argument("--svg", metavar="FILE", help="write nodes alive and goodput over time as a picture")
    parser.add_argument("--strategy", metavar="NAME", action="append", default=[], help="one of the strategies alone; may be repeated")
    drawn = parser.add_argument_group("drawn traces (rate:R and every:S)")
    drawn.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same losses (default: 0)")
    drawn.add_argument("--days", type=_above_zero, default=30.0, metavar="D", help="length of the trace (default: 30)")
    drawn.add_argument("--nodes", type=_positive, metavar="N", help="nodes at the start (default: those of the plan)")
    drawn.add_argument("--rack-rate", type=_not_below_zero, default=0.0, metavar="R", help="events a node and day that take neighbours too")
    drawn.add_argument(
        "--rack-size", type=_above_zero, default=4.0, metavar="K", help="nodes that such an event takes on average (default: 4)"
    )
    drawn.add_argument("--repair-hours", type=_not_below_zero, metavar="H", help="lost nodes come back after H hours (default: never)")
    times = parser.add_argument_group("times, in seconds (what is not given is assumed, and told)")
    times.add_argument("--step-seconds", type=_above_zero, metavar="S", help="a step of the plan as it stands, measured")
    times.add_argument("--flops-per-rank", type=_above_zero, metavar="F", help="FLOP/s of a rank, where no step was measured")
    times.add_argument("--recovery-seconds", type=_not_below_zero, metavar="S", help="from a loss until PDSL trains on, measured")
    times.add_argument("--restart-seconds", type=_not_below_zero, metavar="S", help="from a loss until a restarted job trains")
    times.add_argument("--checkpoint-seconds", type=_not_below_zero, metavar="S", help="standing still while a checkpoint is written")
    times.add_argument("--checkpoint-every", type=_positive, metavar="N", help="steps from one checkpoint to the next")
    _spec_options(parser)


def _chaos_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .pdsl file, or a plan that was written with -o")
    parser.add_argument("--seed", type=_count, default=0, metavar="N", help="seed of the first run; same seed, same faults (default: 0)")
    parser.add_argument(
        "--kills", type=_positive, metavar="K", help="faults in a run, each on a node of its own (default: those of the budget)"
    )
    parser.add_argument("--runs", type=_positive, default=5, metavar="R", help="disturbed runs, of seeds N, N + 1, ... (default: 5)")
    parser.add_argument("--steps", type=_positive, metavar="S", help="steps of a run (default: those of the spec, 12 at most)")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=1e-6, metavar="X", help="largest relative deviation of a loss that passes (default: 1e-6)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what goes to standard output (default: text)")


def _agent_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .pdsl file, or a plan that was written with -o; the same on every machine")
    parser.add_argument(
        "--rendezvous",
        required=True,
        metavar="HOST:PORT[,...]",
        help="where the agents meet: addresses of nodes, the same everywhere; who comes later finds any of them that lives",
    )
    parser.add_argument("--node", type=int, metavar="K", help="the number of this node (default: the first that is free)")
    parser.add_argument("--host", metavar="ADDRESS", help="the address at which the others reach this machine (default: found by itself)")
    parser.add_argument("--patience", type=float, default=300.0, metavar="SECONDS", help="how long to wait for the others (default: 300)")
    parser.add_argument(
        "--steps", type=_positive, metavar="N", help="steps to take instead of those of the spec; the same on every machine"
    )
    parser.add_argument("--resume", action="store_true", help="begin where the newest checkpoint ends; the same on every machine")
    parser.add_argument("--metrics", metavar="FILE", help="write one JSON object a step, as this node sees it")
    parser.add_argument("--log-dir", metavar="FOLDER", help="write what each rank has to say into a file of its own")


def _spec_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", metavar="NAME=VALUE", action="append", default=[], help="set a param, or a value such as train.batch=8"
    )
    parser.add_argument("--profile", metavar="NAME", help="apply a profile of the spec")
    parser.add_argument("--world", type=_positive, metavar="N", help="the number of ranks, where the spec leaves it open")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; raises nothing but what PDSL_DEBUG=1 lets through."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parse(sys.argv[1:] if argv is None else list(argv))
        status = CLEAN if options is None else _run(options)
        sys.stdout.flush()
        return status
    except Invocation as error:
        return _say(str(error), USAGE)
    except Findings:
        return FINDINGS
    except BrokenPipeError:
        _silence()
        return CLEAN
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            return _failed(error)
        _silence()
        return _say(f"the output cannot be written: {error.strerror}", USAGE)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except SystemExit as ending:
        return _say(f"code that the spec names ended the process: SystemExit({ending.code})", FINDINGS)
    except Exception as error:  # noqa: BLE001  the last resort: nobody but a developer of PDSL wants a traceback
        return _failed(error)


def _parse(argv: list[str]) -> argparse.Namespace | None:
    """The options of a command, or None if help or the version was asked for and shown. Raises Invocation."""
    parser, by_name = arguments()
    if argv and not argv[0].startswith("-") and argv[0] not in by_name:
        raise Invocation(f"there is no command {argv[0]!r}{_near(argv[0], by_name)}")
    try:
        options, unknown = parser.parse_known_args(argv)
    except SystemExit:  # argparse, once it has shown the help
        return None
    if unknown:
        offered = [o for action in by_name[options.command]._actions for o in action.option_strings] if options.command else ["--version"]
        raise Invocation(f"unknown option {unknown[0]}{_near(unknown[0].split('=')[0], offered)}\ntry: pdsl {options.command or ''} --help")
    if options.version:
        import pdsl

        sys.stdout.write(f"pdsl {pdsl.__version__}\n")
        return None
    if options.command is None:
        parser.print_help()
        return None
    return options


def _run(options: argparse.Namespace) -> int:
    from pdsl import commands

    if options.command != "check":
        gc.enable()  # the console script starts without

    status: int = getattr(commands, options.command)(options)
    return status


def _near(word: str, known: Iterable[str]) -> str:
    """The one that was meant, or all there are."""
    from difflib import get_close_matches

    known = list(known)
    close = get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _failed(error: Exception) -> int:
    from pdsl.grammar.errors import PdslError, PeerError

    if os.environ.get("PDSL_DEBUG"):
        raise error
    if isinstance(error, PeerError):  # the rank that failed by itself speaks for all
        return FINDINGS
    if isinstance(error, PdslError):
        return _say(str(error), FINDINGS)
    told = " ".join(str(error).split())
    return _say(f"{type(error).__name__}: {told}\nthis is a fault of PDSL; run with PDSL_DEBUG=1 for the traceback", FINDINGS)


def _say(message: str, status: int) -> int:
    try:
        sys.stdout.flush()
        sys.stderr.write(f"pdsl: {message}\n")
    except BrokenPipeError:
        _silence()
    return status


def _silence() -> None:
    """Let the interpreter flush into nothing at its end: whoever read the output has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
