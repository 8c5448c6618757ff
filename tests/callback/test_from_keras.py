"""Callbacks of Keras: called as Keras's `fit` calls them, on any number of replicas, and across a resume."""

import csv
import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import keras
import pytest
import tf_keras

from callbacks import Callback, Checkpoint, FromKeras
from callbacks.learning_rate import rate_of
from loop import fit
from loop.backends import create
from tests.conftest import ROOT, tfloop
from tests.tasks import Legacy, Plain, TwoRates

OPTIONS = {"epochs": 3, "batch_size": 20}
TASK = """
import keras
from callbacks import Callback, FromKeras
from tests.tasks import Plain


class Rates(Callback):
    runs_on = "all"

    def on_epoch_end(self, run, metrics):
        rates = run.backend.gather_json(float(run.optimizer.learning_rate.numpy()))
        if run.backend.is_chief:
            with open("rates", "a") as file:
                print(*rates, file=file)


class Task(Plain):
    def build_callbacks(self):
        scheduled = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return [FromKeras(scheduled), FromKeras(keras.callbacks.CSVLogger("log.csv")), Rates()]
"""


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class Several(Plain):
    def eval_data(self):
        return {"val": super().train_data(), "test": super().train_data()}


def test_csv_logger_has_the_names_of_keras_and_appends_on_resume(quiet):
    def logged(task, epochs, directory):
        logger = FromKeras(keras.callbacks.CSVLogger(f"{directory}.csv"))
        return fit(task, epochs=epochs, batch_size=20, callbacks=quiet() + [logger], run_dir=directory)

    logged(Plain(), 2, "run")
    with open("run.csv", "a") as file:
        file.write("2,0.5,0.5,0.5,0.5\r\n3,0.25")  # of epochs after the last checkpoint, as a kill leaves them
    result = logged(Plain(), 3, "run")
    table = rows("run.csv")
    assert [row["epoch"] for row in table] == ["0", "1", "2"]
    assert float(table[-1]["val_loss"]) == result.metrics["eval_loss"]
    assert float(table[-1]["loss"]) == result.metrics["loss"]
    logged(Several(), 1, "several")
    assert {"loss", "val_loss", "test_loss"} <= rows("several.csv")[0].keys()


def test_csv_logger_that_has_served_a_resumed_run_starts_the_file_of_a_new_run_anew(quiet):
    logger = FromKeras(keras.callbacks.CSVLogger("log.csv"))
    for directory, epochs in (("run", 1), ("run", 2), ("other", 3)):
        fit(Plain(), epochs=epochs, batch_size=20, callbacks=quiet() + [logger], run_dir=directory)
    assert [row["epoch"] for row in rows("log.csv")] == ["0", "1", "2"]


class Killed(BaseException):
    """Nothing in the loop catches this."""


class KillAt(Callback):
    def __init__(self, step):
        self.every = self.step = step

    def on_steps_end(self, run, metrics):
        if run.progress.step == self.step:
            run.checkpointing.writer.wait()
            raise Killed


def test_rates_are_those_of_a_run_that_was_never_killed(quiet):
    def train(directory, *more, backend="single"):
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=1.0)
        scheduled = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        chosen = quiet(checkpoint=Checkpoint(every=1)) + [FromKeras(plateau), FromKeras(scheduled), *more]
        return fit(Plain(), epochs=5, batch_size=20, backend=backend, callbacks=chosen, run_dir=directory), plateau

    whole, plateau = train("whole")
    assert plateau.min_delta == -1.0  # Keras changes it at the first use
    for step in (14, 18, 19):  # within an epoch, at its end, and after the start of the next one
        with pytest.raises(Killed):
            train(f"cut-{step}", KillAt(step))
        assert train(f"cut-{step}")[0].weights_sha256 == whole.weights_sha256
    replicated, _ = train("replicated", backend=create("mirrored", 2))
    assert replicated.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)


