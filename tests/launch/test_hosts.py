"""Several hosts: `--hosts` over ssh between network namespaces, and `mpirun`."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import cli
from loop import UsageError
from loop.launch import host_agent, schedulers
from loop.launch import ssh as ssh_
from loop.launch.environment import JOB, LAUNCHER
from loop.launch.host_slots import read_hosts
from loop.launch.hosts import Cluster, Host
from tests import launchers
from tests.campaigns.elastic import OPTIONS, TASK
from tests.conftest import ROOT, TFLOOP, needs_horovod

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HERE, THERE = "10.79.0.1", "10.79.0.2"


def run(*command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, **more)
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

    def network(self):
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

    def sshd(self):
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
        for name in self.names:  # with connections that don't know yet that they were cut
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in inside.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for daemon in self.daemons:
            daemon.communicate(timeout=20)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def cable(self, state):
        run("ip", "-n", self.names[1], "link", "set", "cable", state)
        if state == "up":  # the other end learns of it later
            try_it = self.inside(0, "bash", "-c", f"exec 2>/dev/null; </dev/tcp/{THERE}/22")
            wait_for(lambda: subprocess.run(try_it).returncode == 0)

    def processes(self, host):
        """What runs there, beside sshd."""
        found = {}
        for pid in run("ip", "netns", "pids", self.names[host]).split():
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return {pid: command for pid, command in found.items() if command and "sshd" not in command}

    def start(self, *arguments, **more):
        environment = {
            **os.environ,
            "DEMO_API_KEY": "not-for-everybody",
            "TFLOOP_SSH": f"ssh -F {self.directory / 'ssh.conf'}",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.Popen(
            self.inside(0, *TFLOOP, *arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    need("ip")
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        try:
            made.network()
        except (AssertionError, OSError) as error:
            pytest.skip(f"network namespaces aren't allowed here: {error}")
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def hosts(network):
    need("ssh", "ssh-keygen", SSHD)
    network.sshd()
    return network


def need(*tools):
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} isn't installed (apt-get install iproute2 openssh-client openssh-server)")


@needs_horovod
def test_two_hosts_train_together(hosts, tmp_path):
    options = f"--hosts {HERE}:1,{THERE}:1 --steps 90 --track off --json"
    process = hosts.start("train", "digits", *options.split(), cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert (result["backend"], result["replicas"], result["steps"]) == ("horovod", 2, 90)
    assert not hosts.processes(1)


def test_a_host_that_is_cut_off_ends_the_job_and_is_named(hosts, tmp_path):
    options = f"--hosts {HERE}:1,{THERE}:1 --backend multiworker --epochs 99999 --eval-every never --track off"
    process = hosts.start("train", "digits", *options.split(), cwd=tmp_path)
    seen = []
    for line in process.stderr:
        seen.append(line)
        if " epoch 1/" in line:
            break
    assert process.poll() is None, seen
    _, worker_there = sorted(hosts.processes(1), key=int)  # behind the agent, which has started it
    assert b"DEMO_API_KEY=not-for-everybody" in Path(f"/proc/{worker_there}/environ").read_bytes()
    assert "not-for-everybody" not in str([hosts.processes(host) for host in (0, 1)])
    hosts.cable("down")
    try:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 1
        assert f"tfloop: error: host {THERE} is gone, and rank 1 with it: " in err.splitlines()[-1]
        wait_for(lambda: not hosts.processes(1))
    finally:
        process.kill()
        hosts.cable("up")


@needs_horovod
def test_an_elastic_job_goes_on_without_the_host_that_is_cut_off(hosts, tmp_path, monkeypatch):
    """The chief is there: the worker here takes over, from what it has in memory."""
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.setenv("ELASTIC_GO", str(tmp_path / "go"))
    options = f"--hosts {THERE}:1,{HERE}:1 --elastic 1:2 --run-dir run {' '.join(OPTIONS)}"
    process = hosts.start("train", "task.py:Held", *options.split(), cwd=tmp_path)

    def events(event):
        path = tmp_path / "run" / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        assert process.poll() is None, process.stderr.read()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    try:
        wait_for(lambda: events("steps_end"))
        hosts.cable("down")
        wait_for(lambda: len(events("fit_start")) == 2)
        [gone], [_, restored] = events("worker_gone"), events("restore")
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        hosts.cable("up")
        for pid in hosts.processes(1):  # these would end by themselves, as above
            os.kill(int(pid), signal.SIGKILL)
    assert process.returncode == 0, err
    assert (json.loads(out)["status"], json.loads(out)["steps"]) == ("finished", 12 * 101)
    assert (gone["worker"], gone["how"].partition(":")[0]) == ("0", f"host {THERE} is gone")
    assert restored["checkpoint"]
    assert f"elastic: worker 0 on {THERE} is gone: host {THERE} is gone: " in err
    assert "elastic: going on with 1 worker" in err


@pytest.mark.parametrize(
    ("launcher", "backend"), [("SkyPilot", "multiworker"), pytest.param("Kubernetes", "horovod", marks=needs_horovod)]
)
def test_one_worker_on_each_host_by_variables_alone(launcher, backend, network, tmp_path):
    """What SkyPilot sets on a node; and what a pod has, with the names that a headless service gives pods."""
    processes = []
    for rank in (0, 1):
        environment = {
            "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": f"{HERE}\n{THERE}", "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        }  # fmt: skip
        if launcher == "Kubernetes":
            environment = {
                "JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"run-{rank}", "TFLOOP_SERVICE": "pods",
                "TFLOOP_PODS": "2",
            }  # fmt: skip
            with Path("/etc/netns", network.names[rank], "hosts").open("a") as known:
                known.write(f"{HERE} run-0.pods\n{THERE} run-1.pods\n")
        command = network.inside(
            rank, *TFLOOP, "train", "digits", "--steps", 5, "--backend", backend, "--track", "off", "--json"
        )
        environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    result = json.loads(outputs[0][0])
    assert (result["backend"], result["replicas"], result["steps"]) == (backend, 2, 5)


def launched(command, cwd, **more):
    """Runs workers that find each other by themselves; gives the result of the chief, the only one."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, **more)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "weights_sha256" in line]
    return json.loads(line)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun isn't installed (apt-get install openmpi-bin)")
