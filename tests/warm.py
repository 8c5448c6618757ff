"""Starts Python processes that have TensorFlow imported already: importing it takes most of the time of a process test.

A server imports what all processes import, before any of it has run, and forks once for each process. Within
`processes`, `subprocess` asks the server for the commands of `tfloop`, and for those with `-X warm`, which Python
itself ignores. Such a process is a child of the one that asks, with its own arguments, environment, descriptors,
signals, group and session, and its `sys.modules` has only what it has imported itself. It has a server of its own, for
the workers that it starts. All other commands, and all of them where `TFLOOP_TESTS_COLD` is set, are started by the
system as ever.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "cli", "loop.commands.check_export", "loop.launch.horovodrun", "callbacks.mlflow.courier",
    "loop.commands.evaluate_beside", "loop.commands.bench_contender",
)  # fmt: skip
"""What `python -m` starts so."""
READER = "from loop.data.reader_process import serve; serve("
"""How the code of `python -c` begins that starts so: that of a reader process."""
LIGHT = ("cli", "loop.launch.fixed_job", "loop.launch.elastic_job")
"""What is in `sys.modules` from the start."""
HEAVY = (
    "jinja2", "numpy", "sklearn.datasets", "tensorflow", "keras", "loop.fit", "loop.keras_task", "loop.commands.verify",
    "loop.commands.export", "loop.backends.strategy", "horovod.tensorflow", "loop.backends.horovod",
    "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store",
)  # fmt: skip
"""What comes into `sys.modules` when it is imported, with all before it."""
IMPORTED = ("TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "LD_", "MALLOC_", "PYTHON", "LC_", "LANG")
"""Variables that are read while modules are imported begin so: they must be those of the server."""
FREE = ("PYTHONPATH", "PYTHONUNBUFFERED", "TF_CONFIG", "TF_FORCE_GPU_ALLOW_GROWTH", "CUDA_VISIBLE_DEVICES")
"""Those of them that are read later: tfloop sets the last two for processes that it starts."""
PADDING = "TFLOOP_TESTS_PADDING"
ROOM = 60_000  # bytes for arguments, and for the environment, where /proc shows them
SUBREAPER = 36  # of prctl
SERVER = "import sys; sys.path.insert(0, sys.argv[1]); from tests import warm; warm.main(int(sys.argv[2]))"

_fork_exec = subprocess._fork_exec
_server = None
_stash = {}
"""What `HEAVY` has imported: the number of the step, and the module, by name."""
_imported = {}
"""The same modules, in each process that the server makes, until it ends."""


class Server:
    """The end of a server's socket, in the process whose children it makes.

    Args:
        connection: the socket.
        environment: the variables that the server was started with.
        process: the server, where it was started and not forked.
    """

    def __init__(self, connection, environment, process=None):
        self.connection = connection
        self.environment = environment
        self.process = process
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ready = False

    def can_make(self, arguments, variables):
        """Whether it makes this process as the system would."""
        if self._owner != os.getpid() or "TFLOOP_TESTS_COLD" in variables or arguments[0] != sys.executable:
            return False
        size = sum(len(os.fsencode(name + value)) + 2 for name, value in variables.items())
        if max(size, sum(map(len, arguments)) * 4) > ROOM or parsed(arguments) is None:
            return False
        return _read_at_import(variables) == _read_at_import(self.environment)

    def make(self, request, descriptors):
        """Makes a process; returns its id."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            if not self._ready:
                self._ready = self.connection.recv(5) == b"ready"
            # The server's child makes the process and ends: its parent is then the nearest one that takes orphans.
            prctl(SUBREAPER, 1, 0, 0, 0)
            try:
                body = json.dumps(request).encode()
                socket.send_fds(self.connection, [len(body).to_bytes(4, "big")], descriptors)
                self.connection.sendall(body)
                answer = self.connection.recv(8)
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)
        if len(answer) != 8:
            raise ConnectionError
        return int.from_bytes(answer, "big")


@contextlib.contextmanager
def processes():
    """Within it, `subprocess` asks a server, which starts when the first process is wanted of it."""
    if sys.platform == "linux" and "TFLOOP_TESTS_COLD" not in os.environ:
        subprocess._fork_exec = fork_exec
    try:
        yield
    finally:
        subprocess._fork_exec = _fork_exec


