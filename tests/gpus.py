"""GPUs that a test makes up: what TensorFlow says of them, and what is asked of it."""

import types

import tensorflow as tf

from loop.backends import devices


class Machine:
    """What TensorFlow says of a machine with GPUs, before or after it has started; `done` is what was set."""

    def __init__(self, monkeypatch, count, started=False):
        self.started, self.done = started, []
        self.all = [types.SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in range(count)]
        self.visible = list(self.all)
        physical = tf.config.list_physical_devices
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: self.all if kind == "GPU" else physical(kind)
        )
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: self.visible)
        monkeypatch.setattr(tf.config, "set_visible_devices", self.set_visible)
        configuration = tf.config.get_logical_device_configuration
        monkeypatch.setattr(
            tf.config, "get_logical_device_configuration", lambda gpu: None if gpu in self.all else configuration(gpu)
        )
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self.grow)
        for name in ("TF_FORCE_GPU_ALLOW_GROWTH", *devices.LOCAL_RANK):
            monkeypatch.delenv(name, raising=False)

    def set_visible(self, gpus, kind):
        if self.visible != gpus and self.started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = gpus

    def grow(self, gpu, growing):
        if self.started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.done.append((gpu, growing))


class Strategy:
    """In place of a strategy of TensorFlow's, which would look for the GPUs: what it was made with."""

    def __init__(self, *given, **named):
        self.given = given
        self.named = named


def worker_strategy(gpus):
    """The class of a strategy with one worker and a replica on each of so many GPUs."""

    class OneWorker(Strategy):
        num_replicas_in_sync = max(gpus, 1)
        cluster_resolver = types.SimpleNamespace(cluster_spec=lambda: tf.train.ClusterSpec({"worker": ["127.0.0.1:9"]}))
        extended = types.SimpleNamespace(_get_variable_creator_initial_value=None)  # which is replaced, and not called

    return OneWorker


class Library:
    """In place of CUDA's library, which `ctypes` loads: its GPUs have UUIDs."""

    def __init__(self, uuids, code=0):
        self._uuids = uuids
        self._code = code

    def cuInit(self, flags):
        return self._code

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 100 + ordinal
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid.raw = self._uuids[device.value - 100]
        return 0


class Nvml:
    """In place of NVIDIA's package `pynvml`: GPUs with these UUIDs, which can not say how many watts they take."""

    def __init__(self, uuids):
        self._uuids = uuids

    def nvmlInit(self):
        if not self._uuids:
            raise RuntimeError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self):
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return self._uuids[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=10 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=(1 + handle) * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle):
        raise RuntimeError("Not Supported")
