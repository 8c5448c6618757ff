"""The agent of `tfloop train --hosts` on each host: runs the host's workers for the launcher.

The launcher starts it as `python -m loop.launch.host_agent`, and talks to it over its stdin and stdout. The agent
describes its host, starts the workers, passes on what they print and report, and writes the launcher's plans into
files for them. It ends the workers when the launcher is gone: when stdin is closed, or silent for `SILENCE`. Each
message is a line of JSON. A message to the launcher starts with `MARK`, because a login shell may also print lines.
Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from callbacks.files import ROOT, write_text
from loop.launch import machine, signals
from loop.launch.agent_protocol import Facts, Message, Question
from loop.launch.environment import JOB, LAUNCHER
from loop.launch.process import WorkerProcess, printed_lines, start_worker, worker_command
from loop.target import task_loader

MARK = "\x1dtfloop "
"""Starts a message to the launcher."""
BEAT = 5.0
"""Agent and launcher send each other a message at least so often, in seconds."""
SILENCE = 20.0
"""After so many seconds without a message, agent and launcher take each other for gone."""
# The same before the first message: the launcher sends it when it has started the agents of all hosts, whose names may
# take long to resolve, or which may be slow to start.
_FIRST_SILENCE = 600.0
_GRACE = 30.0  # seconds that workers have to save and end when the launcher is gone


def main() -> None:
    """Serves one job."""
    messages = received()
    question = _first_question(messages)
    if question is None:
        return
    threading.Thread(target=_beat, daemon=True).start()
    send(answer=facts(question))
    with signals.temporary_directory("tfloop-") as directory:
        _HostWorkers(Path(directory)).obey(messages)


def _first_question(messages: Iterator[Message]) -> Question | None:
    """Reads messages up to the launcher's question; None: the launcher has ended before it asked."""
    for message in messages:
        if "ask" in message:
            question: Question = message["ask"]
            return question
    return None


def received() -> Iterator[Message]:
    """The launcher's messages, until it is gone."""
    rest = b""
    patience = _FIRST_SILENCE
    # From the descriptor, not `sys.stdin`: its buffer would hide lines from `select`.
    while select.select([0], [], [], patience)[0] and (piece := os.read(0, 1 << 16)):
        patience = SILENCE
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)


_sending = threading.Lock()


def send(**message: object) -> None:
    """Sends the launcher a message, in one piece. If the launcher is gone, `received` ends."""
    with _sending, contextlib.suppress(OSError):
        print(MARK + json.dumps(message), flush=True)


def _beat() -> None:
    while True:
        send()
        time.sleep(BEAT)


class _HostWorkers:
    """The workers of this host, by rank, and the directory in which they and the launcher exchange files."""

    def __init__(self, directory: Path) -> None:
        self._workers: dict[int, WorkerProcess] = {}
        self._directory = directory
        self._copiers: list[threading.Thread] = []
        self._over = threading.Event()  # no more workers will be started
        threading.Thread(target=self._report, daemon=True).start()

    def obey(self, messages: Iterable[Message]) -> None:
        """Carries out the launcher's messages. When they end, the workers save and end; late ones are killed."""
        for message in messages:
            self._carry_out(message)
        workers = self._workers.values()
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
            time.sleep(0.1)
        for worker in workers:  # also one that has ended: it may have left processes behind
            worker.kill()
        signals.leave(1)

    def _carry_out(self, message: Message) -> None:
        if "start" in message:
            self._start(**message["start"])
        elif "over" in message:
            self._over.set()
        elif "file" in message:
            write_text(self._directory / message["file"], message["text"])
        elif "signal" in message:
            worker = self._workers[message["rank"]]
            if message["signal"] == signal.SIGKILL:
                worker.kill()  # with all processes that it has started
            else:
                worker.send_signal(message["signal"])

    def _start(self, places: dict[str, dict[str, str]], arguments: list[str], environment: dict[str, str]) -> None:
        # To its workers, the agent is the launcher: they report into its directory, and end when it is gone.
        own = {JOB: str(self._directory), LAUNCHER: str(os.getpid())}
        for rank, place in places.items():
            worker = start_worker(worker_command(arguments), {**os.environ, **environment, **own, **place})
            for stream in (worker.stdout, worker.stderr):
                copier = threading.Thread(target=_copy, args=(worker, stream, int(rank)), daemon=True)
                copier.start()
                self._copiers.append(copier)
            self._workers[int(rank)] = worker

    def _report(self) -> None:
        """Sends the files that workers write or change, and their exit codes, until all have ended."""
        sent: dict[str, str] = {}
        reported: set[int] = set()
        while not (self._over.is_set() and reported >= self._workers.keys()):
            # Before the files are read: a worker's end is reported after all that it has written.
            codes = {rank: worker.poll() for rank, worker in list(self._workers.items())}
            for path in sorted(self._directory.glob("rank-*")):
                if path.suffix == ".tmp":  # a worker is still writing it
                    continue
                text = path.read_text()
                if sent.get(path.name) != text:
                    sent[path.name] = text
                    send(file=path.name, text=text)
            for rank, code in codes.items():
                if code is not None and rank not in reported:
                    reported.add(rank)
                    send(ended=code, rank=rank)
            time.sleep(0.05)
        for thread in self._copiers:
            thread.join()
        signals.leave(0)  # in this thread, `sys.exit` would end the thread alone


