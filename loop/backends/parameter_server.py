"""The backend `parameter_server`: servers hold the variables, and workers make steps asynchronously, for one chief.

The chief alone runs `fit`; workers and parameter servers run `serve`. The step sees one replica. One worker computes
each step, on a whole global batch, with the weights that it finds, while other workers change them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Gradient, PerReplica, Source, Sources, Variable, int64_tensors
from loop.backends.devices import local_rank, use_gpus
from loop.backends.strategy import (
    StrategyBackend,
    answers,
    connect_directly,
    in_time,
    listeners,
    undo_sigterm_handler,
)
from loop.errors import UsageError
from loop.launch import signals
from loop.launch.environment import tf_cluster
from loop.launch.worker import await_peers, mark_state
from loop.model.variables import as_tf
from loop.options import read_partition

PARTS = 2
"""The number of parts of a call for each worker. There are several, so that a slow worker can make fewer of them."""
CHIEF_GONE = 3
"""After so many failed attempts to reach the chief, a second apart, a server ends."""

Partitioner: TypeAlias = Callable[..., Sequence[int]]
"""A function in TensorFlow's form: from a variable's shape and dtype to the number of shards along each axis."""


class ParameterServer(StrategyBackend):
    """ParameterServerStrategy and its coordinator: in the chief of a `TF_CONFIG` with workers and parameter servers.

    Args:
        partition: how variables (of Keras 3) are cut along their first axis: "fixed:N", into N shards; "min:BYTES",
            into a shard for each parameter server, but none smaller than this; "max:BYTES", into shards of at most this
            size; or a function, see `Partitioner`. None: each variable is whole, on one parameter server.
    """

    name = "parameter_server"
    asynchronous = True

    def __init__(self, partition: str | Partitioner | None = None) -> None:
        rank, places = tf_cluster(os.environ["TF_CONFIG"])
        if rank:
            raise UsageError(
                f"this process is {list(places)[rank]}, and only the chief calls fit: start it with `tfloop train ... "
                "--backend parameter_server`, which finds its place, or call loop.backends.parameter_server.serve()"
            )
        connect_directly(places)
        peers = dict(list(places.items())[1:])  # all but the chief
        workers = [name for name in peers if name.startswith("worker ")]
        self._servers = {name: address for name, address in peers.items() if name.startswith("ps ")}
        self._partition = partition
        self._parts = PARTS * len(workers)
        partitioner = _partitioner(partition, len(self._servers))
        with contextlib.suppress(RuntimeError):  # TensorFlow has already started: neither can be set any more
            tf.config.threading.set_inter_op_parallelism_threads(operation_threads(places))
            tf.config.set_visible_devices([], "GPU")  # the chief computes nothing: GPUs are for the workers
        # Before the strategy, which would wait for them without end, and can't be interrupted.
        await_peers(listeners(peers))
        # The coordinator handles the loss of a worker itself, but logs hundreds of lines about it.
        logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
        with in_time():  # a peer may be lost now
            self.strategy = tf.distribute.ParameterServerStrategy(
                tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc"), partitioner
            )
            _update_shards(self.strategy.extended)
            self._coordinator = _Coordinator(self.strategy)
        undo_sigterm_handler()

    def check(self, variables: Sequence[Variable], data: Sources, options: Mapping[str, object]) -> None:
        parts = sum(len(shards(variable)) for variable in as_tf(variables))
        if len(self._servers) > parts:
            raise UsageError(
                f"{len(self._servers)} parameter servers (--ps) for {parts} variables to train: some would have "
                f"nothing to do; give at most {parts}, or cut large variables with --partition"
            )
        if self._partition and not all(isinstance(variable, keras.Variable) for variable in variables):
            raise UsageError(
                f"partition={self._partition!r} (--partition, --min-shard-bytes): only variables of Keras 3 can be "
                "cut, and this model has others (a tf.Module's, or of tf_keras): leave it out"
            )
        _check_source("train_data()", data.train)
        for name, source in data.evaluated.items():
            what = f"eval_data()[{name!r}]" if name else "eval_data()"
            _check_source(what, source)
        for option, value, instead in (
            ("precision", "mixed_float16", "workers can't agree on a loss scale; use bfloat16"),
            ("compile", "xla", "its programs need the variables where they run; use graph"),
            ("shard_optimizer", True, "parameter servers hold the optimizer's state already; leave it out"),
        ):
            if options[option] == value:
                raise UsageError(f"{option}={value!r} with backend='parameter_server': {instead}")
        if options["profile"]:
            raise UsageError(
                f"profile={options['profile']!r} with backend='parameter_server': the chief, which would be traced, "
                "computes nothing; use another backend for it"
            )

    def call(
        self, function: Callable[..., tf.Tensor], iterator: object, epoch: int, step: int, steps: int
    ) -> list[tuple[int, np.ndarray]]:
        parts = min(steps, self._parts)
        # In whole numbers: the parts differ by one step at most, and together they are exactly `steps`.
        bounds = [step + steps * part // parts for part in range(parts + 1)]
        scheduled = []
        for first, end in itertools.pairwise(bounds):
            arguments = (iterator, *int64_tensors(epoch, first, end - first))
            scheduled.append((first, self._coordinator.schedule(function, arguments)))
        # All parts are done before any result is fetched: between two calls, no worker changes the variables.
        self._coordinator.join()
        return [(first, result.fetch()) for first, result in scheduled]

    def run(self, function: Callable[..., PerReplica], *args: object) -> PerReplica:
        # A function that the coordinator has scheduled is already in the context of its only replica.
        if tf.distribute.in_cross_replica_context():
            return super().run(function, *args)
        return function(*args)

    def first(self, value: PerReplica) -> PerReplica:
        return value

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(tensors)  # a step has one replica, whichever worker computes it

    def apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Variable]
    ) -> None:
        # Keras 3 reads its counter of steps and then writes it: if two workers do so at once, one step isn't counted.
        if not isinstance(optimizer.iterations, tf.Variable):
            optimizer.iterations.assign_add = optimizer.iterations.value.assign_add
        super().apply(optimizer, gradients, variables)

    def gradients(
        self, tape: tf.GradientTape, objective: tf.Tensor, variables: Sequence[Variable]
    ) -> Sequence[Gradient]:
        # TensorFlow has a gradient for each shard, not for the variable that consists of them.
        by_shard = tape.gradient(objective, list(map(shards, variables)))
        return [_whole(variable, parts) for variable, parts in zip(variables, by_shard, strict=True)]

    def local_values(self, variable: tf.Variable) -> list[np.ndarray]:
        return [np.asarray(variable.numpy())]

    def snapshot(self, variable: tf.Variable) -> np.ndarray:
        return np.asarray(variable.numpy())

    def lost(self, error: BaseException) -> str:
        if not isinstance(error, tf.errors.OpError):
            return ""
        # The type of the error doesn't say which process is gone: each server is asked.
        gone = []
        for name, address in self._servers.items():
            if not answers(address):
                gone.append(f"{name} ({address})")
        return f"parameter server gone: {', '.join(gone)}, and the variables in it" if gone else ""


def _partitioner(partition: str | Partitioner | None, servers: int) -> Partitioner | None:
    """TensorFlow's partitioner; see `ParameterServer`."""
    if not isinstance(partition, str):
        return partition
    kind, number = read_partition(partition)
    partitioners = tf.distribute.experimental.partitioners
    made: Partitioner
    if kind == "fixed":
        made = partitioners.FixedShardsPartitioner(number)
    elif kind == "min":
        made = partitioners.MinSizePartitioner(number, servers)
    else:
        made = partitioners.MaxSizePartitioner(number)
    return made


