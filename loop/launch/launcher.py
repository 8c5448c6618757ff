"""Starts the workers of a job on this machine, and finds this process's place in a job that somebody else started.

Imports no TensorFlow: what is wrong with a job is said before anything is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.util
import json
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from callbacks.files import FileError, write_text
from callbacks.progress import MARK, RELAY, Display
from callbacks.run_record.redaction import mask, tell
from loop.errors import PeerError, TrainingError, UsageError, no_exit
from loop.launch import explain, plugins, signals
from loop.options import BACKENDS, with_defaults

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster, Remote

LAUNCHER = "TFLOOP_LAUNCHER"
"""Environment variable: the process id of the launcher, which is its workers' parent."""
JOB = "TFLOOP_JOB"
"""Environment variable: where the workers of a job that we started leave their process ids and results."""
WORKER = "TFLOOP_WORKER"
"""Environment variable: this worker's name in an elastic job, in which ranks change."""
START_TIMEOUT = "TFLOOP_START_TIMEOUT"
"""Environment variable: how many seconds all workers of a job have to start; 120."""
STOPPED = "stopped before training began; start again to go on"
"""What is said of a stop by a signal before there was anything to save."""
STOPPING = "interrupted: the run saves and ends; a second Ctrl-C (or signal) ends it at once, without saving"
"""What is said at once of a stop by a signal."""
stderr = 2
"""The file descriptor of stderr, also while something else stands in its place."""
CHATTER = (
    r"[IWE]\d{4} \d\d:|[IWE]0000 00:00:|WARNING: All log messages before absl|To enable the following instructions"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] |WARNING:tensorflow:\d+ out of the last "
)
"""What TensorFlow prints to stderr while it starts, whatever its log level: nobody can act on it."""
_GONE = ("UnavailableError", "AbortedError", "HorovodInternalError")
MPI, NCCL = b"libmpi.so", b"ncclAllReduce"
"""What Horovod's library names if it was built with MPI, or with NCCL."""
MOST_WORKERS = 1024
"""So many workers are started at most."""
MOST_SERVERS = 64
"""So many parameter servers make sense at most."""
MOST_RESTARTS = 10
"""So often the launcher starts each worker of a `parameter_server` job again."""
ORPHAN_GRACE = 600.0
"""Seconds that a worker has to save and end when its launcher is gone."""
_LAST_WORDS = 2.0  # seconds in which what a worker has started may still print when it has ended
_LONGEST = 1 << 20  # bytes that are printed as a line, and read at once
_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed
_EARLY_GRACE = 3.0  # the same while some have not started: the others wait for them, and do nothing else


