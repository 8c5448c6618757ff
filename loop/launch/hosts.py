"""Several hosts: they are reached over ssh and compared, and an agent on each runs its workers."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from callbacks.files import write_text
from callbacks.run_record.redaction import mask
from loop.errors import UsageError
from loop.launch import host_agent, machine
from loop.launch.environment import start_timeout

AGENT = "loop.launch.host_agent"
SSH = "TFLOOP_SSH"
"""Environment variable: the command to use for ssh, with options; `ssh`."""
_OF_A_HOST = re.compile(
    r"_|PATH|HOME|PWD|OLDPWD|USER|LOGNAME|MAIL|SHELL|SHLVL|TERM|HOST|HOSTNAME|TMPDIR|LD_.*|SSH_.*|XDG_.*|DBUS_.*"
    r"|DISPLAY|WAYLAND_DISPLAY|VIRTUAL_ENV|CONDA_.*|CUDA_VISIBLE_DEVICES|SLURM.*|BASH_FUNC_.*"
)


def read(
    text: str | None, workers: int | None, backend: str, interface: str | None, remote_python: str | None
) -> dict[str, int]:
    """What was typed as `--hosts`: how many workers each host is to have; empty without it.

    Raises:
        UsageError: it can't be read, or contradicts what else was typed.
    """
    if text is None:
        for option, value in (("--interface", interface), ("--remote-python", remote_python)):
            if value is not None:
                raise UsageError(f"{option} {value} is of use with --hosts alone")
        return {}
    if interface is not None and not _is_interface(interface):
        raise UsageError(f"--interface {interface!r}: give the name of a network interface, or a network: 10.0.0.0/24")
    if remote_python is not None and not remote_python.strip():
        raise UsageError(f"--remote-python {remote_python!r}: give the path of Python on the other hosts")
    slots = _slots(text)
    total = sum(slots.values())
    if total < 2:
        raise UsageError(f"--hosts {text}: that is one worker in all: give at least two, such as {next(iter(slots))}:2")
    if workers not in (None, total):
        raise UsageError(f"--workers {workers}, but --hosts {text} has {total}: leave --workers out")
    if backend not in ("auto", "horovod", "multiworker"):
        raise UsageError(f"--hosts with --backend {backend}: use horovod or multiworker")
    return slots


def _slots(text: str) -> dict[str, int]:
    """How many workers each host is to have, from `name:workers,name:workers`."""
    slots: dict[str, int] = {}
    for part in text.split(","):
        # No name starts with a dash: ssh would take it for an option.
        host = re.fullmatch(r"(?![-\s])([^:,\s]+)(?::(\d+))?", part, re.ASCII)
        if not host or not 1 <= int(host[2] or 1) <= 4096:
            raise UsageError(f"--hosts {text}: {part!r} can't be read: give name:workers, such as h1:4,h2:4")
        if host[1] in slots:
            raise UsageError(f"--hosts {text}: {host[1]} is there twice: give each host once, with all its workers")
        slots[host[1]] = int(host[2] or 1)
    return slots


def _is_interface(text: str) -> bool:
    """Whether it may be the name of an interface, or is a network."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_network(text))
    return re.fullmatch(r"[^/\s]{1,15}", text) is not None


def files(target: str, configs: Sequence[Path]) -> dict[str, str | None]:
    """The files that every host must have, by name, with their hashes."""
    return {name: host_agent.digest(name) for name in (target, *map(str, configs))}


@contextlib.contextmanager
def connect(
    slots: Mapping[str, int], backend: str, files: Mapping[str, str | None], interface: str | None, python: str | None
) -> Iterator[Cluster]:
    """The hosts of a job, reached and compared with this machine; what runs there ends with the context.

    Raises:
        UsageError: hosts that can't be reached, or aren't as this machine is; each with its reason.
    """
    cluster = Cluster([Host(name, count, python) for name, count in slots.items()])
    try:
        asked = {"directory": str(Path.cwd()), "files": list(files), "interface": interface}
        for host in cluster.hosts:
            host.send(ask=asked | {"slots": host.slots})
        threading.Thread(target=cluster.watch, name="hosts", daemon=True).start()
        deadline = time.monotonic() + start_timeout()
        for host in cluster.hosts:
            host.answered.wait(max(0.0, deadline - time.monotonic()))
        expected = host_agent.versions()
        if backend != "horovod":
            del expected["horovod"]
        if problems := [f"{host.name}: {why}" for host in cluster.hosts for why in host.problems(expected, files)]:
            raise UsageError("; ".join(problems))
        cluster.meet(interface)
        yield cluster
    finally:
        cluster.close()


