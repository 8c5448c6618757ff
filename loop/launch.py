"""Starts the workers of a job on this machine, and finds this process's place in a job that somebody else started.

Imports no TensorFlow: what is wrong with a job is said before anything is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from callbacks.progress import MARK, RELAY, Display
from loop.errors import PeerError, TrainingError, UsageError

JOB = "TFLOOP_JOB"
"""Environment variable: where the workers of a job that we started leave their process ids and results."""
CHATTER = (
    r"[IWE]\d{4} \d\d:|[IWE]0000 00:00:|WARNING: All log messages before absl|To enable the following instructions"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] |WARNING:tensorflow:\d+ out of the last "
)
"""What TensorFlow prints to stderr while it starts, whatever its log level: nobody can act on it."""
# What Horovod's launcher tells of a failed worker; the failure itself is told by `run`.
_LAUNCHER_CHATTER = r"Process \d+ exit|Terminating remaining"
_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed


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
    environment = os.environ if environment is None else environment
    if backend == "horovod" and (missing := horovod_missing()):
        raise UsageError(f"backend='horovod': {missing}; or use backend='multiworker', which needs nothing more")
    if backend == "single" and workers is not None and workers > 1:
        raise UsageError(f"workers={workers} with backend='single': one device is one worker; use mirrored or horovod")
    if backend == "multiworker" or (backend == "auto" and "TF_CONFIG" in environment):
        if "TF_CONFIG" in environment:
            read_tf_config(environment["TF_CONFIG"])
        elif workers is None:
            raise UsageError(
                "backend='multiworker' without TF_CONFIG: start them with `tfloop train ... --workers N`, or set "
                "TF_CONFIG in each of them"
            )
    if backend != "auto":
        return backend, "asked for"
    if "HOROVOD_RANK" in environment:
        if missing := horovod_missing():
            raise UsageError(f"started by Horovod's launcher, but {missing}")
        return "horovod", "started by Horovod's launcher"
    if "TF_CONFIG" in environment:
        return "multiworker", "TF_CONFIG is set"
    for launcher, variable in (("mpirun", "OMPI_COMM_WORLD_SIZE"), ("srun", "SLURM_STEP_NUM_TASKS")):
        if environment.get(variable, "1") != "1":
            raise UsageError(
                f"started by {launcher} ({variable}={environment[variable]}), which this version can't join: start "
                "with horovodrun, with --workers N, or with TF_CONFIG in each process"
            )
    if workers is not None and workers > 1:
        missing = horovod_missing()
        if missing is None:
            return "horovod", "it is installed"
        return "multiworker", missing
    if count_gpus() >= 2:
        return "mirrored", f"there are {count_gpus()} GPUs"
    return "single", "one device"


def horovod_missing() -> str | None:
    """What is missing for Horovod, and how to get it; None if it is there. Doesn't import it."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return "Horovod is not installed (in a checkout: `uv sync`; it needs a C++ compiler)"
    root = Path(next(iter(spec.submodule_search_locations)))
    if not list((root / "tensorflow").glob("mpi_lib*.so")):
        return (
            "Horovod is installed without its native library, because there was no C++ compiler (install g++ and make, "
            "then `uv cache clean horovod && uv sync --reinstall-package horovod`)"
        )
    return None


def count_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use, without loading TensorFlow."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if visible is None:
        return len(devices)
    named = [each for each in visible.split(",") if each.strip()]
    return min(len(devices), next((i for i, each in enumerate(named) if each.strip() == "-1"), len(named)))


