"""Which engine `auto` is, and what is said about a malformed job; without TensorFlow, without processes."""

import json

import pytest

from loop import UsageError, launch

JOB = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}})


@pytest.mark.parametrize(
    ("environment", "workers", "horovod", "gpus", "chosen"),
    [
        ({}, None, True, 0, "single"),
        ({}, None, True, 1, "single"),
        ({}, None, True, 2, "mirrored"),
        ({}, 1, True, 0, "single"),
        ({}, 2, True, 0, "horovod"),
        ({}, 2, True, 4, "horovod"),
        ({}, 2, False, 0, "multiworker"),
        ({"HOROVOD_RANK": "0"}, None, True, 4, "horovod"),
        ({"TF_CONFIG": JOB}, None, True, 4, "multiworker"),
        ({"TF_CONFIG": JOB, "HOROVOD_RANK": "0"}, None, True, 0, "horovod"),
    ],
)
def test_auto(environment, workers, horovod, gpus, chosen, monkeypatch):
    monkeypatch.setattr(launch, "horovod_missing", lambda: None if horovod else "Horovod is not installed")
    monkeypatch.setattr(launch, "count_gpus", lambda: gpus)
    name, why = launch.choose("auto", workers, environment)
    assert name == chosen
    assert why


@pytest.mark.parametrize(
    ("backend", "workers", "environment", "message"),
    [
        ("single", 2, {}, "workers=2 with backend='single'"),
        ("horovod", None, {}, "backend='horovod': Horovod is not installed"),
        ("multiworker", None, {}, "without TF_CONFIG"),
        ("auto", None, {"HOROVOD_RANK": "1"}, "started by Horovod's launcher, but Horovod is not installed"),
        ("auto", None, {"TF_CONFIG": "{"}, "can't be read"),
        ("auto", None, {"OMPI_COMM_WORLD_SIZE": "2"}, "started by mpirun"),
        ("auto", None, {"SLURM_STEP_NUM_TASKS": "4"}, "started by srun"),
        ("auto", None, {"TF_CONFIG": "[]"}, "can't be read"),
        ("auto", None, {"TF_CONFIG": '{"cluster": {}}'}, "can't be read .*'task'"),
        (
            "multiworker",
            None,
            {"TF_CONFIG": JOB.replace('"index": 1', '"index": 2')},
            "its task is worker 2, but its cluster has worker 0, worker 1",
        ),
    ],
)
def test_refusals(backend, workers, environment, message, monkeypatch):
    monkeypatch.setattr(launch, "horovod_missing", lambda: "Horovod is not installed")
    with pytest.raises(UsageError, match=message):
        launch.choose(backend, workers, environment)


def test_rank_of_a_job_with_a_chief():
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    for rank, task in enumerate([("chief", 0), ("worker", 0), ("worker", 1)]):
        text = json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})
        assert launch.read_tf_config(text) == (rank, 3)


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("", 0), ("0,2", 2), ("-1", 0), ("0,-1,1", 1)])
def test_gpus_are_counted_without_tensorflow(visible, count, monkeypatch):
    monkeypatch.setattr(launch.Path, "glob", lambda *_: [launch.Path(f"/dev/nvidia{i}") for i in (0, 1, 2, "ctl")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.count_gpus() == count


def test_horovod_without_its_library_is_told_from_none(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: Spec)
    assert "without its native library" in launch.horovod_missing()
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in launch.horovod_missing()


def test_ports():
    ports = launch.free_ports(3)
    assert len(set(ports)) == 3
    assert all(launch.port_is_free("127.0.0.1", port) for port in ports)
