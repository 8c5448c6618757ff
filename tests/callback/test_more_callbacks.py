"""The callbacks that are added by name, in real runs; and what every exported callback must do."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import callbacks
from callbacks import (
    EMA,
    EVENTS,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    LearningRateScaling,
    ModelSummary,
    Notify,
    ReduceOnPlateau,
    TensorBoard,
    Timer,
    notify,
)
from callbacks.files import FileError, UnsafeFileError
from callbacks.mlflow.points import points
from callbacks.run_record import journal, redaction
from loop import ArrayData, UsageError, fit
from loop.backends import create
from tests.conftest import ROOT, needs_horovod
from tests.tasks import Conv, Legacy, Plain, TwoRates, Unweighted, Weighted

SMALL = {"batch_size": 20}
"""Six steps in an epoch of 101 examples, the last one short."""


def entries(result, event):
    return [entry for entry, _ in journal.read(result.run_dir / "journal.jsonl") if entry["event"] == event]


# What every callback must do

MADE = {
    "Checkpoint": lambda: callbacks.Checkpoint(every=4),
    "EMA": lambda: EMA(0.9),
    "EarlyStopping": lambda: EarlyStopping(patience=9),
    "FromKeras": lambda: callbacks.FromKeras(keras.callbacks.History()),
    "LambdaCallback": lambda: LambdaCallback(steps_end=lambda run, metrics: None, every=2),
    "LearningRateScaling": lambda: LearningRateScaling(10, warmup_epochs=1),
    "ModelSummary": lambda: ModelSummary(io.StringIO()),
    "Notify": lambda: Notify("http://127.0.0.1:9/secret"),
    "Profiler": lambda: callbacks.Profiler(2, 3),
    "ReduceOnPlateau": lambda: ReduceOnPlateau(patience=9),
    "TensorBoard": lambda: TensorBoard(every=2, histograms=1),
    "Timer": lambda: Timer("99h"),
    "TrainerStatus": lambda: callbacks.TrainerStatus("https://127.0.0.1:9/status", __file__, __file__),
}
"""Arguments of callbacks that need some, or get other ones than their defaults here."""
TRAINS_OTHERWISE = {"EMA", "LearningRateScaling"}
NOT_HERE = {
    "EvaluateBeside": "test_evaluate_beside.py kills and resumes it: the same evaluations to the bit, without it too",
    "MLflowTracker": "test_callbacks.py resumes it against a real store",
}
KINDS = [
    name
    for name in callbacks.__all__
    if isinstance(kind := getattr(callbacks, name), type) and issubclass(kind, Callback) and kind is not Callback
]


REPLICAS = {"EMA", "LearningRateMonitor", "LearningRateScaling", "ModelSummary", "ReduceOnPlateau", "TensorBoard"}
"""Callbacks that read or change variables are tested on two replicas."""
# Those that leave the weights alone are in one run together.
GROUPS = [
    *([name] for name in sorted(TRAINS_OTHERWISE)),
    sorted(REPLICAS - TRAINS_OTHERWISE),
    sorted({*KINDS} - REPLICAS - NOT_HERE.keys()),
]


def engine(name):
    return create("mirrored", 2) if name in REPLICAS else create("single")


@pytest.fixture(scope="module")
def without():
    """The weights after two epochs with the standard callbacks alone, by the number of replicas."""
    given = callbacks.standard(mlflow=None, progress=None, checkpoint=None)
    results = [fit(Plain(), epochs=2, backend=engine(name), callbacks=given, **SMALL) for name in ("EMA", "")]
    return {result.replicas: result.weights_sha256 for result in results}


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_every_callback_bears_two_runs_and_a_resume_to_the_bit(names, without, quiet, tmp_path):
    def made():
        return [MADE.get(name, getattr(callbacks, name))() for name in names]

    def train(tested, directory, epochs):
        kinds = [*map(type, tested)]
        given = [each for each in quiet() if type(each) not in kinds] + tested
        return fit(
            Plain(), epochs=epochs, backend=engine(names[0]), callbacks=callbacks.StandardSet(given),
            run_dir=tmp_path / directory, **SMALL,
        )  # fmt: skip

    once = made()
    whole = train(once, "whole", 2)
    assert train(once, "again", 1).epochs == 1  # the same objects, another run
    resumed = train(made(), "again", 2)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert (whole.weights_sha256 == without[whole.replicas]) == (names[0] not in TRAINS_OTHERWISE)
    assert [row["step"] for row in resumed.history] == [6, 12]
    for used, new in zip(once, made(), strict=True):
        new.load_state_dict(json.loads(json.dumps(used.state_dict())))


# TensorBoard


def events(directory):
    """All events of a directory: (tag, step, value as NumPy has it), and the graphs."""
    points, graphs = [], []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        with contextlib.suppress(tf.errors.DataLossError):
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(record)
                graphs += [event.graph_def] * bool(event.graph_def)
                for value in event.summary.value:
                    plugin = value.metadata.plugin_data.plugin_name
                    points.append((plugin, value.tag, event.step, tf.make_ndarray(value.tensor)))
    return points, graphs


def test_tensorboard_has_each_point_once_also_after_a_kill(quiet, tmp_path):
    def die(run, metrics):
        if run.progress.step == 9:
            raise KeyError("planted")

    def given():
        return quiet() + [TensorBoard(every=1, histograms=2)]

    options = {"run_dir": tmp_path / "run", "epochs": 4, **SMALL}
    with pytest.raises(KeyError):
        fit(Plain(), callbacks=given() + [LambdaCallback(steps_end=die, every=1)], **options)
    [torn] = (tmp_path / "run" / "tensorboard").iterdir()
    with torn.open("ab") as file:
        file.write(b"\x20\0\0\0\0\0\0\0torn")
    result = fit(Plain(), callbacks=given(), **options)

    points, graphs = events(result.run_dir / "tensorboard")
    found = {}
    for plugin, tag, step, value in points:
        found.setdefault((plugin, tag), []).append((step, value))
    assert [step for step, _ in found["scalars", "step/loss"]] == list(range(1, 25))
    assert [step for step, _ in found["scalars", "step/examples_per_second"]] == list(range(1, 25))
    for name in ("loss", "eval_loss"):
        expected = [(row["step"], np.float32(row[name])) for row in result.history]
        assert found["scalars", name] == expected
    weights = found["histograms", "weights/w"]
    assert [step for step, _ in weights] == [12, 24]
    left, right, counts = weights[-1][1].T
    assert counts.sum() == 5
    np.testing.assert_array_equal(left[1:], right[:-1])
    w = result.model.w.numpy()
    assert (left[0], right[-1]) == (w.min(), w.max())
    [graph] = graphs
    assert len(tf.compat.v1.GraphDef.FromString(graph).node) > 10


def test_tensorboard_refuses_a_place_for_no_event_files_before_the_training(quiet, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnsafeFileError, match="tensorboard: it isn't a directory"):
        fit(Plain(), callbacks=quiet() + [TensorBoard()], run_dir=tmp_path / "run")
    with pytest.raises(FileError, match=r"not-\\udcff/tensorboard: .* isn't UTF-8: give TensorBoard another directory"):
        fit(Plain(), callbacks=quiet() + [TensorBoard()], run_dir=tmp_path / os.fsdecode(b"not-\xff"))


def test_tensorboard_waits_for_no_pipe_among_its_files(quiet, tmp_path):
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    os.mkfifo(tmp_path / "run" / "tensorboard" / "events.out.tfevents.1")
    (tmp_path / "run" / "tensorboard" / "events.out.tfevents.2").mkdir()
    assert fit(Plain(), callbacks=quiet() + [TensorBoard()], run_dir=tmp_path / "run").status == "finished"


def test_tensorboard_traces_nothing_for_the_graph(quiet):
    look = LambdaCallback(fit_end=lambda run, status: counts.append(run.step.traces))
    counts = []
    fit(Plain(), callbacks=quiet() + [TensorBoard(), look], steps=2)
    assert counts == [1]


# LearningRateMonitor


@pytest.mark.parametrize(("kind", "family"), [(Plain, keras), (Legacy, tf_keras)])
def test_learning_rate_is_a_metric(kind, family, quiet, tmp_path):
    schedule = family.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)

    class Scheduled(kind):
        def build_optimizer(self):
            return family.optimizers.SGD(schedule)

    added = [LearningRateMonitor(), CSVLogger()]
    given = quiet(journal=callbacks.Journal(every=4)) + added
    result = fit(Scheduled(), epochs=2, callbacks=given, run_dir=tmp_path, **SMALL)
    rates = [0.1 * 0.5 ** (step / 10) for step in (6, 12)]
    np.testing.assert_allclose([row["learning_rate"] for row in result.history], rates, rtol=1e-6)
    sent = [point for event in ("steps_end", "epoch_end") for each in entries(result, event) for point in points(each)]
    sent = {(name, step): value for name, value, _, step in sent if "rate" in name}
    steps = [("step/learning_rate", 4), ("step/learning_rate", 12), ("learning_rate", 6), ("learning_rate", 12)]
    assert list(sent) == steps
    np.testing.assert_allclose(list(sent.values()), [0.1 * 0.5 ** (step / 10) for _, step in steps], rtol=1e-6)
    assert "learning_rate" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_learning_rates_of_two_optimizers(quiet):
    metrics = fit(TwoRates(), callbacks=quiet() + [LearningRateMonitor()], **SMALL).metrics
    assert metrics["body_learning_rate"] == pytest.approx(0.001)
    assert metrics["head_learning_rate"] == pytest.approx(0.01)


# ReduceOnPlateau


def plateau():
    """Its metric never improves after the first measurement."""
    return ReduceOnPlateau(factor=0.5, patience=1, min_delta=99.0, cooldown=1, min_lr=0.02)


class Rates(Callback):
    """Keeps the learning rate of each step, in each replica of this worker."""

    runs_on = "all"
    every = 1

    def __init__(self):
        self.seen = []

    def on_steps_end(self, run, metrics):
        rate = run.optimizer._learning_rate
        values = run.backend.local_values(getattr(rate, "value", rate) if isinstance(rate, keras.Variable) else rate)
        self.seen.append([round(float(value), 6) for value in values])


@pytest.mark.parametrize("kind", [Weighted, Legacy])
def test_reduce_on_plateau_is_the_same_on_all_replicas_and_after_a_resume(kind, quiet, tmp_path):
    def train(directory, epochs, more=()):
        given = quiet() + [plateau(), *more]
        options = {"backend": create("mirrored", 2), "run_dir": tmp_path / directory}
        return fit(kind(), epochs=epochs, callbacks=given, **options, **SMALL)

    rates = Rates()
    whole = train("a", 6, [rates])
    start = float(np.float32(kind().build_optimizer().learning_rate))
    # Measurements: the first is the best; the second reduces; the third doesn't count; the fourth, ...
    expected = [start, start, start / 2, start / 2, *[max(start / 4, min(0.02, start / 2))] * 2]
    if start < 0.02:
        expected = [start] * 6  # a rate below `min_lr` stays; it must not be raised to it
    assert rates.seen == [[round(rate, 6)] * 2 for rate in expected for _ in range(6)]
    train("b", 3)  # within a cooldown
    assert train("b", 6).weights_sha256 == whole.weights_sha256


JOB = """
import json, sys
from pathlib import Path
import callbacks
from loop import backends, fit
from tests.tasks import Weighted

