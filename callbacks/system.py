"""SystemMetrics: what each process and its machine are at, beside the training, in a thread."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from typing import Any, ClassVar, Literal

from callbacks.arguments import check, is_number
from callbacks.base import Callback, Metrics, Run
from callbacks.run_record import journal

_MEGA = 1e6


class SystemMetrics(Callback):
    """Samples CPU, memory, disk, network and GPUs on each rank, into the journal and thereby to MLflow.

    The names begin with `system/rank0/`, with the rank: `cpu` (percent of the machine's), `rss_mb` (this process),
    `free_memory_mb`, `free_disk_mb` (where the run directory is), `received_mb_per_s` and `sent_mb_per_s` (of the
    machine); of each GPU that this process may see, by NVML, `gpu0/use` (percent), `gpu0/memory_mb`, `gpu0/watts`.

    The chief's samples are written at once. Other ranks' travel at the end of each epoch; what they have seen after the
    last one stays there.

    Args:
        interval: seconds between two samples.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, interval: float = 10.0) -> None:
        check(self, is_number(interval, 0.1, 1e6), "give seconds, from 0.1 to 1000000", interval=interval)
        self.interval = interval
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # the last sample is taken by another thread
        self._samples: list[dict[str, Any]] = []

    def on_fit_start(self, run: Run) -> None:
        self._stop()  # where the workers of an elastic job form anew, with other ranks
        self._meter = _Meter(run)
        self._thread = threading.Thread(target=self._follow, args=(run,), name="system metrics", daemon=True)
        self._ended.clear()
        self._thread.start()

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        with self._lock:
            own, self._samples = self._samples, []
        for samples in run.backend.gather_json(own):
            for sample in samples if run.backend.is_chief else ():
                journal.append(run, "system", **sample)

    def on_fit_end(self, run: Run, status: str) -> None:
        if self._thread is not None:
            self._stop()
            self._sample(run)

    def _stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _follow(self, run: Run) -> None:
        while not self._ended.wait(self.interval):
            self._sample(run)

    def _sample(self, run: Run) -> None:
        done, prefix = run.progress, f"system/rank{run.backend.rank}/"
        metrics = {prefix + name: value for name, value in self._meter.read().items()}
        if run.backend.is_chief:
            journal.append(run, "system", metrics=metrics)
            return
        with self._lock:
            self._samples.append({"time": time.time(), "step": done.step, "epoch": done.epoch, "metrics": metrics})


class _Meter:
    """Reads the instruments."""

    def __init__(self, run: Run) -> None:
        import psutil

        self._psutil, self._process, self._directory = psutil, psutil.Process(), run.directory
        psutil.cpu_percent()  # the next one tells of the time from here on
        self._then, self._network = time.monotonic(), psutil.net_io_counters()
        self._gpus = _gpus()

    def read(self) -> dict[str, float]:
        """The values of now, or since the last time; what can't be read is left out."""
        found = {"cpu": self._psutil.cpu_percent()}
        found["rss_mb"] = self._process.memory_info().rss / _MEGA
        found["free_memory_mb"] = self._psutil.virtual_memory().available / _MEGA
        with contextlib.suppress(OSError):
            found["free_disk_mb"] = shutil.disk_usage(self._directory).free / _MEGA
        now, network = time.monotonic(), self._psutil.net_io_counters()
        if network is not None and self._network is not None:
            seconds = max(now - self._then, 1e-3)
            found["received_mb_per_s"] = (network.bytes_recv - self._network.bytes_recv) / _MEGA / seconds
            found["sent_mb_per_s"] = (network.bytes_sent - self._network.bytes_sent) / _MEGA / seconds
        self._then, self._network = now, network
        for name, read in self._gpus.items():
            with contextlib.suppress(Exception):  # each driver has its own gaps
                found[name] = float(read())
        return found


def _gpus() -> dict[str, Any]:
    """By the names of values of GPUs that this process may see, what reads them; nothing where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if visible == [""] or str(index) in visible or pynvml.nvmlDeviceGetUUID(handle) in visible:
                handles[f"gpu{index}"] = handle
    except Exception:  # not installed, no driver, or no access to it
        return {}
    found: dict[str, Any] = {}
    for name, handle in handles.items():
        found[f"{name}/use"] = lambda handle=handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        found[f"{name}/memory_mb"] = lambda handle=handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / _MEGA
        found[f"{name}/watts"] = lambda handle=handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return found
