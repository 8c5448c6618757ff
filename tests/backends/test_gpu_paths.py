"""Each path that depends on a GPU, on GPUs that the test makes up: what would happen on such a machine.

docs/gpu.md has the table of these paths; `python -m tests.campaigns.gpu_lines` names each of their lines that no test
runs.
"""

import ctypes
import json
import os
import re
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import formats, system, throughput_probe
from loop import ArrayData, IndexedData, TrainTask, UsageError, backends, fit
from loop.backends import base, devices, horovod, parameter_server, strategy
from loop.commands import doctor, dry_run, memory, memory_measurements, tune, verify
from loop.commands.cli import checks
from loop.data import BatchOptions, open_data, source
from loop.launch import elastic_job, host_agent, hosts, machine
from loop.launch.elastic_limits import Limits
from loop.monitor.phase_marker import PhaseMarker
from loop.options import with_defaults
from loop.step.batches import Batches
from loop.step.build import build
from loop.step.plan import make_plan
from tests.campaigns import gpu_lines
from tests.commands.test_memory import report_of
from tests.commands.test_tune import ABOUT
from tests.conftest import ROOT
from tests.gpus import Library, Machine, Nvml, Strategy, worker_strategy
from tests.tasks import Weighted

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"]


@pytest.fixture(autouse=True)
def _one_device_a_replica():
    yield
    devices.own_several("single", 1)


def test_the_page_names_functions_that_are_in_those_files():
    functions, tests = gpu_lines.table()
    assert len(functions) > 50
    assert all(gpu_lines.code_of(path, name) for path, name, _ in functions)
    assert all((ROOT / test.partition("#")[0]).is_file() for test in tests)


# Visibility, memory growth, local rank


@pytest.mark.parametrize(("backend", "sees"), [("mirrored", [0, 1]), ("central", [0, 1]), ("multiworker", [1])])
def test_a_process_takes_all_gpus_or_that_of_its_local_rank(backend, sees, monkeypatch):
    gpus = Machine(monkeypatch, 2)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    threads = []
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", threads.append)
    devices.prepare(backend, 2, threads=3)
    assert threads == [3]
    assert gpus.visible == [gpus.all[index] for index in sees]
    assert gpus.done == [(gpu, True) for gpu in gpus.visible]


def test_named_gpus_need_no_logical_cpus(monkeypatch):
    made = []
    monkeypatch.setattr(devices, "_make_logical_cpus", made.append)
    Machine(monkeypatch, 2)
    devices.prepare("mirrored", None, ["gpu:0", "cpu:0", "gpu:1"])
    devices.prepare("mirrored", 2)
    assert made == [1, 0]


@pytest.mark.parametrize(("backend", "rank", "sees"), [("single", None, [0, 1, 2, 3]), ("horovod", "1", [2, 3])])
def test_a_replica_owns_several_gpus(backend, rank, sees, monkeypatch):
    gpus = Machine(monkeypatch, 4)
    if rank is not None:
        monkeypatch.setenv("TFLOOP_LOCAL_RANK", rank)
    devices.prepare(backend, per_replica=2)
    assert gpus.visible == [gpus.all[index] for index in sees]
    assert [devices.device(0), devices.device(1), devices.per_replica()] == ["GPU:0", "GPU:1", 2]
    assert devices.is_of_replica("/job:localhost/replica:0/task:0/device:GPU:1")
    devices.check_several()  # CPUs alone are counted there


def test_a_replica_with_too_few_gpus_is_refused(monkeypatch):
    Machine(monkeypatch, 1)
    with pytest.raises(UsageError, match=r"devices_per_replica=2: this replica has 1 GPU\(s\)"):
        devices.prepare("single", per_replica=2)
    Machine(monkeypatch, 3)
    monkeypatch.setenv("TFLOOP_LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="worker 2 on this machine, but only 3 GPUs"):
        devices.prepare("horovod", per_replica=2)


def test_memory_growth_that_is_set_already_is_left_as_it_is(monkeypatch):
    gpus = Machine(monkeypatch, 2, started=True)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "True")
    assert devices.use_gpus() == gpus.all  # and no warning
    gpus = Machine(monkeypatch, 2)
    limited = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda gpu: [limited] if gpu is gpus.all[0] else None
    )
    devices.use_gpus()
    assert gpus.done == [(gpus.all[1], True)]


