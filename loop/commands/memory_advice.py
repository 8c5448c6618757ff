"""After a lack of memory in training: the table of `tfloop memory` on stderr.

It is measured by a process that takes the place of the one that has trained, and so frees all its memory, that of a GPU
too: `python -m loop.commands.memory_advice REQUEST`. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import typer

from callbacks.run_record.redaction import guard_streams, tell
from loop.commands import memory, memory_measurements, terminal
from loop.commands.cli.output import shown_stages, stopped_clean
from loop.commands.tune import available
from loop.errors import FAILED, TrainingError, UsageError


def replace_process(
    target: str,
    assignments: Sequence[str],
    batch_size: int | None,
    workers: int,
    options: Mapping[str, Any],
    share: float,
) -> NoReturn:
    """Ends this process, which has failed, with the table; its arguments are those of `memory.memory`.

    `share` is the part of this machine's memory that a worker may take.
    """
    request = json.dumps([target, list(assignments), batch_size, workers, dict(options), share])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "loop.commands.memory_advice", request])  # noqa: S606


def main() -> NoReturn:
    """Measures and prints; the exit code is that of the training that has failed."""
    guard_streams()
    target, assignments, batch_size, workers, options, share = json.loads(sys.argv[1])
    tell("measuring what each setting needs; Ctrl-C leaves it out ...")
    try:
        with stopped_clean("nothing is left behind"), shown_stages(memory_measurements.STAGES) as progress:
            limit = share * available()
            report = memory.memory(target, assignments, batch_size, workers, limit, progress, options)
    except (UsageError, TrainingError, typer.Exit) as error:
        if not isinstance(error, typer.Exit):  # it was interrupted
            tell(f"tfloop memory: {error}")
        sys.exit(FAILED)
    # stdout is for the result, of which there is none.
    with contextlib.redirect_stdout(sys.stderr):
        terminal.write(memory.lines(report))
    sys.exit(FAILED)


if __name__ == "__main__":
    main()
