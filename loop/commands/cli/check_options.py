"""The options of `tfloop verify`, `replay` and `chaos` alone; see `options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from loop.commands import completion

# Options of verify.
VerifyBatchSize = Annotated[int | None, Option(help="The global batch; the task's own if not given.")]
VerifyCompile = Annotated[str | None, Option("--compile", help="graph or xla; the task's own if not given.")]
Processes = Annotated[bool, Option(help="Also in 2 real processes, not in logical devices alone.")]
# Not for users: `verify` gives it to the workers that it starts.
Record = Annotated[Path | None, Option(hidden=True)]

# Options of replay.
Kept = Annotated[
    str, Argument(metavar="RUN", help="RUN_DIR/bad/step-..., or a run: its newest one.", autocompletion=completion.runs)
]

# Options of chaos.
Kills = Annotated[int, Option(help="How many processes are killed, one after the other.")]
ChaosCheckpointEvery = Annotated[
    str | None, Option(help="epoch, a number of steps, or a time; if not given, some ten times in the run.")
]
ChaosMigrate = Annotated[
    bool, Option("--migrate", help="Go on on another machine after each kill: on 2 workers, on 3, at last on 1.")
]
ChaosStore = Annotated[str | None, Option(metavar="URL", help="A folder in object storage, for the runs with kills.")]
ChaosSeed = Annotated[int, Option(help="Of the moments of the kills, and of the training.")]
ChaosKeep = Annotated[Path | None, Option(help="Where to keep all runs; they are removed if not given.")]
