"""The backends of `tf.distribute`: `mirrored` and `central` (one process), `multiworker`, `tpu`."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Backend, PerReplica, Sources, Variable, shared_value
from loop.backends.devices import local_rank, logical_cpus, use_gpus
from loop.backends.initial_values import allow_any_type
from loop.backends.step_collectives import COLLECTIVE, gathered_flat, in_types
from loop.errors import UsageError
from loop.launch import machine, stderr
from loop.launch.environment import start_timeout, tf_cluster, tpu_name
from loop.launch.worker import await_peers

_ANSWER_SECONDS = 10.0  # a TPU, or Google Cloud, that hasn't answered after this time counts as unreachable
NO_PROXY = "no_grpc_proxy"
"""Environment variable: the hosts that gRPC reaches without a proxy. It is read instead of `no_proxy`."""


class StrategyBackend(Backend):
    """What the `tf.distribute` backends share; a subclass makes the strategy."""

    strategy: tf.distribute.Strategy

    def scope(self) -> contextlib.AbstractContextManager[object]:
        return self.strategy.scope()

    def can_read(self, variable: tf.Variable) -> bool:
        return getattr(variable, "_distribute_strategy", None) in (None, self.strategy)  # None: made outside of any

    def trains(self, variable: tf.Variable, optimizer: keras.optimizers.Optimizer) -> bool:
        is_own = getattr(variable, "_distribute_strategy", None) is self.strategy
        return is_own or ((self.asynchronous or not self.own_variables) and self.can_read(variable))

    def made_optimizer(self, optimizer: keras.optimizers.Optimizer) -> bool:
        return getattr(optimizer, "_distribution_strategy", self.strategy) is self.strategy

    def run(self, function: Callable[..., PerReplica], *args: object) -> PerReplica:
        return self.strategy.run(function, args)

    def first(self, value: PerReplica) -> PerReplica:
        return tf.nest.map_structure(lambda leaf: self.strategy.experimental_local_results(leaf)[0], value)

    def replica(self) -> tf.Tensor:
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return in_types(self._reduce_flat, tensors, COLLECTIVE)

    def _reduce_flat(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        reduce = tf.distribute.get_replica_context().all_reduce
        if len(tensors) == 1:
            # A copy: a tensor that was captured from another graph may have no device, which TensorFlow needs here.
            return [reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensors[0]))]
        # tf.distribute would make a collective of each tensor. One flat tensor is one collective.
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        total = reduce(tf.distribute.ReduceOp.SUM, tf.concat(flat, 0))
        parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()

        def gather(flat: tf.Tensor) -> tf.Tensor:
            return context.all_gather(flat, 0)

        return in_types(functools.partial(gathered_flat, gather), tensors, COLLECTIVE - {tf.bfloat16})

    def assign(self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
        # Not `variable.assign`, which takes the mean over replicas of a variable of tf_keras.
        def update(strategy: tf.distribute.Strategy, values: Sequence[PerReplica]) -> None:
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(variable, lambda own, new: own.assign(new), args=(value,), group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(update, self.strategy, list(values))

    def apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Variable]
    ) -> None:
        try:
            super().apply(optimizer, gradients, variables)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise UsageError(
                f"{type(optimizer).__name__} decides at each step whether to update (gradient_accumulation_steps, "
                f"ema_overwrite_frequency, or tf.cond in its code), which TensorFlow can't with backend={self.name!r}: "
                "leave that out, and use a larger batch_size with accumulate, or ema; or backend='horovod'"
            ) from None

    def snapshot(self, variable: tf.Variable) -> tf.Tensor | np.ndarray:
        return shared_value(self.strategy.experimental_local_results(variable)[0])

    def local_values(self, variable: tf.Variable) -> list[np.ndarray]:
        return [value.numpy() for value in self.strategy.experimental_local_results(variable)]

    def set_local_values(self, variable: tf.Variable, values: Sequence[np.ndarray]) -> None:
        for own, value in zip(self.strategy.experimental_local_results(variable), values, strict=True):
            own.assign(value)


class Mirrored(StrategyBackend):
    """MirroredStrategy: all GPUs of this machine, or logical CPU devices; each replica has all variables.

    Args:
        replicas: how many; None: one for each GPU; on a machine without GPUs, one for each logical CPU device.
        devices: a replica on each of these instead, such as `["gpu:0", "gpu:2"]`.
        communication: how gradients are added up: "nccl", "hierarchical" (in two levels, for machines whose GPUs are
            connected in two groups), "one-device" (on the first one); "auto": TensorFlow chooses between GPUs.
    """

    name = "mirrored"
    # Not in all strategies: TensorFlow's collectives between workers keep the shape of their first use.
    gathers_rows = True

    def __init__(
        self, replicas: int | None = None, devices: Sequence[str] | None = None, communication: str = "auto"
    ) -> None:
        self.devices = named_devices(devices) if devices else all_devices(self.name, replicas)
        self.local_replicas = len(self.devices)
        self.strategy = self._strategy(communication)

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(rows, 0)

    def _strategy(self, communication: str) -> tf.distribute.Strategy:
        only_gpus = all("gpu" in device for device in self.devices)
        if communication == "nccl" and not only_gpus:
            raise no_nccl(f"the devices are {', '.join(self.devices)}", "hierarchical or one-device")
        if communication == "hierarchical" and len(self.devices) % 2:
            # TensorFlow adds up two groups of equal size, and silently leaves out a replica that is in neither.
            raise UsageError(
                f"communication='hierarchical' adds up two halves of the devices, and there are {len(self.devices)}: "
                "use an even number of them, or leave it out"
            )
        # Not TensorFlow's collectives between logical CPUs: a process could then have no second strategy of another
        # size.
        if communication == "auto" and not only_gpus:
            communication = "one-device"
        operations = {
            "auto": lambda: None,
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
            "one-device": tf.distribute.ReductionToOneDevice,
        }
        return tf.distribute.MirroredStrategy(self.devices, cross_device_ops=operations[communication]())


class Central(Mirrored):
    """CentralStorageStrategy: as `mirrored`, but variables are stored once, and updated once.

    They are in the memory of the CPU or, with a single device, of this device.
    """

    name = "central"
    gathers_rows = False
    own_variables = False

    def _strategy(self, communication: str) -> tf.distribute.Strategy:
        self._storage = self.devices[0] if len(self.devices) == 1 else "/cpu:0"
        return tf.distribute.experimental.CentralStorageStrategy(self.devices, self._storage)

    def no_sharding(self) -> str:
        return "variables are stored once, so no replica has a part of its own; use backend='mirrored', or leave it out"

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        # The strategy refuses an assignment by all replicas unless the variable's `aggregation` says whose value
        # counts. Variables of Keras 3 don't say so. All replicas assign the same value: that of the first one counts.
        def creator(create: Callable[..., tf.Variable], **named: object) -> tf.Variable:
            if named.get("aggregation") in (None, tf.VariableAggregation.NONE):
                named["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
            return create(**named)

        with self.strategy.scope(), tf.variable_creator_scope(creator):
            yield

    def check(self, variables: Sequence[Variable], data: Sources, options: Mapping[str, object]) -> None:
        if options["compile"] == "xla" and set(self.devices) != {self._storage}:
            raise UsageError(
                "compile='xla' with backend='central': variables are stored on cpu:0, and XLA reads none of another "
                "device: use backend='mirrored', or leave compile out"
            )

    def local_values(self, variable: tf.Variable) -> list[np.ndarray]:
        return [variable.numpy()] * self.local_replicas


class MultiWorker(StrategyBackend):
    """MultiWorkerMirroredStrategy: the workers of `TF_CONFIG`.

    Args:
        communication: "ring" (over gRPC) or "nccl" (between GPUs); "auto": NCCL where there are GPUs.
    """

    name = "multiworker"

    def __init__(self, communication: str = "auto") -> None:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        gpus = use_gpus(local_rank())  # before the strategy, which takes all visible devices
        if communication == "nccl" and not gpus:
            raise no_nccl("there is none", "ring")
        kind = tf.distribute.experimental.CommunicationImplementation
        implementation = kind.NCCL if gpus and communication != "ring" else kind.RING
        # Before the strategy, whose own wait for the others names none of them and can't be interrupted.
        _meet()
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        try:
            with in_time():  # a peer may be lost now
                self.strategy = allow_any_type(tf.distribute.MultiWorkerMirroredStrategy(communication_options=options))
        except RuntimeError as error:
            if "at program startup" not in str(error):
                raise
            raise UsageError(
                "backend='multiworker' must start before anything else uses TensorFlow: write this before any tensor, "
                "data set, layer or metric is made, and hand the backend to fit(..., backend=backend):\n"
                "    from loop import backends\n"
                '    backend = backends.create("multiworker")'
            ) from None
        undo_sigterm_handler()
        cluster = self.strategy.cluster_resolver.cluster_spec().as_dict()
        chiefs = len(cluster.get("chief", []))
        # Chiefs have the first ranks, as in `_meet`.
        self.rank = int(task["index"]) + (chiefs if task["type"] == "worker" else 0)
        self.workers = chiefs + len(cluster.get("worker", []))
        self.local_replicas = self.strategy.num_replicas_in_sync // self.workers
        self.device = "GPU:0" if gpus and self.local_replicas == 1 else ""
        self._sum = tf.function(self._sum_in_graph, reduce_retracing=True)
        # Last: it is a collective, which uses all that is set above.
        self.refuse_shared_gpus(gpus)

    def sum_on_host(self, array: np.ndarray) -> np.ndarray:
        # The length is rounded up to a power of 2: few shapes, and so few traces, serve all messages.
        flat = np.zeros(1 << max(array.size - 1, 7).bit_length(), np.int64)
        flat[: array.size] = array.reshape(-1)
        total = self.first(self._sum(tf.constant(flat))).numpy()
        return total[: array.size].reshape(array.shape)

    def _sum_in_graph(self, array: tf.Tensor) -> PerReplica:
        def in_replica(array: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # A worker has one array, but may have several replicas: the first adds it, the others add zeros.
            is_first = tf.cast(context.replica_id_in_sync_group % self.local_replicas == 0, tf.int64)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, array * is_first)

        return self.strategy.run(in_replica, (array,))


class TPU(StrategyBackend):
    """TPUStrategy: the cores of the TPU that `TPU_NAME` names. Never run on one: see docs/engines.md."""

    name = "tpu"

    def __init__(self) -> None:
        name = tpu_name()
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_ANSWER_SECONDS)  # of the resolver's questions to Google Cloud
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(name)
            if address := resolver.master().removeprefix("grpc://"):
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port))).close()  # TensorFlow itself would wait without end
            with in_time():
                tf.config.experimental_connect_to_cluster(resolver)
                tf.tpu.experimental.initialize_tpu_system(resolver)
        except Exception as error:  # Google's client has many
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"no TPU {name!r} ({type(error).__name__}: {reason}): give --tpu the name of one in your Google Cloud "
                "project, grpc://host:8470, or `local` on a TPU virtual machine; or use another --backend"
            ) from None
        finally:
            socket.setdefaulttimeout(before)
        self.strategy = tf.distribute.TPUStrategy(resolver)
        self.local_replicas = self.strategy.num_replicas_in_sync

    def no_sharding(self) -> str:
        return "never tried on a TPU: leave it out"


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Within it, this process ends if TensorFlow takes longer than a start may: it would wait for many minutes.

    TensorFlow holds the interpreter while it waits, so that no other thread can end the process.
    """
    faulthandler.dump_traceback_later(start_timeout(), exit=True, file=stderr.descriptor())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def undo_sigterm_handler() -> None:
    """Gives SIGTERM back the handler that Python knows, in place of TensorFlow's own native one."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _meet() -> None:
    """Waits until all workers of `TF_CONFIG` are there: each listens at its address until it has reached all others.

    Raises:
        UsageError: another process has this worker's port.
        TrainingError: some are not there in time.
    """
    rank, places = tf_cluster(os.environ["TF_CONFIG"])
    own = list(places)[rank]
    host, port = host_and_port(places[own])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connect_directly(places)
    try:
        listener = socket.create_server((host if host in ("127.0.0.1", "::1") else "", port), family=family)
    except OSError as error:
        raise UsageError(
            f"TF_CONFIG: this process is {own} at {places[own]}, but can't listen at that port ({error.strerror}): end "
            "what has it (`ss -ltnp`), or give all workers other ports: in TF_CONFIG; under srun by TFLOOP_PORT_BASE"
        ) from None
    others = {name: address for name, address in places.items() if name != own}
    # At the end the port is free for TensorFlow's server, which then answers the workers that come later.
    with listener:
        await_peers(listeners(others))


def connect_directly(places: Mapping[str, str]) -> None:
    """Has TensorFlow connect to these processes without a proxy, which would not reach them: gRPC uses `http_proxy`."""
    exempt = os.getenv(NO_PROXY, os.getenv("no_proxy", "")).split(",")
    for address in places.values():
        exempt.append(host_and_port(address)[0])
    os.environ[NO_PROXY] = ",".join(filter(None, dict.fromkeys(exempt)))


def listeners(places: Mapping[str, str]) -> dict[str, Callable[[], bool]]:
    """The peers for `await_peers`: by name and address, a function that returns whether the process listens there."""
    peers: dict[str, Callable[[], bool]] = {}
    for name, address in places.items():
        peers[f"{name} ({address})"] = functools.partial(answers, address)
    return peers


def no_nccl(why: str, instead: str) -> UsageError:
    """The error for NCCL without GPUs."""
    return UsageError(f"communication='nccl' works between GPUs alone, and {why}: leave it out, or give {instead}")


def answers(address: str) -> bool:
    """Whether a process listens at `host:port`."""
    try:
        socket.create_connection(host_and_port(address), timeout=5).close()
    except OSError:
        return False
    return True


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def all_devices(backend: str, replicas: int | None) -> list[str]:
    """The names of this number of GPUs, or of logical CPU devices on a machine without GPUs; None: of all devices."""
    gpus = use_gpus()
    if not gpus:
        return logical_cpus(replicas, f"{backend} with {replicas} replicas")
    if replicas and replicas > len(gpus):
        raise UsageError(f"{backend} with {replicas} replicas, but there are {len(gpus)} GPUs: ask for fewer")
    return [f"/gpu:{index}" for index in range(replicas or len(gpus))]


def named_devices(names: Sequence[str]) -> list[str]:
    """The devices of these names, such as `gpu:0`; of CPUs, as many logical ones are made as are named.

    Raises:
        UsageError: a text isn't the name of a device, comes twice, or names a missing device; with the present ones.
    """
    names = machine.device_names(names)
    # `use_gpus` first: listing the logical devices starts TensorFlow, and GPUs can't be set up after that.
    gpus = [f"gpu:{index}" for index in range(len(use_gpus()))]
    with contextlib.suppress(UsageError):  # TensorFlow has already started with fewer: the error below names them
        logical_cpus(machine.count_cpus(names))
    present = [name.strip("/") for name in logical_cpus(None)] + gpus
    for name in names:
        if name not in present:
            raise UsageError(f"devices: there is no {name}; there are {', '.join(present)}")
    return [f"/{name}" for name in names]
