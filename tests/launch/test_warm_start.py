"""Warm starts: a process that was forked is as one that the system has started."""

import json
import multiprocessing
import os
import signal
import subprocess
from multiprocessing import forkserver

import pytest

from loop import fit
from loop.launch import warm_start
from loop.launch.environment import LAUNCHER
from tests.tasks import Weighted

TASKS = """
import json, os, signal, sys
import numpy as np
from tests.tasks import Weighted

DRAWN = float(np.random.rand())  # not yet by the seed of a run

class Told(Weighted):
    def train_data(self):
        facts = {
            "drawn": DRAWN, "session": os.getsid(0) == os.getpid(), "arguments": sys.argv[1:3],
            "launcher": os.environ["TFLOOP_LAUNCHER"] == str(os.getppid()), "variable": os.environ["GIVEN"],
            "directory": os.getcwd(),
        }
        print(json.dumps(facts), file=sys.stderr)
        return super().train_data()

class Killed(Weighted):
    def train_data(self):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def trained(tmp_path):
    """Starts a training of this file's tasks; gives the process, and what it has printed by its end."""
    (tmp_path / "mine.py").write_text(TASKS)
    forkserver._forkserver._stop()  # that of an earlier test may have other variables
    warm_start._server_environment.cache_clear()
    number = iter(range(9))

    def start(target, **variables):
        out, errors = (tmp_path / f"{name}-{next(number)}" for name in ("out", "errors"))
        command = [
            *warm_start.COMMAND,
            "train",
            target,
            "--epochs=1",
            "--track=off",
            "--json",
            "--run-dir=" + str(out) + ".run",
        ]
        environment = {**os.environ, LAUNCHER: str(os.getpid()), "GIVEN": "here", **variables}
        process = warm_start.start(command, environment, out, errors)
        return process, lambda: (process.wait(120), out.read_text(), errors.read_text())

    return start


def test_each_process_stands_alone_and_trains_to_the_same_bits(trained, quiet):
    first, ended_first = trained("mine.py:Told")
    second, ended_second = trained("mine.py:Told")
    killed, ended_killed = trained("mine.py:Killed")
    assert all(isinstance(process, warm_start._Forked) for process in (first, second, killed))

    facts = []
    for ended in (ended_first, ended_second):
        code, printed, errors = ended()
        assert code == 0, errors
        assert json.loads(printed)["weights_sha256"] == fit(Weighted(), callbacks=quiet()).weights_sha256
        facts.append(json.loads(next(line for line in errors.splitlines() if line.startswith('{"drawn"'))))
    assert facts[0].pop("drawn") != facts[1].pop("drawn")  # the seed of the server is not theirs
    told = {"session": True, "arguments": ["train", "mine.py:Told"], "launcher": True, "variable": "here"}
    assert facts == [told | {"directory": os.getcwd()}] * 2
    assert ended_killed()[0] == killed.returncode == -signal.SIGKILL


def test_it_is_stopped_killed_and_waited_for_as_any_other(trained):
    process, ended = trained("mine.py:Missing")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    code, printed, errors = ended()
    assert (code, printed) == (2, "")
    assert "tfloop: error: " in errors
    assert process.poll() == 2
    process.terminate()  # does nothing to what has ended
    process, ended = trained("mine.py:Told")
    os.killpg(process.pid, signal.SIGKILL)
    assert ended()[0] == -signal.SIGKILL


def test_what_must_be_imported_otherwise_starts_as_ever(trained):
    process, ended = trained("mine.py:Missing", TF_ENABLE_ONEDNN_OPTS="0")
    assert isinstance(process, subprocess.Popen)
    assert ended()[0] == 2


def test_without_a_socket_for_the_server_it_starts_as_ever(trained, monkeypatch):
    """In a `TMPDIR` whose path is longer than that of a socket may be, sweeps ended with an OSError."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", f"/tmp/{'long' * 30}")
    process, ended = trained("mine.py:Missing")
    assert isinstance(process, subprocess.Popen)
    assert ended()[0] == 2
