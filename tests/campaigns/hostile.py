"""Run directories that a stranger has made, under all commands. `python -m tests.campaigns.hostile [CASES [SEED]]`

In each case something in a run directory is exchanged for a link, a pipe, a huge or a nested file, or for nonsense
whose digests are right, and a command is given that directory. It must end with one of our exit codes, without a
traceback, within 10 s of CPU time, and must leave alone what stands outside.

Each case is a child of a process that has everything loaded, and has computed nothing with TensorFlow yet.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from loop.checkpoint import checkpoint_files

TASK = """
from dataclasses import dataclass
from tests.tasks import Plain

@dataclass
class Tiny(Plain):
    examples: int = 24
    rate: float = 0.05
"""
FILES = ("run.json", "journal.jsonl", "lock", "mlflow.json", "report.html", "run.json.tmp", "report.html.tmp")
DIRECTORIES = ("checkpoints", "bad", "samples", "model")
ABSURD = (
    None, True, -5, 10**9, 10**30, -1, 0, 1.5, 1e308, "", "x", "\x1b[31m", "../../elsewhere", "/etc/passwd", "nan",
    [], [[]], {}, {"a": None}, "9" * 300, [1] * 1000, "\0", "évil:Task", {"float": "inf"},
)  # fmt: skip
SECONDS, PATIENCE = 10, 90
"""CPU seconds that a command may take, and seconds by the clock, on a machine that may be busy with other things."""


# What a stranger does


def hurt(draw, run, elsewhere):
    """Does something to a run directory; returns what, in words."""
    way = draw.choice((exchange, exchange, exchange, fill, fill, seal, seal, seal, twist, tear, drop))
    try:
        return way(draw, run, elsewhere)
    except (ValueError, KeyError, TypeError, AttributeError):  # an earlier one has left no such JSON to change
        return tear(draw, run, elsewhere)


def regular_text(path):
    """The text of a file; a pipe, which would block, is none.

    Raises:
        ValueError: it isn't a regular file, or no text.
    """
    if not path.is_file():
        raise ValueError(path)
    return path.read_text()


def places(draw, run):
    """A file of a run directory, those of its checkpoints included."""
    steps = checkpoint_files.complete(run / "checkpoints")
    inside = [path / name for path in steps for name in ("manifest.json", "tensors.npz")]
    return draw.choice([*(run / name for name in FILES), *inside])


def clear(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange(draw, run, elsewhere):
    """A link, a pipe, a socket or a directory in the place of a file or a directory."""
    steps = checkpoint_files.complete(run / "checkpoints")
    path = draw.choice([places(draw, run), *(run / name for name in DIRECTORIES), *steps])
    kind = draw.choice(("symlink", "directory link", "dangling", "loop", "hard link", "pipe", "socket", "directory"))
    clear(path)
    if kind == "symlink":
        path.symlink_to(elsewhere / "canary")
    elif kind == "directory link":
        path.symlink_to(elsewhere)
    elif kind == "dangling":
        path.symlink_to(elsewhere / "new")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "hard link":
        os.link(elsewhere / "canary", path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(path.name)
        os.chdir(here)
    else:
        path.mkdir()
    return f"{path.relative_to(run)} is a {kind}"


def fill(draw, run, elsewhere):
    """A huge, nested or garbled file."""
    path, kind = places(draw, run), draw.choice(("sparse", "deep", "digits", "garbage", "empty", "wide", "no object"))
    clear(path)
    if kind == "sparse":
        with path.open("wb") as file:
            file.truncate(8 << 30)
    elif kind == "deep":
        path.write_text('{"task": "Tiny", "a": ' + "[" * 300_000 + "]" * 300_000 + "}\n")
    elif kind == "digits":
        path.write_text('{"task": "Tiny", "step": ' + "9" * draw.choice((400, 4301, 100_000)) + "}\n")
    elif kind == "garbage":
        path.write_bytes(draw.randbytes(5000))
    elif kind == "wide":
        path.write_text(json.dumps({f"name{i}": i for i in range(200_000)}) + "\n")
    else:
        path.write_text({"empty": "", "no object": "[1, 2]\n"}[kind])
    return f"{path.relative_to(run)} is {kind}"


def exchanged(draw, value):
    """JSON with one of its values, at any depth, exchanged or left out; and where."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return draw.choice(ABSURD), ""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = draw.choice(keys)
    copy = value.copy()
    if draw.random() < 0.1:
        del copy[key]
        return copy, f".{key} left out"
    copy[key], where = exchanged(draw, value[key])
    return copy, f".{key}{where}"


