"""What this machine has: CPU cores, GPUs, free ports, and which Horovod. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import mmap
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from callbacks.formats import plural
from callbacks.system import named_gpus
from loop.errors import UsageError

MPI = b"libmpi.so"
"""A name that is in Horovod's library if it was built with MPI."""
NCCL = b"ncclAllReduce"
"""A name that is in Horovod's library if it was built with NCCL."""


def usable_cpus() -> int:
    """How many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # on macOS, where a process can't be limited to some of the cores


def count_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use, without loading TensorFlow."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    named = named_gpus()
    # The variable may name more GPUs than this machine, or this container, has.
    return len(devices) if named is None else min(len(devices), len(named))


def check_gpus(workers: int) -> None:
    """Refuses more workers on this machine than it has GPUs, if it has any: some would share one without a warning.

    Raises:
        UsageError: how many there are.
    """
    gpus = count_gpus()
    if workers > gpus > 0:
        raise UsageError(too_few_gpus(gpus, f"{workers} workers (--workers)"))


def too_few_gpus(gpus: int, who: str) -> str:
    """The message for more workers than GPUs. `who` is its subject, such as `4 workers`."""
    return (
        f"{who}, but only {plural(gpus, 'GPU')}, and each worker needs one of its own: start at most {gpus}, or "
        "set CUDA_VISIBLE_DEVICES=-1 to train on CPUs"
    )


def device_names(names: Sequence[str]) -> list[str]:
    """Names of devices as `cpu:0` and `gpu:1`.

    Raises:
        UsageError: one is no such name, or comes twice.
    """
    short_names: list[str] = []
    for name in names:
        short = name.strip().lower().removeprefix("/").removeprefix("device:")
        if not re.fullmatch(r"(cpu|gpu):\d+", short):
            raise UsageError(f"devices: {name!r} isn't a device: give names such as cpu:0 or gpu:1")
        if short in short_names:
            raise UsageError(f"devices: {short} comes twice: each makes one replica")
        short_names.append(short)
    return short_names


def count_cpus(names: Sequence[str]) -> int:
    """How many of these devices are logical CPU devices; see `device_names`."""
    return len([name for name in names if name.startswith("cpu:")])


def horovod_missing() -> str | None:
    """What is missing for Horovod, and how to get it; None if nothing is. Doesn't import Horovod."""
    libraries = horovod_libraries()
    if libraries is None:
        return "Horovod is not installed (in a checkout: `uv sync`; it needs a C++ compiler)"
    if not libraries:
        return (
            "Horovod is installed without its native library, because there was no C++ compiler (install g++ and make, "
            "then `uv cache clean horovod && uv sync --reinstall-package horovod`)"
        )
    if missing := _missing_mpi(libraries):
        return (
            f"Horovod is built with MPI, whose library {missing} can't be loaded (install Open MPI again; or build "
            "Horovod anew: `uv cache clean horovod && uv sync --reinstall-package horovod`)"
        )
    return None


def _missing_mpi(libraries: Sequence[Path]) -> str:
    """The name of the MPI library that Horovod was built with, if this machine doesn't have it; else ""."""
    for library in libraries:
        with _content(library) as content:
            # The library's list of what it is linked with holds the whole name, which ends with a zero byte.
            begin = content.find(MPI)
            if begin < 0:
                continue
            name = content[begin : content.find(b"\0", begin)].decode()  # such as libmpi.so.40
        try:
            ctypes.CDLL(name)
        except OSError:
            return name
    return ""


def horovod_libraries() -> list[Path] | None:
    """Horovod's native library for TensorFlow; [] if it wasn't built, None if Horovod isn't installed."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    return list(Path(next(iter(spec.submodule_search_locations)), "tensorflow").glob("mpi_lib*.so"))


def horovod_knows_gpus() -> bool:
    """Whether Horovod reduces gradients between GPUs without a copy to the CPU; true on a machine without GPUs."""
    return not count_gpus() or horovod_built_with(NCCL)


def horovod_built_with(name: bytes) -> bool:
    """Whether Horovod is installed, and its library contains this name. Loading the library would load TensorFlow."""
    for library in horovod_libraries() or ():
        with _content(library) as content:
            return content.find(name) >= 0
    return False


@contextlib.contextmanager
def _content(library: Path) -> Iterator[mmap.mmap]:
    """The bytes of a library, which isn't loaded."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that are free now at an address of this machine; host "" means all addresses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_socket(host)) for _ in range(count)]
        for listener in sockets:  # all are open at the same time, so that no port is returned twice
            listener.bind((host, 0))
        return [listener.getsockname()[1] for listener in sockets]


def port_is_free(host: str, port: int) -> bool:
    """Whether this port is free.

    Raises:
        UsageError: this machine has no such address.
    """
    with _socket(host) as probe:
        # As servers do: otherwise a port whose last connections have just ended would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            # EACCES: ports below 1024 need a privilege. A UnicodeError has no `errno`: the host isn't a host name.
            if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise UsageError(f"--host {host}: this machine has no such address ({error})") from None
    return True


def _socket(host: str) -> socket.socket:
    """A socket for an address of this machine: only those of IPv6 have a colon."""
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
