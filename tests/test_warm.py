"""Processes that have TensorFlow imported already are what other processes are."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what the server needs")
ABOUT = """
import json, os, signal, sys
about = {
    "arguments": sys.argv, "all": sys.orig_argv, "path": sys.path, "directory": os.getcwd(), "parent": os.getppid(),
    "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(), "umask": os.umask(0),
    "environment": dict(os.environ), "name": __name__, "file": globals().get("__file__"),
    "signals": {each.name: str(signal.getsignal(each)) for each in signal.Signals}, "input": sys.stdin.read(),
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "heavy": sorted({"numpy", "tensorflow", "keras", "loop.fit"} & set(sys.modules)),
    "streams": [(each.encoding, each.errors, each.line_buffering) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "shown": [each for each in open("/proc/self/cmdline").read().split(chr(0)) if each],
}
print(json.dumps(about))
print("to stderr", file=sys.stderr)
import numpy  # which warns where its code runs again
import tensorflow
assert tensorflow.reduce_sum(tensorflow.ones([3])).numpy() == 3
from loop import fit
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("how", "new_session"), [(["-P", "-c", ABOUT], False), (["-c", ABOUT], True), (["script.py"], False)]
)
def test_a_warm_process_is_what_a_cold_one_is(how, new_session, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(ABOUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []
    for cold in ({"TFLOOP_TESTS_COLD": "1"}, {"TFLOOP_TESTS_ELSE": "1"}):
        done = subprocess.run(
            [sys.executable, "-X", "warm", *how, "one", "größe"], env={**os.environ, **cold}, input="typed",
            start_new_session=new_session, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 7, done.stderr
        assert done.stderr.startswith("to stderr\n")  # behind it stands what TensorFlow says when it is loaded
        assert "NumPy module was reloaded" not in done.stderr
        about = json.loads(done.stdout)
        del about["environment"][next(iter(cold))]
        found.append(about)
    assert found[0] == found[1]
    assert found[1]["parent"] == os.getpid()


def test_a_warm_process_is_killed_as_any_other():
    code = "import time; print('there', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-X", "warm", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_a_signal_ignored_while_the_server_starts_is_ignored_only_then(monkeypatch):
    """As within `before_training`, where a test may be the first of its process to start another."""
    monkeypatch.delenv("TFLOOP_TESTS_COLD", raising=False)
    monkeypatch.setattr(warm, "_server", None)
    code = "import signal; print(int(signal.getsignal(signal.SIGUSR1)))"
    said = []
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGUSR1, handler)
            said.append(subprocess.check_output([sys.executable, "-X", "warm", "-c", code], text=True, timeout=240))
    finally:
        signal.signal(signal.SIGUSR1, before)
        warm._server.connection.close()  # ends it
        warm._server.process.wait(240)
    assert said == ["1\n", "0\n"]


CHECKS_ITS_FILES = """
import atexit, os
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
atexit.register(lambda: print(all(os.fstat(number) for number in opened)))
"""
STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-X', 'warm', '-c', sys.argv[1]], check=True)"


def test_at_the_end_of_a_process_of_a_warm_process_its_files_are_open():
    command = [sys.executable, "-X", "warm", "-c", STARTS, CHECKS_ITS_FILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