def _check_source(name: str, source: Source) -> None:
    """Refuses data that workers can't read batch by batch in any order."""
    if getattr(source, "on_host", False):
        raise UsageError(
            f"{name} is IndexedData, which each worker reads in a process of its own, and with "
            "backend='parameter_server' workers have none: return ArrayData, or use another backend"
        )
    is_stream = source.steps_per_epoch is None
    if is_stream:
        raise UsageError(
            f"{name} is a tf.data.Dataset, which only one process can read in its order: with "
            "backend='parameter_server', return ArrayData, of which any worker can read any batch"
        )


class _Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's coordinator, without the clean-up at its end, which would wait for a worker that is gone."""

    def __del__(self) -> None:
        pass


def serve(threads: int = 0) -> None:
    """Makes this process the worker or parameter server of `TF_CONFIG`, until the chief has ended.

    Args:
        threads: TensorFlow's threads for an operation; 0: as many as there are cores.

    Raises:
        UsageError: another process has its port.
        TrainingError: the chief isn't there in time.
    """
    rank, places = tf_cluster(os.environ["TF_CONFIG"])
    config = json.loads(os.environ["TF_CONFIG"])
    name = list(places)[rank]
    chief = next(iter(places.values()))  # it has the first rank

    # Before the server, which starts TensorFlow with the devices that are visible then.
    if name.startswith("worker "):
        use_gpus(local_rank() or 0)
    else:
        tf.config.set_visible_devices([], "GPU")
    mark_state("arrived")
    connect_directly(places)
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(config["cluster"]), config["task"]["type"], int(config["task"]["index"]), "grpc",
            tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=threads, inter_op_parallelism_threads=operation_threads(places)
            ),
        )  # fmt: skip
    except tf.errors.OpError as error:
        raise UsageError(
            f"TF_CONFIG: this process is {name} at {places[name]}, but can't listen at that port ({error.message}): "
            "end what has it (`ss -ltnp` shows that), or give another port in the TF_CONFIG of all processes"
        ) from None
    mark_state("started")
    await_peers(listeners({"the chief": chief}))
    # The chief must end first: when all processes are asked to stop, it still reads the variables here to save them.
    for number in signals.STOPS:
        signal.signal(number, signal.SIG_IGN)
    misses = 0
    while misses < CHIEF_GONE:
        time.sleep(1.0)
        misses = 0 if answers(chief) else misses + 1
    del server  # until here, because TensorFlow's server ends with this object


