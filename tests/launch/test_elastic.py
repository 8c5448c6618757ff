"""Elastic jobs: real workers that are killed, and come back; and what is refused."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import callbacks
from callbacks.example_log import ExampleLog, differences, used
from loop import UsageError, fit
from loop.launch import elastic_job, elastic_limits, elastic_workers
from loop.launch.elastic_limits import Limits, discovered_slots, read_limits
from loop.launch.output import Output
from loop.target import task_loader
from tests.campaigns import elastic as campaign
from tests.campaigns.elastic import TASK, Job, distance
from tests.conftest import needs_horovod, until


@needs_horovod
def test_workers_that_are_killed_change_nothing(tmp_path):
    job = Job(tmp_path / "elastic", 2, "--elastic=1:2")
    try:
        # Meanwhile, the same in this process: on one replica.
        (tmp_path / "task.py").write_text(TASK)
        chosen = callbacks.standard(mlflow=None, progress=None) + [ExampleLog(tmp_path / "witness")]
        alone = fit(
            task_loader.load("task.py:Held", ()),
            epochs=12,
            batch_size=50,
            seed=3,
            callbacks=chosen,
            run_dir=tmp_path / "run",
        )
        job.wait_for(lambda: job.events("steps_end"), "step")
        job.kill("0")  # the chief
        job.wait_for(lambda: 2 in job.joined(), "worker comes back")
        job.kill("2")  # which has joined as the last
        job.wait_for(lambda: "2" in [each["worker"] for each in job.events("worker_gone")], "end of its generation")
        result = job.result()
    finally:
        job.close()
    assert (result["status"], result["steps"]) == ("finished", alone.steps)
    assert list(differences(used(tmp_path / "witness"), used(job.directory / "witness"))) == []
    job.directory = tmp_path
    own = job.weights()
    job.directory = tmp_path / "elastic"
    assert distance(own, job.weights()) < 1e-4
    said = job.errors()
    for text in ("worker 0 is gone: killed by signal 9", "worker 2 joins: 2 workers", "going on with 1 worker"):
        assert f"elastic: {text}" in said


@needs_horovod
def test_a_signal_between_two_attempts_has_the_next_one_save(tmp_path):
    """The worker ended at once, and the steps that it had in its memory alone were lost."""
    job = Job(tmp_path, 2, "--elastic=1:2")
    try:
        job.wait_for(lambda: job.events("steps_end"), "step")
        pid = job.members()["0"]
        joined = Path(re.search("TFLOOP_JOB=([^\0]*)", Path(f"/proc/{pid}/environ").read_text())[1], "rank-0.joined")
        job.kill("1")
        job.wait_for(lambda: joined.read_text() == "1", "generation with one worker")
        job.process.terminate()  # the attempt, and its handler of signals, are still being made
        assert job.process.wait(timeout=240) == 75
    finally:
        job.close()
    said = job.errors()
    assert "going on from step" in said
    assert "the run saves and ends" in said
    assert re.search(r"interrupted at step \d", said), said


DYING = """
import pathlib
import horovod.tensorflow as hvd

def init(start=hvd.init):
    connecting = pathlib.Path(__file__).with_name("connecting")
    if os.environ["TFLOOP_WORKER"] == "1":  # the other one is in it, and waits for this one
        while not connecting.exists():
            time.sleep(0.01)
        os._exit(0)  # as a library may do; the launcher has not asked this worker to end
    connecting.touch()
    start()