def test_gpus_that_are_too_few_to_compare_on_are_hidden_in_time(monkeypatch):
    Machine(monkeypatch, 1, started=True)
    with pytest.raises(UsageError, match=r"already started with 1 GPU\(s\): .*\n.*\n    tf.config.set_visible_devices"):
        devices.alike(3)


def test_a_gpu_is_known_by_its_uuid(monkeypatch):
    gpus = Machine(monkeypatch, 2).all
    uuids = [bytes(range(16)), bytes(range(200, 216))]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(uuids))
    first, second = (devices.gpu_identity([gpu]) for gpu in gpus)
    assert first == int.from_bytes(uuids[0][:8], "big") >> 1
    assert first != second
    assert 0 < second < 2**63  # as workers exchange it
    assert devices.gpu_identity(gpus) == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(uuids, code=100))
    assert devices.gpu_identity(gpus[:1]) == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(cuInit=lambda flags: 0))  # an old one
    assert devices.gpu_identity(gpus[:1]) == 0


def test_each_worker_and_host_is_given_no_more_workers_than_gpus(monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    with pytest.raises(UsageError, match=r"3 workers \(--workers\), but only 2 GPUs"):
        elastic_job.run_elastic_job(Limits(1, 3), None, ["train", "digits"])
    answer = host_agent.facts({"directory": os.getcwd(), "interface": None, "files": [], "slots": 1})
    assert answer["gpus"] == 2
    host = hosts.Host.__new__(hosts.Host)
    host.lost, host.slots, host.answer = "", 3, answer
    host.answered = types.SimpleNamespace(is_set=lambda: True)
    monkeypatch.setattr(host, "_differences", lambda *_: iter(()))
    assert list(host.problems({}, {})) == [machine.too_few_gpus(2, "is to have 3 workers")]


def test_names_of_devices():
    assert machine.device_names([" /device:GPU:1", "cpu:0"]) == ["gpu:1", "cpu:0"]
    with pytest.raises(UsageError, match="devices: 'gpu' isn't a device: give names such as cpu:0 or gpu:1"):
        machine.device_names(["gpu"])
    with pytest.raises(UsageError, match="devices: gpu:0 comes twice"):
        machine.device_names(["gpu:0", "/GPU:0"])


# Device strings, and the strategies' options


def test_a_single_replica_computes_on_the_first_gpu(monkeypatch):
    Machine(monkeypatch, 2)
    assert backends.create("single").device == "GPU:0"


@pytest.mark.parametrize(
    ("communication", "operations"),
    [
        ("auto", None),
        ("nccl", tf.distribute.NcclAllReduce),
        ("hierarchical", tf.distribute.HierarchicalCopyAllReduce),
        ("one-device", tf.distribute.ReductionToOneDevice),
    ],
)
def test_mirrored_has_a_replica_on_each_gpu(communication, operations, monkeypatch):
    Machine(monkeypatch, 4)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", Strategy)
    for made in (
        backends.create("mirrored", 2, communication=communication),
        backends.create("mirrored", devices=["gpu:0", "GPU:1"], communication=communication),
    ):
        assert made.strategy.given == (["/gpu:0", "/gpu:1"],)
        assert made.local_replicas == 2
        chosen = made.strategy.named["cross_device_ops"]
        assert type(chosen) is (operations or type(None))
    assert len(backends.create("mirrored").devices) == 4
    with pytest.raises(UsageError, match="mirrored with 5 replicas, but there are 4 GPUs: ask for fewer"):
        backends.create("mirrored", 5)


def test_gpus_and_cpus_together_add_up_on_one_device(monkeypatch):
    Machine(monkeypatch, 1)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", Strategy)
    made = backends.create("mirrored", devices=["gpu:0", "cpu:1"])
    assert made.strategy.given == (["/gpu:0", "/cpu:1"],)
    assert type(made.strategy.named["cross_device_ops"]) is tf.distribute.ReductionToOneDevice
    with pytest.raises(UsageError, match="communication='nccl' works between GPUs alone, and the devices are /gpu:0"):
        backends.create("mirrored", devices=["gpu:0", "cpu:1"], communication="nccl")
    with pytest.raises(UsageError, match="there is no gpu:1; there are cpu:0, cpu:1, cpu:2, cpu:3, gpu:0"):
        backends.create("mirrored", devices=["gpu:1"])


@pytest.mark.parametrize(("count", "storage"), [(1, "/gpu:0"), (2, "/cpu:0")])
def test_central_has_its_variables_on_the_only_gpu_or_on_the_cpu(count, storage, monkeypatch):
    Machine(monkeypatch, count)
    monkeypatch.setattr(tf.distribute.experimental, "CentralStorageStrategy", Strategy)
    made = backends.create("central")
    assert made.strategy.given == ([f"/gpu:{index}" for index in range(count)], storage)
    if count == 1:
        made.check([], None, {"compile": "xla"})
    else:
        with pytest.raises(UsageError, match="compile='xla' with backend='central'"):
            made.check([], None, {"compile": "xla"})


@pytest.mark.parametrize(
    ("gpus", "rank", "communication", "implementation", "replicas", "device"),
    [
        (0, None, "auto", "RING", 1, ""),
        (1, None, "auto", "NCCL", 1, "GPU:0"),
        (4, "2", "nccl", "NCCL", 1, "GPU:0"),
        (4, "2", "ring", "RING", 1, "GPU:0"),
        (2, None, "auto", "NCCL", 2, ""),  # one process for a machine: several replicas in it
    ],
)
def test_multiworker_communicates_by_nccl_between_gpus(
    gpus, rank, communication, implementation, replicas, device, monkeypatch
):
    made_up = Machine(monkeypatch, gpus)
    if rank is not None:
        monkeypatch.setenv("TFLOOP_LOCAL_RANK", rank)
    seen = gpus if rank is None else 1
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", worker_strategy(seen))
    monkeypatch.setattr(strategy.MultiWorker, "sum_on_host", lambda self, array: array)
    cluster = {"worker": [f"127.0.0.1:{machine.free_ports(1)[0]}"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    made = backends.create("multiworker", communication=communication)
    kind = tf.distribute.experimental.CommunicationImplementation
    assert made.strategy.named["communication_options"].implementation == kind[implementation]
    assert len(made_up.visible) == seen
    assert (made.rank, made.workers, made.local_replicas, made.device) == (0, 1, replicas, device)


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    )
    with pytest.raises(UsageError, match=r"communication='nccl' works between GPUs alone, and there is none: .*ring"):
        backends.create("multiworker", communication="nccl")


@pytest.mark.parametrize(("gpus", "device"), [(4, "GPU:0"), (0, "")])
@pytest.mark.parametrize("elastic", [False, True])
def test_horovod_computes_on_the_gpu_of_its_local_rank(gpus, device, elastic, monkeypatch):
    made_up = Machine(monkeypatch, gpus)
    place = types.SimpleNamespace(local_rank=lambda: 3, rank=lambda: 3, size=lambda: 4)
    monkeypatch.setattr(horovod, "hvd", place)
    monkeypatch.setattr(horovod, "_start", lambda check=None: None)
    monkeypatch.setattr(horovod, "Member", lambda: types.SimpleNamespace(join=lambda start: start()))
    identities = []
    monkeypatch.setattr(devices, "refuse_sharing", identities.append)
    monkeypatch.setattr(horovod.Horovod, "sum_on_host", lambda self, array: array)
    made = horovod.ElasticHorovod() if elastic else horovod.Horovod()
    assert (made.device, made.rank, made.workers) == (device, 3, 4)
    assert made_up.visible == made_up.all[3:]
    assert identities == ([] if elastic else [[0, 0, 0, 0]])


class ServerRefused(Exception):
    """In place of a server that starts."""


@pytest.mark.parametrize(("role", "rank", "sees"), [("worker", "1", [1]), ("worker", None, [0]), ("ps", None, [])])
def test_workers_of_parameter_servers_have_a_gpu_each_and_servers_none(role, rank, sees, monkeypatch):
    made_up = Machine(monkeypatch, 2)
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}))
    if rank is not None:
        monkeypatch.setenv("TFLOOP_LOCAL_RANK", rank)

    def refuse(*given):
        raise ServerRefused

    monkeypatch.setattr(tf.distribute, "Server", refuse)
    with pytest.raises(ServerRefused):
        parameter_server.serve()
    assert made_up.visible == [made_up.all[index] for index in sees]


