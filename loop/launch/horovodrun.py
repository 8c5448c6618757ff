"""Horovod's rendezvous for our workers; with workers on this machine: `python -m loop.launch.horovodrun N COMMAND...`.

`horovodrun` itself isn't used. It loads TensorFlow in the launcher, its rendezvous server listens on all interfaces,
and it puts two processes around each worker, which hide how the worker died. Here the same server, which authenticates
no client, is bound to loopback, or to the one address where the hosts of a job meet. The caller starts the workers.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

from loop.launch.rendezvous import serve

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


@contextlib.contextmanager
def rendezvous(
    workers: int, cluster: Cluster | None = None, shares: Mapping[str, int] | None = None
) -> Iterator[list[dict[str, str]]]:
    """Within it, serves the rendezvous; yields the environment variables of each worker, by rank.

    Args:
        workers: how many there are.
        cluster: the hosts that they are on; None: this machine.
        shares: how many workers each host has, by its address; None: as many as its slots.
    """
    address = "127.0.0.1"
    interfaces = {"localhost": LOOPBACK}
    if cluster is not None:
        address = cluster.address
        interfaces = cluster.interfaces()
        shares = shares or cluster.shares()
    shares = shares or {"localhost": workers}
    hosts = ",".join(f"{host}:{count}" for host, count in shares.items())
    slots = get_host_assignments(parse_hosts(hosts), workers)
    server = serve(address, 0, slots)
    port = server.server_address[1]
    places = []
    for slot in slots:
        place = create_run_env_vars(address, [interfaces[slot.hostname]], port) | create_slot_env_vars(slot)
        places.append({name: str(value) for name, value in place.items()})
    try:
        yield places
    finally:
        server.shutdown()
        server.server_close()


def main(workers: int, command: list[str]) -> int:
    """Runs the command in N processes; returns 1 if one of them failed, which prints its failure itself."""
    with rendezvous(workers) as places:
        processes = [subprocess.Popen(command, env={**os.environ, **place}) for place in places]
        while True:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:  # one has failed, or all have ended
                break
            time.sleep(0.1)
        for process in processes:  # has no effect on those that have ended
            process.terminate()
        return max(process.wait() != 0 for process in processes)  # not `any`, which wouldn't wait for all of them


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