class Remote:
    """A worker on a host, as the launcher sees it: what `launch.Worker` is on this machine."""

    def __init__(self, host: Host, rank: int) -> None:
        self.where = f" on {host.name}"
        self.lost = ""
        self.returncode: int | None = None
        self._host, self._rank = host, rank

    def poll(self) -> int | None:
        """Its exit code, when it has ended."""
        if self.returncode is None and self._host.lost:  # just now, or when it was to be started
            self._host.lose(self._host.lost)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""
        self._host.send(signal=number, rank=self._rank)

    def kill(self) -> None:
        """Kills it, and all that it has started."""
        self.send_signal(signal.SIGKILL)


class Host:
    """A host of a job: the connection to the agent there, and what it says.

    Args:
        name: as ssh knows it.
        slots: how many workers it is to have.
        python: Python there; None: at the same path as here.
    """

    def __init__(self, name: str, slots: int, python: str | None) -> None:
        self.name = name
        self.slots = slots
        self.workers: dict[int, Remote] = {}
        self.answered = threading.Event()
        self.answer: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.lost = ""
        self._said: list[str] = []  # what isn't the agent's, such as errors of ssh
        self._show: Callable[[str, str], None] = lambda line, who: self._said.append(line.strip())
        self._directory = Path()
        self._over = False
        self._sending = threading.Lock()
        self.here = host_agent.resolve(name) is not None
        # A session of its own: Ctrl-C is for the launcher. All users can see these arguments, so no secret is in them.
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", AGENT] if self.here else command(name, python or sys.executable),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"--hosts needs {error.filename}, which can't be run here ({error.strerror}): install it, or say by "
                f"{SSH} what to use for ssh"
            ) from None
        self.threads = [
            threading.Thread(target=follow, name=f"{follow.__name__} {name}", daemon=True)
            for follow in (self._listen, self._errors)
        ]
        for thread in reversed(self.threads):
            thread.start()

    @property
    def address(self) -> str:
        """Where it is reached by the others."""
        return str(self.answer["address"])

    def send(self, **message: Any) -> None:
        """Tells the agent; if it is gone, `_listen` finds out."""
        assert self.process.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def start(
        self, places: dict[int, dict[str, str]], arguments: Sequence[str], environment: Mapping[str, str],
        directory: Path, show: Callable[[str, str], None],
    ) -> list[Remote]:  # fmt: skip
        """Has the agent start a worker with the variables of each place, by rank.

        What they leave comes to the directory, what they print is shown. Variables go the way of the messages, so that
        no secret is on a command line.
        """
        workers = {rank: Remote(self, rank) for rank in places}
        self.workers, self._directory, self._show = self.workers | workers, directory, show
        shared = {name: value for name, value in environment.items() if not _OF_A_HOST.fullmatch(name)}
        self.send(start={"places": places, "arguments": arguments, "environment": shared})
        return list(workers.values())

    def over(self) -> None:
        """Tells the agent that no more workers will be started: it ends with those that it has."""
        self._over = True
        self.send(over=True)

    def problems(self, expected: Mapping[str, str], files: Mapping[str, str | None]) -> Iterator[str]:
        """Why it can't take part."""
        if self.lost or not self.answered.is_set():
            yield self.lost or f"can't be reached: no answer within {start_timeout():g} s (--start-timeout)"
        elif "problem" in self.answer:
            yield self.answer["problem"]
        else:
            has = self.answer["versions"]
            for name, version in expected.items():
                if has[name] != version:
                    yield f"has {name} {has[name]}, but here it is {version}: install the same"
            for name, digest in files.items():
                if digest is None:  # it can't be found on this machine either: the workers will report it
                    continue
                if self.answer["files"][name] is None:
                    yield f"has no {name} in {Path.cwd()}: copy it there"
                elif self.answer["files"][name] != digest:
                    yield f"has another {name} than this machine: copy it there"
            if self.slots > (gpus := self.answer.get("gpus", 0)) > 0:
                yield machine.too_few_gpus(gpus, f"is to have {self.slots} workers")

    def lose(self, reason: str) -> None:
        """Marks the host as lost, and its workers with it."""
        self.lost = self.lost or reason
        for rank, worker in self.workers.items():
            if worker.returncode is None:
                worker.lost = f"host {self.name} is gone, and rank {rank} with it: {self.lost}"
                worker.returncode = 255
        self.answered.set()
        with contextlib.suppress(OSError):
            self.process.kill()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(host_agent.MARK):
                self.heard = time.monotonic()
                self._take(json.loads(text[len(host_agent.MARK) :]))
            else:
                self._show(text, self.name)
        code = self.process.wait()
        self.threads[1].join(1.0)
        if not self._over or any(worker.returncode is None for worker in self.workers.values()):
            what = "its connection ended" if self.answered.is_set() else "can't be reached"
            self.lose(f"{what}: {mask(self._said[-1]) if self._said else f'exit code {code}'}")

    def _take(self, message: dict[str, Any]) -> None:
        if "answer" in message:
            self.answer = message["answer"]
            self.answered.set()
        elif "line" in message:
            self._show(message["line"], f"{self.name} {message['rank']}")
        elif "ended" in message:
            self.workers[message["rank"]].returncode = message["ended"]
        elif "file" in message and re.fullmatch(r"rank-\d+\.[a-z]+", message["file"]):
            write_text(self._directory / message["file"], message["text"])

    def _errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace").strip()
            self._said.append(text)
            if self.workers:
                self._show(text, self.name)


