"""What commands show in a terminal of 80 columns, and what nothing that they show can do to it."""

import fcntl
import io
import math
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from callbacks import formats, progress
from callbacks.files import naming
from callbacks.run_record import redaction
from callbacks.run_record.record import Record
from loop.commands import runs, terminal, verify
from loop.commands.verify import Comparison, Report
from tests.conftest import ROOT, TFLOOP, needs_mounts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9994, "999 ms"), (0.9996, "1.0 s"), (59.94, "59.9 s"), (59.96, "1 min"), (3599.4, "59 min 59 s"),
        (3599.7, "1 h"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations_are_rounded_before_their_unit_is_chosen(seconds, text):
    assert formats.lasting(seconds) == text


def in_terminal(command, columns=80):
    """Runs a command at a terminal so wide, and gives what it shows."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=subprocess.STDOUT, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait() == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n").splitlines()


def test_compare_fits_into_a_terminal_with_long_targets(tmp_path):
    for number in range(8):
        directory = tmp_path / "runs" / f"run-{number}"
        directory.mkdir(parents=True)
        target = f"/home/someone/{'deeply/nested/' * 4}{number}/task.py:Digits"
        (directory / "run.json").write_text(
            f'{{"task": "Digits", "status": "finished", "target": "{target}", "hyperparameters": '
            f'{{"hidden": {number}, "sizes": [{", ".join(["64"] * 9 * (number + 1))}]}}}}'
        )
        event = '{"time": 1.0, "event": "epoch_end", "step": 1, "epoch": 0, "metrics": {"a_loss_of_a_long_name_'
        (directory / "journal.jsonl").write_text(event + f'{"x" * 40}": 0.123456789, "loss": {number}.5}}}}\n')
    names = [f"run-{number}" for number in range(8)]
    lines = in_terminal([*TFLOOP, "runs", "compare", "--root", tmp_path / "runs", *names])
    assert max(map(len, lines)) <= 80
    text = "".join("".join(lines).split())
    assert "0/task.py:Digits" not in text  # it is broken over lines
    assert [line.split() for line in lines if line.startswith("hidden")] == [["hidden", *"012345"], ["hidden", *"67"]]


def test_a_table_that_fits_is_as_it_was():
    drawn = terminal.tables([["hidden", "16", "64"]], ["differs", "A", "B"])
    assert list(map(terminal.as_text, drawn)) == ["differs  A   B\nhidden   16  64"]


def test_a_plot_says_how_many_values_it_leaves_out():
    head, *_ = terminal.plot("loss", {"loss": [(1, 2.0), (2, 1e200), (3, -1e100), (4, math.inf)], "held": [(1, 3.0)]})
    assert head == "loss  * loss (2 values beyond 1e+100 left out)  o held"
    assert terminal.plot("loss", {"loss": [(1, 1e200)]}) == ["loss: nothing to plot"]


def test_verify_fits_into_a_terminal(monkeypatch):
    differences = {"gradients": 7e-7, "weights": 2e-6, "statistics": math.nan, "metrics": 5e-7}
    first = f"gradients/1/00000:{'a_block/' * 20}kernel"
    comparisons = [
        Comparison("float32", "single", 1, differences, "", True),
        Comparison("float32", "mirrored", 3, differences, first, False),
        Comparison("float64", "multiworker", 2, differences, "", True),
        Comparison("float64", "single", 1, {}, "", True, "can't be computed: " + "a long reason " * 10),
    ]
    report = Report("Digits", 64, 6, comparisons, ["compute() calls a layer " * 8], False, "2 logical CPU devices")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(terminal, "width", lambda: 80)
    lines = [text for text, _ in verify.lines(report)]
    assert max(map(len, lines)) <= 80
    assert "".join(line.strip() for line in lines).count(first) == 1
    [one] = [line for line in lines if "multiworker" in line]
    assert one.endswith("7e-07    2e-06           -    5e-07  same")


HOSTILE = "loss\x1b]0;owned\x07\nfinished at step 9\r\x9b31m\u202e"


def test_no_metric_and_no_directory_controls_the_terminal():
    stream = io.StringIO()
    display = progress.Display(stream)
    state = {
        "kind": "start", "metrics": {HOSTILE: 1.0}, "step": 0, "total": 9, "epoch": 1, "epochs": 1, "speed": 1.0,
        "directory": f"runs/{HOSTILE}", "why": HOSTILE, "status": "stopped",
        "run": dict.fromkeys(("replicas", "workers", "parameters", "batch_size"), 1) | {"backend": "x", "task": "T"},
    }  # fmt: skip
    for kind in ("start", "epoch", "end"):
        display.update(state | {"kind": kind})
    redaction.tell(f"note: {HOSTILE}", stream)
    text = stream.getvalue()
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b]0;owned" in text
    assert [line for line in text.splitlines() if line.startswith("finished")] == [
        "finished at step 9\\r\\x9b31m\\u202e"
    ]


def test_a_command_tells_of_hostile_runs_without_their_control_characters(tmp_path):
    of = Record(path=tmp_path, name="run", task="T", status="finished", replicas=1, hyperparameters={"a": 1})
    assert all(line.isprintable() for part in runs.show(of) for line in terminal.as_text(part).split("\n"))


FULL = """
import subprocess, sys
from pathlib import Path
from callbacks import files
from callbacks.csv_logger import CSVLogger
from callbacks.mlflow import tracker
from loop.checkpoint import checkpoint_files
from types import SimpleNamespace as Some
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16384", "tmpfs", disk], check=True)
with open(disk / "filler", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)): pass
    except OSError: pass
run = Some(directory=disk, history=[{"loss": 1.0}])
for write in (
    lambda: files.write_json(disk / "run.json", {"a": "b" * 9999}),
    lambda: checkpoint_files.write(disk / "checkpoints", 1, {}, {"a": "b" * 9999}),
    lambda: tracker.write_state(disk, "sqlite:///x", "e" * 9999),
    lambda: files.write_text(disk / "run.json", "x" * 9999),
    lambda: CSVLogger().on_epoch_end(run, {}),
):
    try:
        write()
    except OSError as error:
        print(error.errno, error.filename)
"""


@needs_mounts
def test_a_full_disk_names_the_file(tmp_path):
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-P", "-c", FULL, tmp_path],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [number for number, _ in lines] == ["28"] * 5, done.stdout
    for (_, told), name in zip(
        lines, ["run.json", "checkpoints", "mlflow.json", "run.json", "metrics.csv"], strict=True
    ):
        assert told.startswith(str(tmp_path / name)), told


def test_an_error_that_names_its_file_keeps_its_name(tmp_path):
    with pytest.raises(OSError, match="other"), naming(tmp_path):
        raise OSError(28, "full", "other")
