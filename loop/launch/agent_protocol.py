"""The messages between the launcher and the agent of a host, and the interface of their connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypedDict

Message = dict[str, Any]
"""A message between launcher and agent: a JSON object. Its first key says what it is; {} only shows a sign of life."""
Hashes = Mapping[str, str | None]
"""The SHA-256 of files by their names, which may be targets; None: there is no such file."""


class Question(TypedDict, total=False):
    """What the launcher's first message asks.

    Attributes:
        directory: the working directory of the workers.
        interface: see `host_agent.meeting_place`.
        files: the files whose hashes are asked for; see `host_agent.source_of`.
        slots: how many workers the host has.
    """

    directory: str
    interface: str | None
    # `Host.ask` fills in both for its host.
    files: list[str]
    slots: int


class Facts(TypedDict, total=False):
    """What a host has: the answer to the first message.

    Attributes:
        problem: why the host can't take part; then there is nothing else.
        versions: see `host_agent.versions`.
        files: the hashes that were asked for.
        ports: a free port for each worker.
        interface: the network interface at which the hosts meet; None: it isn't known.
        address: the address of this host there; None: it has none.
        hostname: the name that the host has for itself.
        hostname_is: the address to which this name resolves; None: to none of this host.
        gpus: how many GPUs workers may use.
        seen: the address of the launcher, as ssh has it; "": there is no ssh.
    """

    problem: str
    versions: dict[str, str]
    files: dict[str, str | None]
    ports: list[int]
    interface: str | None
    address: str | None
    hostname: str
    hostname_is: str | None
    gpus: int
    seen: str


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
