"""TensorFlow's devices, memory growth and threads, which can be set only before anything uses TensorFlow.

A task's module may use TensorFlow when it is imported, and the task when it is made: a metric, a data set or a lookup
layer is enough. So each command calls `prepare` (or `alike`) before it loads the task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

from callbacks.formats import plural
from loop.backends.xla_cache import keep_programs
from loop.errors import UsageError
from loop.launch import machine
from loop.launch.environment import LOCAL_SIZE

LOCAL_RANK = ("TFLOOP_LOCAL_RANK", "HOROVOD_LOCAL_RANK")
"""Environment variables with a worker's index among those on its machine, in the order in which they count."""
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_OF_WORKERS = ("horovod", "multiworker")
"""The backends whose processes compute a part of each batch by themselves."""
_WITH_SEVERAL = ("single", "horovod")
"""The backends whose replicas may own several devices: TensorFlow's strategies place the variables themselves."""

_of_replica: list[str] = []
"""The names of the devices that a replica of this process owns, if there are several."""


def prepare(
    backend: str = "single",
    replicas: int | None = None,
    devices: Sequence[str] | None = None,
    threads: int | None = None,
    per_replica: int | None = None,
) -> None:
    """Sets up TensorFlow for a backend. It must be called before anything uses TensorFlow.

    Args:
        backend: the backend that will be made.
        replicas: with `mirrored` and `central`: how many replicas it is to have; None: one for each device.
        devices: with those, the devices instead.
        threads: of an operation; None: the worker's share of the cores, where `tfloop` has started several on its
            machine and they use no GPU; else TensorFlow decides. Each would use all cores, and the workers would wait
            for each other (docs/performance/collectives.md). With 1, a replica on a CPU also makes one operation at a
            time.
        per_replica: how many devices a replica owns; None: one. See `device`.

    Raises:
        UsageError: this process has no GPU of its own.
    """
    keep_programs()  # first, because XLA reads its flags only once
    own_several(backend, per_replica)  # before `use_gpus`, which asks how many GPUs a replica owns
    _warn_of_unused_gpus()
    own_gpu = local_rank() if backend in _OF_WORKERS else None
    gpus = use_gpus(own_gpu)
    _set_threads(backend, threads, on_gpus=bool(gpus))
    if backend not in ("mirrored", "central"):
        return
    if devices:
        count = machine.count_cpus(machine.device_names(devices))
    elif gpus:
        count = 0  # each replica has a GPU
    else:
        count = replicas or 0
    _make_logical_cpus(count)