def start():
    """Starts the server of this process."""
    own, its = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", SERVER, str(ROOT), str(its.fileno()), "x" * ROOM]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    padded = environment | {PADDING: "x" * ROOM}
    process = subprocess.Popen(command, env=padded, pass_fds=[its.fileno()], cwd="/", **quiet)
    its.close()
    return Server(own, environment, process)


def fork_exec(args, executables, close_fds, keep, cwd, environment, *rest):
    """Takes what `subprocess` hands to the system: its place is that of `_posixsubprocess.fork_exec`."""
    global _server
    p2cread, _, _, c2pwrite, _, errwrite, _, errpipe_write, _, new_session, *others = rest
    if close_fds and tuple(others[:6]) == (-1, None, None, None, -1, None):  # no group, users, umask, function
        arguments = [os.fsdecode(argument) for argument in args]
        variables = dict(os.environ)
        if environment is not None:
            variables = dict(os.fsdecode(each).split("=", 1) for each in environment)
        directory = os.fsdecode(cwd or os.getcwd())
        if _server is None and arguments[0] == sys.executable and parsed(arguments):
            _server = start()
        if _server and _server.can_make(arguments, variables) and Path(directory).is_dir():
            streams = [number if number != -1 else own for own, number in enumerate((p2cread, c2pwrite, errwrite))]
            kept = [number for number in keep if number != errpipe_write]
            request = {
                "arguments": arguments,
                "variables": variables,
                "directory": directory,
                "kept": kept,
                "new_session": bool(new_session),
                "umask": int(re.findall(r"Umask:\s+(\d+)", Path("/proc/self/status").read_text())[0], 8),
                "ignored": [each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
                "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            }
            with contextlib.suppress(OSError):  # a closed descriptor, or a server that was killed
                return _server.make(request, [*streams, *kept])
    return _fork_exec(args, executables, close_fds, keep, cwd, environment, *rest)


def _read_at_import(variables):
    return {name: text for name, text in variables.items() if name.startswith(IMPORTED) and name not in FREE}


def parsed(arguments):
    """Whether `-P` was given, `-m`, `-c` or "" for a script, and the rest; None where the system is to start it."""
    safe, warm = False, False
    rest = arguments[1:]
    while rest and rest[0] in ("-P", "-X"):
        if rest.pop(0) == "-P":
            safe = True
        elif rest and rest.pop(0) == "warm":
            warm = True
        else:
            return None
    if rest[:1] in (["-m"], ["-c"]) and len(rest) > 1:
        known = rest[1] in MODULES if rest[0] == "-m" else rest[1].startswith(READER)
        return (safe, *rest[:1], rest[1:]) if warm or known else None
    return (safe, "", rest) if warm and rest and not rest[0].startswith("-") else None


# The server


def main(number):
    """Imports, then makes processes until the one that it serves has ended."""
    connection = socket.socket(fileno=number)
    for each in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # those two, Python ignores in each process
        if signal.getsignal(each) == signal.SIG_IGN:  # as the starting test did just then
            signal.signal(each, signal.SIG_DFL)
    for name in LIGHT:
        importlib.import_module(name)
    atexit.register(forget)  # before all that modules register: it is called last
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # or MLflow would start a thread
    for step, name in enumerate(HEAVY):
        before = set(sys.modules)
        with contextlib.suppress(ImportError):  # Horovod may be missing
            importlib.import_module(name)
        _stash.update({new: (step, sys.modules[new]) for new in set(sys.modules) - before})
    sys.path.remove(str(ROOT))  # which `SERVER` has put there
    _imported.update({name: module for name, (_, module) in _stash.items()})
    del sys.modules["cli"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the command line has set one
    environment = dict(os.environ)
    gc.collect()
    gc.freeze()
    connection.sendall(b"ready")
    run(*serve(connection), environment)


def forget():
    """Keeps Python from taking apart, at its end, what the server has imported: that copies all the memory of it.

    All else ends as ever: the functions of `atexit`, threads, streams, the process's own modules, and the libraries.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))  # Python clears the modules that no one else has
    for name, module in _imported.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def serve(connection):
    """Makes processes; returns in each of them what it is to be, and its descriptors. Ends with the other end."""
    mine = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in mine}
    while True:
        try:
            length, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
        except ConnectionError:
            os._exit(0)
        if not length:
            os._exit(0)
        body = b""
        while len(body) < int.from_bytes(length, "big"):
            body += connection.recv(1 << 20)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            request = json.loads(body)
            if request["new_session"]:  # before the one that asks goes on: it may ask for the group
                os.setsid()
            os.write(writer, os.getpid().to_bytes(8, "big"))
            while os.getppid() == between:
                time.sleep(0.0005)
            signal.pthread_sigmask(signal.SIG_BLOCK, mine)  # until `run` has the process block what was asked for
            for number, handler in before.items():
                signal.signal(number, handler)
            connection.detach()  # `keep_descriptors` closes it; the object must not close its number at the end
            return request, descriptors
        os.waitpid(between, 0)
        connection.sendall(os.read(reader, 8))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def run(request, descriptors, environment):
    """Makes this process what was asked for, with a server of its own, and runs it to its end."""
    global _server
    own, its = socket.socketpair()
    if os.fork() == 0:
        keep_descriptors([its.fileno()], [3])
        for end in (own, its):
            end.detach()  # or the processes that it makes would close these numbers, whatever they stand for there
        connection = socket.socket(fileno=3)
        connection.sendall(b"ready")
        run(*serve(connection), environment)
        return
    highest = keep_descriptors([*descriptors, own.fileno()], [0, 1, 2, *request["kept"], None])
    own.detach()
    its.detach()
    _server = Server(socket.socket(fileno=highest), environment)
    subprocess._fork_exec = fork_exec
    os.umask(request["umask"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    tempfile.tempdir = None  # that of the server's environment
    show(request["arguments"], request["variables"])
    for name in _stash:
        sys.modules.pop(name)
    sys.meta_path.insert(0, Stash())
    _stash["numpy.random"][1].seed()  # or all processes would draw the same numbers
    open_streams()
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    execute(request["arguments"], request["variables"].get("PYTHONPATH", ""))


def keep_descriptors(descriptors, numbers):
    """Has this process keep only these, under these numbers; None is the number behind all. Returns the highest."""
    numbers = [max(number or 0 for number in numbers) + 1 if number is None else number for number in numbers]
    above = max(*numbers, *descriptors) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    null = os.open(os.devnull, os.O_RDWR)
    for number in {0, 1, 2} - set(numbers):
        os.dup2(null, number)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=number < 3)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {0, 1, 2, *numbers}:
            with contextlib.suppress(OSError):
                os.close(int(name))
    return max(numbers)


def show(arguments, variables):
    """Has /proc show the arguments and variables of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    addresses = [int(field) for field in fields[45:49]]  # the beginning and the end of each
    settings = [f"{name}={text}" for name, text in variables.items()]
    for texts, (first, last) in ((arguments, addresses[:2]), (settings, addresses[2:])):
        body = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(first, body.ljust(last - first, b"\0"), last - first)


def open_streams():
    """Opens `sys.stdin`, `sys.stdout` and `sys.stderr` as Python does when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffer = raw if unbuffered and number else (io.BufferedWriter if number else io.BufferedReader)(raw)
        lines = raw.isatty() or (number == 2 and not unbuffered)
        stream = io.TextIOWrapper(
            buffer, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered and number > 0
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def execute(arguments, python_path):
    """Runs what Python would run with these arguments."""
    safe, how, rest = parsed(arguments)
    first = {"-m": os.getcwd(), "-c": "", "": str(Path(rest[0]).resolve().parent)}
    sys.path[:0] = [*([] if safe else [first[how]]), *filter(None, python_path.split(os.pathsep))]
    importlib.invalidate_caches()
    sys.orig_argv[:] = arguments
    sys.argv[:] = [how or rest[0], *rest[1:]]
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    if how == "-m":
        runpy._run_module_as_main(rest[0])
        return
    name = "<string>"
    source = rest[0]
    if how == "":
        name = script.__file__ = str(Path(rest[0]).absolute())
        source = Path(rest[0]).read_bytes()
    exec(compile(source, name, "exec"), script.__dict__)


class Stash(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports what the server has imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in _stash:
            return None
        # Not the module itself yet: Python would take the spec that it has, and run its code again.
        last, module = _stash[name]
        for other, (step, each) in [*_stash.items()]:
            if step <= last and other != name:
                sys.modules[other] = each
                del _stash[other]
        own = getattr(module, "__spec__", None)
        spec = importlib.machinery.ModuleSpec(name, self, loader_state=(module, own))
        spec.origin = getattr(own, "origin", None)
        spec.submodule_search_locations = getattr(own, "submodule_search_locations", None)
        return spec

    def create_module(self, spec):
        _stash.pop(spec.name, None)
        return spec.loader_state[0]

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state[1]
