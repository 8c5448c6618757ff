"""How many workers each host has: `--hosts`, and the options that belong to it."""

from __future__ import annotations

import contextlib
import ipaddress
import re

from loop.errors import UsageError


def read_hosts(
    text: str | None, workers: int | None, backend: str, interface: str | None, remote_python: str | None
) -> dict[str, int]:
    """How many workers each host has, by `--hosts`; empty without that option.

    Raises:
        UsageError: it can't be read, or contradicts another option.
    """
    if text is None:
        for option, value in (("--interface", interface), ("--remote-python", remote_python)):
            if value is not None:
                raise UsageError(f"{option} {value} is of use with --hosts alone")
        return {}
    _check_host_options(interface, remote_python)
    slots = _slots(text)
    total = sum(slots.values())
    if total < 2:
        raise UsageError(f"--hosts {text}: that is one worker in all: give at least two, such as {next(iter(slots))}:2")
    if workers not in (None, total):
        raise UsageError(f"--workers {workers}, but --hosts {text} has {total}: leave --workers out")
    if backend not in ("auto", "horovod", "multiworker"):
        raise UsageError(f"--hosts with --backend {backend}: use horovod or multiworker")
    return slots


def _check_host_options(interface: str | None, remote_python: str | None) -> None:
    if interface is not None and not _is_interface(interface):
        raise UsageError(f"--interface {interface!r}: give the name of a network interface, or a network: 10.0.0.0/24")
    if remote_python is not None and not remote_python.strip():
        raise UsageError(f"--remote-python {remote_python!r}: give the path of Python on the other hosts")


def _slots(text: str) -> dict[str, int]:
    """How many workers each host has, from `name:workers,name:workers`."""
    slots: dict[str, int] = {}
    for part in text.split(","):
        # No name starts with a dash: ssh would take it for an option.
        host = re.fullmatch(r"(?![-\s])([^:,\s]+)(?::(\d{1,4}))?", part, re.ASCII)
        if not host or not 1 <= int(host[2] or 1) <= 4096:
            raise UsageError(f"--hosts {text}: {part!r} can't be read: give name:workers, such as h1:4,h2:4")
        if host[1] in slots:
            raise UsageError(f"--hosts {text}: {host[1]} is there twice: give each host once, with all its workers")
        slots[host[1]] = int(host[2] or 1)
    return slots


def _is_interface(text: str) -> bool:
    """Whether a text may be the name of an interface, or is a network."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_network(text))
    return re.fullmatch(r"[^/\s]{1,15}", text) is not None  # Linux allows no longer names