def shards(variable: Variable) -> list[tf.Variable]:
    """The variables that a variable consists of: its shards, or itself alone."""
    return list(variable.variables) if _is_sharded(variable) else [variable]


def _is_sharded(variable: Variable) -> bool:
    return hasattr(variable, "variables")


def _whole(variable: Variable, gradients: Sequence[Gradient]) -> Gradient:
    """The gradient of a variable, from those of its shards."""
    if all(gradient is None for gradient in gradients):
        return None
    if len(gradients) == 1:
        return gradients[0]
    # The objective may depend on some of the shards alone. Sparse gradients are made dense, so that all can be joined.
    parts = []
    for shard, gradient in zip(shards(variable), gradients, strict=True):
        if gradient is None:
            parts.append(tf.zeros_like(shard))
        else:
            parts.append(tf.convert_to_tensor(gradient))
    return tf.concat(parts, 0)


def _update_shards(extended: tf.distribute.StrategyExtended) -> None:
    """Lets Keras's optimizers update variables in shards, and make slots for them, which are cut in the same way.

    A strategy refuses both, because the shards are in several places, but a slot or an update can be in one place only.
    """
    original_colocate = extended.colocate_vars_with
    original_update = extended.update

    def colocate_vars_with(variable: Variable) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if _is_sharded(variable) else original_colocate(variable)

    def update(
        variable: Variable,
        function: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> object:
        if _is_sharded(variable):
            return function(variable, *args, **kwargs or {})
        return original_update(variable, function, args, kwargs, group)

    extended.colocate_vars_with = colocate_vars_with
    extended.update = update


def operation_threads(places: Mapping[str, str]) -> int:
    """How many operations each process may run at once.

    An operation that waits for another process keeps its thread. With only as many threads as cores, all threads could
    wait for each other: on a machine with two cores, training hangs.
    """
    return max(8, 4 * len(places), os.cpu_count() or 1)