def test_the_chief_of_parameter_servers_has_no_gpu(monkeypatch):
    made_up = Machine(monkeypatch, 2)
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", lambda count: None)

    def refuse(peers):
        raise ServerRefused

    monkeypatch.setattr(parameter_server, "await_peers", refuse)
    with pytest.raises(ServerRefused):
        parameter_server.ParameterServer()
    assert made_up.visible == []


# The step and its data


def test_a_value_on_a_gpu_is_copied_to_the_cpu_and_another_is_shared():
    value = np.arange(3.0)

    def variable(device):
        tensor = types.SimpleNamespace(device=f"/job:localhost/replica:0/task:0/device:{device}", numpy=lambda: value)
        return types.SimpleNamespace(read_value=lambda: tensor), tensor

    own, _ = variable("GPU:0")
    assert base.shared_value(own) is value
    own, tensor = variable("CPU:0")
    assert base.shared_value(own) is tensor


@pytest.mark.parametrize("stream", [False, True])
def test_batches_are_copied_to_the_device_that_computes(stream, quiet):
    class Task(Weighted):
        def train_data(self):
            data = super().train_data()
            return tf.data.Dataset.from_tensor_slices(data.arrays) if stream else data

    results = []
    for device in ("", "CPU:1"):
        backend = backends.create("single")
        backend.device = device
        results.append(fit(Task(), backend=backend, callbacks=quiet(), epochs=1).weights_sha256)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "data", [ArrayData([[1], [2, 3], [4]], padding=0), IndexedData(np.ones((3, 2)))], ids=["padded", "indexed"]
)
def test_batches_that_are_read_ahead_stay_in_host_memory(data):
    """TensorFlow would put what a branch returns on a GPU, from where each step would copy it back."""
    made = source(data, BatchOptions(2), "data")
    zero = tf.constant(0, tf.int64)

    @tf.function(autograph=False)
    def read(end):
        batches = Batches(made, (), zero, end, PhaseMarker(noted=False, timed=False, replicas=1))
        return batches.each(
            lambda step, state: step < end, lambda step, read, state: state + 1, zero, batches.first(zero), zero
        )[-1]

    assert read(tf.constant(2, tf.int64)) == 2
    library = read.get_concrete_function(tf.constant(2, tf.int64)).graph.as_graph_def().library
    nodes = [node for function in library.function for node in function.node_def]
    found = {node.device for node in nodes if node.op in ("If", "StatelessIf")}
    assert len(found) == 1
    assert found.pop().endswith("CPU:0")


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_step_on_a_gpu_has_no_sparse_gradients_and_no_graph_of_its_own(gpus, precision, monkeypatch):
    class Table(TrainTask):
        def build_model(self):
            return keras.Sequential([keras.Input((2,)), keras.layers.Embedding(9, 3), keras.layers.Flatten()])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def train_data(self):
            return ArrayData(np.zeros((8, 2), "int32"))

        def compute(self, model, batch, training):
            return {"loss": tf.reduce_sum(model(batch), -1)}

    logical = tf.config.list_logical_devices
    made_up = [types.SimpleNamespace(name="/device:GPU:0")] * gpus
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind=None: made_up if kind == "GPU" else logical(kind)
    )
    options = with_defaults(None, {"batch_size": 4, "precision": precision})
    data = open_data(Table(), options)
    backend = base.Backend()
    plan = make_plan(build(Table(), backend, precision, data.train.example), backend, data, options, False)
    assert plan.may_isolate == (not gpus)
    assert plan.row_gradients == ({0} if not gpus and precision == "float32" else set())
    assert plan.loss_scaled == (precision == "mixed_float16")


