"""Several hosts: `--hosts` over ssh between network namespaces, `mpirun`, Slurm's variables, and cluster manifests."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, TFLOOP, needs_horovod

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HERE, THERE = "10.79.0.1", "10.79.0.2"


def run(*command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, **more)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)


class Hosts:
    """Two network namespaces, joined by a cable, with an sshd in each."""

    def __init__(self, directory):
        self.names = [f"tfloop-{os.getpid()}-{each}" for each in "ab"]
        self.directory = directory
        self.daemons = []

    def inside(self, host, *command):
        return ["ip", "netns", "exec", self.names[host], *map(str, command)]

    def up(self):
        for name in self.names:
            run("ip", "netns", "add", name)
        a, b = self.names
        run("ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for host, address in enumerate((HERE, THERE)):
            etc = Path("/etc/netns", self.names[host])  # what is in it is laid over /etc there
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            run("ip", "-n", self.names[host], "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                run("ip", "-n", self.names[host], "link", "set", link, "up")
        for key in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / key)
        shutil.copy(self.directory / "user.pub", self.directory / "authorized")
        (self.directory / "sshd.conf").write_text(
            f"HostKey {self.directory}/host\nAuthorizedKeysFile {self.directory}/authorized\nStrictModes no\n"
            "UsePAM no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        (self.directory / "ssh.conf").write_text(
            f"IdentityFile {self.directory}/user\nUserKnownHostsFile {self.directory}/known\n"
            "StrictHostKeyChecking accept-new\nIdentitiesOnly yes\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in (0, 1):
            command = self.inside(host, SSHD, "-D", "-e", "-f", self.directory / "sshd.conf")
            self.daemons.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            assert "listening" in self.daemons[-1].stderr.readline()

    def down(self):
        for daemon in self.daemons:
            daemon.terminate()
            daemon.communicate(timeout=20)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def cable(self, state):
        run("ip", "-n", self.names[1], "link", "set", "cable", state)

    def processes(self, host):
        """What runs there, beside sshd."""
        found = {}
        for pid in run("ip", "netns", "pids", self.names[host]).split():
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return {pid: command for pid, command in found.items() if command and "sshd" not in command}

    def start(self, *arguments, **more):
        environment = {**os.environ, "TFLOOP_SSH": f"ssh -F {self.directory / 'ssh.conf'}", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            self.inside(0, *TFLOOP, *arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "ssh", "ssh-keygen", SSHD):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} isn't installed (apt-get install iproute2 openssh-client openssh-server)")
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    tried = subprocess.run(["ip", "netns", "add", made.names[0]], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"network namespaces aren't allowed here: {tried.stderr.strip()}")
    run("ip", "netns", "del", made.names[0])
    try:
        made.up()
        yield made
    finally:
        made.down()


@needs_horovod
def test_two_hosts_train_together(hosts, tmp_path):
    process = hosts.start(
        "train", "digits", "--hosts", f"{HERE}:1,{THERE}:1", "--steps", "90", "--track", "off", "--json"
    )
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    print(err)
    result = json.loads(out)
    assert (result["backend"], result["replicas"], result["steps"]) == ("horovod", 2, 90)
    assert not hosts.processes(1)


@pytest.mark.parametrize("engine", ["multiworker", "horovod"])
def test_a_host_that_is_cut_off_ends_the_job_and_is_named(hosts, tmp_path, engine):
    arguments = ["--hosts", f"{HERE}:1,{THERE}:1", "--backend", engine, "--epochs", "99999", "--eval-every", "never"]
    process = hosts.start("train", "digits", *arguments, "--track", "off", cwd=tmp_path)
    seen = []
    for line in process.stderr:
        seen.append(line)
        if " epoch 2/" in line:
            break
    assert process.poll() is None, seen
    assert len(hosts.processes(1)) == 2  # the agent and its worker
    hosts.cable("down")
    try:
        t0 = time.monotonic()
        _, err = process.communicate(timeout=60)
        print(time.monotonic() - t0, err)
        assert process.returncode == 1
        assert f"tfloop: error: host {THERE} is gone, and rank 1 with it: " in err.splitlines()[-1]
        wait_for(lambda: not hosts.processes(1))
        print(time.monotonic() - t0)
    finally:
        process.kill()
        hosts.cable("up")
