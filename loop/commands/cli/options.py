"""The arguments and options of the command line, each declared once: its type, its name and its help."""

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
_first = partial(Option, rich_help_panel=help_.FIRST)
_length = partial(Option, rich_help_panel=help_.LENGTH)
_devices = partial(Option, rich_help_panel=help_.DEVICES)
_hosts = partial(Option, rich_help_panel=help_.HOSTS)
_numbers = partial(Option, rich_help_panel=help_.NUMBERS)
_speed = partial(Option, rich_help_panel=help_.SPEED)
_saving = partial(Option, rich_help_panel=help_.SAVING)
_tracking = partial(Option, rich_help_panel=help_.TRACKING)
_trouble = partial(Option, rich_help_panel=help_.TROUBLE)

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
Set = Annotated[list[str], _first("--set", metavar="KEY=VALUE", help="A field of the task; repeatable.")]
Epochs = Annotated[int | None, _first(help="Passes over the training data.")]
Steps = Annotated[int | None, _first(help="Optimizer steps, instead of epochs.")]
BatchSize = Annotated[int | None, _first(help="The global batch, over all replicas.")]
Backend = Annotated[
    str | None,
    _first(
        help="auto, single, mirrored, central, multiworker, horovod, parameter_server, tpu, or a plug-in's name.",
        autocompletion=completion.backends,
    ),
]
Workers = Annotated[int | None, _first(help="Processes on this machine; with mirrored, central: replicas.")]
AsJson = Annotated[bool, Option("--json", help="The last line of stdout is the result as JSON.")]
Seed = Annotated[int | None, _first(help="Of initial weights and of the data's order.")]
EvalEvery = Annotated[
    str | None, _length(help="epoch, never, or a number of steps; or val=epoch,test=500 of several sets.")
]
EvalBeside = Annotated[
    str | None, _length(metavar="cpu|gpu:N", help="Evaluate its checkpoints in a process beside it.")
]
Track = Annotated[str | None, _first(help="MLflow's tracking URI, or off.")]
Replicas = Annotated[int | None, Option(help="Replicas, with mirrored or central.")]
Config = Annotated[
    list[Path],
    _first(
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

# Options of train: devices, servers and hosts.
Ps = Annotated[int | None, _devices(help="Parameter servers, with parameter_server; 1.")]
MinShardBytes = Annotated[
    int | None, _devices(help="Cut variables into shards of at least so many bytes, over the --ps servers.")
]
Partition = Annotated[
    str | None,
    _devices(
        metavar="HOW", help="Cut variables of parameter servers: fixed:N shards, min:SIZE or max:SIZE of a shard."
    ),
]
Communication = Annotated[
    str,
    _devices(
        metavar="HOW", help="Of gradients: auto; multiworker: ring, nccl; mirrored: nccl, hierarchical, one-device."
    ),
]
Hosts = Annotated[
    str | None, _hosts("--hosts", metavar="H1:4,H2:4", help="Processes on several hosts, started over ssh.")
]
Launcher = Annotated[str | None, _hosts(metavar="ray", help="What starts the workers, if not tfloop itself: ray.")]
Address = Annotated[str | None, _hosts(metavar="HOST:PORT", help="The head of the Ray cluster, or auto.")]
CpusPerWorker = Annotated[int | None, _hosts(metavar="N", help="CPUs that Ray counts for each worker; 1.")]
Placement = Annotated[str | None, _hosts(help="Ray: pack (few nodes, the default) or spread.")]
Interface = Annotated[str | None, _hosts(help="Where the hosts meet, if not as ssh finds them: eth1, or 10.0.0.0/24.")]
RemotePython = Annotated[str | None, _hosts(help="Python on the other hosts, if not at the same path.")]
Devices = Annotated[
    str | None, _devices(metavar="LIST", help="With mirrored, central: a replica on each, as gpu:0,gpu:2.")
]
DevicesPerReplica = Annotated[
    int | None, _devices(metavar="N", help="A model is spread over so many devices by loop.device (single, horovod).")
]
Tpu = Annotated[str | None, _devices(metavar="NAME", help="The TPU, for the backend tpu; TPU_NAME.")]
Elastic = Annotated[
    str | None, _hosts("--elastic", metavar="MIN:MAX", help="Go on while so many workers live (horovod).")
]
Discovery = Annotated[
    Path | None, _hosts(metavar="SCRIPT", help="With --elastic: prints host:slots, asked each second.")
]

# Options of train: the run, its numbers and its speed.
TrainRunDir = Annotated[
    Path | None,
    _first(
        parser=_with_own_message(address.run_dir),  # a URL stays a text, whatever the annotation says
        metavar="DIR|URL",
        help="The run directory, or s3://bucket/path (gs, az, https, file); a new one below runs/ if not given.",
    ),
]
Resume = Annotated[str | None, _saving(help="auto, never, or the path of a checkpoint.")]
Shuffle = Annotated[bool | None, _length("--shuffle/--no-shuffle", help="Permute the data each epoch.")]
DropRemainder = Annotated[
    bool | None, _length("--drop-remainder/--no-drop-remainder", help="Leave out an epoch's last batch if it is short.")
]
Precision = Annotated[str | None, _numbers(help="float32, float64, bfloat16 or mixed_float16.")]
Accumulate = Annotated[int | None, _numbers(help="Micro-batches in a global batch.")]
Compression = Annotated[str | None, _numbers(help="Of gradients between replicas: none, fp16 or bf16.")]
Groups = Annotated[int | None, _numbers(help="Collectives in which gradients are reduced.")]
Reduction = Annotated[str | None, _numbers(help="Of gradients: sum; or adasum, which is inexact.")]
LocalSteps = Annotated[int | None, _numbers(help="Steps that replicas make between two averages: inexact; 1: exact.")]
ClipNorm = Annotated[float | None, _numbers(help="Greatest global norm of the gradient.")]
ClipValue = Annotated[float | None, _numbers(help="Greatest absolute value in the gradient.")]
OnNonfinite = Annotated[str | None, _numbers(help="stop or skip, when a gradient is not finite.")]
AcceptChanges = Annotated[bool | None, _saving("--accept-changes", help="Go on with other settings than the run had.")]
StallTimeout = Annotated[float | None, _trouble(help="Seconds after which a run that hangs says where.")]
Profile = Annotated[str | None, _trouble(metavar="A:B", help="Trace steps A to B, and tell where the time goes.")]
SyncBatchNorm = Annotated[
    bool | None, _numbers("--sync-batch-norm/--no-sync-batch-norm", help="Its statistics over all replicas.")
]
ShardOptimizer = Annotated[
    bool | None, _speed("--shard-optimizer", help="Each replica holds a part of the optimizer's state: saves memory.")
]
Ema = Annotated[float | None, _numbers(help="Decay of a moving average of the weights.")]
Remat = Annotated[
    str | None, _speed(metavar="full|64MB|NAMES", help="Layers computed again on the way back, to save memory.")
]
Compile = Annotated[str | None, _speed("--compile", help="graph, xla, or auto: the faster one.")]
StepsPerCall = Annotated[str | None, _speed(help="Steps in a compiled call, or auto.")]
Prefetch = Annotated[str | None, _speed(help="Batches that a stream is read ahead, or auto.")]
Threads = Annotated[int | None, _speed(help="TensorFlow's threads in each worker; its share of the cores.")]

# Options of train: saving, tracking and trouble.
CheckpointEvery = Annotated[
    str | None, _saving(help="epoch, a number of steps, or a time such as 10m; auto: epochs, at most one in 10 s.")
]
TrackWait = Annotated[float | None, _tracking(help="How long the end may wait for MLflow, in seconds: 60.")]
Tag = Annotated[list[str], _tracking(metavar="KEY=VALUE", help="A tag of the run in MLflow; repeatable.")]
LogModel = Annotated[
    bool, _tracking("--log-model", help="At the end, MLflow gets the model, with signature and input example.")
]
Register = Annotated[
    str | None, _tracking(metavar="NAME", help="Register the model in MLflow by this name; with --log-model.")
]
StartTimeout = Annotated[
    float | None, _hosts(help="Seconds that all workers have to start; TFLOOP_START_TIMEOUT, or 120.")
]
Overfit = Annotated[int | None, _length(metavar="N", help="Train and evaluate on the first N global batches alone.")]
Keep = Annotated[str | None, _length(help="Which weights are the result: last, or best.")]
DryRun = Annotated[
    bool, _length("--dry-run", help="Make two steps and an evaluation, show what they tell, keep nothing.")
]
Debug = Annotated[bool, _trouble("--debug", help="If it fails in code that isn't tfloop's: the whole traceback.")]
Callback = Annotated[
    list[str],
    _length(help="A callback of tfloop's: TensorBoard, or \"EarlyStopping(metric='eval_loss')\"; repeatable."),
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
