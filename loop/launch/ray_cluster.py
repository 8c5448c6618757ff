"""Workers on a Ray cluster: `--launcher ray`.

For each worker, an actor (`loop.launch.ray_actor`) starts the agent that ssh starts on a host
(`loop.launch.host_agent`), and passes messages between agent and launcher. All else is as with `--hosts`. Ray reserves
resources for the workers (`loop.launch.ray_places`), and copies the working directory to their nodes. Imports no
TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from loop.errors import UsageError
from loop.launch import host_agent, stderr
from loop.launch.agent_protocol import Hashes
from loop.launch.environment import start_timeout
from loop.launch.hosts import Cluster
from loop.launch.ray_actor import in_a_line
from loop.launch.ray_options import Request, check_address
from loop.launch.ray_places import MARK, ElasticRayCluster, RayCluster


@contextlib.contextmanager
def connect(request: Request, backend: str, files: Hashes, run_directory: Path | None) -> Iterator[Cluster]:
    """Within it, the agents of a job run on a Ray cluster, and their nodes have been compared with this machine.

    Args:
        request: what the job asks of the cluster.
        backend: the backend of the job.
        files: the files that each agent must have.
        run_directory: `--run-dir`.

    Raises:
        UsageError: there is no cluster or no room, or a node differs from this machine; with the reason.
    """
    with _shared_file(run_directory) as mark, _session(request, files, run_directory) as ray:
        kind = RayCluster if request.fewest is None else ElasticRayCluster
        # The mark is one of the files that are compared: it shows that a node shares the disk of the run directory.
        cluster = kind(ray, request, backend, {**files, str(mark): host_agent.digest(str(mark))})
        try:
            cluster.connect()
            yield cluster
        finally:
            cluster.close()


@contextlib.contextmanager
def _shared_file(run_directory: Path | None) -> Iterator[Path]:
    """Within it, a new file is in the parent of the run directory. A node that shares the disk sees the file."""
    parent = (run_directory or Path("runs", "new")).absolute().parent
    mark = parent / f"{MARK}{secrets.token_hex(8)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UsageError(f"{parent} can't be written ({error.strerror}): give another --run-dir") from None
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the directory isn't empty: it has runs
            parent.rmdir()


@contextlib.contextmanager
def _session(request: Request, files: Hashes, run_directory: Path | None) -> Iterator[ModuleType]:
    """Within it, this process is connected to the cluster. Yields the module `ray`."""
    check_address(request.address)
    ray = _imported()
    runtime_environment = _runtime_environment(files, run_directory)
    problems: list[str] = []

    def begin() -> None:
        try:
            ray.init(
                request.address, runtime_env=runtime_environment, log_to_driver=False, logging_level=logging.CRITICAL
            )
        except Exception as error:  # of many types; all are about the cluster, or about the directory to copy there
            problems.append(in_a_line(error))

    # Not in the main thread, where Ray would replace the handler of SIGTERM. `init` may also block for minutes.
    thread = threading.Thread(target=begin, name="ray", daemon=True)
    with stderr.quiet_start(says=False):
        thread.start()
        thread.join(start_timeout())
    if thread.is_alive():
        problems.append(f"no answer within {start_timeout():g} s (--start-timeout)")

    if problems:
        has_token = os.environ.get("RAY_AUTH_MODE") == "token"
        fix = "" if has_token else "; if it asks for a token, set RAY_AUTH_MODE=token"
        raise UsageError(f"--launcher ray --address {request.address}: {problems[0]}{fix}")
    try:
        yield ray
    finally:
        ray.shutdown()


def _imported() -> ModuleType:
    """The module `ray`.

    Raises:
        UsageError: it isn't installed.
    """
    # Before the import, which reads both variables.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # less severe messages are in the log files of the session
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # Ray would start its workers by `uv run`
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        import ray
    except ImportError:
        raise UsageError("--launcher ray needs Ray: install it, with pip install 'tfloop[ray]'") from None
    # Ray prints errors of the cluster to stdout, which is for the result alone. The job reports its errors itself.
    ray._private.worker.print_to_stdstream = lambda *arguments, **options: None
    return ray


def _runtime_environment(files: Hashes, run_directory: Path | None) -> dict[str, object]:
    """Ray's `runtime_env`: the working directory without its runs; empty if no file of the job is in it."""
    here = Path.cwd()
    if not any(_is_within(here, name) for name in files):
        return {}
    excludes = ["/runs/", f"{MARK}*"]
    if run_directory is not None:
        is_trial = (run_directory.parent / "run.json").exists()  # its parent is the directory of a sweep
        excluded = (run_directory.parent if is_trial else run_directory).absolute()
        if excluded.is_relative_to(here):
            excludes.append(f"/{excluded.relative_to(here)}/")
    return {"working_dir": str(here), "excludes": excludes}


def _is_within(directory: Path, name: str) -> bool:
    """Whether the file of a target, or the file of this name, is in a directory."""
    path = host_agent.source_of(name)
    return path is not None and path.resolve().is_relative_to(directory)