def test_mpirun_is_joined(tmp_path):
    """With Horovod as it is built here; a build with MPI is in docs/scale-out.md."""
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "2",
        *TFLOOP,
        "train",
        "digits",
    ]
    result = launched([*command, "--steps", "5", "--track", "off", "--json"], tmp_path)
    engine = "horovod" if schedulers.horovod_has_mpi() else "multiworker"
    assert (result["backend"], result["replicas"], result["steps"]) == (engine, 2, 5)


def test_mpirun_on_two_hosts(hosts, tmp_path):
    """Two workers on each of two namespaces; Adasum ends, too."""
    need("mpirun", "unshare")
    if not schedulers.horovod_has_mpi():
        pytest.skip("Horovod was built without MPI")
    # Of hosts with the same name, Open MPI confuses the workers.
    named = ["unshare", "--uts", "sh", "-c", 'hostname node0; exec "$@"', "sh"]
    shell = f"ssh -F {hosts.directory / 'ssh.conf'}"
    mca = {"btl_tcp_if_include": "cable", "oob_tcp_if_include": "cable", "plm_rsh_agent": shell}
    options = [text for name, value in mca.items() for text in ("--mca", name, value)]
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", "4", "--host", f"{HERE}:2,{THERE}:2"]
    train = [*TFLOOP, "train", "digits", "--steps=5", "--seed=1", "--track=off", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def loss(*more):
        command = [*named, *mpirun, *options, "-x", "PATH", "-x", "PYTHONPATH", *train, *more]
        result = launched(hosts.inside(0, *command), tmp_path, env=environment)
        assert (result["backend"], result["replicas"], result["steps"]) == ("horovod", 4, 5)
        return result["metrics"]["loss"]

    here = launched([*train, "--workers=4"], tmp_path)["metrics"]["loss"]
    # MPI adds up in another order than Gloo: a sum of 4 numbers in float32 differs by some 1e-7 of it.
    assert loss() == pytest.approx(here, rel=1e-6)
    assert loss("--reduction=adasum") != here


def test_parts_of_a_job_that_know_nothing_of_each_other_do_not_train(tmp_path):
    """Variables of a launcher whose MPI is not Horovod's."""
    if not schedulers.horovod_has_mpi():
        pytest.skip("Horovod was built without MPI")
    processes = launchers.start("jsrun", tmp_path, *launchers.STEPS, "--backend=horovod")
    errors = [process.communicate(timeout=200)[1].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert all("Horovod's MPI has 1 of the 2 workers that were started: it isn't the MPI of" in text for text in errors)


@given(st.dictionaries(st.from_regex(r"(root@)?[a-z0-9][a-z0-9.]{0,5}", fullmatch=True), st.integers(1, 9), min_size=2))
@settings(max_examples=30, deadline=None)
def test_hosts_are_read(places):
    text = ",".join(f"{name}:{slots}" if slots > 1 else name for name, slots in places.items())
    assert read_hosts(text, None, "auto", None, None) == places


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a:2,,b"], "--hosts a:2,,b: '' can't be read: give name:workers"),
        (["--hosts", "a:2,-oProxyCommand=x:1"], "'-oProxyCommand=x:1' can't be read"),
        (["--hosts", "a:0,b:2"], "'a:0' can't be read"),
        (["--hosts", "a:2,b:" + "1" * 5000], f"'b:{'1' * 5000}' can't be read"),
        (["--hosts", "a:1,a:1"], "a is there twice"),
        (["--hosts", "a"], "that is one worker in all"),
        (["--hosts", "a:2", "--workers", "3"], "--workers 3, but --hosts a:2 has 2"),
        (["--hosts", "a:2", "--backend", "mirrored"], "--hosts with --backend mirrored: use horovod or multiworker"),
        (["--interface", "eth0"], "--interface eth0 is of use with --hosts alone"),
        (
            ["--hosts", "a:2,b:2", "--elastic", "1:3"],
            "--hosts a:2,b:2 has 4 workers, with --elastic 1:3: give a number",
        ),
        (["--hosts", "a,b", "--elastic", "1:2", "--discovery", "room"], "--discovery room with --hosts a,b: "),
    ],
)
def test_bad_options(arguments, message):
    done = CliRunner().invoke(cli.app, ["train", "digits", *arguments])
    assert message in str(done.exception)
    assert isinstance(done.exception, UsageError)


