"""The command ``gradsync``: reads the command line and hands over; torch is never imported here."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence

from gradsync import __version__
from gradsync.errors import DistError

__all__ = ["main"]

_RUN_HELP = """\
Start a program as N ranks on this host. Inside, gradsync.init_process_group() needs no arguments.
When a rank fails, the others are ended and the first failure is reported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    >>> main(["run", "-n", "2", "train.py"])  # doctest: +SKIP
    0
    """
    _open_standard_streams()
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except DistError as error:
        print(f"gradsync: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gradsync: cannot start {options.program!r}: {error}", file=sys.stderr)
        return 126


def _open_standard_streams() -> None:
    """Put /dev/null in the place of streams that are closed (``>&-``).

    Otherwise what is opened next gets their numbers, and what ranks write goes there.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            mode = "r" if fd == 0 else "w"
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115  (for good)


def _run(options: argparse.Namespace) -> int:
    # Here and not above: `gradsync run --help` is answered without the store and the launcher.
    from gradsync.launch.job import one_for_each_core
    from gradsync.launch.run import run

    if options.no_python:
        if shutil.which(options.program) is None:
            print(f"gradsync run: no program {options.program!r} to run", file=sys.stderr)
            return 127
        command = [options.program, *options.args]
    else:
        # Unbuffered, so that lines appear when they are written and none is lost with a rank.
        module = ["-m"] if options.module else []
        command = [sys.executable, "-u", *module, options.program, *options.args]
    return run(
        command,
        options.nprocs or one_for_each_core(),
        threads=options.threads,
        grace_s=options.grace,
        linger_s=options.linger,
        signal_children=options.no_python,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradsync", description="Data-parallel training.")
    parser.add_argument("--version", action="version", version=f"gradsync {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="start a program as N ranks",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="gradsync run [-n N] [options] (script.py | -m module | --no-python program) [args]",
    )
    run.add_argument(
        "-n",
        "--nprocs",
        "--nproc-per-node",
        "--nproc_per_node",
        type=_ranks,
        default=1,
        metavar="N",
        help="how many ranks (default: 1); auto or cpu: one for each core",
    )
    run.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="OMP_NUM_THREADS of each rank (default: what is set, else cores / N)",
    )
    run.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds between asking ranks to end and killing them (default: 10)",
    )
    run.add_argument(
        "--linger",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="seconds in which the others may end by themselves when a rank fails (default: 0)",
    )
    run.add_argument(
        "--standalone", action="store_true", help="as for torchrun; a job on one host always is"
    )
    how = run.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="the program is a Python module")
    how.add_argument("--no-python", action="store_true", help="the program is no Python script")
    run.add_argument("program", help="what to run")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _ranks(text: str) -> int | None:
    """Return how many, None for one for each core."""
    if text in ("auto", "cpu"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, or auto, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value