def choose(backend: str, workers: int | None = None, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Which engine is meant, and why.

    Args:
        backend: an engine's name, or `auto`.
        workers: how many processes are to be started on this machine; None or 1: this one is the job, or part of one.
        environment: the environment variables; None: this process's.

    Returns:
        The engine's name, and the reason in a few words.

    Raises:
        UsageError: the engine that is asked for isn't there, or can't do with so many workers.
    """
    if environment is None:
        from loop.launch import schedulers

        schedulers.join(backend)
        environment = os.environ
    if backend == "horovod" and (missing := horovod_missing()):
        raise UsageError(f"backend='horovod': {missing}; or use backend='multiworker', which needs nothing more")
    if backend == "single" and workers is not None and workers > 1:
        raise UsageError(f"workers={workers} with backend='single': one device is one worker; use mirrored or horovod")
    if backend == "tpu":
        if workers is not None and workers > 1:
            raise UsageError(f"workers={workers} with backend='tpu': the TPU says how many: leave --workers out")
        tpu_name(environment)
    if backend not in BACKENDS and (missing := plugins.ask(backend, workers or 1)[1]):
        raise UsageError(f"backend={backend!r}: {missing}")
    serves = "TF_CONFIG" in environment and has_servers(backend, environment["TF_CONFIG"])
    if backend in ("multiworker", "parameter_server") and "TF_CONFIG" not in environment and workers is None:
        raise UsageError(
            f"backend={backend!r} without TF_CONFIG: start them with `tfloop train ... --workers N`, or set TF_CONFIG "
            "in each of them"
        )
    if backend != "auto":
        return backend, "asked for"
    if "HOROVOD_RANK" in environment:
        if missing := horovod_missing():
            raise UsageError(f"started by Horovod's launcher, but {missing}")
        return "horovod", "started by Horovod's launcher"
    if "TF_CONFIG" in environment:
        return ("parameter_server", "TF_CONFIG has them") if serves else ("multiworker", "TF_CONFIG is set")
    if "TPU_NAME" in environment:
        return choose("tpu", workers, environment)[0], "a TPU is named"
    if plugin := plugins.first_available(workers or 1):
        return plugin, "this plug-in is available"
    if workers is not None and workers > 1:
        return job_backend()
    if count_gpus() >= 2:
        return "mirrored", f"there are {count_gpus()} GPUs"
    return "single", "one device"


def job_backend() -> tuple[str, str]:
    """The backend of a job on this machine for which none was asked for, and the reason in a few words."""
    missing = horovod_missing()
    if missing is None and not horovod_knows_gpus():
        missing = "Horovod is built without NCCL, so that gradients between GPUs would go through the CPU"
    return ("horovod", "it is installed") if missing is None else ("multiworker", missing)


def place(backend: str, workers: int | None, asynchronous: bool = False, alone: str = "") -> str:
    """The engine for this process, or for the workers that it is to start; says why where nobody asked for it.

    It may be `parameter_server` if it may be `asynchronous`. `alone` is the name of a command that runs in one process.
    """
    from loop.launch import schedulers

    with_defaults(None, {"backend": backend})
    if backend == "parameter_server" and not asynchronous:
        raise UsageError(f"backend={backend!r} is for `tfloop train` alone: give another --backend, or leave it out")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: give a whole number >= 1")
    if workers is not None and workers > MOST_WORKERS:
        raise UsageError(f"--workers {workers}: give at most {MOST_WORKERS}")
    schedulers.join(backend)
    size = job_size()
    if size is not None and workers not in (None, size) and JOB not in os.environ:
        raise UsageError(f"--workers {workers}, but this job has been started with {size} workers: leave --workers out")
    with quiet_start(says=False):  # a plug-in may load TensorFlow
        chosen, why = choose(backend, None if size is not None else workers)
    if alone and (chosen in ("horovod", "multiworker") or size is not None):
        raise UsageError(f"{alone} runs in one process, not on {chosen}: give --backend mirrored, or no --workers")
    if backend == "auto" and size is None and ((workers or 1) > 1 or chosen not in BACKENDS):
        tell(f"backend: {chosen} ({why})")
    return chosen


def horovod_missing() -> str | None:
    """What is missing for Horovod, and how to get it; None if it is there. Doesn't import it."""
    libraries = horovod_libraries()
    if libraries is None:
        return "Horovod is not installed (in a checkout: `uv sync`; it needs a C++ compiler)"
    if not libraries:
        return (
            "Horovod is installed without its native library, because there was no C++ compiler (install g++ and make, "
            "then `uv cache clean horovod && uv sync --reinstall-package horovod`)"
        )
    return None


def horovod_libraries() -> list[Path] | None:
    """Horovod's native library for TensorFlow, if it was built; None if Horovod isn't installed."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    return list(Path(next(iter(spec.submodule_search_locations)), "tensorflow").glob("mpi_lib*.so"))


def horovod_knows_gpus() -> bool:
    """Whether gradients on this machine's GPUs, if there are any, stay there when Horovod reduces them."""
    return not count_gpus() or horovod_built_with(NCCL)


def horovod_built_with(name: bytes) -> bool:
    """Whether Horovod is there, and its library names this. Doesn't load it: that takes TensorFlow."""
    for library in horovod_libraries() or ():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name) >= 0
    return False


