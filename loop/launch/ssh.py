"""Hosts that are reached over ssh: `--hosts`."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from loop.errors import UsageError
from loop.launch import host_agent
from loop.launch.agent_protocol import Connection, Hashes, Question
from loop.launch.environment import start_timeout
from loop.launch.hosts import AGENT, Cluster, Host

SSH = "TFLOOP_SSH"
"""Environment variable: the command to use for ssh, with options; `ssh`."""


@contextlib.contextmanager
def connect(
    slots: Mapping[str, int], backend: str, files: Hashes, interface: str | None, python: str | None
) -> Iterator[Cluster]:
    """Within it, agents run on the hosts of a job, and the hosts have been compared with this machine.

    Raises:
        UsageError: hosts that can't be reached, or differ from this machine; each with its reason.
    """
    cluster = Cluster([])
    try:
        # One by one: if an agent can't be started, those that run are closed below.
        for name, count in slots.items():
            cluster.hosts.append(Host(name, count, open_agent(name, python)))
        question: Question = {"directory": str(Path.cwd()), "interface": interface}
        cluster.compare([question] * len(cluster.hosts), backend, files)
        cluster.meet(interface)
        yield cluster
    finally:
        cluster.close()


def open_agent(name: str, python: str | None) -> Connection:
    """Starts the agent of a host: over ssh, or here if the host is this machine.

    Args:
        name: as ssh takes it.
        python: the path of Python there; None: the same as here.
    """
    is_here = host_agent.resolve(name) is not None
    # All users of a machine can see these arguments: no secret may be among them.
    arguments = [sys.executable, "-P", "-m", AGENT] if is_here else command(name, python or sys.executable)
    try:
        # In a session of its own: Ctrl-C reaches the launcher alone, which then asks the workers to stop.
        return subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise UsageError(
            f"--hosts needs {error.filename}, which can't be run here ({error.strerror}): install it, or say by "
            f"{SSH} what to use for ssh"
        ) from None


def command(name: str, python: str) -> list[str]:
    """The command that starts the agent on a host."""
    variables = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    remote = shlex.join(["exec", "env", *variables, python, "-P", "-m", AGENT])
    options = [
        "-oBatchMode=yes",  # a question for a password would wait for an answer without end
        "-oServerAliveInterval=5",
        "-oServerAliveCountMax=3",
        "-oControlPath=none",  # a shared connection would have the options of the process that opened it
        f"-oConnectTimeout={math.ceil(start_timeout())}",
    ]
    try:
        ssh = shlex.split(os.environ.get(SSH, "")) or ["ssh"]
    except ValueError as error:
        raise UsageError(f"{SSH}={os.environ[SSH]} can't be read ({error}): give a command as in a shell") from None
    return [*ssh, "-T", *options, "--", name, remote]
