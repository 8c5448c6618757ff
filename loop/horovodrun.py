"""Horovod's own launcher for workers on this machine: `python -m loop.horovodrun N COMMAND...`.

`horovodrun` loads TensorFlow in the launcher to ask what Horovod was built with, and its rendezvous server listens on
all interfaces. This calls the same launcher without the first, and binds the second to loopback: that server asks
nobody who he is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from horovod.runner.common.util.settings import Settings
from horovod.runner.gloo_run import gloo_run
from horovod.runner.http import http_server

from loop.launch import die_with_parent

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


def on_loopback(server_factory: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """Starts a server on a free port of the loopback interface; in place of Horovod's `find_port`."""
    server = server_factory(("127.0.0.1", 0))
    return server, server.server_address[1]


def main(workers: int, command: list[str]) -> int:
    """Runs the command in N processes; returns 1 if one of them failed. The failure itself is the workers' to tell."""
    die_with_parent()
    http_server.find_port = on_loopback
    settings = Settings(hosts=f"localhost:{workers}", num_proc=workers, nics=[LOOPBACK], run_func_mode=False)
    try:
        gloo_run(settings, settings.nics, dict(os.environ), "127.0.0.1", command)
    except RuntimeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
