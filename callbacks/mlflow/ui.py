"""The MLflow UI: the process that `tfloop ui` becomes. It opens the store before MLflow does, whose errors are long."""

from __future__ import annotations

import os
import signal
import sys

from callbacks.mlflow.delivery import client_of, reason
from callbacks.run_record.redaction import redact, tell

STORE = "MLFLOW_BACKEND_STORE_URI"
"""The variable with the store's URI: it may hold a password, and all users can see a command line."""


def main() -> None:
    """Runs `mlflow ui` with the arguments of this process; exit code 2: the store can't be opened."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports silently; MLflow handles it afterwards
    store = os.environ[STORE]
    try:
        client_of(store)
    except Exception as error:  # a store may fail in any way
        tell(f"tfloop: error: MLflow can't open {redact(store)} ({reason(error)})")
        sys.exit(2)
    # MLflow passes only SIGTERM and SIGINT on to its server, which would be left alone.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    from mlflow.cli import cli

    cli.main(["ui", *sys.argv[1:]], prog_name="mlflow")


if __name__ == "__main__":
    main()
