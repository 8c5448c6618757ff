"""Evaluation beside the training: the same numbers at the same steps, whatever is killed, and never in the way."""

import json
import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

import mlflow
import pytest

import callbacks
from callbacks.evaluate_beside import FOLDER, _visible
from callbacks.run_record import record
from callbacks.side_process import SideProcess
from loop import fit
from tests.conftest import TFLOOP, needs_horovod, tfloop, until
from tests.tasks import Plain

COMMAND = ("train", "digits", "--checkpoint-every", "epoch", "--seed", 1)


def train(*arguments, beside=True, cwd=None):
    how = ("--eval-beside", "cpu") if beside else ()
    return tfloop(*COMMAND, *arguments, *how, cwd=cwd)


def lines(run):
    """The lines of the journal about evaluations."""
    entries = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["event"] == "eval_end"]


def evaluations(run):
    return {entry["step"]: entry["metrics"] for entry in lines(run)}


@pytest.fixture(scope="module")
def within(tmp_path_factory):
    """The evaluations of a run that makes them itself."""
    directory = tmp_path_factory.mktemp("within")
    done = train("--epochs", 4, "--track", "off", "--run-dir", "run", beside=False, cwd=directory)
    assert done.returncode == 0, done.stderr
    return evaluations(directory / "run")


