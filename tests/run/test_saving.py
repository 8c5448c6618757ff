"""What saving costs: the history stands in the journal alone, and short epochs share a checkpoint."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import callbacks
from callbacks import Callback, Checkpoint
from callbacks import checkpoint as policy
from callbacks.run_record.journal import read_history
from loop import fit
from loop.backends import create
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files
from loop.run.checkpointing import Checkpointing
from tests.tasks import Plain


class Killed(BaseException):
    """Nothing in the loop catches this: the process might as well be gone."""


class EndAt(Callback):
    """Ends the run at the start of an epoch, counted from 0: by a kill, or by an error."""

    def __init__(self, epoch, error=Killed):
        self.epoch, self.error = epoch, error

    def on_epoch_start(self, run):
        if run.progress.epoch == self.epoch:
            if self.error is Killed:
                run.checkpointing.held = None  # which would be lost with the process
            raise self.error("planted")


class Scores(Callback):
    """Makes the evaluation of the seventh epoch the best."""

    runs_on = "all"

    def on_eval_end(self, run, metrics):
        metrics["eval_loss"] = abs(run.progress.epoch - 6) + 1.0


def train(directory, epochs, *more, journal=True, every="epoch", backend="single", **options):
    changes = {} if journal else {"journal": None}
    chosen = callbacks.standard(
        mlflow=None, progress=None, report=None, checkpoint=Checkpoint(every=every, keep_last=99), **changes
    )
    chosen = callbacks.StandardSet([*more, *chosen])
    return fit(Plain(), epochs=epochs, batch_size=50, run_dir=directory, callbacks=chosen, backend=backend, **options)


def killed(directory, epoch, **options):
    with pytest.raises(Killed):
        train(directory, 6, EndAt(epoch), eval_every="never", **options)


def steps_of(directory):
    return [int(path.name.removeprefix("step-")) for path in checkpoint_files.complete(Path(directory) / "checkpoints")]


def manifest_size(directory, step):
    return (Path(directory) / "checkpoints" / f"step-{step:08d}" / "manifest.json").stat().st_size


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run", 6, eval_every="never")


def test_checkpoints_do_not_grow_with_the_epochs():
    train("run", 60, eval_every="never")
    # All that may differ are the digits of counters and of means.
    assert abs(manifest_size("run", 180) - manifest_size("run", 3)) < 100
    assert manifest_size("run", 180) < 20_000
    assert "history" not in checkpoint_files.verify(Path("run/checkpoints/step-00000180"))


def test_history_after_a_resume_is_complete_wherever_it_stands(whole, capfd):
    killed("first", 2, every=4)  # the journal has a row of steps that are made again
    killed("second", 4, resume="first", journal=False)  # from another run directory; the checkpoints have the history
    shutil.rmtree("first")
    killed("second", 5)  # the journal has it all
    result = train("second", 6, eval_every="never")
    assert (result.weights_sha256, result.history) == (whole.weights_sha256, whole.history)
    assert read_history(Path("second/journal.jsonl")) == whole.history
    assert train("second", 6, eval_every="never", journal=False).history == whole.history
    assert "the history lacks" not in capfd.readouterr().err


def test_an_older_run_goes_on_with_its_history(whole):
    """Its checkpoints have the history, and the lines of its journal no examples."""
    killed("old", 3)
    path = Path("old/checkpoints/step-00000009")
    manifest = checkpoint_files.verify(path)
    tensors = checkpoint_files.read(path, manifest)
    state = {name: value for name, value in manifest.items() if name not in ("format", "step", "files", "tensors")}
    del state["journal"]
    shutil.rmtree("old/checkpoints")
    checkpoint_files.write(path.parent, 9, tensors, state | {"history": whole.history[:3]})
    lines = [json.loads(line) for line in Path("old/journal.jsonl").read_text().splitlines()]
    text = [json.dumps({name: value for name, value in line.items() if name != "examples"}) for line in lines]
    Path("old/journal.jsonl").write_text("\n".join(text) + "\n")
    killed("old", 5)
    assert train("old", 6, eval_every="never").history == whole.history


def test_a_journal_that_is_gone_is_said_and_training_goes_on(whole, capfd):
    killed("run", 3)
    Path("run/journal.jsonl").unlink()
    result = train("run", 6, eval_every="never")
    assert "the history lacks 3 of the 3 epochs before the checkpoint" in capfd.readouterr().err
    assert (result.weights_sha256, result.history) == (whole.weights_sha256, whole.history[3:])


@pytest.mark.parametrize("replicas", [1, 2])
def test_short_epochs_share_a_checkpoint_but_the_best_and_the_last_are_kept(replicas, monkeypatch):
    monkeypatch.setattr(policy, "PAUSE", math.inf)
    options = {"backend": create("mirrored", replicas) if replicas > 1 else "single", "every": "auto"}
    result = train("run", 10, Scores(), **options)
    assert steps_of("run") == [3, 21, 30]  # the first, which shows that saving works; the best; the last
    with pytest.raises(Killed):
        train("killed", 10, Scores(), EndAt(8), **options)
    assert steps_of("killed") == [3]  # the best was in memory: it is made again
    resumed = train("killed", 10, Scores(), **options)
    assert steps_of("killed") == [3, 6, 21, 30]  # the first epoch's end of each attempt is saved
    assert (resumed.weights_sha256, resumed.history) == (result.weights_sha256, result.history)


def test_the_best_is_written_when_the_run_fails(monkeypatch):
    monkeypatch.setattr(policy, "PAUSE", math.inf)
    with pytest.raises(ValueError, match="planted"):
        train("run", 10, Scores(), EndAt(8, ValueError), every="auto")
    assert steps_of("run") == [3, 21]


def test_each_epoch_is_saved_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(policy, "PAUSE", math.inf)
    train("run", 4, every="epoch", eval_every="never")
    assert steps_of("run") == [3, 6, 9, 12]


def test_a_signal_while_an_elastic_job_waits_to_form_anew_ends_the_run(quiet, monkeypatch):
    """The next attempt has requests of its own, and the launcher sends a signal once."""
    backend = Backend()
    backend.member = SimpleNamespace(generation=0, run_directory=None, kept=None, changed=False, events=[])

    class Changed(Callback):
        every = 3

        def on_steps_end(self, run, metrics):
            run.save("test")  # which is waited for before the workers form anew
            backend.member.changed = True

    wait = Checkpointing.wait

    def wait_with_signal(checkpointing):
        checkpointing._run.stops.signalled = True
        wait(checkpointing)

    monkeypatch.setattr(Checkpointing, "wait", wait_with_signal)
    result = fit(Plain(), backend=backend, callbacks=quiet(checkpoint=Checkpoint()) + [Changed()])
    assert (result.status, result.steps) == ("preempted", 3)
    assert [path.name for path in checkpoint_files.complete(result.run_dir / "checkpoints")] == ["step-00000003"]
