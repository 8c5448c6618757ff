"""CSVLogger: one line of a CSV file for each epoch."""

from __future__ import annotations

import csv
import io
import itertools
import os
from pathlib import Path

from callbacks.arguments import check
from callbacks.base import Callback, Metrics, Run
from callbacks.files import UnsafeFileError, write_text
from callbacks.run_record.redaction import redact

# The names that a run itself uses in its directory.
_FILES = ("run.json", "journal.jsonl", "lock", "mlflow.json", "mlflow.lock", "report.html")
_DIRECTORIES = ("bad", "checkpoints", "evaluations.tmp", "model", "profile", "samples", "source", "tensorboard")


class CSVLogger(Callback):
    """Writes the metrics of each epoch to a CSV file, in columns after `epoch`, `step` and `examples`.

    Each time the whole file is written, so that a resumed run has each epoch once.

    Args:
        path: the file; a relative one lies in the run directory.
    """

    def __init__(self, path: str | Path = "metrics.csv") -> None:
        check(self, isinstance(path, str | Path) and Path(path).name != "", "give the path of a file", path=path)
        # The run makes its own directories later: with a file named `checkpoints`, it could save nothing.
        is_taken = os.path.normpath(path) in (*_FILES, *_DIRECTORIES)
        check(self, not is_taken, "the run has a file or directory of that name: give another one", path=path)
        self.path = Path(path)

    def on_setup(self, run: Run) -> None:
        path = run.directory / self.path
        if path.is_dir():  # known before the training, not at the end of the first epoch
            raise UnsafeFileError(path, "it is a directory")

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        history = redact(run.history)  # the task names its metrics, and a name may hold a secret
        columns = dict.fromkeys(itertools.chain.from_iterable(history))  # each once, in order
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, columns)
        table.writeheader()
        table.writerows(history)
        path = run.directory / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text.getvalue())