# What commands and callbacks say


@pytest.mark.parametrize(("gpus", "hidden"), [(3, None), (1, "-1")])
def test_verify_uses_gpus_in_all_its_processes_or_in_none(gpus, hidden, monkeypatch):
    Machine(monkeypatch, gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "left by the test")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "logical_cpus", lambda count: None)

    def seen(*given, **named):
        raise UsageError(f"hidden: {os.environ.get('CUDA_VISIBLE_DEVICES')}")

    monkeypatch.setattr(verify, "verify", seen)
    with pytest.raises(UsageError, match=f"hidden: {hidden}"):
        checks.verify("digits", processes=False)


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ({"device_name": "NVIDIA H100", "compute_capability": (9, 0)}, "NVIDIA H100 (.* 9.0: --precision bfloat16)"),
        ({"device_name": "Tesla T4", "compute_capability": (7, 5)}, "Tesla T4 (.* 7.5: --precision mixed_float16)"),
        ({"device_name": "Tesla P100", "compute_capability": (6, 0)}, "Tesla P100"),
        ({}, "/physical_device:GPU:0"),
    ],
)
def test_doctor_names_gpus_and_their_precision(details, said, monkeypatch):
    Machine(monkeypatch, 1)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    finding = doctor._devices()
    pattern = said.replace("(", r"\(").replace(")", r"\)")
    assert finding["state"] == "ok"
    assert re.search(f", {pattern}$", finding["found"])
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    finding = doctor._devices()
    assert finding["state"] == "broken"
    assert "but the machine has 2" in finding["found"]


