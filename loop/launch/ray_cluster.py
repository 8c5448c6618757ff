"""Workers on a Ray cluster: `--launcher ray`.

In a placement group, an actor for each worker starts the same agent that ssh starts on a host
(`loop.launch.host_agent`), and passes on what agent and launcher write to each other. So all else is as with
`--hosts`. Ray finds room for the workers, and brings the working directory there. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from callbacks.files import LAUNCH_DIRECTORY
from callbacks.formats import plural
from callbacks.run_record.redaction import tell
from loop.errors import UsageError
from loop.launch import host_agent, stderr
from loop.launch.environment import start_timeout
from loop.launch.hosts import AGENT, Cluster, Host
from loop.launch.ray_options import Request, check_address

_SOON = 2.0  # seconds after which a wait for room is announced
_MARK = ".tfloop-"  # begins the name of a file by which nodes show that they share the disk
_STREAMS = ("stdout", "stderr")
# Threads of an actor, one for each kind of call: no kind waits for another, and calls of a kind keep their order.
_THREADS = {"write": 1, "end": 1, **dict.fromkeys(_STREAMS, 1)}


@contextlib.contextmanager
def connect(
    request: Request, backend: str, files: Mapping[str, str | None], run_directory: Path | None
) -> Iterator[Cluster]:
    """Within it, the agents of a job run on a Ray cluster, and have been compared with this machine.

    Args:
        request: what the job asks of the cluster.
        backend: the job's.
        files: the files that each agent must have, by name, with their hashes.
        run_directory: `--run-dir`.

    Raises:
        UsageError: no cluster, no room, or nodes that differ from this machine; with the reason.
    """
    with _shared_file(run_directory) as mark, _session(request, files, run_directory) as ray:
        cluster = _RayCluster(ray)
        try:
            cluster.place(request)
            questions = [{"directory": ".", "interface": _reached(host.name)} for host in cluster.hosts]
            cluster.compare(questions, backend, {**files, str(mark): host_agent.digest(str(mark))})
            for host in cluster.hosts:
                host.answer["address"] = _reached(host.name)
            yield cluster
        finally:
            cluster.close()


@contextlib.contextmanager
def _shared_file(run_directory: Path | None) -> Iterator[Path]:
    """Within it, a new file lies beside the run directory: a node that doesn't have it doesn't share the disk."""
    parent = (run_directory or Path("runs", "new")).absolute().parent
    mark = parent / f"{_MARK}{secrets.token_hex(8)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UsageError(f"{parent} can't be written ({error.strerror}): give another --run-dir") from None
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there are runs in it
            parent.rmdir()


@contextlib.contextmanager
def _session(request: Request, files: Mapping[str, str | None], run_directory: Path | None) -> Iterator[Any]:
    """Within it, this process is connected with the cluster; yields the module `ray`."""
    check_address(request.address)
    ray = _imported()
    brought = _runtime_environment(files, run_directory)
    problems: list[str] = []

    def begin() -> None:
        try:
            quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
            ray.init(request.address, runtime_env=brought, **quiet)
        except Exception as error:  # Ray has many; each is about the cluster, or about what it is to bring there
            problems.append(_in_a_line(error))

    # In a thread: in the main one, Ray would take SIGTERM for itself, and it may try for minutes.
    thread = threading.Thread(target=begin, name="ray", daemon=True)
    with stderr.quiet_start(says=False):
        thread.start()
        thread.join(start_timeout())
    if thread.is_alive():
        problems.append(f"no answer within {start_timeout():g} s (--start-timeout)")
    if problems:
        raise UsageError(f"--launcher ray --address {request.address}: {problems[0]}")
    try:
        yield ray
    finally:
        ray.shutdown()


def _imported() -> Any:
    """The module `ray`.

    Raises:
        UsageError: it isn't installed.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # all else is in the files of Ray's session
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # Ray would start its workers by `uv run`
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        import ray
    except ImportError:
        raise UsageError("--launcher ray needs Ray: install it, with pip install 'tfloop[ray]'") from None
    # Ray prints errors of its cluster to stdout, where only the result may stand. Those of the job are reported anyway.
    ray._private.worker.print_to_stdstream = lambda *arguments, **options: None
    return ray


def _runtime_environment(files: Mapping[str, str | None], run_directory: Path | None) -> dict[str, Any]:
    """What Ray brings to the nodes: the working directory without runs, unless the job has no file of its own."""
    here = Path.cwd()
    own = [name for name in files if (path := host_agent.source_of(name)) and path.resolve().is_relative_to(here)]
    if not own:
        return {}
    excludes = ["/runs/", f"{_MARK}*"]
    if run_directory is not None:
        of_sweep = (run_directory.parent / "run.json").exists()
        not_brought = (run_directory.parent if of_sweep else run_directory).absolute()
        if not_brought.is_relative_to(here):
            excludes.append(f"/{not_brought.relative_to(here)}/")
    return {"working_dir": str(here), "excludes": excludes}


class _RayHost(Host):
    """The place of one worker: its name is the address of a node, which may have others."""

    def missing(self, name: str) -> str:
        if Path(name).name.startswith(_MARK):
            return f"doesn't see {Path(name).parent}, where the run is to be: give --run-dir on a disk that all share"
        return f"has no {name}: Ray brings only what is in {Path.cwd()}, without what .gitignore names: put it there"


