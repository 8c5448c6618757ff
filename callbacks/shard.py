"""ShardData: every replica gets its part of each global batch."""

from __future__ import annotations

from typing import ClassVar, Literal

from callbacks.arguments import check
from callbacks.base import Callback, Run
from callbacks.types import Data


class ShardData(Callback):
    """Gives each replica its part of the data, so that together they use each example once.

    Array data (`ArrayData`) is always split by example: replica r of R takes rows `r*n//R .. (r+1)*n//R` of each global
    batch of n examples. For a `tf.data.Dataset`:

    - `"example"` (what `"auto"` chooses): every worker reads the whole stream and keeps its rows of each global batch.
      Exact with any number of workers, but each of them reads everything. The stream must be the same on all of them.
    - `"file"`: each worker reads its own files (the data set must start from a list of files). Nothing is read twice,
      but which examples form a batch depends on the number of workers.
    - `"none"`: each worker reads the whole stream and trains on all of it. For a stream that is random, or that the
      task has already split by worker.

    Args:
        policy: `"auto"`, `"example"`, `"file"` or `"none"`.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"
    POLICIES = ("auto", "example", "file", "none")

    def __init__(self, policy: str = "auto") -> None:
        check(self, policy in self.POLICIES, f"give one of {', '.join(self.POLICIES)}", policy=policy)
        self.policy = "example" if policy == "auto" else policy

    def on_data(self, run: Run, data: Data) -> Data:
        return data.sharded(run.backend, self.policy)
