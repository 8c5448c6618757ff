"""SystemMetrics: measures the load of each process and its machine, in a thread beside the training."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from callbacks.arguments import check, is_number
from callbacks.base import Callback, Metrics, Run
from callbacks.run_record import journal
from callbacks.types import Foreign, JsonObject

_MEGA = 1e6
_PATIENCE = 5.0  # seconds that the end of a run waits for a sample: the driver of a broken GPU may never answer


class SystemMetrics(Callback):
    """Samples CPU, memory, disk, network and GPUs on each rank, into the journal and thereby to MLflow.

    The names begin with `system/rank0/`, with the rank: `cpu` (percent of the machine's), `rss_mb` (this process),
    `free_memory_mb`, `free_disk_mb` (where the run directory is), `received_mb_per_s` and `sent_mb_per_s` (of the
    machine); of each GPU that this process may see, by NVML, `gpu0/use` (percent), `gpu0/memory_mb`, `gpu0/watts`.

    The chief's samples are written at once. Those of other ranks are sent at the end of each epoch; their samples after
    the last epoch are lost. The standard set samples the chief alone: that needs no collective.

    A value that can't be read, and a sample that can't be written, are left out: they never end a run.

    Args:
        interval: seconds between two samples.
        runs_on: `"all"` or `"chief"`; see `Callback`.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, interval: float = 10.0, runs_on: Literal["chief", "all"] = "all") -> None:
        check(self, is_number(interval, 0.1, 1e6), "give seconds, from 0.1 to 1000000", interval=interval)
        check(self, runs_on in ("chief", "all"), "give chief or all", runs_on=runs_on)
        vars(self)["runs_on"] = runs_on
        self.interval = interval
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # two threads use `_samples`: the one that measures, and the one that trains
        self._samples: list[JsonObject] = []

    def on_fit_start(self, run: Run) -> None:
        self._stop()  # the workers of an elastic job may have formed anew, with other ranks
        # Not made in the thread: the import of psutil there would hold the interpreter up while steps are made.
        with contextlib.suppress(Exception):  # best effort: a sandbox may hide the machine
            self._meter = _Meter(run)
            self._ended = threading.Event()  # of its own for each thread: one that hangs must not go on later
            arguments = (run, self._ended)
            self._thread = threading.Thread(target=self._follow, args=arguments, name="system metrics", daemon=True)
            self._thread.start()

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        if self.runs_on == "chief":  # the exchange below is for all ranks
            return
        # Taken under the lock and sent without it: a collective may wait long, and must not stop the measuring.
        with self._lock:
            own = self._samples
            self._samples = []
        for samples in run.backend.gather_json(own):
            for sample in samples if run.backend.is_chief else ():
                journal.append(run, "system", **sample)

    def on_fit_end(self, run: Run, status: str) -> None:
        if self._stop():
            self._sample(run)

    def _stop(self) -> bool:
        """Ends the thread; False if there is none, or if it hangs in a sample."""
        self._ended.set()
        thread = self._thread
        self._thread = None
        if thread is None:
            return False
        thread.join(_PATIENCE)
        return not thread.is_alive()

    def _follow(self, run: Run, ended: threading.Event) -> None:
        while not ended.wait(self.interval):
            self._sample(run)

    def _sample(self, run: Run) -> None:
        with contextlib.suppress(Exception):  # best effort: on a full disk, for example, the journal tells the error
            self._record(run)

    def _record(self, run: Run) -> None:
        prefix = f"system/rank{run.backend.rank}/"
        metrics = {prefix + name: value for name, value in self._meter.read().items()}
        if run.backend.is_chief:
            journal.append(run, "system", metrics=metrics)
            return
        position = {"step": run.progress.step, "epoch": run.progress.epoch}
        with self._lock:
            self._samples.append({"time": time.time(), **position, "metrics": metrics})


class _Meter:
    """Reads the values of the machine and of this process."""

    def __init__(self, run: Run) -> None:
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()
        self._directory = run.directory
        psutil.cpu_percent()  # the next call measures the time from here on
        self._then = time.monotonic()
        self._network = psutil.net_io_counters()
        self._gpus = _gpus()

    def read(self) -> dict[str, float]:
        """The current values, and rates since the last reading; what can't be read is left out."""
        values = {
            "cpu": self._psutil.cpu_percent(),
            "rss_mb": self._process.memory_info().rss / _MEGA,
            "free_memory_mb": self._psutil.virtual_memory().available / _MEGA,
        }
        with contextlib.suppress(OSError):
            values["free_disk_mb"] = shutil.disk_usage(self._directory).free / _MEGA
        now = time.monotonic()
        network = self._psutil.net_io_counters()
        if network is not None and self._network is not None:
            seconds = max(now - self._then, 1e-3)
            values["received_mb_per_s"] = (network.bytes_recv - self._network.bytes_recv) / _MEGA / seconds
            values["sent_mb_per_s"] = (network.bytes_sent - self._network.bytes_sent) / _MEGA / seconds
        self._then = now
        self._network = network
        for name, read in self._gpus.items():
            with contextlib.suppress(Exception):  # a driver may lack any of these values
                values[name] = float(read())
        return values


def named_gpus() -> list[str] | None:
    """The GPUs that `CUDA_VISIBLE_DEVICES` names, each by its index or its UUID; None: it isn't set: all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = []
    for name in map(str.strip, visible.split(",")):
        if name == "-1":  # CUDA ignores it and all names after it
            break
        if name:
            names.append(name)
    return names


def _has_uuid(uuid: str, names: Sequence[str]) -> bool:
    """Whether one of the names is this UUID, or the beginning of it, which CUDA takes as well."""
    return any(name.startswith("GPU-") and uuid.startswith(name) for name in names)


def _gpus() -> dict[str, Callable[[], float]]:
    """The functions that read the values of the visible GPUs, by the names of the values; {} without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = {}
        named = named_gpus()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if named is None or str(index) in named or _has_uuid(pynvml.nvmlDeviceGetUUID(handle), named):
                handles[f"gpu{index}"] = handle
    except Exception:  # not installed, no driver, or no access to it
        return {}
    readers: dict[str, Callable[[], float]] = {}
    for name, handle in handles.items():
        readers |= _readers(pynvml, name, handle)
    return readers


def _readers(pynvml: Foreign, name: str, handle: Foreign) -> dict[str, Callable[[], float]]:
    return {
        f"{name}/use": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        f"{name}/memory_mb": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / _MEGA,
        f"{name}/watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
