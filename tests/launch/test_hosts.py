"""Several hosts: `--hosts` over ssh between network namespaces, `mpirun`, Slurm's variables, and cluster manifests."""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import cli
from loop import UsageError
from loop.launch import host_agent, machine, schedulers
from loop.launch import ssh as ssh_
from loop.launch.environment import read_tf_config, tf_cluster
from loop.launch.host_slots import read_hosts
from tests.campaigns.elastic import OPTIONS, TASK
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
        for host in range(len(self.daemons)):  # with connections that don't know yet that they were cut
            for pid in run("ip", "netns", "pids", self.names[host]).split():
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
def hosts(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "ssh", "ssh-keygen", SSHD):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} isn't installed (apt-get install iproute2 openssh-client openssh-server)")
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        try:
            made.network()
        except (AssertionError, OSError) as error:
            pytest.skip(f"network namespaces aren't allowed here: {error}")
        made.sshd()
        yield made
    finally:
        made.down()


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
        _, err = process.communicate(timeout=60)
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
        out, err = process.communicate(timeout=60)
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


def launched(command, cwd):
    """Runs workers that find each other by themselves; gives the result of the chief, the only one."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
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


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "3527409665",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "n[09-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
}  # fmt: skip


@pytest.mark.parametrize("mpi", [True, False])
def test_places_under_mpirun(mpi, monkeypatch):
    monkeypatch.setattr(schedulers, "horovod_has_mpi", lambda: mpi)
    if mpi:
        assert schedulers.place("auto", OPEN_MPI) == {
            "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"
        }  # fmt: skip
    else:
        place = schedulers.place("auto", OPEN_MPI)
        assert read_tf_config(place["TF_CONFIG"]) == (1, 2)
        assert re.findall(r"127\.0\.0\.1:\d+", place["TF_CONFIG"])
    assert "TF_CONFIG" in schedulers.place("multiworker", OPEN_MPI)
    assert schedulers.place("auto", {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) == {}


def test_places_under_srun():
    place = schedulers.place("auto", SLURM)
    rank, addresses = tf_cluster(place["TF_CONFIG"])
    base = 10_000 + 256 * (4713 % 88)
    assert rank == 2
    assert list(addresses.values()) == [f"n09:{base}", f"n09:{base + 1}", f"n10:{base}"]
    assert place["TFLOOP_LOCAL_RANK"] == "0"
    alone = SLURM | {
        "SLURM_STEP_NODELIST": "n09",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "0",
    }
    assert "127.0.0.1" in schedulers.place("auto", alone | {schedulers.PORTS: "4000"})["TF_CONFIG"]
    assert schedulers.place("auto", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}) == {}  # the script of a batch job


@pytest.mark.parametrize(
    ("backend", "environment", "message"),
    [
        ("horovod", OPEN_MPI, "but Horovod is built without MPI: build it with MPI"),
        ("auto", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "on several hosts, of which 1 are here"),
        ("auto", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK=one"),
        ("auto", {name: OPEN_MPI[name] for name in OPEN_MPI if name != "PMIX_NAMESPACE"}, "set TFLOOP_PORT_BASE"),
        ("auto", OPEN_MPI | {"TFLOOP_PORT_BASE": "80"}, "TFLOOP_PORT_BASE=80: give a port"),
        ("horovod", SLURM, "backend='horovod' under srun"),
        ("auto", SLURM | {"SLURM_LOCALID": "1"}, "srun --distribution=block"),
        ("auto", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3"}, "contradict each other"),
        ("auto", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2+1"}, "SLURM_STEP_TASKS_PER_NODE=2.1: it must be like"),
        ("auto", SLURM | {"SLURM_STEP_NODELIST": "n[9-"}, "the node list 'n.9-' can't be read"),
        ("auto", {name: SLURM[name] for name in SLURM if name != "SLURM_NODEID"}, "SLURM_NODEID isn't set"),
    ],
)
def test_jobs_that_cannot_be_joined(backend, environment, message, monkeypatch):
    monkeypatch.setattr(schedulers, "horovod_has_mpi", lambda: False)
    monkeypatch.setattr(machine, "horovod_missing", lambda: None)
    with pytest.raises(UsageError, match=message):
        schedulers.place(backend, environment)


word = st.text("abcxyz-", min_size=1, max_size=4)
ranges = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=3)


@given(st.lists(st.lists(st.tuples(word, ranges | st.none()), min_size=1, max_size=2), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_node_lists_are_expanded(names):
    """Compressed names beside what they stand for, both made from the same parts."""
    texts, expected = [], []
    for parts in names:
        text, stands_for = "", [""]
        for letters, numbers in parts:
            text += letters
            values = [""]
            if numbers is not None:
                text += "[" + ",".join(f"{a:0{w}}-{a + n:0{w}}" if n else f"{a:0{w}}" for a, n, w in numbers) + "]"
                values = [str(a + i).zfill(max(w, len(str(a)))) for a, n, w in numbers for i in range(n + 1)]
            stands_for = [name + letters + value for name in stands_for for value in values]
        texts.append(text)
        expected += stands_for
    assert schedulers.node_list(",".join(texts)) == expected


@given(st.text("ab[]-,19 ", max_size=12))
@settings(max_examples=100, deadline=None)
def test_node_lists_are_read_or_refused(text):
    names = []
    with contextlib.suppress(UsageError):
        names = schedulers.node_list(text)
    assert all(name and not set(name) & set("[], ") for name in names)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_task_counts(counts):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in counts)
    assert schedulers.task_counts(text) == [count for count, times in counts for _ in range(times)]


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


def fits(value, schema, definitions):
    """Whether a value is as a JSON schema says, as far as ours says anything."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    assert isinstance(value, kinds[schema["type"]]) if "type" in schema else True, f"{value!r} is no {schema['type']}"
    assert "enum" not in schema or value in schema["enum"], f"{value!r} is none of {schema['enum']}"
    assert "pattern" not in schema or re.search(schema["pattern"], value), f"{value!r} is not like {schema['pattern']}"
    assert "minimum" not in schema or value >= schema["minimum"], f"{value!r} is less than {schema['minimum']}"
    if "$ref" in schema:
        fits(value, definitions[schema["$ref"]], definitions)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        assert set(schema.get("required", [])) <= set(value), (
            f"{schema['required']} are required, not only {list(value)}"
        )
        assert schema.get("additionalProperties", True) or set(value) <= set(properties), f"unknown: {list(value)}"
        for name, each in value.items():
            fits(each, properties.get(name, {}), definitions)
    if isinstance(value, list):
        for each in value:
            fits(each, schema.get("items", {}), definitions)


