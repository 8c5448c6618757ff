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
from typing import Any

import tensorflow as tf

from loop.errors import UsageError
from loop.launch import machine

LOCAL_RANK = ("TFLOOP_LOCAL_RANK", "HOROVOD_LOCAL_RANK")
"""Environment variables with a worker's index among those on its machine, in the order in which they count."""
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def prepare(
    backend: str = "single",
    replicas: int | None = None,
    devices: Sequence[str] | None = None,
    threads: int | None = None,
) -> None:
    """Sets up TensorFlow for a backend; to be called before anything uses TensorFlow.

    Args:
        backend: the backend that will be made.
        replicas: with `mirrored` and `central`: how many replicas it is to have; None: one for each device.
        devices: with those, the devices instead.
        threads: of an operation; None: TensorFlow decides.

    Raises:
        UsageError: this process has no GPU of its own.
    """
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    gpus = use_gpus(local_rank() if backend in ("horovod", "multiworker") else None)
    if backend in ("mirrored", "central"):
        if devices:
            count = sum(name.startswith("cpu:") for name in machine.device_names(devices))
        else:
            count = 0 if gpus else replicas or 0
        _make_logical_cpus(count)


def alike(replicas: int) -> str:
    """Sets up devices of one kind for runs on one replica to `replicas`, whose numbers are compared.

    Returns:
        Which devices they are, in words.

    Raises:
        UsageError: TensorFlow has already started with other devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
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
        text += f", since this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)} and {replicas} replicas need as many"
    return text


def local_rank() -> int | None:
    """The index of this worker among those on its machine; None: there is no launcher, or it doesn't say."""
    texts = [os.environ[name] for name in LOCAL_RANK if name in os.environ]
    return int(texts[0]) if texts and texts[0].isdecimal() else None


def logical_cpus(count: int | None, backend: str = "mirrored") -> list[str]:
    """The names of `count` logical CPU devices; None: of all that there are.

    They are made, unless TensorFlow has already started.

    Raises:
        UsageError: TensorFlow has already started with fewer.
    """
    _make_logical_cpus(count or 0)
    devices = [f"/cpu:{index}" for index in range(len(tf.config.list_logical_devices("CPU")))]
    if count and count > len(devices):
        raise UsageError(
            f"{backend} with {count} replicas, but TensorFlow has already started with {len(devices)} logical CPU "
            "device(s): "
            + _first(
                'cpu = tf.config.list_physical_devices("CPU")[0]',
                f"tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {count})",
            )
        )
    return devices[:count]


def _make_logical_cpus(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    with contextlib.suppress(RuntimeError):  # TensorFlow has already started: its devices can't change any more
        if len(tf.config.get_logical_device_configuration(cpu) or [None]) < count:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def use_gpus(local_rank: int | None = None) -> list[Any]:
    """Lets GPU memory grow as needed, and gives a worker that shares its machine with others a GPU of its own.

    Args:
        local_rank: the index of this worker on its machine; None: it uses all GPUs.

    Returns:
        The GPUs that this process uses.

    Raises:
        UsageError: there are more workers here than GPUs, or TensorFlow has already started with all of them.
    """
    gpus = list(tf.config.get_visible_devices("GPU"))
    if local_rank is not None and len(gpus) > 1:  # a single one was chosen before, here or by the launcher
        if local_rank >= len(gpus):
            raise UsageError(machine.too_few_gpus(len(gpus), f"worker {local_rank + 1} on this machine"))
        gpus = [gpus[local_rank]]
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


def _let_memory_grow(gpus: Sequence[Any]) -> None:
    for gpu in gpus:
        if tf.config.get_logical_device_configuration(gpu):  # its logical devices have memory limits of their own
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            if os.environ.get(_GROWTH, "").lower() == "true":
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
    code = "".join(f"\n    {line}" for line in lines)
    return f"write this before anything uses TensorFlow (tensors, data sets, layers, metrics):{code}"


def gpu_identity(gpus: Sequence[Any]) -> int:
    """A number that no other GPU has, on this or another machine; 0 if it can't be known, or there isn't one GPU."""
    if len(gpus) != 1:
        return 0
    ordinal = int(gpus[0].name.rpartition(":")[2])
    uuid = ctypes.create_string_buffer(16)
    device = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        codes = [
            cuda.cuInit(0),
            cuda.cuDeviceGet(ctypes.byref(device), ordinal),
            cuda.cuDeviceGetUuid_v2(uuid, device),
        ]
    except (OSError, AttributeError):  # no such library, or an old one
        return 0
    # Shifted, because workers exchange signed numbers of 64 bits.
    return 0 if any(codes) else int.from_bytes(uuid.raw[:8], "big") >> 1


def refuse_sharing(identities: Sequence[int]) -> None:
    """Refuses a GPU that several workers have.

    Args:
        identities: the `gpu_identity` of each worker, by rank.

    Raises:
        UsageError: which workers have the same one.
    """
    for identity in identities:
        ranks = [rank for rank, other in enumerate(identities) if other == identity]
        if identity and len(ranks) > 1:
            raise UsageError(
                f"ranks {' and '.join(map(str, ranks))} have the same GPU: start at most one worker for each GPU of a "
                "machine, or set CUDA_VISIBLE_DEVICES=-1 to train on CPUs"
            )