def seal(draw, run, elsewhere):
    """A manifest with nonsense in it, and the digest that belongs to it; those before it are removed."""
    *before, path = checkpoint_files.complete(run / draw.choice(("checkpoints", "checkpoints", "bad"))) or [None]
    if path is None:
        return tear(draw, run, elsewhere)
    for each in before:
        shutil.rmtree(each)
    manifest = json.loads(regular_text(path / "manifest.json"))
    manifest.pop("sha256")
    manifest, where = exchanged(draw, manifest)
    if isinstance(manifest, dict):
        manifest["sha256"] = checkpoint_files._digest(manifest)
        if isinstance(manifest.get("step"), int) and 0 <= manifest["step"] < 10**15:
            path = path.rename(path.with_name(f"step-{manifest['step']:08d}"))
    (path / "manifest.json").write_text(json.dumps(manifest))
    return f"the manifest's {where}, sealed"


def twist(draw, run, elsewhere):
    """Nonsense in `run.json`, or in a line of the journal."""
    if draw.random() < 0.5:
        path = run / "run.json"
        value, where = exchanged(draw, json.loads(regular_text(path)))
        path.write_text(json.dumps(value))
        return f"run.json{where} is nonsense"
    path = run / "journal.jsonl"
    lines = regular_text(path).splitlines()
    number = draw.randrange(len(lines))
    value, where = exchanged(draw, json.loads(lines[number]))
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return f"line {number} of the journal{where} is nonsense"


def tear(draw, run, elsewhere):
    """A file that is cut, or has another byte."""
    path = places(draw, run)
    if path.is_file() and path.stat().st_size:
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content[: draw.randint(0, len(content))] if draw.random() < 0.5 else content)
    return f"{path.relative_to(run)} is torn"


def drop(draw, run, elsewhere):
    """A file or directory that isn't there."""
    path = draw.choice([run / "checkpoints", places(draw, run)])
    clear(path)
    return f"{path.relative_to(run)} is gone"


# What is done with it


def commands(run, good, place):
    """Command lines for a run directory, those that need no TensorFlow first."""
    target, new = f"{place / 'task.py'}:Tiny", place / "case"
    short = ["--track", "off", "--backend", "single", "--batch-size", "8"]
    return [
        ["runs", "--root", run.parent], ["runs", "show", run], ["runs", "show", run, "--json"],
        ["runs", "compare", run, good], ["tail", run, "--no-follow"], ["report", run],
        ["export", run, new / "out.npz"], ["runs", "rm", run, "--yes"], ["evaluate", run], ["replay", run],
        ["sweep", run], ["evaluate", run / "checkpoints" / "step-00000006"],
        ["sync", run, "--track", f"sqlite:///{place / 'store' / 'mlflow.db'}"], ["sync", run],
        ["evaluate", run, "--target", target], ["replay", run, "--target", target],
        ["export", run, new / "out", "--target", target, "--no-check"],
        ["train", target, "--epochs", "3", "--run-dir", run, *short],
        ["train", target, "--epochs", "3", "--run-dir", run, "--resume", "never", *short],
        ["train", target, "--epochs", "3", "--run-dir", new / "new", "--resume", run, *short],
    ]  # fmt: skip


QUICK = 12
"""So many of `commands` load neither TensorFlow's runtime nor MLflow, whatever they find."""


def seen(*directories):
    """What stands in directories: names, sizes, times and contents."""
    found = {}
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            about = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[str(path)] = about.st_mode, about.st_size, about.st_mtime_ns, content
    return found


def run_command(words):
    """Runs a command line in this process; returns its exit code. Its working directory and streams are this one's."""
    import cli

    sys.argv = ["tfloop", *map(str, words)]
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


