"""The server where Horovod's workers meet."""

from __future__ import annotations

import os
import threading

from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from loop.errors import UsageError
from loop.launch.environment import horovod_meets_at, job_rank
from loop.launch.places import PORTS
from loop.launch.schedulers import HOSTS


def serve_job() -> None:
    """In rank 0 of a job that an outside launcher has started: serves its rendezvous until this process ends.

    Raises:
        UsageError: this worker's address, or its port there, can't be used.
    """
    place = horovod_meets_at()
    if place is None or HOSTS not in os.environ or job_rank() != 0:  # another launcher's own server, or rank 0, serves
        return
    address, port = place
    slots = get_host_assignments(parse_hosts(os.environ[HOSTS]), int(os.environ["HOROVOD_SIZE"]))
    try:
        serve(address, port, slots)
    except OSError as error:
        raise UsageError(
            f"Horovod's workers meet at {address}:{port}, where rank 0 can't listen ({error.strerror}): set {PORTS} to "
            "another port for all workers, or use --backend multiworker"
        ) from None


def serve(address: str, port: int, slots: list[SlotInfo]) -> RendezvousHTTPServer:
    """The server for workers in these slots, in a thread; port 0: any that is free."""
    server = RendezvousHTTPServer((address, port), RendezvousHandler, 0)
    server.init(slots)  # before it serves: it answers the workers by these slots
    threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
    return server
