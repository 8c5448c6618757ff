"""Which backend `auto` is, and the messages for a malformed job; without TensorFlow."""

import ast
import errno
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from callbacks.run_record.redaction import mask
from loop import UsageError
from loop.commands import command_line
from loop.errors import PeerError
from loop.launch import environment, machine, schedulers
from loop.launch.backend_choice import choose_backend
from loop.launch.environment import START_TIMEOUT, horovod_meets_at, job_rank, job_size, read_tf_config, start_timeout
from loop.launch.worker import as_peer_error
from tests.conftest import ROOT, needs_horovod, tfloop

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
    monkeypatch.setattr(machine, "horovod_missing", lambda: None if horovod else "Horovod is not installed")
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "horovod_built_with", lambda name: True)
    name, why = choose_backend("auto", workers, environment)
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
        ("auto", None, {"TF_CONFIG": "[]"}, "can't be read"),
        ("auto", None, {"TF_CONFIG": '{"cluster": {}}'}, "can't be read .*'task'"),
        *(
            (
                "auto",
                None,
                {"TF_CONFIG": JOB.replace('"index": 1', f'"index": {value}')},
                f"the index {value} of the task",
            )
            for value in ("0.7", "1.0", "true", "null", '"0.7"', '"one"')
        ),
        ("auto", None, {"TF_CONFIG": JOB.replace("b:2", "b:http")}, "address of worker 1 is 'b:http': give host:port"),
        ("auto", None, {"TF_CONFIG": JOB.replace("b:2", "b:99999")}, "with a port of 1 to 65535"),
        ("auto", None, {"TF_CONFIG": JOB.replace("b:2", "b..c:2")}, "address of worker 1 is 'b..c:2': give host:port"),
        ("auto", None, {"TF_CONFIG": JOB.replace("b:2", "b:" + "2" * 5000)}, "with a port of 1 to 65535"),
        ("auto", None, {"TF_CONFIG": JOB.replace("b:2", "a:1")}, "worker 0 and worker 1 have the same address a:1"),
        ("auto", None, {"TF_CONFIG": JOB.replace('"a:1", "b:2"', "")}, "but its cluster has no workers"),
        (
            "multiworker",
            None,
            {"TF_CONFIG": JOB.replace('"index": 1', '"index": 2')},
            "its task is worker 2, but its cluster has worker 0, worker 1",
        ),
    ],
)
def test_refusals(backend, workers, environment, message, monkeypatch):
    monkeypatch.setattr(machine, "horovod_missing", lambda: "Horovod is not installed")
    with pytest.raises(UsageError, match=message):
        choose_backend(backend, workers, environment)


def test_rank_of_a_job_with_a_chief():
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    for rank, task in enumerate([("chief", 0), ("worker", 0), ("worker", 1)]):
        text = json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})
        assert read_tf_config(text) == (rank, 3)


@pytest.mark.parametrize("variables", [("0", None), ("", ""), ("x", "2"), ("-1", "2"), ("0", "0"), ("2", "2")])
def test_horovods_variables_that_are_no_place(variables, monkeypatch):
    for name, value in zip(("HOROVOD_RANK", "HOROVOD_SIZE"), variables, strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    for place in (job_rank, job_size):
        with pytest.raises(UsageError, match=f"HOROVOD_RANK={variables[0]} with HOROVOD_SIZE={variables[1] or '.not'}"):
            place()


@pytest.mark.parametrize("port", ["abc", "", "0", "65536", "-1"])
def test_a_place_to_meet_that_has_no_port(port, monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", port)
    with pytest.raises(UsageError, match=f"HOROVOD_GLOO_RENDEZVOUS_PORT={port} isn't a port"):
        horovod_meets_at()


@needs_horovod
@pytest.mark.parametrize("hosts", [{}, {schedulers.HOSTS: "127.0.0.1:2"}], ids=["launcher", "rank 0 serves"])
def test_the_command_refuses_it_with_exit_code_2(hosts, tmp_path):
    variables = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", **hosts}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables, "HOROVOD_GLOO_RENDEZVOUS_PORT": "abc"}
    done = tfloop("train", "digits", cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert "tfloop: error: HOROVOD_GLOO_RENDEZVOUS_PORT=abc isn't a port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("", 0), ("0,2", 2), ("-1", 0), ("0,-1,1", 1)])
def test_gpus_are_counted_without_tensorflow(visible, count, monkeypatch):
    monkeypatch.setattr(machine.Path, "glob", lambda *_: [machine.Path(f"/dev/nvidia{i}") for i in (0, 1, 2, "ctl")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.count_gpus() == count


def test_horovod_without_its_library_is_told_from_none(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: Spec)
    assert "without its native library" in machine.horovod_missing()
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in machine.horovod_missing()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ports(host):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    ports = machine.free_ports(3, host)
    assert len(set(ports)) == 3
    assert all(machine.port_is_free(host, port) for port in ports)
    with socket.create_server((host, ports[0]), family=socket.AF_INET6 if host == "::1" else socket.AF_INET):
        assert not machine.port_is_free(host, ports[0])


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_start_timeouts_that_are_none(text, monkeypatch):
    monkeypatch.setenv(START_TIMEOUT, text)
    with pytest.raises(UsageError, match=f"TFLOOP_START_TIMEOUT={text}: give a number"):
        start_timeout()


def test_what_an_engine_says_when_a_peer_is_gone(monkeypatch):
    class UnavailableError(Exception):
        """Has the name of TensorFlow's."""

    error, other = UnavailableError("Graph execution error:"), ValueError("of the task")
    assert as_peer_error(error) is error  # alone, nobody can be gone
    monkeypatch.setenv("TF_CONFIG", JOB)
    assert isinstance(as_peer_error(error), PeerError)
    assert as_peer_error(other) is other


def test_secrets_are_masked(monkeypatch):
    monkeypatch.setenv("STORE_PASSWORD", "hunter22")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("OTHER_SECRET", "short")
    monkeypatch.setattr(sys, "argv", ["tfloop", "--set", "api_key=key-12345", "--set=password=word-123", "a=b"])
    text = "hunter22 hf_abcdef key-12345 word-123 short http://user:pass@host/ b"
    assert mask(text) == "*** *** *** *** short http://***@host/ b"


def test_backends_know_a_workers_side_and_not_who_starts_it():
    known = {"environment", "machine", "worker", "member", "plugins", "rendezvous", "signals", "stderr"}
    for path in (ROOT / "loop" / "backends").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "loop.launch":
                assert {alias.name for alias in node.names} <= known, path
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loop.launch."):
                assert node.module.removeprefix("loop.launch.") in known, path


@pytest.mark.parametrize("left", ["", "rank-0.json"])
def test_a_worker_that_cannot_report_says_itself_why_it_has_ended(left, tmp_path, monkeypatch, capsys):
    """It ended "without a word" when there was no room in the folder for temporary files."""
    monkeypatch.setenv(environment.JOB, str(tmp_path))
    monkeypatch.setenv(environment.WORKER, "0")
    if left:
        (tmp_path / left).touch()
    full = OSError(errno.ENOSPC, "", "/tmp/rank-0.pid")
    assert command_line.report_error(full) == 1
    assert ("/tmp/rank-0.pid can't be written (No space left on device)" in capsys.readouterr().err) == (not left)
