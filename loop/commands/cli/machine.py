"""`tfloop new`, `doctor` and `ui`: this directory and this machine."""

from __future__ import annotations

import os
import sys

from callbacks.run_record.redaction import redact, tell
from loop.commands import new as new_
from loop.commands.cli import options as typed
from loop.commands.cli.output import end, show
from loop.errors import UsageError
from loop.launch import machine, stderr


def new(name: typed.NewName) -> None:
    """Write a commented task file, NAME.py, that trains at once."""
    target = new_.new(name)
    print(f"wrote {target.partition(':')[0]}; train it: tfloop train {target}")


def doctor(as_json: typed.AsJson = False) -> None:
    """Say what works on this machine, and what to do about what doesn't."""
    with stderr.quiet_start():
        from loop.commands import doctor as doctor_

        findings = doctor_.examine()
    show(findings, [doctor_.table(findings)], as_json)
    end(all(finding["state"] != "broken" for finding in findings))


def ui(port: typed.Port = 5000, host: typed.Host = "127.0.0.1") -> None:
    """Start the MLflow UI on the default store."""
    from callbacks import files, side_process
    from callbacks.mlflow.tracker import default_uri
    from callbacks.mlflow.ui import STORE

    uri = default_uri()
    if uri.startswith(("http://", "https://")):
        raise UsageError(
            f"MLFLOW_TRACKING_URI={redact(uri)} is a server, which has a UI of its own: open it in a browser"
        )
    path = files.sqlite_path(uri)
    if path and not path.exists():
        raise UsageError(f"{path} isn't there: train something first, here")
    if not machine.port_is_free(host, port):
        free = machine.free_ports(1, host)[0]
        tell(f"port {port} is in use, taking {free}")
        port = free
    # Without the query, MLflow's page starts with its part for language models, where these runs aren't.
    # Said before the process is replaced: after that, this code prints nothing more.
    address = f"[{host}]" if ":" in host else host
    tell(f"MLflow UI: http://{address}:{port}/?workflowType=machine_learning  (Ctrl-C ends it)")
    command = [sys.executable, "-P", "-m", "callbacks.mlflow.ui", "--host", host, "--port", str(port)]
    os.environ |= {STORE: uri, "PYTHONPATH": side_process.search_path()}
    # MLflow starts four processes, and ends those that are slow to start: a busy machine never shows the page.
    os.environ.setdefault("MLFLOW_WORKERS", "1")
    # Nor are its jobs wanted, a dozen processes that evaluate language models.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted
