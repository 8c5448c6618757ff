"""A Ray cluster of three nodes with a CPU each, on loopback, whose raylets can be killed."""

import contextlib
import os
import subprocess
import sys
import tempfile

from tests.conftest import ROOT

HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 2000}
"""How soon a node is found to be dead: by default, after 15 s."""
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
HEAD = NODE | {"_system_config": HEALTH}

_CODE = f"""
import os, signal, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={HEAD})
nodes = [cluster.add_node(wait=False, **{NODE}) for _ in range(2)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    os.kill(nodes.pop().all_processes['raylet'][0].process.pid, signal.SIGKILL)
    nodes.append(cluster.add_node(wait=False, **{NODE}))
cluster.shutdown()
"""


class Nodes:
    """The nodes of a cluster.

    Attributes:
        address: of its head.
    """

    def __init__(self, process):
        self._process = process
        self.address = process.stdout.readline().strip()
        assert self.address.startswith("127.0.0.1:")

    def replace_one(self):
        """Kills the raylet that came last with -9, and has another node join."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def nodes():
    """Within it, the cluster runs, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-c", _CODE],
            cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield Nodes(process)
        finally:
            process.stdin.close()
            process.wait(timeout=60)