class _RayCluster(Cluster):
    """The places of a job's workers on a Ray cluster."""

    def __init__(self, ray: Any) -> None:
        super().__init__([])
        self._ray = ray
        self._group: Any = None

    def place(self, request: Request) -> None:
        """Finds room for all workers, and starts an agent for each."""
        has_gpus = request.gpus and self._ray.cluster_resources().get("GPU")
        bundle = {"CPU": request.cpus} | ({"GPU": request.gpus} if has_gpus else {})
        self._group = self._ray.util.placement_group([bundle] * request.workers, strategy=request.placement.upper())
        self._await_room(request, bundle)
        actors = [self._start_actor(bundle, index) for index in range(request.workers)]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        self.address = _reached(addresses[self._ray.get_runtime_context().get_node_id()])
        places = []
        for actor in actors:
            try:
                node = self._ray.get(actor.node.remote(), timeout=start_timeout())
            except self._ray.exceptions.RayError as error:
                raise UsageError(f"a Ray actor has not started: {_in_a_line(error)}") from None
            places.append((addresses[node], actor))
        # Ranks are dealt out address by address, the one with the first bundle first.
        order = list(dict(places))
        places.sort(key=lambda place: order.index(place[0]))
        for address, actor in places:
            self.hosts.append(_RayHost(address, 1, _ActorConnection(self._ray, actor)))

    def start(self, places: Any, arguments: Any, environment: Mapping[str, str], directory: Any, show: Any) -> Any:
        return super().start(places, arguments, {**environment, **_of_workers()}, directory, show)

    def close(self) -> None:
        super().close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)  # with the actors that are left in it

    def _await_room(self, request: Request, bundle: Mapping[str, float]) -> None:
        timeout = start_timeout()
        if self._group.wait(min(_SOON, timeout)):
            return
        needed = " and ".join(f"{count} {name}" for name, count in bundle.items())
        total = self._ray.cluster_resources()
        free = self._ray.available_resources()
        there = ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
        tell(f"waiting for room on the Ray cluster: {needed} for each worker; it has {there}")
        while not self._group.wait(timeout):
            if self._places(bundle) >= request.workers:
                continue  # others have taken the room, and will leave it
            raise UsageError(
                f"--launcher ray: no room for {plural(request.workers, 'worker')} with {needed} each within "
                f"{timeout:g} s (--start-timeout): the cluster has {there}; start fewer workers, or add nodes"
            )

    def _places(self, bundle: Mapping[str, float]) -> int:
        """How many workers the nodes have room for, if nothing else ran there."""
        places = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                places += int(min(node["Resources"].get(name, 0) // count for name, count in bundle.items()))
        return places

    def _start_actor(self, bundle: Mapping[str, float], index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        kind = self._ray.remote(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            concurrency_groups=_THREADS,
            scheduling_strategy=where,
        )(_actor_class())
        variables = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        return kind.remote(AGENT, variables)


def _of_workers() -> dict[str, str]:
    """Variables of all workers: Ray shows each only its own GPUs; and where relative paths of runs begin."""
    return {"TFLOOP_LOCAL_RANK": "0", LAUNCH_DIRECTORY: str(Path.cwd())}


def _actor_class() -> type:
    """The class of the actors. Ray sends a class within a function by value: no node needs tfloop to load it."""

    class Agent:
        """Starts an agent on its node, and passes on what it reads and prints."""

        def __init__(self, module: str, variables: dict[str, str]) -> None:
            # Ray sets it for an actor, but workers are to compute as on any other machine.
            environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            self._process: Any = subprocess.Popen(
                [sys.executable, "-P", "-m", module], env=environment | variables, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip

        def node(self) -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

        def write(self, data: bytes) -> None:
            self._process.stdin.write(data)
            self._process.stdin.flush()

        def close(self) -> None:
            self._process.stdin.close()

        def read(self, stream: str) -> bytes:
            return os.read(getattr(self._process, stream).fileno(), 1 << 16)

        def wait(self) -> int:
            return self._process.wait()

    return Agent


class _Stdin:
    """What the launcher writes to an agent."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def write(self, data: bytes) -> None:
        self._actor.write.options(concurrency_group="write").remote(data)

    def flush(self) -> None:
        """Does nothing: each call of `write` is sent at once."""

    def close(self) -> None:
        self._actor.close.options(concurrency_group="write").remote()


class _ActorConnection:
    """The connection to an agent behind an actor; see `hosts.Connection`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._end = actor.wait.options(concurrency_group="end").remote()
        self._reason = ""
        self.stdin = _Stdin(actor)
        self.stdout = self._lines("stdout")
        self.stderr = self._lines("stderr")

    def wait(self, timeout: float | None = None) -> int:
        try:
            return int(self._ray.get(self._end, timeout=timeout))
        except self._ray.exceptions.GetTimeoutError:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0) from None
        except Exception:  # the actor is gone, or the session is over
            return 255

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the session is over
            self._ray.kill(self._actor)

    def _lines(self, stream: str) -> Iterator[bytes]:
        """What the agent prints, by line; at last why there is no more, if its actor is gone."""
        rest = b""
        try:
            while piece := self._ray.get(self._actor.read.options(concurrency_group=stream).remote(stream)):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line + b"\n"
        except self._ray.exceptions.RayError as error:
            if stream == "stderr":
                yield _in_a_line(error).encode()


def _reached(address: str) -> str:
    """The address at which workers of a node reach each other: 127.0.0.1 for nodes of a cluster on loopback."""
    return "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address


def _in_a_line(error: BaseException) -> str:
    """The last line of Ray's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
