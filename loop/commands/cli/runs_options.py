"""The options of `tfloop runs`, `tail`, `report`, `watch` and `sync` alone; see `options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from loop.commands import completion
from loop.commands.cli.options import written_file

# Options of runs, and of the commands in its group.
Metric = Annotated[str | None, Option(help="The metric to show; if not given: eval_loss, or loss without evaluation.")]
Drawn = Annotated[str | None, Option(help="The metric to draw; if not given, the first two.")]
Filter = Annotated[
    list[str],
    Option("--filter", metavar="CONDITION", help="status=finished, eval_loss<0.3, hidden>=64, ...; repeatable."),
]
Sort = Annotated[
    str | None, Option(help="A column, metric or hyperparameter; with a - before it, the other way round.")
]
Yes = Annotated[bool, Option("--yes", help="Don't ask.")]

# Options of tail.
Count = Annotated[int, Option("-n", min=0, help="How many events of before are shown first.")]
Follow = Annotated[bool, Option("--follow/--no-follow", help="Show what comes until the run ends.")]

# Options of report.
ReportNames = Annotated[
    list[str],
    Argument(
        metavar="RUN... [OUT.html]",
        help="A run, or several to compare: name, path, ...",
        autocompletion=completion.runs,
    ),
]
ReportOut = Annotated[
    Path | None,
    Option(
        "--out",
        parser=written_file,
        metavar="FILE",
        help="The page; if not given: report.html in the run's directory; of several: comparison.html here.",
    ),
]

# Options of watch and sync.
WatchPort = Annotated[int, Option("--port", max=65535, min=1, help="The port; another one is taken if it is in use.")]
SyncTrack = Annotated[str | None, Option(help="MLflow's tracking URI; the run's own if not given.")]