def test_doctor_says_what_horovod_was_built_with(monkeypatch):
    built = {"gloo_built": True, "mpi_built": False, "nccl_built": 21907, "cuda_built": True}
    fake = types.SimpleNamespace(**{name: (lambda value=value: value) for name, value in built.items()})
    monkeypatch.setattr(machine, "horovod_missing", lambda: None)
    monkeypatch.setitem(sys.modules, "horovod", types.SimpleNamespace(tensorflow=fake))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", fake)
    monkeypatch.setattr(doctor, "version", lambda name: "0.28.1")
    assert doctor._horovod()["found"] == "0.28.1, built with: gloo yes, mpi no, nccl yes, cuda yes"


def test_the_peak_of_a_gpu_is_that_of_the_fullest(monkeypatch):
    peaks = {"GPU:0": 5, "GPU:1": 7}
    names = [types.SimpleNamespace(name=f"/device:{name}") for name in peaks]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: names)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"peak": peaks[name]})
    assert throughput_probe.peak_memory()[1] == 7


def test_memory_is_that_of_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(memory_measurements, "available", lambda: 1)  # of the host, which is not asked
    measured = []

    def outcome(self, name, examples, settings):
        measured.append(examples)
        return report_of(1) | {"gpu_memory": (1000 + 10 * examples) * 2**20}

    monkeypatch.setattr(memory_measurements.Prober, "_measured", outcome)
    report = memory.memory("net.py:Net")
    assert measured[:2] == [8, 32]
    assert report.on_gpu
    assert memory.as_json(report)["device"] == "gpu"
    assert next(iter(memory.lines(report))).endswith("peak memory of a GPU, in MB")


def test_tune_and_dry_run_show_the_memory_of_a_gpu(monkeypatch, tmp_path):
    row = tune.Row({}, [1000.0], 1.0, gpu_memory=3 * 2**30)
    shown = formats.size(row.gpu_memory)
    report = tune.Report([], ABOUT, [row], row, {}, [])
    table = tune.lines(report)[0]
    assert "on the GPU" in [column.header for column in table.columns]
    sizes = {"parameters": 4, "gradients": 4, "optimizer": 8, "peak": [10], "gpu_peak": [0, 3 * 2**30]}
    assert dry_run._memory(sizes, 1, 1).endswith(f", {shown} on a GPU")


@pytest.mark.parametrize(
    ("visible", "measured"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0, 2", [0, 2]),
        ("1,-1,0", [1]),
        ("GPU-bbbb-2", [1]),
        ("GPU-bb,GPU-cc", [1, 2]),
    ],
)
def test_gpus_that_are_visible_are_measured(visible, measured, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(UUIDS))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = types.SimpleNamespace(directory=os.getcwd())
    read = system._Meter(run).read()
    found = {name: value for name, value in read.items() if name.startswith("gpu")}
    expected = {}
    for index in measured:
        expected |= {f"gpu{index}/use": 10.0 + index, f"gpu{index}/memory_mb": 1000.0 * (1 + index)}
    assert found == expected  # no watts, which this driver can't tell


def test_without_nvml_no_gpu_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([]))
    assert system._gpus() == {}