def tpu_name(environment: Mapping[str, str] | None = None) -> str:
    """The TPU that `TPU_NAME` names: in Google Cloud, by its address, or on this virtual machine.

    Raises:
        UsageError: there is no such variable, or its value is no name.
    """
    name = (os.environ if environment is None else environment).get("TPU_NAME")
    form = "give --tpu NAME (a TPU of your Google Cloud project), grpc://host:8470, or `local` on a TPU virtual machine"
    if name is None:
        raise UsageError(f"backend='tpu': which one? {form}; or set TPU_NAME")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?|grpc://[^\s/]+:\d{1,5}", name):
        raise UsageError(f"TPU_NAME={name!r} is no TPU's name: {form}")
    return name


def device_names(names: Sequence[str]) -> list[str]:
    """Names of devices as `cpu:0` and `gpu:1`.

    Raises:
        UsageError: one is no such name, or comes twice.
    """
    found = [name.strip().lower().removeprefix("/").removeprefix("device:") for name in names]
    for place, name in enumerate(found):
        if not re.fullmatch(r"(cpu|gpu):\d+", name):
            raise UsageError(f"devices: {names[place]!r} is no device: give names such as cpu:0 or gpu:1")
        if name in found[:place]:
            raise UsageError(f"devices: {name} comes twice: each makes one replica")
    return found


def count_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use, without loading TensorFlow."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if visible is None:
        return len(devices)
    named = [each for each in visible.split(",") if each.strip()]
    return min(len(devices), next((i for i, each in enumerate(named) if each.strip() == "-1"), len(named)))


def check_gpus(workers: int) -> None:
    """Refuses more workers on this machine than it has GPUs, where it has any: they would share them silently.

    Raises:
        UsageError: how many there are.
    """
    gpus = count_gpus()
    if workers > gpus > 0:
        raise UsageError(too_few_gpus(gpus, f"{workers} workers (--workers)"))


def too_few_gpus(gpus: int, who: str) -> str:
    """What is said of workers that have no GPU of their own on a machine with so many."""
    return (
        f"{who}, but only {gpus} GPU{'s' * (gpus > 1)}, and each worker needs one of its own: start at most {gpus}, or "
        "set CUDA_VISIBLE_DEVICES=-1 to train on CPUs"
    )


def read_tf_config(text: str) -> tuple[int, int]:
    """The rank of this process among the workers of a `TF_CONFIG`, and how many there are.

    Raises:
        UsageError: it isn't JSON, or names no place for this process; with what it should look like.
    """
    rank, addresses = tf_cluster(text)
    return rank, len(addresses)


def has_servers(backend: str, text: str) -> bool:
    """Whether a `TF_CONFIG` is that of a `parameter_server` job.

    Raises:
        UsageError: as `read_tf_config`; or it isn't one for this engine.
    """
    if backend not in ("auto", "multiworker", "parameter_server"):
        return False
    jobs = [name.split()[0] for name in tf_cluster(text)[1]]
    chief, workers, servers = (jobs.count(job) for job in ("chief", "worker", "ps"))
    if backend == "parameter_server" or (servers and backend == "auto"):
        if chief != 1 or not workers or not servers:
            raise UsageError(
                f"TF_CONFIG: its cluster has {chief} chief, {workers} worker and {servers} ps, but a parameter_server "
                "job has 1 chief, and at least 1 worker and 1 ps (a parameter server)"
            )
        check_servers("parameter_server", servers)
    elif servers:
        raise UsageError(
            f"TF_CONFIG: its cluster has {servers} ps (parameter servers), which backend={backend!r} has no use for: "
            "ask for backend='parameter_server', or leave them out"
        )
    return servers > 0


def check_servers(backend: str, servers: int) -> None:
    """Refuses a number of parameter servers that makes no sense.

    Raises:
        UsageError: it is too small or too great, or the engine has none.
    """
    if backend != "parameter_server":
        raise UsageError(
            f"--ps {servers} with backend={backend!r}, which has no parameter servers: add --backend parameter_server, "
            "or leave --ps out"
        )
    if not 1 <= servers <= MOST_SERVERS:
        raise UsageError(f"{servers} parameter servers (--ps): give 1 to {MOST_SERVERS}")


