"""Fault injection: makes a chosen point of the program fail, so that tests see what happens then.

It does nothing unless the environment has `TFLOOP_FAULT=point:rank:step:how`, or several of these, divided by commas.
When this rank first reaches the point at this step or later, it raises an error (`raise`), is killed as by kill -9
(`kill`), or hangs (`hang`). The rank may be `*`. A point is a call of `reached`: `grep -rn 'injection.reached' loop`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple

from loop.errors import UsageError

VARIABLE = "TFLOOP_FAULT"
HOW = ("raise", "kill", "hang")


class Fault(NamedTuple):
    """A fault that is still to happen."""

    point: str
    rank: str
    step: int
    how: str


_faults: list[Fault] | None = None  # None until the environment was read


def _parsed(text: str) -> list[Fault]:
    faults = []
    for part in filter(None, text.split(",")):
        try:
            point, rank, step, how = part.split(":")
            faults.append(Fault(point, rank, int(step), how))
            if how not in HOW or not (rank == "*" or rank.isdecimal()):
                raise ValueError
        except ValueError:
            raise UsageError(f"{VARIABLE}={part}: give point:rank:step:how, with how one of {', '.join(HOW)}") from None
    return faults


class PlannedError(RuntimeError):
    """The error that `TFLOOP_FAULT` asks for."""


def reached(point: str, rank: int = 0, step: int = 0) -> None:
    """Fails here, if `TFLOOP_FAULT` asks for it."""
    global _faults
    if _faults is None:
        _faults = _parsed(os.environ.get(VARIABLE, ""))
    for fault in _faults:
        if fault.point == point and fault.rank in ("*", str(rank)) and step >= fault.step:
            _faults.remove(fault)  # once only: a run that goes on after the error must not fail again
            if fault.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while fault.how == "hang":  # for ever: until another process ends this one
                time.sleep(60)
            raise PlannedError(f"the fault {':'.join(map(str, fault))} that {VARIABLE} asks for")
