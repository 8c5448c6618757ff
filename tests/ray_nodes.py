"""A Ray cluster of three nodes with a CPU each, on loopback, whose raylets can be killed."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT

HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 2000}
"""How soon a node is found to be dead: by default, after 15 s."""
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
HEAD = NODE | {"_system_config": HEALTH}

_CODE = f"""
import json, os, signal, sys, tempfile
from ray.cluster_utils import Cluster
head = {HEAD} | json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args=head | dict(temp_dir=tempfile.mkdtemp(dir=os.getcwd())))
def node():
    # A directory of its own, as on a machine of its own: else a node that joins makes anew what the others work in.
    return cluster.add_node(wait=False, temp_dir=tempfile.mkdtemp(dir=os.getcwd()), **{NODE})
nodes = [node(), node()]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    os.kill(nodes.pop().all_processes['raylet'][0].process.pid, signal.SIGKILL)
    nodes.append(node())
cluster.shutdown()
"""


class Nodes:
    """The nodes of a cluster.

    Attributes:
        address: of its head.
        directory: its processes work in it.
    """

    def __init__(self, process, directory):
        self._process = process
        self.directory = Path(directory)
        self.address = process.stdout.readline().strip()
        assert self.address.startswith("127.0.0.1:")

    def replace_one(self):
        """Kills the raylet that came last with -9, and has another node join."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()


def _environment(directory):
    """What the processes of a cluster need to know."""
    # Ray writes the head's address into its default directory, which it doesn't make where nodes have their own.
    (Path(directory) / "ray").mkdir()
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": directory}


@contextlib.contextmanager
def nodes(**head):
    """Within it, the cluster runs, in a process of its own.

    Args:
        head: what its head has besides, or other than, a CPU; see `ray.cluster_utils`.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(head)],
            cwd=directory, env=_environment(directory), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield Nodes(process, directory)
        finally:
            process.stdin.close()
            process.wait(timeout=240)
