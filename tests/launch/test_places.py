"""Places in a job of an outside launcher, by its variables: `mpirun`, Slurm, LSF, PBS, Flux, SkyPilot, Kubernetes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callbacks.progress import RELAY
from loop import UsageError, backends
from loop.launch import host_lists, machine, places, schedulers, worker
from loop.launch.environment import JOB, LAUNCHER, OWNER, forget_inherited_job, read_tf_config, tf_cluster
from tests import launchers
from tests.conftest import ROOT, needs_horovod, tfloop
from tests.launchers import LAUNCHERS, SHARED

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
    base = 10_000 + 256 * ((13 * 4711 + 2) % 88)
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
    assert schedulers.place("auto", SLURM | {"SLURM_JOB_ID": "4227858432"})  # in a federation of clusters


@pytest.mark.parametrize(
    ("backend", "environment", "message"),
    [
        ("horovod", OPEN_MPI, "but Horovod is built without MPI: build it with MPI"),
        ("auto", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "on several hosts, of which 1 are here"),
        ("auto", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK=one"),
        ("auto", {name: OPEN_MPI[name] for name in OPEN_MPI if name != "PMIX_NAMESPACE"}, "set TFLOOP_PORT_BASE"),
        ("auto", OPEN_MPI | {"TFLOOP_PORT_BASE": "80"}, "TFLOOP_PORT_BASE=80: give a port"),
        ("auto", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2: started by an mpiexec that doesn't say where"),
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
    assert host_lists.node_list(",".join(texts)) == expected


@given(st.text("ab[]-,19 ", max_size=12))
@settings(max_examples=100, deadline=None)
def test_node_lists_are_read_or_refused(text):
    names = []
    with contextlib.suppress(UsageError):
        names = host_lists.node_list(text)
    assert all(name and not set(name) & set("[], ") for name in names)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_task_counts(counts):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in counts)
    assert host_lists.task_counts(text) == [count for count, times in counts for _ in range(times)]


@given(st.lists(st.tuples(word, st.integers(1, 9)), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_hosts_with_their_slots(slots):
    text = " ".join(f"{host} {count}" for host, count in slots)
    assert host_lists.host_counts(text) == [host for host, count in slots for _ in range(count)]


@given(st.permutations("aabbbc"))
@settings(max_examples=30, deadline=None)
def test_task_maps(hosts):
    """Ranks in any order over the hosts, as ranges and as single numbers."""
    lines = []
    for host in sorted(set(hosts)):
        ranks = [rank for rank, each in enumerate(hosts) if each == host]
        is_range = ranks == list(range(ranks[0], ranks[-1] + 1))
        lines.append(f"{host}: {ranks[0]}-{ranks[-1]}" if is_range else f"{host}: {','.join(map(str, ranks))}")
    assert host_lists.task_hosts("\n".join(lines)) == hosts


@st.composite
def jobs_of(draw):
    launcher = draw(st.sampled_from(LAUNCHERS))
    count = draw(st.integers(2, 4))
    slots = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    if launcher == "jsrun":
        slots = [slots[0]] * count
    if launcher not in SHARED:
        slots = [1] * count
    name = {"SkyPilot": "10.0.0.{}", "Kubernetes": "run-{}"}.get(launcher, "n{}.example")
    return launcher, {name.format(index): slot for index, slot in enumerate(slots)}


@pytest.fixture
def flux(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@given(job=jobs_of())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_workers_find_the_same_places(flux, job):
    launcher, nodes = job
    hosts = [node for node, count in nodes.items() for _ in range(count)]
    if launcher == "Kubernetes":
        hosts = [f"{host}.digits" for host in hosts]
    clusters = set()
    for rank, environment in enumerate(launchers.environments(launcher, nodes, flux)):
        found = schedulers.place("multiworker", environment)
        own, addresses = tf_cluster(found["TF_CONFIG"])
        assert own == rank
        assert [address.partition(":")[0] for address in addresses.values()] == hosts
        # One worker a node uses all of its GPUs; where there may be several, each takes that of its own rank there.
        local = None if launcher in ("SkyPilot", "Kubernetes") else str(hosts[:rank].count(hosts[rank]))
        assert found.get("TFLOOP_LOCAL_RANK") == local
        clusters.add(json.dumps(addresses))
        check_horovod(schedulers.place("horovod", {**environment, "OMPI_COMM_WORLD_SIZE": "1"}), rank, hosts)
    assert len(clusters) == 1


def check_horovod(found, rank, hosts):
    """The same numbers as Horovod's own launcher gives, where it is asked; it fills hosts one after the other."""
    machine.horovod_missing() and pytest.skip("Horovod isn't installed")
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars

    slots = get_host_assignments(parse_hosts(found[schedulers.HOSTS]), len(hosts))
    assert create_slot_env_vars(slots[rank]).items() <= found.items()
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == hosts[0]