@pytest.mark.parametrize(
    ("ssh", "message"),
    [
        ("'", "TFLOOP_SSH=' can't be read .No closing quotation"),
        ("/dev/null", "--hosts needs /dev/null, which can't be run here .Permission denied"),
        ("/no/ssh -4", "--hosts needs /no/ssh, which can't be run here .No such file"),
    ],
)
def test_what_is_no_ssh(ssh, message, monkeypatch):
    monkeypatch.setenv("TFLOOP_SSH", ssh)
    with pytest.raises(UsageError, match=message):
        ssh_.open_agent("h1", None)
    monkeypatch.setenv("TFLOOP_SSH", "")
    assert ssh_.command("h1", "python")[:2] == ["ssh", "-T"]


def test_a_name_that_is_no_host_name_is_none_of_this_machine():
    """Python's error for two dots side by side isn't the one for a name that is unknown."""
    assert host_agent.resolve("a..b") is None


def test_hosts_that_cannot_take_part_are_named_each_with_its_reason(hosts, tmp_path):
    """There: another TensorFlow by its metadata, and an empty directory over the one that has the task."""
    (tmp_path / "task.py").write_text("from loop import TrainTask\n\n\nclass Own(TrainTask):\n    pass\n")
    other = tmp_path.parent / f"{tmp_path.name}-there"
    (other / "tensorflow-0.1.dist-info").mkdir(parents=True)
    (other / "tensorflow-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorflow\nVersion: 0.1\n"
    )
    (other / "python").write_text(
        f"#!/bin/sh\nPYTHONPATH={other}:$PYTHONPATH\nexec unshare -m sh -c "
        f'\'mount -t tmpfs none {tmp_path} && exec {sys.executable} "$@"\' sh "$@"\n'
    )
    (other / "python").chmod(0o755)
    places = f"{HERE}:1,{THERE}:1,10.79.0.9:1"
    arguments = ["--hosts", places, "--remote-python", other / "python", "--start-timeout", "6"]
    process = hosts.start("train", "task.py:Own", *arguments, cwd=tmp_path)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2
    line = err.splitlines()[-1]
    version = importlib.metadata.version("tensorflow")
    assert f"{THERE}: has tensorflow 0.1, but here it is {version}: install the same; " in line
    assert f"{THERE}: has no task.py:Own in {tmp_path}: copy it there; " in line
    assert re.search(r"10\.79\.0\.9: can't be reached: ", line)
    assert f"error: {THERE}" in line  # nothing is said of this one
    wait_for(lambda: not hosts.processes(1))