def read_tf_config(text: str) -> tuple[int, int]:
    """The rank of this process among the workers of a `TF_CONFIG`, and how many there are.

    Raises:
        UsageError: it isn't JSON, or names no place for this process; with what it should look like.
    """
    form = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        places = [(job, index) for job in ("chief", "worker") for index in range(len(cluster.get(job, [])))]
        place = (task["type"], int(task["index"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG={text!r} can't be read ({type(error).__name__}: {error}): it must be {form}"
        ) from None
    if place not in places:
        there = ", ".join(f"{job} {index}" for job, index in places) or "no workers"
        raise UsageError(f"TF_CONFIG: its task is {place[0]} {place[1]}, but its cluster has {there}")
    return places.index(place), len(places)


def job_size() -> int | None:
    """How many workers the job has that this process was started in; None outside of one."""
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_SIZE"])
    return read_tf_config(os.environ["TF_CONFIG"])[1] if "TF_CONFIG" in os.environ else None


def job_rank() -> int:
    """The rank of this process in the job that it was started in; 0 outside of one."""
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_RANK"])
    return read_tf_config(os.environ["TF_CONFIG"])[0] if "TF_CONFIG" in os.environ else 0


# In a worker


@contextlib.contextmanager
def reporting() -> Iterator[Callable[..., None]]:
    """In a worker that `run` started, gives a function that leaves this worker's exit code, error and result for it.

    A `PeerError` only repeats what another worker says: it is kept as such, so that the first failure is told.
    """
    job = os.environ.get(JOB)
    if job is None:
        yield lambda code, error=None, result=None: None
        return
    die_with_parent()
    place = Path(job) / f"rank-{job_rank()}"
    place.with_suffix(".pid").write_text(str(os.getpid()))

    def report(code: int, error: BaseException | None = None, result: Any = None) -> None:
        text = str(error) if isinstance(error, UsageError | TrainingError) else f"{type(error).__name__}: {error}"
        said = {"error": text if error else "", "echo": isinstance(error, PeerError), "time": time.time()}
        partial = place.with_suffix(".tmp")
        partial.write_text(json.dumps({"code": code, "result": result, **said}))
        partial.replace(place.with_suffix(".json"))

    yield report


def die_with_parent() -> None:
    """Ends this process politely, as SIGTERM does, when the one that started it is gone: killed, it can't say so."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


# In the launcher


def run(backend: str, workers: int, arguments: Sequence[str]) -> tuple[int, str, Any]:
    """Runs `tfloop` with these arguments in N processes on this machine, and streams what they print to stderr.

    When one worker fails, the others are ended. SIGTERM and SIGINT are handed on to all workers.

    Args:
        backend: `horovod` or `multiworker`.
        workers: N.
        arguments: the command line behind `tfloop`.

    Returns:
        The exit code of the first worker that failed, or 0; its error, or ""; and the chief's result.
    """
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    job = Path(tempfile.mkdtemp(prefix="tfloop-"))
    environment = {**os.environ, JOB: str(job)}
    if sys.stderr.isatty():
        environment[RELAY] = "relay"
    output = _Output()
    try:
        start = _start_horovod if backend == "horovod" else _start_multiworker
        processes = start(command, workers, environment, output)
        _wait(processes, job)
        for thread in output.threads:
            thread.join()
        return _outcome(processes, job, workers)
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _start_horovod(
    command: list[str], workers: int, environment: dict[str, str], output: _Output
) -> list[subprocess.Popen[bytes]]:
    launcher = [sys.executable, "-P", "-m", "loop.horovodrun", str(workers)]
    process = _popen([*launcher, *command], environment)
    output.follow(process, None)
    return [process]


def _start_multiworker(
    command: list[str], workers: int, environment: dict[str, str], output: _Output
) -> list[subprocess.Popen[bytes]]:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    processes = []
    for rank in range(workers):
        place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        own = {**environment, "TF_CONFIG": json.dumps(place), "TFLOOP_LOCAL_RANK": str(rank)}
        processes.append(_popen(command, own))
        output.follow(processes[-1], rank)
    return processes


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _popen(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which hands it on once.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def _wait(processes: list[subprocess.Popen[bytes]], job: Path) -> None:
    """Waits for all processes; ends the others when one has failed; hands signals on to the workers."""

    def hand_on(number: int, frame: Any) -> None:
        started = list(job.glob("rank-*.pid"))
        for path in started:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), number)
        if not started:  # too early for any worker to have said who it is
            for process in processes:
                process.terminate()

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        deadline: float | None = None
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.poll() for process in processes):
                deadline = time.monotonic() + _GRACE
            elif deadline is not None and time.monotonic() > deadline:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(processes: list[subprocess.Popen[bytes]], job: Path, workers: int) -> tuple[int, str, Any]:
    reports = {}
    for rank in range(workers):
        path = job / f"rank-{rank}.json"
        if path.exists():
            reports[rank] = json.loads(path.read_text())
    failed = sorted((each["echo"], each["time"], rank) for rank, each in reports.items() if each["code"])
    result = reports.get(0, {}).get("result")
    silent = [rank for rank in range(workers) if rank not in reports]
    if silent:  # killed, or crashed: it could not even report
        ended = [process.returncode for process in processes]
        code = next((code for code in ended if code), 1)
        how = f" by signal {-code}" if code < 0 and len(processes) == workers else ""
        said = f"; rank {failed[0][2]} then failed: {reports[failed[0][2]]['error']}" if failed else ""
        return 1, f"rank {silent[0]} ended without a word{how}: killed, or out of memory{said}", result
    if failed:
        rank = failed[0][2]
        report = reports[rank]
        return report["code"], report["error"] and f"rank {rank}: {report['error']}", result
    return 0, "", result


class _Output:
    """What the workers print, on stderr, each line with its rank in front; their progress as a bar."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self._display = Display()
        self._lock = threading.Lock()

    def follow(self, process: subprocess.Popen[bytes], rank: int | None) -> None:
        """Follows both streams of a process. Rank None: its lines bear the rank that Horovod's launcher put there."""
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            thread = threading.Thread(target=self._copy, args=(stream, rank), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _copy(self, stream: IO[bytes], rank: int | None) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\r\n")
            place = re.match(r"\[(\d+)\]<std(?:out|err)>:", text) if rank is None else None
            text, prefix = (
                (text[place.end() :], place[1]) if place else (text, "launcher" if rank is None else str(rank))
            )
            if re.match(CHATTER, text) or (prefix == "launcher" and re.match(_LAUNCHER_CHATTER, text)):
                continue
            with self._lock:
                if text.startswith(MARK):
                    self._display.update(json.loads(text[len(MARK) :]))
                elif text:
                    self._display.line(f"[{prefix}] {text}")


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody listens on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
