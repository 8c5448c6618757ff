"""docs/tutorial.md, followed word by word: each command and each program, in the order of the page."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from loop.launch import machine
from tests.conftest import ROOT, TFLOOP, needs_horovod, tfloop

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
INTERRUPTED = "# press Ctrl-C"
LONG, SHORTER = "--epochs 200", "--epochs 60"
"""What gives people the time to press Ctrl-C, and what a program needs."""


def section(number):
    """The section of the page with this number."""
    [text] = [text for text in SECTIONS if text.startswith(f"{number}. ")]
    return text


def blocks(text, language=""):
    """The fenced blocks of a text that are in this language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for its_language, code in fences if its_language == language]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tutorial")


def type_in(line, directory):
    """Types a command of the page; returns what it has printed."""
    name, *arguments = shlex.split(line.replace(LONG, SHORTER), comments=True)
    assert name == "tfloop"
    if INTERRUPTED in line:
        return interrupted(arguments, directory)
    done = tfloop(*arguments, cwd=directory)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def interrupted(arguments, directory):
    """The same, with a Ctrl-C after the first epochs."""
    journal = directory / arguments[arguments.index("--run-dir") + 1] / "journal.jsonl"
    process = subprocess.Popen([*TFLOOP, *arguments], cwd=directory, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (journal.exists() and '"eval_end"' in journal.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=240)
    assert process.returncode == 75, printed
    return printed


def run(number, directory):
    """All commands of a section; returns what each has printed."""
    lines = [line for block in blocks(section(number)) for line in block.splitlines()]
    return [type_in(line, directory) for line in lines]


def program(code, directory):
    """Runs a program of the page in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-X", "warm", "-c", code], cwd=directory, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(run_dir):
    """The losses of all evaluations of a run that is over."""
    assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"
    lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    return [line["metrics"]["eval_loss"] for line in lines if line["event"] == "eval_end"]


def test_1_the_notebook_trains(directory):
    cells = [nbformat.v4.new_code_cell(code) for code in blocks(section(1), "python")]
    here = f"import sys; sys.path[:0] = ['', {str(ROOT)!r}]"  # as in an installation, and as Jupyter starts kernels
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(here), *cells])
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(directory)}}).execute()
    [shown] = [output for output in notebook.cells[-1]["outputs"] if output["output_type"] == "execute_result"]
    assert "finished" in shown["data"]["text/html"]
    assert (directory / "mytask.py").exists()


def test_2_runs_are_listed_and_reported(directory):
    listed, shown, _ = run(2, directory)
    assert listed.count("MyTask-") == 1
    assert "eval_loss" in shown
    assert len([*directory.glob("runs/MyTask-*/report.html")]) == 1


def test_3_it_is_checked(directory):
    dry, overfit, verified = run(3, directory)
    assert "nothing of it is kept" in dry
    assert re.search(r"eval_accuracy 1\s", overfit)
    assert "the same numbers everywhere" in verified


@needs_horovod
def test_4_two_workers_have_the_numbers_of_one(directory):
    run(4, directory)
    one, two = (losses(directory / "runs" / name) for name in ("one", "two"))
    assert one == pytest.approx(two, rel=0, abs=1e-4)


@needs_horovod
def test_5_it_is_interrupted_and_goes_on(directory):
    stopped, resumed, killed = run(5, directory)
    assert "--run-dir runs/long" in stopped
    assert "going on" in resumed or "went on" in resumed, resumed
    assert "nothing is lost" in killed


def test_6_predictions_are_read(directory):
    run(6, directory)
    [code] = blocks(section(6), "python")
    assert float(program(code, directory)) > 0.8


def test_7_the_export_is_loaded_by_tensorflow_alone(directory):
    run(7, directory)
    [code] = blocks(section(7), "python")
    assert "loop" not in code
    assert float(program(code, directory)) > 0.8
    assert (directory / "image" / "Dockerfile").exists()
    assert (directory / "image" / "my_task" / "1" / "saved_model.pb").exists()


def test_8_a_launcher_starts_it(directory):
    [script] = blocks(section(8))
    ports = machine.free_ports(2)
    for stated, free in zip(("41001", "41002"), ports, strict=True):
        script = script.replace(stated, str(free))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=directory, capture_output=True, text=True, timeout=280, env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(directory / "runs" / "cluster") == pytest.approx(losses(directory / "runs" / "two"), rel=0, abs=1e-4)


def test_every_block_of_the_page_is_run():
    text = "".join(section(number) for number in range(1, 9))
    assert PAGE.count("\n```") == 2 * (len(blocks(text)) + len(blocks(text, "python")))
