"""The environment variables that tell a process its place in a job: names, readers and checks.

Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence

from callbacks.progress import RELAY
from loop.errors import UsageError

LAUNCHER = "TFLOOP_LAUNCHER"
"""Environment variable: the process id of the launcher, which is its workers' parent."""
JOB = "TFLOOP_JOB"
"""Environment variable: the job's directory, in which workers that `tfloop` has started report to the launcher."""
WORKER = "TFLOOP_WORKER"
"""Environment variable: this worker's name in an elastic job. Unlike its rank, it never changes."""
OWNER = "TFLOOP_OWNER"
"""Environment variable: the process id of the worker that these variables are meant for; "": it has not started yet."""
LOCAL_SIZE = "TFLOOP_LOCAL_SIZE"
"""Environment variable: how many workers `tfloop` has started on this worker's machine, which share its cores."""
START_TIMEOUT = "TFLOOP_START_TIMEOUT"
"""Environment variable: the seconds within which all workers of a job must have started; 120."""
_OF_WORKER = (LAUNCHER, JOB, WORKER, OWNER, LOCAL_SIZE, RELAY, "TFLOOP_LOCAL_RANK", "TF_CONFIG")
_OF_LAUNCHERS = (
    "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "LSF_PM_TASKID", "OMPI_COMM_WORLD_SIZE", "PBS_NODEFILE", "PMI_SIZE",
    "SKYPILOT_NODE_RANK", "SLURM_STEP_NUM_TASKS", "TFLOOP_SERVICE",
)  # fmt: skip
"""Variables of outside launchers. `places` finds no place without the launcher's own."""


def forget_inherited_job() -> None:
    """Removes a job's variables from the environment of a command that one of its workers has started.

    The command isn't a worker: with these variables, it would take the place of the worker that has started it.
    """
    if os.environ.get(OWNER, "") in ("", str(os.getpid())):
        return
    for name in list(os.environ):
        if name in (*_OF_WORKER, *_OF_LAUNCHERS) or name.startswith("HOROVOD_"):
            del os.environ[name]


def own_job() -> None:
    """Marks a job's variables as this process's own: a command that it starts has no part in the job.

    Also those of an outside launcher, and those of a job with one worker, which has no size.
    """
    if JOB in os.environ or job_size() is not None:
        os.environ[OWNER] = str(os.getpid())


def check_place(backend: str, environment: Mapping[str, str]) -> None:
    """Refuses a backend whose workers find each other by `TF_CONFIG` in a process without that variable.

    Raises:
        UsageError: it is such a backend.
    """
    if backend in ("multiworker", "parameter_server") and "TF_CONFIG" not in environment:
        raise UsageError(
            f"backend={backend!r} without TF_CONFIG: start them with `tfloop train ... --workers N`, or set TF_CONFIG "
            "in each of them"
        )


def job_size() -> int | None:
    """The number of workers of the job that this process was started in; None outside of a job.

    Raises:
        UsageError: the launcher's variables can't be read.
    """
    return _rank_and_size()[1]


def job_rank() -> int:
    """The rank of this process in the job that it was started in; 0 outside of a job.

    Raises:
        UsageError: the launcher's variables can't be read.
    """
    return _rank_and_size()[0]


def _rank_and_size() -> tuple[int, int | None]:
    # Before TF_CONFIG, which a cluster may set for all processes: as `backend_choice` does.
    if "HOROVOD_RANK" in os.environ:
        rank = os.environ["HOROVOD_RANK"]
        size = os.environ.get("HOROVOD_SIZE", "")
        numbers = re.fullmatch(r"\d+ [1-9]\d*", f"{rank} {size}", re.ASCII)
        # An elastic worker without a place yet has its name as its rank, which may be any number.
        if not numbers or (int(rank) >= int(size) and WORKER not in os.environ):
            raise UsageError(
                f"HOROVOD_RANK={rank} with HOROVOD_SIZE={size or '(not set)'} isn't a place in a job: Horovod's "
                "launcher sets both; unset them where it isn't meant"
            )
        return int(rank), int(size)
    if "TF_CONFIG" in os.environ:
        return read_tf_config(os.environ["TF_CONFIG"])
    return 0, None