def _copy(worker: WorkerProcess, stream: IO[bytes], rank: int) -> None:
    for line in printed_lines(worker, stream):
        send(line=line, rank=rank)


# What a host has: the launcher asks each host for it, and compares it with what its own machine has


def facts(question: Question) -> Facts:
    """The answer to the launcher's first message."""
    try:
        os.chdir(question["directory"])
    except OSError as error:
        return {"problem": f"there is no working directory {question['directory']} ({error.strerror})"}
    nic, address = meeting_place(question["interface"])
    return {
        "versions": versions(),
        "files": {name: digest(name) for name in question["files"]},
        "ports": machine.free_ports(question["slots"], ""),
        "interface": nic,
        "address": address,
        "hostname": socket.gethostname(),
        "hostname_is": resolve(socket.gethostname()),
        "gpus": machine.count_gpus(),
        "seen": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
    }


def versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    installed = {"Python": "{}.{}".format(*sys.version_info)}
    for name in ("tfloop", "tensorflow", "keras", "horovod"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "none"
    source = hashlib.sha256()
    for path in sorted([ROOT / "cli.py", *(ROOT / "loop").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]):
        source.update(path.read_bytes())
    # The version alone isn't enough: that of a checkout stays the same while its source changes.
    installed["tfloop"] += f", source {source.hexdigest()[:8]}"
    return installed


def digest(name: str) -> str | None:
    """SHA-256 of a file, or of the file that a target names; None if it isn't there."""
    path = source_of(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def source_of(name: str) -> Path | None:
    """The file of a target, found without importing anything. A name that isn't a target is the path of a file."""
    if name in task_loader.SHIPPED:
        return task_loader.shipped_path(name)
    place, colon, _ = name.rpartition(":")
    if not colon or place.endswith(".py"):
        return Path(place or name)
    module = place.replace(".", "/")
    for root in ("", *sys.path):  # the working directory first, as when the target is imported
        for file in (f"{module}.py", f"{module}/__init__.py"):
            path = Path(root, file)
            if path.is_file():
                return path
    return None


def meeting_place(interface: str | None, reached: str | None = None) -> tuple[str | None, str | None]:
    """The network interface at which the hosts of a job meet, and this machine's address there.

    Args:
        interface: the name of one, or a network such as 10.0.0.0/24; None: the one at `reached`.
        reached: the address at which the other hosts reach this machine; None: the one that ssh connected to.
    """
    addresses = interfaces()
    if interface in addresses:
        return interface, addresses[interface]
    if interface is None:
        if reached is None:
            # The variable has the client's address and port, then those of this machine.
            connection = os.environ.get("SSH_CONNECTION", "").split()
            reached = connection[2] if len(connection) > 2 else ""
        for nic, address in addresses.items():
            if address == reached:
                return nic, address
        return None, reached or None
    with contextlib.suppress(ValueError):  # not a network, but the name of an interface that isn't here
        network = ipaddress.ip_network(interface)
        for nic, address in addresses.items():
            if ipaddress.ip_address(address) in network:
                return nic, address
    return None, None


def resolve(name: str) -> str | None:
    """The address of this machine that a name resolves to, as Gloo finds it; None: the name isn't this machine's."""
    # The name can't be resolved. A UnicodeError: it isn't a host name, such as one with two dots side by side.
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # fails unless the address belongs to this machine
                return str(address[0])
    return None


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, nic in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", nic.encode()))  # SIOCGIFADDR
                addresses[nic] = socket.inet_ntoa(answer[20:24])
    return addresses


if __name__ == "__main__":
    main()
