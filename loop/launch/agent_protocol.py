"""The messages between the launcher and the agent of a host, and the interface of their connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypedDict

Message = dict[str, Any]
"""A message between launcher and agent: a JSON object. Its first key says what it is; {} only shows a sign of life."""
Hashes = Mapping[str, str | None]
"""The SHA-256 of files by their names, which may be targets; None: there is no such file."""


class Question(TypedDict, total=False):
    """What the launcher's first message asks."""

    directory: str  # the working directory of the workers
    interface: str | None  # see `host_agent.meeting_place`
    # `Host.ask` fills in both for its host.
    files: list[str]  # the files whose hashes are asked for; see `host_agent.source_of`
    slots: int  # how many workers the host has


class Facts(TypedDict, total=False):
    """What a host has: the answer to the first message."""

    problem: str  # why the host can't take part; then there is nothing else
    versions: dict[str, str]  # see `host_agent.versions`
    files: dict[str, str | None]  # the hashes that were asked for
    ports: list[int]  # a free port for each worker
    interface: str | None  # the network interface at which the hosts meet; None: it isn't known
    address: str | None  # the address of this host there; None: it has none
    hostname: str  # the name that the host has for itself
    hostname_is: str | None  # the address to which this name resolves; None: to none of this host
    gpus: int  # how many GPUs workers may use
    seen: str  # the address of the launcher, as ssh has it; "": there is no ssh


class Writable(Protocol):
    """The stdin of an agent."""

    def write(self, data: bytes, /) -> object:
        """Writes data, which may be buffered until `flush`."""

    def flush(self) -> None:
        """Sends what was written."""

    def close(self) -> None:
        """Closes it; the agent then ends."""


class Connection(Protocol):
    """What a launcher needs of the connection to an agent: a part of `subprocess.Popen`."""

    @property
    def stdin(self) -> Writable | None:
        """Takes messages to the agent."""

    @property
    def stdout(self) -> Iterable[bytes] | None:
        """The lines that the agent prints: its messages."""

    @property
    def stderr(self) -> Iterable[bytes] | None:
        """The lines that the agent prints to stderr."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended; returns its exit code."""

    def kill(self) -> None:
        """Ends it at once."""
