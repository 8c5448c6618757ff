"""The batch script of examples/cluster under Slurm itself, with two nodes. `python -m tests.campaigns.slurm`

Each node is a network namespace of this machine; they share its disk. There are two jobs. The first is told to end
while it trains, as before its time limit. From the second, Slurm takes the nodes away for a job of a higher priority.
Each must save, be queued again, go on, and come to the bits of `--workers 2`.

Needs root, and `apt-get install iproute2 munge slurm-wlm`. Takes some 3 minutes on two cores.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT, TFLOOP
from tests.launch.test_hosts import HERE, THERE, Hosts, run, wait_for

STEPS = 6000
"""Some 30 seconds of training: the script is stopped within them."""
BATCH = ("--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", "--output=out.txt")
CONFIGURATION = """
ClusterName=two
SlurmctldHost=one({here})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={directory}
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=one NodeAddr={here} CPUs=1
NodeName=two NodeAddr={there} CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A controller and two nodes, in two network namespaces."""

    def __init__(self, hosts, directory):
        self.hosts, self.directory = hosts, directory
        # `tfloop`, with a training that takes longer than that of the example.
        command = directory / "bin" / "tfloop"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {" ".join(map(str, TFLOOP))} "$@" --steps {STEPS} --seed 1 --track off\n')
        command.chmod(0o755)
        self.configuration = directory / "slurm.conf"
        self.configuration.write_text(CONFIGURATION.format(directory=directory, here=HERE, there=THERE))
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n{HERE} one\n{THERE} two\n")
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.configuration),
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def run(self, *command, host=0):
        """Runs a command on a node. (`ip netns exec` hides control groups, which slurmd looks for.)"""
        name = ("one", "two")[host]
        script = f'mount --bind {self.directory}/hosts /etc/hosts && hostname {name} && exec "$@"'
        inside = ["nsenter", f"--net=/run/netns/{self.hosts.names[host]}", "unshare", "--uts", "--mount"]
        return run(*inside, "sh", "-c", script, "sh", *command, env=self.environment, cwd=self.directory).strip()

    def start(self):
        self.run("slurmctld")
        for host, name in enumerate(("one", "two")):
            self.run("slurmd", "-N", name, host=host)
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        wait_for(lambda: set(self.run(*idle).split()) == {"one", "two"})

    def submit(self):
        """Submits the batch script; returns the number of the job once it trains."""
        job = self.run("sbatch", *BATCH, ROOT / "examples" / "cluster" / "slurm.sbatch")
        wait_for(lambda: "epoch 1" in self.output())
        return job

    def queued_again(self, job):
        """Waits until Slurm has queued the job again, and lets it start at once: Slurm would wait two minutes."""
        wait_for(lambda: "JobState=PENDING" in self.run("scontrol", "show", "job", job))
        assert "Restarts=1" in self.run("scontrol", "show", "job", job)
        self.run("scontrol", "update", f"jobid={job}", "starttime=now")

    def finished(self, job):
        """Waits for the end of a job that has gone on; returns the hash of its weights."""
        wait_for(lambda: "JobState=COMPLETED" in self.run("scontrol", "show", "job", job), 240)
        assert "going on from step" in self.output()
        stopped, result = [line for line in self.output().splitlines() if "weights_sha256" in line]
        assert json.loads(stopped)["status"] == "preempted"
        return json.loads(result)["weights_sha256"]

    def output(self):
        path = self.directory / "out.txt"
        return path.read_text() if path.exists() else ""


def weights_of_two_workers(directory):
    """The hash of the weights, of the same training without Slurm."""
    command = [*TFLOOP, "train", "digits", "--backend=multiworker", "--workers=2", f"--steps={STEPS}", "--seed=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run(*command, "--track=off", "--threads=1", "--json", cwd=directory, env=environment)
    return json.loads(done)["weights_sha256"]


@contextlib.contextmanager
def cluster():
    """Slurm on two nodes, with a directory of its own."""
    if subprocess.run(["munge", "-n"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        run("runuser", "-u", "munge", "--", "/usr/sbin/munged")
    with tempfile.TemporaryDirectory(prefix="tfloop-slurm-", ignore_cleanup_errors=True) as name:
        hosts = Hosts(Path(name))
        try:
            hosts.network()
            slurm = Slurm(hosts, Path(name))
            slurm.start()
            yield slurm
        finally:
            hosts.down()


def main():
    for tool in ("ip", "munge", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} isn't installed: apt-get install iproute2 munge slurm-wlm")
    with cluster() as slurm:
        wanted = weights_of_two_workers(slurm.directory)
        # As `--signal=TERM@120` does before the time limit: the tasks have the signal, and not the script.
        job = slurm.submit()
        slurm.run("scancel", "--signal=TERM", job)
        slurm.queued_again(job)
        stopped = slurm.finished(job)
        print(f"told to end: {'the same bits' if stopped == wanted else 'OTHER WEIGHTS'}", flush=True)
        (slurm.directory / "out.txt").unlink()
        job = slurm.submit()
        slurm.run("sbatch", "--partition=high", "--nodes=2", "--wrap=sleep 5")
        slurm.queued_again(job)
        preempted = slurm.finished(job)
        print(f"preempted: {'the same bits' if preempted == wanted else 'OTHER WEIGHTS'}")
    return stopped != wanted or preempted != wanted


if __name__ == "__main__":
    sys.exit(main())
