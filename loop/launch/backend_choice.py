"""Which backend a job uses, and why. Imports no TensorFlow, so that mistakes are reported at once."""

from __future__ import annotations

import os
from collections.abc import Mapping

from callbacks.run_record.redaction import tell
from loop.errors import UsageError
from loop.launch import machine, plugins, schedulers, stderr
from loop.launch.environment import JOB, check_place, job_size, tf_cluster, tpu_name
from loop.options import BACKENDS, with_defaults

MOST_WORKERS = 1024
"""The greatest number of workers that can be asked for."""
MOST_SERVERS = 64
"""The greatest number of parameter servers that can be asked for."""


def choose_backend(
    backend: str, workers: int | None = None, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """The backend that is used, and why.

    Args:
        backend: a backend's name, or `auto`.
        workers: how many processes are to be started on this machine; None or 1: this process is the job, or a part of
            one.
        environment: the environment variables; None: this process's.

    Returns:
        The backend's name, and the reason in a few words.

    Raises:
        UsageError: the backend that is asked for isn't there, or can't work with so many workers.
    """
    if environment is None:
        schedulers.join(backend)
        environment = os.environ
    _refuse_unusable(backend, workers, environment)
    # Read for every backend, so that a TF_CONFIG that contradicts it is refused.
    serves = "TF_CONFIG" in environment and has_servers(backend, environment["TF_CONFIG"])
    if workers is None:
        check_place(backend, environment)
    if backend != "auto":
        return backend, "asked for"
    # An outside launcher has decided already; only without one does this machine decide.
    return _of_launcher(environment, workers, serves) or _of_machine(workers)


def _refuse_unusable(backend: str, workers: int | None, environment: Mapping[str, str]) -> None:
    """Refuses a backend that isn't there, or can't work with so many workers."""
    if backend == "horovod" and (missing := machine.horovod_missing()):
        raise UsageError(f"backend='horovod': {missing}; or use backend='multiworker', which needs nothing more")
    if backend == "single" and workers is not None and workers > 1:
        raise UsageError(f"workers={workers} with backend='single': one device is one worker; use mirrored or horovod")
    if backend == "tpu":
        if workers is not None and workers > 1:
            raise UsageError(f"workers={workers} with backend='tpu': the TPU says how many: leave --workers out")
        tpu_name(environment)
    if backend not in BACKENDS and (missing := plugins.ask(backend, workers or 1)[1]):
        raise UsageError(f"backend={backend!r}: {missing}")


def _of_launcher(environment: Mapping[str, str], workers: int | None, serves: bool) -> tuple[str, str] | None:
    """The backend that the variables of an outside launcher ask for; None: there is no launcher."""
    # Before TF_CONFIG, which a cluster may set for all processes: as `environment.job_rank` does.
    if "HOROVOD_RANK" in environment:
        if missing := machine.horovod_missing():
            raise UsageError(f"started by Horovod's launcher, but {missing}")
        return "horovod", "started by Horovod's launcher"
    if "TF_CONFIG" in environment:
        return ("parameter_server", "TF_CONFIG has them") if serves else ("multiworker", "TF_CONFIG is set")
    if "TPU_NAME" in environment:
        return choose_backend("tpu", workers, environment)[0], "a TPU is named"
    return None


def _of_machine(workers: int | None) -> tuple[str, str]:
    """The best backend for this machine."""
    if plugin := plugins.first_available(workers or 1):
        return plugin, "this plug-in is available"
    # With several workers, each has a GPU of its own; a single process takes all GPUs.
    if workers is not None and workers > 1:
        return job_backend()
    if machine.count_gpus() >= 2:
        return "mirrored", f"there are {machine.count_gpus()} GPUs"
    return "single", "one device"


def job_backend() -> tuple[str, str]:
    """The backend of a job on this machine for which none was asked for, and the reason in a few words."""
    missing = machine.horovod_missing()
    # `multiworker` uses the NCCL that TensorFlow brings.
    if missing is None and not machine.horovod_knows_gpus():
        missing = "Horovod is built without NCCL, so that gradients between GPUs would go through the CPU"
    return ("horovod", "it is installed") if missing is None else ("multiworker", missing)


def choose_for_command(backend: str, workers: int | None, asynchronous: bool = False, alone: str = "") -> str:
    """The backend for this process, or for the workers that it is to start; checked against what was typed.

    A choice that differs from what the user may expect is printed with its reason.

    Args:
        backend: `--backend`.
        workers: `--workers`; None: not typed.
        asynchronous: whether the command can run on `parameter_server`.
        alone: the name of a command that runs in one process; "": it may run in several.

    Raises:
        UsageError: the options contradict each other, or the job.
    """
    with_defaults(None, {"backend": backend})  # refuses a name that isn't a backend's
    if backend == "parameter_server" and not asynchronous:
        raise UsageError(f"backend={backend!r} is for `tfloop train` alone: give another --backend, or leave it out")
    _check_workers(workers)
    schedulers.join(backend)  # before `job_size`, which reads the variables that this sets
    size = job_size()
    if size is not None:
        # A worker that `tfloop` has started has the launcher's command line, and --workers in it.
        if workers not in (None, size) and JOB not in os.environ:
            raise UsageError(
                f"--workers {workers}, but this job has been started with {size} workers: leave --workers out"
            )
        workers = None  # nothing is to be started: this process is one of the workers
    with stderr.quiet_start(says=False):  # a plug-in may load TensorFlow
        chosen, why = choose_backend(backend, workers)
    if alone and (chosen in ("horovod", "multiworker") or size is not None):
        raise UsageError(f"{alone} runs in one process, not on {chosen}: give --backend mirrored, or no --workers")
    if backend == "auto" and size is None:
        _report_choice(chosen, why, workers or 1)
    return chosen


def starts_workers(backend: str) -> bool:
    """Whether this process starts the workers of this backend, instead of being one."""
    return backend in ("horovod", "multiworker", "parameter_server") and job_size() is None


def _report_choice(chosen: str, why: str, workers: int) -> None:
    """Prints the choice of a backend, unless it is the one that a user expects."""
    if workers > 1 or chosen not in BACKENDS:
        tell(f"backend: {chosen} ({why})")


def _check_workers(workers: int | None) -> None:
    """Refuses a number of workers that is out of range."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: give a whole number >= 1")
    if workers is not None and workers > MOST_WORKERS:
        raise UsageError(f"--workers {workers}: give at most {MOST_WORKERS}")


def has_servers(backend: str, text: str) -> bool:
    """Whether a `TF_CONFIG` is that of a `parameter_server` job.

    Raises:
        UsageError: as `read_tf_config`; or the backend can't use it.
    """
    if backend not in ("auto", "multiworker", "parameter_server"):
        return False
    jobs = [name.split()[0] for name in tf_cluster(text)[1]]
    servers = jobs.count("ps")
    if backend == "parameter_server" or (servers and backend == "auto"):
        _check_server_cluster(jobs.count("chief"), jobs.count("worker"), servers)
    elif servers:
        raise UsageError(
            f"TF_CONFIG: its cluster has {servers} ps (parameter servers), which backend={backend!r} has no use for: "
            "ask for backend='parameter_server', or leave them out"
        )
    return servers > 0


def _check_server_cluster(chiefs: int, workers: int, servers: int) -> None:
    """Refuses a cluster that isn't that of a `parameter_server` job."""
    if chiefs != 1 or not workers or not servers:
        raise UsageError(
            f"TF_CONFIG: its cluster has {chiefs} chief, {workers} worker and {servers} ps, but a parameter_server "
            "job has 1 chief, and at least 1 worker and 1 ps (a parameter server)"
        )
    check_servers("parameter_server", servers)


def check_servers(backend: str, servers: int) -> None:
    """Refuses a number of parameter servers that is out of range, or that the backend can't use.

    Raises:
        UsageError: it is too small or too great, or the backend has none.
    """
    if backend != "parameter_server":
        raise UsageError(
            f"--ps {servers} with backend={backend!r}, which has no parameter servers: add --backend parameter_server, "
            "or leave --ps out"
        )
    if not 1 <= servers <= MOST_SERVERS:
        raise UsageError(f"{servers} parameter servers (--ps): give 1 to {MOST_SERVERS}")