seen = []
rates = callbacks.LambdaCallback(
    steps_end=lambda run, metrics: seen.append(round(float(run.optimizer.learning_rate), 6)), every=1, runs_on="all"
)
plateau = callbacks.ReduceOnPlateau(factor=0.5, patience=1, cooldown=1)
backend = backends.create("horovod")
values = iter([3.0, 300.0, 300.0, 300.0])
worse = callbacks.LambdaCallback(eval_end=lambda run, metrics: metrics.update(eval_loss=next(values)))  # on the chief
given = callbacks.StandardSet([*callbacks.standard(mlflow=None, progress=None), worse, plateau, rates])
result = fit(Weighted(), epochs=4, batch_size=20, backend=backend, callbacks=given, run_dir=sys.argv[1])
seen = backend.gather_json(seen)
if backend.is_chief:
    Path(sys.argv[1], "seen.json").write_text(json.dumps(seen))
backend.exchange(0)
backend.close()
"""


@needs_horovod
def test_reduce_on_plateau_agrees_in_two_horovod_workers(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [
            sys.executable, "-m", "loop.launch.horovodrun", "2",
            sys.executable, "-X", "warm", str(tmp_path / "job.py"), str(tmp_path / "run"),
        ],
        capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = json.loads((tmp_path / "run" / "seen.json").read_text())
    assert first == second == [rate for rate in (0.05, 0.05, 0.025, 0.025) for _ in range(6)]
    assert "step 12: eval_loss has not improved on 3 for 1 measurement: the learning rate is now 0.025" in done.stderr


def test_reduce_on_plateau_refuses_a_schedule(quiet):
    for more in ([LearningRateScaling(10, warmup_epochs=0), plateau()], [plateau(), LearningRateScaling(10)]):
        with pytest.raises(
            ValueError, match=r"the learning rate of SGD is a schedule, ScaledRate, which says .*leave one"
        ):
            fit(Weighted(), callbacks=quiet() + more)


# EMA


def test_ema_is_the_option_of_fit(quiet, tmp_path):
    def train(directory, epochs, *more, **options):
        return fit(
            Weighted(), epochs=epochs, callbacks=quiet() + list(more), run_dir=tmp_path / directory, **options, **SMALL
        )

    by_option = train("option", 2, ema=0.9)
    train("callback", 1, EMA(0.9))
    assert train("callback", 2, EMA(0.9)).weights_sha256 == by_option.weights_sha256
    assert json.loads((tmp_path / "callback" / "run.json").read_text())["options"]["ema"] == 0.9
    with pytest.raises(UsageError, match=r"ema was 0\.9, now None"):
        train("callback", 3)
    with pytest.raises(ValueError, match=r"EMA\(decay=0\.9\), but fit has ema=0\.99: give one of the two"):
        train("other", 1, EMA(0.9), ema=0.99)


# Timer


def test_timer_counts_earlier_lives_and_ends_politely(quiet, tmp_path):
    def train(directory, limit, more=()):
        timer = Timer(limit)
        run_dir = tmp_path / directory
        return timer, fit(Plain(), epochs=3, callbacks=quiet() + [timer, *more(timer)], run_dir=run_dir, **SMALL)

    def an_hour_goes_by(timer):
        def age(run):
            timer._before += 3600 * (run.progress.epoch == 1)

        return [LambdaCallback(epoch_start=age)]

    def nothing(timer):
        return []

    _, whole = train("a", "99h", nothing)
    first, stopped = train("b", "1h", an_hour_goes_by)
    assert (stopped.status, stopped.epochs) == (
        "stopped",
        2,
    )  # it checks its clock once a second, and after evaluations
    assert 3600 <= first.elapsed < 7200
    [end] = entries(stopped, "fit_end")
    assert end["reason"] == "the run has taken its max_duration of 1h"
    second, again = train("b", "1h", nothing)
    assert (again.status, again.steps) == ("stopped", 12)
    assert second.elapsed > 3600
    _, ended = train("b", "1h30m", nothing)
    assert (ended.status, ended.weights_sha256) == ("finished", whole.weights_sha256)


@pytest.mark.parametrize(("text", "seconds"), [("2h30m", 9000), ("90s", 90), ("1.5d", 129600), ("1d2h3m4s", 93784)])
def test_times_of_a_timer(text, seconds):
    assert Timer(text).seconds == seconds


# Notify


@pytest.fixture
def server(monkeypatch):
    """A real server on loopback: the requests it got, its answers, and an event that lets it answer."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    about = SimpleNamespace(got=[], status=200, answers=threading.Event(), arrived=threading.Event())
    about.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            about.got.append((self.path, self.headers, json.loads(body)))
            about.arrived.set()
            about.answers.wait()
            self.send_response(about.status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        about.place = f"http://127.0.0.1:{serving.server_port}"
        about.url = f"{about.place}/services/T0/tOpSeCrEt?key=tOpSeCrEt"
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield about
        about.answers.set()
        serving.shutdown()
        thread.join()
    redaction.hidden.clear()


def all_told():
    for thread in list(notify._under_way):
        thread.join(60)
        assert not thread.is_alive()


def test_notify_tells_the_end_and_checkpoints(quiet, server, tmp_path):
    url = server.url.replace("http://", "http://me:tOp%20SeCrEt@")
    for epochs in (1, 2):
        given = quiet() + [Notify(url, on=["end", "checkpoint"])]
        result = fit(Plain(), epochs=epochs, callbacks=given, run_dir=tmp_path / "run")
        all_told()
    path, headers, _ = server.got[0]
    assert path == "/services/T0/tOpSeCrEt?key=tOpSeCrEt"
    assert (headers["Authorization"], headers["Content-Type"]) == ("Basic bWU6dE9wIFNlQ3JFdA==", "application/json")
    messages = sorted((body for _, _, body in server.got), key=lambda body: (body["step"], body["event"]))
    assert [(body["event"], body["step"]) for body in messages] == [
        ("checkpoint", 4), ("end", 4), ("checkpoint", 8), ("end", 8)
    ]  # fmt: skip
    last = messages[-1]
    assert last["metrics"] == result.history[-1]
    assert last["text"].startswith(f"Plain: finished at step 8, loss {result.metrics['loss']:.4g}, eval_loss ")
    assert (last["status"], last["run_directory"]) == ("finished", str(result.run_dir))


def test_notify_tells_a_failure_without_its_secrets(quiet, server, tmp_path, capsys):
    @dataclass
    class Told(Plain):
        """Has the URL in a field, and in an error."""

        hook: str = server.url

    def fail(run, metrics):
        raise KeyError(f"no answer from {server.url}")

    given = quiet() + [Notify(server.url), LambdaCallback(epoch_end=fail)]
    with pytest.raises(KeyError):
        fit(Told(), callbacks=given, run_dir=tmp_path / "run")
    all_told()
    [(_, _, body)] = server.got
    assert (body["event"], body["status"]) == ("failure", "failed")
    assert body["error"] == "KeyError: 'no answer from ***'"
    written = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.json*"))
    assert '"hook": "***"' in written
    assert "tOpSeCrEt" not in written + json.dumps(body) + str(capsys.readouterr())


def test_notify_bears_a_server_that_hangs_and_delays_nothing(quiet, server, capsys):
    server.answers.clear()
    result = fit(Plain(), callbacks=quiet() + [Notify(server.url, on=("checkpoint", "end"), timeout=3600)])
    assert result.status == "finished"
    assert server.arrived.wait(60)
    assert notify._under_way  # the run has not waited for it
    server.answers.set()
    all_told()

    server.answers.clear()
    fit(Plain(), callbacks=quiet() + [Notify(server.url, on="end", timeout=0.05)])
    all_told()
    assert capsys.readouterr().err == f"warning: the webhook at {server.place} was not told (no answer within 0.05 s)\n"


def test_notify_tells_once_what_a_server_has_against_it(quiet, server, capsys):
    server.status = 500
    given = quiet() + [Notify(server.url, on=("checkpoint", "end"))]
    assert fit(Plain(), epochs=3, callbacks=given).status == "finished"
    all_told()
    assert len(server.got) >= 2
    assert capsys.readouterr().err == f"warning: the webhook at {server.place} was not told (it answered 500)\n"


def notifying(server, **more):
    """A process that sends the message of a run's end, and ends."""
    code = f"""
from types import SimpleNamespace as Some
from callbacks import Notify
run = Some(info={{"task": "T"}}, progress=Some(step=3, epoch=1), history=[], directory="d", stop_reason="")
Notify({server.url!r}, **{more!r}).on_fit_end(run, "finished")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)


def test_a_process_that_ends_gives_its_message_time(server):
    server.answers.clear()
    process = notifying(server)
    assert server.arrived.wait(60)
    server.answers.set()
    assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == 0
    assert server.got[0][2]["step"] == 3


def test_a_process_that_ends_says_that_its_message_had_no_answer(server):
    server.answers.clear()
    process = notifying(server, timeout=0.5)
    _, stderr = process.communicate(timeout=60)
    server.answers.set()
    assert stderr == f"warning: the webhook at {server.place} was not told (no answer within 0.5 s)\n"
    assert process.returncode == 0


# ModelSummary


def printed(task):
    stream = io.StringIO()
    given = callbacks.standard(mlflow=None, progress=None, checkpoint=None) + [ModelSummary(stream)]
    fit(task, steps=1, callbacks=given)
    return [re.split(r"  +", line) for line in stream.getvalue().splitlines()]


def test_summary_of_a_keras_model():
    class Nested(Conv):
        def build_model(self):
            model = super().build_model()
            frozen = keras.Sequential([keras.Input((10,)), keras.layers.Dense(3, name="inner")], name="frozen")
            frozen.trainable = False
            return keras.Sequential([*model.layers, frozen, keras.layers.Dense(10, name="last")])

    table = printed(Nested())
    assert table[0] == ["layer", "shape", "trained", "not trained", "bytes"]
    rows = {re.sub(r"_\d+", "", row[0] or row[1]): row[1 + (not row[0]) :] for row in table[1:-1]}
    assert rows == {
        "conv2d (Conv2D)": ["(None, 6, 6, 4)", "40", "160 B"],
        "batch_normalization (BatchNormalization)": ["(None, 6, 6, 4)", "8", "8", "64 B"],
        "activation (Activation)": ["(None, 6, 6, 4)"],
        "flatten (Flatten)": ["(None, 144)"],
        "dropout (Dropout)": ["(None, 144)"],
        "dense (Dense)": ["(None, 10)", "1,450", "5.8 kB"],
        "frozen (Sequential)": ["(None, 3)", "33", "132 B"],
        "inner (Dense)": ["(None, 3)", "33", "132 B"],
        "last (Dense)": ["(None, 10)", "40", "160 B"],
    }
    assert table[-1] == ["1,538 parameters are trained, 41 are not: 6.32 kB, and 12.3 kB of the optimizer"]


def test_summary_of_a_tf_keras_model_and_of_a_module():
    table = printed(Legacy())
    assert [[re.sub(r"_\d+", "", row[0]), *row[1:]] for row in table[1:-1]] == [
        ["dense (Dense)", "(None, 4)", "24", "96 B"],
        ["dense (Dense)", "(None, 1)", "5", "20 B"],
    ]
    table = printed(Plain())
    assert table[1:-1] == [["b", "()", "1", "4 B"], ["w", "(5, 1)", "5", "20 B"]]
    assert table[-1][0].startswith("6 parameters are trained, 0 are not: 24 B")


def test_summary_of_a_keras_model_with_weights_of_its_own():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(5,), name="scale", initializer="ones")
            self.out = keras.layers.Dense(1)

        def call(self, inputs):
            return self.out(inputs * self.scale)

    class Subclassed(Unweighted):
        def build_model(self):
            return Own()

    table = printed(Subclassed())
    assert [[re.sub(r"_\d+", "", row[0]), *row[1:]] for row in table[1:-1]] == [
        ["dense (Dense)", "(None, 1)", "6", "24 B"],
        ["own/scale", "(5,)", "5", "20 B"],
    ]
    assert "scale" in table[2][0]


# LambdaCallback


def test_lambda_callback_hears_every_event(quiet, tmp_path):
    seen = []

    def hook(event):
        return lambda run, *more: seen.append(event)

    given = quiet() + [LambdaCallback(**{event: hook(event) for event in EVENTS})]
    fit(Plain(), callbacks=given, steps=1, profile="1:1")
    assert list(dict.fromkeys(seen)) == [event for event in EVENTS if event != "exception"]
    fit(Plain(), callbacks=quiet() + [LambdaCallback(steps_end=hook("third"), every=3)], **SMALL)
    assert seen.count("third") == 2

    def fail(run):
        raise KeyError("planted")

    with pytest.raises(KeyError):
        fit(Plain(), callbacks=quiet() + [LambdaCallback(epoch_start=fail, exception=hook("exception"))], **SMALL)
    assert seen[-1] == "exception"


def test_lambda_callback_runs_where_it_is_asked_to():
    from loop.run.bus import Bus

    run = SimpleNamespace(backend=SimpleNamespace(is_chief=False), callbacks={})
    Bus([LambdaCallback(setup=print), everywhere := LambdaCallback(setup=print, runs_on="all")], run)
    assert list(run.callbacks.values()) == [everywhere]


# What is refused, and what is documented


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LambdaCallback(epoch_ends=print), r"LambdaCallback\(epoch_ends=.*did you mean 'epoch_end'\?"),
        (lambda: LambdaCallback(on_epoch_end=print), "did you mean 'epoch_end'"),
        (lambda: LambdaCallback(epoch_end=3), r"epoch_end=3\): give a function"),
        (lambda: LambdaCallback(), "give at least one event"),
        (lambda: LambdaCallback(setup=print, runs_on="chef"), "runs_on='chef'.: give chief or all"),
        (lambda: LambdaCallback(setup=print, every="daily"), "every='daily' isn't a schedule"),
        (lambda: Timer("2 hours"), r"Timer\(max_duration='2 hours'\): give a time > 0 like"),
        (lambda: Timer("0s"), "give a time > 0"),
        (lambda: Timer(""), "give a time > 0"),
        (lambda: Timer(60), "max_duration=60"),
        (lambda: EMA(1.0), r"EMA\(decay=1.0\): give a number between 0 and 1"),
        (lambda: ReduceOnPlateau(factor=2), r"ReduceOnPlateau\(factor=2\): give a number between 0 and 1"),
        (lambda: ReduceOnPlateau(patience=0), r"ReduceOnPlateau\(patience=0\): give a whole number >= 1"),
        (lambda: TensorBoard(histograms=-1), r"TensorBoard\(histograms=-1\): give a number of epochs"),
        (lambda: TensorBoard(histograms=True), "histograms=True"),
        (lambda: Notify("hooks.example.org/x"), "the url .not shown.* must be like"),
        (lambda: Notify("file:///etc/passwd"), "the url .not shown"),
        (lambda: Notify("http://me:secret/x"), "the url .not shown"),
        (lambda: Notify("https://h/x", on="finish"), r"on='finish'\): no such message; there are: end, failure"),
        (lambda: Notify("https://h/x", on=("end", "checkpoints")), "did you mean 'checkpoint'"),
        (lambda: Notify("https://h/x", on=()), "give at least one of"),
        (lambda: Notify("https://h/x", timeout=0), r"Notify\(timeout=0\): give seconds > 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_told_with_their_fix(make, message):
    with pytest.raises(ValueError, match=message) as told:
        make()
    assert "secret" not in str(told.value).replace("hold a secret", "")


def documented(heading):
    """The first cells of the table under a heading of the page."""
    _, _, text = (ROOT / "docs" / "callbacks.md").read_text().partition(f"\n## {heading}\n")
    table = text.partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_the_page_has_every_event_in_order_and_every_callback():
    assert documented("Events") == list(EVENTS)
    assert sorted(documented("All callbacks")) == sorted(KINDS)


def test_the_example_of_the_page_runs(quiet, capsys):
    page = (ROOT / "docs" / "callbacks.md").read_text()
    code = page.partition("\n## Your own\n")[2].partition("```python\n")[2].partition("```")[0]
    names = {}
    exec(code, names)
    [own] = [each for each in names.values() if isinstance(each, type) and each.__module__ == "builtins"]
    first = own()
    result = fit(Plain(), epochs=2, callbacks=quiet() + [first], **SMALL)
    again = own()
    fit(Plain(), epochs=3, callbacks=quiet() + [again], run_dir=result.run_dir, **SMALL)
    assert again.state_dict() != own().state_dict()


def test_lines_of_usage_on_the_page_can_be_evaluated():
    page = (ROOT / "docs" / "callbacks.md").read_text()
    for line in re.findall(r"^\| `\w+` \|.*\| `(\w+\(.*\))` \|$", page, re.MULTILINE):
        assert isinstance(eval(line, vars(callbacks) | {"tf": tf, "keras": keras, "ArrayData": ArrayData}), Callback)
    redaction.hidden.clear()