def tf_cluster(text: str) -> tuple[int, dict[str, str]]:
    """The rank of this process among those of a `TF_CONFIG`, and the address of each, by rank: `worker 0`.

    Raises:
        UsageError: as `read_tf_config`.
    """
    form = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        given = [(job, list(cluster.get(job, []))) for job in ("chief", "worker", "ps")]
        addresses = {f"{job} {index}": each for job, all_of_it in given for index, each in enumerate(all_of_it)}
        place = f"{task['type']} {_index(task['index'])}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG={text!r} can't be read ({type(error).__name__}: {error}): it must be {form}"
        ) from None
    for name, address in addresses.items():
        port = str(address).rpartition(":")[2]
        if not re.fullmatch(r".+:\d+", str(address)) or not 0 < int(port) < 65536:
            raise UsageError(
                f"TF_CONFIG: the address of {name} is {address!r}: give host:port, with a port of 1 to 65535"
            )
        if same := [other for other in addresses if other != name and addresses[other] == address]:
            raise UsageError(f"TF_CONFIG: {name} and {same[0]} have the same address {address}: give each its own")
    if place not in addresses:
        there = ", ".join(addresses) or "no workers"
        raise UsageError(f"TF_CONFIG: its task is {place}, but its cluster has {there}")
    return list(addresses).index(place), addresses


def _index(value: object) -> int:
    """The index of a task in `TF_CONFIG`: a whole number, or its digits as a text, as TensorFlow takes it.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value, re.ASCII):
        return int(value)
    raise ValueError(f"the index {json.dumps(value)} of the task is no whole number")


def job_size() -> int | None:
    """How many workers the job has that this process was started in; None outside of one.

    Raises:
        UsageError: the launcher's variables can't be read.
    """
    return _rank_and_size()[1]


def job_rank() -> int:
    """The rank of this process in the job that it was started in; 0 outside of one.

    Raises:
        UsageError: the launcher's variables can't be read.
    """
    return _rank_and_size()[0]


def _rank_and_size() -> tuple[int, int | None]:
    if "HOROVOD_RANK" in os.environ:
        rank, size = os.environ["HOROVOD_RANK"], os.environ.get("HOROVOD_SIZE", "")
        numbers = re.fullmatch(r"\d+ [1-9]\d*", f"{rank} {size}", re.ASCII)
        if not numbers or (int(rank) >= int(size) and WORKER not in os.environ):  # whose first rank is but a name
            raise UsageError(
                f"HOROVOD_RANK={rank} with HOROVOD_SIZE={size or '(not set)'} is no place in a job: Horovod's launcher "
                "sets both; unset them where it isn't meant"
            )
        return int(rank), int(size)
    return read_tf_config(os.environ["TF_CONFIG"]) if "TF_CONFIG" in os.environ else (0, None)


def start_timeout() -> float:
    """How many seconds the workers of a job have until all of them have started.

    Raises:
        UsageError: `TFLOOP_START_TIMEOUT` is no such number.
    """
    text = os.environ.get(START_TIMEOUT, "120")
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(f"{START_TIMEOUT}={text}: give a number of seconds > 0")


def late(missing: Sequence[str], timeout: float) -> str:
    """What is said of workers that have not started in time."""
    return (
        f"{' and '.join(missing)} {'have' if len(missing) > 1 else 'has'} not started within {timeout:g} s: look at "
        f"what is printed there; a slow start may be given more with --start-timeout, or {START_TIMEOUT}"
    )


@contextlib.contextmanager
def quiet_start(says: bool = True) -> Iterator[None]:
    """TensorFlow's chatter while it is loaded goes nowhere; what else is written to stderr meanwhile is kept.

    Args:
        says: whether it is said that TensorFlow is being loaded; in a job, rank 0 or the launcher says it.
    """
    global stderr
    if says and "tensorflow" not in sys.modules and JOB not in os.environ and job_rank() == 0:
        tell("loading TensorFlow ...")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            own, stderr = stderr, 2
            os.dup2(own, 2)
            os.close(own)
            kept.seek(0)
            for line in kept.read().decode(errors="replace").splitlines():
                if not re.match(CHATTER, line):
                    tell(line)
            if "tensorflow" in sys.modules and not gc.get_freeze_count():
                # What has been imported stays to the end. The garbage collector needn't look at its 400,000 objects
                # again: that takes seconds, most of them when the process ends.
                gc.freeze()


# In a worker


def await_peers(peers: Mapping[str, Callable[[], bool]]) -> None:
    """Waits until all other workers are there, before the engine does, whose wait can't be interrupted.

    Args:
        peers: by the name of each, a function that says whether it is there.

    Raises:
        TrainingError: some are not, in time; their names.
    """
    timeout = start_timeout()
    deadline = time.monotonic() + timeout
    missing = dict(peers)
    while missing := {name: there for name, there in missing.items() if not there()}:
        if time.monotonic() > deadline:
            raise TrainingError(late(list(missing), timeout))
        time.sleep(0.1)


def mark(state: str) -> None:
    """Tells the launcher, where it is ours, how far this worker has come.

    Args:
        state: "arrived"; "started" with all others; or "trains", from where on a signal has it save.
    """
    if JOB in os.environ:
        (Path(os.environ[JOB]) / f"rank-{own_name()}.{state}").touch()


def own_name() -> str:
    """By what its launcher knows this worker: its rank, or its name in an elastic job."""
    return os.environ.get(WORKER) or str(job_rank())


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Within it, the signals of `signals.stops` end this process at once, and SIGUSR1 is ignored: nothing can be saved.

    What is called within it may have handlers of its own for a while, as `fit` has.
    """

    def stop(number: int, frame: Any) -> None:
        """`heard` acts: Python calls this only when a wait within native code is over."""

    def heard(number: int) -> None:
        if signal.getsignal(number) is stop:
            if JOB not in os.environ:  # else the launcher tells it, once for all workers
                with contextlib.suppress(OSError):  # a terminal that is gone
                    os.write(stderr, f"{STOPPED}\n".encode())
            signals.leave(75)

    actions: dict[int, Any] = {**dict.fromkeys(signals.stops(), stop), signal.SIGUSR1: signal.SIG_IGN}
    with signals.handled(actions), signals.watched(heard):
        yield


