"""The command `tfloop`: how it begins and ends, and its commands, whose signatures are in `loop/commands/cli/`."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C, by the shell's convention."""
CLOSED = []
STREAMS = []
"""The streams that replace closed ones. They are kept, since `guard_streams` uses their buffers."""
for descriptor in range(3):  # in this order: each takes the lowest number that is free
    try:
        os.fstat(descriptor)
    except OSError:  # closed by `>&-`: the next file that is opened would get this number, and what is printed
        CLOSED.append(os.open(os.devnull, os.O_RDWR))
        os.set_inheritable(descriptor, True)
        if descriptor:
            STREAMS.append(open(descriptor, "w"))  # noqa: SIM115
            setattr(sys, "stdout" if descriptor == 1 else "stderr", STREAMS[-1])


def leave(number: int, frame: object) -> None:
    """Ends the process silently, on Ctrl-C during the imports. Afterwards, `main` handles it."""
    os._exit(INTERRUPTED)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    try:  # noqa: SIM105 - nothing is loaded before it
        signal.signal(signal.SIGINT, leave)
    except ValueError:  # in a thread
        pass

import contextlib
import importlib.metadata
from typing import Annotated

import typer
from typer import Option

from callbacks.run_record.redaction import guard_streams, tell
from loop.commands import command_line
from loop.commands.cli import help as help_
from loop.commands.cli.checks import chaos, replay, rerun, verify
from loop.commands.cli.machine import doctor, new, ui
from loop.commands.cli.runs import report, runs_app, sync, tail, watch
from loop.commands.cli.search import bench, find_lr, memory, sweep, tune
from loop.commands.cli.training import Configurable, evaluate, export, predict, train
from loop.errors import FAILED, no_exit
from loop.launch import signals
from loop.launch.environment import JOB, forget_inherited_job

app = typer.Typer(
    cls=help_.Group,
    help="Trains TensorFlow models: the same task, and the same numbers, on one device or many.",
    no_args_is_help=True,
    context_settings={"max_content_width": 100},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def print_version(asked: bool) -> None:
    """Prints the version, if it is asked for, and ends."""
    if asked:
        print(f"tfloop {importlib.metadata.version('tfloop')}")
        raise typer.Exit


@app.callback()
def tfloop(
    version: Annotated[
        bool, Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


# The order of the help.
help_.add(app, help_.TRAIN, {"new": new, "train": train, "sweep": sweep}, train=Configurable)
app.add_typer(runs_app, name="runs", rich_help_panel=help_.LOOK)
help_.add(app, help_.LOOK, {"tail": tail, "watch": watch, "report": report, "ui": ui, "sync": sync})
help_.add(app, help_.CHECK, {"doctor": doctor, "verify": verify, "rerun": rerun, "replay": replay, "chaos": chaos})
help_.add(app, help_.TUNE, {"find-lr": find_lr, "tune": tune, "memory": memory, "bench": bench})
help_.add(app, help_.USE, {"evaluate": evaluate, "predict": predict, "export": export})


def tell_if_closed() -> None:
    """Says that a result has no stdout to go to, and writes what stderr still holds."""
    with contextlib.suppress(OSError):  # a terminal that is gone
        if 1 in CLOSED and "--json" in sys.argv:
            print("note: stdout is closed: the result isn't shown", file=sys.stderr)
        sys.stderr.flush()


def main() -> None:
    """Runs the command; a wrong input is one line and exit code 2."""
    guard_streams()
    command_line.show_own_warnings_as_lines()
    forget_inherited_job()
    heard: list[int] = []
    try:
        command_line.check(sys.argv[1:])
        # Training, and the workers of a job, have handlers of their own.
        own = JOB in os.environ or sys.argv[1:2] == ["train"]
        with contextlib.nullcontext(heard) if own else signals.interrupting() as heard, no_exit():
            code = typer.main.get_command(app).main(prog_name="tfloop", standalone_mode=False) or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit:
        raise
    # Not `Exception` alone: Python's own traceback, as of an `asyncio.CancelledError`, would show secrets.
    except BaseException as error:
        code = command_line.report_error(error)
    # typer makes 130 of each KeyboardInterrupt. The shell's convention is 128 and the signal.
    if code == INTERRUPTED and heard not in ([], [signal.SIGINT]):
        code = 128 + heard[0]
        tell(f"stopped by {signal.Signals(heard[0]).name}")
    tell_if_closed()
    # Output that could not be written, such as to a full disk, is a failure of the command.
    code = code if command_line.flushed() else code or FAILED
    command_line.tell_of_threads()
    sys.exit(code)


# All is loaded: from here on, Ctrl-C raises `KeyboardInterrupt`, as in other programs.
if signal.getsignal(signal.SIGINT) is leave:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if __name__ == "__main__":
    main()
