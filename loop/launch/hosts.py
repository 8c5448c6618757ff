"""Several hosts: they are compared with this machine, and an agent on each runs its workers."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from callbacks.files import write_text
from callbacks.run_record.redaction import mask
from loop.errors import UsageError
from loop.launch import host_agent, machine
from loop.launch.agent_protocol import Connection, Facts, Hashes, Message, Question
from loop.launch.environment import start_timeout

AGENT = "loop.launch.host_agent"
"""The module that runs as the agent of a host."""
# Environment variables that describe one host. The launcher sends all others to every host.
_OF_A_HOST = re.compile(
    r"_|PATH|HOME|PWD|OLDPWD|USER|LOGNAME|MAIL|SHELL|SHLVL|TERM|HOST|HOSTNAME|TMPDIR|LD_.*|SSH_.*|XDG_.*|DBUS_.*"
    r"|DISPLAY|WAYLAND_DISPLAY|VIRTUAL_ENV|CONDA_.*|CUDA_VISIBLE_DEVICES|SLURM.*|RAY_.*|BASH_FUNC_.*"
)


def files(target: str, configs: Sequence[Path]) -> Hashes:
    """The hashes of the files that every host must have."""
    return {name: host_agent.digest(name) for name in (target, *map(str, configs))}


def expected_versions(backend: str) -> dict[str, str]:
    """What this machine has, and every host must have for a job with this backend."""
    expected = host_agent.versions()
    if backend != "horovod":
        del expected["horovod"]
    return expected


class Remote:
    """A worker on a host. It has the interface of `process.WorkerProcess`, a worker on this machine."""

    def __init__(self, host: Host, rank: int) -> None:
        self.where = f" on {host.name}"
        self.lost = ""
        self.returncode: int | None = None
        self._host = host
        self._rank = rank

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        # A worker that is started after its host was lost hasn't been marked by `lose`.
        if self.returncode is None and self._host.lost:
            self._host.lose(self._host.lost)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""
        self._host.send(signal=number, rank=self._rank)

    def kill(self) -> None:
        """Kills it, and all processes that it has started."""
        self.send_signal(signal.SIGKILL)


class Host:
    """A host of a job: the connection to the agent there, and what it has reported.

    Args:
        name: as ssh takes it.
        slots: how many workers it has.
        process: the connection: ssh; on this machine, the agent itself; on a Ray cluster, an actor.

    Attributes:
        workers: its workers, by rank.
        answered: set when the agent has answered the first message, or the host is lost.
        answer: the agent's answer.
        heard: when the launcher last handled a line of the agent; infinite while it handles one.
        lost: why the host is lost; "": it isn't.
        here: whether it is this machine.
        threads: two threads, which read the agent's stdout and stderr.
    """

    def __init__(self, name: str, slots: int, process: Connection) -> None:
        self.name = name
        self.slots = slots
        self.process = process
        self.workers: dict[int, Remote] = {}
        self.answered = threading.Event()
        self.answer: Facts = {}
        self.heard = time.monotonic()
        self.lost = ""
        self._printed: list[str] = []  # lines that aren't messages of the agent, such as errors of ssh
        self._show: Callable[[str, str], None] = lambda line, source: self._printed.append(line.strip())
        self._directory = Path()
        self._over = False  # whether the agent knows that no more workers will be started
        self._sending = threading.Lock()
        self.here = host_agent.resolve(name) is not None

        # Last, because the threads use what is set above. `_listen` joins the other thread, which must have started.
        listener = threading.Thread(target=self._listen, name=f"_listen {name}", daemon=True)
        errors = threading.Thread(target=self._errors, name=f"_errors {name}", daemon=True)
        self.threads = [listener, errors]
        errors.start()
        listener.start()

    @property
    def address(self) -> str:
        """The address at which the other hosts reach it."""
        return str(self.answer["address"])

    def send(self, **message: object) -> None:
        """Sends the agent a message. An agent that is gone is ignored here: `_listen` notices it."""
        assert self.process.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def ask(self, question: Question, files: Hashes) -> None:
        """Sends the first message, whose answer says what the host has; see `host_agent.facts`."""
        self.send(ask={**question, "files": list(files), "slots": self.slots})

    def start(
        self, places: dict[int, dict[str, str]], arguments: Sequence[str], environment: Mapping[str, str],
        directory: Path, show: Callable[[str, str], None],
    ) -> list[Remote]:  # fmt: skip
        """Has the agent start a worker for each place.

        Variables are sent as messages: on a command line, all users could read the secrets among them.

        Args:
            places: the variables of each worker's place, by rank.
            arguments: the command line after `tfloop`.
            environment: the variables of all workers.
            directory: the job's directory, to which the files of the workers are copied.
            show: takes each line that a worker prints, and where it comes from.
        """
        workers = {rank: Remote(self, rank) for rank in places}
        self.workers |= workers
        self._directory = directory
        self._show = show
        shared = {}
        for name, value in environment.items():
            if not _OF_A_HOST.fullmatch(name):
                shared[name] = value
        self.send(start={"places": places, "arguments": arguments, "environment": shared})
        return list(workers.values())

    def over(self) -> None:
        """Tells the agent that no more workers will be started: it ends when its workers have ended."""
        self._over = True
        self.send(over=True)

    def problems(self, expected: Mapping[str, str], files: Hashes) -> Iterator[str]:
        """The reasons why it can't take part in the job.

        Args:
            expected: the versions that this machine has.
            files: the hashes of the files on this machine.
        """
        if self.lost or not self.answered.is_set():
            yield self.lost or f"can't be reached: no answer within {start_timeout():g} s (--start-timeout)"
        elif "problem" in self.answer:
            yield self.answer["problem"]
        else:
            yield from self._differences(expected, files)
            gpus = self.answer.get("gpus", 0)
            if self.slots > gpus > 0:
                yield machine.too_few_gpus(gpus, f"is to have {self.slots} workers")

    def _differences(self, expected: Mapping[str, str], files: Hashes) -> Iterator[str]:
        """What the host has that differs from this machine."""
        versions = self.answer["versions"]
        for name, version in expected.items():
            if versions[name] != version:
                yield f"has {name} {versions[name]}, but here it is {version}: install the same"
        for name, digest in files.items():
            if digest is None:  # it isn't on this machine either: the workers will report it
                continue
            if self.answer["files"][name] is None:
                yield self.missing(name)
            elif self.answer["files"][name] != digest:
                yield f"has another {name} than this machine: copy it there"

    def missing(self, name: str) -> str:
        """The message for a file that it doesn't have."""
        return f"has no {name} in {Path.cwd()}: copy it there"

    def lose(self, reason: str) -> None:
        """Marks the host as lost, and its workers with it."""
        self.lost = self.lost or reason  # several threads may call this: the first reason counts
        for rank, worker in self.workers.items():
            if worker.returncode is None:
                worker.lost = f"host {self.name} is gone, and rank {rank} with it: {self.lost}"
                worker.returncode = 255
        self.answered.set()  # ends the wait for its answer
        with contextlib.suppress(OSError):
            self.process.kill()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            is_message = text.startswith(host_agent.MARK)
            if is_message and not text.endswith("\n"):
                break  # the agent, or the connection, has ended within a message
            # Showing a line waits while stderr is held, by a pager or Ctrl-S. The host isn't silent then.
            self.heard = float("inf")
            try:
                if is_message:
                    self._take(json.loads(text[len(host_agent.MARK) :]))
                else:
                    self._show(text, self.name)
            finally:
                self.heard = time.monotonic()
        code = self.process.wait()
        self.threads[1].join(1.0)  # it may still read the reason from stderr
        # An agent ends by itself only after the launcher has told it that all workers are started.
        has_finished = self._over and all(worker.returncode is not None for worker in self.workers.values())
        if not has_finished:
            what = "its connection ended" if self.answered.is_set() else "can't be reached"
            reason = mask(self._printed[-1]) if self._printed else f"exit code {code}"
            self.lose(f"{what}: {reason}")

    def _take(self, message: Message) -> None:
        if "answer" in message:
            self.answer = message["answer"]
            self.answered.set()
        elif "line" in message:
            self._show(message["line"], f"{self.name} {message['rank']}")
        elif "ended" in message:
            self.workers[message["rank"]].returncode = message["ended"]
        elif "file" in message and re.fullmatch(r"rank-\d+\.[a-z]+", message["file"]):
            # Only names of this form, without a path: a host must not write outside of the job's directory.
            write_text(self._directory / message["file"], message["text"])

    def _errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace").strip()
            self._printed.append(text)
            if self.workers:
                self._show(text, self.name)


