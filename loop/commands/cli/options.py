"""The arguments and options of the command line, each declared once: its type, its name and its help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from loop.checkpoint.store import address
from loop.commands import completion
from loop.commands.cli import help as help_
from loop.commands.runs import directories
from loop.errors import UsageError


def _told(read: Callable[[str], Path | str]) -> Callable[[str], Path | str]:
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


written_file = _told(_file)
"""The parser of an option that names a file to write."""

# None means that an option wasn't typed: the task's own default counts then, which a signature can't know. Where the
# type has no None, the default in the command's signature is the default.

# Of many commands.
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
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A field of the task; repeatable.", rich_help_panel=help_.FIRST),
]
Epochs = Annotated[int | None, Option(help="Passes over the training data.", rich_help_panel=help_.FIRST)]
Steps = Annotated[int | None, Option(help="Optimizer steps, instead of epochs.", rich_help_panel=help_.FIRST)]
BatchSize = Annotated[int | None, Option(help="The global batch, over all replicas.", rich_help_panel=help_.FIRST)]
Backend = Annotated[
    str | None,
    Option(
        help="auto, single, mirrored, central, multiworker, horovod, parameter_server, tpu, or a plug-in's name.",
        autocompletion=completion.backends,
        rich_help_panel=help_.FIRST,
    ),
]
Workers = Annotated[
    int | None, Option(help="Processes on this machine; with mirrored, central: replicas.", rich_help_panel=help_.FIRST)
]
AsJson = Annotated[bool, Option("--json", help="The last line of stdout is the result as JSON.")]
Seed = Annotated[int | None, Option(help="Of initial weights and of the data's order.", rich_help_panel=help_.FIRST)]
EvalEvery = Annotated[
    str | None,
    Option(
        help="epoch, never, or a number of steps; or val=epoch,test=500 of several sets.", rich_help_panel=help_.LENGTH
    ),
]
EvalBeside = Annotated[
    str | None,
    Option(metavar="cpu|gpu:N", help="Evaluate its checkpoints in a process beside it.", rich_help_panel=help_.LENGTH),
]
Track = Annotated[str | None, Option(help="MLflow's tracking URI, or off.", rich_help_panel=help_.FIRST)]
Replicas = Annotated[int | None, Option(help="Replicas, with mirrored or central.")]
Config = Annotated[
    list[Path] | None,
    Option(
        "--config",
        help="A TOML or YAML file of train's options, and a table [set]; what is typed wins. Repeatable.",
        rich_help_panel=help_.FIRST,
    ),
]
Root = Annotated[
    Path | None,
    Option(
        parser=_told(directories.root),
        metavar="DIR|URL",
        help="Where the runs are; runs/ if not given.",
        show_default=False,
    ),
]
_NAMED = "A name, the beginning of one, a path, a URL, or latest."
Name = Annotated[str, Argument(metavar="RUN", help=_NAMED, autocompletion=completion.runs)]
Names = Annotated[list[str], Argument(metavar="RUN", help=_NAMED, autocompletion=completion.runs)]

# Of train: devices, servers and hosts.
Ps = Annotated[int | None, Option(help="Parameter servers, with parameter_server; 1.", rich_help_panel=help_.DEVICES)]
MinShardBytes = Annotated[
    int | None,
    Option(
        help="Cut variables into shards of at least so many bytes, over the --ps servers.",
        rich_help_panel=help_.DEVICES,
    ),
]
Partition = Annotated[
    str | None,
    Option(
        metavar="HOW",
        help="Cut variables of parameter servers: fixed:N shards, min:SIZE or max:SIZE of a shard.",
        rich_help_panel=help_.DEVICES,
    ),
]
Communication = Annotated[
    str,
    Option(
        metavar="HOW",
        help="Of gradients: auto; multiworker: ring, nccl; mirrored: nccl, hierarchical, one-device.",
        rich_help_panel=help_.DEVICES,
    ),
]
Hosts = Annotated[
    str | None,
    Option(
        "--hosts",
        metavar="H1:4,H2:4",
        help="Processes on several hosts, started over ssh.",
        rich_help_panel=help_.HOSTS,
    ),
]
Launcher = Annotated[
    str | None,
    Option(metavar="ray", help="What starts the workers, if not tfloop itself: ray.", rich_help_panel=help_.HOSTS),
]
Address = Annotated[
    str | None, Option(metavar="HOST:PORT", help="The head of the Ray cluster, or auto.", rich_help_panel=help_.HOSTS)
]
CpusPerWorker = Annotated[
    int | None, Option(metavar="N", help="CPUs that Ray counts for each worker; 1.", rich_help_panel=help_.HOSTS)
]
Placement = Annotated[
    str | None, Option(help="Ray: pack (few nodes, the default) or spread.", rich_help_panel=help_.HOSTS)
]
Interface = Annotated[
    str | None,
    Option(help="Where the hosts meet, if not as ssh finds them: eth1, or 10.0.0.0/24.", rich_help_panel=help_.HOSTS),
]
RemotePython = Annotated[
    str | None, Option(help="Python on the other hosts, if not at the same path.", rich_help_panel=help_.HOSTS)
]
Devices = Annotated[
    str | None,
    Option(
        metavar="LIST", help="With mirrored, central: a replica on each, as gpu:0,gpu:2.", rich_help_panel=help_.DEVICES
    ),
]
DevicesPerReplica = Annotated[
    int | None,
    Option(
        metavar="N",
        help="A model is spread over so many devices by loop.device (single, horovod).",
        rich_help_panel=help_.DEVICES,
    ),
]
Tpu = Annotated[
    str | None, Option(metavar="NAME", help="The TPU, for the backend tpu; TPU_NAME.", rich_help_panel=help_.DEVICES)
]
Elastic = Annotated[
    str | None,
    Option(
        "--elastic", metavar="MIN:MAX", help="Go on while so many workers live (horovod).", rich_help_panel=help_.HOSTS
    ),
]
Discovery = Annotated[
    Path | None,
    Option(metavar="SCRIPT", help="With --elastic: prints host:slots, asked each second.", rich_help_panel=help_.HOSTS),
]

# Of train: the run, its numbers and its speed.
TrainRunDir = Annotated[
    Path | None,
    Option(
        parser=_told(address.run_dir),  # a URL stays a text, whatever the annotation says
        metavar="DIR|URL",
        help="The run directory, or s3://bucket/path (gs, az, https, file); a new one below runs/ if not given.",
        rich_help_panel=help_.FIRST,
    ),
]
Resume = Annotated[str | None, Option(help="auto, never, or the path of a checkpoint.", rich_help_panel=help_.SAVING)]
Shuffle = Annotated[
    bool | None, Option("--shuffle/--no-shuffle", help="Permute the data each epoch.", rich_help_panel=help_.LENGTH)
]
DropRemainder = Annotated[
    bool | None,
    Option(
        "--drop-remainder/--no-drop-remainder",
        help="Leave out an epoch's last batch if it is short.",
        rich_help_panel=help_.LENGTH,
    ),
]
Precision = Annotated[
    str | None, Option(help="float32, float64, bfloat16 or mixed_float16.", rich_help_panel=help_.NUMBERS)
]
Accumulate = Annotated[int | None, Option(help="Micro-batches in a global batch.", rich_help_panel=help_.NUMBERS)]
Compression = Annotated[
    str | None, Option(help="Of gradients between replicas: none, fp16 or bf16.", rich_help_panel=help_.NUMBERS)
]
Groups = Annotated[
    int | None, Option(help="Collectives in which gradients are reduced.", rich_help_panel=help_.NUMBERS)
]
Reduction = Annotated[
    str | None, Option(help="Of gradients: sum; or adasum, which is inexact.", rich_help_panel=help_.NUMBERS)
]
LocalSteps = Annotated[
    int | None,
    Option(help="Steps that replicas make between two averages: inexact; 1: exact.", rich_help_panel=help_.NUMBERS),
]
ClipNorm = Annotated[float | None, Option(help="Greatest global norm of the gradient.", rich_help_panel=help_.NUMBERS)]
ClipValue = Annotated[
    float | None, Option(help="Greatest absolute value in the gradient.", rich_help_panel=help_.NUMBERS)
]
OnNonfinite = Annotated[
    str | None, Option(help="stop or skip, when a gradient is not finite.", rich_help_panel=help_.NUMBERS)
]
AcceptChanges = Annotated[
    bool | None,
    Option("--accept-changes", help="Go on with other settings than the run had.", rich_help_panel=help_.SAVING),
]
StallTimeout = Annotated[
    float | None, Option(help="Seconds after which a run that hangs says where.", rich_help_panel=help_.TROUBLE)
]
Profile = Annotated[
    str | None,
    Option(metavar="A:B", help="Trace steps A to B, and tell where the time goes.", rich_help_panel=help_.TROUBLE),
]
SyncBatchNorm = Annotated[
    bool | None,
    Option(
        "--sync-batch-norm/--no-sync-batch-norm",
        help="Its statistics over all replicas.",
        rich_help_panel=help_.NUMBERS,
    ),
]
ShardOptimizer = Annotated[
    bool | None,
    Option(
        "--shard-optimizer",
        help="Each replica holds a part of the optimizer's state: saves memory.",
        rich_help_panel=help_.SPEED,
    ),
]
Ema = Annotated[float | None, Option(help="Decay of a moving average of the weights.", rich_help_panel=help_.NUMBERS)]
Remat = Annotated[
    str | None,
    Option(
        metavar="full|64MB|NAMES",
        help="Layers computed again on the way back, to save memory.",
        rich_help_panel=help_.SPEED,
    ),
]
Compile = Annotated[
    str | None, Option("--compile", help="graph, xla, or auto: the faster one.", rich_help_panel=help_.SPEED)
]
StepsPerCall = Annotated[str | None, Option(help="Steps in a compiled call, or auto.", rich_help_panel=help_.SPEED)]
Prefetch = Annotated[
    str | None, Option(help="Batches that a stream is read ahead, or auto.", rich_help_panel=help_.SPEED)
]
Threads = Annotated[
    int | None, Option(help="TensorFlow's threads in each worker; its share of the cores.", rich_help_panel=help_.SPEED)
]

# Of train: saving, tracking and trouble.
CheckpointEvery = Annotated[
    str | None,
    Option(
        help="epoch, a number of steps, or a time such as 10m; auto: epochs, at most one in 10 s.",
        rich_help_panel=help_.SAVING,
    ),
]
TrackWait = Annotated[
    float | None, Option(help="How long the end may wait for MLflow, in seconds: 60.", rich_help_panel=help_.TRACKING)
]
Tag = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUE", help="A tag of the run in MLflow; repeatable.", rich_help_panel=help_.TRACKING),
]
LogModel = Annotated[
    bool,
    Option(
        "--log-model",
        help="At the end, MLflow gets the model, with signature and input example.",
        rich_help_panel=help_.TRACKING,
    ),
]
Register = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Register the model in MLflow by this name; with --log-model.",
        rich_help_panel=help_.TRACKING,
    ),
]
StartTimeout = Annotated[
    float | None,
    Option(help="Seconds that all workers have to start; TFLOOP_START_TIMEOUT, or 120.", rich_help_panel=help_.HOSTS),
]
Overfit = Annotated[
    int | None,
    Option(metavar="N", help="Train and evaluate on the first N global batches alone.", rich_help_panel=help_.LENGTH),
]
Keep = Annotated[str | None, Option(help="Which weights are the result: last, or best.", rich_help_panel=help_.LENGTH)]
DryRun = Annotated[
    bool,
    Option(
        "--dry-run",
        help="Make two steps and an evaluation, show what they tell, keep nothing.",
        rich_help_panel=help_.LENGTH,
    ),
]
Debug = Annotated[
    bool,
    Option(
        "--debug", help="If it fails in code that isn't tfloop's: the whole traceback.", rich_help_panel=help_.TROUBLE
    ),
]
Callback = Annotated[
    list[str] | None,
    Option(
        help="A callback of tfloop's: TensorBoard, or \"EarlyStopping(metric='eval_loss')\"; repeatable.",
        rich_help_panel=help_.LENGTH,
    ),
]

# Of evaluate, and of predict.
UseBackend = Annotated[str | None, Option(help="auto, single, mirrored, central, multiworker or horovod.")]
EvaluateBatchSize = Annotated[int | None, Option(help="The global batch.")]

# Of predict.
PredictData = Annotated[
    str,
    Argument(
        metavar="[DATA]",
        help="eval, train, test or a set of the task; or a file .npy, .npz, .parquet of inputs.",
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

# Of export.
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

# Of new and ui.
NewName = Annotated[str, Argument(metavar="NAME", help="Of the file, without .py.")]
Port = Annotated[int, Option(max=65535, min=1, help="The port; another one is taken if it is in use.")]
Host = Annotated[str, Option(help="The address to listen on; loopback unless told otherwise.")]