def test_they_are_those_of_the_run_to_the_bit_at_their_own_steps_everywhere(within, empty_store, tmp_path):
    store = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    done = train("--epochs", 4, "--track", store, "--run-dir", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert evaluations(tmp_path / "run") == within
    assert [(entry["step"], entry["epoch"]) for entry in lines(tmp_path / "run")] == [(45 * n, n) for n in range(1, 5)]

    last = within[180]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: result["metrics"][name] for name in last} == last
    assert f"step 180: eval_loss {last['eval_loss']:.4g}"[:25] in done.stderr

    read = record.read(tmp_path / "run")
    assert read.curves["eval_loss"] == [(step, metrics["eval_loss"]) for step, metrics in within.items()]
    assert (read.status, read.steps, read.faults) == ("finished", 180, [])
    client = mlflow.MlflowClient(store)
    [run] = client.search_runs([client.get_experiment_by_name("Digits").experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval_loss")
    assert {point.step: point.value for point in history} == {step: each["eval_loss"] for step, each in within.items()}
    assert not (tmp_path / "run" / FOLDER).exists()


@needs_horovod
def test_a_job_of_several_workers_has_them_made_by_one_process(tmp_path):
    done = train("--epochs", 2, "--workers", 2, "--track", "off", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = evaluations(tmp_path / "run")
    assert list(found) == [45, 90]
    alone = tfloop("evaluate", "run", "--json", cwd=tmp_path)
    assert json.loads(alone.stdout.splitlines()[-1]) == found[90]


def test_a_run_that_was_killed_goes_on_with_those_that_are_missing(within, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "stops.py").write_text(
        "import os, signal\n"
        "import callbacks\n"
        "from loop.target.task_loader import find\n"
        "class Digits(find('digits')):\n"
        "    def build_callbacks(self):\n"
        "        def killed(run, reason):\n"
        "            if run.progress.step >= 90 and not os.path.exists('killed'):\n"
        "                open('killed', 'w').close()\n"
        "                os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return [callbacks.LambdaCallback(checkpoint=killed)]\n"
    )
    command = ("train", "stops.py:Digits", *COMMAND[2:], "--epochs", 4, "--run-dir", "run", "--track", "off")
    assert tfloop(*command, "--eval-beside", "cpu", cwd=tmp_path).returncode == -signal.SIGKILL
    assert any((run / FOLDER).iterdir())

    done = tfloop(*command, "--eval-beside", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert evaluations(run) == within
    assert len(lines(run)) == len(within)  # each once
    assert not (run / FOLDER).exists()


def test_the_history_has_those_of_earlier_attempts_and_none_of_another_run(tmp_path, quiet):
    beside = callbacks.EvaluateBeside()

    def trained(directory, epochs, every):
        chosen = quiet(checkpoint=callbacks.Checkpoint(every)) + [beside]
        done = fit(Plain(), epochs=epochs, eval_every="never", run_dir=tmp_path / directory, callbacks=chosen)
        return [row.get("eval_loss") for row in done.history]

    first = trained("run", 2, "epoch")
    assert None not in first
    resumed = trained("run", 3, "epoch")
    assert resumed[:2] == first
    assert resumed[2] is not None
    # This run has no checkpoint of its second epoch, at whose step the same object has evaluated that of another run.
    assert trained("other", 3, 1000) == [first[0], None, resumed[2]]


TRAINS = """
import loop
from tests.tasks import Plain


class Mine(Plain):
    pass


loop.fit(Mine(), steps=1)
"""


def test_a_file_that_trains_when_it_is_imported_is_refused_in_its_process(tmp_path):
    """Each training started a process, which imported the file and trained, without end."""
    (tmp_path / "mine.py").write_text(TRAINS)
    process = SideProcess("loop.commands.evaluate_beside")
    try:
        process.order({"target": f"{tmp_path / 'mine.py'}:Mine", "fields": {}, "device": "cpu", "options": {}})
        process.order("step-1")
        answer = process.answer(240)
    finally:
        process.end()
    assert "mine.py calls fit when it is imported, and a call of fit has imported it: call fit below" in answer["error"]
    assert not Path("runs").exists()


def test_thousands_of_missing_evaluations_fill_no_pipe():
    """The training wrote orders and read no answer, the process answered and read no order: both waited for good."""
    beside = callbacks.EvaluateBeside()
    beside._pending = [Path(f"/runs/run/{FOLDER}/step-{step:08d}") for step in range(4000)]
    beside._process = SideProcess("http.server", "--bind", "127.0.0.1", "0")  # which reads no order
    stdin = beside._process.process.stdin
    try:
        os.set_blocking(stdin.fileno(), False)
        beside._order()
        assert select.select([], [stdin], [], 0)[1]
    finally:
        beside._end_process()


def test_its_process_is_heard_by_a_training_with_many_open_files(many_open_files):
    process = SideProcess("json.tool", "--help")  # which ends, and gives no answer
    try:
        with pytest.raises(EOFError, match="its process ended with 0"):
            process.answer(60)
    finally:
        process.end()


def test_the_end_of_its_process_is_told_and_stops_nothing(tmp_path, quiet, capfd):
    beside = callbacks.EvaluateBeside()

    class Killer(callbacks.Callback):
        every = 1

        def on_steps_end(self, run, metrics):
            os.kill(beside._process.process.pid, signal.SIGKILL) if run.progress.step == 1 else None

    result = fit(Plain(), steps=4, eval_every="never", run_dir=tmp_path / "run", callbacks=quiet() + [beside, Killer()])
    assert result.status == "finished"
    assert "checkpoints aren't evaluated any more: its process ended with -9" in capfd.readouterr().err
    assert not lines(tmp_path / "run")


def test_it_ends_with_the_training_that_is_killed(tmp_path):
    command = [*TFLOOP, *map(str, COMMAND), "--epochs", "100000", "--eval-beside", "cpu", "--track", "off"]
    with subprocess.Popen([*command, "--run-dir", "run"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("step "):  # the first evaluation
                break
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        process.kill()
    assert children
    for child in children:
        until(lambda child=child: _has_ended(child))


def _has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digits", "--eval-beside", "tpu"), "--eval-beside tpu: give cpu, or a GPU such as gpu:1"),
        (("digits", "--eval-beside", "cpu", "--eval-every", "3"), "leave one of them out"),
    ],
)
def test_bad_input(command, arguments, text):
    code, _, errors = command("train", *arguments, "--track", "off")
    assert code == 2
    assert text in errors


def test_a_run_that_evaluates_itself_is_refused(tmp_path, quiet):
    with pytest.raises(ValueError, match="would make the same evaluations"):
        fit(Plain(), run_dir=tmp_path / "run", callbacks=quiet() + [callbacks.EvaluateBeside()])


def test_what_fails_there_is_told_once(tmp_path):
    (tmp_path / "blind.py").write_text(
        "from loop.target.task_loader import find\n"
        "class Blind(find('digits')):\n"
        "    def eval_data(self):\n"
        "        return None\n"
    )
    done = tfloop("train", "blind.py:Blind", *COMMAND[2:], "--epochs", 3, "--eval-beside", "cpu", "--run-dir", "run")
    assert done.returncode == 0
    assert done.stderr.count("isn't evaluated: Blind.eval_data() returned None") == 1
    assert not lines(tmp_path / "run")


def test_no_cpu_evaluates_in_the_place_of_a_gpu_that_is_not_there(tmp_path):
    done = tfloop(*COMMAND, "--epochs", 2, "--track", "off", "--eval-beside", "gpu:99", "--run-dir", "run")
    assert done.returncode == 0
    assert done.stderr.count("isn't evaluated: gpu:99 was to evaluate it, and TensorFlow doesn't see it") == 1
    assert not lines(tmp_path / "run")


@pytest.mark.parametrize(
    ("allowed", "device", "visible"),
    [(None, "gpu:1", "1"), ("2,3", "gpu:1", "3"), ("2,3", "gpu:2", "-1"), ("2,3", "cpu", "-1"), ("-1", "gpu:0", "-1")],
)
def test_only_gpus_that_the_run_may_use_are_taken(monkeypatch, allowed, device, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert _visible(device) == visible