def horovod_meets_at() -> tuple[str, int] | None:
    """The address and the port where Horovod's workers meet; None: no variable says.

    Raises:
        UsageError: the variable of the port has none.
    """
    if not {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"} <= os.environ.keys():
        return None
    port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 65536:
        raise UsageError(
            f"HOROVOD_GLOO_RENDEZVOUS_PORT={port} isn't a port (1 to 65535): Horovod's workers meet there. "
            "Horovod's launcher sets it; outside of a job of Horovod, unset all variables that begin with HOROVOD_"
        )
    return os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(port)


def worker_name() -> str:
    """The name that the launcher has for this worker: its rank or, in an elastic job, a name that never changes."""
    return os.environ.get(WORKER) or str(job_rank())


def start_timeout() -> float:
    """The seconds within which all workers of a job must have started.

    Raises:
        UsageError: `TFLOOP_START_TIMEOUT` is no such number.
    """
    text = os.environ.get(START_TIMEOUT, "120")
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):  # false for nan, too
            return float(text)
    raise UsageError(f"{START_TIMEOUT}={text}: give a number of seconds > 0")


def not_started(missing: Sequence[str], timeout: float) -> str:
    """The message for workers that have not started in time."""
    return (
        f"{' and '.join(missing)} {'have' if len(missing) > 1 else 'has'} not started within {timeout:g} s: look at "
        f"what is printed there; a slow start may be given more with --start-timeout, or {START_TIMEOUT}"
    )


def read_tf_config(text: str) -> tuple[int, int]:
    """The rank of this process among the workers of a `TF_CONFIG`, and how many there are.

    Raises:
        UsageError: it isn't JSON, or names no place for this process; with what it should look like.
    """
    rank, addresses = tf_cluster(text)
    return rank, len(addresses)


def tf_cluster(text: str) -> tuple[int, dict[str, str]]:
    """The rank of this process in a `TF_CONFIG`, and the address of each process by its name, such as `worker 0`.

    The names are in the order of ranks.

    Raises:
        UsageError: as `read_tf_config`.
    """
    try:
        config = json.loads(text)
        addresses = _addresses(config["cluster"])
        own_task = f"{config['task']['type']} {_index(config['task']['index'])}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        form = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        raise UsageError(
            f"TF_CONFIG={text!r} can't be read ({type(error).__name__}: {error}): it must be {form}"
        ) from None
    _check_addresses(addresses)
    if own_task not in addresses:
        tasks = ", ".join(addresses) or "no workers"
        raise UsageError(f"TF_CONFIG: its task is {own_task}, but its cluster has {tasks}")
    return list(addresses).index(own_task), addresses


def _addresses(cluster: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The address of each task, in the order of ranks: the chief's first, the parameter servers' last."""
    addresses = {}
    for job in ("chief", "worker", "ps"):  # TensorFlow numbers ranks in this order
        for index, address in enumerate(list(cluster.get(job, []))):
            addresses[f"{job} {index}"] = address
    return addresses


def _check_addresses(addresses: Mapping[str, str]) -> None:
    """Refuses a text that isn't an address, and an address that two tasks have."""
    for name, address in addresses.items():
        if not _is_address(str(address)):
            raise UsageError(
                f"TF_CONFIG: the address of {name} is {address!r}: give host:port, with a port of 1 to 65535"
            )
        # If two processes had the same address, only one could listen there.
        if same := [other for other in addresses if other != name and addresses[other] == address]:
            raise UsageError(f"TF_CONFIG: {name} and {same[0]} have the same address {address}: give each its own")


def _is_address(text: str) -> bool:
    """Whether a text is a host name or an address, with a port."""
    parts = re.fullmatch(r"(.+):(\d{1,5})", text, re.ASCII)
    if parts is None or not 0 < int(parts[2]) < 65536:
        return False
    try:
        parts[1].encode("idna")  # as for each connection: fails for `a..b`, and for a label of more than 63 characters
    except UnicodeError:
        return False
    return True


def _index(value: object) -> int:
    """The index of a task in `TF_CONFIG`: a whole number, or a text of its digits; TensorFlow accepts both.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):  # `true` would be an int
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value, re.ASCII):
        return int(value)
    raise ValueError(f"the index {json.dumps(value)} of the task isn't a whole number")


def tpu_name(environment: Mapping[str, str] | None = None) -> str:
    """The TPU that `TPU_NAME` names: one of a Google Cloud project, an address, or `local` for this virtual machine.

    Raises:
        UsageError: there is no such variable, or its value isn't a name.
    """
    name = (os.environ if environment is None else environment).get("TPU_NAME")
    form = "give --tpu NAME (a TPU of your Google Cloud project), grpc://host:8470, or `local` on a TPU virtual machine"
    if name is None:
        raise UsageError(f"backend='tpu': which one? {form}; or set TPU_NAME")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?|grpc://[^\s/]+:\d{1,5}", name):
        raise UsageError(f"TPU_NAME={name!r} isn't a TPU's name: {form}")
    return name
