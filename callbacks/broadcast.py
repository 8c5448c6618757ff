"""BroadcastVariables: every replica starts from the chief's variables, which is checked."""

from __future__ import annotations

from itertools import zip_longest
from typing import ClassVar, Literal

from callbacks.base import Callback, Run


class BroadcastVariables(Callback):
    """Before the first step, gives every worker the chief's variables, and compares a hash of them.

    These are all variables: weights, BatchNorm statistics, seeds, optimizer slots and counters. So initial values that
    differ (random ones without a seed, a restore from a disk that only the chief has) become the same everywhere.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def on_fit_start(self, run: Run) -> None:
        own = [f"{variable.dtype.name}{list(variable.shape)} {variable.name}" for variable in run.variables]
        # Compared first: a broadcast of variables of other shapes would hang or fail without saying why.
        models = run.backend.gather_json(own)
        for rank, model in enumerate(models):
            for of_chief, of_rank in zip_longest(models[0], model, fillvalue="nothing"):
                if _form(of_chief) != _form(of_rank):
                    raise RuntimeError(
                        f"rank {rank} has built another model than the chief: {of_rank} where the chief has "
                        f"{of_chief}; look for code that depends on the rank"
                    )
        # All of them, also those that a seed makes equal: a restore may have read another file on each worker.
        run.backend.broadcast_variables(run.variables)
        run.check_replicas()


def _form(variable: str) -> str:
    """Dtype and shape; names may differ, since Keras counts them in each process."""
    return variable.split(" ")[0]
