"""A sweep through kill -9, of itself alone or of all that belongs to it: each trial comes once, all under one parent.

`python -m tests.campaigns.sweep [KILLS]` sweeps 12 trials of digits, two at once; some five minutes on two cores.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKEN = "TFLOOP_SWEEP_CAMPAIGN"
"""Environment variable by which all processes of a sweep are known, whoever their parent has become."""


class Life:
    """A start of a sweep, and all that comes of it."""

    def __init__(self, command):
        self._token = secrets.token_hex(8)
        environment = {**os.environ, TOKEN: self._token}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)

    def wait_for(self, happened, seconds=300):
        """Waits until something has happened, or it has ended by itself; whether it has happened."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and not happened():
            assert time.monotonic() < deadline, "it has not happened"
            time.sleep(0.05)
        return self.process.poll() is None

    def pids(self):
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{TOKEN}={self._token}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    yield int(path.name)

    def kill(self, everything):
        """Kills the sweep alone, which its trials hear of; or all at once."""
        for pid in list(self.pids()) if everything else [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def result(self):
        """Its exit code, and what it has written to stderr."""
        _, printed = self.process.communicate(timeout=1200)
        return self.process.returncode, printed.decode()


def progress(directory):
    """How much has been done: lines of all trials' journals."""
    return sum(len(path.read_bytes().splitlines()) for path in directory.glob("trial-*/journal.jsonl"))


def check(directory, uri, trials):
    """Each trial is there once, complete, and so it is in MLflow, below one run."""
    import mlflow
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{directory / 'study.db'}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * trials
    assert len({tuple(trial.params.values()) for trial in study.trials}) == trials
    assert len(list(directory.glob("trial-*"))) == trials
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()], max_results=1000)
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    found = {run.data.tags["tfloop.run_directory"]: run for run in children}
    assert sorted(found) == sorted(map(str, directory.glob("trial-*")))
    assert len(children) == trials
    assert {run.info.status for run in runs} == {"FINISHED"}
    for trial in study.trials:
        run = found[str(directory / f"trial-{trial.number:03d}")]
        assert abs(run.data.metrics["eval_loss"] - trial.value) <= 1e-12 * abs(trial.value)
        for name, value in trial.params.items():
            assert float(run.data.params[name]) == float(value)
    assert abs(parent.data.metrics["best_eval_loss"] - study.best_value) <= 1e-12


def main(kills=4, trials=12):
    with tempfile.TemporaryDirectory(prefix="tfloop-sweep-") as place:
        directory, uri = Path(place) / "swept", f"sqlite:///{place}/mlflow.db"
        command = [
            sys.executable, "-P", "-m", "cli", "sweep", "digits", "--grid=hidden=16,32,64",
            "--random=learning_rate=1e-4..1e-1:log", f"--trials={trials}", "--jobs=2", "--epochs=2",
            f"--sweep-dir={directory}", f"--track={uri}", "--json",
        ]  # fmt: skip
        for number in range(kills):
            life, before = Life(command), progress(directory)
            # The first kill may hit the start of the first trials, the others are spread over the campaign.
            enough = before + (number and 20)
            if not life.wait_for(
                lambda enough=enough: (directory / "trial-000").exists() and progress(directory) >= enough
            ):
                break
            life.kill(everything=number % 2 == 1)
            print(
                f"kill {number + 1}: {'of all' if number % 2 else 'of the sweep'}, {progress(directory)} lines",
                flush=True,
            )
        life = Life(command)
        code, printed = life.result()
        print(printed)
        assert code == 0, code
        check(directory, uri, trials)
        lives = [
            sum(json.loads(line)["event"] == "restore" for line in (path / "journal.jsonl").open())
            for path in sorted(directory.glob("trial-*"))
        ]
        print(f"{trials} trials, none twice, under one parent in MLflow; lives of each: {lives}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