def child(act, output):
    """Runs `act` in a child; returns its exit code (negative: the signal that ended it; None: it hung) and seconds."""
    begun = time.monotonic()
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.setsid()
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            streams = [os.fdopen(each, "w", closefd=False) for each in (1, 2)]  # kept: a command wraps them
            sys.stdout, sys.stderr = streams
            code = act()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code if isinstance(code, int) else 99)
    while time.monotonic() - begun < PATIENCE:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it has left behind
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, PATIENCE


def base(place):
    """Trains a run with a step that wasn't finite, and makes the store's tables; in a child, since it computes."""

    def act():
        import mlflow
        import numpy as np

        import callbacks
        from loop import fit
        from tests.tasks import regression

        sys.path.insert(0, str(place))
        import task

        from loop import ArrayData

        class Tiny(task.Tiny):
            def train_data(self):
                inputs, labels, _ = regression(self.examples)
                inputs[20] = np.inf
                return ArrayData(inputs, labels)

        Tiny.__module__ = "task"
        more = {"batch_size": 8, "on_nonfinite": "skip", "run_dir": place / "good"}
        fit(Tiny(), epochs=2, callbacks=callbacks.standard(mlflow=None, progress=None), **more)
        (place / "store").mkdir()
        mlflow.MlflowClient(f"sqlite:///{place / 'store' / 'mlflow.db'}").search_experiments()
        return 0

    output = place / "output"
    global PATIENCE
    PATIENCE, before = 600, PATIENCE
    code, _ = child(act, output)
    PATIENCE = before
    assert code == 0, output.read_text()


def judge(words, code, seconds, told, before, after, limit=SECONDS):
    """What is wrong with how a command has ended, or ""."""
    if code is None:
        return f"hung for {PATIENCE} s"
    if code not in (0, 1, 2, 75):
        return f"exit code {code}"
    if "Traceback" in told:
        return "a traceback"
    if seconds > limit:
        return f"{seconds:.1f} s"
    if before != after:
        changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
        return f"touched {', '.join(sorted(changed))}"
    return "" if code == 0 or told.strip() else "failed without a word"


def main(cases=500, seed=0):
    draw, place = random.Random(seed), Path(tempfile.mkdtemp(prefix="tfloop-hostile-"))
    os.environ |= {"HOME": str(place / "home"), "XDG_STATE_HOME": str(place / "state"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{place / 'store' / 'mlflow.db'}"
    for name in ("home", "elsewhere", "runs"):
        (place / name).mkdir()
    (place / "task.py").write_text(TASK)
    (place / "elsewhere" / "canary").write_text("what stands elsewhere stays as it is\n")
    import mlflow  # noqa: F401 - loaded once, for all children

    import cli  # noqa: F401

    base(place)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    codes, wrong, longest, begun = Counter(), [], (0.0, ""), time.monotonic()
    for case in range(cases):
        run, new = place / "runs" / "run", place / "case"
        new.mkdir()
        shutil.copytree(place / "good", run)
        what = "; ".join(hurt(draw, run, place / "elsewhere") for _ in range(draw.choice((1, 1, 1, 2))))
        words = draw.choice(commands(run, place / "good", place))
        outside = (place / "elsewhere", place / "good", place / "home")
        before = seen(*outside)
        os.chdir(new)
        code, seconds = child(lambda words=words: run_command(words), place / "output")
        os.chdir(place)
        told = (place / "output").read_text(errors="replace")
        problem = judge(words, code, seconds, told, before, seen(*outside))
        codes[code] += 1
        longest = max(longest, (seconds, f"{words[0]}: {what}"))
        if problem:
            wrong.append(f"case {case}: {problem}: {what}: tfloop {' '.join(map(str, words))}\n{told[-1500:]}")
            print(wrong[-1], flush=True)
        shutil.rmtree(new)
        clear(run)
    print(f"{cases} cases in {time.monotonic() - begun:.0f} s, exit codes {dict(codes)}, longest {longest[0]:.1f} s")
    print(f"  ({longest[1]})\n{len(wrong)} wrong")
    shutil.rmtree(place)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