@pytest.fixture(autouse=True)
def _without_mpi(monkeypatch):
    """Whatever this machine's Horovod is built with; a test may set it otherwise."""
    monkeypatch.setattr(schedulers, "horovod_has_mpi", lambda: False)


@given(job=jobs_of(), data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_variable_gives_a_place_or_is_refused(flux, job, data):
    launcher, nodes = job
    environment = data.draw(st.sampled_from(list(launchers.environments(launcher, nodes, flux))))
    name = data.draw(st.sampled_from(sorted(environment)))
    value = data.draw(st.none() | st.sampled_from(["", "0", "-1", "1", "2", "99", "x", "ƒ", "a 1 b", "a b", "1 1"]))
    environment = {**environment, name: value} if value is not None else {**environment}
    if value is None:
        del environment[name]
    with contextlib.suppress(UsageError):
        if found := schedulers.place("auto", environment):
            rank, size = read_tf_config(found["TF_CONFIG"])
            assert rank < size


def first(launcher, nodes, directory, rank=1, **changes):
    environment = list(launchers.environments(launcher, nodes, directory))[rank] | changes
    return {name: value for name, value in environment.items() if value is not None}


TWO = {"n1": 2, "n2": 2}
EACH = {"n1": 1, "n2": 1}


@pytest.mark.parametrize(
    ("launcher", "nodes", "changes", "message"),
    [
        ("jsrun", TWO, {"JSM_NAMESPACE_LOCAL_RANK": "0"}, "jsrun's task 1 of 4, .* --launch_distribution packed"),
        ("jsrun", TWO, {"JSM_NAMESPACE_SIZE": "5"}, "no place on the 3 hosts of LSB_MCPU_HOSTS"),
        ("jsrun", TWO, {"JSM_NAMESPACE_LOCAL_SIZE": "0"}, "no place on the 3 hosts"),
        ("jsrun", TWO, {"LSB_JOBID": None}, "LSB_JOBID isn't set"),
        ("Flux", TWO, {"FLUX_JOB_SIZE": "5"}, "2 hosts with 4 tasks, but FLUX_JOB_NNODES=2, FLUX_JOB_SIZE=5"),
        ("Flux", TWO, {"FLUX_JOB_NNODES": "3"}, "contradict each other"),
        ("Flux", TWO, {"FLUX_TASK_LOCAL_ID": "0"}, "FLUX_TASK_RANK=1, FLUX_TASK_LOCAL_ID=0"),
        ("Flux", TWO, {"FLUX_TASK_RANK": "4"}, "FLUX_TASK_RANK=4"),
        ("Flux", TWO, {"FLUX_JOB_ID": "ƒ3"}, "`flux job taskmap --to=hosts ƒ3`, which says on which hosts"),
        ("blaunch", TWO, {"LSF_PM_TASKID": "5"}, "blaunch has started 4 workers, but this one has rank 4"),
        ("blaunch", TWO, {"LSF_PM_TASKID": "0"}, "has rank -1"),
        ("blaunch", TWO, {"LSB_HOSTS": "n1 n2"}, "LSB_MCPU_HOSTS=n1 2 n2 2, LSB_HOSTS=n1 n2"),
        ("blaunch", TWO, {"LSB_MCPU_HOSTS": "n1 n2"}, "LSB_MCPU_HOSTS=n1 n2: it must be like"),
        ("blaunch", {"n1": 1, "here": 1}, {"LSF_PM_TASKID": "1"}, "blaunch's task 0 runs on here, .* has n1 there"),
        ("mpiexec", TWO, {"PMI_SIZE": "3"}, "PMI_SIZE=3, but PBS_NODEFILE has 4 lines"),
        ("mpiexec", TWO, {"PBS_NODEFILE": "/none"}, "PBS_NODEFILE=/none, .* can't be read here"),
        ("pbsdsh", TWO, {"PBS_VNODENUM": "4"}, "PBS has started 4 workers, but this one has rank 4"),
        ("OpenPBS", TWO, {}, "4 lines with 2 hosts, and pbsdsh tells a worker its host alone"),
        ("SkyPilot", EACH, {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3, and SKYPILOT_NODE_IPS has 2 addresses"),
        ("SkyPilot", EACH, {"SKYPILOT_NODE_IPS": "n1\nn1"}, "has 1 addresses on 2 lines"),
        ("SkyPilot", EACH, {"SKYPILOT_NODE_RANK": "2"}, "SkyPilot has started 2 workers, but this one has rank 2"),
        ("SkyPilot", EACH, {"SKYPILOT_NUM_GPUS_PER_NODE": "64"}, "=64, but this node shows 0 GPUs"),
        ("Kubernetes", EACH, {"TFLOOP_PODS": None}, "the number of pods isn't clear .no variable has it"),
        ("Kubernetes", EACH, {"JAX_NUM_PROCESSES": "3"}, "isn't clear .*'TFLOOP_PODS': 2, 'JAX_NUM_PROCESSES': 3"),
        ("Kubernetes", EACH, {"HOSTNAME": "run-0"}, "HOSTNAME=run-0, JOB_COMPLETION_INDEX=1, 2 pods"),
        ("Kubernetes", {"run-0": 1, "run-1": 1}, {"JAX_PROCESS_ID": "0"}, "contradict each other"),
        ("Kubernetes", {"run-0": 1, "run-1": 1}, {"TFLOOP_PODS": "1"}, "contradict each other"),
        ("Kubernetes", EACH, {"JOB_COMPLETION_INDEX": None}, "JOB_COMPLETION_INDEX isn't set"),
    ],
)
def test_places_that_contradict_themselves(launcher, nodes, changes, message, flux, monkeypatch):
    monkeypatch.setattr(places.socket, "gethostname", lambda: "here.example")
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=message):
        schedulers.place("auto", first(launcher, nodes, flux, **changes))


def test_the_command_refuses_such_a_place_with_exit_code_2(tmp_path):
    environment = first("blaunch", TWO, tmp_path, LSB_HOSTS="n1 n2")
    done = tfloop("train", "digits", cwd=tmp_path, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.startswith("tfloop: error: LSF's variables contradict each other")
    assert "Traceback" not in done.stderr


def test_what_is_no_job_of_several_workers(flux, tmp_path):
    """A job's script, a job of one worker, and pods that have nothing to do with each other."""
    for launcher, lone in (("SkyPilot", {"n1": 1}), ("Kubernetes", {"n-0": 1}), ("blaunch", {"n1": 1})):
        assert schedulers.place("auto", first(launcher, lone, tmp_path, rank=0)) == {}
    assert schedulers.place("auto", first("blaunch", TWO, tmp_path, LSF_PM_TASKID=None)) == {}
    assert schedulers.place("auto", first("pbsdsh", TWO, tmp_path, PBS_TASKNUM="1")) == {}
    assert schedulers.place("auto", {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "sweep-1"}) == {}


def test_steps_of_neighboring_jobs_of_slurm_have_ports_of_their_own():
    """Step 1 of a job and step 0 of the next one, on the same node, had the same."""
    numbers = set()
    for job in range(4711, 4717):
        for step in range(13):
            _, own = places.find({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            numbers.add(own.number % 88)  # the blocks of ports
    assert len(numbers) == 6 * 13


@pytest.mark.parametrize("launcher", ["Slurm", "mpirun", *LAUNCHERS])
def test_a_command_that_a_worker_starts_is_none_of_the_job(launcher, tmp_path, flux, monkeypatch):
    """It took the worker's place, and was refused because the worker has the port."""
    monkeypatch.setattr(schedulers, "horovod_has_mpi", lambda: False)
    inherited = OPEN_MPI
    if launcher != "mpirun":
        hosts = {"n-0": 1, "n-1": 1}
        inherited = list(launchers.environments(launcher, hosts, tmp_path))[1]
    place = schedulers.place("auto", inherited)
    monkeypatch.setattr(os, "environ", {**inherited, **place, "PATH": os.environ["PATH"]})
    with worker.reporting():
        forget_inherited_job()
    assert os.environ["TF_CONFIG"] == place["TF_CONFIG"]  # the worker itself
    os.environ[OWNER] = str(os.getppid())
    forget_inherited_job()
    assert "TF_CONFIG" not in os.environ
    assert schedulers.place("auto", os.environ) == {}


def test_a_script_that_a_worker_starts_is_none_of_the_job(monkeypatch):
    """Its `fit` took the worker's place, and Horovod aborted it after 30 seconds."""
    inherited = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", OWNER: str(os.getppid()), "PATH": os.environ["PATH"]}
    inherited[RELAY] = "relay"  # its own progress ended the job's bar
    monkeypatch.setattr(os, "environ", inherited)
    schedulers.join("auto")
    assert list(os.environ) == ["PATH"]


def test_a_script_under_an_outside_launcher_owns_its_variables(monkeypatch):
    """Only commands of `tfloop` did: a script that its callback started met Horovod in its place, and was aborted."""
    inherited = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", dict(inherited))
    backends.create("single")
    assert {**os.environ, **inherited} == os.environ
    assert os.environ[OWNER] == str(os.getpid())
    os.environ[OWNER] = str(os.getppid())
    backends.create("single")
    assert not {OWNER, "HOROVOD_RANK"} & os.environ.keys()


def test_a_lone_worker_of_a_job_owns_its_variables_too(tmp_path):
    """As with `--launcher ray`: a command that it started reported in its place, and ended at once."""
    code = "import os\nfrom loop.launch import worker\nwith worker.reporting():\n    print(os.environ['TFLOOP_OWNER'])"
    job = {JOB: str(tmp_path), LAUNCHER: str(os.getpid()), OWNER: "", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **job}, stdout=subprocess.PIPE) as process:
        assert int(process.stdout.read()) == process.pid


@pytest.mark.parametrize("backend", ["multiworker", pytest.param("horovod", marks=needs_horovod)])
def test_two_processes_meet_by_such_variables(backend, tmp_path):
    """`python -m tests.campaigns.launchers` does this for each launcher that may start several on a host."""
    result, others = launchers.train("blaunch", tmp_path, backend)
    assert (result["backend"], result["replicas"], result["steps"]) == (backend, 2, 5)
    assert others == [""]


def test_a_worker_that_is_evicted_has_all_save_and_exit_with_75(tmp_path):
    """SIGTERM to one worker, as when the node of one pod is drained: no launcher of ours hands it on."""
    options = "--epochs 99999 --eval-every never --track off --run-dir run"
    chief, other = launchers.start("blaunch", tmp_path, "train", "digits", *options.split())
    try:
        assert any("epoch 1/" in line for line in chief.stderr)
        other.send_signal(signal.SIGTERM)
        ends = [process.communicate(timeout=240)[1] for process in (chief, other)]
    finally:
        chief.kill()
        other.kill()
    assert (chief.returncode, other.returncode) == (75, 75), ends
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
