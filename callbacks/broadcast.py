"""BroadcastVariables: every replica starts from the chief's weights, and that is checked."""

from __future__ import annotations

from itertools import zip_longest
from typing import ClassVar, Literal

from callbacks.base import Callback, Run


class BroadcastVariables(Callback):
    """Before the first step, gives every worker the chief's variables, and compares a hash of them.

    All of them: weights, BatchNorm statistics, seeds, optimizer slots and counters. Initial values that differ (random
    ones without a seed, a restore from a disk that only the chief has) are thereby the same everywhere.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def on_fit_start(self, run: Run) -> None:
        forms = run.backend.gather_json([f"{v.dtype.name}{list(v.shape)} {v.name}" for v in run.variables])
        for rank, form in enumerate(forms):
            if [each.split(" ")[0] for each in form] != [each.split(" ")[0] for each in forms[0]]:
                pairs = zip_longest(forms[0], form, fillvalue="nothing")
                own, other = next(pair for pair in pairs if pair[0].split(" ")[0] != pair[1].split(" ")[0])
                raise RuntimeError(
                    f"rank {rank} has built another model than the chief: {other} where the chief has {own}; "
                    "look for code that depends on the rank"
                )
        run.backend.broadcast_variables(run.variables)
        run.check_replicas()
