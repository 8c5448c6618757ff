"""The options of `tfloop tune`, `bench`, `memory`, `sweep` and `find-lr` alone; see `options`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from loop.commands.cli import help as help_
from loop.commands.cli.options import written_file
from loop.commands.tune import TUNED

# Options of tune and bench.
Only = Annotated[list[str], Option(metavar="NAME", help=f"What to try, of {', '.join(TUNED)}; repeatable.")]
Seconds = Annotated[float, Option(help="How long a trial measures, when it is warm.")]
BenchRounds = Annotated[int, Option(min=1, help="How often each is measured, in turns.")]
Rounds = Annotated[int, Option(min=1, help="How often settings that are close are measured, in turns.")]
TuneBatchSize = Annotated[
    bool,
    Option("--tune-batch-size", help="Take the fastest batch size, too: with another one, something else is learned."),
]
TuneOut = Annotated[
    Path, Option(parser=written_file, metavar="FILE", help="Where to write the best settings, for --config.")
]
Force = Annotated[bool, Option("--force", help="Write over the file.")]

# Options of sweep.
_trials = partial(Option, rich_help_panel=help_.TRIALS)
SweepTarget = Annotated[
    str, Argument(metavar="TARGET", help="As for train; or the directory of a sweep, to go on with it.")
]
Grid = Annotated[list[str], _trials(metavar="FIELD=A,B,...", help="Try each of these values; repeatable.")]
Random = Annotated[
    list[str], _trials(metavar="FIELD=LOW..HIGH", help="Draw values; add :log for a wide range; repeatable.")
]
Trials = Annotated[int | None, _trials(help="How many; all combinations of the grid if not given.")]
SweepMetric = Annotated[str, _trials(help="What is to be best, at the end of a trial.")]
Direction = Annotated[str | None, _trials(help="minimize or maximize; by the metric's name.")]
Jobs = Annotated[int, _trials(min=1, max=256, help="How many trials are under way at once.")]
Sampler = Annotated[str, _trials(help="How --random draws: tpe (learns from the trials) or random.")]
Pruner = Annotated[str, _trials(help="median ends trials that are worse than half of those before; or none.")]
SweepDir = Annotated[
    Path | None, _trials(help="The directory of the sweep; if not given, one for this command below runs/.")
]
SweepSeed = Annotated[int | None, _trials(help="Of what is drawn, and of the training.")]

# Options of find-lr. Fewer steps than this don't show where the loss falls.
FindLrSteps = Annotated[int, Option(min=10, max=100_000, help="How many steps to make.")]
Low = Annotated[float, Option(help="The learning rate of the first step.")]
High = Annotated[float, Option(help="That of the last one.")]
FindLrBackend = Annotated[str | None, Option(help="single, mirrored or central.")]
FindLrOut = Annotated[
    Path | None,
    Option(parser=written_file, metavar="FILE", help="Where to write the plot (.png, .svg) or the numbers (.json)."),
]

# Options of memory.
Memory = Annotated[
    str | None,
    Option(
        "--memory", metavar="SIZE", help="What a replica has, such as 16GB: show which settings fit, and the fastest."
    ),
]
MemoryWorkers = Annotated[int, Option("--workers", help="Replicas that share the global batch.", min=1, max=100_000)]