MANIFESTS = sorted((ROOT / "examples" / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schema_and_the_command_line(path):
    schema = json.loads((ROOT / "tests" / "kubeflow.schema.json").read_text())
    manifest = yaml.safe_load(path.read_text())
    fits(manifest, schema, schema["definitions"])
    for command in re.findall(r"\[(tfloop, .*)\]", path.read_text()):
        check_command(command.split(", "))
    replicas = next(specs for name, specs in manifest["spec"].items() if name.endswith("ReplicaSpecs"))
    for place, wrong in (
        (manifest["spec"], {"replicas": 4}),
        (replicas["Worker"], {"replicas": 0}),
        (replicas, {"Ps": {}}),
    ):
        kept = dict(place)
        place.update(wrong)
        with pytest.raises(AssertionError):
            fits(manifest, schema, schema["definitions"])
        place.clear()
        place.update(kept)


def check_command(words):
    """That `tfloop train` has all these options."""
    assert words[:2] == ["tfloop", "train"]
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {name for each in typer.main.get_group(cli.app).commands["train"].params for name in each.opts}
    assert options <= known


def test_the_batch_script_is_one():
    path = ROOT / "examples" / "cluster" / "slurm.sbatch"
    run("bash", "-n", path)
    line = path.read_text().replace("\\\n", "").splitlines()[-1]
    check_command(shlex.split(line[line.index("tfloop train") :]))


@pytest.mark.parametrize("script", ["two-hosts.sh", "tf-config.sh"])
def test_scripts_for_two_hosts_type_what_tfloop_knows(script, tmp_path):
    """`tfloop` here prints what it is called with: that the commands themselves work is tested above, and elsewhere."""
    path = ROOT / "examples" / "cluster" / script
    (tmp_path / "tfloop").write_text('#!/bin/sh\necho "$TF_CONFIG"; for word in tfloop "$@"; do echo "$word"; done\n')
    (tmp_path / "tfloop").chmod(0o755)
    more = {"env": os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}
    hosts = ["h1", "h2"] if script == "two-hosts.sh" else ["1", "h1:2222", "h2:2222"]
    variable, *words = run(path, *hosts, "--epochs", 3, **more).splitlines()
    check_command(words)
    assert words[-2:] == ["--epochs", "3"]
    if script == "two-hosts.sh":
        assert read_hosts(words[words.index("--hosts") + 1], None, "auto", None, None) == {"h1": 1, "h2": 1}
    else:
        task = {"type": "worker", "index": 1}
        assert json.loads(variable) == {"cluster": {"worker": ["h1:2222", "h2:2222"]}, "task": task}
    lacking = subprocess.run([path, hosts[0]], capture_output=True, text=True, timeout=60, **more)
    assert lacking.returncode
    assert "give " in lacking.stderr


def test_hosts_that_cannot_take_part_are_named_each_with_its_reason(hosts, tmp_path):
    """There: another TensorFlow by its metadata, and an empty directory over the one that has the task."""
    (tmp_path / "task.py").write_text("")
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
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    line = err.splitlines()[-1]
    version = importlib.metadata.version("tensorflow")
    assert f"{THERE}: has tensorflow 0.1, but here it is {version}: install the same; " in line
    assert f"{THERE}: has no task.py:Own in {tmp_path}: copy it there; " in line
    assert re.search(r"10\.79\.0\.9: can't be reached: ", line)
    assert f"error: {THERE}" in line  # nothing is said of this one
    wait_for(lambda: not hosts.processes(1))


def test_an_agent_runs_workers_and_ends_them_when_its_launcher_is_gone(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "loop.launch.host_agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

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
    process.wait(timeout=120)
    process.stdout.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