@contextlib.contextmanager
def reporting() -> Iterator[Callable[..., None]]:
    """In a worker that `run` started, gives a function that leaves this worker's exit code, error and result for it.

    An error within it is reported so too, and raised as what it means: see `plain`. A `PeerError` only repeats what
    another worker says: it is kept as such, so that the first failure is told.
    """
    job = os.environ.get(JOB)

    def report(code: int, error: BaseException | None = None, result: Any = None) -> None:
        if job is None:
            return
        place = Path(job) / f"rank-{own_name()}"
        ours = isinstance(error, UsageError | TrainingError | FileError)
        text = "" if error is None else str(error) if ours else explain.in_a_line(error)
        said = {"error": mask(text), "echo": isinstance(error, PeerError), "time": time.time()}
        write_text(place.with_suffix(".json"), json.dumps({"code": code, "result": result, **said}))

    if job is not None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until somebody hears it
        die_with_parent()
        (Path(job) / f"rank-{own_name()}.pid").write_text(str(os.getpid()))
    try:
        with no_exit():
            yield report
    except BaseException as error:
        meant = plain(error)
        report(2 if isinstance(meant, UsageError) else 1, meant)
        if meant is error:
            raise
        raise meant from error


def plain(error: BaseException) -> BaseException:
    """The error as it is to be told: what an engine says when another worker is gone becomes a `PeerError`."""
    if not gone(error) or (job_size() or 1) == 1:
        return error
    return PeerError(f"another worker is gone: what it printed last says why ({type(error).__name__} here)")


def gone(error: BaseException) -> bool:
    """Whether an engine says by this error that it has lost another worker."""
    name = type(error).__name__
    return name in _GONE or (name == "UnknownError" and re.search(r"Horovod|/gloo/", str(error)) is not None)


