"""The far end of `tfloop train --hosts`: runs a host's workers for the launcher behind stdin.

It is started as `python -m loop.launch.host_agent`.

It says what this host has, starts the workers that it is sent, passes on what they print and how far they have
come, writes down what the launcher plans for them, and ends them when it is gone: when stdin is closed, or silent for
long. Each message is a line of JSON, those to the launcher with a mark in front, since a login shell may print, too.
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
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from callbacks.files import ROOT, write_text
from loop.launch import machine
from loop.launch.environment import JOB, LAUNCHER
from loop.launch.process import WorkerProcess, printed_lines, start_worker
from loop.target import task_loader

MARK = "\x1dtfloop "
"""Starts a message to the launcher."""
BEAT, SILENCE = 5.0, 20.0
"""How often both ends say something, and after how long a silence they take each other for gone, in seconds."""
_GRACE = 30.0  # seconds that workers have to save and end when the launcher is gone


def main() -> None:
    """Serves one job."""
    messages = heard()
    asked: dict[str, Any] = next((each["ask"] for each in messages if "ask" in each), {})
    if not asked:
        return
    threading.Thread(target=_beat, daemon=True).start()
    say(answer=facts(asked))
    _HostWorkers().obey(messages)


def heard() -> Iterator[dict[str, Any]]:
    """The launcher's messages, until it is gone."""
    rest = b""
    while select.select([0], [], [], SILENCE)[0] and (piece := os.read(0, 1 << 16)):
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)


_speaking = threading.Lock()


def say(**message: Any) -> None:
    """Sends the launcher a message, in one piece. If it is gone, `obey` finds out."""
    with _speaking, contextlib.suppress(OSError):
        print(MARK + json.dumps(message), flush=True)


def _beat() -> None:
    while True:
        say()
        time.sleep(BEAT)


class _HostWorkers:
    """The workers here, by rank, and the directory where they and the launcher leave word for each other."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerProcess] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="tfloop-"))
        self._copies: list[threading.Thread] = []
        self._over = threading.Event()  # no more workers will be started
        threading.Thread(target=self._report, daemon=True).start()

    def obey(self, messages: Iterable[dict[str, Any]]) -> None:
        """Carries out the launcher's messages; when it is gone, has workers save and end, and kills what is left."""
        for message in messages:
            if "start" in message:
                self._start(**message["start"])
            elif "over" in message:
                self._over.set()
            elif "file" in message:
                write_text(self._directory / message["file"], message["text"])
            elif "signal" in message:
                worker = self._workers[message["rank"]]
                worker.kill() if message["signal"] == signal.SIGKILL else worker.send_signal(message["signal"])
        workers = self._workers.values()
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
            time.sleep(0.1)
        for worker in workers:
            worker.kill()
        self._end(1)

    def _start(self, places: dict[str, dict[str, str]], arguments: list[str], environment: dict[str, str]) -> None:
        # As the launcher does it on its own machine: workers find the same there, and watch over this process.
        own = {JOB: str(self._directory), LAUNCHER: str(os.getpid())}
        command = [sys.executable, "-P", "-m", "cli", *arguments]
        for rank, place in places.items():
            worker = start_worker(command, {**os.environ, **environment, **own, **place})
            for stream in (worker.stdout, worker.stderr):
                self._copies.append(threading.Thread(target=_copy, args=(worker, stream, int(rank)), daemon=True))
                self._copies[-1].start()
            self._workers[int(rank)] = worker

    def _report(self) -> None:
        """Sends the files that workers leave or change, and their exit codes, until all have ended."""
        told: dict[str, str] = {}
        ends: set[int] = set()
        while not (self._over.is_set() and ends >= self._workers.keys()):
            ended = {rank: code for rank, worker in [*self._workers.items()] if (code := worker.poll()) is not None}
            for path in sorted(self._directory.glob("rank-*")):
                if path.suffix != ".tmp" and told.get(path.name) != (text := path.read_text()):
                    told[path.name] = text
                    say(file=path.name, text=text)
            for rank in ended.keys() - ends:  # behind what it left before
                ends.add(rank)
                say(ended=ended[rank], rank=rank)
            time.sleep(0.05)
        for thread in self._copies:
            thread.join()
        self._end(0)

    def _end(self, code: int) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(code)


def _copy(worker: WorkerProcess, stream: IO[bytes], rank: int) -> None:
    for line in printed_lines(worker, stream):
        say(line=line, rank=rank)


# What a host has; asked on both ends, and compared


def facts(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to what the launcher asks first."""
    try:
        os.chdir(asked["directory"])
    except OSError as error:
        return {"problem": f"there is no working directory {asked['directory']} ({error.strerror})"}
    nic, address = where(asked["interface"])
    return {
        "versions": versions(),
        "files": {name: digest(name) for name in asked["files"]},
        "ports": machine.free_ports(asked["slots"], ""),
        "interface": nic,
        "address": address,
        "hostname": socket.gethostname(),
        "hostname_is": resolve(socket.gethostname()),
        "gpus": machine.count_gpus(),
        "seen": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
    }


def versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    found = {"Python": "{}.{}".format(*sys.version_info)}
    for name in ("tfloop", "tensorflow", "keras", "horovod"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    source = hashlib.sha256()
    for path in sorted([ROOT / "cli.py", *(ROOT / "loop").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]):
        source.update(path.read_bytes())
    found["tfloop"] += f", source {source.hexdigest()[:8]}"  # a checkout keeps its version for long
    return found


def digest(name: str) -> str | None:
    """SHA-256 of a file, or of the one that a target is in; None if it isn't there."""
    path = source_of(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def source_of(name: str) -> Path | None:
    """The file of a target, found without importing anything; another name is a file itself."""
    if name in task_loader.SHIPPED:
        return task_loader.shipped_path(name)
    place, colon, _ = name.rpartition(":")
    if not colon or place.endswith(".py"):
        return Path(place or name)
    module = place.replace(".", "/")
    ways = (Path(root, file) for root in ("", *sys.path) for file in (f"{module}.py", f"{module}/__init__.py"))
    return next((path for path in ways if path.is_file()), None)


def where(interface: str | None, towards: str | None = None) -> tuple[str | None, str | None]:
    """The network interface where the hosts of a job meet, and its address here.

    Args:
        interface: the name of one, or a network such as 10.0.0.0/24; None: that by which ssh came here.
        towards: instead of that, an address of this machine.
    """
    all_of_them = interfaces()
    if interface in all_of_them:
        return interface, all_of_them[interface]
    if interface is None:
        reached = towards if towards is not None else (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
        return next((nic for nic, address in all_of_them.items() if address == reached), None), reached or None
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(interface)
        found = [each for each in all_of_them.items() if ipaddress.ip_address(each[1]) in network]
        return found[0] if found else (None, None)
    return None, None


def resolve(name: str) -> str | None:
    """The address of this machine that a name stands for, as Gloo finds it; None if it stands for none."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, nic in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", nic.encode()))  # SIOCGIFADDR
                found[nic] = socket.inet_ntoa(answer[20:24])
    return found


if __name__ == "__main__":
    main()