def _set_threads(backend: str, threads: int | None, on_gpus: bool) -> None:
    """Sets the threads of an operation, and how many operations run at a time; see `prepare`."""
    if threads is None and backend in _OF_WORKERS and not on_gpus:
        threads = _share_of_cores()
    if threads is None:
        return
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    one_replica_on_cpu = not on_gpus and backend in ("single", *_OF_WORKERS)
    if not one_replica_on_cpu or "TF_NUM_INTEROP_THREADS" in os.environ:
        return
    # Else there is a thread for each core of the machine. With one core for the replica, a second thread computes
    # nothing sooner, and handing small operations over to it takes longer than they do (docs/workers.md). More threads
    # than cores are for Python in a step; see `graph_threads`.
    if threads == 1 or threads > machine.usable_cpus():
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def _share_of_cores() -> int | None:
    """The number of cores for this worker; None: the user has set it, or no other workers are known on this machine."""
    workers = os.environ.get(LOCAL_SIZE, "")
    if "TF_NUM_INTRAOP_THREADS" in os.environ or not workers.isdecimal() or workers in ("0", "1"):
        return None
    return max(1, machine.usable_cpus() // int(workers))


def graph_threads() -> int:
    """How many operations of a graph TensorFlow runs at a time.

    An operation that calls Python holds one of these threads, and a `tf.function` that this Python calls needs another.
    """
    given = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    in_environment = int(given) if given.isdecimal() else 0
    return tf.config.threading.get_inter_op_parallelism_threads() or in_environment or machine.usable_cpus()


def _warn_of_unused_gpus() -> None:
    """Warns if this machine has GPUs, and TensorFlow can't use any: it says so only in a log, and takes the CPU."""
    present = machine.count_gpus()
    if present and not tf.config.list_physical_devices("GPU"):
        warnings.warn(
            f"this machine has {plural(present, 'GPU')}, which TensorFlow can't load: the CPU does the work. "
            "Install CUDA's libraries (uv sync --extra gpu; pip install 'tfloop[gpu]') and look at nvidia-smi; or set "
            "CUDA_VISIBLE_DEVICES=-1, if the CPU is meant",
            stacklevel=2,
        )


def own_several(backend: str, per_replica: int | None) -> None:
    """Lets each replica own several devices, for a model that is spread over them; see `device`.

    Args:
        backend: the name of the backend.
        per_replica: how many; None: one.

    Raises:
        UsageError: the backend can't, or there are fewer devices.
    """
    _of_replica.clear()
    if per_replica in (None, 1):
        return
    if type(per_replica) is not int or per_replica < 1:
        raise UsageError(f"devices_per_replica={per_replica!r}: give a whole number >= 1")
    if backend not in _WITH_SEVERAL:
        raise UsageError(
            f"devices_per_replica={per_replica} with backend={backend!r}, which places variables itself: use "
            f"{' or '.join(map(repr, _WITH_SEVERAL))}"
        )
    count = per_replica
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    # Before `use_gpus`, which gives this worker as many GPUs as a replica owns.
    _of_replica.extend(f"{kind}:{index}" for index in range(count))
    if kind == "CPU":
        _make_logical_cpus(count)  # whether all are there is checked later, since that starts TensorFlow
        return
    own_rank = local_rank() if backend == "horovod" else None
    gpus = use_gpus(own_rank)
    if len(gpus) < count:
        raise UsageError(f"devices_per_replica={count}: this replica has {len(gpus)} GPU(s)")


def check_is_eager() -> None:
    """Refuses a program for TensorFlow 1, in which tensors have no values.

    Raises:
        UsageError: eager execution is off, or a graph is being made.
    """
    if not tf.executing_eagerly():
        raise UsageError(
            "eager execution is off: leave out tf.compat.v1.disable_eager_execution() and disable_v2_behavior(), and "
            "train outside of tf.Graph().as_default() and tf.function; tfloop compiles the steps by itself"
        )


def check_several() -> None:
    """Refuses devices of a replica that aren't there; starts TensorFlow.

    Raises:
        UsageError: TensorFlow had already started with fewer.
    """
    if _of_replica and _of_replica[0].startswith("CPU"):
        logical_cpus(len(_of_replica), f"a replica on {len(_of_replica)} devices")


def device(index: int) -> str:
    """The device with this index among those that a replica owns, for `tf.device`: to spread a model over them.

        class Net(TrainTask):
            def build_model(self):
                inputs = outputs = keras.Input((1024,))
                outputs = keras.layers.Dense(8192, "relu")(outputs)
                with tf.device(loop.device(1)):
                    outputs = keras.layers.Dense(8192, "relu")(outputs)
                return keras.Model(inputs, outputs)

    An operation with weights runs on the device of the weights, in the forward and the backward pass, and the
    optimizer's state is there, too. Any other operation runs where its inputs come from. The number of devices of a
    replica is `--devices-per-replica` (`backends.create(..., devices_per_replica=2)`). A replica with one device has
    everything there, so that the same task also trains, evaluates and exports on a smaller machine.

    Args:
        index: from 0.

    Returns:
        A name such as "GPU:1"; "" if a replica owns one device, so that TensorFlow chooses the device.

    Raises:
        UsageError: a replica owns several devices, but none with this index.
    """
    if not _of_replica:
        return ""
    if not 0 <= index < len(_of_replica):
        raise UsageError(
            f"loop.device({index}): a replica owns {len(_of_replica)} devices, from 0 on: give a larger "
            "--devices-per-replica"
        )
    return _of_replica[index]


def per_replica() -> int:
    """How many devices a replica of this process owns."""
    return len(_of_replica) or 1


def is_of_replica(name: str) -> bool:
    """Whether a replica of this process owns this device, by its whole name or a part of it."""
    return name.rpartition("device:")[2].strip("/") in _of_replica


def alike(replicas: int) -> str:
    """Sets up devices of one kind, for runs on 1 to `replicas` replicas whose results are compared.

    Returns:
        Which devices they are, in words.

    Raises:
        UsageError: TensorFlow has already started with other devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    # All replicas on GPUs, or none: the two kinds of device round differently.
    if len(tf.config.get_visible_devices("GPU")) >= replicas:
        use_gpus()
        return f"{replicas} GPUs"
    if gpus:
        try:
            tf.config.set_visible_devices([], "GPU")
        except RuntimeError:
            raise UsageError(
                f"{replicas} replicas are compared on logical CPU devices where there are fewer GPUs, but TensorFlow "
                f"has already started with {len(gpus)} GPU(s): "
                + _first("import tensorflow as tf", 'tf.config.set_visible_devices([], "GPU")')
            ) from None
    logical_cpus(replicas)
    text = f"{replicas} logical CPU devices"
    if gpus:
        text += f", since this machine has {plural(len(gpus), 'GPU')} and {replicas} replicas need as many"
    return text


def local_rank() -> int | None:
    """The index of this worker among those on its machine; None: there is no launcher, or it doesn't say."""
    for name in LOCAL_RANK:
        if name in os.environ:
            text = os.environ[name]
            return int(text) if text.isdecimal() else None
    return None


def logical_cpus(count: int | None, what: str = "") -> list[str]:
    """The names of `count` logical CPU devices; None: of all that there are.

    Missing ones are made, unless TensorFlow has already started.

    Args:
        count: how many.
        what: what needs them, for the error; "": `mirrored` with this number of replicas.

    Raises:
        UsageError: TensorFlow has already started with fewer.
    """
    _make_logical_cpus(count or 0)
    devices = [f"/cpu:{index}" for index in range(len(tf.config.list_logical_devices("CPU")))]
    if count and count > len(devices):
        what = what or f"mirrored with {count} replicas"
        raise UsageError(
            f"{what}, but TensorFlow has already started with {len(devices)} logical CPU device(s): "
            + _first(
                'cpu = tf.config.list_physical_devices("CPU")[0]',
                f"tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {count})",
            )
        )
    return devices[:count]


def _make_logical_cpus(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    with contextlib.suppress(RuntimeError):  # TensorFlow has already started: its devices can't change any more
        # Without a configuration, there is one logical device.
        if len(tf.config.get_logical_device_configuration(cpu) or [None]) < count:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def use_gpus(local_rank: int | None = None) -> list[tf.config.PhysicalDevice]:
    """Lets GPU memory grow as needed, and gives a worker that shares its machine with others a GPU of its own.

    Args:
        local_rank: the index of this worker on its machine; None: it uses all GPUs.

    Returns:
        The GPUs that this process uses.

    Raises:
        UsageError: there are more workers here than GPUs, or TensorFlow has already started with all of them.
    """
    keep_programs()
    gpus = list(tf.config.get_visible_devices("GPU"))
    own = per_replica()
    if local_rank is not None and len(gpus) > own:  # otherwise they were chosen already, here or by the launcher
        begin = own * local_rank
        if begin + own > len(gpus):
            raise UsageError(machine.too_few_gpus(len(gpus), f"worker {local_rank + 1} on this machine"))
        gpus = gpus[begin : begin + own]
        try:
            tf.config.set_visible_devices(gpus, "GPU")
        except RuntimeError:
            raise UsageError(
                "each worker uses one GPU, but TensorFlow has already started with all GPUs: "
                + _first(
                    'gpus = tf.config.list_physical_devices("GPU")',
                    f'tf.config.set_visible_devices(gpus[{local_rank}], "GPU")  # {local_rank}: the local rank',
                )
            ) from None
    _let_memory_grow(gpus)
    return gpus


def _let_memory_grow(gpus: Sequence[tf.config.PhysicalDevice]) -> None:
    for gpu in gpus:
        if tf.config.get_logical_device_configuration(gpu):  # its logical devices have memory limits of their own
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            if os.environ.get(_GROWTH, "").lower() == "true":  # then memory grows although TensorFlow has started
                continue
            warnings.warn(
                "TensorFlow has already started, and takes all memory of each GPU instead of what it needs: "
                + _first(
                    'for gpu in tf.config.list_physical_devices("GPU"):',
                    "    tf.config.experimental.set_memory_growth(gpu, True)",
                ),
                stacklevel=2,
            )
            return


def _first(*lines: str) -> str:
    """The part of a message that shows code which must run before TensorFlow starts."""
    code = "\n    ".join(("", *lines))  # each on a line of its own, indented
    return f"write this before anything uses TensorFlow (tensors, data sets, layers, metrics):{code}"


def gpu_identity(gpus: Sequence[tf.config.PhysicalDevice]) -> int:
    """A number that no other GPU on any machine has; 0 if it is unknown, or there isn't exactly one GPU."""
    if len(gpus) != 1:
        return 0
    # From CUDA's driver: TensorFlow numbers the GPUs that it sees from 0, in each process and on each machine.
    ordinal = int(gpus[0].name.rpartition(":")[2])
    uuid = ctypes.create_string_buffer(16)
    device = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), ordinal), cuda.cuDeviceGetUuid_v2(uuid, device)]
    except (OSError, AttributeError):  # no such library, or an old one
        return 0
    if any(codes):  # a call into CUDA has failed
        return 0
    # Shifted, because workers exchange signed numbers of 64 bits.
    return int.from_bytes(uuid.raw[:8], "big") >> 1


def refuse_sharing(identities: Sequence[int]) -> None:
    """Refuses workers that share a GPU.

    Args:
        identities: the `gpu_identity` of each worker, by rank.

    Raises:
        UsageError: which workers have the same one.
    """
    ranks_by_gpu: dict[int, list[int]] = {}
    for rank, identity in enumerate(identities):
        if identity:  # 0: it is unknown
            ranks_by_gpu.setdefault(identity, []).append(rank)
    for ranks in ranks_by_gpu.values():
        if len(ranks) > 1:
            raise UsageError(
                f"ranks {' and '.join(map(str, ranks))} have the same GPU: start at most one worker for each GPU of a "
                "machine, or set CUDA_VISIBLE_DEVICES=-1 to train on CPUs"
            )