def test_all_ranks_take_the_rate_that_the_chief_sets():
    Path("task.py").write_text(TASK)
    done = tfloop(
        "train", "task.py:Task", "--epochs", 3, "--batch-size", 20, "--workers", 2, "--backend", "multiworker",
        "--track", "off", env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rates = [list(map(float, line.split())) for line in Path("rates").read_text().splitlines()]
    assert [one == other for one, other in rates] == [True, True, True]
    assert rates[2][0] == pytest.approx(rates[0][0] / 4)
    assert [row["epoch"] for row in rows("log.csv")] == ["0", "1", "2"]


class Watches(keras.callbacks.Callback):
    """Notes all calls, and what it sees of the run."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.steps = 0

    def on_train_begin(self, logs=None):
        self.calls.append(
            ["train_begin", self.params["epochs"], self.params["steps"], len(self.model.trainable_variables)]
        )

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(["epoch_begin", epoch])

    def on_batch_begin(self, batch, logs=None):
        self.calls.append(["batch_begin", batch])

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.calls.append(["batch_end", batch, sorted(logs)])

    def on_test_end(self, logs=None):
        self.calls.append(["test_end", sorted(logs)])

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(["epoch_end", epoch, sorted(logs)])
        self.model.stop_training = epoch == 1

    def on_train_end(self, logs=None):
        self.calls.append(["train_end"])


def test_a_callback_of_ones_own_sees_what_keras_would_show_it_and_may_stop(quiet):
    watches = Watches()
    result = fit(Plain(), steps=9, batch_size=60, callbacks=quiet() + [FromKeras(watches)], run_dir="run")
    epoch = [
        ["batch_begin", 0],
        ["batch_end", 0, ["loss"]],
        ["batch_begin", 1],
        ["batch_end", 1, ["loss"]],
        ["test_end", ["loss"]],
    ]
    logs = ["loss", "val_loss"]
    assert watches.calls == [
        ["train_begin", 5, 2, len(result.model.trainable_variables)],
        *(["epoch_begin", 0], *epoch, ["epoch_end", 0, logs]),
        *(["epoch_begin", 1], *epoch, ["epoch_end", 1, logs]),
        ["train_end"],
    ]
    assert (result.status, watches.steps) == ("stopped", 4)
    again = Watches()
    fit(Plain(), epochs=5, batch_size=60, callbacks=quiet() + [FromKeras(again)], run_dir="run")
    assert again.steps == 10  # the number of the callback goes on


def test_without_hooks_of_batches_nothing_is_called_between_steps(quiet):
    seen = []
    watching = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"]))
    assert FromKeras(watching).every == "epoch"
    result = fit(Plain(), **OPTIONS, callbacks=quiet() + [FromKeras(watching)])
    assert seen == [row["eval_loss"] for row in result.history]
    assert FromKeras(keras.callbacks.TerminateOnNaN()).every == 1


def test_several_optimizers_are_shown_as_keras_shows_those_that_hold_others(quiet):
    rates = []

    class Look(Callback):
        def on_fit_end(self, run, status):
            rates.extend(map(rate_of, run.optimizer.values()))

    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.25)
    fit(TwoRates(), epochs=1, batch_size=20, callbacks=quiet() + [FromKeras(halved), Look()])
    assert rates == [0.25, 0.25]


def test_remote_monitor(quiet):
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        monitor = FromKeras(keras.callbacks.RemoteMonitor(root=address, send_as_json=True))
        fit(Plain(), **OPTIONS, callbacks=quiet() + [monitor])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [row["epoch"] for row in received] == [0, 1, 2]
    assert {"loss", "val_loss"} <= received[0].keys()


class Forges(FromKeras):
    key = "FromKeras"

    def state_dict(self):
        attributes = {"steps": 70, "path": "/elsewhere", "on_epoch_end": 1, "__dict__": {}}
        return {"begun": 0, "attributes": attributes}


class WatchesInto(Watches):
    def __init__(self, path):
        super().__init__()
        self.path = path


def test_a_checkpoint_of_others_replaces_no_setting_and_no_method(quiet):
    fit(Plain(), epochs=1, batch_size=60, callbacks=quiet() + [Forges(WatchesInto("mine"))], run_dir="run")
    watches = WatchesInto("mine")
    fit(Plain(), epochs=2, batch_size=60, callbacks=quiet() + [FromKeras(watches)], run_dir="run")
    assert watches.path == "mine"
    assert watches.steps == 72
    assert ["epoch_end", 1, ["loss", "val_loss"]] in watches.calls


def test_those_of_tf_keras(quiet):
    chosen = [tf_keras.callbacks.CSVLogger("log.csv"), tf_keras.callbacks.LearningRateScheduler(lambda epoch: 0.125)]
    look = []

    class Look(Callback):
        def on_fit_end(self, run, status):
            look.append(rate_of(run.optimizer))

    fit(Legacy(), epochs=2, batch_size=20, callbacks=quiet() + [*map(FromKeras, chosen), Look()])
    assert look == [0.125]
    assert "val_loss" in rows("log.csv")[1]


class InTest(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


class Stops(keras.callbacks.EarlyStopping):
    """Of a class of one's own."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.callbacks.ModelCheckpoint("a.keras"), r"ModelCheckpoint\): use callbacks.Checkpoint"),
        (lambda: keras.callbacks.BackupAndRestore("a"), "leave it out"),
        (Stops, r"FromKeras\(Stops\): use callbacks.EarlyStopping"),
        (lambda: tf_keras.callbacks.EarlyStopping(), "use callbacks.EarlyStopping"),
        (keras.callbacks.SwapEMAWeights, "ema=0.999"),
        (keras.callbacks.TensorBoard, "use callbacks.TensorBoard"),
        (InTest, "overrides on_test_batch_end"),
        (lambda: keras.callbacks.CSVLogger, "give an object of a subclass of keras.callbacks.Callback"),
        (lambda: "CSVLogger", "give an object of a subclass"),
        (Checkpoint, "it is a callback of tfloop"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_use(make, message):
    with pytest.raises(ValueError, match=message):
        FromKeras(make())


def test_an_error_of_the_callback_ends_the_run_with_it(quiet):
    def fails(epoch, logs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(Plain(), **OPTIONS, callbacks=quiet() + [FromKeras(keras.callbacks.LambdaCallback(on_epoch_end=fails))])
