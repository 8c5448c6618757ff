"""The arguments and options of most commands, each declared once: its type, its name and its help.

Those of `train` alone are in `train_arguments`; those of some other commands in `check_options`, `runs_options` and
`search_options`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from loop.checkpoint.store import address
from loop.commands import completion
from loop.commands.cli import help as help_
from loop.commands.runs import directories
from loop.errors import UsageError
from loop.options import BACKENDS


def _with_own_message(read: Callable[[str], Path | str]) -> Callable[[str], Path | str]:
    """A parser whose errors keep their message: typer replaces that of a `ValueError` by one of its own."""

    def parse(text: str) -> Path | str:
        try:
            return read(text)
        except UsageError as error:
            raise BadParameter(str(error)) from None

    return parse


def _file(text: str | Path) -> Path:
    """The path of a file that is written; a default is a path already."""
    if isinstance(text, str) and text.endswith("/"):  # which a `Path` leaves out
        raise UsageError(f"{text}: this is the name of a directory, and a file is written: leave out the slash")
    return Path(text)


written_file = _with_own_message(_file)
"""The parser of an option that names a file to write."""

# An option of each theme of the help.
first = partial(Option, rich_help_panel=help_.FIRST)
length = partial(Option, rich_help_panel=help_.LENGTH)
devices = partial(Option, rich_help_panel=help_.DEVICES)
hosts = partial(Option, rich_help_panel=help_.HOSTS)
numbers = partial(Option, rich_help_panel=help_.NUMBERS)
speed = partial(Option, rich_help_panel=help_.SPEED)
saving = partial(Option, rich_help_panel=help_.SAVING)
tracking = partial(Option, rich_help_panel=help_.TRACKING)
trouble = partial(Option, rich_help_panel=help_.TROUBLE)

# None means that an option wasn't typed: then the task's own default counts, which a signature can't know. An option
# whose type has no None has its default in the command's signature.
UNTYPED: list[Any] = []
"""The default of an option that can be repeated."""

# Options of many commands.
Target = Annotated[
    str,
    Argument(
        metavar="TARGET",
        help="file.py:Class, package.module:Class, or a shipped example: digits, charlm, gan, ...",
        autocompletion=completion.targets,
    ),
]
RunDir = Annotated[
    str,
    Argument(
        metavar="RUN",
        help="A run: its directory or a checkpoint in it, its URL, its name in runs/, the beginning of one, or latest.",
        autocompletion=completion.runs,
    ),
]
TaskTarget = Annotated[
    str | None, Option("--target", help="The task, if not the one with which you trained there on this machine.")
]
Trust = Annotated[bool, Option("--trust", help="Use what the directory itself names: code that it names is run.")]
Set = Annotated[list[str], first("--set", metavar="KEY=VALUE", help="A field of the task; repeatable.")]
Epochs = Annotated[int | None, first(help="Passes over the training data.")]
Steps = Annotated[int | None, first(help="Optimizer steps, instead of epochs.")]
BatchSize = Annotated[int | None, first(help="The global batch, over all replicas.")]
Backend = Annotated[
    str | None,
    first(
        help=f"{', '.join(BACKENDS)}, or a plug-in's name.",
        autocompletion=completion.backends,
    ),
]
Workers = Annotated[int | None, first(help="Processes on this machine; with mirrored, central: replicas.")]
AsJson = Annotated[bool, Option("--json", help="The last line of stdout is the result as JSON.")]
Seed = Annotated[int | None, first(help="Of initial weights and of the data's order.")]
EvalEvery = Annotated[
    str | None, length(help="epoch, never, or a number of steps; or val=epoch,test=500 of several sets.")
]
Track = Annotated[str | None, first(help="MLflow's tracking URI, or off.")]
Replicas = Annotated[int | None, Option(help="Replicas, with mirrored or central.")]
Config = Annotated[
    list[Path],
    first(
        "--config", help="A TOML or YAML file of train's options, and a table [set]; what is typed wins. Repeatable."
    ),
]
_root = Option(
    parser=_with_own_message(directories.root),
    metavar="DIR|URL",
    help="Where the runs are; runs/ if not given.",
    show_default=False,
)
Root = Annotated[Path, _root]
GroupRoot = Annotated[Path | None, _root]  # of the commands of `runs`; None: the `--root` before their name counts
_NAMED = "A name, the beginning of one, a path, a URL, or latest."
Name = Annotated[str, Argument(metavar="RUN", help=_NAMED, autocompletion=completion.runs)]
Names = Annotated[list[str], Argument(metavar="RUN", help=_NAMED, autocompletion=completion.runs)]

# Options of train, and of commands that train as it does.
Launcher = Annotated[str | None, hosts(metavar="ray", help="What starts the workers, if not tfloop itself: ray.")]
Address = Annotated[str | None, hosts(metavar="HOST:PORT", help="The head of the Ray cluster, or auto.")]
CpusPerWorker = Annotated[int | None, hosts(metavar="N", help="CPUs that Ray counts for each worker; 1.")]
Placement = Annotated[str | None, hosts(help="Ray: pack (few nodes, the default) or spread.")]
TrainRunDir = Annotated[
    Path | None,
    first(
        parser=_with_own_message(address.run_dir),  # a URL stays a text, whatever the annotation says
        metavar="DIR|URL",
        help="The run directory, or s3://bucket/path (gs, az, https, file); a new one below runs/ if not given.",
    ),
]

# Options of evaluate, and of predict.
UseBackend = Annotated[str | None, Option(help="auto, single, mirrored, central, multiworker or horovod.")]
EvaluateBatchSize = Annotated[int | None, Option(help="The global batch.")]

# Options of predict.
PredictData = Annotated[
    str,
    Argument(
        metavar="[DATA]", help="eval, train, test or a set of the task; or a file .npy, .npz, .parquet of inputs."
    ),
]
PredictOut = Annotated[
    Path,
    Option(parser=written_file, metavar="FILE", help="What is written: OUT.parquet, OUT.npy, OUT.npz or OUT.jsonl."),
]
PredictWorkers = Annotated[int | None, Option("--workers", help="Processes on this machine.")]
PredictBatchSize = Annotated[int | None, Option("--batch-size", help="Examples in a block, computed at once.")]
PredictThreads = Annotated[
    int | None, Option("--threads", help="TensorFlow's threads for an operation, in each worker; all cores.")
]

# Options of export.
Out = Annotated[
    str,
    Argument(
        metavar="OUT",
        help="OUT.npz (weights), OUT.keras (Keras file), OUT.onnx, OUT.tflite, or a directory (SavedModel).",
    ),
]
Check = Annotated[
    bool,
    Option("--check/--no-check", help="Load it in a new process, and compare outputs to 1e-6 (ONNX and LiteRT: 1e-5)."),
]
Serving = Annotated[
    bool, Option("--serving", help="The layout that TensorFlow Serving reads, and a Dockerfile that serves it.")
]

# Options of new and ui.
NewName = Annotated[str, Argument(metavar="NAME", help="Of the file, without .py.")]
Port = Annotated[int, Option(max=65535, min=1, help="The port; another one is taken if it is in use.")]
Host = Annotated[str, Option(help="The address to listen on; loopback unless told otherwise.")]
