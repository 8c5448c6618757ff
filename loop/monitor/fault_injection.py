"""Fault: makes a chosen place of the program fail, so that what must happen then can be tried. Idle unless asked for.

`TFLOOP_FAULT=point:rank:step:how`, several divided by commas: at the first time that this rank comes by the point at
this step or later, it raises an error (`raise`), is killed as by kill -9 (`kill`), or hangs (`hang`). The rank may be
`*`. The points are where `reached` is called: `grep -rn 'fault.reached' loop`.
"""

from __future__ import annotations

import os
import signal
import time

from loop.errors import UsageError

VARIABLE = "TFLOOP_FAULT"
HOW = ("raise", "kill", "hang")


def _planned(text: str) -> list[tuple[str, str, int, str]]:
    plans = []
    for each in filter(None, text.split(",")):
        try:
            point, rank, step, how = each.split(":")
            plans.append((point, rank, int(step), how))
            if how not in HOW or not (rank == "*" or rank.isdecimal()):
                raise ValueError
        except ValueError:
            raise UsageError(f"{VARIABLE}={each}: give point:rank:step:how, with how one of {', '.join(HOW)}") from None
    return plans


_plans: list[tuple[str, str, int, str]] | None = None


class PlannedError(RuntimeError):
    """The error that was asked for."""


def reached(point: str, rank: int = 0, step: int = 0) -> None:
    """Fails here, if that was asked for; see above."""
    global _plans
    if _plans is None:
        _plans = _planned(os.environ.get(VARIABLE, ""))
    for plan in _plans:
        where, who, when, how = plan
        if where == point and who in ("*", str(rank)) and step >= when:
            _plans.remove(plan)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while how == "hang":
                time.sleep(60)
            raise PlannedError(f"the fault {where}:{who}:{when}:{how} that {VARIABLE} asks for")
