"""What goes wrong in real processes: workers that are killed or hang, peers that never come, early signals, secrets."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cli
from callbacks.progress import MARK
from loop import TrainingError, UsageError
from loop.backends import strategy
from loop.launch import machine
from loop.launch.environment import START_TIMEOUT
from loop.launch.fixed_job import FixedJob
from loop.launch.output import Output
from loop.launch.process import printed_lines, start_worker
from tests.conftest import ROOT, TFLOOP, needs_horovod

HOROVOD = pytest.param("horovod", marks=needs_horovod)
TASK = '''
from dataclasses import dataclass
import tensorflow as tf
from examples_digits import Digits as Base

class Slow(Base):
    """Takes a hundredth of a second for a step."""
    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        with tf.control_dependencies([tf.py_function(lambda: __import__("time").sleep(0.01), [], [])]):
            return {name: tf.identity(value) for name, value in values.items()}

@dataclass
class Telling(Base):
    """Says in an error what it should keep to itself."""
    api_key: str = ""
    def build_model(self):
        raise RuntimeError(f"no answer from http://me:{self.api_key}@host to {self.api_key}")
'''


class Started:
    """A command under way; every process of it can be told by its environment."""

    def __init__(self, request, directory, *arguments, command="train", **environment):
        self.mark = f"TFLOOP_TEST={directory}"
        self.process = subprocess.Popen(
            [*TFLOOP, command, *map(str, arguments), *["--track", "off"][: 2 * (command == "train")]], cwd=directory,
            env={**os.environ, "TFLOOP_TEST": str(directory), "TMPDIR": str(directory), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

        request.addfinalizer(self.clear)

    def clear(self):
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def wait_for(self, condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.02)
        return found

    def end(self, seconds=120):
        """Exit code, stdout and lines of stderr, when it has ended."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err.splitlines()

    def alive(self):
        """Its processes that are still there, by `/proc`."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (each / "environ").read_text(errors="replace").split("\0"):
                    found.append(int(each.name))
            except OSError:
                continue
        return found


@pytest.fixture
def start(request):
    return functools.partial(Started, request)


@pytest.fixture
def task(tmp_path):
    from loop.target import task_loader

    (tmp_path / "examples_digits.py").write_text(task_loader.shipped_path("digits").read_text())
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def training(directory):
    journal = directory / "run" / "journal.jsonl"
    return journal.exists() and '"epoch_end"' in journal.read_text()


def pid_of(directory, rank):
    """The process of a worker that has said who it is."""
    return next((int(path.read_text() or 0) for path in directory.glob(f"tfloop-*/rank-{rank}.pid")), 0)


def check_killed(job, rank):
    code, out, lines = job.end(seconds=30)
    assert (code, out) == (1, "")
    assert lines[-1].startswith(
        f"tfloop: error: rank {rank} ended without a word: killed by signal 9 (Killed), or out of memory"
    )
    assert not job.alive()


def test_of_workers_that_are_found_together_one_that_aborted_is_not_the_cause(tmp_path):
    job = FixedJob(tmp_path, {}, [], has_servers=False)
    job._titles = ["rank 0", "rank 1", "rank 2"]
    for number in (signal.SIGABRT, signal.SIGKILL, signal.SIGABRT):
        command = [sys.executable, "-S", "-c", f"import os; os.kill(os.getpid(), {int(number)})"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        process.wait()
        process.lost = process.where = ""
        job._processes.append(process)
    assert job._find_ended()
    outcome = job.outcome()
    assert (outcome.code, outcome.error[:41]) == (1, "rank 1 ended without a word: killed by si")


@pytest.mark.parametrize("engine", [HOROVOD, "multiworker"])
def test_a_rank_that_is_killed_ends_the_job(engine, start, task):
    """In start-up and in training, in one go: what is asked for is the same."""
    early = start(task, "task.py:Slow", "--backend", engine, "--workers", 2)
    early.wait_for(lambda: pid_of(task, 1))
    os.kill(pid_of(task, 1), signal.SIGKILL)  # it is loading TensorFlow
    check_killed(early, 1)

    rank = int(engine == "horovod")
    late = start(task, "task.py:Slow", "--backend", engine, "--workers", 2, "--epochs", 500, "--run-dir", "run")
    late.wait_for(lambda: training(task))
    os.kill(pid_of(task, rank), signal.SIGKILL)
    check_killed(late, rank)


@needs_horovod
def test_a_rank_that_hangs_in_start_up_is_named(start, task):
    job = start(
        task, "digits", "--backend", "horovod", "--workers", 2, "--start-timeout", 20, TFLOOP_FAULT="start:1:0:hang"
    )
    code, out, lines = job.end()
    assert (code, out) == (1, "")
    assert "rank 1 has not started within 20 s" in lines[-1] or "rank 1 have not started" in lines[-1]
    assert not job.alive()


def test_a_callback_that_fails_on_the_chief_alone_ends_all_with_its_error(start, task):
    job = start(task, "digits", "--backend", "multiworker", "--workers", 2, TFLOOP_FAULT="callback-epoch_end:0:1:raise")
    code, out, lines = job.end()
    assert (code, out) == (1, "")
    assert lines[-1].startswith("tfloop: error: rank 0: PlannedError: the fault callback-epoch_end:0:1:raise")
    assert not job.alive()


@needs_horovod
def test_a_rank_that_hangs_is_named_with_its_phase_and_so_is_the_one_that_waits_for_it(start, task):
    job = start(
        task, "digits", "--backend", "horovod", "--workers", 2, "--stall-timeout", 5, TFLOOP_FAULT="call:1:10:hang"
    )
    wanted = {
        "[0] watchdog: rank 0 of 2: .* it is at all-reduce for",
        "[1] watchdog: rank 1 of 2: .* it is at compute for",
    }
    for line in job.process.stderr:
        wanted = {text for text in wanted if not re.search(text.replace("[", r"\["), line)}
        if not wanted:
            break
    assert not wanted


@pytest.mark.cold
def test_the_survivor_of_an_outside_job_ends(start, task, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")  # as a user has it
    addresses = [f"127.0.0.1:{port}" for port in machine.free_ports(2)]
    workers = [
        start(
            task, "task.py:Slow", "--epochs", 500, "--run-dir", "run",
            TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}),
        )
        for index in range(2)
    ]  # fmt: skip
    workers[0].wait_for(lambda: training(task))
    workers[1].process.kill()
    workers[1].end()
    code, _, lines = workers[0].end(seconds=60)
    assert code == 1
    assert "Traceback (most recent call last):" not in lines
    assert len([line for line in lines if line.startswith("tfloop: error: another worker is gone")]) == 1, lines
    assert not [line for line in lines if "grpc" in line.lower()], lines
    assert not workers[0].alive()


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("single", signal.SIGTERM),
        ("single", signal.SIGINT),
        pytest.param("horovod", signal.SIGINT, marks=needs_horovod),
        ("multiworker", signal.SIGTERM),
    ],
)
def test_a_signal_before_training_ends_with_75(engine, number, start, task):
    workers = [] if engine == "single" else ["--workers", 2]

    def listening():
        """The command hears signals, and its workers are there, though they haven't said who they are."""
        status = Path(f"/proc/{job.process.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return caught >> (signal.SIGTERM - 1) & 1 and (not workers or len(job.alive()) == 3)

    for moment in (listening, lambda: pid_of(task, 0)) if workers else (listening,):
        job = start(task, "task.py:Slow", "--backend", engine, *workers)
        job.wait_for(moment)
        job.process.send_signal(number)
        code, out, lines = job.end()
        assert (code, out) == (75, ""), lines
        assert lines[-1].endswith("stopped before training began; start again to go on")
        assert not [line for line in lines if "error" in line or "interrupted" in line]
        assert not job.alive()
        assert not list(task.glob("tfloop-*"))


def test_sigusr1_harms_nobody_who_is_young_and_a_second_signal_ends_at_once(start, task):
    job = start(task, "task.py:Slow", "--backend", "multiworker", "--workers", 2, TFLOOP_FAULT="start:*:0:hang")
    job.wait_for(lambda: pid_of(task, 0) and pid_of(task, 1))
    job.process.send_signal(signal.SIGUSR1)
    os.kill(pid_of(task, 0), signal.SIGSTOP)  # one that can't hear a polite word
    os.kill(pid_of(task, 1), signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGINT)
    code, _, lines = job.end()
    assert code == 1
    assert "ended at once by a second signal" in lines[-1]
    assert not job.alive()


@pytest.mark.parametrize("engine", ["multiworker", "parameter_server"])
def test_workers_meet_without_the_proxy_of_their_machine(engine, start, task):
    # No process listens at the proxy's port: a connection through it fails.
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    job = start(task, "digits", "--steps", 2, "--workers", 2, "--backend", engine, "--start-timeout", 60, **proxies)
    code, _, lines = job.end()
    assert code == 0, lines
    assert not job.alive()


def test_the_exceptions_from_a_proxy_that_a_user_has_made_stay(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.org,127.0.0.1")
    monkeypatch.delenv(strategy.NO_PROXY, raising=False)
    strategy.connect_directly({"worker 0": "127.0.0.1:2222", "worker 1": "[::1]:2222"})
    assert os.environ[strategy.NO_PROXY] == "example.org,127.0.0.1,::1"


def tf_config(*ports, index=0):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def test_what_a_worker_has_started_may_live_on_with_its_streams():
    # In a session of its own, so that it isn't killed with the worker.
    code = (
        "import subprocess, sys\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(one.pid)\nprint('x' * 3_000_000, end='', flush=True)"
    )
    worker = start_worker([sys.executable, "-c", code], dict(os.environ))
    pid, *rest = printed_lines(worker, worker.stdout)
    os.kill(int(pid), signal.SIGKILL)  # it was there
    assert "".join(rest) == "x" * 3_000_000
    assert max(map(len, rest)) <= 1 << 21  # what never ends is shown in pieces
    worker.communicate()


def test_a_launcher_whose_terminal_is_gone_still_takes_what_workers_print():
    """Else they would wait for ever, when their pipe is full."""
    code = (
        "import os, sys\nfrom loop.launch import output, process\noutput = output.Output()\n"
        "command = [sys.executable, '-c', 'for i in range(20000): print(str(i) * 50)']\n"
        "worker = process.start_worker(command, dict(os.environ))\n"
        "output.follow(worker, '0')\noutput.line('a line of its own')\nsys.exit(worker.wait())"
    )
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=240, cwd=ROOT).returncode == 0
    os.close(writer)


def test_what_a_task_prints_beside_relayed_progress_is_shown_as_it_is(capfd):
    """What was taken for progress, and was none, ended the thread that reads: the worker waited for ever."""
    end = {"kind": "end", "metrics": {}, "status": "finished", "why": "", "step": 3, "speed": 1.0}
    printed = ['\x1e{"a record": "of JSON"}\n', "\x1e{\n", f"{MARK}{{\n", f"half{MARK}{json.dumps(end)}\n"]
    code = f"import sys\nfor text in {printed!r} + 90_000 * ['x\\n']: sys.stderr.write(text)"
    shown = Output()
    with start_worker([sys.executable, "-S", "-c", code], {}) as worker:
        shown.follow(worker, "0")
        assert worker.wait(timeout=240) == 0
        shown.join()
    first = [
        '[0] \x1e{"a record": "of JSON"}',
        "[0] \x1e{",
        f"[0] {MARK}{{",
        "[0] half",
        "finished at step 3, 1 examples/s",
    ]
    assert capfd.readouterr().err.split("\n") == [*first, *["[0] x"] * 90_000, ""]


@pytest.mark.parametrize(
    ("grace", "handler"), [(0.1, "signal.SIG_IGN"), (600.0, "lambda *_: sys.exit()")], ids=["hangs", "ends"]
)
def test_an_orphan_leaves_nothing_behind_that_it_has_started(grace, handler):
    orphan = (
        "import signal, subprocess, sys, time\nfrom loop.launch import worker\n"
        f"worker.ORPHAN_GRACE = {grace}\nsignal.signal(signal.SIGTERM, {handler})\nworker.die_with_parent()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('there', file=sys.stderr, flush=True)\ntime.sleep(600)"
    )
    parent = (
        "import subprocess, sys\n"
        "one = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, stderr=subprocess.PIPE)\n"
        "print(one.stderr.readline().decode())"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, orphan], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.communicate(timeout=240)[0] == "there\n\n"  # which ends when nobody has it open any more


def test_too_many_open_files_are_said_with_the_limit(tmp_path):
    command = ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh", *TFLOOP, "train", "digits", "--workers=20"]
    done = subprocess.run(
        [*command, "--backend=multiworker", "--track=off"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert re.search(r"Too many open files \(a process may have 40 here: raise that with ulimit -n; --debug", line)


def test_peers_that_never_come_are_named(monkeypatch):
    ports = machine.free_ports(3)
    monkeypatch.setenv("TF_CONFIG", tf_config(*ports))
    monkeypatch.setenv(START_TIMEOUT, "0.3")
    with socket.create_server(("127.0.0.1", ports[1])), pytest.raises(TrainingError) as raised:
        strategy._meet()
    assert str(raised.value).startswith(f"worker 2 (127.0.0.1:{ports[2]}) has not started within 0.3 s: ")


def test_own_port_in_use_is_named(monkeypatch):
    ports = machine.free_ports(2)
    monkeypatch.setenv("TF_CONFIG", tf_config(*ports, index=1))
    message = f"this process is worker 1 at 127.0.0.1:{ports[1]}, but can't listen .*other ports: .*TFLOOP_PORT_BASE"
    with socket.create_server(("127.0.0.1", ports[1])), pytest.raises(UsageError, match=message):
        strategy._meet()


@needs_horovod
def test_ranks_of_an_outside_horovodrun_that_never_come_are_named(monkeypatch):
    from loop.backends import horovod
    from loop.launch.horovodrun import rendezvous

    monkeypatch.setenv(START_TIMEOUT, "0.3")
    with rendezvous(3) as places:
        for rank in (2, 0):
            for name, value in places[rank].items():
                monkeypatch.setenv(name, value)
            with pytest.raises(TrainingError) as raised:
                horovod._meet()
        assert str(raised.value).startswith("rank 1 has not started within 0.3 s: ")  # rank 2 has been there


def test_an_error_tells_no_secret(task, monkeypatch, capfd):
    monkeypatch.chdir(task)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        sys, "argv", ["tfloop", "train", "task.py:Telling", "--set", "api_key=key-12345", "--backend", "single"]
    )
    with pytest.raises(SystemExit):
        cli.main()
    err = capfd.readouterr().err
    assert "RuntimeError: no answer from http://***@host to ***" in err
    assert "key-12345" not in err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # nothing is left of the start's handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_tune_leaves_no_trial_behind(number, start, task):
    tuning = start(task, "task.py:Slow", command="tune")
    tuning.wait_for(lambda: len(tuning.alive()) > 1)
    tuning.process.send_signal(number)
    code, _, lines = tuning.end()
    deadline = time.monotonic() + 240
    while tuning.alive():
        assert time.monotonic() < deadline, "a trial lives on"
        time.sleep(0.05)
    if number == signal.SIGINT:
        assert (code, lines[-1]) == (75, "stopped: nothing is written, and nothing is left behind")
        assert not [*task.glob("tfloop-*"), *task.glob("*tune.toml*")]