def host_that_prints(code):
    """A host whose agent is this program."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Host("localhost", 1, subprocess.Popen([sys.executable, "-c", code], **pipes))


def closed(host):
    for thread in host.threads:
        thread.join(60)
        assert not thread.is_alive()
    for stream in (host.process.stdin, host.process.stdout, host.process.stderr):
        with contextlib.suppress(OSError):  # what was not sent to a program that has ended
            stream.close()


def test_a_connection_that_ends_within_a_message_is_a_lost_host():
    """Its thread failed, and the host was lost after 20 seconds, with another reason."""
    host = host_that_prints(f"print({host_agent.MARK!r} + '{{\"line\": \"cut', end='')")
    closed(host)
    assert host.lost == "can't be reached: exit code 0"


def test_a_host_is_not_silent_while_its_line_waits_for_stderr(monkeypatch):
    """A pager that was not read on for 20 seconds ended the job."""
    monkeypatch.setattr(host_agent, "SILENCE", 0.05)
    monkeypatch.setattr(host_agent, "BEAT", 0.05)
    shows, goes_on = threading.Event(), threading.Event()
    host = host_that_prints(f'input(); print({host_agent.MARK!r} + \'{{"line": "", "rank": 0}}\', flush=True); input()')
    host._show = lambda line, source: shows.set() or goes_on.wait(60)
    host.answered.set()
    host.heard = float("inf")  # it starts
    cluster = Cluster([host])
    watching = threading.Thread(target=cluster.watch)
    watching.start()  # its first sign of life is the first line that the program reads
    try:
        assert shows.wait(60)
        time.sleep(10 * host_agent.SILENCE)
        assert host.lost == ""
    finally:
        cluster._closed.set()
        watching.join()
        goes_on.set()
        host.process.kill()
        closed(host)


def test_an_agent_waits_for_its_first_message_until_the_launcher_has_started_all(tmp_path):
    """With names that took long to resolve, the agents of the first hosts had given up when they were asked."""
    code = (
        "from loop.launch import host_agent\nhost_agent.SILENCE = 0.05\nprint('waits', flush=True)\nhost_agent.main()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"waits\n"
        time.sleep(0.5)
        ask = {"directory": str(tmp_path), "files": [], "interface": None, "slots": 1}
        out, _ = process.communicate(json.dumps({"ask": ask}).encode() + b"\n", timeout=240)
    assert b'"answer"' in out


def test_an_agent_runs_workers_and_ends_them_when_its_launcher_is_gone(tmp_path):
    command = [sys.executable, "-P", "-m", "loop.launch.host_agent"]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(process.kill)

        def tell(**message):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()

        def hear(name):
            for line in process.stdout:
                assert line.startswith(host_agent.MARK.encode()), line
                message = json.loads(line[len(host_agent.MARK) :])
                if name in message:
                    return message
            raise AssertionError(f"ended without {name}")

        tell(ask={"directory": str(tmp_path), "files": ["digits", "no.py:Task"], "interface": None, "slots": 2})
        answer = hear("answer")["answer"]
        assert answer["versions"] == host_agent.versions()
        assert answer["files"] == {"digits": host_agent.digest("digits"), "no.py:Task": None}
        assert len(set(answer["ports"])) == 2
        places = {rank: {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2"} for rank in (0, 1)}
        tell(start={"environment": {}, "arguments": ["train", "digits"], "places": places})
        pids = [int(hear("file")["text"]) for _ in places]
        tell(signal=signal.SIGKILL, rank=1)
        assert hear("ended") == {"ended": -signal.SIGKILL, "rank": 1}
        process.stdin.close()
        process.wait(timeout=240)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_worker_s_files_are_never_seen_half_written(tmp_path):
    """An agent sends a file when it sees it. It has sent a worker's process number that was still empty."""
    code = """
import sys
from loop.launch.worker import reporting

written = set()

def hear(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+"):
        written.add(str(arguments[0]).rpartition("/")[2])

sys.addaudithook(hear)
with reporting() as report:
    report(0)
print(*sorted(written))
"""
    environment = {
        **os.environ,
        JOB: str(tmp_path),
        LAUNCHER: str(os.getpid()),
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "1",
    }
    written = run(sys.executable, "-c", code, cwd=ROOT, env=environment).split()
    assert written == ["rank-0.json.tmp", "rank-0.pid.tmp"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-0.json", "rank-0.pid"]