hvd.init = init
"""


@needs_horovod
def test_a_death_while_the_others_connect_has_the_job_start_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "TASK", TASK + DYING)
    monkeypatch.setattr(campaign, "OPTIONS", ["--steps=3", "--track=off", "--json"])
    job = Job(tmp_path, 2, "--elastic=1:2")
    try:
        assert job.result()["status"] == "finished"
    finally:
        job.close()
    said = job.errors()
    assert "elastic: worker 1 is gone: exit code 0" in said
    # Horovod ends it or, by chance, waits for minutes.
    assert re.search(
        "elastic: worker 0 (still waits in Horovod for one that is gone|is gone: killed by signal 6)", said
    )


IGNORES = (
    "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path('ready').touch(); time.sleep(99)"
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 1), (signal.SIGTERM, 75)])
def test_a_job_whose_workers_die_while_they_stop_has_not_saved(number, code, tmp_path, monkeypatch):
    """It ended with 75, as one that has saved. A worker that dies of the signal itself had nothing to save yet."""
    monkeypatch.chdir(tmp_path)
    ignores = IGNORES if number == signal.SIGKILL else IGNORES.replace("SIG_IGN", "SIG_DFL")
    monkeypatch.setattr(elastic_workers, "worker_command", lambda arguments: [sys.executable, "-c", ignores])
    job = elastic_job.ElasticJob(Limits(1, 1), 1, tmp_path, dict(os.environ), (), None)
    try:
        while not Path("ready").exists():
            assert job._advance()
            time.sleep(0.01)
        [worker] = job.running()
        job.hear(signal.SIGTERM, None)
        worker.process.send_signal(number)
        while job._advance():
            time.sleep(0.01)
    finally:
        job.kill()
    job.output.join()
    with worker.process:
        outcome = job.outcome()
    assert outcome.code == code
    lost = "worker 0 is gone: killed by signal 9 (Killed): the run isn't saved; its last checkpoint is as it was"
    assert outcome.error == (lost if code == 1 else "")


def test_room_that_comes_and_goes_is_no_loss_of_workers(tmp_path, monkeypatch):
    """After ten times in ten minutes, no worker was started any more, and nothing said so."""
    monkeypatch.setattr(elastic_workers, "worker_command", lambda arguments: ["sleep", "99"])
    monkeypatch.setattr(elastic_workers, "_PAUSE", 0.0)
    workers = elastic_workers.ElasticWorkers(1, tmp_path, dict(os.environ), (), None, Output())
    ended = []

    def end_one():
        workers.running[-1].process.kill()
        workers.running[-1].process.wait()
        ended.extend(workers.remove_ended())

    try:
        for _ in range(elastic_workers.MOST_RESTARTS + 2):
            workers.wanted = 2
            workers.start_missing()
            assert len(workers.running) == 2
            workers.wanted = 1
            end_one()
        workers.start_missing()
        assert len(workers.running) == 1
        for _ in range(elastic_workers.MOST_RESTARTS + 2):
            end_one()
            workers.pause()  # lost
            workers.start_missing()
            if not workers.running:
                break
        assert len(workers._restarts) == elastic_workers.MOST_RESTARTS
    finally:
        while workers.running:
            end_one()
        workers._output.join()
        for worker in ended:
            worker.process.stdout.close()
            worker.process.stderr.close()


@pytest.mark.parametrize(
    ("text", "backend", "workers", "message"),
    [
        ("3", "auto", None, "--elastic 3: give the least and the greatest"),
        ("0:2", "auto", None, "--elastic 0:2: a job needs at least 1"),
        ("3:2", "auto", None, "--elastic 3:2: MIN is greater than MAX"),
        ("2:3", "auto", 4, "--workers 4 with --elastic 2:3: give a number from 2 to 3"),
        ("1:1025", "auto", None, "--elastic 1:1025: give at most 1024 workers"),
        ("1:" + "1" * 5000, "auto", None, "--elastic 1:1+: give the least and the greatest"),
        ("1:2", "mirrored", 2, "--elastic 1:2 with --backend mirrored"),
    ],
)
def test_refusals(text, backend, workers, message):
    with pytest.raises(UsageError, match=message):
        read_limits(text, None, backend, workers)


def test_discovery(tmp_path):
    script = tmp_path / "discover.sh"
    with pytest.raises(UsageError, match=r"discover.sh: there is no such script"):
        read_limits("1:4", script, "auto", None)
    script.write_text(f"#!{sys.executable}\nprint('localhost:2')\nprint('127.0.0.1')\n")
    script.chmod(0o755)
    assert read_limits("1:4", script, "auto", None) == Limits(1, 4, script)
    assert discovered_slots(script) == 3
    script.write_text(f"#!{sys.executable}\nprint('elsewhere:2')\n")
    with pytest.raises(UsageError, match=r"printed 'elsewhere:2': give localhost:SLOTS"):
        discovered_slots(script)
    script.write_text("#!/bin/false\n")
    with pytest.raises(
        UsageError, match=r"--discovery .*discover.sh has failed with exit status 1 .it printed no error"
    ):
        discovered_slots(script)
    for text in ("localhost:" + "9" * 5000, "localhost:\udcff", "localhost:-1"):  # which Python can't read as a number
        script.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n", errors="surrogateescape")
        with pytest.raises(UsageError, match=r"printed 'localhost:.*': give localhost:SLOTS"):
            discovered_slots(script)
    with pytest.raises(UsageError, match=r"--discovery .* without --elastic"):
        read_limits(None, script, "auto", None)


def test_a_discovery_script_that_hangs_leaves_nothing_behind(tmp_path, monkeypatch):
    """What it had started stayed, also at the end of the launcher."""
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(elastic_limits, "_PATIENCE", 0.01)
        with pytest.raises(UsageError, match=r"discover.sh has not ended within 0.01 s: it must print localhost:SLOTS"):
            discovered_slots(script)
    with elastic_limits.discovering(script, print, print):
        until((tmp_path / "child").exists)
    status = Path("/proc", (tmp_path / "child").read_text().strip(), "status")
    with contextlib.suppress(FileNotFoundError):  # no parent may be left that asks for its end
        until(lambda: "State:\tZ" in status.read_text())
