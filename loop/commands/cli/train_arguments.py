"""What `tfloop train` takes; `options` has those that other commands take, too."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated

from loop.commands.cli import options as typed


class TrainArguments(types.SimpleNamespace):
    """What is typed for `tfloop train`. The help has the options of each theme in this order."""

    target_: typed.Target
    epochs: typed.Epochs = None
    steps: typed.Steps = None
    batch_size: typed.BatchSize = None
    backend: typed.Backend = None
    workers: typed.Workers = None
    ps: Annotated[int | None, typed.devices(help="Parameter servers, with parameter_server; 1.")] = None
    min_shard_bytes: Annotated[
        int | None, typed.devices(help="Cut variables into shards of at least so many bytes, over the --ps servers.")
    ] = None
    partition: Annotated[
        str | None,
        typed.devices(
            metavar="HOW", help="Cut variables of parameter servers: fixed:N shards, min:SIZE or max:SIZE of a shard."
        ),
    ] = None
    communication: Annotated[
        str,
        typed.devices(
            metavar="HOW", help="Of gradients: auto; multiworker: ring, nccl; mirrored: nccl, hierarchical, one-device."
        ),
    ] = "auto"
    hosts_: Annotated[
        str | None, typed.hosts("--hosts", metavar="H1:4,H2:4", help="Processes on several hosts, started over ssh.")
    ] = None
    launcher: typed.Launcher = None
    address: typed.Address = None
    cpus_per_worker: typed.CpusPerWorker = None
    placement: typed.Placement = None
    interface: Annotated[
        str | None, typed.hosts(help="Where the hosts meet, if not as ssh finds them: eth1, or 10.0.0.0/24.")
    ] = None
    remote_python: Annotated[str | None, typed.hosts(help="Python on the other hosts, if not at the same path.")] = None
    devices: Annotated[
        str | None, typed.devices(metavar="LIST", help="With mirrored, central: a replica on each, as gpu:0,gpu:2.")
    ] = None
    devices_per_replica: Annotated[
        int | None,
        typed.devices(metavar="N", help="A model is spread over so many devices by loop.device (single, horovod)."),
    ] = None
    tpu: Annotated[str | None, typed.devices(metavar="NAME", help="The TPU, for the backend tpu; TPU_NAME.")] = None
    elastic_: Annotated[
        str | None, typed.hosts("--elastic", metavar="MIN:MAX", help="Go on while so many workers live (horovod).")
    ] = None
    discovery: Annotated[
        Path | None, typed.hosts(metavar="SCRIPT", help="With --elastic: prints host:slots, asked each second.")
    ] = None
    set_: typed.Set = typed.UNTYPED
    run_dir: typed.TrainRunDir = None
    resume: Annotated[str | None, typed.saving(help="auto, never, or the path of a checkpoint.")] = None
    seed: typed.Seed = None
    shuffle: Annotated[bool | None, typed.length("--shuffle/--no-shuffle", help="Permute the data each epoch.")] = None
    drop_remainder: Annotated[
        bool | None,
        typed.length("--drop-remainder/--no-drop-remainder", help="Leave out an epoch's last batch if it is short."),
    ] = None
    precision: Annotated[str | None, typed.numbers(help="float32, float64, bfloat16 or mixed_float16.")] = None
    accumulate: Annotated[int | None, typed.numbers(help="Micro-batches in a global batch.")] = None
    compression: Annotated[str | None, typed.numbers(help="Of gradients between replicas: none, fp16 or bf16.")] = None
    groups: Annotated[int | None, typed.numbers(help="Collectives in which gradients are reduced.")] = None
    reduction: Annotated[str | None, typed.numbers(help="Of gradients: sum; or adasum, which is inexact.")] = None
    local_steps: Annotated[
        int | None, typed.numbers(help="Steps that replicas make between two averages: inexact; 1: exact.")
    ] = None
    clip_norm: Annotated[float | None, typed.numbers(help="Greatest global norm of the gradient.")] = None
    clip_value: Annotated[float | None, typed.numbers(help="Greatest absolute value in the gradient.")] = None
    on_nonfinite: Annotated[str | None, typed.numbers(help="stop or skip, when a gradient is not finite.")] = None
    accept_changes: Annotated[
        bool | None, typed.saving("--accept-changes", help="Go on with other settings than the run had.")
    ] = None
    stall_timeout: Annotated[
        float | None,
        typed.trouble(help="Seconds after which a run that hangs says where."),
    ] = None
    profile: Annotated[
        str | None, typed.trouble(metavar="A:B", help="Trace steps A to B, and tell where the time goes.")
    ] = None
    sync_batch_norm: Annotated[
        bool | None, typed.numbers("--sync-batch-norm/--no-sync-batch-norm", help="Its statistics over all replicas.")
    ] = None
    shard_optimizer: Annotated[
        bool | None,
        typed.speed("--shard-optimizer", help="Each replica holds a part of the optimizer's state: saves memory."),
    ] = None
    ema: Annotated[float | None, typed.numbers(help="Decay of a moving average of the weights.")] = None
    remat: Annotated[
        str | None,
        typed.speed(metavar="full|64MB|NAMES", help="Layers computed again on the way back, to save memory."),
    ] = None
    compile_: Annotated[str | None, typed.speed("--compile", help="graph, xla, or auto: the faster one.")] = None
    steps_per_call: Annotated[str | None, typed.speed(help="Steps in a compiled call, or auto.")] = None
    prefetch: Annotated[str | None, typed.speed(help="Batches that a stream is read ahead, or auto.")] = None
    threads: Annotated[
        int | None,
        typed.speed(help="TensorFlow's threads in each worker; its share of the cores."),
    ] = None
    eval_every: typed.EvalEvery = None
    eval_beside: Annotated[
        str | None, typed.length(metavar="cpu|gpu:N", help="Evaluate its checkpoints in a process beside it.")
    ] = None
    checkpoint_every: Annotated[
        str | None,
        typed.saving(help="epoch, a number of steps, or a time such as 10m; auto: epochs, at most one in 10 s."),
    ] = None
    track: typed.Track = None
    track_wait: Annotated[
        float | None, typed.tracking(help="How long the end may wait for MLflow, in seconds: 60.")
    ] = None
    tag: Annotated[
        list[str],
        typed.tracking(metavar="KEY=VALUE", help="A tag of the run in MLflow; repeatable."),
    ] = typed.UNTYPED
    log_model: Annotated[
        bool, typed.tracking("--log-model", help="At the end, MLflow gets the model, with signature and input example.")
    ] = False
    register: Annotated[
        str | None, typed.tracking(metavar="NAME", help="Register the model in MLflow by this name; with --log-model.")
    ] = None
    start_timeout: Annotated[
        float | None, typed.hosts(help="Seconds that all workers have to start; TFLOOP_START_TIMEOUT, or 120.")
    ] = None
    overfit: Annotated[
        int | None, typed.length(metavar="N", help="Train and evaluate on the first N global batches alone.")
    ] = None
    keep: Annotated[str | None, typed.length(help="Which weights are the result: last, or best.")] = None
    dry_run_: Annotated[
        bool, typed.length("--dry-run", help="Make two steps and an evaluation, show what they tell, keep nothing.")
    ] = False
    debug: Annotated[
        bool, typed.trouble("--debug", help="If it fails in code that isn't tfloop's: the whole traceback.")
    ] = False
    config_: typed.Config = typed.UNTYPED
    as_json: typed.AsJson = False
    callback: Annotated[
        list[str],
        typed.length(help="A callback of tfloop's: TensorBoard, or \"EarlyStopping(metric='eval_loss')\"; repeatable."),
    ] = typed.UNTYPED