class Cluster:
    """The hosts of a job."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.address = "127.0.0.1"
        """This machine's, where the hosts reach it."""
        self._closed = threading.Event()

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads that end when all that the hosts have sent is shown."""
        return [host.threads[0] for host in self.hosts]

    def watch(self) -> None:
        """Until it is closed: sends the agents a sign of life, and takes those that send none for lost."""
        while not self._closed.wait(host_agent.BEAT / 5):
            for host in self.hosts:
                host.send()
                if host.answered.is_set() and time.monotonic() - host.heard > host_agent.SILENCE:
                    host.lose(f"nothing was heard of it for {host_agent.SILENCE:g} s")

    def meet(self, interface: str | None) -> None:
        """Finds out where the hosts meet, and this machine's place there.

        Raises:
            UsageError: a host has no address there.
        """
        remote = [host for host in self.hosts if not host.here]
        seen = remote[0].answer["seen"] if remote else "127.0.0.1"
        nic, address = host_agent.where(interface, seen)
        if not address or host_agent.resolve(address) is None:
            raise UsageError(
                f"{remote[0].name if remote else 'localhost'}: no address where it and this machine meet was found "
                f"({interface or seen or 'none'}): give --interface, such as eth1 or 10.0.0.0/24"
            )
        self.address = address
        for host in self.hosts:
            if host.here:
                host.answer |= {"interface": nic, "address": address}
            if host.answer["address"] is None:
                raise UsageError(f"{host.name}: has no interface {interface}: give another --interface")

    def addresses(self) -> list[tuple[str, int]]:
        """An address for each worker, and its place among those of its host."""
        return [
            (f"[{host.address}]:{port}" if ":" in host.address else f"{host.address}:{port}", local)
            for host in self.hosts
            for local, port in enumerate(host.answer["ports"])
        ]

    def interfaces(self) -> dict[str, str]:
        """The name of the network interface of each host, by address, as Horovod has to be told it.

        Raises:
            UsageError: it isn't known, or Horovod would take another one in spite of it.
        """
        # Horovod 0.28.1 forgets the interface in a second round of connections (GlooContext::InitializeForProcessSet).
        problems = [
            f"{host.name}: its own name, {host.answer['hostname']}, is {host.answer['hostname_is'] or 'nobody'} there, "
            f"and so no other host reaches its Horovod: make it {host.address} in its /etc/hosts"
            for host in self.hosts
            if host.answer["hostname_is"] != host.address
        ]
        if problems and not all(host.here for host in self.hosts):
            raise UsageError("; ".join([*problems, "or use --backend multiworker"]))
        for host in self.hosts:
            if host.answer["interface"] is None:
                raise UsageError(
                    f"{host.name}: none of its network interfaces has the address {host.address}: give --interface"
                )
        return {host.address: host.answer["interface"] for host in self.hosts}

    def start(
        self, places: Sequence[dict[str, str]], arguments: Sequence[str], environment: Mapping[str, str],
        directory: Path, show: Callable[[str, str], None],
    ) -> list[Remote]:  # fmt: skip
        """Starts all workers, of which each has the variables of its place; gives them by rank."""
        workers: list[Remote] = []
        for host in self.hosts:
            ranks = range(len(workers), len(workers) + host.slots)
            workers += host.start({rank: places[rank] for rank in ranks}, arguments, environment, directory, show)
            host.over()
        return workers

    def close(self) -> None:
        """Ends all connections, and so what is left on the hosts."""
        self._closed.set()
        for host in self.hosts:
            with contextlib.suppress(OSError):
                host.process.stdin.close()  # type: ignore[union-attr]
        for host in self.hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(timeout=2.0)
            host.process.kill()


def command(name: str, python: str) -> list[str]:
    """The command that starts the agent on a host."""
    variables = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    remote = shlex.join(["exec", "env", *variables, python, "-P", "-m", AGENT])
    # A connection of its own: one that is shared has the options of the process that opened it.
    options = {"BatchMode": "yes", "ServerAliveInterval": 5, "ServerAliveCountMax": 3, "ControlPath": "none"}
    options["ConnectTimeout"] = math.ceil(start_timeout())
    try:
        ssh = shlex.split(os.environ.get(SSH, "")) or ["ssh"]
    except ValueError as error:
        raise UsageError(f"{SSH}={os.environ[SSH]} can't be read ({error}): give a command as in a shell") from None
    return [*ssh, "-T", *(f"-o{option}={value}" for option, value in options.items()), "--", name, remote]