def die_with_parent() -> None:
    """Ends this process politely, as SIGTERM does, when the one that started it is gone: killed, it can't say so.

    One that hangs, and so doesn't end, is killed with all that it has started: nobody else would.
    """
    # It may have gone before we came to this line.
    parent = int(os.environ.get(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)  # it leads no group

    threading.Thread(target=watch, name="parent", daemon=True).start()


# In the launcher


def run(
    backend: str, workers: int, arguments: Sequence[str], servers: int = 1, cluster: Cluster | None = None
) -> tuple[int, str, Any]:
    """Runs `tfloop` with these arguments in N processes, and streams what they print to stderr.

    When one worker fails, or some have not started in time, the others are ended; but a worker of a `parameter_server`
    job that is killed is started again. SIGTERM and SIGINT end all workers politely, a second one at once; SIGUSR1 is
    handed on to them.

    Args:
        backend: `horovod`, `multiworker` or `parameter_server`.
        workers: N.
        arguments: the command line behind `tfloop`.
        servers: with `parameter_server`, the number of parameter servers, beside the chief and the N workers.
        cluster: the hosts that they are to run on; None: this machine.

    Raises:
        UsageError: there are fewer GPUs here than workers.

    Returns:
        The exit code of the first worker that failed, or 0; its error, or ""; and the chief's result. Where all were
        stopped by a signal, 75.
    """
    if cluster is None:
        check_gpus(workers)
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    timeout = start_timeout()
    with place_of_job() as (directory, environment):
        output, job = _Output(), _Job(directory)
        try:
            with heard_by(job.hear), _places(backend, workers, servers, cluster) as places:
                job.has_servers = backend == "parameter_server"
                job.names = [f"rank {rank}" for rank in range(len(places))]
                if job.has_servers:
                    job.names = list(tf_cluster(places[0]["TF_CONFIG"])[1])

                def start(rank: int) -> Worker:
                    process = start_worker(command, {**environment, **places[rank]})
                    output.follow(process, job.names[rank].removeprefix("rank "))
                    return process

                job.start, job.tell = start, output.line
                if cluster is None:
                    job.processes += map(start, range(len(places)))
                else:
                    job.processes += cluster.start(places, arguments, environment, directory, output.take)
                    output.threads += cluster.threads
                job.wait(timeout)
                job.kill()  # what workers may have left behind
                for thread in output.threads:
                    thread.join()
            return job.outcome()
        finally:
            job.kill()


@contextlib.contextmanager
def place_of_job() -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory in which workers leave word for the launcher, and the environment that tells them of it."""
    with signals.temporary_directory("tfloop-") as directory:
        environment = {**os.environ, JOB: directory, LAUNCHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        if sys.stderr.isatty():
            environment[RELAY] = "relay"
        yield Path(directory), environment


def heard_by(hear: Callable[[int, Any], None]) -> contextlib.AbstractContextManager[None]:
    """Within it, `hear` takes the signals that a job hands on to its workers."""
    return signals.handled(dict.fromkeys([*signals.stops(), signal.SIGUSR1], hear))


@contextlib.contextmanager
def _places(backend: str, workers: int, servers: int, cluster: Cluster | None) -> Iterator[list[dict[str, str]]]:
    """The environment variables that tell each worker its place."""
    if backend == "horovod":
        from loop.launch.horovodrun import rendezvous

        with rendezvous(workers, cluster) as places:
            yield places
        return
    jobs = {"chief": 1, "worker": workers, "ps": servers} if backend == "parameter_server" else {"worker": workers}
    ports = free_ports(sum(jobs.values()))
    addresses = iter(cluster.addresses() if cluster else [(f"127.0.0.1:{port}", None) for port in ports])
    tasks = [{"type": job, "index": index} for job, size in jobs.items() for index in range(size)]
    members: dict[str, list[str]] = {job: [] for job in jobs}
    ranks = []
    for task in tasks:
        address, local = next(addresses)
        members[str(task["type"])].append(address)
        ranks.append(task["index"] if local is None else local)
    yield [
        {"TF_CONFIG": json.dumps({"cluster": members, "task": task}), "TFLOOP_LOCAL_RANK": str(local)}
        for task, local in zip(tasks, ranks, strict=True)
    ]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of an address of this machine that nobody listens on at the moment; host "" means all addresses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


class Worker(subprocess.Popen[bytes]):
    """A worker on this machine."""

    where = ""
    """Where it runs, as it is told behind its rank."""
    lost = ""
    """What has become of its host, if that is gone."""

    def kill(self) -> None:
        """Kills it, and all that it has started, at once: each worker is a group of processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def start_worker(command: list[str], environment: dict[str, str]) -> Worker:
    """Starts a worker with pipes for what it prints."""
    # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which hands it on once.
    return Worker(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def printed(worker: Worker, stream: IO[bytes]) -> Iterator[str]:
    """The lines that a worker prints, until it has ended: what it has started may live on, and hold the stream open."""
    poll, rest, until = select.poll(), b"", float("inf")
    poll.register(stream, select.POLLIN)
    over = False
    while not over:
        if worker.poll() is not None:
            until = min(until, time.monotonic() + _LAST_WORDS)
        over = time.monotonic() > until
        if not poll.poll(0 if over else 1000):
            continue
        piece = os.read(stream.fileno(), _LONGEST)
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if len(rest) > _LONGEST:  # no line, and no memory has room for what never ends
            yield rest.decode(errors="replace")
            rest = b""
        over = over or not piece
    if rest:
        yield rest.decode(errors="replace")


class _Job:
    """The workers of a job, by rank, and what becomes of them.

    Attributes:
        processes: one for each rank.
        names: what each is called.
        has_servers: whether rank 0 alone trains, and the others serve it: they end with it, and its workers, unlike
            its parameter servers, are started again.
        start: starts a rank.
        tell: prints a line.
    """

    start: Callable[[int], Worker]
    tell: Callable[[str], None]

    def __init__(self, directory: Path) -> None:
        self.processes: list[Worker | Remote] = []
        self.names: list[str] = []
        self.has_servers = False
        self._restarts: dict[int, int] = {}
        self._directory = directory
        self._ended: dict[int, float] = {}  # when each rank was found to have ended
        self._killed = float("inf")  # when we killed what was left
        self._wishes = signals.Wishes()
        self._saves = 0  # how often SIGUSR1 was heard, and not handed on
        self._announced = False  # whether it was told that the job stops
        self._told: set[int] = set()  # ranks that have been told to stop, when they could hear it
        self._problem = ""

    def hear(self, number: int, frame: Any) -> None:
        """Takes a signal; `wait` hands it on."""
        if number == signal.SIGUSR1:
            self._saves += 1
        else:
            self._wishes.hear(number)

    def wait(self, timeout: float) -> None:
        """Waits for all workers; ends them when one has failed, or has not started in time; hands signals on."""
        start_by, end_by = time.monotonic() + timeout, float("inf")
        while len(self._ended) < len(self.processes) and not (self.has_servers and 0 in self._ended):
            now = time.monotonic()
            for rank, process in enumerate(self.processes):
                if rank not in self._ended and process.poll() is not None and not self._started_again(rank):
                    self._ended[rank] = time.time()
                    if process.returncode or not (self.has_servers or self._path(rank, "json").exists()):
                        end_by = min(end_by, now + (_EARLY_GRACE if self._without("started") else _GRACE))
            self._hand_on()
            if now > start_by and end_by == float("inf") and (missing := self._without("arrived", "started")):
                self._problem = late([self._name(rank) for rank in missing], timeout)
            if now > end_by or self._problem:
                self.kill()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills all that is left of the job, at once."""
        self._killed = min(self._killed, time.time())
        for process in self.processes:
            process.kill()

    def outcome(self) -> tuple[int, str, Any]:
        """What `run` returns."""
        reports = {}
        for rank in range(len(self.processes)):
            with contextlib.suppress(FileNotFoundError):
                reports[rank] = json.loads(self._path(rank, "json").read_text())
        result = reports.get(0, {}).get("result")
        if self._problem:
            return 1, self._problem, result
        if self.has_servers and reports.get(0, {}).get("code") == 0:
            return 0, "", result
        failures = []  # an echo comes last, whenever it was
        for rank in self._ended:
            process, report = self.processes[rank], reports.get(rank)
            if process.lost and (report is None or report["code"]):  # whatever else is said, that is why
                failures.append((False, 0.0, 1, process.lost))
            elif report is None:  # killed, or crashed: it could not even report
                # What the loss of a server means, its chief knows better.
                echo = self._ended[rank] > self._killed or (self.has_servers and rank > 0)
                stopped = process.returncode == 75 or (self._stops and process.returncode == -signal.SIGTERM)
                failures.append((echo, self._ended[rank], 75 if stopped else 1, "" if stopped else self._died(rank)))
            elif report["code"]:
                said = report["error"] and f"{self._name(rank)}: {report['error']}"
                failures.append((report["echo"], report["time"], report["code"], said))
        if not failures:
            return 0, "", result
        if self._stops and all(echo or code == 75 for echo, _, code, _ in failures):
            return 75, "", result
        _, _, code, said = min(failures)
        return code, said, result

    def _started_again(self, rank: int) -> bool:
        """Starts a worker that was killed again, where a chief has others do its steps meanwhile."""
        serves = self.has_servers and self.names[rank].startswith("worker") and not self._stops
        serves = serves and self._killed == float("inf")
        if not serves or self._path(rank, "json").exists() or self._without("started", among=[rank]):
            return False
        count = self._restarts[rank] = self._restarts.get(rank, 0) + 1
        if count > MOST_RESTARTS:
            return False
        self.tell(f"{self._died(rank)}; its steps are made again, and it is started again")
        self.processes[rank] = self.start(rank)
        return True

    @property
    def _stops(self) -> int:
        return self._wishes.count

    def _hand_on(self) -> None:
        if self._stops and not self._announced and any(self._directory.glob("rank-*.trains")):
            self._announced = True
            self.tell(STOPPING)
        if self._stops > 1 and not self._problem:
            self._problem = "ended at once by a second signal; checkpoints that were there are as they were"
        alive = [rank for rank in range(len(self.processes)) if rank not in self._ended]
        for rank in alive if self._stops else ():
            # TensorFlow swallows a SIGTERM while an engine starts: until then it is sent again.
            if rank not in self._told:
                if not self._without("started", among=[rank]):
                    self._told.add(rank)
                self.processes[rank].send_signal(signal.SIGTERM)
        while self._saves:
            self._saves -= 1
            for rank in set(alive) - set(self._without("pid")):  # it would kill one that is younger
                self.processes[rank].send_signal(signal.SIGUSR1)

    def _without(self, *states: str, among: Sequence[int] | None = None) -> list[int]:
        """The ranks that have not come to the first of these states that not all have come to."""
        ranks = range(len(self.processes)) if among is None else among
        lists = ([rank for rank in ranks if not self._path(rank, state).exists()] for state in states)
        return next(filter(None, lists), [])

    def _name(self, rank: int) -> str:
        return f"{self.names[rank]}{self.processes[rank].where}"

    def _path(self, rank: int, state: str) -> Path:
        return self._directory / f"rank-{rank}.{state}"

    def _died(self, rank: int) -> str:
        code = self.processes[rank].returncode or 0
        how = f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return f"{self._name(rank)} ended without a word: {how}" + (
            ", or out of memory" if code == -signal.SIGKILL else ""
        )


class _Output:
    """What the workers print, on stderr, each line with its rank in front; their progress as a bar."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self._display = Display()
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Prints a line."""
        with self._lock, contextlib.suppress(OSError):  # a terminal that is gone: workers would wait for ever
            self._display.line(text)

    def follow(self, process: Worker, label: str) -> None:
        """Follows both streams of a process; each line has the label in front."""
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            thread = threading.Thread(target=self._copy, args=(process, stream, label), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _copy(self, process: Worker, stream: IO[bytes], label: str) -> None:
        for line in printed(process, stream):
            self.take(line, label)

    def take(self, line: str, who: str) -> None:
        """Shows a line that somebody has printed."""
        text = line.rstrip("\r\n")
        if re.match(CHATTER, text):
            return
        with self._lock, contextlib.suppress(OSError):
            if text.startswith(MARK):
                self._display.update(json.loads(text[len(MARK) :]))
            elif text:
                self._display.line(f"[{who}] {text}")


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody listens on this port.

    Raises:
        UsageError: this machine has no such address.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise UsageError(f"--host {host}: this machine has no such address ({error})") from None
    return True