class Cluster:
    """The hosts of a job.

    Attributes:
        hosts: the hosts. Elastic jobs on a Ray cluster add to them while they run.
        address: the address at which they reach this machine.
    """

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.address = "127.0.0.1"
        self._closed = threading.Event()

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads that end when all output of the hosts has been shown."""
        return [host.threads[0] for host in self.hosts]

    def compare(self, questions: Sequence[Question], backend: str, files: Hashes) -> None:
        """Asks the agents what their hosts have, and compares it with this machine.

        Args:
            questions: what each host is asked.
            backend: the backend of the job.
            files: the hashes of the files that each host must have.

        Raises:
            UsageError: hosts that can't be reached, or differ; each with its reason.
        """
        for host, question in zip(self.hosts, questions, strict=True):
            host.ask(question, files)
        # Started before the wait for answers: an agent that receives no message for `SILENCE` takes the launcher for
        # gone.
        threading.Thread(target=self.watch, name="hosts", daemon=True).start()
        deadline = time.monotonic() + start_timeout()
        for host in self.hosts:
            host.answered.wait(max(0.0, deadline - time.monotonic()))
        expected = expected_versions(backend)
        problems = []
        for host in self.hosts:
            for reason in host.problems(expected, files):
                problems.append(f"{host.name}: {reason}")
        if problems:
            raise UsageError("; ".join(problems))

    def watch(self) -> None:
        """Sends the agents signs of life, and marks silent hosts as lost, until `close`."""
        while not self._closed.wait(host_agent.BEAT / 5):
            for host in self.hosts:
                host.send()
                # Before the first answer, `start_timeout` decides: a host may be slow to import Python's modules.
                if host.answered.is_set() and time.monotonic() - host.heard > host_agent.SILENCE:
                    host.lose(f"nothing was heard of it for {host_agent.SILENCE:g} s")

    def meet(self, interface: str | None) -> None:
        """Determines the network interface at which the hosts meet, and this machine's address there.

        Args:
            interface: `--interface`; None: the one that ssh uses.

        Raises:
            UsageError: a host has no address there.
        """
        remote = [host for host in self.hosts if not host.here]
        seen = remote[0].answer["seen"] if remote else "127.0.0.1"
        nic, address = host_agent.meeting_place(interface, seen)
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
        """The address of each worker, and its index among the workers of its host."""
        addresses = []
        for host in self.hosts:
            name = f"[{host.address}]" if ":" in host.address else host.address  # IPv6 in brackets
            for index, port in enumerate(host.answer["ports"]):
                addresses.append((f"{name}:{port}", index))
        return addresses

    def shares(self) -> Counter[str]:
        """How many workers each address has: on a Ray cluster, several hosts may have the same."""
        shares: Counter[str] = Counter()
        for host in self.hosts:
            shares[host.address] += host.slots
        return shares

    def interfaces(self) -> dict[str, str]:
        """The name of each host's network interface, by the host's address, as Horovod needs it.

        Raises:
            UsageError: it isn't known, or Horovod would use another one.
        """
        # Horovod 0.28.1 forgets the interface in a second round of connections (GlooContext::InitializeForProcessSet).
        # It then uses the address to which the host's own name resolves: that must be the same address.
        problems = []
        for host in self.hosts:
            resolved = host.answer["hostname_is"]
            if resolved != host.address:
                problems.append(
                    f"{host.name}: its own name, {host.answer['hostname']}, is {resolved or 'no address'} there, and "
                    f"so no other host reaches its Horovod: make it {host.address} in its /etc/hosts"
                )
        if problems and not all(host.here for host in self.hosts):
            raise UsageError("; ".join([*problems, "or use --backend multiworker"]))

        interfaces = {}
        for host in self.hosts:
            interface = host.answer["interface"]
            if interface is None:
                raise UsageError(
                    f"{host.name}: none of its network interfaces has the address {host.address}: give --interface"
                )
            interfaces[host.address] = interface
        return interfaces

    def start(
        self, places: Sequence[dict[str, str]], arguments: Sequence[str], environment: Mapping[str, str],
        directory: Path, show: Callable[[str, str], None],
    ) -> list[Remote]:  # fmt: skip
        """Starts all workers, each with the variables of its place; returns them by rank. See `Host.start`."""
        workers: list[Remote] = []
        for host in self.hosts:
            ranks = range(len(workers), len(workers) + host.slots)
            own_places = {rank: places[rank] for rank in ranks}
            workers += host.start(own_places, arguments, environment, directory, show)
            host.over()  # a fixed job starts no worker twice
        return workers

    def close(self) -> None:
        """Closes all connections. The agents then end the workers that are left."""
        self._closed.set()
        for host in self.hosts:
            assert host.process.stdin is not None
            with contextlib.suppress(OSError):
                host.process.stdin.close()
        # Only when all are closed: so the agents end at the same time, not one after the other.
        for host in self.hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(timeout=2.0)
            host.process.kill()
