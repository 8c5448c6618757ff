"""What all tests share: four logical CPU devices, a clean directory for each test, and quick callbacks."""

import atexit
import contextlib
import functools
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Where Python was told to write no bytecode, each process would compile TensorFlow again: 10 of its 15 seconds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(ROOT / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
# Not the home of who runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="tfloop-state-")
os.environ["TFLOOP_CACHE"] = f"{os.environ['XDG_STATE_HOME']}/cache"
# Horovod's workers wake each other up every half millisecond, as `loop.backends.horovod` asks for, also where one
# compiles and the others wait: a quarter of their CPU time. `test_horovodrun_is_joined` has what users have, and so
# have tests marked `cold`.
CYCLE = "HOROVOD_CYCLE_TIME"
os.environ.setdefault(CYCLE, "5")

# A shell in the background, or `nohup`, ignores these, and so would each process that a test starts.
for _number, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

import pytest
import tensorflow as tf

import callbacks
from loop.launch import machine
from tests import warm
from tests import workers as workers_

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
TFLOOP = [sys.executable, "-P", "-m", "cli"]

needs_horovod = pytest.mark.skipif(machine.horovod_missing() is not None, reason=str(machine.horovod_missing()))
# A disk that is full or read-only is a real one, mounted where no other process sees it.
needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0, reason="may not mount"
)

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


QUICK = (
    "test_architecture", "test_cli", "test_fit", "test_options", "checkpoint/test_checkpoint_files",
    "launch/test_launcher", "step/test_step", "target/test_fields",
)  # fmt: skip
"""The files whose tests `-m quick` runs, but for those marked `slow`."""

LONGEST = (
    "launch/test_jobs", "launch/test_hosts", "test_same_numbers", "commands/test_chaos", "commands/test_sweep",
    "backends/test_backends", "step/test_sharding", "backends/test_parameter_server", "commands/test_verify",
    "launch/test_failures", "launch/test_ray", "launch/test_elastic", "commands/test_tune",
    "callback/test_mlflow_extras", "callback/test_tracking", "test_first", "test_first_hour", "commands/test_export",
    "test_ported", "test_tutorial", "test_examples", "step/test_remat", "test_reliability",
)  # fmt: skip
"""The files that come first, so that no worker of `-n 2` is left alone with one at the end."""


def pytest_collection_modifyitems(items):
    names = {item: item.path.relative_to(ROOT / "tests").with_suffix("").as_posix() for item in items}
    for item, name in names.items():
        if name in QUICK and not item.get_closest_marker("slow"):
            item.add_marker("quick")
    items.sort(key=lambda item: LONGEST.index(names[item]) if names[item] in LONGEST else len(LONGEST))


def pytest_collection_finish():
    """Spares the garbage collector what has been imported, and most of its looks at graphs: a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 10)


@pytest.fixture(scope="session", autouse=True)
def _warm_processes():
    """Processes of `tfloop` have TensorFlow imported already, but in tests marked `cold`."""
    with warm.processes():
        yield


@pytest.fixture(autouse=True)
def _directory_of_its_own(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # where a task's file lies comes into it
    for name in ("TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE", "MLFLOW_TRACKING_URI", "TFLOOP_JOB"):
        monkeypatch.delenv(name, raising=False)
    if request.node.get_closest_marker("cold"):
        monkeypatch.setenv("TFLOOP_TESTS_COLD", "1")
        monkeypatch.delenv(CYCLE, raising=False)
    before = sys.modules.copy()
    yield
    os.environ.pop("TFLOOP_OWNER", None)  # of a backend that was made in this process
    # A task file of this test, such as `task.py`, would be the module `task` for all tests after it.
    inside = f"{tmp_path}{os.sep}"
    for name, module in sys.modules.copy().items():  # another thread may import
        if before.get(name) is module:  # to ask all 6,000 modules for their file takes 6 ms a test
            continue
        file = getattr(module, "__file__", None)
        if file and str(file).startswith(inside):
            del sys.modules[name]


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A sqlite store with its tables: making them takes seconds."""
    import mlflow

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Runs a job of `tests/workers.py`, once; gives what each worker has printed, and what the chief has written."""

    @functools.cache
    def run(engine, workers):
        if engine == "horovod" and (missing := machine.horovod_missing()):
            pytest.skip(missing)
        out = tmp_path_factory.mktemp(f"{engine}-{workers}")
        return workers_.run(engine, workers, out), out

    return run


@pytest.fixture
def many_open_files():
    """More open files than `select.select` takes, as of a run with a file for each part of its data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this system opens fewer files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def quiet():
    """The standard callbacks without MLflow and without a bar; each call gives new ones."""
    return lambda **changes: callbacks.standard(**{"mlflow": None, "progress": None, **changes})


class Unstarted(callbacks.Callback):
    """Ends a run before its first step."""

    def on_fit_start(self, run):
        run.stop("all that comes before the first step has been checked")


@pytest.fixture
def checks():
    """Callbacks that end a run before its first step: for what is said by then, no step has to be compiled."""
    return lambda: callbacks.standard(mlflow=None, progress=None, checkpoint=None) + [Unstarted()]


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a command line in this process, where TensorFlow is warm; gives exit code, stdout and stderr."""
    import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tfloop", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capfd.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


def until(happened, seconds=240):
    """Waits until something has happened, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)
    return found


def tfloop(*arguments, cwd=None, timeout=480, **more):
    """Runs the command in a process of its own; gives its exit code, stdout and stderr."""
    return subprocess.run(
        [*TFLOOP, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout, **more
    )
