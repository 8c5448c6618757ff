"""Lists of hosts as schedulers write them, and the hosts that they stand for."""

from __future__ import annotations

import itertools
import re

from loop.errors import UsageError


def node_list(text: str) -> list[str]:
    """The nodes of Slurm's compressed list: `rack[1-2]n[08-10],login` are `rack1n08`, ..., `rack2n10`, `login`.

    Raises:
        UsageError: it is no such list.
    """
    # Commas within brackets belong to the ranges.
    names = re.findall(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", text)
    if not names or ",".join(names) != text:
        raise UsageError(f"the node list {text!r} can't be read: it must be like node[01-03,7],login")
    nodes: list[str] = []
    for name in names:
        parts = map(_values, re.split(r"(\[.*?\])", name))
        # The last range counts fastest, as in Slurm's own order of nodes.
        nodes += map("".join, itertools.product(*parts))
    return nodes


def _values(part: str) -> list[str]:
    """The values of one part of a name: the part itself, or the numbers of its ranges, with leading zeros."""
    if not part.startswith("["):
        return [part]
    values = []
    unreadable = UsageError(f"the node list has {part}, which can't be read: it must be like [01-03,7]")
    for text in part[1:-1].split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
        if numbers is None:
            raise unreadable
        first = int(numbers[1])
        last = int(numbers[2] or numbers[1])
        if not 0 <= last - first < 1_000_000:  # no cluster is larger; a longer list would fill the memory
            raise unreadable
        digits = len(numbers[1])  # as many as the first one has: 08, 09, 10
        for number in range(first, last + 1):
            values.append(f"{number:0{digits}}")
    return values


def task_counts(text: str) -> list[int]:
    """How many tasks each node has: `2(x3),1` are 2, 2, 2, 1.

    Raises:
        UsageError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text}: it must be like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def host_counts(text: str) -> list[str]:
    """The host of each slot in LSF's list: `a 2 b 1` are a, a, b.

    Raises:
        UsageError: it is no such list.
    """
    words = text.split()
    counts = words[1::2]
    if len(words) % 2 or not all(re.fullmatch(r"[1-9]\d{0,4}", count, re.ASCII) for count in counts):
        raise UsageError(f"LSB_MCPU_HOSTS={text}: it must be like host1 2 host2 1")
    hosts = []
    for host, count in zip(words[::2], counts):
        hosts += [host] * int(count)
    return hosts


def task_hosts(text: str) -> list[str]:
    """The host of each task, by rank, in Flux's task map: the lines `a: 0-1` and `b: 2` are a, a, b.

    Raises:
        UsageError: it is no such map, or a task has no host, or two.
    """
    hosts: dict[int, str] = {}
    for line in text.splitlines():
        host, _, tasks = line.rpartition(": ")
        numbers = list(map(int, _values(f"[{tasks.strip('[]')}]")))
        if not host or hosts.keys() & set(numbers):
            raise UsageError(f"the task map {text!r} can't be read: it must have lines like host1: 0-1")
        hosts |= dict.fromkeys(numbers, host)
    if sorted(hosts) != list(range(len(hosts))):
        raise UsageError(f"the task map {text!r} has no host for some tasks")
    return [hosts[task] for task in sorted(hosts)]
